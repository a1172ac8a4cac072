//! How much of a prompt is reused, in common scenarios, on the model-free device.

use crate::sim::{Job, Outcome, Sim, check_outcome, reference};
use selkie_core::{
    engine::Request,
    state::{CacheEvent, CapturePolicy, GRID, Limits, PrefixHash, Reason, StateShape, cache::Evictions},
};

const HYBRID: (bool, bool) = (true, true);
const RECURRENT: (bool, bool) = (true, false);
const ATTENTION: (bool, bool) = (false, true);

fn limits() -> Limits {
    Limits { max_batch: 8, step_tokens: 512, slots: 64, pages: 512, ..Limits::default() }
}

fn sim((slots, pages): (bool, bool), limits: Limits) -> Sim {
    let shape = StateShape { slot_bytes: u64::from(slots), page_bytes: u64::from(pages), context: 1 << 16 };
    Sim::new(shape, limits, 1)
}

fn job(prompt: Vec<u32>, max_tokens: usize) -> Job {
    let request = Request { prompt, max_tokens, ..Request::default() };
    Job { request, stop: 1_000_000, gap: 0, cancel_after: None }
}

/// `count` tokens that no other text has.
fn text(of: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| of * 10_000 + i).collect()
}

/// One job after the other.
fn one_by_one(sim: &mut Sim, jobs: &[Job]) -> Vec<Outcome> {
    jobs.iter().map(|job| sim.run(std::slice::from_ref(job)).remove(0)).collect()
}

fn reused(sim: &mut Sim, jobs: &[Job]) -> Vec<usize> {
    let outcomes = one_by_one(sim, jobs);
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        check_outcome(job, outcome, true, false);
    }
    outcomes.iter().map(|o| o.report.unwrap().reused).collect()
}

/// Each digit 256 tokens, five template tokens before and four after.
fn scenario() -> Vec<Job> {
    let digits: [&[u32]; 8] = [&[1, 2], &[1, 3], &[1, 4], &[1, 2, 5], &[1, 4, 5], &[1, 3, 5], &[1, 3], &[1, 3]];
    let prompt = |digits: &[u32]| {
        let body = digits.iter().flat_map(|&d| text(d, 256));
        [90, 91, 92, 93, 94].into_iter().chain(body).chain([95, 96, 97, 98]).collect()
    };
    digits.iter().map(|d| job(prompt(d), 16)).collect()
}

#[test]
fn reference_scenario() {
    let default = vec![0, 0, 256, 512, 512, 512, 512, 512];
    let one = vec![0, 0, 256, 512, 512, 256, 256, 512];
    let attention = vec![0, 256, 256, 512, 512, 512, 512, 512];
    for step_tokens in [1, 50, 64, 200, 512, 4096] {
        for (policy, recurrent) in [(CapturePolicy::Default, &default), (CapturePolicy::OnePerPrefill, &one)] {
            for (kind, expected, states) in
                [(HYBRID, recurrent, 7), (RECURRENT, recurrent, 7), (ATTENTION, &attention, 0)]
            {
                let mut sim = sim(kind, Limits { policy, step_tokens, ..limits() });
                assert_eq!(reused(&mut sim, &scenario()), *expected, "{kind:?} {policy:?} {step_tokens}");
                assert_eq!(sim.scheduler.cached_states(), states);
                sim.assert_empty();
            }
        }
    }
}

#[test]
fn reasons_of_the_scenario() {
    use Reason::{FirstSight, Full, NoState};
    let reasons = |policy| {
        let mut sim = sim(HYBRID, Limits { policy, ..limits() });
        let outcomes = one_by_one(&mut sim, &scenario());
        outcomes.iter().map(|o| o.report.unwrap().reason).collect::<Vec<_>>()
    };
    let first = [FirstSight, NoState, FirstSight, FirstSight, FirstSight];
    assert_eq!(reasons(CapturePolicy::Default), [&first[..], &[FirstSight, Full, Full]].concat());
    assert_eq!(reasons(CapturePolicy::OnePerPrefill), [&first[..], &[FirstSight, NoState, Full]].concat());
}

