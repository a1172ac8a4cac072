//! RMS norm, with an optional residual add before it and an optional gate around it, per group.
//!
//! `x += add_scale * add; out = x * rsqrt(mean(x²) + eps) * weight`, the mean over each of `groups` equal parts of a row.

use serde::{Deserialize, Serialize};

use super::{Access, Act, Cost, ensure, expect, moved, size};
use crate::backend::Handle;
use crate::tensor::{DType, Tensor};

/// A gate on a norm: `act(z)` multiplies the norm's input (Mamba-2) or its output (Gated DeltaNet).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gate<Buf> {
    /// `[T, D]`.
    pub z: Tensor<Buf>,
    /// silu or sigmoid.
    pub act: Act,
    /// Gate first, then norm; else norm first.
    pub before: bool,
}

/// RMS norm over rows. Statistics in f32. `weight` has the `1 + w` of zero-centred norms folded in at load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RmsNorm<Buf> {
    /// `[T, D]`; written back (in place) only with `add`.
    pub x: Tensor<Buf>,
    /// `[T, D]` and its factor, added to `x` first.
    pub add: Option<(Tensor<Buf>, f32)>,
    /// `[D] f32`, or `[D / groups] f32` shared by all groups (per-head norms).
    pub weight: Tensor<Buf>,
    /// Gate, if any.
    pub gate: Option<Gate<Buf>>,
    /// `[T, D]`.
    pub out: Tensor<Buf>,
    /// Adds to `out` instead of overwriting it, for a norm after a mixer. Not with a gate or `add`.
    pub accumulate: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Equal parts of a row, each with its own mean: Mamba-2's groups, or heads.
    pub groups: usize,
}

impl<Buf: Handle> RmsNorm<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let x = if self.add.is_some() { Access::InPlace } else { Access::Read };
        let out = if self.accumulate { Access::InPlace } else { Access::Write };
        let mut t = vec![(x, &self.x), (Access::Read, &self.weight), (out, &self.out)];
        t.extend(self.add.iter().map(|(a, _)| (Access::Read, a)));
        t.extend(self.gate.iter().map(|g| (Access::Read, &g.z)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), held: size(&self.weight), flops: 4 * self.x.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (rows, d) = (self.x.rows(), self.x.row_len());
        expect("rms_norm", "x", &self.x, &[rows, d]);
        expect("rms_norm", "out", &self.out, &[rows, d]);
        ensure!("rms_norm", self.groups > 0 && d % self.groups == 0, "{} groups of {d}", self.groups);
        let w = self.weight.len();
        ensure!("rms_norm", w == d || w == d / self.groups, "weight of {w} for {d} in {} groups", self.groups);
        ensure!("rms_norm", self.weight.dtype == DType::F32, "weight is not f32");
        let alone = self.gate.is_none() && self.add.is_none();
        ensure!("rms_norm", alone || !self.accumulate, "accumulates with a gate or another input");
        if let Some((a, _)) = &self.add {
            expect("rms_norm", "add", a, &[rows, d]);
        }
        if let Some(g) = &self.gate {
            expect("rms_norm", "gate", &g.z, &[rows, d]);
        }
    }
}
