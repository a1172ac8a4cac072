//! One row of a step: its chunks, the slot that each of them writes, and the slots that the sequence holds afterwards.

use super::{
    plan::PlanRow,
    sequence::{Rules, Sequence, Taken},
    stats::Stats,
};
use crate::state::{Cache, GRID, cache::Wanted};
use crate::step::{Chunk, Row, Src, TokenRef};

/// The state that the rows of one step share.
pub(super) struct Step<'a> {
    pub cache: &'a mut Cache,
    pub stats: &'a mut Stats,
    pub rules: Rules,
    pub number: u64,
    /// Slots that occur in the step. Each is held until the step is planned, so that none is handed out, evicted or
    /// written in place while another row of the step reads or writes it.
    pub held: &'a mut Vec<u32>,
    /// Pages given up by rows that still write them in this step.
    pub swapped: &'a mut Vec<u32>,
}

/// Where a prefill share of at most `budget` tokens ends: on the grid if it is 64 tokens or more, unless it ends the
/// known tokens; a shorter one anywhere.
pub(super) fn share_end(done: usize, known: usize, budget: usize) -> usize {
    let end = known.min(done + budget);
    if end < known && end - done >= GRID { end / GRID * GRID } else { end }
}

impl Step<'_> {
    /// Plans the tokens from `seq.done` to `end`, or fewer if no second slot is free. The sequence already has the pages.
    pub fn row(&mut self, seq: &mut Sequence, end: usize) -> PlanRow {
        let start = seq.done;
        let (chunks, end) = if self.rules.has_slots { self.chunks(seq, end) } else { (Vec::new(), end) };
        let token = |at: usize| seq.tokens.get(at).map_or_else(|| seq.unread(at), |&id| TokenRef::Known(id));
        let tokens = (start..end).map(token).collect();
        let last = end == seq.tokens.len() + seq.outstanding;
        let row = Row {
            lane: seq.lane,
            first_position: start as u32,
            outputs: match last {
                _ if seq.scores => (0..(end - start) as u32).collect(),
                true => vec![(end - start - 1) as u32],
                false => Vec::new(),
            },
            tokens,
            chunks,
            pages: seq.pages.clone(),
        };
        self.count(seq, start, end);
        seq.done = end;
        seq.outstanding += usize::from(last);
        seq.decoding |= last;
        seq.scores &= !last;
        seq.settle(self.cache, self.rules, self.number, self.swapped);
        PlanRow { seq: seq.id, row }
    }

    fn count(&mut self, seq: &mut Sequence, start: usize, end: usize) {
        let fresh = start.max(seq.computed).min(end);
        self.stats.tokens_recomputed += (fresh - start) as u64;
        self.stats.tokens_prefilled += end.min(seq.prompt_len).saturating_sub(fresh) as u64;
        seq.computed = seq.computed.max(end);
    }

    /// The chunk table of the row and its end. Leaves the sequence with its slots after the row.
    fn chunks(&mut self, seq: &mut Sequence, end: usize) -> (Vec<Chunk>, usize) {
        let (start, src) = (seq.done, seq.cur);
        let first_end = (start / GRID + 1) * GRID;
        let alone = src != 0 && self.cache.slots().holders(src) == 1;
        let mut end = end;
        let mut captured = Vec::new();
        let last = self.wants_last(seq, end).then(|| self.fresh_capture(seq, alone)).flatten();
        let dst = if let Some(slot) = last {
            self.cache.hold_slot(slot);
            captured.push(Taken { position: end, slot, decode: seq.decoding });
            slot
        } else if alone && end <= first_end {
            src
        } else if let Some(slot) = seq.spare.take().or_else(|| self.cache.take_slot()) {
            slot
        } else {
            // A sequence whose state is shared, or that has none yet, has a spare slot. This one owns its state alone.
            assert!(alone, "a sequence without a slot to write");
            end = end.min(first_end);
            src
        };
        self.inner_captures(seq, start, end, &mut captured);

        let mut chunks = Vec::with_capacity((end - start).div_ceil(GRID) + 1);
        let mut at = start;
        while at < end {
            let stop = end.min((at / GRID + 1) * GRID);
            let inner = || captured.iter().find(|t| t.position == stop).map_or(0, |t| t.slot);
            chunks.push(Chunk {
                len: (stop - at) as u32,
                src: if at == start { Src::Slot(src) } else { Src::Carry },
                dst: if stop == end { dst } else { inner() },
            });
            at = stop;
        }
        for slot in chunks.iter().map(|c| c.dst).chain([src]).filter(|&slot| slot != 0) {
            self.cache.hold_slot(slot);
            self.held.push(slot);
        }
        seq.taken.extend(captured);
        if dst != src {
            seq.cur = dst;
            if alone && seq.spare.is_none() {
                seq.spare = Some(src);
            } else {
                self.cache.release_slot(src);
            }
        } else if seq.decoding
            && let Some(spare) = seq.spare.take()
        {
            self.cache.release_slot(spare);
        }
        (chunks, end)
    }

    /// Whether the state at the end of the share is to be kept: a wanted one in prefill, a grid point in decode. The
    /// latter makes room on the path.
    fn wants_last(&mut self, seq: &Sequence, end: usize) -> bool {
        if !seq.decoding {
            return seq.wanted.iter().any(|w| w.position == end && w.take);
        }
        if !(self.rules.cache && self.rules.captures_all && end.is_multiple_of(GRID)) {
            return false;
        }
        let leaving = seq.leaving(self.cache);
        self.cache.make_room_on_path(seq.tip, leaving);
        true
    }

    /// A slot for a capture that is also the sequence's own state. The spare can be used if the present state can become the
    /// next spare.
    fn fresh_capture(&mut self, seq: &mut Sequence, alone: bool) -> Option<u32> {
        let slot = self.cache.take_slot().or_else(|| if alone { seq.spare.take() } else { None });
        self.note_capture(slot)
    }

    /// Captures strictly inside the row, the branch point first, then the deepest: if slots run out, those help most.
    fn inner_captures(&mut self, seq: &mut Sequence, start: usize, end: usize, captured: &mut Vec<Taken>) {
        if seq.decoding {
            return;
        }
        let mut inner: Vec<_> =
            seq.wanted.iter().filter(|w| w.take && w.position > start && w.position < end).copied().collect();
        inner.sort_by_key(|w| (!w.branch, std::cmp::Reverse(w.position)));
        for Wanted { position, .. } in inner {
            let slot = self.cache.take_slot();
            if let Some(slot) = self.note_capture(slot) {
                captured.push(Taken { position, slot, decode: false });
            }
        }
        captured.sort_by_key(|t| t.position);
        if self.rules.one_capture
            && let Some(deepest) = captured.last()
        {
            seq.enter_to = deepest.position;
        }
    }

    fn note_capture(&mut self, slot: Option<u32>) -> Option<u32> {
        match slot {
            Some(_) => self.stats.captures += 1,
            None => self.stats.captures_skipped += 1,
        }
        slot
    }
}