#[test]
fn a_shared_prefix_is_reused_up_to_the_grid() {
    for shared in [200, 210] {
        for kind in [HYBRID, RECURRENT] {
            for step_tokens in [1, 7, 64, 100, 512] {
                let mut sim = sim(kind, Limits { step_tokens, ..limits() });
                let jobs: Vec<_> = (1..4).map(|i| job([text(9, shared), text(i, 40)].concat(), 4)).collect();
                // 240 or 250 tokens: the last grid point strictly inside is 192, the same as the branch.
                assert_eq!(reused(&mut sim, &jobs), [0, 192, 192], "{shared} {kind:?} {step_tokens}");
            }
        }
    }
}

#[test]
fn at_least_one_token_is_left_to_compute() {
    for step_tokens in [10, 64, 150, 512] {
        let mut sim = sim(HYBRID, Limits { step_tokens, ..limits() });
        let jobs = vec![job(text(1, 512), 5); 4];
        assert_eq!(reused(&mut sim, &jobs), [0, 448, 448, 448]);
    }
}

#[test]
fn equal_prompts_arriving_together_compute_the_common_part_once() {
    for kind in [HYBRID, RECURRENT, ATTENTION] {
        for step_tokens in [33, 64, 100, 301, 512, 4096] {
            for policy in [CapturePolicy::Default, CapturePolicy::OnePerPrefill] {
                let mut sim = sim(kind, Limits { step_tokens, policy, ..limits() });
                let outcomes = sim.run(&vec![job(text(1, 301), 20); 8]);
                let reused: Vec<_> = outcomes.iter().map(|o| o.report.unwrap().reused).collect();
                assert_eq!(reused, [0, 256, 256, 256, 256, 256, 256, 256], "{kind:?} {step_tokens} {policy:?}");
                assert_eq!(sim.scheduler.stats().tokens_prefilled, 301 + 7 * 45);
            }
        }
    }
}

#[test]
fn so_they_do_where_the_tree_has_their_pages_but_lost_the_states() {
    for step_tokens in [33, 100, 150, 512] {
        let mut sim = sim(HYBRID, Limits { step_tokens, slots: 9, ..limits() });
        reused(&mut sim, &[job(text(1, 301), 1)]);
        // The states of other requests evict the only one of that path.
        let others: Vec<_> = (2..12).map(|i| job(text(i, 70), 1)).collect();
        reused(&mut sim, &others);
        let outcomes = sim.run(&vec![job(text(1, 301), 2); 4]);
        let first = outcomes[0].report.unwrap();
        assert_eq!((first.matched, first.reused, first.reason), (256, 0, Reason::Evicted));
        let reused: Vec<_> = outcomes.iter().map(|o| o.report.unwrap().reused).collect();
        assert_eq!(reused, [0, 256, 256, 256], "{step_tokens}");
    }
}

/// A chat of `turns` turns under a system prompt, each prompt with its message ends.
fn chat(sim: &mut Sim, system: &[u32], turns: u32, of: u32) -> Vec<usize> {
    let (mut tokens, mut boundaries) = (system.to_vec(), vec![system.len()]);
    let mut reused = Vec::new();
    for turn in 0..turns {
        tokens.extend(text(of + turn, 50));
        boundaries.push(tokens.len());
        let mut job = job(tokens.clone(), 70);
        job.request.boundaries = boundaries.clone();
        reused.extend(self::reused(sim, std::slice::from_ref(&job)));
        tokens.extend(reference(&tokens, 70, job.stop));
        boundaries.push(tokens.len());
    }
    reused
}

#[test]
fn a_long_chat_keeps_the_system_prompt() {
    for kind in [HYBRID, RECURRENT] {
        let mut sim = sim(kind, limits());
        let first = chat(&mut sim, &text(9, 200), 14, 20);
        // Every turn continues from the newest grid point of the decode before it.
        let expected: Vec<_> = (0..14).map(|t| if t == 0 { 0 } else { (200 + 120 * t - 1) / GRID * GRID }).collect();
        assert_eq!(first, expected);
        assert!(sim.scheduler.cached_states() <= 8, "{} states", sim.scheduler.cached_states());
        assert_eq!(chat(&mut sim, &text(9, 200), 1, 60), [192]);
    }
}

