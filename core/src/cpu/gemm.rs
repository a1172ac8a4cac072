//! `out = scale * x Wᵀ (+ bias) (+ out)` on weights that are read in place, in their stored format.
//!
//! Every output is a dot product in one order: 16 lanes over K and a fixed tree (see [`super::dot`]). Tiles, panels, threads
//! and instruction sets only change which outputs are computed together, never an output's bits.
//!
//! Few rows of x: tiles read the weights in place, several weight rows at a time, each once from memory. Many rows: a
//! panel of weights is converted to f32 once per block of x rows and used by all of them.

#![allow(
    clippy::needless_range_loop,
    reason = "plain index loops unroll fully, so that accumulators stay in registers"
)]

use std::cell::RefCell;
use std::marker::PhantomData;

use super::int8::{self, Rounded};
use super::par;
use super::simd::{Isa, LANES, Simd, dispatch};
use super::tile::{Acc, Bf16, Elem, F8, F16, F32, Packed, Rows, tile};
use crate::format::{Coded, Format, GROUP, with_format};
use crate::tensor::DType;

/// Consecutive output rows of a weight, `[n, K]`, at any byte address.
#[derive(Clone, Copy, Debug)]
pub struct WeightRows {
    /// First element.
    pub ptr: *const u8,
    /// F32, Bf16 or F16; of coded rows, U8.
    pub dtype: DType,
    /// What the bytes of a row are.
    pub format: Format,
    /// Rows.
    pub n: usize,
    /// Distance between rows in bytes.
    pub row_bytes: usize,
    /// Output column of the first row.
    pub col: usize,
}

/// A matrix product on raw views. Activations are f32 and aligned as such.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// `[M, K] f32`.
    pub x: *const f32,
    /// Distance between rows of `x` in elements.
    pub x_stride: usize,
    /// The weight as row blocks.
    pub w: &'a [WeightRows],
    /// `[M, N] f32`.
    pub out: *mut f32,
    /// Distance between rows of `out` in elements.
    pub out_stride: usize,
    /// Rows of `x` and `out`.
    pub m: usize,
    /// Inner dimension.
    pub k: usize,
    /// Factor on the product.
    pub scale: f32,
    /// `[N] f32`, added after scaling; null for none.
    pub bias: *const f32,
    /// Null, or `n` factors of columns.
    pub columns: *const f32,
    /// Adds to `out` instead of overwriting it.
    pub accumulate: bool,
    /// Activations are rounded to 8 bits where they meet coded rows, see [`crate::format::round_group`].
    pub int8: bool,
}

// SAFETY: `matmul`'s contract covers every access through the pointers, from any thread.
unsafe impl Sync for Product<'_> {}

/// Rows of x up to which the weights are read in place.
const FEW_ROWS: usize = 8;
/// Rows of x that share a converted panel of weights.
const ROW_BLOCK: usize = 128;
/// Weight rows of a panel: a multiple of every tile width.
const PANEL: usize = 24;
/// Columns of a panel: a strip of it and the rows of x against it fit into the first-level cache.
const DEPTH: usize = 640;
/// Estimated nanoseconds below which a product stays on the calling thread: a fork costs about one microsecond while
/// helpers are near.
const FORK_NS: usize = 3_000;

/// Computes `p` on the fastest instruction set with all threads.
///
/// # Safety
/// All views of `p` lie in readable memory (`out`: writable). During the call no other code writes `x`, the weights, their
/// factors or the bias, or reads or writes `out`; `out` overlaps none of them.
pub unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller's contract.
    unsafe { matmul_on(Isa::best(), p, par::threads()) }
}

