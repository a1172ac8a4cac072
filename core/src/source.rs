//! Where a model's bytes come from.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// A counted range of bytes that keeps its owner (a mapped file, a static, a vector) alive.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..owner.as_ref().as_ref().len();
        Self { owner, range }
    }

    /// A part of these bytes; panics if it lies outside.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "bytes {range:?} of {}", self.len());
        let start = self.range.start;
        Self { owner: self.owner.clone(), range: start + range.start..start + range.end }
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.owner.as_ref().as_ref()[self.range.clone()]
    }
}
