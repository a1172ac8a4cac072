use pollster::block_on;

use super::{Size, Sizes};
use crate::{
    Result,
    checkpoint::{Checkpoint, scaled::tests::open, tests::message},
    format::Format,
};

type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;

/// A matrix as MLX defines it; with `experts`, that many stacked.
struct Matrix {
    experts: usize,
    n: usize,
    k: usize,
    size: Size,
    codes: Vec<u32>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

fn all(bits: usize, group: usize) -> Sizes {
    Sizes { all: Size { bits, group }, layers: [].into() }
}

/// A float of 8 bits of mantissa, which all dtypes hold.
fn short(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

impl Matrix {
    fn new(experts: usize, n: usize, k: usize, bits: usize, group: usize) -> Self {
        let mut state = 11u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 9
        };
        let (elements, groups) = (experts * n * k, experts * n * k / group);
        let codes = (0..elements).map(|_| next() % (1 << bits)).collect();
        let scales: Vec<f32> = (0..groups).map(|_| short(0.01 + (next() % 1000) as f32 / 9000.0)).collect();
        // Elements around 0, and a few groups that are far from it.
        let middle = (1u32 << bits) as f32 / 2.0;
        let biases = scales.iter().map(|s| short(-s * (middle + (next() % 7) as f32 - 3.0))).collect();
        Self { experts, n, k, size: Size { bits, group }, codes, scales, biases }
    }

    fn shape(&self, last: usize) -> Vec<usize> {
        if self.experts == 1 { vec![self.n, last] } else { vec![self.experts, self.n, last] }
    }

    /// Bit `b` of element `j` is bit `j * bits + b` of a row.
    fn packed(&self) -> Vec<u8> {
        let bits = self.size.bits;
        let mut out = Vec::new();
        for row in self.codes.chunks(self.k) {
            let bit = |at: usize| row[at / bits] >> (at % bits) & 1;
            out.extend((0..self.k * bits / 8).map(|byte| (0..8).map(|b| (bit(8 * byte + b) as u8) << b).sum::<u8>()));
        }
        out
    }

    fn tensors(&self, dtype: &'static str) -> Tensors {
        let floats = |values: &[f32]| {
            let bytes = values.iter().flat_map(|x| match dtype {
                "F16" => half::f16::from_f32(*x).to_le_bytes().to_vec(),
                "BF16" => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            });
            bytes.collect::<Vec<u8>>()
        };
        let groups = self.shape(self.k / self.size.group);
        vec![
            ("l.weight", "U32", self.shape(self.k * self.size.bits / 32), self.packed()),
            ("l.scales", dtype, groups.clone(), floats(&self.scales)),
            ("l.biases", dtype, groups, floats(&self.biases)),
        ]
    }

    fn assert(&self, dtype: &'static str, format: Format) {
        let Size { bits, group } = self.size;
        let checkpoint = open(&self.tensors(dtype)).unwrap().with_mlx(Some(&all(bits, group)), "").unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["l.weight"]);
        assert!(checkpoint.is_coded() && !checkpoint.holds_unknown_codes());
        let stored = checkpoint.tensor("l.weight", &self.shape(self.k)).unwrap();
        assert_eq!(stored.format, format, "{:?}", self.size);
        let got = format.decode(&block_on(stored.read(0..stored.bytes())).unwrap());
        assert_eq!(got.len(), self.codes.len());
        for (i, got) in got.iter().enumerate() {
            // Products of these are exact in f64, and so in f32.
            let (scale, bias) = (f64::from(self.scales[i / group]), f64::from(self.biases[i / group]));
            let want = scale * f64::from(self.codes[i]) + bias;
            assert_eq!(*got, want as f32, "{:?}, element {i}", self.size);
        }
        // Rows in the middle, as a loader reads large matrices and experts.
        let row = stored.row_bytes();
        let some = block_on(stored.read(3 * row..(self.n - 2) * row)).unwrap();
        assert_eq!(format.decode(&some), got[3 * self.k..(self.n - 2) * self.k]);
    }
}

#[test]
fn all_bits_and_groups() {
    for bits in Size::BITS {
        for group in Size::GROUPS {
            let format = if bits <= 4 && group > 32 { Format::I4 } else { Format::I8 };
            for dtype in ["BF16", "F32"] {
                Matrix::new(1, 7, 3 * group, bits, group).assert(dtype, format);
            }
            Matrix::new(3, 6, 2 * group, bits, group).assert("BF16", format);
        }
    }
    let mut halves = Matrix::new(1, 9, 256, 4, 64);
    halves.scales.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).to_f32());
    halves.biases.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).to_f32());
    halves.assert("F16", Format::I4);
}

/// Elements of a row of 32 whose first bytes are `start`, with scale 1 and bias 0.
fn decoded(bits: usize, start: &[u8]) -> Vec<f32> {
    let mut codes = start.to_vec();
    codes.resize(4 * bits, 0);
    let one = half::bf16::from_f32(1.0).to_le_bytes().to_vec();
    let tensors = vec![
        ("l.weight", "U32", vec![1, bits], codes),
        ("l.scales", "BF16", vec![1, 1], one),
        ("l.biases", "BF16", vec![1, 1], vec![0; 2]),
    ];
    let checkpoint = open(&tensors).unwrap().with_mlx(Some(&all(bits, 32)), "").unwrap();
    let raw = block_on(checkpoint.get("l.weight", &[1, 32])).unwrap();
    raw.dtype.to_f32(&raw.bytes)
}

