//! Attention: tensor cores for the common head dims, split over the keys for few queries, tiled over the queries for many.

use selkie_core::{
    Result,
    ops::{Attention, KvPool},
    step::PAGE,
    tensor::{DType, Tensor},
};

use super::{Arena, Device, aligned, fours, wide};
use crate::{
    arguments::{self, At},
    launch::{Address, Launch, Work, address},
    spec::{File, Spec},
};

/// Most runs that the generic kernel cuts the keys of a query into.
const MAX_SPLITS: usize = 64;
/// Keys of a slice of the decode kernel.
const KEYS: usize = 16;

/// The kernel of an attention op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Any shape: a block per query head.
    Generic { splits: usize },
    /// A block per token and KV head.
    Decode(Decode),
    /// A block per tile of tokens and query head.
    Prefill { tiles: usize },
    /// The same with warpgroup products.
    Wgmma,
}

/// How few queries are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decode {
    /// Warps of a block; each has its own ring.
    warps: usize,
    /// Slices of 16 keys in a ring.
    stages: usize,
    /// Blocks that share the keys of a token and KV head.
    splits: usize,
}

/// The heads that a decode block reads.
#[derive(Clone, Copy, Debug)]
struct Heads {
    /// Head dim.
    dim: usize,
    /// Query heads of a KV head.
    group: usize,
    /// Pages in 8 bits.
    codes: bool,
}

impl Heads {
    fn of<B: Address>(a: &Attention<B>) -> Self {
        let (dim, kv_heads) = (a.head_dim, a.pool.k.dims()[1]);
        Self { dim, group: a.q.row_len() / dim / kv_heads, codes: a.pool.k.dtype == DType::I8 }
    }
}

/// Most warps of a decode block: as many as a multiprocessor runs concurrently.
const MOST_WARPS: usize = 8;

impl Decode {
    /// One large block a multiprocessor where there are few, so that most results are merged in shared memory, else two of half
    /// the size, one of which copies while the other begins or ends.
    fn of(units: usize, slices: usize, heads: Heads, device: &Device) -> Option<Self> {
        let fits = |&(warps, stages): &(usize, usize)| Self { warps, stages, splits: 1 }.shared(heads) <= device.shared;
        let rings = [MOST_WARPS, MOST_WARPS / 2].into_iter().flat_map(|w| [4, 3, 2].map(|s| (w, s)));
        let (most, stages) = rings.into_iter().find(fits)?;
        let warps = if units > device.sms { most / 2 } else { most };
        let splits = (device.sms / units.max(1)).min(slices.div_ceil(warps)).max(1);
        Some(Self { warps, stages, splits })
    }

    /// Shared memory of a block, in bytes: the rings, or the warps' results.
    fn shared(self, Heads { dim, group, codes }: Heads) -> usize {
        let bf16 = if dim.is_multiple_of(64) { 2 * dim } else { 2 * (dim + 8) };
        // Codes: an odd number of pieces of 16 bytes, and a scale.
        let row = if codes { ((dim / 16) | 1) * 16 + 4 } else { bf16 };
        let ring = self.warps * self.stages * 2 * KEYS * row;
        ring.max(self.warps * group * (dim + 4 + 2) * 4)
    }
}

impl Variant {
    /// Runs of a query whose results a second kernel merges.
    fn splits(self) -> usize {
        match self {
            Self::Generic { splits } => splits,
            Self::Decode(_) | Self::Prefill { .. } | Self::Wgmma => 1,
        }
    }
}

/// Queries, and two pages of keys and values; of codes one in bf16, the codes of the next and the scales of both.
fn prefill_shared(head_dim: usize, tiles: usize, codes: bool) -> usize {
    let row = (head_dim + 8) * 2;
    let pages = if codes { 2 * PAGE * (row + head_dim + 8) } else { 4 * PAGE * row };
    64 * tiles * row + pages
}

/// Tokens of a tile of the warpgroup kernel.
const WGMMA_TILE: usize = 128;

/// Queries, two stages of keys and values, and room to start at a multiple of 1024. The kernel takes tiles of half as many keys
/// for heads of 256.
fn wgmma_shared(head_dim: usize) -> usize {
    let keys = if head_dim == 256 { 64 } else { 128 };
    (WGMMA_TILE + 4 * keys) * head_dim * 2 + 1024
}

/// Results of runs of keys that become one.
pub(super) struct Merge {
    /// Tokens of the bucket.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Columns of a head's result.
    pub columns: usize,
    /// Runs.
    pub splits: usize,
}

