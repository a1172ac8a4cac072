//! Fairness between shares, counted in steps and tokens on a scheduler without a device.

use std::collections::HashMap;

use selkie_core::{
    engine::{Commit, Plan, Request, Scheduler, SeqId},
    state::{Limits, StateShape},
};

const STEP: usize = 512;

/// A scheduler whose steps are done at once; every sampled token is 7.
struct Run {
    scheduler: Scheduler,
    /// Number of steps, and their tokens.
    steps: usize,
    tokens: usize,
    /// Prompt tokens of each share.
    prompts: HashMap<String, usize>,
    /// The share of a request, and the tokens of its prompt.
    shares: HashMap<SeqId, (String, usize)>,
    /// In the order of their first tokens.
    begun: Vec<SeqId>,
    next_text: u32,
}

impl Run {
    fn new(slots: usize, pages: usize, max_batch: usize, step_tokens: usize) -> Self {
        let shape = StateShape { slot_bytes: u64::from(slots > 0), page_bytes: u64::from(pages > 0), context: 1 << 16 };
        let limits = Limits { max_batch, step_tokens, slots, pages, ..Limits::default() };
        Self {
            scheduler: Scheduler::new(shape, limits, b"fair").unwrap(),
            steps: 0,
            tokens: 0,
            prompts: HashMap::new(),
            shares: HashMap::new(),
            begun: Vec::new(),
            next_text: 1,
        }
    }

    /// A prompt that begins like no other.
    fn ask(&mut self, share: &str, prompt: usize, max_tokens: usize, priority: i32) -> SeqId {
        self.next_text += 1;
        let (length, prompt) = (prompt, vec![self.next_text; prompt]);
        let (share, namespace) = (share.to_owned(), share.to_owned());
        let request = Request { prompt, max_tokens, share: share.clone(), namespace, priority, ..Request::default() };
        let id = self.scheduler.submit(request).unwrap();
        self.shares.insert(id, (share, length));
        id
    }

    fn ask_many(&mut self, share: &str, count: usize, prompt: usize, max_tokens: usize) {
        for _ in 0..count {
            self.ask(share, prompt, max_tokens, 0);
        }
    }

    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step();
        }
    }

    fn step(&mut self) -> Plan {
        let plan = self.scheduler.plan();
        self.steps += 1;
        for row in &plan.rows {
            let tokens = row.row.tokens.len();
            self.tokens += tokens;
            let (share, prompt) = &self.shares[&row.seq];
            let left = prompt.saturating_sub(row.row.first_position as usize);
            *self.prompts.entry(share.clone()).or_default() += tokens.min(left);
            for _ in &row.row.outputs {
                if !self.begun.contains(&row.seq) {
                    self.begun.push(row.seq);
                }
                if self.scheduler.commit(row.seq, &[7]) == Some(Commit::Last) {
                    self.scheduler.end(row.seq);
                }
            }
        }
        self.scheduler.audit().unwrap();
        plan
    }

    fn until_begun(&mut self, id: SeqId) {
        while !self.begun.contains(&id) {
            self.step();
            assert!(self.steps < 100_000, "it never begins");
        }
    }

    fn prompt_tokens(&self, share: &str) -> usize {
        self.prompts.get(share).copied().unwrap_or(0)
    }
}

/// Enough for everything, few pages, few slots: what the heavy share exhausts first.
const POOLS: [(&str, usize, usize); 4] =
    [("lanes", 64, 4096), ("pages", 64, 4 * 131), ("slots", 6, 4096), ("recurrent", 6, 0)];

#[test]
fn a_short_request_beside_a_thousand_long_ones() {
    for (what, slots, pages) in POOLS {
        for answer in [1, 40, 2_000] {
            // While prompts are computed, while some answers run, while all lanes decode.
            for moment in [0, 1, 3, 16, 17, 40, 129, 300] {
                let mut run = Run::new(slots, pages, 8, STEP);
                let answer = if pages == 4 * 131 { answer.min(150) } else { answer };
                run.ask_many("heavy", 1000, 8_000, answer);
                run.steps(moment);
                let begin = (run.steps, run.tokens);
                let id = run.ask("light", 100, 8, 0);
                // The step that runs when it arrives.
                let in_flight = if moment > 0 { STEP } else { 0 };
                run.until_begun(id);
                let (steps, tokens) = (run.steps - begin.0, run.tokens - begin.1);
                let at = format!("{what}, answers of {answer}, at step {moment}: {steps} steps, {tokens} tokens");
                // Alone it is one step of 100 tokens.
                assert!(steps <= 3 + 1 - in_flight.min(1), "{at}");
                assert!(in_flight + tokens <= 3 * 100 + STEP, "{at}");
            }
        }
    }
}

