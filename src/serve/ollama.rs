//! Ollama's `/api/chat` and `/api/tags`.

use selkie_core::{
    chat::{Conversation, End, Message, strftime},
    engine::FinishReason,
    grammar::Structure,
    reply::Event,
    session::{Facts, Overrides, Prompt},
};
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    answer::Speak,
    fields::Fields,
    refusal::{Dialect, Refusal},
    speech::{Call, ToolUse},
    sse::Out,
    voice::{Ended, Head, Tokens, Voice, extension},
    wanted::{Wanted, messages, overrides, stops},
};

/// Reads a request for a chat, with the voice of its answer. Streaming is the default.
///
/// # Errors
/// If it is not one that can be answered.
pub fn read(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    fields.refuse_unless(&[("logprobs", "false")])?;
    let stream = fields.raw("stream").is_none() || fields.flag("stream")?;
    let tools = ToolUse::openai(fields)?;
    let (thinks, values) = thinking(fields)?;
    let talk = Conversation { messages: turns(fields)?, tools: tools.tools.clone(), values, end: End::Answer };
    let mut wanted = Wanted {
        prompts: vec![Prompt::Conversation(talk)],
        tools,
        structure: structure(fields)?,
        n: 1,
        stream,
        salt: fields.get("cache_salt")?.unwrap_or_default(),
        ..Wanted::default()
    };
    if let Some(options) = fields.raw("options") {
        let options = Fields::of("options".into(), options)?;
        let penalty = options.number("repeat_penalty", 1e-6, 100.0)?;
        let values = overrides(&options)?;
        wanted.overrides = Overrides { repetition_penalty: penalty.or(values.repetition_penalty), ..values };
        wanted.stop = stops(&options, "stop")?;
        // Negative: without a limit of its own.
        let unlimited = options.raw("num_predict").is_some_and(|n| n.get().starts_with('-'));
        if !unlimited {
            wanted.max_tokens = options.count("num_predict", 1, u64::from(u32::MAX))?.map(|n| n as usize);
        }
        for field in ["presence_penalty", "frequency_penalty"] {
            if options.number(field, -100.0, 100.0)?.is_some_and(|x| x != 0.0) {
                return Err(options.refuse(field, "is not supported by this server; leave it out"));
            }
        }
    }
    Ok((wanted, Box::new(move |head| Box::new(Ollama { head, thinks, open: None }))))
}

/// The messages, with what this protocol names otherwise.
fn turns(fields: &Fields<'_>) -> Result<Vec<Message>, Refusal> {
    let mut all = messages(fields, "messages")?;
    for (i, (value, message)) in fields.list("messages")?.into_iter().flatten().zip(&mut all).enumerate() {
        let turn = Fields::of(format!("messages[{i}]"), value)?;
        if turn.list("images")?.is_some_and(|images| !images.is_empty()) {
            return Err(turn.refuse("images", "has images, and this server runs language models only"));
        }
        message.name = message.name.take().or(turn.get("tool_name")?);
        message.reasoning_content = message.reasoning_content.take().or(turn.get("thinking")?);
    }
    Ok(all)
}

/// Whether reasoning is shown, and its values for the template.
fn thinking(fields: &Fields<'_>) -> Result<(bool, Map<String, Value>), Refusal> {
    let mut values = Map::new();
    let thinks = match fields.raw("think").map(RawValue::get) {
        None => return Ok((false, values)),
        // A level of effort.
        Some(level) if level.starts_with('"') => {
            values.insert("reasoning_effort".into(), fields.need::<String>("think")?.into());
            true
        }
        Some(_) => fields.flag("think")?,
    };
    values.insert("enable_thinking".into(), thinks.into());
    Ok((thinks, values))
}

/// What the answer has to be: `"json"`, or a schema.
fn structure(fields: &Fields<'_>) -> Result<Option<Structure>, Refusal> {
    match fields.raw("format").map(RawValue::get) {
        None | Some("\"\"") => Ok(None),
        Some("\"json\"") => Ok(Some(Structure::JsonObject)),
        Some(schema) if schema.starts_with('{') => Ok(Some(Structure::Schema(fields.need("format")?))),
        Some(_) => Err(fields.refuse("format", "must be \"json\" or a JSON schema")),
    }
}