/// [`matmul`] on one instruction set; on the calling thread alone if `threads` is 1.
///
/// # Safety
/// As for [`matmul`].
pub unsafe fn matmul_on(isa: Isa, p: &Product<'_>, threads: usize) {
    let n: usize = p.w.iter().map(|b| b.n).sum();
    let bytes: usize = p.w.iter().map(|b| b.n * b.format.bytes(p.k, b.dtype.bytes())).sum();
    // One thread reads about 40 bytes from the cache and computes about 40 products in a nanosecond.
    let ns = bytes / 40 + p.m * n * p.k / 40;
    let threads = if ns < FORK_NS { 1 } else { threads };
    // Few rows: pieces of about an eighth of a thread's share, so that threads end together.
    let share = if p.m > FEW_ROWS { 0 } else { n / (threads * 8) };
    let pieces_of = |b: &WeightRows| {
        let (panel, row_blocks) = match rounds(p, b) {
            true => (int8::PANEL, p.m.div_ceil(int8::ROW_BLOCK)),
            false if p.m <= FEW_ROWS => (PANEL, 1),
            false => (PANEL, p.m.div_ceil(ROW_BLOCK)),
        };
        let cols = share.next_multiple_of(panel).max(panel);
        (cols, row_blocks, b.n.div_ceil(cols) * row_blocks)
    };
    let pieces = p.w.iter().map(|b| pieces_of(b).2).sum();
    let all = |x: &Rounded| {
        let piece = |mut i: usize| {
            for b in p.w {
                let (cols, row_blocks, here) = pieces_of(b);
                if i < here {
                    let (row_block, i) = (i % row_blocks, i / row_blocks);
                    let rows = (i * cols, b.n.min((i + 1) * cols));
                    // SAFETY: the caller's contract; pieces write disjoint outputs.
                    unsafe { run_piece(isa, p, x, b, rows, row_block) };
                    return;
                }
                i -= here;
            }
        };
        if threads == 1 { (0..pieces).for_each(piece) } else { par::pieces(pieces, piece) }
    };
    if !p.w.iter().any(|b| rounds(p, b)) {
        return all(&Rounded::default());
    }
    int8::ROUNDED.with_borrow_mut(|x| {
        // SAFETY: the caller's contract.
        unsafe { x.fill(isa, p, threads) };
        all(x);
    });
}

/// Whether activations are rounded for a block.
fn rounds(p: &Product<'_>, b: &WeightRows) -> bool {
    p.int8 && b.format.is_integer()
}

/// Rows `rows` of a weight block against one block of x rows.
///
/// # Safety
/// As for [`matmul`]; no other piece has these outputs.
unsafe fn run_piece(isa: Isa, p: &Product<'_>, x: &Rounded, b: &WeightRows, rows: (usize, usize), row_block: usize) {
    if rounds(p, b) {
        let first = row_block * int8::ROW_BLOCK;
        let block = (first, p.m.min(first + int8::ROW_BLOCK));
        // SAFETY: the caller's contract.
        return unsafe { int8::piece(isa, p, x, b, rows, block) };
    }
    // Outside the dispatch: a closure that passes through the standard library may not be inlined into it.
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: the caller's contract.
        unsafe {
            match b.dtype {
                _ if b.format == Format::F8 => dispatch!(isa, |s| piece::<_, F8>(s, p, b, rows, row_block, scratch)),
                _ if b.format != Format::Plain => dispatch!(isa, |s| coded_piece(s, p, b, rows, row_block, scratch)),
                DType::F32 => dispatch!(isa, |s| piece::<_, F32>(s, p, b, rows, row_block, scratch)),
                DType::Bf16 => dispatch!(isa, |s| piece::<_, Bf16>(s, p, b, rows, row_block, scratch)),
                DType::F16 => dispatch!(isa, |s| piece::<_, F16>(s, p, b, rows, row_block, scratch)),
                DType::U32 | DType::U8 | DType::I8 => panic!("matmul: a weight of integers"),
            }
        }
    });
}

/// [`run_piece`] on one instruction set and one dtype.
///
/// # Safety
/// As for [`run_piece`]; the elements of `b` are `E`.
#[inline(always)]
unsafe fn piece<S: Simd, E: Elem>(
    s: S,
    p: &Product<'_>,
    b: &WeightRows,
    (from, to): (usize, usize),
    row_block: usize,
    scratch: &mut Vec<Line>,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if p.m > FEW_ROWS {
            let first = row_block * ROW_BLOCK;
            let block = (first, p.m.min(first + ROW_BLOCK));
            if S::WIDE_TILE {
                many_rows::<S, E, 4, 6>(s, p, b, (from, to), block, scratch);
            } else {
                many_rows::<S, E, 2, 3>(s, p, b, (from, to), block, scratch);
            }
        } else if !S::WIDE_TILE {
            few_rows::<S, E, 3>(s, p, b, (from, to), 2);
        } else if p.m <= 4 {
            few_rows::<S, E, 6>(s, p, b, (from, to), 4);
        } else {
            few_rows::<S, E, 3>(s, p, b, (from, to), 8);
        }
    }
}

