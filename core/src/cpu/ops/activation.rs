//! Pointwise activations on the CPU.

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::{math, par, view};
use crate::ops::{Act, Activation};

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

impl Activation<Buf> {
    pub(super) fn run(&self) {
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
