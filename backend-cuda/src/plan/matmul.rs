//! Linear layers: our own kernel for few rows, cuBLASLt above, a plain f32 kernel for everything else.

use selkie_core::{
    Result,
    ops::{Act, Conv1d, Matmul, RowBlock},
    tensor::{DType, Tensor},
};

use super::{BESIDE, Target, act, wide};
use crate::{
    launch::{Address, Args, Gemm, Launch, Work, address},
    spec::{File, Spec},
};

/// Rows of x up to which our own kernel reads the weight at memory speed.
pub(crate) const FEW: usize = 8;

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Few,
    Library,
    Plain,
}

fn path<B: Address>(a: &Matmul<B>, block: &RowBlock<B>, out: &Tensor<B>, target: &Target) -> Path {
    let inputs = target.tuned && wide(&[&a.x, &block.w]) && a.w.k.is_multiple_of(8);
    let (m, k) = (a.x.rows(), a.w.k);
    // Reading x again with every slice is dear beyond two rows; then the library is faster.
    if inputs && (m <= 2 || m <= FEW && (!target.blas || few_shape(m, k, target.shared).resident)) {
        Path::Few
    } else if inputs
        && target.blas
        // What is there already is added within the library's product, so it would be scaled too.
        && !(a.columns.is_some() && a.accumulate)
        && address(out).is_multiple_of(16)
        && (out.row_stride * out.dtype.bytes()).is_multiple_of(16)
    {
        Path::Library
    } else {
        Path::Plain
    }
}

/// How a block of the kernel for few rows is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewShape {
    warps: usize,
    stages: usize,
    /// Inner dimension of a slice.
    depth: usize,
    /// x is copied once instead of with every slice.
    resident: bool,
    /// Dynamic shared memory.
    shared: usize,
    /// Blocks of a multiprocessor.
    blocks: usize,
}

fn few_shape(m: usize, k: usize, shared: usize) -> FewShape {
    let warps = if k <= 1024 { 4 } else { 8 };
    let fixed = 2 * warps * m * 16 * 4 + 1024;
    // A small x fits beside the rings; the x of one row is cheap to copy again.
    let wants_resident = m > 1 || (4096..=8192).contains(&k);
    // Deep slices where the inner dimension is long, unless the device has too little shared memory for two of them.
    for depth in if k >= 4096 { [128, 64] } else { [64, 64] } {
        let x_bytes = m * (k.next_multiple_of(depth * warps) + 8) * 2;
        for resident in [true, false] {
            if resident && !(wants_resident && x_bytes <= 68 << 10 && x_bytes * 2 <= shared) {
                continue;
            }
            for stages in [4, 3, 2] {
                let ring = warps * stages * (16 + if resident { 0 } else { 8 }) * (depth + 8) * 2;
                let dynamic = ring + if resident { x_bytes } else { 0 };
                if dynamic + fixed <= shared {
                    let blocks = (shared / (dynamic + fixed)).clamp(1, 4);
                    return FewShape { warps, stages, depth, resident, shared: dynamic, blocks };
                }
            }
        }
    }
    panic!("matmul: {m} rows of {k} do not fit into {shared} bytes of shared memory");
}

/// How the kernel with bulk copies cuts `n` rows of W, if it takes the shape. Warps and depth fix the order of the sums and
/// depend on the inner dimension only.
fn bulk_shape(m: usize, k: usize, n: usize, target: &Target) -> Option<FewShape> {
    let warps = if k <= 1024 { 4 } else { 8 };
    let depth = if k >= 4096 { 128 } else { 64 };
    let span = warps * depth;
    let slices = k.div_ceil(span);
    let x_bytes = m * (slices * span + 8) * 2;
    let resident = x_bytes <= 68 << 10;
    if !resident && !k.is_multiple_of(span) {
        return None;
    }
    let tiles = n.div_ceil(16);
    // More blocks than one a multiprocessor only where they all fit with everything that they copy.
    let blocks = if k <= 2048 { tiles.div_ceil(target.sms).clamp(1, 4) } else { 1 };
    let fixed = 2 * warps * m * 16 * 4 + 2048;
    let stage = (16 + if resident { 0 } else { m }) * (span + 8) * 2;
    let room = (target.shared.checked_sub(BESIDE)? / blocks).checked_sub(fixed + if resident { x_bytes } else { 0 })?;
    let stages = (room / stage).min(tiles.div_ceil(target.sms * blocks) * slices).min(16);
    let shared = stages * stage + if resident { x_bytes } else { 0 };
    (stages >= 2.min(slices)).then_some(FewShape { warps, stages, depth, resident, shared, blocks })
}

