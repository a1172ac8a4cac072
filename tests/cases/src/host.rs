//! The host side of a case: the arrays that an op touches, as numbers and as the bytes that a device gets.

use half::{bf16, f16};

use super::batch::Batch;
use super::codes;
use selkie_core::backend::{Caps, Int8};
use selkie_core::format::Format;
use selkie_core::kv8;
use selkie_core::ops::RowBlock;
use selkie_core::step::{Bucket, PAGE, Step};
use selkie_core::tensor::{DType, Tensor};

/// Fills everything that an op must not read: a NaN as f32, bf16 and f16, and as u32 a number that is not an index.
const POISON: [u8; 4] = [0xa5, 0xff, 0xa5, 0xff];
/// Poisoned bytes after every buffer.
const GUARD_BYTES: usize = 64;

/// The dtypes that a backend chose for everything but weights.
#[derive(Clone, Copy, Debug)]
pub struct Dtypes {
    /// Activations.
    pub act: DType,
    /// Precision of the factors of products.
    pub products: DType,
    /// Where activations are rounded to 8 bits.
    pub int8: Int8,
    /// KV pages.
    pub kv: DType,
    /// Convolution states.
    pub conv: DType,
    /// Recurrent states.
    pub state: DType,
    /// Ranks, all of which get the same arguments.
    pub ranks: usize,
}

impl From<&Caps> for Dtypes {
    fn from(c: &Caps) -> Self {
        Self { act: c.act, products: c.products, int8: c.int8, kv: c.kv, conv: c.conv, state: c.state, ranks: c.ranks }
    }
}

/// `x` as a device with this dtype sees it.
pub(super) fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::U32 | DType::U8 | DType::I8 => panic!("a float in an integer array"),
    }
}

pub(super) fn put(dtype: DType, x: f32, to: &mut [u8]) {
    match dtype {
        DType::F32 => to.copy_from_slice(&x.to_le_bytes()),
        DType::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        DType::F16 => to.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        DType::U32 | DType::U8 | DType::I8 => panic!("a float in an integer array"),
    }
}

fn take(dtype: DType, from: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f32::from_le_bytes([from[0], from[1], from[2], from[3]]).into(),
        DType::Bf16 => bf16::from_le_bytes([from[0], from[1]]).into(),
        DType::F16 => f16::from_le_bytes([from[0], from[1]]).into(),
        DType::U32 => u32::from_le_bytes([from[0], from[1], from[2], from[3]]).into(),
        DType::U8 => from[0].into(),
        DType::I8 => (from[0] as i8).into(),
    }
}

/// The required value of one element after the op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Want {
    /// The bits that were there before.
    Keep,
    /// Exactly this: zeros of padding, ids.
    Exact(f64),
    /// This, within the op's limit.
    Near(f64),
    /// The integer that this is rounded to; either one if it lies in the middle.
    Code(f64),
    /// The first byte of an f32 with this value; the other three are [`Want::Any`].
    Scale(f64),
    /// Any value: rounding decides, or the contract does not say.
    Any,
}

