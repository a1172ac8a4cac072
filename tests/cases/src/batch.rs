//! Batches for the cases: rows with their chunks and pages, and the tables as an op finds them.

use std::sync::Arc;

use selkie_core::step::{
    Bucket, CARRY, CHUNK_WORDS, Chunk, NONE, PAGE, ROW_WORDS, Row, Src, TokenRef, bucket_of, encode,
};

/// The rows of one step and the bucket that they are encoded for.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub rows: Vec<Row>,
    pub bucket: Bucket,
}

impl Batch {
    pub fn new(rows: Vec<Row>) -> Self {
        Self { bucket: bucket_of(&rows), rows }
    }

    /// The same rows in a bucket twice as large in every direction.
    pub fn padded(mut self) -> Self {
        let b = self.bucket;
        self.bucket = Bucket::holding(2 * b.tokens, 2 * b.rows, 2 * b.chunks, 2 * b.outputs, 2 * b.pages);
        self
    }

    pub fn words(&self) -> Vec<u32> {
        encode(&self.rows, self.bucket)
    }

    /// Tokens that are not padding.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|r| r.tokens.len()).sum()
    }

    fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.rows.iter().flat_map(|r| &r.chunks)
    }

    /// Slots of a pool that serves the batch, slot 0 and two unused ones included.
    pub fn slots(&self) -> usize {
        let used = self.chunks().map(|c| c.dst.max(source(c).unwrap_or(0))).max();
        used.unwrap_or(0) as usize + 3
    }

    /// Slots that rows start from, slot 0 left out.
    pub fn sources(&self) -> Vec<usize> {
        let mut s: Vec<usize> = self.chunks().filter_map(source).filter(|s| *s != 0).map(|s| s as usize).collect();
        s.sort_unstable();
        s.dedup();
        s
    }

    /// Pages of a pool that serves the batch, page 0 and two unused ones included.
    pub fn pages(&self) -> usize {
        self.rows.iter().flat_map(|r| r.pages.iter()).max().map_or(0, |&p| p as usize) + 3
    }
}

/// The slot that a chunk starts from.
fn source(c: &Chunk) -> Option<u32> {
    match c.src {
        Src::Slot(slot) => Some(slot),
        Src::Carry => None,
    }
}

/// A row whose chunks are `(len, src, dst)`, with `src` as in the chunk table.
pub(super) fn row(first_position: u32, chunks: &[(u32, u32, u32)]) -> Row {
    let src = |src| if src == CARRY { Src::Carry } else { Src::Slot(src) };
    let chunks: Vec<Chunk> = chunks.iter().map(|&(len, s, dst)| Chunk { len, src: src(s), dst }).collect();
    let tokens = chunks.iter().map(|c| c.len).sum();
    Row { first_position, tokens: (0..tokens).map(TokenRef::Known).collect(), chunks, ..Row::default() }
}

/// A row of `tokens` cut on the grid of 64, with one dst per chunk (0 where `dst` ends early).
pub(super) fn cut(first_position: u32, tokens: u32, src: u32, dst: &[u32]) -> Row {
    let (mut at, end, mut chunks) = (first_position, first_position + tokens, vec![]);
    while at < end {
        let next = (at / PAGE as u32 + 1) * PAGE as u32;
        let i = chunks.len();
        let src = if i == 0 { src } else { CARRY };
        chunks.push((next.min(end) - at, src, dst.get(i).copied().unwrap_or(0)));
        at = next;
    }
    row(first_position, &chunks)
}