/// How a warp of the kernel for one or two rows streams W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GemvShape {
    warps: usize,
    stages: usize,
    /// Elements of a stage.
    depth: usize,
    /// The warps of a block share its rows.
    split: bool,
    /// Rows of W that are multiplied side by side.
    rows: usize,
    /// Dynamic shared memory.
    shared: usize,
}

/// Warps of a block of that kernel that have rows of their own, and how many can share them.
const GEMV_WARPS: usize = 8;
const GEMV_MOST_WARPS: usize = 16;
/// Elements of a row that its tensor-core operands hold.
const GEMV_STEP: usize = 256;
/// Operands of a stage: 4 KiB. Copies of 2 KiB and less are slower, and with larger ones a warp asks for the next one later.
const GEMV_STAGE: usize = 8;
/// Inner dimension from which the warps of a block share its rows: there are too few of them for a warp each, and what a warp
/// has of a row is still long.
const GEMV_SPLIT: usize = 16384;

impl GemvShape {
    /// Blocks for `n` rows of W: as few as need no more turns, so that all have as many rows and end together.
    fn blocks(&self, n: usize, sms: usize) -> usize {
        let sets = if self.split { 1 } else { self.warps };
        let turns = n.div_ceil(n.div_ceil(GEMV_WARPS).min(sms) * sets);
        n.div_ceil(turns * sets)
    }
}

/// Cuts `n` rows of W for `m` rows of x, if x fits; long rows are shared where three of them fit beside it.
fn gemv_shape(m: usize, k: usize, n: usize, target: &Target) -> Option<GemvShape> {
    let shared = if k >= GEMV_SPLIT { gemv_cut(m, k, n, true, target) } else { None };
    shared.or_else(|| gemv_cut(m, k, n, false, target))
}

/// The same with rows shared or not.
fn gemv_cut(m: usize, k: usize, n: usize, split: bool, target: &Target) -> Option<GemvShape> {
    let steps = k.div_ceil(GEMV_STEP);
    let warps = if split { gemv_warps(steps) } else { GEMV_WARPS };
    let x_bytes = 2 * m * steps * GEMV_STEP;
    // Ahead of rows that long stands another product, which leaves no room beside it either way.
    let beside = if split { BESIDE / 2 } else { BESIDE };
    let room = target.shared.checked_sub(beside + 4096 + x_bytes)? / warps;
    let (share, per_warp) =
        if split { (steps.div_ceil(warps), n.div_ceil(target.sms)) } else { (steps, n.div_ceil(target.sms * warps)) };
    // In stages of `piece` operands, if as many as `least` or all that a warp needs fit.
    let cut = |piece: usize, least: usize| {
        let depth = GEMV_STEP * piece;
        let needed = per_warp * share.div_ceil(piece);
        let fit = (room / (2 * depth)).min(16);
        // Where all of W is there before x, what counts is how long a warp takes from row to row.
        let abreast = if !split && piece == share { [4, 2].as_slice() } else { &[] };
        let rows = abreast.iter().copied().find(|&r| r <= needed && 2 * r <= fit).unwrap_or(1);
        let stages = fit.min(needed.next_multiple_of(rows)) / rows * rows;
        let shared = x_bytes + warps * stages * 2 * depth;
        (stages >= needed.min(least)).then_some(GemvShape { warps, stages, depth, split, rows, shared })
    };
    if split {
        return cut(share, 3);
    }
    // Whole rows of up to 8 KiB where two can be multiplied side by side, or all that a warp has fits; else pieces.
    let whole = if share <= 2 * GEMV_STAGE { cut(share, 4) } else { None };
    let pieces = |most: usize| cut(share.div_ceil(share.div_ceil(most)), 3);
    whole.or_else(|| pieces(GEMV_STAGE)).or_else(|| pieces(GEMV_STAGE / 2))
}

