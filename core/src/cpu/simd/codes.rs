//! Vectors of 64 bytes for products of integers: 16 lanes of four codes each, or 16 sums.
//!
//! Integer operations are exact, so all instruction sets agree. The float operations that go with them are those of
//! [`Codes::Float`].

#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::{LANES, Simd};

/// Operations on 16 lanes of 32 bits; `Self` is the token of an instruction set.
pub trait Codes: Copy + 'static {
    /// Vectors of f32 of the same instruction set.
    type Float: Simd;
    /// 16 lanes of 32 bits.
    type B: Copy;

    /// What is added (as an exclusive or) to codes of 8 bits before [`Codes::dot`]: 128 where it takes unsigned ones.
    const BIAS: u8;

    /// Whether [`Codes::pairs`] and [`Codes::folded`] are faster than [`Codes::words`] for one row of x.
    const PAIRS: bool = false;

    /// The token for floats.
    fn float(self) -> Self::Float;

    /// Calls `f` in a function compiled for this instruction set. `f` must be `#[inline(always)]`.
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R;

    /// Bytes `at .. at + 16` of 16 rows as words: lane `r` of vector `j` is word `j` of row `r`.
    ///
    /// # Safety
    /// The rows have these bytes.
    unsafe fn words(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 4];

    /// Bytes `at .. at + 32` of 16 rows: vector `i` holds row `8 (i / 4) + i % 4`, then the fourth row after it.
    ///
    /// # Safety
    /// The rows have these bytes.
    #[inline(always)]
    unsafe fn pairs(self, rows: &[*const u8; LANES], at: usize) -> [Self::B; 8] {
        let mut out = [self.splat(0); 8];
        for (i, out) in out.iter_mut().enumerate() {
            let mut both = [[0; 32]; 2];
            for (h, half) in both.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                *half = unsafe { rows[pair_row(i) + 4 * h].add(at).cast::<[u8; 32]>().read() };
            }
            // SAFETY: the array has 64 bytes.
            *out = unsafe { self.load(both.as_ptr().cast()) };
        }
        out
    }

    /// 32 bytes at any address, twice.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn twice(self, p: *const u8) -> Self::B {
        // SAFETY: the caller's contract; the array has 64 bytes.
        unsafe { self.load([p.cast::<[u8; 32]>().read(); 2].as_ptr().cast()) }
    }

    /// The sums of the lower and of the upper four words of each row of [`Codes::pairs`], lane `r` for row `r`.
    #[inline(always)]
    fn folded(self, pairs: [Self::B; 8]) -> [Self::B; 2] {
        let mut sums = [[0u32; LANES]; 2];
        for (i, pair) in pairs.into_iter().enumerate() {
            for (w, word) in self.lanes(pair).into_iter().enumerate() {
                let sum = &mut sums[w / 4 % 2][pair_row(i) + 4 * (w / 8)];
                *sum = sum.wrapping_add(word);
            }
        }
        // SAFETY: the arrays have 64 bytes.
        unsafe { [self.load(sums[0].as_ptr().cast()), self.load(sums[1].as_ptr().cast())] }
    }

    /// The two bytes at `at` of every row as f16, in f32.
    ///
    /// # Safety
    /// The rows have these bytes.
    #[inline(always)]
    unsafe fn halves(self, rows: &[*const u8; LANES], at: usize) -> <Self::Float as Simd>::V {
        let mut halves = [[0u8; 2]; LANES];
        for (half, row) in halves.iter_mut().zip(rows) {
            // SAFETY: the caller's contract.
            *half = unsafe { row.add(at).cast::<[u8; 2]>().read() };
        }
        // SAFETY: the array has 32 bytes.
        unsafe { self.float().load_f16(halves.as_ptr().cast()) }
    }

    /// 64 bytes at any address.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load(self, p: *const u8) -> Self::B;

    /// Writes 64 bytes at any address.
    ///
    /// # Safety
    /// They are writable.
    unsafe fn store(self, a: Self::B, p: *mut u8);

    /// All lanes `x`.
    fn splat(self, x: u32) -> Self::B;
    /// `a & b`.
    fn and(self, a: Self::B, b: Self::B) -> Self::B;
    /// `a | b`.
    fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// `a ^ b`.
    fn xor(self, a: Self::B, b: Self::B) -> Self::B;
    /// Lanes shifted right by `n < 32` bits; zeros come in.
    fn shr(self, a: Self::B, n: u32) -> Self::B;
    /// Lanes shifted left by `n < 32` bits.
    fn shl(self, a: Self::B, n: u32) -> Self::B;
    /// The lower 32 bits of the lanes' products.
    fn mul(self, a: Self::B, b: Self::B) -> Self::B;
    /// For each byte, which is less than 16, that entry of the table.
    fn lookup(self, a: Self::B, table: &[u8; 16]) -> Self::B;

    /// Adds to each lane of `acc` the sum of four products: codes of `w` times the four of `x`, which lie in
    /// `-127..=127`. Codes of `w` are 0 to 127; if `WIDE`, any signed ones, xor [`Codes::BIAS`], which an unsigned
    /// product counts as larger by that.
    #[inline(always)]
    fn dot<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: u32) -> Self::B {
        self.dots::<WIDE>(acc, w, self.splat(x))
    }

    /// [`Codes::dot`] with four codes of x per lane.
    fn dots<const WIDE: bool>(self, acc: Self::B, w: Self::B, x: Self::B) -> Self::B;

    /// `a + b`, modulo 2^32.
    fn add(self, a: Self::B, b: Self::B) -> Self::B;

    /// Signed lanes as floats, rounded to nearest.
    fn to_float(self, a: Self::B) -> <Self::Float as Simd>::V;

    /// The lower 16 bits of the lanes, which are f16, as f32.
    #[inline(always)]
    fn half(self, a: Self::B) -> <Self::Float as Simd>::V {
        let halves = self.lanes(a).map(|x| x as u16);
        // SAFETY: the array has 32 bytes.
        unsafe { self.float().load_f16(halves.as_ptr().cast()) }
    }

    /// The lanes as an array.
    #[inline(always)]
    fn lanes(self, a: Self::B) -> [u32; LANES] {
        let mut out = [0u32; LANES];
        // SAFETY: the array has 64 bytes.
        unsafe { self.store(a, out.as_mut_ptr().cast()) };
        out
    }
}

/// The first row of a vector of [`Codes::pairs`].
const fn pair_row(i: usize) -> usize {
    8 * (i / 4) + i % 4
}

/// Runs an expression with the token `s` for integers of instruction set `isa`, compiled for that instruction set.
macro_rules! dispatch_codes {
    ($isa:expr, |$s:ident| $body:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx512(t) => match t.vnni() {
                Some(t) => $crate::cpu::simd::codes::Codes::run(
                    t,
                    #[inline(always)]
                    |$s| $body,
                ),
                None => $crate::cpu::simd::codes::Codes::run(
                    t.avx2(),
                    #[inline(always)]
                    |$s| $body,
                ),
            },
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx2(t) => $crate::cpu::simd::codes::Codes::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::simd::Isa::Neon(t) => $crate::cpu::simd::codes::Codes::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::cpu::simd::Isa::Wasm128(t) => $crate::cpu::simd::codes::Codes::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
            #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
            $crate::cpu::simd::Isa::Plain(t) => $crate::cpu::simd::codes::Codes::run(
                t,
                #[inline(always)]
                |$s| $body,
            ),
        }
    };
}
pub(crate) use dispatch_codes;

#[cfg(test)]
mod tests;
