use super::*;

/// 1024 elements of every format: random blocks and what PyPI `gguf` 0.19 decodes them to, f32.
const VECTORS: &[u8] = include_bytes!("vectors.bin");

#[test]
fn decoding_equals_the_reference_of_gguf_bit_for_bit() {
    let mut rest = VECTORS;
    for format in Format::CODED {
        let (coded, after) = rest.split_at(format.bytes(1024, 0));
        let (want, after) = after.split_at(4096);
        rest = after;
        let got = format.decode(coded);
        let want = want.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{} element {i}: {got}, {want}", format.name());
        }
    }
    assert!(rest.is_empty());
}

#[test]
fn blocks_are_whole_groups() {
    for format in Format::CODED {
        let (n, bytes) = format.block().unwrap();
        assert!(n % GROUP == 0 && format.bytes(4 * n, 0) == 4 * bytes, "{}", format.name());
    }
    assert_eq!(Format::Plain.bytes(10, 2), 20);
}

/// What each code of 8-bit floats stands for, but for its sign.
fn magnitudes() -> Vec<f64> {
    (0..127).map(|code| f64::from(e4m3_to_f32(code))).collect()
}

#[test]
fn eight_bit_floats_are_the_nearest() {
    let all = magnitudes();
    for (code, x) in all.iter().enumerate() {
        assert_eq!(usize::from(f32_to_e4m3(*x as f32)), code);
        assert_eq!(usize::from(f32_to_e4m3(-*x as f32)), code | 0x80);
    }
    for (code, pair) in all.windows(2).enumerate() {
        let middle = (pair[0] + pair[1]) as f32 / 2.0;
        let even = code + code % 2;
        for (x, want) in [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)] {
            assert_eq!(usize::from(f32_to_e4m3(x)), want, "{x}");
        }
    }
}

#[test]
fn rounded_activations_are_codes_times_a_power_of_two() {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 16_777_216.0
    };
    let (mut error, mut size) = (0.0, 0.0);
    for i in 0..1000 {
        // The sum of four is nearly normal.
        let factor = (i as f32 % 60.0 - 30.0).exp2();
        let x: [f32; EIGHT_GROUP] = std::array::from_fn(|_| factor * (next() + next() + next() + next() - 2.0));
        let (mut once, mut twice) = ([0.0; EIGHT_GROUP], [0.0; EIGHT_GROUP]);
        round_eight(&x, &mut once);
        round_eight(&once, &mut twice);
        assert_eq!(once, twice);
        assert!(once.iter().all(|x| half::bf16::from_f32(*x).to_f32() == *x));
        for (a, b) in x.iter().zip(&once) {
            error += f64::from((a - b) / factor).powi(2);
            size += f64::from(a / factor).powi(2);
        }
    }
    println!("NMSE of rounded activations: {:.2e}", error / size);
    assert!(error / size < 1e-3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut x, mut out) = ([1.0; EIGHT_GROUP], [0.0; EIGHT_GROUP]);
        x[77] = bad;
        round_eight(&x, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
    let mut out = [1.0; EIGHT_GROUP];
    round_eight(&[0.0; EIGHT_GROUP], &mut out);
    assert!(out.iter().all(|x| *x == 0.0));
}
