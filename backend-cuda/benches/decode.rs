//! Times a decode step of a whole model with random weights, and the share of each kind of op.
//!
//! `decode CONFIG BATCH CONTEXT..`: a step of BATCH sequences, each at position CONTEXT - 1, for every pair. "without" is the
//! step with one kind of op left out; the difference is the cost of that kind in its place.

use std::collections::{BTreeMap, BTreeSet};

use selkie_core::{
    Error, Result,
    backend::{Backend, Ops},
    checkpoint::Checkpoint,
    config::Config,
    engine::pools,
    layer::LayerPools,
    models::{self, Limits, Model},
    ops::{LANE_WORDS, Op, Sample},
    step::{Bucket, Chunk, PAGE, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
    timer::Timer,
    weights::Loader,
};
use selkie_cuda::{Buf, Cuda, Options};

/// Passes on all ops but those of one kind.
struct Without<'a> {
    ops: &'a mut dyn Ops<Buf>,
    kind: &'a str,
    count: BTreeMap<String, usize>,
}

/// The name of an op; the product of the logits is a kind of its own.
fn kind(op: &Op<Buf>) -> String {
    match op {
        Op::Matmul(a) => format!("matmul {}x{}", a.w.n, a.w.k),
        _ => op.name().into(),
    }
}

impl Ops<Buf> for Without<'_> {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        let kind = kind(&op);
        if kind == self.kind {
            return Ok(());
        }
        *self.count.entry(kind).or_default() += 1;
        self.ops.op(op)
    }
}

/// One token in each of `n` rows at `position`, in place in slots 1 .. n.
fn rows(n: usize, position: u32) -> Vec<Row> {
    let pages = position / PAGE as u32 + 1;
    let row = |i: u32| Row {
        lane: i,
        first_position: position,
        tokens: vec![TokenRef::Known(i)],
        chunks: vec![Chunk { len: 1, src: Src::Slot(i + 1), dst: i + 1 }],
        pages: (0..pages).map(|p| 1 + i * pages + p).collect::<Vec<_>>().into(),
        outputs: vec![0],
    };
    (0..n as u32).map(row).collect()
}

struct Decode<'a> {
    cuda: &'a Cuda,
    model: &'a dyn Model<Cuda>,
    pools: Vec<LayerPools<Buf>>,
    step: Step<Buf>,
    last: Tensor<Buf>,
    sample: Sample<Buf>,
}

impl Decode<'_> {
    /// Microseconds of a step, and how many ops of each kind it has.
    fn time(&self, without: &str) -> Result<(f64, BTreeMap<String, usize>)> {
        let mut count = BTreeMap::new();
        let tape = self.cuda.record(|ops| {
            let mut filter = Without { ops, kind: without, count: BTreeMap::new() };
            self.model.forward(&mut filter, &self.step, &self.pools, &self.last)?;
            filter.op(self.sample.clone().into())?;
            count = filter.count;
            Ok(())
        })?;
        let times = |n: usize| (0..n).map(|_| pollster::block_on(self.cuda.time(&tape))).collect::<Result<Vec<f64>>>();
        times(5)?;
        let mut times = times(31)?;
        times.sort_by(f64::total_cmp);
        Ok((times[times.len() / 2], count))
    }
}

fn prepare<'a>(cuda: &'a Cuda, model: &'a dyn Model<Cuda>, batch: usize, context: usize) -> Result<Decode<'a>> {
    let pools = pools::alloc(cuda, model.spec(), batch, batch * context.div_ceil(PAGE))?;
    for (i, layer) in pools.iter().enumerate() {
        let kv = layer.kv.iter().flat_map(|kv| [&kv.k, &kv.v]);
        for pool in layer.conv.iter().chain(&layer.recurrent).chain(kv) {
            cuda.fill_random(pool, i as u32, 0.5)?;
        }
    }
    let ints =
        cuda.alloc("ints", 4 * Bucket::holding(batch, batch, batch, batch, context.div_ceil(PAGE)).words() as u64)?;
    let table = |columns: usize| -> Result<Tensor<Buf>> {
        Ok(Tensor::new(cuda.alloc("table", 4 * (batch * columns) as u64)?, DType::U32, &[batch, columns]))
    };
    let (last, ids) = (table(1)?, table(1)?);
    let (last, ids) = (Tensor::new(last.buf, DType::U32, &[batch]), Tensor::new(ids.buf, DType::U32, &[batch]));
    let (lanes, seen) = (table(LANE_WORDS)?, table(model.spec().vocab.div_ceil(32))?);
    // Greedy, without a penalty.
    let greedy: Vec<u32> =
        (0..batch * LANE_WORDS).map(|i| if i % LANE_WORDS == 3 { 1f32.to_bits() } else { 0 }).collect();
    cuda.write(&lanes.buf, 0, &greedy.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
    let rows = rows(batch, context as u32 - 1);
    let bucket = bucket_of(&rows);
    cuda.write(&ints, 0, &encode(&rows, bucket).iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
    let step = Step::new(ints, bucket);
    let logits = model.logits().head(bucket.outputs);
    let sample = Sample { step: step.clone(), logits, lanes, seen, last: last.clone(), ids };
    Ok(Decode { cuda, model, pools, step, last, sample })
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let usage = || Error::BadRequest("usage: decode CONFIG BATCH CONTEXT [BATCH CONTEXT]..".into());
    let (path, numbers) = args.split_first().ok_or_else(usage)?;
    let numbers: Vec<usize> = numbers.iter().map(|n| n.parse().map_err(|_| usage())).collect::<Result<_>>()?;
    let bytes = std::fs::read(path).map_err(|e| Error::io(std::path::Path::new(path), e))?;
    let config = Config::parse(path, &bytes)?;
    let shares = std::env::var_os("TOTAL_ONLY").is_none();
    let cuda = Cuda::open(Options::default())?;
    let checkpoint = Checkpoint::random(1);
    let batch = numbers.iter().step_by(2).copied().max().ok_or_else(usage)?;
    let mut report = |_| {};
    let mut loader = Loader::new(&cuda, &checkpoint, &mut report);
    let limits = Limits { max_tokens: batch, max_outputs: batch };
    let model = pollster::block_on(models::build(&models::read(&config)?, &mut loader, limits))?;
    for pair in numbers.chunks_exact(2) {
        let decode = prepare(&cuda, model.as_ref(), pair[0], pair[1])?;
        // The clocks come up.
        let started = std::time::Instant::now();
        while started.elapsed().as_millis() < 500 {
            decode.time("")?;
        }
        let (all, count) = decode.time("")?;
        let rate = 1e6 * pair[0] as f64 / all;
        println!("{path} B={} context {}: {all:.1} us a step, {rate:.0} tokens/s", pair[0], pair[1]);
        for kind in count.keys().filter(|_| shares).collect::<BTreeSet<_>>() {
            let cost = decode.time("")?.0 - decode.time(kind)?.0;
            println!("  {kind:<24} {:>4} ops {cost:>9.1} us {:>8.2} each", count[kind], cost / count[kind] as f64);
        }
    }
    Ok(())
}
