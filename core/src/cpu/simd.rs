//! The 16-lane vector that all CPU code computes with, one implementation per instruction set.
//!
//! Kernels are written once, generic over a [`Simd`] token, and instantiated per instruction set by `dispatch!`:
//!
//! ```ignore
//! use crate::cpu::simd::{Isa, Simd, dispatch};
//!
//! /// `y += a * x`, elementwise.
//! pub fn axpy(isa: Isa, a: f32, x: &[f32], y: &mut [f32]) {
//!     dispatch!(isa, |s| axpy_kernel(s, a, x, y))
//! }
//!
//! #[inline(always)] // a kernel must be inlined into the function that enables the CPU features
//! fn axpy_kernel<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
//!     let a = s.splat(a);
//!     let (xs, x_tail) = x.as_chunks::<16>();
//!     let (ys, y_tail) = y.as_chunks_mut::<16>();
//!     for (x, y) in xs.iter().zip(ys) {
//!         s.store(s.fma(a, s.load(x), s.load(y)), y);
//!     }
//!     let v = s.fma(a, s.load_partial(x_tail), s.load_partial(y_tail));
//!     s.store_partial(v, y_tail);
//! }
//! ```
//!
//! Rules for kernels:
//! - `#[inline(always)]` on every generic function and on every closure that touches a vector
//!   (`f(#[inline(always)] |v| ..)`); an outlined one would compute without the CPU's vector registers.
//! - No vector operation inside a closure that the standard library calls (`map`, `fold`, `from_fn`, `LocalKey::with`):
//!   those may be outlined and then run hundreds of times slower. Write loops; borrow thread-locals outside `dispatch!`.
//! - Take the token once, outside the loops; `dispatch!` costs a call that cannot be inlined.
//! - **Every operation gives the same bits on every instruction set**: all are IEEE operations rounded once, `fma` is
//!   fused (but on wasm32, which has no fused multiply-add), [`Simd::reduce_sum`] adds in one fixed tree, and functions
//!   such as [`Simd::exp`] are built from these. Tails go through the same operations as full vectors.
//! - Tokens prove that the CPU has the instructions: they only come from detection, so all methods on slices are safe.

pub mod bits;
pub(crate) mod codes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use super::math;
pub(crate) use crate::format::f16_to_f32;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use plain::Plain;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub use wasm::Wasm128;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Lanes of the vector type, on every instruction set.
pub const LANES: usize = 16;

/// An instruction set that this CPU has. The value inside each variant proves it.
#[derive(Clone, Copy, Debug)]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL: one register per vector.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// AVX2, FMA and F16C: two registers per vector.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// NEON: four registers per vector.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// WebAssembly's 128-bit vectors: four registers per vector.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Wasm128(Wasm128),
    /// Plain arrays, which the compiler vectorises. Not in a wasm module with vectors: it always has them.
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    Plain(Plain),
}

impl Isa {
    /// The fastest instruction set of this CPU, detected once.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::all()[0])
    }

    /// Every instruction set of this CPU, fastest first; plain code is the last.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx512::detect().map(Self::Avx512));
            all.extend(Avx2::detect().map(Self::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        all.extend(Neon::detect().map(Self::Neon));
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        all.push(Self::Wasm128(Wasm128));
        #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
        all.push(Self::Plain(Plain));
        all
    }

    /// Short name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Self::Wasm128(_) => "simd128",
            #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
            Self::Plain(_) => "plain",
        }
    }
}

/// Runs an expression with the token `s` of instruction set `isa`, compiled for that instruction set:
/// `dispatch!(isa, |s| kernel(s, x, y))`. See the [module](self).
macro_rules! dispatch {
    ($isa:expr, |$s:ident| $body:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx512(t) => $crate::cpu::simd::Simd::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx2(t) => $crate::cpu::simd::Simd::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::simd::Isa::Neon(t) => $crate::cpu::simd::Simd::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::cpu::simd::Isa::Wasm128(t) => $crate::cpu::simd::Simd::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
            $crate::cpu::simd::Isa::Plain(t) => $crate::cpu::simd::Simd::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
        }
    };
}
pub(crate) use dispatch;