/// The arrays that an op writes, by name, with every element of their view.
pub(super) type Wants = Vec<(&'static str, Vec<Want>)>;

pub(super) enum Data {
    /// Already rounded to the array's dtype; NaN elements are stored as poison.
    Float(Vec<f32>),
    Int(Vec<u32>),
    /// Rows of codes, and the elements that they stand for.
    Codes(Vec<u8>, Vec<f32>),
}

/// One argument of an op: a view, and its elements without the gaps.
pub(super) struct Array {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub offset: usize,
    pub row_stride: usize,
    /// Index of the buffer; several arrays may be views of one.
    pub buf: usize,
    /// A row block of a weight, which a device may use in place in a file.
    pub weight: bool,
    /// What the bytes of its rows are.
    pub format: Format,
    pub data: Data,
}

impl Array {
    fn row_len(&self) -> usize {
        self.dims[1..].iter().product()
    }

    fn end(&self) -> usize {
        self.offset + (self.dims[0] - 1) * self.row_stride + self.row_len()
    }

    /// Byte range of element `i` (of the view without its gaps) in the buffer.
    pub fn at(&self, i: usize) -> std::ops::Range<usize> {
        let (row_len, size) = (self.row_len(), self.dtype.bytes());
        let start = (self.offset + i / row_len * self.row_stride + i % row_len) * size;
        start..start + size
    }

    pub fn read(&self, i: usize, buf: &[u8]) -> f64 {
        take(self.dtype, &buf[self.at(i)])
    }

    /// Writes `x` as element `i`.
    #[cfg(test)]
    pub fn set(&self, i: usize, x: f64, buf: &mut [u8]) {
        let at = self.at(i);
        match self.dtype {
            DType::U32 => buf[at].copy_from_slice(&(x as u32).to_le_bytes()),
            d => put(d, x as f32, &mut buf[at]),
        }
    }

    fn store(&self, image: &mut [u8]) {
        match &self.data {
            Data::Int(v) => {
                for (i, x) in v.iter().enumerate() {
                    image[self.at(i)].copy_from_slice(&x.to_le_bytes());
                }
            }
            Data::Codes(bytes, _) => {
                for (i, x) in bytes.iter().enumerate() {
                    image[self.at(i)][0] = *x;
                }
            }
            // Poison is already there where the array holds NaN.
            Data::Float(v) => {
                for (i, &x) in v.iter().enumerate().filter(|(_, x)| !x.is_nan()) {
                    put(self.dtype, x, &mut image[self.at(i)]);
                }
            }
        }
    }
}

/// All arrays of a case.
#[derive(Default)]
pub(super) struct Host {
    pub arrays: Vec<Array>,
    pub bucket: Option<Bucket>,
    /// Products round activations to 8 bits.
    pub int8: bool,
}

impl Host {
    fn push(&mut self, name: &str, dtype: DType, dims: &[usize], data: Data) -> &mut Array {
        let len = match &data {
            Data::Float(v) => v.len(),
            Data::Int(v) => v.len(),
            Data::Codes(bytes, _) => bytes.len(),
        };
        assert_eq!(len, dims.iter().product::<usize>(), "{name}");
        let (buf, row_stride) = (self.arrays.len(), dims[1..].iter().product());
        let dims = dims.to_vec();
        self.arrays.push(Array {
            name: name.into(),
            dtype,
            dims,
            offset: 0,
            row_stride,
            buf,
            weight: false,
            format: Format::Plain,
            data,
        });
        self.arrays.last_mut().expect("just pushed")
    }

    /// An array with values, rounded to `dtype`.
    pub fn float(&mut self, name: &str, dtype: DType, dims: &[usize], mut values: Vec<f32>) {
        if dtype != DType::F32 {
            values.iter_mut().for_each(|x| *x = round(dtype, *x));
        }
        self.push(name, dtype, dims, Data::Float(values));
    }

    /// KV pages `[pages, KH, 64, hd]`, rounded to `dtype`, which may have 8 bits. Tokens of NaN are poison.
    pub fn pages(&mut self, name: &str, dtype: DType, dims: [usize; 4], values: Vec<f32>) {
        if dtype != DType::I8 {
            return self.float(name, dtype, &dims, values);
        }
        let [pages, heads, _, hd] = dims;
        let mut bytes = kv8::bytes(&values, hd);
        let head = kv8::span(dtype, hd);
        for (values, bytes) in values.chunks(PAGE * hd).zip(bytes.chunks_mut(head)) {
            for (slot, _) in values.chunks(hd).enumerate().filter(|(_, row)| row[0].is_nan()) {
                let scale = PAGE * hd + 4 * slot;
                for at in (slot * hd..(slot + 1) * hd).chain(scale..scale + 4) {
                    bytes[at] = POISON[at % 4];
                }
            }
        }
        let values = kv8::values(&bytes, hd);
        self.push(name, dtype, &[pages, heads, PAGE, kv8::stored(dtype, hd)], Data::Codes(bytes, values));
    }

    /// A row block of a weight, `[.., K]`, which a device may use in place in a file: numbers of root mean square `rms` in
    /// `dtype`, or codes of elements about as large.
    pub fn weight(&mut self, name: &str, (dtype, format): (DType, Format), dims: &[usize], rms: f32, rng: &mut Rng) {
        let n = dims.iter().product();
        if format == Format::Plain {
            let mut values = rng.vec(n, rms);
            // Zeros are left alone: the weights of published shapes would take a minute.
            if !rng.blank {
                values.iter_mut().for_each(|x| *x = round(dtype, *x));
            }
            self.push(name, dtype, dims, Data::Float(values)).weight = true;
            return;
        }
        let bytes = if rng.blank { vec![0; format.bytes(n, 1)] } else { codes::random(format, n, 1.7 * rms, rng) };
        let mut stored = dims.to_vec();
        if let Some(k) = stored.last_mut() {
            *k = format.bytes(*k, 1);
        }
        let values = if rng.blank { Vec::new() } else { format.decode(&bytes) };
        let array = self.push(name, DType::U8, &stored, Data::Codes(bytes, values));
        (array.weight, array.format) = (true, format);
    }

    /// An array that holds poison until the op writes it.
    pub fn out(&mut self, name: &str, dtype: DType, dims: &[usize]) {
        let n = dims.iter().product();
        match dtype {
            DType::U32 => self.int(name, dims, vec![u32::from_le_bytes(POISON); n]),
            _ => self.float(name, dtype, dims, vec![f32::NAN; n]),
        }
    }

    pub fn int(&mut self, name: &str, dims: &[usize], values: Vec<u32>) {
        self.push(name, DType::U32, dims, Data::Int(values));
    }

    /// The step's integers.
    pub fn step(&mut self, batch: &Batch) {
        self.bucket = Some(batch.bucket);
        self.int("ints", &[batch.bucket.words()], batch.words());
    }

    /// Makes `name` a view that starts `lead` elements into its buffer, with `gap` elements between rows.
    pub fn spread(&mut self, name: &str, lead: usize, gap: usize) {
        let a = self.arrays.iter_mut().find(|a| a.name == name).unwrap_or_else(|| panic!("no array {name}"));
        a.offset += lead;
        a.row_stride += gap;
    }

    /// Makes these arrays column ranges of one matrix, with `gap` unused columns after them.
    pub fn join(&mut self, names: &[&str], gap: usize) {
        let first = self.index(names[0]);
        let width: usize = names.iter().map(|n| self.arrays[self.index(n)].row_len()).sum();
        let (dtype, rows, mut offset) = (self.arrays[first].dtype, self.arrays[first].dims[0], 0);
        for n in names {
            let i = self.index(n);
            let a = &mut self.arrays[i];
            assert!(a.dtype == dtype && a.dims[0] == rows, "{n} does not fit beside {}", names[0]);
            (a.buf, a.offset, a.row_stride) = (first, offset, width + gap);
            offset += a.row_len();
        }
    }

    /// Makes `name` a view of the buffer of `with`, `lead` elements into it.
    pub fn share(&mut self, name: &str, with: &str, lead: usize) {
        let buf = self.array(with).buf;
        let i = self.index(name);
        (self.arrays[i].buf, self.arrays[i].offset) = (buf, lead);
    }

    fn index(&self, name: &str) -> usize {
        self.arrays.iter().position(|a| a.name == name).unwrap_or_else(|| panic!("no array {name}"))
    }

    pub fn array(&self, name: &str) -> &Array {
        &self.arrays[self.index(name)]
    }

    /// Values of a float array, row after row.
    pub fn get(&self, name: &str) -> &[f32] {
        match &self.array(name).data {
            Data::Float(v) | Data::Codes(_, v) => v,
            Data::Int(_) => panic!("{name} holds integers"),
        }
    }

    /// Values of a float array as products see them: every 32 of a row are integers of -127 to 127 times a scale, where the
    /// device rounds them so.
    pub fn factors(&self, name: &str) -> Vec<f32> {
        let mut x = self.get(name).to_vec();
        if self.int8 {
            for group in x.chunks_mut(32) {
                let most = group.iter().fold(0f32, |most, x| most.max(x.abs()));
                let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
                let scale = f64::from(most / 127.0);
                group.iter_mut().for_each(|x| *x = (scale * f64::from((*x * inverse).round_ties_even())) as f32);
            }
        }
        x
    }

    /// Values of an integer array.
    pub fn ints(&self, name: &str) -> &[u32] {
        match &self.array(name).data {
            Data::Int(v) => v,
            Data::Float(_) | Data::Codes(..) => panic!("{name} holds floats"),
        }
    }

    /// Weights in codes.
    pub fn coded(&self) -> impl Iterator<Item = &Array> {
        self.arrays.iter().filter(|a| a.format != Format::Plain)
    }

    pub fn has(&self, name: &str) -> bool {
        self.arrays.iter().any(|a| a.name == name)
    }

    /// Number of bytes of every buffer, guard included; 0 where an array is a view of an earlier buffer.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes = vec![0; self.arrays.len()];
        for a in &self.arrays {
            let end = (a.end() * a.dtype.bytes()).next_multiple_of(16);
            sizes[a.buf] = sizes[a.buf].max(end + GUARD_BYTES);
        }
        sizes
    }

    /// Bytes of every buffer before the op.
    pub fn images(&self) -> Vec<Vec<u8>> {
        let mut images: Vec<Vec<u8>> = self.sizes().into_iter().map(|n| POISON.repeat(n / 4)).collect();
        for a in &self.arrays {
            a.store(&mut images[a.buf]);
        }
        images
    }
}

