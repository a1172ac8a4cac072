//! What one step computes: rows of tokens, the chunks of their states, their pages, and whose logits are sampled.

/// Names a request, in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// A step. Once planned it must run, before any later one.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Decode rows first, oldest first, then prefill by arrival. Empty: nothing to do until a commit or a submission.
    pub rows: Vec<PlanRow>,
    /// Requests that got a lane in this step; their rows are among `rows`.
    pub admitted: Vec<SeqId>,
    /// Requests that lost their lane before this step. They are admitted again later.
    pub preempted: Vec<SeqId>,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// Whose it is.
    pub seq: SeqId,
    /// The sequence's fixed index while it runs, less than the batch.
    pub lane: u32,
    /// Absolute position of the first token.
    pub first_position: u32,
    /// The tokens to compute, at least one.
    pub tokens: Vec<TokenRef>,
    /// The tokens cut at the grid, in order; empty for a model without recurrent state.
    pub chunks: Vec<PlanChunk>,
    /// Pages of positions `0 .. first_position + tokens`; empty for a model without attention.
    pub pages: Vec<u32>,
    /// Indices into `tokens` whose logits are sampled: the last one if the row reaches the end of the known tokens.
    pub outputs: Vec<u32>,
}

/// Where a token's id comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRef {
    /// The id.
    Known(u32),
    /// What this lane sampled last, which the host has not read yet.
    FromDevice,
}

/// A run of tokens between two neighbouring grid points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanChunk {
    /// First token, an index into the row.
    pub start: u32,
    /// Tokens, 1 to 64.
    pub len: u32,
    /// State to start from. A slot only in the row's first chunk.
    pub src: Src,
    /// Slot that receives the state after the last token; 0: nowhere.
    pub dst: u32,
}

/// Where a chunk's state comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    /// A slot; 0 is the state before the first token.
    Slot(u32),
    /// The row's previous chunk.
    Carry,
}
