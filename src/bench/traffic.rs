//! `selkie bench prefix --traffic`: chats that share a system prompt and agents that branch, with memory for all or a part of
//! their states and pages.

use std::{collections::HashMap, io::Write, sync::Arc, time::Instant};

use selkie_core::{
    engine::{EngineOptions, Event, Request, SeqId},
    model_dir::ModelFiles,
    state::CapturePolicy,
    step::PAGE,
    tier::TierOptions,
};
use serde_json::{Value, json};

use super::{Random, SEED, chart};
use crate::{
    args::BenchPrefixArgs,
    failure::{Failure, Outcome},
    model,
    output_file::OutputFile,
    terminal::{self, Output, thousands},
};

/// Number of sequences that run at a time.
const MAX_BATCH: usize = 16;
/// Chats per agent, and the tokens of an agent's task. An agent works for two turns, then continues in several branches of two
/// turns each.
const CHATS_PER_AGENT: usize = 8;
const TASK_TOKENS: usize = 400;
const AGENT_TURNS: usize = 2;
const BRANCHES: usize = 4;
/// Minimum and maximum tokens of a user's message and of an answer.
const MESSAGE: (usize, usize) = (24, 88);
const ANSWER: (usize, usize) = (16, 40);
/// Memory, in per cent of the whole working set.
const BUDGETS: [usize; 3] = [100, 50, 25];
/// Series of the table and the plot: cache off, then the policies.
pub const SERIES: [(&str, Option<CapturePolicy>); 3] =
    [("off", None), ("one-per-prefill", Some(CapturePolicy::OnePerPrefill)), ("default", Some(CapturePolicy::Default))];

/// Runs the traffic with every memory size and policy, prints the table and draws the plot.
pub fn run(args: &BenchPrefixArgs) -> Outcome {
    let chat = args.turns.saturating_mul(MESSAGE.1 + ANSWER.1).saturating_add(args.system_tokens);
    super::check_tokens(args.chats.saturating_mul(chat), "--chats, --turns and --system-tokens")?;
    let files = super::open(&args.target)?;
    let svg = args.svg.as_deref().map(OutputFile::create).transpose()?;
    let work = |policy, room, host| Traffic { args, files: &files, policy, room, host }.run();
    let all = work(Some(CapturePolicy::Default), None, 0)?;
    let mut series: Vec<_> = SERIES.iter().map(|(name, policy)| (*name, *policy, 0)).collect();
    series.extend(args.host_cache.map(|bytes| ("default, host", Some(CapturePolicy::Default), bytes)));
    let mut results = Vec::new();
    for budget in BUDGETS {
        let part = |n: usize| (n * budget).div_ceil(100);
        let room = Room { slots: part(all.peak_slots), pages: part(all.peak_pages) };
        let mut runs: Vec<Vec<Totals>> = series.iter().map(|_| Vec::new()).collect();
        for _ in 0..args.runs {
            for (&(name, policy, host), runs) in series.iter().zip(&mut runs) {
                terminal::note(format_args!("{budget} % of the working set, {name} ..."));
                let result = work(policy, Some(room), host)?;
                if result.backend == "cpu" && result.texts != all.texts {
                    return Err(Failure::Other(format!("the answers differ with {budget} % and {name}")));
                }
                runs.push(result);
            }
        }
        results.extend(series.iter().zip(runs).map(|(&(name, ..), runs)| (budget, name, median(runs))));
    }
    if let Some(mut file) = svg {
        let cells: Vec<chart::Cell> = results
            .iter()
            .map(|(budget, series, r)| chart::Cell {
                group: format!("{budget} %"),
                series,
                values: [100.0 * r.share(), r.rate()],
            })
            .collect();
        let title = format!("{} chats of {} turns, {}", args.chats, args.turns, all.device);
        let panels = ["reused prompt tokens, %", "tokens/s, prompts included"];
        let text = chart::bars(&title, "room for states and pages", panels, &cells);
        file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
        file.commit()?;
    }
    let mut out = Output::new();
    if args.target.json { out.json(&json(&all, &results)) } else { out.text(&text(&all, &results)) }
}

/// The run of median time.
fn median(mut runs: Vec<Totals>) -> Totals {
    runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    runs.swap_remove(runs.len() / 2)
}

/// Sizes of the pools.
#[derive(Clone, Copy)]
struct Room {
    slots: usize,
    pages: usize,
}

struct Traffic<'a> {
    args: &'a BenchPrefixArgs,
    files: &'a Arc<ModelFiles>,
    /// `None`: no prefix cache.
    policy: Option<CapturePolicy>,
    /// `None`: as much as half of the free memory holds.
    room: Option<Room>,
    /// Bytes of host memory for what is evicted.
    host: u64,
}

/// The results of one run.
struct Totals {
    backend: &'static str,
    device: String,
    requests: usize,
    prompt_tokens: usize,
    reused_tokens: usize,
    /// Of these, from host memory.
    host_tokens: usize,
    recomputed_tokens: u64,
    generated_tokens: usize,
    seconds: f64,
    /// Milliseconds from submission to the first token, sorted.
    waits: Vec<f64>,
    preemptions: u64,
    evicted_states: u64,
    peak_slots: usize,
    peak_pages: usize,
    /// A hash of all answers.
    texts: u64,
}

