//! One error type for the whole engine. Libraries never print: the command line decides how an error is shown.

use std::{path::PathBuf, sync::Arc};

use crate::units::size;

/// Result of every fallible call in selkie.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure: what is wrong, where, and (in the message) a remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A model directory, configuration, tensor file, tokenizer or template is wrong.
    #[error("{file}: {why}")]
    BadModel {
        /// The file with the fault, as the user named it.
        file: String,
        /// What is wrong with it and what to do.
        why: String,
    },
    /// A request or an option that cannot be served.
    #[error("{0}")]
    BadRequest(String),
    /// A prompt that does not fit into the context, or not together with its answer.
    #[error("{why}")]
    TooLong {
        /// The lengths.
        why: String,
        /// Tokens of the prompt, of its answer at most, and of what fits of both, if the prompt was tokenised.
        tokens: Option<(usize, usize, usize)>,
    },
    /// A well-formed model or op that this version or backend does not implement.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The op, family, dtype or feature.
        what: String,
        /// The reason, and the supported alternatives.
        why: String,
    },
    /// No logit of a token is a finite number, so there is nothing to choose from.
    #[error(
        "the model's logits are not finite: a weight file or config.json is damaged; compare the files with their source, or download them again"
    )]
    NotFinite,
    /// An allocation that does not fit.
    #[error("not enough memory for {what}: {} asked, {} free", size(*asked), size(*free))]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that were free, as far as the backend can tell.
        free: u64,
    },
    /// A kernel or shader that did not compile.
    #[error("{label} did not compile:\n{log}")]
    Compile {
        /// File and variant.
        label: String,
        /// The compiler's log.
        log: String,
    },
    /// The device failed; names the op where it is known.
    #[error("device error in {op}: {why}")]
    Device {
        /// The op being recorded, run or read.
        op: String,
        /// The driver's reason.
        why: String,
    },
    /// The engine panicked. It is a bug; nothing that it held can be used.
    #[error("the engine panicked: {0}; this is a bug in selkie, please report it, and load the model again")]
    Panicked(String),
    /// The engine has ended, so it takes no requests.
    #[error("the engine has ended: {0}")]
    Ended(Arc<Error>),
    /// No usable device for a backend that was requested by name.
    #[error("backend {backend} has no usable device: {why}")]
    NoDevice {
        /// Name of the backend.
        backend: &'static str,
        /// Why not.
        why: String,
    },
}

impl Error {
    /// A [`Error::BadModel`] for `file`.
    pub fn model(file: impl Into<String>, why: impl Into<String>) -> Self {
        Self::BadModel { file: file.into(), why: why.into() }
    }

    /// A [`Error::Io`] for `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}
