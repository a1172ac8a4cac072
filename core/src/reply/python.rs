//! Calls as Python writes them: `f(x=1, y=["a"])`. Literals become JSON.

use super::{
    NotACall, Out, Progress,
    text::{Hex, escape, quoted},
};

/// Longest number, word or name.
const MAX_WORD: usize = 256;

pub(super) fn begins_name(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

fn is_in_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// The JSON of a Python literal.
pub(super) fn literal(text: &str) -> Option<String> {
    let mut literal = Literal::default();
    let mut out = String::new();
    for c in text.chars() {
        if literal.step(c, &mut out).ok()? == Step::Over {
            return None;
        }
    }
    literal.finish(&mut out).ok()?.then_some(out)
}

/// A call `name(key=value, …)`.
#[derive(Default)]
pub(super) struct PythonCall {
    at: At,
    name: String,
    arguments: usize,
}

#[derive(Default)]
enum At {
    #[default]
    Name,
    /// After the name's opening parenthesis or a comma.
    KeyOrEnd,
    Key(String),
    /// White space after a key.
    Equals(String),
    Value(Literal),
    CommaOrEnd,
}

impl PythonCall {
    /// The first character of the name.
    pub fn begin(&mut self, c: char) {
        self.name.push(c);
    }

    pub fn step(&mut self, c: char, out: &mut Out) -> Result<Progress, NotACall> {
        match &mut self.at {
            At::Name if c == '(' => self.at = At::KeyOrEnd,
            At::Name if is_in_name(c) && self.name.len() < MAX_WORD => self.name.push(c),
            At::KeyOrEnd | At::Equals(_) | At::CommaOrEnd if c.is_whitespace() => {}
            At::KeyOrEnd | At::CommaOrEnd if c == ')' => {
                if self.arguments == 0 {
                    out.start(&self.name, None);
                    out.arguments("{");
                }
                out.arguments("}");
                return Ok(Progress::Whole);
            }
            At::KeyOrEnd if begins_name(c) => self.at = At::Key(c.into()),
            At::Key(key) if is_in_name(c) && key.len() < MAX_WORD => key.push(c),
            At::Key(key) if c.is_whitespace() => self.at = At::Equals(std::mem::take(key)),
            At::Key(key) | At::Equals(key) if c == '=' => {
                let key = quoted(key);
                if self.arguments == 0 {
                    out.start(&self.name, None);
                }
                out.arguments(&format!("{}{key}: ", if self.arguments == 0 { "{" } else { ", " }));
                self.arguments += 1;
                self.at = At::Value(Literal::default());
            }
            At::Value(literal) => {
                let mut text = String::new();
                let step = literal.step(c, &mut text);
                out.arguments(&text);
                match step? {
                    Step::More => {}
                    Step::Last => self.at = At::CommaOrEnd,
                    Step::Over => {
                        self.at = At::CommaOrEnd;
                        return self.step(c, out);
                    }
                }
            }
            At::CommaOrEnd if c == ',' => self.at = At::KeyOrEnd,
            _ => return Err(NotACall),
        }
        Ok(Progress::More)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    More,
    /// The character ended the literal.
    Last,
    /// The literal had ended before it.
    Over,
}

/// Translates a literal: strings, numbers, `True`, `False`, `None` (and JSON's words), lists, tuples and dictionaries.
#[derive(Default)]
struct Literal {
    /// The closing brackets of what is open.
    open: Vec<char>,
    at: Place,
    /// The value that is being read is the key of a dictionary.
    key: bool,
    /// A comma is written before the next value: Python allows one before a closing bracket, JSON does not.
    comma: bool,
}

#[derive(Default)]
enum Place {
    #[default]
    Value,
    /// After an opening bracket or, in a list, after a comma.
    ValueOrEnd,
    Colon,
    CommaOrEnd,
    /// After a quote: an empty string may end, three quotes may begin one.
    Quote(char, u8),
    Text(Text),
    /// A number or a word.
    Word(String),
}

/// The inside of a string.
struct Text {
    quote: char,
    /// It ends at three quotes.
    long: bool,
    /// Quotes that were read of those three.
    quotes: usize,
    escape: Escape,
}

#[derive(Default)]
enum Escape {
    #[default]
    None,
    Begun,
    Hex(Hex),
}

impl Literal {
    fn step(&mut self, c: char, out: &mut String) -> Result<Step, NotACall> {
        match &mut self.at {
            Place::Value | Place::ValueOrEnd | Place::Colon | Place::CommaOrEnd if c.is_whitespace() => {}
            Place::ValueOrEnd | Place::CommaOrEnd if self.open.last() == Some(&c) => {
                self.open.pop();
                (self.key, self.comma) = (false, false);
                out.push(if c == ')' { ']' } else { c });
                return Ok(self.ended());
            }
            Place::Value | Place::ValueOrEnd => self.begin(c, out)?,
            Place::Colon if c == ':' => {
                out.push_str(": ");
                self.key = false;
                self.at = Place::Value;
            }
            Place::CommaOrEnd if c == ',' => {
                self.key = self.open.last() == Some(&'}');
                self.comma = true;
                self.at = Place::ValueOrEnd;
            }
            Place::Colon | Place::CommaOrEnd => return Err(NotACall),
            Place::Quote(quote, count) => match (c == *quote, *count) {
                (true, 1) => *count = 2,
                (true, _) => self.at = Place::Text(Text::new(c, true)),
                (false, 1) => {
                    self.at = Place::Text(Text::new(*quote, false));
                    return self.step(c, out);
                }
                (false, _) => {
                    out.push('"');
                    if self.ended() == Step::Last {
                        return Ok(Step::Over);
                    }
                    return self.step(c, out);
                }
            },
            Place::Text(text) => {
                if text.step(c, out)? {
                    out.push('"');
                    return Ok(self.ended());
                }
            }
            Place::Word(word) => {
                if (is_in_name(c) || c == '+') && word.len() < MAX_WORD {
                    word.push(c);
                } else {
                    let json = self.word()?;
                    out.push_str(&json);
                    if self.ended() == Step::Last {
                        return Ok(Step::Over);
                    }
                    return self.step(c, out);
                }
            }
        }
        Ok(Step::More)
    }

    /// The text is over; whether the literal is complete.
    fn finish(&mut self, out: &mut String) -> Result<bool, NotACall> {
        match &self.at {
            Place::Word(_) => {
                let json = self.word()?;
                out.push_str(&json);
                Ok(self.ended() == Step::Last)
            }
            Place::Quote(_, 2) => {
                out.push('"');
                Ok(self.ended() == Step::Last)
            }
            Place::CommaOrEnd => Ok(self.open.is_empty()),
            _ => Ok(false),
        }
    }

    fn begin(&mut self, c: char, out: &mut String) -> Result<(), NotACall> {
        if std::mem::take(&mut self.comma) {
            out.push_str(", ");
        }
        match c {
            '\'' | '"' => {
                out.push('"');
                self.at = Place::Quote(c, 1);
            }
            '{' | '[' | '(' if !self.key => {
                let close = match c {
                    '{' => '}',
                    '[' => ']',
                    _ => ')',
                };
                out.push(if c == '{' { '{' } else { '[' });
                self.open.push(close);
                self.key = c == '{';
                self.at = Place::ValueOrEnd;
            }
            c if c.is_alphanumeric() || matches!(c, '-' | '+' | '.') => self.at = Place::Word(c.into()),
            _ => return Err(NotACall),
        }
        Ok(())
    }

    /// The number or word as JSON.
    fn word(&self) -> Result<String, NotACall> {
        let Place::Word(word) = &self.at else { return Err(NotACall) };
        let json = match &**word {
            "True" | "true" => "true".into(),
            "False" | "false" => "false".into(),
            "None" | "null" => "null".into(),
            number => number_as_json(number).ok_or(NotACall)?,
        };
        Ok(if self.key { quoted(&json) } else { json })
    }

    fn ended(&mut self) -> Step {
        if self.key {
            self.at = Place::Colon;
            return Step::More;
        }
        self.at = Place::CommaOrEnd;
        if self.open.is_empty() { Step::Last } else { Step::More }
    }
}

/// Python allows `_` between digits, a leading `+`, and a point without digits on one side.
fn number_as_json(text: &str) -> Option<String> {
    let plain = text.replace('_', "");
    let plain = plain.strip_prefix('+').unwrap_or(&plain);
    let digits = plain.strip_prefix('-').unwrap_or(plain);
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    if serde_json::from_str::<serde_json::Number>(plain).is_ok() {
        return Some(plain.into());
    }
    let value: f64 = plain.parse().ok()?;
    serde_json::Number::from_f64(value).map(|n| n.to_string())
}

impl Text {
    fn new(quote: char, long: bool) -> Self {
        Self { quote, long, quotes: 0, escape: Escape::None }
    }

    /// Whether the string has ended.
    fn step(&mut self, c: char, out: &mut String) -> Result<bool, NotACall> {
        match &mut self.escape {
            Escape::None if c == self.quote => {
                self.quotes += 1;
                return Ok(!self.long || self.quotes == 3);
            }
            Escape::None => {
                for _ in 0..std::mem::take(&mut self.quotes) {
                    escape(self.quote, out);
                }
                if c == '\\' { self.escape = Escape::Begun } else { escape(c, out) }
            }
            Escape::Begun => {
                self.escape = Escape::None;
                match c {
                    '\\' | '\'' | '"' => escape(c, out),
                    'n' => out.push_str("\\n"),
                    'r' => out.push_str("\\r"),
                    't' => out.push_str("\\t"),
                    'b' => out.push_str("\\b"),
                    'f' => out.push_str("\\f"),
                    '\n' => {}
                    'x' => self.escape = Escape::Hex(Hex::new(2)),
                    'u' => self.escape = Escape::Hex(Hex::new(4)),
                    'U' => self.escape = Escape::Hex(Hex::new(8)),
                    // Python leaves other backslashes in the text.
                    other => {
                        escape('\\', out);
                        escape(other, out);
                    }
                }
            }
            Escape::Hex(hex) => {
                if hex.step(c)? {
                    let value = hex.value;
                    self.escape = Escape::None;
                    match char::from_u32(value) {
                        Some(c) => escape(c, out),
                        // Half of a surrogate pair; JSON has them too.
                        None if value < 0x10000 => out.push_str(&format!("\\u{value:04x}")),
                        None => return Err(NotACall),
                    }
                }
            }
        }
        Ok(false)
    }
}