/// Warps that share rows of `steps` operands: as many as divide them most evenly.
fn gemv_warps(steps: usize) -> usize {
    let least = steps.div_ceil(GEMV_MOST_WARPS);
    let warps = (least..=least.max(GEMV_STAGE)).rev().map(|share| steps.div_ceil(share));
    warps.min_by_key(|warps| steps.next_multiple_of(*warps)).unwrap_or(1)
}

/// Whether W is so large that reading it takes much longer than the kernels around it: about what an L2 holds.
fn long(n: usize, k: usize, target: &Target) -> bool {
    2 * n * k > (target.sms * 400) << 10
}

/// Whether a short product is better dealt row by row, because its tiles of 16 rows leave many multiprocessors without work in
/// the end and their last slices are short, and all of W fits into the rings.
fn evener(m: usize, k: usize, n: usize, target: &Target) -> bool {
    let (tiles, rows) = (n.div_ceil(16), n.div_ceil(target.sms * GEMV_WARPS));
    let uneven = tiles > target.sms && 8 * tiles.next_multiple_of(target.sms) > 9 * tiles;
    let ragged = (2048..GEMV_SPLIT).contains(&k) && !k.is_multiple_of(if k >= 4096 { 1024 } else { 512 });
    let whole = |s: GemvShape| s.stages >= rows * k.next_multiple_of(GEMV_STEP).div_ceil(s.depth);
    uneven && ragged && gemv_shape(m, k, n, target).is_some_and(whole)
}

/// Whether W is marked for leaving the L2 first. Measured on an H200 with an L2 full of written lines: marked, 145 MiB take 3.5 us
/// of 47 less, 1 GiB 11 of 260 more. In a step the marks cost something: with short products marked too, a state update of
/// nemotron-h-8b took 11.5 us instead of 6.0 and the step 3.4 % more, since what layers had written stayed in the L2 until the
/// next layer needed the room, or so it seems.
fn once(n: usize, k: usize, target: &Target) -> bool {
    long(n, k, target) && 2 * n * k <= 256 << 20
}

/// The op ahead of a product, computed by the product's own kernel.
pub(super) struct Prologue<'a, B> {
    /// RMS norm instead of an activation.
    pub norm: bool,
    /// Input of the norm or the activation.
    pub first: &'a Tensor<B>,
    /// Gate of the norm, or second factor.
    pub second: Option<&'a Tensor<B>>,
    /// Elements from `first` to the gate of the row; 0 = none.
    pub row_gate: usize,
    pub act: Act,
    /// Weight and epsilon of a norm.
    pub weight: Option<(&'a Tensor<B>, f32)>,
    /// Access width, size and threads of a group of a norm.
    pub shape: [usize; 3],
    /// As in `rms_norm.cu`.
    pub gate: usize,
}

/// A product of one row with the ops around it, if one kernel computes them all.
pub(super) fn around<B: Address>(
    a: &Matmul<B>,
    ahead: Option<&Prologue<B>>,
    conv: Option<&Conv1d<B>>,
    target: &Target,
) -> Option<Work> {
    let [block] = a.w.blocks.as_slice() else { return None };
    let out = a.out.cols(block.col, block.w.rows());
    let few = a.x.rows() == 1 && path(a, block, &out, target) == Path::Few;
    few.then(|| streamed(a, block, &out, ahead, conv, target)).flatten()
}

