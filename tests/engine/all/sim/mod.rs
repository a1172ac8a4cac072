//! A device without a model: a slot holds (hash of the tokens, position), a page the tokens written into it. Running a
//! plan on it checks every rule of the state contract. The sampled token depends on the state and the keys that were
//! read, so a wrong state gives a wrong text.

mod mirror;

use std::collections::{HashMap, HashSet, VecDeque};

use mirror::Mirror;
use selkie_core::{
    engine::{Commit, Plan, PlanRow, Request, Scheduler, SeqId},
    state::{CacheEvent, GRID, Limits, Pool, Reason, Report, StateShape},
    step::{Row, Src, TokenRef},
};

const START: u64 = 0x9e37_79b9;

/// The state after one more token.
fn advance(state: u64, token: u32) -> u64 {
    (state ^ u64::from(token)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31).wrapping_add(0x52dc_e729)
}

/// The token that follows a state.
fn next_token(state: u64) -> u32 {
    (state >> 40) as u32 % 50 + 1
}

fn state_of(tokens: &[u32]) -> u64 {
    tokens.iter().fold(START, |s, &t| advance(s, t))
}

/// The completion of `prompt` alone and without a cache; it stops after a token that `stop` divides.
pub fn reference(prompt: &[u32], max_tokens: usize, stop: u32) -> Vec<u32> {
    let mut state = state_of(prompt);
    let mut out = Vec::new();
    while out.len() < max_tokens {
        let token = next_token(state);
        out.push(token);
        if token.is_multiple_of(stop) {
            break;
        }
        state = advance(state, token);
    }
    out
}

/// A request and how it ends.
#[derive(Clone, Debug)]
pub struct Job {
    pub request: Request,
    /// Stops after a token that this divides.
    pub stop: u32,
    /// Steps to wait after the previous arrival.
    pub gap: usize,
    /// Cancelled so many steps after its submission.
    pub cancel_after: Option<usize>,
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub completion: Vec<u32>,
    pub report: Option<Report>,
    pub cancelled: bool,
    /// Prompt positions computed, each counted once.
    pub prefilled: usize,
}

struct Live {
    job: usize,
    share: String,
    priority: i32,
    scores: bool,
    stop: u32,
    cancel_at: Option<usize>,
    /// All tokens as the device knows them: in a pipelined run more than the host knows.
    truth: Vec<u32>,
    prompt_len: usize,
    max_tokens: usize,
    lane: Option<u32>,
    done: usize,
    decoding: bool,
    /// How each prompt position was served first: computed (true) or reused (false).
    computed: Vec<Option<bool>>,
    /// Positions computed or reused at least once; a pre-emption does not reset it.
    reached: usize,
    /// Drafts are in flight, in its lane.
    trial: bool,
}

/// What a row sampled at each of its outputs, and the drafts in it.
struct Sampled {
    seq: SeqId,
    ids: Vec<u32>,
    drafts: Vec<u32>,
}

impl Sampled {
    /// Drafts that equal the id sampled in their place, before the first that does not.
    fn right(&self) -> usize {
        self.drafts.iter().zip(&self.ids).take_while(|(draft, id)| draft == id).count()
    }
}

/// Scheduler, device and driver.
pub struct Sim {
    pub scheduler: Scheduler,
    shape: StateShape,
    limits: Limits,
    /// `None`: poison.
    slots: Vec<Option<(u64, usize)>>,
    pages: Vec<[Option<u32>; GRID]>,
    lanes: Vec<Option<u32>>,
    live: HashMap<SeqId, Live>,
    pending: VecDeque<Vec<Sampled>>,
    /// Steps planned before the commits.
    depth: usize,
    pub preempted: bool,
    /// The tree is cleared before this step.
    pub clear_at: Option<usize>,
    /// Positions computed again after a pre-emption.
    recomputed: u64,
    /// The tree as a subscriber knows it.
    mirror: Mirror,
}

impl Sim {
    pub fn new(shape: StateShape, limits: Limits, depth: usize) -> Self {
        let mut scheduler = Scheduler::new(shape, limits.clone(), b"sim").unwrap();
        scheduler.subscribe(true);
        Self {
            slots: vec![None; scheduler.slots().capacity() + 1],
            pages: vec![[None; GRID]; scheduler.pages().capacity() + 1],
            lanes: vec![None; limits.max_batch],
            live: HashMap::new(),
            pending: VecDeque::new(),
            depth,
            preempted: false,
            clear_at: None,
            recomputed: 0,
            mirror: Mirror::default(),
            scheduler,
            shape,
            limits,
        }
    }

