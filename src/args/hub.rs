//! Arguments of the subcommands that fetch, list and remove models.

use clap::Args;

/// The end of `pull`'s help.
pub const PULL: &str = "Files go into the cache of Hugging Face's tools ($HF_HUB_CACHE, else $HF_HOME/hub, else
~/.cache/huggingface/hub), where Python finds them too. Ctrl-C stops; the same command goes on from there.
Only what the model needs is fetched: config.json, generation_config.json, the tokenizer, the chat template and the
weights. A token for private and gated models is taken from HF_TOKEN, the file HF_TOKEN_PATH or $HF_HOME/token.
HF_ENDPOINT names another server, HTTPS_PROXY a proxy; HF_HUB_OFFLINE=1 forbids all requests.

Examples:
  selkie pull ibm-granite/granite-4.0-h-350m
  selkie pull ibm-granite/granite-4.0-h-350m@main
  selkie pull owner/name:model-Q8_0.gguf";

/// The end of `list`'s help.
pub const LIST: &str = "Examples:
  selkie list
  selkie list --json | jq -r '.[] | select(.complete) | .name'";

/// The end of `rm`'s help.
pub const REMOVE: &str = "Examples:
  selkie rm ibm-granite/granite-4.0-h-350m
  selkie rm ibm-granite/granite-4.0-h-350m@v1 --yes";

/// Arguments of `pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// The model: `owner/name[@revision][:file]`
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Accepted for scripts that give it to every command; to pull is to agree
    #[arg(short, long, hide = true)]
    pub yes: bool,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    /// The model: `owner/name[@revision]`
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
}
