//! A tensor is a counted buffer, a dtype, dims, an offset and a row stride: views are free, splits never copy.

use serde::{Deserialize, Serialize};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Unsigned 32-bit integer.
    U32,
    /// A byte of a coded weight, see [`crate::format`].
    U8,
    /// A byte of KV pages in 8 bits, see [`crate::kv8`].
    I8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }

    /// Little-endian elements of this dtype, at any alignment, as f32 (integers by value).
    pub fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        let (words, halves) = (bytes.as_chunks::<4>().0, bytes.as_chunks::<2>().0);
        match self {
            Self::F32 => words.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Self::U32 => words.iter().map(|b| u32::from_le_bytes(*b) as f32).collect(),
            Self::Bf16 => halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
            Self::F16 => halves.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            Self::U8 => bytes.iter().map(|b| f32::from(*b)).collect(),
            Self::I8 => bytes.iter().map(|b| f32::from(*b as i8)).collect(),
        }
    }
}

/// A view of a buffer: `dims` outermost first, rows `row_stride` elements apart, everything within a row contiguous.
///
/// "Row" is the first dimension. For a rank-1 tensor the row stride is 1. Cloning clones the handle, not the bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tensor<Buf> {
    /// The buffer that holds the elements.
    pub buf: Buf,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first; unused trailing entries are 1.
    dims: [usize; 4],
    rank: usize,
    /// First element, in elements from the start of the buffer.
    pub offset: usize,
    /// Distance between consecutive entries of the first dimension, in elements.
    pub row_stride: usize,
}

impl<Buf> Tensor<Buf> {
    /// The same view of another buffer.
    pub fn on<New>(&self, buf: New) -> Tensor<New> {
        let Self { dtype, dims, rank, offset, row_stride, .. } = *self;
        Tensor { buf, dtype, dims, rank, offset, row_stride }
    }
}

impl<Buf: Clone> Tensor<Buf> {
    /// A contiguous tensor at the start of `buf`.
    pub fn new(buf: Buf, dtype: DType, dims: &[usize]) -> Self {
        assert!((1..=4).contains(&dims.len()), "a tensor has 1 to 4 dimensions, not {dims:?}");
        let mut d = [1; 4];
        d[..dims.len()].copy_from_slice(dims);
        let elements = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        assert!(elements.is_some(), "a tensor of {dims:?} has more elements than a size can count");
        let row_stride = dims[1..].iter().product();
        Self { buf, dtype, dims: d, rank: dims.len(), offset: 0, row_stride }
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Entries of the first dimension.
    pub fn rows(&self) -> usize {
        self.dims[0]
    }

    /// Elements of one entry of the first dimension.
    pub fn row_len(&self) -> usize {
        self.dims[1..self.rank].iter().product()
    }

    /// Number of elements of the view.
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements lie one after the other, with no gap between rows.
    pub fn is_contiguous(&self) -> bool {
        self.rows() <= 1 || self.row_stride == self.row_len()
    }

    /// The first `n` rows.
    pub fn head(&self, n: usize) -> Self {
        self.slice_rows(0, n)
    }

    /// Rows `from .. from + n`.
    pub fn slice_rows(&self, from: usize, n: usize) -> Self {
        assert!(from + n <= self.rows(), "rows {from}..{} of a tensor of {} rows", from + n, self.rows());
        let mut t = self.clone();
        t.dims[0] = n;
        t.offset += from * self.row_stride;
        t
    }

    /// `n` rows, every `step`th from row `from` on.
    pub fn every(&self, from: usize, step: usize, n: usize) -> Self {
        let last = n.checked_sub(1).map_or(from, |n| from + n * step);
        assert!(last < self.rows(), "rows up to {last} of a tensor of {} rows", self.rows());
        let mut t = self.clone();
        t.dims[0] = n;
        t.offset += from * self.row_stride;
        t.row_stride *= step;
        t
    }

    /// Columns `from .. from + n` of a rank-2 tensor: a view with this tensor's row stride.
    pub fn cols(&self, from: usize, n: usize) -> Self {
        assert!(self.rank == 2 && from + n <= self.dims[1], "columns {from}..{} of {:?}", from + n, self.dims());
        let mut t = self.clone();
        t.dims[1] = n;
        t.offset += from;
        t
    }

    /// First byte of the view in its buffer.
    pub fn byte_offset(&self) -> usize {
        self.offset * self.dtype.bytes()
    }

    /// One past the last byte of the view in its buffer.
    pub fn byte_end(&self) -> usize {
        if self.is_empty() {
            return self.byte_offset();
        }
        // Views are compared with their buffers by this number: it must not wrap.
        let last_row = (self.rows() - 1).checked_mul(self.row_stride).and_then(|n| n.checked_add(self.offset));
        let end = last_row.and_then(|n| n.checked_add(self.row_len())?.checked_mul(self.dtype.bytes()));
        end.expect("the bytes of a view are counted by a usize")
    }
}
