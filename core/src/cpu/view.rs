//! Rows of a tensor as slices: the only place where tensors become references.
//!
//! Views of several tensors interleave in one buffer (`z | x B C | dt` of one projection), so they are made from raw
//! pointers. What makes that sound:
//! - a view's range was compared with its buffer's size when it was made, and rows do not overlap;
//! - a buffer's lease counts the views that are alive as a `RefCell` does: many readers or one writer, else a panic;
//! - [`Buf`] is neither `Send` nor `Sync`, so leases are only touched by one thread. What goes to other threads are
//!   shared readers and the disjoint tiles of a writer, all bound to the lifetime of the lease.

use std::cell::Cell;
use std::marker::PhantomData;

use super::Buf;
use super::gemm::WeightRows;
use crate::backend::Handle;
use crate::format::Format;
use crate::ops::RowBlock;
use crate::tensor::{DType, Tensor};

/// Element types of views.
pub(crate) trait Elem: bytemuck::Pod + Send + Sync {
    /// The dtype of tensors with such elements.
    const DTYPE: DType;
}

impl Elem for f32 {
    const DTYPE: DType = DType::F32;
}

impl Elem for u32 {
    const DTYPE: DType = DType::U32;
}

impl Elem for i8 {
    const DTYPE: DType = DType::I8;
}

/// One reader's share of a buffer.
struct Shared<'a>(&'a Cell<isize>);

impl<'a> Shared<'a> {
    fn take(buf: &'a Buf) -> Self {
        assert!(buf.lease().get() >= 0, "read of a buffer that is being written");
        buf.lease().set(buf.lease().get() + 1);
        Self(buf.lease())
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The only writer of a buffer.
struct Exclusive<'a>(&'a Cell<isize>);

impl<'a> Exclusive<'a> {
    fn take(buf: &'a Buf) -> Self {
        assert!(!buf.is_adopted(), "write to adopted bytes");
        assert!(buf.lease().get() == 0, "write to a buffer that is in use");
        buf.lease().set(-1);
        Self(buf.lease())
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.0.set(0);
    }
}

/// The first byte of a view that lies within its buffer.
fn first_byte(t: &Tensor<Buf>) -> *mut u8 {
    assert!(t.byte_end() as u64 <= t.buf.bytes(), "a view beyond its buffer");
    // SAFETY: the offset is at most the end of the view, which lies in the buffer; an empty view may point anywhere.
    if t.is_empty() { t.buf.ptr() } else { unsafe { t.buf.ptr().add(t.byte_offset()) } }
}

fn first_element<T: Elem>(t: &Tensor<Buf>) -> *mut T {
    assert!(t.dtype == T::DTYPE, "a view of {:?} as {:?}", t.dtype, T::DTYPE);
    let p = first_byte(t).cast::<T>();
    assert!(t.is_empty() || p.is_aligned(), "a view of {:?} at an odd address", t.dtype);
    if t.is_empty() { std::ptr::dangling_mut() } else { p }
}

/// The rows of a tensor, to read.
pub(crate) struct Rows<'a, T = f32> {
    ptr: *const T,
    rows: usize,
    len: usize,
    stride: usize,
    _lease: Shared<'a>,
}

// SAFETY: through a shared reference only elements are read; the lease is touched by making and dropping alone, and the
// view cannot move to another thread.
unsafe impl<T: Elem> Sync for Rows<'_, T> {}

/// Views a tensor to read it.
pub(crate) fn read<T: Elem>(t: &Tensor<Buf>) -> Rows<'_, T> {
    let lease = Shared::take(&t.buf);
    Rows { ptr: first_element(t), rows: t.rows(), len: t.row_len(), stride: t.row_stride, _lease: lease }
}

impl<T: Elem> Rows<'_, T> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies in the buffer, and the lease keeps writers away.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.len) }
    }

    /// First element and row stride, for kernels that take pointers.
    pub fn raw(&self) -> (*const T, usize) {
        (self.ptr, self.stride)
    }

    /// All elements of a tensor without gaps (a vector, say).
    pub fn flat(&self) -> &[T] {
        assert!(self.rows <= 1 || self.stride == self.len, "a view with gaps as one slice");
        // SAFETY: as in `row`; without gaps the rows are one range.
        unsafe { std::slice::from_raw_parts(self.ptr, self.rows * self.len) }
    }
}

/// The stored bytes of a weight's rows, at any alignment.
pub(crate) struct RowBytes<'a> {
    ptr: *const u8,
    rows: usize,
    bytes: usize,
    stride: usize,
    /// f32, bf16 or f16; of coded rows, u8.
    pub dtype: DType,
    /// What the bytes of a row are.
    pub format: Format,
    _lease: Shared<'a>,
}

// SAFETY: as for `Rows`.
unsafe impl Sync for RowBytes<'_> {}

/// Views the rows of a weight `[n, ..]`.
pub(crate) fn read_bytes(block: &RowBlock<Buf>) -> RowBytes<'_> {
    let t = &block.w;
    let lease = Shared::take(&t.buf);
    let size = t.dtype.bytes();
    RowBytes {
        ptr: first_byte(t),
        rows: t.rows(),
        bytes: t.row_len() * size,
        stride: t.row_stride * size,
        dtype: t.dtype,
        format: block.format,
        _lease: lease,
    }
}

