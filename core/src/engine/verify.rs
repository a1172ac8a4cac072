//! Drafts in a step: which rows verify how many, and which slot a sequence keeps afterwards.
//!
//! A row with drafts is chunks of one token, each with a slot of its own, and all its positions are outputs. The id sampled at a
//! position with `uniform(seed, position)` is the one that a step without drafts would sample there, if all drafts before it were
//! right. So the first id always counts, and each next one if the draft before it equals the id sampled in its place. To commit
//! some of them is to choose a slot; the others are freed, and the keys of rejected drafts lie beyond the end of the sequence,
//! where the next row overwrites them.

use std::sync::Arc;

use super::{
    gauge::{self, Gauge},
    plan::{Plan, PlanRow},
    schedule::Scheduler,
    sequence::{Rules, Sequence, Taken},
    stats::Stats,
};
use crate::state::{Cache, GRID, Limits, TokenCosts};
use crate::step::{Chunk, Row, Src, TokenRef};

/// Tokens of a row with drafts: few numbers, so that few steps are recorded.
pub(super) const WIDTHS: [usize; 3] = [8, 4, 2];

/// Drafts in flight.
#[derive(Debug)]
pub(super) struct Trial {
    /// How many.
    pub drafts: usize,
    /// The states after each of them, without one for a model that has none.
    pub slots: Vec<u32>,
}

/// A decode row, by its place in the plan, and the drafts that could follow.
struct Guess {
    row: usize,
    drafts: Vec<u32>,
    gauge: Gauge,
    /// It writes its state in place, which a row of several chunks cannot: one slot more.
    in_place: bool,
    /// Positions left on the sequence's pages.
    left: usize,
}

/// A step without drafts.
struct Base {
    /// Its decode rows.
    decodes: usize,
    tokens: usize,
    costs: TokenCosts,
}

impl Base {
    /// Generated tokens per time with so many drafts, of which so many are expected to be right.
    fn rate(&self, right: f32, drafts: usize) -> f32 {
        (self.decodes as f32 + right) / self.costs.time(self.tokens + drafts)
    }
}

impl Guess {
    /// Whether the row is one of those with drafts if these have `width` tokens: it guesses so many and should give more than the
    /// time is worth otherwise.
    fn takes(&self, width: usize, step: &Base) -> bool {
        let price = step.rate(0.0, 0) * step.costs.of_more(step.tokens, width - 1);
        self.drafts.len() >= width - 1 && self.gauge.gain(width) >= price
    }

    /// Slots and pages that so many drafts take.
    fn needs(&self, drafts: usize, rules: Rules) -> (usize, usize) {
        let slots = if rules.has_slots { drafts + usize::from(self.in_place) } else { 0 };
        (slots, usize::from(rules.has_pages && drafts > self.left))
    }
}

impl Scheduler {
    /// Adds drafts to the first `decodes` rows, as far as there is room. The other rows are planned already.
    pub(super) fn plan_drafts(&mut self, plan: &mut Plan, decodes: usize) {
        if self.limits.drafts == 0 {
            return;
        }
        let guesses = self.guesses(&plan.rows[..decodes]);
        if guesses.is_empty() {
            return;
        }
        let step = Base { decodes, tokens: count(plan, |row| row.tokens.len()), costs: self.limits.costs };
        let Some(width) = self.width(&guesses, &step, room(plan, &self.limits)) else { return };
        for guess in guesses.iter().filter(|guess| guess.takes(width, &step)) {
            let (slots, pages) = guess.needs(width - 1, self.rules);
            let free = slots <= self.cache.slots().free() && pages <= self.cache.pages().free();
            if free && room(plan, &self.limits) >= width - 1 {
                self.add_drafts(&mut plan.rows[guess.row], &guess.drafts[..width - 1]);
            }
        }
    }

    /// What the drafters guess, without rows for which they guess nothing.
    fn guesses(&mut self, rows: &[PlanRow]) -> Vec<Guess> {
        let mut guesses = Vec::new();
        for (at, PlanRow { seq, row }) in rows.iter().enumerate() {
            let i = self.index(*seq).expect("a planned sequence runs");
            let seq = &mut self.running[i];
            let drafts = seq.guess(self.limits.drafts, &self.limits.costs);
            if !drafts.is_empty() {
                let left = (seq.pages.len() * GRID).saturating_sub(seq.done);
                guesses.push(Guess { row: at, drafts, gauge: seq.gauge.clone(), in_place: in_place(row), left });
            }
        }
        guesses
    }

    /// The tokens of each row with drafts, the same for all rows of a step: that which should give the most tokens per time, among
    /// those for which all that pay have room, and 2. `room`: see there.
    fn width(&self, guesses: &[Guess], step: &Base, room: usize) -> Option<usize> {
        let rate = |width: usize| {
            let takers = || guesses.iter().filter(|guess| guess.takes(width, step));
            let needs = takers().map(|guess| guess.needs(width - 1, self.rules));
            let (slots, pages) = needs.fold((0, 0), |sum, needs| (sum.0 + needs.0, sum.1 + needs.1));
            let free = slots <= self.cache.slots().free() && pages <= self.cache.pages().free();
            let drafts = takers().count() * (width - 1);
            let fits = drafts > 0 && (width == 2 || free && drafts <= room);
            let gain = takers().map(|guess| guess.gauge.gain(width)).sum();
            fits.then(|| step.rate(gain, drafts))
        };
        let widths = WIDTHS.into_iter().filter(|width| *width - 1 <= self.limits.drafts);
        let (best, width) = gauge::best(widths.filter_map(|width| Some((rate(width)?, width))))?;
        (best >= step.rate(0.0, 0)).then_some(width)
    }

