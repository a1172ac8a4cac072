//! `mamba` (Falcon-Mamba too) and `mamba2`: nothing but such layers.

use serde_json::{Map, Value};

use super::{Arch, Change, Facts, Rule, copies, ends, mamba1, mamba2};
use crate::Result;

pub(super) const ARCH: Arch = Arch { names: &["mamba"], config, rules };
pub(super) const ARCH_2: Arch = Arch { names: &["mamba2"], config: config_2, rules: rules_2 };

const PREFIX: &str = "backbone.layers.{}.mixer.";

fn config(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    let normed = f.bool("ssm.dt_b_c_rms").unwrap_or(false);
    c.insert("model_type".into(), if normed { "falcon_mamba" } else { "mamba" }.into());
    c.remove("intermediate_size");
    c.insert("expand".into(), f.expand()?.into());
    c.insert("state_size".into(), f.usize("ssm.state_size")?.into());
    c.insert("time_step_rank".into(), f.usize("ssm.time_step_rank")?.into());
    c.insert("conv_kernel".into(), f.usize("ssm.conv_kernel")?.into());
    c.insert("use_conv_bias".into(), f.any("ssm_conv1d.bias")?.into());
    c.insert("use_bias".into(), f.any("ssm_in.bias")?.into());
    Ok(())
}

fn rules(_: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = around();
    mamba1(&mut rules, PREFIX);
    Ok(rules)
}

fn config_2(f: &Facts<'_>, c: &mut Map<String, Value>) -> Result<()> {
    c.insert("model_type".into(), "mamba2".into());
    f.mamba2(c, ["num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"])?;
    c.insert("use_conv_bias".into(), f.any("ssm_conv1d.bias")?.into());
    c.insert("use_bias".into(), f.any("ssm_in.bias")?.into());
    Ok(())
}

fn rules_2(f: &Facts<'_>) -> Result<Vec<Rule>> {
    let mut rules = around();
    mamba2(&mut rules, f, PREFIX)?;
    Ok(rules)
}

fn around() -> Vec<Rule> {
    let mut rules = ends("backbone.embeddings.weight", "backbone.norm_f.weight", Change::None);
    copies(&mut rules, "backbone.layers.{}.", &[("norm", "attn_norm")]);
    rules
}
