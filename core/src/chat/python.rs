//! Python's methods of strings and lists that templates call and the template engine does not have.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters, tests,
    value::{ValueKind, from_args},
};
use minijinja_contrib::pycompat;

/// Replaces tests and filters that differ from Jinja's: `None` cannot be iterated over, strings and mappings are
/// sequences too, and an undefined value is an empty one.
pub(super) fn correct(env: &mut Environment<'_>) {
    env.add_test("iterable", |v: &Value| !v.is_none() && tests::is_iterable(v));
    env.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::String | ValueKind::Map | ValueKind::Undefined) || tests::is_sequence(v)
    });
    for name in ["length", "count"] {
        env.add_filter(name, |v: &Value| if v.is_undefined() { Ok(0) } else { filters::length(v) });
    }
}

/// Calls `method` of `value`; the engine's own set handles methods that are unknown here.
pub(super) fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => string_method(text, method, args)?,
        None if method == "index" && value.kind() == ValueKind::Seq => {
            let (wanted,): (Value,) = from_args(args)?;
            Some(value.try_iter()?.position(|v| v == wanted).map(Value::from).ok_or_else(|| missing("list"))?)
        }
        None => None,
    }
    .map_or_else(|| pycompat::unknown_method_callback(state, value, method, args), Ok)
}

fn missing(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("the value is not in the {what}"))
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let three = |a: &str, b: &str, c: &str| [a, b, c].into_iter().map(Value::from).collect::<Value>();
    Ok(Some(match method {
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            rsplit(text, separator, most.and_then(|n| usize::try_from(n).ok()))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (at,): (&str,) = from_args(args)?;
            text.split_once(at).map_or_else(|| three(text, "", ""), |(a, b)| three(a, at, b))
        }
        "rpartition" => {
            let (at,): (&str,) = from_args(args)?;
            text.rsplit_once(at).map_or_else(|| three("", "", text), |(a, b)| three(a, at, b))
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let at = text.find(part).ok_or_else(|| missing("string"))?;
            text[..at].chars().count().into()
        }
        "casefold" => text.to_lowercase().into(),
        _ => return Ok(None),
    }))
}

/// Splits from the right at most `most` times; without a separator at runs of white space.
fn rsplit(text: &str, separator: Option<&str>, most: Option<usize>) -> Value {
    let mut parts = Vec::new();
    let mut rest = text;
    if separator.is_none() {
        rest = rest.trim();
    }
    while most.is_none_or(|most| parts.len() < most) {
        let cut = match separator {
            Some(separator) => rest.rsplit_once(separator),
            None => rest.rsplit_once(char::is_whitespace).map(|(a, b)| (a.trim_end(), b)),
        };
        let Some((left, right)) = cut else { break };
        parts.push(right);
        rest = left;
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(rest);
    }
    parts.reverse();
    parts.into_iter().map(Value::from).collect()
}
