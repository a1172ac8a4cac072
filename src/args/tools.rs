//! Arguments of the subcommands that show or write things: `logits`, `inspect`, `convert`, `devices`, `web`, `config`,
//! `completions`, `man`.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use clap_complete::Shell;
use selkie_core::convert::Target;

use super::{ModelArgs, PoolArgs};

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
    /// The model, like -m; a config.json alone is enough
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub what: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The GGUF file to write
    #[arg(short, long, value_name = "FILE.gguf")]
    pub output: PathBuf,
    /// Type of the matrices: f32, bf16, q8_0, q6_k, q5_k_m, q4_k_m, iq4_nl or q4_0
    #[arg(long = "type", value_name = "TYPE")]
    pub kind: Target,
    /// Write the file even if other programs do not know the model's tokenizer, and with a head for drafts that they do not read
    #[arg(long)]
    pub selkie_only: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
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
    /// The folder that holds the page (default: web/dist if it is there, else the page in the program)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address to listen on; the default is reached from this machine only
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub listen: IpAddr,
}

/// Arguments of `config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The subcommand whose page is printed (default: the program's own)
    pub command: Option<String>,
    /// Write all pages to this folder
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub dir: Option<PathBuf>,
}