/// One of the kernels with bulk copies.
fn streamed<B: Address>(
    a: &Matmul<B>,
    block: &RowBlock<B>,
    out: &Tensor<B>,
    ahead: Option<&Prologue<B>>,
    conv: Option<&Conv1d<B>>,
    target: &Target,
) -> Option<Work> {
    // With short products the kernels around them count, and several small blocks a multiprocessor let those in sooner.
    let (m, k, n) = (a.x.rows(), a.w.k, block.w.rows());
    let rows = long(n, k, target) || evener(m, k, n, target);
    let one = if rows { gemv(a, block, out, ahead, conv, target) } else { None };
    one.or_else(|| bulk(a, block, out, ahead, conv, target))
}

/// The kernel for one or two rows.
fn gemv<B: Address>(
    a: &Matmul<B>,
    block: &RowBlock<B>,
    out: &Tensor<B>,
    ahead: Option<&Prologue<B>>,
    conv: Option<&Conv1d<B>>,
    target: &Target,
) -> Option<Work> {
    let (m, k, n) = (a.x.rows(), a.w.k, block.w.rows());
    let shape = gemv_shape(m, k, n, target).filter(|_| target.bulk && m <= 2)?;
    let spec = Spec::new(File::Gemv)
        .int("K", k)
        .int("M", m)
        .int("WARPS", shape.warps)
        .int("STAGES", shape.stages)
        .int("DEPTH", shape.depth)
        .flag("SPLIT", shape.split)
        .int("ROWS", shape.rows)
        .flag("ONCE", once(n, k, target));
    let (spec, args) = with_around(spec, a, block, out, ahead, conv, target);
    let grid = [shape.blocks(n, target.sms), 1, 1];
    Some(Work::Kernel(Launch::new(spec, grid, 32 * shape.warps, args).with_shared(shape.shared)))
}

/// The kernel for few rows with bulk copies.
fn bulk<B: Address>(
    a: &Matmul<B>,
    block: &RowBlock<B>,
    out: &Tensor<B>,
    ahead: Option<&Prologue<B>>,
    conv: Option<&Conv1d<B>>,
    target: &Target,
) -> Option<Work> {
    let (m, k, n) = (a.x.rows(), a.w.k, block.w.rows());
    let around = ahead.is_some() || conv.is_some();
    let f = bulk_shape(m, k, n, target).filter(|f| target.bulk && (f.resident || !around))?;
    let spec = Spec::new(File::MatmulFewBulk)
        .int("K", k)
        .int("M", m)
        .int("WARPS", f.warps)
        .int("STAGES", f.stages)
        .int("DEPTH", f.depth)
        .flag("X_RESIDENT", f.resident)
        .flag("ONCE", once(n, k, target));
    let (spec, args) = with_around(spec, a, block, out, ahead, conv, target);
    let grid = [n.div_ceil(16).min(target.sms * f.blocks), 1, 1];
    Some(Work::Kernel(Launch::new(spec, grid, 32 * (f.warps + 1), args).with_shared(f.shared)))
}