/// [`run_piece`] of coded rows: panels are decoded exactly, whatever the number of rows of x.
///
/// # Safety
/// As for [`run_piece`].
#[inline(always)]
unsafe fn coded_piece<S: Simd>(
    s: S,
    p: &Product<'_>,
    b: &WeightRows,
    (from, to): (usize, usize),
    row_block: usize,
    scratch: &mut Vec<Line>,
) {
    let first = row_block * ROW_BLOCK;
    let block = (first, p.m.min(first + ROW_BLOCK));
    for from in (from..to).step_by(PANEL) {
        let rows = (from, to.min(from + PANEL));
        // SAFETY: the caller's contract. The element type is not used: `pack` looks at the format first.
        unsafe {
            if S::WIDE_TILE {
                many_rows::<S, F32, 4, 6>(s, p, b, rows, block, scratch);
            } else {
                many_rows::<S, F32, 2, 3>(s, p, b, rows, block, scratch);
            }
        }
    }
}

/// All rows of x against weight rows `from..to`, read in place; at most `together` rows of x share a weight in registers.
///
/// # Safety
/// As for [`piece`].
#[inline(always)]
unsafe fn few_rows<S: Simd, E: Elem, const NR: usize>(
    s: S,
    p: &Product<'_>,
    b: &WeightRows,
    (from, to): (usize, usize),
    together: usize,
) {
    let mut n = from;
    while n < to {
        // Rows after the end repeat the last one; their results are dropped.
        let mut rows = [b.ptr; NR];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = b.ptr.wrapping_add((n + j).min(to - 1) * b.row_bytes);
        }
        let next = b.ptr.wrapping_add((n + NR) * b.row_bytes);
        let cols = Rows { rows, next, elem: PhantomData::<E> };
        let mut m = 0;
        while m < p.m {
            let mr = together.min(p.m - m);
            // SAFETY: rows m .. m + mr of x and the weight rows have k elements.
            unsafe {
                let x = p.x.add(m * p.x_stride);
                macro_rules! rows_of_x {
                    ($mr:literal) => {{
                        let acc = [[s.zero(); NR]; $mr];
                        let acc = tile::<S, _, $mr, NR>(s, x, p.x_stride, cols, p.k, acc);
                        store_tile(s, p, acc, m, b.col + n, NR.min(to - n));
                    }};
                }
                match mr {
                    1 => rows_of_x!(1),
                    2 => rows_of_x!(2),
                    3 => rows_of_x!(3),
                    4 => rows_of_x!(4),
                    5 if NR == 3 => rows_of_x!(5),
                    6 if NR == 3 => rows_of_x!(6),
                    7 if NR == 3 => rows_of_x!(7),
                    _ if NR == 3 => rows_of_x!(8),
                    _ => unreachable!("more than 4 rows of x with {NR} weight rows"),
                }
            }
            m += mr;
        }
        n += NR;
    }
}

/// 16 floats on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

