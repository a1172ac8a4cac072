//! Loops over f32 slices with the one reduction order: lane `j` sums the elements `k = j mod 16` in ascending order with
//! fused multiply-adds, and the lanes are added in the tree of [`Simd::reduce_sum`].
//!
//! Slices of one call have equal lengths; surplus elements of a longer one are ignored.

use super::simd::{LANES, Simd};

/// `sum a[k] b[k]`.
#[inline(always)]
pub fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let (a, a_tail) = a[..n].as_chunks::<LANES>();
    let (b, b_tail) = b[..n].as_chunks::<LANES>();
    let mut acc = s.zero();
    for (a, b) in a.iter().zip(b) {
        acc = s.fma(s.load(a), s.load(b), acc);
    }
    if !a_tail.is_empty() {
        acc = s.fma(s.load_partial(a_tail), s.load_partial(b_tail), acc);
    }
    s.reduce_sum(acc)
}

/// [`dot`] of `a` with the four rows of `b`, `[4, a.len()]`.
#[inline(always)]
pub fn dot4<S: Simd>(s: S, a: &[f32], b: &[f32]) -> [f32; 4] {
    let n = a.len();
    let (b0, b) = b.split_at(n);
    let (b1, b) = b.split_at(n);
    let (b2, b) = b.split_at(n);
    let b = [b0, b1, b2, &b[..n]];
    let mut acc = [s.zero(); 4];
    let full = n / LANES * LANES;
    let mut at = 0;
    while at < full {
        let x = s.load_partial(&a[at..at + LANES]);
        for i in 0..4 {
            acc[i] = s.fma(x, s.load_partial(&b[i][at..at + LANES]), acc[i]);
        }
        at += LANES;
    }
    if full < n {
        let x = s.load_partial(&a[full..]);
        for i in 0..4 {
            acc[i] = s.fma(x, s.load_partial(&b[i][full..]), acc[i]);
        }
    }
    s.reduce_sum4(acc)
}

/// `sum x[k]^2`.
#[inline(always)]
pub fn sum_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    dot(s, x, x)
}

/// `y += a x`.
#[inline(always)]
pub fn axpy<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
    let n = x.len().min(y.len());
    let a = s.splat(a);
    let (x, x_tail) = x[..n].as_chunks::<LANES>();
    let (y, y_tail) = y[..n].as_chunks_mut::<LANES>();
    for (x, y) in x.iter().zip(y) {
        s.store(s.fma(a, s.load(x), s.load(y)), y);
    }
    if !x_tail.is_empty() {
        let v = s.fma(a, s.load_partial(x_tail), s.load_partial(y_tail));
        s.store_partial(v, y_tail);
    }
}

/// `x *= a`.
#[inline(always)]
pub fn scale<S: Simd>(s: S, a: f32, x: &mut [f32]) {
    super::math::map(
        s,
        x,
        #[inline(always)]
        |s, v| s.mul(s.splat(a), v),
    );
}

/// One token of a recurrence on one state row: `state = decay state + a b`, then returns `sum state[k] c[k]`.
#[inline(always)]
pub fn decay_add_dot<S: Simd>(s: S, state: &mut [f32], decay: f32, a: f32, b: &[f32], c: &[f32]) -> f32 {
    let n = state.len().min(b.len()).min(c.len());
    let (decay, a) = (s.splat(decay), s.splat(a));
    let (h, h_tail) = state[..n].as_chunks_mut::<LANES>();
    let (b, b_tail) = b[..n].as_chunks::<LANES>();
    let (c, c_tail) = c[..n].as_chunks::<LANES>();
    let mut acc = s.zero();
    for ((h, b), c) in h.iter_mut().zip(b).zip(c) {
        let new = s.fma(a, s.load(b), s.mul(decay, s.load(h)));
        s.store(new, h);
        acc = s.fma(new, s.load(c), acc);
    }
    if !h_tail.is_empty() {
        let new = s.fma(a, s.load_partial(b_tail), s.mul(decay, s.load_partial(h_tail)));
        s.store_partial(new, h_tail);
        acc = s.fma(new, s.load_partial(c_tail), acc);
    }
    s.reduce_sum(acc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{Isa, dispatch};

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
    }

    /// The rule, spelled out.
    fn lanes_dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lane = [0f32; 16];
        for (k, (a, b)) in a.iter().zip(b).enumerate() {
            lane[k % 16] = a.mul_add(*b, lane[k % 16]);
        }
        for half in [8, 4, 2, 1] {
            for j in 0..half {
                lane[j] += lane[j + half];
            }
        }
        lane[0]
    }

    #[test]
    fn one_order_for_every_length_and_isa() {
        for n in (0..49).chain([255, 256, 1000]) {
            let (a, b, c) = (noise(n, 1), noise(n, 2), noise(n, 3));
            let want = lanes_dot(&a, &b);
            let state: Vec<f32> = (0..n).map(|k| 0.7f32.mul_add(b[k], 0.9 * a[k])).collect();
            let sum: Vec<f32> = (0..n).map(|k| 0.7f32.mul_add(b[k], a[k])).collect();
            for isa in Isa::all() {
                assert_eq!(dispatch!(isa, |s| dot(s, &a, &b)).to_bits(), want.to_bits(), "{n} {}", isa.name());
                let rows: Vec<f32> = [&b, &c, &a, &b].into_iter().flatten().copied().collect();
                let four = dispatch!(isa, |s| dot4(s, &a, &rows));
                for (row, got) in [&b, &c, &a, &b].into_iter().zip(four) {
                    assert_eq!(got.to_bits(), lanes_dot(&a, row).to_bits(), "{n} {}", isa.name());
                }
                let mut h = a.clone();
                let y = dispatch!(isa, |s| decay_add_dot(s, &mut h, 0.9, 0.7, &b, &c));
                assert_eq!(h, state, "{n} {}", isa.name());
                assert_eq!(y.to_bits(), lanes_dot(&state, &c).to_bits(), "{n} {}", isa.name());
                let mut y = a.clone();
                dispatch!(isa, |s| axpy(s, 0.7, &b, &mut y));
                assert_eq!(y, sum, "{n} {}", isa.name());
                dispatch!(isa, |s| scale(s, 3.0, &mut y));
                assert!(y.iter().zip(&sum).all(|(y, x)| *y == 3.0 * x));
            }
        }
    }
}
