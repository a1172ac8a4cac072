//! Readers of configurations that several families share. They also hold the bounds of the ops, so that a strange configuration
//! is an error with a key rather than a failed check inside a step.

use crate::{
    Result,
    blocks::mamba2::{self, Gating},
    config::{Config, Heads, LayerType},
    ops::Act,
};

/// An activation by its name in the configuration.
pub(super) fn act(c: &Config, key: &str, default: &str) -> Result<Act> {
    Ok(match c.str_or(key, default)? {
        "silu" | "swish" => Act::Silu,
        "relu2" => Act::Relu2,
        "gelu" => Act::Gelu,
        "sigmoid" => Act::Sigmoid,
        other => return Err(c.bad(key, format_args!("activation {other:?} is not supported"))),
    })
}

/// Refuses a model whose activation differs from the one of its family.
pub(super) fn require_act(c: &Config, key: &str, only: &str) -> Result<()> {
    let found = c.str_or(key, only)?;
    if found != only {
        return Err(c.bad(key, format_args!("activation {found:?} is not supported, only {only:?}")));
    }
    Ok(())
}

/// Heads of the attention layers of a family whose head dim is a number by default, not a share of the model width.
pub(super) fn heads_or(c: &Config, head_dim: usize) -> Result<Heads> {
    if c.has("head_dim|attention_head_dim") {
        return heads(c);
    }
    let heads = c.usize("num_attention_heads")?;
    let kv_heads = c.usize_or("num_key_value_heads", heads)?;
    c.divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    Ok(Heads { heads, kv_heads, head_dim })
}

/// Heads of the attention layers; pages hold keys in pairs of elements.
pub(super) fn heads(c: &Config) -> Result<Heads> {
    let heads = c.heads()?;
    if !heads.head_dim.is_multiple_of(2) {
        return Err(
            c.bad("head_dim|num_attention_heads", format_args!("head dim {} is odd; it must be even", heads.head_dim))
        );
    }
    Ok(heads)
}

/// Taps of a convolution, 4 by default.
pub(super) fn conv_taps(c: &Config, key: &str) -> Result<usize> {
    conv_taps_or(c, key, 4)
}

/// The same with another default.
pub(super) fn conv_taps_or(c: &Config, key: &str, default: usize) -> Result<usize> {
    let taps = c.usize_or(key, default)?;
    if !(2..=8).contains(&taps) {
        return Err(c.bad(key, format_args!("{taps} taps; 2 to 8 are supported")));
    }
    Ok(taps)
}

/// Experts per token, out of `available`.
pub(super) fn top_k(c: &Config, key: &str, default: usize, available: usize) -> Result<usize> {
    let k = c.usize_or(key, default)?;
    if k > available.min(32) {
        return Err(c.bad(key, format_args!("{k} experts per token; at most {} are possible", available.min(32))));
    }
    Ok(k)
}

/// Bounds on dt after softplus.
pub(super) fn dt_limit(c: &Config) -> Result<(f32, f32)> {
    Ok(c.time_step_limit()?.unwrap_or((0.0, f32::INFINITY)))
}

/// Checks that heads divide into groups and that the widths are possible.
pub(super) fn mamba_groups(c: &Config, plan: &mamba2::Plan, heads_key: &str, groups_key: &str) -> Result<()> {
    c.divides((heads_key, plan.heads), (groups_key, plan.groups))?;
    c.width(heads_key, &[plan.heads, plan.head_dim])?;
    c.width(groups_key, &[plan.groups, plan.state])?;
    Ok(())
}

/// Refuses a switch with a value that no known model of the family has.
pub(super) fn require_bool(c: &Config, key: &str, only: bool) -> Result<()> {
    if c.bool_or(key, only)? != only {
        return Err(c.bad(key, format_args!("{} is not supported, only {only}", !only)));
    }
    Ok(())
}

/// Refuses layers whose attention sees a window only.
pub(super) fn require_no_window(c: &Config) -> Result<()> {
    require_bool(c, "use_sliding_window", false)?;
    match c.opt_count("sliding_window")? {
        // Files with the switch keep the number although nothing uses it.
        Some(n) if n > 0 && !c.has("use_sliding_window") => {
            Err(c.bad("sliding_window", format_args!("{n} is not supported: this family attends to all positions")))
        }
        _ => Ok(()),
    }
}

/// One type per layer, from the list under `layer_types` or by `default`.
pub(super) fn layer_types(c: &Config, default: impl Fn(usize) -> LayerType) -> Result<Vec<LayerType>> {
    let count = c.layers("num_hidden_layers")?;
    match c.layer_types("layer_types|layers_block_type")? {
        Some(types) if types.len() != count => {
            Err(c.bad("layer_types", format_args!("{} entries for {count} layers", types.len())))
        }
        Some(types) => Ok(types),
        None => Ok((0..count).map(default).collect()),
    }
}

/// An error about a layer type that the family does not have.
pub(super) fn no_such_layer(c: &Config, found: LayerType) -> crate::Error {
    c.bad("layer_types", format_args!("{found:?} is not a layer of this family"))
}

/// Channels of a recurrent mixer: `mamba_expand` times the model width.
pub(super) fn expanded(c: &Config, key: &str, width: usize) -> Result<usize> {
    c.width(key, &[c.usize_or(key, 2)?, width])
}

/// A size that may also be `"auto"` or missing, which means `auto`.
pub(super) fn size_or_auto(c: &Config, key: &str, auto: impl FnOnce() -> Result<usize>) -> Result<usize> {
    match c.value(key) {
        None => auto(),
        Some(v) if v.as_str() == Some("auto") => auto(),
        Some(v) if v.is_string() => Err(c.bad(key, format_args!("{v} is neither a number nor \"auto\""))),
        Some(_) => c.usize(key),
    }
}

/// The Mamba-2 layers of the families that name their sizes `mamba_*`, with `inner` channels.
pub(super) fn mamba2(c: &Config, width: usize, inner: usize, eps: f32) -> Result<mamba2::Plan> {
    let heads = c.usize_or("mamba_n_heads", 128)?;
    let head_dim = size_or_auto(c, "mamba_d_head", || {
        c.divides(("mamba_expand", inner), ("mamba_n_heads", heads))?;
        Ok(inner / heads)
    })?;
    let plan = mamba2::Plan {
        width,
        heads,
        head_dim,
        state: c.usize_or("mamba_d_state", 256)?,
        groups: c.usize_or("mamba_n_groups", 1)?,
        kernel: conv_taps(c, "mamba_d_conv")?,
        conv_bias: c.bool_or("mamba_conv_bias", true)?,
        bias: [c.bool_or("mamba_proj_bias", false)?; 2],
        input_scale: 1.0,
        scales: [1.0; 5],
        gate: Gating::BeforeNorm,
        eps,
        dt_limit: dt_limit(c)?,
    };
    mamba_groups(c, &plan, "mamba_n_heads", "mamba_n_groups")?;
    Ok(plan)
}
