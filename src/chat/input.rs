//! Messages from a terminal or a pipe.

use std::{
    borrow::Cow,
    io::{self, BufRead, IsTerminal},
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustyline::{
    Cmd, Context, Editor, Event, Helper, KeyCode, KeyEvent, Modifiers,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::DefaultHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};
use selkie_core::tokenizer::MAX_TEXT_BYTES;

use super::command;
use crate::{
    failure::{Failure, Outcome},
    terminal,
};

/// Set by Ctrl-C while an answer is being generated.
pub static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Longest message in bytes that the history keeps. A longer one was pasted, and would fill the screen on every search.
const MAX_REMEMBERED: usize = 2000;
/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Where the user's messages come from.
pub enum Input {
    /// A terminal.
    Editor {
        /// With the user's keys.
        editor: Box<Editor<Keys, DefaultHistory>>,
        /// Its file.
        history: Option<PathBuf>,
    },
    /// Lines of a pipe or a file.
    Plain(io::StdinLock<'static>),
}

impl Input {
    /// Standard input.
    ///
    /// # Errors
    /// If the terminal cannot be used.
    pub fn new() -> Outcome<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Plain(io::stdin().lock()));
        }
        let failed = |e: &dyn std::fmt::Display| Failure::Other(format!("the terminal: {e}"));
        signal_hook::flag::register(signal_hook::consts::SIGINT, INTERRUPTED.clone()).map_err(|e| failed(&e))?;
        let mut editor = Box::new(Editor::<Keys, DefaultHistory>::new().map_err(|e| failed(&e))?);
        editor.set_helper(Some(Keys));
        editor.bind_sequence(Event::from(KeyEvent(KeyCode::Enter, Modifiers::ALT)), Cmd::Newline);
        let history = history_file();
        if let Some(path) = &history
            && let Err(e) = editor.load_history(path)
        {
            tracing::debug!("no history: {}: {e}", path.display());
        }
        Ok(Self::Editor { editor, history })
    }

    /// Whether a person types.
    pub fn is_interactive(&self) -> bool {
        matches!(self, Self::Editor { .. })
    }

    /// The next message; `None` at the end of the input.
    ///
    /// # Errors
    /// If the input cannot be read.
    pub fn message(&mut self) -> Outcome<Option<String>> {
        match self {
            Self::Plain(from) => {
                let message = plain(from).map_err(|e| Failure::Other(format!("standard input: {e}")))?;
                Ok(message.map(|m| joined(&m).into_owned()))
            }
            Self::Editor { editor, history } => loop {
                INTERRUPTED.store(false, Ordering::Relaxed);
                match editor.readline("> ") {
                    Ok(text) => {
                        remember(editor, history.as_deref(), &text);
                        return Ok(Some(joined(&text).into_owned()));
                    }
                    Err(ReadlineError::Interrupted) => terminal::note("Ctrl-D or /exit leaves."),
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(Failure::Other(format!("the terminal: {e}"))),
                }
            },
        }
    }
}

/// Whether a message continues in the next line: after a backslash, and between triple quotes.
fn goes_on(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => !rest.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message without the marks that joined its lines.
fn joined(text: &str) -> Cow<'_, str> {
    if let Some(rest) = text.trim_start().strip_prefix(QUOTES) {
        let inner = rest.split(QUOTES).next().unwrap_or(rest);
        return Cow::Borrowed(inner.trim_matches('\n'));
    }
    let text = text.strip_suffix('\\').unwrap_or(text);
    if text.contains("\\\n") { Cow::Owned(text.replace("\\\n", "\n")) } else { Cow::Borrowed(text) }
}

/// A message of one or more lines.
fn plain(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let Some(mut message) = plain_line(&mut *from, 0)? else { return Ok(None) };
    while goes_on(&message) {
        let Some(line) = plain_line(&mut *from, message.len())? else { break };
        message = message + "\n" + &line;
    }
    Ok(Some(message))
}

/// A line without its end, of a length that can be a message after `before` bytes.
fn plain_line(from: impl BufRead, before: usize) -> io::Result<Option<String>> {
    let most = MAX_TEXT_BYTES.saturating_sub(before) as u64;
    let mut line = Vec::new();
    if from.take(most + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.len() as u64 > most {
        let why = format!("more than {} are too long for a message", terminal::size(MAX_TEXT_BYTES as u64));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    let text = String::from_utf8(line).map_err(|e| {
        let why = format!("not UTF-8 from byte {} of a line on", e.utf8_error().valid_up_to());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Ok(Some(text.strip_suffix('\r').unwrap_or(text).to_owned()))
}

/// The history is a convenience, so errors are ignored.
fn remember(editor: &mut Editor<Keys, DefaultHistory>, history: Option<&Path>, text: &str) {
    let kept = !text.trim().is_empty() && text.len() <= MAX_REMEMBERED;
    if !kept || !editor.add_history_entry(text).unwrap_or(false) {
        return;
    }
    if let Some(path) = history
        && let Err(e) = editor.save_history(path)
    {
        tracing::debug!("the history is not kept: {}: {e}", path.display());
    }
}

/// `selkie/history` in the user's directory for program state, which is created if necessary.
fn history_file() -> Option<PathBuf> {
    // The specification of these variables says that relative paths must be ignored.
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = if cfg!(windows) {
        var("LOCALAPPDATA")?
    } else {
        var("XDG_STATE_HOME").or_else(|| Some(var("HOME")?.join(".local/state")))?
    };
    let dir = state.join("selkie");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("history"))
}

/// The actions of Enter and Tab in the editor.
pub struct Keys;

impl Helper for Keys {}
impl Highlighter for Keys {}

impl Hinter for Keys {
    type Hint = String;
}

impl Validator for Keys {
    fn validate(&self, ctx: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(if goes_on(ctx.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Keys {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok((0, command::completions(&line[..at])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: &str) -> Vec<String> {
        let mut from = input.as_bytes();
        let mut all = Vec::new();
        while let Some(message) = plain(&mut from).unwrap() {
            all.push(joined(&message).into_owned());
        }
        all
    }

    #[test]
    fn lines_are_joined_by_a_backslash_or_triple_quotes() {
        assert_eq!(messages("one\ntwo\r\n"), ["one", "two"]);
        assert_eq!(messages("one\\\ntwo\\\nthree\nfour\n"), ["one\ntwo\nthree", "four"]);
        assert_eq!(messages("\"\"\"\none\n\ntwo\n\"\"\"\nthree"), ["one\n\ntwo", "three"]);
        assert_eq!(messages("\"\"\"one\"\"\"\n"), ["one"]);
        assert_eq!(messages("say \"\"\" twice\n"), ["say \"\"\" twice"]);
        // The input ends before the message does.
        assert_eq!(messages("\"\"\"\none"), ["one"]);
        assert_eq!(messages("one\\"), ["one"]);
    }
}
