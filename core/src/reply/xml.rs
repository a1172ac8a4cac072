//! Calls as XML: `NAME><parameter=KEY>VALUE</parameter></function>`, after `<function=`.

use super::{
    NotACall, Out, Piece, Progress,
    format::Mark,
    schema::{Tools, Types},
    text::{escape, quoted},
};

/// Longest name of a tool or of a parameter, in bytes.
const MAX_NAME: usize = 256;

/// A call after `<function=`.
#[derive(Default)]
pub(super) struct XmlCall {
    at: At,
    name: String,
    parameters: usize,
    /// There is no tag around it: only a known tool makes it a call.
    pub bare: bool,
}

#[derive(Default)]
enum At {
    #[default]
    Name,
    Between,
    Key(String),
    Value(Value),
}

/// The value of a parameter. The line feed after its tag and the one before its closing tag are not part of it.
struct Value {
    types: Types,
    begun: bool,
    /// A line feed that is shown only if more follows.
    line: bool,
    /// A value whose type is chosen at its end.
    text: String,
}

impl XmlCall {
    pub fn step(&mut self, piece: Piece, tools: &Tools, out: &mut Out) -> Result<Progress, NotACall> {
        match (&mut self.at, piece) {
            (At::Name, Piece::Char('>')) => {
                self.name = self.name.trim().to_owned();
                if self.name.is_empty() || (self.bare && !tools.has(&self.name)) {
                    return Err(NotACall);
                }
                out.start(&self.name, None);
                out.arguments("{");
                self.at = At::Between;
            }
            (At::Name, Piece::Char(c)) if name_goes_on(&self.name, c) => self.name.push(c),
            (At::Between, Piece::Char(c)) if c.is_whitespace() => {}
            // A second closing tag.
            (At::Between, Piece::Mark(Mark::ParameterEnd)) => {}
            (At::Between, Piece::Mark(Mark::Parameter)) => self.at = At::Key(String::new()),
            (At::Between | At::Value(_), Piece::Mark(Mark::FunctionEnd)) => {
                self.value_ends(out);
                out.arguments("}");
                return Ok(Progress::Whole);
            }
            (At::Key(key), Piece::Char('>')) => {
                let key = key.trim().to_owned();
                if key.is_empty() {
                    return Err(NotACall);
                }
                let types = tools.types(&self.name, &key);
                let comma = if self.parameters > 0 { ", " } else { "" };
                let quote = if types.is_text() { "\"" } else { "" };
                out.arguments(&format!("{comma}{}: {quote}", quoted(&key)));
                self.parameters += 1;
                self.at = At::Value(Value { types, begun: false, line: false, text: String::new() });
            }
            (At::Key(key), Piece::Char(c)) if name_goes_on(key, c) => key.push(c),
            (At::Value(value), Piece::Char(c)) => value.push(c, out),
            (At::Value(_), Piece::Mark(Mark::ParameterEnd)) => self.value_ends(out),
            // The closing tag was forgotten.
            (At::Value(_), Piece::Mark(Mark::Parameter)) => {
                self.value_ends(out);
                self.at = At::Key(String::new());
            }
            _ => return Err(NotACall),
        }
        Ok(Progress::More)
    }

    /// The answer ended; whether the call is complete but for its closing tag.
    pub fn finish(&mut self, out: &mut Out) -> bool {
        let whole = matches!(self.at, At::Between) && self.parameters > 0;
        if whole {
            out.arguments("}");
            out.end();
        }
        whole
    }

    fn value_ends(&mut self, out: &mut Out) {
        if let At::Value(value) = std::mem::replace(&mut self.at, At::Between) {
            out.arguments(&if value.types.is_text() { "\"".into() } else { value.types.json(&value.text) });
        }
    }
}

/// Names end at `>`; a line feed or another tag shows that this is none.
fn name_goes_on(name: &str, c: char) -> bool {
    c != '\n' && c != '<' && name.len() < MAX_NAME
}

impl Value {
    fn push(&mut self, c: char, out: &mut Out) {
        if c == '\n' && !self.begun {
            self.begun = true;
            return;
        }
        self.begun = true;
        if self.line {
            self.show('\n', out);
        }
        self.line = c == '\n';
        if !self.line {
            self.show(c, out);
        }
    }

    fn show(&mut self, c: char, out: &mut Out) {
        if self.types.is_text() {
            let mut text = String::new();
            escape(c, &mut text);
            out.arguments(&text);
        } else {
            self.text.push(c);
        }
    }
}
