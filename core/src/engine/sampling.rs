//! The sampling of a step in which some lane has rules.
//!
//! A lane holds one mask. The positions of a row with drafts have a mask each, so they are sampled one after the other: in the first
//! pass the first output of every such row and all other outputs, in the next ones the outputs after each draft. The masks follow
//! from the drafts, so no pass waits for the ids of another.

use super::{
    Engine, Event, FinishReason, SeqId,
    flight::{Flight, Incoming, Output},
    guide::Guide,
};
use crate::{Result, backend::Backend};

/// Masks by lane.
type Masks = Vec<(u32, Vec<u32>)>;

/// Which outputs of a step are sampled when.
#[derive(Default)]
struct Turns {
    /// The pass of each output; `None`: it is not sampled.
    of: Vec<Option<usize>>,
    /// The masks of each pass.
    passes: Vec<Masks>,
    /// Outputs whose drafts lead nowhere.
    dead: Vec<usize>,
}

impl Turns {
    /// Adds a row that samples, with the masks of its positions; none if they do not depend on the tokens.
    fn add(&mut self, row: &[Output], masks: Vec<Vec<u32>>) {
        let (at, known) = (self.of.len(), masks.len());
        if known == 0 {
            self.of.extend(row.iter().map(|_| Some(0)));
            return;
        }
        self.of.extend((0..row.len()).map(|place| Some(place).filter(|place| *place < known)));
        self.dead.extend(at + known..at + row.len());
        self.passes.resize_with(self.passes.len().max(known), Vec::new);
        for (pass, mask) in self.passes.iter_mut().zip(masks) {
            pass.push((row[0].lane, mask));
        }
    }

    /// The outputs that a pass does not sample.
    fn hidden(&self, pass: usize) -> Vec<bool> {
        self.of.iter().map(|of| *of != Some(pass)).collect()
    }
}

impl<B: Backend> Engine<B> {
    /// Whether a mask for one of these outputs depends on an id that the host has not read.
    pub(super) fn waits(&self, outputs: &[Output]) -> bool {
        let constrained = |id: &SeqId| self.live.get(id).and_then(|l| l.guide.as_ref()).is_some_and(Guide::constrains);
        let unread = |id: &SeqId| self.flight.iter().any(|f| f.outputs.iter().any(|other| other.id == *id));
        outputs.iter().any(|output| constrained(&output.id) && unread(&output.id))
    }

    /// Writes the masks of a step whose sampling is held, and enqueues it. A request without an allowed token ends.
    pub(super) fn sample(&mut self, flight: &mut Flight<B>, events: &mut Vec<Event>) -> Result<()> {
        let Some((begun, needs)) = flight.held.take() else { return Ok(()) };
        let mut turns = Turns::default();
        for row in flight.outputs.chunk_by(|output, _| output.draft.is_some()) {
            match row[0].target {
                Some(_) => turns.of.push(None),
                None => turns.add(row, self.masks(row, events)),
            }
        }
        let last = turns.passes.len().max(1) - 1;
        for pass in 0..=last {
            let hidden = turns.hidden(pass);
            if hidden.contains(&true) {
                self.runner.hide(&begun, &hidden)?;
            }
            for (lane, mask) in turns.passes.get(pass).into_iter().flatten() {
                self.runner.mask(*lane, mask)?;
            }
            self.runner.draw(&begun, needs)?;
        }
        flight.dead = turns.dead;
        let (ids, reports) = self.runner.drawn(&begun, needs);
        (flight.ids, flight.reports) = (Some(Incoming::new(ids)), reports.map(Incoming::new));
        self.keep_logits(flight);
        Ok(())
    }

    /// The masks of the positions of a row. None if they do not depend on the tokens, and for a request that has ended or ends here.
    fn masks(&mut self, row: &[Output], events: &mut Vec<Event>) -> Vec<Vec<u32>> {
        let id = row[0].id;
        let Some(live) = self.live.get_mut(&id) else { return Vec::new() };
        let Some(guide) = &mut live.guide else { return Vec::new() };
        let drafts: Vec<u32> = row.iter().filter_map(|output| output.draft).collect();
        let position = live.prompt_tokens + live.completion_tokens;
        guide.masks(position, &drafts, &live.stop_ids).unwrap_or_else(|e| {
            events.push(self.finish(id, FinishReason::Failed, Some(e)));
            Vec::new()
        })
    }
}
