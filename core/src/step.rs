//! The per-step integers: one u32 buffer that every op of a step reads, written once per step.
//!
//! A [`Bucket`] fixes the sizes of its sections, and so every offset, variant and grid: a step recorded for a bucket is
//! replayed with other integers. Unused entries are padding: tokens with row [`NONE`], chunks of length 0, rows of 0
//! tokens, outputs [`NONE`]. Nothing else is padding.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::tensor::{DType, Tensor};

/// Tokens of one KV page, of one prefix-tree node and of the longest chunk: one number everywhere.
pub const PAGE: usize = 64;
/// "No such thing" in any integer of a step: the row of a padding token, an unused output.
pub const NONE: u32 = u32::MAX;
/// A chunk's `src`: continue from the previous chunk of the same row.
pub const CARRY: u32 = u32::MAX;
/// Bit set in a token id that says: take the last sampled token of lane `id & !FROM_DEVICE`.
pub const FROM_DEVICE: u32 = 1 << 31;
/// Words of a chunk-table entry: row, start (in the packed batch), len, src slot or [`CARRY`], dst slot (0 = nowhere).
pub const CHUNK_WORDS: usize = 5;
/// Words of a row-table entry: first token, tokens, first chunk, chunks.
pub const ROW_WORDS: usize = 4;

/// Sizes of a step, rounded up so that few distinct steps exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Bucket {
    /// Packed tokens T: a power of two up to 64, then a multiple of 64 (a prefill is not replayed, so its padding
    /// would cost more than a new size does).
    pub tokens: usize,
    /// Sequences R in the batch, a power of two.
    pub rows: usize,
    /// Chunk-table entries C, a power of two.
    pub chunks: usize,
    /// Positions O whose logits are computed, a power of two up to 64, then a multiple of 64.
    pub outputs: usize,
    /// Page-table entries per row, a power of two.
    pub pages: usize,
}

fn round(n: usize) -> usize {
    if n <= PAGE { n.max(1).next_power_of_two() } else { n.next_multiple_of(PAGE) }
}

impl Bucket {
    /// The bucket that holds these counts.
    pub fn holding(tokens: usize, rows: usize, chunks: usize, outputs: usize, pages: usize) -> Self {
        let pow2 = |n: usize| n.max(1).next_power_of_two();
        Self {
            tokens: round(tokens),
            rows: pow2(rows),
            chunks: pow2(chunks),
            outputs: round(outputs),
            pages: pow2(pages),
        }
    }

    /// Word offset of the token ids `[T]`.
    pub const fn ids(&self) -> usize {
        0
    }
    /// Word offset of the absolute positions `[T]`.
    pub const fn positions(&self) -> usize {
        self.tokens
    }
    /// Word offset of each token's row `[T]`, [`NONE`] for padding.
    pub const fn token_row(&self) -> usize {
        2 * self.tokens
    }
    /// Word offset of the chunk table `[C, 5]`.
    pub const fn chunk_table(&self) -> usize {
        3 * self.tokens
    }
    /// Word offset of the row table `[R, 4]`.
    pub const fn row_table(&self) -> usize {
        self.chunk_table() + CHUNK_WORDS * self.chunks
    }
    /// Word offset of the output tokens `[O]`: index into the packed tokens, [`NONE`] for padding.
    pub const fn output_token(&self) -> usize {
        self.row_table() + ROW_WORDS * self.rows
    }
    /// Word offset of the outputs' lanes `[O]`.
    pub const fn output_lane(&self) -> usize {
        self.output_token() + self.outputs
    }
    /// Word offset of the page table `[R, pages]`; unused entries name page 0.
    pub const fn page_table(&self) -> usize {
        self.output_lane() + self.outputs
    }
    /// Words of the whole buffer.
    pub const fn words(&self) -> usize {
        self.page_table() + self.rows * self.pages
    }
}

/// The integers of the step being recorded, as ops receive them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step<Buf> {
    /// `[words] u32`, laid out as `bucket` says.
    pub ints: Tensor<Buf>,
    /// The sizes that fix every offset.
    pub bucket: Bucket,
}

impl<Buf: Clone> Step<Buf> {
    /// A step over the first words of `buf`.
    pub fn new(buf: Buf, bucket: Bucket) -> Self {
        Self { ints: Tensor::new(buf, DType::U32, &[bucket.words()]), bucket }
    }
}

/// One sequence's share of a step: its tokens, consecutive in the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Index of the sequence among those that run; names its sampling parameters and its last sampled id.
    pub lane: u32,
    /// Absolute position of the first token.
    pub first_position: u32,
    /// The tokens to compute, at least one.
    pub tokens: Vec<TokenRef>,
    /// The tokens cut at the grid, in order: their lengths add up to the number of tokens. Empty for a model without
    /// recurrent state.
    pub chunks: Vec<Chunk>,
    /// The sequence's pages from position 0 on, at least those of the row; empty for a model without attention. Shared
    /// with the sequence, which copies the list before it changes an entry.
    pub pages: Arc<Vec<u32>>,
    /// Tokens (relative to the row) whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
}

impl Row {
    /// Position after the last token.
    pub fn end(&self) -> usize {
        self.first_position as usize + self.tokens.len()
    }

    /// Tokens that are guesses.
    pub fn drafts(&self) -> usize {
        self.tokens.iter().filter(|token| matches!(token, TokenRef::Draft(_))).count()
    }

    /// The row's page table: the pages of positions `0 .. end`.
    pub fn page_table(&self) -> &[u32] {
        &self.pages[..self.pages.len().min(self.end().div_ceil(PAGE))]
    }
}

