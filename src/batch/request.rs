//! Lines of the input and of the output.

use std::collections::BTreeMap;

use selkie_core::{
    chat::Message,
    controls::Controls,
    session::{Ask, Model, Overrides, Prompt, WhenFull},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

use super::{Answered, openai};
use crate::{failure, generate};

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

    /// How the line is answered, and its request. Where that has none, `place` is the seed, and `when_full` the policy.
    pub fn ask(&self, place: usize, when_full: WhenFull) -> (Reply, Result<Ask, String>) {
        let outline = self.outline();
        if let Some(custom_id) = outline.custom_id {
            let (endpoint, ask) = openai::ask(self.text, place as u64, when_full);
            return (Reply::OpenAi { custom_id, endpoint }, ask.map_err(|e| self.fault(&e)));
        }
        match serde_json::from_slice::<Request>(self.text) {
            Ok(mut request) => (Reply::Own { id: request.id.take() }, request.ask(place as u64, when_full)),
            Err(e) => (Reply::Own { id: outline.id }, Err(self.fault(&openai::Fault::Json(e)))),
        }
    }

    /// The key that tells the request from others, as written: `id`, or `custom_id` of OpenAI's batch API.
    pub fn id(&self) -> Option<Box<RawValue>> {
        let outline = self.outline();
        outline.custom_id.or(outline.id)
    }

    fn outline(&self) -> Outline {
        serde_json::from_slice(self.text).unwrap_or_default()
    }

    fn fault(&self, fault: &openai::Fault) -> String {
        let e = match fault {
            openai::Fault::Request(why) => return why.clone(),
            openai::Fault::Json(e) => e,
        };
        if let Err(e) = std::str::from_utf8(self.text) {
            return format!("not UTF-8 from byte {} of the line on", e.valid_up_to() + 1);
        }
        // The parser counts lines within the one it was given.
        let why = failure::json_error(e).replace(" at line 1 column ", " at column ");
        if e.is_data() { why } else { format!("not JSON: {why}") }
    }
}

/// The form in which a line is answered.
pub enum Reply {
    /// Our own, with the request's id.
    Own {
        /// As written.
        id: Option<Box<RawValue>>,
    },
    /// That of OpenAI's batch API.
    OpenAi {
        /// As written.
        custom_id: Box<RawValue>,
        /// The request of the line.
        endpoint: openai::Endpoint,
    },
}

impl Reply {
    /// A line of the output, without its end.
    pub fn line(&self, result: Result<Answered, &str>, line: &Line, model: &Model) -> String {
        match self {
            Self::Own { id } => {
                let rest = match result {
                    Ok((done, tokens)) => generate::completion_fields(done, tokens),
                    Err(why) => error_fields(why),
                };
                let answer = Answer { id: id.as_deref(), rest, line: line.number, line_hash: line.hash() };
                serde_json::to_string(&answer).expect("an answer has string keys only")
            }
            Self::OpenAi { custom_id, endpoint } => openai::answer(custom_id, *endpoint, result, line.number, model),
        }
    }
}

/// What both forms of a request say by the same names, as an [`Ask`] without the rest.
macro_rules! shared {
    ($given:ident, $logprobs:expr, $seed:ident) => {
        Ask {
            sampling: Overrides {
                temperature: $given.temperature,
                top_k: $given.top_k,
                top_p: $given.top_p,
                min_p: $given.min_p,
                repetition_penalty: $given.repetition_penalty,
                seed: Some($given.seed.unwrap_or($seed)),
            },
            stop: $given.stop.map(Stop::list).unwrap_or_default(),
            controls: Controls {
                logprobs: $logprobs,
                presence_penalty: $given.presence_penalty.unwrap_or_default(),
                frequency_penalty: $given.frequency_penalty.unwrap_or_default(),
                logit_bias: $given.logit_bias.unwrap_or_default().into_iter().collect(),
                min_tokens: $given.min_tokens.unwrap_or_default(),
                allowed_tokens: $given.allowed_token_ids,
            },
            ignore_eos: $given.ignore_eos.unwrap_or_default(),
            stop_token_ids: $given.stop_token_ids.unwrap_or_default(),
            ..Ask::default()
        }
    };
}
pub(super) use shared;

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
    when_full: Option<Policy>,
    logprobs: Option<u8>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// By token id.
    logit_bias: Option<BTreeMap<u32, f32>>,
    min_tokens: Option<usize>,
    ignore_eos: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    allowed_token_ids: Option<Vec<u32>>,
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
pub enum Stop {
    /// A string.
    One(String),
    /// A list.
    Several(Vec<String>),
}

impl Stop {
    /// As a list.
    pub fn list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Several(texts) => texts,
        }
    }
}

/// See [`WhenFull`].
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", expecting = "`when_full` must be \"error\" or \"drop-oldest\"")]
enum Policy {
    Error,
    DropOldest,
}

/// The part of a line that can be read although the line may not be a valid request.
#[derive(Default, Deserialize)]
struct Outline {
    id: Option<Box<RawValue>>,
    custom_id: Option<Box<RawValue>>,
}

impl Request {
    /// The request; `seed` and `when_full` are used if it has none.
    fn ask(self, seed: u64, when_full: WhenFull) -> Result<Ask, String> {
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
        Ok(Ask {
            prompt,
            max_tokens: self.max_tokens,
            namespace: self.namespace.unwrap_or_default(),
            when_full: match self.when_full {
                Some(Policy::Error) => WhenFull::Error,
                Some(Policy::DropOldest) => WhenFull::DropOldest,
                None => when_full,
            },
            ..shared!(self, self.logprobs, seed)
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

/// The fields of an answer that is an error.
fn error_fields(why: &str) -> Value {
    json!({
        "text": null,
        "ids": [],
        "finish_reason": "error",
        "error": why,
        "left_out_messages": 0,
        "usage": { "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0 },
        "cache": { "matched_tokens": 0, "reused_tokens": 0, "host_tokens": 0, "disk_tokens": 0, "reason": null, "converted": false },
        "timing": { "queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0 },
    })
}

/// The fields of an answer of an earlier run.
#[derive(Deserialize)]
pub struct Known {
    /// As the request had it.
    id: Option<Box<RawValue>>,
    /// The same in OpenAI's form, where `id` is the answer's.
    custom_id: Option<Box<RawValue>>,
    /// Number of the request's line.
    pub line: Option<usize>,
    /// [`Line::hash`] of that line.
    pub line_hash: Option<String>,
    /// `error` if there is no answer.
    finish_reason: Option<String>,
    response: Option<KnownResponse>,
}

#[derive(Deserialize)]
struct KnownResponse {
    status_code: u16,
}

impl Known {
    /// The key of the request, see [`Line::id`].
    pub fn key(&self) -> Option<&RawValue> {
        self.custom_id.as_deref().or(self.id.as_deref())
    }

    /// Whether this is an answer, and not an error or something else.
    pub fn is_answer(&self) -> bool {
        match (&self.finish_reason, &self.response) {
            (Some(reason), _) => reason != "error",
            (None, Some(response)) => response.status_code == 200,
            (None, None) => false,
        }
    }
}
