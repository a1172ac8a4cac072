//! Products of coded weights with activations that are rounded to 8 bits.
//!
//! A row of x becomes codes with a scale per 32 columns ([`Rounded`]); nothing depends on other rows. Sums of products of codes
//! are exact integers. An output adds up, group of 32 by group in ascending order and rounded once each (but on wasm32, see
//! [`Simd`]): the sum of each part that has a scale of its own, `sum * (weight's scale * x's scale)`, then the weight's offset,
//! `offset * -(x's scale * sum of x's codes)`. So neither the number of rows nor threads or the instruction set change a bit.
//!
//! Lanes are weight rows: the codes of 16 rows are brought into the order that the products read, depth by depth, and used by
//! all rows of x. A single row of x meets codes as they lie in memory where that is faster; its sums are the same integers.

#![allow(
    clippy::needless_range_loop,
    reason = "plain index loops unroll fully, so that accumulators stay in registers"
)]

mod blocks;
mod rounded;

use std::cell::RefCell;
use std::marker::PhantomData;

use super::gemm::{self, Product, WeightRows};
use super::simd::codes::{Codes, dispatch_codes};
use super::simd::{Isa, LANES, Simd};
use crate::format::{GROUP, with_format};
use blocks::{Blocks, OneRow, Sink};
pub(super) use rounded::{ROUNDED, Rounded};

/// Rows of x that share the codes of a panel.
pub(super) const ROW_BLOCK: usize = 128;
/// Weight rows of a panel, as whole strips of 16 of every instruction set.
pub(super) const PANEL: usize = 32;
/// Groups of a depth, whole blocks of every format: the strips of a panel and the rows of x against them fit into the
/// caches next to the core.
const DEPTH: usize = 16;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// Lines of a strip: 8 of codes, two of scales and one of offsets per group.
const STRIP: usize = DEPTH * 11;

thread_local! {
    /// Strips and the accumulators of the outputs under way, kept from call to call.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// 16 weight rows, a depth of them.
#[derive(Clone, Copy)]
struct Strip(*mut Line);

impl Strip {
    /// The 8 vectors of codes of a group: lane `r` of vector `i` holds columns `4 i .. 4 i + 4` of row `r`.
    #[inline(always)]
    fn codes(self, group: usize) -> *mut u8 {
        self.0.wrapping_add(8 * group).cast()
    }

    /// Scales of the 16 rows for a half of a group; formats with one scale have it as the first.
    #[inline(always)]
    fn scales(self, group: usize, half: usize) -> *mut u8 {
        self.0.wrapping_add(8 * DEPTH + 2 * group + half).cast()
    }

    /// Offsets of the 16 rows.
    #[inline(always)]
    fn offsets(self, group: usize) -> *mut u8 {
        self.0.wrapping_add(10 * DEPTH + group).cast()
    }
}

/// Rows `rows` of a coded weight against the rows `block` of x.
///
/// # Safety
/// As for [`gemm::matmul`]; no other piece has these outputs, and `x` holds the product's rows.
pub(super) unsafe fn piece(
    isa: Isa,
    p: &Product<'_>,
    x: &Rounded,
    b: &WeightRows,
    rows: (usize, usize),
    block: (usize, usize),
) {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(PANEL / LANES * (STRIP + ROW_BLOCK), Line([0.0; LANES]));
        let scratch = scratch.as_mut_ptr();
        // SAFETY: the caller's contract; the scratch has room for two strips and their accumulators.
        unsafe {
            with_format!(
                b.format,
                F => dispatch_codes!(isa, |s| panels::<_, F>(s, p, x, b, rows, block, scratch)),
                other => unreachable!("its codes are no integers")
            )
        }
    });
}