#[test]
fn namespaces_share_nothing() {
    let mut sim = sim(HYBRID, limits());
    let of = |namespace: &str| {
        let mut job = job(text(1, 300), 3);
        job.request.namespace = namespace.into();
        job
    };
    assert_eq!(reused(&mut sim, &[of("a"), of("b"), of("a"), of(""), of("b")]), [0, 0, 256, 0, 256]);
}

#[test]
fn one_usable_slot_serves_and_even_reuses() {
    for step_tokens in [1, 64, 512] {
        let mut sim = sim(HYBRID, Limits { slots: 1, step_tokens, ..limits() });
        // 5 + 60 - 1 computed positions end on the grid. Their state lies in the only slot.
        let prompt = text(1, 5);
        let mut longer = [prompt.clone(), reference(&prompt, 60, 1_000_000)].concat();
        longer.extend(text(2, 10));
        assert_eq!(reused(&mut sim, &[job(prompt, 60), job(longer, 60)]), [0, 64]);
        let outcomes = sim.run(&[job(text(3, 500), 90), job(text(3, 400), 90), job(text(4, 70), 1)]);
        assert_eq!(outcomes.len(), 3);
        assert_eq!(sim.scheduler.stats().peak_slots, 1);
    }
}

#[test]
fn an_eviction_is_named() {
    let mut small = sim(HYBRID, Limits { slots: 3, ..limits() });
    let jobs: Vec<_> = [1, 2, 3, 4, 1].map(|i| job(text(i, 300), 3)).into();
    let outcomes = one_by_one(&mut small, &jobs);
    let last = outcomes[4].report.unwrap();
    assert_eq!((last.matched, last.reused, last.reason), (256, 0, Reason::Evicted));
    // The same with the pages gone.
    let mut small = sim(HYBRID, Limits { pages: 6, ..limits() });
    let last = one_by_one(&mut small, &jobs)[4].report.unwrap();
    assert_eq!((last.matched, last.reused, last.reason), (0, 0, Reason::Evicted));
}

#[test]
fn the_state_used_least_recently_is_evicted() {
    // A text of 300 tokens leaves one state, at 256, and needs two slots while it runs.
    let mut small = sim(HYBRID, Limits { slots: 3, ..limits() });
    let jobs = [1, 2, 1, 3, 1].map(|i| job(text(i, 300), 3));
    assert_eq!(reused(&mut small, &jobs), [0, 0, 256, 0, 256]);
}

#[test]
fn the_leaf_used_least_recently_is_evicted() {
    // A text of 300 tokens needs five pages and leaves four.
    for pages in 9..=12 {
        let mut small = sim(ATTENTION, Limits { pages, ..limits() });
        let jobs = [1, 2, 1, 3, 1].map(|i| job(text(i, 300), 3));
        assert_eq!(reused(&mut small, &jobs), [0, 0, 256, 0, 256], "{pages} pages");
    }
}

#[test]
fn evictions_are_counted() {
    let evictions = |limits| {
        let mut small = sim(HYBRID, limits);
        one_by_one(&mut small, &[1, 2, 3].map(|i| job(text(i, 300), 3)));
        small.scheduler.stats().evictions
    };
    assert_eq!(evictions(limits()), Evictions { slots: 0, nodes: 0 });
    // The third text finds two of three slots taken: one state is evicted, no page.
    assert_eq!(evictions(Limits { slots: 3, ..limits() }), Evictions { slots: 1, nodes: 0 });
    // Each text needs five of six pages. The second evicts three of the first's four, the third the last of these and
    // three of the second's. The deepest nodes are evicted with their states.
    assert_eq!(evictions(Limits { pages: 6, ..limits() }), Evictions { slots: 2, nodes: 7 });
}

