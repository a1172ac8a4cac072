//! Lines of the input and of the output.

use selkie_core::{
    chat::Message,
    model_dir::ModelFiles,
    session::{Ask, Overrides, Prompt},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

use crate::failure;

/// A line of the input that is not empty.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// Counted from 1, empty lines included.
    pub number: usize,
    /// Without white space around it.
    pub text: &'a [u8],
}

impl<'a> Line<'a> {
    /// The lines of a file.
    pub fn all(input: &'a [u8]) -> Vec<Self> {
        let lines = input.split(|b| *b == b'\n').enumerate();
        lines.map(|(i, line)| Self { number: i + 1, text: line.trim_ascii() }).filter(|l| !l.text.is_empty()).collect()
    }

    /// A hash of the line's text, for an answer's field `line_hash`.
    pub fn hash(&self) -> String {
        format!("{:016x}", selkie_core::fnv::hash(selkie_core::fnv::START, self.text))
    }

    /// The line's id as written, and its request; `place` is the seed if the request has none.
    pub fn ask(&self, place: usize, files: &ModelFiles) -> (Option<Box<RawValue>>, Result<Ask, String>) {
        match serde_json::from_slice::<Request>(self.text) {
            Ok(mut request) => (request.id.take(), request.ask(files, place as u64)),
            Err(e) => (self.id(), Err(self.fault(&e))),
        }
    }

    /// The id of a line that may not be a valid request.
    pub fn id(&self) -> Option<Box<RawValue>> {
        serde_json::from_slice::<OnlyId>(self.text).unwrap_or_default().id
    }

    fn fault(&self, e: &serde_json::Error) -> String {
        if let Err(e) = std::str::from_utf8(self.text) {
            return format!("not UTF-8 from byte {} of the line on", e.valid_up_to() + 1);
        }
        // The parser counts lines within the one it was given.
        failure::json_error(e).replace(" at line 1 column ", " at column ")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the fields of a request")]
struct Request {
    /// Kept as text, so that a number is returned exactly as it was written.
    id: Option<Box<RawValue>>,
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    messages: Option<Vec<Turn>>,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    namespace: Option<String>,
}

/// A message of a chat.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `role` and `content`")]
struct Turn {
    role: String,
    content: String,
}

/// One stop string or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "`stop` must be a string or a list of strings")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// The readable part of a line that is not a valid request.
#[derive(Default, Deserialize)]
struct OnlyId {
    id: Option<Box<RawValue>>,
}

impl Request {
    /// The request; `seed` is used if it has none.
    fn ask(self, files: &ModelFiles, seed: u64) -> Result<Ask, String> {
        let given = [self.prompt.is_some(), self.prompt_ids.is_some(), self.messages.is_some()];
        let prompt = match (self.prompt, self.prompt_ids, self.messages) {
            (Some(text), None, None) => Prompt::Text(text),
            (None, Some(ids), None) => Prompt::Ids(ids),
            (None, None, Some(turns)) => {
                Prompt::Messages(turns.into_iter().map(|t| Message::new(&t.role, t.content)).collect())
            }
            _ => {
                let n = given.iter().filter(|g| **g).count();
                return Err(format!("a request has one of `prompt`, `prompt_ids` and `messages`; this one has {n}"));
            }
        };
        let overrides = Overrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        Ok(Ask {
            prompt,
            sampling: overrides.over(files.generation.sampling(seed)),
            max_tokens: self.max_tokens,
            stop: match self.stop {
                None => Vec::new(),
                Some(Stop::One(text)) => vec![text],
                Some(Stop::Several(texts)) => texts,
            },
            namespace: self.namespace.unwrap_or_default(),
        })
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    id: Option<&'a RawValue>,
    #[serde(flatten)]
    rest: Value,
    line: usize,
    line_hash: String,
}

/// A line of the output, without its end: the answer with the fields `rest`.
pub fn answer(id: Option<&RawValue>, rest: Value, line: &Line) -> String {
    let answer = Answer { id, rest, line: line.number, line_hash: line.hash() };
    serde_json::to_string(&answer).expect("an answer has string keys only")
}

/// The fields of an answer that is an error.
pub fn error_fields(why: &str) -> Value {
    json!({
        "text": null,
        "ids": [],
        "finish_reason": "error",
        "error": why,
        "usage": { "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0 },
        "cache": { "matched_tokens": 0, "reused_tokens": 0, "reason": null },
        "timing": { "queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0 },
    })
}

/// What an earlier run says about one of its answers.
#[derive(Deserialize)]
pub struct Known {
    /// As the request had it.
    pub id: Option<Box<RawValue>>,
    /// Number of the request's line.
    pub line: Option<usize>,
    /// [`Line::hash`] of that line.
    pub line_hash: Option<String>,
    /// `error` if there is no answer.
    pub finish_reason: String,
}
