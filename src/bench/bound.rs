//! Lower bounds on the bytes and operations of a step, and on its time on a device of known rates.

use selkie_core::{
    Result,
    backend::{Backend, Handle, Ops},
    engine::runner::Runner,
    ops::Op,
    step::{Bucket, Step},
    tensor::{DType, Tensor},
};

/// Rates of kernels that only read or only multiply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes read from memory per second.
    pub read: f64,
    /// Operations of matrix products per second.
    pub products: f64,
    /// Operations of attention per second.
    pub attention: f64,
}

impl Rates {
    /// The rates of a device with figures in BENCHMARKS.md.
    pub fn of(device: &str) -> Option<Self> {
        device.contains("H200").then_some(Self { read: 4.6e12, products: 680e12, attention: 600e12 })
    }
}

/// The cost of ops, added up instead of running them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes of weights, as often as they are read, without the small ones of norms and convolutions.
    pub weights: u64,
    /// Bytes of all weights, of pages that are read, and of states, read and written.
    pub held: u64,
    /// All operations.
    pub flops: u64,
    /// Those of matrix products.
    pub products: u64,
    /// Those of attention per query and key.
    pub per_pair: u64,
}

impl<Buf: Handle> Ops<Buf> for Work {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        let cost = op.cost();
        self.held += cost.held;
        self.flops += cost.flops;
        match &op {
            Op::Matmul(_) | Op::ExpertMatmul(_) | Op::HeadMatmul(_) => {
                self.weights += cost.held;
                self.products += cost.flops;
            }
            Op::Attention(attention) => self.per_pair += 4 * attention.q.row_len() as u64,
            Op::LatentAttention(attention) => {
                let shared = attention.heads * attention.pool.v.dims()[3];
                self.per_pair += (4 * attention.q.row_len() + 2 * shared) as u64;
            }
            _ => {}
        }
        Ok(())
    }
}

impl Work {
    /// A step of this shape.
    pub fn of_step<B: Backend>(runner: &Runner<B>, bucket: Bucket) -> Result<Self> {
        let ints = runner.backend().alloc("step integers", 4 * bucket.words() as u64)?;
        let last = Tensor::new(runner.backend().alloc("last ids", 4 * bucket.rows as u64)?, DType::U32, &[bucket.rows]);
        let mut work = Self::default();
        runner.model().forward(&mut work, &Step::new(ints, bucket), runner.pools(), &last)?;
        Ok(work)
    }

    /// The work of `steps` such steps by the same layers.
    pub fn times(self, steps: u64) -> Self {
        let Self { weights, held, flops, products, per_pair } = self;
        let [weights, held, flops, products] = [weights, held, flops, products].map(|n| steps * n);
        Self { weights, held, flops, products, per_pair }
    }

    /// Seconds that a decode step must take: the bytes that it moves.
    pub fn decode_seconds(&self, rates: &Rates) -> f64 {
        self.held as f64 / rates.read
    }

    /// Seconds that a prompt of `tokens` must take, if this is the work of its steps: its products, and attention of each token
    /// to itself and all before it.
    pub fn prompt_seconds(&self, tokens: usize, rates: &Rates) -> f64 {
        let pairs = tokens as f64 * (tokens + 1) as f64 / 2.0;
        self.products as f64 / rates.products + self.per_pair as f64 * pairs / rates.attention
    }
}

#[cfg(test)]
mod tests {
    use selkie_core::ops::{Attention, KvPool, Matmul, RowBlock, ScanForm, SelectiveScan, Weight};

    use super::*;

    #[derive(Clone, Debug)]
    struct Plain(usize);

    impl Handle for Plain {
        fn id(&self) -> usize {
            self.0
        }
        fn bytes(&self) -> u64 {
            1 << 20
        }
    }

    fn tensor(id: usize, dtype: DType, dims: &[usize]) -> Tensor<Plain> {
        Tensor::new(Plain(id), dtype, dims)
    }

    /// Two rows of one token each: a product of 8 to 6, attention of 2 heads of 4 over 3 pages, a scan of one head of 4 x 8.
    fn step() -> Work {
        let bucket = Bucket { tokens: 2, rows: 2, chunks: 2, outputs: 2, pages: 3 };
        let step = Step::new(Plain(0), bucket);
        let blocks = vec![RowBlock::plain(tensor(1, DType::Bf16, &[6, 8]), 0)];
        let mut work = Work::default();
        let product = Matmul {
            x: tensor(2, DType::Bf16, &[2, 8]),
            w: Weight { blocks, n: 6, k: 8 },
            columns: None,
            bias: Some(tensor(3, DType::F32, &[6])),
            out: tensor(4, DType::Bf16, &[2, 6]),
            scale: 1.0,
            accumulate: true,
            precise: false,
        };
        let page = |id| tensor(id, DType::Bf16, &[5, 1, 64, 4]);
        let attention = Attention {
            step: step.clone(),
            q: tensor(5, DType::Bf16, &[2, 8]),
            pool: KvPool { k: page(6), v: page(7) },
            out: tensor(8, DType::Bf16, &[2, 8]),
            head_dim: 4,
            scale: 1.0,
            window: None,
            first: 0,
        };
        let scan = SelectiveScan {
            step,
            x: tensor(9, DType::Bf16, &[2, 4]),
            b: tensor(9, DType::Bf16, &[2, 8]),
            c: tensor(9, DType::Bf16, &[2, 8]),
            dt: tensor(12, DType::Bf16, &[2, 1]),
            par: tensor(13, DType::F32, &[3, 1]),
            pool: tensor(14, DType::F32, &[9, 1, 4, 8]),
            y: tensor(15, DType::Bf16, &[2, 4]),
            form: ScanForm::PerHead,
            heads_per_group: 1,
            first_head: 0,
            dt_limit: (0.0, f32::INFINITY),
        };
        for op in [Op::from(product), attention.into(), scan.into()] {
            op.check();
            work.op(op).expect("no device is asked");
        }
        work
    }

    #[test]
    fn a_step_moves_weights_pages_and_states_and_no_activations() {
        let work = step();
        let weights = 6 * 8 * 2 + 6 * 4;
        let pages = 2 * 2 * 3 * 64 * 4 * 2;
        let states = 2 * 2 * 4 * 8 * 4;
        assert_eq!(work.weights, weights);
        assert_eq!(work.held, weights + pages + states + 3 * 4);
        assert_eq!((work.products, work.per_pair), (2 * 2 * 6 * 8, 4 * 8));
    }

    #[test]
    fn bounds_follow_from_rates() {
        let work = Work { held: 9_200_000_000, products: 680_000_000_000_000, per_pair: 1_200, ..Work::default() };
        let rates = Rates::of("NVIDIA H200").expect("known");
        assert_eq!(work.decode_seconds(&rates), 0.002);
        // Three tokens see one, two and three of them.
        assert_eq!(work.prompt_seconds(3, &rates), 1.0 + 6.0 * 1_200.0 / 600e12);
        assert_eq!(Rates::of("some other device"), None);
    }
}
