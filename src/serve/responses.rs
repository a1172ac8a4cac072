//! OpenAI's `/v1/responses`. Nothing is stored: a conversation comes as a whole with every request.

use selkie_core::{
    chat::{Conversation, End, Message, ToolCall},
    engine::FinishReason,
    grammar::Structure,
    reply::Event,
    session::Prompt,
};
use serde_json::{Map, Value, json};

use super::{
    answer::Speak,
    fields::Fields,
    refusal::Refusal,
    speech::{Said, ToolUse, response_format},
    sse::Out,
    voice::{Ended, Head, Tokens, Usage, Voice, extension},
    wanted::{Wanted, content, max_tokens, overrides, role_of},
};

/// Most bytes of a request's metadata.
const MOST_METADATA: usize = 32 << 10;

/// Reads a request, with the voice of its answer.
///
/// # Errors
/// If it is not one that can be answered.
pub fn read(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    refuse_absent(fields)?;
    let tools = ToolUse::responses(fields)?;
    let (format, structure) = text_format(fields)?;
    tools.allow(structure.as_ref(), fields)?;
    let talk = Conversation {
        messages: input(fields)?,
        tools: tools.tools.clone(),
        values: reasoning(fields)?,
        end: End::Answer,
    };
    let wanted = Wanted {
        prompts: vec![Prompt::Conversation(talk)],
        tools,
        structure,
        n: 1,
        overrides: overrides(fields)?,
        max_tokens: max_tokens(fields, &["max_output_tokens"])?,
        stop: Vec::new(),
        ignore_eos: fields.flag("ignore_eos")?,
        salt: fields.get("cache_salt")?.unwrap_or_default(),
        priority: fields.get("priority")?.unwrap_or_default(),
        stream: fields.flag("stream")?,
        ..Wanted::default()
    };
    // It is repeated in the answer.
    if fields.raw("metadata").is_some_and(|value| value.get().len() > MOST_METADATA) {
        return Err(fields.refuse("metadata", &format!("has more than {MOST_METADATA} bytes")));
    }
    let asked = Asked {
        instructions: fields.get("instructions")?,
        max_output_tokens: wanted.max_tokens,
        temperature: fields.get("temperature")?,
        top_p: fields.get("top_p")?,
        metadata: fields.get("metadata")?.unwrap_or_else(|| json!({})),
        tools: fields.get("tools")?.unwrap_or_else(|| json!([])),
        tool_choice: fields.get("tool_choice")?.unwrap_or_else(|| "auto".into()),
        parallel: !wanted.tools.single,
        format,
    };
    Ok((wanted, Box::new(move |head| Box::new(Responses::new(head, asked)))))
}

fn refuse_absent(fields: &Fields<'_>) -> Result<(), Refusal> {
    fields.refuse_unless(&[
        ("previous_response_id", "\"\""),
        ("conversation", "\"\""),
        ("background", "false"),
        ("top_logprobs", "0"),
        ("prompt", "{}"),
    ])
}

/// The format of `text` as it was sent, and the structure that it asks for.
fn text_format(fields: &Fields<'_>) -> Result<(Value, Option<Structure>), Refusal> {
    let plain = || (json!({ "type": "text" }), None);
    let Some(text) = fields.raw("text") else { return Ok(plain()) };
    let text = Fields::of("text".into(), text)?;
    let Some(raw) = text.raw("format") else { return Ok(plain()) };
    let format = Fields::of("text.format".into(), raw)?;
    let structure = response_format(&format)?;
    Ok((text.need("format")?, structure))
}

/// Values for the template: the effort of reasoning.
fn reasoning(fields: &Fields<'_>) -> Result<Map<String, Value>, Refusal> {
    let mut values = Map::new();
    if let Some(raw) = fields.raw("reasoning")
        && let Some(effort) = Fields::of("reasoning".into(), raw)?.get::<String>("effort")?
    {
        if effort == "none" {
            values.insert("enable_thinking".into(), false.into());
        }
        values.insert("reasoning_effort".into(), effort.into());
    }
    Ok(values)
}