    /// Runs all jobs to their ends and returns an outcome for each.
    pub fn run(&mut self, jobs: &[Job]) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = vec![None; jobs.len()];
        let mut arrivals = Vec::new();
        let mut at = 0;
        for (i, job) in jobs.iter().enumerate() {
            at += job.gap;
            arrivals.push((at, i));
        }
        let mut arrivals = arrivals.into_iter().peekable();
        for now in 0.. {
            assert!(
                now < 100_000,
                "no end in sight: {} running, {} waiting",
                self.scheduler.running(),
                self.scheduler.waiting()
            );
            while let Some((_, i)) = arrivals.next_if(|&(at, _)| at <= now) {
                self.submit(&jobs[i], i, now);
            }
            let due: Vec<_> =
                self.live.iter().filter(|(_, l)| l.cancel_at.is_some_and(|at| at <= now)).map(|(&id, _)| id).collect();
            for id in due {
                self.finish(id, true, &mut outcomes);
            }
            if self.clear_at == Some(now) {
                self.clear_cache();
                self.poison();
            }
            let planned = self.step();
            while self.pending.len() > if planned { self.depth } else { 0 } {
                self.commit(&mut outcomes);
            }
            if !planned && arrivals.peek().is_none() && self.scheduler.running() + self.scheduler.waiting() == 0 {
                break;
            }
            let stuck = !planned && self.scheduler.running() + self.scheduler.waiting() > 0;
            if stuck {
                // Everything was committed above: the next plan must find work.
                assert!(
                    self.step(),
                    "deadlock: {} running, {} waiting",
                    self.scheduler.running(),
                    self.scheduler.waiting()
                );
            }
        }
        outcomes.into_iter().map(|o| o.expect("every request ends")).collect()
    }

    /// After everything ended: with an empty tree nothing is in use.
    pub fn assert_empty(&mut self) {
        self.clear_cache();
        assert_eq!(self.scheduler.slots().used(), 0, "leaked slots");
        assert_eq!(self.scheduler.pages().used(), 0, "leaked pages");
        assert_eq!((self.scheduler.cached_pages(), self.scheduler.cached_states()), (0, 0));
    }

    pub fn submit(&mut self, job: &Job, index: usize, now: usize) -> SeqId {
        let id = self.scheduler.submit(job.request.clone()).unwrap();
        let live = Live {
            job: index,
            share: job.request.share.clone(),
            priority: job.request.priority,
            scores: job.request.prompt_logprobs.is_some(),
            stop: job.stop,
            cancel_at: job.cancel_after.map(|n| now + n),
            truth: job.request.prompt.clone(),
            prompt_len: job.request.prompt.len(),
            max_tokens: job.request.max_tokens,
            lane: None,
            done: 0,
            decoding: false,
            computed: vec![None; job.request.prompt.len()],
            reached: 0,
            trial: false,
        };
        self.live.insert(id, live);
        id
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.mirror.take_log()
    }

    /// Forgets all prefixes.
    pub fn clear_cache(&mut self) {
        self.scheduler.clear_cache();
        self.audit();
    }

    fn finish(&mut self, id: SeqId, cancelled: bool, outcomes: &mut [Option<Outcome>]) {
        let live = self.live.remove(&id).unwrap();
        let completion = self.scheduler.tokens(id).unwrap()[live.prompt_len..].to_vec();
        let report = self.scheduler.end(id);
        self.audit();
        self.poison();
        let count = |how| live.computed.iter().filter(|&&c| c == Some(how)).count();
        let prefilled = count(true);
        assert_eq!(report.map_or(0, |r| r.reused), count(false));
        outcomes[live.job] = Some(Outcome { completion, report, cancelled, prefilled });
    }

    fn commit(&mut self, outcomes: &mut [Option<Outcome>]) {
        let Some(sampled) = self.pending.pop_front() else { return };
        for row in sampled {
            let (id, right) = (row.seq, row.right());
            let Some(live) = self.live.get_mut(&id) else {
                assert_eq!(self.scheduler.commit(id, &row.ids[..1]), None);
                continue;
            };
            let stop = row.ids[..=right].iter().position(|token| token.is_multiple_of(live.stop));
            if !row.drafts.is_empty() && std::mem::take(&mut live.trial) {
                live.reached = live.reached.max(live.done);
            }
            let commit = self.scheduler.commit(id, &row.ids[..=stop.unwrap_or(right)]);
            let commit = commit.expect("a live sequence takes its tokens");
            let stop = stop.is_some();
            self.audit();
            if stop || commit == Commit::Last {
                self.finish(id, false, outcomes);
            }
        }
        self.poison();
    }

    /// Plans and runs one step; false if there was nothing to plan.
    pub fn step(&mut self) -> bool {
        let before: Vec<u32> = counts(self.scheduler.slots());
        let before_pages: Vec<u32> = counts(self.scheduler.pages());
        let evictions = self.scheduler.stats().evictions;
        let plan = self.scheduler.plan();
        self.audit();
        if plan.rows.iter().all(|planned| self.takes_nothing(planned)) && plan.preempted.is_empty() {
            assert_eq!(self.scheduler.stats().evictions, evictions, "drafts evict something");
        }
        for id in &plan.preempted {
            self.preempted = true;
            let live = self.live.get_mut(id).unwrap();
            (live.lane, live.done, live.decoding, live.trial) = (None, 0, false, false);
        }
        for id in &plan.admitted {
            let PlanRow { row, .. } = plan.rows.iter().find(|r| r.seq == *id).expect("admitted without a row");
            let live = self.live.get_mut(id).unwrap();
            assert_eq!(live.lane.replace(row.lane), None);
            live.done = row.first_position as usize;
            live.reached = live.reached.max(live.done);
            assert!(live.done.is_multiple_of(GRID) && live.done < live.truth.len());
            for position in live.computed.iter_mut().take(live.done) {
                position.get_or_insert(false);
            }
        }
        if plan.preempted.is_empty() {
            self.check_single_holders(&plan, &before, &before_pages);
        }
        // One pre-emption may be for another share. More of them: pages were short, and a request is admitted only if the step
        // would be empty without it.
        if plan.preempted.len() > 1 && !plan.admitted.is_empty() {
            assert_eq!(plan.rows.len(), 1, "a step that pre-empted admits beside other rows");
        }
        self.check_plan(&plan);
        let sampled = self.execute(&plan);
        assert_eq!(self.scheduler.stats().tokens_recomputed, self.recomputed);
        self.poison();
        if !sampled.is_empty() {
            self.pending.push_back(sampled);
        }
        !plan.rows.is_empty()
    }

    /// Whether a row needs neither page nor slot, but for its drafts.
    fn takes_nothing(&self, planned: &PlanRow) -> bool {
        let start = planned.row.first_position as usize;
        self.live[&planned.seq].decoding && !start.is_multiple_of(GRID) && !(start + 1).is_multiple_of(GRID)
    }

    /// A slot or page that is written had at most one holder when the step was planned.
    fn check_single_holders(&self, plan: &Plan, slots: &[u32], pages: &[u32]) {
        for PlanRow { row, .. } in &plan.rows {
            for chunk in row.chunks.iter().filter(|c| c.dst != 0) {
                assert!(slots[chunk.dst as usize] <= 1, "slot {} is shared and written", chunk.dst);
            }
            for &page in row.page_table().iter().skip(row.first_position as usize / GRID) {
                assert!(pages[page as usize] <= 1, "page {page} is shared and written");
            }
        }
    }

    fn check_plan(&mut self, plan: &Plan) {
        let total: usize = plan.rows.iter().map(|r| r.row.tokens.len()).sum();
        assert!(total <= self.limits.step_tokens, "{total} tokens in a step");
        let outputs: usize = plan.rows.iter().map(|r| r.row.outputs.len()).sum();
        assert!(outputs <= self.limits.outputs(), "{outputs} outputs in a step");
        let mut widths = plan.rows.iter().map(|r| r.row.drafts() + 1).filter(|width| *width > 1);
        if let Some(width) = widths.next() {
            assert!([2, 4, 8].contains(&width) && width <= self.limits.drafts + 1, "{width} tokens with drafts");
            assert!(widths.all(|other| other == width), "rows with different numbers of drafts");
        }
        assert!(plan.rows.len() <= self.limits.max_batch);
        let mut lanes = HashSet::new();
        let mut written = HashMap::new();
        let (mut decodes_first, mut order) = (Vec::new(), HashMap::<_, Vec<_>>::new());
        for (i, PlanRow { seq, row }) in plan.rows.iter().enumerate() {
            let live = &self.live[seq];
            decodes_first.push(!live.decoding);
            order.entry((&live.share, live.priority)).or_default().push((!live.decoding, *seq));
            assert_eq!(live.lane, Some(row.lane));
            assert!((row.lane as usize) < self.limits.max_batch && lanes.insert(row.lane));
            for chunk in row.chunks.iter().filter(|c| c.dst != 0) {
                assert!(written.insert(chunk.dst, i).is_none(), "slot {} is written twice", chunk.dst);
            }
            self.check_cut(row, live);
        }
        assert!(decodes_first.is_sorted(), "a prefill before a decode row");
        assert!(order.values().all(|rows| rows.is_sorted()), "rows out of order: {order:?}");
        let mut table_writes = HashMap::new();
        for (i, PlanRow { row, .. }) in plan.rows.iter().enumerate() {
            let first = row.first_position as usize / GRID;
            for &page in row.page_table().iter().skip(first) {
                assert!(table_writes.insert(page, i).is_none(), "page {page} has two writers");
            }
        }
        for (i, PlanRow { row, .. }) in plan.rows.iter().enumerate() {
            for page in row.page_table() {
                assert!(table_writes.get(page).is_none_or(|&w| w == i), "page {page} is read and written in one step");
            }
            if let Some(PlanChunkSrc(slot)) = row_src(row) {
                assert!(written.get(&slot).is_none_or(|&w| w == i), "slot {slot} is read and written in one step");
                let same = row.chunks.iter().any(|c| c.dst == slot && slot != 0);
                assert!(!same || row.chunks.len() == 1, "in place with several chunks");
            }
        }
    }

    fn check_cut(&self, row: &Row, live: &Live) {
        let (start, len, drafts) = (row.first_position as usize, row.tokens.len(), row.drafts());
        let end = start + len;
        assert_eq!(start, live.done);
        assert!(!live.trial, "planned while its drafts are in flight");
        assert!(drafts < len && end - drafts <= live.truth.len());
        let sampled = if end == live.truth.len() { vec![len as u32 - 1] } else { vec![] };
        assert_eq!(row.outputs, if live.scores || drafts > 0 { (0..len as u32).collect() } else { sampled });
        if drafts > 0 {
            assert!(live.decoding && len == drafts + 1 && end - drafts == live.truth.len());
            assert!(live.truth.len() + len - live.prompt_len <= live.max_tokens, "drafts after the last token");
            assert!(row.chunks.iter().all(|chunk| chunk.len == 1 && chunk.dst != 0), "a draft whose state is lost");
        }
        if len >= GRID && end < live.truth.len() {
            assert!(end.is_multiple_of(GRID), "a share of {len} tokens ends at {end}");
        }
        let table = if self.shape.has_pages() { end.div_ceil(GRID) } else { 0 };
        let pages = row.page_table();
        assert_eq!(pages.len(), table);
        assert!(pages.iter().all(|&p| p != 0));
        assert_eq!(pages.iter().collect::<HashSet<_>>().len(), table);
        if !self.shape.has_slots() {
            assert!(row.chunks.is_empty());
            return;
        }
        let mut at = 0;
        for (i, chunk) in row.chunks.iter().enumerate() {
            assert!((1..=GRID as u32).contains(&chunk.len));
            let (first, last) = (start + at as usize, start + (at + chunk.len) as usize - 1);
            assert_eq!(first / GRID, last / GRID, "a chunk crosses the grid");
            assert_eq!(matches!(chunk.src, Src::Slot(_)), i == 0);
            at += chunk.len;
        }
        assert_eq!(at as usize, len);
        assert_ne!(row.chunks.last().unwrap().dst, 0, "the state is lost");
    }

    /// Runs the rows one after the other. [`check_plan`](Self::check_plan) has ensured that their order does not
    /// matter.
    fn execute(&mut self, plan: &Plan) -> Vec<Sampled> {
        let mut sampled = Vec::new();
        for PlanRow { seq, row } in &plan.rows {
            let start = row.first_position as usize;
            let end = start + row.tokens.len() - row.drafts();
            let live = self.live.get_mut(seq).unwrap();
            let ids: Vec<u32> = row
                .tokens
                .iter()
                .map(|t| match t {
                    TokenRef::Known(id) | TokenRef::Draft(id) => *id,
                    TokenRef::FromDevice(lane) => {
                        assert_eq!(*lane, row.lane, "a token of another sequence");
                        self.lanes[row.lane as usize].expect("a lane without a token")
                    }
                })
                .collect();
            assert_eq!(ids[..end - start], live.truth[start..end], "wrong tokens");
            if self.shape.has_pages() {
                let at = |p: usize| (row.page_table()[p / GRID] as usize, p % GRID);
                for (i, &id) in ids.iter().enumerate() {
                    let (page, offset) = at(start + i);
                    self.pages[page][offset] = Some(id);
                }
                for p in 0..end {
                    let (page, offset) = at(p);
                    assert_eq!(self.pages[page][offset], Some(live.truth[p]), "wrong key at {p}");
                }
            }
            if let Some(PlanChunkSrc(src)) = row_src(row) {
                let (mut state, position) =
                    if src == 0 { (START, 0) } else { self.slots[src as usize].expect("a poisoned slot is read") };
                assert_eq!(position, start, "slot {src} is at another position");
                assert_eq!(state, state_of(&live.truth[..start]), "slot {src} has another state");
                let mut at = start;
                for chunk in &row.chunks {
                    for &id in &ids[at - start..][..chunk.len as usize] {
                        state = advance(state, id);
                    }
                    at += chunk.len as usize;
                    if chunk.dst != 0 {
                        self.slots[chunk.dst as usize] = Some((state, at));
                    }
                }
            }
            for p in start..end.min(live.prompt_len) {
                live.computed[p].get_or_insert(true);
            }
            self.recomputed += (live.reached.min(end).max(start) - start) as u64;
            live.reached = live.reached.max(end);
            live.done = end;
            if end == live.truth.len() {
                live.scores = false;
                live.decoding = true;
                let mut state = state_of(&live.truth);
                let drafts = ids[end - start..].to_vec();
                let mut row_ids = vec![next_token(state)];
                for &draft in &drafts {
                    state = advance(state, draft);
                    row_ids.push(next_token(state));
                }
                self.lanes[row.lane as usize] = row_ids.last().copied();
                let of_row = Sampled { seq: *seq, ids: row_ids, drafts };
                live.trial = !of_row.drafts.is_empty();
                live.done += of_row.right();
                live.truth.extend(&of_row.ids[..=of_row.right()]);
                sampled.push(of_row);
            }
        }
        sampled
    }

    fn poison(&mut self) {
        for (id, slot) in self.slots.iter_mut().enumerate().skip(1) {
            if self.scheduler.slots().holders(id as u32) == 0 {
                *slot = None;
            }
        }
        for (id, page) in self.pages.iter_mut().enumerate().skip(1) {
            if self.scheduler.pages().holders(id as u32) == 0 {
                *page = [None; GRID];
            }
        }
    }

    fn audit(&mut self) {
        self.scheduler.audit().unwrap();
        self.mirror.follow(&mut self.scheduler, self.shape.has_slots());
    }
}

