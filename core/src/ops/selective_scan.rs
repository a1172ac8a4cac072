//! The selective state-space recurrence of Mamba-2 (per head) and Mamba-1 (per channel), driven by the chunk table.
//!
//! With `dt = clamp(softplus(dt_raw + dt_bias))`, per head h of group g:
//! `S ← exp(dt A) S + (dt x) ⊗ B;  y = S C + D x`. State and arithmetic are f32.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// Which parameters a head has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScanForm {
    /// Mamba-2: one A, D and dt per head; `par` is `[3, H] f32`: A (negative), D, dt_bias.
    PerHead,
    /// Mamba-1: P = 1, so a head is a channel; `par` is `[N + 2, H] f32`: A of state 0 .. N-1, then D, dt_bias.
    PerChannel,
}

/// The scan of some heads. A chunk starts from its `src` slot (or carries on) and leaves its state in `dst`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SelectiveScan<Buf> {
    /// Chunk, row and token tables.
    pub step: Step<Buf>,
    /// `[T, H * P]`.
    pub x: Tensor<Buf>,
    /// `[T, G * N]`, all groups.
    pub b: Tensor<Buf>,
    /// `[T, G * N]`, all groups.
    pub c: Tensor<Buf>,
    /// `[T, H]`, before bias and softplus.
    pub dt: Tensor<Buf>,
    /// Per-head or per-channel parameters, see [`ScanForm`]; the row stride may exceed H (a block of heads).
    pub par: Tensor<Buf>,
    /// `[S, H, P, N]`. Slot 0 reads as zero and discards writes.
    pub pool: Tensor<Buf>,
    /// `[T, H * P]`; rows of padding tokens receive 0.
    pub y: Tensor<Buf>,
    /// Parameters per head or per channel.
    pub form: ScanForm,
    /// Heads of one group of B and C, counted over the whole layer.
    pub heads_per_group: usize,
    /// Index of the first head of this block in the layer.
    pub first_head: usize,
    /// Bounds on dt after softplus; (0, ∞) unless the config's `time_step_limit` is finite.
    pub dt_limit: (f32, f32),
}

impl<Buf: Handle> SelectiveScan<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let reads = [&self.step.ints, &self.x, &self.b, &self.c, &self.dt, &self.par];
        let mut t: Vec<_> = reads.into_iter().map(|r| (Read, r)).collect();
        t.extend([(InPlace, &self.pool), (Write, &self.y)]);
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let state = self.pool.row_len();
        let activations: u64 = [&self.x, &self.b, &self.c, &self.dt, &self.y].map(size).iter().sum();
        let states = 2 * self.step.bucket.rows * state * self.pool.dtype.bytes();
        let held = states as u64 + size(&self.par);
        Cost { bytes: activations + held, held, flops: 5 * (self.step.bucket.tokens * state) as u64 }
    }

    pub(super) fn check(&self) {
        let t = self.step.bucket.tokens;
        let &[slots, h, p, n] = self.pool.dims() else { panic!("selective_scan: pool is {:?}", self.pool.dims()) };
        expect("selective_scan", "pool", &self.pool, &[slots, h, p, n]);
        expect("selective_scan", "x", &self.x, &[t, h * p]);
        expect("selective_scan", "y", &self.y, &[t, h * p]);
        expect("selective_scan", "dt", &self.dt, &[t, h]);
        let gn = self.b.row_len();
        expect("selective_scan", "b", &self.b, &[t, gn]);
        expect("selective_scan", "c", &self.c, &[t, gn]);
        let last_group = (self.first_head + h - 1) / self.heads_per_group;
        ensure!("selective_scan", (last_group + 1) * n <= gn, "group {last_group} of B with {gn} columns");
        ensure!("selective_scan", self.par.dtype == DType::F32, "par is not f32");
        match self.form {
            ScanForm::PerHead => expect("selective_scan", "par", &self.par, &[3, h]),
            ScanForm::PerChannel => {
                expect("selective_scan", "par", &self.par, &[n + 2, h]);
                ensure!("selective_scan", p == 1, "per channel with head dim {p}");
            }
        }
    }
}
