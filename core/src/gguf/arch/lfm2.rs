//! `lfm2` and `lfm2moe`.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, How, Rule, attention, copies, ends, experts};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["lfm2", "lfm2moe"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    f.attention(c)?;
    f.rope(c)?;
    let kind = |i| if f.stores(i, "shortconv.conv.weight") { "conv" } else { "full_attention" };
    c.insert("layer_types".into(), f.layer_types(kind)?);
    c.insert("conv_L_cache".into(), f.usize("shortconv.l_cache")?.into());
    c.insert("conv_bias".into(), f.any("shortconv.conv.bias")?.into());
    // The width in the file is the adjusted one.
    c.insert("block_auto_adjust_ff_dim".into(), false.into());
    let moe = f.opt("expert_count")?.is_some_and(|n| n > 0);
    c.insert("model_type".into(), if moe { "lfm2_moe" } else { "lfm2" }.into());
    if moe {
        f.experts(c)?;
        c.insert("num_dense_layers".into(), f.opt("leading_dense_block_count")?.unwrap_or(0).into());
        c.insert("use_expert_bias".into(), f.any("exp_probs_b.bias")?.into());
    }
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    // Despite its name it is the norm after the last layer.
    let mut rules = vec![Rule::new("model.embedding_norm.weight", &["token_embd_norm.weight"], How::Copy)];
    rules.extend(ends("model.embed_tokens.weight", "model.embedding_norm.weight", Change::None));
    let prefix = "model.layers.{}.";
    attention(&mut rules, f, &format!("{prefix}self_attn."), false)?;
    let pairs = [
        ("operator_norm", "attn_norm"),
        ("ffn_norm", "ffn_norm"),
        ("self_attn.out_proj", "attn_output"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("conv.conv", "shortconv.conv"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
        ("feed_forward.gate", "ffn_gate_inp"),
    ];
    copies(&mut rules, prefix, &pairs);
    rules.push(Rule::new(format!("{prefix}feed_forward.expert_bias"), &["blk.{}.exp_probs_b.bias"], How::Copy));
    let leaf = |leaf: &str| format!("{prefix}feed_forward.experts.{leaf}.weight");
    experts(&mut rules, &leaf("gate_up_proj"), &leaf("down_proj"));
    Ok(rules)
}
