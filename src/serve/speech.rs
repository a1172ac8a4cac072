//! What an answer says: content, reasoning and calls of tools; and what it must be, if the request says so.

use std::sync::OnceLock;

use selkie_core::{
    controls::Constraint,
    grammar::{Grammars, Lead, Structure},
    reply::{CallFormat, Event, Format, Parser, Reasoning, Start, Tools},
    session::Model,
};
use serde_json::{Map, Value, json, value::RawValue};

use super::{fields::Fields, refusal::Refusal};

/// Most tools of a request.
const MOST_TOOLS: usize = 1024;
/// Longest name of a tool, in bytes.
const LONGEST_NAME: usize = 128;

/// How a model writes what is not content.
pub struct Speech {
    format: Format,
    /// Made when it is first needed: it takes a while for a large vocabulary.
    grammars: OnceLock<Result<Grammars, String>>,
}

/// The tools of a request, and how they are to be used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolUse {
    /// Definitions in OpenAI's form.
    pub tools: Vec<Value>,
    /// Whether, and which.
    pub choice: Choice,
    /// Only the first call counts.
    pub single: bool,
}

/// Which tools the answer calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Choice {
    /// As the model likes.
    #[default]
    Auto,
    /// None; what looks like a call is text.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A complete call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

/// A whole answer, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The text for the user, with the sources of calls that broke off.
    pub content: String,
    /// The reasoning.
    pub reasoning: String,
    /// The calls that are complete.
    pub calls: Vec<Call>,
    /// Tokens of the reasoning.
    pub reasoning_tokens: usize,
}

/// Takes the answer of one choice apart.
pub struct Listener {
    parser: Parser,
    single: bool,
    said: Said,
    /// The call that is being read.
    open: Option<Call>,
}

impl Speech {
    /// The speech of a model. `calls` and `reasoning` replace what its chat template shows.
    pub fn new(model: &Model, calls: Option<CallFormat>, reasoning: Option<Reasoning>) -> Self {
        let text = model.text();
        let found = match (text.chat(), text.tokenizer()) {
            (Ok(chat), Ok(tokenizer)) => Format::detect(chat.source(), |token| tokenizer.token_id(token).is_some()),
            _ => Format::default(),
        };
        let format = Format { calls: calls.or(found.calls), reasoning: reasoning.or(found.reasoning) };
        Self { format, grammars: OnceLock::new() }
    }

    /// Whether answers of a chat are taken apart.
    pub fn is_plain(&self, tools: &ToolUse) -> bool {
        self.format.reasoning.is_none() && (tools.tools.is_empty() || tools.choice == Choice::None)
    }

    /// The listener of an answer to a prompt that ends with `tail`. `values`: those for the template. Ids of calls begin with `ids`.
    pub fn listener(&self, tail: &str, tools: &ToolUse, values: &Map<String, Value>, ids: String) -> Listener {
        let is = |name: &str, value: bool| values.get(name).and_then(Value::as_bool) == Some(value);
        let start = Start {
            in_reasoning: self.format.opens_reasoning(tail),
            content_required: is("enable_thinking", false) || is("force_nonempty_content", true),
            ids,
        };
        let known = if tools.choice == Choice::None { Tools::default() } else { Tools::new(&tools.tools) };
        // A model without a format of its own can only have learned the usual one.
        let calls = self.format.calls.or(Some(CallFormat::Hermes));
        let parser = Parser::new(&Format { calls, ..self.format }, known, start);
        Listener { parser, single: tools.single, said: Said::default(), open: None }
    }

