//! The command line: subcommands, options and their help texts.

use std::{ffi::OsString, net::IpAddr, path::PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum, builder::RangedU64ValueParser};
use selkie_core::{
    engine::{MOST_BATCH, MOST_STEP_TOKENS},
    session::Overrides,
};

/// Runs hybrid language models, which combine attention with recurrent layers.
///
/// `selkie "PROMPT"` is short for `selkie generate "PROMPT"`. Without -m, the small demo model inside the program runs.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Print more on stderr (-vv: much more); SELKIE_LOG=FILTER selects in detail
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// Maximum tokens of a benchmark's prompts, more than any model's context.
pub const MAX_TOKENS: usize = 1 << 24;

const EXAMPLES: &str = "Examples:
  selkie \"What is 17 + 25?\"
  selkie \"Tell me a story about a fox named Leo and a lantern.\" --temperature 0.8 --seed 7
  selkie -m ~/models/granite-4.0-h-350m \"Why is the sky blue?\" --max-tokens 200
  selkie chat -m ~/models/granite-4.0-h-350m
  selkie batch requests.jsonl -o answers.jsonl
  selkie inspect -m ~/models/granite-4.0-h-350m
  selkie web
  selkie devices";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt (the default)
    #[command(after_help = "Examples:
  selkie generate \"What is 17 + 25?\"
  selkie generate -m DIR --system \"Answer in one sentence.\" \"Why is the sky blue?\"
  git diff | selkie generate -m DIR - --max-tokens 100
  selkie generate -m DIR --raw \"Once upon a time\" --temperature 0.8 --top-p 0.95 --seed 7
  selkie generate --json \"Hello!\"")]
    Generate(GenerateArgs),
    /// Chat with a model
    #[command(after_help = "Type /help in the chat for its commands. Ctrl-C stops an answer, Ctrl-D leaves.

Examples:
  selkie chat
  selkie chat -m DIR --system \"You are a helpful assistant.\" --temperature 0.7
  printf 'Hello!\\nWho are you?\\n' | selkie chat")]
    Chat(ChatArgs),
    /// Answer many requests from a JSON-lines file
    #[command(
        after_help = "A line of IN.jsonl: {\"id\": any JSON, one of \"prompt\" (text, no chat template), \"prompt_ids\" and
\"messages\", and optionally \"max_tokens\", \"temperature\", \"top_k\", \"top_p\", \"min_p\", \"repetition_penalty\",
\"seed\", \"stop\", \"namespace\"}. Answers come in the order of the requests. The exit code is 1 if a line failed.
Each answer is written to .OUT.jsonl.partial as soon as it is complete; with the last one the file becomes OUT.jsonl.
Ctrl-C or an error leaves .OUT.jsonl.partial, from which --resume goes on. A second Ctrl-C ends at once.

Examples:
  selkie batch requests.jsonl -o answers.jsonl
  selkie batch - -o - < requests.jsonl | jq .text
  selkie batch requests.jsonl -o answers.jsonl -m DIR --memory 4GiB --stats stats.json
  selkie batch requests.jsonl -o answers.jsonl --resume
  selkie batch requests.jsonl -o answers.jsonl --sequential --capture-policy one-per-prefill"
    )]
    Batch(BatchArgs),
    /// Write logits, greedy tokens and states of a prompt to a safetensors file, for comparison with other engines
    #[command(after_help = "The file holds logits [T, V], greedy_ids [N], greedy_logits [N, V] and, after the prompt,
state.layer{i}.conv [1, C, K-1] (oldest first) and state.layer{i}.recurrent [1, H, P, N]; its metadata names
backend, device and version. No cache is used and the greedy steps do not stop at an end-of-sequence token.

Examples:
  echo '[1, 3, 350, 273, 226, 22, 28]' > ids.json
  selkie logits --ids ids.json --steps 8 --out logits.safetensors
  selkie logits -m DIR --ids ids.json --steps 0 --out logits.safetensors --backend cpu")]
    Logits(LogitsArgs),
    /// Show a model's layers and sizes, and the memory per sequence
    #[command(after_help = "Examples:
  selkie inspect
  selkie inspect -m DIR --memory 4GiB
  selkie inspect -m DIR --json | jq .slot_bytes")]
    Inspect(InspectArgs),
    /// List the backends and their devices, and why some cannot be used
    #[command(after_help = "Examples:
  selkie devices
  selkie devices --json | jq '.[] | select(.usable)'")]
    Devices(DevicesArgs),
    /// Serve the browser page to this machine
    #[command(after_help = "The page is made by `web/build`; any other static server does as well.

