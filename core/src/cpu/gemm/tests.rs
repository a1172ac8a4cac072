use super::*;

/// A product with strides, offsets and odd weight addresses, and its result by the rule, spelled out.
struct Case {
    x: Vec<f32>,
    bytes: Vec<u8>,
    bias: Vec<f32>,
    before: Vec<f32>,
    want: Vec<f32>,
    m: usize,
    n: usize,
    k: usize,
    dtype: DType,
}

const X_GAP: usize = 3;
const W_GAP: usize = 5;
const OUT_GAP: usize = 2;
const SCALE: f32 = 0.7;
/// Columns of the first of two weight blocks, stored after the second.
const SPLIT: usize = 7;

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_769) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x
    };
    (0..n).map(|_| (next() >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

impl Case {
    fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        let x = noise(m * (k + X_GAP), 1);
        let mut w = noise(n * (k + W_GAP), 2);
        let mut bytes = vec![0xffu8];
        for w in &mut w {
            match dtype {
                DType::F32 => bytes.extend(w.to_le_bytes()),
                DType::Bf16 => {
                    let h = half::bf16::from_f32(*w);
                    *w = h.to_f32();
                    bytes.extend(h.to_le_bytes());
                }
                _ => {
                    let h = half::f16::from_f32(*w);
                    *w = h.to_f32();
                    bytes.extend(h.to_le_bytes());
                }
            }
        }
        let bias = noise(n, 3);
        let before = noise(m * (n + OUT_GAP), 4);
        let mut want = before.clone();
        for i in 0..m {
            for j in 0..n {
                let mut lane = [0f32; 16];
                for c in 0..k {
                    lane[c % 16] = x[i * (k + X_GAP) + c].mul_add(w[j * (k + W_GAP) + c], lane[c % 16]);
                }
                for half in [8, 4, 2, 1] {
                    for l in 0..half {
                        lane[l] += lane[l + half];
                    }
                }
                let col = (j + SPLIT.min(n)) % n.max(1);
                let out = &mut want[i * (n + OUT_GAP) + col];
                *out += SCALE * lane[0] + bias[col];
            }
        }
        Self { x, bytes, bias, before, want, m, n, k, dtype }
    }

    /// Rows `from .. from + m` of the product.
    fn run(&self, isa: Isa, threads: usize, from: usize, m: usize) -> Vec<u32> {
        let (n, k) = (self.n, self.k);
        let mut out = self.before.clone();
        let split = SPLIT.min(n);
        // The stored row j gives column (j + split) mod n: the last `split` stored rows are the first columns.
        let base = self.bytes[1..].as_ptr();
        let block = |row: usize, n: usize, col: usize| WeightRows {
            ptr: base.wrapping_add(row * (k + W_GAP) * self.dtype.bytes()),
            dtype: self.dtype,
            format: Format::Plain,
            n,
            row_bytes: (k + W_GAP) * self.dtype.bytes(),
            col,
        };
        let blocks = [block(n - split, split, 0), block(0, n - split, split)];
        let p = Product {
            x: self.x[from * (k + X_GAP)..].as_ptr(),
            x_stride: k + X_GAP,
            w: &blocks,
            out: out[from * (n + OUT_GAP)..].as_mut_ptr(),
            out_stride: n + OUT_GAP,
            m,
            k,
            scale: SCALE,
            bias: self.bias.as_ptr(),
            columns: std::ptr::null(),
            accumulate: true,
            int8: true,
        };
        // SAFETY: the vectors hold what the views describe.
        unsafe { matmul_on(isa, &p, threads) };
        out.iter().map(|x| x.to_bits()).collect()
    }

    fn check(&self, isa: Isa, threads: usize) {
        let got = self.run(isa, threads, 0, self.m);
        let want: Vec<u32> = self.want.iter().map(|x| x.to_bits()).collect();
        let at = (0..want.len()).find(|&i| got[i] != want[i]);
        let Self { m, n, k, dtype, .. } = self;
        assert_eq!(at, None, "{} {m} x {n} x {k} {dtype:?}, {threads} threads", isa.name());
    }
}

#[test]
fn every_tail_has_the_reference_bits_on_every_isa() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for k in 0..49 {
            for (m, n) in [(1, 20), (3, 13), (6, 9), (9, 20), (14, 31)] {
                let case = Case::new(m, n, k, dtype);
                Isa::all().into_iter().for_each(|isa| case.check(isa, 1));
            }
        }
    }
}

#[test]
fn one_row_has_the_bits_of_many() {
    for dtype in [DType::F32, DType::Bf16] {
        let case = Case::new(70, 61, 150, dtype);
        for isa in Isa::all() {
            let all = case.run(isa, 1, 0, 70);
            for m in 1..70 {
                let stride = case.n + OUT_GAP;
                assert_eq!(case.run(isa, 1, 0, m)[..m * stride], all[..m * stride], "{m} rows on {}", isa.name());
                let one = case.run(isa, 1, m, 1);
                assert_eq!(one[m * stride..][..stride], all[m * stride..][..stride], "row {m} on {}", isa.name());
            }
        }
    }
}

#[test]
fn large_products_split_without_changing_bits() {
    // Several depths, row blocks and panels, and enough work for every thread.
    for (m, n, k) in [(1, 400, 1500), (8, 131, 1300), (150, 77, 1500), (131, 50, 641), (260, 29, 640)] {
        for dtype in [DType::Bf16, DType::F32] {
            let case = Case::new(m, n, k, dtype);
            for isa in Isa::all() {
                case.check(isa, 1);
                case.check(isa, par::threads());
                case.check(isa, 7);
            }
        }
    }
}

#[test]
fn nothing_to_do() {
    for (m, n, k) in [(0, 5, 5), (5, 0, 5), (12, 0, 0)] {
        let case = Case::new(m, n, k, DType::Bf16);
        Isa::all().into_iter().for_each(|isa| case.check(isa, 1));
    }
}

#[test]
fn plain_epilogue_overwrites() {
    for m in [2, 20] {
        let case = Case::new(m, 10, 33, DType::F16);
        let mut out = vec![f32::NAN; m * 10];
        let block = WeightRows {
            ptr: case.bytes[1..].as_ptr(),
            dtype: DType::F16,
            format: Format::Plain,
            n: 10,
            row_bytes: 2 * (33 + W_GAP),
            col: 0,
        };
        let p = Product {
            x: case.x.as_ptr(),
            x_stride: 33 + X_GAP,
            w: &[block],
            out: out.as_mut_ptr(),
            out_stride: 10,
            m,
            k: 33,
            scale: 1.0,
            bias: std::ptr::null(),
            columns: std::ptr::null(),
            accumulate: false,
            int8: false,
        };
        // SAFETY: the vectors hold what the views describe.
        unsafe { matmul(&p) };
        assert!(out.iter().all(|x| x.abs() < 33.0), "every output is written, none is read");
    }
}
