//! Chats: the model's template turns messages into a prompt.
//!
//! Templates are programs from a file. They run with a limit on their steps, see nothing but the messages and the names of
//! special tokens, and what messages contain can never act as a special token (see [`crate::tokenizer`]).

mod python;

use minijinja::{
    Environment, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;

use crate::{Error, Result, tokenizer::Tokenizer};

/// Steps that a template may take; the longest published ones take some thousands a message.
const FUEL: u64 = 20_000_000;
/// Boundaries are looked for at the ends of this many messages, the newest ones, besides the first.
const MAX_BOUNDARIES: usize = 32;

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or whatever else the template knows; letters, digits, `_` and `-` only.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A chat as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The whole prompt.
    pub ids: Vec<u32>,
    /// Token counts, ascending and less than `ids.len()`, at which the system prompt and messages end, as far as that can be
    /// told: another chat that begins with the same messages begins with the same ids up to there.
    pub boundaries: Vec<usize>,
}

/// A model's chat template.
pub struct ChatTemplate {
    file: String,
    /// The compiled template, or why it could not be compiled: that matters only to those who chat.
    compiled: std::result::Result<Environment<'static>, String>,
}

impl ChatTemplate {
    /// The template `source` from `file`. `now` gives the seconds since 1970 for templates that print the date.
    pub fn new(file: &str, source: &str, now: fn() -> u64) -> Self {
        let compiled = environment(source, now).map_err(|e| describe(&e));
        Self { file: file.into(), compiled }
    }

    /// The prompt of `messages`, in which text of special tokens is guarded.
    fn render(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let bad = |why: &str| Error::model(&self.file, format!("the chat template cannot be used: {why}"));
        let compiled = self.compiled.as_ref().map_err(|why| bad(why))?;
        let names = tokenizer.named_tokens().iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str())));
        let names = Value::from_pairs(names);
        let values = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt,
            tools => (),
            documents => (),
            ..names
        };
        let rendered = compiled.get_template(TEMPLATE).and_then(|template| template.render(values));
        rendered.map_err(|e| match e.kind() {
            ErrorKind::OutOfFuel => bad("it does not come to an end"),
            _ => Error::model(&self.file, format!("the chat template refused these messages: {}", describe(&e))),
        })
    }

    /// Turns a chat into token ids. With `add_generation_prompt` the prompt ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file if the template is wrong, raises or does not end; [`Error::BadRequest`] if there are
    /// no messages or a role is not a plain word.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<Prompt> {
        if messages.is_empty() {
            return Err(Error::BadRequest("the chat has no messages".into()));
        }
        // Templates print roles between the halves of special tokens (`'<|' + role + '|>'`).
        let plain =
            |role: &str| !role.is_empty() && role.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
        if let Some(message) = messages.iter().find(|m| !plain(&m.role)) {
            return Err(Error::BadRequest(format!("{:?} is not the role of a message", message.role)));
        }
        let guarded: Vec<Message> =
            messages.iter().map(|m| Message::new(&m.role, tokenizer.guard(&m.content))).collect();
        let text = self.render(tokenizer, &guarded, add_generation_prompt)?;
        let encoded = tokenizer.encode_guarded(&text)?;
        let mut boundaries: Vec<usize> = (1..=messages.len())
            .filter(|n| *n == 1 || *n + MAX_BOUNDARIES > messages.len())
            // A template may refuse a part of a chat; then its end is not known.
            .filter_map(|n| self.render(tokenizer, &guarded[..n], false).ok())
            .map(|part| part.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count())
            .map(|bytes| encoded.ends.partition_point(|end| *end <= bytes))
            .filter(|tokens| *tokens > 0 && *tokens < encoded.ids.len())
            .collect();
        boundaries.sort_unstable();
        boundaries.dedup();
        Ok(Prompt { ids: encoded.ids, boundaries })
    }
}

/// Seconds since 1970 by the system's clock; the browser has another one.
#[cfg(not(target_arch = "wasm32"))]
pub fn system_clock() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

const TEMPLATE: &str = "chat_template";

/// The environment that transformers gives to templates.
fn environment(source: &str, now: fn() -> u64) -> std::result::Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(python::method);
    python::correct(&mut env);
    env.set_fuel(Some(FUEL));
    env.add_filter("tojson", to_json);
    env.add_function("raise_exception", |message: String| -> std::result::Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: String| strftime(&format, now()));
    // Jinja reads every end of line as a line feed.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    env.add_template_owned(TEMPLATE, without_generation_tags(&source))?;
    Ok(env)
}

/// transformers marks the assistant's words with a block tag of its own, `generation`, that prints what it holds.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let end = rest[start..].find("%}").map_or(rest.len(), |n| start + n + 2);
        let tag = &rest[start..end];
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\n', '\t']);
        let replaced = match word {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        };
        out += &rest[..start];
        out += &replaced;
        rest = &rest[end..];
    }
    out + rest
}

/// What went wrong and in which line.
fn describe(e: &minijinja::Error) -> String {
    let what = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
    e.line().map_or(what.clone(), |line| format!("{what} (line {line} of the template)"))
}

/// `json.dumps` as transformers calls it: characters beyond ASCII and HTML's stay as they are, `indent` is optional.
fn to_json(value: Value, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let fault = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
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
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "separators are a pair of strings"));
            };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Separated { item, key }))
        }
    }
    .map_err(fault)?;
    Ok(String::from_utf8(out).expect("JSON is UTF-8"))
}

/// JSON on one line with these texts between items and behind keys.
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

/// The directives of `strftime` that templates use, for a time in UTC; others stay as they are.
fn strftime(format: &str, now: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, seconds) = (now / 86_400, now % 86_400);
    let (year, month, day) = civil_date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let hour = seconds / 3600;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let rest = chars.as_str();
        let directive = rest.chars().next().unwrap_or('%');
        chars.next();
        out += &match directive {
            'Y' => format!("{year}"),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'B' => month_name.into(),
            'b' => month_name[..3].into(),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'A' => day_name.into(),
            'a' => day_name[..3].into(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'M' => format!("{:02}", seconds / 60 % 60),
            'S' => format!("{:02}", seconds % 60),
            '%' => "%".into(),
            other => format!("%{other}"),
        };
    }
    out
}

/// Year, month and day of the Gregorian calendar, `days` after 1970-01-01.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that the leap day is the last of its year; 146,097 days are 400 years.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
