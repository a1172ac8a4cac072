//! Sum over the devices that share a model by tensor parallelism; nothing to do on one device.

use super::{Access, Cost, moved};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// `x ← Σ over ranks of x`, after a row-parallel product.
#[derive(Clone, Debug)]
pub struct AllReduce<Buf> {
    /// `[T, D]`.
    pub x: Tensor<Buf>,
}

impl<Buf: Handle> AllReduce<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        vec![(Access::InPlace, &self.x)]
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), flops: self.x.len() as u64 }
    }

    pub(super) fn check(&self) {}
}
