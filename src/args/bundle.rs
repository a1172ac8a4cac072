//! Arguments of `bundle`, and of other commands that read one.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ModelArgs, PoolArgs};

/// Arguments of `bundle`.
#[derive(Debug, Args)]
pub struct BundleArgs {
    #[command(subcommand)]
    pub what: BundleCommand,
}

/// What to do with a bundle.
#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Compute a prompt and write its state
    #[command(after_help = "Examples:
  selkie bundle make -m DIR --system \"$(cat rules.txt)\" -o rules.bundle
  selkie bundle make -m DIR --raw - -o book.bundle < book.txt
  selkie batch questions.jsonl -o answers.jsonl -m DIR --warm rules.bundle")]
    Make(Box<MakeArgs>),
    /// Show what a bundle holds; no model is needed
    #[command(after_help = "Examples:
  selkie bundle inspect rules.bundle
  selkie bundle inspect rules.bundle --json | jq .numerics")]
    Inspect(InspectBundleArgs),
    /// Compare all checksums of a bundle and, with -m, its model
    #[command(after_help = "Examples:
  selkie bundle verify rules.bundle
  selkie bundle verify rules.bundle -m DIR")]
    Verify(VerifyArgs),
}

/// Arguments of `bundle make`.
#[derive(Debug, Args)]
pub struct MakeArgs {
    /// A user's message after the system prompt or, with --raw, the text; `-` reads standard input
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// The bundle to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// System prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// The prompt is text without a chat template
    #[arg(long, requires = "prompt")]
    pub raw: bool,
    /// Most states to write, the deepest ones; each of them is a place where other prompts may branch off
    #[arg(long, value_name = "N", default_value = "8")]
    pub states: usize,
    #[command(flatten)]
    pub pool: PoolArgs,
}

/// Arguments of `bundle inspect`.
#[derive(Debug, Args)]
pub struct InspectBundleArgs {
    /// The bundle
    pub file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bundle verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The bundle
    pub file: PathBuf,
    #[command(flatten)]
    pub model: ModelArgs,
}
