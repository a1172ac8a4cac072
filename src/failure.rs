//! The reasons for which the program ends early, with their exit codes.

use std::{io, sync::Arc};

use selkie_core::Error;

/// A reason to stop. The message is written for the person at the terminal.
#[derive(Debug)]
pub enum Failure {
    /// The engine's error: exit code 1.
    Engine(Error),
    /// The same of an error that ended several requests: exit code 1.
    Shared(Arc<Error>),
    /// Another failed operation: exit code 1.
    Other(String),
    /// The command line is invalid: exit code 2.
    Usage(String),
    /// A signal asked the program to stop.
    Stopped {
        /// The exit code, 128 and the number of the signal.
        code: u8,
        /// The message.
        why: String,
    },
    /// The failure was already reported: exit code 1.
    Reported,
    /// The reader of standard output is gone: not an error, no message.
    OutputClosed,
}

/// Result of the subcommands.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failed write to standard output.
    pub fn output(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Other(format!("standard output: {e}")),
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Engine(_) | Self::Shared(_) | Self::Other(_) | Self::Reported => 1,
            Self::Usage(_) => 2,
            Self::Stopped { code, .. } => *code,
            Self::OutputClosed => 0,
        }
    }

    /// The message for the user, if there is one.
    pub fn message(&self) -> Option<String> {
        match self {
            Self::Engine(e) => Some(advised(e)),
            Self::Shared(e) => Some(advised(e)),
            Self::Other(text) | Self::Usage(text) | Self::Stopped { why: text, .. } => Some(text.clone()),
            Self::Reported | Self::OutputClosed => None,
        }
    }
}

/// The fault of JSON text, without the parser's names for numbers and lists.
pub fn json_error(e: &serde_json::Error) -> String {
    let text = e.to_string();
    // The text before it may quote the input.
    let Some((found, expected)) = text.rsplit_once(", expected ") else { return text };
    let (name, rest) = expected.split_once(" at line ").unwrap_or((expected, ""));
    let name = match name {
        "usize" | "u64" => "a whole number, 0 or more",
        "u32" => "a whole number from 0 to 4294967295",
        "f32" => "a number",
        "a sequence" => "a list",
        other => other,
    };
    let place = if rest.is_empty() { String::new() } else { format!(" at line {rest}") };
    format!("{found}, expected {name}{place}")
}

/// The error with its remedy.
fn advised(e: &Error) -> String {
    match advice(e) {
        Some(advice) => format!("{e}; {advice}"),
        None => e.to_string(),
    }
}

/// The remedy for errors whose message has none, in terms of this program's options.
fn advice(e: &Error) -> Option<&'static str> {
    match e {
        Error::OutOfMemory { .. } => Some(
            "ask for less (--slots, --kv-pages, --max-batch, --step-tokens, --context) or, if --memory is the limit, raise it",
        ),
        Error::NoDevice { .. } => Some("`selkie devices` lists what there is"),
        _ => None,
    }
}

impl From<Arc<Error>> for Failure {
    fn from(e: Arc<Error>) -> Self {
        Arc::try_unwrap(e).map_or_else(Self::Shared, Self::Engine)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Engine(e)
    }
}
