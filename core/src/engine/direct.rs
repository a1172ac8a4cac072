//! A model driven without the engine: sequences with slots and pages of their own, steps cut as the caller likes,
//! logits of every position, states for inspection. No cache, no scheduling, no sampling on the device. For `selkie
//! logits` and for tests.

use std::collections::HashSet;

use crate::{
    Error, Result,
    backend::{Backend, Measure, Ops},
    engine::pools,
    kv8,
    layer::LayerPools,
    models::{Hidden, Limits, Model},
    step::{Bucket, Chunk, PAGE, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
};

/// The state of a sequence: its number of tokens, its slot and its pages. Hand it back to [`Direct::release`].
#[derive(Debug, Default)]
pub struct Sequence {
    /// Number of tokens computed.
    pub len: usize,
    slot: u32,
    pages: Vec<u32>,
}

/// A place inside a share where a chunk ends besides the grid of 64 and the end of the share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tokens of the share before the cut, at least 1 and at most all.
    pub at: usize,
    /// Keep the state at this point as a sequence of its own.
    pub capture: bool,
}

/// The tokens that a step adds to one sequence.
#[derive(Debug)]
pub struct Share<'a> {
    /// Grows by the ids.
    pub sequence: &'a mut Sequence,
    /// Token ids, at least one.
    pub ids: &'a [u32],
    /// Ascending.
    pub cuts: &'a [Cut],
}

/// Results of a share.
#[derive(Debug, Default)]
pub struct Computed {
    /// `[tokens of the share, V]`.
    pub logits: Vec<f32>,
    /// The captured sequences, in order.
    pub captures: Vec<Sequence>,
}

/// The state of one layer of a sequence, as f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerValues {
    /// `[C, K - 1]`.
    pub conv: Option<Vec<f32>>,
    /// `[H, P, N]`.
    pub recurrent: Option<Vec<f32>>,
    /// `[KH, tokens, hd]`: keys as stored, i.e. rotated, and values.
    pub kv: Option<(Vec<f32>, Vec<f32>)>,
}

/// Drives a model.
pub struct Direct<'a, B: Backend> {
    backend: &'a B,
    model: &'a dyn Model<B>,
    limits: Limits,
    pools: Vec<LayerPools<B::Buf>>,
    has_slots: bool,
    has_pages: bool,
    /// Holders of every slot and page; entry 0 is never given away.
    slots: Vec<u32>,
    pages: Vec<u32>,
    ints: Option<(B::Buf, usize)>,
    last: Tensor<B::Buf>,
    measured: HashSet<(Bucket, Option<Hidden>)>,
    scratch: u64,
}

impl<'a, B: Backend> Direct<'a, B> {
    /// Allocates states for `slots` sequences and `pages` pages. A sequence of several chunks a step needs a second slot, each
    /// capture one more. `limits` are those that the model was built with.
    ///
    /// # Errors
    /// Those of [`pools::alloc`].
    pub fn new(backend: &'a B, model: &'a dyn Model<B>, limits: Limits, slots: usize, pages: usize) -> Result<Self> {
        let spec = model.spec();
        let pools = pools::alloc(backend, spec, slots, pages)?;
        Ok(Self {
            backend,
            model,
            limits,
            has_slots: spec.layers.iter().any(|l| l.conv.is_some() || l.recurrent.is_some()),
            has_pages: spec.layers.iter().any(|l| l.kv.is_some()),
            pools,
            slots: vec![0; slots + 1],
            pages: vec![0; pages + 1],
            ints: None,
            last: Tensor::new(backend.alloc("last ids", 4)?, DType::U32, &[1]),
            measured: HashSet::new(),
            scratch: 0,
        })
    }

    /// Gives up a sequence's slot and pages.
    pub fn release(&mut self, sequence: Sequence) {
        self.drop_slot(sequence.slot);
        sequence.pages.iter().for_each(|p| self.pages[*p as usize] -= 1);
    }

    fn drop_slot(&mut self, slot: u32) {
        if slot != 0 {
            self.slots[slot as usize] -= 1;
        }
    }

    fn fresh(held: &mut [u32], what: &str) -> Result<u32> {
        let free = (1..held.len()).find(|i| held[*i] == 0);
        let i = free.ok_or_else(|| Error::BadRequest(format!("all {} {what} are in use", held.len() - 1)))?;
        held[i] = 1;
        Ok(i as u32)
    }

    /// Another sequence with the same tokens; the next step of either writes elsewhere.
    ///
    /// # Errors
    /// [`Error::BadRequest`] off the grid of 64 for a model with attention, whose partial page has one writer only.
    pub fn fork(&mut self, sequence: &Sequence) -> Result<Sequence> {
        if self.has_pages && !sequence.len.is_multiple_of(PAGE) {
            let len = sequence.len;
            return Err(Error::BadRequest(format!(
                "a fork at token {len} of a model with attention: not a multiple of {PAGE}"
            )));
        }
        if sequence.slot != 0 {
            self.slots[sequence.slot as usize] += 1;
        }
        sequence.pages.iter().for_each(|p| self.pages[*p as usize] += 1);
        Ok(Sequence { len: sequence.len, slot: sequence.slot, pages: sequence.pages.clone() })
    }

