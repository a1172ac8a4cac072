//! Activations of recipes that round them: `out = x` in 8-bit floats with a scale per row and 128 columns.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, moved};
use crate::backend::Handle;
use crate::format::EIGHT_GROUP;
use crate::tensor::Tensor;

/// Rounds the input of a linear layer as [`crate::format::round_eight`] does, to numbers that f32 and bf16 hold exactly. So kernels
/// for activations multiply them as they are, and others their codes.
///
/// Only the op that follows reads `out`. A backend that computes both at once need not write it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Round<Buf> {
    /// `[M, K]`, K a multiple of [`EIGHT_GROUP`].
    pub x: Tensor<Buf>,
    /// `[M, K]`, of the dtype of `x`.
    pub out: Tensor<Buf>,
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
        ensure!("round", k.is_multiple_of(EIGHT_GROUP), "{k} columns are no whole groups");
    }
}
