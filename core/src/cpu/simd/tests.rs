use super::*;

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

fn v(seed: u32) -> [f32; 16] {
    noise(16, seed)[..].try_into().unwrap()
}

/// Every operation on one instruction set, as one list of bits.
fn everything(isa: Isa) -> Vec<u32> {
    let (mut a, b, mut c) = (v(1), v(2), v(3));
    a[3] = b[3];
    (a[4], a[5], c[6]) = (f32::INFINITY, f32::NEG_INFINITY, 0.0);
    let bytes: Vec<u8> = (0..200u32).map(|i| (i * 89 % 251) as u8).collect();
    dispatch!(isa, |s| {
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
    })
}

#[test]
fn every_operation_has_the_same_bits_on_every_isa() {
    let all = Isa::all();
    println!("{:?}", all.iter().map(|i| i.name()).collect::<Vec<_>>());
    let want = everything(*all.last().unwrap());
    for isa in all {
        let got = everything(isa);
        let at = (0..want.len()).find(|&i| got[i] != want[i]);
        assert_eq!(at, None, "{}: {:08x?} {:08x?}", isa.name(), at.map(|i| got[i]), at.map(|i| want[i]));
    }
}

#[test]
fn every_f16_converts_exactly() {
    for isa in Isa::all() {
        for base in (0..=u16::MAX).step_by(16) {
            let halves: [u16; 16] = std::array::from_fn(|j| base + j as u16);
            // SAFETY: 32 bytes.
            let got = dispatch!(isa, |s| s.to_array(unsafe { s.load_f16(halves.as_ptr().cast()) }));
            for (h, got) in halves.into_iter().zip(got) {
                let want = half::f16::from_bits(h).to_f32();
                assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{h:04x}: {got} {want}");
            }
        }
    }
}

#[test]
fn sums_follow_the_tree() {
    let x = v(9);
    let eight: [f32; 8] = std::array::from_fn(|j| x[j] + x[j + 8]);
    let four: [f32; 4] = std::array::from_fn(|j| eight[j] + eight[j + 4]);
    let want = (four[0] + four[2]) + (four[1] + four[3]);
    for isa in Isa::all() {
        let got = dispatch!(isa, |s| s.reduce_sum(s.load(&x)));
        assert_eq!(got.to_bits(), want.to_bits(), "{}", isa.name());
        let four = [v(9), v(10), v(11), v(12)];
        let got = dispatch!(isa, |s| {
            let v = [s.load(&four[0]), s.load(&four[1]), s.load(&four[2]), s.load(&four[3])];
            s.reduce_sum4(v)
        });
        for (x, got) in four.iter().zip(got) {
            let want = dispatch!(isa, |s| s.reduce_sum(s.load(x)));
            assert_eq!(got.to_bits(), want.to_bits(), "{}", isa.name());
        }
    }
}
