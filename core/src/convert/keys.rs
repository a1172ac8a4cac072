//! The keys of an architecture, out of its layers. What they cannot say is found when they are read back.

use super::fold::attention_layers;
use crate::{
    Error, Result,
    blocks::{Plan, gated_delta, mamba1, mamba2, moe},
    gguf::{Meta, MetaValue},
    models::{Architecture, Branch, Head},
    ops::Router,
    rope::{Rope, RopeScaling},
};

/// `general.architecture` of a model.
///
/// # Errors
/// [`Error::Unsupported`] for a family that GGUF files are not written of.
pub(super) fn architecture(label: &str, a: &Architecture) -> Result<&'static str> {
    let has = |of: fn(&Plan) -> bool| branches(a).any(|b| of(&b.plan));
    let experts = has(|p| matches!(p, Plan::Moe(_)));
    Ok(match a.family {
        "llama" => "llama",
        "qwen3" => "qwen3",
        "nemotron_h" if experts => "nemotron_h_moe",
        "nemotron_h" => "nemotron_h",
        "granitemoehybrid" if has(|p| matches!(p, Plan::Mamba2(_))) => "granitehybrid",
        "granitemoehybrid" if experts => "granitemoe",
        "granitemoehybrid" => "granite",
        "mamba" | "falcon_mamba" => "mamba",
        "mamba2" => "mamba2",
        "jamba" => "jamba",
        "falcon_h1" => "falcon-h1",
        "lfm2" => "lfm2",
        "lfm2_moe" => "lfm2moe",
        "qwen3_next" => "qwen3next",
        "qwen3_5_text" => "qwen35",
        "qwen3_5_moe_text" => "qwen35moe",
        family => {
            return Err(Error::Unsupported {
                what: format!("{label}: a GGUF file of a model of type {family:?}"),
                why: "files are written of llama, qwen3, nemotron_h, granitemoehybrid, mamba, falcon_mamba, mamba2, jamba, \
                      falcon_h1, lfm2, lfm2_moe, qwen3_next and qwen3_5; use the folder as it is"
                    .into(),
            });
        }
    })
}

/// Whether other programs read the head for drafts in files of an architecture. Those of Nemotron-H must have experts.
pub(super) fn head_is_known(arch: &str, head: &Head) -> bool {
    match arch {
        "qwen3next" | "qwen35" | "qwen35moe" => true,
        "nemotron_h_moe" => head.steps.iter().flat_map(|step| &step.branches).any(is_moe),
        _ => false,
    }
}

fn branches(a: &Architecture) -> impl Iterator<Item = &Branch> {
    a.layers.iter().flatten().flat_map(|step| &step.branches)
}

/// Keys of one architecture under way.
struct Keys {
    arch: &'static str,
    meta: Meta,
}

impl Keys {
    fn set(&mut self, key: &str, value: MetaValue) {
        self.meta.set(format!("{}.{key}", self.arch), value);
    }

    fn int(&mut self, key: &str, n: usize) {
        self.set(key, MetaValue::u32(u32::try_from(n).unwrap_or(u32::MAX)));
    }

    fn float(&mut self, key: &str, x: f32) {
        self.set(key, MetaValue::f32(x));
    }

    /// One number if all layers have the same, else one for each.
    fn per_layer(&mut self, key: &str, numbers: &[usize]) {
        match numbers {
            [first, rest @ ..] if rest.iter().all(|n| n == first) => self.int(key, *first),
            _ => self.set(key, MetaValue::u32s(&numbers.iter().map(|n| *n as u32).collect::<Vec<_>>())),
        }
    }
}

