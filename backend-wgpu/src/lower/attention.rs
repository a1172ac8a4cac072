//! Lowers the rotary embedding with its KV write, and attention.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::kv8;
use selkie_core::ops::Access::{Read, Write};
use selkie_core::ops::{Attention, RopeKv};
use selkie_core::step::PAGE;
use selkie_core::tensor::DType;

use super::{Facts, demand, quads};
use crate::kernel::{Builder, Kernel, shader};

/// Minimum tokens per row for the tiled shader, where queries share keys.
const FEW_TOKENS: usize = 4;

/// Target number of workgroups when pages of few tokens are split, and the maximum number of splits per token.
const GROUPS: usize = 1024;
const MOST_SPLITS: usize = 64;

pub(super) fn rope_kv<B: Handle>(op: &RopeKv<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let hd = op.head_dim;
    let (heads, kv_heads) = (op.q.row_len() / hd, op.k.row_len() / hd);
    let coded = op.pool.k.dtype == DType::I8;
    if coded {
        quads("rope_kv", "the head dim", hd)?;
    }
    let mut b = Builder::new(shader!("rope_kv"))
        .constant("HEAD_DIM", hd)
        .constant("HEAD_SPAN", kv8::span(op.pool.k.dtype, hd))
        .flag("CODED", coded)
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
            .constant("HEAD_SPAN", kv8::span(op.pool.k.dtype, hd))
            .param("heads", heads)
            .param("window", op.window.unwrap_or(u32::MAX) as usize)
            .param("first", op.first as usize)
            .float("scale", op.scale)
            .step(&op.step)
            .vectors("q", Read, &op.q)
            .vectors("keys", Read, &op.pool.k)
            .vectors("values", Read, &op.pool.v)
    };
    if facts.few_barriers {
        let rows = base(shader!("attention_rows"))
            .constant("QUADS", hd / 4)
            .param("heads_per_kv", per_kv)
            .vectors("out", Write, &op.out);
        return Ok(vec![rows.build("attention", (b.tokens * heads).div_ceil(64), facts.max_binding)]);
    }
    if b.tokens >= FEW_TOKENS * b.rows && hd <= 256 && per_kv <= 64 {
        let tokens = 64 / per_kv;
        let tile = base(shader!("attention_tile"))
            .constant("GROUP", per_kv)
            .constant("TOKENS", tokens)
            .constant("COLUMNS", hd.div_ceil(64))
            .constant("DEPTH", if hd <= 128 { 16 } else { 8 })
            .param("kv_heads", kv_heads)
            .vectors("out", Write, &op.out);
        return Ok(vec![tile.build("attention", b.tokens.div_ceil(tokens) * kv_heads, facts.max_binding)]);
    }
    demand(hd <= 512, "attention", || format!("a head dim of {hd}; at most 512 is supported"))?;
    let together = together(per_kv);
    let items = b.tokens * heads / together;
    let splits = splits(items, b.pages);
    // The partial result of a head: `hd` sums, the largest score, the sum of weights and padding.
    let partial = [b.tokens * heads * splits, hd + 4];
    let part = base(shader!("attention"))
        .constant("HEADS", together)
        .constant("HELD", hd.div_ceil(16))
        .constant("LOADS", PAGE.div_ceil(1024 / hd))
        .subgroup(facts.subgroup.filter(|size| *size >= 4), 4)
        .flag("PARTIAL", splits > 1)
        .param("splits", splits)
        .param("per", b.pages.div_ceil(splits))
        .param("heads_per_kv", per_kv);
    if splits == 1 {
        return Ok(vec![part.vectors("out", Write, &op.out).build("attention", items, facts.max_binding)]);
    }
    let merge = Builder::new(shader!("attention_merge"))
        .constant("HEAD_DIM", hd)
        .constant("SPLITS", splits)
        .param("heads", heads)
        .step(&op.step)
        .scratch("partial", Read, 0, partial)
        .vectors("out", Write, &op.out);
    Ok(vec![
        part.scratch("partial", Write, 0, partial).build("attention", items * splits, facts.max_binding),
        merge.build("attention", b.tokens * heads, facts.max_binding),
    ])
}

/// Maximum scratch bytes for any number of rows: there are at most [`GROUPS`] partial results per head of a workgroup.
pub(super) fn scratch<B: Handle>(op: &Attention<B>, facts: &Facts) -> u64 {
    let per_kv = op.q.row_len() / op.head_dim / op.pool.k.dims()[1];
    let parts = if facts.few_barriers { 0 } else { GROUPS * together(per_kv) };
    4 * (parts * (op.head_dim + 4)) as u64
}

/// Splits of a token's pages; `items` counts tokens times groups of heads that share keys.
fn splits(items: usize, pages: usize) -> usize {
    (GROUPS / items).clamp(1, MOST_SPLITS).min(pages)
}

/// Query heads per workgroup, which share the keys that they read.
fn together(per_kv: usize) -> usize {
    (1..=4).rev().find(|n| per_kv.is_multiple_of(*n)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_at_most_what_is_reserved() {
        for items in 1..3000 {
            for pages in [1, 2, 33, 64, 2048] {
                let splits = splits(items, pages);
                assert!(splits == 1 || items * splits <= GROUPS, "{items} of {pages} pages");
            }
        }
    }
}