/// The body of `/api/tags`.
pub fn tags(names: &[String], facts: Option<&Facts>, created: u64) -> Value {
    let (family, parameters, bytes, print) =
        facts.map_or(("", 0, 0, 0), |f| (&*f.family, f.parameters, f.weight_bytes, f.fingerprint));
    let models: Vec<Value> = names
        .iter()
        .map(|name| {
            json!({
                "name": name,
                "model": name,
                "modified_at": time(created),
                "size": bytes,
                "digest": format!("{print:016x}"),
                "details": {
                    "format": "",
                    "family": family,
                    "families": [family],
                    "parameter_size": format!("{:.1}M", parameters as f64 / 1e6),
                    "quantization_level": "",
                },
            })
        })
        .collect();
    json!({ "models": models })
}

fn time(seconds: u64) -> String {
    strftime("%Y-%m-%dT%H:%M:%SZ", seconds)
}

/// Says answers as this protocol does: lines of JSON.
struct Ollama {
    head: Head,
    /// Reasoning is shown.
    thinks: bool,
    /// The call that is being said: it is shown whole.
    open: Option<Call>,
}

impl Ollama {
    /// A line with a part of the message.
    fn piece(&self, text: &str) -> Value {
        json!({
            "model": self.head.model,
            "created_at": time(self.head.created),
            "message": { "role": "assistant", "content": text },
            "done": false,
        })
    }

    fn say(&mut self, out: &Out, event: &Event) {
        let mut piece = self.piece("");
        match event {
            Event::Content(text) | Event::CallBroken { text, .. } => {
                self.open = None;
                piece["message"]["content"] = (&**text).into();
            }
            Event::Reasoning(text) if self.thinks => piece["message"]["thinking"] = (&**text).into(),
            Event::Reasoning(_) => return,
            Event::CallStarted { id, name, .. } => {
                self.open = Some(Call { id: id.clone(), name: name.clone(), arguments: String::new() });
                return;
            }
            Event::Arguments { text, .. } => {
                if let Some(call) = &mut self.open {
                    call.arguments += text;
                }
                return;
            }
            Event::CallEnded { .. } => {
                let Some(call) = self.open.take() else { return };
                piece["message"]["tool_calls"] = json!([tool_call(&call)]);
            }
        }
        out.line(&piece);
    }

    /// The last line; times are in nanoseconds.
    fn last(&self, text: &str, answers: &[Ended]) -> Value {
        let mut last = self.piece(text);
        last["done"] = true.into();
        if let Some(ended) = answers.first() {
            let t = &ended.timing;
            let [queue, prefill, decode] = [t.queue_ms, t.prefill_ms, t.decode_ms].map(|ms| (ms * 1e6) as u64);
            let reason = if ended.finish == FinishReason::Length { "length" } else { "stop" };
            last["done_reason"] = reason.into();
            last["total_duration"] = (queue + prefill + decode).into();
            last["load_duration"] = 0.into();
            last["prompt_eval_count"] = ended.prompt_tokens.into();
            last["prompt_eval_duration"] = prefill.into();
            last["eval_count"] = ended.ids.len().into();
            last["eval_duration"] = decode.into();
            last["selkie"] = extension(answers);
        }
        last
    }
}

/// A call; its arguments are an object here.
fn tool_call(call: &Call) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({ "id": call.id, "function": { "name": call.name, "arguments": arguments } })
}

impl Voice for Ollama {
    fn has_comments(&self) -> bool {
        false
    }

    fn begin(&mut self, _: &Out, _: usize) {}

    fn said(&mut self, out: &Out, _: usize, events: &[Event], _: Tokens) {
        for event in events {
            self.say(out, event);
        }
    }

    fn end(&mut self, _: &Out, _: usize, _: &Ended) {}

