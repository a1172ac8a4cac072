//! Products of 9 to 64 rows of x with coded weights, whose elements are decoded in registers for warpgroup products; codes of 8-bit
//! floats are multiplied as they are where x are such codes too.

use selkie_core::format::Format;

use super::{
    Arena, Device, SMEM_LEFT_FREE, codes,
    pick::{Product, SKINNY_ROWS},
    vector, wide,
};
use crate::{
    arguments::{At, MatmulCodesWgmma, Rows},
    codes::{Layout, SPAN},
    launch::{Address, Launch},
    spec::{File, Spec},
};

/// Most rows of x: each has sums in the registers of every warpgroup.
const MOST_ROWS: usize = 64;
/// Most stages of a ring.
const MOST_STAGES: usize = 4;
/// Stages of the ring of x and fewest of a warp's, the best first.
const STAGES: [(usize, usize); 2] = [(3, 3), (2, 2)];
/// Barriers, alignment, scales of x, in bytes; and factors of the spans of a warpgroup.
const FIXED_BYTES: usize = 2048;
const FACTORS_BYTES: usize = 2048;

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Warpgroups that multiply, 64 rows of W each.
    groups: usize,
    stages: usize,
    /// Stages of x.
    x_stages: usize,
    /// Blocks that share each tile evenly, or 1: the spans of all tiles are dealt to the blocks.
    ways: usize,
    /// Dynamic shared memory, in bytes.
    shared: usize,
    blocks: usize,
}

/// Columns of a warpgroup product for `m` rows of x.
fn columns(m: usize) -> usize {
    m.next_multiple_of(16)
}

/// Cuts a product of `m` rows of x, of `width` bytes an element, with `n` rows of codes, if a ring fits.
fn shape([m, width]: [usize; 2], n: usize, layout: &Layout, device: &Device) -> Option<Shape> {
    // With few columns there are registers for one more.
    let groups = if columns(m) <= 32 { 4 } else { 3 };
    let room = device.shared.checked_sub(SMEM_LEFT_FREE + FIXED_BYTES + groups * FACTORS_BYTES)?;
    let (tiles, spans) = (n.div_ceil(64 * groups), layout.spans());
    // Few tiles: as many blocks share each as there are, if all have rows of x to finish and few multiprocessors have no block.
    let ways = (device.sms / tiles).min(columns(m) / 8).min(spans);
    let ways = if ways > 1 && 5 * tiles * ways >= 4 * device.sms { ways } else { 1 };
    // To add the sums of many blocks takes as long as some spans do.
    let least = spans.div_ceil(2).isqrt().max(1);
    let dealt = (tiles * spans / least).clamp(1, device.sms);
    let blocks = if ways > 1 { tiles * ways } else { dealt };
    let cut = |(x_stages, fewest): (usize, usize)| {
        let (x, stage) = (width * x_stages * columns(m) * SPAN, 4 * groups * layout.span_bytes());
        let stages = (room.checked_sub(x)? / stage).min(MOST_STAGES);
        let shared = x + stages * stage + 1024;
        (stages >= fewest).then_some(Shape { groups, stages, x_stages, ways, shared, blocks })
    };
    STAGES.into_iter().find_map(cut)
}

/// How the kernel is cut, if it takes the product. `width`: bytes of an element of x.
fn cut<B: Address>(p: &Product<B>, width: usize, device: &Device) -> Option<(Layout, Shape)> {
    let layout = Layout::of(p.w.format, p.k())?;
    let rows = p.m() > SKINNY_ROWS && p.m() <= MOST_ROWS;
    if !(device.tuned && device.wgmma && rows && wide(&[&p.op.x])) {
        return None;
    }
    Some((layout, shape([p.m(), width], p.n(), &layout, device)?))
}

/// Bytes of sums of pieces of tiles.
fn sums(shape: &Shape, m: usize) -> u64 {
    (shape.blocks * 64 * shape.groups * columns(m) * 4) as u64
}

/// Bytes of the scratch memory for sums of pieces of tiles, if the kernel takes the product.
pub(super) fn scratch<B: Address>(p: &Product<B>, device: &Device) -> Option<u64> {
    Some(sums(&cut(p, 2, device)?.1, p.m()))
}