    fn add_drafts(&mut self, planned: &mut PlanRow, drafts: &[u32]) {
        let i = self.index(planned.seq).expect("a planned sequence runs");
        self.running[i].add_drafts(&mut planned.row, drafts, &mut self.cache, self.rules);
        self.stats.drafts.rows += 1;
        self.stats.drafts.tokens += drafts.len() as u64;
    }
}

/// Whether a row of one token writes the slot that it reads.
fn in_place(row: &Row) -> bool {
    row.chunks.first().is_some_and(|chunk| chunk.src == Src::Slot(chunk.dst))
}

fn count(plan: &Plan, of: fn(&Row) -> usize) -> usize {
    plan.rows.iter().map(|planned| of(&planned.row)).sum()
}

/// Tokens and outputs that the step may still have.
fn room(plan: &Plan, limits: &Limits) -> usize {
    let tokens = limits.step_tokens - count(plan, |row| row.tokens.len());
    tokens.min(limits.outputs() - count(plan, |row| row.outputs.len()))
}

impl Sequence {
    /// Guesses of the tokens after the row just planned, at most `most` and no more than it may sample; none while they would not
    /// pay even if the sequence were alone.
    fn guess(&mut self, most: usize, costs: &TokenCosts) -> Vec<u32> {
        let most = most.min(self.max_tokens - self.outputs());
        let Some(drafter) = self.drafter.as_mut().filter(|_| most > 0) else { return Vec::new() };
        if self.gauge.rests() {
            return Vec::new();
        }
        if !self.gauge.pays(costs, 0.0) {
            self.gauge.rest();
            return Vec::new();
        }
        // Its first token may be one that the host has not read, but for which there is a guess too.
        let unread = self.outstanding - 1;
        let mut drafts = drafter.draft(&self.tokens, unread + most);
        drafts.truncate(unread + most);
        drafts.drain(..unread.min(drafts.len()));
        drafts
    }

    /// Adds drafts to its row of one token. The slots and pages that they need are free, and nothing is evicted.
    fn add_drafts(&mut self, row: &mut Row, drafts: &[u32], cache: &mut Cache, rules: Rules) {
        if rules.has_pages && self.done + drafts.len() > self.pages.len() * GRID {
            let page = cache.take_free_page().expect("there is room");
            Arc::make_mut(&mut self.pages).push(page);
            // Not a copy of the sequence's list: that may have the tree's pages already where this row writes its own.
            Arc::make_mut(&mut row.pages).push(page);
        }
        let mut take = || cache.take_free_slot().expect("there is room");
        if in_place(row) {
            // A row of several chunks does not write what it reads.
            self.spare = Some(std::mem::replace(&mut self.cur, take()));
            row.chunks[0].dst = self.cur;
        }
        let slots: Vec<u32> = if rules.has_slots { drafts.iter().map(|_| take()).collect() } else { Vec::new() };
        row.chunks.extend(slots.iter().map(|&dst| Chunk { len: 1, src: Src::Carry, dst }));
        row.tokens.extend(drafts.iter().map(|&id| TokenRef::Draft(id)));
        row.outputs = (0..row.tokens.len() as u32).collect();
        self.trial = Some(Trial { drafts: drafts.len(), slots });
    }

    /// The verdict on its drafts, if it has some: so many of them are tokens now. Keeps the state after the last of them, and that
    /// at a grid point before it as a capture.
    pub fn accept(&mut self, accepted: usize, cache: &mut Cache, rules: Rules, stats: &mut Stats) {
        let Some(Trial { drafts, slots }) = self.trial.take() else { return };
        assert!(accepted <= drafts, "{accepted} of {drafts} drafts");
        self.gauge.note(drafts, accepted);
        let from = self.done;
        self.done += accepted;
        self.computed = self.computed.max(self.done);
        if accepted > 0 && rules.has_slots {
            let grid = self.done / GRID * GRID;
            if grid > from && rules.cache && rules.captures_all {
                let leaving = self.leaving(cache);
                cache.make_room_on_path(self.tip, leaving);
                let slot = slots[grid - from - 1];
                cache.hold_slot(slot);
                self.taken.push_back(Taken { position: grid, slot, decode: true });
                stats.captures += 1;
            }
            let before = std::mem::replace(&mut self.cur, slots[accepted - 1]);
            cache.hold_slot(self.cur);
            match self.spare {
                // It is alone: a shared one is a capture or was another's, and then there is a spare.
                None => self.spare = Some(before),
                Some(_) => cache.release_slot(before),
            }
        }
        slots.into_iter().for_each(|slot| cache.release_slot(slot));
        if rules.has_slots && cache.slots().holders(self.cur) == 1 {
            // It is written in place.
            cache.release_slot(self.spare.take().unwrap_or(0));
        }
        if rules.has_pages && self.pages.len() > self.done.div_ceil(GRID) {
            let page = Arc::make_mut(&mut self.pages).pop().expect("counted");
            cache.release_page(page);
        }
        cache.restore_reserved();
    }
}
