//! Token embedding: `out[t] = scale * table[id(t)]`.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, Weight, ensure, expect, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::Tensor;

/// Looks up the rows of the step's token ids. The output row is not written for a padding token, and not for a token
/// whose lane sampled none ([`crate::step::NONE`], see [`crate::ops::Sample`]): its sequence has ended and its results
/// are not used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Embed<Buf> {
    /// Token ids of the step; an id with [`crate::step::FROM_DEVICE`] names a lane of `last`.
    pub step: Step<Buf>,
    /// `[L] u32`: the last sampled token of each lane.
    pub last: Tensor<Buf>,
    /// `[V, D]`, row blocks at `col` = first vocabulary id of the block.
    pub table: Weight<Buf>,
    /// `[T, D]`.
    pub out: Tensor<Buf>,
    /// Factor on every element (Granite, Falcon-H1).
    pub scale: f32,
}

impl<Buf: Handle> Embed<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let mut t = vec![(Access::Read, &self.step.ints), (Access::Read, &self.last), (Access::Write, &self.out)];
        t.extend(self.table.blocks.iter().map(|b| (Access::Read, &b.w)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let row = self.table.blocks[0].w.row_len() * self.table.blocks[0].w.dtype.bytes();
        let held = (self.step.bucket.tokens * row) as u64;
        Cost { bytes: held + size(&self.out), held, flops: self.out.len() as u64 }
    }

    pub(super) fn check(&self) {
        expect("embed", "out", &self.out, &[self.step.bucket.tokens, self.table.k]);
        ensure!("embed", self.last.dims().len() == 1, "last is not a vector");
        self.table.check("embed");
    }
}
