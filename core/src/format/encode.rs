//! Encoders of the coded formats that files are written in.
//!
//! Scales are searched for the least sum of squared errors. Without samples of activations all columns of a matrix count alike,
//! so that is the least expected error of its products. A search tries scales around those that map the extremes onto the
//! extreme codes, improves each by least squares over its codes, and keeps the best. Where scales are codes themselves, their
//! neighbours are tried too, and the scales of the block are improved by least squares over all of it.

use std::sync::LazyLock;

use half::f16;

use super::{Format, GROUP, blocks::IQ4_NL};

/// Elements and groups of a K-quant's block.
const BLOCK: usize = 256;
const GROUPS: usize = BLOCK / GROUP;
/// How often least squares and rounding take turns.
const ROUNDS: usize = 3;

impl Format {
    /// Coded formats that [`Format::encode`] writes.
    pub const WRITTEN: [Self; 8] =
        [Self::Q4_0, Self::Q5_0, Self::Q5_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K, Self::Iq4Nl];

    /// The blocks of finite elements, whole blocks of them. A scale that f16 cannot hold becomes infinite.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let block: fn(&[f32], &mut Vec<u8>) = match self {
            Self::Q4_0 => q4_0,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q4K => q4_k,
            Self::Q5K => q5_k,
            Self::Q6K => q6_k,
            Self::Iq4Nl => iq4_nl,
            other => panic!("{} is not written", other.name()),
        };
        let (n, bytes) = self.block().expect("a coded format");
        assert!(values.len().is_multiple_of(n), "{} elements are not whole blocks of {n}", values.len());
        let mut out = Vec::with_capacity(values.len() / n * bytes);
        for values in values.chunks_exact(n) {
            block(values, &mut out);
        }
        out
    }
}

/// A number as its f16 bits stand for it.
fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// The inverse of a scale; 0 for none.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { scale.recip() }
}

/// The nearest integer in a range.
#[inline(always)]
fn integer(x: f32, low: f32, high: f32) -> f32 {
    // The sum of a small number and 1.5 * 2^23 is rounded to an integer.
    (x.clamp(low, high) + 12_582_912.0) - 12_582_912.0
}

/// The largest element by magnitude.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// The codes that a scale is searched for.
#[derive(Clone, Copy)]
struct Codes<F> {
    /// The extreme ones.
    ends: [f32; 2],
    /// Distance of the codes between which the search maps the extreme element.
    step: f32,
    nearest: F,
}

/// Integers of a range.
fn integers(low: f32, high: f32) -> Codes<impl Fn(f32) -> f32 + Copy> {
    Codes { ends: [low, high], step: 0.1, nearest: move |x| integer(x, low, high) }
}

/// The scale for `x ≈ scale * code`.
fn scale(x: &[f32], codes: Codes<impl Fn(f32) -> f32>) -> f32 {
    let most = extreme(x);
    if most == 0.0 {
        return 0.0;
    }
    // How much of the sum of squares is explained, and by which scale.
    let mut best = (0.0, 0.0);
    for end in codes.ends {
        for step in -9..=9 {
            let mut inverse = (end + codes.step * step as f32) / most;
            for _ in 0..ROUNDS {
                let (mut products, mut squares) = (0.0, 0.0);
                for x in x {
                    let code = (codes.nearest)(x * inverse);
                    products += x * code;
                    squares += code * code;
                }
                if products == 0.0 || squares == 0.0 {
                    break;
                }
                let explained = products * products / squares;
                if explained <= best.0 {
                    break;
                }
                best = (explained, products / squares);
                inverse = squares / products;
            }
        }
    }
    best.1
}

