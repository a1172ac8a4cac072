//! AVX-512 with VNNI (one register per vector) and AVX2 (two).

use std::arch::x86_64::*;

use super::super::{Avx2, Avx512, LANES, Simd, x86::proven};
use super::{Codes, pair_row};

/// Token of [`Avx512`] with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Vnni(Avx512);

impl Avx512 {
    /// The token for products of integers, if this CPU has the instructions.
    pub fn vnni(self) -> Option<Vnni> {
        is_x86_feature_detected!("avx512vnni").then_some(Vnni(self))
    }
}

/// 16 bytes from each of two addresses.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn pair(p: [*const u8; 2]) -> __m256i {
    // SAFETY: the caller's contract.
    let [low, high] = unsafe { [_mm_loadu_si128(p[0].cast()), _mm_loadu_si128(p[1].cast())] };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
}

impl Codes for Vnni {
    type Float = Avx512;
    type B = __m512i;

    const BIAS: u8 = 128;
    const PAIRS: bool = true;

    #[inline(always)]
    fn float(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        fn enabled<R>(s: Vnni, f: impl FnOnce(Vnni) -> R) -> R {
            f(s)
        }
        proven!(enabled(self, f))
    }

    #[inline(always)]
    unsafe fn words(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 4] {
        proven!({
            // Row 4 q + i in quarter q of vector i.
            let mut v = [_mm512_setzero_si512(); 4];
            for (i, v) in v.iter_mut().enumerate() {
                let low = [rows[i].add(at), rows[4 + i].add(at)];
                let high = [rows[8 + i].add(at), rows[12 + i].add(at)];
                *v = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(pair(low)), pair(high));
            }
            let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpacklo_epi32(v[2], v[3]));
            let (c, d) = (_mm512_unpackhi_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[2], v[3]));
            [
                _mm512_unpacklo_epi64(a, b),
                _mm512_unpackhi_epi64(a, b),
                _mm512_unpacklo_epi64(c, d),
                _mm512_unpackhi_epi64(c, d),
            ]
        })
    }

    #[inline(always)]
    unsafe fn pairs(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 8] {
        proven!({
            let mut out = [_mm512_setzero_si512(); 8];
            for (i, out) in out.iter_mut().enumerate() {
                let (low, high) = (rows[pair_row(i)].wrapping_add(at), rows[pair_row(i) + 4].wrapping_add(at));
                let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
                *out = _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.cast()));
            }
            out
        })
    }

    #[inline(always)]
    unsafe fn twice(self, p: *const u8) -> Self::B {
        proven!(_mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    fn folded(self, p: [Self::B; 8]) -> [Self::B; 2] {
        proven!({
            // Quarters with four sums each: of the lower half of four rows, of the upper, then of the fourth rows after them.
            let mut sums = [p[0]; 2];
            for (h, sums) in sums.iter_mut().enumerate() {
                let [a, b, c, d] = [p[4 * h], p[4 * h + 1], p[4 * h + 2], p[4 * h + 3]];
                let a = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let c = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                *sums = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
            }
            let [a, b] = sums;
            [_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b)]
        })
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::B {
        proven!(_mm512_loadu_si512(p.cast()))
    }

    #[inline(always)]
    unsafe fn store(self, a: Self::B, p: *mut u8) {
        proven!(_mm512_storeu_si512(p.cast(), a))
    }

    #[inline(always)]
    fn splat(self, x: u32) -> Self::B {
        proven!(_mm512_set1_epi32(x as i32))
    }

    #[inline(always)]
    fn and(self, a: Self::B, b: Self::B) -> Self::B {
        proven!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        proven!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::B, b: Self::B) -> Self::B {
        proven!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn shr(self, a: Self::B, n: u32) -> Self::B {
        proven!(_mm512_srlv_epi32(a, _mm512_set1_epi32(n as i32)))
    }

    #[inline(always)]
    fn shl(self, a: Self::B, n: u32) -> Self::B {
        proven!(_mm512_sllv_epi32(a, _mm512_set1_epi32(n as i32)))
    }

    #[inline(always)]
    fn mul(self, a: Self::B, b: Self::B) -> Self::B {
        proven!(_mm512_mullo_epi32(a, b))
    }

    #[inline(always)]
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B {
        proven!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a))
    }

    #[inline(always)]
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B {
        proven!(_mm512_dpbusd_epi32(acc, w, x))
    }

    #[inline(always)]
    fn add(self, a: Self::B, b: Self::B) -> Self::B {
        proven!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn to_float(self, a: Self::B) -> __m512 {
        proven!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    unsafe fn halves(self, rows: &[*const u8; LANES], at: usize) -> __m512 {
        let mut halves = [0i16; LANES];
        for (half, row) in halves.iter_mut().zip(rows) {
            // SAFETY: the caller's contract.
            *half = unsafe { row.wrapping_add(at).cast::<i16>().read_unaligned() };
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = halves;
        proven!(_mm512_cvtph_ps(_mm256_setr_epi16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)))
    }

    #[inline(always)]
    fn half(self, a: Self::B) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))
    }
}

