//! Kimi-Linear: Kimi Delta Attention in most layers, attention over latents in the listed ones, and SwiGLU or a mixture of
//! experts with a shared one in all.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer, llama,
    readers::{conv_taps, layer_types, no_such_layer, require_act, require_bool, top_k},
};
use crate::{
    Error, Result,
    blocks::{Plan, delta_attention, latent_attention, moe},
    config::{Config, LayerType},
    ops::{Act, Router},
};

/// Keys of models that share the type but compute something else.
const OTHERS: [&str; 8] = [
    "gate_lower_bound",
    "use_full_rank_gate",
    "mla_use_output_gate",
    "mla_use_rope",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "attn_res_block_size",
    "attention_bias",
];

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "kimi_linear", 1 << 20, false, norm("norm.weight".into()))?;
    let linear = c.opt_object("linear_attn_config")?;
    refuse(c, linear.as_ref())?;
    let (delta, attention) = (delta(c, linear.as_ref(), a.width, eps)?, attention(c, a.width)?);
    let (dense, swiglu) = (dense_layers(c)?, llama::mlp(a.width, c.usize_or("intermediate_size", 9216)?, false));
    for (i, layer) in types(c, linear.as_ref())?.into_iter().enumerate() {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer: Plan = match layer {
            LayerType::Recurrent => delta.clone().into(),
            LayerType::Attention => attention.clone().into(),
            other => return Err(no_such_layer(c, other)),
        };
        // Files that transformers saved again have one prefix for both.
        let (mlp, moe) = (name("mlp."), name("block_sparse_moe."));
        let branches = match dense[i] {
            true => vec![Branch::new(format!("{mlp}|{moe}"), swiglu.clone())],
            false => experts(c, a.width, &[moe, mlp])?,
        };
        a.layers.push(vec![
            SubLayer::pre_norm(norm(name("input_layernorm.weight")), vec![Branch::new(name("self_attn."), mixer)]),
            SubLayer::pre_norm(norm(name("post_attention_layernorm.weight")), branches),
        ]);
    }
    Ok(a)
}

/// Refuses options that change the computation, by their keys.
fn refuse(c: &Config, linear: Option<&Config>) -> Result<()> {
    require_act(c, "hidden_act", "silu")?;
    require_act(c, "moe_router_activation_func", "sigmoid")?;
    require_bool(c, "mla_use_nope", true)?;
    for of in [Some(c), linear].into_iter().flatten() {
        for key in OTHERS {
            match of.value(key) {
                None => {}
                Some(v) if v.is_null() || v.as_bool() == Some(false) => {}
                Some(v) => return Err(of.bad(key, format_args!("{v} is not supported"))),
            }
        }
    }
    only(c, "moe_layer_freq", 1)
}

/// Refuses a number with another value.
fn only(c: &Config, key: &str, value: usize) -> Result<()> {
    match c.usize_or(key, value)? {
        found if found == value => Ok(()),
        found => Err(c.bad(key, format_args!("{found} is not supported, only {value}"))),
    }
}

/// From the list of types; else from the two lists of layers, which count from 1; else every fourth after the first attends.
fn types(c: &Config, linear: Option<&Config>) -> Result<Vec<LayerType>> {
    const ATTENDING: &str = "full_attn_layers";
    const RECURRENT: &str = "kda_layers";
    let lists = match linear {
        Some(l) if !c.has("layer_types") => l.opt_usizes(ATTENDING)?.zip(l.opt_usizes(RECURRENT)?).map(|x| (l, x)),
        _ => None,
    };
    if let Some((l, (attending, recurrent))) = &lists {
        for i in 1..=c.layers("num_hidden_layers")? {
            if attending.contains(&i) == recurrent.contains(&i) {
                let why = format_args!("layer {i}, counted from 1, must be in one of this list and `{RECURRENT}`");
                return Err(l.bad(ATTENDING, why));
            }
        }
    }
    layer_types(c, |i| {
        let attends = match &lists {
            Some((_, (attending, _))) => attending.contains(&(i + 1)),
            None => i > 0 && i % 4 == 0,
        };
        if attends { LayerType::Attention } else { LayerType::Recurrent }
    })
}

