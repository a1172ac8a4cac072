use super::super::{Isa, Plain};
use super::*;

fn bytes(n: usize, seed: u32) -> Vec<u8> {
    let mut x = seed.wrapping_mul(2_654_435_769) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x
    };
    (0..n).map(|_| (next() >> 11) as u8).collect()
}

/// 16 words.
#[inline(always)]
fn of<S: Codes>(s: S, words: &[u32; LANES]) -> S::B {
    // SAFETY: the array has 64 bytes.
    unsafe { s.load(words.as_ptr().cast()) }
}

/// The results of every operation, in the order of `Codes`.
#[inline(always)]
fn everything<S: Codes>(s: S) -> Vec<[u32; LANES]> {
    let stored = bytes(16 * 37, 1);
    let rows: [*const u8; LANES] = std::array::from_fn(|r| stored[37 * r..].as_ptr());
    // SAFETY: every row has 37 bytes.
    let words = unsafe { s.words(&rows, 13) };
    let [a, b, c, d] = words;
    let mut out = words.map(|w| s.lanes(w)).to_vec();
    // SAFETY: every row has 37 bytes, and so has the start of all.
    let (pairs, halves, twice) = unsafe { (s.pairs(&rows, 5), s.halves(&rows, 35), s.twice(stored[3..].as_ptr())) };
    out.extend(pairs.into_iter().chain([twice]).chain(s.folded(pairs)).map(|w| s.lanes(w)));
    out.push(s.float().to_array(halves).map(|half| if half.is_nan() { 0 } else { half.to_bits() }));
    let nibbles = s.and(a, s.splat(0x0f0f_0f0f));
    let table: [u8; 16] = std::array::from_fn(|i| 7 * i as u8 + 99);
    for r in [
        s.and(a, b),
        s.or(a, b),
        s.xor(a, b),
        s.shr(a, 0),
        s.shr(a, 5),
        s.shr(a, 31),
        s.shl(a, 0),
        s.shl(a, 9),
        s.mul(a, b),
        s.lookup(nibbles, &table),
        s.add(a, b),
        s.dots::<false>(c, s.and(a, s.splat(0x7f7f_7f7f)), s.and(b, s.splat(0x7f7f_7f7f))),
        s.dot::<false>(c, s.and(a, s.splat(0x7f7f_7f7f)), 0x7f81_0135),
        s.dot::<false>(c, s.splat(0x7f7f_7f7f), 0x7f7f_7f7f),
        s.dot::<false>(c, s.splat(0x7f7f_7f7f), 0x8181_8181),
    ] {
        out.push(s.lanes(r));
    }
    // Wide codes: an unsigned product counts each as larger by the bias.
    let bias = u32::from(S::BIAS) * 0x0101_0101;
    for (w, x) in [(a, 0x7f81_0135u32), (b, 0x7f7f_7f7f), (s.splat(0x8080_8080), 0x8181_7f81), (d, 0x0102_fefd)] {
        let sum: i32 = x.to_le_bytes().into_iter().map(|b| i32::from(b as i8)).sum();
        let more = u32::from(S::BIAS).wrapping_mul(sum as u32);
        let biased = s.lanes(s.dot::<true>(c, s.xor(w, s.splat(bias)), x));
        out.push(biased.map(|sum| sum.wrapping_sub(more)));
    }
    let ones = of(s, &std::array::from_fn(|i| (i as u32 * 0x1000_0001).wrapping_sub(7)));
    let float = s.float();
    out.push(float.to_array(s.to_float(ones)).map(f32::to_bits));
    out.push(float.to_array(s.to_float(c)).map(f32::to_bits));
    // Finite halves, with what must be ignored above them.
    out.push(float.to_array(s.half(s.and(d, s.splat(0xffff_bbff)))).map(f32::to_bits));
    out
}

#[test]
fn every_operation_has_the_same_bits_on_every_isa() {
    let want = everything(Plain);
    for isa in Isa::all() {
        let got = dispatch_codes!(isa, |s| everything(s));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "{}: result {i}", isa.name());
        }
    }
}

/// 1000 and the products.
#[inline(always)]
fn added<S: Codes>(s: S, w: &[u32; LANES], x: u32) -> [u32; LANES] {
    s.lanes(s.dot::<false>(s.splat(1000), of(s, w), x))
}

#[test]
fn products_are_sums_of_four() {
    let w: [u32; LANES] = std::array::from_fn(|i| u32::from_le_bytes([i as u8, 127, 0, 100]));
    let x = u32::from_le_bytes([3, -127i8 as u8, 55, -1i8 as u8]);
    for isa in Isa::all() {
        let got = dispatch_codes!(isa, |s| added(s, &w, x));
        for (i, got) in got.into_iter().enumerate() {
            assert_eq!(got as i32, 1000 + 3 * i as i32 - 127 * 127 - 100, "lane {i} on {}", isa.name());
        }
    }
}
