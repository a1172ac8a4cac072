//! What a request wants, in no protocol's words, and the fields that several protocols share.

use selkie_core::{
    chat::{Message, ToolCall},
    controls::Controls,
    grammar::Structure,
    session::{Overrides, Prompt, WhenFull},
};
use serde_json::value::RawValue;

use super::{fields::Fields, refusal::Refusal, speech::ToolUse};

/// Most choices of a request: its `n`, times its prompts.
pub const MOST_CHOICES: u64 = 128;
/// Most stop strings; each is looked for at every character.
const MOST_STOPS: usize = 64;
/// Most messages of a chat.
const MOST_MESSAGES: usize = 1 << 16;

/// A request that can be run.
#[derive(Debug, Default, PartialEq)]
pub struct Wanted {
    /// One or several starts; each is continued `n` times.
    pub prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub n: usize,
    /// How tokens are chosen, where the request says so.
    pub overrides: Overrides,
    /// Most tokens of each answer.
    pub max_tokens: Option<usize>,
    /// Texts before which an answer ends.
    pub stop: Vec<String>,
    /// The model's end of text does not end an answer.
    pub ignore_eos: bool,
    /// Other tokens that end an answer.
    pub stop_token_ids: Vec<u32>,
    /// Rules over the logits, and which log probabilities are reported.
    pub controls: Controls,
    /// Tools that the answer may call.
    pub tools: ToolUse,
    /// What the answer has to be.
    pub structure: Option<Structure>,
    /// Prefixes are shared by requests with the same salt only.
    pub salt: String,
    /// Among the requests of a key, lower ones are first.
    pub priority: i32,
    /// What happens to a chat that is longer than the context.
    pub when_full: WhenFull,
    /// The answer comes in pieces.
    pub stream: bool,
    /// The answer begins with its prompt.
    pub echo: bool,
    /// Log probabilities of the prompt, and of so many likely tokens at each of its places.
    pub prompt_logprobs: Option<u8>,
}

impl Wanted {
    /// The number of answers.
    pub fn choices(&self) -> usize {
        self.n * self.prompts.len()
    }

    /// Reads what is the same in OpenAI's protocols; the prompts are the caller's part.
    ///
    /// # Errors
    /// If a value is impossible, or asks for what this server does not do.
    pub fn openai(fields: &Fields<'_>) -> Result<Self, Refusal> {
        refuse_absent(fields)?;
        let n = fields.count("n", 1, MOST_CHOICES)?.unwrap_or(1) as usize;
        let ignore_eos = fields.flag("ignore_eos")?;
        let max_tokens = max_tokens(fields, &["max_completion_tokens", "max_tokens"])?;
        let controls = controls(fields)?;
        if max_tokens.is_some_and(|most| most < controls.min_tokens) {
            return Err(fields.refuse("min_tokens", "is more than the maximum number of tokens"));
        }
        Ok(Self {
            prompts: Vec::new(),
            n,
            overrides: overrides(fields)?,
            max_tokens,
            stop: stops(fields, "stop")?,
            ignore_eos,
            stop_token_ids: ids(fields, "stop_token_ids", MOST_STOPS)?.unwrap_or_default(),
            controls,
            salt: fields.get("cache_salt")?.unwrap_or_default(),
            priority: fields.get("priority")?.unwrap_or_default(),
            when_full: when_full(fields)?,
            stream: fields.flag("stream")?,
            ..Self::default()
        })
    }
}

fn when_full(fields: &Fields<'_>) -> Result<WhenFull, Refusal> {
    let Some(name) = fields.get::<String>("when_full")? else { return Ok(WhenFull::Error) };
    WhenFull::from_name(&name).ok_or_else(|| fields.refuse("when_full", "must be \"error\" or \"drop-oldest\""))
}

