//! The device side of the engine: buffers of a step, sampling lanes, recorded steps.

use std::collections::HashMap;

use super::{
    tail::{Needs, Tail},
    verify::WIDTHS,
};
use crate::backend::{Backend, Measure, Ops};
use crate::bundle::{Kind, Part};
use crate::controls::LaneRules;
use crate::error::Result;
use crate::layer::LayerPools;
use crate::models::{Hidden, Model};
use crate::ops::{LANE_WORDS, Sample};
use crate::sample::Sampling;
use crate::saved::{Room, Saving};
use crate::source::Bytes;
use crate::step::{Bucket, NONE, PAGE, Row, Step, TokenRef, bucket_of, encode};
use crate::tensor::{DType, Tensor};

/// Largest step that a [`Runner`] must take.
#[derive(Clone, Copy, Debug)]
pub struct RunnerLimits {
    /// Sequences that run at a time; also the number of lanes.
    pub lanes: usize,
    /// Tokens of one step.
    pub tokens: usize,
    /// Positions of one step whose logits are computed.
    pub outputs: usize,
    /// Drafts of one row.
    pub drafts: usize,
    /// Pages of one sequence.
    pub pages: usize,
}

impl RunnerLimits {
    /// The bucket that no step exceeds.
    pub fn largest(&self) -> Bucket {
        let rows = self.lanes.min(self.tokens);
        Bucket::holding(self.tokens, rows, self.tokens, self.outputs.min(self.tokens), self.pages)
    }

    /// The bucket of a decode step of `rows` sequences.
    fn decode(&self, rows: usize) -> Bucket {
        Bucket::holding(rows, rows, rows, rows, self.pages)
    }

    /// The buckets of steps that verify drafts, of one sequence and of as many as a step holds.
    fn verifications(&self) -> impl Iterator<Item = Bucket> {
        let outputs = self.outputs.min(self.tokens);
        let widths = WIDTHS.into_iter().filter(move |width| *width <= (self.drafts + 1).min(outputs));
        widths.flat_map(move |width| {
            [1, self.lanes.min(outputs / width)].map(|rows| {
                let tokens = rows * width;
                Bucket::holding(tokens, rows, tokens, tokens, self.pages)
            })
        })
    }
}

/// A step whose logits are enqueued and whose sampling is not.
#[derive(Clone, Debug)]
pub struct Begun {
    bucket: Bucket,
    /// It is played from tapes.
    replayed: bool,
    /// The packed tokens of its outputs.
    outputs: Vec<u32>,
}

/// Runs steps: one write of integers, one play, one read of sampled ids.
pub struct Runner<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    pools: Vec<LayerPools<B::Buf>>,
    /// The step's integers, sized for the largest bucket.
    ints: B::Buf,
    /// `[L, 8] u32`, see [`LANE_WORDS`].
    lanes: Tensor<B::Buf>,
    /// `[L, ceil(V / 32)] u32`.
    seen: Tensor<B::Buf>,
    /// `[L] u32`.
    last: Tensor<B::Buf>,
    /// `[L] u32`: ids sampled in the step.
    ids: Tensor<B::Buf>,
    /// Whole steps: forward and sample.
    tapes: HashMap<Bucket, B::Tape>,
    /// Passes of the model's head.
    head_tapes: HashMap<(Bucket, Hidden), B::Tape>,
    /// Of requests with rules, once there was one.
    tail: Option<Tail<B>>,
    /// Steps in two parts, for lanes with rules: up to the logits, and from there on.
    forward_tapes: HashMap<Bucket, B::Tape>,
    sample_tapes: HashMap<(Bucket, Needs), B::Tape>,
    limits: RunnerLimits,
}

