//! Options and requests from JavaScript.

use selkie_core::{
    chat::Message,
    engine::Speculate,
    session::{Ask, Overrides, Prompt, WhenFull},
};
use serde::Deserialize;

use crate::device::Wanted;

/// Options of a load.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadOptions {
    pub backend: Wanted,
    pub prefix_cache: Option<bool>,
    pub memory_bytes: Option<u64>,
    pub context_tokens: Option<usize>,
    pub max_batch: Option<usize>,
    pub speculate: Guesses,
    pub drafts: Option<usize>,
    pub label: Option<String>,
}

/// See [`Speculate`].
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase", expecting = "`speculate` must be \"auto\", \"off\", \"ngram\" or \"mtp\"")]
pub enum Guesses {
    #[default]
    Auto,
    Off,
    Ngram,
    Mtp,
}

impl From<Guesses> for Speculate {
    fn from(guesses: Guesses) -> Self {
        match guesses {
            Guesses::Auto => Self::Auto,
            Guesses::Off => Self::Off,
            Guesses::Ngram => Self::Ngram,
            Guesses::Mtp => Self::Mtp,
        }
    }
}

/// A request.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Request {
    messages: Option<Vec<Turn>>,
    prompt: Option<String>,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Vec<String>,
    namespace: String,
    origin: String,
    when_full: Policy,
}

/// See [`WhenFull`].
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", expecting = "`whenFull` must be \"error\" or \"drop-oldest\"")]
enum Policy {
    #[default]
    Error,
    DropOldest,
}

#[derive(Debug, Deserialize)]
struct Turn {
    role: String,
    content: String,
}

impl Request {
    /// The request, with `seed` if it has none.
    pub fn ask(self, seed: u64) -> Ask {
        let sampling = Overrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: Some(self.seed.unwrap_or(seed)),
        };
        let prompt = match self.messages {
            Some(turns) => Prompt::Messages(messages(turns)),
            None => Prompt::Text(self.prompt.unwrap_or_default()),
        };
        Ask {
            prompt,
            sampling,
            max_tokens: self.max_tokens,
            stop: self.stop,
            namespace: self.namespace,
            origin: self.origin,
            when_full: match self.when_full {
                Policy::Error => WhenFull::Error,
                Policy::DropOldest => WhenFull::DropOldest,
            },
            ..Ask::default()
        }
    }
}

fn messages(turns: Vec<Turn>) -> Vec<Message> {
    turns.into_iter().map(|turn| Message::new(&turn.role, turn.content)).collect()
}

/// What is saved as a bundle.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SaveRequest {
    messages: Option<Vec<Turn>>,
    prompt: Option<String>,
    pub namespace: String,
    pub origin: String,
    pub states: Option<usize>,
}

impl SaveRequest {
    /// The messages, if it has some.
    pub fn messages(&mut self) -> Option<Vec<Message>> {
        self.messages.take().map(messages)
    }

    /// The prompt as text, for a request without messages.
    pub fn text(&mut self) -> String {
        self.prompt.take().unwrap_or_default()
    }
}

/// Where a bundle goes.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadStateOptions {
    pub namespace: String,
    pub exact_only: bool,
}
