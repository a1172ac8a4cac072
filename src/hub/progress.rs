//! What a person sees of a download: a bar on a terminal, and lines that do not damage it.

use std::fmt::Display;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::terminal;

/// The bar of one download after the other; nothing is drawn where there is no terminal.
pub struct Progress(ProgressBar);

impl Progress {
    /// Draws nothing yet.
    pub fn new() -> Self {
        let style = "{bar:30} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left  {msg}";
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        Self(bar.with_style(ProgressStyle::with_template(style).expect("the template is valid")))
    }

    /// A download of so many bytes begins.
    pub fn begin(&self, bytes: u64) {
        self.0.reset();
        self.0.set_length(bytes);
    }

    /// The file that comes now.
    pub fn file(&self, name: &str) {
        self.0.set_message(name.to_owned());
    }

    /// So many bytes came, or came in vain if negative.
    pub fn add(&self, bytes: i64) {
        match u64::try_from(bytes) {
            Ok(bytes) => self.0.inc(bytes),
            Err(_) => self.0.dec(bytes.unsigned_abs()),
        }
    }

    /// The bar goes.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }

    /// A line on stderr.
    pub fn say(&self, text: impl Display) {
        self.0.suspend(|| terminal::note(text));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
