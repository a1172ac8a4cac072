//! Skinny GEMM: products of few rows of x, tiles of 16 rows of W on tensor cores.

use selkie_core::{Error, Result, tensor::DType};

use super::{
    Device, Hazards, SMEM_LEFT_FREE,
    fused::Neighbours,
    pick::{Product, evict_first},
};
use crate::{
    arguments::{MatmulSkinny, OtherProduct, ProductPair},
    launch::{Address, Launch},
    spec::{File, Spec},
};

/// How a block is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    warps: usize,
    stages: usize,
    /// Inner dimension of a slice.
    depth: usize,
    /// x is copied once instead of with every slice.
    pub resident: bool,
    /// Dynamic shared memory, in bytes.
    shared: usize,
    /// Blocks of a multiprocessor.
    blocks: usize,
}

/// Most bytes of an x that is copied once: rings of useful depth fit next to it.
const RESIDENT_BYTES: usize = 68 << 10;

/// Static shared memory of a block: the partial sums of 16 rows of W in two buffers, and barriers of at most `barriers` bytes.
fn static_shared(warps: usize, m: usize, barriers: usize) -> usize {
    2 * warps * m * 16 * 4 + barriers
}

/// How the kernel of every device is cut for `m` rows of x, if one of its cuts fits into `shared` bytes.
pub(super) fn shape(m: usize, k: usize, shared: usize) -> Option<Shape> {
    let warps = if k <= 1024 { 4 } else { 8 };
    let fixed = static_shared(warps, m, 1024);
    // A small x fits next to the rings; the x of one row is cheap to copy again.
    let wants_resident = m > 1 || (4096..=8192).contains(&k);
    // Deep slices where the inner dimension is long, unless the device has too little shared memory for two of them.
    for depth in if k >= 4096 { [128, 64] } else { [64, 64] } {
        let x_bytes = m * (k.next_multiple_of(depth * warps) + 8) * 2;
        for resident in [true, false] {
            if resident && !(wants_resident && x_bytes <= RESIDENT_BYTES && x_bytes * 2 <= shared) {
                continue;
            }
            for stages in [4, 3, 2] {
                let ring = warps * stages * (16 + if resident { 0 } else { 8 }) * (depth + 8) * 2;
                let dynamic = ring + if resident { x_bytes } else { 0 };
                if dynamic + fixed <= shared {
                    let blocks = (shared / (dynamic + fixed)).clamp(1, 4);
                    return Some(Shape { warps, stages, depth, resident, shared: dynamic, blocks });
                }
            }
        }
    }
    None
}

/// The kernel of every device.
pub(super) fn launch<B: Address>(p: &Product<B>, device: &Device) -> Result<Launch> {
    let (m, k, n) = (p.m(), p.k(), p.n());
    let Some(f) = shape(m, k, device.shared) else {
        return Err(Error::Unsupported {
            what: format!("matmul of {m} rows with an inner dimension of {k}"),
            why: format!("its slices do not fit into the {} bytes of shared memory of a block", device.shared),
        });
    };
    let spec = Spec::new(File::MatmulSkinny)
        .int("K", k)
        .int("M", m)
        .int("WARPS", f.warps)
        .int("STAGES", f.stages)
        .int("DEPTH", f.depth)
        .flag("X_RESIDENT", f.resident)
        .flag("ACCUMULATE", p.op.accumulate)
        .flag("HAS_COLUMNS", p.op.columns.is_some())
        .flag("HAS_BIAS", p.op.bias.is_some())
        .ty("out_t", p.out.dtype);
    let args = MatmulSkinny {
        x: (&p.op.x).into(),
        w: p.w.argument(),
        n: n as i32,
        columns: p.columns(),
        bias: p.bias(),
        out: p.out.into(),
        scale: p.op.scale,
    };
    let grid = [n.div_ceil(16).min(device.sms * f.blocks), 1, 1];
    Ok(Launch::new(spec, grid, 32 * f.warps, &args).with_shared(f.shared))
}

/// How the kernel with bulk copies cuts `n` rows of W, if it takes the shape. Warps and depth fix the order of the sums; they
/// depend on the inner dimension only.
fn bulk_shape(m: usize, k: usize, n: usize, device: &Device) -> Option<Shape> {
    let warps = if k <= 1024 { 4 } else { 8 };
    let depth = if k >= 4096 { 128 } else { 64 };
    let span = warps * depth;
    let slices = k.div_ceil(span);
    let x_bytes = m * (slices * span + 8) * 2;
    let resident = x_bytes <= RESIDENT_BYTES;
    if !resident && !k.is_multiple_of(span) {
        return None;
    }
    let tiles = n.div_ceil(16);
    // More than one block per multiprocessor only where all of them fit with everything that they copy.
    let blocks = if k <= 2048 { tiles.div_ceil(device.sms).clamp(1, 4) } else { 1 };
    let fixed = static_shared(warps, m, 2048);
    let stage = (16 + if resident { 0 } else { m }) * (span + 8) * 2;
    let x_shared = if resident { x_bytes } else { 0 };
    let room = (device.shared.checked_sub(SMEM_LEFT_FREE)? / blocks).checked_sub(fixed + x_shared)?;
    let stages = (room / stage).min(tiles.div_ceil(device.sms * blocks) * slices).min(16);
    let shared = stages * stage + x_shared;
    (stages >= 2.min(slices)).then_some(Shape { warps, stages, depth, resident, shared, blocks })
}

