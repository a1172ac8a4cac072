//! Strings of JSON, character by character.

use super::NotACall;

/// Appends `c` as it stands in a string of JSON.
pub(super) fn escape(c: char, out: &mut String) {
    match c {
        '"' => *out += "\\\"",
        '\\' => *out += "\\\\",
        '\n' => *out += "\\n",
        '\r' => *out += "\\r",
        '\t' => *out += "\\t",
        c if c < ' ' => *out += &format!("\\u{:04x}", c as u32),
        c => out.push(c),
    }
}

/// `text` as a string of JSON.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    text.chars().for_each(|c| escape(c, &mut out));
    out.push('"');
    out
}

/// Hexadecimal digits of an escape.
#[derive(Clone, Copy, Default)]
pub(super) struct Hex {
    pub left: u8,
    pub value: u32,
}

impl Hex {
    pub fn new(digits: u8) -> Self {
        Self { left: digits, value: 0 }
    }

    /// Whether that was the last one.
    pub fn step(&mut self, c: char) -> Result<bool, NotACall> {
        self.value = self.value << 4 | c.to_digit(16).ok_or(NotACall)?;
        self.left -= 1;
        Ok(self.left == 0)
    }
}

/// Reads a string of JSON after its opening quote. Control characters may stand in it as they are.
#[derive(Default)]
pub(super) struct Unescape {
    state: Escape,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

#[derive(Default)]
enum Escape {
    #[default]
    None,
    Begun,
    Hex(Hex),
}

/// A character of a string, or its end.
pub(super) enum Read {
    Nothing,
    Char(char),
    End,
}

impl Unescape {
    pub fn step(&mut self, c: char) -> Result<Read, NotACall> {
        let read = match &mut self.state {
            Escape::None if c == '"' => Read::End,
            Escape::None if c == '\\' => {
                self.state = Escape::Begun;
                return Ok(Read::Nothing);
            }
            Escape::None => Read::Char(c),
            Escape::Begun => Read::Char(match c {
                '"' | '\\' | '/' => c,
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    self.state = Escape::Hex(Hex::new(4));
                    return Ok(Read::Nothing);
                }
                _ => return Err(NotACall),
            }),
            Escape::Hex(hex) => {
                if !hex.step(c)? {
                    return Ok(Read::Nothing);
                }
                let value = hex.value;
                self.state = Escape::None;
                return self.unit(value);
            }
        };
        self.state = Escape::None;
        // A half alone is no character.
        if self.high.is_some() { Err(NotACall) } else { Ok(read) }
    }

    /// A unit of UTF-16.
    fn unit(&mut self, unit: u32) -> Result<Read, NotACall> {
        let code = match (self.high.take(), unit) {
            (None, 0xd800..=0xdbff) => {
                self.high = Some(unit);
                return Ok(Read::Nothing);
            }
            (Some(high), 0xdc00..=0xdfff) => 0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00),
            (None, unit) => unit,
            (Some(_), _) => return Err(NotACall),
        };
        char::from_u32(code).map(Read::Char).ok_or(NotACall)
    }
}
