//! Rotary embedding with the KV write, and attention.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{Read, Write};
use selkie_core::ops::{Attention, RopeKv};

use super::{Facts, quads};
use crate::kernel::{Builder, Kernel, shader};

/// Fewest tokens per row for which queries share their keys in tiles.
const FEW_TOKENS: usize = 4;

pub(super) fn rope_kv<B: Handle>(op: &RopeKv<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let hd = op.head_dim;
    let (heads, kv_heads) = (op.q.row_len() / hd, op.k.row_len() / hd);
    let mut b = Builder::new(shader!("rope_kv"))
        .constant("HEAD_DIM", hd)
        .flag("NORM", op.norm.is_some())
        .flag("ROTATE", op.inv_freq.is_some())
        .param("heads", heads)
        .param("kv_heads", kv_heads)
        .param("pairs", op.inv_freq.as_ref().map_or(0, |f| f.len()))
        .float("eps", op.norm.as_ref().map_or(0.0, |(_, eps)| *eps))
        .step(&op.step)
        .view("q", Read, &op.q)
        .view("k", Read, &op.k)
        .view("v", Read, &op.v)
        .view("q_out", Write, &op.q_out)
        .view("keys", Write, &op.pool.k)
        .view("values", Write, &op.pool.v);
    if let Some((norm, _)) = &op.norm {
        b = b.view("norm", Read, norm);
    }
    if let Some(inv_freq) = &op.inv_freq {
        b = b.view("inv_freq", Read, inv_freq);
    }
    Ok(vec![b.build("rope_kv", op.step.bucket.tokens * (heads + 2 * kv_heads), facts.max_binding)])
}

pub(super) fn attention<B: Handle>(op: &Attention<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let hd = op.head_dim;
    quads("attention", "the head dim", hd)?;
    let (heads, kv_heads) = (op.q.row_len() / hd, op.pool.k.dims()[1]);
    let (b, per_kv) = (&op.step.bucket, heads / kv_heads);
    let base = |shader| {
        Builder::new(shader)
            .constant("HEAD_DIM", hd)
            .param("heads", heads)
            .param("window", op.window.unwrap_or(u32::MAX) as usize)
            .float("scale", op.scale)
            .step(&op.step)
            .vectors("q", Read, &op.q)
            .vectors("keys", Read, &op.pool.k)
            .vectors("values", Read, &op.pool.v)
    };
    // 64 queries in registers and some keys and values in 16 KiB.
    if b.tokens >= FEW_TOKENS * b.rows && hd.is_multiple_of(16) && hd <= 256 && per_kv <= 64 {
        let tokens = 64 / per_kv;
        let tile = base(shader!("attention_tile"))
            .constant("GROUP", per_kv)
            .constant("TOKENS", tokens)
            .constant("KEYS", if hd <= 128 { 8 } else { 4 })
            .param("kv_heads", kv_heads)
            .vectors("out", Write, &op.out);
        return Ok(vec![tile.build("attention", b.tokens.div_ceil(tokens) * kv_heads, facts.max_binding)]);
    }
    let one = base(shader!("attention")).param("heads_per_kv", per_kv).view("out", Write, &op.out);
    Ok(vec![one.build("attention", b.tokens * heads, facts.max_binding)])
}