/// Rules over the logits, without the report of log probabilities.
fn controls(fields: &Fields<'_>) -> Result<Controls, Refusal> {
    let allowed_tokens = ids(fields, "allowed_token_ids", usize::MAX)?;
    if allowed_tokens.as_ref().is_some_and(Vec::is_empty) {
        return Err(fields.refuse("allowed_token_ids", "is empty"));
    }
    Ok(Controls {
        logprobs: None,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or_default(),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or_default(),
        logit_bias: logit_bias(fields)?,
        min_tokens: fields.count("min_tokens", 0, u64::from(u32::MAX))?.unwrap_or_default() as usize,
        allowed_tokens,
    })
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, Refusal> {
    let Some(value) = fields.raw("logit_bias") else { return Ok(Vec::new()) };
    let biases = Fields::of("logit_bias".into(), value)?;
    let mut all: Vec<(u32, f32)> = Vec::new();
    for name in biases.names() {
        let id = name.parse().map_err(|_| fields.refuse("logit_bias", "has a name that is no token id"))?;
        all.extend(biases.number(name, -100.0, 100.0)?.map(|bias| (id, bias)));
    }
    all.sort_unstable_by_key(|(id, _)| *id);
    Ok(all)
}

/// A list of token ids.
fn ids(fields: &Fields<'_>, name: &str, most: usize) -> Result<Option<Vec<u32>>, Refusal> {
    let ids: Option<Vec<u32>> = fields.get(name)?;
    match &ids {
        Some(ids) if ids.len() > most => Err(fields.refuse(name, &format!("has more than {most} ids"))),
        _ => Ok(ids),
    }
}

/// The first of several names that is there.
///
/// # Errors
/// If it is no whole number from 1 on.
pub fn max_tokens(fields: &Fields<'_>, names: &[&str]) -> Result<Option<usize>, Refusal> {
    for name in names {
        if let Some(most) = fields.count(name, 1, u64::from(u32::MAX))? {
            return Ok(Some(most as usize));
        }
    }
    Ok(None)
}

/// The values of sampling.
///
/// # Errors
/// If one is impossible.
pub fn overrides(fields: &Fields<'_>) -> Result<Overrides, Refusal> {
    let above_zero = |name: &str, most: f64| match fields.number(name, 0.0, most)? {
        Some(0.0) => Err(fields.refuse(name, &format!("must be a number above 0 and at most {most}"))),
        x => Ok(x),
    };
    // -1 is vLLM's word for all tokens; a seed is any whole number of 64 bits.
    let top_k = match fields.raw("top_k").map(RawValue::get) {
        Some("-1") => Some(0),
        _ => fields.count("top_k", 0, u64::from(u32::MAX))?.map(|k| k as u32),
    };
    let seed = match fields.raw("seed").map(|seed| seed.get().parse::<i64>()) {
        Some(Ok(seed)) => Some(seed as u64),
        _ => fields.count("seed", 0, u64::MAX)?,
    };
    Ok(Overrides {
        temperature: fields.number("temperature", 0.0, 100.0)?,
        top_k,
        top_p: above_zero("top_p", 1.0)?,
        min_p: fields.number("min_p", 0.0, 1.0)?,
        repetition_penalty: above_zero("repetition_penalty", 100.0)?,
        seed,
    })
}

/// Stop strings.
///
/// # Errors
/// If one is empty, or there are too many.
pub fn stops(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, Refusal> {
    let stops = fields.strings(name)?;
    if stops.len() > MOST_STOPS {
        return Err(fields.refuse(name, &format!("has {} strings; at most {MOST_STOPS} are taken", stops.len())));
    }
    match stops.iter().any(String::is_empty) {
        true => Err(fields.refuse(name, "has an empty string, before which every answer would end")),
        false => Ok(stops),
    }
}

/// Refuses fields that would change the answer and that nothing here obeys, unless their value asks for what is done anyway.
fn refuse_absent(fields: &Fields<'_>) -> Result<(), Refusal> {
    const OFF: &[&str] = &["false", "0", "[]", "{}", "\"\""];
    let tables: [(&[&str], &[&str]); 3] = [
        (
            &[
                "suffix",
                "bad_words",
                "functions",
                "use_beam_search",
                "include_stop_str_in_output",
                "truncate_prompt_tokens",
                "thinking_token_budget",
                "chat_template",
                "documents",
                "audio",
                "web_search_options",
            ],
            OFF,
        ),
        (&["best_of"], &["1"]),
        (&["skip_special_tokens"], &["true"]),
    ];
    for (names, allowed) in tables {
        for name in names {
            if fields.raw(name).is_some_and(|value| !allowed.contains(&value.get())) {
                return Err(not_supported(fields, name, allowed[0]));
            }
        }
    }
    Ok(())
}

fn not_supported(fields: &Fields<'_>, name: &str, allowed: &str) -> Refusal {
    fields.refuse(name, &format!("is not supported by this server; leave it out or send {allowed}"))
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// The messages of a chat: text, or parts that are text.
///
/// # Errors
/// If there are none, or one has something else.
pub fn messages(fields: &Fields<'_>, name: &str) -> Result<Vec<Message>, Refusal> {
    let list = fields.list(name)?.ok_or_else(|| fields.refuse(name, "is missing"))?;
    if list.is_empty() || list.len() > MOST_MESSAGES {
        return Err(fields.refuse(name, &format!("has {} messages; send 1 to {MOST_MESSAGES}", list.len())));
    }
    list.iter()
        .enumerate()
        .map(|(i, value)| message(&Fields::of(format!("{}[{i}]", fields.name(name)), value)?))
        .collect()
}

/// The role of a message, as templates know it.
///
/// # Errors
/// If there is none.
pub fn role_of(turn: &Fields<'_>) -> Result<String, Refusal> {
    let role: String = turn.need("role")?;
    // OpenAI's newer name.
    Ok(if role == "developer" { "system".into() } else { role })
}

fn message(turn: &Fields<'_>) -> Result<Message, Refusal> {
    let role = role_of(turn)?;
    for field in ["function_call", "audio"] {
        if turn.raw(field).is_some_and(|value| value.get() != "[]") {
            return Err(turn.refuse(field, "is not supported by this server"));
        }
    }
    let tool_calls = tool_calls(turn)?;
    let reasoning = ["reasoning", "reasoning_content"].into_iter().find(|name| turn.raw(name).is_some());
    let reasoning_content = reasoning.map(|name| content(turn, name)).transpose()?;
    let content = match turn.raw("content") {
        None if tool_calls.is_empty() => return Err(turn.refuse("content", "is missing")),
        _ => content(turn, "content")?,
    };
    let (tool_call_id, name) = (turn.get("tool_call_id")?, turn.get("name")?);
    Ok(Message { reasoning_content, tool_calls, tool_call_id, name, ..Message::new(&role, content) })
}

/// Calls that an earlier answer made.
fn tool_calls(turn: &Fields<'_>) -> Result<Vec<ToolCall>, Refusal> {
    let call = |(i, value)| {
        let call = Fields::of(format!("{}[{i}]", turn.name("tool_calls")), value)?;
        let function = call.raw("function").ok_or_else(|| call.refuse("function", "is missing"))?;
        let function = Fields::of(call.name("function"), function)?;
        let id: Option<String> = call.get("id")?;
        // A text of JSON; Ollama's clients send the object itself.
        let arguments = match function.raw("arguments") {
            Some(object) if object.get().starts_with('{') => object.get().to_owned(),
            _ => function.get("arguments")?.unwrap_or_default(),
        };
        Ok(ToolCall::new(id.unwrap_or_default(), function.need::<String>("name")?, &arguments))
    };
    turn.list("tool_calls")?.unwrap_or_default().into_iter().enumerate().map(call).collect()
}

/// Text, or the texts of parts together.
///
/// # Errors
/// If a part is something else.
pub fn content(fields: &Fields<'_>, name: &str) -> Result<String, Refusal> {
    let Some(value) = fields.raw(name) else { return Ok(String::new()) };
    if let Ok(text) = serde_json::from_str::<String>(value.get()) {
        return Ok(text);
    }
    let parts = fields.list(name).map_err(|_| fields.refuse(name, "must be a string or a list of parts"))?;
    let mut all = String::new();
    for (i, part) in parts.unwrap_or_default().into_iter().enumerate() {
        let place = format!("{}[{i}]", fields.name(name));
        if let Ok(text) = serde_json::from_str::<String>(part.get()) {
            all += &text;
            continue;
        }
        let part = Fields::of(place, part)?;
        match &*part.need::<String>("type")? {
            "text" | "input_text" | "output_text" => all += &part.need::<String>("text")?,
            "image_url" | "input_image" | "image" => {
                return Err(part.refuse("type", "is an image, and this server runs language models only"));
            }
            other => {
                let why = format!("is {:?}, and this server takes text only", short(other));
                return Err(part.refuse("type", &why));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Wanted, Refusal> {
        Wanted::openai(&Fields::body(body.as_bytes()).unwrap())
    }

    fn param(body: &str) -> String {
        read(body).unwrap_err().param.unwrap()
    }

    #[test]
    fn what_benchmarks_send() {
        let body = r#"{"model": "x", "n": 2, "max_tokens": 9, "temperature": 0, "top_p": 1.0, "top_k": -1, "seed": -1,
            "repetition_penalty": 1.0, "ignore_eos": true, "min_tokens": 9, "stop": "\n", "logprobs": false, "user": "u",
            "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tool_choice": "auto", "tools": [],
            "something_new": {"a": [1]}, "stream": true, "stream_options": {"include_usage": true}, "cache_salt": "s",
            "priority": -3}"#;
        let wanted = read(body).unwrap();
        let overrides = Overrides {
            temperature: Some(0.0),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: None,
            repetition_penalty: Some(1.0),
            seed: Some(u64::MAX),
        };
        let expected = Wanted {
            prompts: Vec::new(),
            n: 2,
            overrides,
            max_tokens: Some(9),
            stop: vec!["\n".into()],
            ignore_eos: true,
            controls: Controls { min_tokens: 9, ..Controls::default() },
            salt: "s".into(),
            priority: -3,
            stream: true,
            ..Wanted::default()
        };
        assert_eq!(wanted, expected);
        assert_eq!(read(r#"{"max_completion_tokens": 3, "max_tokens": 9}"#).unwrap().max_tokens, Some(3));
    }

    #[test]
    fn impossible_values_name_their_field() {
        for (name, value) in [
            ("temperature", "-1"),
            ("temperature", "\"hot\""),
            ("top_p", "0"),
            ("top_p", "1.1"),
            ("min_p", "2"),
            ("top_k", "-2"),
            ("seed", "1.5"),
            ("repetition_penalty", "0"),
            ("n", "0"),
            ("n", "1000"),
            ("max_tokens", "0"),
            ("max_completion_tokens", "-1"),
            ("stop", "[\"a\", \"\"]"),
            ("stop", "7"),
            ("stream", "\"yes\""),
            ("min_tokens", "-1"),
            ("presence_penalty", "3"),
            ("logit_bias", "{\"a\": 1}"),
            ("allowed_token_ids", "[]"),
            ("stop_token_ids", "[-1]"),
            ("cache_salt", "5"),
            ("priority", "0.5"),
            ("priority", "9999999999"),
            ("when_full", "\"drop\""),
        ] {
            assert_eq!(param(&format!("{{\"{name}\": {value}}}")), name, "{value}");
        }
    }

    #[test]
    fn nothing_that_changes_the_answer_is_ignored() {
        for (name, value) in [("bad_words", "[\"x\"]"), ("best_of", "2"), ("skip_special_tokens", "false")] {
            assert_eq!(param(&format!("{{\"{name}\": {value}}}")), name, "{value}");
        }
    }

    #[test]
    fn messages_are_text() {
        let of = |body: &str| messages(&Fields::body(body.as_bytes()).unwrap(), "messages");
        let body = r#"{"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "name": "u", "content":
            [{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}]}]}"#;
        let expected = [
            Message::new("system", "Be kind."),
            Message { name: Some("u".into()), ..Message::new("user", "What is 17 + 25?") },
        ];
        assert_eq!(of(body).unwrap(), expected);
        let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}"#;
        let refusal = of(image).unwrap_err();
        assert_eq!(refusal.param.as_deref(), Some("messages[0].content[0].type"));
        assert!(refusal.message.contains("is an image"), "{}", refusal.message);
        for (body, param) in [
            ("{}", "messages"),
            (r#"{"messages": []}"#, "messages"),
            (r#"{"messages": ["x"]}"#, "messages[0]"),
            (r#"{"messages": [{"content": "x"}]}"#, "messages[0].role"),
            (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content"),
            (r#"{"messages": [{"role": "user", "content": 7}]}"#, "messages[0].content"),
            (r#"{"messages": [{"role": "assistant", "tool_calls": [1]}]}"#, "messages[0].tool_calls[0]"),
            (
                r#"{"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}"#,
                "messages[0].tool_calls[0].function",
            ),
        ] {
            assert_eq!(of(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
