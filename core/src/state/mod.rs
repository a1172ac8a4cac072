//! The states of sequences: recurrent slots, KV pages and the prefix tree over both.
//!
//! No tensor appears here. A slot or a page is a number; the pools behind the numbers belong to the backend. Slot 0 and
//! page 0 read as zero and discard writes: they are never handed out and never counted.
//!
//! * [`pool`]: reference-counted ids, one pool for slots and one for pages.
//! * [`hash`]: the chained name of a 64-token page under its parent, the same in every process.
//! * [`key`]: its name outside of the tree.
//! * [`prefix`]: the tree of pages and its two orders of eviction.
//! * [`cache`]: the pools and the tree together: match, enter, capture, evict.
//! * [`recent`]: hashes of recently removed nodes, to tell an eviction from a first sight.
//! * [`report`]: a request's report about its match, and the events of the tree.
//! * [`budget`]: how a number of bytes is split between slots and pages.
//! * [`costs`]: the time of a step by its tokens.

pub mod budget;
pub mod cache;
pub mod costs;
pub mod hash;
pub mod key;
pub mod pool;
pub mod prefix;
pub mod recent;
pub mod report;

pub use cache::Cache;
pub use costs::TokenCosts;
pub use hash::PrefixHash;
pub use key::PrefixKey;
pub use pool::Pool;
pub use report::{CacheEvent, Reason, Report};

/// Tokens of a page, of a tree node and of the longest chunk: the grid of everything.
pub const GRID: usize = crate::step::PAGE;

/// Whose prefixes these are, and where their values came from. Nothing is shared between realms; each has a root of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Realm {
    /// The tenant.
    pub namespace: String,
    /// How the values that a prefix may begin with were converted: the numerics of a bundle, or what a lower tier did; empty for prefixes
    /// that this engine computed, or that one with equal numerics did.
    pub origin: String,
}

/// Sizes of one sequence's state, as far as scheduling needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Bytes of one slot: conv and recurrent state of all layers at one position. 0: the model has neither, no slots.
    pub slot_bytes: u64,
    /// Bytes of one page: keys and values of all attention layers for [`GRID`] tokens. 0: no attention, no pages.
    pub page_bytes: u64,
    /// Longest sequence in tokens, prompt and completion together.
    pub context: usize,
}

impl StateShape {
    /// Whether the model has recurrent or conv state.
    pub fn has_slots(&self) -> bool {
        self.slot_bytes > 0
    }

    /// Whether the model has attention.
    pub fn has_pages(&self) -> bool {
        self.page_bytes > 0
    }
}

/// Which states a prefill leaves in the tree. Models without recurrent layers ignore it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CapturePolicy {
    /// Branch point, last grid point and message ends in prefill, the newest grid point in decode.
    #[default]
    Default,
    /// One capture a prefill: the branch point if hit < branch < last grid point, else the last grid point. No decode
    /// captures, and pages enter the tree only up to that capture.
    OnePerPrefill,
}

/// Sizes and options fixed at load.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Sequences that run at a time, and the number of lanes.
    pub max_batch: usize,
    /// Most tokens of one step, at least 1. Multiples of 64 waste nothing.
    pub step_tokens: usize,
    /// Usable slots, slot 0 not counted. Ignored by a model without recurrent state.
    pub slots: usize,
    /// Usable pages, page 0 not counted. Ignored by a model without attention.
    pub pages: usize,
    /// Whether prefixes are kept and reused at all.
    pub prefix_cache: bool,
    /// States that prefill and decode capture.
    pub policy: CapturePolicy,
    /// Most states on one path from the root; more only if none of them may be dropped.
    pub path_cap: usize,
    /// Most tree nodes of a model without pages: no pool limits their number.
    pub max_nodes: usize,
    /// Most drafts of a row; 0: none is made.
    pub drafts: usize,
    /// The time of a step: drafts are made where they pay. [`TokenCosts::NONE`]: wherever there is a guess.
    pub costs: TokenCosts,
    /// Time of a pass of the model's head over one token, in steps of one token.
    pub head_cost: f32,
}

/// Outputs of the drafts of a step, and of the tokens that they follow, where the batch alone has fewer: their logits take memory.
const DRAFT_OUTPUTS: usize = 64;

impl Limits {
    /// Most positions of a step whose logits are computed.
    pub fn outputs(&self) -> usize {
        let all = self.max_batch.saturating_mul(self.drafts + 1);
        self.max_batch.max(all.min(DRAFT_OUTPUTS))
    }

    /// Slots and pages that the tree leaves free for drafts, which evict nothing: those of a step, and no large part of the pools.
    pub fn reserved(&self) -> (usize, usize) {
        if self.drafts == 0 {
            return (0, 0);
        }
        let rows = self.max_batch.min(self.outputs() / 2);
        (self.outputs().min(self.slots / 2), rows.min(self.pages / 8))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_batch: 64,
            step_tokens: 2048,
            slots: 0,
            pages: 0,
            prefix_cache: true,
            policy: CapturePolicy::Default,
            path_cap: 8,
            max_nodes: 1 << 17,
            drafts: 0,
            costs: TokenCosts::NONE,
            head_cost: 0.0,
        }
    }
}
