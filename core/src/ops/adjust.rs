//! The rules of requests over their logits, before sampling.

use serde::{Deserialize, Serialize};

use super::rules::RuleWords;
use super::{Access, Cost, ensure, expect};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// `out[o]` = `logits[o]` after the rules of the output's lane; a copy for a lane without the flag [`RuleWords::RULED`].
///
/// The logit x of token v becomes, in this order (that of vLLM; arithmetic in f32):
/// 1. minus infinity, and that is final, if x is not a number, if the lane has a mask and bit v is not set, or if the
///    entry of v says that it may not come before a later position than that of the new token;
/// 2. `x + bias` with the bias of the entry of v, if there is one;
/// 3. `x / r` if positive, else `x * r`, with the repetition penalty r, if bit v of `seen[lane]` is set;
/// 4. `(x - frequency * n) - presence` with the flag [`RuleWords::COUNTED`], if the lane has sampled v n times, n > 0.
///
/// Padding outputs write nothing. A lane has at most one output: those of drafts are shown one after the other, each with its mask.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Adjust<Buf> {
    /// Output tokens, lanes and positions.
    pub step: Step<Buf>,
    /// `[O, V] f32`.
    pub logits: Tensor<Buf>,
    /// `[L, words] u32`, see [`RuleWords`].
    pub rules: Tensor<Buf>,
    /// `[L, ceil(V / 32)] u32`: bit v of a lane's row: token v is known to the sequence.
    pub seen: Tensor<Buf>,
    /// `[O, V] f32`.
    pub out: Tensor<Buf>,
}

impl<Buf: Handle> Adjust<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let reads = [&self.step.ints, &self.logits, &self.rules, &self.seen];
        reads.into_iter().map(|r| (Access::Read, r)).chain([(Access::Write, &self.out)]).collect()
    }

    pub(super) fn cost(&self) -> Cost {
        // The logits twice, and of each lane mask, seen tokens and counts.
        let lane = self.logits.row_len() + 2 * self.seen.row_len();
        let words = 2 * self.logits.len() + self.step.bucket.outputs * lane;
        Cost { bytes: 4 * words as u64, held: 0, flops: 4 * self.logits.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (o, v, lanes) = (self.step.bucket.outputs, self.logits.row_len(), self.rules.rows());
        expect("adjust", "logits", &self.logits, &[o, v]);
        expect("adjust", "rules", &self.rules, &[lanes, RuleWords { vocab: v }.words()]);
        expect("adjust", "seen", &self.seen, &[lanes, v.div_ceil(32)]);
        expect("adjust", "out", &self.out, &[o, v]);
        let floats = [&self.logits, &self.out].iter().all(|t| t.dtype == DType::F32);
        ensure!("adjust", floats, "logits are not f32");
    }
}
