//! Results go to standard output, everything else to standard error. Text from models and files is escaped, so that it cannot
//! control the terminal.

use std::{
    borrow::Cow,
    fmt::Display,
    io::{self, IsTerminal, Write},
};

use crate::failure::{Failure, Outcome};

/// Writes results.
pub struct Output {
    stdout: io::Stdout,
    terminal: bool,
}

impl Output {
    /// The process's standard output.
    pub fn new() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Self { stdout, terminal }
    }

    /// Writes and flushes text that may come from a model or a file.
    pub fn text(&mut self, text: &str) -> Outcome {
        let text = if self.terminal { visible(text) } else { Cow::Borrowed(text) };
        let mut out = self.stdout.lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::output)
    }

    /// Like [`Output::text`], with a line feed.
    pub fn line(&mut self, text: &str) -> Outcome {
        self.text(&format!("{text}\n"))
    }

    /// Writes one JSON value as a line.
    pub fn json(&mut self, value: &serde_json::Value) -> Outcome {
        self.line(&format!("{value:#}"))
    }
}

/// Writes a message to standard error. Errors are ignored: a closed standard error is no reason to stop.
pub fn note(text: impl Display) {
    let text = text.to_string();
    let text = if io::stderr().is_terminal() { visible(&text) } else { Cow::Borrowed(&*text) };
    let _ = writeln!(io::stderr(), "{text}");
}

/// Like [`note`], dimmed if the terminal supports it.
pub fn dim_note(text: impl Display) {
    let text = text.to_string();
    if colours() {
        let _ = writeln!(io::stderr(), "\x1b[2m{}\x1b[0m", visible(&text));
    } else {
        note(text);
    }
}

/// Reports the error that ended the program.
pub fn error(text: impl Display) {
    let text = text.to_string();
    if colours() {
        let _ = writeln!(io::stderr(), "\x1b[1;31merror:\x1b[0m {}", visible(&text));
    } else {
        note(format_args!("error: {text}"));
    }
}

/// Whether standard error is a terminal that shows colours.
pub fn colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
    !refused && !dumb && io::stderr().is_terminal()
}

/// `text` with visible control characters, except line feed and tab. Escape sequences could hide text, rename the window or
/// type input, and marks that reverse the writing direction could disguise text.
pub fn visible(text: &str) -> Cow<'_, str> {
    let harmless = |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || reorders(c));
    if text.chars().all(harmless) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            c if harmless(c) => shown.push(c),
            '\0'..='\x1f' => shown.extend(char::from_u32(0x2400 + c as u32)),
            '\x7f' => shown.push('\u{2421}'),
            c => shown.extend(c.escape_unicode()),
        }
    }
    Cow::Owned(shown)
}

fn reorders(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A number with thousands separators: `1,312`.
pub fn thousands(n: f64) -> String {
    let digits = format!("{n:.0}");
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

/// A size in a readable unit: `13.5 MiB`.
pub fn size(bytes: u64) -> String {
    let mut n = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if n < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{n:.1} {unit}") };
        }
        n /= 1024.0;
    }
    format!("{n:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_shown_and_text_is_left_alone() {
        assert!(matches!(visible("naïve 狐\n\tfox 🦊"), Cow::Borrowed(_)));
        assert_eq!(visible("\x1b[31mred\x07\x7f\r"), "␛[31mred␇␡␍");
        assert_eq!(visible("a\u{9b}31m"), "a\\u{9b}31m");
        assert_eq!(visible("\u{202e}live"), "\\u{202e}live");
    }

    #[test]
    fn numbers() {
        assert_eq!(thousands(999.6), "1,000");
        assert_eq!(thousands(12.0), "12");
        assert_eq!(thousands(1234567.0), "1,234,567");
        assert_eq!(size(100), "100 B");
        assert_eq!(size(13 << 20), "13.0 MiB");
    }
}
