//! Products with coded weights: few rows of x straight from the codes, more from elements that are decoded to the scratch memory.

use selkie_core::{format::Format, tensor::DType};

use super::{
    Arena, Device, Hazards, SMEM_LEFT_FREE,
    fused::Neighbours,
    pick::{Matrix, Product, SKINNY_ROWS},
    wide,
};
use crate::{
    arguments::{At, CodesDecode, Rows},
    codes::{Layout, TILE, UNIT_WARPS, unit},
    launch::{Address, Launch},
    spec::{File, Spec},
};

/// Most bytes of elements that are decoded at a time.
const DECODED_BYTES: usize = 256 << 20;
/// Bytes of the sums of two turns of most warps and rows of x, and of the barriers.
const SUMS_BYTES: usize = 2 * MOST_WARPS * SKINNY_ROWS * TILE * 4 + 2048;
/// Most warps of a block.
const MOST_WARPS: usize = 16;
/// Fewer warps than this do not keep up with memory.
const FEWEST_WARPS: usize = 12;
/// Warps of a block where it makes no difference: enough to wait for memory.
const WARPS: usize = 16;
/// Bytes of a stage at which a warp's part of a tile is cut, the best first: much shorter copies are slower.
const STAGE_BYTES: [usize; 2] = [3 << 10, 1 << 10];

/// How a block is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    warps: usize,
    /// Warps that share a tile.
    share: usize,
    stages: usize,
    /// Units of a stage.
    depth: usize,
    /// x is copied once, not read with every unit.
    resident: bool,
    /// Dynamic shared memory, in bytes.
    shared: usize,
    blocks: usize,
}

/// Warps that share a tile, and teams of a block. They fix the order of the sums, so they do not depend on the rows of x.
fn teams(tiles: usize, units: usize, most_warps: usize, sms: usize) -> (usize, usize) {
    let each = |share: usize| (1..=most_warps / share).map(move |teams| (share, teams));
    // Units that the busiest multiprocessor takes in the time of its longest warp; few warps wait for their own arithmetic.
    let cost = |share: usize, teams: usize| {
        tiles.div_ceil(sms * teams) * units.div_ceil(share) * (share * teams).max(FEWEST_WARPS)
    };
    let all = (1..=units.min(most_warps)).flat_map(each);
    all.min_by_key(|&(share, teams)| (cost(share, teams), (share * teams).abs_diff(WARPS), teams)).unwrap_or((1, 1))
}

/// Cuts a product of `m` rows of x with `n` rows of codes, if a ring fits. `unit`: elements of one.
fn shape(m: usize, n: usize, layout: &Layout, unit: usize, device: &Device) -> Option<Shape> {
    let tiles = n.div_ceil(TILE);
    // As many as leave room for two stages of one unit and the sums of any number of rows.
    let warps = device.shared.saturating_sub(SMEM_LEFT_FREE + SUMS_BYTES) / (2 * layout.unit_bytes);
    let (share, teams) = teams(tiles, layout.units, warps.clamp(1, MOST_WARPS), device.sms);
    let (warps, blocks) = (share * teams, tiles.min(device.sms));
    let (most, turns) = (layout.units.div_ceil(share), tiles.div_ceil(blocks * teams));
    let x_bytes = 2 * m * (layout.units * unit + 16);
    // The sums of two turns, and the barriers.
    let fixed = SMEM_LEFT_FREE + 2 * warps * m * TILE * 4 + 2048;
    // Slices of at most so many bytes, in at least so many stages.
    let cut = |least: usize, resident: bool, bytes: usize| {
        let depth = most.div_ceil((most * layout.unit_bytes).div_ceil(bytes).min(most));
        let needed = (turns * most.div_ceil(depth)).clamp(2, 16);
        let (stage, x) = (warps * depth * layout.unit_bytes, if resident { x_bytes } else { 0 });
        let room = device.shared.checked_sub(fixed + x)?;
        let stages = (room / stage).min(needed);
        let shared = x + stages * stage;
        (stages >= needed.min(least)).then_some(Shape { warps, share, stages, depth, resident, shared, blocks })
    };
    let ways = [3, 2].into_iter().flat_map(|least| [true, false].map(|resident| (least, resident)));
    let mut cuts = ways.flat_map(|(least, resident)| STAGE_BYTES.map(|bytes| cut(least, resident, bytes)));
    cuts.find_map(|shape| shape)
}

/// How the kernel that reads codes is cut, if it takes the product.
fn cut<B: Address>(p: &Product<B>, device: &Device) -> Option<(Layout, Shape)> {
    let (layout, unit) = (Layout::of(p.w.format, p.k())?, unit(p.w.format)?);
    if !(device.tuned && p.m() <= SKINNY_ROWS && wide(&[&p.op.x])) {
        return None;
    }
    Some((layout, shape(p.m(), p.n(), &layout, unit, device)?))
}

/// Whether the product is computed from the codes.
pub(super) fn takes<B: Address>(p: &Product<B>, device: &Device) -> bool {
    cut(p, device).is_some()
}

/// Whether `n` rows are loaded with the evict-first policy. As for plain weights: those that exceed the L2, but not by far.
pub(super) fn evict_first(layout: &Layout, n: usize, device: &Device) -> bool {
    let bytes = layout.bytes(n);
    bytes > (device.sms * 400) << 10 && bytes <= 256 << 20
}

