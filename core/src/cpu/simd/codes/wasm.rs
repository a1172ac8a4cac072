//! WebAssembly's 128-bit vectors without relaxed instructions: four registers per vector.

use std::arch::wasm32::*;

use super::super::{LANES, Simd, Wasm128, wasm::lanewise};
use super::Codes;

impl Codes for Wasm128 {
    type Float = Self;
    type B = [v128; 4];

    const BIAS: u8 = 0;

    #[inline(always)]
    fn float(self) -> Self {
        self
    }

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        Simd::run(self, f)
    }

    #[inline(always)]
    unsafe fn words(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 4] {
        let mut out = [[u32x4_splat(0); 4]; 4];
        for (q, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
            let mut v = [u32x4_splat(0); 4];
            for (v, row) in v.iter_mut().zip(rows) {
                // SAFETY: the caller grants 16 bytes of each row; this load takes any address.
                *v = unsafe { v128_load(row.add(at).cast()) };
            }
            let (a, b) = (u32x4_shuffle::<0, 4, 1, 5>(v[0], v[1]), u32x4_shuffle::<0, 4, 1, 5>(v[2], v[3]));
            let (c, d) = (u32x4_shuffle::<2, 6, 3, 7>(v[0], v[1]), u32x4_shuffle::<2, 6, 3, 7>(v[2], v[3]));
            out[0][q] = u64x2_shuffle::<0, 2>(a, b);
            out[1][q] = u64x2_shuffle::<1, 3>(a, b);
            out[2][q] = u64x2_shuffle::<0, 2>(c, d);
            out[3][q] = u64x2_shuffle::<1, 3>(c, d);
        }
        out
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::B {
        let p: *const v128 = p.cast();
        // SAFETY: the caller grants 64 bytes; these loads take any address.
        unsafe { [v128_load(p), v128_load(p.add(1)), v128_load(p.add(2)), v128_load(p.add(3))] }
    }

    #[inline(always)]
    unsafe fn store(self, a: Self::B, p: *mut u8) {
        for (i, a) in a.into_iter().enumerate() {
            // SAFETY: the caller grants 64 bytes; these stores take any address.
            unsafe { v128_store(p.cast::<v128>().add(i), a) };
        }
    }

    #[inline(always)]
    fn splat(self, x: u32) -> Self::B {
        [u32x4_splat(x); 4]
    }

    #[inline(always)]
    fn and(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| v128_and(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| v128_or(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| v128_xor(a, b))
    }

    #[inline(always)]
    fn shr(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| u32x4_shr(a, n))
    }

    #[inline(always)]
    fn shl(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| u32x4_shl(a, n))
    }

    #[inline(always)]
    fn mul(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| i32x4_mul(a, b))
    }

    #[inline(always)]
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B {
        // SAFETY: the table has 16 bytes.
        let table = unsafe { v128_load(table.as_ptr().cast()) };
        lanewise!(|a| i8x16_swizzle(table, a))
    }

    #[inline(always)]
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B {
        lanewise!(|acc, w, x| {
            let low = i32x4_extadd_pairwise_i16x8(i16x8_extmul_low_i8x16(w, x));
            let high = i32x4_extadd_pairwise_i16x8(i16x8_extmul_high_i8x16(w, x));
            let even = i32x4_shuffle::<0, 2, 4, 6>(low, high);
            i32x4_add(acc, i32x4_add(even, i32x4_shuffle::<1, 3, 5, 7>(low, high)))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| u32x4_add(a, b))
    }

    #[inline(always)]
    fn to_float(self, a: Self::B) -> [v128; 4] {
        lanewise!(|a| f32x4_convert_i32x4(a))
    }
}