    /// One step over several sequences; computes the logits of all its tokens.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the step exceeds the limits, or slots or pages run out; those of the backend.
    pub async fn step(&mut self, shares: &mut [Share<'_>]) -> Result<Vec<Computed>> {
        let tokens: usize = shares.iter().map(|s| s.ids.len()).sum();
        let most = self.limits.max_tokens.min(self.limits.max_outputs);
        if tokens > most || shares.iter().any(|s| s.ids.is_empty()) {
            return Err(Error::BadRequest(format!(
                "a step of {tokens} tokens; from 1 to {most} per step are possible"
            )));
        }
        let (mut rows, mut computed) = (Vec::new(), Vec::new());
        for share in shares.iter_mut() {
            let (row, captures) = self.plan(share)?;
            rows.push(row);
            computed.push(Computed { logits: Vec::new(), captures });
        }
        let logits = self.run(&rows, None).await?;
        let vocab = self.model.spec().vocab;
        let mut from = 0;
        for (row, out) in rows.iter().zip(&mut computed) {
            out.logits = logits[from..from + row.tokens.len() * vocab].to_vec();
            from += row.tokens.len() * vocab;
        }
        Ok(computed)
    }

    /// Cuts a share into chunks and gives it slots and pages.
    fn plan(&mut self, share: &mut Share<'_>) -> Result<(Row, Vec<Sequence>)> {
        let (s, n) = (&mut *share.sequence, share.ids.len());
        let first = s.len;
        if self.has_pages {
            while s.pages.len() * PAGE < first + n {
                s.pages.push(Self::fresh(&mut self.pages, "pages")?);
            }
        }
        let mut ends: Vec<usize> = (1..=n).filter(|end| (first + end).is_multiple_of(PAGE)).collect();
        ends.extend(share.cuts.iter().map(|c| c.at));
        ends.push(n);
        ends.sort_unstable();
        ends.dedup();
        let (src, mut from) = (s.slot, 0);
        let (mut chunks, mut captures) = (Vec::new(), Vec::new());
        for &end in &ends {
            let capture = share.cuts.iter().any(|c| c.at == end && c.capture);
            let in_place = ends.len() == 1 && src != 0 && self.slots[src as usize] == 1;
            let mut dst = 0;
            if self.has_slots && (capture || end == n) {
                dst = if in_place { src } else { Self::fresh(&mut self.slots, "slots")? };
            }
            let from_slot = if from == 0 { Src::Slot(src) } else { Src::Carry };
            chunks.push(Chunk { len: (end - from) as u32, src: from_slot, dst });
            if capture {
                let full = (first + end) / PAGE;
                let at_end =
                    Sequence { len: first + end, slot: dst, pages: s.pages.iter().take(full).copied().collect() };
                // A capture inside the share is the only holder of its slot; one at the end shares it with the sequence.
                captures.push(self.fork(&at_end)?);
                if end < n {
                    self.drop_slot(dst);
                }
            }
            if end == n && !in_place {
                self.drop_slot(src);
                s.slot = dst;
            }
            from = end;
        }
        s.len += n;
        let row = Row {
            lane: 0,
            first_position: first as u32,
            tokens: share.ids.iter().copied().map(TokenRef::Known).collect(),
            chunks,
            pages: s.pages.clone().into(),
            outputs: (0..n as u32).collect(),
        };
        Ok((row, captures))
    }

    /// Logits `[ids, V]` of the model's head, of one pass for each of `ids`: the first pass goes on from the sequence, each next one
    /// from the head's own result. The sequence keeps its tokens; only keys beyond its end are written.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if pages run out; those of the backend.
    ///
    /// # Panics
    /// If the model was built without its head.
    pub async fn drafts(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        for (i, &id) in ids.iter().enumerate() {
            let position = sequence.len + i;
            if self.has_pages && position == sequence.pages.len() * PAGE {
                sequence.pages.push(Self::fresh(&mut self.pages, "pages")?);
            }
            let row = Row {
                lane: 0,
                first_position: position as u32,
                tokens: vec![TokenRef::Known(id)],
                chunks: vec![Chunk { len: 1, src: Src::Slot(sequence.slot), dst: 0 }],
                pages: sequence.pages.clone().into(),
                outputs: vec![0],
            };
            let hidden = if i == 0 { Hidden::Slot } else { Hidden::Own };
            logits.extend(self.run(&[row], Some(hidden)).await?);
        }
        Ok(logits)
    }

    /// Runs the model, or a pass of its head, and reads the logits.
    async fn run(&mut self, rows: &[Row], head: Option<Hidden>) -> Result<Vec<f32>> {
        let bucket = bucket_of(rows);
        let ints = self.ints(bucket)?;
        let step = Step::new(ints.clone(), bucket);
        if self.measured.insert((bucket, head)) {
            let mut measure = Measure::new(self.backend);
            self.record(&mut measure, &step, head)?;
            if measure.scratch > self.scratch {
                self.scratch = measure.scratch;
                self.backend.reserve(self.scratch)?;
            }
        }
        self.backend.write(&ints, 0, bytemuck::cast_slice(&encode(rows, bucket)))?;
        self.backend.run(|ops| self.record(ops, &step, head))?;
        let outputs = rows.iter().map(|r| r.outputs.len()).sum();
        self.read(&self.model.logits().head(outputs)).await
    }

    fn record(&self, ops: &mut dyn Ops<B::Buf>, step: &Step<B::Buf>, head: Option<Hidden>) -> Result<()> {
        match head {
            None => self.model.forward(ops, step, &self.pools, &self.last),
            Some(hidden) => self.model.draft(ops, step, &self.pools, &self.last, hidden),
        }
    }

    /// A buffer for the integers of a step.
    fn ints(&mut self, bucket: Bucket) -> Result<B::Buf> {
        if let Some((buf, words)) = &self.ints
            && *words >= bucket.words()
        {
            return Ok(buf.clone());
        }
        let buf = self.backend.alloc("step integers", 4 * bucket.words() as u64)?;
        self.ints = Some((buf.clone(), bucket.words()));
        Ok(buf)
    }

    async fn read(&self, t: &Tensor<B::Buf>) -> Result<Vec<f32>> {
        let bytes = self.backend.read(t).await?;
        let width = t.dims().last().copied().unwrap_or_default();
        Ok(kv8::to_f32(t.dtype, &bytes, kv8::elements(t.dtype, width)))
    }

    /// Runs `ids` in steps of the given sizes, as many tokens as possible when those end; returns the logits `[T, V]`.
    ///
    /// # Errors
    /// As [`Direct::step`].
    pub async fn prompt(&mut self, sequence: &mut Sequence, ids: &[u32], steps: &[usize]) -> Result<Vec<f32>> {
        let most = self.limits.max_tokens.min(self.limits.max_outputs);
        let (mut logits, mut rest, mut steps) = (Vec::new(), ids, steps.iter());
        while !rest.is_empty() {
            let n = steps.next().copied().unwrap_or(most).clamp(1, rest.len());
            let (now, later) = rest.split_at(n);
            let mut computed = self.step(&mut [Share { sequence: &mut *sequence, ids: now, cuts: &[] }]).await?;
            logits.append(&mut computed[0].logits);
            rest = later;
        }
        Ok(logits)
    }

    /// Continues greedily from the `logits` `[V]` of the last token: `count` ids, and the logits `[count, V]` after each.
    ///
    /// # Errors
    /// As [`Direct::step`].
    pub async fn greedy(
        &mut self,
        sequence: &mut Sequence,
        logits: &[f32],
        count: usize,
    ) -> Result<(Vec<u32>, Vec<f32>)> {
        let (mut ids, mut all) = (Vec::new(), Vec::new());
        let mut next = argmax(logits);
        for _ in 0..count {
            ids.push(next);
            let computed = self.step(&mut [Share { sequence: &mut *sequence, ids: &[next], cuts: &[] }]).await?;
            next = argmax(&computed[0].logits);
            all.extend_from_slice(&computed[0].logits);
        }
        Ok((ids, all))
    }

    /// The states of a sequence, one entry per layer.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn states(&self, sequence: &Sequence) -> Result<Vec<LayerValues>> {
        let mut all = Vec::new();
        for layer in &self.pools {
            let mut values = LayerValues::default();
            for (blocks, out) in [(&layer.conv, &mut values.conv), (&layer.recurrent, &mut values.recurrent)] {
                for pool in blocks {
                    let part = self.read(&pool.slice_rows(sequence.slot as usize, 1)).await?;
                    // The ops read slot 0 as zero, whatever its memory holds.
                    let part = if sequence.slot == 0 { vec![0.0; part.len()] } else { part };
                    out.get_or_insert_default().extend(part);
                }
            }
            for pool in &layer.kv {
                let (k, v) = values.kv.get_or_insert_default();
                k.extend(self.pages(&pool.k, sequence).await?);
                v.extend(self.pages(&pool.v, sequence).await?);
            }
            all.push(values);
        }
        Ok(all)
    }

    /// `[KH, tokens, hd]` of one pool.
    async fn pages(&self, pool: &Tensor<B::Buf>, sequence: &Sequence) -> Result<Vec<f32>> {
        let &[_, heads, _, width] = pool.dims() else { unreachable!("a KV pool has four dims") };
        let hd = kv8::elements(pool.dtype, width);
        let mut by_head = vec![Vec::with_capacity(sequence.len * hd); heads];
        for (i, page) in sequence.pages.iter().enumerate() {
            let tokens = PAGE.min(sequence.len - i * PAGE);
            let values = self.read(&pool.slice_rows(*page as usize, 1)).await?;
            for (head, all) in by_head.iter_mut().enumerate() {
                all.extend_from_slice(&values[head * PAGE * hd..][..tokens * hd]);
            }
        }
        Ok(by_head.concat())
    }
}

/// The index of the largest value, the first of equal ones.
fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |b, (i, &x)| if x > b.1 { (i, x) } else { b });
    best.0 as u32
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
