//! What ranks on two CUDA devices pay for a sum: `cargo bench -p selkie-cuda --bench exchange`. A recorded step of 200 sums of
//! `[rows, 4096]` bf16 in a row, by the host's clock.

use std::time::Instant;

use selkie_core::{
    Result,
    backend::{Backend, Ops},
    ops::{AllReduce, Op, RmsNorm},
    tensor::{DType, Tensor},
};
use selkie_cuda::Options;

const SUMS: usize = 200;
const WIDTH: usize = 4096;
const RUNS: usize = 7;

/// Microseconds of one of the `n` parts of a step, the median of some runs.
fn time<B: Backend>(backend: &B, ops: &[Op<B::Buf>], n: usize) -> Result<f64> {
    let tape = backend.record(|rec| (0..n).try_for_each(|_| ops.iter().try_for_each(|op| rec.op(op.clone()))))?;
    let fence = Tensor::new(backend.alloc("fence", 4)?, DType::U32, &[1]);
    let mut times = Vec::with_capacity(RUNS);
    for run in 0..RUNS + 2 {
        pollster::block_on(backend.read(&fence))?;
        let start = Instant::now();
        backend.play(&tape)?;
        pollster::block_on(backend.read(&fence))?;
        if run >= 2 {
            times.push(start.elapsed().as_secs_f64() * 1e6 / n as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}

fn main() -> Result<()> {
    let backend = match selkie_cuda::ranks(&[0, 1], Options::default()) {
        Ok(backend) => backend,
        Err(e) => {
            println!("not measured: {e}");
            return Ok(());
        }
    };
    println!("{}", backend.caps().device);
    println!("| rows | sum, us | GB/s from each other rank | sum and norm, us |\n|---|---|---|---|");
    for rows in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192] {
        let tensor = |label: &str| {
            let bytes = (rows * WIDTH * DType::Bf16.bytes()) as u64;
            Ok::<_, selkie_core::Error>(Tensor::new(backend.alloc(label, bytes)?, DType::Bf16, &[rows, WIDTH]))
        };
        let (x, out, normed) = (tensor("x")?, tensor("out")?, tensor("normed")?);
        let weight = Tensor::new(backend.alloc("weight", 4 * WIDTH as u64)?, DType::F32, &[WIDTH]);
        let sum = AllReduce { x, out: out.clone(), accumulate: true };
        let (add, gate, accumulate, eps, groups) = (None, None, false, 1e-5, 1);
        let norm = RmsNorm { x: out, add, weight, gate, out: normed, accumulate, eps, groups };
        let alone = time(&backend, &[sum.clone().into()], SUMS)?;
        let both = time(&backend, &[sum.into(), norm.into()], SUMS)?;
        let rate = (rows * WIDTH * DType::Bf16.bytes()) as f64 / alone / 1e3;
        println!("| {rows} | {alone:.2} | {rate:.0} | {both:.2} |");
    }
    Ok(())
}
