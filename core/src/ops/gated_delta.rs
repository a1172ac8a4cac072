//! The gated delta rule of Gated DeltaNet and Kimi Delta Attention, driven by the chunk table.
//!
//! Per value head, with `q ← l2(q) dk^-1/2`, `k ← l2(k)` (`l2(v) = v rsqrt(Σv² + 1e-6)`), `β = beta_scale σ(b)` and
//! `g = a_neg softplus(a + dt_bias)`: `S ← exp(g) S; δ = β (v - kᵀS); S ← S + k ⊗ δ; o = qᵀS`. State and arithmetic f32.
//! With G gates per head, g is a number (G = 1) or a vector along the keys (G = dk), each row of S with its own decay.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// The recurrence of some value heads. A chunk starts from its `src` slot (or carries on) and leaves its state in `dst`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GatedDelta<Buf> {
    /// Chunk, row and token tables.
    pub step: Step<Buf>,
    /// `[T, Hk * dk]`, all key heads, after the convolution.
    pub q: Tensor<Buf>,
    /// `[T, Hk * dk]`, all key heads.
    pub k: Tensor<Buf>,
    /// `[T, H * dv]`, the value heads of this block.
    pub v: Tensor<Buf>,
    /// `[T, H * G]`: raw decay input; G is 1 or dk.
    pub a: Tensor<Buf>,
    /// `[T, H]`: raw β input.
    pub b: Tensor<Buf>,
    /// `[2, H * G] f32`: a_neg = -exp(A_log), dt_bias; the row stride may exceed H * G.
    pub par: Tensor<Buf>,
    /// `[S, H, dk, dv]`. Slot 0 reads as zero and discards writes.
    pub pool: Tensor<Buf>,
    /// `[T, H * dv]`; rows of padding tokens receive 0.
    pub out: Tensor<Buf>,
    /// Value heads that share a key head, counted over the whole layer.
    pub heads_per_key: usize,
    /// Index of the first value head of this block in the layer.
    pub first_head: usize,
    /// 1, or 2 where negative eigenvalues are allowed (Olmo-Hybrid).
    pub beta_scale: f32,
}

impl<Buf: Handle> GatedDelta<Buf> {
    /// Whether every row of the state has a decay of its own.
    pub fn decays_per_channel(&self) -> bool {
        self.a.row_len() != self.pool.dims()[1]
    }

    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let reads = [&self.step.ints, &self.q, &self.k, &self.v, &self.a, &self.b, &self.par];
        let mut t: Vec<_> = reads.into_iter().map(|r| (Read, r)).collect();
        t.extend([(InPlace, &self.pool), (Write, &self.out)]);
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let state = self.pool.row_len();
        let activations: u64 = [&self.q, &self.k, &self.v, &self.a, &self.b, &self.out].map(size).iter().sum();
        let states = 2 * self.step.bucket.rows * state * self.pool.dtype.bytes();
        let held = states as u64 + size(&self.par);
        Cost { bytes: activations + held, held, flops: 7 * (self.step.bucket.tokens * state) as u64 }
    }

    pub(super) fn check(&self) {
        let t = self.step.bucket.tokens;
        let &[slots, h, dk, dv] = self.pool.dims() else { panic!("gated_delta: pool is {:?}", self.pool.dims()) };
        expect("gated_delta", "pool", &self.pool, &[slots, h, dk, dv]);
        expect("gated_delta", "v", &self.v, &[t, h * dv]);
        expect("gated_delta", "out", &self.out, &[t, h * dv]);
        let keys = self.q.row_len();
        expect("gated_delta", "q", &self.q, &[t, keys]);
        expect("gated_delta", "k", &self.k, &[t, keys]);
        let gates = self.a.row_len();
        ensure!("gated_delta", gates == h || gates == h * dk, "{gates} decays for {h} heads with keys of {dk}");
        expect("gated_delta", "a", &self.a, &[t, gates]);
        expect("gated_delta", "b", &self.b, &[t, h]);
        expect("gated_delta", "par", &self.par, &[2, gates]);
        ensure!("gated_delta", self.par.dtype == DType::F32, "par is not f32");
        let last_key = (self.first_head + h - 1) / self.heads_per_key;
        ensure!("gated_delta", (last_key + 1) * dk <= keys, "key head {last_key} of {keys} columns");
    }
}
