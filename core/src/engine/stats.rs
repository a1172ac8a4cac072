//! Counters of a run.

use super::draft::MOST_DRAFTS;
use crate::{
    state::{Reason, cache::Evictions},
    tier::TierStats,
};

/// Drafts, and what became of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Rows that verified drafts.
    pub rows: u64,
    /// Drafts in them.
    pub tokens: u64,
    /// Drafts that became tokens of answers, by their place in the row.
    pub accepted_at: [u64; MOST_DRAFTS],
}

impl DraftStats {
    /// Drafts that became tokens of answers.
    pub fn accepted(&self) -> u64 {
        self.accepted_at.iter().sum()
    }
}

/// Totals since the scheduler was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Steps with at least one row.
    pub steps: u64,
    /// Requests admitted, by reason, in the order of [`Reason::ALL`]; once a request.
    pub reasons: [u64; Reason::ALL.len()],
    /// Prompt tokens computed, once a request.
    pub tokens_prefilled: u64,
    /// Prompt tokens not computed because their state was in the tree. With `tokens_prefilled`: all prompt tokens of
    /// the requests whose prefill ended.
    pub tokens_reused: u64,
    /// Tokens computed again after a pre-emption.
    pub tokens_recomputed: u64,
    /// Completion tokens committed.
    pub tokens_generated: u64,
    /// Guesses of tokens.
    pub drafts: DraftStats,
    /// States captured for the tree.
    pub captures: u64,
    /// Captures that were wanted but found no slot.
    pub captures_skipped: u64,
    /// States and nodes lost for lack of room.
    pub evictions: Evictions,
    /// The tiers below the device.
    pub tiers: TierStats,
    /// Sequences that were put back into the queue.
    pub preemptions: u64,
    /// Most slots in use at a time, snapshots included.
    pub peak_slots: usize,
    /// Most pages in use at a time, cached ones included.
    pub peak_pages: usize,
}

impl Stats {
    /// Adds the totals of another engine.
    pub fn add(&mut self, other: &Self) {
        let Self { steps, reasons, tokens_prefilled, tokens_reused, tokens_recomputed, tokens_generated, .. } = other;
        self.steps += steps;
        self.reasons.iter_mut().zip(reasons).for_each(|(all, more)| *all += more);
        self.tokens_prefilled += tokens_prefilled;
        self.tokens_reused += tokens_reused;
        self.tokens_recomputed += tokens_recomputed;
        self.tokens_generated += tokens_generated;
        self.drafts.rows += other.drafts.rows;
        self.drafts.tokens += other.drafts.tokens;
        self.drafts.accepted_at.iter_mut().zip(other.drafts.accepted_at).for_each(|(all, more)| *all += more);
        self.captures += other.captures;
        self.captures_skipped += other.captures_skipped;
        self.evictions.slots += other.evictions.slots;
        self.evictions.nodes += other.evictions.nodes;
        self.tiers.add(&other.tiers);
        self.preemptions += other.preemptions;
        self.peak_slots += other.peak_slots;
        self.peak_pages += other.peak_pages;
    }

    /// Requests admitted with this reason.
    pub fn reason(&self, reason: Reason) -> u64 {
        self.reasons[reason as usize]
    }
}
