//! Kernels of a recorded step that start while their predecessors run, in a bucket that is not full: they write the bits of the
//! ops run one by one.
//!
//! Ignored, not passed, without a device; `SELKIE_REQUIRE=cuda` turns that into a failure. A device older than compute capability
//! 9.0 starts no kernel early.

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::{
    Error, Result,
    backend::{Backend, Ops},
    ops::{Act, Conv1d, GatedDelta, Matmul, Op, RowBlock, ScanForm, SelectiveScan, Weight},
    step::{Chunk, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
};
use selkie_cuda::{Buf, Cuda, Options};

/// Tokens of the step, one row each, less than the bucket holds.
const TOKENS: u32 = 3;
const HEADS: usize = 16;
/// Columns of a head.
const DIM: usize = 64;
const STATE: usize = 128;
const COLUMNS: usize = HEADS * DIM;
/// Replays of the step.
const TIMES: usize = 20;

#[derive(Clone, Copy)]
enum Kind {
    Conv,
    Scan,
    Delta,
}

fn main() {
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == "cuda"));
    let ignored = matches!(Cuda::open(Options::default()), Err(Error::NoDevice { .. })) && !required;
    let trials = [("conv1d", Kind::Conv), ("selective_scan", Kind::Scan), ("gated_delta", Kind::Delta)];
    let trials = trials.map(|(name, kind)| {
        let run = move || compare(kind).unwrap_or_else(|e| Err(e.to_string().into()));
        Trial::test(format!("{name} after two products"), run).with_ignored_flag(ignored)
    });
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(1);
    libtest_mimic::run(&args, trials.into()).exit();
}

struct Device(Cuda);

impl Device {
    fn fill(&self, t: &Tensor<Buf>) -> Result<()> {
        self.0.fill_random(t, t.len() as u32, 1.0).map(|_| ())
    }

    fn tensor(&self, dtype: DType, dims: &[usize]) -> Result<Tensor<Buf>> {
        let bytes = dims.iter().product::<usize>() * dtype.bytes();
        let t = Tensor::new(self.0.alloc("overlap", bytes.next_multiple_of(16) as u64)?, dtype, dims);
        self.fill(&t)?;
        Ok(t)
    }