/// Scale and offset for `x ≈ scale * code - offset` with codes from 0 to `top`.
fn affine(x: &[f32], top: f32, any_offset: bool) -> (f32, f32) {
    let [low, high] = [f32::min, f32::max].map(|of| x.iter().copied().reduce(of).unwrap_or(0.0));
    // An offset of K-quants takes something off.
    let low = if any_offset { low } else { low.min(0.0) };
    if high <= low {
        return (0.0, -low);
    }
    let (n, sum) = (x.len() as f32, x.iter().sum::<f32>());
    let mut best = (f32::NEG_INFINITY, (high - low) / top, -low);
    for step in -10..=10 {
        let (mut inverse, mut offset) = ((top + 0.1 * step as f32) / (high - low), -low);
        for _ in 0..ROUNDS {
            let (mut codes, mut squares, mut products) = (0.0, 0.0, 0.0);
            for x in x {
                let code = integer((x + offset) * inverse, 0.0, top);
                codes += code;
                squares += code * code;
                products += code * x;
            }
            let determinant = n * squares - codes * codes;
            if determinant <= 0.0 {
                break;
            }
            let (mut scale, mut least) =
                ((n * products - sum * codes) / determinant, (squares * sum - codes * products) / determinant);
            if least > 0.0 && !any_offset {
                (scale, least) = (products / squares, 0.0);
            }
            let explained = scale * products + least * sum;
            if explained <= best.0 || scale <= 0.0 {
                break;
            }
            best = (explained, scale, -least);
            (inverse, offset) = (scale.recip(), -least);
        }
    }
    (best.1, best.2)
}

/// 32 codes of 4 bits: the first half in low nibbles, the other in high ones.
fn nibbles(codes: &[u8; GROUP]) -> [u8; 16] {
    std::array::from_fn(|j| (codes[j] & 15) | codes[j + 16] << 4)
}

/// The fifth bits of 32 codes.
fn fifth_bits(codes: &[u8; GROUP]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (j, code)| bits | u32::from(code >> 4) << j).to_le_bytes()
}

/// The codes of 32 elements for a scale and an offset, from 0 on; `zero` stands for 0.
fn unsigned(x: &[f32], d: f32, offset: f32, [zero, top]: [f32; 2]) -> [u8; GROUP] {
    let inverse = inverse(d);
    std::array::from_fn(|i| (integer((x[i] + offset) * inverse, -zero, top) + zero) as u8)
}

fn q8_0(x: &[f32], out: &mut Vec<u8>) {
    let d = rounded(extreme(x).abs() / 127.0);
    out.extend(half(d));
    out.extend(x.iter().map(|x| integer(x * inverse(d), -127.0, 127.0) as i8 as u8));
}

fn q4_0(x: &[f32], out: &mut Vec<u8>) {
    let d = rounded(scale(x, integers(-8.0, 7.0)));
    out.extend(half(d));
    out.extend(nibbles(&unsigned(x, d, 0.0, [8.0, 7.0])));
}

fn q5_0(x: &[f32], out: &mut Vec<u8>) {
    let d = rounded(scale(x, integers(-16.0, 15.0)));
    let codes = unsigned(x, d, 0.0, [16.0, 15.0]);
    out.extend(half(d));
    out.extend(fifth_bits(&codes));
    out.extend(nibbles(&codes));
}

fn q5_1(x: &[f32], out: &mut Vec<u8>) {
    let (d, offset) = affine(x, 31.0, true);
    let (d, offset) = (rounded(d), rounded(offset));
    let codes = unsigned(x, d, offset, [0.0, 31.0]);
    out.extend(half(d));
    out.extend(half(-offset));
    out.extend(fifth_bits(&codes));
    out.extend(nibbles(&codes));
}

/// The number of the entry of the table next to `x`.
fn entry(x: f32) -> usize {
    let between = |i: usize| f32::from(i16::from(IQ4_NL[i]) + i16::from(IQ4_NL[i + 1])) / 2.0;
    (0..15).map(|i| usize::from(x > between(i))).sum()
}

/// The entries next to the integers from -128 on, for searches.
fn entries() -> [f32; 256] {
    std::array::from_fn(|i| f32::from(IQ4_NL[entry(i as f32 - 128.0)]))
}

