//! Admission: the next request of a share gets a lane, one slot and the pages of all its known tokens together, or nothing.

use std::sync::Arc;

use super::{plan::Plan, schedule::Scheduler, sequence::Sequence};
use crate::state::{
    GRID, Reason, Report,
    cache::{Match, Wanted},
    prefix::{NONE, Stateless},
};
use crate::tier::Tier;

/// What became of the next request of a share.
pub(super) enum Admission {
    /// It runs, at this place among the running ones.
    Admitted(usize),
    /// There is none, or it waits for something that others compute or that a lower tier brings.
    Later,
    /// Lanes, slots or pages are short.
    NoRoom,
}

impl Scheduler {
    /// Admits the next request of a share if it fits now.
    pub(super) fn admit(&mut self, share: &str, plan: &mut Plan) -> Admission {
        let Some(id) = self.shares.head(share) else { return Admission::Later };
        if self.loading.contains(&id) || self.queue.get(&id).is_some_and(|seq| seq.outstanding > 0) {
            return Admission::Later;
        }
        if self.free_lanes.is_empty() {
            return Admission::NoRoom;
        }
        if self.outputs_left == 0 {
            // Prompts whose logits are wanted have taken them for this step.
            return Admission::Later;
        }
        let mut seq = self.dequeue(id).expect("the head waits");
        let tried = self.try_admit(&mut seq);
        if let Err(why) = tried {
            self.enqueue(seq);
            return why;
        }
        seq.lane = self.free_lanes.pop().expect("checked above");
        if seq.outputs() == 0 {
            seq.gauge = self.habit.as_good();
        }
        plan.admitted.push(id);
        let i = self.running.partition_point(|other| other.id < id);
        self.running.insert(i, seq);
        self.outputs_left -= 1;
        Admission::Admitted(i)
    }

    /// The match of a request, and the realm that it continues in: that of converted values only if they lead further.
    fn choose(&self, seq: &mut Sequence, pages: usize) -> Match {
        let (home, cold) = seq.find(&self.cache, pages, self.step);
        let Some(cold) = cold else { return home };
        let pending = home.pending || cold.pending;
        seq.in_cold = cold.hit > home.hit;
        Match { pending, ..if seq.in_cold { cold } else { home } }
    }

    fn try_admit(&mut self, seq: &mut Sequence) -> Result<(), Admission> {
        let mut found = Match { nodes: Vec::new(), hit: 0, reason: Reason::Off, pending: false };
        let pages = seq.matchable_pages();
        seq.in_cold = false;
        if self.rules.cache {
            seq.extend_hashes(pages);
        }
        if seq.scores && self.rules.cache {
            found.reason = Reason::PromptLogprobs;
        } else if self.rules.cache {
            found = self.choose(seq, pages);
            if found.pending || self.running.iter().any(|other| other.will_capture(seq, found.hit, pages)) {
                return Err(Admission::Later);
            }
            found.reason = match seq.declined {
                Some(Tier::Host) if found.reason != Reason::Full => Reason::Host,
                Some(Tier::Disk) if found.reason != Reason::Full => Reason::Disk,
                _ => found.reason,
            };
        }
        let hit_node = found.hit.checked_sub(1).map(|i| found.nodes[i]);
        let hit_slot = hit_node.map_or(0, |id| self.cache.tree()[id].slot);
        let fresh_pages = if self.rules.has_pages { seq.tokens.len().div_ceil(GRID) - found.hit } else { 0 };
        if fresh_pages > self.cache.obtainable_pages(&found) {
            return Err(Admission::NoRoom);
        }

        // From here on nothing that the hit needs can be evicted, and matched nodes after the hit are evicted last.
        if self.rules.cache {
            seq.tip = hit_node.unwrap_or_else(|| self.cache.root(&seq.line().realm));
            seq.guard = seq.tip;
            self.cache.guard(seq.guard);
            self.cache.touch_match(&found);
        }
        seq.entered = found.hit;
        seq.done = found.hit * GRID;
        if self.rules.has_pages {
            for &id in &found.nodes[..found.hit] {
                let page = self.cache.tree()[id].page;
                self.cache.hold_page(page);
                Arc::make_mut(&mut seq.pages).push(page);
            }
        }
        self.cache.hold_slot(hit_slot);
        seq.cur = hit_slot;
        if !(self.take_slot(seq) && self.cache.take_pages(fresh_pages, Arc::make_mut(&mut seq.pages))) {
            self.give_up(seq);
            return Err(Admission::NoRoom);
        }
        if self.rules.cache {
            for &id in &found.nodes[found.hit..] {
                if !self.cache.tree().is_alive(id) {
                    break;
                }
                self.cache.guard_child(id);
                seq.guard = id;
            }
            self.plan_captures(seq, &found);
        }
        self.note(seq, &found);
        Ok(())
    }

