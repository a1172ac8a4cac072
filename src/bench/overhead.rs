//! `selkie bench prefix --overhead`: the cost of the prefix cache without hits, and the time to the first token of a hit compared
//! with a prompt of only the tokens that the hit must compute.

use std::{sync::Arc, time::Instant};

use selkie_core::{
    Result,
    engine::{AnyEngine, EngineOptions, Event, Request},
    model_dir::ModelFiles,
    state::Report,
    step::PAGE,
};
use serde_json::json;

use super::{Random, SEED};
use crate::{
    args::{BackendArgs, BenchPrefixArgs},
    failure::Outcome,
    model,
    terminal::Output,
};

/// Measurements of each kind. They alternate, and medians are reported.
const ROUNDS: usize = 9;
/// Requests of a round without hits, their prompt tokens and their answer tokens.
const REQUESTS: usize = 16;
const PROMPT: usize = 300;
const ANSWER: usize = 32;
const MAX_BATCH: usize = 8;
/// Tokens of the shared prefix of the hits, and tokens after it.
const PREFIX: usize = 16 * PAGE;
const SUFFIX: usize = 100;

/// Measures and prints both ratios.
pub fn run(args: &BenchPrefixArgs) -> Outcome {
    let files = super::open(&args.target)?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for round in 0..2 * ROUNDS {
        // The order alternates, so that neither kind is always first.
        let prefix_cache = (round + round / 2) % 2 == 1;
        let seconds = misses(&args.target.model.backend, &files, prefix_cache)?;
        if prefix_cache { on.push(seconds) } else { off.push(seconds) }
    }
    let (hit, alone) = hits(&args.target.model.backend, &files)?;
    let (off, on) = (median(off), median(on));
    let tokens = (REQUESTS * (PROMPT + ANSWER)) as f64;
    let mut out = Output::new();
    if args.target.json {
        return out.json(&json!({
            "tokens_per_second_off": tokens / off,
            "tokens_per_second_on": tokens / on,
            "throughput_ratio": off / on,
            "first_token_ms_hit": hit,
            "first_token_ms_suffix_alone": alone,
            "first_token_ratio": hit / alone,
        }));
    }
    let cost = 100.0 * (1.0 - off / on);
    out.text(&format!(
        "no request hits: {:.0} tokens/s with the cache off, {:.0} with it on: {cost:.1} % less\n\
         first token of a hit of {PREFIX} tokens: {hit:.2} ms, of its last {SUFFIX} tokens alone: {alone:.2} ms: {:.3} times\n\
         (medians of {ROUNDS} alternating runs)\n",
        tokens / off,
        tokens / on,
        hit / alone
    ))
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs requests that share no prefix; returns seconds.
fn misses(args: &BackendArgs, files: &Arc<ModelFiles>, prefix_cache: bool) -> Outcome<f64> {
    let options = EngineOptions { max_batch: MAX_BATCH, prefix_cache, ..EngineOptions::default() };
    let mut engine = model::load_engine(model::backend(args)?, files, &options)?;
    let vocab = engine.spec().vocab;
    let mut random = Random(SEED);
    let mut seconds = 0.0;
    // The first pass is a warm-up.
    for _ in 0..2 {
        for _ in 0..REQUESTS {
            let prompt = random.ids(PROMPT, vocab);
            engine.submit(Request { prompt, max_tokens: ANSWER, ..Request::default() })?;
        }
        let start = Instant::now();
        while !engine.is_idle() {
            pollster::block_on(engine.step())?;
        }
        seconds = start.elapsed().as_secs_f64();
    }
    Ok(seconds)
}

/// Times to the first token of hits and of the tokens that hits must compute; returns milliseconds of both.
fn hits(args: &BackendArgs, files: &Arc<ModelFiles>) -> Outcome<(f64, f64)> {
    let options = EngineOptions { max_batch: 1, slots: Some(64), kv_pages: Some(256), ..EngineOptions::default() };
    let mut engine = model::load_engine(model::backend(args)?, files, &options)?;
    let vocab = engine.spec().vocab;
    let mut random = Random(SEED);
    let prefix = random.ids(PREFIX, vocab);
    let (mut hits, mut alone) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let suffix = random.ids(SUFFIX, vocab);
        let hit = pollster::block_on(first_token(&mut *engine, [&prefix[..], &suffix].concat()))?.ms;
        let bare = pollster::block_on(first_token(&mut *engine, suffix.iter().rev().copied().collect()))?.ms;
        // The first request puts the prefix into the cache.
        if round > 0 {
            hits.push(hit);
            alone.push(bare);
        }
    }
    Ok((median(hits), median(alone)))
}

/// A request for one token.
pub(super) struct First {
    /// Milliseconds from submission to the token.
    pub ms: f64,
    /// What it reused.
    pub cache: Option<Report>,
}

/// Runs a request for one token alone.
pub(super) async fn first_token(engine: &mut dyn AnyEngine, prompt: Vec<u32>) -> Result<First> {
    let start = Instant::now();
    engine.submit(Request { prompt, max_tokens: 1, ..Request::default() })?;
    let mut first = First { ms: 0.0, cache: None };
    while !engine.is_idle() {
        for event in engine.step().await? {
            match event {
                Event::Token { .. } => first.ms = start.elapsed().as_secs_f64() * 1e3,
                Event::Finished(end) => first.cache = end.cache,
            }
        }
    }
    Ok(first)
}
