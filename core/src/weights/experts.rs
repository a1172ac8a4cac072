//! The matrices of experts: stacked in one tensor or some, or stored one by one.

use super::{ExpertParts, Loader, Stream, most_rows};
use crate::{
    Error, Result,
    backend::Backend,
    checkpoint::{Run, StoredTensor},
    format::Format,
    ops::{ExpertRange, RowBlock},
    tensor::{DType, Tensor},
};

impl<B: Backend> Loader<'_, B> {
    /// The matrices `[n, k]` of `experts` experts.
    ///
    /// # Errors
    /// As [`Loader::matrix`], and [`Error::Unsupported`] if the experts have several dtypes on a device that gathers them.
    pub async fn experts(
        &mut self,
        experts: usize,
        n: usize,
        k: usize,
        parts: &ExpertParts,
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let name = parts.stacked.first().or(parts.each.first().map(|(name, _)| name));
        if let Some(name) = name
            && let Some(ranges) = self.random_experts(experts, n, k, name)?
        {
            return Ok(ranges);
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
                blocks.push(RowBlock { w: self.adopt(run.tensor).await?, format, col });
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
                    blocks.push(RowBlock { w: Tensor::new(w.buf, w.dtype, &[1, *rows, row]), format, col });
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

impl<B: Backend> ExpertGather<B> {
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
                blocks.push(RowBlock { w: Tensor::new(buf, dtype, &dims), format, col });
            }
            ranges.push(ExpertRange { first, experts: count, blocks });
        }
        let stream = |b: &RowBlock<B::Buf>| Stream::new(b.w.buf.clone(), 0);
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

    /// The ranges, once all rows were put.
    fn finish(mut self, l: &mut Loader<'_, B>) -> Result<Vec<ExpertRange<B::Buf>>> {
        for to in self.streams.iter_mut().flatten() {
            to.finish(l)?;
        }
        self.ranges.iter().flat_map(|range| &range.blocks).try_for_each(|block| l.arrange(block))?;
        Ok(self.ranges)
    }
}
