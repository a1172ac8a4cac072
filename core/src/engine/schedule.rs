//! The scheduler: which tokens of which sequences the next step computes.
//!
//! Decode rows come first, then prefill, of the first request of each share before that of the second. A request is admitted,
//! and matched, only in the step that gives it its first token. Within a share the order is priority, then arrival; the
//! victim of a pre-emption is the last running one of the share with the most. Between shares `fair` decides.
//!
//! Decisions where the contract leaves freedom:
//! * A request waits for the next step if its prefix is being computed in this one, or if a running prefill will soon leave a
//!   deeper state for it; later requests of its share wait too. Equal prompts that arrive together therefore compute their common part
//!   once, with every step budget and policy, and however much of their path is left.
//! * Prompt pages enter the tree when their step is planned, but other rows of that step do not use them; generated pages
//!   enter when the host has read their ids. A plan must therefore run.
//! * A step in which a sequence was pre-empted for lack of pages admits no request, unless it would be empty.
//! * Slots that occur in a step count as held until the step is planned, and a page given up for the tree's copy is
//!   freed then: a step never uses a slot or a page twice.
//! * Drafts come last and take what is free: tokens of the step, slots and pages that nobody else wants. A sequence with drafts in
//!   flight is planned again after their commit.
//! * A sequence that was pre-empted before the host read its sampled token is admitted again only after that token's commit.
//! * Forks go through the tree: a request that shares a prefix with another holds its state and pages from the deepest
//!   grid point that has a state, and computes the tail (< 64 tokens with a state at the last grid point) itself.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    fair::Shares,
    gauge::Gauge,
    plan::{Plan, SeqId},
    row::{Step, share_end},
    sequence::{Request, Rules, Sequence},
    stats::Stats,
};
use crate::{
    Error, Result,
    state::{
        Cache, CacheEvent, CapturePolicy, GRID, Limits, Pool, PrefixHash, Realm, Report, StateShape,
        cache::Evicted,
        prefix::{NONE, Tree},
    },
    units::thousands,
};

/// Most positions of a prompt in a step whose logits are wanted: they go to the host.
const MOST_SCORES: usize = 256;

/// What a committed token means for its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The sequence may continue.
    More,
    /// It was the last one that `max_tokens` allows. The caller ends the sequence.
    Last,
}

/// Requests, waiting and running, over the state cache of one model. It handles numbers only, no tensors.
///
/// The caller's loop: [`plan`](Self::plan) a step, run it, read the sampled ids, [`commit`](Self::commit) those of each row, and
/// [`end`](Self::end) the sequences that stop. A pipelined caller plans one or more steps before the commits; tokens
/// that the host has not read are then [`FromDevice`](crate::step::TokenRef::FromDevice), and a step that ran past a
/// stop is not sampled from: `commit` ignores sequences that are gone.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) shape: StateShape,
    pub(super) limits: Limits,
    pub(super) rules: Rules,
    pub(super) cache: Cache,
    pub(super) stats: Stats,
    /// In order of arrival.
    pub(super) running: Vec<Sequence>,
    pub(super) queue: BTreeMap<SeqId, Sequence>,
    /// The order of the queue.
    pub(super) shares: Shares,
    /// The share that found no room in the last step, if another one has to give it some.
    pub(super) refused: Option<Arc<str>>,
    pub(super) free_lanes: Vec<u32>,
    /// Outputs that the step may have besides one of each running sequence: a step has at most as many as there are lanes.
    pub(super) outputs_left: usize,
    pub(super) step: u64,
    /// Requests that wait for values of a lower tier.
    pub(super) loading: Vec<SeqId>,
    /// What lower tiers do with states, if they convert them.
    pub(super) cold: Option<String>,
    /// How drafts fare, whatever the request.
    pub(super) habit: Gauge,
    next_id: u64,
    held: Vec<u32>,
    swapped: Vec<u32>,
}

/// Checks that a request of `prompt` tokens and up to `new` more can ever run, with `pages` KV pages in all.
///
/// # Errors
/// [`Error::BadRequest`] if one of the two is 0; [`Error::TooLong`] if they do not fit into the context or the pages, with
/// both numbers.
pub fn check_lengths(shape: &StateShape, pages: usize, prompt: usize, new: usize) -> Result<()> {
    if prompt == 0 || new == 0 {
        let what = if prompt == 0 { "the prompt is empty" } else { "max_tokens must be at least 1" };
        return Err(Error::BadRequest(what.into()));
    }
    let total = prompt.saturating_add(new);
    let [p, n, t] = [prompt, new, total].map(thousands);
    let asked = format!("{p} prompt tokens and up to {n} new ones are {t} tokens");
    let context = shape.context;
    if total > context {
        let why = format!(
            "{asked}, the context holds {} (key `max_position_embeddings`, or less by the option for the context)",
            thousands(context)
        );
        return Err(Error::TooLong { why, tokens: Some((prompt, new, context)) });
    }
    // The last token is sampled and never computed.
    let needed = (total - 1).div_ceil(GRID);
    if shape.has_pages() && needed > pages {
        let why = format!("{asked} and need {} KV pages, there are {}", thousands(needed), thousands(pages));
        return Err(Error::TooLong { why, tokens: Some((prompt, new, context.min(pages * GRID))) });
    }
    Ok(())
}

