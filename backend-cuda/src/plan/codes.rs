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
    codes::{Layout, SPAN, TILE, UNIT_WARPS},
    launch::{Address, Launch},
    spec::{File, Spec},
};

/// Most bytes of elements that are decoded at a time.
const DECODED_BYTES: usize = 256 << 20;
/// Bytes of the barriers and of the sums of x.
const FIXED_BYTES: usize = 10 << 10;
/// Most warps of a block.
const MOST_WARPS: usize = 16;
/// Fewer warps than this do not keep up with memory.
const FEWEST_WARPS: usize = 12;

/// How a block is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    warps: usize,
    stages: usize,
    /// x is copied once, not read with every span.
    resident: bool,
    /// Dynamic shared memory, in bytes.
    shared: usize,
    blocks: usize,
}

/// Cuts a product of `m` rows of x with `n` rows of codes, if a ring fits.
fn shape(m: usize, n: usize, layout: &Layout, device: &Device) -> Option<Shape> {
    let (spans, span_bytes) = (layout.spans(), layout.span_bytes());
    let x_bytes = |m: usize, resident: bool| if resident { 2 * m * (spans * SPAN + 16) } else { 0 };
    let tile_bytes = |m: usize| m * TILE * 4;
    // The sums of a block's tiles take at most a third of the shared memory.
    let most_tiles = (device.shared / 3 / tile_bytes(SKINNY_ROWS)).saturating_sub(MOST_WARPS).max(1);
    let tiles = n.div_ceil(TILE);
    let blocks = tiles.min(device.sms * tiles.div_ceil(device.sms * most_tiles));
    let own = tiles.div_ceil(blocks);
    // Only kernels that start early need room for those before them.
    let fixed = FIXED_BYTES + if device.bulk_copies { SMEM_LEFT_FREE } else { 0 };
    let stages = |m: usize, warps: usize, resident: bool| {
        let room = device.shared.saturating_sub(fixed + (warps + own) * tile_bytes(m) + x_bytes(m, resident));
        room / (warps * span_bytes)
    };
    // How warps share the tiles does not depend on the rows of x: as many as have rings of two stages next to any x, if that leaves enough
    // of them; else next to one row, which is always in shared memory, and to none of the most.
    let with_any = |warps: &usize| stages(SKINNY_ROWS, *warps, true) >= 2;
    let with_one = |warps: &usize| stages(1, *warps, true) >= 2 && stages(SKINNY_ROWS, *warps, false) >= 2;
    let warps = (FEWEST_WARPS..=MOST_WARPS).rev().find(with_any);
    let warps = warps.or_else(|| (1..=MOST_WARPS).rev().find(with_one))?;
    let needed = (own * spans).div_ceil(warps).clamp(2, 16);
    let resident = m == 1 || stages(m, warps, true) >= 2;
    let stages = stages(m, warps, resident).min(needed);
    let shared = x_bytes(m, resident) + warps * stages * span_bytes + (warps + own) * tile_bytes(m);
    Some(Shape { warps, stages, resident, shared, blocks })
}

/// How the kernel that reads codes is cut, if it takes the product.
fn cut<B: Address>(p: &Product<B>, device: &Device) -> Option<(Layout, Shape)> {
    let layout = Layout::of(p.w.format, p.k())?;
    if !(device.tuned && p.m() <= SKINNY_ROWS && wide(&[&p.op.x])) {
        return None;
    }
    Some((layout, shape(p.m(), p.n(), &layout, device)?))
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
        .int("STAGES", shape.stages)
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
                for (n, k) in
                    [(18560, 4096), (4096, 21504), (262_144, 2048), (768, 768), (2048, 2048), (100, 1024), (64, 256)]
                {
                    let layout = Layout::of(format, k).expect("a coded format");
                    for m in 1..=SKINNY_ROWS {
                        let f = shape(m, n, &layout, &device).expect("a common shape");
                        assert!(f.shared + FIXED_BYTES <= device.shared, "{} {m} x {n} x {k}: {f:?}", format.name());
                        assert!(f.stages >= 2 && (m > 1 || f.resident));
                        // Warps share the tiles alike for all numbers of rows.
                        let one = shape(1, n, &layout, &device).expect("a common shape");
                        assert_eq!((f.warps, f.blocks), (one.warps, one.blocks));
                    }
                }
            }
        }
    }

    #[test]
    fn rings_are_deep_enough() {
        let device = Device::like_h200(227);
        for (format, m, n, k, warps, stages, blocks) in [
            (Format::Q4K, 1, 18560, 4096, 16, 5, 132),
            (Format::Q4K, 8, 18560, 4096, 16, 3, 132),
            (Format::Q4K, 1, 4096, 21504, 16, 4, 132),
            (Format::Q8_0, 1, 4096, 21504, 16, 2, 132),
            (Format::Nvfp4, 1, 131_072, 4096, 16, 5, 132),
            (Format::Q6K, 1, 262_144, 2048, 14, 4, 132),
        ] {
            let f = shape(m, n, &Layout::of(format, k).expect("a coded format"), &device).expect("a common shape");
            assert_eq!((f.warps, f.stages, f.blocks), (warps, stages, blocks), "{} {m} x {n} x {k}", format.name());
            assert!(f.resident);
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
