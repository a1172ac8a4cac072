//! `out = scale * columns * x Wᵀ (+ bias) (+ out)`: every linear layer.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, moved, size};
use crate::backend::Handle;
use crate::format::Format;
use crate::tensor::{DType, Tensor};

/// Consecutive output rows of a weight: a view of stored bytes, and the output column of its first row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RowBlock<Buf> {
    /// `[n, K]` f32, bf16 or f16, or the bytes of coded rows, `[n, bytes] u8`; on the CPU the mapped file, at any alignment. For
    /// experts `[E, n, ..]`.
    pub w: Tensor<Buf>,
    /// What the bytes of a row are.
    pub format: Format,
    /// First output column.
    pub col: usize,
    /// Of [`Format::F8`]: rows from each multiple of 128 to the next share their scales, so there is one per 128 x 128.
    pub squares: bool,
}

impl<Buf: Clone> RowBlock<Buf> {
    /// A block of plain elements.
    pub fn plain(w: Tensor<Buf>, col: usize) -> Self {
        Self { w, format: Format::Plain, col, squares: false }
    }

    /// Elements of a row, K; `None` if the row is no whole number of blocks.
    pub fn k(&self) -> Option<usize> {
        let stored = *self.w.dims().last()?;
        match self.format.block() {
            None => Some(stored),
            Some((n, bytes)) => (stored % bytes == 0).then(|| stored / bytes * n),
        }
    }

    /// Panics, naming the op, unless rows of `k` elements are stored in a dtype that goes with the format.
    pub(super) fn check(&self, op: &str, k: usize) {
        assert!(self.k() == Some(k), "{op}: a block of {} is {:?}, inner dim {k}", self.format.name(), self.w.dims());
        let fits = match self.format {
            Format::Plain => matches!(self.w.dtype, DType::F32 | DType::Bf16 | DType::F16),
            _ => self.w.dtype == DType::U8,
        };
        assert!(fits, "{op}: a weight of {:?} as {}", self.w.dtype, self.format.name());
    }
}

/// A weight `[N, K]` as row blocks that together cover the N output columns once.
///
/// Fusion (q, k, v), de-interleaving (Qwen3-Next) and splits at binding limits are lists of blocks, not copies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Weight<Buf> {
    /// The blocks, ascending by column where the device gathered them, in file order where it could not.
    pub blocks: Vec<RowBlock<Buf>>,
    /// Output columns.
    pub n: usize,
    /// Inner dimension.
    pub k: usize,
}

impl<Buf: Handle> Weight<Buf> {
    pub(super) fn check(&self, op: &str) {
        let mut cols: Vec<(usize, usize)> = self.blocks.iter().map(|b| (b.col, b.w.rows())).collect();
        cols.sort_unstable();
        let mut next = 0;
        for (b, (col, n)) in self.blocks.iter().zip(&cols) {
            assert!(*col == next, "{op}: columns {next}..{col} of a weight are missing or covered twice");
            assert!(b.w.dims().len() == 2, "{op}: a block is {:?}", b.w.dims());
            b.check(op, self.k);
            next += n;
        }
        assert!(next == self.n, "{op}: blocks cover {next} of {} columns", self.n);
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|b| (b.w.len() * b.w.dtype.bytes()) as u64).sum()
    }
}

/// A matrix product with its epilogue. Every dot product has one summation order, independent of the number of rows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Matmul<Buf> {
    /// `[M, K]`, activation dtype (or f32).
    pub x: Tensor<Buf>,
    /// `[N, K]`.
    pub w: Weight<Buf>,
    /// `[N] f32`: a factor per output column, besides `scale`.
    pub columns: Option<Tensor<Buf>>,
    /// `[N] f32`, added after scaling.
    pub bias: Option<Tensor<Buf>>,
    /// `[M, N]`, activation dtype or f32 (router and output logits).
    pub out: Tensor<Buf>,
    /// Factor on the product.
    pub scale: f32,
    /// Adds to `out` (the residual stream) instead of overwriting it.
    pub accumulate: bool,
    /// The factors are not rounded to [`Caps::products`](crate::backend::Caps::products): a router decides by what follows.
    pub precise: bool,
}

impl<Buf: Handle> Matmul<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let out = if self.accumulate { Access::InPlace } else { Access::Write };
        let mut t = vec![(Access::Read, &self.x), (out, &self.out)];
        t.extend(self.columns.iter().chain(&self.bias).map(|b| (Access::Read, b)));
        t.extend(self.w.blocks.iter().map(|b| (Access::Read, &b.w)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let flops = 2 * self.x.rows() * self.w.n * self.w.k;
        let vectors = self.columns.iter().chain(&self.bias);
        let held = vectors.chain(self.w.blocks.iter().map(|b| &b.w)).map(size).sum();
        Cost { bytes: moved(&self.tensors()), held, flops: flops as u64 }
    }

    pub(super) fn check(&self) {
        self.w.check("matmul");
        expect("matmul", "x", &self.x, &[self.x.rows(), self.w.k]);
        expect("matmul", "out", &self.out, &[self.x.rows(), self.w.n]);
        for (name, b) in [("columns", &self.columns), ("bias", &self.bias)] {
            if let Some(b) = b {
                expect("matmul", name, b, &[self.w.n]);
                ensure!("matmul", b.dtype == DType::F32, "{name} is not f32");
            }
        }
    }
}
