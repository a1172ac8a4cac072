//! One error type for the whole engine. Libraries never print: the command line decides how an error is shown.

use std::path::PathBuf;

/// Result of every fallible call in selkie.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and (in the message) what to do about it.
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
        /// The file that holds the fault, as the user named it.
        file: String,
        /// What is wrong with it and what to do.
        why: String,
    },
    /// A request or an option that cannot be served.
    #[error("{0}")]
    BadRequest(String),
    /// A well-formed model or op that this version or backend does not implement.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The op, family, dtype or feature.
        what: String,
        /// Why, and what is supported instead.
        why: String,
    },
    /// No logit of a token is a finite number, so there is nothing to choose from.
    #[error(
        "the model's logits are not finite: a weight or the configuration is damaged; compare the files with their source, or download them again"
    )]
    NotFinite,
    /// An allocation that does not fit.
    #[error("not enough memory for {what}: {asked} bytes asked, {free} bytes free")]
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
    /// No usable device for a backend that was asked for by name.
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
