//! Text to token ids and back.
//!
//! # Text that must not act
//! A message may contain the text of a special token (`<|end|>`). Encoded unchanged it would become that token, and a
//! user could end a turn and begin another in another role. Such text is *guarded* before the chat template sees it: a
//! character that occurs nowhere else is inserted after its first character, so it is no longer a special token. After
//! rendering, the template's own special tokens are found in the text with the guards. Then a normaliser removes the
//! guards, after special tokens were split off and before any other rule sees the text. So the rest is encoded exactly
//! as if special tokens did not exist.
//!
//! A normaliser may turn other text into the text of a special token (`<|END|>` in lower case). If special tokens are
//! looked for in normalised text and the normaliser could do that, they are looked for in the original text instead.
//! With all rules, a special token whose place in the text does not hold its own text is an error.
//!
//! # Bounds
//! A file is checked before the library reads it ([`file`]): no rule may take memory out of proportion. A panic of the
//! library becomes an error that names the file. Encoding takes some 170 bytes of memory per byte of text, so a text is
//! measured first ([`Tokenizer::most_bytes`]).

mod bytes;
mod file;

use std::{collections::HashMap, sync::OnceLock};

use serde_json::{Map, Value};
use tokenizers::{
    AddedToken, NormalizerWrapper,
    normalizers::{Replace, Sequence},
};

use self::file::Lengths;
use crate::{Error, Result, config::parse_object, survive};

/// A tokenizer as `tokenizer.json` describes it, with the additions of `tokenizer_config.json`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Special tokens of two characters or more, by their first character.
    specials: HashMap<char, Vec<String>>,
    /// The same by their ids.
    special_ids: HashMap<u32, String>,
    /// Special tokens are found in the text as the template printed it, see the module.
    as_printed: bool,
    lengths: Lengths,
    /// `bos_token` and the like, by their names in `tokenizer_config.json`.
    named: Vec<(String, String)>,
    /// `inner` with a normaliser that removes the guard; made on first need, since it is a copy of the vocabulary.
    guarded: OnceLock<tokenizers::Tokenizer>,
    file: String,
}

/// Most bytes of a text that any tokenizer takes, once normalisers have made it as long as they can.
pub const MAX_TEXT_BYTES: usize = 32 << 20;
/// Bytes of text that are tokenised at least where rules drop or join text, so that its length says little about its tokens.
const LEAST_TEXT_BYTES: usize = 1 << 20;

/// Ids of a text, and for each the byte of the text at which it ends.
pub(crate) struct Encoded {
    pub ids: Vec<u32>,
    pub ends: Vec<usize>,
}

/// The guard that the normaliser removes. A noncharacter, never used in text; a text that contains it nevertheless loses it.
const GUARD: char = '\u{fdd0}';

