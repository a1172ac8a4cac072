//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

use selkie_core::{engine::FinishReason, reply::Event, session::Prompt};
use serde_json::{Value, json};

use super::{
    answer::Speak,
    blocks::conversation,
    fields::Fields,
    refusal::{Dialect, Refusal},
    speech::Said,
    sse::Out,
    voice::{Ended, Head, Tokens, Usage, Voice, extension},
    wanted::{Wanted, max_tokens, overrides, stops},
};

/// Reads a request, with the voice of its answer.
///
/// # Errors
/// If it is not one that can be answered.
pub fn read(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    let most = max_tokens(fields, &["max_tokens"])?.ok_or_else(|| fields.refuse("max_tokens", "is missing"))?;
    fields.refuse_unless(&[("mcp_servers", "[]")])?;
    let (talk, tools) = conversation(fields)?;
    let thinks = talk.values.get("enable_thinking").is_some_and(|on| on == true);
    let stop = stops(fields, "stop_sequences")?;
    let shown = stop.clone();
    let wanted = Wanted {
        prompts: vec![Prompt::Conversation(talk)],
        tools,
        n: 1,
        overrides: overrides(fields)?,
        max_tokens: Some(most),
        stop,
        ignore_eos: fields.flag("ignore_eos")?,
        salt: fields.get("cache_salt")?.unwrap_or_default(),
        stream: fields.flag("stream")?,
        ..Wanted::default()
    };
    Ok((wanted, Box::new(move |head| Box::new(Anthropic { head, stops: shown, thinks, blocks: 0, open: None }))))
}

/// Says answers as this protocol does.
struct Anthropic {
    head: Head,
    stops: Vec<String>,
    /// Reasoning is shown.
    thinks: bool,
    /// Blocks that were begun.
    blocks: usize,
    /// The kind of the block that has not ended.
    open: Option<&'static str>,
}

impl Anthropic {
    /// The message without its content.
    fn message(&self, content: Value, usage: Value) -> Value {
        json!({
            "id": format!("msg_{}", self.head.id),
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    /// Reason and sequence of the end.
    fn end_of(&self, ended: &Ended) -> (&'static str, Value) {
        match ended.finish {
            FinishReason::Length => ("max_tokens", Value::Null),
            _ if !ended.said.calls.is_empty() => ("tool_use", Value::Null),
            // Of several sequences it is not known which one it was.
            _ if ended.at_stop && self.stops.len() == 1 => ("stop_sequence", (&*self.stops[0]).into()),
            _ if ended.at_stop => ("stop_sequence", Value::Null),
            _ => ("end_turn", Value::Null),
        }
    }
}

impl Anthropic {
    /// Begins a block, unless one of this kind is open.
    fn block(&mut self, out: &Out, kind: &'static str, block: &Value) {
        if self.open == Some(kind) && kind != "tool_use" {
            return;
        }
        self.close(out);
        let index = self.blocks;
        out.event(
            "content_block_start",
            &json!({ "type": "content_block_start", "index": index, "content_block": block }),
        );
        self.blocks += 1;
        self.open = Some(kind);
    }

    fn delta(&self, out: &Out, delta: Value) {
        let index = self.blocks.saturating_sub(1);
        out.event("content_block_delta", &json!({ "type": "content_block_delta", "index": index, "delta": delta }));
    }

    fn close(&mut self, out: &Out) {
        if self.open.take().is_some() {
            out.event("content_block_stop", &json!({ "type": "content_block_stop", "index": self.blocks - 1 }));
        }
    }

    fn event(&mut self, out: &Out, event: &Event) {
        match event {
            Event::Content(text) | Event::CallBroken { text, .. } => {
                self.block(out, "text", &json!({ "type": "text", "text": "" }));
                self.delta(out, json!({ "type": "text_delta", "text": text }));
            }
            Event::Reasoning(text) if self.thinks => {
                self.block(out, "thinking", &json!({ "type": "thinking", "thinking": "", "signature": "" }));
                self.delta(out, json!({ "type": "thinking_delta", "thinking": text }));
            }
            Event::Reasoning(_) => {}
            Event::CallStarted { id, name, .. } => {
                self.block(out, "tool_use", &json!({ "type": "tool_use", "id": id, "name": name, "input": {} }));
            }
            Event::Arguments { text, .. } => {
                self.delta(out, json!({ "type": "input_json_delta", "partial_json": text }))
            }
            Event::CallEnded { .. } => self.close(out),
        }
    }

    /// The blocks of a whole answer.
    fn content(&self, said: &Said) -> Value {
        let mut blocks = Vec::new();
        if self.thinks && !said.reasoning.is_empty() {
            blocks.push(json!({ "type": "thinking", "thinking": said.reasoning, "signature": "" }));
        }
        if !said.content.is_empty() || said.calls.is_empty() {
            blocks.push(json!({ "type": "text", "text": said.content }));
        }
        for call in &said.calls {
            let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
            blocks.push(json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input }));
        }
        blocks.into()
    }
}

/// Here, tokens read from the cache are not a part of the input.
fn usage(of: Usage) -> Value {
    json!({
        "input_tokens": of.prompt - of.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": of.cached,
        "output_tokens": of.completion,
    })
}

impl Voice for Anthropic {
    fn begin(&mut self, out: &Out, _: usize) {
        let start = Usage { prompt: self.head.prompt_tokens, ..Usage::default() };
        out.event(
            "message_start",
            &json!({ "type": "message_start", "message": self.message(json!([]), usage(start)) }),
        );
        out.event("ping", &json!({ "type": "ping" }));
    }

