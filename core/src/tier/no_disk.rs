//! A page has no directory: there is no tier of files.

use futures_channel::oneshot;

use super::{DiskOptions, Name, Value, Wanted};
use crate::error::{Error, Result};

/// Never there.
#[derive(Debug)]
pub enum Disk {}

/// Never there.
pub type Loading = oneshot::Receiver<Vec<(Name, Value)>>;

impl Disk {
    /// Fails.
    ///
    /// # Errors
    /// Always.
    pub fn open(options: &DiskOptions, _numerics: &str, _most_queued: u64) -> Result<Self> {
        Err(Error::Unsupported {
            what: format!("a disk cache in {}", options.dir.display()),
            why: "a browser has no directories".into(),
        })
    }

    /// Never called.
    pub fn has(&self, _: &Name) -> bool {
        match *self {}
    }

    /// Never called.
    pub fn store(&self, _: Name, _: Value) {
        match *self {}
    }

    /// Never called.
    pub fn flush(&self) {
        match *self {}
    }

    /// Never called.
    pub fn load(&self, _: Vec<Wanted>) -> Loading {
        match *self {}
    }

    /// Never called.
    pub fn clear(&self) {
        match *self {}
    }

    /// Never called.
    pub fn rate(&self) -> Option<f64> {
        match *self {}
    }

    /// Never called.
    pub fn size(&self) -> (usize, u64) {
        match *self {}
    }
}
