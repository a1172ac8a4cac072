//! Calls in Kimi's sections: `functions.NAME:0<|tool_call_argument_begin|>{…}`, after `<|tool_call_begin|>`.

use super::{
    NotACall, Out, Piece, Progress,
    format::Mark,
    json::{Scanner, Step},
};

/// A call after `<|tool_call_begin|>`.
#[derive(Default)]
pub(super) struct KimiCall {
    id: String,
    arguments: Option<Scanner>,
}

impl KimiCall {
    pub fn expects(&self, mark: Mark) -> bool {
        mark == Mark::KimiArguments && self.arguments.is_none()
    }

    pub fn step(&mut self, piece: Piece, out: &mut Out) -> Result<Progress, NotACall> {
        match (piece, &mut self.arguments) {
            (Piece::Char('<' | '\n'), None) => return Err(NotACall),
            (Piece::Char(c), None) => self.id.push(c),
            (Piece::Mark(Mark::KimiArguments), arguments @ None) => *arguments = Some(Scanner::default()),
            (Piece::Char(c), Some(scanner)) if scanner.is_at_start() && c.is_whitespace() => {}
            (Piece::Char(c), Some(scanner)) => {
                if scanner.is_at_start() {
                    let id = self.id.trim();
                    let name =
                        id.rsplit_once(':').filter(|(_, n)| n.parse::<u32>().is_ok()).map_or(id, |(name, _)| name);
                    let name = name.strip_prefix("functions.").unwrap_or(name);
                    if c != '{' || name.is_empty() {
                        return Err(NotACall);
                    }
                    out.start(name, Some(id));
                }
                let mut text = String::new();
                let step = scanner.copy(c, &mut text)?;
                out.arguments(&text);
                if step == Step::Last {
                    return Ok(Progress::Whole);
                }
            }
            (Piece::Mark(_), _) => return Err(NotACall),
        }
        Ok(Progress::More)
    }
}