/// The conversation: a text of the user, or a list of items, after the instructions.
fn input(fields: &Fields<'_>) -> Result<Vec<Message>, Refusal> {
    let mut all = Vec::new();
    if let Some(text) = fields.get::<String>("instructions")? {
        all.push(Message::new("system", text));
    }
    let value = fields.raw("input").ok_or_else(|| fields.refuse("input", "is missing"))?;
    if let Ok(text) = serde_json::from_str::<String>(value.get()) {
        all.push(Message::new("user", text));
        return Ok(all);
    }
    let items = fields.list("input").map_err(|_| fields.refuse("input", "must be a string or a list of items"))?;
    for (i, item) in items.unwrap_or_default().into_iter().enumerate() {
        let item = Fields::of(format!("input[{i}]"), item)?;
        match item.get::<String>("type")?.as_deref() {
            None | Some("message") => all.push(Message::new(&role_of(&item)?, content(&item, "content")?)),
            // What a model thought before is no part of its prompt.
            Some("reasoning") => {}
            Some("function_call") => {
                let (id, name) = (item.need::<String>("call_id")?, item.need::<String>("name")?);
                let call = ToolCall::new(id, name, &item.need::<String>("arguments")?);
                // What a model says before its calls, and all calls of a turn, are one message.
                match all.last_mut() {
                    Some(last) if last.role == "assistant" => last.tool_calls.push(call),
                    _ => all.push(Message { tool_calls: vec![call], ..Message::new("assistant", "") }),
                }
            }
            Some("function_call_output") => {
                let tool_call_id = Some(item.need("call_id")?);
                if item.raw("output").is_none() {
                    return Err(item.refuse("output", "is missing"));
                }
                all.push(Message { tool_call_id, ..Message::new("tool", content(&item, "output")?) });
            }
            Some(_) => {
                let why = "can only be \"message\", \"function_call\" or \"function_call_output\" on this server";
                return Err(item.refuse("type", why));
            }
        }
    }
    Ok(all)
}

/// Values of the request that its answer repeats.
struct Asked {
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    metadata: Value,
    tools: Value,
    tool_choice: Value,
    parallel: bool,
    /// Of the text.
    format: Value,
}

/// Says answers as this endpoint does.
struct Responses {
    head: Head,
    asked: Asked,
    /// Events so far.
    events: u64,
    /// Items of the output that are complete.
    items: Vec<Value>,
    /// The one that is not.
    open: Option<Open>,
}

/// An item of the output while it is said.
enum Open {
    Message { text: String },
    Call { id: String, name: String, arguments: String },
}

impl Responses {
    fn new(head: Head, asked: Asked) -> Self {
        Self { head, asked, events: 0, items: Vec::new(), open: None }
    }

    fn response(&self, status: &str, output: Value, usage: Value) -> Value {
        let asked = &self.asked;
        json!({
            "id": format!("resp_{}", self.head.id),
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self.head.model,
            "output": output,
            "parallel_tool_calls": asked.parallel,
            "previous_response_id": null,
            "reasoning": { "effort": null, "summary": null },
            "store": false,
            "temperature": asked.temperature,
            "text": { "format": asked.format },
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
        })
    }

    /// An item at this place of the output.
    fn item(&self, at: usize, item: &Open, status: &str) -> Value {
        let id = &self.head.id;
        match item {
            Open::Message { text } => json!({
                "id": format!("msg_{id}_{at}"), "type": "message", "role": "assistant", "status": status,
                "content": [part(text)],
            }),
            Open::Call { id: call, name, arguments } => json!({
                "id": format!("fc_{id}_{at}"), "type": "function_call", "status": status, "call_id": call, "name": name,
                "arguments": arguments,
            }),
        }
    }

    /// The output of a whole answer.
    fn output(&self, said: &Said, status: &str) -> Value {
        let mut all = Vec::new();
        if !said.content.is_empty() || said.calls.is_empty() {
            all.push(self.item(0, &Open::Message { text: said.content.clone() }, status));
        }
        for call in &said.calls {
            let (id, name, arguments) = (call.id.clone(), call.name.clone(), call.arguments.clone());
            all.push(self.item(all.len(), &Open::Call { id, name, arguments }, "completed"));
        }
        all.into()
    }

