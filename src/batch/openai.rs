//! Lines of OpenAI's batch API, which vLLM's `run-batch` takes too. Input: `custom_id`, `method`, `url` and `body`.
//! Output: a response with the body of that endpoint.

use std::collections::BTreeMap;

use selkie_core::{
    chat::{Message, system_clock},
    controls::Controls,
    engine::FinishReason,
    session::{Ask, Completion, Model, Overrides, Prompt, Token, WhenFull},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json, value::RawValue};

use super::{
    Answered,
    request::{Stop, shared},
};
use crate::logprobs;

/// The endpoint of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// The fault of a line.
pub enum Fault {
    /// It cannot be read.
    Json(serde_json::Error),
    /// It requests something that does not exist.
    Request(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `custom_id`, `method`, `url` and `body`")]
struct Line<'a> {
    #[serde(rename = "custom_id")]
    _custom_id: IgnoredAny,
    method: Option<String>,
    url: Option<String>,
    #[serde(borrow)]
    body: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the parameters of the endpoint")]
struct Body {
    messages: Option<Vec<Turn>>,
    prompt: Option<TextPrompt>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    /// Values without effect here: the model is the one that was loaded.
    #[serde(rename = "model")]
    _model: Option<IgnoredAny>,
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(rename = "store")]
    _store: Option<IgnoredAny>,
    /// Values that are accepted only if they describe the behaviour of this program.
    n: Option<Value>,
    stream: Option<Value>,
    response_format: Option<Value>,
    logprobs: Option<Reported>,
    top_logprobs: Option<u8>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    /// By token id.
    logit_bias: Option<BTreeMap<u32, f32>>,
    /// These are vLLM's.
    min_tokens: Option<usize>,
    ignore_eos: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    allowed_token_ids: Option<Vec<u32>>,
}

/// The field `logprobs`: whether they are reported, or with /v1/completions how many.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "`logprobs` must be true, false or a number")]
enum Reported {
    Whether(bool),
    Top(u8),
}

#[derive(Deserialize)]
#[serde(expecting = "an object with `role` and `content`")]
struct Turn {
    role: String,
    content: Content,
}

/// Text, or text in parts.
#[derive(Deserialize)]
#[serde(untagged, expecting = "`content` must be a string or a list of parts of the type `text`")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    Text { text: String },
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`prompt` must be a string or a list of token ids")]
enum TextPrompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The request of a line; `seed` and `when_full` are used if it has none.
pub fn ask(line: &[u8], seed: u64, when_full: WhenFull) -> (Endpoint, Result<Ask, Fault>) {
    let line: Line = match serde_json::from_slice(line) {
        Ok(line) => line,
        Err(e) => return (Endpoint::Chat, Err(Fault::Json(e))),
    };
    let endpoint = match line.url.as_deref() {
        None | Some("/v1/chat/completions") => Endpoint::Chat,
        Some("/v1/completions") => Endpoint::Text,
        Some(other) => {
            let why = format!("`url` is {other:?}; there are /v1/chat/completions and /v1/completions");
            return (Endpoint::Chat, Err(Fault::Request(why)));
        }
    };
    if let Some(method) = line.method.filter(|m| m != "POST") {
        return (endpoint, Err(Fault::Request(format!("`method` is {method:?} and must be \"POST\""))));
    }
    let body = serde_json::from_str::<Body>(line.body.get()).map_err(Fault::Json);
    (endpoint, body.and_then(|body| body.ask(endpoint, seed, when_full).map_err(Fault::Request)))
}

impl Body {
    fn ask(self, endpoint: Endpoint, seed: u64, when_full: WhenFull) -> Result<Ask, String> {
        self.check()?;
        let logprobs = self.logprobs(endpoint)?;
        let prompt = match (endpoint, self.messages, self.prompt) {
            (Endpoint::Chat, Some(turns), None) => Prompt::Messages(turns.into_iter().map(Turn::message).collect()),
            (Endpoint::Text, None, Some(TextPrompt::Text(text))) => Prompt::Text(text),
            (Endpoint::Text, None, Some(TextPrompt::Ids(ids))) => Prompt::Ids(ids),
            (Endpoint::Chat, ..) => return Err("/v1/chat/completions takes `messages` and no `prompt`".into()),
            (Endpoint::Text, ..) => return Err("/v1/completions takes `prompt` and no `messages`".into()),
        };
        Ok(Ask {
            prompt,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            when_full,
            ..shared!(self, logprobs, seed)
        })
    }

