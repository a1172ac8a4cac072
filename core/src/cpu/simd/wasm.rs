//! WebAssembly's 128-bit vectors: four registers per vector. There is no detection: a module is compiled with them
//! (`-C target-feature=+simd128`) or without.

use std::arch::wasm32::*;

use super::{LANES, Simd, f16_to_f32};

/// One lane-wise operation on the four registers of each operand.
macro_rules! lanewise {
    (|$($x:ident),+| $e:expr) => {
        [
            { $(let $x = $x[0];)+ $e },
            { $(let $x = $x[1];)+ $e },
            { $(let $x = $x[2];)+ $e },
            { $(let $x = $x[3];)+ $e },
        ]
    };
}

pub(super) use lanewise;

/// Token of 128-bit vectors.
#[derive(Clone, Copy, Debug)]
pub struct Wasm128;

impl Simd for Wasm128 {
    type V = [v128; 4];

    const WIDE_TILE: bool = false;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        f(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [f32x4_splat(x); 4]
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u8) -> Self::V {
        let p: *const v128 = p.cast();
        // SAFETY: the caller grants 64 bytes; these loads take any address.
        unsafe { [v128_load(p), v128_load(p.add(1)), v128_load(p.add(2)), v128_load(p.add(3))] }
    }

    #[inline(always)]
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> Self::V {
        let mut x = [0f32; LANES];
        // SAFETY: the caller grants 4n bytes, and n < 16.
        unsafe { std::ptr::copy_nonoverlapping(p, x.as_mut_ptr().cast(), 4 * n) };
        self.load(&x)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Self::V {
        let p: *const v128 = p.cast();
        // SAFETY: the caller grants 32 bytes; these loads take any address.
        let (a, b) = unsafe { (v128_load(p), v128_load(p.add(1))) };
        [
            u32x4_shl(u32x4_extend_low_u16x8(a), 16),
            u32x4_shl(u32x4_extend_high_u16x8(a), 16),
            u32x4_shl(u32x4_extend_low_u16x8(b), 16),
            u32x4_shl(u32x4_extend_high_u16x8(b), 16),
        ]
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Self::V {
        // SAFETY: the caller grants 32 bytes.
        let h = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        let mut x = [0f32; LANES];
        for j in 0..LANES {
            x[j] = f16_to_f32(h[j]);
        }
        self.load(&x)
    }

    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut u8) {
        let p: *mut v128 = p.cast();
        // SAFETY: the caller grants 64 bytes; these stores take any address.
        unsafe {
            v128_store(p, v[0]);
            v128_store(p.add(1), v[1]);
            v128_store(p.add(2), v[2]);
            v128_store(p.add(3), v[3]);
        }
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| f32x4_add(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| f32x4_sub(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| f32x4_mul(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| f32x4_div(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Two roundings, as plain code has here: the relaxed instruction may round once or twice.
        lanewise!(|a, b, c| f32x4_add(f32x4_mul(a, b), c))
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // `pmax(b, a)` is `if b < a { a } else { b }`.
        lanewise!(|a, b| f32x4_pmax(b, a))
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        // `pmin(b, a)` is `if a < b { a } else { b }`.
        lanewise!(|a, b| f32x4_pmin(b, a))
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        lanewise!(|a, b, yes, no| v128_bitselect(yes, no, f32x4_lt(a, b)))
    }

    #[inline(always)]
    fn scale_pow2(self, p: Self::V, n: Self::V) -> Self::V {
        // Two exact powers of two, since 2^n itself may lie outside the normal numbers.
        lanewise!(|p, n| {
            let n = i32x4_trunc_sat_f32x4(n);
            let half = i32x4_shr(n, 1);
            let bias = i32x4_splat(127);
            let a = i32x4_shl(i32x4_add(half, bias), 23);
            let b = i32x4_shl(i32x4_add(i32x4_sub(n, half), bias), 23);
            f32x4_mul(f32x4_mul(p, a), b)
        })
    }

    #[inline(always)]
    fn reduce_sum(self, v: Self::V) -> f32 {
        let v = f32x4_add(f32x4_add(v[0], v[2]), f32x4_add(v[1], v[3]));
        let v = f32x4_add(v, i32x4_shuffle::<2, 3, 2, 3>(v, v));
        f32x4_extract_lane::<0>(v) + f32x4_extract_lane::<1>(v)
    }
}