impl<B: Backend> Runner<B> {
    /// Allocates the step's buffers and the scratch arena. `pools` has one entry per layer.
    pub fn new(
        backend: B,
        model: Box<dyn Model<B>>,
        pools: Vec<LayerPools<B::Buf>>,
        limits: RunnerLimits,
    ) -> Result<Self> {
        let vocab_words = model.spec().vocab.div_ceil(32);
        let largest = limits.largest();
        let ints = backend.alloc("step integers", 4 * largest.words() as u64)?;
        let table = |label, columns: usize| -> Result<Tensor<B::Buf>> {
            let buf = backend.alloc(label, 4 * (largest.outputs.max(limits.lanes) * columns) as u64)?;
            Ok(Tensor::new(buf, DType::U32, &[largest.outputs.max(limits.lanes), columns]))
        };
        let lanes = table("sampling parameters", LANE_WORDS)?;
        let seen = table("seen tokens", vocab_words)?;
        let vector = |label| -> Result<Tensor<B::Buf>> {
            let t = table(label, 1)?;
            Ok(Tensor::new(t.buf.clone(), DType::U32, &[t.rows()]))
        };
        let (last, ids) = (vector("last ids")?, vector("sampled ids")?);
        let runner = Self {
            backend,
            model,
            pools,
            ints,
            lanes,
            seen,
            last,
            ids,
            tapes: HashMap::new(),
            head_tapes: HashMap::new(),
            tail: None,
            forward_tapes: HashMap::new(),
            sample_tapes: HashMap::new(),
            limits,
        };
        runner.reserve(limits)?;
        // A decode step follows a short prompt: its kernels are compiled concurrently with those of the prompt.
        runner.expect(1, 1)?;
        Ok(runner)
    }

    /// Announces all steps of one sequence, of up to `tokens` tokens, so that their kernels are there when they come. Kernels of
    /// products depend on the tokens of a [bucket](bucket_of), those of attention for few tokens on its pages too.
    ///
    /// # Errors
    /// A device error.
    pub fn expect_steps(&self, tokens: usize) -> Result<()> {
        let doubled = |most: usize| std::iter::successors(Some(1), move |n| Some(2 * n).filter(|n| *n <= most));
        let prompts = doubled(PAGE).chain((PAGE..=tokens).step_by(PAGE)).map(|tokens| (tokens, tokens.div_ceil(PAGE)));
        let few = doubled(self.limits.pages.next_power_of_two()).flat_map(|pages| [(1, pages), (2, pages)]);
        prompts.chain(few).try_for_each(|(tokens, pages)| self.expect(tokens, pages))
    }

    /// Announces a step of `tokens` tokens of one sequence that has `pages` pages.
    fn expect(&self, tokens: usize, pages: usize) -> Result<()> {
        let chunks = tokens.div_ceil(PAGE);
        self.backend.expect(|ops| self.forward(ops, Bucket::holding(tokens, 1, chunks, 1, pages)))
    }

    /// Announces the step of these rows.
    ///
    /// # Errors
    /// A device error.
    pub(super) fn expect_step(&self, rows: &[impl AsRef<Row>]) -> Result<()> {
        self.backend.expect(|ops| self.forward(ops, bucket_of(rows)))
    }

    /// Sizes the scratch arena: the scratch of the largest decode and prefill buckets suffices for smaller ones.
    fn reserve(&self, limits: RunnerLimits) -> Result<()> {
        let mut measure = Measure::new(&self.backend);
        let plain = [limits.decode(1), limits.decode(limits.lanes.min(limits.tokens)), limits.largest()];
        for bucket in plain.into_iter().chain(limits.verifications()) {
            self.forward(&mut measure, bucket)?;
        }
        if self.model.has_head() {
            for rows in [1, limits.lanes.min(limits.tokens)] {
                self.pass(&mut measure, limits.decode(rows), Hidden::Slot)?;
            }
        }
        let scratch = measure.scratch;
        self.backend.reserve(scratch)
    }

