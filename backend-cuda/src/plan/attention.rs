//! Attention: tensor cores for the common head dims, split over the keys for few queries, tiled over the queries for many.

use selkie_core::{Result, ops::Attention, step::PAGE};

use super::{Target, aligned, wide};
use crate::{
    launch::{Address, Args, Launch, Work},
    spec::{File, Spec},
};

/// Most runs that the keys of a query are cut into.
const MAX_SPLITS: usize = 64;

/// What computes an attention op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Any shape: a block per query head.
    Generic { splits: usize },
    /// A block per token and KV head.
    Decode { splits: usize, stages: usize },
    /// A block per tile of tokens and query head.
    Prefill { tiles: usize },
    /// The same with warpgroup products.
    Wgmma,
}

impl Variant {
    fn splits(self) -> usize {
        match self {
            Self::Generic { splits } | Self::Decode { splits, .. } => splits,
            Self::Prefill { .. } | Self::Wgmma => 1,
        }
    }
}

fn decode_shared(head_dim: usize, group: usize, stages: usize) -> usize {
    let ring = 4 * stages * 2 * 16 * (head_dim + 8) * 2;
    ring.max(4 * group * (head_dim + 4 + 2) * 4)
}

fn prefill_shared(head_dim: usize, tiles: usize) -> usize {
    (64 * tiles + 4 * PAGE) * (head_dim + 8) * 2
}

/// Tokens of a tile of the warpgroup kernel, and keys.
const WGMMA_TILE: usize = 128;

/// Queries, two stages of keys and values, and room to start at a multiple of 1024.
fn wgmma_shared(head_dim: usize) -> usize {
    5 * WGMMA_TILE * head_dim * 2 + 1024
}

/// Runs that the keys of a query are cut into, so that `blocks_per_sm` blocks are there for every multiprocessor.
fn splits(units: usize, pages: usize, sms: usize, blocks_per_sm: usize) -> usize {
    (blocks_per_sm * sms / units.max(1)).min(pages).clamp(1, MAX_SPLITS)
}

fn variant<B: Address>(a: &Attention<B>, target: &Target) -> Variant {
    let (hd, tokens, pages) = (a.head_dim, a.step.bucket.tokens, a.step.bucket.pages);
    let (heads, kv_heads) = (a.q.row_len() / hd, a.pool.k.dims()[1]);
    let group = heads / kv_heads;
    let tensor_cores = target.tuned && hd % 16 == 0 && hd <= 256 && wide(&[&a.q, &a.pool.k, &a.pool.v, &a.out]);
    // The largest tile and the deepest ring that fit everywhere; a device with more memory runs two such blocks.
    let tiles = [2, 1].into_iter().find(|&m| (m == 1 || hd <= 128) && prefill_shared(hd, m) <= target.shared);
    let stages = [3, 2].into_iter().find(|&s| decode_shared(hd, group, s) <= target.shared);
    let many = tokens > PAGE && tokens > a.step.bucket.rows;
    if tensor_cores && many && target.wgmma && matches!(hd, 64 | 128) && wgmma_shared(hd) <= target.shared {
        return Variant::Wgmma;
    }
    match (tiles, stages) {
        (Some(tiles), _) if tensor_cores && many => Variant::Prefill { tiles },
        (_, Some(stages)) if tensor_cores && group <= 16 => {
            Variant::Decode { splits: splits(tokens * kv_heads, pages, target.sms, 1), stages }
        }
        _ => Variant::Generic { splits: splits(tokens * heads, pages, target.sms, 8) },
    }
}

pub(super) fn scratch<B: Address>(a: &Attention<B>, target: &Target) -> u64 {
    if variant(a, target).splits() == 1 && a.step.bucket.tokens > 8 * target.sms {
        return 0;
    }
    // Units times splits stays below this for every number of tokens that is split, so a smaller step fits too.
    let heads = a.q.row_len() / a.head_dim;
    ((8 * target.sms).max(2 * target.sms * heads) * (a.head_dim + 4) * 4) as u64
}

