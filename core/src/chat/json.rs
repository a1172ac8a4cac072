//! The filter `tojson`.

use minijinja::{Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize;

/// `json.dumps` as transformers calls it: characters beyond ASCII and those of HTML are not escaped, `indent` is
/// optional.
pub(super) fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let fault = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut value = serde_json::to_value(&value).map_err(fault)?;
    if sort_keys == Some(true) {
        value.sort_all_objects();
    }
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let spaces = " ".repeat(n.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => {
            // Python's default separators.
            let separators = separators.unwrap_or_else(|| vec![", ".into(), ": ".into()]);
            let Ok([item, key]) = <[String; 2]>::try_from(separators) else {
                return Err(Error::new(ErrorKind::InvalidOperation, "separators are a pair of strings"));
            };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Separated { item, key }))
        }
    }
    .map_err(fault)?;
    Ok(String::from_utf8(out).expect("JSON is UTF-8"))
}

/// JSON on one line with these texts between items and after keys.
struct Separated {
    item: String,
    key: String,
}

impl serde_json::ser::Formatter for Separated {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.item.as_bytes()) }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.item.as_bytes()) }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}
