//! The matrices of experts: stacked in one tensor or some, or stored one by one.

use std::ops::Range;

use super::{
    ExpertParts, ExpertShare, Loader, Rank,
    gather::{Stream, bytes_before},
    most_rows,
};
use crate::{
    Error, Result,
    backend::Backend,
    checkpoint::{Run, StoredTensor},
    format::Format,
    ops::{ExpertRange, RowBlock},
    tensor::{DType, Tensor},
};

/// Bytes of stored tensors that are the rows of one expert.
type StoredExpert = Vec<(StoredTensor, Range<usize>)>;

impl<B: Backend> Loader<'_, B> {
    /// The matrices `[n, k]` of `experts` experts; of several ranks each has its `share` of every one of them.
    ///
    /// # Errors
    /// As [`Loader::matrix`], and [`Error::Unsupported`] if the experts have several dtypes on a device that gathers them.
    pub async fn experts(
        &mut self,
        experts: usize,
        n: usize,
        k: usize,
        parts: &ExpertParts,
        share: ExpertShare,
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let (rows, columns) = share.dims(n, k, self.ranks().len());
        let name = parts.stacked.first().or(parts.each.first().map(|(name, _)| name));
        if let Some(name) = name
            && let Some(ranges) = self.random_experts(experts, rows, columns, name)?
        {
            return Ok(ranges);
        }
        if self.ranks().len() > 1 {
            return self.shared_experts([experts, n, k], parts, share).await;
        }
        let stacked = parts.stacked.iter().find(|name| self.stores(name));
        match stacked.or(parts.stacked.first().filter(|_| parts.each.is_empty())) {
            Some(name) => {
                self.refuse_factor(name).await?;
                let runs = self.runs(name, &[experts, n, k])?;
                self.stacked_experts([experts, n, k], name, runs).await
            }
            None => self.separate_experts(experts, n, k, &parts.each).await,
        }
    }

    /// Whether the inputs of all experts `[n, k]` are rounded.
    pub fn rounds_experts(&self, [experts, n, k]: [usize; 3], parts: &ExpertParts) -> bool {
        match parts.stacked.iter().find(|name| self.stores(name)) {
            Some(name) => self.rounds(name, &[experts, n, k]),
            None if parts.each.is_empty() => {
                parts.stacked.first().is_some_and(|name| self.rounds(name, &[experts, n, k]))
            }
            None => (0..experts).all(|e| {
                let name = |pattern: &str| pattern.replace("{}", &e.to_string());
                parts.each.iter().all(|(pattern, rows)| self.rounds(&name(pattern), &[*rows, k]))
            }),
        }
    }

    /// Each rank's share of every expert, read expert by expert.
    async fn shared_experts(
        &mut self,
        [experts, n, k]: [usize; 3],
        parts: &ExpertParts,
        share: ExpertShare,
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let (name, stored) = self.stored_experts([experts, n, k], parts)?;
        self.refuse_factor(&name).await?;
        let (like, ranks) = (&stored[0][0].0, self.ranks().len());
        let kind = (like.dtype, like.format);
        if let Some((other, _)) = stored.iter().flatten().find(|(t, _)| (t.dtype, t.format) != kind) {
            let what = format!("tensor `{}` with experts of {:?} and {:?}", self.full(&name), kind.0, other.dtype);
            return Err(Error::Unsupported { what, why: "ranks have experts of one type".into() });
        }
        let (rows, columns) = share.dims(n, k, ranks);
        let row_bytes = like.row_bytes();
        let taken = bytes_before(columns, like, &self.full(&name))?;
        let gather = ExpertGather::of(self, &name, kind, taken, [experts, rows, columns])?;
        let mut gathers: Vec<ExpertGather<B>> = self.ranks().map(|rank| gather.on(rank)).collect();
        for (e, pieces) in stored.into_iter().enumerate() {
            let mut matrix = Vec::with_capacity(n * row_bytes);
            for (tensor, bytes) in pieces {
                matrix.extend_from_slice(&tensor.read(bytes).await?);
            }
            for (rank, gather) in self.ranks().zip(&mut gathers) {
                gather.put(self, e, 0, &share.cut(rank, &matrix, n, row_bytes))?;
            }
        }
        for gather in &mut gathers {
            gather.flush(self)?;
        }
        gather.finish(self)
    }

    /// Where the rows of each expert are stored, and the name of a tensor of them.
    fn stored_experts(&self, [experts, n, k]: [usize; 3], parts: &ExpertParts) -> Result<(String, Vec<StoredExpert>)> {
        let stacked = parts.stacked.iter().find(|name| self.stores(name));
        if let Some(name) = stacked.or(parts.stacked.first().filter(|_| parts.each.is_empty())) {
            let runs = self.runs(name, &[experts, n, k])?;
            if !runs.iter().all(Run::is_whole) {
                let what = format!("tensor `{}`", self.full(name));
                return Err(Error::Unsupported { what, why: "its experts are parts of tensors".into() });
            }
            let of = |e: usize, run: &Run| {
                let each = run.tensor.bytes() / experts;
                (run.tensor.clone(), e * each..(e + 1) * each)
            };
            return Ok((name.clone(), (0..experts).map(|e| runs.iter().map(|run| of(e, run)).collect()).collect()));
        }
        let tensor = |e: usize, (pattern, rows): &(String, usize)| {
            let name = self.full(&pattern.replace("{}", &e.to_string()));
            let tensor = self.checkpoint.tensor(&name, &[*rows, k])?;
            let bytes = 0..tensor.bytes();
            Ok((tensor, bytes))
        };
        let expert = |e| parts.each.iter().map(|each| tensor(e, each)).collect::<Result<StoredExpert>>();
        let stored = (0..experts).map(expert).collect::<Result<_>>()?;
        Ok((parts.each[0].0.replace("{}", "0"), stored))
    }

    /// Experts in tensors of all of them, side by side in the rows of each expert.
    async fn stacked_experts(
        &mut self,
        [experts, n, k]: [usize; 3],
        name: &str,
        runs: Vec<Run>,
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let whole = runs.iter().all(Run::is_whole);
        let first = &runs[0].tensor;
        if !whole
            || !self.backend.adopts()
                && runs.iter().any(|r| r.tensor.format != first.format || r.tensor.dtype != first.dtype)
        {
            return Err(Error::Unsupported {
                what: format!("tensor `{}`", self.full(name)),
                why: "its experts are parts of tensors, or have several types on a device that gathers them".into(),
            });
        }
        if self.backend.adopts() {
            let (mut col, mut blocks) = (0, Vec::new());
            for run in runs {
                let (format, rows) = (run.tensor.format, run.count);
                blocks.push(RowBlock { w: self.adopt(run.tensor).await?, format, col, squares: false });
                col += rows;
            }
            return Ok(vec![ExpertRange { first: 0, experts, blocks }]);
        }
        let mut gather = ExpertGather::new(self, name, first, [experts, n, k])?;
        for e in 0..experts {
            let mut col = 0;
            for run in &runs {
                let each = run.tensor.bytes() / experts;
                let bytes = run.tensor.read(e * each..(e + 1) * each).await?;
                gather.put(self, e, col, &bytes)?;
                col += run.count;
            }
        }
        gather.finish(self)
    }

    async fn separate_experts(
        &mut self,
        experts: usize,
        n: usize,
        k: usize,
        each: &[(String, usize)],
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let mut adopted = Vec::new();
        let mut gather: Option<ExpertGather<B>> = None;
        for e in 0..experts {
            let (mut col, mut blocks) = (0, Vec::new());
            for (pattern, rows) in each {
                let name = pattern.replace("{}", &e.to_string());
                let tensor = self.checkpoint.tensor(&self.full(&name), &[*rows, k])?;
                if self.backend.adopts() {
                    let (format, row) = (tensor.format, tensor.row_bytes() / tensor.dtype.bytes());
                    let w = self.adopt(tensor).await?;
                    blocks.push(RowBlock {
                        w: Tensor::new(w.buf, w.dtype, &[1, *rows, row]),
                        format,
                        col,
                        squares: false,
                    });
                } else {
                    if gather.is_none() {
                        gather = Some(ExpertGather::new(self, &name, &tensor, [experts, n, k])?);
                    }
                    let gather = gather.as_mut().expect("it was just made");
                    if (tensor.dtype, tensor.format) != (gather.dtype, gather.format) {
                        return Err(Error::Unsupported {
                            what: format!("tensor `{}` of dtype {:?}", self.full(&name), tensor.dtype),
                            why: format!("the experts before it are {:?}", gather.dtype),
                        });
                    }
                    gather.put(self, e, col, &tensor.whole().await?.bytes)?;
                }
                col += rows;
            }
            if gather.is_none() {
                adopted.push(ExpertRange { first: e, experts: 1, blocks });
            }
        }
        match gather {
            Some(gather) => gather.finish(self),
            None => Ok(adopted),
        }
    }

    /// Random matrices of all experts made on the device, if the checkpoint is random and the device can make them.
    fn random_experts(&mut self, e: usize, n: usize, k: usize, name: &str) -> Result<Option<Vec<ExpertRange<B::Buf>>>> {
        let Some((seed, half)) = self.checkpoint.random_matrix(&self.full(name), &[e, n, k]) else { return Ok(None) };
        let gather = ExpertGather::of(self, name, (DType::Bf16, Format::Plain), k * DType::Bf16.bytes(), [e, n, k])?;
        for (i, block) in gather.ranges.iter().flat_map(|r| &r.blocks).enumerate() {
            if !self.backend.fill_random(&block.w, seed.wrapping_add(i as u32), half)? {
                return Ok(None);
            }
            self.advance(block.w.len() * DType::Bf16.bytes());
        }
        Ok(Some(gather.ranges))
    }
}

