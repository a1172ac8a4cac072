//! Pointwise activations of MLPs and gates: `out = act(gate) * up * sigmoid(row_gate)`.

use super::{Access, Cost, expect, moved};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::{self, math, par, view};
use crate::tensor::Tensor;

/// A pointwise function, computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Debug)]
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
        Cost { bytes: moved(&self.tensors()), flops: 8 * self.out.len() as u64 }
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

impl Act {
    /// The function on 16 lanes.
    #[inline(always)]
    pub(super) fn apply<S: Simd>(self, s: S, v: S::V) -> S::V {
        match self {
            Self::Identity => v,
            Self::Silu => math::silu(s, v),
            Self::Sigmoid => math::sigmoid(s, v),
            Self::Relu2 => math::relu2(s, v),
            Self::Gelu => math::gelu(s, v),
        }
    }
}

/// Rows of a task.
const TILE: usize = 8;

impl Activation<cpu::Buf> {
    pub(super) fn reference(&self) {
        let act = self.act;
        let gate = view::read(&self.gate);
        let up = self.up.as_ref().map(view::read);
        let row_gate = self.row_gate.as_ref().map(view::read);
        let mut out = view::write(&self.out);
        par::for_each(out.rows().tiles(TILE, self.out.row_len()), 8 * self.out.len(), |i, mut tile| {
            for r in 0..tile.rows() {
                let t = i * TILE + r;
                let scale = row_gate.as_ref().map(|g| math::sigmoid_scalar(g.row(t)[0]));
                let up = up.as_ref().map(|u| u.row(t));
                dispatch!(Isa::best(), |s| activate(s, act, gate.row(t), up, scale, tile.row_mut(r)));
            }
        });
    }
}

#[inline(always)]
fn activate<S: Simd>(s: S, act: Act, gate: &[f32], up: Option<&[f32]>, scale: Option<f32>, out: &mut [f32]) {
    for (i, out) in out.chunks_mut(LANES).enumerate() {
        let at = i * LANES;
        let mut v = act.apply(s, s.load_partial(&gate[at..]));
        if let Some(up) = up {
            v = s.mul(v, s.load_partial(&up[at..]));
        }
        if let Some(scale) = scale {
            v = s.mul(v, s.splat(scale));
        }
        s.store_partial(v, out);
    }
}
