//! `selkie bench speculate`: what drafts gain, by the number of them and by how many are right.
//!
//! Prompts and answers are parts of a given text, else made up: the ids that the model samples are replaced by the answer's. So any
//! model, one with random weights too, shows what a text that it did not write would gain. A drafter that knows the answer guesses
//! it, wrongly as often as it is told; the n-gram drafter knows what came before, and so does the model's head.

use std::{path::Path, sync::Arc, time::Instant};

use selkie_core::{
    Result,
    engine::{AnyEngine, Drafter, EngineOptions, Event, Request, Speculate},
    model_dir::ModelFiles,
    state::budget::RUNNING_SLOTS,
    step::PAGE,
};
use serde_json::{Value, json};

use super::{Random, SEED};
use crate::{
    args::{BenchSpeculateArgs, SpeculateArg},
    embedded,
    failure::{Failure, Outcome},
    input_file, model,
    terminal::{Output, thousands},
};

/// Percentages of guesses that are right.
const RIGHT: [u64; 4] = [100, 80, 50, 0];
/// Maximum size of the text, in bytes.
const MAX_TEXT: u64 = 16 << 20;

/// Measures and prints.
pub fn run(args: &BenchSpeculateArgs) -> Outcome {
    let tokens = args.batch.saturating_mul(args.prompt_tokens.saturating_add(args.decode_tokens));
    super::check_tokens(tokens, "--batch, --prompt-tokens and --decode-tokens")?;
    let files = super::open(&args.target)?;
    let text = args.text.as_deref().map(|path| text(path, &files)).transpose()?;
    let mut engine = load(args, &files)?;
    let texts = texts(args, engine.spec().vocab, text)?;
    let measured = pollster::block_on(measure(&mut *engine, args, &texts, &cases(args)))?;
    let mut out = Output::new();
    let device = format!("{} ({})", engine.caps().backend, engine.caps().device);
    match args.target.json {
        true => out.json(&as_json(args, files.label(), &device, &measured)),
        false => out.text(&as_text(args, files.label(), &device, &measured)),
    }
}

fn load(args: &BenchSpeculateArgs, files: &Arc<ModelFiles>) -> Outcome<Box<dyn crate::backend::Loaded>> {
    let length = args.prompt_tokens + args.decode_tokens;
    let options = EngineOptions {
        max_batch: args.batch,
        context: Some(length),
        prefix_cache: false,
        slots: Some(args.batch * (RUNNING_SLOTS as usize + args.drafts)),
        kv_pages: Some(args.batch * length.div_ceil(PAGE)),
        speculate: match Speculate::from(args.how) {
            // The first case of every run is off.
            Speculate::Off => Speculate::Ngram,
            how => how,
        },
        drafts: args.drafts,
        measure_costs: true,
        ..EngineOptions::default()
    };
    model::load_engine(model::backend(&args.target.model.backend)?, files, &options)
}

/// The ids of a file, by the demo model's tokenizer if the model has none.
fn text(path: &Path, files: &ModelFiles) -> Outcome<Vec<u32>> {
    let bytes = input_file::load_regular(path, MAX_TEXT)?;
    let text = String::from_utf8_lossy(&bytes);
    if let Ok(tokenizer) = files.tokenizer() {
        return Ok(tokenizer.encode_plain(&text)?);
    }
    let demo = pollster::block_on(ModelFiles::open(Arc::new(embedded::DEMO), || 0))?;
    Ok(demo.tokenizer()?.encode_plain(&text)?)
}

/// The sequences of a run, prompts and answers: parts of the file, else made-up ids.
fn texts(args: &BenchSpeculateArgs, vocab: usize, file: Option<Vec<u32>>) -> Outcome<Vec<Vec<u32>>> {
    let (length, mut random) = (args.prompt_tokens + args.decode_tokens, Random(SEED));
    let Some(ids) = file else {
        return Ok((0..args.batch).map(|_| random.ids(length, vocab)).collect());
    };
    if ids.len() < length || ids.iter().any(|id| *id as usize >= vocab) {
        let why = format!("the text has {} tokens of {} that are needed, or ids beyond {vocab}", ids.len(), length);
        return Err(Failure::Usage(format!("--text: {why}; give a longer one, or fewer tokens")));
    }
    let spread = (ids.len() - length) / args.batch;
    Ok((0..args.batch).map(|i| ids[i * spread..][..length].to_vec()).collect())
}

/// What the drafters of a run do.
#[derive(Clone, Copy)]
enum Guesses {
    Off,
    /// So many at a time, and this percentage of them right.
    Rated(usize, u64),
    Ngram,
    Head,
}

/// A text says nothing about guesses of a given quality, so these are measured without one.
fn cases(args: &BenchSpeculateArgs) -> Vec<Guesses> {
    let counts = [1, 3, 7].into_iter().filter(|count| *count <= args.drafts && args.text.is_none());
    let rated = counts.flat_map(|count| RIGHT.map(|right| Guesses::Rated(count, right)));
    let own = if args.how == SpeculateArg::Mtp { Guesses::Head } else { Guesses::Ngram };
    [Guesses::Off].into_iter().chain(rated).chain([own]).collect()
}

/// Guesses a text that it knows.
#[derive(Clone)]
struct Rated {
    text: Arc<[u32]>,
    /// How many fewer than it is asked for: the engine also asks for tokens that it has not read yet.
    fewer: usize,
    /// Percent that are right.
    right: u64,
}

