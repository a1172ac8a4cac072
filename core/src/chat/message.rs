//! Turns of a chat, with tools and reasoning.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, map::Entry};

use crate::{Error, Result, tokenizer::Tokenizer};

/// Deepest nesting of JSON in arguments, tools and values for the template.
const MAX_DEPTH: usize = 64;

/// One turn of a chat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool` or another role of the template; letters, digits, `_` and `-` only.
    pub role: String,
    /// The text.
    pub content: String,
    /// The reasoning before the text, for templates that repeat it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls that the assistant made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that this message of a tool answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the tool or of the speaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A call of a tool, as templates see it: `{"id", "type": "function", "function": {"name", "arguments"}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct ToolCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// An object, or a string that is no text of an object.
    pub arguments: Value,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    function: Function,
}

#[derive(Serialize, Deserialize)]
struct Function {
    name: String,
    arguments: Value,
}

impl From<Wire> for ToolCall {
    fn from(wire: Wire) -> Self {
        Self { id: wire.id, name: wire.function.name, arguments: wire.function.arguments }
    }
}

impl From<ToolCall> for Wire {
    fn from(call: ToolCall) -> Self {
        let function = Function { name: call.name, arguments: call.arguments };
        Self { id: call.id, kind: "function".into(), function }
    }
}

/// A chat with what a template may need besides its messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The turns.
    pub messages: Vec<Message>,
    /// Definitions of tools, as the template expects them: OpenAI's objects.
    pub tools: Vec<Value>,
    /// More values by name (`enable_thinking`); they replace none of the names that every template has.
    pub values: Map<String, Value>,
    /// Where the prompt ends.
    pub end: End,
}

/// The end of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// Where the assistant's answer begins.
    #[default]
    Answer,
    /// After the last message.
    Messages,
    /// Within the last message, which the answer continues.
    FinalMessage,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// Bytes of all its text.
    pub fn bytes(&self) -> usize {
        let optional = [&self.reasoning_content, &self.tool_call_id, &self.name];
        let calls = self.tool_calls.iter().map(|call| call.id.len() + call.name.len() + bytes(&call.arguments));
        self.content.len() + optional.into_iter().flatten().map(String::len).sum::<usize>() + calls.sum::<usize>()
    }

    /// The same with the text of special tokens guarded.
    pub(super) fn guarded(&self, tokenizer: &Tokenizer) -> Self {
        let guard = |text: &String| tokenizer.guard(text);
        let call = |call: &ToolCall| ToolCall {
            id: guard(&call.id),
            name: guard(&call.name),
            arguments: guarded(&call.arguments, tokenizer),
        };
        Self {
            role: self.role.clone(),
            content: guard(&self.content),
            reasoning_content: self.reasoning_content.as_ref().map(guard),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: self.tool_call_id.as_ref().map(guard),
            name: self.name.as_ref().map(guard),
        }
    }
}

impl ToolCall {
    /// A call whose arguments are JSON text, as clients send them. Templates get an object; a text that is none stays as it is,
    /// and no text is an empty object.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: &str) -> Self {
        let parsed = || serde_json::from_str(arguments).ok().filter(Value::is_object);
        let arguments = match arguments.trim() {
            "" => Value::Object(Map::new()),
            text => parsed().unwrap_or_else(|| text.into()),
        };
        Self { id: id.into(), name: name.into(), arguments }
    }
}

impl Conversation {
    /// Messages alone, which the assistant answers.
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }

    /// The same with text of special tokens guarded.
    pub(super) fn guarded(&self, tokenizer: &Tokenizer) -> Self {
        Self {
            messages: self.messages.iter().map(|m| m.guarded(tokenizer)).collect(),
            tools: self.tools.iter().map(|tool| guarded(tool, tokenizer)).collect(),
            values: guarded_map(&self.values, tokenizer),
            end: self.end,
        }
    }

    /// Bytes of all its text.
    pub fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(Message::bytes).sum();
        messages + self.tools.iter().map(bytes).sum::<usize>() + self.values.values().map(bytes).sum::<usize>()
    }

    /// Checks what needs no template.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if there are no messages, a role is not a plain word, values are nested too deeply, or a message
    /// that is to be continued has no text.
    pub fn check(&self) -> Result<()> {
        super::check(&self.messages)?;
        let tools = self.tools.iter().map(|tool| ("definitions of tools", tool));
        let values = self.values.values().map(|value| ("values for the chat template", value));
        let calls =
            self.messages.iter().flat_map(|m| &m.tool_calls).map(|c| ("arguments of a tool call", &c.arguments));
        if let Some((what, _)) = tools.chain(values).chain(calls).find(|(_, value)| !is_within(value, MAX_DEPTH)) {
            return Err(Error::BadRequest(format!("{what} are nested deeper than {MAX_DEPTH} levels")));
        }
        let empty = self.messages.last().is_some_and(|last| last.content.trim().is_empty());
        if self.end == End::FinalMessage && empty {
            return Err(Error::BadRequest("the last message, which is to be continued, has no text".into()));
        }
        Ok(())
    }
}

/// The value with guarded strings and keys.
fn guarded(value: &Value, tokenizer: &Tokenizer) -> Value {
    match value {
        Value::String(text) => tokenizer.guard(text).into(),
        Value::Array(list) => list.iter().map(|value| guarded(value, tokenizer)).collect(),
        Value::Object(map) => Value::Object(guarded_map(map, tokenizer)),
        other => other.clone(),
    }
}

/// The same for a mapping.
fn guarded_map(map: &Map<String, Value>, tokenizer: &Tokenizer) -> Map<String, Value> {
    let mut out = Map::new();
    for (key, value) in map {
        if let Entry::Vacant(entry) = out.entry(tokenizer.guard(key)) {
            entry.insert(guarded(value, tokenizer));
        }
    }
    out
}

/// Bytes of the strings in a value, and some for what is around them.
fn bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + 2,
        Value::Array(list) => list.iter().map(|value| bytes(value) + 2).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + bytes(value) + 6).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 4,
    }
}

fn is_within(value: &Value, depth: usize) -> bool {
    match value {
        Value::Array(list) => depth > 0 && list.iter().all(|value| is_within(value, depth - 1)),
        Value::Object(map) => depth > 0 && map.values().all(|value| is_within(value, depth - 1)),
        _ => true,
    }
}
