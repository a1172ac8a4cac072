//! Pointwise activations of MLPs and gates: `out = act(gate) * up * sigmoid(row_gate)`.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, expect, moved};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// A pointwise function, computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Act {
    /// `x`.
    Identity,
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `max(x, 0)²`.
    Relu2,
    /// `x * Φ(x)`, exact (erf).
    Gelu,
}

/// Activation, optionally gated and scaled per row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Activation<Buf> {
    /// `[T, I]`.
    pub gate: Tensor<Buf>,
    /// `[T, I]`, multiplied with the activated gate.
    pub up: Option<Tensor<Buf>>,
    /// `[T, 1]`: its sigmoid scales the row (Qwen's shared expert).
    pub row_gate: Option<Tensor<Buf>>,
    /// `[T, I]`.
    pub out: Tensor<Buf>,
    /// Applied to `gate`.
    pub act: Act,
}

impl<Buf: Handle> Activation<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let mut t = vec![(Access::Read, &self.gate), (Access::Write, &self.out)];
        t.extend(self.up.iter().chain(&self.row_gate).map(|u| (Access::Read, u)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), held: 0, flops: 8 * self.out.len() as u64 }
    }

    pub(super) fn check(&self) {
        let dims = [self.gate.rows(), self.gate.row_len()];
        expect("activation", "gate", &self.gate, &dims);
        expect("activation", "out", &self.out, &dims);
        if let Some(u) = &self.up {
            expect("activation", "up", u, &dims);
        }
        if let Some(r) = &self.row_gate {
            expect("activation", "row_gate", r, &[dims[0], 1]);
        }
    }
}
