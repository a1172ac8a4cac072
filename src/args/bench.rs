//! Arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use selkie_core::engine::{MOST_BATCH, MOST_DRAFTS, MOST_STEP_TOKENS};

#[cfg(feature = "serve")]
use super::PoolArgs;
use super::{
    BackendArgs, ModelArgs, SpeculateArg,
    values::{one_to, parse_size},
};

/// Maximum tokens of a benchmark's prompts, more than any model's context.
pub const MAX_TOKENS: usize = 1 << 24;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  selkie bench
  selkie bench model -m DIR --prompt-tokens 512 --json
  selkie bench model --config models/configs/granite-4.0-h-350m.json
  selkie bench model --config models/configs/granite-4.0-h-350m.json --weights q4_k_m
  selkie bench ops matmul
  selkie bench prefix
  selkie bench prefix --traffic --svg traffic.svg
  selkie bench speculate --text README.md
  selkie bench serve")]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// The kinds of `bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Tokens per second of prefill and decode, compared with the limits of this machine (the default)
    Model(BenchModelArgs),
    /// Times of single ops at the sizes of published models: cold, net of a launch, warm, and the share of the limit
    Ops(BenchOpsArgs),
    /// How much the prefix cache reuses: in a fixed scenario, or in realistic traffic
    Prefix(BenchPrefixArgs),
    /// What HTTP, idle connections and structured output cost, against the same requests without them
    #[cfg(feature = "serve")]
    #[command(after_help = BENCH_SERVE)]
    Serve(BenchServeArgs),
    /// What guessed tokens gain, by the number of them and by how many are right, and with a text
    Speculate(BenchSpeculateArgs),
}

/// What `selkie bench serve --help` ends with.
#[cfg(feature = "serve")]
const BENCH_SERVE: &str = "Model, server and load generator are one process. The cases take turns; each round has the same requests and begins
with an empty prefix cache. On the CPU the answers of all cases are compared. Random weights (--config) get a made-up
tokenizer. The load generator is one thread, whose processor time is reported.

Examples:
  selkie bench serve
  selkie bench serve --clients 4 --no-stream
  selkie bench serve --idle-connections 1000
  selkie bench serve --clients 8 --schema
  selkie bench serve --config models/configs/granite-4.0-h-1b.json --clients 64 --runs 3 --json";

/// The model of a benchmark.
#[derive(Clone, Debug, Args)]
pub struct BenchTarget {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Measure a model with random weights of this config.json
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub config: Option<PathBuf>,
    /// With --config: random weights of this format, or mix of formats, e.g. q4_k_m, q8_0, fp8 or int4 (default: bf16)
    #[arg(long, value_name = "FORMAT", requires = "config")]
    pub weights: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bench model`.
#[derive(Debug, Args)]
pub struct BenchModelArgs {
    #[command(flatten)]
    pub target: BenchTarget,
    /// Tokens of each prompt, and so the context at the start of decoding
    #[arg(long, visible_alias = "context", value_name = "N", default_value = "512", value_parser = one_to(MAX_TOKENS))]
    pub prompt_tokens: usize,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "N", default_value = "64", value_parser = one_to(MAX_TOKENS))]
    pub decode_tokens: usize,
    /// Sequences at once, each with a different prompt
    #[arg(long, value_name = "B", default_value = "1", value_parser = one_to(MOST_BATCH))]
    pub batch: usize,
    /// Most tokens that one step computes
    #[arg(long, value_name = "N", default_value = "512", value_parser = one_to(MOST_STEP_TOKENS))]
    pub step_tokens: usize,
    /// Repetitions after a warm-up run; the best is reported, as for the machine's limits [default: 3, fewer once
    /// 2 s have passed]
    #[arg(long, value_name = "N", value_parser = one_to(1000))]
    pub runs: Option<usize>,
}

/// Arguments of `bench ops`.
#[derive(Debug, Args)]
pub struct BenchOpsArgs {
    /// Only shapes whose name contains this, e.g. `matmul`
    pub filter: Option<String>,
    /// Where it runs.
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Include the largest shapes on a CPU, too
    #[arg(long)]
    pub all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bench speculate`.
#[derive(Debug, Args)]
pub struct BenchSpeculateArgs {
    #[command(flatten)]
    pub target: BenchTarget,
    /// Prompts and answers are parts of this text, not made-up ids
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// When rows with guesses are planned: always, or where it should pay
    #[arg(long = "speculate", value_name = "HOW", value_enum, default_value = "ngram")]
    pub how: SpeculateArg,
    /// Most guesses in a step of a sequence, 1 to 7
    #[arg(long, value_name = "K", default_value = "7", value_parser = one_to(MOST_DRAFTS))]
    pub drafts: usize,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value = "256", value_parser = one_to(MAX_TOKENS))]
    pub prompt_tokens: usize,
    /// Tokens that each sequence generates
    #[arg(long, value_name = "N", default_value = "128", value_parser = one_to(MAX_TOKENS))]
    pub decode_tokens: usize,
    /// Sequences at once
    #[arg(long, value_name = "B", default_value = "1", value_parser = one_to(MOST_BATCH))]
    pub batch: usize,
    /// Alternating runs of all cases after a warm-up; the best of each is reported
    #[arg(long, value_name = "N", default_value = "3", value_parser = one_to(1000))]
    pub runs: usize,
}