struct PlanChunkSrc(u32);

fn row_src(row: &Row) -> Option<PlanChunkSrc> {
    match row.chunks.first()?.src {
        Src::Slot(slot) => Some(PlanChunkSrc(slot)),
        Src::Carry => None,
    }
}

fn counts(pool: &Pool) -> Vec<u32> {
    (0..=pool.capacity() as u32).map(|id| pool.holders(id)).collect()
}

/// Properties of every finished request, in any run.
pub fn check_outcome(job: &Job, outcome: &Outcome, cache: bool, preempted: bool) {
    let prompt = job.request.prompt.len();
    let expected = reference(&job.request.prompt, job.request.max_tokens, job.stop);
    if outcome.cancelled {
        assert!(expected.starts_with(&outcome.completion));
    } else {
        assert_eq!(outcome.completion, expected);
    }
    let Some(report) = outcome.report else {
        assert!(outcome.cancelled);
        return;
    };
    let cap = (prompt - 1) / GRID * GRID;
    assert!(report.reused <= report.matched && report.matched <= cap, "{report:?} of {prompt}");
    if !outcome.cancelled {
        assert_eq!(report.reused + outcome.prefilled, prompt, "{report:?}");
    }
    assert_eq!(report.reason == Reason::Off, !cache);
    if !preempted {
        assert!(report.reused.is_multiple_of(GRID));
        match report.reason {
            Reason::Full => assert_eq!(report.reused, cap),
            Reason::NoState | Reason::Policy => assert!(report.matched > report.reused),
            Reason::FirstSight => assert!(report.matched == report.reused && report.reused < cap),
            Reason::Evicted | Reason::Host | Reason::Disk => assert!(report.reused < cap),
            Reason::Off | Reason::PromptLogprobs => assert_eq!((report.matched, report.reused), (0, 0)),
        }
    }
}
