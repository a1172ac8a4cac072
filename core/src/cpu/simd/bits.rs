//! Runs every operation on fixed numbers, for tests that all instruction sets agree on every platform.

use super::Simd;

/// A reproducible mix of magnitudes and signs.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_769).wrapping_add(12345);
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x
    };
    (0..n).map(|_| f32::from_bits((next() & 0x807f_ffff) | ((115 + next() % 16) << 23))).collect()
}

/// 16 numbers of [`noise`].
pub(super) fn v(seed: u32) -> [f32; 16] {
    let noise = noise(16, seed);
    std::array::from_fn(|j| noise[j])
}

/// The results of every operation of an instruction set, as one list of bits; a NaN counts without its payload.
#[inline(always)]
pub fn everything<S: Simd>(s: S) -> Vec<u32> {
    let (mut a, b, mut c) = (v(1), v(2), v(3));
    a[3] = b[3];
    (a[4], a[5], c[6]) = (f32::INFINITY, f32::NEG_INFINITY, 0.0);
    let bytes: Vec<u8> = (0..200u32).map(|i| (i * 89 % 251) as u8).collect();
    let (x, y, z) = (s.load(&a), s.load(&b), s.load(&c));
    let p = s.fma(s.load(&[0.03; 16]), s.splat(1.0), s.splat(1.0));
    let n = s.load(&[
        -150.0, -149.0, -140.0, -127.0, -126.0, -30.0, -1.0, 0.0, 1.0, 2.0, 77.0, 100.0, 126.0, 127.0, 128.0, 5.0,
    ]);
    let mut out: Vec<f32> = Vec::new();
    for r in [
        s.add(x, y),
        s.sub(x, y),
        s.mul(x, y),
        s.div(y, z),
        s.fma(y, z, x),
        s.max(x, y),
        s.min(x, y),
        s.select_lt(x, y, z, y),
        s.scale_pow2(p, n),
        s.exp(y),
        s.neg(x),
        s.abs(x),
        s.splat(1.5),
    ] {
        out.extend(s.to_array(r));
    }
    out.extend([s.reduce_sum(y), s.reduce_sum(z), s.reduce_max(x), s.reduce_max(z)]);
    for n in 0..=16 {
        let mut part = vec![7.0; n + 1];
        s.store_partial(s.add(s.load_partial(&a[..n]), y), &mut part[..n]);
        out.extend(part);
    }
    for at in 0..5 {
        // SAFETY: the buffer has 200 bytes.
        unsafe {
            let p = bytes.as_ptr().add(at);
            out.extend(s.to_array(s.load_ptr(p)));
            out.extend(s.to_array(s.load_bf16(p)));
            out.extend(s.to_array(s.load_f16(p)));
            for n in 0..16 {
                out.extend(s.to_array(s.load_ptr_partial(p, n)));
                out.extend(s.to_array(s.load_half_partial(p, n, true)));
                out.extend(s.to_array(s.load_half_partial(p, n, false)));
            }
        }
    }
    out.into_iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
}
