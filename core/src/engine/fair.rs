//! Fairness between shares, the tenants of requests: whose prompt tokens a step computes, and who gives room to whom.
//!
//! * **Prompt tokens** by deficit: the share that has had the fewest of them is served first, and a step is divided equally
//!   between the shares that have prompts. A share that comes back has no more credit than the others.
//! * Once a share's prompts are complete in a step, the others get at most as many tokens as it had (at least [`ROUND`]): its
//!   first tokens do not wait for long prompts of others.
//! * **Admission** in the order of shares; within one by priority, then by arrival. A share whose head waits for a prefix is
//!   passed over. One whose head finds no room stops admission, so that it gets the next room.
//! * **Room:** if the largest share has at least two lanes more than one that finds no room, its last sequence is pre-empted
//!   before the next step, and the other one is served first. Every exchange makes the two more equal, so none is undone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    admit::Admission,
    plan::{Plan, SeqId},
    schedule::Scheduler,
    sequence::Sequence,
};
use crate::state::GRID;

/// Fewest prompt tokens that a share gets in its turn, if the step has so many.
const ROUND: usize = GRID;

/// Requests that wait, by share, and what each share has had.
#[derive(Debug, Default)]
pub(super) struct Shares(BTreeMap<Arc<str>, Share>);

#[derive(Debug, Default)]
struct Share {
    /// In the order of their admission.
    waiting: BTreeSet<(i32, SeqId)>,
    /// Prompt tokens computed since some moment that is the same for all shares.
    served: u64,
    /// Had something to do in the last step.
    busy: bool,
    /// Was passed over in the last step.
    deferred: bool,
}

impl Shares {
    /// A request waits.
    pub fn add(&mut self, seq: &Sequence) {
        self.0.entry(seq.share.clone()).or_default().waiting.insert((seq.priority, seq.id));
    }

    /// A request does not wait any more.
    pub fn remove(&mut self, seq: &Sequence) {
        if let Some(share) = self.0.get_mut(&seq.share) {
            share.waiting.remove(&(seq.priority, seq.id));
        }
    }

    /// The request of a share that is admitted next.
    pub fn head(&self, share: &str) -> Option<SeqId> {
        self.0.get(share)?.waiting.first().map(|(_, id)| *id)
    }

    /// The next `most` requests of each share.
    pub fn next(&self, most: usize) -> Vec<Vec<SeqId>> {
        let next = |share: &Share| share.waiting.iter().take(most).map(|(_, id)| *id).collect();
        self.0.values().map(next).collect()
    }

    /// Number of shares with requests that wait.
    pub fn waiting(&self) -> usize {
        self.0.values().filter(|share| !share.waiting.is_empty()).count()
    }

    /// Requests of shares that were passed over in the last step.
    pub fn deferred(&self) -> usize {
        self.0.values().filter(|share| share.deferred).map(|share| share.waiting.len()).sum()
    }

    /// The shares with prompt tokens to compute, in the order of their turns: least served, then fewest sequences running, then
    /// earliest request. `running`: see [`Running`]. No share counts as more than `step` tokens short of the one with the
    /// most: otherwise it would have many steps for itself.
    fn turns(&mut self, running: &BTreeMap<Arc<str>, Running>, step: usize) -> Vec<Arc<str>> {
        for name in running.keys() {
            self.0.entry(name.clone()).or_default();
        }
        let has_work = |name: &Arc<str>, share: &Share| {
            !share.waiting.is_empty() || running.get(name).is_some_and(|r| !r.prefills.is_empty())
        };
        self.0.retain(|name, share| has_work(name, share) || running.contains_key(name) || share.served > 0);
        let busy = || self.0.iter().filter(|(name, share)| share.busy && has_work(name, share)).map(|(_, s)| s.served);
        let (least, most) = (busy().min(), busy().max().unwrap_or(0));
        let mut turns = Vec::new();
        for (name, share) in &mut self.0 {
            let works = has_work(name, share);
            if works {
                let floor = if share.busy { 0 } else { least.unwrap_or(0) };
                share.served = share.served.max(floor).max(most.saturating_sub(step as u64));
                let earliest = share.waiting.first().map_or(SeqId(0), |(_, id)| *id);
                let lanes = running.get(name).map_or(0, |r| r.lanes);
                turns.push((share.served, lanes, earliest, name.clone()));
            }
            (share.busy, share.deferred) = (works, false);
        }
        if turns.len() < 2 {
            // Nobody to compare with: everybody who comes next starts equal.
            self.0.values_mut().for_each(|share| share.served = 0);
        }
        turns.sort_unstable();
        turns.into_iter().map(|(.., name)| name).collect()
    }

