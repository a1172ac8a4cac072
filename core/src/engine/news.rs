//! What the engine tells its callers.

use std::sync::Arc;

use super::SeqId;
use crate::{Error, controls::Logprobs, state::Report};

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled a stop id.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
    /// The caller cancelled it.
    Cancelled,
    /// It could not go on; its error says why. Other requests are not affected.
    Failed,
}

/// Milliseconds that a request spent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From submission to the step that gave it its first token.
    pub queue_ms: f64,
    /// From there to its first sampled token.
    pub prefill_ms: f64,
    /// From there to its end.
    pub decode_ms: f64,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Which request.
    pub id: SeqId,
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens sampled, a stop id included.
    pub completion_tokens: usize,
    /// The match in the cache; `None` if it was cancelled before it ran.
    pub cache: Option<Report>,
    /// Where its time went.
    pub timing: Timing,
    /// At the places of the prompt's tokens from the second one on, with [`Request::prompt_logprobs`](super::Request::prompt_logprobs).
    pub prompt_logprobs: Arc<[Logprobs]>,
    /// The error if `reason` is [`FinishReason::Failed`], else `None`.
    pub error: Option<Arc<Error>>,
}

/// News for the callers, in the order in which it happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request has one more token.
    Token {
        /// Which request.
        id: SeqId,
        /// The sampled id; a stop id too.
        token: u32,
        /// `[V]` of the model, before any rule, with [`EngineOptions::logits`](super::EngineOptions::logits).
        logits: Option<Box<[f32]>>,
        /// With [`Controls::logprobs`](crate::controls::Controls::logprobs).
        logprobs: Option<Box<Logprobs>>,
        /// With the first token: [`Finished::prompt_logprobs`], if the request asked for them.
        prompt_logprobs: Option<Arc<[Logprobs]>>,
    },
    /// A request has ended.
    Finished(Finished),
}
