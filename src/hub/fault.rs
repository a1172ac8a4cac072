//! What goes wrong between a request and its answer.

use std::fmt;

use selkie_core::Error;

/// Why there is no answer, or not the wanted one.
#[derive(Debug)]
pub enum Fault {
    /// There is no connection to this host.
    Unreachable {
        /// The host.
        host: String,
        /// What the system says.
        why: String,
    },
    /// A connection broke.
    Cut(String),
    /// The server's answer is an error.
    Status {
        /// Its number.
        status: u16,
        /// The hub's name for the reason, from `X-Error-Code`.
        code: String,
        /// The server's name.
        host: String,
    },
    /// The file is not the one that was listed.
    Changed(String),
    /// The server says something that is no part of the protocol.
    Nonsense(String),
    /// A file of the cache cannot be written.
    Local(Error),
}

impl Fault {
    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Cut(_) => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            Self::Changed(_) | Self::Nonsense(_) | Self::Local(_) => false,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { host, why } => write!(f, "{host} cannot be reached: {why}"),
            Self::Status { status, code, host } if code.is_empty() => write!(f, "{host} answers {status}"),
            Self::Status { status, code, host } => write!(f, "{host} answers {status} ({code})"),
            Self::Cut(why) | Self::Changed(why) | Self::Nonsense(why) => f.write_str(why),
            Self::Local(e) => e.fmt(f),
        }
    }
}