/// [`piece`] of one format on one instruction set.
///
/// # Safety
/// As for [`piece`].
#[inline(always)]
unsafe fn panels<S: Codes, F: Blocks>(
    s: S,
    p: &Product<'_>,
    x: &Rounded,
    b: &WeightRows,
    (from, to): (usize, usize),
    block: (usize, usize),
    scratch: *mut Line,
) {
    let groups = p.k / GROUP;
    if F::PAIRED && S::PAIRS && block.1 - block.0 == 1 {
        // SAFETY: the caller's contract.
        return unsafe { one_row::<S, F>(s, p, x, b, (from, to), block.0) };
    }
    let strips = if S::Float::WIDE_TILE { 2 } else { 1 };
    for n in (from..to).step_by(strips * LANES) {
        for first in (0..groups).step_by(DEPTH) {
            let depth = (first, groups.min(first + DEPTH));
            for i in 0..strips {
                // SAFETY: the caller's contract.
                unsafe {
                    unpack::<S, F>(s, b, (n + i * LANES, to), depth, &mut Strip(scratch.wrapping_add(i * STRIP)))
                };
            }
            let part = Part { p, x, zero: F::above::<S>(), depth, block };
            let cols = (b.col + n, (to - n).min(strips * LANES));
            // One function per instruction set and kind, not one per format.
            // SAFETY: the caller's contract.
            unsafe {
                match (F::WIDE, F::SPLIT, F::OFFSET) {
                    (true, _, true) => rows_of_x::<S, true, false, true>(s, &part, scratch, cols),
                    (true, ..) => rows_of_x::<S, true, false, false>(s, &part, scratch, cols),
                    (_, true, _) => rows_of_x::<S, false, true, false>(s, &part, scratch, cols),
                    (.., true) => rows_of_x::<S, false, false, true>(s, &part, scratch, cols),
                    _ => rows_of_x::<S, false, false, false>(s, &part, scratch, cols),
                }
            }
        }
    }
}

/// Row `m` of x against weight rows `from..to`.
///
/// # Safety
/// As for [`piece`].
#[inline(always)]
unsafe fn one_row<S: Codes, F: Blocks>(
    s: S,
    p: &Product<'_>,
    x: &Rounded,
    b: &WeightRows,
    (from, to): (usize, usize),
    m: usize,
) {
    for n in (from..to).step_by(LANES) {
        let mut sink = OneRow { acc: s.float().zero(), x, m, format: PhantomData::<F> };
        // SAFETY: the caller's contract.
        unsafe {
            unpack::<S, F>(s, b, (n, to), (0, p.k / GROUP), &mut sink);
            gemm::store(s.float(), p, sink.acc, m, b.col + n, LANES.min(to - n));
        }
    }
}

/// Hands the groups `depth` of weight rows `n .. n + 16` to a sink; rows from `to` on repeat the last one.
///
/// # Safety
/// The weight has rows up to `to`, and the groups; the sink has room for them.
#[inline(always)]
unsafe fn unpack<S: Codes, F: Blocks>(
    s: S,
    b: &WeightRows,
    (n, to): (usize, usize),
    (first, end): (usize, usize),
    sink: &mut impl Sink<S>,
) {
    let mut rows = [b.ptr; LANES];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = b.ptr.wrapping_add((n + r).min(to - 1) * b.row_bytes);
    }
    let per_block = F::BLOCK / GROUP;
    // The next 16 rows will be read soon: as one stream, which memory serves best.
    let next = b.ptr.wrapping_add((n + LANES) * b.row_bytes);
    for block in first / per_block..end / per_block {
        for at in (0..LANES * F::BYTES).step_by(64) {
            s.float().prefetch(next.wrapping_add(block * LANES * F::BYTES + at));
        }
        // SAFETY: depths are whole blocks; the caller's contract.
        unsafe { F::unpack(s, &rows, block * F::BYTES, sink, block * per_block - first) };
    }
}

/// What the products of a depth of a panel share.
struct Part<'a> {
    p: &'a Product<'a>,
    x: &'a Rounded,
    /// What codes in a strip stand above their integers.
    zero: i32,
    /// Groups.
    depth: (usize, usize),
    /// Rows of x.
    block: (usize, usize),
}

/// Adds a depth of a panel to the outputs of all rows of x, and writes them after the last one.
///
/// # Safety
/// As for [`piece`]; the scratch holds the strips.
#[inline(always)]
unsafe fn rows_of_x<S: Codes, const WIDE: bool, const SPLIT: bool, const OFFSET: bool>(
    s: S,
    part: &Part<'_>,
    scratch: *mut Line,
    cols: (usize, usize),
) {
    s.run(
        #[inline(always)]
        |s| {
            let (first, end) = part.block;
            let mut m = first;
            while m < end {
                let together = 4.min(end - m);
                // SAFETY: the caller's contract.
                unsafe {
                    macro_rules! tile {
                        ($mr:literal) => {
                            if S::Float::WIDE_TILE {
                                tile::<S, WIDE, SPLIT, OFFSET, $mr, 2>(s, part, scratch, m, cols)
                            } else {
                                tile::<S, WIDE, SPLIT, OFFSET, $mr, 1>(s, part, scratch, m, cols)
                            }
                        };
                    }
                    match together {
                        1 => tile!(1),
                        2 => tile!(2),
                        3 => tile!(3),
                        _ => tile!(4),
                    }
                }
                m += together;
            }
        },
    );
}