/// How that kernel cuts two products, a tile a block.
fn pair_shape(m: usize, k: usize, device: &Device) -> Option<Shape> {
    let f = bulk_shape(m, k, 1, device)?;
    let room = device.shared.checked_sub(SMEM_LEFT_FREE)?;
    Some(Shape { blocks: (room / (f.shared + static_shared(f.warps, m, 2048))).min(4), ..f })
}

/// Whether it computes products with so many rows of W at once: all blocks run at the same time.
pub(super) fn fits_pair(m: usize, k: usize, n: [usize; 2], device: &Device) -> bool {
    let tiles: usize = n.iter().map(|n| n.div_ceil(16)).sum();
    pair_shape(m, k, device).is_some_and(|f| f.resident && tiles <= device.sms * f.blocks)
}

/// The kernel with bulk copies, if the device has them and it takes the shape.
pub(super) fn bulk<B: Address>(
    p: &Product<B>,
    neighbours: &Neighbours<B>,
    device: &Device,
    hazards: &Hazards,
) -> Option<Launch> {
    let (m, k, n, pair) = (p.m(), p.k(), p.n(), neighbours.pair());
    let takes = |f: &Shape| device.bulk_copies && (f.resident || neighbours.is_none());
    let shape = if pair.is_some() { pair_shape(m, k, device) } else { bulk_shape(m, k, n, device) };
    let f = shape.filter(takes)?;
    let spec = Spec::new(File::MatmulSkinnyBulk)
        .int("K", k)
        .int("M", m)
        .int("WARPS", f.warps)
        .int("STAGES", f.stages)
        .int("DEPTH", f.depth)
        .flag("X_RESIDENT", f.resident)
        .flag("PAIR", pair.is_some())
        .flag("EVICT_FIRST", evict_first(n, k, device))
        .ty("pair_t", pair.map_or(DType::F32, |other| other.out.dtype));
    let spec = neighbours.constants(spec, p);
    let other = OtherProduct {
        pair_x: pair.map(|other| &other.x).into(),
        pair_w: pair.and_then(|other| other.w.blocks.first()).map(|block| &block.w).into(),
        pair_n: pair.map_or(0, |other| other.w.n as i32),
        pair_out: pair.map(|other| &other.out).into(),
    };
    let args = ProductPair { product: neighbours.arguments(p, hazards), other };
    let tiles = |n: usize| n.div_ceil(16);
    let blocks = match pair {
        Some(other) => tiles(n) + tiles(other.w.n),
        None => tiles(n).min(device.sms * f.blocks),
    };
    Some(Launch::new(spec, [blocks, 1, 1], 32 * (f.warps + 1), &args).with_shared(f.shared))
}

#[cfg(test)]
mod tests {
    use super::{super::pick::SKINNY_ROWS, *};

    #[test]
    fn blocks_fit_into_shared_memory() {
        for shared in [99 << 10, 163 << 10, 227 << 10] {
            for k in [768, 2048, 4096, 8192, 21504] {
                for m in 1..=SKINNY_ROWS {
                    let f = shape(m, k, shared).expect("a common shape");
                    assert!(f.shared + 2 * f.warps * m * 64 <= shared, "{m} x {k}: {f:?}");
                }
            }
        }
        let h200 = Device::like_h200(227);
        for (n, k) in [(18560, 4096), (4096, 21504), (768, 768), (2048, 2048), (3376, 768), (100, 1000), (2688, 1856)] {
            for m in 1..=SKINNY_ROWS {
                let f = bulk_shape(m, k, n, &h200).expect("a common shape");
                assert!(f.blocks * (f.shared + 2 * f.warps * m * 64 + 2048) <= h200.shared, "{m} x {n} x {k}: {f:?}");
            }
        }
        assert!(shape(8, 4096, 227 << 10).is_some_and(|f| f.resident));
        assert!(shape(8, 21504, 227 << 10).is_some_and(|f| !f.resident));
        assert_eq!(shape(8, 4096, 8 << 10), None);
    }
}