fn iq4_nl(x: &[f32], out: &mut Vec<u8>) {
    static ENTRIES: LazyLock<[f32; 256]> = LazyLock::new(entries);
    let entries = &*ENTRIES;
    let nearest = |x| entries[(integer(x, -128.0, 127.0) + 128.0) as usize & 255];
    let d = rounded(scale(x, Codes { ends: [-127.0, 113.0], step: 1.0, nearest }));
    let inverse = inverse(d);
    out.extend(half(d));
    out.extend(nibbles(&std::array::from_fn(|i| entry(x[i] * inverse) as u8)));
}

/// Scales and offsets of a block of Q4_K or Q5_K, in units of those of the block, and the codes.
#[derive(Clone)]
struct Affine {
    d: f32,
    dmin: f32,
    scales: [u8; GROUPS],
    offsets: [u8; GROUPS],
    codes: [[u8; GROUP]; GROUPS],
    error: f32,
}

impl Affine {
    /// The best codes for the given units, near the given scales and offsets.
    fn near(x: &[f32], d: f32, dmin: f32, wanted: &[(f32, f32); GROUPS], top: f32) -> Self {
        let mut all =
            Self { d, dmin, scales: [0; GROUPS], offsets: [0; GROUPS], codes: [[0; GROUP]; GROUPS], error: 0.0 };
        for (g, x) in x.chunks_exact(GROUP).enumerate() {
            let near = |wanted: f32, unit: f32| {
                let middle = integer(wanted * inverse(unit), 0.0, 63.0) as u8;
                middle.saturating_sub(1)..=(middle + 1).min(if unit == 0.0 { 0 } else { 63 })
            };
            let mut best = f32::INFINITY;
            for scale in near(wanted[g].0, d) {
                for offset in near(wanted[g].1, dmin) {
                    let (s, o) = (d * f32::from(scale), dmin * f32::from(offset));
                    let inverse = inverse(s);
                    let miss = |x: &f32| x - (s * integer((x + o) * inverse, 0.0, top) - o);
                    let error: f32 = x.iter().map(|x| miss(x) * miss(x)).sum();
                    if error < best {
                        best = error;
                        (all.scales[g], all.offsets[g]) = (scale, offset);
                    }
                }
            }
            let (s, o) = (d * f32::from(all.scales[g]), dmin * f32::from(all.offsets[g]));
            all.codes[g] = unsigned(x, s, o, [0.0, top]);
            all.error += best;
        }
        all
    }

    /// Units that fit the codes best: `x ≈ d * scale * code - dmin * offset`.
    fn units(&self, x: &[f32]) -> Option<(f32, f32)> {
        // Sums over products of both factors and x.
        let [mut aa, mut ab, mut bb, mut ax, mut bx] = [0.0f32; 5];
        for (g, x) in x.chunks_exact(GROUP).enumerate() {
            let (scale, b) = (f32::from(self.scales[g]), -f32::from(self.offsets[g]));
            for (x, code) in x.iter().zip(&self.codes[g]) {
                let a = scale * f32::from(*code);
                (aa, ab, bb) = (aa + a * a, ab + a * b, bb + b * b);
                (ax, bx) = (ax + a * x, bx + b * x);
            }
        }
        let determinant = aa * bb - ab * ab;
        let (d, dmin) = match (bb > 0.0, determinant > 0.0) {
            (true, true) => ((ax * bb - bx * ab) / determinant, (bx * aa - ax * ab) / determinant),
            (false, _) if aa > 0.0 => (ax / aa, 0.0),
            _ => return None,
        };
        (d >= 0.0 && dmin >= 0.0).then_some((d, dmin))
    }
}