    /// The blocks of memory that hold one row of a part each time, in order.
    pub(super) fn pools_of(&self, part: &Part) -> impl Iterator<Item = &Tensor<B::Buf>> {
        let LayerPools { kv, conv, recurrent } = &self.pools[part.layer as usize];
        let kind = part.kind;
        let pages = kv.iter().filter_map(move |kv| match kind {
            Kind::Key => Some(&kv.k),
            Kind::Value => Some(&kv.v),
            _ => None,
        });
        let conv = conv.iter().filter(move |_| kind == Kind::Conv);
        pages.chain(conv).chain(recurrent.iter().filter(move |_| kind == Kind::Recurrent))
    }

    /// Copies one slot or page of these parts, each of which has one row, to host memory of as many bytes.
    ///
    /// # Errors
    /// A device error.
    pub(super) fn save_entry(&self, parts: &[Part], entry: u32, room: Box<dyn Room>) -> Result<Box<dyn Saving>> {
        self.backend.save(&self.all_pools_of(parts), entry as usize, room)
    }

    /// Copies what [`save_entry`](Self::save_entry) has copied back to the device.
    ///
    /// # Errors
    /// A device error.
    pub(super) fn restore_entry(&self, parts: &[Part], entry: u32, saved: &Bytes) -> Result<()> {
        self.backend.restore(saved, &self.all_pools_of(parts), entry as usize)
    }

    fn all_pools_of(&self, parts: &[Part]) -> Vec<Tensor<B::Buf>> {
        parts.iter().flat_map(|part| self.pools_of(part)).cloned().collect()
    }

    /// Records the model and the sampling of a step of this bucket.
    fn forward(&self, ops: &mut dyn Ops<B::Buf>, bucket: Bucket) -> Result<()> {
        self.logits(ops, bucket)?;
        ops.op(self.sample(bucket).into())
    }

    /// Records the model.
    fn logits(&self, ops: &mut dyn Ops<B::Buf>, bucket: Bucket) -> Result<()> {
        let step = Step::new(self.ints.clone(), bucket);
        self.model.forward(ops, &step, &self.pools, &self.last)
    }

    fn sample(&self, bucket: Bucket) -> Sample<B::Buf> {
        Sample {
            step: Step::new(self.ints.clone(), bucket),
            logits: self.model.logits().head(bucket.outputs),
            lanes: self.lanes.clone(),
            seen: self.seen.clone(),
            last: self.last.clone(),
            ids: self.ids.head(bucket.outputs),
        }
    }

    /// Allocates the buffers of lanes with rules, if they do not exist yet. Called between steps.
    ///
    /// # Errors
    /// Too little memory, or a batch whose rules do not fit into a binding.
    pub fn expect_rules(&mut self) -> Result<()> {
        if self.tail.is_some() {
            return Ok(());
        }
        let outputs = self.limits.largest().outputs;
        let tail = Tail::new(&self.backend, self.lanes.rows(), outputs, self.model.spec().vocab)?;
        // The arena never becomes smaller, and recorded steps keep the one they were recorded with.
        self.backend.reserve(tail.scratch(&self.backend, self.sample(self.limits.largest()))?)?;
        let first = Bucket::holding(1, 1, 1, 1, 1);
        self.backend.expect(|ops| tail.record(ops, Needs::ALL, self.sample(first)))?;
        self.tail = Some(tail);
        Ok(())
    }

