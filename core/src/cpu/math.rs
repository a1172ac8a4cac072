//! Elementwise functions on 16 lanes, built from [`Simd`] operations only, so that every instruction set, full vectors
//! and tails give the same bits.
//!
//! The polynomials are Chebyshev fits of this project; each function states its error, which its test measures.

use super::simd::{Isa, Simd, dispatch};

/// Evaluates `c[0] + c[1] x + c[2] x^2 + ..`.
#[inline(always)]
fn poly<S: Simd, const N: usize>(s: S, x: S::V, c: [f32; N]) -> S::V {
    let mut p = s.splat(c[N - 1]);
    for i in (0..N - 1).rev() {
        p = s.fma(p, x, s.splat(c[i]));
    }
    p
}

/// `e^x` within 1.1 ulp; 0 below -103.98, infinity above 88.73, NaN for NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Outside these the result is 0 or infinity anyway. The operand order keeps NaN.
    let x = s.max(s.splat(-104.0), x);
    let x = s.min(s.splat(89.0), x);
    // Adding 1.5 * 2^23 rounds to an integer.
    let magic = s.splat(12_582_912.0);
    let n = s.sub(s.fma(x, s.splat(std::f32::consts::LOG2_E), magic), magic);
    // ln 2 in two parts, the first with 10 bits, so that n * LN2_HI is exact with or without fused operations.
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let q = poly(s, r, [0.5, 0.166_665_77, 0.041_666_556, 0.008_363_179, 0.001_392_618_4]);
    // 1 + (r + r^2 q)
    let p = s.add(s.fma(s.mul(r, r), q, r), s.splat(1.0));
    s.scale_pow2(p, n)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.neg(x))))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), exp(s, s.neg(x))))
}

/// `log(1 + e^x)`; `x` itself once `e^-x` no longer counts.
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    let u = exp(s, s.neg(s.abs(x)));
    // log(1 + u) = 2 atanh(t) with t = u / (2 + u) in 0..=1/3.
    let t = s.div(u, s.add(u, s.splat(2.0)));
    let z = s.mul(t, t);
    let q = poly(s, z, [0.333_333_34, 0.199_998_53, 0.142_961_79, 0.108_532_88, 0.116_121_65]);
    let half = s.fma(s.mul(t, z), q, t);
    s.fma(half, s.splat(2.0), s.max(s.zero(), x))
}

/// `max(x, 0)^2`.
#[inline(always)]
pub fn relu2<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.zero(), x);
    s.mul(x, x)
}

/// `tanh(x)`.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let a = s.abs(x);
    let one = s.splat(1.0);
    let z = s.mul(x, x);
    let q = poly(s, z, [-0.333_333_34, 0.133_333_04, -0.053_959_26, 0.021_768_919, -0.008_343_946, 0.002_292_744_8]);
    let small = s.fma(s.mul(x, z), q, x);
    let e = exp(s, s.mul(a, s.splat(-2.0)));
    let big = s.div(s.sub(one, e), s.add(one, e));
    let big = s.select_lt(x, s.zero(), s.neg(big), big);
    s.select_lt(a, s.splat(0.625), small, big)
}

/// The error function, within 1e-7 absolutely.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let z = s.mul(x, x);
    let q = poly(
        s,
        z,
        [
            std::f32::consts::FRAC_2_SQRT_PI,
            -0.376_126_3,
            0.112_835_95,
            -0.026_854_211,
            0.005_189_087_4,
            -8.016_864e-4,
            7.875_875e-5,
        ],
    );
    let small = s.mul(x, q);
    // 1 - e^(-a q(a)); beyond 4 the result is 1 and the polynomial no longer holds.
    let a = s.min(s.splat(4.0), s.abs(x));
    let q = poly(
        s,
        a,
        [
            1.128_971,
            0.633_923_26,
            0.108_161_41,
            -0.025_362_096,
            0.004_397_706_7,
            -5.218_701_4e-4,
            3.744_117e-5,
            -1.214_896_9e-6,
        ],
    );
    let big = s.sub(s.splat(1.0), exp(s, s.neg(s.mul(a, q))));
    let big = s.select_lt(x, s.zero(), s.neg(big), big);
    s.select_lt(s.abs(x), s.splat(1.0), small, big)
}

/// `x/2 (1 + erf(x / sqrt 2))`.
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let half = s.mul(x, s.splat(0.5));
    s.fma(half, erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2))), half)
}

/// `x[i] = f(x[i])`; `f` is one of this module's functions or an `#[inline(always)]` closure.
#[inline(always)]
pub fn map<S: Simd>(s: S, x: &mut [f32], f: impl Fn(S, S::V) -> S::V) {
    let (full, tail) = x.as_chunks_mut::<16>();
    for x in full {
        let v = f(s, s.load(x));
        s.store(v, x);
    }
    if !tail.is_empty() {
        let v = f(s, s.load_partial(tail));
        s.store_partial(v, tail);
    }
}

macro_rules! scalar {
    ($($(#[$doc:meta])* $name:ident = $f:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(x: f32) -> f32 {
            dispatch!(Isa::best(), |s| s.to_array($f(s, s.splat(x)))[0])
        }
    )*};
}