#[test]
fn a_request_that_does_not_fit_yet_evicts_nothing() {
    let mut small = sim(HYBRID, Limits { pages: 10, ..limits() });
    reused(&mut small, &[job(text(1, 150), 1), job(text(2, 70), 1)]);
    // Three pages are cached, five run, two are free. The next one has two of the cached pages and needs four more.
    small.submit(&job(text(3, 300), 9), 0, 0);
    small.submit(&job([text(1, 128), text(4, 200)].concat(), 9), 1, 0);
    assert!(small.step() && small.step());
    assert_eq!((small.scheduler.running(), small.scheduler.waiting()), (1, 1));
    assert_eq!(small.scheduler.stats().evictions.nodes, 0);
}

#[test]
fn what_can_never_fit_is_refused_with_both_numbers() {
    let mut small = sim(HYBRID, Limits { pages: 4, ..limits() });
    // The last sampled token is never computed: 257 tokens need 4 pages.
    assert!(small.scheduler.submit(job(text(1, 200), 57).request).is_ok());
    let error = small.scheduler.submit(job(text(1, 200), 58).request).unwrap_err().to_string();
    assert!(error.contains("need 5 KV pages") && error.contains("there are 4"), "{error}");
    let error = small.scheduler.submit(job(text(1, 1 << 16), 1).request).unwrap_err().to_string();
    assert!(error.contains("65,537") && error.contains("65,536"), "{error}");
    assert!(small.scheduler.submit(job(Vec::new(), 1).request).is_err());
    assert!(small.scheduler.submit(job(text(1, 1), 0).request).is_err());
}

#[test]
fn the_cap_drops_the_shallowest_but_never_the_first() {
    let mut sim = sim(HYBRID, Limits { path_cap: 3, ..limits() });
    let mut long = job(text(1, 1000), 1);
    long.request.boundaries = vec![100, 200, 300, 400, 500, 600];
    reused(&mut sim, &[long]);
    // 64, 512 or 576, and 960 were planned; the others were dropped.
    let upto = |n: usize| job([text(1, n), text(2, 30)].concat(), 1);
    let outcome = one_by_one(&mut sim, &[upto(100)]).remove(0).report.unwrap();
    assert_eq!((outcome.reused, outcome.reason), (64, Reason::FirstSight));
    let outcome = one_by_one(&mut sim, &[upto(300)]).remove(0).report.unwrap();
    assert_eq!((outcome.matched, outcome.reused, outcome.reason), (256, 64, Reason::Policy));
    assert_eq!(reused(&mut sim, &[upto(980)]), [960]);
}

/// A text that leaves the first at 128 tokens and has message ends at 70 and 200.
fn branching() -> Job {
    let mut job = job([text(1, 128), text(2, 472)].concat(), 1);
    job.request.boundaries = vec![70, 200];
    job
}

#[test]
fn the_cap_never_drops_a_branch() {
    let mut sim = sim(HYBRID, Limits { path_cap: 3, ..limits() });
    reused(&mut sim, &[job(text(1, 300), 1), branching()]);
    // Wanted are 64, 128 (where the texts part), 192 and 576. The cap drops 192.
    let known = branching().request.prompt;
    let upto = |n: usize| job([&known[..n], &text(3, 30)].concat(), 1);
    assert_eq!(reused(&mut sim, &[upto(130)]), [128]);
    let outcome = one_by_one(&mut sim, &[upto(200)]).remove(0).report.unwrap();
    assert_eq!((outcome.matched, outcome.reused, outcome.reason), (192, 128, Reason::Policy));
}

#[test]
fn short_of_slots_the_branch_is_captured_first() {
    let known = branching().request.prompt;
    let upto = |n: usize| job([&known[..n], &text(3, 30)].concat(), 1);
    // One slot is written, the others are for captures: the branch, then the deepest.
    for (slots, at_branch, deepest) in [(2, 128, 128), (3, 128, 576)] {
        for (job, expected) in [(upto(130), at_branch), (upto(590), deepest)] {
            let mut small = sim(HYBRID, Limits { slots, step_tokens: 1024, ..limits() });
            assert_eq!(
                reused(&mut small, &[self::job(text(1, 300), 1), branching(), job])[2],
                expected,
                "{slots} slots"
            );
        }
    }
}