impl Merge {
    /// The kernel, if there are several runs.
    pub fn launch(&self, args: arguments::AttentionCombine, out: DType) -> Option<Work> {
        let Self { tokens, heads, columns, splits } = *self;
        if splits == 1 {
            return None;
        }
        // Several runs for each, so that some are on their way at a time.
        let warps = (splits / 4).next_power_of_two().min(8);
        let spec = Spec::new(File::AttentionCombine)
            .int("HEAD_DIM", columns)
            .int("HEADS", heads)
            .int("SPLITS", splits)
            .int("WARPS", warps)
            .ty("out_t", out);
        Some(Work::Kernel(Launch::new(spec, [tokens * heads, columns.div_ceil(128), 1], 32 * warps, &args)))
    }
}

/// Runs that the keys of a query are cut into, so that there are about `blocks` of them.
pub(super) fn splits(units: usize, pages: usize, blocks: usize) -> usize {
    (blocks / units.max(1)).min(pages).clamp(1, MAX_SPLITS)
}

/// Whether pages in bf16 or of codes can be read 16 bytes at a time.
pub(super) fn wide_pages<B: Address>(pool: &KvPool<B>) -> bool {
    let codes =
        |t: &Tensor<B>| t.dtype == DType::I8 && address(t).is_multiple_of(16) && t.row_stride.is_multiple_of(16);
    let pool = [&pool.k, &pool.v];
    wide(&pool) || pool.into_iter().all(codes)
}

fn variant<B: Address>(a: &Attention<B>, device: &Device) -> Variant {
    let (hd, tokens, pages) = (a.head_dim, a.step.bucket.tokens, a.step.bucket.pages);
    let (heads, kv_heads) = (a.q.row_len() / hd, a.pool.k.dims()[1]);
    let block @ Heads { group, codes, .. } = Heads::of(a);
    let tensor_cores = device.tuned && hd % 16 == 0 && hd <= 256 && wide(&[&a.q, &a.out]) && wide_pages(&a.pool);
    // The largest tile that fits everywhere; a device with more memory runs two such blocks.
    let tiles = [2, 1].into_iter().find(|&m| (m == 1 || hd <= 128) && prefill_shared(hd, m, codes) <= device.shared);
    let decode = Decode::of(tokens * kv_heads, pages * (PAGE / KEYS), block, device);
    let many = tokens > PAGE && tokens > a.step.bucket.rows;
    let wgmma = device.wgmma && !codes && matches!(hd, 64 | 128 | 256) && wgmma_shared(hd) <= device.shared;
    if tensor_cores && many && wgmma {
        return Variant::Wgmma;
    }
    match (tiles, decode) {
        (Some(tiles), _) if tensor_cores && many => Variant::Prefill { tiles },
        (_, Some(decode)) if tensor_cores && group <= 16 => Variant::Decode(decode),
        _ => Variant::Generic { splits: splits(tokens * heads, pages, 8 * device.sms) },
    }
}

pub(super) fn scratch<B: Address>(a: &Attention<B>, device: &Device) -> u64 {
    if variant(a, device).splits() == 1 && a.step.bucket.tokens > 8 * device.sms {
        return 0;
    }
    // Units times splits stays below this for every number of tokens that is split, so a smaller step fits too.
    let heads = a.q.row_len() / a.head_dim;
    ((8 * device.sms).max(2 * device.sms * heads) * (a.head_dim + 4) * 4) as u64
}

