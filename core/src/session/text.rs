//! A model's text side, which needs no engine: prompts become ids, and requests become what the engine takes.

use std::sync::{Arc, OnceLock};

use super::{
    Ask, DEFAULT_MAX_TOKENS, Facts, Overrides, Prompt, WhenFull,
    reader::Reader,
    window::{self, Room},
};
use crate::{
    Error, Result,
    chat::{self, ChatTemplate, Conversation, End, Message},
    engine::{Request, schedule::check_lengths},
    generation::GenerationConfig,
    model_dir::ModelFiles,
    sample::Sampling,
    stop::StopStrings,
    survive::survived,
    tokenizer::{Tokenizer, check_ids},
    units::thousands,
};

/// Tokenizer, chat template, sampling defaults and the tokens that end a text.
pub struct Text {
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    chat: Option<Arc<ChatTemplate>>,
    generation: GenerationConfig,
    stop_ids: Vec<u32>,
    label: String,
    /// By id, made when they are first needed.
    token_bytes: OnceLock<Vec<Vec<u8>>>,
}

/// A prompt as ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<u32>,
    /// Where its messages end, in tokens.
    pub boundaries: Vec<usize>,
    /// Messages that were left out, see [`WhenFull`].
    pub dropped: usize,
    /// The answer is a part of the same text: a space before its first word is shown.
    pub continues: bool,
    /// Of a conversation, the last characters of its text, see [`chat::Prompt::tail`].
    pub tail: String,
}

impl Encoded {
    /// A rendered conversation without `dropped` of its messages.
    pub(super) fn of(prompt: chat::Prompt, dropped: usize, end: End) -> Self {
        let chat::Prompt { ids, boundaries, tail } = prompt;
        Self { ids, boundaries, dropped, continues: end == End::FinalMessage, tail }
    }
}

/// How many times the longest text all messages of a chat may have together.
pub(super) const MESSAGES_BEYOND: usize = 4;

