//! What a step's results mean for its requests.

use std::mem;

use super::{
    Engine, Event, FinishReason, SeqId,
    flight::{Flight, Incoming, Output},
    schedule::Commit,
};
use crate::{Error, backend::Backend, controls::Logprobs, step::NONE};

/// What a step computed, a row per output.
struct Results {
    ids: Vec<u32>,
    logits: Option<Vec<f32>>,
    reports: Option<Vec<f32>>,
    scores: Option<Vec<f32>>,
}

impl Results {
    fn of<B: Backend>(flight: &Flight<B>, ids: &Incoming<B::Read>) -> Self {
        let floats = |read: &Option<Incoming<B::Read>>| read.as_ref().map(|l| bytemuck::pod_collect_to_vec(l.bytes()));
        Self {
            ids: bytemuck::pod_collect_to_vec(ids.bytes()),
            logits: floats(&flight.logits),
            reports: floats(&flight.reports),
            scores: floats(&flight.scores),
        }
    }

    /// Replaces the ids of `len` outputs from `at` on, as far as there are forced ones; [`NONE`] stays.
    fn force(&mut self, at: usize, len: usize, forced: &[u32]) {
        let sampled = self.ids[at..at + len].iter_mut().zip(forced);
        sampled.filter(|(id, _)| **id != NONE).for_each(|(id, forced)| *id = *forced);
    }

    /// The row of an output in a table that has a row for each.
    fn row<'a>(&self, table: &'a Option<Vec<f32>>, output: usize) -> Option<&'a [f32]> {
        let all = table.as_deref()?;
        let len = all.len() / self.ids.len();
        Some(&all[output * len..][..len])
    }
}

/// The sampled ids that are tokens of the text: the first of a row, and each next one if the draft before it is the id sampled in
/// its place; up to the first that ends the text, and none from [`NONE`] on.
fn tokens<'a>(row: &[Output], ids: &'a [u32], stop_ids: &[u32]) -> &'a [u32] {
    let right = row.iter().zip(ids).take_while(|(output, id)| output.draft == Some(**id)).count();
    let sampled = &ids[..=right];
    let end = sampled.iter().position(|id| *id == NONE || stop_ids.contains(id));
    match end {
        Some(end) if sampled[end] == NONE => &sampled[..end],
        Some(end) => &sampled[..=end],
        None => sampled,
    }
}

impl<B: Backend> Engine<B> {
    /// Commits the ids of a step that has arrived.
    pub(super) fn land(&mut self, flight: Flight<B>) -> Vec<Event> {
        self.landed = Some((flight.tokens, flight.enqueued));
        let Some(ids) = &flight.ids else { return Vec::new() };
        let mut results = Results::of(&flight, ids);
        flight.dead.iter().for_each(|output| results.ids[*output] = NONE);
        let now = (self.clock)();
        if let Some(lower) = &mut self.lower {
            lower.landed(flight.tokens, flight.enqueued, now);
        }
        let (mut events, mut at) = (Vec::new(), 0);
        for row in flight.outputs.chunk_by(|output, _| output.draft.is_some()) {
            match row[0].target {
                Some(target) => self.score(row[0].id, target, results.row(&results.scores, at).unwrap_or_default()),
                None => {
                    results.force(at, row.len(), self.scheduler.forced(row[0].id));
                    self.land_row(row, at, &results, now, &mut events);
                }
            }
            at += row.len();
        }
        events
    }

    /// Commits what a row sampled, from output `at` of the step on.
    fn land_row(&mut self, row: &[Output], at: usize, results: &Results, now: f64, events: &mut Vec<Event>) {
        let id = row[0].id;
        // It may have ended while the step was in flight.
        let Some(live) = self.live.get_mut(&id) else { return };
        let tokens = tokens(row, &results.ids[at..at + row.len()], &live.stop_ids);
        let Some(last) = tokens.last() else {
            events.push(self.finish(id, FinishReason::Failed, Some(Error::NotFinite)));
            return;
        };
        let Some(commit) = self.scheduler.commit(id, tokens) else { return };
        if live.first_token.is_none() && live.scores.is_some() {
            live.prompt_logprobs = Some(mem::take(&mut live.scored).into());
        }
        let mut prompt_logprobs = live.prompt_logprobs.clone().filter(|_| live.first_token.is_none());
        live.first_token.get_or_insert(now);
        live.completion_tokens += tokens.len();
        for (i, &token) in (at..).zip(tokens) {
            let logits = results.row(&results.logits, i).map(Into::into);
            let report = results.row(&results.reports, i);
            let logprobs = live.guide.as_ref().zip(report).and_then(|(guide, report)| guide.logprobs(report));
            events.push(Event::Token { id, token, logits, logprobs, prompt_logprobs: prompt_logprobs.take() });
        }
        let stop = live.stop_ids.contains(last);
        let over = match &mut live.guide {
            Some(guide) if !stop => guide.commit(tokens),
            _ => Ok(stop),
        };
        match over {
            Ok(true) => events.push(self.finish(id, FinishReason::Stop, None)),
            Err(e) => events.push(self.finish(id, FinishReason::Failed, Some(e))),
            Ok(false) if commit == Commit::Last => events.push(self.finish(id, FinishReason::Length, None)),
            Ok(false) => {}
        }
    }

    /// Compares logits with the token of the prompt at `target`. After a pre-emption they come again, maybe after the first token.
    fn score(&mut self, id: SeqId, target: usize, logits: &[f32]) {
        if let (Some(live), Some(tokens)) = (self.live.get_mut(&id), self.scheduler.tokens(id))
            && let Some(n) = live.scores.filter(|_| live.prompt_logprobs.is_none())
            && live.scored.len() + 1 == target
        {
            live.scored.push(Logprobs::of_logits(logits, tokens[target], n));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_up_to_the_first_wrong_draft_and_to_the_end_of_the_text() {
        let found = |drafts: &[u32], ids: &[u32], stop: u32| {
            let drafts = drafts.iter().copied().map(Some).chain([None]);
            let row: Vec<_> = drafts.map(|draft| Output { id: SeqId(0), lane: 0, target: None, draft }).collect();
            tokens(&row, ids, &[stop]).to_vec()
        };
        assert_eq!(found(&[], &[5], 9), [5]);
        assert_eq!(found(&[5, 6, 7], &[5, 6, 7, 8], 9), [5, 6, 7, 8]);
        assert_eq!(found(&[5, 6, 7], &[4, 6, 7, 8], 9), [4]);
        assert_eq!(found(&[5, 6, 7], &[5, 4, 7, 8], 9), [5, 4]);
        assert_eq!(found(&[5, 6, 7], &[5, 6, 7, 8], 6), [5, 6]);
        assert_eq!(found(&[5, 6, 7], &[4, 6, 7, 8], 6), [4]);
        assert_eq!(found(&[5, 6, 7], &[5, NONE, 7, 8], 9), [5]);
        assert!(found(&[5, 6, 7], &[NONE; 4], 9).is_empty());
    }
}
