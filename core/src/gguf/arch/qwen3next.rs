//! `qwen3next`, `qwen35` and `qwen35moe`: norms have 1 added; the projections of Gated DeltaNet are split in the one, and the
//! value heads of the others stand in another order.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, How, Pick, Rule, attention, copies, ends, experts, head};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["qwen3next", "qwen35", "qwen35moe"], config, rules };

/// Sizes of Gated DeltaNet.
struct Delta {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
}

impl Delta {
    fn read(f: &Facts<'_>) -> Result<Self> {
        let (key_heads, value_heads) = (f.usize("ssm.group_count")?, f.usize("ssm.time_step_rank")?);
        let (key_dim, inner) = (f.usize("ssm.state_size")?, f.usize("ssm.inner_size")?);
        let sizes = [key_heads, value_heads, key_dim, inner];
        let fits = sizes.iter().all(|n| (1..=1 << 24).contains(n));
        if !fits || !inner.is_multiple_of(value_heads) || !value_heads.is_multiple_of(key_heads) {
            let why = format_args!("{key_heads} key heads, {value_heads} value heads, {inner} channels do not divide");
            return Err(f.bad("ssm.group_count", why));
        }
        Ok(Self { key_heads, value_heads, key_dim, value_dim: inner / value_heads })
    }

    /// Value heads of a key head.
    fn per_key(&self) -> usize {
        self.value_heads / self.key_heads
    }
}

/// Whether value head `p` uses key head `p mod Hk` rather than `p div r`.
pub(super) fn tiled(arch: &str) -> bool {
    arch != "qwen3next"
}

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    let model_type = match f.arch {
        "qwen3next" => "qwen3_next",
        "qwen35" => "qwen3_5_text",
        _ => "qwen3_5_moe_text",
    };
    c.insert("model_type".into(), model_type.into());
    f.attention(c)?;
    f.rope(c)?;
    let d = Delta::read(f)?;
    // Where the value heads are tiled, every one gets a copy of its key head's rows: heads keep the order of the file, in which
    // the columns of the output projection stand too.
    c.insert("linear_num_key_heads".into(), if tiled(f.arch) { d.value_heads } else { d.key_heads }.into());
    c.insert("linear_num_value_heads".into(), d.value_heads.into());
    c.insert("linear_key_head_dim".into(), d.key_dim.into());
    c.insert("linear_value_head_dim".into(), d.value_dim.into());
    c.insert("linear_conv_kernel_dim".into(), f.usize("ssm.conv_kernel")?.into());
    let kind = |i| if f.stores(i, "ssm_a") { "linear_attention" } else { "full_attention" };
    c.insert("layer_types".into(), f.layer_types(kind)?);
    let dense: Vec<usize> = (0..f.layers()?).filter(|i| !f.stores(*i, "ffn_gate_inp.weight")).collect();
    c.insert("mtp_num_hidden_layers".into(), f.drafts()?.into());
    c.insert("num_experts".into(), 0.into());
    if f.opt("expert_count")?.is_some_and(|n| n > 0) {
        f.experts(c)?;
        c.insert("mlp_only_layers".into(), dense.into());
        let shared = f.opt("expert_shared_feed_forward_length")?.unwrap_or(0);
        c.insert("shared_expert_intermediate_size".into(), shared.into());
    }
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.norm.weight", Change::MinusOne);
    let layer = |leaf: &str| format!("model.layers.{{}}.{leaf}");
    block(&mut rules, f, "model.layers.{}.")?;
    copies(&mut rules, &layer(""), &[("linear_attn.norm", "ssm_norm")]);
    let d = Delta::read(f)?;
    match tiled(f.arch) {
        true if f.own_order => grouped_heads(&mut rules, &d, layer),
        true => tiled_heads(&mut rules, &d, layer),
        false => per_key_head(&mut rules, &d, layer),
    }
    let mut own = Vec::new();
    block(&mut own, f, "mtp.layers.0.")?;
    let around = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];
    head(&mut rules, f, own, around, Change::MinusOne)?;
    Ok(rules)
}

