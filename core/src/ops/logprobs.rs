//! What is kept and reported of a sampled token: its count, and log probabilities.

use serde::{Deserialize, Serialize};

use super::rules::{REPORT_WORDS, RuleWords};
use super::{Access, Cost, ensure, expect};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// After `sample`: counts `ids[o]` in the rules of the output's lane, and reports log probabilities.
///
/// With the flag [`RuleWords::COUNTED`], the lane's count of `ids[o]` grows by 1. If its word [`RuleWords::TOP`] is `n + 1 > 0`,
/// then with `lp(v) = (x[v] - max) - ln(sum over u of exp(x[u] - max))`, x = `logits[o]`, where a logit that is not a number
/// counts as minus infinity:
/// `report[o][0] = lp(ids[o])`, and for i < n, `report[o][1 + 2 i]` is the id of the i-th most likely token (the lowest id first
/// among equals) and `report[o][2 + 2 i]` its lp. Where fewer than n logits are above minus infinity, the other ids are -1 and
/// their lp 0. If the largest logit is not finite, all ids are -1 and lp(ids\[o\]) is minus infinity.
///
/// Ids are numbers, exact in f32, so that one read brings everything. Numbers beyond 1 + 2 n stay as they are. Padding outputs and
/// those whose id is [`crate::step::NONE`] write nothing. A lane has at most one output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Logprobs<Buf> {
    /// Output tokens and lanes.
    pub step: Step<Buf>,
    /// `[O, V] f32`: the model's own logits, before any rule.
    pub logits: Tensor<Buf>,
    /// `[O] u32`: the sampled tokens.
    pub ids: Tensor<Buf>,
    /// `[L, words] u32`, see [`RuleWords`]; only counts are written.
    pub rules: Tensor<Buf>,
    /// `[O, 41] f32`, see [`REPORT_WORDS`].
    pub report: Tensor<Buf>,
}

/// Vocabularies up to here have ids that are exact in f32.
const MOST_VOCAB: usize = 1 << 24;

impl<Buf: Handle> Logprobs<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let reads = [&self.step.ints, &self.logits, &self.ids];
        let writes = [(Access::InPlace, &self.rules), (Access::Write, &self.report)];
        reads.into_iter().map(|r| (Access::Read, r)).chain(writes).collect()
    }

    pub(super) fn cost(&self) -> Cost {
        let words = self.logits.len() + self.report.len();
        Cost { bytes: 4 * words as u64, held: 0, flops: 3 * self.logits.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (o, v, lanes) = (self.step.bucket.outputs, self.logits.row_len(), self.rules.rows());
        expect("logprobs", "logits", &self.logits, &[o, v]);
        expect("logprobs", "ids", &self.ids, &[o]);
        expect("logprobs", "rules", &self.rules, &[lanes, RuleWords { vocab: v }.words()]);
        expect("logprobs", "report", &self.report, &[o, REPORT_WORDS]);
        let floats = [&self.logits, &self.report].iter().all(|t| t.dtype == DType::F32);
        ensure!("logprobs", floats, "logits or report are not f32");
        ensure!("logprobs", v <= MOST_VOCAB, "a vocabulary of {v} ids, which f32 cannot hold");
    }
}
