//! `jamba`: which layers attend or have experts is known by their tensors, and must follow a period.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, Rule, attention, copies, ends, experts, mamba1};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["jamba"], config, rules };

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "jamba".into());
    f.attention(c)?;
    for (key, value) in [
        ("mamba_expand", f.expand()?),
        ("mamba_d_state", f.usize("ssm.state_size")?),
        ("mamba_dt_rank", f.usize("ssm.time_step_rank")?),
        ("mamba_d_conv", f.usize("ssm.conv_kernel")?),
    ] {
        c.insert(key.into(), value.into());
    }
    c.insert("mamba_conv_bias".into(), f.any("ssm_conv1d.bias")?.into());
    c.insert("mamba_proj_bias".into(), f.any("ssm_in.bias")?.into());
    period(f, c, "attn_layer", "attn_q.weight")?;
    c.insert("num_experts".into(), 1.into());
    if f.any("ffn_gate_inp.weight")? {
        c.insert("num_experts".into(), f.usize("expert_count")?.into());
        c.insert("num_experts_per_tok".into(), f.usize("expert_used_count")?.into());
        period(f, c, "expert_layer", "ffn_gate_inp.weight")?;
    }
    Ok(())
}

/// Period and offset of the layers that have a tensor.
fn period(f: &Facts<'_>, c: &mut Map<String, Value>, name: &str, leaf: &str) -> Result<()> {
    let layers = f.layers()?;
    let with: Vec<usize> = (0..layers).filter(|i| f.stores(*i, leaf)).collect();
    let offset = with.first().copied().unwrap_or(layers);
    let period = with.get(1).map_or(layers + 1, |second| second - offset);
    if !(0..layers).filter(|i| i % period == offset).eq(with.iter().copied()) {
        return Err(f.bad("block_count", format_args!("layers {with:?} have `{leaf}`, which is no period")));
    }
    c.insert(format!("{name}_period"), period.into());
    c.insert(format!("{name}_offset"), offset.into());
    Ok(())
}

fn rules(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = ends("model.embed_tokens.weight", "model.final_layernorm.weight", Change::None);
    let prefix = "model.layers.{}.";
    attention(&mut rules, f, &format!("{prefix}self_attn."), false)?;
    mamba1(&mut rules, &format!("{prefix}mamba."));
    let pairs = [
        ("input_layernorm", "attn_norm"),
        ("pre_ff_layernorm", "ffn_norm"),
        ("feed_forward.gate_proj", "ffn_gate"),
        ("feed_forward.up_proj", "ffn_up"),
        ("feed_forward.down_proj", "ffn_down"),
        ("feed_forward.router", "ffn_gate_inp"),
    ];
    copies(&mut rules, prefix, &pairs);
    let leaf = |leaf: &str| format!("{prefix}feed_forward.experts.{leaf}.weight");
    experts(&mut rules, &leaf("gate_up_proj"), &leaf("down_proj"));
    Ok(rules)
}
