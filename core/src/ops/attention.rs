//! Causal grouped-query attention over KV pages: prefill, decode and verification in one op.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, KvPool, ensure, expect, size};
use crate::backend::Handle;
use crate::step::{PAGE, Step};
use crate::tensor::Tensor;

/// Query head `i` attends with KV head `i / (H / KH)` to all positions of its row up to its own, the last `window` of
/// them if there is a window, and of those before `first` its own only. Softmax in f32. Works from the row table, not from the chunks. Keys are walked in absolute blocks
/// of 64 (a page each), so that a query's result depends on its position only. No keys give 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attention<Buf> {
    /// Row table, positions, page tables.
    pub step: Step<Buf>,
    /// `[T, H * hd]`, rotated.
    pub q: Tensor<Buf>,
    /// Pages that hold the keys and values of these KV heads, this step's tokens included.
    pub pool: KvPool<Buf>,
    /// `[T, H * hd]`; rows of padding tokens are not written.
    pub out: Tensor<Buf>,
    /// Head dim.
    pub head_dim: usize,
    /// Factor on q·k.
    pub scale: f32,
    /// Positions seen, the own one included (sliding window).
    pub window: Option<u32>,
    /// Positions before this one are seen by their own queries only; 0: none is hidden.
    pub first: u32,
}

impl<Buf: Handle> Attention<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        vec![(Read, &self.step.ints), (Read, &self.q), (Read, &self.pool.k), (Read, &self.pool.v), (Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        let b = &self.step.bucket;
        let kv_columns = self.pool.k.row_len() / PAGE;
        let keys = b.pages * PAGE;
        let held = (2 * b.rows * keys * kv_columns * self.pool.k.dtype.bytes()) as u64;
        Cost { bytes: 2 * size(&self.q) + held, held, flops: 4 * (keys * self.q.len()) as u64 }
    }

    pub(super) fn check(&self) {
        let (t, q, kv) = (self.step.bucket.tokens, self.q.row_len(), self.pool.k.dims()[1]);
        expect("attention", "q", &self.q, &[t, q]);
        expect("attention", "out", &self.out, &[t, q]);
        self.pool.check("attention", kv, self.head_dim);
        ensure!("attention", q % (self.head_dim * kv) == 0, "{q} query columns over {kv} heads of {}", self.head_dim);
        ensure!("attention", self.window != Some(0), "a window of 0");
    }
}