    fn said(&mut self, out: &Out, _: usize, events: &[Event], _: Tokens) {
        for event in events {
            self.event(out, event);
        }
    }

    fn end(&mut self, out: &Out, _: usize, ended: &Ended) {
        if self.blocks == 0 {
            self.block(out, "text", &json!({ "type": "text", "text": "" }));
        }
        self.close(out);
        let (reason, sequence) = self.end_of(ended);
        let answers = std::slice::from_ref(ended);
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        out.event(
            "message_delta",
            &json!({
                "type": "message_delta",
                "delta": delta,
                "usage": usage(Usage::of(answers, 1)),
                "selkie": extension(answers),
            }),
        );
    }

    fn finish(&mut self, out: &Out, _: &[Ended]) {
        out.event("message_stop", &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        out.event("error", &why.body(Dialect::Anthropic));
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        let content = answers.first().map_or_else(|| json!([]), |a| self.content(&a.said));
        let mut message = self.message(content, usage(Usage::of(answers, 1)));
        if let Some(ended) = answers.first() {
            let (reason, sequence) = self.end_of(ended);
            message["stop_reason"] = reason.into();
            message["stop_sequence"] = sequence;
        }
        message["selkie"] = extension(answers);
        message
    }
}

#[cfg(test)]
mod tests {
    use selkie_core::chat::Message;

    use super::*;
    use crate::serve::{
        speech::Call,
        voice::tests::{ended, head, streamed},
    };

    #[test]
    fn a_request() {
        let body = r#"{"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "Be kind.", "cache_control":
            {"type": "ephemeral"}}], "messages": [{"role": "user", "content": "Hi"}], "stop_sequences": ["."],
            "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "stream": true}"#;
        let (wanted, _) = read(&Fields::body(body.as_bytes()).unwrap()).unwrap();
        let messages = vec![Message::new("system", "Be kind."), Message::new("user", "Hi")];
        let [Prompt::Conversation(talk)] = &wanted.prompts[..] else { panic!("{:?}", wanted.prompts) };
        assert_eq!((&talk.messages, &talk.values["enable_thinking"]), (&messages, &json!(false)));
        assert_eq!((wanted.max_tokens, wanted.stream, &*wanted.stop), (Some(9), true, &[".".to_owned()][..]));
        for (field, body) in [
            ("max_tokens", r#"{"messages": [{"role": "user", "content": "Hi"}]}"#),
            ("messages", r#"{"max_tokens": 1}"#),
            (
                "tools[0].type",
                r#"{"max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}], "messages": [{"role": "user", "content": "Hi"}]}"#,
            ),
            (
                "tool_choice",
                r#"{"max_tokens": 1, "tool_choice": {"type": "any"}, "messages": [{"role": "user", "content": "Hi"}]}"#,
            ),
            (
                "messages[0].content[0].type",
                r#"{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            ),
        ] {
            let refusal = read(&Fields::body(body.as_bytes()).unwrap()).err().unwrap();
            assert_eq!(refusal.param.as_deref(), Some(field));
        }
    }

    #[test]
    fn an_answer_in_pieces_and_whole() {
        let mut voice = Anthropic { head: head(), stops: vec![".".into()], thinks: true, blocks: 0, open: None };
        let events = streamed(&mut voice);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_deref().unwrap()).collect();
        let expected = [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ];
        assert_eq!(names, expected);
        assert!(events.iter().all(|(name, data)| data["type"] == name.as_deref().unwrap()));
        assert_eq!(events[4].1["delta"], json!({"type": "text_delta", "text": " 25"}));
        assert_eq!(events[6].1["usage"]["cache_read_input_tokens"], 64);
        assert_eq!(events[6].1["usage"]["input_tokens"], 36);
        let at_stop = Ended { at_stop: true, ..ended("17", FinishReason::Stop) };
        let whole = voice.whole(&[at_stop]);
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("stop_sequence"), &json!(".")));
        assert_eq!(whole["content"], json!([{"type": "text", "text": "17"}]));
        assert_eq!(voice.whole(&[ended("", FinishReason::Length)])["stop_reason"], "max_tokens");
        assert_eq!(voice.whole(&[ended("", FinishReason::Stop)])["stop_reason"], "end_turn");
    }