/// The product of few rows of x, and its neighbours, straight from the codes.
pub(super) fn launch<B: Address>(
    p: &Product<B>,
    neighbours: &Neighbours<B>,
    device: &Device,
    hazards: &Hazards,
) -> Option<Launch> {
    let (layout, shape) = cut(p, device).filter(|(_, shape)| shape.resident || neighbours.is_none())?;
    let spec = Spec::new(File::MatmulCodes)
        .int("FORMAT", layout.format)
        .int("K", p.k())
        .int("M", p.m())
        .int("WARPS", shape.warps)
        .int("SHARE", shape.share)
        .int("STAGES", shape.stages)
        .int("DEPTH", shape.depth)
        .flag("X_RESIDENT", shape.resident)
        .flag("EVICT_FIRST", evict_first(&layout, p.n(), device));
    let spec = neighbours.constants(spec, p);
    let launch = Launch::new(spec, [shape.blocks, 1, 1], 32 * shape.warps, &neighbours.arguments(p, hazards));
    Some(launch.with_shared(shape.shared))
}

/// Rows that are decoded at a time.
fn rows_at_once(k: usize, dtype: DType) -> usize {
    (DECODED_BYTES / (k * dtype.bytes()) / TILE * TILE).max(TILE)
}

/// Bytes of the scratch memory for decoded elements.
pub(super) fn decoded_bytes(n: usize, k: usize, dtype: DType) -> u64 {
    (n.min(rows_at_once(k, dtype)) * k * dtype.bytes()) as u64
}

/// The rows of `w` as elements of a dtype, in parts that take turns in the scratch memory, each with the kernel that decodes it.
pub(super) fn decoded(w: &Matrix, k: usize, dtype: DType, arena: &Arena) -> Vec<(Launch, Matrix)> {
    let layout = Layout::of(w.format, k).expect("rows of codes");
    let at_once = rows_at_once(k, dtype);
    let part = |first: usize| {
        let rows = at_once.min(w.rows - first);
        let spec = Spec::new(File::CodesDecode).int("FORMAT", layout.format).int("K", k).ty("out_t", dtype);
        let args = CodesDecode {
            w: At(w.at + layout.bytes(first) as u64),
            n: rows as u64,
            out: Rows { at: arena.scratch, stride: k as u64 },
        };
        let blocks = (rows.div_ceil(TILE) * layout.units).div_ceil(UNIT_WARPS);
        let elements = Matrix { at: arena.scratch, stride: k, dtype, format: Format::Plain, rows, col: w.col + first };
        (Launch::new(spec, [blocks, 1, 1], 32 * UNIT_WARPS, &args), elements)
    };
    (0..w.rows).step_by(at_once).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_into_shared_memory() {
        for shared in [99, 163, 227] {
            let device = Device::like_h200(shared);
            for format in Format::CODED.into_iter().chain(Format::SCALED) {
                for (n, k) in [(18560, 4096), (4096, 21504), (768, 768), (2048, 2048), (100, 1024), (64, 256)] {
                    let unit = unit(format).expect("a coded format");
                    let layout = Layout::of(format, k).expect("a coded format");
                    for m in 1..=SKINNY_ROWS {
                        let f = shape(m, n, &layout, unit, &device).expect("a common shape");
                        let fixed = 2 * f.warps * m * TILE * 4 + 2048;
                        assert!(f.shared + fixed <= device.shared, "{} {m} x {n} x {k}: {f:?}", format.name());
                        assert!(f.stages >= 2 && f.warps.is_multiple_of(f.share) && f.share <= layout.units);
                        // The order of the sums is the same for all numbers of rows.
                        let one = shape(1, n, &layout, unit, &device).expect("a common shape");
                        assert_eq!((f.share, f.warps), (one.share, one.warps));
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_are_shared_evenly() {
        // Tiles, units, warps that share a tile, teams.
        for (tiles, units, share, of) in [
            (1160, 16, 16, 1),
            (256, 84, 14, 1),
            (8192, 16, 16, 1),
            (128, 3, 3, 4),
            (6272, 3, 1, 16),
            (168, 29, 15, 1),
            (5, 1, 1, 12),
        ] {
            assert_eq!(teams(tiles, units, MOST_WARPS, 132), (share, of), "{tiles} tiles of {units}");
        }
    }

    #[test]
    fn large_matrices_are_decoded_in_parts() {
        let w = Matrix { at: 1 << 40, stride: 0, dtype: DType::U8, format: Format::Q4K, rows: 131_072, col: 7 };
        let parts = decoded(&w, 4096, DType::Bf16, &Arena { scratch: 1 << 50, ..Arena::default() });
        let cut: Vec<(usize, usize)> = parts.iter().map(|(_, m)| (m.col, m.rows)).collect();
        assert_eq!(cut, [(7, 32_768), (32_775, 32_768), (65_543, 32_768), (98_311, 32_768)]);
        assert_eq!(decoded_bytes(131_072, 4096, DType::Bf16), 256 << 20);
        assert_eq!(decoded_bytes(100, 4096, DType::F32), 100 * 4096 * 4);
    }
}
