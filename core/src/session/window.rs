//! Chooses the part of a conversation that a prompt holds when not all of it fits.

use crate::{
    Error, Result,
    chat::{ChatTemplate, Conversation, Message},
    tokenizer::Tokenizer,
};

use super::{
    DEFAULT_MAX_TOKENS,
    text::{Encoded, MESSAGES_BEYOND},
};

/// The treatment of messages that do not fit into the context with their answer. Other prompts are always refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// The request is refused: [`Error::TooLong`].
    #[default]
    Error,
    /// The oldest turns are left out, each a user's message with everything up to the next one, until prompt and answer
    /// fit and half of the context is free. Otherwise every later turn would leave out another one, and compute the
    /// whole rest again. System prompt and last turn are kept; if these alone are too long, the request is refused.
    DropOldest,
}

impl WhenFull {
    /// Both, in the order of their names.
    pub const ALL: [Self; 2] = [Self::Error, Self::DropOldest];

    /// The name used in requests and options: `error` or `drop-oldest`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::DropOldest => "drop-oldest",
        }
    }

    /// The policy of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }
}

/// Limits on the length of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Tokens of the longest sequence.
    pub context: usize,
    /// Bytes of the longest text that can be that many tokens.
    pub bytes: usize,
    /// Tokens that the answer may have, if the request says so.
    pub answer: Option<usize>,
}

impl Room {
    /// Most tokens of a prompt that leave room for the answer; the room is a quarter of the context if the request does
    /// not set it.
    fn most(&self) -> usize {
        let answer = self.answer.unwrap_or(DEFAULT_MAX_TOKENS.min(self.context / 4));
        self.context.saturating_sub(answer)
    }
}

/// The prompt of all messages or, if that is too long, of the system prompt and as many of the last turns as [`WhenFull`] says.
///
/// # Errors
/// Those of template and tokenizer; [`Error::TooLong`] if the last turn alone is too long to be tokenised.
pub(super) fn fit(chat: &ChatTemplate, tokenizer: &Tokenizer, mut talk: Conversation, room: Room) -> Result<Encoded> {
    let messages = &std::mem::take(&mut talk.messages);
    let head = messages.iter().take_while(|m| matches!(&*m.role, "system" | "developer")).count();
    let turns: Vec<usize> = (head..messages.len()).filter(|i| messages[*i].role == "user").collect();
    let encode = |from: usize| -> Result<Encoded> {
        let kept: Vec<Message> = messages[..head].iter().chain(&messages[from..]).cloned().collect();
        let kept = Conversation { messages: kept, ..talk.clone() };
        let prompt = chat.encode_conversation(tokenizer, &kept, room.bytes)?;
        Ok(Encoded::of(prompt, from - head, talk.end))
    };
    // Text that cannot fit is not even rendered.
    let fits = |from: usize, most: usize| -> Result<Option<Encoded>> {
        let lengths = messages[..head].iter().chain(&messages[from..]).map(Message::bytes);
        if lengths.clone().max() > Some(room.bytes) || lengths.sum::<usize>() / MESSAGES_BEYOND > room.bytes {
            return Ok(None);
        }
        match encode(from) {
            Ok(ids) if ids.ids.len() <= most => Ok(Some(ids)),
            Ok(_) | Err(Error::TooLong { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    };
    if let Some(all) = fits(head, room.most())? {
        return Ok(all);
    }
    let most = room.most().min(room.context / 2);
    // Binary search for the fewest turns to leave out; the last one is never among them.
    let (mut first, mut end, mut found) = (1, turns.len(), None);
    while first < end {
        let middle = first.midpoint(end);
        match fits(turns[middle], most)? {
            Some(ids) => (end, found) = (middle, Some(ids)),
            None => first = middle + 1,
        }
    }
    match (found, turns.last()) {
        (Some(ids), _) => Ok(ids),
        // It may fit without leaving half of the context free; if not, the engine says by how much.
        (None, Some(last)) => encode(*last),
        (None, None) => encode(head),
    }
}
