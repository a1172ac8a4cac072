//! Calls as objects of JSON: `{"name": "f", "arguments": {…}}`.

use super::{
    NotACall, Out, Progress,
    text::{Hex, Read, Unescape, escape},
};

/// A value of JSON, checked character by character.
#[derive(Default)]
pub(super) struct Scanner {
    /// The open objects (true) and arrays.
    open: Vec<bool>,
    at: At,
    /// The string that is being read is a key.
    key: bool,
}

#[derive(Default)]
enum At {
    #[default]
    Value,
    /// After `[`.
    ValueOrEnd,
    /// After `{`.
    KeyOrEnd,
    Key,
    Colon,
    CommaOrEnd,
    String,
    Escape,
    Hex(Hex),
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static str),
}

/// What was read last of a number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Number {
    fn next(self, c: char) -> Option<Self> {
        use Number::*;
        Some(match (self, c) {
            (Minus, '0') => Zero,
            (Minus | Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => Exponent,
            (Exponent, '+' | '-') => Sign,
            (Exponent | Sign | Power, '0'..='9') => Power,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Power)
    }
}

/// What a character did to a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// It ended the value.
    Last,
    /// The value, a number, had ended before it.
    Over,
}

impl Scanner {
    /// Whether no character but white space has come.
    pub fn is_at_start(&self) -> bool {
        matches!(self.at, At::Value) && self.open.is_empty()
    }

    /// As [`Scanner::step`]; appends the character to `out`, escaped where JSON demands it.
    pub fn copy(&mut self, c: char, out: &mut String) -> Result<Step, NotACall> {
        let raw = matches!(self.at, At::String) && c < ' ';
        let step = self.step(c)?;
        if raw {
            escape(c, out)
        } else {
            out.push(c)
        }
        Ok(step)
    }

    pub fn step(&mut self, c: char) -> Result<Step, NotACall> {
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match &mut self.at {
            At::Value | At::ValueOrEnd | At::KeyOrEnd | At::Key | At::Colon | At::CommaOrEnd if space => {}
            At::ValueOrEnd if c == ']' => return Ok(self.close()),
            At::Value | At::ValueOrEnd => self.begin(c)?,
            At::KeyOrEnd if c == '}' => return Ok(self.close()),
            At::KeyOrEnd | At::Key if c == '"' => {
                self.key = true;
                self.at = At::String;
            }
            At::Colon if c == ':' => self.at = At::Value,
            At::CommaOrEnd => match (c, self.open.last()) {
                (',', Some(true)) => self.at = At::Key,
                (',', Some(false)) => self.at = At::Value,
                ('}', Some(true)) | (']', Some(false)) => return Ok(self.close()),
                _ => return Err(NotACall),
            },
            At::String => match c {
                '"' if self.key => (self.key, self.at) = (false, At::Colon),
                '"' => return Ok(self.ended()),
                '\\' => self.at = At::Escape,
                _ => {}
            },
            At::Escape => {
                self.at = match c {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => At::String,
                    'u' => At::Hex(Hex::new(4)),
                    _ => return Err(NotACall),
                }
            }
            At::Hex(hex) => {
                if hex.step(c)? {
                    self.at = At::String;
                }
            }
            At::Number(number) => match number.next(c) {
                Some(next) => *number = next,
                None if number.may_end() => {
                    if self.ended() == Step::Last {
                        return Ok(Step::Over);
                    }
                    return self.step(c);
                }
                None => return Err(NotACall),
            },
            At::Word(rest) => {
                *rest = rest.strip_prefix(c).ok_or(NotACall)?;
                if rest.is_empty() {
                    return Ok(self.ended());
                }
            }
            At::KeyOrEnd | At::Key | At::Colon => return Err(NotACall),
        }
        Ok(Step::More)
    }

    fn begin(&mut self, c: char) -> Result<(), NotACall> {
        self.at = match c {
            '{' => {
                self.open.push(true);
                At::KeyOrEnd
            }
            '[' => {
                self.open.push(false);
                At::ValueOrEnd
            }
            '"' => At::String,
            '-' => At::Number(Number::Minus),
            '0' => At::Number(Number::Zero),
            '1'..='9' => At::Number(Number::Integer),
            't' => At::Word("rue"),
            'f' => At::Word("alse"),
            'n' => At::Word("ull"),
            _ => return Err(NotACall),
        };
        Ok(())
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        self.ended()
    }

    fn ended(&mut self) -> Step {
        self.at = At::CommaOrEnd;
        if self.open.is_empty() { Step::Last } else { Step::More }
    }
}

/// An object with `name` and `arguments` (or `parameters`), after its opening brace. Other keys are skipped. Arguments may be an
/// object, the text of one in a string, or missing.
#[derive(Default)]
pub(super) struct JsonCall {
    at: Field,
    name: String,
    named: bool,
    started: bool,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
}