/// The keys of a model that is written as `arch`, with its head if that is loaded: one more layer.
pub(super) fn keys(arch: &'static str, a: &Architecture) -> Meta {
    let trunk = a.layers.len();
    let mut a = a.clone();
    a.layers.extend(a.head.take().filter(|_| a.drafts).map(|head| head.steps));
    let (a, drafts) = (&a, a.layers.len() - trunk);
    let mut keys = Keys { arch, meta: Meta::default() };
    keys.meta.set("general.architecture", MetaValue::text(arch));
    keys.meta.set("general.quantization_version", MetaValue::u32(2));
    keys.int("block_count", a.layers.len());
    if drafts > 0 {
        keys.int("nextn_predict_layers", drafts);
    }
    keys.int("context_length", a.context);
    keys.int("embedding_length", a.width);
    keys.int("vocab_size", a.vocab);
    keys.float("attention.layer_norm_rms_epsilon", a.norm.eps);
    attention(&mut keys, a);
    feed_forward(&mut keys, a);
    for branch in branches(a) {
        match &branch.plan {
            Plan::Mamba2(p) => keys.mamba2(p),
            Plan::Mamba1(p) => keys.mamba1(p),
            Plan::GatedDelta(p) => keys.gated_delta(p),
            Plan::ShortConv(p) => keys.int("shortconv.l_cache", p.kernel),
            Plan::Moe(p) => keys.experts(p),
            _ => {}
        }
    }
    match arch {
        "granite" | "granitemoe" | "granitehybrid" => granite(&mut keys, a),
        "nemotron_h" | "nemotron_h_moe" => keys.float("attention.layer_norm_epsilon", a.norm.eps),
        "lfm2moe" => {
            let dense = a.layers.iter().take_while(|l| l.iter().flat_map(|s| &s.branches).all(|b| !is_moe(b))).count();
            keys.int("leading_dense_block_count", dense);
        }
        "qwen3next" | "qwen35" | "qwen35moe" => intervals(&mut keys, a, trunk),
        _ => {}
    }
    keys.meta
}

fn is_moe(branch: &Branch) -> bool {
    matches!(branch.plan, Plan::Moe(_))
}

fn attention(keys: &mut Keys, a: &Architecture) {
    let plans: Vec<_> = attention_layers(a).collect();
    let Some(plan) = plans.iter().flatten().next() else {
        keys.int("attention.head_count", 0);
        return;
    };
    keys.int("attention.head_count", plan.heads.heads);
    let kv: Vec<usize> = plans.iter().map(|p| p.map_or(0, |p| p.heads.kv_heads)).collect();
    match keys.arch {
        // Which layers attend is said by another key.
        "qwen3next" | "qwen35" | "qwen35moe" => keys.int("attention.head_count_kv", plan.heads.kv_heads),
        _ => keys.per_layer("attention.head_count_kv", &kv),
    }
    keys.int("attention.key_length", plan.heads.head_dim);
    keys.int("attention.value_length", plan.heads.head_dim);
    if let Some(rope) = &plan.rope {
        keys.rope(rope);
    }
}

/// Widths of dense layers, or of experts where there are no others.
fn feed_forward(keys: &mut Keys, a: &Architecture) {
    let width = |layer: &Vec<crate::models::SubLayer>| {
        let of = |b: &Branch| match &b.plan {
            Plan::Mlp(p) => Some(p.inner),
            Plan::Moe(p) => Some(p.inner),
            _ => None,
        };
        layer.iter().flat_map(|s| &s.branches).find_map(of).unwrap_or(0)
    };
    let widths: Vec<usize> = a.layers.iter().map(width).collect();
    let mlp = |b: &Branch| if let Plan::Mlp(p) = &b.plan { Some(p.inner) } else { None };
    let dense = || branches(a).find_map(mlp);
    match keys.arch {
        "nemotron_h" | "nemotron_h_moe" => keys.per_layer("feed_forward_length", &widths),
        // The first layers are dense, and their width is the one that counts.
        "lfm2moe" | "jamba" => keys.int("feed_forward_length", dense().unwrap_or(widths[0])),
        _ => keys.int("feed_forward_length", widths.first().copied().unwrap_or(0)),
    }
    // An MLP in a layer with experts is the shared expert.
    let steps = a.layers.iter().flatten().filter(|s| s.branches.iter().any(is_moe));
    if let Some(shared) = steps.flat_map(|s| &s.branches).find_map(mlp) {
        keys.int("expert_shared_feed_forward_length", shared);
        keys.int("expert_shared_count", 1);
    }
}

