//! The tokens of one request become text: decoded, and searched for stop strings.

use std::{mem, sync::Arc};

use super::{Completion, Text, Token, Update};
use crate::{
    Error,
    engine::{FinishReason, Finished},
    stop::StopStrings,
    tokenizer::TextStream,
};

/// Reads the answer to one request.
pub(super) struct Reader {
    text: Arc<Text>,
    stream: TextStream,
    stops: StopStrings,
    /// So many tokens are not searched for them.
    min_tokens: usize,
    /// What was shown.
    out: String,
    ids: Vec<u32>,
    dropped: usize,
    pub prompt_tokens: usize,
    /// A stop string was found; tokens in flight are not part of the answer.
    stopped: bool,
    /// Its tokens could not be decoded.
    failed: Option<Error>,
}

impl Reader {
    /// `before`: the ids of a text that the answer continues. `stops`: the strings that end it, once it has more than
    /// `min_tokens` tokens.
    pub fn new(
        text: Arc<Text>,
        before: &[u32],
        (stops, min_tokens): (StopStrings, usize),
        dropped: usize,
        prompt_tokens: usize,
    ) -> Self {
        Self {
            text,
            stream: TextStream::new(before),
            stops,
            min_tokens,
            out: String::new(),
            ids: Vec::new(),
            dropped,
            prompt_tokens,
            stopped: false,
            failed: None,
        }
    }

    /// Whether further tokens are of no use: a stop string was found, or one could not be decoded.
    pub fn has_enough(&self) -> bool {
        self.stopped || self.failed.is_some()
    }

    /// Takes a token; `None` once it has enough.
    pub fn token(&mut self, token: Token) -> Option<Update> {
        if self.has_enough() {
            return None;
        }
        self.ids.push(token.id);
        let mut text = String::new();
        if let Some(tokenizer) = &self.text.tokenizer {
            match self.stream.push(tokenizer, token.id) {
                Ok(piece) => text = self.show(&piece),
                Err(e) => self.failed = Some(e),
            }
        }
        Some(Update::Text { text, tokens: vec![token] })
    }

    /// Ends the answer: the text that was held back, if any, and all of it.
    pub fn finish(&mut self, mut end: Finished) -> (Option<Update>, Completion) {
        let mut rest = String::new();
        if let Some(tokenizer) = &self.text.tokenizer
            && !self.has_enough()
        {
            match self.stream.finish(tokenizer) {
                Ok(piece) => rest = self.show(&piece),
                Err(e) => self.failed = Some(e),
            }
            if !self.stopped {
                let held = self.stops.finish();
                self.out += &held;
                rest += &held;
            }
        }
        if let Some(e) = self.failed.take() {
            (end.reason, end.error) = (FinishReason::Failed, Some(Arc::new(e)));
        }
        let finish = if self.stopped { FinishReason::Stop } else { end.reason };
        let text = self.text.has_tokenizer().then_some(mem::take(&mut self.out));
        let completion = Completion { text, ids: mem::take(&mut self.ids), finish, dropped: self.dropped, end };
        ((!rest.is_empty()).then_some(Update::Text { text: rest, tokens: Vec::new() }), completion)
    }

    /// What of a piece of decoded text cannot be part of a stop string.
    fn show(&mut self, piece: &str) -> String {
        if self.ids.len() <= self.min_tokens && self.min_tokens > 0 {
            self.out += piece;
            return piece.to_owned();
        }
        let (text, stopped) = self.stops.push(piece);
        self.stopped = stopped;
        self.out += &text;
        text
    }
}