/// The same of codes of x, whose rows are whole units of W.
pub(super) fn scratch_of_eights<B: Address>(p: &Product<B>, device: &Device) -> Option<u64> {
    let fits = |layout: &Layout| p.w.format == Format::F8 && p.k().is_multiple_of(layout.unit);
    Some(sums(&cut(p, 1, device).filter(|(layout, _)| fits(layout))?.1, p.m()))
}

/// The product, if the kernel takes it.
pub(super) fn launch<B: Address>(p: &Product<B>, device: &Device, arena: &Arena) -> Option<Launch> {
    let x = ((&p.op.x).into(), None);
    Some(launch_with(p, cut(p, 2, device)?, x, arena.scratch, (device, arena)))
}

/// The product of codes of x and their scales, with the sums of pieces at `partial`.
pub(super) fn launch_eights<B: Address>(
    p: &Product<B>,
    [codes, scales]: [u64; 2],
    partial: u64,
    device: &Device,
    arena: &Arena,
) -> Option<Launch> {
    let x = (Rows { at: codes, stride: p.k() as u64 }, Some(scales));
    Some(launch_with(p, cut(p, 1, device)?, x, partial, (device, arena)))
}

fn launch_with<B: Address>(
    p: &Product<B>,
    (layout, shape): (Layout, Shape),
    (x, scales): (Rows, Option<u64>),
    partial: u64,
    (device, arena): (&Device, &Arena),
) -> Launch {
    let spec = Spec::new(File::MatmulCodesWgmma)
        .int("FORMAT", layout.format)
        .int("K", p.k())
        .int("M", p.m())
        .int("GROUPS", shape.groups)
        .int("STAGES", shape.stages)
        .int("X_STAGES", shape.x_stages)
        .int("WAYS", shape.ways)
        .flag("EIGHTS", scales.is_some())
        .flag("FOURS", vector(4, &[p.out]) == 4)
        .flag("EVICT_FIRST", codes::evict_first(&layout, p.n(), device))
        .flag("ACCUMULATE", p.op.accumulate)
        .flag("HAS_COLUMNS", p.op.columns.is_some())
        .flag("HAS_BIAS", p.op.bias.is_some())
        .ty("out_t", p.out.dtype);
    let args = MatmulCodesWgmma {
        x,
        x_scales: At(scales.unwrap_or(0)),
        w: At(p.w.at),
        n: p.n() as i32,
        columns: p.columns(),
        bias: p.bias(),
        out: p.out.into(),
        scale: p.op.scale,
        partial: At(partial),
        tickets: At(arena.tickets),
    };
    Launch::new(spec, [shape.blocks, 1, 1], 128 * (shape.groups + 1), &args).with_shared(shape.shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_into_shared_memory() {
        let device = Device::like_h200(227);
        for format in Format::CODED.into_iter().chain(Format::SCALED) {
            for (n, k) in [(18560, 4096), (4096, 21504), (768, 768), (37, 768), (64, 256)] {
                let layout = Layout::of(format, k).expect("a coded format");
                for (m, width) in (SKINNY_ROWS + 1..=MOST_ROWS).flat_map(|m| [(m, 1), (m, 2)]) {
                    let f = shape([m, width], n, &layout, &device).expect("a common shape");
                    let fixed = FIXED_BYTES + f.groups * FACTORS_BYTES;
                    assert!(f.shared + fixed <= device.shared, "{} {m} x {n} x {k}: {f:?}", format.name());
                    let tiles = n.div_ceil(64 * f.groups);
                    assert!(f.stages >= 2 && (1..=(tiles * layout.spans()).min(device.sms)).contains(&f.blocks));
                    assert!(
                        f.ways == 1
                            || f.ways <= layout.spans() && f.ways <= columns(m) / 8 && f.blocks == tiles * f.ways
                    );
                }
            }
        }
    }
    #[test]
    fn few_tiles_are_shared() {
        let device = Device::like_h200(227);
        let layout = Layout::of(Format::Q4K, 4096).expect("a coded format");
        for (m, n, ways) in [(64, 4096, 6), (64, 18560, 1), (64, 2688, 8), (64, 2048, 1), (16, 13568, 2), (16, 4096, 1)]
        {
            assert_eq!(shape([m, 2], n, &layout, &device).expect("a common shape").ways, ways, "{m} x {n}");
        }
    }
}
