//! The tools of a request, as far as their calls depend on them.

use std::{collections::HashMap, sync::Arc};

use serde_json::Value;

use super::{python, text::quoted};

/// Names of tools and types of their parameters.
#[derive(Clone, Debug, Default)]
pub struct Tools(Arc<HashMap<String, HashMap<String, Types>>>);

/// A set of JSON's types, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types(u8);

const NULL: u8 = 1;
const INTEGER: u8 = 2;
const NUMBER: u8 = 4;
const BOOLEAN: u8 = 8;
const OBJECT: u8 = 16;
const ARRAY: u8 = 32;
const STRING: u8 = 64;

/// Schemas within a schema that are looked at for the types of one parameter.
const MAX_PARTS: usize = 256;

impl Tools {
    /// The tools of a request in OpenAI's form (`{"type": "function", "function": {"name", "parameters"}}`) or without the outer
    /// object. Entries without a name are left out.
    pub fn new(tools: &[Value]) -> Self {
        let entry = |tool: &Value| {
            let tool = tool.get("function").unwrap_or(tool);
            let schema = tool.get("parameters").or_else(|| tool.get("input_schema")).unwrap_or(&Value::Null);
            let properties = schema.get("properties").and_then(Value::as_object);
            let types = |(key, part): (&String, &Value)| {
                let mut left = MAX_PARTS;
                (key.clone(), Types::of(part, schema, &mut left))
            };
            Some((tool.get("name")?.as_str()?.to_owned(), properties.into_iter().flatten().map(types).collect()))
        };
        Self(Arc::new(tools.iter().filter_map(entry).collect()))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether there is one of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The types that a parameter may have; a string if nothing is known.
    pub(super) fn types(&self, tool: &str, parameter: &str) -> Types {
        self.0.get(tool).and_then(|parameters| parameters.get(parameter)).copied().unwrap_or(Types(STRING))
    }
}

impl Types {
    fn of(schema: &Value, root: &Value, left: &mut usize) -> Self {
        let found = Self::within(schema, root, left);
        if found == 0 { Self(STRING) } else { Self(found) }
    }

    fn within(schema: &Value, root: &Value, left: &mut usize) -> u8 {
        *left = left.saturating_sub(1);
        if *left == 0 {
            return 0;
        }
        let of_value = |value: &Value| match value {
            Value::Null => NULL,
            Value::Bool(_) => BOOLEAN,
            Value::Number(n) if n.is_f64() => NUMBER,
            Value::Number(_) => INTEGER,
            Value::String(_) => STRING,
            Value::Array(_) => ARRAY,
            Value::Object(_) => OBJECT,
        };
        let mut found = match schema.get("type") {
            Some(Value::String(name)) => Self::named(name),
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).map(Self::named).fold(0, |a, b| a | b),
            _ => 0,
        };
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten().chain(schema.get("const"));
        found |= values.map(of_value).fold(0, |a, b| a | b);
        for key in ["anyOf", "oneOf", "allOf"] {
            for part in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                found |= Self::within(part, root, left);
            }
        }
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|path| root.pointer(path.strip_prefix('#')?));
        found | target.map_or(0, |part| Self::within(part, root, left))
    }

    fn named(name: &str) -> u8 {
        match name {
            "null" => NULL,
            "integer" | "int" => INTEGER,
            "number" | "float" => NUMBER,
            "boolean" | "bool" => BOOLEAN,
            "object" | "dict" => OBJECT,
            "array" | "list" => ARRAY,
            _ => STRING,
        }
    }

    /// Whether the value can be shown before it is complete.
    pub fn is_text(self) -> bool {
        self.0 == STRING
    }

    /// A parameter's text as JSON of the first type that it can be. A text of none of them is JSON of another type unless
    /// a string is allowed, and a string at last.
    pub fn json(self, text: &str) -> String {
        let trimmed = text.trim();
        let is = |types: u8| self.0 & types != 0;
        if is(NULL) && trimmed.eq_ignore_ascii_case("null") {
            return "null".into();
        }
        let value: Option<Value> = serde_json::from_str(trimmed).ok();
        let kind = match &value {
            Some(Value::Number(n)) if n.is_f64() => NUMBER,
            Some(Value::Number(_)) => INTEGER | NUMBER,
            Some(Value::Object(_)) => OBJECT,
            Some(Value::Array(_)) => ARRAY,
            _ => 0,
        };
        if is(kind) {
            return trimmed.into();
        }
        if is(BOOLEAN) {
            match &*trimmed.to_ascii_lowercase() {
                "true" | "1" => return "true".into(),
                "false" | "0" => return "false".into(),
                _ => {}
            }
        }
        if is(OBJECT | ARRAY)
            && let Some(json) = python::literal(trimmed).filter(|json| json.starts_with(['{', '[']))
        {
            return json;
        }
        if !is(STRING) && value.is_some() { trimmed.into() } else { quoted(text) }
    }
}