    #[test]
    fn results_of_tools_are_messages_of_their_own() {
        let body = r#"{"max_tokens": 9, "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true}, "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "So?"}]}]}"#;
        let (wanted, _) = read(&Fields::body(body.as_bytes()).unwrap()).unwrap();
        let [Prompt::Conversation(talk)] = &wanted.prompts[..] else { panic!("{:?}", wanted.prompts) };
        let roles: Vec<&str> = talk.messages.iter().map(|m| &*m.role).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "user"]);
        let [_, call, result, last] = &talk.messages[..] else { panic!() };
        assert_eq!((&*call.content, call.reasoning_content.as_deref()), ("I look.", Some("hm")));
        assert_eq!((&call.tool_calls[0].arguments, &*result.content), (&json!({"a": 1}), "42"));
        assert_eq!((result.tool_call_id.as_deref(), &*last.content), (Some("c1"), "So?"));
        let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
        assert_eq!((&talk.tools, &wanted.tools.tools, wanted.tools.single), (&vec![tool.clone()], &vec![tool], true));
    }

    #[test]
    fn reasoning_and_calls_are_blocks() {
        let mut voice = Anthropic { head: head(), stops: Vec::new(), thinks: true, blocks: 0, open: None };
        let out = Out::default();
        voice.said(&out, 0, &[Event::Reasoning("hm".into())], Tokens::default());
        voice.said(&out, 0, &[Event::Content("I look.".into())], Tokens::default());
        let started = Event::CallStarted { index: 0, id: "c".into(), name: "f".into() };
        let arguments = Event::Arguments { index: 0, text: "{}".into() };
        voice.said(&out, 0, &[started, arguments, Event::CallEnded { index: 0 }], Tokens::default());
        let mut ended = ended("I look.", FinishReason::Stop);
        ended.said.reasoning = "hm".into();
        ended.said.calls.push(Call { id: "c".into(), name: "f".into(), arguments: "{}".into() });
        voice.end(&out, 0, &ended);
        let text = out.take();
        let parse = |line: &str| Some(serde_json::from_str::<Value>(line.strip_prefix("data: ")?).unwrap());
        let events: Vec<Value> = text.lines().filter_map(parse).collect();
        let kinds: Vec<String> = events
            .iter()
            .map(|e| {
                let inner = ["content_block", "delta"].iter().find_map(|key| e[key]["type"].as_str()).unwrap_or("");
                format!("{} {} {inner}", e["type"].as_str().unwrap(), e["index"])
            })
            .collect();
        assert_eq!(
            kinds,
            [
                "content_block_start 0 thinking",
                "content_block_delta 0 thinking_delta",
                "content_block_stop 0 ",
                "content_block_start 1 text",
                "content_block_delta 1 text_delta",
                "content_block_stop 1 ",
                "content_block_start 2 tool_use",
                "content_block_delta 2 input_json_delta",
                "content_block_stop 2 ",
                "message_delta null ",
            ]
        );
        assert_eq!(events[9]["delta"]["stop_reason"], "tool_use");
        let whole = voice.whole(&[ended]);
        let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": {}});
        assert_eq!((&whole["content"][2], &whole["content"][0]["thinking"]), (&call, &json!("hm")));
        assert_eq!(whole["stop_reason"], "tool_use");
    }
}
