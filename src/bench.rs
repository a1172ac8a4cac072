//! `selkie bench`: measurements that anyone can repeat.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use selkie_core::{
    Error, Result,
    chat::system_clock,
    model_dir::ModelFiles,
    source::{Bytes, LocalFuture, Source},
    step::PAGE,
};

use crate::{
    args::{BenchArgs, BenchCommand, BenchTarget, MAX_TOKENS},
    failure::{Failure, Outcome},
    input_file, model,
};

mod bound;
mod bundles;
mod chart;
// Tests have it without the feature, which would compile the engine once more.
#[cfg(any(feature = "bench-ops", test))]
mod ops;
#[cfg(not(any(feature = "bench-ops", test)))]
mod ops {
    use crate::{
        args::BenchOpsArgs,
        failure::{Failure, Outcome},
    };

    /// Says how to get it.
    pub fn run(_: &BenchOpsArgs) -> Outcome {
        let build = "cargo build --release --features bench-ops";
        Err(Failure::Usage(format!("this selkie was built without `bench ops`; `{build}` makes one that has it")))
    }
}
mod overhead;
mod prefix;
mod restore;
#[cfg(feature = "serve")]
mod serve;
mod speculate;
mod speed;
mod traffic;

pub use bound::Work;

/// Maximum size of config.json, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Seed of random weights and prompts: every run measures the same.
const SEED: u64 = 1;

/// Refuses a run with too many tokens in all prompts and answers; `options` names the options that determine their number.
fn check_tokens(tokens: usize, options: &str) -> Outcome {
    if tokens > MAX_TOKENS {
        let why = format!("{options} make {tokens} tokens together, more than the {MAX_TOKENS} of a run; ask for less");
        return Err(Failure::Usage(why));
    }
    Ok(())
}

/// [`check_tokens`] of one prompt, of which the cache is to keep a state.
fn check_prompt(tokens: usize, option: &str) -> Outcome {
    check_tokens(tokens, option)?;
    if tokens <= PAGE {
        return Err(Failure::Usage(format!("{option} {tokens}: a prompt of more than {PAGE} tokens leaves a state")));
    }
    Ok(())
}

/// Runs the benchmark that was asked for.
pub fn run(args: &BenchArgs) -> Outcome {
    match &args.what {
        BenchCommand::Model(args) => speed::run(args),
        BenchCommand::Ops(args) => ops::run(args),
        #[cfg(feature = "serve")]
        BenchCommand::Serve(args) => serve::run(args),
        BenchCommand::Speculate(args) => speculate::run(args),
        BenchCommand::Prefix(args) if args.traffic => traffic::run(args),
        BenchCommand::Prefix(args) if args.overhead => overhead::run(args),
        BenchCommand::Prefix(args) => match (args.restore, args.bundle) {
            (Some(tokens), _) => restore::run(args, tokens),
            (None, Some(tokens)) => bundles::run(args, tokens),
            (None, None) => prefix::run(args),
        },
    }
}

/// The model to measure.
fn open(target: &BenchTarget) -> Outcome<Arc<ModelFiles>> {
    let Some(path) = &target.config else { return model::open(&target.model) };
    let recipe = target.weights.as_deref().map(str::parse).transpose()?;
    let bytes = input_file::load_regular(path, MAX_CONFIG_BYTES)?;
    let source = Arc::new(ConfigOnly { path: path.clone(), bytes: bytes.into() });
    Ok(Arc::new(pollster::block_on(ModelFiles::open_random(source, system_clock, SEED, recipe))?))
}

/// One file with any name as the config.json of a model.
struct ConfigOnly {
    path: PathBuf,
    bytes: Bytes,
}

impl ConfigOnly {
    fn file(&self, name: &str) -> Option<&Bytes> {
        (name == "config.json").then_some(&self.bytes)
    }
}

impl Source for ConfigOnly {
    fn label(&self) -> String {
        self.path.display().to_string()
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok(self.file(name).map(|b| b.len() as u64))))
    }

    fn read<'a>(&'a self, name: &'a str, range: std::ops::Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let missing = || Error::io(Path::new(name), std::io::ErrorKind::NotFound.into());
        let part = self.file(name).and_then(|b| b.get(range.start as usize..range.end as usize));
        Box::pin(std::future::ready(part.ok_or_else(missing)))
    }

    fn path(&self, _name: &str) -> String {
        self.label()
    }
}

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    /// The next number (splitmix64).
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number less than `n`.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Token ids of a made-up text.
    fn ids(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocab) as u32).collect()
    }
}
