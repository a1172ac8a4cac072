use pollster::block_on;

use super::Layout;
use crate::checkpoint::{Checkpoint, scaled::tests::open, tests::message};
use crate::format::Format;

const GPTQ: Layout = Layout::Gptq { less_one: true, any_order: false };

/// A matrix as its recipe defines it.
struct Matrix {
    n: usize,
    k: usize,
    bits: usize,
    /// Columns of a group.
    width: usize,
    codes: Vec<u32>,
    scales: Vec<f32>,
    zeros: Vec<u32>,
    /// The group of each column.
    order: Vec<usize>,
}

type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;

fn bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

impl Matrix {
    fn new(n: usize, k: usize, bits: usize, width: usize) -> Self {
        let mut state = 7u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 9
        };
        let (groups, most) = (k.div_ceil(width), 1 << bits);
        let codes = (0..n * k).map(|_| next() % most).collect();
        let scales =
            (0..n * groups).map(|_| half::f16::from_f32(0.01 + (next() % 1000) as f32 / 9000.0).to_f32()).collect();
        // No zero point of gptq's first form is 0.
        let zeros = (0..n * groups).map(|_| 1 + next() % (most - 1)).collect();
        Self { n, k, bits, width, codes, scales, zeros, order: (0..k).map(|c| c / width).collect() }
    }

    fn groups(&self) -> usize {
        self.k.div_ceil(self.width)
    }

    /// Words of `p` values in a row of `of`, value `j` in place `place(j)`.
    fn pack(
        &self,
        rows: usize,
        columns: usize,
        of: impl Fn(usize, usize) -> u32,
        place: impl Fn(usize) -> usize,
    ) -> Vec<u8> {
        let p = 32 / self.bits;
        let word = |r: usize, w: usize| (0..p).map(|j| of(r, w * p + j) << (self.bits * place(j))).sum::<u32>();
        bytes((0..rows).flat_map(|r| (0..columns.div_ceil(p)).map(move |w| (r, w))).map(|(r, w)| word(r, w)))
    }

    fn transposed(&self, name: &'static str, dtype: &'static str) -> (&'static str, &'static str, Vec<usize>, Vec<u8>) {
        let value = |i: usize| self.scales[i % self.n * self.groups() + i / self.n];
        let bytes = (0..self.n * self.groups()).flat_map(|i| match dtype {
            "F16" => half::f16::from_f32(value(i)).to_le_bytes().to_vec(),
            _ => value(i).to_le_bytes().to_vec(),
        });
        (name, dtype, vec![self.groups(), self.n], bytes.collect())
    }

    fn gptq(&self, less: u32) -> Tensors {
        let (p, mask) = (32 / self.bits, (1u32 << self.bits) - 1);
        // By columns: a word holds consecutive elements of a row of the matrix.
        let words = (0..self.k / p).flat_map(|kw| {
            (0..self.n).map(move |r| (0..p).map(|j| self.codes[r * self.k + kw * p + j] << (self.bits * j)).sum())
        });
        let zero = |g: usize, r: usize| self.zeros[r * self.groups() + g].wrapping_sub(less) & mask;
        vec![
            ("l.qweight", "I32", vec![self.k / p, self.n], bytes(words)),
            ("l.qzeros", "I32", vec![self.groups(), self.n / p], self.pack(self.groups(), self.n, zero, |j| j)),
            self.transposed("l.scales", "F16"),
            ("l.g_idx", "I32", vec![self.k], bytes(self.order.iter().map(|g| *g as u32))),
        ]
    }

    fn awq(&self) -> Tensors {
        // Output 1 of 8 is the fifth from below, and so on.
        let place = |j: usize| [0, 4, 1, 5, 2, 6, 3, 7][j];
        let code = |c: usize, r: usize| self.codes[r * self.k + c];
        let zero = |g: usize, r: usize| self.zeros[r * self.groups() + g];
        vec![
            ("l.qweight", "I32", vec![self.k, self.n / 8], self.pack(self.k, self.n, code, place)),
            ("l.qzeros", "I32", vec![self.groups(), self.n / 8], self.pack(self.groups(), self.n, zero, place)),
            self.transposed("l.scales", "F16"),
        ]
    }

    fn packed(&self, zeros: bool) -> Tensors {
        let p = 32 / self.bits;
        let scales = self.scales.iter().flat_map(|x| x.to_le_bytes()).collect();
        let shape = [self.n as u64, self.k as u64].iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut out = vec![
            (
                "l.weight_packed",
                "I32",
                vec![self.n, self.k / p],
                self.pack(self.n, self.k, |r, c| self.codes[r * self.k + c], |j| j),
            ),
            ("l.weight_scale", "F32", vec![self.n, self.groups()], scales),
            ("l.weight_shape", "I64", vec![2], shape),
        ];
        if zeros {
            // Rows of the last word that are none are zero.
            let zero = |w: usize, g: usize| {
                let of = |j: usize| self.zeros.get((w * p + j) * self.groups() + g).map_or(0, |z| z << (self.bits * j));
                (0..p).map(of).sum::<u32>()
            };
            let words = (0..self.n.div_ceil(p)).flat_map(|w| (0..self.groups()).map(move |g| zero(w, g)));
            out.push(("l.weight_zero_point", "I32", vec![self.n.div_ceil(p), self.groups()], bytes(words)));
        }
        out
    }

    /// Values by the definition; the middle of the codes stands for zero unless there are zero points.
    fn assert(&self, tensors: Tensors, layout: Layout, format: Format, zeros: bool) {
        let checkpoint = open(&tensors).unwrap().with_integers(layout).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["l.weight"]);
        assert!(checkpoint.is_coded() && !checkpoint.holds_unknown_codes());
        let stored = checkpoint.tensor("l.weight", &[self.n, self.k]).unwrap();
        assert_eq!(stored.format, format);
        let decode = |bytes: &[u8]| match format {
            Format::Plain => stored.dtype.to_f32(bytes),
            format => format.decode(bytes),
        };
        let got = decode(&block_on(stored.read(0..stored.bytes())).unwrap());
        for (i, got) in got.iter().enumerate() {
            let (row, group) = (i / self.k, self.order[i % self.k]);
            let at = row * self.groups() + group;
            let zero = if zeros { self.zeros[at] } else { 1 << (self.bits - 1) };
            let want = f64::from(self.scales[at]) * (f64::from(self.codes[i]) - f64::from(zero));
            assert_eq!(*got, want as f32, "element {i}");
        }
        // Rows in the middle, as a loader reads large matrices.
        let row = stored.row_bytes();
        let some = block_on(stored.read(3 * row..(self.n - 2) * row)).unwrap();
        assert_eq!(decode(&some), got[3 * self.k..(self.n - 2) * self.k]);
    }
}