    /// What the answer to a prompt must be. `tail`: the end of a chat's prompt, after which reasoning may come first.
    ///
    /// # Errors
    /// 400 if it cannot be followed.
    pub fn constraint(
        &self,
        model: &Model,
        tail: Option<&str>,
        tools: &ToolUse,
        structure: Option<&Structure>,
    ) -> Result<Option<Box<dyn Constraint + Send>>, Refusal> {
        let format = self.format.calls.unwrap_or(CallFormat::Hermes);
        let Some(structure) = &tools.with_structure(format, structure) else { return Ok(None) };
        let lead = match (tail.map(str::trim_end), self.format.reasoning) {
            (Some(tail), _) if self.format.opens_reasoning(tail) => Lead::RestOfReasoning,
            (Some(tail), Some(reasoning)) if !tail.ends_with("</think>") => Lead::Reasoning(reasoning),
            _ => Lead::None,
        };
        let make = || {
            let text = model.text();
            Grammars::new(text.tokenizer()?, model.facts().vocab, text.stop_ids())
        };
        let grammars = self.grammars.get_or_init(|| make().map_err(|e| e.to_string()));
        let grammars = grammars.as_ref().map_err(|why| Refusal::new(500, why.clone()))?;
        let matcher = grammars.matcher(structure, lead)?;
        Ok(Some(Box::new(matcher)))
    }
}

