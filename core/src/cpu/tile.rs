//! The register tile under [`super::gemm`]: MR rows of x against NR weight rows, one 16-lane accumulator per output.

#![allow(
    clippy::needless_range_loop,
    reason = "plain index loops unroll fully, so that accumulators stay in registers"
)]

use std::marker::PhantomData;

use super::simd::{LANES, Simd};
use crate::format::{Coded, blocks};

/// How weight elements are stored.
pub(super) trait Elem: Copy + 'static {
    /// Bytes of 64 elements; those of longer blocks on average.
    const BYTES_OF_64: usize;

    /// 16 elements of a row at any address, from element `k` on.
    ///
    /// # Safety
    /// The row at `row` has `k + 16` elements; `k` is a multiple of 16.
    unsafe fn load<S: Simd>(s: S, row: *const u8, k: usize) -> S::V;

    /// The last `n < 16` elements of a row at any address, from element `k` on, then zeros.
    ///
    /// # Safety
    /// The row at `row` has `k + n` elements; `k` is a multiple of 16.
    unsafe fn load_partial<S: Simd>(s: S, row: *const u8, k: usize, n: usize) -> S::V;
}

macro_rules! elem {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$s:ident, $p:ident, $n:ident| $full:expr, $partial:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Elem for $name {
            const BYTES_OF_64: usize = 64 * $bytes;

            #[inline(always)]
            unsafe fn load<S: Simd>($s: S, row: *const u8, k: usize) -> S::V {
                // SAFETY: the caller's contract.
                unsafe {
                    let $p = row.add(k * $bytes);
                    $full
                }
            }

            #[inline(always)]
            unsafe fn load_partial<S: Simd>($s: S, row: *const u8, k: usize, $n: usize) -> S::V {
                // SAFETY: the caller's contract.
                unsafe {
                    let $p = row.add(k * $bytes);
                    $partial
                }
            }
        }
    };
}

elem!(
    /// IEEE single precision.
    F32, 4, |s, p, n| s.load_ptr(p), s.load_ptr_partial(p, n)
);
elem!(
    /// The upper half of an f32.
    Bf16, 2, |s, p, n| s.load_bf16(p), s.load_half_partial(p, n, true)
);
elem!(
    /// IEEE half precision.
    F16, 2, |s, p, n| s.load_f16(p), s.load_half_partial(p, n, false)
);

/// Blocks of 8-bit floats with a scale, see [`crate::format::Format::F8`].
#[derive(Clone, Copy)]
pub(super) struct F8;

impl Elem for F8 {
    const BYTES_OF_64: usize = 64 * blocks::F8::BYTES / blocks::F8::BLOCK;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, row: *const u8, k: usize) -> S::V {
        const BLOCK: usize = blocks::F8::BLOCK;
        // SAFETY: the caller's contract; 16 elements from a multiple of 16 on lie in one block, after its scale.
        unsafe {
            let block = row.add(k / BLOCK * blocks::F8::BYTES);
            let scale = f32::from_le_bytes(block.cast::<[u8; 4]>().read_unaligned());
            let codes = block.add(4 + k % BLOCK).cast::<[u8; LANES]>().read_unaligned();
            // As f16, whose exponents count 8 less, these are the same numbers over 256.
            let mut halves = [0u16; LANES];
            for (half, code) in halves.iter_mut().zip(codes) {
                *half = (u16::from(code) & 0x80) << 8 | (u16::from(code) & 0x7f) << 7;
            }
            let values = s.mul(s.load_f16(halves.as_ptr().cast()), s.splat(256.0));
            s.mul(s.splat(scale), values)
        }
    }

    #[inline(always)]
    unsafe fn load_partial<S: Simd>(_: S, _: *const u8, _: usize, _: usize) -> S::V {
        unreachable!("rows are whole blocks")
    }
}