impl Drafter for Rated {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        let next = self.text.iter().enumerate().skip(known.len()).take(most.saturating_sub(self.fewer));
        next.map(|(at, id)| if Random(at as u64).next() % 100 < self.right { *id } else { another(*id) }).collect()
    }
    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

fn another(id: u32) -> u32 {
    if id == 0 { 1 } else { id - 1 }
}

/// Tokens per second, tokens per step, and the share of guesses that were right.
#[derive(Clone, Copy, Default)]
struct Speed {
    rate: f64,
    per_step: f64,
    right: Option<f64>,
}

struct Measured {
    guesses: Guesses,
    speed: Speed,
    /// The rate without guesses.
    off: f64,
}

async fn measure(
    engine: &mut dyn AnyEngine,
    args: &BenchSpeculateArgs,
    texts: &[Vec<u32>],
    cases: &[Guesses],
) -> Result<Vec<Measured>> {
    let mut best = vec![Speed::default(); cases.len()];
    // The first run is a warm-up.
    for run in 0..=args.runs {
        for (case, best) in cases.iter().zip(&mut best) {
            let speed = decode(engine, texts.iter().map(|text| request(args, text, *case)).collect()).await?;
            if run > 0 && speed.rate > best.rate {
                *best = speed;
            }
        }
    }
    let off = best[0].rate;
    Ok(cases.iter().zip(best).map(|(guesses, speed)| Measured { guesses: *guesses, speed, off }).collect())
}

/// A request that is answered with the rest of its text.
fn request(args: &BenchSpeculateArgs, text: &[u32], guesses: Guesses) -> Request {
    let rated = |fewer, right| -> Box<dyn Drafter> { Box::new(Rated { text: text.into(), fewer, right }) };
    let drafter = match guesses {
        Guesses::Off => Some(rated(usize::MAX, 0)),
        Guesses::Rated(count, right) => Some(rated(args.drafts - count, right)),
        Guesses::Ngram | Guesses::Head => None,
    };
    let (prompt, answer) = text.split_at(args.prompt_tokens);
    Request {
        prompt: prompt.to_vec(),
        forced: answer.into(),
        max_tokens: args.decode_tokens,
        drafter,
        ..Request::default()
    }
}

/// Runs requests to their ends; the clock starts when all have a token.
async fn decode(engine: &mut dyn AnyEngine, requests: Vec<Request>) -> Result<Speed> {
    let mut waiting = requests.into_iter().map(|request| engine.submit(request)).collect::<Result<Vec<_>>>()?;
    let (mut start, mut before, mut tokens) = (Instant::now(), engine.stats(), 0);
    while !engine.is_idle() {
        for event in engine.step().await? {
            let Event::Token { id, .. } = event else { continue };
            if waiting.is_empty() {
                tokens += 1;
                continue;
            }
            waiting.retain(|of| *of != id);
            (start, before) = (Instant::now(), engine.stats());
        }
    }
    let (seconds, after) = (start.elapsed().as_secs_f64(), engine.stats());
    let guessed = after.drafts.tokens - before.drafts.tokens;
    let accepted = after.drafts.accepted() - before.drafts.accepted();
    Ok(Speed {
        rate: f64::from(tokens) / seconds,
        per_step: f64::from(tokens) / (after.steps - before.steps).max(1) as f64,
        right: (guessed > 0).then(|| accepted as f64 / guessed as f64),
    })
}

impl Guesses {
    fn name(self) -> String {
        match self {
            Self::Off => "off".into(),
            Self::Rated(most, right) => format!("{most} guesses, {right} % right"),
            Self::Ngram => "n-gram".into(),
            Self::Head => "MTP head".into(),
        }
    }
}

fn as_text(args: &BenchSpeculateArgs, model: &str, device: &str, all: &[Measured]) -> String {
    let BenchSpeculateArgs { batch, prompt_tokens, decode_tokens, runs, .. } = args;
    let mut text = format!("{model} on {device}\n");
    text +=
        &format!("(prompts of {prompt_tokens} tokens, answers of {decode_tokens}, {batch} at once; best of {runs})\n");
    text += &format!("{:<36}{:>10}{:>14}{:>12}{:>9}\n", "", "tokens/s", "tokens/step", "accepted", "of off");
    for Measured { guesses, speed, off } in all {
        let right = speed.right.map_or(String::new(), |right| format!("{:.0} %", 100.0 * right));
        let (name, rate, gain) = (guesses.name(), thousands(speed.rate), speed.rate / off);
        text += &format!("{name:<36}{rate:>10}{:>14.2}{right:>12}{gain:>9.2}\n", speed.per_step);
    }
    text
}

fn as_json(args: &BenchSpeculateArgs, model: &str, device: &str, all: &[Measured]) -> Value {
    let one = |m: &Measured| {
        json!({
            "guesses": m.guesses.name(),
            "tokens_per_second": m.speed.rate,
            "tokens_per_step": m.speed.per_step,
            "accepted": m.speed.right,
            "of_off": m.speed.rate / m.off,
        })
    };
    json!({
        "model": model,
        "device": device,
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "decode_tokens": args.decode_tokens,
        "runs": args.runs,
        "cases": all.iter().map(one).collect::<Vec<_>>(),
    })
}