#[test]
fn steps_are_divided_equally() {
    for (step_tokens, shares) in [(STEP, 2), (STEP, 3), (64, 2), (100, 3), (7, 2), (1, 3)] {
        let mut run = Run::new(64, 4096, 8, step_tokens);
        let names: Vec<String> = (0..shares).map(|i| format!("share {i}")).collect();
        // The first one has many more requests, and shorter ones.
        run.ask_many(&names[0], 200, 700, 3);
        for name in &names[1..] {
            run.ask_many(name, 20, 5_000, 3);
        }
        for _ in 0..40_000 / step_tokens.max(4) {
            run.step();
            let all = names.iter().map(|name| run.prompt_tokens(name));
            let (least, most) = (all.clone().min().unwrap(), all.max().unwrap());
            assert!(most - least <= step_tokens + 64, "{step_tokens}, {shares}: {:?}", run.prompts);
        }
        assert!(run.prompt_tokens(&names[1]) > 1_000);
    }
}

#[test]
fn a_share_that_comes_back_has_no_credit() {
    let mut run = Run::new(64, 4096, 8, STEP);
    run.ask_many("steady", 50, 8_000, 1);
    run.steps(200);
    run.ask_many("late", 50, 8_000, 1);
    let before = run.prompt_tokens("steady");
    run.steps(100);
    let (steady, late) = (run.prompt_tokens("steady") - before, run.prompt_tokens("late"));
    assert!(steady.abs_diff(late) <= STEP, "{steady} and {late}");
    assert!(steady + late >= 99 * STEP, "steps are full");
}

#[test]
fn tiny_requests_without_end_starve_nobody() {
    // A step has a single token, and a new request of one token comes with each of them.
    let mut run = Run::new(64, 4096, 8, 1);
    let long = run.ask("long", 300, 1, 0);
    for _ in 0..2_000 {
        run.ask("tiny", 1, 1, 0);
        run.step();
    }
    assert!(run.begun.contains(&long), "{:?}", run.prompts);
}

#[test]
fn lanes_are_divided_and_given_back() {
    let mut run = Run::new(64, 4096, 8, STEP);
    run.ask_many("first", 40, 64, 400);
    run.steps(4);
    run.ask_many("second", 40, 64, 400);
    run.steps(20);
    let lanes = |run: &mut Run| {
        let plan = run.step();
        plan.rows.iter().filter(|row| run.shares[&row.seq].0 == "first").count()
    };
    assert_eq!((lanes(&mut run), run.scheduler.running()), (4, 8));
    // Each exchange makes the shares more equal, so there are no more than these.
    assert_eq!(run.scheduler.stats().preemptions, 4);
    while run.scheduler.running() + run.scheduler.waiting() > 0 {
        run.step();
        assert!(run.steps < 100_000);
    }
    assert_eq!(run.begun.len(), 80);
}

#[test]
fn a_share_that_waits_for_its_own_prefix_holds_nobody_up() {
    let mut run = Run::new(64, 4096, 8, STEP);
    let one = run.ask("a", 100, 1, 0);
    run.next_text -= 1;
    let same = run.ask("a", 100, 1, 0);
    let other = run.ask("b", 100, 1, 0);
    run.step();
    assert_eq!(run.begun, [one, other]);
    assert_eq!((run.scheduler.deferred(), run.scheduler.waiting_shares()), (1, 1));
    run.until_begun(same);
    assert_eq!((run.scheduler.deferred(), run.scheduler.waiting_shares()), (0, 0));
}

#[test]
fn priority_counts_within_a_share() {
    let mut run = Run::new(64, 4096, 1, STEP);
    let first = run.ask("a", 100, 1, 0);
    let (late, soon) = (run.ask("a", 100, 1, 5), run.ask("a", 100, 1, -5));
    let (other, equal) = (run.ask("b", 100, 1, 9), run.ask("a", 100, 1, 0));
    run.steps(20);
    assert_eq!(run.begun[0], soon);
    let place = |id: SeqId| run.begun.iter().position(|other| *other == id).unwrap();
    assert!(place(soon) < place(first) && place(first) < place(equal) && place(equal) < place(late));
    assert!(place(other) < place(first), "a low priority counts against no other share: {:?}", run.begun);
}
