//! The fields of a JSON object in a request, taken one by one, so that a refusal names its field. Unknown ones are left.

use std::{collections::HashMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::refusal::Refusal;
use crate::failure::json_error;

/// Most fields of an object. Each takes more memory than its text.
const MOST_FIELDS: usize = 1024;

/// An object, or a part of a request that is one.
pub struct Fields<'a> {
    /// Where it is, to name fields: empty for the body, else like `messages[0]`.
    place: String,
    fields: HashMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn body(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| Refusal::bad(format!("the body is not UTF-8 from byte {} on", e.valid_up_to() + 1)))?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim_ascii().is_empty() {
            return Err(Refusal::bad("the body is empty; send a JSON object".into()));
        }
        match serde_json::from_str(text) {
            Ok(Object(fields)) => Ok(Self { place: String::new(), fields }),
            Err(e) if e.is_data() => Err(Refusal::bad(format!("the body {}", not_one(&e)))),
            Err(e) => Err(Refusal::bad(format!("the body is not JSON: {}", json_error(&e)))),
        }
    }

    /// Reads an object that is a part of a request.
    ///
    /// # Errors
    /// If it is not one.
    pub fn of(place: String, value: &'a RawValue) -> Result<Self, Refusal> {
        match serde_json::from_str(value.get()) {
            Ok(Object(fields)) => Ok(Self { place, fields }),
            Err(e) => Err(Refusal::field(&place, format!("`{place}` {}", not_one(&e)))),
        }
    }

    /// The full name of a field.
    pub fn name(&self, field: &str) -> String {
        if self.place.is_empty() { field.to_owned() } else { format!("{}.{field}", self.place) }
    }

    /// A refusal of a field.
    pub fn refuse(&self, field: &str, why: &str) -> Refusal {
        let name = self.name(field);
        Refusal::field(&name, format!("`{name}` {why}"))
    }

    /// Names of all fields, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str)
    }

    /// Refuses fields that have another value than the one with which they mean nothing.
    ///
    /// # Errors
    /// If there is one.
    pub fn refuse_unless(&self, meaningless: &[(&str, &str)]) -> Result<(), Refusal> {
        match meaningless.iter().find(|(field, off)| self.raw(field).is_some_and(|value| value.get() != *off)) {
            Some((field, _)) => Err(self.refuse(field, "is not supported by this server; leave it out")),
            None => Ok(()),
        }
    }

    /// A field as it was written; `None` if it is missing or null.
    pub fn raw(&self, field: &str) -> Option<&'a RawValue> {
        self.fields.get(field).copied().filter(|value| value.get() != "null")
    }

    /// A field of a type; `None` if it is missing or null.
    ///
    /// # Errors
    /// If it is of another type.
    pub fn get<T: Deserialize<'a>>(&self, field: &str) -> Result<Option<T>, Refusal> {
        let Some(value) = self.raw(field) else { return Ok(None) };
        serde_json::from_str(value.get()).map(Some).map_err(|e| {
            let why = json_error(&e);
            let why = why.split(" at line ").next().unwrap_or_default();
            self.refuse(field, &format!("is wrong: {why}"))
        })
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// If it is missing or of another type.
    pub fn need<T: Deserialize<'a>>(&self, field: &str) -> Result<T, Refusal> {
        self.get(field)?.ok_or_else(|| self.refuse(field, "is missing"))
    }

    /// A number between two limits.
    ///
    /// # Errors
    /// If it is none.
    pub fn number(&self, field: &str, least: f64, most: f64) -> Result<Option<f32>, Refusal> {
        let Some(value) = self.raw(field) else { return Ok(None) };
        match serde_json::from_str::<f64>(value.get()) {
            Ok(x) if (least..=most).contains(&x) => Ok(Some(x as f32)),
            _ => Err(self.refuse(field, &format!("must be a number from {least} to {most}"))),
        }
    }

    /// A whole number between two limits.
    ///
    /// # Errors
    /// If it is none.
    pub fn count(&self, field: &str, least: u64, most: u64) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.raw(field) else { return Ok(None) };
        match serde_json::from_str::<u64>(value.get()) {
            Ok(n) if (least..=most).contains(&n) => Ok(Some(n)),
            _ if most == u64::MAX => Err(self.refuse(field, &format!("must be a whole number from {least} on"))),
            _ => Err(self.refuse(field, &format!("must be a whole number from {least} to {most}"))),
        }
    }

    /// `true` or `false`; false if it is missing.
    ///
    /// # Errors
    /// If it is something else.
    pub fn flag(&self, field: &str) -> Result<bool, Refusal> {
        match self.raw(field).map(RawValue::get) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(self.refuse(field, "must be true or false")),
        }
    }

    /// A list of values as they were written.
    ///
    /// # Errors
    /// If it is no list.
    pub fn list(&self, field: &str) -> Result<Option<Vec<&'a RawValue>>, Refusal> {
        let Some(value) = self.raw(field) else { return Ok(None) };
        serde_json::from_str(value.get()).map(Some).map_err(|_| self.refuse(field, "must be a list"))
    }

    /// A string or a list of strings.
    ///
    /// # Errors
    /// If it is something else.
    pub fn strings(&self, field: &str) -> Result<Vec<String>, Refusal> {
        let Some(value) = self.raw(field) else { return Ok(Vec::new()) };
        let text = value.get();
        serde_json::from_str(text)
            .map(|one| vec![one])
            .or_else(|_| serde_json::from_str(text))
            .map_err(|_| self.refuse(field, "must be a string or a list of strings"))
    }
}

