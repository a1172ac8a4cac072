//! The columns of all ranks side by side: `out = [x_0 | x_1 | ..]`. So every rank gets all logits.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, size};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// Joins the columns of all ranks, in ascending order of ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AllGather<Buf> {
    /// `[T, N]`: this rank's columns.
    pub x: Tensor<Buf>,
    /// `[T, W N]` for W ranks, equal on all of them.
    pub out: Tensor<Buf>,
}

impl<Buf: Handle> AllGather<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        vec![(Access::Read, &self.x), (Access::Write, &self.out)]
    }

    /// That of one rank, which reads its own columns once and writes all of them.
    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: size(&self.x) + size(&self.out), held: 0, flops: 0 }
    }

    pub(super) fn check(&self) {
        let (own, all) = (self.x.row_len(), self.out.row_len());
        ensure!("all_gather", self.x.rows() == self.out.rows(), "{} rows into {}", self.x.rows(), self.out.rows());
        ensure!("all_gather", own > 0 && all % own == 0, "columns of {own} into {all}");
    }
}
