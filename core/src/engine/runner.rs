//! The device side of the engine: buffers of a step, sampling lanes, recorded steps.

use std::collections::HashMap;

use crate::backend::{Backend, Measure, Ops};
use crate::error::Result;
use crate::layer::LayerPools;
use crate::models::Model;
use crate::ops::{LANE_WORDS, Sample};
use crate::sample::Sampling;
use crate::step::{Bucket, Row, Step, bucket_of, encode};
use crate::tensor::{DType, Tensor};

/// Largest step that a [`Runner`] must take.
#[derive(Clone, Copy, Debug)]
pub struct RunnerLimits {
    /// Sequences that run at once; also the number of lanes.
    pub lanes: usize,
    /// Tokens of one step.
    pub tokens: usize,
    /// Pages of one sequence.
    pub pages: usize,
}

impl RunnerLimits {
    /// The bucket that no step exceeds.
    pub fn largest(&self) -> Bucket {
        let rows = self.lanes.min(self.tokens);
        Bucket::holding(self.tokens, rows, self.tokens, rows, self.pages)
    }

    /// The bucket of a decode step of `rows` sequences.
    fn decode(&self, rows: usize) -> Bucket {
        Bucket::holding(rows, rows, rows, rows, self.pages)
    }
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
    tapes: HashMap<Bucket, B::Tape>,
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
        let runner = Self { backend, model, pools, ints, lanes, seen, last, ids, tapes: HashMap::new() };
        runner.reserve(limits)?;
        // After a short prompt comes a decode step; its kernels are compiled while those of the prompt are.
        runner.backend.expect(|ops| runner.forward(ops, Bucket::holding(1, 1, 1, 1, 1)))?;
        Ok(runner)
    }

    /// Sizes the scratch arena: what ops of the largest decode and prefill buckets ask for holds for smaller ones.
    fn reserve(&self, limits: RunnerLimits) -> Result<()> {
        let mut measure = Measure::new(&self.backend);
        for bucket in [limits.decode(1), limits.decode(limits.lanes.min(limits.tokens)), limits.largest()] {
            self.forward(&mut measure, bucket)?;
        }
        let scratch = measure.scratch;
        self.backend.reserve(scratch)
    }

    /// Records the model and the sampling of a step of this bucket.
    fn forward(&self, ops: &mut dyn Ops<B::Buf>, bucket: Bucket) -> Result<()> {
        let step = Step::new(self.ints.clone(), bucket);
        self.model.forward(ops, &step, &self.pools, &self.last)?;
        let sample = Sample {
            step,
            logits: self.model.logits().head(bucket.outputs),
            lanes: self.lanes.clone(),
            seen: self.seen.clone(),
            last: self.last.clone(),
            ids: self.ids.head(bucket.outputs),
        };
        ops.op(sample.into())
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
    /// A step in which every row has one token is played from a recorded tape, so that a decode loop costs the host
    /// one write a step.
    pub fn step(&mut self, rows: &[impl AsRef<Row>]) -> Result<Option<B::Read>> {
        let bucket = bucket_of(rows);
        let ints = encode(rows, bucket);
        self.backend.write(&self.ints, 0, bytemuck::cast_slice(&ints))?;
        if rows.iter().all(|r| r.as_ref().tokens.len() == 1) {
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
            // All ones is a NaN in f32, bf16 and f16.
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
