//! `nemotron_h` and `nemotron_h_moe`: a mixer per layer, known by its tensors.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, How, Rule, attention, copies, ends, head, mamba2};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["nemotron_h", "nemotron_h_moe"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "nemotron_h".into());
    let layers = f.layers()?;
    let kind = |i| match () {
        () if f.stores(i, "ssm_in.weight") => "mamba",
        () if f.stores(i, "ffn_gate_inp.weight") => "moe",
        () if f.stores(i, "ffn_up.weight") => "mlp",
        () => "attention",
    };
    let kinds = f.layer_types(kind)?;
    // The head is one block: attention, then what its tensors say.
    let second = (f.drafts()? > 0).then(|| kind(layers));
    let has = |kind| second == Some(kind) || kinds.as_array().is_some_and(|kinds| kinds.iter().any(|k| k == kind));
    if has("attention") {
        f.attention(c)?;
    }
    if has("mamba") {
        f.mamba2(c, ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"])?;
        c.insert("use_conv_bias".into(), f.any("ssm_conv1d.bias")?.into());
        c.insert("use_bias".into(), f.any("ssm_in.bias")?.into());
    }
    if has("moe") {
        f.experts(c)?;
        c.insert("n_routed_experts".into(), f.usize("expert_count")?.into());
        c.insert("n_group".into(), f.opt("expert_group_count")?.filter(|n| *n > 0).unwrap_or(1).into());
        c.insert("topk_group".into(), f.opt("expert_group_used_count")?.filter(|n| *n > 0).unwrap_or(1).into());
        let shared = f.opt("expert_shared_feed_forward_length")?.unwrap_or(0);
        c.insert("n_shared_experts".into(), usize::from(shared > 0).into());
        c.insert("moe_shared_expert_intermediate_size".into(), shared.into());
        if let Some(latent) = f.opt("moe_latent_size")?.filter(|n| *n > 0) {
            c.insert("moe_latent_size".into(), latent.into());
        }
    }
    c.insert("layers_block_type".into(), kinds);
    c.insert("num_nextn_predict_layers".into(), f.drafts()?.into());
    if let Some(second) = second {
        c.insert("mtp_layers_block_type".into(), vec!["attention", second].into());
    }
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("backbone.embeddings.weight", "backbone.norm_f.weight", Change::None);
    let prefix = "backbone.layers.{}.mixer.";
    copies(&mut rules, "backbone.layers.{}.", &[("norm", "attn_norm")]);
    mamba2(&mut rules, f, prefix)?;
    let mut own = Vec::new();
    if f.opt("attention.head_count")?.is_some_and(|n| n > 0) {
        attention(&mut rules, f, prefix, true)?;
        attention(&mut own, f, "mtp.layers.0.mixer.", true)?;
    }
    feed_forward(&mut rules, prefix);
    copies(&mut own, "mtp.layers.", &[("0.norm", "attn_norm"), ("1.norm", "post_attention_norm")]);
    feed_forward(&mut own, "mtp.layers.1.mixer.");
    let around = ["layers.0.eh_proj", "layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"];
    head(&mut rules, f, own, around, Change::None)?;
    Ok(rules)
}

/// An MLP, or experts.
fn feed_forward(rules: &mut Vec<Rule>, prefix: &str) {
    let pairs = [
        ("up_proj", "ffn_up"),
        ("down_proj", "ffn_down"),
        ("gate", "ffn_gate_inp"),
        ("experts.up_proj", "ffn_up_exps"),
        ("experts.down_proj", "ffn_down_exps"),
        ("shared_experts.up_proj", "ffn_up_shexp"),
        ("shared_experts.down_proj", "ffn_down_shexp"),
        ("fc1_latent_proj", "ffn_latent_down"),
        ("fc2_latent_proj", "ffn_latent_up"),
    ];
    copies(rules, prefix, &pairs);
    let bias = format!("{prefix}gate.e_score_correction_bias");
    rules.push(Rule::new(bias, &["blk.{}.exp_probs_b.bias"], How::Copy));
}
