//! Options that several subcommands share: model, device, sampling, memory.

use std::{path::PathBuf, time::Duration};

use clap::{ArgGroup, Args, ValueEnum};
use selkie_core::{
    engine::{MOST_BATCH, MOST_DRAFTS, MOST_STEP_TOKENS, Speculate},
    format::Products,
    ranks::{MOST_RANKS, Rendezvous},
    session::{Overrides, WhenFull},
    tier::{ColdDtype, DiskOptions, TierOptions, Where},
};

use super::values::{at_least_one, one_to, parse_size, parse_time};
use crate::{
    backend::Place,
    failure::{Failure, Outcome},
    open::Device,
};

/// The model and its device.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model: a directory as published on Hugging Face, or `owner/name[@revision][:file]`, which is looked for in the cache
    /// of its tools and else fetched after a question (default: the embedded demo model)
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Fetch a model that is not here without asking
    #[arg(short, long)]
    pub yes: bool,
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
    /// Precision of stored keys and values; int8 takes a quarter of the memory of f32 and about half of that of bf16, and rounds
    #[arg(long, value_name = "DTYPE", value_enum, default_value = "auto")]
    pub kv_dtype: KvType,
    /// CUDA devices by number, such as 0,1: several share the model, each with a part of its weights and states; they have to be
    /// of one host and reach one another's memory. One alone is the device to use
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub gpus: Vec<usize>,
    /// Divide the model over N ranks of the CPU, threads that hold a share of it each; for testing how models are divided, it is
    /// not faster (needs --backend cpu; for GPUs see --gpus)
    #[arg(long, value_name = "N", default_value = "1", value_parser = one_to(MOST_RANKS))]
    pub ranks: usize,
    /// Every rank as a process of its own
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Products of matrices; exact ones take activations as they are, fast ones may round them
    #[arg(long, value_name = "KIND", value_enum, default_value = "fast")]
    pub products: ProductsArg,
}

/// Which rank of a model this process is.
#[derive(Clone, Debug, Default, Args)]
pub struct ProcessArgs {
    /// Rank of this process, if every rank that shares the model is one: each runs the same command with its number, from 0 on.
    /// Rank 0 answers, the others follow it and end with it. torchrun's variables say the same (RANK, WORLD_SIZE, MASTER_ADDR,
    /// and the port after MASTER_PORT). Of one host; --gpus names the device, else it is LOCAL_RANK or the rank
    #[arg(long, value_name = "R", requires_all = ["world", "rendezvous"])]
    pub rank: Option<usize>,
    /// Number of ranks in processes of their own
    #[arg(long, value_name = "W", requires = "rank", value_parser = one_to(MOST_RANKS))]
    pub world: Option<usize>,
    /// Where rank 0 listens for the others, unencrypted, such as 127.0.0.1:29500
    #[arg(long, value_name = "HOST:PORT", requires = "rank")]
    pub rendezvous: Option<String>,
    /// The command loads one engine.
    #[arg(skip)]
    pub possible: bool,
}

impl ProcessArgs {
    /// What they or torchrun's variables say, which `variable` looks up; `None` for a single process.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a rank that there is not, and for a command that has none.
    fn rendezvous(&self, variable: impl Fn(&str) -> Option<String>) -> Outcome<Option<Rendezvous>> {
        if !self.possible {
            let only = "--rank is for commands that load one engine: generate, chat, batch, serve and bench model";
            return if self.rank.is_some() { Err(Failure::Usage(only.into())) } else { Ok(None) };
        }
        let number = |name: &str| variable(name)?.parse::<usize>().ok();
        let at = match (self.rank, self.world, &self.rendezvous) {
            (Some(rank), Some(ranks), Some(address)) => Rendezvous { address: address.clone(), rank, ranks },
            _ => {
                let told = (number("RANK"), number("WORLD_SIZE"), variable("MASTER_ADDR"), number("MASTER_PORT"));
                let (Some(rank), Some(ranks), Some(host), Some(port)) = told else { return Ok(None) };
                // torchrun itself listens at the port.
                Rendezvous { address: format!("{host}:{}", port + 1), rank, ranks }
            }
        };
        match at {
            Rendezvous { rank, ranks, .. } if rank >= ranks => {
                Err(Failure::Usage(format!("rank {rank} of {ranks}: ranks are counted from 0")))
            }
            Rendezvous { ranks: 1, .. } => Ok(None),
            at => Ok(Some(at)),
        }
    }
}