    fn took(&mut self, share: &str, tokens: usize, deferred: bool) {
        if let Some(share) = self.0.get_mut(share) {
            share.served += tokens as u64;
            share.deferred = deferred;
        }
    }
}

/// What a share has in the batch.
#[derive(Debug, Default)]
struct Running {
    lanes: usize,
    /// Its sequences whose prompt is not complete, in the order of their turns.
    prefills: Vec<(i32, SeqId)>,
}

/// The prompt tokens of a step, dealt out to shares.
struct Deal {
    budget: usize,
    /// Shares whose turn comes.
    turns: usize,
    /// Most tokens of each of them.
    most: usize,
}

impl Deal {
    /// Tokens for the next share.
    fn slice(&mut self) -> usize {
        let equal = self.budget.div_ceil(self.turns).max(ROUND);
        self.turns -= 1;
        equal.min(self.most).min(self.budget)
    }

    /// No later share of this step gets more than so many, or than a round.
    fn limit(&mut self, tokens: usize) {
        self.most = self.most.min(tokens.max(ROUND));
    }
}

impl Scheduler {
    /// Plans the prompt tokens of a step. `first`: the share for which room was made. `admits`: requests may be admitted even if
    /// the step has rows already.
    pub(super) fn plan_prompts(&mut self, plan: &mut Plan, budget: usize, first: Option<Arc<str>>, admits: bool) {
        let mut running = self.running_by_share();
        let mut turns = self.shares.turns(&running, self.limits.step_tokens);
        turns.sort_by_key(|share| Some(share) != first.as_ref());
        let mut deal = Deal { budget, turns: turns.len(), most: usize::MAX };
        let mut open = true;
        for share in turns {
            let slice = deal.slice();
            let prefills = running.remove(&share).unwrap_or_default().prefills;
            let (mut left, mut deferred) = (slice, false);
            for (_, id) in prefills {
                if left > 0 {
                    let i = self.index(id).expect("it runs");
                    left -= self.plan_prefill(i, left, plan);
                }
            }
            while open && left > 0 && (admits || plan.rows.is_empty()) {
                match self.admit(&share, plan) {
                    Admission::Admitted(i) => left -= self.plan_prefill(i, left, plan),
                    Admission::Later => {
                        deferred = self.shares.head(&share).is_some();
                        break;
                    }
                    Admission::NoRoom => {
                        open = false;
                        if self.last_beyond(&share).is_some() {
                            // Others go on with a short step: room is made before the next one.
                            self.refused = Some(share.clone());
                            deal.limit(ROUND);
                        }
                    }
                }
            }
            let taken = slice - left;
            self.shares.took(&share, taken, deferred);
            if left > 0 && taken > 0 && !self.has_prefill(&share) {
                deal.limit(taken);
            }
            deal.budget -= taken;
        }
    }

    fn has_prefill(&self, share: &str) -> bool {
        self.running.iter().any(|seq| !seq.decoding && *seq.share == *share)
    }

    /// Pre-empts the last sequence of the largest share for a share that found no room in the last step, and returns that.
    pub(super) fn make_way(&mut self, plan: &mut Plan) -> Option<Arc<str>> {
        let share = self.refused.take()?;
        self.shares.head(&share)?;
        let victim = self.last_beyond(&share)?;
        self.preempt(victim, plan);
        Some(share)
    }

    /// The running sequences, those first that are pre-empted last: the first one of each share, then the second ones, and so on.
    pub(super) fn precedence(&self) -> Vec<(usize, SeqId)> {
        let mut all: Vec<&Sequence> = self.running.iter().collect();
        all.sort_by(|a, b| (&a.share, a.priority, a.id).cmp(&(&b.share, b.priority, b.id)));
        let ranked = all.chunk_by(|a, b| a.share == b.share).flat_map(|same| same.iter().map(|s| s.id).enumerate());
        let mut order: Vec<(usize, SeqId)> = ranked.collect();
        order.sort_unstable();
        order
    }

    /// The sequence that is pre-empted first, if its share has at least two lanes more than this one.
    fn last_beyond(&self, share: &str) -> Option<SeqId> {
        let lanes = self.running.iter().filter(|seq| *seq.share == *share).count();
        self.precedence().pop().filter(|(rank, _)| *rank > lanes).map(|(_, id)| id)
    }

    fn running_by_share(&self) -> BTreeMap<Arc<str>, Running> {
        let mut all: BTreeMap<Arc<str>, Running> = BTreeMap::new();
        for seq in &self.running {
            let share = all.entry(seq.share.clone()).or_default();
            share.lanes += 1;
            if !seq.decoding {
                share.prefills.push((seq.priority, seq.id));
            }
        }
        all.values_mut().for_each(|share| share.prefills.sort_unstable());
        all
    }
}