impl Tokenizer {
    /// Reads `tokenizer.json`, called `file` in messages, and the parsed `tokenizer_config.json`, if there is one.
    ///
    /// # Errors
    /// [`Error::BadModel`] if `tokenizer.json` is damaged.
    pub fn new(file: &str, bytes: &[u8], config: Option<&Map<String, Value>>) -> Result<Self> {
        let bad = |e: &dyn std::fmt::Display| {
            Error::model(
                file,
                format!("not a valid tokenizer: {e}; download it again, or give token ids instead of text"),
            )
        };
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        // Parsed here first: the library's own message for text that is not JSON does not say where it breaks.
        let mut parsed = parse_object(file, bytes)?;
        let (lengths, changed) = file::check(&mut parsed).map_err(|why| bad(&why))?;
        let normalizer = parsed.get("normalizer").cloned();
        let rewritten = changed.then(|| Value::Object(std::mem::take(&mut parsed)).to_string());
        drop(parsed);
        let bytes = rewritten.as_ref().map_or(bytes, |text| text.as_bytes());
        let mut inner = survived(|| {
            let inner = tokenizers::Tokenizer::from_bytes(bytes)?;
            // Some faults appear only here. A text that a rule refuses is reported when it occurs.
            let _ = inner.encode("Hello, world! 1 + 2", true).and_then(|e| inner.decode(e.get_ids(), true));
            Ok(inner)
        })
        .map_err(|e| bad(&e))?;
        let named = config.map(named_tokens).unwrap_or_default();
        // A few files leave the flag of an end-of-turn token unset.
        let unflagged: Vec<AddedToken> = inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|t| !t.special && named.iter().any(|(_, text)| *text == t.content))
            .map(|t| AddedToken { special: true, ..t })
            .collect();
        survived(|| inner.add_special_tokens(unflagged)).map_err(|e| bad(&e))?;
        let added = inner.get_added_tokens_decoder();
        let special: Vec<(u32, AddedToken)> =
            added.into_iter().filter(|(_, t)| t.special && t.content.chars().nth(1).is_some()).collect();
        let texts: Vec<String> = special.iter().map(|(_, t)| t.content.clone()).collect();
        let as_printed = special.iter().any(|(_, t)| t.normalized) && file::may_forge(normalizer.as_ref(), &texts);
        let special_ids = special.into_iter().map(|(id, t)| (id, t.content)).collect();
        let mut specials: HashMap<char, Vec<String>> = HashMap::new();
        for text in texts {
            specials.entry(text.chars().next().unwrap_or_default()).or_default().push(text);
        }
        let guarded = OnceLock::new();
        Ok(Self { inner, specials, special_ids, as_printed, lengths, named, guarded, file: file.into() })
    }

    /// The file that this tokenizer is from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Bytes of text beyond which a text certainly has more than `tokens` tokens, or takes more memory than is
    /// sensible. Where rules drop or join text, nothing is certain: then it is the length of `tokens` of the longest
    /// token, and at least 1 MiB.
    pub fn most_bytes(&self, tokens: usize) -> usize {
        let bytes = match self.lengths.per_token {
            Some(bytes) => tokens.saturating_mul(bytes),
            None => tokens.saturating_mul(self.lengths.longest).max(LEAST_TEXT_BYTES),
        };
        bytes.min(MAX_TEXT_BYTES / self.lengths.growth)
    }

    /// Entries of the vocabulary, added tokens included. Ids may have gaps and the model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token given as text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Text of `bos_token`, `eos_token`, `pad_token` or `unk_token`.
    pub fn named_token(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str())
    }

    /// All of them, for the chat template.
    pub(crate) fn named_tokens(&self) -> &[(String, String)] {
        &self.named
    }

    /// The ids of a raw prompt: special tokens in the text are recognised, and those that the tokenizer puts around every
    /// text are added.
    ///
    /// # Errors
    /// [`Error::BadModel`] if the tokenizer's own rules fail on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = survived(|| self.inner.encode_fast(text, true)).map_err(|e| self.fault(&e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of a text in which nothing is special; nothing is added.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_guarded(&self.guard(text))?.ids)
    }

    /// The ids of a rendered prompt whose foreign parts went through [`Tokenizer::guard`]; nothing is added.
    pub(crate) fn encode_guarded(&self, text: &str) -> Result<Encoded> {
        let tokenizer = if self.as_printed || text.contains(GUARD) { self.guarded()? } else { &self.inner };
        let encoding = survived(|| tokenizer.encode(text, false)).map_err(|e| self.fault(&e))?;
        for (id, (start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            let Some(special) = self.special_ids.get(id) else { continue };
            if text.get(*start..*end).is_none_or(|there| there.trim() != special.trim()) {
                let why = "this tokenizer turns ordinary text into a special token; change the message";
                let there: String = text.get(*start..*end).unwrap_or_default().replace(GUARD, "");
                return Err(Error::model(&self.file, format!("{there:?} became {special:?}: {why}")));
            }
        }
        let ends = encoding.get_offsets().iter().map(|(_, end)| *end).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), ends })
    }

    /// Inserts the guard after the first character of every special token in `text`, complete or cut off by the end of
    /// the text (the text after it could complete it).
    pub(crate) fn guard(&self, text: &str) -> String {
        let text = text.replace(GUARD, "");
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            out.push(c);
            let rest = &text[at..];
            let mut specials = self.specials.get(&c).into_iter().flatten();
            if specials.any(|s| rest.starts_with(s.as_str()) || s.starts_with(rest)) {
                out.push(GUARD);
            }
        }
        out
    }

    /// Bytes of `text` without its guards.
    pub(crate) fn unguarded_len(&self, text: &str) -> usize {
        text.len() - text.matches(GUARD).count() * GUARD.len_utf8()
    }

    fn guarded(&self) -> Result<&tokenizers::Tokenizer> {
        if let Some(tokenizer) = self.guarded.get() {
            return Ok(tokenizer);
        }
        let mut tokenizer = self.inner.clone();
        let remove = NormalizerWrapper::from(Replace::new(GUARD.to_string(), "").map_err(|e| self.fault(&e))?);
        let first = [remove].into_iter().chain(self.inner.get_normalizer().cloned());
        tokenizer.with_normalizer(Some(Sequence::new(first.collect()))).map_err(|e| self.fault(&e))?;
        // Otherwise tokens that are looked for in normalised text would be found again after the guards are removed.
        let added = self.inner.get_added_tokens_decoder().into_values();
        let normalized = added.filter(|t| t.special && t.normalized).map(|t| AddedToken { normalized: false, ..t });
        tokenizer.add_special_tokens(normalized).map_err(|e| self.fault(&e))?;
        Ok(self.guarded.get_or_init(|| tokenizer))
    }

    /// The text of `ids`, without special tokens. Bytes that are not UTF-8 become U+FFFD, unknown ids become nothing.
    ///
    /// # Errors
    /// [`Error::BadModel`] if the tokenizer's own rules fail.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        survived(|| self.inner.decode(ids, true)).map_err(|e| self.fault(&e))
    }

    fn fault(&self, e: &dyn std::fmt::Display) -> Error {
        Error::model(
            &self.file,
            format!("the tokenizer fails: {e}; download the file again, or give token ids instead of text"),
        )
    }
}

