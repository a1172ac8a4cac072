//! The state engine against a device that checks the contract: random requests, budgets and limits.
//!
//! `SELKIE_LONG=N cargo test --release -p selkie-core --test all state_engine` runs N cases instead, from a random seed
//! that is printed; `SELKIE_SEED=S` repeats one.

use std::cell::RefCell;

use crate::{
    guess::{Guesser, Habit},
    random::Random,
    sim::{Job, Sim, check_outcome, reference},
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use selkie_core::{
    engine::{Drafter, Request, Stats},
    state::{CacheEvent, CapturePolicy, GRID, Limits, Reason, StateShape, TokenCosts},
};

/// A random request: a prefix of an earlier conversation or of one of a few stems, and a tail of its own.
#[derive(Clone, Debug)]
struct Spec {
    stem: u32,
    shared: usize,
    tail: usize,
    /// Continues the request this many before it, completion included.
    chat: Option<usize>,
    namespace: bool,
    share: usize,
    priority: i32,
    scores: bool,
    max_tokens: usize,
    stop: u32,
    gap: usize,
    cancel_after: Option<usize>,
    boundaries: Vec<usize>,
    habit: Option<Habit>,
}

#[derive(Clone, Debug)]
struct Setup {
    slots: Option<usize>,
    /// Pages beyond those of the largest request; `None`: a model without attention.
    more_pages: Option<usize>,
    max_batch: usize,
    step_tokens: usize,
    depth: usize,
    cache: bool,
    one_per_prefill: bool,
    path_cap: usize,
    max_nodes: usize,
    clear_at: Option<usize>,
    drafts: usize,
    draft_cost: f32,
}

fn spec() -> impl Strategy<Value = Spec> {
    let text = (0..3u32, 0..330usize, 1..90usize, prop::option::weighted(0.4, 1..4usize), prop::bool::weighted(0.15));
    let ends = (1..90usize, prop_oneof![3 => Just(1_000_000u32), 1 => 2..40u32], 0..4usize);
    let rest = (
        prop::option::weighted(0.15, 0..30usize),
        prop::collection::vec(0..400usize, 0..4),
        (prop_oneof![2 => Just(0), 1 => 1..4usize], prop_oneof![3 => Just(0), 1 => -1..2], prop::bool::weighted(0.1)),
        prop::option::weighted(0.7, prop::sample::select(Habit::ALL.to_vec())),
    );
    (text, ends, rest).prop_map(|((stem, shared, tail, chat, namespace), (max_tokens, stop, gap), rest)| Spec {
        stem,
        shared,
        tail,
        chat,
        namespace,
        share: rest.2.0,
        priority: rest.2.1,
        scores: rest.2.2,
        max_tokens,
        stop,
        gap,
        cancel_after: rest.0,
        boundaries: rest.1,
        habit: rest.3,
    })
}

fn setup() -> impl Strategy<Value = Setup> {
    let pools = prop_oneof![
        4 => (1..12usize, 0..24usize).prop_map(|(s, p)| (Some(s), Some(p))),
        1 => (1..12usize).prop_map(|s| (Some(s), None)),
        1 => (0..24usize).prop_map(|p| (None, Some(p))),
    ];
    let steps = prop_oneof![1 => 1..8usize, 2 => 8..200usize, 1 => Just(64usize), 1 => Just(256usize), 1 => Just(2048)];
    let clear = prop::option::weighted(0.1, 0..60usize);
    let drafts = (prop::sample::select(vec![0, 1, 2, 3, 7]), prop::sample::select(vec![0.0, 0.0, 0.1, 0.6]));
    let flags = (prop::bool::weighted(0.9), prop::bool::weighted(0.3), 1..9usize, 1..60usize, clear, drafts);
    (pools, 1..6usize, steps, 0..3usize, flags).prop_map(
        |((slots, more_pages), max_batch, step_tokens, depth, flags)| {
            let (cache, one_per_prefill, path_cap, max_nodes, clear_at, drafts) = flags;
            Setup {
                slots,
                more_pages,
                max_batch,
                step_tokens,
                depth,
                cache,
                one_per_prefill,
                path_cap,
                max_nodes,
                clear_at,
                drafts: drafts.0,
                draft_cost: drafts.1,
            }
        },
    )
}

fn jobs(specs: &[Spec]) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let earlier =
            spec.chat.and_then(|back| jobs.get(i.checked_sub(back)?)).filter(|j| j.request.prompt.len() < 500);
        let mut prompt = match earlier {
            Some(job) => {
                let mut tokens = job.request.prompt.clone();
                tokens.extend(reference(&job.request.prompt, job.request.max_tokens, job.stop));
                tokens
            }
            None => {
                (0..spec.shared as u32).map(|p| 100 + (p * 7 + spec.stem * 1000 * u32::from(p >= 130)) % 5000).collect()
            }
        };
        prompt.extend((0..spec.tail as u32).map(|p| 50_000 + i as u32 * 100 + p));
        let drafter = spec.habit.map(|habit| guesser(habit, &prompt, spec, i));
        let request = Request {
            prompt,
            max_tokens: spec.max_tokens,
            namespace: if spec.namespace { "other".into() } else { String::new() },
            share: format!("share {}", spec.share),
            priority: spec.priority,
            prompt_logprobs: spec.scores.then_some(0),
            boundaries: spec.boundaries.clone(),
            drafter: drafter.map(|drafter| Box::new(drafter) as Box<dyn Drafter>),
            ..Request::default()
        };
        jobs.push(Job { request, stop: spec.stop, gap: spec.gap, cancel_after: spec.cancel_after });
    }
    jobs
}