Examples:
  selkie web
  selkie web --port 9000 --dir web/dist")]
    Web(WebArgs),
    /// Measure speed
    Bench(BenchArgs),
    /// Render chat templates for this program, see `render.rs`
    #[command(name = RENDER, hide = true)]
    Render,
}

/// The subcommand that this program starts itself with.
pub const RENDER: &str = "render-chat-templates";

/// The model and its device.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model directory as published on Hugging Face (default: the embedded demo model)
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Where it runs.
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// The device.
#[derive(Clone, Debug, Args)]
pub struct BackendArgs {
    /// Where to run; a backend chosen by name never falls back to another
    #[arg(long = "backend", value_name = "BACKEND", value_enum, default_value = "auto")]
    pub name: BackendName,
    /// Adapter of the wgpu backend: its number in `selkie devices`, or a part of its name
    #[arg(long, value_name = "NAME")]
    pub adapter: Option<String>,
    /// Precision of stored recurrent states; bf16 takes half the memory and time (CUDA only)
    #[arg(long, value_name = "DTYPE", value_enum, default_value = "f32")]
    pub state_dtype: StateType,
}

/// Precision of stored recurrent states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StateType {
    /// Single precision
    F32,
    /// bf16 in memory, computation in single precision
    Bf16,
}

/// The choice of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// cuda, else wgpu on a GPU, else cpu
    Auto,
    /// NVIDIA GPUs
    Cuda,
    /// Vulkan, Metal or DX12
    Wgpu,
    /// This machine's processor
    Cpu,
}

/// How tokens are sampled; defaults come from the model's generation_config.json.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Maximum tokens to generate (default: 1024, or what the context leaves)
    #[arg(long, value_parser = at_least_one, allow_negative_numbers = true, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Sampling temperature; 0 always takes the likeliest token
    #[arg(long, allow_negative_numbers = true, value_name = "X")]
    pub temperature: Option<f32>,
    /// Sample from the K likeliest tokens only (0: from all)
    #[arg(long, allow_negative_numbers = true, value_name = "K")]
    pub top_k: Option<u32>,
    /// Sample from the likeliest tokens whose probabilities add up to P
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    pub top_p: Option<f32>,
    /// Sample only tokens at least P times as likely as the likeliest
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens that already occurred (1: off)
    #[arg(long, allow_negative_numbers = true, value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// The same seed gives the same text (default: a new one every time)
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text (may be given several times)
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

/// Memory and scheduling.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct PoolArgs {
    /// Memory for recurrent states and KV pages, e.g. 4GiB or 512MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Number of recurrent-state slots, instead of a share of --memory
    #[arg(long, value_name = "N")]
    pub slots: Option<usize>,
    /// Number of KV pages of 64 tokens, instead of a share of --memory
    #[arg(long, value_name = "N")]
    pub kv_pages: Option<usize>,
    /// Longest sequence in tokens (default: the model's)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// Maximum sequences that run at once (default: 16; for a conversation 1)
    #[arg(long, value_name = "N", value_parser = one_to(MOST_BATCH))]
    pub max_batch: Option<usize>,
    /// Most tokens that one step computes
    #[arg(long, value_name = "N", default_value = "512", value_parser = one_to(MOST_STEP_TOKENS))]
    pub step_tokens: usize,
    /// Turn the prefix cache off: compute every prompt from its start
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Which states of a prompt the prefix cache keeps
    #[arg(long, value_enum, default_value = "default")]
    pub capture_policy: Policy,
}

/// Which states of a prompt the prefix cache keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Branch point, last multiple of 64 tokens, ends of messages; while generating, the newest multiple of 64
    Default,
    /// One per prefill: the branch point, or else the last multiple of 64 tokens
    OnePerPrefill,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The prompt; `-` reads it from standard input
    pub prompt: String,
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
    /// Answers, one JSON object a line; `-` writes standard output
    #[arg(short, long, value_name = "OUT.jsonl")]
    pub output: PathBuf,
    #[command(flatten)]
    pub model: ModelArgs,
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
    /// Write counters of the run to this file
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt: a file with a JSON array of token ids
    #[arg(long, value_name = "IDS.json")]
    pub ids: PathBuf,
    /// Greedy steps after the prompt
    #[arg(long, value_name = "N", default_value = "0")]
    pub steps: usize,
    /// The safetensors file to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `web`.
#[derive(Debug, Args)]
pub struct WebArgs {
    /// Port to listen on (0: any free one)
    #[arg(long, value_name = "N", default_value = "8080")]
    pub port: u16,
    /// The folder that holds the page
    #[arg(long, value_name = "DIR", default_value = "web/dist")]
    pub dir: PathBuf,
    /// Address to listen on; the default is reached from this machine only
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub listen: IpAddr,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  selkie bench
  selkie bench model -m DIR --prompt-tokens 512 --json
  selkie bench model --config models/configs/granite-4.0-h-350m.json
  selkie bench ops matmul
  selkie bench prefix
  selkie bench prefix --traffic --svg traffic.svg")]
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
}