/// The uses of the chunk table, one property each; every stateful op runs all of them.
pub(super) fn stateful() -> Vec<(&'static str, Batch)> {
    let decode = |n: u32| (0..n).map(|i| row(5 + 61 * i, &[(1, i + 1, i + 1)])).collect::<Vec<_>>();
    let verify = |first: u32, src: u32, dst: &[u32]| {
        let chunks: Vec<_> = dst.iter().enumerate().map(|(i, &d)| (1, if i == 0 { src } else { CARRY }, d)).collect();
        row(first, &chunks)
    };
    let mixed = vec![
        row(130, &[(1, 1, 1)]),
        row(64, &[(1, 2, 3)]),
        verify(61, 4, &[5, 6, 7, 0, 8]),
        cut(0, 150, 0, &[9, 0, 10]),
        cut(100, 30, 4, &[0, 11]),
        row(0, &[(3, 0, 0)]),
    ];
    let long = vec![
        cut(20, 200, 1, &[2, 0, 3, 4]),
        row(40, &[(32, 5, 5)]),
        cut(0, 33, 0, &[6]),
        verify(64, 7, &[8, 9]),
        cut(3, 130, 1, &[]),
    ];
    vec![
        ("new token", Batch::new(vec![row(0, &[(1, 0, 1)])])),
        ("decode in place", Batch::new(decode(1))),
        ("decode, src is not dst", Batch::new(vec![row(70, &[(1, 2, 1)])])),
        ("decode to nowhere", Batch::new(vec![row(70, &[(1, 1, 0)])])),
        ("decode of 8 rows", Batch::new(decode(8))),
        ("decode of 33 rows", Batch::new(decode(33))),
        ("63 tokens", Batch::new(vec![cut(0, 63, 0, &[1])])),
        ("65 tokens", Batch::new(vec![cut(0, 65, 0, &[0, 1])])),
        ("64 tokens in place", Batch::new(vec![row(64, &[(64, 2, 2)])])),
        ("3 tokens in place", Batch::new(vec![row(64, &[(3, 1, 1)])])),
        ("off the grid", Batch::new(vec![cut(37, 99, 1, &[0, 0, 2])])),
        (
            "short chunks",
            Batch::new(vec![row(8, &[(2, 1, 0), (1, CARRY, 2), (5, CARRY, 3), (1, CARRY, 0), (7, CARRY, 4)])]),
        ),
        ("captures", Batch::new(vec![cut(0, 300, 0, &[3, 1, 0, 2, 4])])),
        ("nothing kept", Batch::new(vec![cut(0, 130, 0, &[])])),
        ("verification", Batch::new(vec![verify(62, 1, &[2, 3, 4, 5, 6])])),
        (
            "verification of 3 rows",
            Batch::new(vec![verify(62, 1, &[2, 3, 0]), verify(128, 4, &[4]), verify(7, 5, &[0, 6, 7, 8])]),
        ),
        (
            "one src, many dst",
            Batch::new(vec![
                row(64, &[(4, 1, 2)]),
                row(64, &[(1, 1, 3)]),
                cut(64, 70, 1, &[0, 4]),
                row(64, &[(2, 1, 0)]),
            ]),
        ),
        ("rows of many lengths", Batch::new(mixed.clone())),
        ("long rows", Batch::new(long)),
        ("padding", Batch::new(mixed).padded()),
        ("padding of one token", Batch::new(vec![row(3, &[(1, 1, 1)])]).padded()),
    ]
}

/// The batch of [`stateful`] with this name.
pub(super) fn find(name: &str) -> Batch {
    stateful().into_iter().find(|(n, _)| *n == name).expect("a batch of that name").1
}

/// A row whose chunks end at, before and after multiples of 16 tokens, each with its state kept, and a short row.
pub(super) fn uneven_chunks() -> Batch {
    let lens = [15, 49, 16, 48, 17, 47, 31, 33, 1, 63, 64, 32, 18, 14];
    let src = |i| if i == 0 { 1 } else { CARRY };
    let chunks: Vec<_> = lens.iter().zip(0..).map(|(&len, i)| (len, src(i), i + 2)).collect();
    Batch::new(vec![row(64, &chunks), row(7, &[(5, 0, 16)])])
}

/// Rows of 1 to 130 tokens, on the grid of 64 and off it, new and carried on.
pub(super) fn every_length() -> Batch {
    Batch::new((0..130).map(|i| cut(37 * i % 128, i + 1, i % 3, &[0, i + 3])).collect())
}

/// Gives every row the pages of its positions: scattered, not in order, each its own.
pub(super) fn with_pages(mut rows: Vec<Row>) -> Vec<Row> {
    let count = |r: &Row| r.end().div_ceil(PAGE);
    let mut next = rows.iter().map(count).sum::<usize>() as u32;
    let longest = rows.iter().map(count).max().unwrap_or(0);
    for page in 0..longest {
        for r in rows.iter_mut().filter(|r| page < count(r)) {
            Arc::make_mut(&mut r.pages).push(next);
            next -= 1;
        }
    }
    rows
}

