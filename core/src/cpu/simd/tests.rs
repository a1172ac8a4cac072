use super::bits::{everything, v};
use super::*;

#[test]
fn every_operation_has_the_same_bits_on_every_isa() {
    let all = Isa::all();
    println!("{:?}", all.iter().map(|i| i.name()).collect::<Vec<_>>());
    let want = everything(Plain);
    for isa in all {
        let got = dispatch!(isa, |s| everything(s));
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