    /// One slot to write: free, evicted, or the hit's snapshot itself if the tree and this sequence alone hold it.
    fn take_slot(&mut self, seq: &mut Sequence) -> bool {
        if !self.rules.has_slots {
            return true;
        }
        seq.spare = self.cache.take_slot();
        if seq.spare.is_some() {
            return true;
        }
        let alone = seq.cur != 0 && self.cache.slots().holders(seq.cur) == 2;
        if alone {
            self.cache.drop_state(seq.tip, Stateless::Evicted);
        }
        alone
    }

    /// Undoes an incomplete admission.
    fn give_up(&mut self, seq: &mut Sequence) {
        for slot in [std::mem::take(&mut seq.cur), seq.spare.take().unwrap_or(0)] {
            self.cache.release_slot(slot);
        }
        for &page in std::mem::take(&mut seq.pages).iter() {
            self.cache.release_page(page);
        }
        if seq.guard != NONE {
            self.cache.unguard(seq.guard);
        }
        (seq.tip, seq.guard, seq.entered, seq.done) = (NONE, NONE, 0, 0);
    }

    /// Chooses the states that the prefill leaves in the tree.
    fn plan_captures(&mut self, seq: &mut Sequence, found: &Match) {
        seq.enter_to = if self.rules.one_capture { 0 } else { usize::MAX };
        if !self.rules.has_slots {
            return;
        }
        let (hit, matched) = (found.hit * GRID, found.nodes.len() * GRID);
        let last = seq.matchable_pages() * GRID;
        let ends = seq.boundaries.iter().map(|&end| end / GRID * GRID);
        let mut positions: Vec<_> = ends.chain([matched, last]).filter(|p| (hit + 1..=last).contains(p)).collect();
        positions.sort_unstable();
        positions.dedup();
        let single = if matched > hit && matched < last { matched } else { last };
        seq.wanted = positions
            .into_iter()
            .map(|position| Wanted {
                position,
                branch: position == matched,
                take: !self.rules.one_capture || position == single,
            })
            .collect();
        if self.rules.captures_all {
            self.cache.cap_path(seq.tip, &mut seq.wanted, None);
        }
    }

    /// How many of the `skipped` tokens before `hit` came from host memory and from disk.
    fn lifted(&mut self, seq: &mut Sequence, hit: usize, skipped: usize) -> (usize, usize) {
        // What was converted came for nothing where exact values lead as far.
        let lifted = seq.lifted.take().filter(|_| seq.in_cold || seq.cold.is_none());
        let Some((tier, from, to)) = lifted else { return (0, 0) };
        let tokens = hit.min(to).saturating_sub(from).min(skipped);
        let tiers = &mut self.stats.tiers;
        match tier {
            Tier::Host => tiers.host_tokens += tokens as u64,
            Tier::Disk => tiers.disk_tokens += tokens as u64,
        }
        if tier == Tier::Host { (tokens, 0) } else { (0, tokens) }
    }

    /// Writes the report at the first admission. Later admissions only add pages that other requests computed meanwhile.
    fn note(&mut self, seq: &mut Sequence, found: &Match) {
        let (hit, matched) = (seq.done, found.nodes.len() * GRID);
        let skipped = hit.min(seq.prompt_len).saturating_sub(seq.computed);
        seq.computed = seq.computed.max(hit);
        self.stats.tokens_reused += skipped as u64;
        let (host, disk) = self.lifted(seq, hit, skipped);
        match &mut seq.report {
            None => {
                self.stats.reasons[found.reason as usize] += 1;
                seq.report = Some(Report { matched, reused: hit, reason: found.reason, host, disk, converted: false });
            }
            Some(report) => {
                report.reused += skipped;
                (report.host, report.disk) = (report.host + host, report.disk + disk);
                if skipped > 0 {
                    report.matched = report.matched.max(hit);
                }
            }
        }
        let converted = hit > 0 && !seq.line().realm.origin.is_empty();
        if let Some(report) = &mut seq.report {
            self.stats.tiers.converted += u64::from(converted && seq.in_cold && !report.converted);
            // Also if it continues from exact values later.
            report.converted |= converted;
        }
    }
}