/// The uses of row and page tables: `(first position, tokens)` of each row.
pub(super) fn paged() -> Vec<(&'static str, Batch)> {
    let batch = |rows: &[(u32, u32)]| Batch::new(with_pages(rows.iter().map(|&(p, n)| cut(p, n, 0, &[])).collect()));
    let decode = |n: u32| batch(&(0..n).map(|i| (i * 37 % 300, 1)).collect::<Vec<_>>());
    let mut shared = batch(&[(128, 1), (128, 40), (128, 3)]);
    let prefix = shared.rows[0].pages[..2].to_vec();
    shared.rows.iter_mut().for_each(|r| Arc::make_mut(&mut r.pages)[..2].copy_from_slice(&prefix));
    vec![
        ("first token", batch(&[(0, 1)])),
        ("decode", batch(&[(100, 1)])),
        ("decode at a page's start", batch(&[(128, 1)])),
        ("decode at a page's end", batch(&[(127, 1)])),
        ("decode of 8 rows", decode(8)),
        ("decode of 33 rows", decode(33)),
        ("decode far out", batch(&[(1100, 1)])),
        ("63 tokens", batch(&[(0, 63)])),
        ("65 tokens", batch(&[(0, 65)])),
        ("300 tokens", batch(&[(0, 300)])),
        ("on from a prefix", batch(&[(192, 100)])),
        ("off the grid", batch(&[(37, 99)])),
        ("verification", batch(&[(62, 5), (300, 3)])),
        ("pages of one prefix", shared),
        ("rows of many lengths", batch(&[(200, 1), (61, 5), (0, 150), (100, 30), (0, 3)])),
        ("padding", batch(&[(200, 1), (61, 5), (0, 150), (100, 30), (0, 3)]).padded()),
    ]
}

/// The tables of a step as words, read as `selkie_core::step` lays them out.
pub(super) struct Tables<'a> {
    words: &'a [u32],
    pub bucket: Bucket,
}

/// One entry of the chunk table.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub row: usize,
    pub start: usize,
    pub len: usize,
    pub src: u32,
    pub dst: usize,
}

impl<'a> Tables<'a> {
    pub fn new(words: &'a [u32], bucket: Bucket) -> Self {
        Self { words, bucket }
    }

    /// Chunks that are not padding, in order.
    pub fn chunks(&self) -> impl Iterator<Item = Span> {
        let table = &self.words[self.bucket.chunk_table()..][..self.bucket.chunks * CHUNK_WORDS];
        table.chunks_exact(CHUNK_WORDS).filter(|w| w[2] != 0).map(|w| Span {
            row: w[0] as usize,
            start: w[1] as usize,
            len: w[2] as usize,
            src: w[3],
            dst: w[4] as usize,
        })
    }

    /// First token of a row.
    pub fn first_token(&self, row: usize) -> usize {
        self.words[self.bucket.row_table() + row * ROW_WORDS] as usize
    }

    /// Row of a token; `None` for padding.
    pub fn row(&self, token: usize) -> Option<usize> {
        let r = self.words[self.bucket.token_row() + token];
        (r != NONE).then_some(r as usize)
    }

    pub fn id(&self, token: usize) -> u32 {
        self.words[self.bucket.ids() + token]
    }

    pub fn position(&self, token: usize) -> usize {
        self.words[self.bucket.positions() + token] as usize
    }

    /// Page of a position of a row.
    pub fn page(&self, row: usize, position: usize) -> usize {
        self.words[self.bucket.page_table() + row * self.bucket.pages + position / PAGE] as usize
    }

    /// Token and lane of each output; `None` for padding.
    pub fn outputs(&self) -> Vec<Option<(usize, usize)>> {
        let words = |at: usize| &self.words[at..at + self.bucket.outputs];
        let lanes = words(self.bucket.output_lane());
        let tokens = words(self.bucket.output_token());
        tokens.iter().zip(lanes).map(|(&t, &l)| (t != NONE).then_some((t as usize, l as usize))).collect()
    }
}