    /// The number of most likely tokens to report, if any are.
    fn logprobs(&self, endpoint: Endpoint) -> Result<Option<u8>, String> {
        match (endpoint, self.logprobs, self.top_logprobs) {
            (_, None | Some(Reported::Whether(false)), None) => Ok(None),
            (Endpoint::Chat, Some(Reported::Whether(true)), top) => Ok(Some(top.unwrap_or(0))),
            (Endpoint::Text, Some(Reported::Top(n)), None) => Ok(Some(n)),
            (Endpoint::Chat, Some(Reported::Top(_)), _) => {
                Err("`logprobs` is true or false in a chat; the number is `top_logprobs`".into())
            }
            (Endpoint::Text, Some(Reported::Whether(true)), _) => {
                Err("`logprobs` of /v1/completions is the number of tokens to report at each place".into())
            }
            (Endpoint::Chat, _, Some(_)) => Err("`top_logprobs` needs `logprobs`: true".into()),
            (Endpoint::Text, _, Some(_)) => Err("`top_logprobs` is for chats; here the number is `logprobs`".into()),
        }
    }

    /// Refuses values that would be ignored.
    fn check(&self) -> Result<(), String> {
        let plain = json!({ "type": "text" });
        for (name, value, allowed) in [
            ("n", &self.n, json!(1)),
            ("stream", &self.stream, json!(false)),
            ("response_format", &self.response_format, plain),
        ] {
            let Some(value) = value else { continue };
            if *value != allowed {
                return Err(format!("`{name}` can only be {allowed}"));
            }
        }
        Ok(())
    }
}

impl Turn {
    fn message(self) -> Message {
        let content = match self.content {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.into_iter().map(|Part::Text { text }| text).collect(),
        };
        Message::new(&self.role, content)
    }
}

/// A line of the output, without its end. `number` is that of the request's line.
pub fn answer(
    custom_id: &RawValue,
    endpoint: Endpoint,
    result: Result<Answered, &str>,
    number: usize,
    model: &Model,
) -> String {
    let id = format!("batch_req_{number}");
    let (status, body) = match result {
        Ok((done, tokens)) => (200, body(done, tokens, endpoint, number, model)),
        Err(why) => {
            let error = json!({ "message": why, "type": "invalid_request_error", "param": null, "code": null });
            (400, json!({ "error": error }))
        }
    };
    let response = json!({ "status_code": status, "request_id": format!("req_{number}"), "body": body });
    // `custom_id` is returned exactly as it was written.
    format!("{{\"id\":\"{id}\",\"custom_id\":{custom_id},\"response\":{response},\"error\":null}}")
}

fn body(done: &Completion, tokens: &[Token], endpoint: Endpoint, number: usize, model: &Model) -> Value {
    let finish = match done.finish {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Failed => "stop",
    };
    let (prompt, completion) = (done.end.prompt_tokens, done.ids.len());
    let (id, object, choice) = match endpoint {
        Endpoint::Chat => {
            let message = json!({ "role": "assistant", "content": done.text });
            let logprobs = logprobs::chat(tokens, model.text());
            let choice = json!({ "index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish });
            (format!("chatcmpl-{number}"), "chat.completion", choice)
        }
        Endpoint::Text => {
            let logprobs = logprobs::completion(tokens, model.text(), &mut 0);
            let choice = json!({ "index": 0, "text": done.text, "logprobs": logprobs, "finish_reason": finish });
            (format!("cmpl-{number}"), "text_completion", choice)
        }
    };
    let mut details = json!({ "cached_tokens": done.reused() });
    if done.is_converted() {
        details["converted"] = true.into();
    }
    json!({
        "id": id,
        "object": object,
        "created": system_clock(),
        "model": model.facts().name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        },
    })
}
