//! The register tile under [`super::gemm`]: MR rows of x against NR weight rows, one 16-lane accumulator per output.

#![allow(
    clippy::needless_range_loop,
    reason = "plain index loops unroll fully, so that accumulators stay in registers"
)]

use std::marker::PhantomData;

use super::simd::{LANES, Simd};

/// How weight elements are stored.
pub(super) trait Elem: Copy + 'static {
    /// Bytes of one element.
    const BYTES: usize;

    /// 16 elements at any address.
    ///
    /// # Safety
    /// `16 * BYTES` bytes at `p` are readable.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::V;

    /// `n < 16` elements at any address, then zeros.
    ///
    /// # Safety
    /// `n * BYTES` bytes at `p` are readable.
    unsafe fn load_partial<S: Simd>(s: S, p: *const u8, n: usize) -> S::V;
}

macro_rules! elem {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$s:ident, $p:ident, $n:ident| $full:expr, $partial:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Elem for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<S: Simd>($s: S, $p: *const u8) -> S::V {
                // SAFETY: the caller's contract is the same.
                unsafe { $full }
            }

            #[inline(always)]
            unsafe fn load_partial<S: Simd>($s: S, $p: *const u8, $n: usize) -> S::V {
                // SAFETY: the caller's contract is the same.
                unsafe { $partial }
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

/// Weight rows where they lie.
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
        unsafe { E::load(s, self.rows[j].add(k * E::BYTES)) }
    }

    #[inline(always)]
    unsafe fn load_partial<S: Simd>(self, s: S, j: usize, k: usize, n: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { E::load_partial(s, self.rows[j].add(k * E::BYTES), n) }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, j: usize, k: usize) {
        // NR rows at once are NR distant streams, which memory serves badly; fetching the next NR rows as one sequential
        // stream keeps its full speed. One hint per cache line.
        let at = (k * NR + j * LANES) * E::BYTES;
        if E::BYTES == 4 || j.is_multiple_of(2) {
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
