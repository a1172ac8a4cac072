//! Chats: the model's template turns messages into a prompt.
//!
//! Templates see only the messages and the names of special tokens. Text in a message never acts as a special token
//! (see [`crate::tokenizer`]) as long as the template prints it unchanged. A template that changes the case of messages
//! or cuts characters out of them can turn ordinary text into a special token. [`render`] lists the bounds on broken
//! and hostile templates.

mod json;
mod message;
mod print;
mod python;
pub mod render;
mod source;
mod time;

use std::{borrow::Cow, sync::Arc};

pub use self::message::{Conversation, End, Message, ToolCall};

pub use self::time::strftime;

use self::render::{InProcess, Job, Rendered, Renderer};
use crate::{Error, Result, tokenizer::Tokenizer, units::thousands};

/// A chat as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The whole prompt.
    pub ids: Vec<u32>,
    /// Token counts, ascending and less than `ids.len()`, at which the system prompt and messages end, as far as that can be
    /// told: another chat that begins with the same messages begins with the same ids up to there.
    pub boundaries: Vec<usize>,
    /// The last characters of its text: they show whether the template has opened the answer's reasoning.
    pub tail: String,
}

/// Bytes of [`Prompt::tail`], about.
const TAIL: usize = 64;

/// A model's chat template. It is compiled when it is first used: a broken one matters only to chats.
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

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a guarded chat.
    fn render(&self, tokenizer: &Tokenizer, chat: &Conversation) -> Result<Rendered> {
        let job = Job {
            source: Cow::Borrowed(&self.source),
            now: (self.now)(),
            names: Cow::Borrowed(tokenizer.named_tokens()),
            messages: Cow::Borrowed(&chat.messages),
            tools: Cow::Borrowed(&chat.tools),
            values: Cow::Borrowed(&chat.values),
            add_generation_prompt: chat.end == End::Answer,
        };
        self.renderer.render(&job).map_err(|why| Error::model(&self.file, why))
    }

    /// Turns a chat into token ids. With `add_generation_prompt` the prompt ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file if the template is wrong, raises, does not end or prints nothing;
    /// [`Error::BadRequest`] if there are no messages or a role is not a plain word.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<Prompt> {
        let end = if add_generation_prompt { End::Answer } else { End::Messages };
        let chat = Conversation { messages: messages.to_vec(), end, ..Conversation::default() };
        self.encode_conversation(tokenizer, &chat, usize::MAX)
    }

    /// Turns a chat with tools and values for the template into token ids. A prompt of more than `most` bytes of text is refused
    /// before it is tokenised.
    ///
    /// # Errors
    /// As for [`ChatTemplate::encode`] and [`Conversation::check`], and [`Error::TooLong`] for a longer text.
    pub fn encode_conversation(&self, tokenizer: &Tokenizer, chat: &Conversation, most: usize) -> Result<Prompt> {
        chat.check()?;
        let said = chat.bytes();
        let chat = chat.guarded(tokenizer);
        let mut rendered = self.render(tokenizer, &chat)?;
        if rendered.text.is_empty() {
            return Err(Error::model(&self.file, "the chat template prints nothing for these messages; correct it"));
        }
        if let (End::FinalMessage, Some(last)) = (chat.end, chat.messages.last()) {
            let Some(len) = end_of(&rendered.text, &last.content) else {
                let why = "the chat template does not print the last message as it is, so that it cannot be continued";
                return Err(Error::model(&self.file, why));
            };
            rendered.text.truncate(len);
        }
        let bytes = tokenizer.unguarded_len(&rendered.text);
        if bytes > most {
            let [bytes, said, most] = [bytes, said, most].map(thousands);
            let file = &self.file;
            let why = format!(
                "the chat template of {file} makes {bytes} bytes of text of {said} bytes of messages; at most {most} fit; correct it, or use the prompt as it is (raw)"
            );
            return Err(Error::TooLong { why, tokens: None });
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
        let from = rendered.text.floor_char_boundary(rendered.text.len().saturating_sub(TAIL));
        let tail = rendered.text[from..].to_owned();
        Ok(Prompt { ids: encoded.ids, boundaries, tail })
    }
}

/// The byte at which the last message ends in the rendered text, as transformers looks for it: a template may strip white space
/// around it.
fn end_of(text: &str, content: &str) -> Option<usize> {
    let stripped = content.trim();
    let start = text.rfind(stripped)?;
    let whole = content.trim_start();
    let len = if text[start..].starts_with(whole) { whole.len() } else { stripped.len() };
    Some(start + len)
}

/// Checks the parts of a chat that need no template.
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
