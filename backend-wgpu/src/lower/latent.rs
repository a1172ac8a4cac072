//! Lowers the ops of attention over latents.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{Read, Write};
use selkie_core::ops::{HeadMatmul, LatentAttention, LatentKv};
use selkie_core::tensor::DType;

use super::{Facts, demand, quads};
use crate::kernel::{Builder, Kernel, shader};

/// Tokens and rows of a matrix per workgroup of a product per head.
const TOKENS: usize = 4;
const ROWS: usize = 32;

/// Most columns of a latent: a thread holds a quad for every 512 of them.
const MOST_LATENT: usize = 2048;

pub(super) fn head_matmul<B: Handle>(op: &HeadMatmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let (rows, k) = (op.w.rows() / op.heads, op.w.row_len());
    let width = op.x.row_len() / op.heads;
    quads("head_matmul", "the inner dimension", k)?;
    quads("head_matmul", "the width of a head", width)?;
    let parts = rows.div_ceil(ROWS);
    let kernel = Builder::new(shader!("head_matmul"))
        .constant("K", k)
        .param("tokens", op.x.rows())
        .param("heads", op.heads)
        .param("rows", rows)
        .param("parts", parts)
        .param("width", width)
        .vectors("x", Read, &op.x)
        .vectors("w", Read, &op.w)
        .view("out", Write, &op.out);
    let groups = op.x.rows().div_ceil(TOKENS) * op.heads * parts;
    Ok(vec![kernel.build("head_matmul", groups, facts.max_binding)])
}

pub(super) fn latent_kv<B: Handle>(op: &LatentKv<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let [latent, shared] = op.pool.latent_widths();
    let coded = op.pool.k.dtype == DType::I8;
    if coded {
        quads("latent_kv", "the width of latents", latent)?;
        quads("latent_kv", "the width of shared keys", shared)?;
    }
    let kernel = Builder::new(shader!("latent_kv"))
        .constant("LATENT", latent)
        .constant("SHARED", shared)
        .flag("CODED", coded)
        .float("eps", op.eps)
        .step(&op.step)
        .view("kv", Read, &op.kv)
        .view("weight", Read, &op.weight)
        .view("latents", Write, &op.pool.k)
        .view("tails", Write, &op.pool.v);
    Ok(vec![kernel.build("latent_kv", op.step.bucket.tokens, facts.max_binding)])
}

pub(super) fn latent_attention<B: Handle>(op: &LatentAttention<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let [latent, shared] = op.pool.latent_widths();
    let width = op.queries.row_len() / op.heads;
    quads("latent_attention", "the width of latents", latent)?;
    quads("latent_attention", "the width of shared keys", shared)?;
    quads("latent_attention", "the width of a query", width)?;
    demand(latent <= MOST_LATENT, "latent_attention", || {
        format!("latents of {latent}; at most {MOST_LATENT} are supported")
    })?;
    demand(shared <= 512, "latent_attention", || format!("shared keys of {shared}; at most 512 are supported"))?;
    let kernel = Builder::new(shader!("latent_attention"))
        .constant("LATENT", latent)
        .constant("SHARED", shared)
        .constant("HELD", latent.div_ceil(512))
        .param("heads", op.heads)
        .param("width", width)
        .float("scale", op.scale)
        .step(&op.step)
        .vectors("q", Read, &op.q)
        .vectors("queries", Read, &op.queries)
        .vectors("latents", Read, &op.pool.k)
        .vectors("tails", Read, &op.pool.v)
        .vectors("out", Write, &op.out);
    Ok(vec![kernel.build("latent_attention", op.step.bucket.tokens * op.heads, facts.max_binding)])
}