    /// Gives `lane`, which is open, the rules of its request, or none. `generated`: the tokens sampled so far.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn open_rules(&mut self, lane: u32, rules: Option<&LaneRules>, generated: &[u32]) -> Result<()> {
        match (&mut self.tail, rules) {
            (Some(tail), Some(rules)) => tail.open_lane(&self.backend, lane, rules, generated),
            (Some(tail), None) => tail.close_lane(&self.backend, lane),
            (None, _) => Ok(()),
        }
    }

    /// Writes the mask `[ceil(V / 32)]` of a lane whose rules have one.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn mask(&self, lane: u32, mask: &[u32]) -> Result<()> {
        self.tail.as_ref().map_or(Ok(()), |tail| tail.mask(&self.backend, lane, mask))
    }

    /// Gives `lane` to a sequence: its sampling parameters, and all tokens known so far for the penalties.
    pub fn open_lane(&self, lane: u32, sampling: &Sampling, known: &[u32]) -> Result<()> {
        let words = self.seen.row_len();
        let mut seen = vec![0u32; words];
        for &id in known {
            seen[id as usize / 32] |= 1 << (id % 32);
        }
        self.backend.write(&self.seen.buf, 4 * (lane as usize * words) as u64, bytemuck::cast_slice(&seen))?;
        let params: [u32; LANE_WORDS] = sampling.lane_words();
        self.backend.write(&self.lanes.buf, 4 * (lane as usize * LANE_WORDS) as u64, bytemuck::cast_slice(&params))
    }

    /// Enqueues a step and the read of its sampled ids, in the order of the rows' outputs; `None` if nothing is sampled.
    ///
    /// A step in which every row has one token, or drafts besides, is played from a recorded tape, so that a decode loop costs the
    /// host one write a step.
    pub fn step(&mut self, rows: &[impl AsRef<Row>]) -> Result<Option<B::Read>> {
        let bucket = self.write(rows)?;
        if is_decode(rows) {
            if !self.tapes.contains_key(&bucket) {
                let tape = self.backend.record(|ops| self.forward(ops, bucket))?;
                self.tapes.insert(bucket, tape);
            }
            self.backend.play(&self.tapes[&bucket])?;
        } else {
            self.backend.run(|ops| self.forward(ops, bucket))?;
        }
        let outputs: usize = rows.iter().map(|r| r.as_ref().outputs.len()).sum();
        Ok((outputs > 0).then(|| self.backend.read(&self.ids.head(outputs))))
    }

    /// Enqueues `passes` passes of the model's head over rows of one token and one output, each from the ids of the one before, and
    /// the reads of their ids `[rows]`. The last ids of the rows' lanes are lost.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn look(&mut self, mut rows: Vec<Row>, passes: usize) -> Result<Vec<B::Read>> {
        let mut reads = Vec::with_capacity(passes);
        let mut hidden = Hidden::Slot;
        for _ in 0..passes {
            let bucket = self.write(&rows)?;
            if !self.head_tapes.contains_key(&(bucket, hidden)) {
                let tape = self.backend.record(|ops| self.pass(ops, bucket, hidden))?;
                self.head_tapes.insert((bucket, hidden), tape);
            }
            self.backend.play(&self.head_tapes[&(bucket, hidden)])?;
            reads.push(self.backend.read(&self.ids.head(rows.len())));
            for row in &mut rows {
                row.first_position += 1;
                row.tokens = vec![TokenRef::FromDevice(row.lane)];
            }
            hidden = Hidden::Own;
        }
        Ok(reads)
    }

    /// One pass of the head, and the sampling of its drafts: by the rule and with the random numbers of the tokens in their places.
    fn pass(&self, ops: &mut dyn Ops<B::Buf>, bucket: Bucket, hidden: Hidden) -> Result<()> {
        let step = Step::new(self.ints.clone(), bucket);
        self.model.draft(ops, &step, &self.pools, &self.last, hidden)?;
        ops.op(self.sample(bucket).into())
    }

    fn write(&self, rows: &[impl AsRef<Row>]) -> Result<Bucket> {
        let bucket = bucket_of(rows);
        self.backend.write(&self.ints, 0, bytemuck::cast_slice(&encode(rows, bucket)))?;
        Ok(bucket)
    }

    /// Enqueues a step up to its logits. [`Runner::draw`] samples from them, before any other step.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn begin(&mut self, rows: &[impl AsRef<Row>]) -> Result<Begun> {
        let (bucket, replayed) = (self.write(rows)?, is_decode(rows));
        if replayed {
            if !self.forward_tapes.contains_key(&bucket) {
                let tape = self.backend.record(|ops| self.logits(ops, bucket))?;
                self.forward_tapes.insert(bucket, tape);
            }
            self.backend.play(&self.forward_tapes[&bucket])?;
        } else {
            self.backend.run(|ops| self.logits(ops, bucket))?;
        }
        Ok(Begun { bucket, replayed, outputs: output_tokens(rows) })
    }

    /// Keeps outputs of a step that was begun from being sampled, and no others: for its next ops they are padding.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn hide(&self, step: &Begun, hidden: &[bool]) -> Result<()> {
        let shown = step.outputs.iter().zip(hidden).map(|(token, hidden)| if *hidden { NONE } else { *token });
        let shown: Vec<u32> = shown.collect();
        self.backend.write(&self.ints, 4 * step.bucket.output_token() as u64, bytemuck::cast_slice(&shown))
    }

    /// Enqueues the sampling of the outputs of a step that was begun which are not hidden.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn draw(&mut self, step: &Begun, needs: Needs) -> Result<()> {
        let bucket = step.bucket;
        let tail = self.tail.as_ref().expect("a lane with rules was opened");
        let key = (bucket, needs);
        if !step.replayed {
            return self.backend.run(|ops| tail.record(ops, needs, self.sample(bucket)));
        }
        if !self.sample_tapes.contains_key(&key) {
            let tape = self.backend.record(|ops| tail.record(ops, needs, self.sample(bucket)))?;
            self.sample_tapes.insert(key, tape);
        }
        self.backend.play(&self.sample_tapes[&key])
    }

    /// Enqueues the reads of the ids `[outputs]` that were drawn and, if there are any, of their reports `[outputs, 41]`.
    pub fn drawn(&self, step: &Begun, needs: Needs) -> (B::Read, Option<B::Read>) {
        let outputs = step.outputs.len();
        let report = self.tail.as_ref().filter(|_| needs.report).map(|tail| tail.read(&self.backend, outputs));
        (self.backend.read(&self.ids.head(outputs)), report)
    }

    /// Reads the logits `[outputs, V]` of the step just enqueued.
    pub fn read_logits(&self, outputs: usize) -> B::Read {
        self.backend.read(&self.model.logits().head(outputs))
    }

    /// Overwrites slots and pages with NaN.
    ///
    /// # Errors
    /// A device error.
    pub fn poison(&self, slots: &[usize], pages: &[usize]) -> Result<()> {
        let fill = |pool: &Tensor<B::Buf>, entries: &[usize]| {
            let bytes = pool.row_len() * pool.dtype.bytes();
            // All ones is a NaN in f32 (scales of codes are), bf16 and f16.
            let poison = vec![0xff; bytes];
            entries.iter().try_for_each(|&e| self.backend.write(&pool.buf, (e * bytes) as u64, &poison))
        };
        for layer in &self.pools {
            layer.conv.iter().chain(&layer.recurrent).try_for_each(|pool| fill(pool, slots))?;
            layer.kv.iter().flat_map(|kv| [&kv.k, &kv.v]).try_for_each(|pool| fill(pool, pages))?;
        }
        Ok(())
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The model.
    pub fn model(&self) -> &dyn Model<B> {
        self.model.as_ref()
    }

    /// State and KV memory, a layer each.
    pub fn pools(&self) -> &[LayerPools<B::Buf>] {
        &self.pools
    }
}

/// Whether every row has one token and perhaps drafts, so that the step is played from a tape.
fn is_decode(rows: &[impl AsRef<Row>]) -> bool {
    rows.iter().map(AsRef::as_ref).all(|row| row.tokens.len() == 1 + row.drafts())
}

/// The packed tokens whose logits are computed, in order.
fn output_tokens(rows: &[impl AsRef<Row>]) -> Vec<u32> {
    let (mut first, mut all) = (0, Vec::new());
    for row in rows.iter().map(AsRef::as_ref) {
        all.extend(row.outputs.iter().map(|output| first + output));
        first += row.tokens.len() as u32;
    }
    all
}
