//! Products of many pairs of token and choice: sorted by expert, multiplied in tiles on tensor cores, summed over the choices.

use selkie_core::{
    ops::{Activation, ExpertMatmul, RowBlock},
    tensor::DType,
};

use super::{Arena, Device, SMEM_LEFT_FREE, act, experts::in_one_block, same_view, vector, wide};
use crate::{
    arguments::{self, At, Rows},
    codes::{Layout, TILE},
    launch::{Address, Launch, Work, address},
    spec::{File, Spec},
};

/// Fewer pairs than this are cheaper one by one.
pub(super) const FEW_PAIRS: usize = 32;

/// Pairs from which on warpgroup products are faster.
const WARPGROUP_PAIRS: usize = 64;

/// Rows of w in a tile of warpgroup products, as in `expert_wgmma.cu`.
const WARPGROUP_ROWS: usize = 256;
/// Stages of their ring.
const WARPGROUP_STAGES: usize = 4;

/// The kernel of the products, and the most pairs of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `expert_grouped.cu`.
    Warps(usize),
    /// `expert_wgmma.cu`.
    Warpgroups(usize),
    /// `expert_grouped_codes.cu`.
    Codes(usize),
    /// `expert_ring_codes.cu`.
    Ring(usize),
}

impl Form {
    /// Chosen by the numbers of pairs and experts.
    fn of(pairs: usize, experts: usize, warpgroups: bool) -> Self {
        let mean = pairs / experts;
        if warpgroups && pairs >= WARPGROUP_PAIRS {
            // Tiles that most experts fill with all their pairs, or with half of them.
            return Self::Warpgroups(if mean <= 112 { 128 } else { 160 });
        }
        Self::Warps(match mean {
            0..=12 => 16,
            13..=64 => 64,
            _ => 128,
        })
    }

    /// The form for coded weights; `ring`: whether the kernel whose codes arrive at memory speed takes tiles of so many pairs. Operands of
    /// the other form leave registers for the sums of 64 pairs.
    fn of_codes(pairs: usize, experts: usize, ring: impl Fn(usize) -> bool) -> Self {
        match pairs / experts {
            0..=3 if ring(8) => Self::Ring(8),
            0..=12 if ring(16) => Self::Ring(16),
            0..=12 => Self::Codes(16),
            _ => Self::Codes(64),
        }
    }

    /// Most pairs of a tile.
    fn pairs(self) -> usize {
        match self {
            Self::Warps(pairs) | Self::Warpgroups(pairs) | Self::Codes(pairs) | Self::Ring(pairs) => pairs,
        }
    }

    /// Stages of the ring, and shared memory of a block.
    fn shared(self) -> (usize, usize) {
        match self {
            Self::Warps(pairs) => {
                let stages = if pairs == 16 { 4 } else { 3 };
                (stages, stages * (pairs + 128) * 72 * 2)
            }
            Self::Codes(pairs) => (4, 4 * pairs * 80 * 2),
            // Cut by the format, see `Ring`.
            Self::Ring(_) => (0, 0),
            // Two warpgroups store 32 pairs of 128 columns at a time; tiles begin at a multiple of 1024 bytes.
            Self::Warpgroups(pairs) => {
                let ring = WARPGROUP_STAGES * (WARPGROUP_ROWS + pairs) * 128;
                (WARPGROUP_STAGES, ring + 2 * 32 * 128 * 2 + 1024)
            }
        }
    }
}

/// Bytes of codes that are copied at a time, if a unit of them is not larger.
const RING_STAGE: usize = 3 << 10;
/// Bytes of a tile of which a warp takes at least so many, if it shares the tile.
const RING_SHARE: usize = 8 << 10;

/// How `expert_ring_codes.cu` is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ring {
    warps: usize,
    /// Warps that share a tile.
    share: usize,
    /// Units of a stage.
    depth: usize,
    stages: usize,
    /// Dynamic shared memory.
    shared: usize,
}

impl Ring {
    /// For rows of this layout and tiles of `pairs` pairs, in `parts` halves, if two stages fit.
    fn of(layout: &Layout, pairs: usize, parts: usize, device: &Device) -> Option<Self> {
        // As many as have registers for the sums.
        let warps = if pairs > 8 { 12 } else { 16 };
        let share = if layout.tile_bytes() >= 2 * RING_SHARE { 2 } else { 1 };
        let most = (RING_STAGE / layout.unit_bytes).clamp(1, layout.units.div_ceil(share));
        // The sums of a tile's second half, twice, and barriers.
        let sums = 2 * (warps / 2) * parts * pairs / 8 * 512 + 4096;
        let room = device.shared.checked_sub(SMEM_LEFT_FREE + sums)? / warps;
        let cut = |depth: usize| {
            let stage = depth * layout.unit_bytes;
            let stages = (room / stage).min(16);
            (stages >= 2).then_some(Self { warps, share, depth, stages, shared: warps * stages * stage })
        };
        (1..=most).rev().find_map(cut)
    }
}

