//! Grammars for calls of tools, in the formats of [`crate::reply`].

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{tidy, up_to};
use crate::reply::CallFormat;

/// Lark for calls of these tools. `mark` gives a tag in Lark.
pub(super) fn lark(
    format: CallFormat,
    tools: &[Value],
    many: bool,
    optional: bool,
    mark: &dyn Fn(&str) -> String,
) -> String {
    let (open, close) = format.tags();
    let (opened, closed) = (mark(open), mark(close));
    let mut out = String::new();
    let mut names = Vec::new();
    for (i, tool) in tools.iter().enumerate() {
        let tool = Tool::of(i, tool);
        names.push(format!("tool{i}"));
        match format {
            CallFormat::Hermes | CallFormat::Jamba => tool.json(&mut out),
            CallFormat::Xml => tool.xml(&mut out),
            CallFormat::Python => tool.python(&mut out),
            CallFormat::Kimi => tool.kimi(&mut out, mark),
        }
    }
    let tool = names.join(" | ");
    // One block: what a model writes for one or several calls.
    let block = match format {
        CallFormat::Hermes | CallFormat::Xml => {
            let more = if many && !optional {
                format!(" (\"\\n\" {opened} \"\\n\" tool \"\\n\" {closed})*")
            } else {
                String::new()
            };
            format!("{opened} \"\\n\" tool \"\\n\" {closed}{more}")
        }
        CallFormat::Jamba => {
            let more = if many { " (\",\\n    \" tool)*" } else { "" };
            format!("{opened} \"[\\n    \" tool{more} \"\\n]\" {closed}")
        }
        CallFormat::Python => {
            let more = if many { " (\", \" tool)*" } else { "" };
            format!("{opened} \"[\" tool{more} \"]\" {closed}")
        }
        CallFormat::Kimi => format!("{opened} tool{} {closed}", if many { "+" } else { "" }),
    };
    // After text, the tag is a part of the rule that reads the text.
    let start = if !optional {
        format!("start: {block}\n")
    } else {
        let rest = block.strip_prefix(opened.as_str()).unwrap_or(&block);
        let repeat = if many { "*" } else { "?" };
        let head = up_to("head", &opened);
        format!("start: (head{rest}){repeat} /(?s:.*)/\n{head}")
    };
    format!("{start}tool: {tool}\n{out}")
}

/// A tool, and the number that its rules have.
struct Tool<'a> {
    number: usize,
    name: &'a str,
    schema: Value,
}

impl<'a> Tool<'a> {
    fn of(number: usize, tool: &'a Value) -> Self {
        let tool = tool.get("function").unwrap_or(tool);
        let schema = tool.get("parameters").or_else(|| tool.get("input_schema")).filter(|schema| schema.is_object());
        let mut schema = schema.cloned().unwrap_or_else(|| json!({}));
        if let Some(map) = schema.as_object_mut() {
            map.entry("type").or_insert_with(|| "object".into());
        }
        let schema = tidy(&schema);
        Self { number, name: tool.get("name").and_then(Value::as_str).unwrap_or_default(), schema }
    }

    fn json(&self, out: &mut String) {
        let head = format!("{{\"name\": {}, \"arguments\": ", Value::from(self.name));
        let (head, schema, i) = (Value::from(head), &self.schema, self.number);
        let _ = writeln!(out, "tool{i}: {head} args{i} \"}}\"\nargs{i}: %json {schema}");
    }

    fn kimi(&self, out: &mut String, mark: &dyn Fn(&str) -> String) {
        let head = Value::from(format!("functions.{}:", self.name));
        let [begin, arguments, end] =
            ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"].map(mark);
        let (schema, i) = (&self.schema, self.number);
        let _ =
            writeln!(out, "tool{i}: {begin} {head} /[0-9]{{1,3}}/ {arguments} args{i} {end}\nargs{i}: %json {schema}");
    }

    fn xml(&self, out: &mut String) {
        let i = self.number;
        let head = Value::from(format!("<function={}>\n", self.name));
        let mut parts = String::new();
        let mut rules = String::new();
        for (k, (name, schema, required)) in self.parameters().enumerate() {
            let _ = write!(parts, " arg{i}_{k}{}", if required { "" } else { "?" });
            let open = Value::from(format!("<parameter={name}>\n"));
            let _ = writeln!(rules, "arg{i}_{k}: {open} value{i}_{k}");
            let _ = match texts(&schema) {
                Some(texts) if texts.is_empty() => {
                    writeln!(rules, "value{i}_{k}[lazy]: /(?s:.*)/ \"\\n</parameter>\\n\"")
                }
                Some(texts) => writeln!(rules, "value{i}_{k}: ({}) \"\\n</parameter>\\n\"", texts.join(" | ")),
                None => {
                    writeln!(rules, "value{i}_{k}: json{i}_{k} \"\\n</parameter>\\n\"\njson{i}_{k}: %json {schema}")
                }
            };
        }
        let _ = writeln!(out, "tool{i}: {head}{parts} \"</function>\"\n{rules}");
    }

    /// Every parameter has a rule for the rest of the arguments after a comma and, up to the first required one, one without.
    fn python(&self, out: &mut String) {
        let i = self.number;
        let parameters: Vec<_> = self.parameters().collect();
        let head = Value::from(format!("{}(", self.name));
        let _ = writeln!(out, "tool{i}: {head} first{i}_0");
        for (k, (name, schema, required)) in parameters.iter().enumerate() {
            let key = Value::from(format!("{name}="));
            let _ = writeln!(out, "arg{i}_{k}: {key} json{i}_{k}\njson{i}_{k}: %json {schema}");
            let next = k + 1;
            let skip = |kind: &str| if *required { String::new() } else { format!(" | {kind}{i}_{next}") };
            let _ = writeln!(out, "first{i}_{k}: arg{i}_{k} rest{i}_{next}{}", skip("first"));
            let _ = writeln!(out, "rest{i}_{k}: \", \" arg{i}_{k} rest{i}_{next}{}", skip("rest"));
        }
        let last = parameters.len();
        let _ = writeln!(out, "first{i}_{last}: \")\"\nrest{i}_{last}: \")\"");
    }

    /// Name, schema with the definitions that it may refer to, and whether it is required.
    fn parameters(&self) -> impl Iterator<Item = (&str, Value, bool)> {
        let required = self.schema.get("required").and_then(Value::as_array);
        let is_required = move |name: &str| required.is_some_and(|list| list.iter().any(|entry| entry == name));
        let properties = self.schema.get("properties").and_then(Value::as_object);
        properties.into_iter().flatten().map(move |(name, schema)| {
            let mut own: Map<String, Value> = schema.as_object().cloned().unwrap_or_default();
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = self.schema.get(key) {
                    own.insert(key.into(), definitions.clone());
                }
            }
            (name.as_str(), tidy(&Value::Object(own)), is_required(name))
        })
    }
}

/// The texts of a parameter that is a string, as strings of Lark: those of its `enum`, or none if every text is allowed.
fn texts(schema: &Value) -> Option<Vec<String>> {
    let strings =
        |list: &Vec<Value>| list.iter().map(|text| text.as_str().map(|text| Value::from(text).to_string())).collect();
    match (schema.get("type").and_then(Value::as_str), schema.get("enum").and_then(Value::as_array)) {
        (Some("string") | None, Some(list)) if !list.is_empty() => strings(list),
        (Some("string"), None) => Some(Vec::new()),
        _ => None,
    }
}
