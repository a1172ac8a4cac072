//! The cost of scheduling a step, from a thousand to a million cached pages. It may depend on the batch and the pages
//! touched, but not on the size of the tree.
//!
//! The tree is filled with prompts of 100 pages; then 32 sequences decode, each 64 tokens after a prompt that shares 20
//! pages with a cached one. The pools are full, so every admission and every new page evicts.
//!
//! `hot`: the requests share the same eight cached prompts. The processor's caches then serve every size alike, and the
//! number of operations is left. `cold`: each shares a random one of all prompts, whose nodes lie in memory.

use std::time::{Duration, Instant};

use selkie_core::{
    engine::{Commit, Request, Scheduler},
    state::{GRID, Limits, StateShape},
};

const PROMPT_PAGES: usize = 100;
const SHARED_PAGES: usize = 20;
const BATCH: usize = 32;
const STEPS: usize = 2000;

/// The tokens of cached prompt `i`.
fn prompt(i: usize, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|t| ((i * 2_654_435_761 + t * 40_503) >> 3) as u32 % 100_000).collect()
}

/// Plans and commits until nothing runs or `steps` are done; returns the time spent in the scheduler.
fn run(scheduler: &mut Scheduler, steps: usize, mut refill: impl FnMut(&mut Scheduler)) -> (usize, Duration) {
    let (mut done, mut spent) = (0, Duration::ZERO);
    while done < steps {
        refill(scheduler);
        let start = Instant::now();
        let plan = scheduler.plan();
        if plan.rows.is_empty() {
            break;
        }
        for row in plan.rows.iter().filter(|r| !r.row.outputs.is_empty()) {
            if scheduler.commit(row.seq, &[7]) == Some(Commit::Last) {
                scheduler.end(row.seq);
            }
        }
        spent += start.elapsed();
        done += 1;
    }
    (done, spent)
}

/// A scheduler with a full tree.
fn filled(pages: usize) -> Scheduler {
    let shape = StateShape { slot_bytes: 1, page_bytes: 1, context: 1 << 20 };
    let limits = Limits {
        max_batch: BATCH,
        step_tokens: 8192,
        slots: pages / 20 + 2 * BATCH,
        pages: pages + BATCH * (SHARED_PAGES + 3),
        ..Limits::default()
    };
    let mut scheduler = Scheduler::new(shape, limits, b"bench").unwrap();
    for i in 0..pages / PROMPT_PAGES {
        let prompt = prompt(i, PROMPT_PAGES * GRID);
        let boundaries = vec![SHARED_PAGES * GRID];
        scheduler.submit(Request { prompt, max_tokens: 1, boundaries, ..Request::default() }).unwrap();
        run(&mut scheduler, usize::MAX, |_| ());
    }
    scheduler
}

/// Keeps the batch full of requests that share cached prompts; microseconds a step, the best of a few rounds.
fn churn(scheduler: &mut Scheduler, cached: usize, next: &mut usize) -> f64 {
    let mut refill = |scheduler: &mut Scheduler| {
        while scheduler.running() + scheduler.waiting() < BATCH {
            *next += 1;
            let mut prompt = prompt(*next * 7919 % cached, SHARED_PAGES * GRID);
            prompt.extend((0..40).map(|t| 200_000 + (*next * 40 + t) as u32));
            scheduler.submit(Request { prompt, max_tokens: 64, ..Request::default() }).unwrap();
        }
    };
    let mut round = || {
        let (steps, spent) = run(scheduler, STEPS, &mut refill);
        spent.as_secs_f64() * 1e6 / steps as f64
    };
    round();
    (0..5).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn main() {
    println!("{:>9} {:>9} {:>12} {:>12} {:>14}", "pages", "states", "hot us/step", "cold us/step", "evicted pages");
    for pages in [1_000, 10_000, 100_000, 1_000_000] {
        let mut scheduler = filled(pages);
        let mut next = 0;
        let hot = churn(&mut scheduler, 8, &mut next);
        let cold = churn(&mut scheduler, pages / PROMPT_PAGES, &mut next);
        let (nodes, states) = (scheduler.cached_pages(), scheduler.cached_states());
        let evicted = scheduler.stats().evictions.nodes;
        println!("{nodes:>9} {states:>9} {hot:>12.1} {cold:>12.1} {evicted:>14}");
    }
}