/// Where a tile finds its NR weight rows.
pub(super) trait Cols<const NR: usize>: Copy {
    /// 16 elements of row `j` from column `k`, a multiple of 16.
    ///
    /// # Safety
    /// The row has these elements.
    unsafe fn load<S: Simd>(self, s: S, j: usize, k: usize) -> S::V;

    /// The last `n < 16` elements of row `j`, from column `k`, then zeros.
    ///
    /// # Safety
    /// The row has these elements.
    unsafe fn load_partial<S: Simd>(self, s: S, j: usize, k: usize, n: usize) -> S::V;

    /// Hints at the part of the next NR rows that corresponds to row `j` and column `k` of these.
    fn prefetch<S: Simd>(self, s: S, j: usize, k: usize);
}

/// Weight rows read in place.
#[derive(Clone, Copy)]
pub(super) struct Rows<E, const NR: usize> {
    /// First element of each row.
    pub(super) rows: [*const u8; NR],
    /// First element of the next NR rows.
    pub(super) next: *const u8,
    /// Element type.
    pub(super) elem: PhantomData<E>,
}

impl<E: Elem, const NR: usize> Cols<NR> for Rows<E, NR> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, j: usize, k: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { E::load(s, self.rows[j], k) }
    }

    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, j: usize, k: usize, n: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { E::load_partial(s, self.rows[j], k, n) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, j: usize, k: usize) {
        // NR rows together are NR distant streams, which memory serves badly; fetching the next NR rows as one sequential
        // stream keeps its full speed. One hint per cache line.
        let at = (k * NR + j * LANES) * E::BYTES_OF_64 / 64;
        if j.is_multiple_of((4 * 64 / E::BYTES_OF_64).next_power_of_two().clamp(1, 4)) {
            s.prefetch(self.next.wrapping_add(at));
        }
    }
}

/// A strip of NR rows converted to f32, `[K / 16, NR, 16]`, zero after the end of a row.
#[derive(Clone, Copy)]
pub(super) struct Packed(pub(super) *const f32);

impl<const NR: usize> Cols<NR> for Packed {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, j: usize, k: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { s.load_ptr(self.0.add(k * NR + j * LANES).cast()) }
    }

    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, j: usize, k: usize, _: usize) -> S::V {
        // SAFETY: strips are padded to whole vectors.
        unsafe { Cols::<NR>::load(self, s, j, k) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, _: S, _: usize, _: usize) {}
}

/// Accumulators of MR x NR outputs.
pub(super) type Acc<S, const MR: usize, const NR: usize> = [[<S as Simd>::V; NR]; MR];

/// Adds the products of `k` columns to `acc`: lane `l` of an accumulator takes the columns `l mod 16`, ascending.
///
/// # Safety
/// Row `i < MR` of `x` starts at `x + i * stride` and has `k` elements; `cols` has `k` columns.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, C: Cols<NR>, const MR: usize, const NR: usize>(
    s: S,
    x: *const f32,
    stride: usize,
    cols: C,
    k: usize,
    mut acc: Acc<S, MR, NR>,
) -> Acc<S, MR, NR> {
    let full = k / LANES * LANES;
    let mut at = 0;
    // SAFETY: `at + 16 <= k` in the loop, and `k - full` elements are left after it.
    unsafe {
        while at < full {
            let mut w = [s.zero(); NR];
            for j in 0..NR {
                w[j] = cols.load(s, j, at);
                cols.prefetch(s, j, at);
            }
            for i in 0..MR {
                let a = s.load_ptr(x.add(i * stride + at).cast());
                for j in 0..NR {
                    acc[i][j] = s.fma(a, w[j], acc[i][j]);
                }
            }
            at += LANES;
        }
        if full < k {
            for j in 0..NR {
                let w = cols.load_partial(s, j, full, k - full);
                for i in 0..MR {
                    let a = s.load_ptr_partial(x.add(i * stride + full).cast(), k - full);
                    acc[i][j] = s.fma(a, w, acc[i][j]);
                }
            }
        }
    }
    acc
}
