//! Attention over latents: their write into pages, the products per head around it, and the attention itself.

use selkie_core::{
    Error, Result, kv8,
    ops::{HeadMatmul, LatentAttention, LatentKv},
    step::PAGE,
    tensor::DType,
};

use super::{Arena, Device, aligned, attention, fours, vector, wide};
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

pub(super) fn head_matmul<B: Address>(a: &HeadMatmul<B>, device: &Device) -> Result<Vec<Work>> {
    let (tokens, heads) = (a.x.rows(), a.heads);
    let (rows, k, width) = (a.w.rows() / heads, a.w.row_len(), a.x.row_len() / heads);
    let spec = |file| Spec::new(file).int("K", k).int("WIDTH", width).int("ROWS", rows);
    let types = |spec: Spec| spec.ty("x_t", a.x.dtype).ty("out_t", a.out.dtype);
    let (x, w, out, number) = ((&a.x).into(), (&a.w).into(), (&a.out).into(), tokens as i32);
    let args = arguments::HeadMatmul { x, w, tokens: number, out };
    // A head begins at any multiple of its width, a row of its matrix at any multiple of k.
    let fits = |v: usize| [k, width, a.w.offset].iter().all(|n| n.is_multiple_of(v));
    let tiles = [rows.div_ceil(64), tokens.div_ceil(64), heads];
    let launch = if tokens <= FEW {
        let vec = [4, 2].into_iter().find(|&v| fits(v) && aligned("head_matmul", v, &[&a.x]).is_ok()).unwrap_or(1);
        let spec = spec(File::HeadMatmul).int("VEC", vec).int("TOKENS", tokens.next_power_of_two());
        Launch::new(types(spec), [rows.div_ceil(32), heads, 1], 256, &args)
    } else if device.tuned && fits(8) && rows.is_multiple_of(2) && wide(&[&a.x, &a.out]) {
        let args = arguments::HeadMatmulMma { x, w, tokens: number, out };
        Launch::new(spec(File::HeadMatmulMma), tiles, 128, &args)
    } else {
        Launch::new(types(spec(File::HeadMatmulTile)), tiles, 256, &args)
    };
    Ok(vec![Work::Kernel(launch)])
}

pub(super) fn latent_kv<B: Address>(a: &LatentKv<B>) -> Result<Vec<Work>> {
    let [latent, shared] = a.pool.latent_widths();
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

/// What a block of the kernel on tensor cores reads.
#[derive(Clone, Copy, Debug)]
struct Pages {
    /// Columns of a latent.
    latent: usize,
    /// Columns of a shared key.
    shared: usize,
    /// In 8 bits.
    codes: bool,
}

impl Pages {
    fn of<B: Address>(a: &LatentAttention<B>) -> Self {
        let [latent, shared] = a.pool.latent_widths();
        Self { latent, shared, codes: a.pool.k.dtype == DType::I8 }
    }
}

/// How a block of the kernel on tensor cores is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Heads of a block, in sixteens.
    sixteens: usize,
    /// Pages in shared memory; of codes, besides one in bf16.
    stages: usize,
}

/// Most heads of a block.
const MOST_HEADS: usize = 32;
/// Most runs that the pages of a token are cut into.
const MOST_RUNS: usize = 128;

impl Tile {
    /// The most heads that fit, of pages that arrive while others are used.
    fn of(heads: usize, pages: Pages, device: &Device) -> Option<Self> {
        let Pages { latent, shared, .. } = pages;
        let takes = latent.is_multiple_of(64) && latent <= 1024 && shared.is_multiple_of(16) && shared <= MOST_SHARED;
        [(2, 2), (2, 1), (1, 2), (1, 1)]
            .into_iter()
            .map(|(sixteens, stages)| Self { sixteens, stages })
            .filter(|tile| takes && (tile.sixteens == 1 || heads > 16))
            .find(|tile| tile.shared(pages) <= device.shared)
    }

