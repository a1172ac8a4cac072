//! The device side of [`Controls`](crate::controls::Controls): the buffers of lanes with rules, and the ops around `sample`.

use crate::backend::{Backend, Measure, Ops};
use crate::controls::LaneRules;
use crate::error::{Error, Result};
use crate::ops::{Adjust, Logprobs, REPORT_WORDS, RuleWords, Sample};
use crate::tensor::{DType, Tensor};

/// What the lanes of a step need around `sample`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Needs {
    /// Some lane's logits are adjusted.
    pub adjust: bool,
    /// Some lane's tokens are counted or reported.
    pub follow: bool,
    /// Some lane's tokens are reported.
    pub report: bool,
}

impl Needs {
    /// All of them.
    pub const ALL: Self = Self { adjust: true, follow: true, report: true };

    /// Those of a lane's rules.
    pub fn of(rules: &LaneRules) -> Self {
        let (adjust, report) = (rules.adjusts(), rules.reports());
        Self { adjust, follow: report || rules.counts(), report }
    }

    /// Those of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            adjust: self.adjust || other.adjust,
            follow: self.follow || other.follow,
            report: self.report || other.report,
        }
    }

    /// Whether there are any.
    pub fn any(self) -> bool {
        self.adjust || self.follow
    }
}

/// The buffers, allocated when the first request with rules is submitted.
pub(super) struct Tail<B: Backend> {
    /// `[L, words] u32`, see [`RuleWords`].
    rules: Tensor<B::Buf>,
    /// `[O, V] f32`: logits after the rules. The model's own stay as they are.
    adjusted: Tensor<B::Buf>,
    /// `[O, 41] f32`, see [`REPORT_WORDS`].
    report: Tensor<B::Buf>,
    at: RuleWords,
    /// Lanes whose header is not zero.
    open: Vec<bool>,
}

impl<B: Backend> Tail<B> {
    /// Buffers for `lanes` lanes and `outputs` outputs of `vocab` logits.
    pub fn new(backend: &B, lanes: usize, outputs: usize, vocab: usize) -> Result<Self> {
        let at = RuleWords { vocab };
        let table = |label: &str, dtype: DType, dims: [usize; 2]| -> Result<Tensor<B::Buf>> {
            let (bytes, most) = (4 * (dims[0] * dims[1]) as u64, backend.caps().max_binding);
            if bytes > most {
                return Err(Error::Unsupported {
                    what: format!(
                        "a request with penalties, biases, a mask or log probabilities in a batch of {lanes}"
                    ),
                    why: format!(
                        "{label} need {bytes} bytes, a binding of this device holds {most}; use a smaller batch"
                    ),
                });
            }
            Ok(Tensor::new(backend.alloc(label, bytes)?, dtype, &dims))
        };
        Ok(Self {
            rules: table("rules of lanes", DType::U32, [lanes, at.words()])?,
            adjusted: table("adjusted logits", DType::F32, [outputs, vocab])?,
            report: table("log probabilities", DType::F32, [outputs, REPORT_WORDS])?,
            at,
            open: vec![false; lanes],
        })
    }

    /// Scratch bytes of the ops of a step.
    pub fn scratch(&self, backend: &B, sample: Sample<B::Buf>) -> Result<u64> {
        let mut measure = Measure::new(backend);
        self.record(&mut measure, Needs::ALL, sample)?;
        Ok(measure.scratch)
    }

    /// Records `sample` with the ops before and after it.
    pub fn record(&self, ops: &mut dyn Ops<B::Buf>, needs: Needs, mut sample: Sample<B::Buf>) -> Result<()> {
        let (step, logits, ids) = (sample.step.clone(), sample.logits.clone(), sample.ids.clone());
        if needs.adjust {
            let out = self.adjusted.head(step.bucket.outputs);
            let (rules, seen) = (self.rules.clone(), sample.seen.clone());
            sample.logits = out.clone();
            ops.op(Adjust { step: step.clone(), logits: logits.clone(), rules, seen, out }.into())?;
        }
        ops.op(sample.into())?;
        if needs.follow {
            let report = self.report.head(step.bucket.outputs);
            ops.op(Logprobs { step, logits, ids, rules: self.rules.clone(), report }.into())?;
        }
        Ok(())
    }

    /// Gives a lane its rules, and the tokens generated so far for the counts.
    pub fn open_lane(&mut self, backend: &B, lane: u32, rules: &LaneRules, generated: &[u32]) -> Result<()> {
        self.open[lane as usize] = true;
        self.write(backend, lane, 0, &rules.head())?;
        if let Some(mask) = rules.mask() {
            self.mask(backend, lane, mask)?;
        }
        if rules.counts() {
            let mut counts = vec![0u32; self.at.vocab];
            generated.iter().for_each(|id| counts[*id as usize] += 1);
            self.write(backend, lane, self.at.counts(), &counts)?;
        }
        Ok(())
    }

    /// Gives a lane to a request without rules.
    pub fn close_lane(&mut self, backend: &B, lane: u32) -> Result<()> {
        if std::mem::take(&mut self.open[lane as usize]) {
            self.write(backend, lane, 0, &[0; RuleWords::HEADER])?;
        }
        Ok(())
    }

    /// Writes a lane's mask `[ceil(V / 32)]`.
    pub fn mask(&self, backend: &B, lane: u32, mask: &[u32]) -> Result<()> {
        self.write(backend, lane, self.at.mask(), mask)
    }

    /// Reads the reports `[outputs, 41]` of the step just enqueued.
    pub fn read(&self, backend: &B, outputs: usize) -> B::Read {
        backend.read(&self.report.head(outputs))
    }

    fn write(&self, backend: &B, lane: u32, at: usize, words: &[u32]) -> Result<()> {
        let word = lane as usize * self.at.words() + at;
        backend.write(&self.rules.buf, 4 * word as u64, bytemuck::cast_slice(words))
    }
}