/// Operations on vectors of 16 f32 lanes; `Self` is the token of an instruction set. See the [module](self).
///
/// Every operation gives the same bits on every implementation (the payload of a NaN excepted).
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 lanes of f32.
    type V: Copy;

    /// Whether 24 accumulators and their operands fit into the registers; else about 6 do.
    const WIDE_TILE: bool;

    /// Calls `f` in a function compiled for this instruction set. `f` must be `#[inline(always)]`.
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;

    /// 16 consecutive floats at any address.
    ///
    /// # Safety
    /// 64 bytes at `p` are readable.
    unsafe fn load_ptr(self, p: *const u8) -> Self::V;

    /// `n < 16` consecutive floats at any address, then zeros.
    ///
    /// # Safety
    /// `4 * n` bytes at `p` are readable.
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> Self::V;

    /// 16 consecutive bf16 numbers at any address.
    ///
    /// # Safety
    /// 32 bytes at `p` are readable.
    unsafe fn load_bf16(self, p: *const u8) -> Self::V;

    /// 16 consecutive f16 numbers at any address.
    ///
    /// # Safety
    /// 32 bytes at `p` are readable.
    unsafe fn load_f16(self, p: *const u8) -> Self::V;

    /// Writes 16 floats at any address.
    ///
    /// # Safety
    /// 64 bytes at `p` are writable.
    unsafe fn store_ptr(self, v: Self::V, p: *mut u8);

    /// Hints that the cache line at `p` will be read: brings it to the second-level cache. Any address is allowed.
    fn prefetch(self, p: *const u8);

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once (twice on wasm32).
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`: `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { yes } else { no }`: `no` where either is NaN.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// `p * 2^n` for integral `n` in `-150..=128` and `p` in `0.5..2`, rounded once; NaN where `p` is NaN.
    fn scale_pow2(self, p: Self::V, n: Self::V) -> Self::V;

    /// The sum of the lanes: lanes `j` and `j + 8` are added first, then `j` and `j + 4`, `j + 2`, `j + 1`.
    fn reduce_sum(self, v: Self::V) -> f32;

    /// [`Simd::reduce_sum`] of four vectors.
    #[inline(always)]
    fn reduce_sum4(self, v: [Self::V; 4]) -> [f32; 4] {
        [self.reduce_sum(v[0]), self.reduce_sum(v[1]), self.reduce_sum(v[2]), self.reduce_sum(v[3])]
    }

    /// The largest lane, compared in the tree of [`Simd::reduce_sum`] with [`Simd::max`].
    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        let mut x = self.to_array(v);
        let mut half = LANES / 2;
        while half > 0 {
            for j in 0..half {
                x[j] = if x[j] > x[j + half] { x[j] } else { x[j + half] };
            }
            half /= 2;
        }
        x[0]
    }

    /// All lanes 0.
    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// 16 floats.
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: the array has 64 readable bytes.
        unsafe { self.load_ptr(x.as_ptr().cast()) }
    }

    /// The first `min(x.len(), 16)` floats of `x`, then zeros.
    #[inline(always)]
    fn load_partial(self, x: &[f32]) -> Self::V {
        if let Some(full) = x.first_chunk::<LANES>() {
            return self.load(full);
        }
        // SAFETY: `x` has that many floats, fewer than 16.
        unsafe { self.load_ptr_partial(x.as_ptr().cast(), x.len()) }
    }

    /// `n < 16` consecutive numbers of 2 bytes each (bf16, else f16) at any address, then zeros.
    ///
    /// # Safety
    /// `2 * n` bytes at `p` are readable.
    #[inline(always)]
    unsafe fn load_half_partial(self, p: *const u8, n: usize, bf16: bool) -> Self::V {
        let mut buf = [0u8; 2 * LANES];
        // SAFETY: the caller grants the bytes; 2n < 32.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buf.as_mut_ptr(), 2 * n);
            if bf16 { self.load_bf16(buf.as_ptr()) } else { self.load_f16(buf.as_ptr()) }
        }
    }

    /// Writes 16 floats.
    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        // SAFETY: the array has 64 writable bytes.
        unsafe { self.store_ptr(v, out.as_mut_ptr().cast()) }
    }

    /// Writes the first `min(out.len(), 16)` lanes.
    #[inline(always)]
    fn store_partial(self, v: Self::V, out: &mut [f32]) {
        if let Some(full) = out.first_chunk_mut::<LANES>() {
            return self.store(v, full);
        }
        let lanes = self.to_array(v);
        for (o, x) in out.iter_mut().zip(lanes) {
            *o = x;
        }
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        x
    }

    /// `-v`.
    #[inline(always)]
    fn neg(self, v: Self::V) -> Self::V {
        self.mul(v, self.splat(-1.0))
    }

    /// `|v|`.
    #[inline(always)]
    fn abs(self, v: Self::V) -> Self::V {
        self.max(v, self.sub(self.zero(), v))
    }

    /// `e^v`, see [`math::exp`].
    #[inline(always)]
    fn exp(self, v: Self::V) -> Self::V {
        math::exp(self, v)
    }
}

#[cfg(test)]
mod tests;