scalar! {
    /// [`exp`] of one number, with the bits of the vector form.
    exp_scalar = exp;
    /// [`sigmoid`] of one number, with the bits of the vector form.
    sigmoid_scalar = sigmoid;
    /// [`silu`] of one number, with the bits of the vector form.
    silu_scalar = silu;
    /// [`softplus`] of one number, with the bits of the vector form.
    softplus_scalar = softplus;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies one function on one instruction set.
    fn apply(isa: Isa, name: &str, x: &mut [f32]) {
        match name {
            "exp" => dispatch!(isa, |s| map(s, x, exp)),
            "sigmoid" => dispatch!(isa, |s| map(s, x, sigmoid)),
            "silu" => dispatch!(isa, |s| map(s, x, silu)),
            "softplus" => dispatch!(isa, |s| map(s, x, softplus)),
            "relu2" => dispatch!(isa, |s| map(s, x, relu2)),
            "tanh" => dispatch!(isa, |s| map(s, x, tanh)),
            "erf" => dispatch!(isa, |s| map(s, x, erf)),
            "gelu" => dispatch!(isa, |s| map(s, x, gelu)),
            _ => unreachable!(),
        }
    }

    const ALL: [&str; 8] = ["exp", "sigmoid", "silu", "softplus", "relu2", "tanh", "erf", "gelu"];

    fn inputs(from: f32, to: f32, n: usize) -> Vec<f32> {
        (0..n).map(|i| from + (to - from) * i as f32 / (n - 1) as f32).collect()
    }

    fn special() -> Vec<f32> {
        let mut x = vec![0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN];
        x.extend([1e-40, -1e-40, 88.72, 88.73, -87.33, -87.4, -103.9, -104.1, 89.5, -500.0, 0.625, 20.0, 20.01]);
        x
    }

    /// Distance in units of the last place of `want`'s f32 (the smallest normal's below it).
    fn ulps(got: f32, want: f64) -> f64 {
        let near = (want.abs() as f32).max(f32::MIN_POSITIVE);
        let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn same_bits_on_every_isa_and_in_tails() {
        let mut x = inputs(-110.0, 95.0, 20_011);
        x.extend(inputs(-6.0, 6.0, 10_007));
        x.extend(special());
        for name in ALL {
            let mut want = x.clone();
            apply(Isa::all()[Isa::all().len() - 1], name, &mut want);
            for isa in Isa::all() {
                let mut got = x.clone();
                apply(isa, name, &mut got);
                let mut single = x.clone();
                single.chunks_mut(5).for_each(|c| apply(isa, name, c));
                for i in 0..x.len() {
                    let same = |a: f32| a.to_bits() == want[i].to_bits() || (a.is_nan() && want[i].is_nan());
                    assert!(same(got[i]) && same(single[i]), "{name}({}) on {}: {}", x[i], isa.name(), got[i]);
                }
            }
        }
    }

    #[test]
    fn accuracy() {
        let worst = |name: &str, from: f32, to: f32, f: fn(f64) -> f64| {
            let x = inputs(from, to, 400_001);
            let mut y = x.clone();
            apply(Isa::best(), name, &mut y);
            let e = x.iter().zip(&y).map(|(&x, &y)| ulps(y, f(f64::from(x)))).fold(0.0, f64::max);
            println!("{name} on {from}..{to}: {e:.2} ulp");
            e
        };
        assert!(worst("exp", -87.0, 88.0, f64::exp) < 1.1);
        assert!(worst("sigmoid", -80.0, 80.0, |x| 1.0 / (1.0 + (-x).exp())) < 2.5);
        assert!(worst("silu", -80.0, 80.0, |x| x / (1.0 + (-x).exp())) < 3.0);
        assert!(worst("softplus", -80.0, 80.0, |x| x.exp().ln_1p()) < 3.0);
        assert!(worst("tanh", -10.0, 10.0, f64::tanh) < 3.0);
    }

    #[test]
    fn erf_values() {
        // From tables (Abramowitz and Stegun 7.1), 10 digits.
        for (x, want) in
            [(0.1, 0.112_462_916_0), (0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (1.5, 0.966_105_146_5)]
        {
            for sign in [1.0, -1.0] {
                let mut y = [sign * x];
                apply(Isa::best(), "erf", &mut y);
                assert!((f64::from(y[0]) - f64::from(sign) * want).abs() < 1e-7, "erf({x}) = {}", y[0]);
            }
        }
        let mut y = [2.0f32, 3.0, 5.0, f32::INFINITY, f32::NEG_INFINITY];
        apply(Isa::best(), "erf", &mut y);
        for (y, want) in y.into_iter().zip([0.995_322_265_0, 0.999_977_909_5, 1.0, 1.0, -1.0]) {
            assert!((f64::from(y) - want).abs() < 1e-7, "{y} {want}");
        }
    }

    #[test]
    fn limits() {
        let mut x = [f32::NEG_INFINITY, -104.5, -1e30, f32::INFINITY, 100.0, f32::NAN, 0.0, -0.0];
        apply(Isa::best(), "exp", &mut x);
        assert_eq!(x[..5], [0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY]);
        assert!(x[5].is_nan());
        assert_eq!(x[6..], [1.0, 1.0]);
        let mut x = [f32::NEG_INFINITY, -200.0, 20.5, 1e30, f32::INFINITY];
        apply(Isa::best(), "softplus", &mut x);
        assert_eq!(x, [0.0, 0.0, 20.5, 1e30, f32::INFINITY]);
    }
}
