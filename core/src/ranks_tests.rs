use pollster::block_on;

use super::*;
use crate::{
    ops::{AllGather, AllReduce, RankNorm, RmsNorm},
    tensor::DType,
};

fn matrix(b: &Ranks, rows: usize, columns: usize) -> Tensor<Buf> {
    Tensor::new(b.alloc("x", 4 * (rows * columns) as u64).unwrap(), DType::F32, &[rows, columns])
}

/// Writes values of its own on every rank.
fn fill(b: &Ranks, x: &Tensor<Buf>, value: impl Fn(usize, usize) -> f32) {
    for rank in 0..b.caps().ranks {
        let values: Vec<f32> = (0..x.len()).map(|i| value(rank, i)).collect();
        b.write_on(rank, &x.buf, 0, bytemuck::cast_slice(&values)).unwrap();
    }
}

fn values(b: &Ranks, rank: usize, x: &Tensor<Buf>) -> Result<Vec<f32>> {
    Ok(DType::F32.to_f32(&block_on(b.read_on(rank, x))?))
}

#[test]
fn sums_and_columns_of_all_ranks_are_equal_on_all_of_them() {
    let b = Ranks::open(3, Products::default()).unwrap();
    let (x, sum, all) = (matrix(&b, 2, 4), matrix(&b, 2, 4), matrix(&b, 2, 12));
    fill(&b, &x, |rank, i| (10 * rank + i) as f32);
    fill(&b, &sum, |_, _| 1.0);
    b.run(|ops| {
        ops.op(AllReduce { x: x.clone(), out: sum.clone(), accumulate: true }.into())?;
        ops.op(AllGather { x: x.clone(), out: all.clone() }.into())
    })
    .unwrap();
    let want_sum: Vec<f32> = (0..8).map(|i| (1 + 30 + 3 * i) as f32).collect();
    let columns = |t: usize| (0..3).flat_map(move |rank| (0..4).map(move |c| (10 * rank + 4 * t + c) as f32));
    let want_all: Vec<f32> = (0..2).flat_map(columns).collect();
    for rank in 0..3 {
        assert_eq!(values(&b, rank, &sum).unwrap(), want_sum, "rank {rank}");
        assert_eq!(values(&b, rank, &all).unwrap(), want_all, "rank {rank}");
    }
}

#[test]
fn a_norm_over_pairs_of_ranks_is_that_of_the_whole_row() {
    let b = Ranks::open(4, Products::default()).unwrap();
    let (x, weight, out) = (matrix(&b, 1, 4), matrix(&b, 1, 4), matrix(&b, 1, 4));
    fill(&b, &x, |rank, i| (rank + i) as f32 - 2.5);
    fill(&b, &weight, |rank, i| 1.0 + (rank * 4 + i) as f32);
    let weight = Tensor::new(weight.buf.clone(), DType::F32, &[4]);
    let (add, gate, accumulate, eps, groups) = (None, None, false, 1e-5, 1);
    let norm = RmsNorm { x, add, weight, gate, out: out.clone(), accumulate, eps, groups };
    b.run(|ops| ops.op(RankNorm { norm, ranks: 2 }.into())).unwrap();
    for rank in 0..4 {
        let of = |rank: usize| (0..4).map(move |i| (rank + i) as f64 - 2.5);
        let first = rank / 2 * 2;
        let mean = of(first).chain(of(first + 1)).map(|v| v * v).sum::<f64>() / 8.0;
        let want = of(rank).enumerate().map(|(i, v)| v / (mean + 1e-5).sqrt() * (1 + rank * 4 + i) as f64);
        for (got, want) in values(&b, rank, &out).unwrap().into_iter().zip(want) {
            assert!((f64::from(got) - want).abs() < 1e-5 * (1.0 + want.abs()), "rank {rank}: {got}, not {want}");
        }
    }
}