/// What a layer of the model and that of the head have in common: attention, and what follows the mixer.
fn block(rules: &mut Vec<Rule>, f: &Facts<'_>, prefix: &str) -> Result<()> {
    let layer = |leaf: &str| format!("{prefix}{leaf}");
    for (name, stored) in [
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
    ] {
        let stored = format!("blk.{{}}.{stored}.weight");
        rules.push(Rule::new(layer(&format!("{name}.weight")), &[&stored], How::Copy).changed(Change::MinusOne));
    }
    // What is called `attn_qkv` here is a projection of another mixer.
    let mut own = Vec::new();
    attention(&mut own, f, &layer("self_attn."), false)?;
    rules.extend(own.into_iter().filter(|rule| rule.how == How::Copy));
    let pairs = [
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.gate", "ffn_gate_inp"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ];
    copies(rules, prefix, &pairs);
    experts(rules, &layer("mlp.experts.gate_up_proj"), &layer("mlp.experts.down_proj"));
    Ok(())
}

/// What has an entry per value head and stands in the order of the file.
fn decays(rules: &mut Vec<Rule>, layer: impl Fn(&str) -> String) {
    rules.push(Rule::new(layer("linear_attn.A_log"), &["blk.{}.ssm_a"], How::Copy).changed(Change::NegLog));
    rules.push(Rule::new(layer("linear_attn.dt_bias"), &["blk.{}.ssm_dt.bias"], How::Copy));
    copies(rules, &layer("linear_attn."), &[("out_proj", "ssm_out")]);
}

/// The order of the family's own files: the value heads of the first key head, those of the second, and so on.
fn grouped_heads(rules: &mut Vec<Rule>, d: &Delta, layer: impl Fn(&str) -> String) {
    // The place in the file of every value head.
    let places = || (0..d.value_heads).map(|v| v % d.per_key() * d.key_heads + v / d.per_key());
    let keys = 2 * d.key_heads * d.key_dim;
    let heads = |first: usize, rows: usize| {
        let pick = move |p| Pick { source: 0, first: first + p * rows, step: 1, count: rows };
        let before = (first > 0).then_some(Pick { source: 0, first: 0, step: 1, count: first });
        How::Rows(before.into_iter().chain(places().map(pick)).collect())
    };
    for (name, stored, how) in [
        ("in_proj_qkv.weight", "attn_qkv.weight", heads(keys, d.value_dim)),
        ("conv1d.weight", "ssm_conv1d.weight", heads(keys, d.value_dim)),
        ("in_proj_z.weight", "attn_gate.weight", heads(0, d.value_dim)),
        ("in_proj_b.weight", "ssm_beta.weight", heads(0, 1)),
        ("in_proj_a.weight", "ssm_alpha.weight", heads(0, 1)),
        ("dt_bias", "ssm_dt.bias", heads(0, 1)),
    ] {
        rules.push(Rule::new(layer(&format!("linear_attn.{name}")), &[&format!("blk.{{}}.{stored}")], how));
    }
    let decay = Rule::new(layer("linear_attn.A_log"), &["blk.{}.ssm_a"], heads(0, 1));
    rules.push(decay.changed(Change::NegLog));
    let mut columns = vec![0; d.value_heads * d.value_dim];
    for (head, place) in places().enumerate() {
        for i in 0..d.value_dim {
            columns[place * d.value_dim + i] = head * d.value_dim + i;
        }
    }
    let name = layer("linear_attn.out_proj.weight");
    rules.push(Rule::new(name, &["blk.{}.ssm_out.weight"], How::Columns(columns)));
}

/// q and k of every value head, then v; the rest is in the same order.
fn tiled_heads(rules: &mut Vec<Rule>, d: &Delta, layer: impl Fn(&str) -> String) {
    let keys = d.key_heads * d.key_dim;
    let pick = |first, count| Pick { source: 0, first, step: 1, count };
    let mut picks = vec![pick(0, keys); d.per_key()];
    picks.extend(vec![pick(keys, keys); d.per_key()]);
    picks.push(pick(2 * keys, d.value_heads * d.value_dim));
    for (name, stored) in [("in_proj_qkv", "attn_qkv"), ("conv1d", "ssm_conv1d")] {
        let name = layer(&format!("linear_attn.{name}.weight"));
        rules.push(Rule::new(name, &[&format!("blk.{{}}.{stored}.weight")], How::Rows(picks.clone())));
    }
    let pairs = [("in_proj_z", "attn_gate"), ("in_proj_b", "ssm_beta"), ("in_proj_a", "ssm_alpha")];
    copies(rules, &layer("linear_attn."), &pairs);
    decays(rules, layer);
}

/// The rows of a key head together: q, k, its values, its z.
fn per_key_head(rules: &mut Vec<Rule>, d: &Delta, layer: impl Fn(&str) -> String) {
    let (keys, values) = (d.key_heads * d.key_dim, d.per_key() * d.value_dim);
    let mut picks = Vec::new();
    for g in 0..d.key_heads {
        let mut pick = |source, first, count| picks.push(Pick { source, first, step: 1, count });
        pick(0, g * d.key_dim, d.key_dim);
        pick(0, keys + g * d.key_dim, d.key_dim);
        pick(0, 2 * keys + g * values, values);
        pick(1, g * values, values);
    }
    let name = layer("linear_attn.in_proj_qkvz.weight");
    rules.push(Rule::new(name.clone(), &["blk.{}.attn_qkv.weight", "blk.{}.attn_gate.weight"], How::Rows(picks)));
    // Older files have them as they were.
    rules.push(Rule::new(name, &["blk.{}.ssm_in.weight"], How::Copy));
    copies(rules, &layer("linear_attn."), &[("in_proj_ba", "ssm_ba"), ("conv1d", "ssm_conv1d")]);
    decays(rules, layer);
}
