//! NEON: four registers per vector.

use std::arch::aarch64::*;

use super::{LANES, Simd, f16_to_f32};

/// Runs intrinsics whose CPU features the token proves.
macro_rules! proven {
    ($e:expr) => {{
        // SAFETY: a token exists only where detection found NEON; memory is the caller's contract.
        unsafe { $e }
    }};
}

/// One lane-wise operation on the four registers of each operand.
macro_rules! lanewise {
    (|$($x:ident),+| $e:expr) => {
        proven!([
            { $(let $x = $x[0];)+ $e },
            { $(let $x = $x[1];)+ $e },
            { $(let $x = $x[2];)+ $e },
            { $(let $x = $x[3];)+ $e },
        ])
    };
}

pub(super) use {lanewise, proven};

/// Token of NEON.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

impl Simd for Neon {
    type V = [float32x4_t; 4];

    const WIDE_TILE: bool = false;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        #[target_feature(enable = "neon")]
        fn enabled<R>(s: Neon, f: impl FnOnce(Neon) -> R) -> R {
            f(s)
        }
        proven!(enabled(self, f))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        proven!([vdupq_n_f32(x); 4])
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u8) -> Self::V {
        // Byte loads: the address need not be a multiple of 4.
        proven!([
            vreinterpretq_f32_u8(vld1q_u8(p)),
            vreinterpretq_f32_u8(vld1q_u8(p.add(16))),
            vreinterpretq_f32_u8(vld1q_u8(p.add(32))),
            vreinterpretq_f32_u8(vld1q_u8(p.add(48))),
        ])
    }

    #[inline(always)]
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> Self::V {
        let mut x = [0f32; LANES];
        proven!({
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr().cast(), 4 * n);
            self.load_ptr(x.as_ptr().cast())
        })
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Self::V {
        proven!({
            let (a, b) = (vreinterpretq_u16_u8(vld1q_u8(p)), vreinterpretq_u16_u8(vld1q_u8(p.add(16))));
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(a))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(a))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(b))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(b))),
            ]
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Self::V {
        let mut x = [0f32; LANES];
        proven!({
            let h = p.cast::<[u16; LANES]>().read_unaligned();
            for j in 0..LANES {
                x[j] = f16_to_f32(h[j]);
            }
            self.load_ptr(x.as_ptr().cast())
        })
    }

    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut u8) {
        proven!({
            vst1q_u8(p, vreinterpretq_u8_f32(v[0]));
            vst1q_u8(p.add(16), vreinterpretq_u8_f32(v[1]));
            vst1q_u8(p.add(32), vreinterpretq_u8_f32(v[2]));
            vst1q_u8(p.add(48), vreinterpretq_u8_f32(v[3]));
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {
        // The intrinsic is not stable, so this leaves it to the hardware prefetcher.
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| vdivq_f32(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanewise!(|a, b, c| vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // Not vmaxq: it differs from the rule for NaN and for zeros of either sign.
        lanewise!(|a, b| vbslq_f32(vcgtq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a, b| vbslq_f32(vcltq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        lanewise!(|a, b, yes, no| vbslq_f32(vcltq_f32(a, b), yes, no))
    }

    #[inline(always)]
    fn scale_pow2(self, p: Self::V, n: Self::V) -> Self::V {
        lanewise!(|p, n| scale_pow2_4(p, n))
    }

    #[inline(always)]
    fn reduce_sum(self, v: Self::V) -> f32 {
        proven!({
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        })
    }
}

/// [`Simd::scale_pow2`] of 4 lanes: two exact powers of two, since `2^n` itself may lie outside the normal numbers.
#[inline]
#[target_feature(enable = "neon")]
fn scale_pow2_4(p: float32x4_t, n: float32x4_t) -> float32x4_t {
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let rest = vsubq_s32(n, half);
    let bias = vdupq_n_s32(127);
    let a = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(half, bias)));
    let b = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(rest, bias)));
    vmulq_f32(vmulq_f32(p, a), b)
}
