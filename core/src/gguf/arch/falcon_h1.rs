//! `falcon-h1`: all multipliers are folded into the weights.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, How, Rule, attention, copies, ends, mamba2};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["falcon-h1"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "falcon_h1".into());
    f.attention(c)?;
    f.rope(c)?;
    let inner = f.mamba2(c, ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"])?;
    c.insert("mamba_d_ssm".into(), inner.into());
    for (key, leaf) in [
        ("mamba_rms_norm", "ssm_norm.weight"),
        ("mamba_conv_bias", "ssm_conv1d.bias"),
        ("mamba_proj_bias", "ssm_in.bias"),
        ("projectors_bias", "ssm_out.bias"),
        ("mlp_bias", "ffn_up.bias"),
    ] {
        c.insert(key.into(), f.any(leaf)?.into());
    }
    c.insert("mamba_norm_before_gate".into(), false.into());
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.final_layernorm.weight", Change::None);
    let prefix = "model.layers.{}.";
    attention(&mut rules, f, &format!("{prefix}self_attn."), false)?;
    mamba2(&mut rules, f, &format!("{prefix}mamba."))?;
    let pairs = [
        ("input_layernorm", "attn_norm"),
        ("pre_ff_layernorm", "ffn_norm"),
        ("feed_forward.gate_proj", "ffn_gate"),
        ("feed_forward.up_proj", "ffn_up"),
        ("feed_forward.down_proj", "ffn_down"),
    ];
    // Converters drop the suffix of this one.
    rules.push(Rule::new(format!("{prefix}pre_ff_layernorm.weight"), &["blk.{}.ffn_norm"], How::Copy));
    copies(&mut rules, prefix, &pairs);
    Ok(rules)
}
