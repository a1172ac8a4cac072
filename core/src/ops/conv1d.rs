//! Depthwise causal convolution with its state, driven by the chunk table.
//!
//! `out[t, c] = act(bias[c] + Σ_j w[c, j] * u[t - K + 1 + j, c])`, tap K-1 being the current token
//! (`architectures`: cross-correlation, no flip). Taps reach back through the packed tokens of the same row, then into
//! the state of the row's first chunk's `src`. A chunk's `dst` receives the K-1 raw inputs that end with its last token.

use serde::{Deserialize, Serialize};

use super::{Access, Act, Cost, ensure, expect, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// Convolution of some channels. See the module for the formula, `crate::step` for the tables.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Conv1d<Buf> {
    /// Chunk, row and token tables.
    pub step: Step<Buf>,
    /// `[T, C]`: raw inputs.
    pub x: Tensor<Buf>,
    /// `[C, K + 1] f32`: taps, oldest first, then the bias (0 without one).
    pub weight: Tensor<Buf>,
    /// `[S, C, K - 1]`, oldest input first. Slot 0 reads as zero and discards writes.
    pub pool: Tensor<Buf>,
    /// `[T, C]`; rows of padding tokens receive 0.
    pub out: Tensor<Buf>,
    /// Silu or identity.
    pub act: Act,
}

impl<Buf: Handle> Conv1d<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        vec![(Read, &self.step.ints), (Read, &self.x), (Read, &self.weight), (InPlace, &self.pool), (Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        let state = self.pool.row_len() * self.pool.dtype.bytes() * self.step.bucket.rows;
        let held = (4 * self.weight.len() + 2 * state) as u64;
        Cost { bytes: 2 * size(&self.x) + held, held, flops: 2 * (self.x.len() * self.weight.row_len()) as u64 }
    }

    pub(super) fn check(&self) {
        let (t, c, k) = (self.step.bucket.tokens, self.x.row_len(), self.weight.row_len() - 1);
        expect("conv1d", "x", &self.x, &[t, c]);
        expect("conv1d", "out", &self.out, &[t, c]);
        expect("conv1d", "weight", &self.weight, &[c, k + 1]);
        expect("conv1d", "pool", &self.pool, &[self.pool.rows(), c, k - 1]);
        ensure!("conv1d", (2..=8).contains(&k), "{k} taps");
        ensure!("conv1d", self.weight.dtype == DType::F32, "weight is not f32");
        ensure!("conv1d", matches!(self.act, Act::Silu | Act::Identity), "activation {:?}", self.act);
    }
}