#[test]
fn a_tape_is_played_by_all_and_states_are_saved_by_rank() {
    let b = Ranks::open(2, Products::default()).unwrap();
    let (x, sum) = (matrix(&b, 2, 2), matrix(&b, 2, 2));
    fill(&b, &x, |rank, i| (4 * rank + i) as f32);
    let tape = b.record(|ops| ops.op(AllReduce { x: x.clone(), out: sum.clone(), accumulate: true }.into())).unwrap();
    b.play(&tape).unwrap();
    b.play(&tape).unwrap();
    assert_eq!(values(&b, 1, &sum).unwrap(), [8.0, 12.0, 16.0, 20.0]);
    let mut saving = b.save(std::slice::from_ref(&x), 1, Box::new(vec![0; 16])).unwrap();
    let saved = block_on(saving.arrive()).unwrap();
    assert_eq!(DType::F32.to_f32(&saved), [2.0, 3.0, 6.0, 7.0]);
    b.restore(&saved, std::slice::from_ref(&sum), 0).unwrap();
    assert_eq!(values(&b, 0, &sum).unwrap(), [2.0, 3.0, 16.0, 20.0]);
    assert_eq!(values(&b, 1, &sum).unwrap(), [6.0, 7.0, 16.0, 20.0]);
}

#[test]
fn a_save_is_not_waited_for_while_a_rank_works() {
    let b = Ranks::open(2, Products::default()).unwrap();
    let (x, sum) = (matrix(&b, 1, 1), matrix(&b, 1, 1));
    fill(&b, &x, |rank, _| rank as f32);
    let op =
        Op::from(AllReduce { x: x.clone(), out: sum.clone(), accumulate: false }).rebind(&mut |buf: &Buf| buf.0.id);
    let meet = |rank: usize| b.links.tell(&b.links.ranks[rank..=rank], &Command::Run([op.clone()].into())).unwrap();
    // Rank 1 waits in the sum for rank 0.
    meet(1);
    let mut saving = b.save(std::slice::from_ref(&sum), 0, Box::new(vec![0; 8])).unwrap();
    assert!(saving.take().is_none());
    meet(0);
    let mut saved = saving.take();
    while saved.is_none() {
        thread::yield_now();
        saved = saving.take();
    }
    assert_eq!(DType::F32.to_f32(&saved.unwrap().unwrap())[1], 1.0);
}

#[test]
fn a_rank_that_panics_ends_all_with_its_reason() {
    let b = Ranks::open(3, Products::default()).unwrap();
    let (x, sum) = (matrix(&b, 1, 1), matrix(&b, 1, 1));
    // A buffer that rank 1 does not have.
    b.links.tell(&b.links.ranks[1..2], &Command::Free(x.buf.0.id)).unwrap();
    b.run(|ops| ops.op(AllReduce { x, out: sum.clone(), accumulate: false }.into())).unwrap();
    let error = values(&b, 0, &sum).unwrap_err().to_string();
    assert!(error.contains("rank 1: it panicked"), "{error}");
    let error = loop {
        // Until the others have seen it too.
        match b.write(&sum.buf, 0, &[0; 4]) {
            Ok(()) => thread::yield_now(),
            Err(e) => break e.to_string(),
        }
    };
    assert!(error.contains("rank 1: it panicked"), "{error}");
}

#[test]
fn a_rank_that_does_nothing_is_waited_for_until_the_deadline() {
    let b = Ranks::with_deadline(2, Products::default(), Duration::from_millis(500)).unwrap();
    let (x, sum) = (matrix(&b, 1, 1), matrix(&b, 1, 1));
    let op =
        Op::from(AllReduce { x: x.clone(), out: sum.clone(), accumulate: false }).rebind(&mut |buf: &Buf| buf.0.id);
    b.links.tell(&b.links.ranks[..1], &Command::Run([op].into())).unwrap();
    let error = values(&b, 0, &sum).unwrap_err().to_string();
    assert!(error.contains("1 of 2 ranks came within 500ms"), "{error}");
}

#[test]
fn impossible_numbers_and_sizes_are_refused() {
    for ranks in [0, MOST_RANKS + 1] {
        assert!(matches!(Ranks::open(ranks, Products::default()), Err(Error::BadRequest(_))));
    }
    let b = Ranks::open(2, Products::default()).unwrap();
    assert!(matches!(b.alloc("pool", 1 << 50), Err(Error::OutOfMemory { .. })));
    let x = matrix(&b, 1, 4);
    assert!(b.write(&x.buf, 8, &[0; 12]).is_err() && b.write(&x.buf, u64::MAX, &[1]).is_err());
}