pub(super) fn attention<B: Address>(a: &Attention<B>, device: &Device, arena: &Arena) -> Result<Vec<Work>> {
    aligned("attention", 4, &[&a.q, &a.pool.k, &a.pool.v, &a.out])?;
    // Rows of 4 heads of 6 are aligned, but their heads are not.
    fours("attention", "head dim", a.head_dim)?;
    let (hd, bucket) = (a.head_dim, &a.step.bucket);
    let (heads, kv_heads) = (a.q.row_len() / hd, a.pool.k.dims()[1]);
    let variant = variant(a, device);
    let file = match variant {
        Variant::Generic { .. } => File::Attention,
        Variant::Decode(_) => File::AttentionDecode,
        Variant::Prefill { .. } => File::AttentionPrefill,
        Variant::Wgmma => File::AttentionWgmma,
    };
    let spec = Spec::new(file)
        .int("HEAD_DIM", hd)
        .int("HEADS", heads)
        .int("KV_HEADS", kv_heads)
        .int("WINDOW", a.window.map_or(0, |w| w.min(i32::MAX as u32) as usize))
        .int("FIRST", a.first.min(i32::MAX as u32) as usize)
        .ty("kv_t", a.pool.k.dtype);
    let (st, q, out, scale) = ((&a.step).into(), (&a.q).into(), (&a.out).into(), a.scale);
    let (k_pages, v_pages, partial) = ((&a.pool.k).into(), (&a.pool.v).into(), At(arena.scratch));
    let tiled = arguments::AttentionTiles { st, q, k_pages, v_pages, out, scale };
    let launch = match variant {
        Variant::Generic { splits } => {
            let spec = spec.int("SPLITS", splits).ty("q_t", a.q.dtype).ty("out_t", a.out.dtype);
            let args = arguments::Attention { st, q, k_pages, v_pages, out, partial, scale };
            Launch::new(spec, [bucket.tokens, heads, splits], 128, &args)
        }
        Variant::Decode(d) => {
            let spec =
                spec.int("WARPS", d.warps).int("STAGES", d.stages).int("SPLITS", d.splits).ty("out_t", a.out.dtype);
            let tickets = At(arena.tickets);
            let args = arguments::AttentionDecode { st, q, k_pages, v_pages, out, partial, tickets, scale };
            Launch::new(spec, [bucket.tokens, kv_heads, d.splits], 32 * d.warps, &args)
                .with_shared(d.shared(Heads::of(a)))
        }
        Variant::Prefill { tiles } => {
            let spec = spec.int("MT", tiles);
            let grid = [bucket.tokens.div_ceil(64 * tiles) + bucket.rows, heads, 1];
            Launch::new(spec, grid, 128, &tiled).with_shared(prefill_shared(hd, tiles, Heads::of(a).codes))
        }
        Variant::Wgmma => {
            let grid = [heads, bucket.tokens.div_ceil(WGMMA_TILE) + bucket.rows, 1];
            Launch::new(spec, grid, 384, &tiled).with_shared(wgmma_shared(hd))
        }
    };
    let mut work = vec![Work::Kernel(launch)];
    let merge = Merge { tokens: bucket.tokens, heads, columns: hd, splits: variant.splits() };
    work.extend(merge.launch(arguments::AttentionCombine { st, partial, out }, a.out.dtype));
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fill_the_device_and_never_exceed_the_pages() {
        assert_eq!(splits(8, 512, 132), 16);
        assert_eq!(splits(8, 512, 264), 33);
        assert_eq!(splits(8, 4, 264), 4);
        assert_eq!(splits(512, 64, 264), 1);
        assert_eq!(splits(1, 1024, 264), MAX_SPLITS);
    }

    #[test]
    fn decode_blocks_fill_the_device() {
        let heads = |dim| Heads { dim, group: 4, codes: false };
        let of = |units, slices, dim| Decode::of(units, slices, heads(dim), &Device::like_h200(227)).unwrap();
        assert_eq!(of(8, 2048, 128), Decode { warps: 8, stages: 3, splits: 16 });
        assert_eq!(of(8, 16, 128), Decode { warps: 8, stages: 3, splits: 2 });
        assert_eq!(of(64, 256, 128), Decode { warps: 8, stages: 3, splits: 2 });
        assert_eq!(of(128, 256, 128), Decode { warps: 8, stages: 3, splits: 1 });
        assert_eq!(of(512, 256, 128), Decode { warps: 4, stages: 3, splits: 1 });
        assert_eq!(of(2, 256, 256), Decode { warps: 4, stages: 3, splits: 64 });
        assert_eq!(of(8, 256, 64).stages, 4);
        let codes = Heads { codes: true, ..heads(128) };
        assert_eq!(Decode::of(8, 256, codes, &Device::like_h200(227)).unwrap().stages, 4);
    }

    /// Shared memory of a block on every supported device.
    const SHARED: usize = 99 << 10;

    #[test]
    fn common_head_dims_fit_into_shared_memory() {
        for (dim, codes) in [64, 80, 96, 128].into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
            assert!(Decode::of(1, 1, Heads { dim, group: 4, codes }, &Device::like_h200(99)).is_some(), "{dim}");
            assert!(prefill_shared(dim, 1, codes) <= SHARED, "{dim}");
        }
    }

    #[test]
    fn warpgroup_tiles_fit_where_they_are_taken() {
        assert!(wgmma_shared(128) <= 227 << 10);
        assert!(wgmma_shared(256) <= 227 << 10);
        assert!(wgmma_shared(128) > SHARED);
    }
}