/// The arrays of a case on a device.
pub(super) struct Bound<'a, Buf> {
    pub host: &'a Host,
    /// One per buffer of [`Host::images`].
    pub bufs: Vec<Option<Buf>>,
}

impl<Buf: Clone> Bound<'_, Buf> {
    pub fn t(&self, name: &str) -> Tensor<Buf> {
        let a = self.host.array(name);
        let buf = self.bufs[a.buf].clone().expect("every view has a buffer");
        let mut t = Tensor::new(buf, a.dtype, &a.dims);
        (t.offset, t.row_stride) = (a.offset, a.row_stride);
        t
    }

    /// A row block of a weight.
    pub fn block(&self, name: &str, col: usize) -> RowBlock<Buf> {
        RowBlock { w: self.t(name), format: self.host.array(name).format, col, squares: false }
    }

    pub fn opt(&self, name: &str) -> Option<Tensor<Buf>> {
        self.host.has(name).then(|| self.t(name))
    }

    pub fn step(&self) -> Step<Buf> {
        let bucket = self.host.bucket.expect("the case has a step");
        Step { ints: self.t("ints"), bucket }
    }
}

/// Random numbers that depend on the case's name only.
pub(super) struct Rng {
    state: u64,
    /// Only shapes matter: vectors are zeros, which are fast to make.
    pub blank: bool,
}

