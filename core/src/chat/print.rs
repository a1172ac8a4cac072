//! Printing of values that contain themselves, or that are nested deeper than the template engine can print.

use minijinja::{Error, Output, State, Value, escape_formatter, value::ValueKind};

/// Levels of nesting that the template engine prints itself.
const MAX_DEPTH: usize = 64;
/// Values that are inspected to find the depth of one.
const MAX_VALUES: usize = 100_000;
/// Levels and values that are printed of a deeper one.
const SHOWN_DEPTH: usize = 4;
const SHOWN_VALUES: usize = 1000;

/// Prints `value`; parts nested too deeply as `...`.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let mut left = MAX_VALUES;
    if is_shallow(value, MAX_DEPTH, &mut left) {
        return escape_formatter(out, state, value);
    }
    let mut text = String::new();
    show(value, SHOWN_DEPTH, &mut { SHOWN_VALUES }, &mut text);
    escape_formatter(out, state, &Value::from(text))
}

/// Whether there are at most `depth` levels of lists and mappings below `value`, judged from at most `left` values.
fn is_shallow(value: &Value, depth: usize, left: &mut usize) -> bool {
    if !matches!(value.kind(), ValueKind::Map | ValueKind::Seq) {
        return true;
    }
    let mut fits = |inner: &Value| {
        *left = left.saturating_sub(1);
        depth > 0 && *left > 0 && is_shallow(inner, depth - 1, left)
    };
    let Ok(mut items) = value.try_iter() else { return true };
    if value.kind() == ValueKind::Seq {
        return items.all(|item| fits(&item));
    }
    items.all(|key| value.get_item(&key).map_or(true, |item| fits(&item)))
}

fn show(value: &Value, depth: usize, left: &mut usize, out: &mut String) {
    let (open, close) = match value.kind() {
        ValueKind::Map => ('{', '}'),
        ValueKind::Seq => ('[', ']'),
        ValueKind::String => return *out += &format!("{value:?}"),
        _ => return *out += &value.to_string(),
    };
    out.push(open);
    for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
        if i > 0 {
            *out += ", ";
        }
        *left = left.saturating_sub(1);
        if depth == 0 || *left == 0 {
            *out += "...";
            break;
        }
        if value.kind() == ValueKind::Seq {
            show(&key, depth - 1, left, out);
        } else {
            *out += &format!("{key:?}: ");
            show(&value.get_item(&key).unwrap_or_default(), depth - 1, left, out);
        }
    }
    out.push(close);
}
