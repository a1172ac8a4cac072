//! RMS norm, with an optional residual add before it and an optional gate around it, per group.
//!
//! `x += add_scale * add; out = x * rsqrt(mean(x²) + eps) * weight`, the mean over each of `groups` equal parts of a row.

use super::{Access, Act, Cost, ensure, expect, moved};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::{self, par, view};
use crate::tensor::{DType, Tensor};

/// A gate on a norm: `act(z)` multiplies the norm's input (Mamba-2) or its output (Gated DeltaNet).
#[derive(Clone, Debug)]
pub struct Gate<Buf> {
    /// `[T, D]`.
    pub z: Tensor<Buf>,
    /// silu or sigmoid.
    pub act: Act,
    /// Gate first, then norm; else norm first.
    pub before: bool,
}

/// RMS norm over rows. Statistics in f32. `weight` has the `1 + w` of zero-centred norms folded in at load.
#[derive(Clone, Debug)]
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
    /// Added to the mean square.
    pub eps: f32,
    /// Equal parts of a row, each with its own mean: Mamba-2's groups, or heads.
    pub groups: usize,
}

impl<Buf: Handle> RmsNorm<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let x = if self.add.is_some() { Access::InPlace } else { Access::Read };
        let mut t = vec![(x, &self.x), (Access::Read, &self.weight), (Access::Write, &self.out)];
        t.extend(self.add.iter().map(|(a, _)| (Access::Read, a)));
        t.extend(self.gate.iter().map(|g| (Access::Read, &g.z)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), flops: 4 * self.x.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (rows, d) = (self.x.rows(), self.x.row_len());
        expect("rms_norm", "x", &self.x, &[rows, d]);
        expect("rms_norm", "out", &self.out, &[rows, d]);
        ensure!("rms_norm", self.groups > 0 && d % self.groups == 0, "{} groups of {d}", self.groups);
        let w = self.weight.len();
        ensure!("rms_norm", w == d || w == d / self.groups, "weight of {w} for {d} in {} groups", self.groups);
        ensure!("rms_norm", self.weight.dtype == DType::F32, "weight is not f32");
        if let Some((a, _)) = &self.add {
            expect("rms_norm", "add", a, &[rows, d]);
        }
        if let Some(g) = &self.gate {
            expect("rms_norm", "gate", &g.z, &[rows, d]);
        }
    }
}

/// Rows of a task.
const TILE: usize = 8;

impl RmsNorm<cpu::Buf> {
    pub(super) fn reference(&self) {
        let (d, groups, eps) = (self.x.row_len(), self.groups, self.eps);
        let weight = view::read::<f32>(&self.weight);
        let gate = self.gate.as_ref().map(|g| (view::read(&g.z), g.act, g.before));
        let mut out = view::write(&self.out);
        let norm = |x: &[f32], t: usize, out: &mut [f32]| {
            let gate = gate.as_ref().map(|(z, act, before)| (z.row(t), *act, *before));
            dispatch!(Isa::best(), |s| norm_row(s, x, gate, weight.flat(), groups, eps, out));
        };
        let work = 4 * self.x.len();
        let out = out.rows().tiles(TILE, d);
        if let Some((add, scale)) = &self.add {
            let add = view::read(add);
            let mut x = view::write(&self.x);
            let tiles = x.rows().tiles(TILE, d).into_iter().zip(out).collect();
            par::for_each(tiles, work, |i, (mut x, mut out)| {
                for r in 0..x.rows() {
                    let t = i * TILE + r;
                    dispatch!(Isa::best(), |s| add_scaled(s, *scale, add.row(t), x.row_mut(r)));
                    norm(x.row(r), t, out.row_mut(r));
                }
            });
        } else {
            let x = view::read(&self.x);
            par::for_each(out, work, |i, mut out| {
                for r in 0..out.rows() {
                    norm(x.row(i * TILE + r), i * TILE + r, out.row_mut(r));
                }
            });
        }
    }
}

/// `x += a * y`.
#[inline(always)]
fn add_scaled<S: Simd>(s: S, a: f32, y: &[f32], x: &mut [f32]) {
    for (x, y) in x.chunks_mut(LANES).zip(y.chunks(LANES)) {
        s.store_partial(s.fma(s.splat(a), s.load_partial(y), s.load_partial(x)), x);
    }
}

#[inline(always)]
fn norm_row<S: Simd>(
    s: S,
    x: &[f32],
    gate: Option<(&[f32], Act, bool)>,
    weight: &[f32],
    groups: usize,
    eps: f32,
    out: &mut [f32],
) {
    let len = x.len() / groups;
    for g in 0..groups {
        let part = g * len..(g + 1) * len;
        let (x, out) = (&x[part.clone()], &mut out[part.clone()]);
        let weight = if weight.len() == len { weight } else { &weight[part.clone()] };
        let gate = gate.map(|(z, act, before)| (&z[part.clone()], act, before));
        let mut sum = s.zero();
        for (i, out) in out.chunks_mut(LANES).enumerate() {
            let mut v = s.load_partial(&x[i * LANES..]);
            if let Some((z, act, true)) = gate {
                v = s.mul(v, act.apply(s, s.load_partial(&z[i * LANES..])));
            }
            sum = s.fma(v, v, sum);
            s.store_partial(v, out);
        }
        let scale = s.splat(1.0 / (s.reduce_sum(sum) / len as f32 + eps).sqrt());
        for (i, out) in out.chunks_mut(LANES).enumerate() {
            let mut v = s.mul(s.mul(s.load_partial(out), scale), s.load_partial(&weight[i * LANES..]));
            if let Some((z, act, false)) = gate {
                v = s.mul(v, act.apply(s, s.load_partial(&z[i * LANES..])));
            }
            s.store_partial(v, out);
        }
    }
}
