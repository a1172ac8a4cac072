//! Products of one or two rows of x: every warp streams rows of W through a ring of its own.

use super::{
    Device, Hazards, SMEM_LEFT_FREE,
    fused::Neighbours,
    pick::{Product, evict_first},
};
use crate::{
    launch::{Address, Launch},
    spec::{File, Spec},
};

/// How a warp streams W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    warps: usize,
    stages: usize,
    /// Elements of a stage.
    depth: usize,
    /// The warps of a block share its rows.
    split: bool,
    /// Rows of W that a warp multiplies at a time.
    rows: usize,
    /// Dynamic shared memory, in bytes.
    shared: usize,
}

/// Warps of a block whose warps have rows of their own.
const WARPS: usize = 8;
/// Most warps that share rows.
const MOST_SHARING_WARPS: usize = 16;
/// Elements of a row that one tensor-core operand holds.
const OPERAND: usize = 256;
/// Operands of a stage: 4 KiB. Copies of 2 KiB and less are slower; with larger ones a warp asks for the next one later.
const STAGE_OPERANDS: usize = 8;
/// Inner dimension from which the warps of a block share its rows: there are too few rows for a warp each, and a warp's part of
/// a row is still long.
const SPLIT_FROM: usize = 16384;
/// Bytes of W per multiprocessor from which uneven tiles cost more than the start of larger blocks, measured on an H200.
const NEARLY_LONG: usize = 300 << 10;
/// The same if the last slices of tiles are short too.
const NEARLY_LONG_RAGGED: usize = 220 << 10;

impl Shape {
    /// Blocks for `n` rows of W: the fewest that need no more turns, so that all have as many rows and end together.
    fn blocks(&self, n: usize, sms: usize) -> usize {
        let sets = if self.split { 1 } else { self.warps };
        let turns = n.div_ceil(n.div_ceil(WARPS).min(sms) * sets);
        n.div_ceil(turns * sets)
    }
}

/// Cuts `n` rows of W for `m` rows of x, if x fits. Long rows are shared where three of them fit next to x.
fn shape(m: usize, k: usize, n: usize, device: &Device) -> Option<Shape> {
    let shared = if k >= SPLIT_FROM { cut(m, k, n, true, device) } else { None };
    shared.or_else(|| cut(m, k, n, false, device))
}

/// [`shape`] with rows shared or not.
fn cut(m: usize, k: usize, n: usize, split: bool, device: &Device) -> Option<Shape> {
    let operands = k.div_ceil(OPERAND);
    let warps = if split { sharing_warps(operands) } else { WARPS };
    let x_bytes = 2 * m * operands * OPERAND;
    // Before such long rows comes another GEMV whose own shared memory already prevents co-residency: less is left free.
    let left_free = if split { SMEM_LEFT_FREE / 2 } else { SMEM_LEFT_FREE };
    let room = device.shared.checked_sub(left_free + 4096 + x_bytes)? / warps;
    let (share, per_warp) = if split {
        (operands.div_ceil(warps), n.div_ceil(device.sms))
    } else {
        (operands, n.div_ceil(device.sms * warps))
    };
    // In stages of `piece` operands, if at least `least` stages fit, or all that a warp needs.
    let in_stages = |piece: usize, least: usize| {
        let depth = OPERAND * piece;
        let needed = per_warp * share.div_ceil(piece);
        let fit = (room / (2 * depth)).min(16);
        // If all weights arrive before x, the time per row is the latency of one row: several are multiplied at once.
        let at_once = if !split && piece == share { [4, 2].as_slice() } else { &[] };
        let rows = at_once.iter().copied().find(|&r| r <= needed && 2 * r <= fit).unwrap_or(1);
        let stages = fit.min(needed.next_multiple_of(rows)) / rows * rows;
        let shared = x_bytes + warps * stages * 2 * depth;
        (stages >= needed.min(least)).then_some(Shape { warps, stages, depth, split, rows, shared })
    };
    if split {
        return in_stages(share, 3);
    }
    // Whole rows of up to 8 KiB where two can be multiplied at once or all that a warp has fits; else pieces.
    let whole = if share <= 2 * STAGE_OPERANDS { in_stages(share, 4) } else { None };
    let pieces = |most: usize| in_stages(share.div_ceil(share.div_ceil(most)), 3);
    whole.or_else(|| pieces(STAGE_OPERANDS)).or_else(|| pieces(STAGE_OPERANDS / 2))
}

/// Warps that share rows of so many operands: the number that divides them most evenly.
fn sharing_warps(operands: usize) -> usize {
    let least = operands.div_ceil(MOST_SHARING_WARPS);
    let warps = (least..=least.max(STAGE_OPERANDS)).rev().map(|share| operands.div_ceil(share));
    warps.min_by_key(|warps| operands.next_multiple_of(*warps)).unwrap_or(1)
}