impl Rng {
    pub fn new(name: &str) -> Self {
        // FNV-1a
        let state = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Self { state, blank: false }
    }

    /// For everything that depends on shapes only.
    pub fn blank(name: &str) -> Self {
        Self { blank: true, ..Self::new(name) }
    }

    pub fn bits(&mut self) -> u64 {
        // splitmix64
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `lo .. hi`.
    pub fn range(&mut self, lo: f32, hi: f32) -> f32 {
        lo + (hi - lo) * ((self.bits() >> 40) as f32 / (1u32 << 24) as f32)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn ranged(&mut self, n: usize, lo: f32, hi: f32) -> Vec<f32> {
        if self.blank {
            return vec![0.0; n];
        }
        (0..n).map(|_| self.range(lo, hi)).collect()
    }

    /// `n` numbers of mean 0 and root mean square `rms`.
    pub fn vec(&mut self, n: usize, rms: f32) -> Vec<f32> {
        let a = rms * 3f32.sqrt();
        self.ranged(n, -a, a)
    }

    /// `[T, cols]` for the tokens of a batch; the rows of padding tokens are NaN.
    pub fn tokens(&mut self, batch: &Batch, cols: usize, rms: f32) -> Vec<f32> {
        let mut v = self.vec(batch.bucket.tokens * cols, rms);
        v[batch.tokens() * cols..].fill(f32::NAN);
        v
    }

    /// `[S, len]`: slot 0 is zero, slots that the batch starts from hold numbers, all others NaN.
    pub fn slots(&mut self, batch: &Batch, len: usize, rms: f32) -> Vec<f32> {
        let mut v = vec![f32::NAN; batch.slots() * len];
        v[..len].fill(0.0);
        for s in batch.sources() {
            let values = self.vec(len, rms);
            v[s * len..(s + 1) * len].copy_from_slice(&values);
        }
        v
    }
}