impl Totals {
    /// Share of the prompt tokens that were not computed.
    fn share(&self) -> f64 {
        self.reused_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Tokens of prompts and answers per second.
    fn rate(&self) -> f64 {
        (self.prompt_tokens + self.generated_tokens) as f64 / self.seconds
    }

    fn wait(&self, per_cent: usize) -> f64 {
        self.waits
            .get((self.waits.len() * per_cent / 100).min(self.waits.len().saturating_sub(1)))
            .copied()
            .unwrap_or(0.0)
    }
}

/// A chat, or one branch of an agent.
struct Conversation {
    /// The conversation that it continues after its end.
    parent: Option<usize>,
    /// New tokens before the first message.
    opening: Vec<u32>,
    /// The messages, with the lengths of the answers.
    turns: Vec<(Vec<u32>, usize)>,
    /// All tokens so far, and the ends of messages.
    history: Vec<u32>,
    boundaries: Vec<usize>,
    done: usize,
}

/// All conversations and their order of turns, which is the same in every run.
struct Script {
    conversations: Vec<Conversation>,
    order: Vec<usize>,
}

impl Script {
    fn new(args: &BenchPrefixArgs, vocab: usize) -> Self {
        let mut random = Random(SEED);
        let system = random.ids(args.system_tokens, vocab);
        let mut conversations = Vec::new();
        let mut add = |random: &mut Random, parent: Option<usize>, opening: Vec<u32>, turns: usize| {
            let between = |random: &mut Random, (from, to): (usize, usize)| from + random.below(to - from + 1);
            let turns = (0..turns).map(|_| {
                let length = between(random, MESSAGE);
                (random.ids(length, vocab), between(random, ANSWER))
            });
            let turns = turns.collect();
            let (history, boundaries) = (Vec::new(), Vec::new());
            conversations.push(Conversation { parent, opening, turns, history, boundaries, done: 0 });
            conversations.len() - 1
        };
        for _ in 0..args.chats {
            add(&mut random, None, system.clone(), args.turns);
        }
        for _ in 0..args.chats.div_ceil(CHATS_PER_AGENT) {
            let task = random.ids(TASK_TOKENS, vocab);
            let trunk = add(&mut random, None, [system.clone(), task].concat(), AGENT_TURNS);
            for _ in 0..BRANCHES {
                add(&mut random, Some(trunk), Vec::new(), AGENT_TURNS);
            }
        }
        let mut left: Vec<usize> = conversations.iter().map(|c| c.turns.len()).collect();
        let mut order = Vec::new();
        loop {
            let ready: Vec<usize> = (0..left.len())
                .filter(|i| left[*i] > 0 && conversations[*i].parent.is_none_or(|p| left[p] == 0))
                .collect();
            if ready.is_empty() {
                return Self { conversations, order };
            }
            let next = ready[random.below(ready.len())];
            left[next] -= 1;
            order.push(next);
        }
    }

    /// The next request of conversation `i`; `None` while it, or the conversation that it continues, waits for an answer.
    fn request(&mut self, i: usize) -> Option<Request> {
        let c = &self.conversations[i];
        if c.history.is_empty() {
            let (history, boundaries) = match c.parent.map(|p| &self.conversations[p]) {
                Some(parent) if parent.done < parent.turns.len() => return None,
                Some(parent) => (parent.history.clone(), parent.boundaries.clone()),
                None => (c.opening.clone(), vec![c.opening.len()]),
            };
            let c = &mut self.conversations[i];
            (c.history, c.boundaries) = (history, boundaries);
        }
        let c = &mut self.conversations[i];
        let (message, answer) = &c.turns[c.done];
        let prompt = [c.history.as_slice(), message].concat();
        c.boundaries.push(prompt.len());
        Some(Request { prompt, boundaries: c.boundaries.clone(), max_tokens: *answer, ..Request::default() })
    }