/// The one block of weights and the form of the products, if they are grouped.
pub(super) fn form<'a, B: Address>(a: &'a ExpertMatmul<B>, device: &Device) -> Option<(&'a RowBlock<B>, Form)> {
    let (experts, block) = in_one_block(a)?;
    let pairs = a.ids.len();
    let grouped = device.tuned && pairs >= FEW_PAIRS && a.x.row_len().is_multiple_of(8) && wide(&[&a.x]);
    if let Some(layout) = Layout::of(block.format, a.x.row_len()) {
        let ring = |pairs| device.bulk_copies && Ring::of(&layout, pairs, 2, device).is_some();
        return grouped.then(|| (block, Form::of_codes(pairs, experts, ring)));
    }
    let fits = grouped && wide(&[&block.w]);
    let stores = a.out.row_len().is_multiple_of(8) && (a.combine.is_some() || wide(&[&a.out]));
    fits.then(|| (block, Form::of(pairs, experts, device.wgmma && stores)))
}

/// Bytes of the tables of `expert_sort.cu`: those of the tiles, and all.
fn tables<B: Address>(a: &ExpertMatmul<B>) -> (usize, usize) {
    let experts: usize = a.experts.iter().map(|r| r.experts).sum();
    let pairs = a.ids.len();
    // An expert's last tile may hold one pair, and no tile is smaller than 8.
    let tiles = 16 * (1 + pairs / 8 + pairs.min(experts));
    (tiles, (tiles + 4 * pairs).next_multiple_of(256))
}

/// The tables, and the products of all pairs before they are combined.
pub(super) fn scratch<B: Address>(a: &ExpertMatmul<B>) -> u64 {
    let products = if a.combine.is_some() { 4 * a.ids.len() * a.out.row_len() } else { 0 };
    (tables(a).1 + products) as u64
}

/// The address of the products before they are combined.
pub(super) fn products<B: Address>(a: &ExpertMatmul<B>, arena: &Arena) -> u64 {
    arena.scratch + tables(a).1 as u64
}

fn table_args<B: Address>(a: &ExpertMatmul<B>, arena: &Arena) -> (At, At) {
    (At(arena.scratch), At(arena.scratch + tables(a).0 as u64))
}

/// Writes the tables.
pub(super) fn sort<B: Address>(a: &ExpertMatmul<B>, form: Form, arena: &Arena) -> Work {
    let experts: usize = a.experts.iter().map(|r| r.experts).sum();
    let spec = Spec::new(File::ExpertSort).int("E", experts).int("TOP", a.ids.row_len()).int("BM", form.pairs());
    let (tiles, order) = table_args(a, arena);
    let args = arguments::ExpertSort { ids: (&a.ids).into(), pairs: a.ids.len() as u32, tiles, order };
    Work::Kernel(Launch::new(spec, [1, 1, 1], 1024, &args))
}

/// The products of the pairs in the tables, to `out` of the dtype, and the activation after them in the forms that compute it.
/// `sorted`: a kernel lies between the one that writes the tables and this one.
pub(super) fn multiply<B: Address>(
    a: &ExpertMatmul<B>,
    (block, form): (&RowBlock<B>, Form),
    (out, out_t): (Rows, DType),
    then: Option<&Activation<B>>,
    sorted: bool,
    device: &Device,
    arena: &Arena,
) -> Work {
    let (k, n, top, experts) = (a.x.row_len(), a.out.row_len(), a.ids.row_len(), block.w.rows());
    let (stages, shared) = form.shared();
    let (tiles, order) = table_args(a, arena);
    // Both forms whose blocks of threads take 128 columns and `bm` pairs.
    let constants = |spec: Spec, bm: usize| {
        spec.int("K", k)
            .int("N", n)
            .int("BM", bm)
            .int("STAGES", stages)
            .int("TOP", top)
            .flag("X_PER_PAIR", a.combine.is_some())
            .ty("out_t", out_t)
    };
    let grid = |bm: usize| [n.div_ceil(128), a.ids.len().div_ceil(bm) + experts.min(a.ids.len()), 1];
    let launch = match form {
        Form::Warps(bm) => {
            let args = arguments::ExpertGrouped { x: (&a.x).into(), w: (&block.w).into(), tiles, order, out };
            Launch::new(constants(Spec::new(File::ExpertGrouped), bm), grid(bm), 128, &args)
        }
        Form::Codes(bm) => {
            let layout = Layout::of(block.format, k).expect("rows of codes");
            let spec = Spec::new(File::ExpertGroupedCodes).int("FORMAT", layout.format);
            let w = Rows { at: address(&block.w), stride: layout.bytes(n) as u64 };
            let args = arguments::ExpertGroupedCodes { x: (&a.x).into(), w, tiles, order, out };
            Launch::new(constants(spec, bm), grid(bm), 128, &args)
        }
        Form::Ring(pairs) => return ring(a, (block, pairs), (out, out_t), then, sorted, device, arena),
        Form::Warpgroups(columns) => {
            let spec = Spec::new(File::ExpertWgmma)
                .int("K", k)
                .int("N", n)
                .int("BT", columns)
                .int("STAGES", stages)
                .int("TOP", top)
                .int("PARTS", parts(then))
                .flag("X_PER_PAIR", a.combine.is_some())
                .flag("HAS_MID", then.is_some())
                .int("ACT", then.map_or(0, |t| act(t.act)));
            let (x, w, mid) = ((&a.x).into(), (&block.w).into(), then.map(|t| &t.out).into());
            let args = arguments::ExpertWgmma { x, w, tiles, order, out, mid };
            Launch::new(spec, [device.sms, 1, 1], 384, &args)
        }
    };
    Work::Kernel(launch.with_shared(shared))
}

