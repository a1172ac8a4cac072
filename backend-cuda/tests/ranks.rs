//! Sums and columns over two devices: values that differ by rank, messages of all lengths in turn, recorded steps played again.
//! Both ranks get the same bits. A fault of the second device is an error of both, soon.
//!
//! Ignored, not passed, without two devices; `SELKIE_REQUIRE=cuda-2-ranks` turns that into a failure.

use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use pollster::block_on;
use selkie_core::{
    Error, Result,
    backend::{Backend, Handle, Ops},
    ops::{AllGather, AllReduce},
    ranks::Ranks,
    tensor::{DType, Tensor},
};
use selkie_cuda::Options;

mod paged;

const RANKS: usize = 2;
const ROUNDS: usize = 60;

fn main() {
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == "cuda-2-ranks"));
    let ignored = matches!(open(), Err(Error::NoDevice { .. })) && !required;
    let run = || exchanges().unwrap_or_else(|e| Err(e.to_string().into()));
    let trials = vec![
        Trial::test("exchanges of all lengths", run).with_ignored_flag(ignored),
        // Brings the contexts down, so it is the last.
        Trial::test("a fault of the second device", fault).with_ignored_flag(ignored),
    ];
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    libtest_mimic::run(&args, trials).exit();
}

fn open() -> Result<Ranks> {
    selkie_cuda::ranks(&[0, 1], Options { f32: true, ..Options::default() })
}

/// A small whole number, so that sums are exact.
fn value(round: usize, rank: usize, i: usize) -> f32 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_mul((round * RANKS + rank + 1) as u64);
    (mixed >> 56) as f32 - 128.0
}

fn exchanges() -> Result<std::result::Result<(), Failed>> {
    let ranks = open()?;
    let tensor = |label: &str, dims: [usize; 2]| {
        Ok::<_, Error>(Tensor::new(ranks.alloc(label, (4 * dims[0] * dims[1]) as u64)?, DType::F32, &dims))
    };
    for round in 0..ROUNDS {
        let (rows, width) = ([1, 3, 64, 700, 40][round % 5], [64, 1000, 4096, 33][round % 4]);
        let (x, sum, all) =
            (tensor("x", [rows, width])?, tensor("sum", [rows, width])?, tensor("all", [rows, RANKS * width])?);
        for rank in 0..RANKS {
            let values: Vec<u8> = (0..x.len()).flat_map(|i| value(round, rank, i).to_le_bytes()).collect();
            ranks.write_on(rank, &x.buf, 0, &values)?;
        }
        let tape = ranks.record(|ops| {
            ops.op(AllReduce { x: x.clone(), out: sum.clone(), accumulate: true }.into())?;
            ops.op(AllGather { x: x.clone(), out: all.clone() }.into())
        })?;
        let plays = 1 + round % 3;
        (0..plays).try_for_each(|_| ranks.play(&tape))?;
        let total = |i: usize| plays as f32 * (0..RANKS).map(|rank| value(round, rank, i)).sum::<f32>();
        let column = |i: usize| {
            let (row, column) = (i / (RANKS * width), i % (RANKS * width));
            value(round, column / width, row * width + column % width)
        };
        for rank in 0..RANKS {
            let sums = DType::F32.to_f32(&block_on(ranks.read_on(rank, &sum))?);
            let columns = DType::F32.to_f32(&block_on(ranks.read_on(rank, &all))?);
            let wrong = (0..sums.len()).find(|&i| sums[i] != total(i));
            let misplaced = (0..columns.len()).find(|&i| columns[i] != column(i));
            if wrong.is_some() || misplaced.is_some() {
                let what =
                    format!("round {round}, rank {rank}, [{rows}, {width}]: sum {wrong:?}, column {misplaced:?}");
                return Ok(Err(what.into()));
            }
        }
    }
    Ok(Ok(()))
}

/// Rank 1 reads a page that does not exist, while rank 0 waits in a kernel for its values. The error comes long before that kernel
/// gives up. It names either rank: the fault takes away memory that rank 0 reaches, too.
fn fault() -> std::result::Result<(), Failed> {
    let began = Instant::now();
    let run = || -> Result<Vec<u8>> {
        let ranks = selkie_cuda::ranks(&[0, 1], Options::default())?;
        let (bucket, good) = paged::step(0);
        let ints = ranks.alloc("ints", good.len() as u64)?;
        ranks.write_on(0, &ints, 0, &good)?;
        ranks.write_on(1, &ints, 0, &paged::step(1 << 29).1)?;
        let op = paged::attention(&ranks, ints, bucket)?;
        let x = op.out.clone();
        let out = Tensor::new(ranks.alloc("sum", x.buf.bytes())?, x.dtype, &[1, x.row_len()]);
        ranks.reserve(ranks.scratch(&op.clone().into()))?;
        let tape = ranks.record(|ops| {
            ops.op(op.into())?;
            ops.op(AllReduce { x, out: out.clone(), accumulate: false }.into())
        })?;
        ranks.play(&tape)?;
        block_on(ranks.read(&out))
    };
    match run() {
        Err(e) if e.to_string().contains("ILLEGAL_ADDRESS") && began.elapsed() < Duration::from_secs(30) => {
            eprintln!("after {:?}: {e}", began.elapsed());
            Ok(())
        }
        other => Err(format!("after {:?}: {other:?}", began.elapsed()).into()),
    }
}