/// A drafter that knows the answer.
fn guesser(habit: Habit, prompt: &[u32], spec: &Spec, seed: usize) -> Guesser {
    let text = [prompt, &reference(prompt, spec.max_tokens, spec.stop)].concat();
    Guesser { habit, text, exact: true, vocab: 100_000, random: Random(seed as u64) }
}

/// Runs a case and returns its counters.
fn run_case(specs: &[Spec], setup: &Setup) -> Stats {
    let jobs = jobs(specs);
    let largest =
        jobs.iter().map(|j| (j.request.prompt.len() + j.request.max_tokens - 1).div_ceil(GRID)).max().unwrap();
    let shape = StateShape {
        slot_bytes: u64::from(setup.slots.is_some()),
        page_bytes: u64::from(setup.more_pages.is_some()),
        context: 4096,
    };
    let limits = Limits {
        max_batch: setup.max_batch,
        step_tokens: setup.step_tokens,
        slots: setup.slots.unwrap_or(0),
        pages: setup.more_pages.map_or(0, |more| largest + more),
        prefix_cache: setup.cache,
        policy: if setup.one_per_prefill { CapturePolicy::OnePerPrefill } else { CapturePolicy::Default },
        path_cap: setup.path_cap,
        max_nodes: setup.max_nodes,
        drafts: setup.drafts,
        costs: TokenCosts::each(setup.draft_cost),
        head_cost: 0.0,
    };
    let mut sim = Sim::new(shape, limits, setup.depth);
    sim.clear_at = setup.clear_at;
    let outcomes = sim.run(&jobs);
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        check_outcome(job, outcome, setup.cache, sim.preempted);
    }
    let stats = sim.scheduler.stats();
    let prefilled: usize = outcomes.iter().map(|o| o.prefilled).sum();
    let reused: usize = outcomes.iter().filter_map(|o| o.report).map(|r| r.reused).sum();
    assert_eq!((stats.tokens_prefilled, stats.tokens_reused), (prefilled as u64, reused as u64));
    assert_eq!(stats.preemptions > 0, sim.preempted);
    if !sim.preempted {
        assert_eq!(stats.tokens_recomputed, 0);
    }
    for reason in Reason::ALL {
        let count = outcomes.iter().filter(|o| o.report.is_some_and(|r| r.reason == reason)).count();
        assert_eq!(stats.reason(reason), count as u64);
    }
    let removed = sim.take_events().iter().filter(|e| matches!(e, CacheEvent::Removed { .. })).count() as u64;
    if shape.has_pages() {
        assert_eq!(removed, stats.evictions.nodes);
    } else {
        // A node without a page is removed when its state is dropped, for any reason.
        assert!(removed >= stats.evictions.nodes);
    }
    sim.assert_empty();
    stats
}

#[test]
fn every_request_ends_and_no_rule_is_broken() {
    let cases = std::env::var("SELKIE_LONG").ok().map(|n| n.parse().expect("SELKIE_LONG is a number of cases"));
    let seed = std::env::var("SELKIE_SEED").ok().map(|s| s.parse().expect("SELKIE_SEED is a number"));
    let seed = seed.unwrap_or_else(|| match cases {
        Some(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        None => 4,
    });
    println!("SELKIE_SEED={seed}");
    let config = Config {
        cases: cases.unwrap_or(2000),
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 4000,
        ..Config::default()
    };
    let case = (prop::collection::vec(spec(), 1..12), setup());
    let total = RefCell::new(Stats::default());
    TestRunner::new(config)
        .run(&case, |(specs, setup)| {
            let stats = run_case(&specs, &setup);
            let mut total = total.borrow_mut();
            for (sum, n) in total.reasons.iter_mut().zip(stats.reasons) {
                *sum += n;
            }
            total.preemptions += stats.preemptions;
            total.tokens_recomputed += stats.tokens_recomputed;
            total.tokens_reused += stats.tokens_reused;
            total.drafts.rows += stats.drafts.rows;
            total.drafts.tokens += stats.drafts.tokens;
            for (sum, n) in total.drafts.accepted_at.iter_mut().zip(stats.drafts.accepted_at) {
                *sum += n;
            }
            total.captures += stats.captures;
            total.captures_skipped += stats.captures_skipped;
            total.evictions.slots += stats.evictions.slots;
            total.evictions.nodes += stats.evictions.nodes;
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    // The cases are useful only if they reach the events that they are for.
    let total = total.into_inner();
    println!("{total:?}");
    let reached =
        [total.preemptions, total.tokens_reused, total.captures_skipped, total.evictions.slots, total.evictions.nodes];
    // There are no lower tiers here.
    let reasons =
        Reason::ALL.into_iter().filter(|r| !matches!(r, Reason::Host | Reason::Disk)).map(|r| total.reason(r));
    assert!(reached.iter().copied().chain(reasons).chain(total.drafts.accepted_at).all(|n| n > 50), "{total:?}");
}