/// By hand, after `mx.quantize` ("the 1st element occupies the 4 least significant bits, the 2nd bits 4-7") and `extract_bits`.
#[test]
#[expect(clippy::unusual_byte_groupings, reason = "they are the codes")]
fn bytes_written_by_hand() {
    assert_eq!(decoded(4, &0x7654_3210u32.to_le_bytes())[..8], [0., 1., 2., 3., 4., 5., 6., 7.]);
    assert_eq!(decoded(2, &[0b11_10_01_00])[..4], [0., 1., 2., 3.]);
    assert_eq!(decoded(3, &[0b10_001_000, 0b1_100_011_0, 0b111_110_10])[..8], [0., 1., 2., 3., 4., 5., 6., 7.]);
    assert_eq!(
        decoded(5, &[0b101_00001, 0b1_00011_10, 0b0001_1111, 0b11_00000_1, 0b10000_010])[..8],
        [1., 21., 3., 31., 17., 0., 11., 16.]
    );
    assert_eq!(decoded(6, &[0b10_000001, 0b0011_1000, 0b111110_01])[..4], [1., 34., 19., 62.]);
    assert_eq!(decoded(8, &[0, 127, 128, 255])[..4], [0., 127., 128., 255.]);
}

#[test]
fn layers_have_sizes_of_their_own() {
    let (a, b) = (Matrix::new(1, 8, 128, 4, 64), Matrix::new(1, 8, 128, 8, 32));
    let mut tensors = a.tensors("BF16");
    let names = ["m.weight", "m.scales", "m.biases"];
    tensors.extend(b.tensors("BF16").into_iter().zip(names).map(|((_, d, s, bytes), name)| (name, d, s, bytes)));
    tensors.push(("plain.weight", "F32", vec![1, 1], vec![0; 4]));
    let layers = [("m".into(), Some(b.size)), ("plain".into(), None)].into();
    let checkpoint = open(&tensors).unwrap().with_mlx(Some(&Sizes { all: a.size, layers }), "").unwrap();
    let format = |name| checkpoint.tensor(name, &[8, 128]).unwrap().format;
    assert_eq!((format("l.weight"), format("m.weight")), (Format::I4, Format::I8));
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["l.weight", "m.weight", "plain.weight"]);
    assert_eq!(checkpoint.formats().keys().copied().collect::<Vec<_>>(), ["F32", "INT4", "INT8"]);
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Tensors), says: &str| {
        let mut tensors = Matrix::new(1, 8, 128, 4, 64).tensors("BF16");
        change(&mut tensors);
        let layers = [("off".into(), None)].into();
        let sizes = Sizes { all: Size { bits: 4, group: 64 }, layers };
        let error = message(open(&tensors).and_then(|c: Checkpoint| c.with_mlx(Some(&sizes), "")));
        let named = error.contains("model.safetensors") && error.contains("tensor `");
        assert!(named && error.contains(says), "{error}");
    };
    refused(&|t| drop(t.remove(1)), "no `scales`");
    refused(&|t| drop(t.remove(2)), "no `biases`");
    refused(&|t| t[1] = ("l.scales", "U8", vec![8, 2], vec![0; 16]), "scales are U8");
    refused(&|t| t[1] = ("l.scales", "BF16", vec![8, 3], vec![0; 48]), "do not fit");
    refused(&|t| t[1] = ("l.scales", "BF16", vec![4, 2], vec![0; 16]), "do not fit");
    refused(&|t| t[2] = ("l.biases", "BF16", vec![16], vec![0; 32]), "do not fit");
    refused(&|t| t[1] = ("l.scales", "BF16", vec![], vec![0; 2]), "do not fit");
    refused(&|t| t[1] = ("l.scales", "BF16", vec![8, 0], vec![]), "do not fit");
    // A group that does not divide the columns: 96 of them.
    refused(&|t| t[0] = ("l.weight", "U32", vec![8, 12], vec![0; 384]), "codes [8, 12], scales [8, 2]");
    refused(&|t| t[0] = ("l.weight", "U32", vec![16], vec![0; 64]), "do not fit");
    refused(&|t| t[0] = ("l.weight", "U32", vec![0, 16], vec![]), "do not fit");
    refused(&|t| t.iter_mut().for_each(|t| (t.2[0], t.3) = (0, vec![])), "do not fit");
    refused(&|t| t.push(("off.weight", "U32", vec![8, 16], vec![0; 512])), "is not quantised");
}

/// Sizes of which no product fits a number of 64 bits.
#[test]
fn sizes_that_overflow_are_refused() {
    let huge = usize::MAX / 2;
    let tensors: Tensors = vec![
        ("l.weight", "U32", vec![0, huge], vec![]),
        ("l.scales", "BF16", vec![0, huge], vec![]),
        ("l.biases", "BF16", vec![0, huge], vec![]),
    ];
    let got: Result<Checkpoint> = open(&tensors).and_then(|c| c.with_mlx(Some(&all(4, 64)), ""));
    assert!(message(got).contains("tensor `l.weight`"));
}
