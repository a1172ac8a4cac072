//! Arguments of the subcommands that answer: `generate`, `chat` and `batch`.

use std::path::PathBuf;

use clap::Args;
use selkie_core::controls::MOST_TOP;

use super::{ModelArgs, PoolArgs, SamplingArgs, WhenFullArg};

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The prompt; text that is piped in follows it, or is the prompt if there is none (or `-`)
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// System prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Continue the prompt as text, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Print one JSON object instead of streaming text
    #[arg(long)]
    pub json: bool,
    /// Add the log probability of each token to the object, and those of the N most likely tokens at its place
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u8).range(..=MOST_TOP as i64))]
    pub logprobs: Option<u8>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// What happens when conversation and answer are longer than the context
    #[arg(long, value_enum, value_name = "POLICY", default_value = "error")]
    pub when_full: WhenFullArg,
    /// Go on with the conversation in this bundle, from its state
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    pub load: Option<PathBuf>,
    /// Write conversation and state to this bundle when the chat ends; only its owner can read it
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Refuse a bundle whose values another device or version computed, instead of converting them
    #[arg(long, requires = "load")]
    pub exact_only: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `batch`.
#[derive(Debug, Args)]
pub struct BatchArgs {
    /// Requests, one JSON object a line; `-` reads standard input
    #[arg(value_name = "IN.jsonl")]
    pub input: PathBuf,
    /// Answers, one JSON object a line; `-`, and nothing in a pipe: standard output
    #[arg(short, long, value_name = "OUT.jsonl")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// What happens when messages and answer are longer than the context, for lines without `when_full`
    #[arg(long, value_enum, value_name = "POLICY", default_value = "error")]
    pub when_full: WhenFullArg,
    /// Run one request at a time
    #[arg(long)]
    pub sequential: bool,
    /// Write answers in the order in which they are complete, not in that of the requests
    #[arg(long)]
    pub unordered: bool,
    /// Go on from a run that did not reach its end, or answer the failed lines of one that did: a request whose id, or
    /// else whose line and its number, has an answer in the output is left out
    #[arg(long)]
    pub resume: bool,
    /// Begin with the state in this bundle, for requests without a namespace
    #[arg(long, value_name = "FILE")]
    pub warm: Option<PathBuf>,
    /// Refuse a bundle whose values another device or version computed, instead of converting them
    #[arg(long, requires = "warm")]
    pub exact_only: bool,
    /// Write counters of the run to this file
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    #[command(flatten)]
    pub pool: PoolArgs,
}