    /// An event with its number.
    fn event(&mut self, out: &Out, name: &str, mut value: Value) {
        value["type"] = name.into();
        value["sequence_number"] = self.events.into();
        self.events += 1;
        out.event(name, &value);
    }

    /// The same about the open item.
    fn about(&mut self, out: &Out, name: &str, mut value: Value) {
        let at = self.items.len();
        if let Some(open) = &self.open {
            value["item_id"] = self.item(at, open, "")["id"].take();
            value["output_index"] = at.into();
            if matches!(open, Open::Message { .. }) {
                value["content_index"] = 0.into();
            }
        }
        self.event(out, name, value);
    }

    /// Begins an item after the end of the one before.
    fn begin_item(&mut self, out: &Out, open: Open) {
        self.end_item(out, "completed");
        let at = self.items.len();
        let mut item = self.item(at, &open, "in_progress");
        let is_message = matches!(open, Open::Message { .. });
        if is_message {
            item["content"] = json!([]);
        }
        self.open = Some(open);
        self.event(out, "response.output_item.added", json!({ "output_index": at, "item": item }));
        if is_message {
            self.about(out, "response.content_part.added", json!({ "part": part("") }));
        }
    }

    fn end_item(&mut self, out: &Out, status: &str) {
        match &self.open {
            None => return,
            Some(Open::Message { text }) => {
                let text = text.clone();
                self.about(out, "response.output_text.done", json!({ "text": text, "logprobs": [] }));
                self.about(out, "response.content_part.done", json!({ "part": part(&text) }));
            }
            Some(Open::Call { name, arguments, .. }) => {
                let done = json!({ "name": name, "arguments": arguments });
                self.about(out, "response.function_call_arguments.done", done);
            }
        }
        let at = self.items.len();
        if let Some(open) = self.open.take() {
            let item = self.item(at, &open, status);
            self.items.push(item.clone());
            self.event(out, "response.output_item.done", json!({ "output_index": at, "item": item }));
        }
    }

    fn say(&mut self, out: &Out, event: &Event) {
        match event {
            Event::Reasoning(_) => {}
            Event::Content(text) | Event::CallBroken { text, .. } => {
                if matches!(self.open, Some(Open::Call { .. })) {
                    // It broke off: its source follows.
                    self.end_item(out, "incomplete");
                }
                if self.open.is_none() {
                    self.begin_item(out, Open::Message { text: String::new() });
                }
                if let Some(Open::Message { text: all }) = &mut self.open {
                    all.push_str(text);
                }
                self.about(out, "response.output_text.delta", json!({ "delta": text, "logprobs": [] }));
            }
            Event::CallStarted { id, name, .. } => {
                let (id, name) = (id.clone(), name.clone());
                self.begin_item(out, Open::Call { id, name, arguments: String::new() });
            }
            Event::Arguments { text, .. } => {
                if let Some(Open::Call { arguments, .. }) = &mut self.open {
                    arguments.push_str(text);
                }
                self.about(out, "response.function_call_arguments.delta", json!({ "delta": text }));
            }
            Event::CallEnded { .. } => self.end_item(out, "completed"),
        }
    }

    /// The response after its end, with this output.
    fn ended(&self, answers: &[Ended], output: Value) -> Value {
        let Some(ended) = answers.first() else { return self.response("completed", output, Value::Null) };
        let usage = Usage::of(answers, 1);
        let usage = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached },
            "output_tokens": usage.completion,
            "output_tokens_details": { "reasoning_tokens": usage.reasoning },
            "total_tokens": usage.prompt + usage.completion,
        });
        let mut all = self.response(status(ended), output, usage);
        if ended.finish == FinishReason::Length {
            all["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        all["selkie"] = extension(answers);
        all
    }
}

fn status(ended: &Ended) -> &'static str {
    if ended.finish == FinishReason::Length { "incomplete" } else { "completed" }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

impl Voice for Responses {
    fn begin(&mut self, out: &Out, _: usize) {
        let response = self.response("in_progress", json!([]), Value::Null);
        self.event(out, "response.created", json!({ "response": response }));
        self.event(out, "response.in_progress", json!({ "response": response }));
    }