#[test]
fn gptq() {
    for (bits, width, format) in [
        (4, 64, Format::I4),
        (4, 128, Format::I4),
        (4, 32, Format::I8),
        (8, 64, Format::I8),
        (2, 64, Format::I4),
        (4, 16, Format::Plain),
    ] {
        let matrix = Matrix::new(80, 256, bits, width);
        matrix.assert(matrix.gptq(1), GPTQ, format, true);
        matrix.assert(matrix.gptq(0), Layout::Gptq { less_one: false, any_order: false }, format, true);
    }
    // One group.
    let matrix = Matrix::new(16, 192, 4, 192);
    matrix.assert(matrix.gptq(1), Layout::Gptq { less_one: true, any_order: true }, Format::I4, true);
}

#[test]
fn columns_of_gptq_in_any_order() {
    let mut matrix = Matrix::new(72, 256, 4, 64);
    for (c, group) in matrix.order.iter_mut().enumerate() {
        *group = c * 5 / 3 % 4;
    }
    matrix.assert(matrix.gptq(1), Layout::Gptq { less_one: true, any_order: true }, Format::Plain, true);
    matrix.order[9] = 4;
    let checkpoint =
        open(&matrix.gptq(1)).unwrap().with_integers(Layout::Gptq { less_one: true, any_order: true }).unwrap();
    let error = block_on(checkpoint.get("l.weight", &[72, 256])).unwrap_err().to_string();
    assert!(error.contains("group 4 of 4"), "{error}");
}

#[test]
fn awq() {
    for (width, format) in [(128, Format::I4), (32, Format::I8)] {
        let matrix = Matrix::new(72, 256, 4, width);
        matrix.assert(matrix.awq(), Layout::Awq, format, true);
    }
}

#[test]
fn compressed_tensors() {
    for (bits, width, format) in [(4, 128, Format::I4), (4, 32, Format::I8), (8, 128, Format::I8), (4, 320, Format::I4)]
    {
        let matrix = Matrix::new(70, if width == 320 { 320 } else { 256 }, bits, width);
        matrix.assert(matrix.packed(true), Layout::Packed { bits }, format, true);
        matrix.assert(matrix.packed(false), Layout::Packed { bits }, format, false);
    }
    let matrix = Matrix::new(70, 96, 8, 96);
    let codes = matrix.codes.iter().map(|c| (*c as u8) ^ 0x80).collect();
    let mut tensors = matrix.packed(false);
    tensors[0] = ("l.weight", "I8", vec![70, 96], codes);
    matrix.assert(tensors, Layout::Bytes, Format::I8, false);
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let matrix = Matrix::new(16, 128, 4, 64);
    let refused = |change: &dyn Fn(&mut Tensors), layout: Layout, tensors: Tensors, says: &str| {
        let mut tensors = tensors;
        change(&mut tensors);
        let error = message(open(&tensors).and_then(|c: Checkpoint| c.with_integers(layout)));
        assert!(error.contains("tensor `l.") && error.contains(says), "{error}");
    };
    refused(&|t| drop(t.remove(2)), GPTQ, matrix.gptq(1), "no `scales`");
    refused(&|t| drop(t.remove(1)), GPTQ, matrix.gptq(1), "no `qzeros`");
    refused(&|t| t[3] = ("l.g_idx", "I32", vec![64], vec![0; 256]), GPTQ, matrix.gptq(1), "do not fit");
    refused(&|t| t[1] = ("l.qzeros", "I32", vec![1, 2], vec![0; 8]), GPTQ, matrix.gptq(1), "do not fit");
    refused(&|t| t[1] = ("l.qzeros", "I32", vec![2, 0], vec![]), GPTQ, matrix.gptq(1), "do not fit");
    refused(&|t| t[0] = ("l.qweight", "I32", vec![128, 0], vec![]), Layout::Awq, matrix.awq(), "2, 4 or 8 bits");
    refused(
        &|t| t[1] = ("l.weight_scale", "F32", vec![16, 0], vec![]),
        Layout::Packed { bits: 4 },
        matrix.packed(false),
        "no elements",
    );
    refused(
        &|t| t[1] = ("l.weight_scale", "I8", vec![16, 2], vec![0; 32]),
        Layout::Packed { bits: 4 },
        matrix.packed(false),
        "scales are I8",
    );
}