/// What both of them take: the product itself and the ops around it.
fn with_around<B: Address>(
    spec: Spec,
    a: &Matmul<B>,
    block: &RowBlock<B>,
    out: &Tensor<B>,
    ahead: Option<&Prologue<B>>,
    conv: Option<&Conv1d<B>>,
    target: &Target,
) -> (Spec, Args) {
    let [vec, group, threads] = ahead.map_or([1, 1, 32], |p| p.shape);
    let spec = spec
        .flag("ACCUMULATE", a.accumulate)
        .flag("HAS_COLUMNS", a.columns.is_some())
        .flag("HAS_BIAS", a.bias.is_some())
        .int("PRE", ahead.map_or(0, |p| if p.norm { 1 } else { 2 }))
        .int("ACT", ahead.map_or(0, |p| act(p.act)))
        .flag("HAS_SECOND", ahead.is_some_and(|p| p.second.is_some()))
        .int("ROW_GATE", ahead.map_or(0, |p| p.row_gate))
        .int("VEC", vec)
        .int("GROUP", group)
        .int("THREADS", threads)
        .int("GATE", ahead.map_or(0, |p| p.gate))
        .flag("SHARED_WEIGHT", ahead.and_then(|p| p.weight).is_some_and(|(w, _)| w.len() == group))
        .flag("CONV", conv.is_some())
        .int("CONV_FIRST", conv.map_or(0, |c| c.x.offset - out.offset))
        .int("CHANNELS", conv.map_or(1, |c| c.x.row_len()))
        .int("TAPS", conv.map_or(2, |c| c.weight.row_len() - 1))
        .int("CONV_ACT", conv.map_or(0, |c| act(c.act)))
        .ty("out_t", out.dtype)
        .ty("pool_t", conv.map_or(DType::F32, |c| c.pool.dtype))
        .ty("conv_t", conv.map_or(DType::F32, |c| c.out.dtype));
    let weight = ahead.and_then(|p| p.weight);
    let args = Args::new()
        .rows(&a.x)
        .rows(&block.w)
        .int(block.w.rows() as u64)
        .int(of_block(&a.columns, block))
        .int(of_block(&a.bias, block))
        .rows(out)
        .float(a.scale)
        .maybe_at(ahead.map(|p| p.first))
        .maybe_at(ahead.and_then(|p| p.second))
        .maybe_at(weight.map(|w| w.0))
        .float(weight.map_or(0.0, |w| w.1))
        .maybe_at(conv.map(|c| &c.step.ints))
        .maybe_rows(conv.map(|c| &c.weight))
        .maybe_rows(conv.map(|c| &c.pool))
        .maybe_at(conv.map(|c| &c.out))
        .int(u64::from(target.untouched));
    (spec, args)
}

/// Address of the factors or biases of a block's rows, or 0.
fn of_block<B: Address>(all: &Option<Tensor<B>>, block: &RowBlock<B>) -> u64 {
    all.as_ref().map_or(0, |b| address(b) + 4 * block.col as u64)
}

/// The kernel for few rows of every device.
fn few<B: Address>(a: &Matmul<B>, block: &RowBlock<B>, out: &Tensor<B>, target: &Target) -> Work {
    let (m, k, n) = (a.x.rows(), a.w.k, block.w.rows());
    let f = few_shape(m, k, target.shared);
    let spec = Spec::new(File::MatmulFew)
        .int("K", k)
        .int("M", m)
        .int("WARPS", f.warps)
        .int("STAGES", f.stages)
        .int("DEPTH", f.depth)
        .flag("X_RESIDENT", f.resident)
        .flag("ACCUMULATE", a.accumulate)
        .flag("HAS_COLUMNS", a.columns.is_some())
        .flag("HAS_BIAS", a.bias.is_some())
        .ty("out_t", out.dtype);
    let args = Args::new().rows(&a.x).rows(&block.w).int(n as u64);
    let args = args.int(of_block(&a.columns, block)).int(of_block(&a.bias, block)).rows(out).float(a.scale);
    let grid = [n.div_ceil(16).min(target.sms * f.blocks), 1, 1];
    Work::Kernel(Launch::new(spec, grid, 32 * f.warps, args).with_shared(f.shared))
}

