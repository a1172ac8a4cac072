//! Chats: the model's template turns messages into a prompt.
//!
//! Templates see nothing but the messages and the names of special tokens, and what messages contain can never act as a special
//! token (see [`crate::tokenizer`]), as long as the template prints it as it is: one that changes the case of messages or cuts
//! characters out of them can make a special token of what was none. What bounds a template that is broken, or made to do harm, is
//! said in [`render`].

mod json;
mod print;
mod python;
pub mod render;
mod source;
mod time;

use std::{borrow::Cow, sync::Arc};

use serde::{Deserialize, Serialize};

use self::render::{InProcess, Job, Rendered, Renderer};
use crate::{Error, Result, tokenizer::Tokenizer};

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or whatever else the template knows; letters, digits, `_` and `-` only.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A chat as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The whole prompt.
    pub ids: Vec<u32>,
    /// Token counts, ascending and less than `ids.len()`, at which the system prompt and messages end, as far as that can be
    /// told: another chat that begins with the same messages begins with the same ids up to there.
    pub boundaries: Vec<usize>,
}

/// A model's chat template. It is looked at when it is first used: a broken one matters only to those who chat.
pub struct ChatTemplate {
    file: String,
    source: String,
    now: fn() -> u64,
    renderer: Arc<dyn Renderer>,
}

impl ChatTemplate {
    /// The template `source` from `file`, rendered [in this process](InProcess). `now` gives the seconds since 1970 for templates
    /// that print the date.
    pub fn new(file: &str, source: &str, now: fn() -> u64) -> Self {
        Self { file: file.into(), source: source.into(), now, renderer: Arc::new(InProcess::default()) }
    }

    /// The same, rendered elsewhere.
    pub fn rendered_by(&self, renderer: Arc<dyn Renderer>) -> Self {
        Self { file: self.file.clone(), source: self.source.clone(), now: self.now, renderer }
    }

    /// The file that the template is from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The prompt of `messages`, in which text of special tokens is guarded.
    fn render(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<Rendered> {
        let job = Job {
            source: Cow::Borrowed(&self.source),
            now: (self.now)(),
            names: Cow::Borrowed(tokenizer.named_tokens()),
            messages: Cow::Borrowed(messages),
            add_generation_prompt,
        };
        self.renderer.render(&job).map_err(|why| Error::model(&self.file, why))
    }

    /// Turns a chat into token ids. With `add_generation_prompt` the prompt ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file if the template is wrong, raises, does not end or prints nothing;
    /// [`Error::BadRequest`] if there are no messages or a role is not a plain word.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<Prompt> {
        self.encode_within(tokenizer, messages, add_generation_prompt, usize::MAX)
    }

    /// The same for a prompt of at most `most` bytes of text; a longer one is refused before it is tokenised.
    ///
    /// # Errors
    /// As for [`ChatTemplate::encode`], and [`Error::BadRequest`] for a longer text.
    pub fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
        most: usize,
    ) -> Result<Prompt> {
        check(messages)?;
        let guarded: Vec<Message> =
            messages.iter().map(|m| Message::new(&m.role, tokenizer.guard(&m.content))).collect();
        let rendered = self.render(tokenizer, &guarded, add_generation_prompt)?;
        if rendered.text.is_empty() {
            return Err(Error::model(&self.file, "the chat template prints nothing for these messages; correct it"));
        }
        let bytes = tokenizer.unguarded_len(&rendered.text);
        if bytes > most {
            let said: usize = messages.iter().map(|m| m.content.len()).sum();
            return Err(Error::BadRequest(format!(
                "the chat template of {} makes {bytes} bytes of text of {said} bytes of messages; at most {most} fit",
                self.file
            )));
        }
        let encoded = tokenizer.encode_guarded(&rendered.text)?;
        let mut boundaries: Vec<usize> = rendered
            .ends
            .iter()
            .map(|bytes| encoded.ends.partition_point(|end| end <= bytes))
            .filter(|tokens| *tokens > 0 && *tokens < encoded.ids.len())
            .collect();
        boundaries.sort_unstable();
        boundaries.dedup();
        Ok(Prompt { ids: encoded.ids, boundaries })
    }
}

/// Checks what can be told of a chat without its template.
///
/// # Errors
/// [`Error::BadRequest`] if there are no messages or a role is not a plain word.
pub(crate) fn check(messages: &[Message]) -> Result<()> {
    if messages.is_empty() {
        return Err(Error::BadRequest("the chat has no messages".into()));
    }
    // Templates print roles between the halves of special tokens (`'<|' + role + '|>'`).
    let plain = |role: &str| !role.is_empty() && role.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    match messages.iter().find(|m| !plain(&m.role)) {
        Some(message) => {
            let role: String = message.role.chars().take(80).collect();
            Err(Error::BadRequest(format!("{role:?} is not the role of a message")))
        }
        None => Ok(()),
    }
}

/// Seconds since 1970 by the system's clock; the browser has another one.
#[cfg(not(target_arch = "wasm32"))]
pub fn system_clock() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
