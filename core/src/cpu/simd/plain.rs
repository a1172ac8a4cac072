//! Plain Rust on arrays of 16: the reference that the other implementations must match bit for bit.

use super::{LANES, Simd, f16_to_f32};

/// Token of plain code, which every CPU runs.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

/// `a * b + c`. wasm32 has no fused multiply-add and an emulated one is slower by a factor of about 50, so there,
/// and only there, the product is rounded too.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "wasm32") { a * b + c } else { a.mul_add(b, c) }
}

/// [`fma`] of vectors where each lane is a call of the C library: 16 calls in a row at every use would be most of this crate's
/// code, and of its build time.
#[inline(never)]
fn called_fma(a: &[f32; LANES], b: &[f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
    for j in 0..LANES {
        c[j] = fma(a[j], b[j], c[j]);
    }
    c
}

#[inline(always)]
pub(super) fn zip<T: Copy>(mut a: [T; LANES], b: [T; LANES], f: impl Fn(T, T) -> T) -> [T; LANES] {
    for j in 0..LANES {
        a[j] = f(a[j], b[j]);
    }
    a
}

impl Simd for Plain {
    type V = [f32; LANES];

    const WIDE_TILE: bool = false;

    // A function of its own, as for the other instruction sets: one copy of the code wherever it is called from.
    #[inline(never)]
    fn run<R>(self, f: impl FnOnce(Self) -> R) -> R {
        f(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u8) -> Self::V {
        // SAFETY: the caller grants 64 bytes.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_ptr_partial(self, p: *const u8, n: usize) -> Self::V {
        let mut v = [0.0; LANES];
        // SAFETY: the caller grants 4n bytes, and n < 16.
        unsafe { std::ptr::copy_nonoverlapping(p, v.as_mut_ptr().cast(), 4 * n) };
        v
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Self::V {
        // SAFETY: the caller grants 32 bytes.
        let h = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        h.map(|h| f32::from_bits(u32::from(h) << 16))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Self::V {
        // SAFETY: the caller grants 32 bytes.
        let h = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        h.map(f16_to_f32)
    }

    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut u8) {
        // SAFETY: the caller grants 64 bytes.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        if cfg!(all(target_arch = "x86_64", not(target_feature = "fma"))) {
            return called_fma(&a, &b, c);
        }
        for j in 0..LANES {
            c[j] = fma(a[j], b[j], c[j]);
        }
        c
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, mut no: Self::V) -> Self::V {
        for j in 0..LANES {
            no[j] = if a[j] < b[j] { yes[j] } else { no[j] };
        }
        no
    }

    #[inline(always)]
    fn scale_pow2(self, p: Self::V, n: Self::V) -> Self::V {
        zip(p, n, |p, n| {
            // Two exact powers of two, since 2^n itself may lie outside the normal numbers.
            let n = n as i32;
            let half = n >> 1;
            let pow2 = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
            p * pow2(half) * pow2(n.wrapping_sub(half))
        })
    }

    #[inline(always)]
    fn reduce_sum(self, mut v: Self::V) -> f32 {
        let mut half = LANES / 2;
        while half > 0 {
            for j in 0..half {
                v[j] += v[j + half];
            }
            half /= 2;
        }
        v[0]
    }
}
