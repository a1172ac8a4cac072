//! The command line: subcommands, options and their help texts.

use std::{ffi::OsString, io::IsTerminal};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

use crate::settings::Settings;

#[cfg(feature = "serve")]
pub use self::serve::*;
pub use self::{bench::*, bundle::*, hub::*, model::*, run::*, tools::*};

mod bench;
mod bundle;
mod first;
mod hub;
mod model;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod tools;
mod values;

/// Runs hybrid language models, which combine attention with recurrent layers.
///
/// `selkie "PROMPT"` is short for `selkie generate "PROMPT"`. Without -m, the small demo model inside the program runs.
#[derive(Debug, Parser)]
#[command(version = VERSION, long_version = LONG_VERSION, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Print more on stderr (-vv: much more); SELKIE_LOG=FILTER selects in detail
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Print results, warnings and errors only: no closing line, no hints
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

const EXAMPLES: &str = "Examples:
  selkie \"What is 17 + 25?\"
  selkie \"Tell me a story about a fox named Leo and a lantern.\" --temperature 0.8 --seed 7
  selkie -m ~/models/granite-4.0-h-350m \"Why is the sky blue?\" --max-tokens 200
  selkie chat -m ibm-granite/granite-4.0-h-350m
  selkie batch requests.jsonl -o answers.jsonl
  selkie inspect -m ~/models/granite-4.0-h-350m
  selkie serve
  selkie web
  selkie devices";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt (the default)
    #[command(after_help = "Examples:
  selkie generate \"What is 17 + 25?\"
  selkie generate -m DIR --system \"Answer in one sentence.\" \"Why is the sky blue?\"
  selkie generate -m DIR --speculate auto \"Correct the spelling of this text: ...\"
  git diff | selkie -m DIR \"Summarise this change.\" --max-tokens 100
  selkie generate < question.txt
  selkie generate -m DIR --raw \"Once upon a time\" --temperature 0.8 --top-p 0.95 --seed 7
  selkie generate --json \"Hello!\"")]
    Generate(GenerateArgs),
    /// Chat with a model
    #[command(after_help = "Type /help in the chat for its commands. Ctrl-C stops an answer, Ctrl-D leaves.

Examples:
  selkie chat
  selkie chat -m DIR --system \"You are a helpful assistant.\" --temperature 0.7
  selkie chat -m DIR --save talk.bundle
  selkie chat -m DIR --load talk.bundle --save talk.bundle
  printf 'Hello!\\nWho are you?\\n' | selkie chat")]
    Chat(ChatArgs),
    /// Answer many requests from a JSON-lines file
    #[command(
        after_help = "A line of IN.jsonl: {\"id\": any JSON, one of \"prompt\" (text, no chat template), \"prompt_ids\" and
\"messages\", and optionally \"max_tokens\", \"temperature\", \"top_k\", \"top_p\", \"min_p\", \"repetition_penalty\",
\"seed\", \"stop\", \"namespace\", \"when_full\"}. A line of OpenAI's batch API ({\"custom_id\", \"method\", \"url\",
\"body\"}) is answered as that API does. Answers come in the order of the requests. The exit code is 1 if a line failed.
Each answer is written to .OUT.jsonl.partial as soon as it is complete; with the last one the file becomes OUT.jsonl.
Ctrl-C or an error leaves .OUT.jsonl.partial, from which --resume goes on. A second Ctrl-C ends at once.

Examples:
  selkie batch requests.jsonl -o answers.jsonl
  selkie batch - < requests.jsonl | jq .text
  selkie batch requests.jsonl -o answers.jsonl -m DIR --memory 4GiB --stats stats.json
  selkie batch requests.jsonl -o answers.jsonl --resume
  selkie batch requests.jsonl -o answers.jsonl --speculate auto --stats stats.json
  selkie batch requests.jsonl -o answers.jsonl --sequential --capture-policy one-per-prefill"
    )]
    Batch(BatchArgs),
    /// Keep the state of a prompt in a file, and look at such files
    #[command(
        after_help = "A bundle holds tokens, KV pages and recurrent states of a prefix, so that a chat, a batch or another machine goes on
