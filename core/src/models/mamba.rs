//! Mamba and Falcon-Mamba: Mamba-1 layers only. Falcon-Mamba norms B, C and the time step without weights.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer,
    mamba2::CONTEXT,
    readers::{conv_taps, expanded, require_act, size_or_auto},
};
use crate::{
    Result,
    blocks::mamba1::{self, Norms},
    config::Config,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    architecture(c, "mamba", Norms::None)
}

pub(super) fn read_falcon(c: &Config) -> Result<Architecture> {
    architecture(c, "falcon_mamba", Norms::Weightless(c.eps_or("mixer_rms_eps", 1e-6)?))
}

fn architecture(c: &Config, family: &'static str, norms: Norms) -> Result<Architecture> {
    let eps = c.eps_or("layer_norm_epsilon", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, family, CONTEXT, true, norm("norm_f.weight".into()))?;
    a.prefixes = &["backbone.", "model.backbone.", "model."];
    a.embedding = &["embeddings.weight", "embedding.weight"];
    require_act(c, "hidden_act", "silu")?;
    let inner = expanded(c, "expand", a.width)?;
    if let Some(other) = c.opt_usize("intermediate_size|d_inner")?.filter(|n| *n != inner) {
        let why = format_args!("{other} is not `expand` times the width, {inner}");
        return Err(c.bad("intermediate_size|d_inner", why));
    }
    let plan = mamba1::Plan {
        width: a.width,
        inner,
        state: c.usize_or("state_size", 16)?,
        rank: size_or_auto(c, "time_step_rank", || Ok(a.width.div_ceil(16)))?,
        kernel: conv_taps(c, "conv_kernel")?,
        conv_bias: c.bool_or("use_conv_bias", true)?,
        bias: c.bool_or("use_bias", false)?,
        norms,
    };
    for i in 0..c.layers("num_hidden_layers|n_layer")? {
        let mixer = Branch::new(format!("layers.{i}.mixer."), plan.clone());
        a.layers.push(vec![SubLayer::pre_norm(norm(format!("layers.{i}.norm.weight")), vec![mixer])]);
    }
    Ok(a)
}
