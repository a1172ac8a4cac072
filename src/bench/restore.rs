//! `selkie bench prefix --restore N`: the time to the first token of a prompt that was computed before, by where its pages and
//! states are now: nowhere, on the device, in host memory, on disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use selkie_core::{
    engine::{AnyEngine, EngineOptions},
    model_dir::ModelFiles,
    step::PAGE,
    tier::{DiskOptions, Rates, TierOptions, Where},
};
use serde_json::{Value, json};

use super::{
    Random, SEED,
    overhead::{First, first_token, median},
};
use crate::{
    args::BenchPrefixArgs,
    failure::{Failure, Outcome},
    model,
    terminal::{self, Output, thousands},
};

/// Measurements of each of two prompts, after two of each that are not counted.
const ROUNDS: usize = 5;
/// Host memory, or the quota of the disk, for the values of two prompts; more than any model here needs.
const HOST: u64 = 8 << 30;

/// Where the prompt's pages and states are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Device,
    Host,
    Disk,
}

impl Place {
    const ALL: [Self; 4] = [Self::Nowhere, Self::Device, Self::Host, Self::Disk];

    fn name(self) -> &'static str {
        match self {
            Self::Nowhere => "computed",
            Self::Device => "on the device",
            Self::Host => "in host memory",
            Self::Disk => "on disk",
        }
    }
}

/// A folder for values on disk, deleted afterwards.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub fn create() -> Outcome<Self> {
        let path = std::env::temp_dir().join(format!("selkie-restore-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|e| Failure::Other(format!("{}: {e}", path.display())))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be deleted here is left to whoever cleans the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Measures and prints the table for prompts of `tokens` tokens.
pub fn run(args: &BenchPrefixArgs, tokens: usize) -> Outcome {
    super::check_prompt(tokens, "--restore")?;
    let files = super::open(&args.target)?;
    let mut medians = Vec::new();
    for place in Place::ALL {
        terminal::note(format_args!("{} ...", place.name()));
        medians.push(measure(args, &files, tokens, place)?);
    }
    let mut out = Output::new();
    if args.target.json { out.json(&json(tokens, &medians)) } else { out.text(&text(tokens, &medians)) }
}

/// Median milliseconds to the first token.
fn measure(args: &BenchPrefixArgs, files: &Arc<ModelFiles>, tokens: usize, place: Place) -> Outcome<f64> {
    let folder = (place == Place::Disk).then(Folder::create).transpose()?;
    let disk = folder.as_ref().map(|folder| DiskOptions {
        place: Where::Dir(folder.0.clone()),
        bytes: HOST,
        ttl: Duration::from_secs(3600),
        identity: b"bench".to_vec(),
    });
    let host = if place == Place::Host { HOST } else { 0 };
    let pages = tokens / PAGE + 2;
    let options = EngineOptions {
        max_batch: 1,
        prefix_cache: place != Place::Nowhere,
        // One prompt at a time has room, unless both are to stay.
        slots: Some(if place == Place::Device { 16 } else { 3 }),
        kv_pages: Some(if place == Place::Device { 3 * pages } else { pages }),
        tiers: TierOptions { host, disk, rates: Rates::ALWAYS, ..TierOptions::default() },
        ..EngineOptions::default()
    };
    let mut engine = model::load_engine(model::backend(&args.target.model.backend)?, files, &options)?;
    let vocab = engine.spec().vocab;
    let mut random = Random(SEED);
    let prompts = [random.ids(tokens, vocab), random.ids(tokens, vocab)];
    let mut times = Vec::new();
    for round in 0..2 * (ROUNDS + 2) {
        let first = pollster::block_on(first_token(&mut *engine, prompts[round % 2].clone()))?;
        // Both were computed, and both were restored once.
        if round < 4 {
            settle(&mut *engine)?;
            continue;
        }
        check(place, tokens, &first)?;
        times.push(first.ms);
    }
    Ok(median(times))
}

/// Lets copies arrive, and files be written, before the next request wants them.
fn settle(engine: &mut dyn AnyEngine) -> Outcome {
    let mut before = None;
    loop {
        std::thread::sleep(Duration::from_millis(200));
        pollster::block_on(engine.step())?;
        let tiers = engine.stats().tiers;
        if before.replace(tiers) == Some(tiers) {
            return Ok(());
        }
    }
}

/// A prompt that came from somewhere else would measure something else.
fn check(place: Place, tokens: usize, first: &First) -> Outcome {
    let most = (tokens - 1) / PAGE * PAGE;
    let wanted = match place {
        Place::Nowhere => (0, 0, 0),
        Place::Device => (most, 0, 0),
        Place::Host => (most, most, 0),
        Place::Disk => (most, 0, most),
    };
    let got = first.cache.map_or((0, 0, 0), |cache| (cache.reused, cache.host, cache.disk));
    if got == wanted {
        return Ok(());
    }
    let why = format!("{}: (reused, from host memory, from disk) is {got:?} and not {wanted:?} tokens", place.name());
    Err(Failure::Other(why))
}

fn text(tokens: usize, medians: &[f64]) -> String {
    let mut lines =
        vec![format!("first token of a prompt of {} tokens, median of {}:", thousands(tokens as f64), 2 * ROUNDS)];
    lines.extend(Place::ALL.iter().zip(medians).map(|(place, ms)| format!("{:<16} {ms:>9.2} ms", place.name())));
    lines.join("\n") + "\n"
}

fn json(tokens: usize, medians: &[f64]) -> Value {
    json!({
        "prompt_tokens": tokens,
        "first_token_ms": {
            "computed": medians[0],
            "device": medians[1],
            "host": medians[2],
            "disk": medians[3],
        },
    })
}