/// Whether a short product is better dealt row by row: its tiles of 16 rows leave many multiprocessors idle in the end, and it is nearly
/// a long one, or their last slices are short and all of W fits into the rings or needs several turns of them.
pub(super) fn prefers_row_dealing(m: usize, k: usize, n: usize, device: &Device) -> bool {
    let (tiles, rows) = (n.div_ceil(16), n.div_ceil(device.sms * WARPS));
    let uneven = tiles > device.sms && 8 * tiles.next_multiple_of(device.sms) > 9 * tiles;
    let ragged = (2048..SPLIT_FROM).contains(&k) && !k.is_multiple_of(if k >= 4096 { 1024 } else { 512 });
    let whole = |s: Shape| s.stages >= rows * k.next_multiple_of(OPERAND).div_ceil(s.depth);
    let exceeds = |limit: usize| 2 * n * k > device.sms * limit;
    let prefers = |s: Shape| exceeds(NEARLY_LONG_RAGGED) || whole(s);
    uneven && (exceeds(NEARLY_LONG) || ragged && shape(m, k, n, device).is_some_and(prefers))
}

/// The launch, if the device has bulk copies and the kernel takes the shape.
pub(super) fn launch<B: Address>(
    p: &Product<B>,
    neighbours: &Neighbours<B>,
    device: &Device,
    hazards: &Hazards,
) -> Option<Launch> {
    let (m, k, n) = (p.m(), p.k(), p.n());
    let shape = shape(m, k, n, device).filter(|_| device.bulk_copies && m <= 2)?;
    let spec = Spec::new(File::Gemv)
        .int("K", k)
        .int("M", m)
        .int("WARPS", shape.warps)
        .int("STAGES", shape.stages)
        .int("DEPTH", shape.depth)
        .flag("SPLIT", shape.split)
        .int("ROWS", shape.rows)
        .flag("EVICT_FIRST", evict_first(n, k, device));
    let spec = neighbours.constants(spec, p);
    let grid = [shape.blocks(n, device.sms), 1, 1];
    Some(Launch::new(spec, grid, 32 * shape.warps, &neighbours.arguments(p, hazards)).with_shared(shape.shared))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_as_measured() {
        let h200 = Device::like_h200(227);
        for (m, n, k, split, warps, stages, depth, rows) in [
            (1, 18560, 4096, false, 8, 6, 2048, 1),
            (1, 131072, 2688, false, 8, 4, 2816, 2),
            (1, 4096, 21504, true, 12, 4, 1792, 1),
            (1, 4096, 16384, true, 8, 5, 2048, 1),
            (1, 6448, 1536, false, 8, 8, 1536, 4),
            (1, 3376, 768, false, 8, 4, 768, 4),
            (1, 2048, 2048, false, 8, 2, 2048, 2),
            (1, 3712, 2688, false, 8, 4, 2816, 2),
            (1, 768, 2048, false, 8, 1, 2048, 1),
            (1, 100, 1000, false, 8, 1, 1024, 1),
            (1, 4096, 24832, true, 14, 3, 1792, 1),
            (2, 4096, 21504, true, 12, 3, 1792, 1),
            // A row of several pieces, and one too long to be shared.
            (1, 8192, 5120, false, 8, 6, 1792, 1),
            (1, 2740, 28680, false, 8, 4, 2048, 1),
            (1, 5120, 49152, false, 8, 3, 2048, 1),
            (2, 8192, 28672, false, 8, 5, 1024, 1),
        ] {
            let f = shape(m, k, n, &h200).expect("a common shape");
            let cut = (f.split, f.warps, f.stages, f.depth, f.rows);
            assert_eq!(cut, (split, warps, stages, depth, rows), "{m} x {n} x {k}");
            assert!(f.shared + 4096 <= h200.shared);
        }
        for (n, k, blocks) in
            [(18560, 4096, 129), (21504, 4096, 128), (4096, 21504, 128), (131072, 4096, 132), (100, 1000, 13)]
        {
            let f = shape(1, k, n, &h200).expect("a common shape");
            assert_eq!(f.blocks(n, h200.sms), blocks, "{n} x {k}");
        }
        assert_eq!(shape(1, 1 << 17, 64, &h200), None);
    }

    /// The shared expert of Nemotron-3-Nano-30B, but not its projections, nor those of Granite-4.0-H-1B; the input of Falcon-H1-7B, but
    /// not the output of Olmo-Hybrid-7B, whose tiles are even; the input of Kimi-Linear's attention, but not its output.
    #[test]
    fn uneven_and_ragged_products_are_dealt_by_rows() {
        let h200 = Device::like_h200(227);
        assert!(prefers_row_dealing(1, 2688, 3712, &h200) && prefers_row_dealing(1, 3712, 2688, &h200));
        assert!(prefers_row_dealing(1, 3072, 6680, &h200) && !prefers_row_dealing(1, 5760, 3840, &h200));
        assert!(prefers_row_dealing(1, 2304, 6720, &h200) && !prefers_row_dealing(1, 4096, 2304, &h200));
        for (n, k) in [(2688, 4096), (4608, 2688), (1536, 4096), (1536, 3072), (6448, 1536)] {
            assert!(!prefers_row_dealing(1, k, n, &h200), "{n} x {k}");
        }
    }
}
