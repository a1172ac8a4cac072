//! `granitehybrid` (Granite 4 and Bamba), and `granite` and `granitemoe` for those without Mamba layers.

use serde_json::{Map, Value, json};

use super::{Arch, Change, Facts, How, Rule, attention, copies, ends, experts, mamba2};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["granitehybrid", "granite", "granitemoe"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "granitemoehybrid".into());
    f.attention(c)?;
    let recurrent = f.any("ssm_in.weight")?;
    c.insert(
        "layer_types".into(),
        f.layer_types(|i| if f.stores(i, "ssm_in.weight") { "mamba" } else { "attention" })?,
    );
    if recurrent {
        f.mamba2(c, ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"])?;
        c.insert("mamba_expand".into(), f.expand()?.into());
        c.insert("mamba_conv_bias".into(), f.any("ssm_conv1d.bias")?.into());
        c.insert("mamba_proj_bias".into(), f.any("ssm_in.bias")?.into());
    }
    // Hybrids have no positions unless they say so; the others have.
    if f.bool("rope.scaling.finetuned").unwrap_or(!recurrent) {
        c.insert("position_embedding_type".into(), "rope".into());
        f.rope(c)?;
    }
    let heads = f.heads()?;
    let factors = [
        ("attention_multiplier", "attention.scale", (heads.head_dim as f64).sqrt().recip()),
        ("embedding_multiplier", "embedding_scale", 1.0),
        ("residual_multiplier", "residual_scale", 1.0),
        ("logits_scaling", "logit_scale", 1.0),
    ];
    for (name, key, default) in factors {
        c.insert(name.into(), f.float(key).filter(|x| *x != 0.0).unwrap_or(default).into());
    }
    let dense = f.usize("feed_forward_length")?;
    match f.opt("expert_count")?.filter(|n| *n > 0) {
        None => c.extend([("num_local_experts".into(), json!(0)), ("shared_intermediate_size".into(), json!(dense))]),
        Some(n) => {
            f.experts(c)?;
            let Some(shared) = f.opt("expert_shared_feed_forward_length")?.filter(|n| *n > 0) else {
                return Err(
                    f.bad("expert_shared_feed_forward_length", "experts without a shared one are not supported")
                );
            };
            c.extend([
                ("num_local_experts".into(), json!(n)),
                ("intermediate_size".into(), c["moe_intermediate_size"].clone()),
                ("shared_intermediate_size".into(), json!(shared)),
            ]);
        }
    }
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.norm.weight", Change::None);
    let prefix = "model.layers.{}.";
    copies(&mut rules, prefix, &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")]);
    attention(&mut rules, f, &format!("{prefix}self_attn."), true)?;
    mamba2(&mut rules, f, &format!("{prefix}mamba."))?;
    copies(&mut rules, &format!("{prefix}block_sparse_moe."), &[("router.layer", "ffn_gate_inp")]);
    let moe = |leaf: &str| format!("{prefix}block_sparse_moe.{leaf}.weight");
    experts(&mut rules, &moe("input_linear"), &moe("output_linear"));
    // Without experts it is the only feed-forward part. The first rule that fits is the one by which files are written.
    let mut suffixes = ["", "_shexp"];
    if f.opt("expert_count")?.is_some_and(|n| n > 0) {
        suffixes.reverse();
    }
    for suffix in suffixes {
        let stored = |leaf: &str| format!("blk.{{}}.ffn_{leaf}{suffix}.weight");
        let input = format!("{prefix}shared_mlp.input_linear.weight");
        rules.push(Rule::new(input, &[&stored("gate"), &stored("up")], How::Join));
        let output = format!("{prefix}shared_mlp.output_linear.weight");
        rules.push(Rule::new(output, &[&stored("down")], How::Copy));
    }
    Ok(rules)
}