impl RowBytes<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows `from .. from + n` for the product kernels; the first of them gives output column `col`.
    pub fn block(&self, from: usize, n: usize, col: usize) -> WeightRows {
        assert!(from + n <= self.rows, "rows {from}..{} of {}", from + n, self.rows);
        let ptr = self.ptr.wrapping_add(from * self.stride);
        WeightRows { ptr, dtype: self.dtype, format: self.format, n, row_bytes: self.stride, col }
    }

    /// The bytes of row `i`.
    pub fn row(&self, i: usize) -> &[u8] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies in the buffer, and the lease keeps writers away.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.bytes) }
    }
}

/// The right to write a tensor; [`Writer::rows`] gives its rows.
pub(crate) struct Writer<'a, T = f32> {
    ptr: *mut T,
    rows: usize,
    len: usize,
    stride: usize,
    _lease: Exclusive<'a>,
}

/// Views a tensor to write it (and to read it).
pub(crate) fn write<T: Elem>(t: &Tensor<Buf>) -> Writer<'_, T> {
    let lease = Exclusive::take(&t.buf);
    assert!(t.rows() <= 1 || t.row_stride >= t.row_len(), "rows to write overlap");
    Writer { ptr: first_element(t), rows: t.rows(), len: t.row_len(), stride: t.row_stride, _lease: lease }
}

impl<T: Elem> Writer<'_, T> {
    /// First element and row stride, for kernels that take pointers.
    pub fn raw(&mut self) -> (*mut T, usize) {
        (self.ptr, self.stride)
    }

    /// The rows.
    pub fn rows(&mut self) -> RowsMut<'_, T> {
        RowsMut { ptr: self.ptr, rows: self.rows, len: self.len, stride: self.stride, _life: PhantomData }
    }
}

/// Rows to write: those of a tensor, or a tile of them. Tiles are disjoint and may go to different threads.
pub(crate) struct RowsMut<'a, T = f32> {
    ptr: *mut T,
    rows: usize,
    len: usize,
    stride: usize,
    _life: PhantomData<&'a mut [T]>,
}

// SAFETY: like `&mut [T]`: no other view reaches these elements.
unsafe impl<T: Elem> Send for RowsMut<'_, T> {}
// SAFETY: through a shared reference elements are only read.
unsafe impl<T: Elem> Sync for RowsMut<'_, T> {}

impl<T: Elem> RowsMut<'_, T> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn row_len(&self) -> usize {
        self.len
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies in the buffer and belongs to this view.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.len) }
    }

    /// Row `i`, to write.
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: as in `row`, and the view is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.stride), self.len) }
    }

    /// Copies row `from` over row `to`.
    pub fn copy_row(&mut self, from: usize, to: usize) {
        assert!(from < self.rows && to < self.rows, "rows {from}, {to} of {}", self.rows);
        if from != to {
            // SAFETY: both rows lie in the view; different rows do not overlap.
            unsafe {
                let (src, dst) = (self.ptr.add(from * self.stride), self.ptr.add(to * self.stride));
                std::ptr::copy_nonoverlapping(src, dst, self.len);
            }
        }
    }
}

impl<'a, T: Elem> RowsMut<'a, T> {
    /// Cuts into tiles of at most `rows` rows and `cols` columns, the tiles of a band of rows one after the other.
    pub fn tiles(self, rows: usize, cols: usize) -> Vec<RowsMut<'a, T>> {
        let mut tiles = Vec::with_capacity(self.rows.div_ceil(rows) * self.len.div_ceil(cols));
        for r in (0..self.rows).step_by(rows) {
            for c in (0..self.len).step_by(cols) {
                tiles.push(RowsMut {
                    // SAFETY: element (r, c) lies in the view.
                    ptr: unsafe { self.ptr.add(r * self.stride + c) },
                    rows: rows.min(self.rows - r),
                    len: cols.min(self.len - c),
                    stride: self.stride,
                    _life: PhantomData,
                });
            }
        }
        tiles
    }
}

/// Copies the elements of a contiguous tensor.
pub(super) fn to_vec(t: &Tensor<Buf>) -> Vec<u8> {
    assert!(t.is_contiguous(), "read of a tensor with gaps");
    let _lease = Shared::take(&t.buf);
    let n = t.len() * t.dtype.bytes();
    // SAFETY: the view lies in its buffer, and the lease keeps writers away.
    unsafe { std::slice::from_raw_parts(first_byte(t), n) }.to_vec()
}

/// Copies `bytes` into a buffer from byte `at` on.
pub(super) fn fill(buf: &Buf, at: usize, bytes: &[u8]) {
    let _lease = Exclusive::take(buf);
    assert!(at as u64 + bytes.len() as u64 <= buf.bytes(), "write beyond a buffer");
    // SAFETY: the range lies in the buffer, and no view of it is alive.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.ptr().add(at), bytes.len()) };
}
