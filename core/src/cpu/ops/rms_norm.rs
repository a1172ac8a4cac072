//! RMS norm on the CPU.

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::{par, view};
use crate::ops::{Act, RmsNorm};

/// Rows of a task.
const TILE: usize = 8;

impl RmsNorm<Buf> {
    pub(super) fn run(&self) {
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
            let accumulate = self.accumulate;
            par::for_each(out, work, |i, mut out| {
                let mut normed = vec![0.0; if accumulate { d } else { 0 }];
                for r in 0..out.rows() {
                    let t = i * TILE + r;
                    if accumulate {
                        norm(x.row(t), t, &mut normed);
                        dispatch!(Isa::best(), |s| add_scaled(s, 1.0, &normed, out.row_mut(r)));
                    } else {
                        norm(x.row(t), t, out.row_mut(r));
                    }
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
    gate: Option<RowGate<'_>>,
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
        let squares = gated(s, x, gate, out);
        scaled(s, 1.0 / (squares / len as f32 + eps).sqrt(), weight, gate, out);
    }
}

/// A row of a gate, its activation, and whether it comes before the norm.
pub(super) type RowGate<'a> = (&'a [f32], Act, bool);

/// Writes what is normed and returns the sum of its squares.
#[inline(always)]
pub(super) fn gated<S: Simd>(s: S, x: &[f32], gate: Option<RowGate<'_>>, out: &mut [f32]) -> f32 {
    let mut sum = s.zero();
    for (i, out) in out.chunks_mut(LANES).enumerate() {
        let mut v = s.load_partial(&x[i * LANES..]);
        if let Some((z, act, true)) = gate {
            v = s.mul(v, act.apply(s, s.load_partial(&z[i * LANES..])));
        }
        sum = s.fma(v, v, sum);
        s.store_partial(v, out);
    }
    s.reduce_sum(sum)
}

/// Norms what [`gated`] has written.
#[inline(always)]
pub(super) fn scaled<S: Simd>(s: S, factor: f32, weight: &[f32], gate: Option<RowGate<'_>>, out: &mut [f32]) {
    let factor = s.splat(factor);
    for (i, out) in out.chunks_mut(LANES).enumerate() {
        let mut v = s.mul(s.mul(s.load_partial(out), factor), s.load_partial(&weight[i * LANES..]));
        if let Some((z, act, false)) = gate {
            v = s.mul(v, act.apply(s, s.load_partial(&z[i * LANES..])));
        }
        s.store_partial(v, out);
    }
}
