//! `out = scale * columns * x Wᵀ (+ bias) (+ out)`: every linear layer.

use super::{Access, Cost, ensure, expect, moved};
use crate::backend::Handle;
use crate::tensor::{DType, Tensor};

/// Consecutive output rows of a weight: a view of stored bytes, and the output column of its first row.
#[derive(Clone, Debug)]
pub struct RowBlock<Buf> {
    /// `[n, K]` f32, bf16 or f16; on the CPU the mapped file, at any alignment. For experts `[E, n, K]`.
    pub w: Tensor<Buf>,
    /// First output column.
    pub col: usize,
}

/// A weight `[N, K]` as row blocks that together cover the N output columns once.
///
/// Fusion (q, k, v), de-interleaving (Qwen3-Next) and splits at binding limits are lists of blocks, not copies.
#[derive(Clone, Debug)]
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
            assert!(b.w.dims()[1..] == [self.k], "{op}: a block is {:?}, inner dim {}", b.w.dims(), self.k);
            assert!(b.w.dtype != DType::U32, "{op}: a weight of integers");
            next += n;
        }
        assert!(next == self.n, "{op}: blocks cover {next} of {} columns", self.n);
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|b| (b.w.len() * b.w.dtype.bytes()) as u64).sum()
    }
}

/// A matrix product with its epilogue. Every dot product has one summation order, whatever the number of rows.
#[derive(Clone, Debug)]
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
    /// Adds to what `out` holds (the residual stream) instead of overwriting it.
    pub accumulate: bool,
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
        Cost { bytes: moved(&self.tensors()), flops: flops as u64 }
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