    /// Rows of one token each, in place.
    fn step(&self) -> Result<Step<Buf>> {
        let row = |i| Row {
            lane: i,
            first_position: 70,
            tokens: vec![TokenRef::Known(0)],
            chunks: vec![Chunk { len: 1, src: Src::Slot(i + 1), dst: i + 1 }],
            outputs: vec![0],
            ..Row::default()
        };
        let rows: Vec<Row> = (0..TOKENS).map(row).collect();
        let words = encode(&rows, bucket_of(&rows));
        let ints = self.0.alloc("ints", 4 * words.len() as u64)?;
        self.0.write(&ints, 0, &words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
        Ok(Step::new(ints, bucket_of(&rows)))
    }

    /// With a weight in f32, whose kernel triggers the next one immediately.
    fn product(&self, x: &Tensor<Buf>, out: &Tensor<Buf>) -> Result<Op<Buf>> {
        let (n, k) = (out.row_len(), x.row_len());
        let w = Weight { blocks: vec![RowBlock::plain(self.tensor(DType::F32, &[n, k])?, 0)], n, k };
        Ok(Matmul {
            x: x.clone(),
            w,
            columns: None,
            bias: None,
            out: out.clone(),
            scale: 0.1,
            accumulate: false,
            precise: false,
        }
        .into())
    }

    /// An op from `x` to `out` and its states.
    fn stateful(&self, kind: Kind, x: &Tensor<Buf>, out: &Tensor<Buf>) -> Result<(Op<Buf>, Tensor<Buf>)> {
        let (step, x, out) = (self.step()?, x.clone(), out.clone());
        // Side by side in one buffer, as a projection leaves them.
        let columns = self.tensor(DType::Bf16, &[x.rows(), 2 * STATE + 2 * HEADS])?;
        let act = |at, width| columns.cols(at, width);
        let of_heads = |rows| self.tensor(DType::F32, &[rows, HEADS]);
        let slots = TOKENS as usize + 1;
        Ok(match kind {
            Kind::Conv => {
                let pool = self.tensor(DType::Bf16, &[slots, COLUMNS, 3])?;
                let weight = self.tensor(DType::F32, &[COLUMNS, 5])?;
                (Conv1d { step, x, weight, pool: pool.clone(), out, act: Act::Silu }.into(), pool)
            }
            Kind::Scan => {
                let pool = self.tensor(DType::F32, &[slots, HEADS, DIM, STATE])?;
                let (b, c, dt, par) = (act(0, STATE), act(STATE, STATE), act(2 * STATE, HEADS), of_heads(3)?);
                let op = SelectiveScan {
                    step,
                    x,
                    b,
                    c,
                    dt,
                    par,
                    pool: pool.clone(),
                    y: out,
                    form: ScanForm::PerHead,
                    heads_per_group: HEADS,
                    first_head: 0,
                    dt_limit: (0.0, f32::INFINITY),
                };
                (op.into(), pool)
            }
            Kind::Delta => {
                let pool = self.tensor(DType::F32, &[slots, HEADS, STATE, DIM])?;
                let (q, k, par) = (act(0, STATE), act(STATE, STATE), of_heads(2)?);
                let (a, b) = (act(2 * STATE, HEADS), act(2 * STATE + HEADS, HEADS));
                let op = GatedDelta {
                    step,
                    q,
                    k,
                    v: x,
                    a,
                    b,
                    par,
                    pool: pool.clone(),
                    out,
                    heads_per_key: HEADS,
                    first_head: 0,
                    beta_scale: 1.0,
                };
                (op.into(), pool)
            }
        })
    }
}

/// A long product reads memory that the stateful op will overwrite, the padding token's row last. The short product after it lets the
/// stateful op start when it starts itself, while the long one still reads.
fn compare(kind: Kind) -> Result<std::result::Result<(), Failed>> {
    let d = Device(Cuda::open(Options::default())?);
    let tokens = d.step()?.bucket.tokens;
    assert!(tokens > TOKENS as usize, "a bucket that is not full");
    let act = |columns| d.tensor(DType::Bf16, &[tokens, columns]);
    let (reused, x, long) = (act(COLUMNS)?, act(COLUMNS)?, d.tensor(DType::Bf16, &[1, 8])?);
    let all_of_it = Tensor::new(reused.buf.clone(), DType::Bf16, &[1, tokens * COLUMNS]);
    let (last, pool) = d.stateful(kind, &x, &reused)?;
    let ops = [d.product(&all_of_it, &long)?, d.product(&act(64)?, &x)?, last];

    let results =
        [("the long product", &long), ("the short product", &x), ("the output", &reused), ("the states", &pool)];
    let left = || -> Result<Vec<Vec<u8>>> { results.iter().map(|(_, t)| pollster::block_on(d.0.read(t))).collect() };
    // NaN where nothing is read before it is written, elsewhere the same numbers every time.
    let again = || -> Result<()> {
        [&long, &x].iter().try_for_each(|t| d.0.write(&t.buf, 0, &vec![0xff; t.len() * t.dtype.bytes()]))?;
        [&reused, &pool].into_iter().try_for_each(|t| d.fill(t))
    };
    again()?;
    for op in &ops {
        d.0.run(|r| r.op(op.clone()))?;
        left()?;
    }
    let apart = left()?;
    let tape = d.0.record(|r| ops.iter().try_for_each(|op| r.op(op.clone())))?;
    for time in 1..=TIMES {
        again()?;
        d.0.play(&tape)?;
        for ((name, _), (together, apart)) in results.iter().zip(left()?.iter().zip(&apart)) {
            if together != apart || apart.iter().all(|b| *b == 0) {
                return Ok(Err(format!("{name} differs in replay {time}, or is zero").into()));
            }
        }
    }
    Ok(Ok(()))
}
