//! A small product per head: `out[t, h] = W_h x[t, h]`.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, moved, size};
use crate::backend::Handle;
use crate::tensor::{DType, Tensor};

/// Multiplies the first K elements of each head of a token by the head's own matrix.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HeadMatmul<Buf> {
    /// `[T, H * W]`, W at least K.
    pub x: Tensor<Buf>,
    /// `[H * N, K] f32`: the matrices of the heads, one after the other.
    pub w: Tensor<Buf>,
    /// `[T, H * N]`.
    pub out: Tensor<Buf>,
    /// Heads H.
    pub heads: usize,
}

impl<Buf: Handle> HeadMatmul<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        vec![(Access::Read, &self.x), (Access::Read, &self.w), (Access::Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        let flops = 2 * (self.x.rows() * self.w.len()) as u64;
        Cost { bytes: moved(&self.tensors()), held: size(&self.w), flops }
    }

    pub(super) fn check(&self) {
        let (t, h) = (self.x.rows(), self.heads);
        let &[rows, k] = self.w.dims() else { panic!("head_matmul: w is {:?}", self.w.dims()) };
        ensure!("head_matmul", h > 0 && rows % h == 0, "{rows} rows for {h} heads");
        expect("head_matmul", "out", &self.out, &[t, rows]);
        let width = self.x.row_len();
        expect("head_matmul", "x", &self.x, &[t, width]);
        ensure!("head_matmul", width.is_multiple_of(h) && width / h >= k, "{width} columns for {h} heads of {k}");
        ensure!("head_matmul", self.w.dtype == DType::F32 && self.w.is_contiguous(), "w is not a plain f32 matrix");
    }
}
