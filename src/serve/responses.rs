//! OpenAI's `/v1/responses`. Nothing is stored: a conversation comes as a whole with every request.

use selkie_core::{chat::Message, engine::FinishReason, reply::Event, session::Prompt};
use serde_json::{Value, json};

use super::{
    answer::Speak,
    fields::Fields,
    refusal::Refusal,
    sse::Out,
    voice::{self, Ended, Head, Tokens, Usage, Voice, extension},
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
    let wanted = Wanted {
        prompts: vec![Prompt::Messages(input(fields)?)],
        n: 1,
        overrides: overrides(fields)?,
        max_tokens: max_tokens(fields, &["max_output_tokens"])?,
        stop: Vec::new(),
        ignore_eos: fields.flag("ignore_eos")?,
        salt: fields.get("cache_salt")?.unwrap_or_default(),
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
    };
    Ok((wanted, Box::new(move |head| Box::new(Responses { head, asked, events: 0, text: String::new() }))))
}

fn refuse_absent(fields: &Fields<'_>) -> Result<(), Refusal> {
    fields.refuse_unless(&[
        ("previous_response_id", "\"\""),
        ("conversation", "\"\""),
        ("tools", "[]"),
        ("background", "false"),
        ("top_logprobs", "0"),
        ("prompt", "{}"),
    ])?;
    if let Some(text) = fields.raw("text")
        && let Some(format) = Fields::of("text".into(), text)?.raw("format")
        && Fields::of("text.format".into(), format)?.need::<String>("type")? != "text"
    {
        return Err(Refusal::field("text.format", "`text.format` can only be of the type \"text\"".into()));
    }
    Ok(())
}

/// The conversation: a text of the user, or a list of messages, after the instructions.
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
    let items = fields.list("input").map_err(|_| fields.refuse("input", "must be a string or a list of messages"))?;
    for (i, item) in items.unwrap_or_default().into_iter().enumerate() {
        let item = Fields::of(format!("input[{i}]"), item)?;
        match item.get::<String>("type")?.as_deref() {
            None | Some("message") => {}
            // What a model thought before is no part of its prompt.
            Some("reasoning") => continue,
            Some(_) => return Err(item.refuse("type", "can only be \"message\" on this server")),
        }
        all.push(Message::new(&role_of(&item)?, content(&item, "content")?));
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
}

/// Says answers as this endpoint does.
struct Responses {
    head: Head,
    asked: Asked,
    /// Events so far.
    events: u64,
    text: String,
}

impl Responses {
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
            "parallel_tool_calls": false,
            "previous_response_id": null,
            "reasoning": { "effort": null, "summary": null },
            "store": false,
            "temperature": asked.temperature,
            "text": { "format": { "type": "text" } },
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
        })
    }

    fn item(&self, status: &str, parts: Value) -> Value {
        let id = format!("msg_{}", self.head.id);
        json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": parts })
    }

    fn event(&mut self, out: &Out, name: &str, mut value: Value) {
        value["type"] = name.into();
        value["sequence_number"] = self.events.into();
        self.events += 1;
        out.event(name, &value);
    }

    fn ended(&self, answers: &[Ended]) -> Value {
        let Some(ended) = answers.first() else { return self.response("completed", json!([]), Value::Null) };
        let cut = ended.finish == FinishReason::Length;
        let status = if cut { "incomplete" } else { "completed" };
        let usage = Usage::of(answers, 1);
        let usage = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached },
            "output_tokens": usage.completion,
            "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": usage.prompt + usage.completion,
        });
        let mut all = self.response(status, json!([self.item(status, json!([part(&ended.said.content)]))]), usage);
        if cut {
            all["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        all["selkie"] = extension(answers);
        all
    }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

impl Voice for Responses {
    fn begin(&mut self, out: &Out, _: usize) {
        let response = self.response("in_progress", json!([]), Value::Null);
        self.event(out, "response.created", json!({ "response": response }));
        self.event(out, "response.in_progress", json!({ "response": response }));
        let item = self.item("in_progress", json!([]));
        self.event(out, "response.output_item.added", json!({ "output_index": 0, "item": item }));
        let added = json!({ "item_id": item["id"], "output_index": 0, "content_index": 0, "part": part("") });
        self.event(out, "response.content_part.added", added);
    }

    fn said(&mut self, out: &Out, _: usize, events: &[Event], _: Tokens) {
        let text = voice::content(events);
        if !text.is_empty() {
            self.text += &text;
            let id = format!("msg_{}", self.head.id);
            let delta = json!({ "item_id": id, "output_index": 0, "content_index": 0, "delta": text, "logprobs": [] });
            self.event(out, "response.output_text.delta", delta);
        }
    }

    fn end(&mut self, out: &Out, _: usize, ended: &Ended) {
        let id = format!("msg_{}", self.head.id);
        let text = std::mem::take(&mut self.text);
        let done = json!({ "item_id": id, "output_index": 0, "content_index": 0, "text": text, "logprobs": [] });
        self.event(out, "response.output_text.done", done);
        let done = json!({ "item_id": id, "output_index": 0, "content_index": 0, "part": part(&text) });
        self.event(out, "response.content_part.done", done);
        let status = if ended.finish == FinishReason::Length { "incomplete" } else { "completed" };
        let item = self.item(status, json!([part(&text)]));
        self.event(out, "response.output_item.done", json!({ "output_index": 0, "item": item }));
    }

    fn finish(&mut self, out: &Out, answers: &[Ended]) {
        let response = self.ended(answers);
        let name = if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.event(out, name, json!({ "response": response }));
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        let mut response = self.response("failed", json!([]), Value::Null);
        response["error"] = json!({ "code": "server_error", "message": why.message });
        self.event(out, "response.failed", json!({ "response": response }));
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        self.ended(answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::voice::tests::{ended, head, streamed};

    fn voice(body: &str) -> Result<(Wanted, Box<dyn Voice>), Refusal> {
        read(&Fields::body(body.as_bytes()).unwrap()).map(|(wanted, speak)| (wanted, speak(head())))
    }

    #[test]
    fn inputs() {
        let (wanted, _) = voice(r#"{"input": "Hi", "instructions": "Be kind.", "max_output_tokens": 4}"#).unwrap();
        let messages = vec![Message::new("system", "Be kind."), Message::new("user", "Hi")];
        assert_eq!((&wanted.prompts[0], wanted.max_tokens), (&Prompt::Messages(messages), Some(4)));
        let (wanted, _) = voice(
            r#"{"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "reasoning"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]}]}"#,
        )
        .unwrap();
        let messages = vec![Message::new("user", "Hi"), Message::new("assistant", "Ho")];
        assert_eq!(wanted.prompts, [Prompt::Messages(messages)]);
        for (body, param) in [
            ("{}", "input"),
            (r#"{"input": "x", "previous_response_id": "resp_1"}"#, "previous_response_id"),
            (r#"{"input": "x", "tools": [{"type": "web_search"}]}"#, "tools"),
            (r#"{"input": "x", "text": {"format": {"type": "json_schema"}}}"#, "text.format"),
            (r#"{"input": [{"type": "function_call"}]}"#, "input[0].type"),
        ] {
            assert_eq!(voice(body).err().unwrap().param.as_deref(), Some(param), "{body}");
        }
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
