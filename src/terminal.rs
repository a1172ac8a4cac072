//! Results go to standard output, everything else to standard error. Text from models and files is escaped, so that it cannot
//! control the terminal.

use std::{
    borrow::Cow,
    fmt::Display,
    io::{self, IsTerminal, Write},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

pub use selkie_core::units::size;

use crate::failure::{Failure, Outcome};
use wrap::Wrap;

mod wrap;

/// Set by `--quiet`.
static QUIET: AtomicBool = AtomicBool::new(false);
/// How long something may take before a line says what is being waited for.
const PATIENCE: Duration = Duration::from_millis(700);

/// Writes results.
pub struct Output {
    stdout: io::Stdout,
    terminal: bool,
    /// Breaks lines between words.
    wrap: Option<Wrap>,
}

impl Output {
    /// The process's standard output.
    pub fn new() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Self { stdout, terminal, wrap: None }
    }

    /// The same for prose that comes in pieces: on a terminal, lines break between words. [`Output::end`] ends it.
    pub fn prose() -> Self {
        let out = Self::new();
        let wrap = out.terminal.then(Wrap::default);
        Self { wrap, ..out }
    }

    /// Whether a person looks at it.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Ends prose, on a line of its own.
    pub fn end(&mut self) -> Outcome {
        let rest = self.wrap.as_mut().map(|wrap| wrap.finish(width())).unwrap_or_default();
        self.write(&rest)
    }

    /// Writes and flushes text that may come from a model or a file.
    pub fn text(&mut self, text: &str) -> Outcome {
        let text = if self.terminal { visible(text) } else { Cow::Borrowed(text) };
        match &mut self.wrap {
            Some(wrap) => {
                let broken = wrap.push(&text, width());
                self.write(&broken)
            }
            None => self.write(&text),
        }
    }

    fn write(&mut self, text: &str) -> Outcome {
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

/// From now on, leaves out notes that the user did not request.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether notes that the user did not request are left out.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Like [`note`], but not with `--quiet`.
pub fn hint(text: impl Display) {
    if !is_quiet() {
        note(text);
    }
}

/// Like [`hint`], dimmed if the terminal supports it.
pub fn dim_note(text: impl Display) {
    if is_quiet() {
        return;
    }
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

/// Columns of the terminal on standard output.
fn width() -> usize {
    terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0))
}

/// A line on a terminal that says what is being waited for. It appears after [`PATIENCE`] and goes when this is dropped.
pub struct Stage(Option<(Sender<()>, JoinHandle<()>)>);

impl Stage {
    /// Begins to wait.
    pub fn begin(what: String) -> Self {
        if is_quiet() || !colours() {
            return Self(None);
        }
        let (ready, wait) = channel();
        let show = move || {
            if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let _ = write!(io::stderr(), "\x1b[2m{}\x1b[0m", visible(&what));
                let _ = wait.recv();
                let _ = write!(io::stderr(), "\r\x1b[K");
            }
        };
        Self(thread::Builder::new().name("stage".into()).spawn(show).ok().map(|thread| (ready, thread)))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some((ready, thread)) = self.0.take() {
            drop(ready);
            let _ = thread.join();
        }
    }
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

/// A number, rounded, with thousands separators: `1,312`.
pub fn thousands(n: f64) -> String {
    selkie_core::units::thousands(n.round() as usize)
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
    fn rates_are_rounded() {
        assert_eq!(thousands(999.6), "1,000");
        assert_eq!(thousands(12.0), "12");
    }
}
