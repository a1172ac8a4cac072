//! A planned step: its rows and the sequence of each.

use crate::step::Row;

/// The identity of a request, in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// A step. Once planned it must run, before any later step.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Decode rows first, then prefill. Empty: nothing to do until a commit or a submission.
    pub rows: Vec<PlanRow>,
    /// Requests that got a lane in this step; their rows are among `rows`.
    pub admitted: Vec<SeqId>,
    /// Requests that lost their lane before this step. They are admitted again later.
    pub preempted: Vec<SeqId>,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// The sequence.
    pub seq: SeqId,
    /// The tokens, states and pages. The lane is the sequence's index while it runs, less than the largest batch. The
    /// last token is an output if the row reaches the end of the known tokens.
    pub row: Row,
}

impl AsRef<Row> for PlanRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}
