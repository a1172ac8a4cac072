//! A conversation with its history.

use std::{mem, sync::Arc};

use super::{Answer, Ask, Model, Prompt, Update, block};
use crate::{Error, Result, chat::Message};

/// A conversation: each question is asked with all that was said before, most of which the engine does not compute again.
pub struct Chat {
    model: Model,
    ask: Ask,
    messages: Vec<Message>,
}

impl Chat {
    pub(super) fn new(model: Model) -> Self {
        Self { model, ask: Ask::default(), messages: Vec::new() }
    }

    /// The same with this system prompt.
    #[must_use]
    pub fn system(mut self, text: impl Into<String>) -> Self {
        self.messages.retain(|m| m.role != "system");
        self.messages.insert(0, Message::new("system", text));
        self
    }

    /// The same with the values of `ask` for every answer; its prompt is not used.
    #[must_use]
    pub fn with(self, ask: Ask) -> Self {
        Self { ask, ..self }
    }

    /// Asks, and returns the pieces of the answer as they are generated. The answer joins the history when it has been read or
    /// the pieces are dropped; one that fails leaves the history as it was.
    ///
    /// # Errors
    /// Those of [`Model::submit`].
    pub fn ask(&mut self, text: impl Into<String>) -> Result<Pieces<'_>> {
        self.messages.push(Message::new("user", text));
        let prompt = Prompt::Messages(self.messages.clone());
        match self.model.submit(Ask { prompt, ..self.ask.clone() }) {
            Ok(answer) => Ok(Pieces { chat: self, answer, text: String::new(), failed: false }),
            Err(e) => {
                self.messages.pop();
                Err(e)
            }
        }
    }

    /// All that was said so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }
}

/// The pieces of an answer, blocking. Dropping them ends the request.
pub struct Pieces<'a> {
    chat: &'a mut Chat,
    answer: Answer,
    text: String,
    failed: bool,
}

impl Iterator for Pieces<'_> {
    type Item = Result<String, Arc<Error>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match block::on(self.answer.next())? {
                Update::Text { text, .. } if text.is_empty() => {}
                Update::Text { text, .. } => {
                    self.text += &text;
                    return Some(Ok(text));
                }
                Update::Done(done) => {
                    // What did not fit stays left out; it begins after the system prompt.
                    let head = self.chat.messages.iter().take_while(|m| m.role == "system").count();
                    self.chat.messages.drain(head..head + done.dropped);
                    let e = done.end.error?;
                    self.failed = true;
                    return Some(Err(e));
                }
            }
        }
    }
}

impl Drop for Pieces<'_> {
    fn drop(&mut self) {
        let messages = &mut self.chat.messages;
        if self.failed {
            messages.pop();
        } else {
            messages.push(Message::new("assistant", mem::take(&mut self.text)));
        }
    }
}