/// Why a value is no object that is taken.
fn not_one(e: &serde_json::Error) -> String {
    let many = format!("has more than {MOST_FIELDS} fields");
    if e.to_string().starts_with(&many) { many } else { "must be a JSON object".into() }
}

/// An object with at most [`MOST_FIELDS`] fields.
struct Object<'a>(HashMap<String, &'a RawValue>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = HashMap::new();
                while let Some((name, value)) = map.next_entry()? {
                    fields.insert(name, value);
                    if fields.len() > MOST_FIELDS {
                        return Err(A::Error::custom(format_args!("has more than {MOST_FIELDS} fields")));
                    }
                }
                Ok(Object(fields))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(body: &str, read: impl Fn(&Fields<'_>) -> Result<(), Refusal>) -> String {
        let refusal = Fields::body(body.as_bytes()).and_then(|f| read(&f)).unwrap_err();
        assert_eq!(refusal.status, 400);
        refusal.message
    }

    #[test]
    fn bodies_that_are_no_object() {
        let nothing = |_: &Fields<'_>| Ok(());
        for (body, part) in [("", "empty"), ("[1]", "must be a JSON object"), ("{", "not JSON"), ("{}x", "not JSON")] {
            assert!(why(body, nothing).contains(part), "{body}");
        }
        let many: String = (0..2_000).map(|i| format!("\"{i}\": 0,")).collect();
        assert_eq!(why(&format!("{{{many} \"x\": 1}}"), nothing), "the body has more than 1024 fields");
        let broken = Fields::body(b"{\"a\xff\"}").err().unwrap().message;
        assert!(broken.contains("not UTF-8 from byte 4"), "{broken}");
        // Far deeper than any stack.
        let deep = format!("{{\"x\": {}{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        let fields = Fields::body(deep.as_bytes()).unwrap();
        assert!(fields.get::<serde_json::Value>("x").is_err());
        assert!(fields.list("x").unwrap().is_some());
    }

    #[test]
    fn a_refusal_names_its_field() {
        let numbers = |f: &Fields<'_>| f.number("temperature", 0.0, 2.0).map(|_| ());
        for value in ["3", "-0.1", "\"warm\"", "1e999", "[]"] {
            let body = format!("{{\"temperature\": {value}}}");
            assert_eq!(why(&body, numbers), "`temperature` must be a number from 0 to 2", "{value}");
        }
        for value in ["0", "1.5", "-1", "true", "99999999999999999999"] {
            let body = format!("{{\"n\": {value}}}");
            assert_eq!(why(&body, |f| f.count("n", 1, 8).map(|_| ())), "`n` must be a whole number from 1 to 8");
        }
        assert_eq!(why("{\"stream\": 1}", |f| f.flag("stream").map(|_| ())), "`stream` must be true or false");
        let text = why("{\"user\": 1}", |f| f.get::<String>("user").map(|_| ()));
        assert_eq!(text, "`user` is wrong: invalid type: integer `1`, expected a string");
        assert_eq!(why("{}", |f| f.need::<String>("model").map(|_| ())), "`model` is missing");
    }

    #[test]
    fn null_is_absent_and_names_are_nested() {
        let body = br#"{"a": null, "stop": ["x", "y"], "o": {"b": 1}}"#;
        let fields = Fields::body(body).unwrap();
        assert_eq!(fields.get::<u32>("a").unwrap(), None);
        assert_eq!(fields.strings("stop").unwrap(), ["x", "y"]);
        let inner = Fields::of("o".into(), fields.raw("o").unwrap()).unwrap();
        assert_eq!(inner.get::<String>("b").unwrap_err().param.as_deref(), Some("o.b"));
    }
}
