//! Drafts of the model's own head: passes of it between two steps, for the sequences whose tokens the host has all read.
//!
//! A pass embeds the last token, which the trunk has not computed yet, beside the hidden vector that the sequence's slot keeps; the
//! next passes go on from the head's own results. They write no slot, and keys only beyond the end of the sequence, where the
//! trunk's next step writes its own. So they may be repeated or forgotten at any moment.

use std::sync::Arc;

use super::{
    Engine,
    flight::Incoming,
    gauge,
    plan::SeqId,
    schedule::Scheduler,
    sequence::{Rules, Sequence},
    verify::WIDTHS,
};
use crate::{
    Result,
    backend::Backend,
    state::{Cache, GRID, Limits, TokenCosts},
    step::{Chunk, Row, Src, TokenRef},
};

/// Rows of one token each, for passes of the head.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub ids: Vec<SeqId>,
    pub rows: Vec<Row>,
    /// Passes, of which each gives a draft of every row.
    pub passes: usize,
}

/// Passes in flight: the sequences, and the ids that each pass gives them.
pub(super) struct Looking<B: Backend> {
    ids: Vec<SeqId>,
    passes: Vec<Incoming<B::Read>>,
}

impl Sequence {
    /// Drafts of the head that its next row may have, at most `most`. 0 while there are some, for the drafters of the host, and while
    /// they would not pay even if the sequence were alone. `landed`: all steps in flight have.
    fn looks(&mut self, most: usize, (costs, head): (&TokenCosts, f32), landed: bool) -> usize {
        let ready = self.decoding && self.trial.is_none() && (!landed || self.outstanding == 0);
        let Some(drafter) = self.drafter.as_mut().filter(|_| ready && !self.gauge.is_resting()) else { return 0 };
        if !drafter.head(&self.tokens).is_some_and(|head| head.is_empty()) {
            return 0;
        }
        if !self.gauge.pays(costs, head) {
            self.gauge.rest();
            return 0;
        }
        // The next row itself samples one.
        most.min(self.max_tokens.saturating_sub(self.outputs() + 1))
    }

    /// Its row for the head, if it has a page for the keys of so many tokens or a free one can be had.
    fn look(&mut self, passes: usize, cache: &mut Cache, rules: Rules) -> Option<Row> {
        if rules.has_pages && self.done + passes > self.pages.len() * GRID {
            Arc::make_mut(&mut self.pages).push(cache.take_free_page()?);
        }
        let chunks = vec![Chunk { len: 1, src: Src::Slot(self.cur), dst: 0 }];
        Some(Row {
            lane: self.lane,
            first_position: self.done as u32,
            tokens: vec![TokenRef::Known(*self.tokens.get(self.done)?)],
            chunks: if rules.has_slots { chunks } else { Vec::new() },
            pages: self.pages.clone(),
            outputs: vec![0],
        })
    }
}

impl Scheduler {
    /// Drafts of the head that the next step should verify, the same for each of its rows: those that should give the most tokens
    /// per time, if more than none. `landed`: no step is in flight.
    fn passes(&mut self, landed: bool) -> Option<usize> {
        let Limits { drafts: most, costs, head_cost, step_tokens, .. } = self.limits;
        let decodes = self.running.iter().filter(|seq| seq.decoding).count();
        let looks = self.running.iter_mut().map(|seq| (seq.looks(most, (&costs, head_cost), landed), &seq.gauge));
        let looking: Vec<_> = looks.filter(|(drafts, _)| *drafts > 0).collect();
        let (rows, least) = (looking.len(), looking.iter().map(|(drafts, _)| *drafts).min()?);
        let free = if self.rules.has_slots { self.cache.slots().free() } else { usize::MAX };
        let room = step_tokens.min(self.limits.outputs()).min(free);
        let rate = |width: usize| {
            let right: f32 = looking.iter().map(|(_, gauge)| gauge.gain(width)).sum();
            let passes = head_cost * (width - 1) as f32 * costs.time(rows);
            (decodes as f32 + right) / (costs.time(decodes + rows * (width - 1)) + passes)
        };
        let widths = WIDTHS.into_iter().filter(|width| width - 1 <= least && rows * width <= room);
        let (best, width) = gauge::best(widths.map(|width| (rate(width), width)))?;
        (best >= decodes as f32 / costs.time(decodes)).then_some(width - 1)
    }

    /// Whether the head should guess before the next step, once the one in flight has landed.
    pub(super) fn waits_for_head(&mut self) -> bool {
        self.passes(false).is_some()
    }

    /// The rows for which the head should guess now.
    pub(super) fn look(&mut self) -> Look {
        let Some(passes) = self.passes(true) else { return Look::default() };
        let mut look = Look { passes, ..Look::default() };
        let Limits { costs, head_cost, .. } = self.limits;
        for seq in &mut self.running {
            if seq.looks(passes, (&costs, head_cost), true) > 0
                && let Some(row) = seq.look(passes, &mut self.cache, self.rules)
            {
                look.ids.push(seq.id);
                look.rows.push(row);
            }
        }
        look
    }

    /// What the head guessed for a sequence, if that still runs.
    fn tell(&mut self, id: SeqId, drafts: Vec<u32>) {
        let Some(i) = self.index(id) else { return };
        let Sequence { drafter, tokens, .. } = &mut self.running[i];
        if let Some(head) = drafter.as_mut().and_then(|drafter| drafter.head(tokens)) {
            *head = drafts;
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Lets the head guess for the sequences that draft with it, and waits for that. If the future is dropped, the next call goes on.
    pub(super) async fn look_ahead(&mut self) -> Result<()> {
        if !self.runner.model().has_head() || self.flight.is_some() {
            return Ok(());
        }
        if self.looking.is_none() {
            let Look { ids, rows, passes } = self.scheduler.look();
            if rows.is_empty() {
                return Ok(());
            }
            let passes = self.runner.look(rows, passes)?.into_iter().map(Incoming::new).collect();
            self.looking = Some(Looking { ids, passes });
        }
        for pass in self.looking.iter_mut().flat_map(|looking| &mut looking.passes) {
            pass.arrive().await?;
        }
        let Looking { ids, passes } = self.looking.take().expect("it has just arrived");
        let vocab = self.spec().vocab as u32;
        let passes: Vec<Vec<u32>> = passes.iter().map(|p| bytemuck::pod_collect_to_vec(p.bytes())).collect();
        for (i, id) in ids.into_iter().enumerate() {
            // Logits that are not finite give no id.
            let drafts = passes.iter().map(|ids| ids[i]).take_while(|id| *id < vocab).collect();
            self.scheduler.tell(id, drafts);
        }
        Ok(())
    }
}