    /// Shared memory of a block, in bytes: queries, pages, weights, statistics of four warps.
    fn shared(self, Pages { latent, shared, codes }: Pages) -> usize {
        let (heads, columns) = (16 * self.sixteens, latent + shared);
        let page = 2 * PAGE * columns;
        let coded: usize = [latent, shared].map(|columns| kv8::span(DType::I8, columns)).iter().sum();
        let pages = if codes { page + self.stages * coded } else { self.stages * page };
        2 * columns * heads + pages + heads * (2 * PAGE + 4 * 4)
    }

    /// Blocks that share the heads of a token.
    fn blocks(self, heads: usize) -> usize {
        heads.div_ceil(16 * self.sixteens)
    }
}

/// Queries of a block of the kernel on warpgroup products: heads of a token, or of several.
const QUERIES: usize = 64;

/// Its shared memory: queries, two pages, weights and factors of a page, and room to begin at a multiple of 1024.
fn wgmma_shared(latent: usize) -> usize {
    3 * 2 * 64 * (latent + 64) + 64 * 128 + 4 * 32 * 8 + 1023
}

/// Whether it takes these pages.
fn takes_wgmma(Pages { latent, shared, codes }: Pages, device: &Device) -> bool {
    let sizes = latent.is_multiple_of(128) && latent <= 512 && shared.is_multiple_of(16) && shared <= 64;
    device.wgmma && !codes && sizes && wgmma_shared(latent) <= device.shared
}

/// The kernel of an attention over latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Any size: a block per head.
    Generic,
    /// A block per token and some heads.
    Tile(Tile),
    /// A block per [`QUERIES`].
    Wgmma,
}

/// Columns of a head of the queries.
fn width<B: Address>(a: &LatentAttention<B>) -> usize {
    a.queries.row_len() / a.heads
}

fn variant<B: Address>(a: &LatentAttention<B>, device: &Device) -> Variant {
    let rows = wide(&[&a.q, &a.queries, &a.out]) && attention::wide_pages(&a.pool);
    let inputs = device.tuned && width(a).is_multiple_of(8) && rows;
    if inputs && takes_wgmma(Pages::of(a), device) {
        return Variant::Wgmma;
    }
    let tile = if inputs { Tile::of(a.heads, Pages::of(a), device) } else { None };
    tile.map_or(Variant::Generic, Variant::Tile)
}

/// Bytes of the scratch memory for runs of pages. Where a token has several, tokens times heads times runs is at most the most
/// heads of a block for every multiprocessor, or [`generic_blocks`].
pub(super) fn scratch<B: Address>(a: &LatentAttention<B>, device: &Device) -> u64 {
    let results = match variant(a, device) {
        Variant::Generic => generic_blocks(device),
        Variant::Tile(_) => MOST_HEADS * device.sms,
        Variant::Wgmma => QUERIES * device.sms,
    };
    (results * (Pages::of(a).latent + 4) * 4) as u64
}