impl Scheduler {
    /// An idle scheduler with empty pools. `fingerprint` names the model and everything else its states depend on; equal
    /// fingerprints give equal page hashes in every process.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if a limit is 0 that must be at least 1.
    pub fn new(shape: StateShape, limits: Limits, fingerprint: &[u8]) -> Result<Self> {
        let needs = [
            (limits.max_batch, "max batch"),
            (limits.step_tokens, "step tokens"),
            (if shape.has_slots() { limits.slots } else { 1 }, "number of slots"),
            (if shape.has_pages() { limits.pages } else { 1 }, "number of KV pages"),
        ];
        if let Some((_, name)) = needs.iter().find(|(n, _)| *n == 0) {
            return Err(Error::BadRequest(format!("the {name} must be at least 1")));
        }
        let (cache_on, has_slots) = (limits.prefix_cache, shape.has_slots());
        let rules = Rules {
            cache: cache_on,
            captures_all: has_slots && limits.policy == CapturePolicy::Default,
            one_capture: has_slots && limits.policy == CapturePolicy::OnePerPrefill,
            has_slots,
            has_pages: shape.has_pages(),
        };
        Ok(Self {
            shape,
            rules,
            cache: Cache::new(&shape, &limits, fingerprint),
            stats: Stats::default(),
            running: Vec::new(),
            queue: BTreeMap::new(),
            shares: Shares::default(),
            refused: None,
            outputs_left: 0,
            free_lanes: (0..limits.max_batch as u32).rev().collect(),
            step: 0,
            loading: Vec::new(),
            cold: None,
            habit: Gauge::default(),
            next_id: 0,
            held: Vec::new(),
            swapped: Vec::new(),
            limits,
        })
    }

    /// Collects what the tree loses for lack of room, for lower tiers. `cold` says what they do with states, if they convert them.
    pub(super) fn keep_evicted(&mut self, identity: Vec<u8>, cold: Option<String>) {
        self.cache.keep_evicted(identity);
        self.cold = cold;
    }

    /// What the tree has lost since the last call.
    pub(super) fn take_evicted(&mut self) -> Vec<Evicted> {
        self.cache.take_evicted()
    }

    /// Everything that the tree has, for lower tiers.
    pub(super) fn contents(&self) -> Vec<Evicted> {
        self.cache.contents()
    }

