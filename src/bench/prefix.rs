//! `selkie bench prefix`: the tokens that a fixed list of requests reuses under each capture policy.

use std::sync::Arc;

use selkie_core::{
    Result,
    engine::{AnyEngine, EngineOptions, Event, Finished, Request},
    model_dir::ModelFiles,
    state::CapturePolicy,
};
use serde_json::{Value, json};

use super::{Random, SEED};
use crate::{
    args::{BackendArgs, BenchPrefixArgs},
    failure::{Failure, Outcome},
    model,
    terminal::Output,
};

/// The requests in order; every digit stands for a text of 256 tokens.
const REQUESTS: [&str; 8] = ["1+2", "1+3", "1+4", "1+2+5", "1+4+5", "1+3+5", "1+3", "1+3"];
const DIGIT_TOKENS: usize = 256;
/// Tokens that a chat template would put before and after a prompt.
const BEFORE: usize = 5;
const AFTER: usize = 4;
const ANSWER_TOKENS: usize = 4;

/// The policies and their names on the command line.
pub const POLICIES: [(CapturePolicy, &str); 2] =
    [(CapturePolicy::OnePerPrefill, "one-per-prefill"), (CapturePolicy::Default, "default")];

/// Runs the scenario under both policies and prints the table.
pub fn run(args: &BenchPrefixArgs) -> Outcome {
    let files = super::open(&args.target)?;
    let columns = POLICIES
        .iter()
        .map(|(policy, _)| scenario(&args.target.model.backend, &files, *policy))
        .collect::<Outcome<Vec<Column>>>()?;
    let mut out = Output::new();
    if args.target.json { out.json(&json(&columns)) } else { out.text(&text(&columns)) }
}

/// The results under one policy.
struct Column {
    /// Reused tokens and reason of every request.
    cells: Vec<(usize, &'static str)>,
    states: usize,
}

fn scenario(args: &BackendArgs, files: &Arc<ModelFiles>, policy: CapturePolicy) -> Outcome<Column> {
    // Memory for everything: the table compares policies without evictions.
    let (slots, kv_pages) = (Some(16), Some(128));
    let options = EngineOptions { max_batch: 1, slots, kv_pages, policy, ..EngineOptions::default() };
    let mut engine = model::load_engine(model::backend(args)?, files, &options)?;
    let vocab = engine.spec().vocab;
    let mut random = Random(SEED);
    let (before, after) = (random.ids(BEFORE, vocab), random.ids(AFTER, vocab));
    let digits: Vec<Vec<u32>> = (0..10).map(|_| random.ids(DIGIT_TOKENS, vocab)).collect();
    let mut cells = Vec::new();
    for request in REQUESTS {
        let body = request.bytes().filter(u8::is_ascii_digit).flat_map(|d| &digits[usize::from(d - b'0')]);
        let prompt = before.iter().chain(body).chain(&after).copied().collect();
        let end = pollster::block_on(answer(&mut *engine, prompt))?;
        let cache = end.and_then(|end| end.cache).ok_or_else(|| Failure::Other("a request got lost".into()))?;
        cells.push((cache.reused, cache.reason.name()));
    }
    Ok(Column { cells, states: engine.scheduler().cached_states() })
}

async fn answer(engine: &mut dyn AnyEngine, prompt: Vec<u32>) -> Result<Option<Finished>> {
    engine.submit(Request { prompt, max_tokens: ANSWER_TOKENS, ..Request::default() })?;
    while !engine.is_idle() {
        for event in engine.step().await? {
            if let Event::Finished(end) = event {
                return Ok(Some(end));
            }
        }
    }
    Ok(None)
}

fn sum(column: &Column) -> usize {
    column.cells.iter().map(|(reused, _)| reused).sum()
}

fn text(columns: &[Column]) -> String {
    let mut lines = vec![
        "Tokens of each request that were reused, and why not more, under both capture policies. The requests come one"
            .to_owned(),
        "after another; 1+3+5 is a prompt of the texts 1, 3 and 5, of 256 tokens each, so it begins as 1+3 does."
            .to_owned(),
        String::new(),
    ];
    let names = POLICIES.map(|(_, name)| format!("{name:>16}               "));
    lines.push(format!("{:<10}{}", "request", names.concat()).trim_end().to_owned());
    for (i, request) in REQUESTS.iter().enumerate() {
        let cells = columns.iter().map(|c| {
            let (reused, reason) = c.cells[i];
            format!("{reused:>16} {:<14}", format!("({reason})"))
        });
        lines.push(format!("{request:<10}{}", cells.collect::<String>()).trim_end().to_owned());
    }
    let totals = columns.iter().map(|c| format!("{:>16} {:<14}", sum(c), format!("{} states", c.states)));
    lines.push(format!("{:<10}{}", "in all", totals.collect::<String>()).trim_end().to_owned());
    lines.join("\n") + "\n"
}

fn json(columns: &[Column]) -> Value {
    let columns = columns.iter().zip(POLICIES).map(|(c, (_, name))| {
        json!({
            "policy": name,
            "requests": REQUESTS,
            "reused": c.cells.iter().map(|(reused, _)| reused).collect::<Vec<_>>(),
            "reasons": c.cells.iter().map(|(_, reason)| reason).collect::<Vec<_>>(),
            "reused_in_all": sum(c),
            "states_held": c.states,
        })
    });
    columns.collect()
}
