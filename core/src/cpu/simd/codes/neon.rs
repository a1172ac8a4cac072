//! NEON without its dot product instructions: four registers per vector.

use std::arch::aarch64::*;

use super::super::{
    LANES, Neon, Simd,
    neon::{lanewise, proven},
};
use super::Codes;

impl Codes for Neon {
    type Float = Self;
    type B = [uint32x4_t; 4];

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
        let mut out = [[proven!(vdupq_n_u32(0)); 4]; 4];
        for (q, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
            proven!({
                let mut v = [vdupq_n_u32(0); 4];
                for (v, row) in v.iter_mut().zip(rows) {
                    *v = vreinterpretq_u32_u8(vld1q_u8(row.add(at)));
                }
                let a = vreinterpretq_u64_u32(vtrn1q_u32(v[0], v[1]));
                let b = vreinterpretq_u64_u32(vtrn1q_u32(v[2], v[3]));
                let c = vreinterpretq_u64_u32(vtrn2q_u32(v[0], v[1]));
                let d = vreinterpretq_u64_u32(vtrn2q_u32(v[2], v[3]));
                out[0][q] = vreinterpretq_u32_u64(vtrn1q_u64(a, b));
                out[1][q] = vreinterpretq_u32_u64(vtrn1q_u64(c, d));
                out[2][q] = vreinterpretq_u32_u64(vtrn2q_u64(a, b));
                out[3][q] = vreinterpretq_u32_u64(vtrn2q_u64(c, d));
            })
        }
        out
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::B {
        proven!([
            vreinterpretq_u32_u8(vld1q_u8(p)),
            vreinterpretq_u32_u8(vld1q_u8(p.add(16))),
            vreinterpretq_u32_u8(vld1q_u8(p.add(32))),
            vreinterpretq_u32_u8(vld1q_u8(p.add(48))),
        ])
    }

    #[inline(always)]
    unsafe fn store(self, a: Self::B, p: *mut u8) {
        for (i, a) in a.into_iter().enumerate() {
            proven!(vst1q_u8(p.add(16 * i), vreinterpretq_u8_u32(a)));
        }
    }

    #[inline(always)]
    fn splat(self, x: u32) -> Self::B {
        proven!([vdupq_n_u32(x); 4])
    }

    #[inline(always)]
    fn and(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| vandq_u32(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| vorrq_u32(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| veorq_u32(a, b))
    }

    #[inline(always)]
    fn shr(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| vshlq_u32(a, vdupq_n_s32(-(n as i32))))
    }

    #[inline(always)]
    fn shl(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| vshlq_u32(a, vdupq_n_s32(n as i32)))
    }

    #[inline(always)]
    fn mul(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| vmulq_u32(a, b))
    }

    #[inline(always)]
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B {
        lanewise!(|a| vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_u32(a))))
    }

    #[inline(always)]
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B {
        lanewise!(|acc, w, x| {
            let (w, x) = (vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x));
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
            let high = vpaddlq_s16(vmull_high_s8(w, x));
            vaddq_u32(acc, vreinterpretq_u32_s32(vpaddq_s32(low, high)))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| vaddq_u32(a, b))
    }

    #[inline(always)]
    fn to_float(self, a: Self::B) -> [float32x4_t; 4] {
        lanewise!(|a| vcvtq_f32_s32(vreinterpretq_s32_u32(a)))
    }
}