from there without computing it. It is a conversation: it is written for its owner only, and it enters one
namespace of one engine. `selkie chat --save FILE` writes one too; `chat --load` and `batch --warm` read them."
    )]
    Bundle(BundleArgs),
    /// Write logits, greedy tokens and states of a prompt to a safetensors file, for comparison with other engines
    #[command(after_help = "The file holds logits [T, V], greedy_ids [N], greedy_logits [N, V] and, after the prompt,
state.layer{i}.conv [1, C, K-1] (oldest first) and state.layer{i}.recurrent [1, H, P, N]; its metadata names
backend, device and version. No cache is used and the greedy steps do not stop at an end-of-sequence token.

Examples:
  echo '[1, 3, 350, 273, 226, 22, 28]' > ids.json
  selkie logits --ids ids.json --steps 8 --out logits.safetensors
  selkie logits -m DIR --ids ids.json --steps 0 --out logits.safetensors --backend cpu")]
    Logits(LogitsArgs),
    /// Show a model's layers and sizes, the memory per sequence, and whether it fits on this machine
    #[command(after_help = "Of a model that is not here, its config.json and the list of its files are enough.

Examples:
  selkie inspect
  selkie inspect -m DIR --memory 4GiB
  selkie inspect ibm-granite/granite-4.0-h-350m
  selkie inspect config.json
  selkie inspect -m DIR --json | jq .slot_bytes")]
    Inspect(InspectArgs),
    /// Write a model as a GGUF file, with smaller weights if wanted
    #[command(
        after_help = "The model is a folder, a GGUF file or a name. The table has the error of each tensor: the root of the mean squared
difference, relative to its elements. A mix (q4_k_m, q5_k_m) gives more bits to the matrices where errors do most harm.
Widths that are no multiple of a type's block get the next larger type with smaller blocks. A head for drafts (--speculate mtp) is
written where llama.cpp reads it, otherwise with --selkie-only.

Examples:
  selkie convert -m DIR -o model-q4_k_m.gguf --type q4_k_m
  selkie convert -m ibm-granite/granite-4.0-h-350m -o granite.gguf --type q8_0
  selkie convert -m model-bf16.gguf -o model-q6_k.gguf --type q6_k
  selkie convert -m DIR -o model.gguf --type q4_k_m --json | jq '.types'"
    )]
    Convert(ConvertArgs),
    /// Fetch a model by its name on Hugging Face, or what is new in it
    #[command(after_help = PULL)]
    Pull(PullArgs),
    /// List the models in the cache
    #[command(after_help = LIST)]
    List(ListArgs),
    /// Remove a model from the cache
    #[command(name = "rm", after_help = REMOVE)]
    Remove(RemoveArgs),
    /// List the backends and their devices, and why some cannot be used
    #[command(after_help = "Examples:
  selkie devices
  selkie devices --json | jq '.[] | select(.usable)'")]
    Devices(DevicesArgs),
    /// Serve the model over HTTP, in the protocols of OpenAI, Anthropic and Ollama
    #[cfg(feature = "serve")]
    #[command(after_help = SERVE)]
    Serve(ServeArgs),
    /// Serve the browser page to this machine
    #[cfg(feature = "serve")]
    #[command(
        after_help = "Release archives have the page; otherwise `web/build` makes it. Any static server does as well.

Examples:
  selkie web
  selkie web --port 9000 --dir web/dist"
    )]
    Web(WebArgs),
    /// Measure speed
    Bench(BenchArgs),
    /// Show the options that a configuration file or SELKIE_MODEL sets
    #[command(after_help = "The file is one JSON object, for example
  {\"model\": \"~/models/granite-4.0-h-350m\", \"backend\": \"wgpu\", \"temperature\": 0.7}
with any of the keys that this command lists. SELKIE_MODEL comes before it, options on the command line before both.")]
    Config(ConfigArgs),
    /// Print what a shell needs to complete commands and options
    #[command(after_help = "Examples:
  selkie completions bash > ~/.local/share/bash-completion/completions/selkie
  selkie completions zsh > ~/.zfunc/_selkie
  selkie completions fish > ~/.config/fish/completions/selkie.fish
  selkie completions powershell >> $PROFILE")]
    Completions(CompletionsArgs),
    /// Print the manual page
    #[command(after_help = "Examples:
  selkie man | man -l -
  selkie man batch | man -l -
  selkie man --dir ~/.local/share/man/man1")]
    Man(ManArgs),
}