/// How activations enter products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProductsArg {
    /// Quantised weights: in 8 bits on the CPU and in large products of few rows on wgpu, and everywhere in 8-bit floats where the
    /// weights' recipe says so. All weights in 16 bits or fewer: in 16 bits in products of more than 8
    /// rows on wgpu, where the device has cooperative matrices, unless the model has a router
    Fast,
    /// As they are
    Exact,
}

impl From<ProductsArg> for Products {
    fn from(arg: ProductsArg) -> Self {
        match arg {
            ProductsArg::Fast => Self::Fast,
            ProductsArg::Exact => Self::Exact,
        }
    }
}

impl BackendArgs {
    /// Whether several ranks share the model.
    pub fn divided(&self) -> bool {
        self.ranks > 1 || self.gpus.len() > 1
    }

    /// What they mean.
    ///
    /// # Errors
    /// [`Failure::Usage`] if they contradict each other.
    pub fn place(&self) -> Outcome<Place> {
        let (bf16_state, adapter) = (self.state_dtype == StateType::Bf16, self.adapter.clone());
        let variable = |name: &str| std::env::var(name).ok();
        let process = self.process.rendezvous(variable)?;
        let gpus = match (&process, &self.gpus[..]) {
            (Some(_), [_, _, ..]) => {
                return Err(Failure::Usage("--gpus names the one device of each rank if ranks are processes".into()));
            }
            (Some(at), []) if matches!(self.name, BackendName::Auto | BackendName::Cuda) => {
                vec![variable("LOCAL_RANK").and_then(|rank| rank.parse().ok()).unwrap_or(at.rank)]
            }
            (_, gpus) => gpus.to_vec(),
        };
        let device = match self.name {
            BackendName::Auto if !gpus.is_empty() => Device::Cuda,
            BackendName::Auto => Device::Auto,
            BackendName::Cuda => Device::Cuda,
            BackendName::Wgpu => Device::Wgpu,
            BackendName::Cpu => Device::Cpu,
        };
        match (device, &adapter) {
            (Device::Cuda | Device::Cpu, Some(_)) => {
                Err(Failure::Usage("--adapter chooses a device of the wgpu backend: add --backend wgpu".into()))
            }
            (Device::Wgpu | Device::Cpu, _) | (_, Some(_)) if bf16_state => {
                Err(Failure::Usage("--state-dtype bf16 is for the CUDA backend: the others keep states in f32".into()))
            }
            (device, _) if self.ranks > 1 && device != Device::Cpu => Err(Failure::Usage(
                "--ranks divides a model over the CPU: add --backend cpu, or name CUDA devices with --gpus 0,1".into(),
            )),
            (Device::Wgpu, _) if process.is_some() => {
                Err(Failure::Usage("ranks are CUDA devices, or of the CPU: add --backend cuda or cpu".into()))
            }
            _ if process.is_some() && self.ranks > 1 => {
                Err(Failure::Usage("--ranks are threads of one process: leave it out where every rank is one".into()))
            }
            (device, _) if !gpus.is_empty() && device != Device::Cuda => {
                Err(Failure::Usage("--gpus names CUDA devices: leave --backend out, or add --backend cuda".into()))
            }
            _ => Ok(Place {
                device,
                adapter,
                bf16_state,
                kv8: self.kv_dtype == KvType::Int8,
                products: self.products.into(),
                ranks: self.ranks,
                gpus,
                process,
                ..Place::default()
            }),
        }
    }
}

/// Precision of stored recurrent states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StateType {
    /// Single precision
    F32,
    /// bf16 in memory, computation in single precision
    Bf16,
}

/// Precision of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvType {
    /// That of the activations
    Auto,
    /// 8 bits, with a scale per token and head
    Int8,
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
    /// Maximum tokens to generate (default: 1024, or the rest of the context if that is less)
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

