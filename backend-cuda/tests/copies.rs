//! Values are copied to host memory and back while other work runs: each has the bytes that were there when the copy was enqueued,
//! whatever is written later, and comes back before what is enqueued later.
//!
//! Ignored, not passed, without a device; `SELKIE_REQUIRE=cuda` turns that into a failure.

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::{
    Error, Result,
    backend::Backend,
    saved::Saving,
    source::Bytes,
    tensor::{DType, Tensor},
};
use selkie_cuda::{Buf, Cuda, Options};

/// Rows of each tensor.
const ROWS: usize = 6;
/// Elements of a row: aligned for wide accesses, and not; together more than a piece of the buffer.
const LENGTHS: [(DType, usize); 4] =
    [(DType::F32, 1 << 20), (DType::Bf16, 33), (DType::F32, 9 << 20), (DType::Bf16, 64)];
/// Rounds, so that the buffer is used several times over.
const ROUNDS: usize = 4;

fn main() {
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == "cuda"));
    let ignored = matches!(Cuda::open(Options::default()), Err(Error::NoDevice { .. })) && !required;
    let test = || there_and_back().unwrap_or_else(|e| Err(e.to_string().into()));
    let early = || fetched_early().unwrap_or_else(|e| Err(e.to_string().into()));
    let trials = vec![
        Trial::test("there and back", test).with_ignored_flag(ignored),
        Trial::test("fetched early", early).with_ignored_flag(ignored),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn row(cuda: &Cuda, pools: &[Tensor<Buf>], row: usize) -> Result<Vec<u8>> {
    let reads = pools.iter().map(|pool| pollster::block_on(cuda.read(&pool.slice_rows(row, 1))));
    Ok(reads.collect::<Result<Vec<_>>>()?.concat())
}

fn poison(cuda: &Cuda, pools: &[Tensor<Buf>], row: usize) -> Result<()> {
    pools.iter().try_for_each(|pool| {
        let bytes = vec![0xff; pool.row_len() * pool.dtype.bytes()];
        cuda.write(&pool.buf, pool.slice_rows(row, 1).byte_offset() as u64, &bytes)
    })
}

fn there_and_back() -> Result<std::result::Result<(), Failed>> {
    let cuda = Cuda::open(Options::default())?;
    let pools = LENGTHS.map(|(dtype, len)| {
        let t = Tensor::new(cuda.alloc("pool", (ROWS * len * dtype.bytes()) as u64)?, dtype, &[ROWS, len]);
        cuda.fill_random(&t, len as u32, 1.0).map(|_| t)
    });
    let pools = pools.into_iter().collect::<Result<Vec<_>>>()?;
    let value: usize = LENGTHS.iter().map(|(dtype, len)| dtype.bytes() * len).sum();
    let memory = cuda.host_memory((ROWS * value.next_multiple_of(4096)) as u64)?;
    let expected = (0..ROWS).map(|i| row(&cuda, &pools, i)).collect::<Result<Vec<_>>>()?;
    let (mut bytes, mut time) = (0, 0.0);
    for round in 0..ROUNDS {
        let mut saving: Vec<Box<dyn Saving>> = Vec::new();
        for i in 0..ROWS {
            let Some(room) = memory.take(value) else { return Ok(Err(format!("round {round}: no room").into())) };
            saving.push(cuda.save(&pools, i, room)?);
            poison(&cuda, &pools, i)?;
        }
        if memory.take(value).is_some() {
            return Ok(Err("there is more room than was asked for".into()));
        }
        let saved: Vec<Bytes> =
            saving.iter_mut().map(|saving| pollster::block_on(saving.arrive())).collect::<Result<_>>()?;
        if let Some(i) = (0..ROWS).find(|i| saved[*i][..] != expected[*i][..]) {
            return Ok(Err(format!("round {round}: row {i} was saved wrongly").into()));
        }
        for (i, value) in saved.iter().enumerate() {
            cuda.restore(value, &pools, i)?;
        }
        drop(saved);
        for (i, expected) in expected.iter().enumerate() {
            if row(&cuda, &pools, i)? != *expected {
                return Ok(Err(format!("round {round}: row {i} came back wrongly").into()));
            }
        }
        // Values are let go of when they have been counted.
        let (more, took) = cuda.restored().unwrap_or_default();
        (bytes, time) = (bytes + more, time + took);
    }
    if bytes != (ROUNDS * ROWS * value) as u64 || time <= 0.0 {
        return Ok(Err(format!("{bytes} bytes in {time} ms were measured").into()));
    }
    println!("values of {value} bytes came back at {:.1} GB/s", bytes as f64 / time / 1e6);
    Ok(Ok(()))
}

/// Values that wait in the buffer come back as those that do not, also after others took their place there.
fn fetched_early() -> Result<std::result::Result<(), Failed>> {
    const LEN: usize = 3 << 20;
    let cuda = Cuda::open(Options::default())?;
    let rows = 64;
    let pool = Tensor::new(cuda.alloc("pool", (4 * rows * LEN) as u64)?, DType::F32, &[rows, LEN]);
    cuda.fill_random(&pool, 7, 1.0)?;
    let pools = [pool];
    let memory = cuda.host_memory((4 * rows * LEN) as u64)?;
    let mut saved = Vec::new();
    for i in 0..rows {
        let Some(room) = memory.take(4 * LEN) else { return Ok(Err(format!("no room for value {i}").into())) };
        saved.push(pollster::block_on(cuda.save(&pools, i, room)?.arrive())?);
    }
    // A few wait; then all come, which takes the buffer several times.
    for few in [1, 4, rows] {
        let at_once = saved.iter().take(few).map(|value| cuda.fetch(value)).collect::<Result<Vec<_>>>()?;
        if at_once[0] {
            return Ok(Err("nothing was fetched".into()));
        }
        for i in (few.min(rows - 1)..rows).chain(0..few.min(rows - 1)) {
            poison(&cuda, &pools, i)?;
            cuda.restore(&saved[i], &pools, i)?;
        }
        for (i, value) in saved.iter().enumerate() {
            if row(&cuda, &pools, i)? != value[..] {
                return Ok(Err(format!("{few} fetched: row {i} came back wrongly").into()));
            }
        }
    }
    Ok(Ok(()))
}