/// Device buffers of all experts, filled expert by expert.
struct ExpertGather<B: Backend> {
    ranges: Vec<ExpertRange<B::Buf>>,
    dtype: DType,
    format: Format,
    per_range: usize,
    row_bytes: usize,
    /// Of each block of each range.
    streams: Vec<Vec<Stream<B::Buf>>>,
}

impl ExpertShare {
    /// Rows and columns that each of some ranks has of an expert's `[n, k]`.
    fn dims(&self, n: usize, k: usize, ranks: usize) -> (usize, usize) {
        match self {
            Self::Rows(_) => (n / ranks, k),
            Self::Columns => (n, k / ranks),
        }
    }

    /// A rank's part of a matrix of `n` rows of `row` bytes.
    fn cut(self, rank: Rank, matrix: &[u8], n: usize, row: usize) -> Vec<u8> {
        match self {
            Self::Rows(sections) => {
                let taken = rank.share_of(rank.of, n / sections / rank.of * row);
                matrix.chunks(n / sections * row).flat_map(|section| &section[taken.clone()]).copied().collect()
            }
            Self::Columns => {
                let taken = rank.share_of(rank.of, row / rank.of);
                matrix.chunks(row).flat_map(|row| &row[taken.clone()]).copied().collect()
            }
        }
    }
}

