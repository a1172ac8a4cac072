//! Arguments of `serve`.

use std::{net::IpAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use selkie_core::{
    engine::MOST_BATCH,
    reply::{CallFormat, Reasoning},
};

use super::{
    ModelArgs, PoolArgs,
    values::{at_least_one, one_to, parse_size},
};

/// Most engines of a server.
const MOST_REPLICAS: usize = 64;

/// What `selkie serve --help` ends with.
pub const SERVE: &str = "Point a client of OpenAI at http://127.0.0.1:8000/v1, with any key. The first SIGTERM or Ctrl-C ends after the
running answers, the second one at once. The exit code is 1 if the engine fails.

Examples:
  selkie serve
  selkie serve -m ibm-granite/granite-4.0-h-350m --served-model-name granite
  selkie serve -m DIR --listen 0.0.0.0 --keys keys.json
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"Once\", \"max_tokens\": 9}'";

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub handover: HandoverArgs,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// The server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address to listen on; the default is reached from this machine only
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", alias = "host")]
    pub listen: IpAddr,
    /// Port to listen on (0: any free one)
    #[arg(long, value_name = "N", default_value = "8000")]
    pub port: u16,
    /// Name of the model in requests and answers; may be given several times (default: that of its folder or file)
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Engines with the same model, among which requests are divided by prefix and load: on the CPU they divide its threads and
    /// memory, with CUDA the first N devices have one each (needs --backend cpu or cuda)
    #[arg(long, value_name = "N", default_value = "1", value_parser = one_to(MOST_REPLICAS))]
    pub replicas: usize,
    /// How the model writes calls of tools, where its chat template does not show it
    #[arg(long, value_name = "FORMAT", value_parser = calls)]
    pub tool_call_parser: Option<CallFormat>,
    /// How the model writes reasoning, where its chat template does not show it
    #[arg(long, value_name = "FORMAT", value_parser = reasoning)]
    pub reasoning_parser: Option<Reasoning>,
    /// A JSON file that maps keys to namespaces: requests need a key, and share prefixes with those of their namespace
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// A host, with its port, by which clients of a server on a local address may call it, like `tunnel:9000`
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Most answers that wait for a place in the batch; more requests are refused with 429
    #[arg(long, value_name = "N", default_value = "256", value_parser = one_to(MOST_BATCH))]
    pub max_queue: usize,
    /// Most connections at a time; more wait
    #[arg(long, value_name = "N", default_value = "1024", value_parser = one_to(1 << 20))]
    pub max_connections: usize,
    /// Most bytes of a request's body
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = parse_size)]
    pub max_body: u64,
    /// Most bytes of a state that is saved or loaded over HTTP, or of a prompt that another server hands over
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_size)]
    pub max_state: u64,
    /// Seconds that an answer may take
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = at_least_one)]
    pub answer_time: usize,
    /// Seconds that running answers are given after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value = "25", value_parser = at_least_one)]
    pub drain_time: usize,
    /// Publish what the prefix cache holds at this address (ZMQ), for routers, like `tcp://127.0.0.1:5557`; it carries prompts
    #[arg(long, value_name = "ADDRESS")]
    pub kv_events: Option<String>,
    /// Address at which routers that missed events ask for them again
    #[arg(long, value_name = "ADDRESS", requires = "kv_events")]
    pub kv_events_replay: Option<String>,
    /// First frame of every message
    #[arg(long, value_name = "TEXT", default_value = "", requires = "kv_events")]
    pub kv_events_topic: String,
    /// How events are written
    #[arg(long, value_name = "FORMAT", default_value = "map", requires = "kv_events")]
    pub kv_events_format: KvFormat,
    /// The namespace whose prefixes are published
    #[arg(long, value_name = "NAME", default_value = "", requires = "kv_events")]
    pub kv_events_namespace: String,
}

/// Prompts that one server computes for another.
#[derive(Debug, Args)]
#[command(next_help_heading = "Hand-over")]
pub struct HandoverArgs {
    /// What is done of a request that a router sends to two servers (`sglang-router --pd-disaggregation`)
    #[arg(long, value_name = "ROLE", default_value = "both")]
    pub role: Role,
    /// Address where computed prompts are fetched; they are not encrypted, and whoever reaches it may read them
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub handover_listen: IpAddr,
    /// Port where computed prompts are fetched; the router is told
    #[arg(long, value_name = "N", default_value = "8998")]
    pub handover_port: u16,
    /// Another machine from which prompts may be fetched, by the host that the router names; may be given several times
    #[arg(long, value_name = "HOST")]
    pub prefill_host: Vec<String>,
    /// Seconds that a prompt may take on the other server; then it is computed by the one that answers
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = at_least_one)]
    pub handover_time: usize,
}

/// What a server does of a request that is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// All of it, as without a second server
    Both,
    /// It computes the prompt and gives its state to the other one
    Prefill,
    /// It answers with the state of the other one
    Decode,
}

/// Encoding of KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvFormat {
    /// Fields by name, those that are not set left out: vLLM since 0.26, SGLang
    Map,
    /// Fields by position, for older consumers
    Positional,
}

fn calls(name: &str) -> Result<CallFormat, String> {
    CallFormat::from_name(name).ok_or_else(|| format!("there are {}", CallFormat::ALL.map(CallFormat::name).join(", ")))
}

fn reasoning(name: &str) -> Result<Reasoning, String> {
    let all = [Reasoning::Think, Reasoning::Spoken].map(Reasoning::name);
    Reasoning::from_name(name).ok_or_else(|| format!("there are {}", all.join(", ")))
}
