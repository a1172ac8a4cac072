//! AVX-512 (one register per vector) and AVX2 with FMA (two).

use std::arch::x86_64::*;

use super::Simd;

/// Runs intrinsics whose CPU features the token proves.
macro_rules! proven {
    ($e:expr) => {{
        // SAFETY: a token exists only where detection found its features; memory is the caller's contract.
        unsafe { $e }
    }};
}

pub(super) use proven;

/// Token of AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        (found && Avx2::detect().is_some()).then_some(Self(()))
    }

    /// The token of the smaller instruction set.
    pub fn avx2(self) -> Avx2 {
        Avx2(())
    }
}

impl Simd for Avx512 {
    type V = __m512;

    const WIDE_TILE: bool = true;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn enabled<R>(s: Avx512, f: impl FnOnce(Avx512) -> R) -> R {
            f(s)
        }
        proven!(enabled(self, f))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proven!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u8) -> __m512 {
        proven!(_mm512_loadu_ps(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> __m512 {
        proven!(_mm512_maskz_loadu_ps((1u16 << n) - 1, p.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        proven!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_ptr(self, v: __m512, p: *mut u8) {
        proven!(_mm512_storeu_ps(p.cast(), v))
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        proven!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        proven!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }

    #[inline(always)]
    fn scale_pow2(self, p: __m512, n: __m512) -> __m512 {
        proven!(_mm512_scalef_ps(p, n))
    }

    #[inline(always)]
    fn reduce_sum(self, v: __m512) -> f32 {
        proven!(sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))))
    }

    #[inline(always)]
    fn reduce_sum4(self, v: [__m512; 4]) -> [f32; 4] {
        proven!({
            // Lower and upper halves of two vectors side by side, added: lanes j and j + 8 of both.
            let a = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(v[0], v[1]),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(v[0], v[1]),
            );
            let b = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(v[2], v[3]),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(v[2], v[3]),
            );
            // Even and odd quarters: lanes j and j + 4 of all four.
            let v =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0b00_00_11_10>(v));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0b00_00_00_01>(v));
            // Lane 0 of each quarter.
            let v = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v));
            [
                _mm_cvtss_f32(v),
                _mm_cvtss_f32(_mm_permute_ps::<1>(v)),
                _mm_cvtss_f32(_mm_permute_ps::<2>(v)),
                _mm_cvtss_f32(_mm_permute_ps::<3>(v)),
            ]
        })
    }
}

/// The sum of 8 lanes, halves first. Needs AVX.
#[inline]
#[target_feature(enable = "avx")]
fn sum8(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Token of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

impl Simd for Avx2 {
    type V = [__m256; 2];

    const WIDE_TILE: bool = false;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enabled<R>(s: Avx2, f: impl FnOnce(Avx2) -> R) -> R {
            f(s)
        }
        proven!(enabled(self, f))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        proven!([_mm256_set1_ps(x), _mm256_set1_ps(x)])
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u8) -> Self::V {
        proven!([_mm256_loadu_ps(p.cast()), _mm256_loadu_ps(p.add(32).cast())])
    }

    #[inline(always)]
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> Self::V {
        let mut x = [0f32; 16];
        proven!({
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr().cast(), 4 * n);
            self.load_ptr(x.as_ptr().cast())
        })
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Self::V {
        proven!({
            let lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(lo)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(hi))]
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Self::V {
        proven!([_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))])
    }

    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut u8) {
        proven!({
            _mm256_storeu_ps(p.cast(), v[0]);
            _mm256_storeu_ps(p.add(32).cast(), v[1]);
        })
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        proven!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        proven!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        proven!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        proven!([
            _mm256_blendv_ps(no[0], yes[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(no[1], yes[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn scale_pow2(self, p: Self::V, n: Self::V) -> Self::V {
        proven!([scale_pow2_8(p[0], n[0]), scale_pow2_8(p[1], n[1])])
    }

    #[inline(always)]
    fn reduce_sum(self, v: Self::V) -> f32 {
        proven!(sum8(_mm256_add_ps(v[0], v[1])))
    }
}

/// [`Simd::scale_pow2`] of 8 lanes: two exact powers of two, since `2^n` itself may lie outside the normal numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn scale_pow2_8(p: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let pow2 = |k| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(k, _mm256_set1_epi32(127))));
    _mm256_mul_ps(_mm256_mul_ps(p, pow2(half)), pow2(_mm256_sub_epi32(n, half)))
}