/// MR rows of x from row `m` on against NV strips.
///
/// # Safety
/// As for [`rows_of_x`].
#[inline(always)]
unsafe fn tile<S: Codes, const WIDE: bool, const SPLIT: bool, const OFFSET: bool, const MR: usize, const NV: usize>(
    s: S,
    part: &Part<'_>,
    scratch: *mut Line,
    m: usize,
    (col, cols): (usize, usize),
) {
    let (f, p, x) = (s.float(), part.p, part.x);
    let (first, end) = part.depth;
    let strips: [Strip; NV] = std::array::from_fn(|v| Strip(scratch.wrapping_add(v * STRIP)));
    let saved = scratch.wrapping_add(PANEL / LANES * STRIP + (m - part.block.0) * NV);
    let mut acc = [[f.zero(); NV]; MR];
    // SAFETY: rows `m .. m + MR` of x exist, strips hold the depth, and the scratch has accumulators for every row of the block;
    // outputs by the caller's contract.
    unsafe {
        if first > 0 {
            for i in 0..MR {
                for v in 0..NV {
                    acc[i][v] = f.load_ptr(saved.wrapping_add(i * NV + v).cast());
                }
            }
        }
        for g in 0..end - first {
            acc = group::<S, WIDE, SPLIT, OFFSET, MR, NV>(s, x, part.zero, (m, first + g), (strips, g), acc);
        }
        for i in 0..MR {
            for v in 0..NV {
                if (end * GROUP) < p.k {
                    f.store_ptr(acc[i][v], saved.wrapping_add(i * NV + v).cast());
                } else if v * LANES < cols {
                    gemm::store(f, p, acc[i][v], m + i, col + v * LANES, LANES.min(cols - v * LANES));
                }
            }
        }
    }
}

/// Adds group `xg` of rows `m ..` of x, which is group `g` of the strips.
///
/// # Safety
/// They exist.
#[inline(always)]
unsafe fn group<S: Codes, const WIDE: bool, const SPLIT: bool, const OFFSET: bool, const MR: usize, const NV: usize>(
    s: S,
    x: &Rounded,
    zero: i32,
    (m, xg): (usize, usize),
    (strips, g): ([Strip; NV], usize),
    mut acc: [[<S::Float as Simd>::V; NV]; MR],
) -> [[<S::Float as Simd>::V; NV]; MR] {
    let f = s.float();
    // SAFETY: the caller's contract.
    unsafe {
        for half in 0..if SPLIT { 2 } else { 1 } {
            let mut sums = [[s.splat(0); NV]; MR];
            for i in 0..MR {
                let codes = if SPLIT { x.sum(m + i, xg, half) } else { x.sum(m + i, xg, 0) + x.sum(m + i, xg, 1) };
                sums[i] = [s.splat((-zero * codes) as u32); NV];
            }
            let steps = if SPLIT { 4 * half..4 * half + 4 } else { 0..8 };
            for j in steps {
                let mut w = [s.splat(0); NV];
                for v in 0..NV {
                    w[v] = s.load(strips[v].codes(g).add(64 * j));
                }
                for i in 0..MR {
                    let x = x.four(m + i, 8 * xg + j);
                    for v in 0..NV {
                        sums[i][v] = s.dot::<WIDE>(sums[i][v], w[v], x);
                    }
                }
            }
            for v in 0..NV {
                let scale = f.load_ptr(strips[v].scales(g, half));
                for i in 0..MR {
                    let scale = f.mul(scale, f.splat(x.scale(m + i, xg)));
                    acc[i][v] = f.fma(s.to_float(sums[i][v]), scale, acc[i][v]);
                }
            }
        }
        if OFFSET {
            for v in 0..NV {
                let offset = f.load_ptr(strips[v].offsets(g));
                for i in 0..MR {
                    acc[i][v] = f.fma(offset, f.splat(x.shift(m + i, xg)), acc[i][v]);
                }
            }
        }
    }
    acc
}

#[cfg(test)]
mod tests;