impl<B: Backend> ExpertGather<B> {
    /// The same buffers, to be filled for one rank.
    fn on(&self, rank: Rank) -> Self {
        let stream = |b: &RowBlock<B::Buf>| Stream::new(Some(rank), b.w.buf.clone(), 0);
        let streams = self.ranges.iter().map(|r| r.blocks.iter().map(stream).collect()).collect();
        let Self { ranges, dtype, format, per_range, row_bytes, .. } = self;
        let (ranges, row_bytes) = (ranges.clone(), *row_bytes);
        Self { ranges, dtype: *dtype, format: *format, per_range: *per_range, row_bytes, streams }
    }

    /// Buffers for experts that are stored like a tensor.
    fn new(l: &Loader<'_, B>, name: &str, like: &StoredTensor, [experts, n, k]: [usize; 3]) -> Result<Self> {
        Self::of(l, name, (like.dtype, like.format), like.row_bytes(), [experts, n, k])
    }

    fn of(
        l: &Loader<'_, B>,
        name: &str,
        (dtype, format): (DType, Format),
        row_bytes: usize,
        [experts, n, k]: [usize; 3],
    ) -> Result<Self> {
        let most = l.rows_per_binding(row_bytes, name)?.min(most_rows(k));
        let per_range = (most / n).clamp(1, experts);
        let rows = most.min(n);
        let mut ranges = Vec::new();
        for first in (0..experts).step_by(per_range) {
            let count = per_range.min(experts - first);
            let mut blocks = Vec::new();
            for col in (0..n).step_by(rows) {
                let dims = [count, rows.min(n - col), row_bytes / dtype.bytes()];
                let buf = l.room(name, dtype, format, &dims)?;
                blocks.push(RowBlock { w: Tensor::new(buf, dtype, &dims), format, col, squares: false });
            }
            ranges.push(ExpertRange { first, experts: count, blocks });
        }
        let stream = |b: &RowBlock<B::Buf>| Stream::new(None, b.w.buf.clone(), 0);
        let streams = ranges.iter().map(|r: &ExpertRange<B::Buf>| r.blocks.iter().map(stream).collect()).collect();
        Ok(Self { ranges, dtype, format, per_range, row_bytes, streams })
    }

    /// Writes rows of expert `e` that become output columns from `col` on. Experts and columns come in ascending order.
    fn put(&mut self, l: &mut Loader<'_, B>, e: usize, col: usize, bytes: &[u8]) -> Result<()> {
        let range = &self.ranges[e / self.per_range];
        let end = col + bytes.len() / self.row_bytes;
        for (b, to) in range.blocks.iter().zip(&mut self.streams[e / self.per_range]) {
            let n = b.w.dims()[1];
            let (from, until) = (col.max(b.col), end.min(b.col + n));
            if from < until {
                to.push(l, &bytes[(from - col) * self.row_bytes..(until - col) * self.row_bytes])?;
            }
        }
        Ok(())
    }

    /// Writes what is held.
    fn flush(&mut self, l: &mut Loader<'_, B>) -> Result<()> {
        self.streams.iter_mut().flatten().try_for_each(|to| to.finish(l))
    }

    /// The ranges, once all rows were put.
    fn finish(mut self, l: &mut Loader<'_, B>) -> Result<Vec<ExpertRange<B::Buf>>> {
        self.flush(l)?;
        self.ranges.iter().flat_map(|range| &range.blocks).try_for_each(|block| l.arrange(block))?;
        Ok(self.ranges)
    }
}
