//! Plain Rust on arrays of 16 words: the reference that the other implementations must match.

use super::super::{LANES, Plain, Simd, plain::zip};
use super::Codes;

impl Codes for Plain {
    type Float = Self;
    type B = [u32; LANES];

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
        let mut out = [[0; LANES]; 4];
        for (r, row) in rows.iter().enumerate() {
            // SAFETY: the caller grants 16 bytes.
            let words = unsafe { row.add(at).cast::<[u32; 4]>().read_unaligned() };
            for (j, word) in words.into_iter().enumerate() {
                out[j][r] = u32::from_le(word);
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::B {
        // SAFETY: the caller grants 64 bytes.
        unsafe { p.cast::<Self::B>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, a: Self::B, p: *mut u8) {
        // SAFETY: the caller grants 64 bytes.
        unsafe { p.cast::<Self::B>().write_unaligned(a) }
    }

    #[inline(always)]
    fn splat(self, x: u32) -> Self::B {
        [x; LANES]
    }

    #[inline(always)]
    fn and(self, a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, |a, b| a ^ b)
    }

    #[inline(always)]
    fn shr(self, a: Self::B, n: u32) -> Self::B {
        zip(a, a, |a, _| a >> n)
    }

    #[inline(always)]
    fn shl(self, a: Self::B, n: u32) -> Self::B {
        zip(a, a, |a, _| a << n)
    }

    #[inline(always)]
    fn mul(self, a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, u32::wrapping_mul)
    }

    #[inline(always)]
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B {
        zip(a, a, |a, _| u32::from_le_bytes(a.to_le_bytes().map(|b| table[usize::from(b & 15)])))
    }

    #[inline(always)]
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B {
        let products = zip(w, x, |w, x| {
            let [w, x] = [w, x].map(|four| four.to_le_bytes().map(|b| i32::from(b as i8)));
            (w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]) as u32
        });
        zip(acc, products, u32::wrapping_add)
    }

    #[inline(always)]
    fn add(self, a: Self::B, b: Self::B) -> Self::B {
        zip(a, b, u32::wrapping_add)
    }

    #[inline(always)]
    fn to_float(self, a: Self::B) -> [f32; LANES] {
        a.map(|a| a as i32 as f32)
    }
}