    fn finish(&mut self, out: &Out, answers: &[Ended]) {
        out.line(&self.last("", answers));
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        out.line(&why.body(Dialect::Ollama));
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        let Some(ended) = answers.first() else { return self.last("", answers) };
        let mut all = self.last(&ended.said.content, answers);
        if self.thinks && !ended.said.reasoning.is_empty() {
            all["message"]["thinking"] = (&*ended.said.reasoning).into();
        }
        if !ended.said.calls.is_empty() {
            all["message"]["tool_calls"] = ended.said.calls.iter().map(tool_call).collect();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::voice::tests::{ended, head};

    fn of(body: &str) -> Result<Wanted, Refusal> {
        read(&Fields::body(body.as_bytes()).unwrap()).map(|(wanted, _)| wanted)
    }

    #[test]
    fn options() {
        let chat = |more: &str| of(&format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}]{more}}}"#));
        let wanted =
            chat(r#", "options": {"num_predict": 5, "repeat_penalty": 1.1, "seed": 3, "stop": ["x"], "num_ctx": 9}"#);
        let wanted = wanted.unwrap();
        assert_eq!((wanted.max_tokens, wanted.stream, wanted.overrides.seed), (Some(5), true, Some(3)));
        assert_eq!(wanted.overrides.repetition_penalty, Some(1.1));
        assert_eq!(chat(r#", "stream": false, "options": {"num_predict": -1}"#).unwrap().max_tokens, None);
        for (more, param) in [
            (r#", "format": "yaml""#, "format"),
            (r#", "tools": [{"type": "function"}]"#, "tools[0].function"),
            (r#", "think": 7"#, "think"),
            (r#", "options": {"top_p": 3}"#, "options.top_p"),
            (r#", "options": {"num_predict": 0}"#, "options.num_predict"),
        ] {
            assert_eq!(chat(more).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn tools_and_what_is_refused() {
        let body = r#"{"format": "json", "think": true, "tools": [{"type": "function", "function": {"name": "f"}}], "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "42", "tool_name": "f"}]}"#;
        let wanted = of(body).unwrap();
        let [Prompt::Conversation(talk)] = &wanted.prompts[..] else { panic!("{:?}", wanted.prompts) };
        let [_, call, result] = &talk.messages[..] else { panic!("{talk:?}") };
        assert_eq!((&call.tool_calls[0].arguments, call.reasoning_content.as_deref()), (&json!({"a": 1}), Some("hm")));
        assert_eq!((&*result.role, &*result.content, result.name.as_deref()), ("tool", "42", Some("f")));
        assert_eq!((wanted.structure, &talk.values["enable_thinking"]), (Some(Structure::JsonObject), &json!(true)));
        let image = r#"{"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}"#;
        let refusal = of(image).unwrap_err();
        assert_eq!(refusal.param.as_deref(), Some("messages[0].images"));
        assert!(refusal.message.contains("has images"), "{}", refusal.message);
    }

    #[test]
    fn a_call_is_said_whole() {
        let (mut voice, out) = (Ollama { head: head(), thinks: true, open: None }, Out::default());
        let started = Event::CallStarted { index: 0, id: "c".into(), name: "f".into() };
        let arguments = |text: &str| Event::Arguments { index: 0, text: text.into() };
        let events = [
            Event::Reasoning("hm".into()),
            started,
            arguments("{\"a\""),
            arguments(": 1}"),
            Event::CallEnded { index: 0 },
        ];
        voice.said(&out, 0, &events, Tokens::default());
        let text = out.take();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let call = json!({"id": "c", "function": {"name": "f", "arguments": {"a": 1}}});
        assert_eq!(
            (&lines[0]["message"]["thinking"], &lines[1]["message"]["tool_calls"]),
            (&json!("hm"), &json!([call]))
        );
        let mut ended = ended("", FinishReason::Stop);
        ended.said.calls.push(Call { id: "c".into(), name: "f".into(), arguments: "{\"a\": 1}".into() });
        assert_eq!(voice.whole(&[ended])["message"]["tool_calls"], json!([call]));
    }

    #[test]
    fn lines() {
        let (mut voice, out) = (Ollama { head: head(), thinks: false, open: None }, Out::default());
        let answers = [ended("17", FinishReason::Stop)];
        voice.begin(&out, 1);
        voice.said(&out, 0, &[Event::Content("17".into())], Tokens::default());
        voice.end(&out, 0, &answers[0]);
        voice.finish(&out, &answers);
        let text = out.take();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[0]["message"]["content"], &lines[0]["done"]), (2, &json!("17"), &json!(false)));
        assert_eq!((&lines[1]["done"], &lines[1]["eval_count"]), (&json!(true), &json!(3)));
        assert_eq!(lines[0]["created_at"], "1970-01-01T00:00:05Z");
    }
}