/// The model of a benchmark.
#[derive(Clone, Debug, Args)]
pub struct BenchTarget {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Measure a model with random weights of this config.json
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub config: Option<PathBuf>,
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
    /// Repetitions after a warm-up run; the best is reported, as for the machine's limits
    #[arg(long, value_name = "N", default_value = "3", value_parser = one_to(1000))]
    pub runs: usize,
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
    /// Number of chats
    #[arg(long, value_name = "N", default_value = "64", value_parser = one_to(MOST_BATCH), requires = "traffic")]
    pub chats: usize,
    /// Turns per chat
    #[arg(long, value_name = "N", default_value = "8", value_parser = one_to(MOST_BATCH), requires = "traffic")]
    pub turns: usize,
    /// Tokens of the system prompt that all chats share
    #[arg(long, value_name = "N", default_value = "1000", value_parser = one_to(MAX_TOKENS), requires = "traffic")]
    pub system_tokens: usize,
    /// Also write the table as an SVG plot
    #[arg(long, value_name = "FILE", requires = "traffic")]
    pub svg: Option<PathBuf>,
}

impl SamplingArgs {
    /// The given values.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

impl Cli {
    /// Parses the program's arguments. If the first argument is not a subcommand, `generate` is assumed; `bench` alone means
    /// `bench model`.
    pub fn read() -> Result<Self, clap::Error> {
        Self::try_parse_from(with_defaults(std::env::args_os().collect()))
    }
}

fn with_defaults(mut args: Vec<OsString>) -> Vec<OsString> {
    let is_verbose = |a: &OsString| a == "--verbose" || a.to_str().is_some_and(|a| a.starts_with("-v"));
    let at = 1 + args.iter().skip(1).take_while(|a| is_verbose(a)).count();
    let cli = Cli::command();
    match args.get(at).map(|a| a.to_string_lossy().into_owned()) {
        None => {}
        Some(first) if ["-h", "--help", "help", "-V", "--version"].contains(&&*first) => {}
        Some(first) if first == "bench" => {
            let kinds = cli.find_subcommand("bench").expect("bench is a subcommand");
            let next = args.get(at + 1).and_then(|a| a.to_str()).unwrap_or_default();
            if !["-h", "--help", "help"].contains(&next) && kinds.find_subcommand(next).is_none() {
                args.insert(at + 1, "model".into());
            }
        }
        Some(first) if cli.find_subcommand(&first).is_some() => {}
        Some(_) => args.insert(at, "generate".into()),
    }
    args
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

fn one_to(most: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most as u64)
}

/// A size in bytes: `512MiB`, `4GiB`, `1.5GB`, `1000000`.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit {unit:?}; write for example 512MiB or 4GiB")),
    };
    let bytes = number.parse::<f64>().map_err(|_| "write for example 512MiB or 4GiB".to_owned())? * factor as f64;
    if bytes < 1.0 || bytes >= u64::MAX as f64 {
        return Err("is not a possible size".into());
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &[&str]) -> Command {
        let args = line.iter().map(OsString::from).collect();
        Cli::try_parse_from(with_defaults(args)).unwrap().command
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_prompt_alone_means_generate() {
        for line in [&["selkie", "Hello"][..], &["selkie", "-v", "Hello"], &["selkie", "--seed", "7", "Hello"]] {
            assert!(matches!(command(line), Command::Generate(g) if g.prompt == "Hello"), "{line:?}");
        }
        assert!(matches!(command(&["selkie", "-"]), Command::Generate(g) if g.prompt == "-"));
        assert!(matches!(command(&["selkie", "generate", "chat"]), Command::Generate(g) if g.prompt == "chat"));
        assert!(matches!(command(&["selkie", "-v", "chat"]), Command::Chat(_)));
    }

    #[test]
    fn bench_alone_means_bench_model() {
        for line in [&["selkie", "bench"][..], &["selkie", "bench", "--json"], &["selkie", "bench", "model"]] {
            assert!(matches!(command(line), Command::Bench(BenchArgs { what: BenchCommand::Model(_) })), "{line:?}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("4GiB"), Ok(4 << 30));
        assert_eq!(parse_size("1.5 MB"), Ok(1_500_000));
        assert_eq!(parse_size("77"), Ok(77));
        for bad in ["", "GiB", "4 apples", "0", "-1", "1e3"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