pub(super) fn attention<B: Address>(a: &Attention<B>, target: &Target) -> Result<Vec<Work>> {
    aligned("attention", 4, &[&a.q, &a.pool.k, &a.pool.v, &a.out])?;
    let (hd, bucket) = (a.head_dim, &a.step.bucket);
    let (heads, kv_heads) = (a.q.row_len() / hd, a.pool.k.dims()[1]);
    let variant = variant(a, target);
    let file = match variant {
        Variant::Generic { .. } => File::Attention,
        Variant::Decode { .. } => File::AttentionDecode,
        Variant::Prefill { .. } => File::AttentionPrefill,
        Variant::Wgmma => File::AttentionWgmma,
    };
    let spec = Spec::new(file)
        .int("HEAD_DIM", hd)
        .int("HEADS", heads)
        .int("KV_HEADS", kv_heads)
        .int("WINDOW", a.window.map_or(0, |w| w.min(i32::MAX as u32) as usize));
    let args = Args::new().step(&a.step).rows(&a.q).rows(&a.pool.k).rows(&a.pool.v).rows(&a.out);
    let launch = match variant {
        Variant::Generic { splits } => {
            let spec =
                spec.int("SPLITS", splits).ty("q_t", a.q.dtype).ty("kv_t", a.pool.k.dtype).ty("out_t", a.out.dtype);
            let args = args.int(target.scratch).float(a.scale);
            Launch::new(spec, [bucket.tokens, heads, splits], 128, args)
        }
        Variant::Decode { splits, stages } => {
            let spec = spec.int("SPLITS", splits).int("STAGES", stages).ty("out_t", a.out.dtype);
            let args = args.int(target.scratch).float(a.scale);
            Launch::new(spec, [bucket.tokens, kv_heads, splits], 128, args).with_shared(decode_shared(
                hd,
                heads / kv_heads,
                stages,
            ))
        }
        Variant::Prefill { tiles } => {
            let spec = spec.int("MT", tiles);
            let grid = [bucket.tokens.div_ceil(64 * tiles) + bucket.rows, heads, 1];
            Launch::new(spec, grid, 128, args.float(a.scale)).with_shared(prefill_shared(hd, tiles))
        }
        Variant::Wgmma => {
            let grid = [heads, bucket.tokens.div_ceil(WGMMA_TILE) + bucket.rows, 1];
            Launch::new(spec, grid, 384, args.float(a.scale)).with_shared(wgmma_shared(hd))
        }
    };
    let mut work = vec![Work::Kernel(launch)];
    if variant.splits() > 1 {
        let spec = Spec::new(File::AttentionCombine)
            .int("HEAD_DIM", hd)
            .int("HEADS", heads)
            .int("SPLITS", variant.splits())
            .ty("out_t", a.out.dtype);
        let args = Args::new().step(&a.step).int(target.scratch).rows(&a.out);
        work.push(Work::Kernel(Launch::new(spec, [(bucket.tokens * heads).div_ceil(4), 1, 1], 128, args)));
    }
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fill_the_device_and_never_exceed_the_pages() {
        assert_eq!(splits(8, 512, 132, 1), 16);
        assert_eq!(splits(8, 512, 132, 2), 33);
        assert_eq!(splits(8, 4, 132, 2), 4);
        assert_eq!(splits(512, 64, 132, 2), 1);
        assert_eq!(splits(1, 1024, 132, 2), MAX_SPLITS);
    }

    /// Shared memory of a block on every supported device.
    const SHARED: usize = 99 << 10;

    #[test]
    fn common_head_dims_fit_into_shared_memory() {
        for hd in [64, 80, 96, 128] {
            assert!(decode_shared(hd, 4, 2) <= SHARED, "{hd}");
            assert!(prefill_shared(hd, 1) <= SHARED, "{hd}");
        }
    }

    #[test]
    fn warpgroup_tiles_fit_where_they_are_taken() {
        assert!(wgmma_shared(128) <= 227 << 10);
        assert!(wgmma_shared(128) > SHARED);
    }
}
