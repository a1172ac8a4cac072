//! Products of many pairs of token and choice: sorted by expert, multiplied in tiles on tensor cores, summed over the choices.

use selkie_core::{
    format::Format,
    ops::{Activation, ExpertMatmul, RowBlock},
    tensor::DType,
};

use super::{Arena, Device, act, experts::in_one_block, same_view, vector, wide};
use crate::{
    arguments::{self, At, Rows},
    codes::Layout,
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

    /// The form for coded weights, whose operands leave registers for the sums of 64 pairs.
    fn of_codes(pairs: usize, experts: usize) -> Self {
        Self::Codes(if pairs / experts <= 12 { 16 } else { 64 })
    }

    /// Most pairs of a tile.
    fn pairs(self) -> usize {
        match self {
            Self::Warps(pairs) | Self::Warpgroups(pairs) | Self::Codes(pairs) => pairs,
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
            // Two warpgroups store 32 pairs of 128 columns at a time; tiles begin at a multiple of 1024 bytes.
            Self::Warpgroups(pairs) => {
                let ring = WARPGROUP_STAGES * (WARPGROUP_ROWS + pairs) * 128;
                (WARPGROUP_STAGES, ring + 2 * 32 * 128 * 2 + 1024)
            }
        }
    }
}

/// The one block of weights and the form of the products, if they are grouped.
pub(super) fn form<'a, B: Address>(a: &'a ExpertMatmul<B>, device: &Device) -> Option<(&'a RowBlock<B>, Form)> {
    let (experts, block) = in_one_block(a)?;
    let pairs = a.ids.len();
    let grouped = device.tuned && pairs >= FEW_PAIRS && a.x.row_len().is_multiple_of(8) && wide(&[&a.x]);
    if block.format != Format::Plain {
        return grouped.then(|| (block, Form::of_codes(pairs, experts)));
    }
    let fits = grouped && wide(&[&block.w]);
    let stores = a.out.row_len().is_multiple_of(8) && (a.combine.is_some() || wide(&[&a.out]));
    fits.then(|| (block, Form::of(pairs, experts, device.wgmma && stores)))
}

/// Bytes of the tables of `expert_sort.cu`: those of the tiles, and all.
fn tables<B: Address>(a: &ExpertMatmul<B>) -> (usize, usize) {
    let experts: usize = a.experts.iter().map(|r| r.experts).sum();
    let pairs = a.ids.len();
    // An expert's last tile may hold one pair, and no tile is smaller than 16.
    let tiles = 16 * (1 + pairs / 16 + pairs.min(experts));
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

/// The products of the pairs in the tables, to `out` of the dtype, and the activation after them in the form that computes it.
pub(super) fn multiply<B: Address>(
    a: &ExpertMatmul<B>,
    (block, form): (&RowBlock<B>, Form),
    (out, out_t): (Rows, DType),
    then: Option<&Activation<B>>,
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
        Form::Warpgroups(columns) => {
            let spec = Spec::new(File::ExpertWgmma)
                .int("K", k)
                .int("N", n)
                .int("BT", columns)
                .int("STAGES", stages)
                .int("TOP", top)
                .int("PARTS", if then.is_some_and(|t| t.up.is_some()) { 2 } else { 1 })
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
    a.combine.is_none() && matches!(form(a, device), Some((_, Form::Warpgroups(_))))
}

/// The first half with the activation that reads all of it, as one kernel after the sort.
pub(super) fn with_activation<B: Address>(
    a: &ExpertMatmul<B>,
    then: &Activation<B>,
    device: &Device,
    arena: &Arena,
) -> Option<Vec<Work>> {
    let form = form(a, device).filter(|f| matches!(f.1, Form::Warpgroups(_)))?;
    if !(wide(&[&then.out]) && then.out.row_len().is_multiple_of(8)) {
        return None;
    }
    Some(vec![sort(a, form.1, arena), multiply(a, form, ((&a.out).into(), DType::Bf16), Some(then), device, arena)])
}

/// Both halves with the activation in between, which sort once. `first` are the kernels of the first half and the activation.
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
    first.extend(second_half(down, (block, with), device, arena));
    Some(first)
}

/// The products of the pairs in the tables, combined.
pub(super) fn second_half<B: Address>(
    a: &ExpertMatmul<B>,
    form: (&RowBlock<B>, Form),
    device: &Device,
    arena: &Arena,
) -> Vec<Work> {
    let (to, dtype) = match a.combine {
        // Rounded like any activation.
        Some(_) => (Rows { at: products(a, arena), stride: a.out.row_len() as u64 }, DType::Bf16),
        None => (Rows { at: address(&a.out), stride: a.out.row_stride as u64 }, a.out.dtype),
    };
    let mut work = vec![multiply(a, form, (to, dtype), None, device, arena)];
    work.extend(combine(a, DType::Bf16, arena));
    work
}

#[cfg(test)]
mod tests {
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
    }

    #[test]
    fn tiles_fit_into_shared_memory() {
        assert!([16, 64, 128].iter().all(|&bm| Form::Warps(bm).shared().1 <= 120 << 10));
        // In addition to the barriers, on a device that has warpgroup products.
        assert!([128, 160].iter().all(|&bt| Form::Warpgroups(bt).shared().1 + 128 <= 227 << 10));
    }
}