impl AsRef<Row> for Row {
    fn as_ref(&self) -> &Row {
        self
    }
}

/// Where a token's id comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRef {
    /// The id.
    Known(u32),
    /// The last sampled token of this lane, which the host has not read yet.
    FromDevice(u32),
    /// A guess of this id, which the step verifies. All later tokens of its row are guesses too.
    Draft(u32),
}

/// A run of at most 64 tokens of one row that does not cross a multiple of 64 of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens, at least 1.
    pub len: u32,
    /// State to start from. A slot only in the row's first chunk.
    pub src: Src,
    /// Slot that receives the state after the last token; 0 = nowhere.
    pub dst: u32,
}

/// Where a chunk's state comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    /// A slot; 0 is the state before the first token.
    Slot(u32),
    /// The row's previous chunk.
    Carry,
}

/// The bucket that holds `rows`.
pub fn bucket_of(rows: &[impl AsRef<Row>]) -> Bucket {
    let rows = || rows.iter().map(AsRef::as_ref);
    let sum = |f: fn(&Row) -> usize| rows().map(f).sum();
    let pages = rows().map(|r| r.page_table().len()).max().unwrap_or(0);
    Bucket::holding(sum(|r| r.tokens.len()), rows().len(), sum(|r| r.chunks.len()), sum(|r| r.outputs.len()), pages)
}

/// Writes `rows` in the layout of `bucket`.
pub fn encode(rows: &[impl AsRef<Row>], bucket: Bucket) -> Vec<u32> {
    let mut w = vec![0u32; bucket.words()];
    w[bucket.token_row()..bucket.token_row() + bucket.tokens].fill(NONE);
    w[bucket.output_token()..bucket.output_token() + bucket.outputs].fill(NONE);
    let (mut token, mut chunk, mut output) = (0, 0, 0);
    for (r, row) in rows.iter().map(AsRef::as_ref).enumerate() {
        let at = bucket.row_table() + r * ROW_WORDS;
        w[at..at + ROW_WORDS].copy_from_slice(&[
            token as u32,
            row.tokens.len() as u32,
            chunk as u32,
            row.chunks.len() as u32,
        ]);
        let mut start = token as u32;
        for c in &row.chunks {
            let src = match c.src {
                Src::Slot(slot) => slot,
                Src::Carry => CARRY,
            };
            let at = bucket.chunk_table() + chunk * CHUNK_WORDS;
            w[at..at + CHUNK_WORDS].copy_from_slice(&[r as u32, start, c.len, src, c.dst]);
            start += c.len;
            chunk += 1;
        }
        debug_assert!(row.chunks.is_empty() || start as usize == token + row.tokens.len());
        for &o in &row.outputs {
            w[bucket.output_token() + output] = token as u32 + o;
            w[bucket.output_lane() + output] = row.lane;
            output += 1;
        }
        let (at, table) = (bucket.page_table() + r * bucket.pages, row.page_table());
        w[at..at + table.len()].copy_from_slice(table);
        for (i, &id) in row.tokens.iter().enumerate() {
            w[bucket.ids() + token] = match id {
                TokenRef::Known(id) | TokenRef::Draft(id) => id,
                TokenRef::FromDevice(lane) => FROM_DEVICE | lane,
            };
            w[bucket.positions() + token] = row.first_position + i as u32;
            w[bucket.token_row() + token] = r as u32;
            token += 1;
        }
    }
    w
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_two_rows_with_padding() {
        let rows = [
            Row {
                lane: 3,
                first_position: 60,
                tokens: [7, 8, 9, 10, 11].map(TokenRef::Known).to_vec(),
                chunks: vec![Chunk { len: 4, src: Src::Slot(2), dst: 5 }, Chunk { len: 1, src: Src::Carry, dst: 6 }],
                pages: vec![4, 9].into(),
                outputs: vec![4],
            },
            Row {
                lane: 1,
                first_position: 0,
                tokens: vec![TokenRef::FromDevice(1)],
                chunks: vec![Chunk { len: 1, src: Src::Slot(0), dst: 1 }],
                // One page more than the row reads.
                pages: vec![2, 7].into(),
                outputs: vec![0],
            },
        ];
        let b = bucket_of(&rows);
        assert_eq!(b, Bucket { tokens: 8, rows: 2, chunks: 4, outputs: 2, pages: 2 });
        let w = encode(&rows, b);
        assert_eq!(w.len(), b.words());
        assert_eq!(w[b.ids()..][..8], [7, 8, 9, 10, 11, FROM_DEVICE | 1, 0, 0]);
        assert_eq!(w[b.positions()..][..8], [60, 61, 62, 63, 64, 0, 0, 0]);
        assert_eq!(w[b.token_row()..][..8], [0, 0, 0, 0, 0, 1, NONE, NONE]);
        assert_eq!(w[b.chunk_table()..][..20], [0, 0, 4, 2, 5, 0, 4, 1, CARRY, 6, 1, 5, 1, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(w[b.row_table()..][..8], [0, 5, 0, 2, 5, 1, 2, 1]);
        assert_eq!(w[b.output_token()..][..2], [4, 5]);
        assert_eq!(w[b.output_lane()..][..2], [3, 1]);
        assert_eq!(w[b.page_table()..], [4, 9, 2, 0]);
    }

    #[test]
    fn buckets_round_up() {
        let b = Bucket::holding(300, 3, 5, 0, 33);
        assert_eq!(b, Bucket { tokens: 320, rows: 4, chunks: 8, outputs: 1, pages: 64 });
    }
}
