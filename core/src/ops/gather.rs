//! Picks the rows whose logits are wanted.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, expect, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::Tensor;

/// `out[o] = x[output_token[o]]`; rows of padding outputs receive 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gather<Buf> {
    /// Names the output tokens.
    pub step: Step<Buf>,
    /// `[T, D]`.
    pub x: Tensor<Buf>,
    /// `[O, D]`.
    pub out: Tensor<Buf>,
}

impl<Buf: Handle> Gather<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        vec![(Access::Read, &self.step.ints), (Access::Read, &self.x), (Access::Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: 2 * size(&self.out), held: 0, flops: 0 }
    }

    pub(super) fn check(&self) {
        let d = self.x.row_len();
        expect("gather", "x", &self.x, &[self.step.bucket.tokens, d]);
        expect("gather", "out", &self.out, &[self.step.bucket.outputs, d]);
    }
}