/// Blocks of the kernel of every size that fill a device.
fn generic_blocks(device: &Device) -> usize {
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
    let (cached, width) = (Pages::of(a), width(a));
    let Pages { latent, shared, .. } = cached;
    aligned("latent_attention", 4, &[&a.q, &a.queries, &a.pool.k, &a.pool.v, &a.out])?;
    for (what, columns) in [("latents of", latent), ("shared keys of", shared), ("heads of", width)] {
        fours("latent_attention", what, columns)?;
    }
    room("latents", latent, MOST_LATENT)?;
    room("shared keys", shared, MOST_SHARED)?;
    let (heads, tokens, pages) = (a.heads, a.step.bucket.tokens, a.step.bucket.pages);
    let (st, q, queries) = ((&a.step).into(), (&a.q).into(), (&a.queries).into());
    let (k_pages, v_pages, out) = ((&a.pool.k).into(), (&a.pool.v).into(), (&a.out).into());
    let (partial, scale) = (At(arena.scratch), a.scale);
    let spec =
        |file| Spec::new(file).int("LATENT", latent).int("SHARED", shared).int("WIDTH", width).int("HEADS", heads);
    let runs = |blocks: usize| (device.sms / blocks).min(pages).clamp(1, MOST_RUNS);
    let (launch, splits) = match variant(a, device) {
        Variant::Generic => {
            let splits = attention::splits(tokens * heads, pages, generic_blocks(device));
            let spec = spec(File::LatentAttention).int("SPLITS", splits);
            let spec = spec.ty("q_t", a.q.dtype).ty("page_t", a.pool.k.dtype).ty("out_t", a.out.dtype);
            let args = arguments::LatentAttention { st, q, queries, k_pages, v_pages, out, partial, scale };
            (Launch::new(spec, [tokens, heads, splits], 128, &args), splits)
        }
        Variant::Tile(tile) => {
            let blocks = tile.blocks(heads);
            let splits = runs(tokens * blocks);
            let spec = spec(File::LatentAttentionTile).int("MT", tile.sixteens).int("STAGES", tile.stages);
            let spec = spec.ty("page_t", a.pool.k.dtype);
            let args = arguments::LatentAttentionTile { st, q, queries, k_pages, v_pages, out, partial, scale };
            let launch = Launch::new(spec.int("SPLITS", splits), [tokens, blocks, splits], 128 * tile.sixteens, &args);
            (launch.with_shared(tile.shared(cached)), splits)
        }
        Variant::Wgmma => {
            let many = tokens > PAGE && tokens > a.step.bucket.rows;
            let of_a_block = if many { (QUERIES / heads).max(1) } else { 1 };
            let tiles = if of_a_block > 1 { tokens.div_ceil(of_a_block) + a.step.bucket.rows } else { tokens };
            let blocks = heads.div_ceil(QUERIES);
            let splits = if of_a_block > 1 { 1 } else { runs(tokens * blocks) };
            let spec = spec(File::LatentAttentionWgmma).int("TOKENS", of_a_block).int("SPLITS", splits);
            let args = arguments::LatentAttentionTile { st, q, queries, k_pages, v_pages, out, partial, scale };
            let spec = spec.ty("page_t", a.pool.k.dtype);
            (Launch::new(spec, [tiles, blocks, splits], 384, &args).with_shared(wgmma_shared(latent)), splits)
        }
    };
    let mut work = vec![Work::Kernel(launch)];
    let merge = attention::Merge { tokens, heads, columns: latent, splits };
    work.extend(merge.launch(arguments::AttentionCombine { st, partial, out }, a.out.dtype));
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_into_shared_memory() {
        let tile = |heads, pages, kib| Tile::of(heads, pages, &Device::like_h200(kib)).map(|t| (t.sixteens, t.stages));
        let of = |heads, latent, shared, kib| tile(heads, Pages { latent, shared, codes: false }, kib);
        assert_eq!(of(32, 512, 64, 227), Some((2, 2)));
        assert_eq!(of(32, 512, 64, 163), Some((2, 1)));
        assert_eq!(of(32, 512, 64, 99), Some((1, 1)));
        assert_eq!(of(4, 64, 16, 99), Some((1, 2)));
        assert_eq!(of(1, 1024, 16, 227), Some((1, 1)));
        assert_eq!(of(1, 1024, 16, 99), None);
        assert_eq!(of(4, 32, 16, 227), None);
        assert_eq!(of(4, 64, 12, 227), None);
        let codes = Pages { latent: 512, shared: 64, codes: true };
        assert_eq!([227, 163, 99].map(|kib| tile(32, codes, kib)), [Some((2, 2)), Some((2, 1)), None]);
    }

    #[test]
    fn warpgroups_take_sizes_that_fit() {
        let takes = |latent, shared, kib| takes_wgmma(Pages { latent, shared, codes: false }, &Device::like_h200(kib));
        assert!(takes(512, 64, 227) && takes(128, 16, 227) && takes(128, 32, 99));
        assert!(!takes(512, 64, 163) && !takes(64, 64, 227) && !takes(512, 80, 227) && !takes(640, 64, 227));
    }

    #[test]
    fn sizes_without_room_are_refused_by_name() {
        assert!(room("latents", MOST_LATENT, MOST_LATENT).is_ok());
        let why = room("latents", MOST_LATENT + 4, MOST_LATENT).expect_err("too many").to_string();
        assert!(why.contains("latents of 2052") && why.contains("2048"), "{why}");
    }
}