    /// Takes the answer to the last request of a conversation.
    fn answer(&mut self, i: usize, answer: &[u32]) {
        let c = &mut self.conversations[i];
        c.history.extend(&c.turns[c.done].0);
        c.history.extend(answer);
        c.boundaries.push(c.history.len());
        c.done += 1;
    }
}

impl Traffic<'_> {
    fn run(&self) -> Outcome<Totals> {
        let backend = model::backend(&self.args.target.model.backend)?;
        let mut options = EngineOptions {
            max_batch: MAX_BATCH,
            prefix_cache: self.policy.is_some(),
            policy: self.policy.unwrap_or_default(),
            tiers: TierOptions { host: self.host, ..TierOptions::default() },
            ..EngineOptions::default()
        };
        match self.room {
            // The longest conversation must fit with any share.
            Some(room) => {
                let longest = self.args.system_tokens
                    + TASK_TOKENS
                    + self.args.turns.max(2 * AGENT_TURNS) * (MESSAGE.1 + ANSWER.1);
                options.slots = Some(room.slots.max(2));
                options.kv_pages = Some(room.pages.max(longest.div_ceil(PAGE)));
            }
            None => options.memory = backend.free_memory().map(|free| free / 2),
        }
        let mut engine = model::load_engine(backend, self.files, &options)?;
        let mut script = Script::new(self.args, engine.spec().vocab);
        let order = std::mem::take(&mut script.order);
        let mut next = 0;
        let mut running: HashMap<SeqId, (usize, Vec<u32>)> = HashMap::new();
        let mut busy = vec![false; script.conversations.len()];
        let mut answers = vec![0u64; order.len()];
        let mut place: HashMap<SeqId, usize> = HashMap::new();
        let mut totals = Totals {
            backend: engine.caps().backend,
            device: engine.caps().device.clone(),
            requests: order.len(),
            prompt_tokens: 0,
            reused_tokens: 0,
            host_tokens: 0,
            recomputed_tokens: 0,
            generated_tokens: 0,
            seconds: 0.0,
            waits: Vec::new(),
            preemptions: 0,
            evicted_states: 0,
            peak_slots: 0,
            peak_pages: 0,
            texts: 0,
        };
        let start = Instant::now();
        while next < order.len() || !running.is_empty() {
            while running.len() < MAX_BATCH && next < order.len() && !busy[order[next]] {
                let Some(request) = script.request(order[next]) else { break };
                let id = engine.submit(request)?;
                running.insert(id, (order[next], Vec::new()));
                place.insert(id, next);
                busy[order[next]] = true;
                next += 1;
            }
            for event in pollster::block_on(engine.step())? {
                match event {
                    Event::Token { id, token, .. } => {
                        if let Some((_, tokens)) = running.get_mut(&id) {
                            tokens.push(token);
                        }
                    }
                    Event::Finished(end) => {
                        let Some((conversation, tokens)) = running.remove(&end.id) else { continue };
                        script.answer(conversation, &tokens);
                        busy[conversation] = false;
                        totals.prompt_tokens += end.prompt_tokens;
                        totals.reused_tokens += end.cache.map_or(0, |c| c.reused);
                        totals.host_tokens += end.cache.map_or(0, |c| c.host);
                        totals.generated_tokens += tokens.len();
                        totals.waits.push(end.timing.queue_ms + end.timing.prefill_ms);
                        answers[place[&end.id]] = tokens.iter().fold(SEED, |h, t| Random(h ^ u64::from(*t)).next());
                    }
                }
            }
        }
        totals.seconds = start.elapsed().as_secs_f64();
        totals.waits.sort_by(f64::total_cmp);
        totals.texts = answers.iter().fold(SEED, |h, a| Random(h ^ a).next());
        let stats = engine.stats();
        totals.recomputed_tokens = stats.tokens_recomputed;
        totals.preemptions = stats.preemptions;
        totals.evicted_states = stats.evictions.slots;
        (totals.peak_slots, totals.peak_pages) = (stats.peak_slots, stats.peak_pages);
        Ok(totals)
    }
}

fn text(all: &Totals, results: &[(usize, &str, Totals)]) -> String {
    let mut lines = vec![
        format!(
            "{} requests, {} prompt tokens, {} generated; the working set is {} states and {} pages",
            all.requests,
            thousands(all.prompt_tokens as f64),
            thousands(all.generated_tokens as f64),
            thousands(all.peak_slots as f64),
            thousands(all.peak_pages as f64)
        ),
        "room   policy            reused  tokens/s  first token, median   95 %  recomputed  evicted states".to_owned(),
    ];
    for (budget, series, r) in results {
        lines.push(format!(
            "{budget:>3} %  {series:<16}  {:>5.1} %  {:>8}  {:>16.0} ms  {:>5.0}  {:>10}  {:>14}",
            100.0 * r.share(),
            thousands(r.rate()),
            r.wait(50),
            r.wait(95),
            r.recomputed_tokens,
            r.evicted_states
        ));
    }
    lines.join("\n") + "\n"
}

fn json(all: &Totals, results: &[(usize, &str, Totals)]) -> Value {
    let runs = results.iter().map(|(budget, series, r)| {
        json!({
            "budget_percent": budget,
            "policy": series,
            "prompt_tokens": r.prompt_tokens,
            "reused_tokens": r.reused_tokens,
            "reused_share": r.share(),
            "host_tokens": r.host_tokens,
            "generated_tokens": r.generated_tokens,
            "recomputed_tokens": r.recomputed_tokens,
            "seconds": r.seconds,
            "tokens_per_second": r.rate(),
            "first_token_ms": { "median": r.wait(50), "p95": r.wait(95) },
            "preemptions": r.preemptions,
            "evicted_states": r.evicted_states,
            "peak_slots": r.peak_slots,
            "peak_pages": r.peak_pages,
        })
    });
    json!({
        "backend": all.backend,
        "device": all.device,
        "requests": all.requests,
        "working_set": { "slots": all.peak_slots, "kv_pages": all.peak_pages },
        "runs": runs.collect::<Vec<_>>(),
    })
}
