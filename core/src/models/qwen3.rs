//! Qwen3: attention with per-head norms, optionally with a sliding window in the later layers, and SwiGLU.

use super::{
    Architecture, Norm, NormKind, llama,
    readers::{heads_or, require_act},
};
use crate::{
    Result,
    blocks::attention::{self, QkNorm},
    config::{Config, LayerType},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = Norm { name: "norm.weight".into(), eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "qwen3", 32_768, false, norm)?;
    require_act(c, "hidden_act", "silu")?;
    let heads = heads_or(c, 128)?;
    let count = c.layers("num_hidden_layers")?;
    let sliding = sliding_layers(c, count)?;
    let window = c.usize_or("sliding_window", 4096)? as u32;
    let mlp = llama::mlp(a.width, c.usize("intermediate_size")?, false);
    for (i, sliding) in sliding.into_iter().enumerate() {
        let attention = attention::Plan {
            bias: c.bool_or("attention_bias", false)?,
            qk_norm: Some(QkNorm::per_head(NormKind::Plain, eps)),
            rope: Some(Rope::read(c, heads.head_dim, 1e4)?),
            window: sliding.then_some(window),
            ..attention::Plan::new(a.width, heads)
        };
        a.layers.push(llama::layer(i, eps, attention, mlp.clone()));
    }
    Ok(a)
}

/// Which layers have a window. Without `use_sliding_window` none has, independent of the other keys.
fn sliding_layers(c: &Config, count: usize) -> Result<Vec<bool>> {
    let used = c.bool_or("use_sliding_window", false)?;
    let Some(types) = c.layer_types("layer_types")? else {
        let first = c.count_or("max_window_layers", 28)?;
        return Ok((0..count).map(|i| used && i >= first).collect());
    };
    if types.len() != count {
        return Err(c.bad("layer_types", format_args!("{} entries for {count} layers", types.len())));
    }
    if let Some(other) = types.iter().find(|t| !matches!(t, LayerType::Attention | LayerType::SlidingAttention)) {
        return Err(c.bad("layer_types", format_args!("{other:?} is not a layer of this family")));
    }
    Ok(types.into_iter().map(|t| used && t == LayerType::SlidingAttention).collect())
}