/// A block of Q4_K or Q5_K.
fn affine_block(x: &[f32], top: f32) -> Affine {
    let mut wanted = [(0.0, 0.0); GROUPS];
    for (wanted, x) in wanted.iter_mut().zip(x.chunks_exact(GROUP)) {
        *wanted = affine(x, top, false);
    }
    let most = |of: fn(&(f32, f32)) -> f32| wanted.iter().map(of).fold(0.0, f32::max) / 63.0;
    let mut best = Affine::near(x, rounded(most(|w| w.0)), rounded(most(|w| w.1)), &wanted, top);
    for _ in 0..ROUNDS {
        let Some((d, dmin)) = best.units(x) else { break };
        let next = Affine::near(x, rounded(d), rounded(dmin), &wanted, top);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    best
}

/// The bytes before the codes: units, scales and offsets of 6 bits.
fn affine_head(block: &Affine, out: &mut Vec<u8>) {
    out.extend(half(block.d));
    out.extend(half(block.dmin));
    let mut packed = [0; 12];
    for g in 0..4 {
        let (scale, offset) = (block.scales[g + 4], block.offsets[g + 4]);
        packed[g] = block.scales[g] | scale >> 4 << 6;
        packed[g + 4] = block.offsets[g] | offset >> 4 << 6;
        packed[g + 8] = (scale & 15) | offset << 4;
    }
    out.extend(packed);
}

/// Low nibbles of the codes of a group, high ones of the next.
fn pairs_of_groups(codes: &[[u8; GROUP]; GROUPS], out: &mut Vec<u8>) {
    for pair in codes.chunks_exact(2) {
        out.extend((0..GROUP).map(|j| (pair[0][j] & 15) | pair[1][j] << 4));
    }
}

fn q4_k(x: &[f32], out: &mut Vec<u8>) {
    let block = affine_block(x, 15.0);
    affine_head(&block, out);
    pairs_of_groups(&block.codes, out);
}

fn q5_k(x: &[f32], out: &mut Vec<u8>) {
    let block = affine_block(x, 31.0);
    affine_head(&block, out);
    out.extend((0..GROUP).map(|j| (0..GROUPS).fold(0, |bits, g| bits | block.codes[g][j] >> 4 << g)));
    pairs_of_groups(&block.codes, out);
}

/// Elements that share a scale of Q6_K, and how often that is.
const SHARED: usize = 16;
const PARTS: usize = BLOCK / SHARED;

/// Scales of a block of Q6_K in units of its own one, and codes.
struct Scaled {
    d: f32,
    scales: [i8; PARTS],
    codes: [i8; BLOCK],
    error: f32,
}

impl Scaled {
    /// The best codes for the given unit, near the given scales.
    fn near(x: &[f32], d: f32, wanted: &[f32; PARTS]) -> Self {
        let mut all = Self { d, scales: [0; PARTS], codes: [0; BLOCK], error: 0.0 };
        for (p, x) in x.chunks_exact(SHARED).enumerate() {
            let middle = integer(wanted[p] * inverse(d), -128.0, 127.0) as i8;
            let mut best = f32::INFINITY;
            for scale in middle.saturating_sub(1)..=middle.saturating_add(1) {
                let s = d * f32::from(scale);
                let inverse = inverse(s);
                let miss = |x: &f32| x - s * integer(x * inverse, -32.0, 31.0);
                let error: f32 = x.iter().map(|x| miss(x) * miss(x)).sum();
                if error < best {
                    best = error;
                    all.scales[p] = scale;
                }
            }
            let inverse = inverse(d * f32::from(all.scales[p]));
            for (code, x) in all.codes[SHARED * p..].iter_mut().zip(x) {
                *code = integer(x * inverse, -32.0, 31.0) as i8;
            }
            all.error += best;
        }
        all
    }

    /// The unit that fits the codes best.
    fn unit(&self, x: &[f32]) -> Option<f32> {
        let (mut squares, mut products) = (0.0, 0.0);
        for (i, x) in x.iter().enumerate() {
            let a = f32::from(self.scales[i / SHARED]) * f32::from(self.codes[i]);
            squares += a * a;
            products += a * x;
        }
        (squares > 0.0).then(|| products / squares)
    }
}

fn q6_k(x: &[f32], out: &mut Vec<u8>) {
    let mut wanted = [0.0; PARTS];
    for (wanted, x) in wanted.iter_mut().zip(x.chunks_exact(SHARED)) {
        *wanted = scale(x, integers(-32.0, 31.0));
    }
    let mut best = Scaled::near(x, rounded(extreme(&wanted) / -128.0), &wanted);
    for _ in 0..ROUNDS {
        let Some(d) = best.unit(x) else { break };
        let next = Scaled::near(x, rounded(d), &wanted);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    // 128 elements in four quarters. The low nibbles are those of the first two, the high ones those of the others; two more
    // bits of each element follow.
    let code = |h: usize, quarter: usize, j: usize| (best.codes[128 * h + 32 * quarter + j] + 32) as u8;
    for h in 0..2 {
        for low in 0..2 {
            out.extend((0..GROUP).map(|j| (code(h, low, j) & 15) | code(h, low + 2, j) << 4));
        }
    }
    for h in 0..2 {
        out.extend((0..GROUP).map(|j| (0..4).fold(0, |bits, q| bits | code(h, q, j) >> 4 << (2 * q))));
    }
    out.extend(best.scales.map(|s| s as u8));
    out.extend(half(best.d));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uniform numbers in -1..1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        }

        /// About normal, with a standard deviation of 1.
        fn normal(&mut self) -> f32 {
            (0..12).map(|_| self.next()).sum::<f32>() / 2.0
        }

        fn normals(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| self.normal()).collect()
        }
    }

    /// Root of the sum of squared errors over that of squares.
    fn error(x: &[f32], y: &[f32]) -> f64 {
        let squares = |x: f32| f64::from(x) * f64::from(x);
        let missed: f64 = x.iter().zip(y).map(|(x, y)| squares(x - y)).sum();
        (missed / x.iter().map(|x| squares(*x)).sum::<f64>()).sqrt()
    }

    fn through(format: Format, x: &[f32]) -> Vec<f32> {
        format.decode(&format.encode(x))
    }

    /// Rounding between extremes with scales of any precision: `bits` for every `n` elements, with an offset or without.
    fn naive(x: &[f32], n: usize, bits: i32, offset: bool) -> Vec<f32> {
        let one = |x: &[f32]| {
            let [low, high] = [f32::min, f32::max].map(|of| x.iter().copied().reduce(of).unwrap());
            let most = (1 << (bits - 1)) as f32 - 1.0;
            let (d, low) =
                if offset { ((high - low) / (2.0 * most + 1.0), low) } else { (low.abs().max(high.abs()) / most, 0.0) };
            x.iter().map(|x| ((x - low) / d).round() * d + low).collect::<Vec<_>>()
        };
        x.chunks(n).flat_map(one).collect()
    }

    #[test]
    fn errors_are_within_bounds_and_less_than_those_of_plain_rounding() {
        // Format, the bound, and elements of a scale, bits and kind of the plain rounding.
        let cases = [
            (Format::Q8_0, 0.0060, None),
            (Format::Q6K, 0.0175, Some((16, 6, false))),
            (Format::Q5K, 0.0355, Some((32, 5, true))),
            (Format::Q4K, 0.0720, Some((32, 4, true))),
            (Format::Q5_1, 0.0360, Some((32, 5, true))),
            (Format::Q5_0, 0.0410, Some((32, 5, false))),
            (Format::Q4_0, 0.0820, Some((32, 4, false))),
            (Format::Iq4Nl, 0.0740, Some((32, 4, false))),
        ];
        assert_eq!(cases.len(), Format::WRITTEN.len());
        let x = Random(1).normals(1 << 16);
        for (format, bound, plain) in cases {
            let found = error(&x, &through(format, &x));
            let plain = plain.map(|(n, bits, offset)| error(&x, &naive(&x, n, bits, offset)));
            println!("{}: {found:.5}, plain {plain:.5?}", format.name());
            assert!(found < bound, "{}: {found}", format.name());
            assert!(plain.is_none_or(|plain| found < plain), "{}: {found}, plain {plain:?}", format.name());
        }
    }

    #[test]
    fn errors_do_not_depend_on_the_size_of_the_elements() {
        let mut random = Random(2);
        for format in Format::WRITTEN {
            let x = random.normals(1024);
            let one = error(&x, &through(format, &x));
            for exponent in [-9, 8] {
                let y: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
                let other = error(&y, &through(format, &y));
                assert!((other / one - 1.0).abs() < 0.05, "{} at 2^{exponent}: {one}, {other}", format.name());
            }
        }
    }

    #[test]
    fn what_a_format_can_hold_is_kept_exactly() {
        let mut random = Random(3);
        let (d, dmin) = (0.0625f32, 0.25f32);
        let mut code = |low: i32, high: i32| {
            let span = (high - low + 1) as f32;
            (low as f32 + ((random.next() + 1.0) / 2.0 * span).floor()).clamp(low as f32, high as f32)
        };
        for format in Format::WRITTEN {
            let x: Vec<f32> = (0..BLOCK)
                .map(|i| {
                    // The extreme codes are in every group, and the largest scale and offset in one.
                    let part = i / GROUP;
                    let mut pick = |low: i32, high: i32| match i % SHARED {
                        0 => low as f32,
                        1 => high as f32,
                        _ => code(low, high),
                    };
                    match format {
                        Format::Q8_0 => d * pick(-127, 127),
                        Format::Q4_0 => d * pick(-8, 7),
                        Format::Q5_0 => d * pick(-16, 15),
                        Format::Q5_1 => d * pick(0, 31) + 3.0,
                        Format::Iq4Nl => d * f32::from(IQ4_NL[pick(0, 15) as usize]),
                        Format::Q6K => d * [-128.0, 60.0, 33.0, 90.0][i / SHARED % 4] * pick(-32, 31),
                        Format::Q4K => d * (63 - part) as f32 * pick(0, 15) - dmin * (56 + part) as f32,
                        Format::Q5K => d * (63 - part) as f32 * pick(0, 31) - dmin * (56 + part) as f32,
                        other => panic!("{} has no case", other.name()),
                    }
                })
                .collect();
            assert_eq!(through(format, &x), x, "{}", format.name());
        }
    }

    #[test]
    fn odd_blocks_stay_finite_and_zeros_stay_zero() {
        let mut random = Random(4);
        for format in Format::WRITTEN {
            assert_eq!(through(format, &[0.0; BLOCK]), [0.0; BLOCK], "{}", format.name());
            for case in 0..40 {
                let blocks = case % 3 + 1;
                let shape = |i: usize, x: f32| match case % 8 {
                    0 => 1.0,
                    1 => -1.0,
                    2 => x.abs(),
                    3 => -x.abs(),
                    4 if i % 50 != 7 => 0.0,
                    5 => x * 1e-7,
                    6 if i % 64 == 9 => 1000.0 * x,
                    7 => x * 1e-30,
                    _ => x,
                };
                let x: Vec<f32> = (0..blocks * BLOCK).map(|i| shape(i, random.next())).collect();
                let y = through(format, &x);
                assert_eq!(y.len(), x.len());
                let most = x.chunks(BLOCK).zip(y.chunks(BLOCK)).all(|(x, y)| {
                    let bound = 0.13 * extreme(x).abs() + 1e-5;
                    x.iter().zip(y).all(|(x, y)| (x - y).abs() <= bound)
                });
                assert!(most, "{} case {case}", format.name());
            }
        }
    }
}