    /// The name of the empty prefix in `realm`, from which those of its pages are chained.
    pub fn root(&self, realm: &Realm) -> PrefixHash {
        self.cache.root_hash(realm)
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt and for `max_tokens` 0; [`Error::TooLong`] for a request that can never fit
    /// into the context or the pages, with both numbers.
    pub fn submit(&mut self, request: Request) -> Result<SeqId> {
        check_lengths(&self.shape, self.limits.pages, request.prompt.len(), request.max_tokens)?;
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let seq = Sequence::new(id, request, &self.cache, self.cold.as_deref());
        self.enqueue(seq);
        Ok(id)
    }

    pub(super) fn enqueue(&mut self, seq: Sequence) {
        self.shares.add(&seq);
        self.queue.insert(seq.id, seq);
    }

    pub(super) fn dequeue(&mut self, id: SeqId) -> Option<Sequence> {
        let seq = self.queue.remove(&id)?;
        self.shares.remove(&seq);
        Some(seq)
    }

    /// The place of a running sequence.
    pub(super) fn index(&self, id: SeqId) -> Option<usize> {
        self.running.binary_search_by_key(&id, |s| s.id).ok()
    }

    /// Plans the next step. An empty plan means that there is nothing to do until a commit or a submission.
    pub fn plan(&mut self) -> Plan {
        self.step += 1;
        let mut plan = Plan::default();
        let mut budget = self.limits.step_tokens;
        let first = self.make_way(&mut plan);
        let before = plan.preempted.len();
        self.plan_decode(&mut plan, &mut budget);
        self.outputs_left = self.limits.max_batch - self.running.len();
        let admits = plan.preempted.len() == before;
        let decodes = plan.rows.len();
        self.plan_prompts(&mut plan, budget, first, admits);
        self.plan_drafts(&mut plan, decodes);
        for slot in self.held.drain(..) {
            self.cache.release_slot(slot);
        }
        for page in self.swapped.drain(..) {
            self.cache.release_page(page);
        }
        self.stats.steps += u64::from(!plan.rows.is_empty());
        plan
    }

    /// Commits the tokens of a row that the host has read, in the order of the steps: the one sampled first, and as many more as
    /// drafts before them were right and the text goes on. `None`: the sequence is gone, the step ran past its stop.
    ///
    /// # Panics
    /// Without a token, and with more than the row could give.
    pub fn commit(&mut self, id: SeqId, tokens: &[u32]) -> Option<Commit> {
        let running = self.index(id);
        let seq = match running {
            Some(i) => &mut self.running[i],
            None => self.queue.get_mut(&id)?,
        };
        seq.outstanding = seq.outstanding.checked_sub(1)?;
        seq.tokens.extend_from_slice(tokens);
        self.stats.tokens_generated += tokens.len() as u64;
        let accepted = tokens.len().checked_sub(1).expect("a row gives a token");
        self.stats.drafts.accepted_at[..accepted].iter_mut().for_each(|n| *n += 1);
        if running.is_some() {
            if seq.outstanding == 0 {
                if let Some(trial) = &seq.trial {
                    self.habit.note(trial.drafts, accepted);
                }
                seq.accept(accepted, &mut self.cache, self.rules, &mut self.stats);
            }
            seq.settle(&mut self.cache, self.rules, self.step, &mut self.swapped);
            for page in self.swapped.drain(..) {
                self.cache.release_page(page);
            }
        }
        Some(if seq.tokens.len() - seq.prompt_len == seq.max_tokens { Commit::Last } else { Commit::More })
    }

    /// Ends a sequence, waiting or running, because it stopped or was cancelled. Allowed at any moment between plans.
    /// Returns its report; `None` if it was never admitted or does not exist.
    pub fn end(&mut self, id: SeqId) -> Option<Report> {
        if let Some(i) = self.index(id) {
            let mut seq = self.running.remove(i);
            self.release(&mut seq);
            return seq.report;
        }
        self.dequeue(id)?.report
    }

    /// The match of a request, once it was admitted.
    pub fn report(&self, id: SeqId) -> Option<Report> {
        self.sequence(id)?.report
    }

    /// The prompt and the committed tokens of a request that has not ended.
    pub fn tokens(&self, id: SeqId) -> Option<&[u32]> {
        self.sequence(id).map(|s| s.tokens.as_slice())
    }

    /// What takes the places of the next ids that a request samples.
    pub fn forced(&self, id: SeqId) -> &[u32] {
        self.sequence(id).and_then(|s| s.forced.get(s.tokens.len() - s.prompt_len..)).unwrap_or_default()
    }

    /// Sequences with a lane.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences in the queue.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Sequences of shares that were passed over in the last step, because their next one waits for a prefix.
    pub fn deferred(&self) -> usize {
        self.shares.deferred()
    }

    /// Shares with sequences in the queue.
    pub fn waiting_shares(&self) -> usize {
        self.shares.waiting()
    }

    /// Counters so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        stats.evictions = self.cache.evictions();
        stats.peak_slots = self.cache.slots().peak();
        stats.peak_pages = self.cache.pages().peak();
        stats
    }

    /// States held by the tree.
    pub fn cached_states(&self) -> usize {
        self.cache.tree().with_state()
    }

    /// Pages (nodes) in the tree.
    pub fn cached_pages(&self) -> usize {
        self.cache.tree().len()
    }

    /// The prefix tree.
    pub fn tree(&self) -> &Tree {
        self.cache.tree()
    }

    /// The slots and their holders.
    pub fn slots(&self) -> &Pool {
        self.cache.slots()
    }

    /// The pages and their holders.
    pub fn pages(&self) -> &Pool {
        self.cache.pages()
    }

    /// Forgets all prefixes. Running sequences continue and enter theirs again.
    pub fn clear_cache(&mut self) {
        self.cache.clear();
        for seq in &mut self.running {
            (seq.entered, seq.decode_state) = (0, None);
            if self.rules.cache {
                seq.tip = self.cache.root(&seq.line().realm);
                seq.guard = seq.tip;
                self.cache.guard(seq.guard);
            }
        }
    }

    /// Starts or stops matching and entering prefixes. Nothing may be queued or running.
    pub(super) fn set_prefix_cache(&mut self, on: bool) {
        assert!(
            self.running.is_empty() && self.queue.is_empty(),
            "the prefix cache is switched while requests are queued or running"
        );
        self.rules.cache = on;
    }

    /// Changes the tokens of a step, at least 1.
    pub(super) fn set_step_tokens(&mut self, tokens: usize) {
        self.limits.step_tokens = tokens;
    }

    /// Starts to collect the events of the tree, or stops.
    pub fn subscribe(&mut self, on: bool) {
        self.cache.subscribe(on);
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.cache.take_events()
    }

