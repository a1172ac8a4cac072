//! The step's integers as the ops read them.

use super::Buf;
use super::view::{self, Rows};
use crate::step::{Bucket, CARRY, CHUNK_WORDS, NONE, ROW_WORDS, Step};

/// A view of a step's integers.
pub(crate) struct Tables<'a> {
    ints: Rows<'a, u32>,
    bucket: Bucket,
}

/// Position of a row's chunks in the chunk table.
#[derive(Clone, Copy)]
pub(crate) struct RowChunks {
    first: usize,
    count: usize,
}

/// An entry of the chunk table.
#[derive(Clone, Copy)]
pub(crate) struct ChunkEntry {
    /// First token in the packed batch.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// Slot to start from; `None` = go on from the chunk before.
    pub src: Option<usize>,
    /// Slot that receives the state; 0 = nowhere.
    pub dst: usize,
}

impl<'a> Tables<'a> {
    /// The tables of a step.
    pub fn of(step: &'a Step<Buf>) -> Self {
        Self { ints: view::read(&step.ints), bucket: step.bucket }
    }

    fn words(&self, at: usize, n: usize) -> &[u32] {
        &self.ints.flat()[at..at + n]
    }

    /// Token ids.
    pub fn ids(&self) -> &[u32] {
        self.words(self.bucket.ids(), self.bucket.tokens)
    }

    /// Absolute positions.
    pub fn positions(&self) -> &[u32] {
        self.words(self.bucket.positions(), self.bucket.tokens)
    }

    /// Row of each token, [`NONE`] for padding.
    pub fn token_row(&self) -> &[u32] {
        self.words(self.bucket.token_row(), self.bucket.tokens)
    }

    /// Whether token `t` is padding.
    pub fn is_padding(&self, t: usize) -> bool {
        self.token_row()[t] == NONE
    }

    /// Token of each output, [`NONE`] for padding.
    pub fn output_token(&self) -> &[u32] {
        self.words(self.bucket.output_token(), self.bucket.outputs)
    }

    /// Lane of each output.
    pub fn output_lane(&self) -> &[u32] {
        self.words(self.bucket.output_lane(), self.bucket.outputs)
    }

    /// Page table of a row.
    pub fn pages(&self, row: usize) -> &[u32] {
        self.words(self.bucket.page_table() + row * self.bucket.pages, self.bucket.pages)
    }

    /// Rows that have tokens.
    pub fn rows(&self) -> impl Iterator<Item = RowChunks> {
        let (rows, _) = self.words(self.bucket.row_table(), ROW_WORDS * self.bucket.rows).as_chunks::<ROW_WORDS>();
        let rows = rows.iter().filter(|[_, tokens, ..]| *tokens > 0);
        rows.map(|[.., first, count]| RowChunks { first: *first as usize, count: *count as usize })
    }

    /// Chunks of a row, without padding.
    pub fn chunks(&self, row: RowChunks) -> impl Iterator<Item = ChunkEntry> {
        let at = self.bucket.chunk_table() + CHUNK_WORDS * row.first;
        let (chunks, _) = self.words(at, CHUNK_WORDS * row.count).as_chunks::<CHUNK_WORDS>();
        chunks.iter().filter(|c| c[2] > 0).map(|&[_, start, len, src, dst]| ChunkEntry {
            start: start as usize,
            len: len as usize,
            src: (src != CARRY).then_some(src as usize),
            dst: dst as usize,
        })
    }
}
