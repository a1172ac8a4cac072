use super::*;
use crate::cpu::gemm::matmul_on;
use crate::cpu::par;
use crate::format::{Format, Integers, round_group};
use crate::tensor::DType;

const X_GAP: usize = 3;
const OUT_GAP: usize = 2;
const SCALE: f32 = 0.7;
/// Columns of the first of two weight blocks, stored after the second.
const SPLIT: usize = 7;

struct Case {
    format: Format,
    x: Vec<f32>,
    /// Rows at odd addresses, with gaps.
    bytes: Vec<u8>,
    row_bytes: usize,
    before: Vec<f32>,
    columns: Vec<f32>,
    m: usize,
    n: usize,
    k: usize,
}

fn bits(seed: u32) -> impl FnMut() -> u32 {
    let mut x = seed.wrapping_mul(2_654_435_769) | 1;
    move || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x
    }
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut next = bits(seed);
    (0..n).map(|_| (next() >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

/// Random blocks; halves and shared exponents are of usual size, everything else is any bits.
fn stored(format: Format, n: usize, k: usize, row_bytes: usize) -> Vec<u8> {
    let mut next = bits(7);
    let mut out: Vec<u8> = (0..1 + n * row_bytes).map(|_| (next() >> 9) as u8).collect();
    let (per_block, bytes) = format.block().unwrap();
    for row in 0..n {
        for block in 0..k / per_block {
            let at = 1 + row * row_bytes + block * bytes;
            let halves: &[usize] = match format {
                Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::Iq4Nl => &[0],
                Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
                Format::Q6K => &[208],
                Format::Mxfp4 => {
                    // Both forms of exponents, but none that makes infinities.
                    out[at] = if block == 1 { 1 } else { 120 + out[at] % 8 };
                    &[]
                }
                Format::Nvfp4 => &[],
                Format::F4 => {
                    out[at..at + 4].copy_from_slice(&0.37f32.to_le_bytes());
                    &[]
                }
                Format::I4 | Format::I8 => {
                    out[at..at + 4].copy_from_slice(&0.011f32.to_le_bytes());
                    out[at + 4..at + 8].copy_from_slice(&(0.03 * block as f32).to_le_bytes());
                    &[]
                }
                Format::Plain | Format::F8 => unreachable!("codes are no integers"),
            };
            for half in halves {
                let small = half::f16::from_f32((out[at + half] as f32 - 100.0) / 2000.0);
                out[at + half..at + half + 2].copy_from_slice(&small.to_le_bytes());
            }
        }
    }
    out
}

impl Case {
    fn new(format: Format, m: usize, n: usize, k: usize) -> Self {
        let row_bytes = format.bytes(k, 0) + 5;
        let bytes = stored(format, n, k, row_bytes);
        let x = noise(m * (k + X_GAP), 1);
        Self { format, x, bytes, row_bytes, before: noise(m * (n + OUT_GAP), 4), columns: noise(n, 5), m, n, k }
    }

    /// Rows `from .. from + m` of the product.
    fn run(&self, isa: Isa, threads: usize, from: usize, m: usize) -> Vec<u32> {
        let (n, k, split) = (self.n, self.k, SPLIT.min(self.n));
        let mut out = self.before.clone();
        // The stored row j gives column (j + split) mod n.
        let block = |row: usize, n: usize, col: usize| WeightRows {
            ptr: self.bytes[1..].as_ptr().wrapping_add(row * self.row_bytes),
            dtype: DType::U8,
            format: self.format,
            n,
            row_bytes: self.row_bytes,
            col,
        };
        let p = Product {
            x: self.x[from * (k + X_GAP)..].as_ptr(),
            x_stride: k + X_GAP,
            w: &[block(n - split, split, 0), block(0, n - split, split)],
            out: out[from * (n + OUT_GAP)..].as_mut_ptr(),
            out_stride: n + OUT_GAP,
            m,
            k,
            scale: SCALE,
            bias: std::ptr::null(),
            columns: self.columns.as_ptr(),
            accumulate: true,
            int8: true,
        };
        // SAFETY: the vectors hold what the views describe.
        unsafe { matmul_on(isa, &p, threads) };
        out.iter().map(|x| x.to_bits()).collect()
    }

    /// Whether 16 columns share a scale.
    fn splits(&self) -> bool {
        matches!(self.format, Format::Q6K | Format::Nvfp4 | Format::F4)
    }

    /// The rule, spelled out with the groups of the exact form.
    fn want(&self) -> Vec<u32> {
        let mut out = self.before.clone();
        for i in 0..self.m {
            let x = &self.x[i * (self.k + X_GAP)..][..self.k];
            for j in 0..self.n {
                let row = &self.bytes[1 + j * self.row_bytes..][..self.format.bytes(self.k, 0)];
                let sum =
                    with_format!(self.format, F => by_groups::<F>(x, row, self.splits()), other => unreachable!());
                let col = (j + SPLIT.min(self.n)) % self.n;
                out[i * (self.n + OUT_GAP) + col] += SCALE * sum * self.columns[col];
            }
        }
        out.iter().map(|x| x.to_bits()).collect()
    }

    fn check(&self, isa: Isa, threads: usize) {
        let (got, want) = (self.run(isa, threads, 0, self.m), self.want());
        let at = (0..want.len()).find(|&i| got[i] != want[i]);
        let float = |at: Option<usize>| at.map(|i| [got[i], want[i]].map(f32::from_bits));
        let name = self.format.name();
        let (m, n, k) = (self.m, self.n, self.k);
        assert_eq!(at, None, "{name} on {}, {m} x {n} x {k}, {threads} threads: {:?}", isa.name(), float(at));
    }
}

fn by_groups<F: Integers>(x: &[f32], row: &[u8], splits: bool) -> f32 {
    let mut acc = 0f32;
    for (g, x) in x.chunks(GROUP).enumerate() {
        let per_block = F::BLOCK / GROUP;
        let w = F::group(&row[g / per_block * F::BYTES..], g % per_block);
        let mut codes = [0; GROUP];
        let scale = round_group(x.try_into().unwrap(), &mut codes);
        let sum = |at: std::ops::Range<usize>| at.map(|i| i32::from(codes[i]) * i32::from(w.codes[i])).sum::<i32>();
        let halves = if !splits {
            vec![(sum(0..32), w.scales[0])]
        } else {
            vec![(sum(0..16), w.scales[0]), (sum(16..32), w.scales[1])]
        };
        for (sum, factor) in halves {
            acc = (sum as f32).mul_add(factor * scale, acc);
        }
        let all: i32 = codes.iter().map(|c| i32::from(*c)).sum();
        acc = w.offset.mul_add(-(scale * all as f32), acc);
    }
    acc
}

#[test]
fn every_format_has_the_reference_bits_on_every_isa() {
    for format in Format::CODED.into_iter().chain([Format::F4, Format::I4, Format::I8]) {
        let block = format.block().unwrap().0;
        for (m, n, blocks) in [(1, 9, 1), (2, 33, 2), (3, 40, 3), (5, 16, 2), (7, 70, 1), (131, 20, 2)] {
            let case = Case::new(format, m, n, blocks * block);
            Isa::all().into_iter().for_each(|isa| case.check(isa, 1));
        }
    }
}

#[test]
fn one_row_has_the_bits_of_many() {
    for format in Format::CODED.into_iter().chain([Format::F4, Format::I4, Format::I8]) {
        let case = Case::new(format, 13, 61, 768);
        for isa in Isa::all() {
            let all = case.run(isa, 1, 0, 13);
            let stride = case.n + OUT_GAP;
            for m in 1..13 {
                assert_eq!(case.run(isa, 1, 0, m)[..m * stride], all[..m * stride], "{m} rows on {}", isa.name());
                let one = case.run(isa, 1, m, 1);
                assert_eq!(one[m * stride..][..stride], all[m * stride..][..stride], "row {m} on {}", isa.name());
            }
        }
    }
}

#[test]
fn large_products_split_without_changing_bits() {
    for (m, n, k) in [(1, 400, 1536), (8, 131, 1280), (150, 77, 1536)] {
        for format in [Format::Q8_0, Format::Q4K, Format::Q6K, Format::Nvfp4] {
            let case = Case::new(format, m, n, k);
            for isa in Isa::all() {
                case.check(isa, 1);
                case.check(isa, par::threads());
                case.check(isa, 7);
            }
        }
    }
}

#[test]
fn activations_that_are_not_finite_give_nan() {
    for (x, others) in [(f32::INFINITY, 1.0), (f32::NAN, 1.0), (f32::NEG_INFINITY, 0.0)] {
        let mut case = Case::new(Format::Q4_0, 2, 20, 64);
        case.x[..64].fill(others);
        case.x[40] = x;
        for isa in Isa::all() {
            let out = case.run(isa, 1, 0, 2);
            assert!(out[..20].iter().all(|x| f32::from_bits(*x).is_nan()), "{}", isa.name());
            assert!(out[22..42].iter().all(|x| f32::from_bits(*x).is_finite()), "{}", isa.name());
        }
    }
}

#[test]
fn nothing_to_do() {
    for (m, n, k) in [(0, 5, 32), (5, 0, 32)] {
        let case = Case::new(Format::Q8_0, m, n, k);
        for isa in Isa::all() {
            assert_eq!(case.run(isa, 1, 0, m).len(), m * (n + OUT_GAP));
        }
    }
}