/// Gate and up, or one: the halves of the products that an activation reads.
pub(super) fn parts<B>(then: Option<&Activation<B>>) -> usize {
    if then.is_some_and(|t| t.up.is_some()) { 2 } else { 1 }
}

/// As [`multiply`], from codes, for tiles of at most `pairs` pairs.
fn ring<B: Address>(
    a: &ExpertMatmul<B>,
    (block, pairs): (&RowBlock<B>, usize),
    (out, out_t): (Rows, DType),
    then: Option<&Activation<B>>,
    sorted: bool,
    device: &Device,
    arena: &Arena,
) -> Work {
    let (k, n) = (a.x.row_len(), a.out.row_len());
    let layout = Layout::of(block.format, k).expect("rows of codes");
    let parts = parts(then);
    let cut = Ring::of(&layout, pairs, parts, device).expect("a ring that fits");
    let (tiles, order) = table_args(a, arena);
    let spec = Spec::new(File::ExpertRingCodes)
        .int("FORMAT", layout.format)
        .int("K", k)
        .int("N", n)
        .int("BM", pairs)
        .int("WARPS", cut.warps)
        .int("SHARE", cut.share)
        .int("STAGES", cut.stages)
        .int("DEPTH", cut.depth)
        .int("TOP", a.ids.row_len())
        .int("PARTS", parts)
        .flag("X_PER_PAIR", a.combine.is_some())
        .flag("HAS_MID", then.is_some())
        .int("ACT", then.map_or(0, |t| act(t.act)))
        .ty("out_t", out_t)
        .ty("mid_t", then.map_or(DType::F32, |t| t.out.dtype));
    let args = arguments::ExpertRingCodes {
        x: (&a.x).into(),
        w: Rows { at: address(&block.w), stride: layout.bytes(n) as u64 },
        tiles,
        order,
        out,
        mid: then.map(|t| &t.out).into(),
        tables_complete: u32::from(sorted),
    };
    let launch = Launch::new(spec, [device.sms, 1, 1], 32 * cut.warps, &args);
    Work::Kernel(launch.with_shared(cut.shared))
}

/// The sum over the choices of the products, which have the dtype `product`.
pub(super) fn combine<B: Address>(a: &ExpertMatmul<B>, product: DType, arena: &Arena) -> Option<Work> {
    let weights = a.combine.as_ref()?;
    let n = a.out.row_len();
    let vec = vector(n, &[&a.out]).min(4);
    let spec = Spec::new(File::ExpertCombine)
        .int("VEC", vec)
        .int("N", n)
        .int("TOP", a.ids.row_len())
        .flag("ACCUMULATE", a.accumulate)
        .ty("product_t", product)
        .ty("out_t", a.out.dtype);
    let args = arguments::ExpertCombine {
        products: At(products(a, arena)),
        ids: (&a.ids).into(),
        weights: weights.into(),
        out: (&a.out).into(),
        scale: a.scale,
    };
    Some(Work::Kernel(Launch::new(spec, [a.ids.rows(), n.div_ceil(256 * vec), 1], 256, &args)))
}

/// Whether the kernel of `a` may compute the activation after it too, and the second half be computed from the same tables.
pub(super) fn may_fuse<B: Address>(a: &ExpertMatmul<B>, device: &Device) -> bool {
    a.combine.is_none() && matches!(form(a, device), Some((_, Form::Warpgroups(_) | Form::Ring(_))))
}

