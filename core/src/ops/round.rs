//! Activations of recipes that round them: `out = x` in 8-bit floats with a scale per row and 128 columns.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, moved};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// Rounds the input of a linear layer as [`crate::format::round_eight`] does, to numbers that every dtype of activations holds
/// exactly. A product of them equals that of the codes with their scales, whatever kernel computes it.
///
/// Only the op that follows reads `out`. A backend that computes both at once need not write it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Round<Buf> {
    /// `[M, K]`, K a multiple of [`Round::GROUP`].
    pub x: Tensor<Buf>,
    /// `[M, K]`, of the dtype of `x`.
    pub out: Tensor<Buf>,
}

impl<Buf> Round<Buf> {
    /// Columns that share a scale: those of a block of weights.
    pub const GROUP: usize = crate::format::EIGHT_GROUP;
}

impl<Buf: Handle> Round<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        vec![(Access::Read, &self.x), (Access::Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), held: 0, flops: 8 * self.out.len() as u64 }
    }

    pub(super) fn check(&self) {
        let k = self.x.row_len();
        expect("round", "out", &self.out, &[self.x.rows(), k]);
        ensure!("round", self.x.dtype == self.out.dtype, "{:?} to {:?}", self.x.dtype, self.out.dtype);
        ensure!("round", k.is_multiple_of(Self::GROUP), "{k} columns are no whole groups");
    }
}