/// Which layers attend: every `n`th of the `trunk`, or a list.
fn intervals(keys: &mut Keys, a: &Architecture, trunk: usize) {
    let recurrent: Vec<bool> = attention_layers(a).map(|p| p.is_none()).collect();
    let interval = recurrent.iter().position(|r| !r).map_or(recurrent.len() + 1, |first| first + 1);
    if recurrent[..trunk].iter().enumerate().all(|(i, r)| *r != (i + 1).is_multiple_of(interval)) {
        keys.int("full_attention_interval", interval);
    } else {
        keys.set("attention.recurrent_layers", MetaValue::bools(&recurrent));
    }
    if keys.arch != "qwen3next" {
        // Sections of positions in pictures; those of text are all the same.
        keys.set("rope.dimension_sections", MetaValue::i32s(&[11, 11, 10, 0]));
    }
}

fn granite(keys: &mut Keys, a: &Architecture) {
    let plan = attention_layers(a).flatten().next();
    if let Some(plan) = plan {
        keys.float("attention.scale", plan.scale);
        keys.set("rope.scaling.finetuned", MetaValue::bool(plan.rope.is_some()));
    }
    keys.float("embedding_scale", a.embedding_scale);
    keys.float("residual_scale", branches(a).next().map_or(1.0, |b| b.scale));
    // The divisor whose inverse the factor is, where rounding left one.
    let near = a.logits_scale.recip();
    let divisors = [near, near.next_up(), near.next_down()];
    keys.float("logit_scale", divisors.into_iter().find(|x| x.recip() == a.logits_scale).unwrap_or(near));
}

impl Keys {
    fn rope(&mut self, rope: &Rope) {
        self.int("rope.dimension_count", rope.rotary_dims);
        self.float("rope.freq_base", rope.theta);
        if let RopeScaling::Linear { factor } = rope.scaling {
            self.set("rope.scaling.type", MetaValue::text("linear"));
            self.float("rope.scaling.factor", factor);
        }
    }

    fn mamba2(&mut self, p: &mamba2::Plan) {
        self.int("ssm.conv_kernel", p.kernel);
        self.int("ssm.inner_size", p.heads * p.head_dim);
        self.int("ssm.state_size", p.state);
        self.int("ssm.time_step_rank", p.heads);
        self.int("ssm.group_count", p.groups);
    }

    fn mamba1(&mut self, p: &mamba1::Plan) {
        self.int("ssm.conv_kernel", p.kernel);
        self.int("ssm.inner_size", p.inner);
        self.int("ssm.state_size", p.state);
        self.int("ssm.time_step_rank", p.rank);
        if matches!(p.norms, mamba1::Norms::Weightless(_)) {
            self.set("ssm.dt_b_c_rms", MetaValue::bool(true));
        }
    }

    fn gated_delta(&mut self, p: &gated_delta::Plan) {
        self.int("ssm.conv_kernel", p.kernel);
        self.int("ssm.state_size", p.key_dim);
        self.int("ssm.group_count", p.key_heads);
        self.int("ssm.time_step_rank", p.value_heads);
        self.int("ssm.inner_size", p.value_heads * p.value_dim);
    }

    fn experts(&mut self, p: &moe::Plan) {
        self.int("expert_count", p.experts);
        self.int("expert_used_count", p.top_k);
        self.int("expert_feed_forward_length", p.inner);
        if let Some(latent) = p.latent {
            self.int("moe_latent_size", latent.width);
        }
        let renorm = match p.rule {
            Router::SoftmaxTopK { renorm } => renorm,
            Router::TopKSoftmax => true,
            Router::Sigmoid { groups, topk_group, renorm, scale, .. } => {
                self.int("expert_gating_func", 2);
                self.float("expert_weights_scale", scale);
                if groups > 1 {
                    self.int("expert_group_count", groups);
                    self.int("expert_group_used_count", topk_group);
                }
                renorm
            }
        };
        self.set("expert_weights_norm", MetaValue::bool(renorm));
    }
}