#[derive(Default)]
enum Field {
    /// Before a key; `}` may stand here.
    #[default]
    First,
    Key,
    InKey(Unescape, String),
    Colon(Kind),
    Value(Kind),
    Name(Unescape),
    Arguments(Scanner),
    /// Arguments in a string, and whether they are complete.
    Quoted(Unescape, Scanner, bool),
    Skipped(Scanner),
    CommaOrEnd,
}

#[derive(Clone, Copy)]
enum Kind {
    Name,
    Arguments,
    Other,
}

impl JsonCall {
    pub fn step(&mut self, c: char, out: &mut Out) -> Result<Progress, NotACall> {
        match &mut self.at {
            Field::First | Field::Key | Field::Colon(_) | Field::Value(_) | Field::CommaOrEnd if c.is_whitespace() => {}
            Field::First | Field::Key if c == '"' => self.at = Field::InKey(Unescape::default(), String::new()),
            Field::InKey(unescape, key) => match unescape.step(c)? {
                Read::Nothing => {}
                Read::Char(c) => key.push(c),
                Read::End => {
                    self.at = Field::Colon(match &**key {
                        "name" if !self.named => Kind::Name,
                        "arguments" | "parameters" if !self.has_arguments => Kind::Arguments,
                        _ => Kind::Other,
                    });
                }
            },
            Field::Colon(kind) if c == ':' => self.at = Field::Value(*kind),
            Field::Value(kind) => {
                let kind = *kind;
                return self.value(kind, c, out);
            }
            Field::Name(unescape) => match unescape.step(c)? {
                Read::Nothing => {}
                Read::Char(c) => self.name.push(c),
                Read::End if self.name.trim().is_empty() => return Err(NotACall),
                Read::End => {
                    self.named = true;
                    if self.has_arguments {
                        self.start(out);
                    }
                    self.at = Field::CommaOrEnd;
                }
            },
            Field::Arguments(scanner) => {
                let mut text = String::new();
                let last = scanner.copy(c, &mut text)? == Step::Last;
                self.show(&text, out);
                if last {
                    self.at = Field::CommaOrEnd;
                }
            }
            Field::Quoted(..) => self.quoted(c, out)?,
            Field::Skipped(scanner) => match scanner.step(c)? {
                Step::More => {}
                Step::Last => self.at = Field::CommaOrEnd,
                Step::Over => {
                    self.at = Field::CommaOrEnd;
                    return self.step(c, out);
                }
            },
            Field::CommaOrEnd if c == ',' => self.at = Field::Key,
            Field::CommaOrEnd if c == '}' && self.named => {
                if !self.started {
                    self.start(out);
                }
                if !self.has_arguments {
                    out.arguments("{}");
                }
                return Ok(Progress::Whole);
            }
            Field::First | Field::Key | Field::Colon(_) | Field::CommaOrEnd => return Err(NotACall),
        }
        Ok(Progress::More)
    }

    /// The first character of a value.
    fn value(&mut self, kind: Kind, c: char, out: &mut Out) -> Result<Progress, NotACall> {
        self.at = match (kind, c) {
            (Kind::Name, '"') => {
                self.at = Field::Name(Unescape::default());
                return Ok(Progress::More);
            }
            (Kind::Arguments, '{') => Field::Arguments(Scanner::default()),
            (Kind::Arguments, '"') => Field::Quoted(Unescape::default(), Scanner::default(), false),
            (Kind::Arguments, 'n') | (Kind::Other, _) => Field::Skipped(Scanner::default()),
            _ => return Err(NotACall),
        };
        if !matches!(self.at, Field::Skipped(_)) {
            self.has_arguments = true;
            if self.named {
                self.start(out);
            }
        }
        if matches!(self.at, Field::Quoted(..)) { Ok(Progress::More) } else { self.step(c, out) }
    }

    fn quoted(&mut self, c: char, out: &mut Out) -> Result<(), NotACall> {
        let Field::Quoted(unescape, scanner, whole) = &mut self.at else { return Err(NotACall) };
        match unescape.step(c)? {
            Read::Nothing => {}
            Read::Char(c) if *whole && c.is_whitespace() => {}
            Read::Char(_) if *whole => return Err(NotACall),
            Read::Char(c) => {
                if scanner.is_at_start() && !matches!(c, '{' | ' ' | '\n') {
                    return Err(NotACall);
                }
                let mut text = String::new();
                *whole = scanner.copy(c, &mut text)? == Step::Last;
                self.show(&text, out);
            }
            Read::End => {
                // An empty text stands for no arguments.
                if scanner.is_at_start() {
                    self.show("{}", out);
                } else if !*whole {
                    return Err(NotACall);
                }
                self.at = Field::CommaOrEnd;
            }
        }
        Ok(())
    }

    fn start(&mut self, out: &mut Out) {
        self.started = true;
        out.start(self.name.trim(), None);
        out.arguments(&std::mem::take(&mut self.early));
    }

    /// More text of the arguments.
    fn show(&mut self, text: &str, out: &mut Out) {
        if self.started { out.arguments(text) } else { self.early += text }
    }
}
