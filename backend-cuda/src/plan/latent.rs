//! Attention over latents: their write into pages, the products per head around it, and the attention itself.

use selkie_core::{
    Error, Result,
    ops::{HeadMatmul, LatentAttention, LatentKv},
};

use super::{Arena, Device, aligned, attention, fours, vector};
use crate::{
    arguments::{self, At},
    launch::{Address, Launch, Work},
    spec::{File, Spec},
};

/// Tokens up to which a head's matrix is read once for all of them.
const FEW: usize = 8;

/// Columns of latents, and of shared keys, that fit into a block of the kernel of every size.
const MOST_LATENT: usize = 2048;
const MOST_SHARED: usize = 512;

pub(super) fn head_matmul<B: Address>(a: &HeadMatmul<B>) -> Result<Vec<Work>> {
    let (tokens, heads) = (a.x.rows(), a.heads);
    let (rows, k, width) = (a.w.rows() / heads, a.w.row_len(), a.x.row_len() / heads);
    let few = tokens <= FEW;
    let spec = Spec::new(if few { File::HeadMatmul } else { File::HeadMatmulTile })
        .int("K", k)
        .int("WIDTH", width)
        .int("ROWS", rows);
    let types = |spec: Spec| spec.ty("x_t", a.x.dtype).ty("out_t", a.out.dtype);
    let args =
        arguments::HeadMatmul { x: (&a.x).into(), w: (&a.w).into(), tokens: tokens as i32, out: (&a.out).into() };
    let launch = if few {
        // A head begins at any multiple of its width, a row of its matrix at any multiple of k.
        let fits = |v: usize| width.is_multiple_of(v) && a.w.offset.is_multiple_of(v);
        let vec = [4, 2].into_iter().find(|&v| fits(v) && vector(k, &[&a.x, &a.w]) >= v).unwrap_or(1);
        let spec = spec.int("VEC", vec).int("TOKENS", tokens.next_power_of_two());
        Launch::new(types(spec), [rows.div_ceil(32), heads, 1], 256, &args)
    } else {
        Launch::new(types(spec), [rows.div_ceil(64), tokens.div_ceil(64), heads], 256, &args)
    };
    Ok(vec![Work::Kernel(launch)])
}

pub(super) fn latent_kv<B: Address>(a: &LatentKv<B>) -> Result<Vec<Work>> {
    let latent = a.weight.len();
    let shared = a.kv.row_len() - latent;
    let widest = vector(latent, &[&a.kv, &a.pool.k]).min(vector(shared, &[&a.kv, &a.pool.v]));
    let vec = if a.weight.offset.is_multiple_of(4) { widest } else { 1 };
    let spec = Spec::new(File::LatentKv)
        .int("VEC", vec)
        .int("LATENT", latent)
        .int("SHARED", shared)
        .ty("kv_t", a.kv.dtype)
        .ty("page_t", a.pool.k.dtype);
    let args = arguments::LatentKv {
        st: (&a.step).into(),
        kv: (&a.kv).into(),
        weight: (&a.weight).into(),
        eps: a.eps,
        k_pages: (&a.pool.k).into(),
        v_pages: (&a.pool.v).into(),
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.step.bucket.tokens.div_ceil(4), 1, 1], 128, &args))])
}

/// Bytes of the scratch memory for runs of pages. Tokens times heads times runs stays below this wherever there are several.
pub(super) fn scratch<B: Address>(a: &LatentAttention<B>, device: &Device) -> u64 {
    (blocks(device) * (a.pool.k.dims()[3] + 4) * 4) as u64
}

/// Blocks of the kernel of every size that fill a device.
fn blocks(device: &Device) -> usize {
    8 * device.sms
}

/// Refuses what the kernel of every size has no room for.
fn room(what: &str, columns: usize, most: usize) -> Result<()> {
    if columns <= most {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("latent_attention with {what} of {columns}"),
        why: format!("the CUDA kernels take up to {most}; --backend cpu takes every size"),
    })
}

pub(super) fn latent_attention<B: Address>(
    a: &LatentAttention<B>,
    device: &Device,
    arena: &Arena,
) -> Result<Vec<Work>> {
    let [latent, shared] = [&a.pool.k, &a.pool.v].map(|t| t.dims()[3]);
    let (heads, width, bucket) = (a.heads, a.queries.row_len() / a.heads, &a.step.bucket);
    aligned("latent_attention", 4, &[&a.q, &a.queries, &a.pool.k, &a.pool.v, &a.out])?;
    for (what, columns) in [("latents of", latent), ("shared keys of", shared), ("heads of", width)] {
        fours("latent_attention", what, columns)?;
    }
    room("latents", latent, MOST_LATENT)?;
    room("shared keys", shared, MOST_SHARED)?;
    let splits = attention::splits(bucket.tokens * heads, bucket.pages, blocks(device));
    let spec = Spec::new(File::LatentAttention)
        .int("LATENT", latent)
        .int("SHARED", shared)
        .int("WIDTH", width)
        .int("HEADS", heads)
        .int("SPLITS", splits)
        .ty("q_t", a.q.dtype)
        .ty("page_t", a.pool.k.dtype)
        .ty("out_t", a.out.dtype);
    let (st, out, partial) = ((&a.step).into(), (&a.out).into(), At(arena.scratch));
    let args = arguments::LatentAttention {
        st,
        q: (&a.q).into(),
        queries: (&a.queries).into(),
        k_pages: (&a.pool.k).into(),
        v_pages: (&a.pool.v).into(),
        out,
        partial,
        scale: a.scale,
    };
    let mut work = vec![Work::Kernel(Launch::new(spec, [bucket.tokens, heads, splits], 128, &args))];
    let combine = attention::Merge { tokens: bucket.tokens, heads, columns: latent, splits };
    work.extend(combine.launch(arguments::AttentionCombine { st, partial, out }, a.out.dtype));
    Ok(work)
}