/// Runs the library on a file or a text; it panics on some.
fn survived<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    survive::survived(call).unwrap_or_else(|| Err("its parts contradict each other".into()))
}

/// `bos_token` and the like: a string, or an object with the string as `content`.
fn named_tokens(config: &Map<String, Value>) -> Vec<(String, String)> {
    let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
    let token = |name: &str| Some((name.to_owned(), text(config.get(name)?)?));
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"]
        .into_iter()
        .filter_map(token)
        .collect()
}

/// Checks ids that did not come from the model's own tokenizer.
///
/// # Errors
/// [`Error::BadRequest`] if there are none, or one is not below `vocab`, naming it and its place.
pub fn check_ids(ids: &[u32], vocab: usize) -> Result<()> {
    if ids.is_empty() {
        return Err(Error::BadRequest("the prompt is empty; give some text or at least one token id".into()));
    }
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        Some((at, id)) => {
            let why = format!(
                "token id {id} at place {at} of the prompt is out of range; by vocab_size in config.json the model has ids 0 to {}",
                vocab - 1
            );
            Err(Error::BadRequest(why))
        }
        None => Ok(()),
    }
}

/// Text of a growing list of tokens, in pieces that end between characters.
///
/// A token may be part of a character, and a tokenizer may drop the space in front of the first word of what it decodes, so
/// each piece is decoded together with the tokens before it.
#[derive(Clone, Debug)]
pub struct TextStream {
    /// Tokens of the last piece, for context, then those not shown yet.
    window: Vec<u32>,
    shown: usize,
}

/// Most tokens that are held back; a character has four bytes, so more tokens cannot be a part of one.
const MAX_HELD: usize = 16;

impl TextStream {
    /// `context` are the last ids of the text that is continued, a few of them; none for a text that stands alone.
    pub fn new(context: &[u32]) -> Self {
        let window = context[context.len().saturating_sub(MAX_HELD)..].to_vec();
        Self { shown: window.len(), window }
    }

    /// The text that `id` completes, perhaps none.
    ///
    /// # Errors
    /// As for [`Tokenizer::decode`].
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.window.push(id);
        self.flush(tokenizer, self.window.len() - self.shown >= MAX_HELD)
    }

    /// The text that is left at the end: bytes of an incomplete character, as U+FFFD.
    ///
    /// # Errors
    /// As for [`Tokenizer::decode`].
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.flush(tokenizer, true)
    }

    fn flush(&mut self, tokenizer: &Tokenizer, all: bool) -> Result<String> {
        let before = tokenizer.decode(&self.window[..self.shown])?;
        let now = tokenizer.decode(&self.window)?;
        let new = now.get(before.len()..).unwrap_or_default();
        if new.is_empty() || (new.ends_with('\u{fffd}') && !all) {
            // Special tokens have no text; without this a run of them would be decoded repeatedly.
            if new.is_empty() && self.window.len() - self.shown >= MAX_HELD {
                self.window.drain(..self.shown);
                self.shown = self.window.len();
            }
            return Ok(String::new());
        }
        let new = new.to_owned();
        self.window.drain(..self.shown);
        self.shown = self.window.len();
        Ok(new)
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