impl ToolUse {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` in OpenAI's form.
    ///
    /// # Errors
    /// If one is wrong.
    pub fn openai(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let mut tools = Vec::new();
        for (i, tool) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
            let tool = Fields::of(format!("tools[{i}]"), tool)?;
            if tool.need::<String>("type")? != "function" {
                return Err(tool.refuse("type", "can only be \"function\" on this server"));
            }
            let raw = tool.raw("function").ok_or_else(|| tool.refuse("function", "is missing"))?;
            let function = Fields::of(tool.name("function"), raw)?;
            check_tools(&function, "parameters")?;
            tools.push(json!({ "type": "function", "function": tool.need::<Value>("function")? }));
        }
        Self::of(fields, tools)
    }

    /// The same for `/v1/responses`, where a tool is not nested.
    ///
    /// # Errors
    /// If one is wrong, or runs on OpenAI's servers.
    pub fn responses(fields: &Fields<'_>) -> Result<Self, Refusal> {
        let mut tools = Vec::new();
        for (i, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
            let tool = Fields::of(format!("tools[{i}]"), value)?;
            if tool.need::<String>("type")? != "function" {
                return Err(tool.refuse("type", "can only be \"function\" on this server: others run at OpenAI"));
            }
            check_tools(&tool, "parameters")?;
            let mut function: Map<String, Value> =
                serde_json::from_str(value.get()).map_err(|_| fields.refuse("tools", "has a tool that is too deep"))?;
            function.retain(|name, value| name != "type" && !value.is_null());
            tools.push(json!({ "type": "function", "function": function }));
        }
        Self::of(fields, tools)
    }

    /// With `tool_choice` and `parallel_tool_calls` in OpenAI's form.
    fn of(fields: &Fields<'_>, tools: Vec<Value>) -> Result<Self, Refusal> {
        let single = !fields.flag("parallel_tool_calls")? && fields.raw("parallel_tool_calls").is_some();
        let choice = match fields.raw("tool_choice").map(RawValue::get) {
            None | Some("\"auto\"") => Choice::Auto,
            Some("\"none\"") => Choice::None,
            Some("\"required\"") => Choice::Required,
            Some(_) => {
                let choice: Value = fields.need("tool_choice")?;
                let name = choice.pointer("/function/name").or_else(|| choice.get("name")).and_then(Value::as_str);
                let why =
                    "must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
                Choice::Named(name.ok_or_else(|| fields.refuse("tool_choice", why))?.into())
            }
        };
        Self { tools, choice, single }.checked(fields)
    }

    /// Itself, if the choice is one of the tools.
    ///
    /// # Errors
    /// If not, or there are too many.
    pub fn checked(self, fields: &Fields<'_>) -> Result<Self, Refusal> {
        let Self { tools, choice, .. } = &self;
        if tools.len() > MOST_TOOLS {
            return Err(fields.refuse("tools", &format!("has {} tools; at most {MOST_TOOLS} are taken", tools.len())));
        }
        match choice {
            Choice::Required if tools.is_empty() => {
                Err(fields.refuse("tool_choice", "asks for a call, but there are no tools"))
            }
            Choice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == **name) => {
                let name: String = name.chars().take(LONGEST_NAME).collect();
                Err(fields.refuse("tool_choice", &format!("names {name:?}, which is none of the tools")))
            }
            _ => Ok(self),
        }
    }

    /// Refuses a structure that could not be followed beside the calls that these tools require.
    ///
    /// # Errors
    /// If a call is required.
    pub fn allow(&self, structure: Option<&Structure>, fields: &Fields<'_>) -> Result<(), Refusal> {
        match self.choice {
            Choice::Required | Choice::Named(_) if structure.is_some() => Err(fields.refuse(
                "tool_choice",
                "asks for a call, which contradicts the structure that the request asks for; leave out one of them",
            )),
            _ => Ok(()),
        }
    }

    /// What the answer is held to: calls, the structure, or either of them.
    fn with_structure(&self, format: CallFormat, structure: Option<&Structure>) -> Option<Structure> {
        let Some(structure) = structure else { return self.structure(format) };
        if self.choice == Choice::None || self.tools.is_empty() {
            return Some(structure.clone());
        }
        let calls = Structure::Calls { format, tools: self.tools.clone(), many: !self.single, optional: false };
        Some(Structure::Either(calls.into(), structure.clone().into()))
    }

    /// The grammar of the calls: always for required ones; for free ones only if a tool is strict.
    fn structure(&self, format: CallFormat) -> Option<Structure> {
        let of = |tools: Vec<Value>, many, optional| Some(Structure::Calls { format, tools, many, optional });
        match &self.choice {
            Choice::None => None,
            Choice::Auto if self.tools.iter().any(|tool| tool["function"]["strict"] == true) => {
                of(self.tools.clone(), !self.single, true)
            }
            Choice::Auto => None,
            Choice::Required => of(self.tools.clone(), !self.single, false),
            Choice::Named(name) => {
                let tools = self.tools.iter().filter(|tool| tool["function"]["name"] == **name).cloned();
                of(tools.collect(), false, false)
            }
        }
    }
}

/// Checks the name of a tool and the schema of its parameters.
///
/// # Errors
/// If one is wrong.
pub fn check_tools(function: &Fields<'_>, schema: &str) -> Result<(), Refusal> {
    let name: String = function.need("name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    match name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) {
        true => Err(function.refuse("name", &format!("must be 1 to {LONGEST_NAME} letters, digits, `_`, `-` or `.`"))),
        false => match function.get::<Value>(schema)? {
            Some(value) if !value.is_object() => Err(function.refuse(schema, "must be an object: a JSON schema")),
            _ => Ok(()),
        },
    }
}

/// Reads what the answer must be: `response_format`, `structured_outputs` or vLLM's older `guided_…`.
///
/// # Errors
/// If it is wrong, or there are several.
pub fn structure(fields: &Fields<'_>) -> Result<Option<Structure>, Refusal> {
    let mut found: Vec<(String, Structure)> = Vec::new();
    if let Some(value) = fields.raw("response_format") {
        let format = Fields::of(fields.name("response_format"), value)?;
        found.extend(response_format(&format)?.map(|structure| (format.name("type"), structure)));
    }
    if let Some(value) = fields.raw("structured_outputs") {
        let outputs = Fields::of(fields.name("structured_outputs"), value)?;
        found.extend(constraints(&outputs, "")?);
    }
    found.extend(constraints(fields, "guided_")?);
    match found.as_slice() {
        [] | [_] => Ok(found.pop().map(|(_, structure)| structure)),
        [(first, _), (second, _), ..] => {
            Err(Refusal::field(second, format!("`{second}` contradicts `{first}`: an answer has one structure")))
        }
    }
}

/// `text`, `json_object` or `json_schema`.
///
/// # Errors
/// If it is wrong.
pub fn response_format(format: &Fields<'_>) -> Result<Option<Structure>, Refusal> {
    match &*format.need::<String>("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(Structure::JsonObject)),
        "json_schema" => {
            let inner = match format.raw("json_schema") {
                Some(inner) => &Fields::of(format.name("json_schema"), inner)?,
                None => format,
            };
            let schema = inner.get::<Value>("schema")?;
            Ok(Some(schema.map_or(Structure::JsonObject, Structure::Schema)))
        }
        _ => Err(format.refuse("type", "can only be \"text\", \"json_object\" or \"json_schema\" on this server")),
    }
}

fn constraints(fields: &Fields<'_>, prefix: &str) -> Result<Vec<(String, Structure)>, Refusal> {
    let field = |name: &str| format!("{prefix}{name}");
    let mut found = Vec::new();
    if let Some(value) = fields.get::<Value>(&field("json"))? {
        // Some clients send the schema as a text.
        let schema = match &value {
            Value::String(text) => {
                serde_json::from_str(text).map_err(|_| fields.refuse(&field("json"), "is no JSON"))?
            }
            _ => value,
        };
        found.push((fields.name(&field("json")), Structure::Schema(schema)));
    }
    if fields.flag(&field("json_object"))? {
        found.push((fields.name(&field("json_object")), Structure::JsonObject));
    }
    if let Some(regex) = fields.get(&field("regex"))? {
        found.push((fields.name(&field("regex")), Structure::Regex(regex)));
    }
    if let Some(texts) = fields.get::<Vec<String>>(&field("choice"))? {
        found.push((fields.name(&field("choice")), Structure::Choice(texts)));
    }
    if let Some(text) = fields.get(&field("grammar"))? {
        found.push((fields.name(&field("grammar")), Structure::Lark(text)));
    }
    Ok(found)
}

/// Values for the chat template.
///
/// # Errors
/// If they are no object.
pub fn template_values(fields: &Fields<'_>) -> Result<Map<String, Value>, Refusal> {
    let mut values: Map<String, Value> = fields.get("chat_template_kwargs")?.unwrap_or_default();
    if let Some(effort) = fields.get::<String>("reasoning_effort")? {
        if effort == "none" {
            values.entry("enable_thinking").or_insert(false.into());
        }
        values.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(values)
}

impl Listener {
    /// What the next tokens say. `special` is the text of a special token, which has no text of its own.
    pub fn hear(&mut self, text: &str, special: Option<&str>) -> Vec<Event> {
        let before = self.parser.in_reasoning();
        let mut events = self.parser.push(text);
        if let Some(token) = special {
            events.extend(self.parser.push_special(token));
        }
        self.said.reasoning_tokens += usize::from(before);
        self.note(events)
    }

    /// All that was said, and the events that only the end shows; the source of a call that broke off is not among them: a
    /// reader of the stream has seen most of it.
    pub fn finish(mut self) -> (Said, Vec<Event>) {
        let events = self.parser.finish();
        let mut events = self.note(events);
        events.retain(|event| !matches!(event, Event::CallBroken { .. }));
        (self.said, events)
    }

    fn note(&mut self, mut events: Vec<Event>) -> Vec<Event> {
        if self.single {
            events.retain(|event| !matches!(index(event), Some(1..)));
        }
        for event in &events {
            self.said.note(event, &mut self.open);
        }
        events
    }
}

fn index(event: &Event) -> Option<usize> {
    match event {
        Event::Content(_) | Event::Reasoning(_) => None,
        Event::CallStarted { index, .. }
        | Event::Arguments { index, .. }
        | Event::CallEnded { index }
        | Event::CallBroken { index, .. } => Some(*index),
    }
}

impl Said {
    fn note(&mut self, event: &Event, open: &mut Option<Call>) {
        match event {
            Event::Content(text) => self.content += text,
            Event::Reasoning(text) => self.reasoning += text,
            Event::CallStarted { id, name, .. } => {
                *open = Some(Call { id: id.clone(), name: name.clone(), arguments: String::new() });
            }
            Event::Arguments { text, .. } => {
                if let Some(call) = open {
                    call.arguments += text;
                }
            }
            Event::CallEnded { .. } => self.calls.extend(open.take()),
            Event::CallBroken { text, .. } => {
                *open = None;
                self.content += text;
            }
        }
    }
}