    /// Recounts every holder, child and guard, between plans; for tests. The cost grows with the size of the cache.
    pub fn audit(&self) -> Result<(), String> {
        let (mut slots, mut pages, mut guards) = (Vec::new(), Vec::new(), Vec::new());
        for seq in &self.running {
            slots.extend([seq.cur, seq.spare.unwrap_or(0)]);
            slots.extend(seq.trial.iter().flat_map(|trial| &trial.slots));
            slots.extend(seq.taken.iter().map(|t| t.slot));
            pages.extend(seq.pages.iter());
            guards.extend([seq.guard].iter().filter(|&&g| g != NONE));
            self.audit_pages(seq)?;
        }
        let holds = |s: &&Sequence| s.cur != 0 || s.trial.is_some() || s.spare.is_some() || !s.pages.is_empty();
        if let Some(seq) = self.queue.values().find(holds) {
            return Err(format!("{:?} waits and holds something", seq.id));
        }
        self.cache.audit(&slots, &pages, &guards)
    }

    /// No path is stored twice: where the tree has a page, the sequence uses that one.
    fn audit_pages(&self, seq: &Sequence) -> Result<(), String> {
        let (tree, mut at) = (self.cache.tree(), seq.tip);
        while at != NONE && tree[at].depth > 0 && self.rules.has_pages {
            let depth = tree[at].depth as usize;
            if seq.pages[depth - 1] != tree[at].page {
                return Err(format!("{:?} has its own page {depth}", seq.id));
            }
            at = tree[at].parent;
        }
        Ok(())
    }

    fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        match self.index(id) {
            Some(i) => Some(&self.running[i]),
            None => self.queue.get(&id),
        }
    }

    fn plan_decode(&mut self, plan: &mut Plan, budget: &mut usize) {
        let mut order = self.precedence();
        let mut at = 0;
        while at < order.len() && *budget > 0 {
            let id = order[at].1;
            let seq = &self.running[self.index(id).expect("it runs")];
            let has_token = seq.done < seq.tokens.len() + seq.outstanding;
            if seq.decoding && has_token && seq.trial.is_none() && seq.outputs() < seq.max_tokens {
                // False: the sequence itself was pre-empted, and it was the last one.
                if !self.make_page(id, &mut order, plan) {
                    return;
                }
                let i = self.index(id).expect("it runs");
                let end = self.running[i].done + 1;
                self.plan_row(i, end, plan);
                *budget -= 1;
            }
            at += 1;
        }
    }

    /// Gives the sequence the page of its next position, pre-empting from the end of `order` if no page is free. False if the
    /// sequence itself was the last.
    fn make_page(&mut self, id: SeqId, order: &mut Vec<(usize, SeqId)>, plan: &mut Plan) -> bool {
        loop {
            let i = self.index(id).expect("the asker is running");
            let seq = &mut self.running[i];
            if !self.rules.has_pages || seq.done < seq.pages.len() * GRID {
                return true;
            }
            if let Some(page) = self.cache.take_page() {
                Arc::make_mut(&mut seq.pages).push(page);
                return true;
            }
            let (_, victim) = order.pop().expect("the asker is in the order");
            self.preempt(victim, plan);
            if victim == id {
                return false;
            }
        }
    }

    /// Puts a running sequence back into the queue.
    pub(super) fn preempt(&mut self, id: SeqId, plan: &mut Plan) {
        let i = self.index(id).expect("a victim runs");
        let mut victim = self.running.remove(i);
        self.release(&mut victim);
        self.stats.preemptions += 1;
        plan.preempted.push(id);
        self.enqueue(victim);
    }

    /// Plans the next share of a prefill and returns its tokens.
    pub(super) fn plan_prefill(&mut self, i: usize, budget: usize, plan: &mut Plan) -> usize {
        let seq = &self.running[i];
        let (scores, start) = (seq.scores, seq.done);
        let budget = if scores { budget.min(self.outputs_left + 1).min(MOST_SCORES) } else { budget };
        let end = share_end(start, seq.tokens.len(), budget);
        self.plan_row(i, end, plan);
        let tokens = self.running[i].done - start;
        if scores {
            self.outputs_left -= tokens - 1;
        }
        tokens
    }

    fn plan_row(&mut self, i: usize, end: usize, plan: &mut Plan) {
        let mut step = Step {
            cache: &mut self.cache,
            stats: &mut self.stats,
            rules: self.rules,
            number: self.step,
            held: &mut self.held,
            swapped: &mut self.swapped,
        };
        plan.rows.push(step.row(&mut self.running[i], end));
    }

    fn release(&mut self, seq: &mut Sequence) {
        seq.release(&mut self.cache, self.rules, self.step);
        self.free_lanes.push(seq.lane);
    }
}
