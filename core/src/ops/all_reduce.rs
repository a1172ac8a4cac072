//! The sum over ranks: `out = Σ x_r`, or `out += Σ x_r`. What a mixer's ranks compute of its output is added to the stream here.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, expect, moved};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// Adds up the `x` of all ranks, in ascending order of ranks, so that every rank gets the same bits every time. The residual add
/// comes after the sum.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AllReduce<Buf> {
    /// `[T, D]`: what this rank has of the sum.
    pub x: Tensor<Buf>,
    /// `[T, D]`, equal on all ranks.
    pub out: Tensor<Buf>,
    /// Adds to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl<Buf: Handle> AllReduce<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let out = if self.accumulate { Access::InPlace } else { Access::Write };
        vec![(Access::Read, &self.x), (out, &self.out)]
    }

    /// That of one rank. What moves between ranks depends on their number and links, which an op does not know.
    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), held: 0, flops: self.x.len() as u64 }
    }

    pub(super) fn check(&self) {
        expect("all_reduce", "out", &self.out, self.x.dims());
    }
}