/// One lane-wise operation on both registers of each operand.
macro_rules! lanewise {
    (|$($x:ident),+| $e:expr) => {
        proven!([{ $(let $x = $x[0];)+ $e }, { $(let $x = $x[1];)+ $e }])
    };
}

impl Codes for Avx2 {
    type Float = Self;
    type B = [__m256i; 2];

    const BIAS: u8 = 0;
    const PAIRS: bool = true;

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
        let mut out = [[proven!(_mm256_setzero_si256()); 2]; 4];
        for (h, rows) in rows.as_chunks::<8>().0.iter().enumerate() {
            proven!({
                // Row 4 q + i in half q of vector i.
                let mut v = [_mm256_setzero_si256(); 4];
                for (i, v) in v.iter_mut().enumerate() {
                    *v = pair([rows[i].add(at), rows[4 + i].add(at)]);
                }
                let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpacklo_epi32(v[2], v[3]));
                let (c, d) = (_mm256_unpackhi_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[2], v[3]));
                out[0][h] = _mm256_unpacklo_epi64(a, b);
                out[1][h] = _mm256_unpackhi_epi64(a, b);
                out[2][h] = _mm256_unpacklo_epi64(c, d);
                out[3][h] = _mm256_unpackhi_epi64(c, d);
            })
        }
        out
    }

    #[inline(always)]
    unsafe fn pairs(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 8] {
        proven!({
            let mut out = [[_mm256_setzero_si256(); 2]; 8];
            for (i, out) in out.iter_mut().enumerate() {
                for (h, out) in out.iter_mut().enumerate() {
                    *out = _mm256_loadu_si256(rows[pair_row(i) + 4 * h].wrapping_add(at).cast());
                }
            }
            out
        })
    }

    #[inline(always)]
    unsafe fn twice(self, p: *const u8) -> Self::B {
        proven!([_mm256_loadu_si256(p.cast()); 2])
    }

    #[inline(always)]
    fn folded(self, p: [Self::B; 8]) -> [Self::B; 2] {
        proven!({
            // As above, with the lower and the upper half of rows in the halves of a register.
            let (mut low, mut high) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
            for h in 0..2 {
                let mut sums = [_mm256_setzero_si256(); 2];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let [a, b, c, d] = [p[4 * h][r], p[4 * h + 1][r], p[4 * h + 2][r], p[4 * h + 3][r]];
                    let a = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                    let c = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                    *sums = _mm256_add_epi32(_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c));
                }
                low[h] = _mm256_permute2x128_si256::<0x20>(sums[0], sums[1]);
                high[h] = _mm256_permute2x128_si256::<0x31>(sums[0], sums[1]);
            }
            [low, high]
        })
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::B {
        proven!([_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())])
    }

    #[inline(always)]
    unsafe fn store(self, a: Self::B, p: *mut u8) {
        proven!({
            _mm256_storeu_si256(p.cast(), a[0]);
            _mm256_storeu_si256(p.add(32).cast(), a[1]);
        })
    }

    #[inline(always)]
    fn splat(self, x: u32) -> Self::B {
        proven!([_mm256_set1_epi32(x as i32); 2])
    }

    #[inline(always)]
    fn and(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| _mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| _mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn shr(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| _mm256_srlv_epi32(a, _mm256_set1_epi32(n as i32)))
    }

    #[inline(always)]
    fn shl(self, a: Self::B, n: u32) -> Self::B {
        lanewise!(|a| _mm256_sllv_epi32(a, _mm256_set1_epi32(n as i32)))
    }

    #[inline(always)]
    fn mul(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| _mm256_mullo_epi32(a, b))
    }

    #[inline(always)]
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B {
        let table = proven!(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())));
        lanewise!(|a| _mm256_shuffle_epi8(table, a))
    }

    #[inline(always)]
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B {
        lanewise!(|acc, w, x| {
            // Sums of two in 16 bits: codes of at most 127 (128 if signed) times 127 do not overflow them.
            let pairs = match WIDE {
                true => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
                false => _mm256_maddubs_epi16(w, x),
            };
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::B, b: Self::B) -> Self::B {
        lanewise!(|a, b| _mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn to_float(self, a: Self::B) -> [__m256; 2] {
        lanewise!(|a| _mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn half(self, a: Self::B) -> [__m256; 2] {
        proven!({
            let mask = _mm256_set1_epi32(0xffff);
            let packed = _mm256_packus_epi32(_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask));
            // Quarters a0 b0 a1 b1 of both in order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            [_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed))]
        })
    }
}