pub(super) fn matmul<B: Address>(a: &Matmul<B>, target: &Target) -> Result<Vec<Work>> {
    let (m, k) = (a.x.rows(), a.w.k);
    let mut work = Vec::new();
    for block in &a.w.blocks {
        let n = block.w.rows();
        let out = a.out.cols(block.col, n);
        let (columns, bias) = (of_block(&a.columns, block), of_block(&a.bias, block));
        match path(a, block, &out, target) {
            Path::Few => {
                let streamed = streamed(a, block, &out, None, None, target);
                work.push(streamed.unwrap_or_else(|| few(a, block, &out, target)));
            }
            Path::Library => {
                work.push(Work::Gemm(Gemm {
                    mnk: [m, n, k],
                    at: [address(&a.x), address(&block.w), address(&out)],
                    strides: [a.x.row_stride, block.w.row_stride, out.row_stride],
                    out: out.dtype,
                    scale: a.scale,
                    accumulate: a.accumulate,
                }));
                if a.columns.is_some() || a.bias.is_some() {
                    let spec = Spec::new(File::MatmulBias)
                        .int("N", n)
                        .flag("HAS_COLUMNS", a.columns.is_some())
                        .flag("HAS_BIAS", a.bias.is_some())
                        .ty("out_t", out.dtype);
                    let args = Args::new().int(columns).int(bias).rows(&out);
                    work.push(Work::Kernel(Launch::new(spec, [m, n.div_ceil(256), 1], 256, args)));
                }
            }
            Path::Plain => {
                let spec = Spec::new(File::MatmulPlain)
                    .int("K", k)
                    .flag("ACCUMULATE", a.accumulate)
                    .flag("HAS_COLUMNS", a.columns.is_some())
                    .flag("HAS_BIAS", a.bias.is_some())
                    .ty("x_t", a.x.dtype)
                    .ty("w_t", block.w.dtype)
                    .ty("out_t", out.dtype);
                let args = Args::new()
                    .rows(&a.x)
                    .rows(&block.w)
                    .int(m as u64)
                    .int(n as u64)
                    .int(columns)
                    .int(bias)
                    .rows(&out)
                    .float(a.scale);
                work.push(Work::Kernel(Launch::new(spec, [n.div_ceil(64), m.div_ceil(64), 1], 256, args)));
            }
        }
    }
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_fit_into_shared_memory() {
        for shared in [99 << 10, 163 << 10, 227 << 10] {
            for k in [768, 2048, 4096, 8192, 21504] {
                for m in 1..=FEW {
                    let f = few_shape(m, k, shared);
                    assert!(f.shared + 2 * f.warps * m * 64 <= shared, "{m} x {k}: {f:?}");
                }
            }
        }
        let target = Target::like_h200(227);
        for (n, k) in [(18560, 4096), (4096, 21504), (768, 768), (2048, 2048), (3376, 768), (100, 1000), (2688, 1856)] {
            for m in 1..=FEW {
                let f = bulk_shape(m, k, n, &target).expect("a common shape");
                assert!(f.blocks * (f.shared + 2 * f.warps * m * 64 + 2048) <= target.shared, "{m} x {n} x {k}: {f:?}");
            }
        }
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
            let f = gemv_shape(m, k, n, &target).expect("a common shape");
            let cut = (f.split, f.warps, f.stages, f.depth, f.rows);
            assert_eq!(cut, (split, warps, stages, depth, rows), "{m} x {n} x {k}");
            assert!(f.shared + 4096 <= target.shared);
        }
        for (n, k, blocks) in
            [(18560, 4096, 129), (21504, 4096, 128), (4096, 21504, 128), (131072, 4096, 132), (100, 1000, 13)]
        {
            let f = gemv_shape(1, k, n, &target).expect("a common shape");
            assert_eq!(f.blocks(n, target.sms), blocks, "{n} x {k}");
        }
        assert_eq!(gemv_shape(1, 1 << 17, 64, &target), None);
        // The shared expert of Nemotron-3-Nano-30B, but not its projections, nor those of Granite-4.0-H-1B.
        assert!(evener(1, 2688, 3712, &target) && evener(1, 3712, 2688, &target));
        for (n, k) in [(2688, 4096), (4608, 2688), (1536, 4096), (1536, 3072), (6448, 1536)] {
            assert!(!evener(1, k, n, &target), "{n} x {k}");
        }
        assert!(few_shape(8, 4096, 227 << 10).resident);
        assert!(!few_shape(8, 21504, 227 << 10).resident);
    }
}