/// Which layers have an MLP instead of experts.
fn dense_layers(c: &Config) -> Result<Vec<bool>> {
    const KEY: &str = "mlp_layer_types";
    let count = c.layers("num_hidden_layers")?;
    let Some(names) = c.opt_strs(KEY)? else {
        let first = c.count_or("first_k_dense_replace", 1)?;
        return Ok((0..count).map(|i| i < first).collect());
    };
    if names.len() != count {
        return Err(c.bad(KEY, format_args!("{} entries for {count} layers", names.len())));
    }
    let dense = |name: &str| match name {
        "dense" => Ok(true),
        "sparse" => Ok(false),
        other => Err::<_, Error>(c.bad(KEY, format_args!("{other:?} is not a layer of this family"))),
    };
    names.into_iter().map(dense).collect()
}

fn delta(c: &Config, linear: Option<&Config>, width: usize, eps: f32) -> Result<delta_attention::Plan> {
    // The object wins.
    let from = |inside: &'static str, key: &'static str| match linear {
        Some(l) if l.has(inside) => (l, inside),
        _ => (c, key),
    };
    let size = |inside, key, default| {
        let (of, key) = from(inside, key);
        of.usize_or(key, default)
    };
    let (heads, head_dim) = (size("num_heads", "linear_num_heads", 32)?, size("head_dim", "linear_head_dim", 128)?);
    let (of, key) = from("short_conv_kernel_size", "linear_conv_kernel_dim");
    let plan = delta_attention::Plan { width, heads, head_dim, kernel: conv_taps(of, key)?, eps };
    c.width("linear_num_heads", &[heads, head_dim])?;
    Ok(plan)
}

fn attention(c: &Config, width: usize) -> Result<latent_attention::Plan> {
    let heads = c.usize_or("num_attention_heads", 32)?;
    only(c, "num_key_value_heads", heads)?;
    let plan = latent_attention::Plan {
        width,
        heads,
        latent: c.usize_or("kv_lora_rank", 512)?,
        shared: c.usize_or("qk_rope_head_dim", 64)?,
        key_dim: c.usize_or("qk_nope_head_dim", 128)?,
        value_dim: c.usize_or("v_head_dim", 128)?,
        query_latent: c.opt_usize("q_lora_rank")?,
        // As the family's own code has it, independent of `rms_norm_eps`.
        eps: 1e-6,
    };
    c.width("num_attention_heads", &[heads, plan.key_dim + plan.shared])?;
    c.width("kv_lora_rank", &[heads, plan.latent])?;
    c.width("v_head_dim", &[heads, plan.value_dim])?;
    Ok(plan)
}

/// The experts and the shared ones, under one of two prefixes.
fn experts(c: &Config, width: usize, prefixes: &[String; 2]) -> Result<Vec<Branch>> {
    let experts = c.usize_or("num_experts|num_local_experts", 256)?;
    let (groups, topk_group) = (c.usize_or("num_expert_group|n_group", 1)?, c.usize_or("topk_group", 1)?);
    c.divides(("num_experts", experts), ("num_expert_group", groups))?;
    if topk_group > groups {
        return Err(c.bad("topk_group", format_args!("{topk_group} of {groups} groups")));
    }
    let inner = c.usize_or("moe_intermediate_size", 1024)?;
    let plan = moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_token|num_experts_per_tok", 8, topk_group * (experts / groups))?,
        inner,
        router: "gate",
        router_bias: Some("gate.e_score_correction_bias"),
        rule: Router::Sigmoid {
            groups,
            topk_group,
            renorm: c.bool_or("moe_renormalize|norm_topk_prob", true)?,
            sum_eps: 1e-20,
            scale: c.f32_or("routed_scaling_factor", 2.446)?,
        },
        input: moe::Experts { stacked: "experts.gate_up_proj", each: &["experts.{}.w1", "experts.{}.w3"] },
        output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.w2"] },
        gated: true,
        act: Act::Silu,
        latent: None,
    };
    let mut branches = vec![Branch::new(prefixes.join("|"), plan)];
    let shared = c.count_or("num_shared_experts|n_shared_experts", 1)?;
    if shared > 0 {
        let inner = c.width("moe_intermediate_size", &[shared, inner])?;
        let prefix = prefixes.each_ref().map(|p| format!("{p}shared_experts.")).join("|");
        branches.push(Branch::new(prefix, llama::mlp(width, inner, false)));
    }
    Ok(branches)
}