/// The first argument with which this program starts itself, see `render.rs`.
pub const RENDER: &str = "render-chat-templates";

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("SELKIE_COMMIT"), ")");
const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("SELKIE_COMMIT"),
    ")\nbackends: cuda, wgpu, cpu\npage: ",
    env!("SELKIE_PAGE")
);

impl Command {
    /// The device of a command that loads one engine, so that its ranks can be processes.
    pub fn one_engine(&mut self) -> Option<&mut BackendArgs> {
        let model = match self {
            Self::Generate(args) => &mut args.model,
            Self::Chat(args) => &mut args.model,
            Self::Batch(args) => &mut args.model,
            #[cfg(feature = "serve")]
            Self::Serve(args) => &mut args.model,
            Self::Bench(BenchArgs { what: BenchCommand::Model(args) }) => &mut args.target.model,
            _ => return None,
        };
        Some(&mut model.backend)
    }
}

impl Cli {
    /// Parses the program's arguments. If the first argument is not a subcommand, `generate` is assumed; `bench` alone
    /// means `bench model`. Missing options come from the user's settings.
    ///
    /// # Errors
    /// Wrong arguments or settings, or the help if it was requested.
    pub fn read(args: Vec<OsString>) -> Result<Self, clap::Error> {
        Self::from_args(args, !std::io::stdin().is_terminal(), Settings::load)
    }

    /// The same for `args`; `piped`: standard input is not a terminal.
    fn from_args(
        args: Vec<OsString>,
        piped: bool,
        settings: impl FnOnce() -> Result<Settings, String>,
    ) -> Result<Self, clap::Error> {
        let (args, added) = first::complete(args, piped)?;
        let command = match settings() {
            Ok(settings) => settings.apply(Self::command(), &args),
            Err(why) => {
                // Help is printed even if the settings are wrong.
                Self::try_parse_from(args)?;
                return Err(clap::Error::raw(ErrorKind::InvalidValue, why + "\n"));
            }
        };
        let cli = Self::from_arg_matches(&command.try_get_matches_from(args)?)?;
        match &cli.command {
            Command::Generate(GenerateArgs { prompt: Some(word), .. }) if added && first::is_word(word) => {
                Err(first::no_command(Self::command(), word, false))
            }
            _ => Ok(cli),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &[&str]) -> Command {
        let args = line.iter().map(OsString::from).collect();
        Cli::from_args(args, false, || Ok(Settings::default())).unwrap().command
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_prompt_alone_means_generate() {
        let prompt = |c: Command| matches!(c, Command::Generate(g) if g.prompt.as_deref() == Some("Hello!"));
        for line in [&["selkie", "Hello!"][..], &["selkie", "-v", "Hello!"], &["selkie", "--seed", "7", "Hello!"]] {
            assert!(prompt(command(line)), "{line:?}");
        }
        assert!(matches!(command(&["selkie", "generate", "chat"]), Command::Generate(_)));
        assert!(matches!(command(&["selkie", "-v", "chat"]), Command::Chat(_)));
    }

    #[test]
    fn a_word_after_options_is_no_prompt_either() {
        let args = ["selkie", "--seed", "7", "chat"].map(OsString::from).to_vec();
        let why = Cli::from_args(args, false, || Ok(Settings::default())).unwrap_err();
        assert!(why.to_string().contains("the command `chat` comes before its options"), "{why}");
        assert_eq!(why.exit_code(), 2);
    }

    #[test]
    fn bench_alone_means_bench_model() {
        for line in [&["selkie", "bench"][..], &["selkie", "bench", "--json"], &["selkie", "bench", "model"]] {
            assert!(matches!(command(line), Command::Bench(BenchArgs { what: BenchCommand::Model(_) })), "{line:?}");
        }
    }
}