impl Text {
    /// The text side of a model's files.
    ///
    /// # Errors
    /// Those of [`ModelFiles::eos`].
    pub fn new(files: &ModelFiles) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            tokenizer: files.tokenizer.clone(),
            chat: files.chat.clone(),
            generation: files.generation.clone(),
            stop_ids: files.eos()?,
            token_bytes: OnceLock::new(),
            label: files.label().to_owned(),
        }))
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::BadModel`] if there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let why = "there is no tokenizer.json, so this model takes token ids only; add the file to use text";
        self.tokenizer.as_ref().ok_or_else(|| Error::model(&self.label, why))
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`Error::BadModel`] if there is none.
    pub fn chat(&self) -> Result<&Arc<ChatTemplate>> {
        let why = "there is no chat template, so this model only continues text; use the prompt as it is (raw)";
        self.chat.as_ref().ok_or_else(|| Error::model(&self.label, why))
    }

    /// Whether it can read and write text.
    pub fn has_tokenizer(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Whether it can chat.
    pub fn has_chat(&self) -> bool {
        self.chat.is_some()
    }

    /// The model's own sampling values.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The tokens that end a text.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The bytes that a token stands for, of a special one its name. None without a tokenizer.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let all = self.token_bytes.get_or_init(|| {
            let Some(tokenizer) = &self.tokenizer else { return Vec::new() };
            let mut all = tokenizer.token_bytes(tokenizer.vocab_size());
            for (id, name) in tokenizer.special_tokens() {
                if let Some(bytes) = all.get_mut(id as usize) {
                    *bytes = name.into();
                }
            }
            all
        });
        all.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// The sampling of a request: its values over the model's own, and a random seed if it has none. This is the only place
    /// where the two meet.
    ///
    /// # Errors
    /// [`Error::BadRequest`] naming a value that is out of its range.
    pub fn sampling(&self, overrides: &Overrides) -> Result<Sampling> {
        let seed = overrides.seed.unwrap_or_else(random_seed);
        let sampling = overrides.over(self.generation.sampling(seed));
        sampling.check()?;
        Ok(sampling)
    }

    /// A request for the engine, and the reader of its answer. Renders and tokenises.
    ///
    /// # Errors
    /// See [`Model::submit`](super::Model::submit).
    pub(super) fn request(self: &Arc<Self>, ask: Ask, facts: &Facts) -> Result<(Request, Reader)> {
        let Ask { prompt, sampling, max_tokens, stop, namespace, origin, share, priority, .. } = ask;
        let (when_full, controls, constraint) = (ask.when_full, ask.controls, ask.constraint);
        let prompt_logprobs = ask.prompt_logprobs;
        let stop_ids = if ask.ignore_eos { &[][..] } else { &self.stop_ids };
        let stop_ids = [stop_ids, &ask.stop_token_ids].concat();
        let sampling = self.sampling(&sampling)?;
        if !stop.is_empty() {
            self.tokenizer()?;
        }
        let stops = StopStrings::new(stop)?;
        let said = match &prompt {
            Prompt::Messages(messages) => Some(messages.iter().map(Message::bytes).sum::<usize>()),
            Prompt::Conversation(talk) => Some(talk.bytes()),
            _ => None,
        };
        let given = matches!(prompt, Prompt::Ids(_));
        let Encoded { ids, boundaries, dropped, continues, .. } =
            self.encode(prompt, when_full, facts.context, max_tokens)?;
        self.check(&ids, given, facts.vocab)?;
        let left = facts.context.saturating_sub(ids.len());
        let max_tokens = max_tokens.unwrap_or_else(|| left.clamp(1, DEFAULT_MAX_TOKENS));
        check_lengths(&facts.sizes.shape, facts.pages, ids.len(), max_tokens).map_err(|e| {
            match (e, said, &self.chat) {
                (Error::TooLong { why, tokens }, Some(said), Some(chat)) => {
                    let said = thousands(said);
                    let made =
                        format!("the chat template of {} made the prompt of {said} bytes of messages", chat.file());
                    Error::TooLong { why: format!("{why}; {made}"), tokens }
                }
                (e, ..) => e,
            }
        })?;
        let before = if continues { &ids[..] } else { &[] };
        let reader = Reader::new(self.clone(), before, (stops, controls.min_tokens), dropped, ids.len());
        let request = Request {
            prompt: ids,
            boundaries,
            sampling,
            max_tokens,
            stop_ids,
            namespace,
            origin,
            share,
            priority,
            prompt_logprobs,
            controls,
            constraint,
            drafter: None,
            forced: Arc::default(),
        };
        request.rules(facts.vocab)?;
        Ok((request, reader))
    }

    /// Renders and tokenises a prompt for sequences of at most `context` tokens; `answer`: what the request allows the answer.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt and an invalid role; [`Error::TooLong`] for text that cannot fit;
    /// [`Error::BadModel`] if tokenizer or chat template are missing or fail.
    pub(super) fn encode(
        &self,
        prompt: Prompt,
        when_full: WhenFull,
        context: usize,
        answer: Option<usize>,
    ) -> Result<Encoded> {
        match prompt {
            Prompt::Ids(ids) => Ok(Encoded { ids, ..Encoded::default() }),
            Prompt::Encoded(encoded) => Ok(encoded),
            // A tokenizer may put a token around every text; that alone is not a prompt.
            Prompt::Text(text) if text.is_empty() => Err(Error::BadRequest("the prompt is empty".into())),
            Prompt::Text(text) => {
                let tokenizer = self.tokenizer()?;
                check_bytes(text.len(), text.len(), tokenizer.most_bytes(context), context)?;
                let ids = outlived(|| tokenizer.encode(&text))?;
                Ok(Encoded { ids, continues: true, ..Encoded::default() })
            }
            Prompt::Messages(messages) => self.converse(Conversation::new(messages), when_full, context, answer),
            Prompt::Conversation(talk) => self.converse(talk, when_full, context, answer),
        }
    }

    fn converse(
        &self,
        talk: Conversation,
        when_full: WhenFull,
        context: usize,
        answer: Option<usize>,
    ) -> Result<Encoded> {
        let chat = self.chat()?;
        talk.check()?;
        let tokenizer = self.tokenizer()?;
        let room = Room { context, bytes: tokenizer.most_bytes(context), answer };
        if when_full == WhenFull::DropOldest {
            return outlived(|| window::fit(chat, tokenizer, talk, room));
        }
        let longest = talk.messages.iter().map(Message::bytes).max().unwrap_or(0);
        check_bytes(longest, talk.bytes(), room.bytes, context)?;
        outlived(|| chat.encode_conversation(tokenizer, &talk, room.bytes))
            .map(|prompt| Encoded::of(prompt, 0, talk.end))
    }

    /// Checks ids against the model's vocabulary. If the model's own tokenizer made them, the error names its file.
    fn check(&self, ids: &[u32], given: bool, vocab: usize) -> Result<()> {
        let Some(tokenizer) = self.tokenizer.as_ref().filter(|_| !given) else {
            return check_ids(ids, vocab);
        };
        let why = match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => format!(
                "it gives token id {id}, and by vocab_size in config.json the model has ids 0 to {}; take tokenizer.json and config.json of one model",
                vocab - 1
            ),
            None if ids.is_empty() => "it makes no tokens from this prompt; give other text, or token ids".into(),
            None => return Ok(()),
        };
        Err(Error::model(tokenizer.file(), why))
    }
}

/// Checks the lengths of texts before they are rendered or tokenised. A template may leave out parts of earlier messages, so
/// all of them together may be somewhat longer than the longest text that fits.
fn check_bytes(longest: usize, all: usize, most: usize, context: usize) -> Result<()> {
    if longest <= most && all / MESSAGES_BEYOND <= most {
        return Ok(());
    }
    let [bytes, context, most] = [if longest > most { longest } else { all }, context, most].map(thousands);
    let why = format!("{bytes} bytes of text cannot fit: the context of {context} tokens holds at most {most}");
    Err(Error::TooLong { why, tokens: None })
}

/// The result of template and tokenizer, which panic on some inputs.
fn outlived<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    survived(call)
        .unwrap_or_else(|| Err(Error::BadRequest("template or tokenizer could not be used on this prompt".into())))
}

/// A seed that differs from call to call. A page has no randomness in std, so it gives every request a seed.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one("a seed")
}
