//! Grouped matrix products over the experts that the router chose.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, RowBlock, ensure, expect, moved};
use crate::backend::Handle;
use crate::tensor::{DType, Tensor};

/// Consecutive experts whose weights lie in the same row blocks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExpertRange<Buf> {
    /// First expert.
    pub first: usize,
    /// Number of experts E.
    pub experts: usize,
    /// Each `[E, n, ..]`; together they cover the N output columns once.
    pub blocks: Vec<RowBlock<Buf>>,
}

/// Either half of an expert MLP.
///
/// Without `combine`: `out[t * k + j] = x[t] W(ids[t, j])ᵀ`, one output row per (token, choice).
/// With `combine`: `out[t] (+)= Σ_j weights[t, j] * (x[t * k + j] W(ids[t, j])ᵀ)`, summed in ascending j.
/// Choices with id [`crate::step::NONE`] are skipped: their rows are not written, and they add nothing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExpertMatmul<Buf> {
    /// `[T, K]`, or `[T * k, K]` with `combine`.
    pub x: Tensor<Buf>,
    /// Ranges in ascending order that cover all experts.
    pub experts: Vec<ExpertRange<Buf>>,
    /// `[T, k] u32`, ascending within a token.
    pub ids: Tensor<Buf>,
    /// `[T, k] f32`.
    pub combine: Option<Tensor<Buf>>,
    /// `[T * k, N]`, or `[T, N]` with `combine`.
    pub out: Tensor<Buf>,
    /// With `combine`: factor on the sum.
    pub scale: f32,
    /// With `combine`: adds to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl<Buf: Handle> ExpertMatmul<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let out = if self.accumulate { InPlace } else { Write };
        let mut t = vec![(Read, &self.x), (Read, &self.ids), (out, &self.out)];
        t.extend(self.combine.iter().map(|c| (Read, c)));
        t.extend(self.experts.iter().flat_map(|r| &r.blocks).map(|b| (Read, &b.w)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let (t, k, n) = (self.ids.rows(), self.ids.row_len(), self.out.row_len());
        let experts: usize = self.experts.iter().map(|r| r.experts).sum();
        let weights: u64 =
            self.experts.iter().flat_map(|r| &r.blocks).map(|b| (b.w.len() * b.w.dtype.bytes()) as u64).sum();
        // A step touches at most one expert per choice.
        let touched = weights * (t * k).min(experts) as u64 / experts.max(1) as u64;
        let flops = 2 * (t * k * n * self.x.row_len()) as u64;
        Cost { bytes: moved(&self.tensors()) - weights + touched, held: touched, flops }
    }

    pub(super) fn check(&self) {
        let (t, k, n) = (self.ids.rows(), self.ids.row_len(), self.out.row_len());
        let (x_rows, out_rows) = if self.combine.is_some() { (t * k, t) } else { (t, t * k) };
        expect("expert_matmul", "x", &self.x, &[x_rows, self.x.row_len()]);
        expect("expert_matmul", "out", &self.out, &[out_rows, n]);
        ensure!("expert_matmul", self.ids.dtype == DType::U32, "ids are not u32");
        ensure!("expert_matmul", self.combine.is_some() || !self.accumulate, "accumulates without combining");
        if let Some(c) = &self.combine {
            expect("expert_matmul", "combine", c, &[t, k]);
        }
        let mut next = 0;
        for r in &self.experts {
            ensure!("expert_matmul", r.first == next, "experts {next}..{} are missing", r.first);
            next += r.experts;
            let rows: usize = r.blocks.iter().map(|b| b.w.dims()[1]).sum();
            ensure!("expert_matmul", rows == n, "blocks of {rows} rows for {n} columns");
            for b in &r.blocks {
                let dims = b.w.dims();
                ensure!("expert_matmul", dims.len() == 3 && dims[0] == r.experts, "a block is {dims:?}");
                b.check("expert_matmul", self.x.row_len());
            }
        }
    }
}