    fn said(&mut self, out: &Out, _: usize, events: &[Event], _: Tokens) {
        for event in events {
            self.say(out, event);
        }
    }

    fn end(&mut self, out: &Out, _: usize, ended: &Ended) {
        if self.open.is_none() && self.items.is_empty() {
            self.begin_item(out, Open::Message { text: String::new() });
        }
        self.end_item(out, status(ended));
    }

    fn finish(&mut self, out: &Out, answers: &[Ended]) {
        let items = std::mem::take(&mut self.items);
        let response = self.ended(answers, items.into());
        let name = if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.event(out, name, json!({ "response": response }));
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        let mut response = self.response("failed", json!([]), Value::Null);
        response["error"] = json!({ "code": "server_error", "message": why.message });
        self.event(out, "response.failed", json!({ "response": response }));
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        let output = answers.first().map_or_else(|| json!([]), |ended| self.output(&ended.said, status(ended)));
        self.ended(answers, output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::{
        speech::Call,
        voice::tests::{ended, head, streamed},
    };

    fn voice(body: &str) -> Result<(Wanted, Box<dyn Voice>), Refusal> {
        read(&Fields::body(body.as_bytes()).unwrap()).map(|(wanted, speak)| (wanted, speak(head())))
    }

    fn messages(wanted: &Wanted) -> &[Message] {
        let [Prompt::Conversation(talk)] = &wanted.prompts[..] else { panic!("{:?}", wanted.prompts) };
        &talk.messages
    }

    #[test]
    fn inputs() {
        let (wanted, _) = voice(r#"{"input": "Hi", "instructions": "Be kind.", "max_output_tokens": 4}"#).unwrap();
        assert_eq!(messages(&wanted), [Message::new("system", "Be kind."), Message::new("user", "Hi")]);
        assert_eq!(wanted.max_tokens, Some(4));
        let (wanted, _) = voice(
            r#"{"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "reasoning"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]}]}"#,
        )
        .unwrap();
        assert_eq!(messages(&wanted), [Message::new("user", "Hi"), Message::new("assistant", "Ho")]);
        for (body, param) in [
            ("{}", "input"),
            (r#"{"input": "x", "previous_response_id": "resp_1"}"#, "previous_response_id"),
            (r#"{"input": "x", "tools": [{"type": "web_search"}]}"#, "tools[0].type"),
            (r#"{"input": "x", "tools": [{"type": "function"}]}"#, "tools[0].name"),
            (r#"{"input": "x", "tool_choice": "required"}"#, "tool_choice"),
            (r#"{"input": "x", "parallel_tool_calls": 1}"#, "parallel_tool_calls"),
            (r#"{"input": "x", "text": {"format": {"type": "yaml"}}}"#, "text.format.type"),
            (
                r#"{"input": "x", "text": {"format": {"type": "json_object"}}, "tool_choice": "required",
                    "tools": [{"type": "function", "name": "f"}]}"#,
                "tool_choice",
            ),
            (r#"{"input": [{"type": "function_call"}]}"#, "input[0].call_id"),
            (r#"{"input": [{"type": "function_call_output", "call_id": "c"}]}"#, "input[0].output"),
            (r#"{"input": [{"type": "item_reference"}]}"#, "input[0].type"),
        ] {
            assert_eq!(voice(body).err().unwrap().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn calls_and_their_outputs_are_messages() {
        let (wanted, _) = voice(
            r#"{"input": [{"role": "user", "content": "Hi"}, {"type": "message", "role": "assistant", "content": "I look."},
                {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]}],
                "tools": [{"type": "function", "name": "f", "strict": true, "parameters": {"type": "object"}, "description": null}],
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}"#,
        )
        .unwrap();
        let [_, said, one, two] = messages(&wanted) else { panic!("{:?}", wanted.prompts) };
        assert_eq!((&*said.content, said.tool_calls.len()), ("I look.", 2));
        assert_eq!((&said.tool_calls[0].arguments, &*said.tool_calls[1].id), (&json!({"a": 1}), "c2"));
        assert_eq!((&*one.role, &*one.content, two.tool_call_id.as_deref()), ("tool", "42", Some("c2")));
        let function = json!({"name": "f", "strict": true, "parameters": {"type": "object"}});
        assert_eq!(wanted.tools.tools, [json!({"type": "function", "function": function})]);
        assert_eq!(wanted.structure, Some(Structure::Schema(json!({"type": "object"}))));
    }

    #[test]
    fn a_call_is_an_item() {
        let (_, mut voice) = voice(r#"{"input": "x"}"#).unwrap();
        let out = Out::default();
        let started = Event::CallStarted { index: 0, id: "c".into(), name: "f".into() };
        let arguments = |text: &str| Event::Arguments { index: 0, text: text.into() };
        let events = [Event::Content("I look.".into()), started, arguments("{\"a\""), arguments(": 1}")];
        voice.said(&out, 0, &events, Tokens::default());
        voice.said(&out, 0, &[Event::CallEnded { index: 0 }], Tokens::default());
        let mut ended = ended("I look.", FinishReason::Stop);
        let call = Call { id: "c".into(), name: "f".into(), arguments: "{\"a\": 1}".into() };
        ended.said.calls.push(call);
        voice.end(&out, 0, &ended);
        voice.finish(&out, &[ended.clone()]);
        let text = out.take();
        let parse = |line: &str| Some(serde_json::from_str::<Value>(line.strip_prefix("data: ")?).unwrap());
        let events: Vec<Value> = text.lines().filter_map(parse).collect();
        let kinds: Vec<&str> = events.iter().map(|e| &e["type"].as_str().unwrap()["response.".len()..]).collect();
        let expected = [
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ];
        assert_eq!(kinds, expected);
        assert_eq!((&events[7]["output_index"], &events[7]["item_id"]), (&json!(1), &events[6]["item"]["id"]));
        assert_eq!(events[9]["arguments"], "{\"a\": 1}");
        let output = &events[11]["response"]["output"];
        assert_eq!((&output[1]["type"], &output[1]["call_id"]), (&json!("function_call"), &json!("c")));
        assert_eq!(voice.whole(&[ended])["output"], *output);
    }

    #[test]
    fn a_call_that_breaks_off_is_incomplete() {
        let (_, mut voice) = voice(r#"{"input": "x"}"#).unwrap();
        let out = Out::default();
        let started = Event::CallStarted { index: 0, id: "c".into(), name: "f".into() };
        let broken = Event::CallBroken { index: 0, text: "<tool_call>{".into() };
        voice.said(&out, 0, &[started, broken], Tokens::default());
        let all = [ended("<tool_call>{", FinishReason::Stop)];
        voice.end(&out, 0, &all[0]);
        voice.finish(&out, &all);
        let text = out.take();
        let last: Value =
            serde_json::from_str(text.lines().filter_map(|l| l.strip_prefix("data: ")).next_back().unwrap()).unwrap();
        let output = &last["response"]["output"];
        assert_eq!(
            (&output[0]["status"], &output[1]["content"][0]["text"]),
            (&json!("incomplete"), &json!("<tool_call>{"))
        );
    }

    #[test]
    fn events_are_numbered() {
        let (_, mut voice) = voice(r#"{"input": "x", "metadata": {"a": "b"}}"#).unwrap();
        let events = streamed(&mut *voice);
        let names: Vec<&str> = events.iter().map(|(name, _)| &name.as_deref().unwrap()["response.".len()..]).collect();
        let expected = [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ];
        assert_eq!(names, expected);
        assert!((0..).zip(&events).all(|(i, (_, e))| e["sequence_number"] == i));
        assert_eq!(events[6].1["text"], "17 + 25");
        let last = &events[9].1["response"];
        assert_eq!(last["output"][0]["content"][0]["text"], "17 + 25");
        assert_eq!(last["usage"]["input_tokens_details"]["cached_tokens"], 64);
        assert_eq!(last["metadata"], json!({"a": "b"}));
        let cut = voice.whole(&[ended("17", FinishReason::Length)]);
        assert_eq!(
            (&cut["status"], &cut["incomplete_details"]["reason"]),
            (&json!("incomplete"), &json!("max_output_tokens"))
        );
    }
}