thread_local! {
    /// A panel of weights as f32 and the accumulators of the outputs under way, kept from call to call.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Rows `first..end` of x against weight rows `from..to` (one panel), converted to f32 depth by depth.
///
/// # Safety
/// As for [`piece`]; `to - from` is at most [`PANEL`] and `end - first` at most [`ROW_BLOCK`].
#[inline(always)]
unsafe fn many_rows<S: Simd, E: Elem, const MR: usize, const NR: usize>(
    s: S,
    p: &Product<'_>,
    b: &WeightRows,
    (from, to): (usize, usize),
    (first, end): (usize, usize),
    scratch: &mut Vec<Line>,
) {
    let panel_lines = PANEL * DEPTH / LANES;
    scratch.resize(panel_lines + ROW_BLOCK * PANEL, Line([0.0; LANES]));
    let (panel, accs) = scratch.split_at_mut(panel_lines);
    let panel: *mut f32 = panel.as_mut_ptr().cast();
    let accs: *mut f32 = accs.as_mut_ptr().cast();
    // Depths of equal length: a short last one would pay a full visit to the accumulators.
    let depth = p.k.div_ceil(p.k.div_ceil(DEPTH).max(1)).next_multiple_of(LANES).max(LANES);
    let mut k0 = 0;
    loop {
        let k = depth.min(p.k - k0);
        let last = k0 + k == p.k;
        let strip_len = k.next_multiple_of(LANES) * NR;
        // SAFETY: a panel has at most PANEL rows of at most DEPTH columns and a block at most ROW_BLOCK rows, so
        // strips and accumulators lie in the scratch; x and weights by the caller's contract.
        unsafe {
            let mut n = from;
            while n < to {
                let strip = panel.add((n - from) / NR * strip_len);
                pack::<S, E, NR>(s, b, (n, to), (k0, k), strip);
                let mut m = first;
                while m < end {
                    let mr = MR.min(end - m);
                    let saved = accs.add(((m - first) * PANEL + (n - from) * mr) * LANES);
                    let x = p.x.add(m * p.x_stride + k0);
                    macro_rules! rows_of_x {
                        ($mr:literal) => {{
                            let mut acc = [[s.zero(); NR]; $mr];
                            if k0 > 0 {
                                for i in 0..$mr {
                                    for j in 0..NR {
                                        acc[i][j] = s.load_ptr(saved.add((i * NR + j) * LANES).cast());
                                    }
                                }
                            }
                            let acc: Acc<S, $mr, NR> = tile::<S, _, $mr, NR>(s, x, p.x_stride, Packed(strip), k, acc);
                            if last {
                                store_tile(s, p, acc, m, b.col + n, NR.min(to - n));
                            } else {
                                for i in 0..$mr {
                                    for j in 0..NR {
                                        s.store_ptr(acc[i][j], saved.add((i * NR + j) * LANES).cast());
                                    }
                                }
                            }
                        }};
                    }
                    match mr {
                        1 => rows_of_x!(1),
                        2 => rows_of_x!(2),
                        3 => rows_of_x!(3),
                        _ => rows_of_x!(4),
                    }
                    m += mr;
                }
                n += NR;
            }
        }
        if last {
            break;
        }
        k0 += k;
    }
}

/// Converts columns `k0 .. k0 + k` of weight rows `n .. n + NR` to a strip of [`Packed`]; rows from `to` on are zero.
///
/// # Safety
/// The rows have `k0 + k` elements of `E`, or of their format; `strip` has room for NR rows of `k` floats, `k` rounded up to a multiple of 16.
#[inline(always)]
unsafe fn pack<S: Simd, E: Elem, const NR: usize>(
    s: S,
    b: &WeightRows,
    (n, to): (usize, usize),
    (k0, k): (usize, usize),
    strip: *mut f32,
) {
    if !matches!(b.format, Format::Plain | Format::F8) {
        // SAFETY: the caller's contract.
        return unsafe { pack_codes(s, b, (n, to), (k0, k), strip, NR) };
    }
    for j in 0..NR {
        // SAFETY: the strip has NR * k floats, k rounded up to a multiple of 16; the weight row has k0 + k elements.
        unsafe {
            let out = strip.add(j * LANES);
            let row = b.ptr.wrapping_add((n + j) * b.row_bytes);
            let mut at = 0;
            while at < k {
                let v = if n + j >= to {
                    s.zero()
                } else if at + LANES <= k {
                    E::load(s, row, k0 + at)
                } else {
                    E::load_partial(s, row, k0 + at, k - at)
                };
                s.store_ptr(v, out.add(at * NR).cast());
                at += LANES;
            }
        }
    }
}

/// [`pack`] of coded rows.
///
/// # Safety
/// As for [`pack`].
#[inline(always)]
unsafe fn pack_codes<S: Simd>(
    s: S,
    b: &WeightRows,
    (n, to): (usize, usize),
    (k0, k): (usize, usize),
    strip: *mut f32,
    nr: usize,
) {
    for j in 0..nr {
        // SAFETY: the caller's contract.
        unsafe {
            let out = strip.add(j * LANES);
            if n + j < to {
                let row = b.ptr.wrapping_add((n + j) * b.row_bytes);
                // One function per instruction set and format, not one per tile.
                with_format!(
                    b.format,
                    F => s.run(
                        #[inline(always)]
                        |_| decode_row::<F>(row, (k0, k), out, nr)
                    ),
                    plain => unreachable!("it is coded")
                );
            } else {
                for at in (0..k).step_by(LANES) {
                    out.add(at * nr).cast::<[f32; LANES]>().write([0.0; LANES]);
                }
            }
        }
    }
}

/// Elements `k0 .. k0 + k` of a row, 16 by 16 at every `nr`th place of 16; both are multiples of 16.
///
/// # Safety
/// The row has the elements, and `out` room for them.
#[inline(always)]
unsafe fn decode_row<F: Coded>(row: *const u8, (k0, k): (usize, usize), out: *mut f32, nr: usize) {
    let mut at = k0;
    while at < k0 + k {
        // SAFETY: rows are whole blocks, so the block of an element lies in its row.
        let block = unsafe { std::slice::from_raw_parts(row.add(at / F::BLOCK * F::BYTES), F::BYTES) };
        let group = F::values(block, at % F::BLOCK / GROUP);
        // The part of the row may begin and end inside a group.
        let halves = at % GROUP / LANES..((k0 + k - at / GROUP * GROUP) / LANES).min(GROUP / LANES);
        for half in halves {
            let values = group.as_chunks::<LANES>().0[half];
            // SAFETY: the caller's contract.
            unsafe { out.add((at - k0) * nr).cast::<[f32; LANES]>().write(values) };
            at += LANES;
        }
    }
}

/// Adds up the lanes and writes rows `m ..` and the first `cols` columns from `col` on, with the epilogue.
///
/// # Safety
/// `p.out` has rows up to `m + MR` and columns up to `col + cols`, and no other thread writes these.
#[inline(always)]
unsafe fn store_tile<S: Simd, const MR: usize, const NR: usize>(
    s: S,
    p: &Product<'_>,
    acc: Acc<S, MR, NR>,
    m: usize,
    col: usize,
    cols: usize,
) {
    let mut first = 0;
    while first < MR * NR {
        let mut four = [s.zero(); 4];
        for (a, v) in four.iter_mut().enumerate() {
            if first + a < MR * NR {
                *v = acc[(first + a) / NR][(first + a) % NR];
            }
        }
        let sums = s.reduce_sum4(four);
        for (a, sum) in sums.into_iter().enumerate() {
            let (i, j) = ((first + a) / NR, (first + a) % NR);
            if i < MR && j < cols {
                // SAFETY: row m + i and column col + j exist in out, and the column in its factors and the bias.
                unsafe {
                    let out = p.out.add((m + i) * p.out_stride + col + j);
                    let mut y = p.scale * sum;
                    if !p.columns.is_null() {
                        y *= *p.columns.add(col + j);
                    }
                    if !p.bias.is_null() {
                        y += *p.bias.add(col + j);
                    }
                    if p.accumulate {
                        y += *out;
                    }
                    *out = y;
                }
            }
        }
        first += 4;
    }
}

/// Writes the first `cols` lanes to row `m` from column `col` on, with the epilogue of [`store_tile`].
///
/// # Safety
/// As for [`store_tile`].
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(s: S, p: &Product<'_>, sums: S::V, m: usize, col: usize, cols: usize) {
    // SAFETY: the columns exist in out, its factors and the bias.
    unsafe {
        let vector = |p: *const f32| std::slice::from_raw_parts(p.add(col), cols);
        let mut y = s.mul(s.splat(p.scale), sums);
        if !p.columns.is_null() {
            y = s.mul(y, s.load_partial(vector(p.columns)));
        }
        if !p.bias.is_null() {
            y = s.add(y, s.load_partial(vector(p.bias)));
        }
        let out = std::slice::from_raw_parts_mut(p.out.add(m * p.out_stride + col), cols);
        if p.accumulate {
            y = s.add(y, s.load_partial(out));
        }
        s.store_partial(y, out);
    }
}

#[cfg(test)]
mod tests;
