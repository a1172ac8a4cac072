//! Bamba: Mamba-2 in most layers, attention with half of each head rotated in the listed ones, and SwiGLU in all.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer, llama,
    readers::{expanded, heads, mamba2, require_act},
};
use crate::{
    Result,
    blocks::attention,
    config::{Config, Heads},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "bamba", 262_144, false, norm("final_layernorm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    let heads = heads(c)?;
    let attention = attention::Plan {
        bias: c.bool_or("attention_bias", false)?,
        rope: Some(rope(c, heads)?),
        ..attention::Plan::new(a.width, heads)
    };
    let mamba = mamba2(c, a.width, expanded(c, "mamba_expand", a.width)?, eps)?;
    let mlp = llama::mlp(a.width, c.usize("intermediate_size")?, c.bool_or("mlp_bias", false)?);
    let count = c.layers("num_hidden_layers")?;
    let attending = c.opt_usizes("attn_layer_indices")?.unwrap_or_default();
    if let Some(i) = attending.iter().find(|i| **i >= count) {
        return Err(c.bad("attn_layer_indices", format_args!("layer {i} of {count}")));
    }
    for i in 0..count {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer = match attending.contains(&i) {
            true => Branch::new(name("self_attn."), attention.clone()),
            false => Branch::new(name("mamba."), mamba.clone()),
        };
        a.layers.push(vec![
            SubLayer::pre_norm(norm(name("input_layernorm.weight")), vec![mixer]),
            SubLayer::pre_norm(
                norm(name("pre_ff_layernorm.weight")),
                vec![Branch::new(name("feed_forward."), mlp.clone())],
            ),
        ]);
    }
    Ok(a)
}

/// The first half of each head. The family's own code ignores a part that the file names.
fn rope(c: &Config, heads: Heads) -> Result<Rope> {
    if !heads.head_dim.is_multiple_of(4) {
        let why = format_args!("half of a head of {} is not an even number of dimensions", heads.head_dim);
        return Err(c.bad("head_dim|num_attention_heads", why));
    }
    Ok(Rope { rotary_dims: heads.head_dim / 2, ..Rope::read_or(c, heads.head_dim, 1e4, 0.5)? })
}