#[test]
fn a_decode_state_about_to_be_replaced_does_not_count_for_the_cap() {
    let mut sim = sim(HYBRID, Limits { path_cap: 3, ..limits() });
    let mut long = job(text(1, 130), 140);
    long.request.boundaries = vec![70];
    // 64 and 128 from the prompt; 256 replaces 192.
    reused(&mut sim, &[long]);
    assert_eq!(sim.scheduler.cached_states(), 3);
    assert_eq!(reused(&mut sim, &[job([text(1, 130), text(2, 20)].concat(), 1)]), [128]);
}

#[test]
fn events_tell_the_tree() {
    let mut sim = sim(HYBRID, limits());
    reused(&mut sim, &[job(text(1, 150), 2)]);
    let root = PrefixHash::root(b"sim", "");
    let (first, second) = (root.child(&text(1, 64)), root.child(&text(1, 64)).child(&text(1, 128)[64..]));
    let stored = |hash, parent, from: usize, has_state| CacheEvent::Stored {
        hash,
        parent,
        tokens: text(1, 150)[from..from + 64].into(),
        has_state,
    };
    let expected = [stored(first, root, 0, false), stored(second, first, 64, false), stored(second, first, 64, true)];
    assert_eq!(sim.take_events(), expected);
    sim.clear_cache();
    assert_eq!(sim.take_events(), [CacheEvent::Cleared]);
}

#[test]
fn events_tell_what_was_evicted() {
    // Short of slots: the page of the first text stays and loses its state.
    let mut small = sim(HYBRID, Limits { slots: 2, ..limits() });
    reused(&mut small, &[job(text(1, 70), 1)]);
    small.take_events();
    reused(&mut small, &[job(text(2, 70), 1)]);
    let root = PrefixHash::root(b"sim", "");
    let stored = |of, has_state| {
        let tokens: Box<[u32]> = text(of, 64).into();
        CacheEvent::Stored { hash: root.child(&tokens), parent: root, tokens, has_state }
    };
    assert_eq!(small.take_events(), [stored(1, false), stored(2, false), stored(2, true)]);
    // Short of pages: it goes.
    let mut small = sim(HYBRID, Limits { pages: 2, ..limits() });
    reused(&mut small, &[job(text(1, 70), 1)]);
    small.take_events();
    reused(&mut small, &[job(text(2, 70), 1)]);
    let removed = CacheEvent::Removed { hash: root.child(&text(1, 64)) };
    assert_eq!(small.take_events(), [removed, stored(2, false), stored(2, true)]);
}

#[test]
fn decode_keeps_the_newest_grid_point_only() {
    let mut sim = sim(HYBRID, limits());
    let outcomes = one_by_one(&mut sim, &[job(text(1, 70), 300)]);
    // The prompt's state at 64 and the newest of decode, 320 of 369 computed positions.
    assert_eq!(sim.scheduler.cached_states(), 2);
    let longer = [text(1, 70), outcomes[0].completion.clone()].concat();
    assert_eq!(reused(&mut sim, &[job(longer, 3)]), [320]);
}

#[test]
fn a_decode_snapshot_that_somebody_hit_stays() {
    for others in [false, true] {
        let mut sim = sim(HYBRID, limits());
        let first = job(text(1, 70), 200);
        let known = [text(1, 70), reference(&first.request.prompt, 200, first.stop)].concat();
        let shared = |tail| job([known[..130].to_vec(), text(tail, 20)].concat(), 2);
        // The first one passes 128 after 59 steps and 192 after 123.
        let (mut second, mut third) = (shared(2), shared(3));
        (second.gap, third.gap) = (80, 60);
        let jobs = if others {
            vec![first, second, third]
        } else {
            third.gap = 140;
            vec![first, third]
        };
        let reused: Vec<_> = sim.run(&jobs).iter().map(|o| o.report.unwrap().reused).collect();
        assert_eq!(reused, if others { vec![0, 128, 128] } else { vec![0, 64] });
    }
}