/// Arguments of `bench serve`.
#[cfg(feature = "serve")]
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    #[command(flatten)]
    pub target: BenchTarget,
    /// Clients at a time, each with one connection and one request at a time
    #[arg(long, value_name = "C", default_value = "8", value_parser = one_to(MOST_BATCH))]
    pub clients: usize,
    /// Requests of a round (default: four a client; with --schema one)
    #[arg(long, value_name = "N", value_parser = one_to(MAX_TOKENS))]
    pub requests: Option<usize>,
    /// Tokens with which all prompts begin
    #[arg(long, value_name = "N", default_value = "1000")]
    pub shared_tokens: usize,
    /// Tokens that each prompt has to itself
    #[arg(long, value_name = "N", default_value = "100", value_parser = one_to(MAX_TOKENS))]
    pub own_tokens: usize,
    /// Tokens that each request generates
    #[arg(long, value_name = "N", default_value = "128", value_parser = one_to(MAX_TOKENS))]
    pub decode_tokens: usize,
    /// Answers come whole instead of in pieces
    #[arg(long)]
    pub no_stream: bool,
    /// Only without HTTP: what the other cases are compared with
    #[arg(long)]
    pub no_http: bool,
    /// Also measure while so many other connections are open and silent
    #[arg(long, value_name = "K", default_value = "0", conflicts_with = "no_http")]
    pub idle_connections: usize,
    /// Also measure with answers that are held to a JSON schema, one request a client: compares the decoding
    #[arg(long, conflicts_with_all = ["no_http", "no_stream", "requests"])]
    pub schema: bool,
    /// Alternating rounds of all cases after a warm-up; medians are reported
    #[arg(long, value_name = "N", default_value = "5", value_parser = one_to(1000))]
    pub runs: usize,
    /// Memory and scheduling.
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `bench prefix`.
#[derive(Debug, Args)]
pub struct BenchPrefixArgs {
    #[command(flatten)]
    pub target: BenchTarget,
    /// Chats that share a system prompt and agents that branch, with memory for 100, 50 and 25 % of their states
    #[arg(long)]
    pub traffic: bool,
    /// The cost of the cache without hits, and the time to the first token of a hit
    #[arg(long, conflicts_with = "traffic")]
    pub overhead: bool,
    /// The time to the first token of a prompt of so many tokens, by where its pages and states are: nowhere, on the device, in
    /// host memory, on disk
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["traffic", "overhead"], value_parser = one_to(MAX_TOKENS))]
    pub restore: Option<usize>,
    /// How fast the pages and states of a prompt of so many tokens are saved to a bundle, loaded, and handed over
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["traffic", "overhead", "restore"], value_parser = one_to(MAX_TOKENS))]
    pub bundle: Option<usize>,
    /// Repetitions of the traffic; the cases take turns, and the median of each is reported
    #[arg(long, value_name = "N", default_value = "1", value_parser = one_to(1000), requires = "traffic")]
    pub runs: usize,
    /// Number of chats
    #[arg(long, value_name = "N", default_value = "64", value_parser = one_to(MOST_BATCH), requires = "traffic")]
    pub chats: usize,
    /// Turns per chat
    #[arg(long, value_name = "N", default_value = "8", value_parser = one_to(MOST_BATCH), requires = "traffic")]
    pub turns: usize,
    /// Tokens of the system prompt that all chats share
    #[arg(long, value_name = "N", default_value = "1000", value_parser = one_to(MAX_TOKENS), requires = "traffic")]
    pub system_tokens: usize,
    /// Also measure the default policy with so much host memory for what is evicted, e.g. 2GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "traffic", conflicts_with = "svg")]
    pub host_cache: Option<u64>,
    /// Also write the table as an SVG plot
    #[arg(long, value_name = "FILE", requires = "traffic")]
    pub svg: Option<PathBuf>,
}