/// What happens when a conversation is longer than the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenFullArg {
    /// The message is refused
    Error,
    /// The oldest turns are left out, the system prompt is kept
    DropOldest,
}

impl From<WhenFullArg> for WhenFull {
    fn from(arg: WhenFullArg) -> Self {
        match arg {
            WhenFullArg::Error => Self::Error,
            WhenFullArg::DropOldest => Self::DropOldest,
        }
    }
}

/// Memory and scheduling.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct PoolArgs {
    /// Memory for recurrent states and KV pages, e.g. 4GiB, 512MiB or 4GB (10^9 bytes)
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
    /// Whether tokens are guessed ahead.
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    /// Where the prefix cache keeps what it has no room for.
    #[command(flatten)]
    pub tiers: TierArgs,
}

/// Guesses of the tokens that come next.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct SpeculateArgs {
    /// Guess the tokens that come next and verify several in one step; answers stay the same
    #[arg(long = "speculate", value_name = "HOW", value_enum, default_value = "auto")]
    pub how: SpeculateArg,
    /// Most guesses in a step of a sequence, 1 to 7; 1, 3 and 7 are used
    #[arg(long, value_name = "K", default_value = "7", value_parser = one_to(MOST_DRAFTS))]
    pub drafts: usize,
}

/// Whether requests draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpeculateArg {
    /// One token at a time
    Off,
    /// As mtp and ngram together, where it should pay: as far as guesses were right so far, never in large batches
    Auto,
    /// Where the last three tokens occurred before in prompt or answer, guess what followed them there
    Ngram,
    /// Guess with the model's own head for that, if it has one (MTP)
    Mtp,
}

impl From<SpeculateArg> for Speculate {
    fn from(arg: SpeculateArg) -> Self {
        match arg {
            SpeculateArg::Off => Self::Off,
            SpeculateArg::Auto => Self::Auto,
            SpeculateArg::Ngram => Self::Ngram,
            SpeculateArg::Mtp => Self::Mtp,
        }
    }
}

/// Tiers below the device's memory.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
#[command(group = ArgGroup::new("lower_tier").args(["host_cache", "disk_cache"]).multiple(true))]
pub struct TierArgs {
    /// Host memory for states and pages that the prefix cache has no room for, e.g. 8GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "no_prefix_cache")]
    pub host_cache: Option<u64>,
    /// Directory for them; it outlives the program, several may share it, and only its owner can read it
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub disk_cache: Option<PathBuf>,
    /// Most bytes in that directory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "16GiB", requires = "disk_cache")]
    pub disk_cache_size: u64,
    /// Delete what was not used for so long, e.g. 12h or 30d
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "7d", requires = "disk_cache")]
    pub disk_cache_ttl: Duration,
    /// What recurrent states are in both: int8 takes a quarter of the room of f32 and is not exact, so answers that go on from such
    /// a state say `converted`
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "exact", requires = "lower_tier")]
    pub cold_dtype: ColdArg,
}

/// What recurrent states are in lower tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColdArg {
    /// What they are on the device
    Exact,
    /// 8 bits a value and a scale per row
    Int8,
}

impl From<ColdArg> for ColdDtype {
    fn from(arg: ColdArg) -> Self {
        match arg {
            ColdArg::Exact => Self::Exact,
            ColdArg::Int8 => Self::Int8,
        }
    }
}

impl TierArgs {
    /// What they mean; the model is named later.
    pub fn options(&self) -> TierOptions {
        let disk = |dir: &PathBuf| {
            let (bytes, ttl) = (self.disk_cache_size, self.disk_cache_ttl);
            DiskOptions { place: Where::Dir(dir.clone()), bytes, ttl, identity: Vec::new() }
        };
        TierOptions {
            host: self.host_cache.unwrap_or(0),
            disk: self.disk_cache.as_ref().map(disk),
            cold: self.cold_dtype.into(),
            ..TierOptions::default()
        }
    }
}

/// Which states of a prompt the prefix cache keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Branch point, last multiple of 64 tokens, ends of messages; while generating, the newest multiple of 64
    Default,
    /// One per prefill: the branch point, or else the last multiple of 64 tokens
    OnePerPrefill,
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