/// The first half with the activation that reads all of it, as one kernel after the sort.
pub(super) fn with_activation<B: Address>(
    a: &ExpertMatmul<B>,
    then: &Activation<B>,
    device: &Device,
    arena: &Arena,
) -> Option<Vec<Work>> {
    let form = form(a, device)?;
    let fits = match form.1 {
        Form::Warpgroups(_) => wide(&[&then.out]) && then.out.row_len().is_multiple_of(8),
        Form::Ring(_) => then.up.is_none() || a.out.row_len().is_multiple_of(2 * TILE),
        _ => false,
    };
    let product = || multiply(a, form, ((&a.out).into(), a.out.dtype), Some(then), false, device, arena);
    fits.then(|| vec![sort(a, form.1, arena), product()])
}

/// Both halves with the activation in between, which sort once. `first` are the kernels before the second half.
pub(super) fn both_halves<B: Address>(
    up: &ExpertMatmul<B>,
    mut first: Vec<Work>,
    down: &ExpertMatmul<B>,
    device: &Device,
    arena: &Arena,
) -> Option<Vec<Work>> {
    let (block, with) = form(down, device)?;
    let same = same_view(&up.ids, &down.ids) && form(up, device)?.1 == with && tables(up) == tables(down);
    if !same {
        return None;
    }
    first.extend(second_half(down, (block, with), true, device, arena));
    Some(first)
}

/// The products of the pairs in the tables, combined. `sorted` as in [`multiply`].
pub(super) fn second_half<B: Address>(
    a: &ExpertMatmul<B>,
    form: (&RowBlock<B>, Form),
    sorted: bool,
    device: &Device,
    arena: &Arena,
) -> Vec<Work> {
    let (to, dtype) = match a.combine {
        // Rounded like any activation.
        Some(_) => (Rows { at: products(a, arena), stride: a.out.row_len() as u64 }, DType::Bf16),
        None => (Rows { at: address(&a.out), stride: a.out.row_stride as u64 }, a.out.dtype),
    };
    let mut work = vec![multiply(a, form, (to, dtype), None, sorted, device, arena)];
    work.extend(combine(a, DType::Bf16, arena));
    work
}

#[cfg(test)]
mod tests {
    use selkie_core::format::Format;

    use super::*;

    #[test]
    fn forms_follow_the_load_of_an_expert() {
        assert_eq!(Form::of(10 * 6, 128, true), Form::Warps(16));
        assert_eq!(Form::of(64 * 6, 128, false), Form::Warps(16));
        assert_eq!(Form::of(64 * 6, 128, true), Form::Warpgroups(128));
        assert_eq!(Form::of(512 * 6, 128, false), Form::Warps(64));
        assert_eq!(Form::of(8192 * 6, 128, false), Form::Warps(128));
        assert_eq!(Form::of(512 * 6, 128, true), Form::Warpgroups(128));
        assert_eq!(Form::of(2048 * 8, 256, true), Form::Warpgroups(128));
        assert_eq!(Form::of(2048 * 10, 72, true), Form::Warpgroups(160));
        assert_eq!(Form::of_codes(64 * 10, 512, |_| true), Form::Ring(8));
        assert_eq!(Form::of_codes(64 * 8, 64, |_| true), Form::Ring(16));
        assert_eq!(Form::of_codes(64 * 8, 64, |_| false), Form::Codes(16));
        assert_eq!(Form::of_codes(2048 * 10, 512, |_| true), Form::Codes(64));
    }

    #[test]
    fn rings_fit_into_shared_memory() {
        for format in Format::CODED.into_iter().chain(Format::SCALED) {
            for (k, pairs, parts) in [(2048, 8, 2), (512, 8, 1), (2688, 16, 2), (14_336, 16, 1)] {
                let layout = Layout::of(format, k).expect("a coded format");
                let ring = Ring::of(&layout, pairs, parts, &Device::like_h200(227)).expect("a common shape");
                let sums = if ring.share > 1 {
                    2 * ring.warps / 2 * parts * pairs / 8 * 512
                } else {
                    2 * parts * pairs / 8 * 512
                };
                assert!(
                    ring.shared + sums + 8 * ring.warps * ring.stages <= 227 << 10,
                    "{} {k}: {ring:?}",
                    format.name()
                );
                assert!(ring.share <= layout.units);
                // Less shared memory has two stages at least, or another form.
                let small = Ring::of(&layout, pairs, parts, &Device::like_h200(99));
                assert!(small.is_none_or(|r| r.stages >= 2 && r.shared <= 99 << 10));
            }
        }
    }

    #[test]
    fn tiles_fit_into_shared_memory() {
        assert!([16, 64, 128].iter().all(|&bm| Form::Warps(bm).shared().1 <= 120 << 10));
        // In addition to the barriers, on a device that has warpgroup products.
        assert!([128, 160].iter().all(|&bt| Form::Warpgroups(bt).shared().1 + 128 <= 227 << 10));
    }
}
