//! Mamba-2: Mamba-2 layers only. Reads both the Hugging Face configuration and that of the original releases.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer,
    readers::{conv_taps, dt_limit, mamba_groups, require_act},
};
use crate::{
    Result,
    blocks::mamba2::{self, Gating},
    config::Config,
};

/// Recurrent models have no longest sequence; positions are u32.
pub(super) const CONTEXT: usize = i32::MAX as usize;

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("layer_norm_epsilon", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let original = c.has("ssm_cfg|d_model");
    let mut a = Architecture::start(c, "mamba2", CONTEXT, original, norm("norm_f.weight".into()))?;
    a.prefixes = &["backbone.", "model.backbone.", "model."];
    a.embedding = &["embeddings.weight", "embedding.weight"];
    if original {
        a.tied = c.bool_or("tie_embeddings|tie_word_embeddings", true)?;
        a.vocab = a.vocab.next_multiple_of(c.usize_or("pad_vocab_size_multiple", 8)?);
    }
    let plan = if original { original_plan(c, a.width)? } else { plan(c, a.width, eps)? };
    for i in 0..c.layers("num_hidden_layers|n_layer")? {
        let mixer = Branch::new(format!("layers.{i}.mixer."), plan.clone());
        a.layers.push(vec![SubLayer::pre_norm(norm(format!("layers.{i}.norm.weight")), vec![mixer])]);
    }
    Ok(a)
}

fn plan(c: &Config, width: usize, eps: f32) -> Result<mamba2::Plan> {
    require_act(c, "hidden_act", "silu")?;
    let plan = mamba2::Plan {
        width,
        heads: c.usize_or("num_heads", 128)?,
        head_dim: c.usize_or("head_dim", 64)?,
        state: c.usize_or("state_size", 128)?,
        groups: c.usize_or("n_groups", 8)?,
        kernel: conv_taps(c, "conv_kernel")?,
        conv_bias: c.bool_or("use_conv_bias", true)?,
        bias: [c.bool_or("use_bias", false)?; 2],
        input_scale: 1.0,
        scales: [1.0; 5],
        gate: Gating::BeforeNorm,
        eps,
        dt_limit: dt_limit(c)?,
    };
    mamba_groups(c, &plan, "num_heads", "n_groups")?;
    Ok(plan)
}

/// `ssm_cfg` of the original releases, with the defaults of their code.
fn original_plan(c: &Config, width: usize) -> Result<mamba2::Plan> {
    let empty = Config::parse(c.file(), b"{}")?;
    let s = c.opt_object("ssm_cfg")?.unwrap_or(empty);
    if s.str_or("layer", "Mamba1")? != "Mamba2" {
        return Err(s.bad("layer", "only Mamba2 is supported under this configuration"));
    }
    if c.opt_usizes("attn_layer_idx")?.is_some_and(|l| !l.is_empty()) || c.count_or("d_intermediate", 0)? > 0 {
        return Err(c.bad("attn_layer_idx|d_intermediate", "models with attention or MLP layers are not supported"));
    }
    let head_dim = s.usize_or("headdim", 64)?;
    let inner = s.width("expand", &[width, s.usize_or("expand", 2)?])?;
    s.divides(("expand", inner), ("headdim", head_dim))?;
    let plan = mamba2::Plan {
        width,
        heads: inner / head_dim,
        head_dim,
        state: s.usize_or("d_state", 128)?,
        groups: s.usize_or("ngroups", 1)?,
        kernel: conv_taps(&s, "d_conv")?,
        conv_bias: s.bool_or("conv_bias", true)?,
        bias: [s.bool_or("bias", false)?; 2],
        input_scale: 1.0,
        scales: [1.0; 5],
        gate: Gating::BeforeNorm,
        eps: 1e-5,
        dt_limit: dt_limit(&s)?,
    };
    mamba_groups(&s, &plan, "headdim", "ngroups")?;
    Ok(plan)
}
