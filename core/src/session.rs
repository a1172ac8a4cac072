//! Text on top of the engine: prompts as text, chats or ids in, pieces of text out.
//!
//! A [`Model`] is a handle of an engine that runs elsewhere: on a thread of its own ([`Model::spawn`]) or polled by a page
//! ([`Local`]). [`Model::submit`] renders, tokenises and checks a request where it is called and sends it through a channel;
//! the engine's loop ([`Driver`]) sends sampled tokens back, and the [`Answer`] turns them into text where it is read. So
//! neither a long prompt nor a slow reader delays another request.
//!
//! A piece of text ends between characters, a stop string is never part of it, and every completion has the reason of its
//! end. A request's failure ends that request only. A failure of the device and a panic end all of them, with their reason.

mod answer;
#[cfg(not(target_arch = "wasm32"))]
mod block;
mod driver;
mod local;
mod model;
pub mod picture;
mod reader;
#[cfg(not(target_arch = "wasm32"))]
mod talk;
mod text;
mod window;

pub use self::{
    answer::Answer,
    driver::Driver,
    local::Local,
    model::{CacheEvents, Facts, Model, Prepared, Reply, Snapshot},
    text::{Encoded, Text},
    window::WhenFull,
};
#[cfg(not(target_arch = "wasm32"))]
pub use self::{
    answer::{Answers, Updates},
    talk::{Chat, Pieces},
};

use crate::{
    Error, Result,
    backend::Backend,
    chat::{Conversation, Message},
    controls::{Constraint, Controls},
    engine::{Engine, EngineOptions, FinishReason, Finished},
    model_dir::ModelFiles,
    models,
    sample::Sampling,
    weights::Progress,
};

/// Tokens generated at most when a request does not say.
pub const DEFAULT_MAX_TOKENS: usize = 1024;

/// The start of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text to continue; special tokens in it are recognised.
    Text(String),
    /// Token ids; they need no tokenizer.
    Ids(Vec<u32>),
    /// A conversation for the model's chat template, which the assistant continues.
    Messages(Vec<Message>),
    /// The same with tools and values for the template.
    Conversation(Conversation),
    /// One of the others, as [`Model::encode`] made it.
    Encoded(Encoded),
}

impl Default for Prompt {
    /// No ids, which no engine accepts.
    fn default() -> Self {
        Self::Ids(Vec::new())
    }
}

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// The text, ids or messages to continue.
    pub prompt: Prompt,
    /// How tokens are chosen, where it is not the model's own way.
    pub sampling: Overrides,
    /// Most tokens to generate; `None`: [`DEFAULT_MAX_TOKENS`], or what the context and the KV pages leave.
    pub max_tokens: Option<usize>,
    /// Texts before which the answer ends. They need a tokenizer.
    pub stop: Vec<String>,
    /// The tenant: prefixes are shared within a namespace only.
    pub namespace: String,
    /// The [`Imported::origin`](crate::engine::Imported::origin) of converted values that the prompt may begin with; empty for
    /// all others.
    pub origin: String,
    /// See [`Request::share`](crate::engine::Request::share).
    pub share: String,
    /// See [`Request::priority`](crate::engine::Request::priority).
    pub priority: i32,
    /// What happens to messages that do not fit into the context.
    pub when_full: WhenFull,
    /// Penalties, biases and masks, and which log probabilities are reported.
    pub controls: Controls,
    /// See [`Request::prompt_logprobs`](crate::engine::Request::prompt_logprobs).
    pub prompt_logprobs: Option<u8>,
    /// Tokens that end the text besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's end of text does not end the answer.
    pub ignore_eos: bool,
    /// Says before each token which ones may come.
    pub constraint: Option<Box<dyn Constraint + Send>>,
}

/// Sampling values of a user or a program; absent ones come from the model's own defaults, see [`Text::sampling`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// See [`Sampling::seed`]; absent, a random one.
    pub seed: Option<u64>,
}

impl Overrides {
    /// `defaults` with these values instead of its own.
    pub fn over(&self, defaults: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            seed: self.seed.unwrap_or(defaults.seed),
        }
    }
}

impl From<Sampling> for Overrides {
    /// All values given.
    fn from(s: Sampling) -> Self {
        Self {
            temperature: Some(s.temperature),
            top_k: Some(s.top_k),
            top_p: Some(s.top_p),
            min_p: Some(s.min_p),
            repetition_penalty: Some(s.repetition_penalty),
            seed: Some(s.seed),
        }
    }
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The natural logarithm of its probability, if the request asked for it.
    pub logprob: Option<f32>,
    /// The likeliest tokens at its place with theirs, likeliest first, as many as the request asked for.
    pub top: Vec<(u32, f32)>,
}

/// News of a request.
#[derive(Clone, Debug)]
pub enum Update {
    /// One more token, or the text that was held back at the end. All texts together are the completion's text, and the
    /// tokens its ids.
    Text {
        /// Whole characters. Empty if there is no tokenizer, the token is special or part of a character, or its text may be
        /// the beginning of a stop string.
        text: String,
        /// The tokens, usually one.
        tokens: Vec<Token>,
    },
    /// The request has ended; nothing follows.
    Done(Completion),
}

/// A finished request.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The generated text up to a stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// The generated ids, an end-of-sequence token included.
    pub ids: Vec<u32>,
    /// Why it ended; a stop string is [`FinishReason::Stop`] too.
    pub finish: FinishReason,
    /// The number of messages that were left out, the oldest but for the system prompt, see [`WhenFull::DropOldest`].
    pub dropped: usize,
    /// The engine's report: cache, times, tokens.
    pub end: Finished,
}

impl Completion {
    /// Why it failed, if it did.
    pub fn error(&self) -> Option<&Error> {
        self.end.error.as_deref()
    }

    /// Prompt tokens that were not computed.
    pub fn reused(&self) -> usize {
        self.end.cache.map_or(0, |cache| cache.reused)
    }

    /// Whether the answer continues from converted values, of a bundle or of a lower tier.
    pub fn is_converted(&self) -> bool {
        self.end.cache.is_some_and(|cache| cache.converted)
    }
}

/// Loads the model in `files` onto `backend` and reports progress to `report`.
///
/// # Errors
/// Those of [`Engine::load`].
pub async fn load<B: Backend>(
    backend: B,
    files: &ModelFiles,
    options: &EngineOptions,
    report: &mut dyn FnMut(Progress),
) -> Result<Engine<B>> {
    let architecture = models::read(&files.config)?;
    let fingerprint = files.fingerprint().await?.to_le_bytes();
    Engine::load(backend, &architecture, &files.checkpoint, &fingerprint, options, report).await
}
