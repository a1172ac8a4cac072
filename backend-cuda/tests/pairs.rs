//! A norm or an activation, the product after it and a convolution after that write the same bits as one kernel and as two or
//! three. So do experts and the activation after them, both halves of experts of many tokens, and one token alone as together with a few,
//! the choice of a token's experts and both halves of these, a product of two inputs and its convolution, and two short products.
//!
//! Ignored, not passed, without a device; `SELKIE_REQUIRE=cuda` turns that into a failure.

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::{
    Error, Result,
    backend::{Backend, Handle, Ops},
    ops::{
        Act, Activation, Conv1d, ExpertMatmul, ExpertRange, Gate, Matmul, Op, RmsNorm, Route, Router, RowBlock, Weight,
    },
    step::{Chunk, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
};
use selkie_cuda::{Buf, Cuda, Options};

fn main() {
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == "cuda"));
    let ignored = matches!(Cuda::open(Options::default()), Err(Error::NoDevice { .. })) && !required;
    let trials = [
        ("norm, 768", Lead::Norm { groups: 1, gate: None }, 768, 3384),
        ("norm, 4096", Lead::Norm { groups: 1, gate: None }, 4096, 18560),
        ("norm, an inner dim of no slice", Lead::Norm { groups: 1, gate: None }, 1000, 40),
        ("norm, long, an inner dim of no whole step", Lead::Norm { groups: 1, gate: None }, 1000, 28008),
        ("norm after a gate, groups of 1024", Lead::Norm { groups: 8, gate: Some(true) }, 8192, 4096),
        ("norm after a gate, one group", Lead::Norm { groups: 1, gate: Some(true) }, 1536, 768),
        ("norm before a gate, heads of 128", Lead::Norm { groups: 32, gate: Some(false) }, 4096, 2048),
        ("silu with a factor", Lead::Activation { act: Act::Silu, up: true, row_gate: false }, 2048, 768),
        ("relu2", Lead::Activation { act: Act::Relu2, up: false, row_gate: false }, 21504, 4096),
        ("silu with a factor and a gate", Lead::Activation { act: Act::Silu, up: true, row_gate: true }, 512, 2048),
        ("relu2, dealt row by row", Lead::Activation { act: Act::Relu2, up: false, row_gate: false }, 3712, 2688),
        ("relu2 with a gate", Lead::Activation { act: Act::Relu2, up: false, row_gate: true }, 4096, 18560),
        ("gelu with a factor, 1000", Lead::Activation { act: Act::Gelu, up: true, row_gate: false }, 1000, 52),
    ]
    .into_iter()
    .flat_map(|(name, lead, k, n)| {
        [(String::new(), None), (", convolution in place".into(), Some(1)), (", convolution".into(), Some(2))].map(
            |(and, dst): (String, Option<u32>)| {
                let run = move || compare(lead, k, n, dst).unwrap_or_else(|e| Err(e.to_string().into()));
                Trial::test(format!("{name}{and}"), run).with_ignored_flag(ignored)
            },
        )
    });
    let experts = [
        ("experts, relu2", [1, 6, 2688, 1856], Act::Relu2, false),
        ("experts, relu2, 4 tokens", [4, 6, 2688, 1856], Act::Relu2, false),
        ("experts, silu with a factor", [1, 10, 2048, 512], Act::Silu, true),
        ("experts, silu with a factor, 3 tokens", [3, 10, 2048, 512], Act::Silu, true),
        ("experts, gelu with a factor, an inner dim of no step", [2, 3, 1000, 200], Act::Gelu, true),
        ("experts, relu2, 200 tokens", [200, 6, 2688, 1856], Act::Relu2, false),
        ("experts, silu with a factor, 500 tokens", [500, 8, 2048, 512], Act::Silu, true),
        ("experts, gelu with a factor, 90 tokens, dims of no step", [90, 3, 1000, 200], Act::Gelu, true),
    ]
    .map(|(name, dims, act, up)| {
        let run = move || compare_experts(dims, act, up).unwrap_or_else(|e| Err(e.to_string().into()));
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    let sigmoid = Router::Sigmoid { groups: 1, topk_group: 1, renorm: true, sum_eps: 1e-6, scale: 1.5 };
    let choices = [
        ("choice by softmax, 8 of 256", [256, 8, 2048, 512], Router::SoftmaxTopK { renorm: true }, Act::Silu, true),
        ("choice by softmax, not to 1", [60, 4, 1000, 200], Router::SoftmaxTopK { renorm: false }, Act::Gelu, true),
        ("choice before softmax, 10 of 72", [72, 10, 1536, 768], Router::TopKSoftmax, Act::Silu, true),
        ("choice by sigmoid, 4 of 32", [32, 4, 2048, 1792], sigmoid, Act::Silu, true),
        ("choice by sigmoid, 6 of 128", [128, 6, 2688, 1856], sigmoid, Act::Relu2, false),
    ]
    .map(|(name, dims, router, act, up)| {
        let run = move || compare_choice(dims, router, act, up).unwrap_or_else(|e| Err(e.to_string().into()));
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    let gated = [("", 1, 2048), (", to another slot", 2, 2048), (", odd", 2, 1001)].map(|(and, dst, channels)| {
        let run = move || compare_gated(channels, dst).unwrap_or_else(|e| Err(e.to_string().into()));
        Trial::test(format!("gated convolution{and}"), run).with_ignored_flag(ignored)
    });
    let twins = [
        ("two products after a norm", true, 2304, [256, 2048]),
        ("two products after a norm, odd", true, 1000, [40, 101]),
        ("two products of two inputs", false, 128, [4096, 4096]),
        ("two products of two inputs, odd", false, 1000, [100, 52]),
    ]
    .map(|(name, norm, k, n)| {
        let run = move || compare_twins(norm, k, n).unwrap_or_else(|e| Err(e.to_string().into()));
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    let trials = trials.chain(experts).chain(choices).chain(gated).chain(twins);
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(1);
    libtest_mimic::run(&args, trials.collect()).exit();
}

#[derive(Clone, Copy)]
enum Lead {
    Norm { groups: usize, gate: Option<bool> },
    Activation { act: Act, up: bool, row_gate: bool },
}

/// `n` output columns; `dst`: the slot that a convolution of all but the first and last 8 of them writes, from slot 1.
fn compare(lead: Lead, k: usize, n: usize, dst: Option<u32>) -> Result<std::result::Result<(), Failed>> {
    let cuda = Cuda::open(Options::default())?;
    let tensor = |dtype: DType, dims: &[usize]| random(&cuda, dtype, dims);
    let (mid, out) = (tensor(DType::Bf16, &[1, k])?, tensor(DType::Bf16, &[1, n])?);
    let mut ops: Vec<Op<Buf>> = vec![match lead {
        Lead::Norm { groups, gate } => {
            let (x, z) = (tensor(DType::Bf16, &[1, k])?, tensor(DType::Bf16, &[1, k])?);
            let gate = gate.map(|before| Gate { z, act: Act::Silu, before });
            let weight = tensor(DType::F32, &[k])?;
            RmsNorm { x, add: None, weight, gate, out: mid.clone(), accumulate: false, eps: 1e-5, groups }.into()
        }
        Lead::Activation { act, up, row_gate } => {
            let all = tensor(DType::Bf16, &[1, 2 * k + 8])?;
            let (gate, up) = (all.cols(0, k), up.then(|| all.cols(k, k)));
            Activation { gate, up, row_gate: row_gate.then(|| all.cols(2 * k, 1)), out: mid.clone(), act }.into()
        }
    }];
    let w = Weight { blocks: vec![RowBlock::plain(tensor(DType::Bf16, &[n, k])?, 0)], n, k };
    ops.push(
        Matmul {
            x: mid.clone(),
            w,
            columns: None,
            bias: None,
            out: out.clone(),
            scale: 1.0,
            accumulate: false,
            precise: false,
        }
        .into(),
    );
    let mut results = vec![mid, out.clone()];
    let mut pools = Vec::new();
    if let Some(dst) = dst {
        let (c, step) = (n - 16, one_token(&cuda, dst)?);
        let (pool, conv) = (tensor(DType::Bf16, &[3, c, 3])?, tensor(DType::Bf16, &[1, c])?);
        let (x, weight) = (out.cols(8, c), tensor(DType::F32, &[c, 5])?);
        ops.push(Conv1d { step, x, weight, pool: pool.clone(), out: conv.clone(), act: Act::Silu }.into());
        results.extend([conv, pool.clone()]);
        pools.push(pool);
    }
    let clear = || -> Result<()> {
        for t in &results {
            cuda.write(&t.buf, 0, &vec![0; t.buf.bytes() as usize])?;
        }
        pools.iter().try_for_each(|t| cuda.fill_random(t, t.buf.id() as u32, 1.0).map(|_| ()))
    };
    same(&cuda, &ops, &results.iter().collect::<Vec<_>>(), &clear)
}

/// Both halves of experts for `tokens` tokens, joined, op by op, and the first token alone if few tokens have the same kernels.
fn compare_experts(
    [tokens, top, width, inner]: [usize; 4],
    act: Act,
    up: bool,
) -> Result<std::result::Result<(), Failed>> {
    let (cuda, experts, n) = (Cuda::open(Options::default())?, 2 * top, if up { 2 * inner } else { inner });
    let tensor = |dtype: DType, dims: &[usize]| random(&cuda, dtype, dims);
    let chosen: Vec<u32> = (0..tokens).flat_map(|t| (0..top).map(move |j| (2 * j + t % 2) as u32)).collect();
    let ids = Tensor::new(cuda.alloc("ids", 4 * chosen.len() as u64)?, DType::U32, &[tokens, top]);
    cuda.write(&ids.buf, 0, &chosen.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
    let (x, weights) = (tensor(DType::Bf16, &[tokens, width])?, tensor(DType::F32, &[tokens, top])?);
    let (proj, mid) = (tensor(DType::Bf16, &[tokens * top, n])?, tensor(DType::Bf16, &[tokens * top, inner])?);
    let (first, second) =
        (random_experts(&cuda, [experts, n, width])?, random_experts(&cuda, [experts, width, inner])?);
    let out = tensor(DType::Bf16, &[tokens, width])?;
    let ops = |tokens: usize| -> Vec<Op<Buf>> {
        let (ids, proj, mid) = (ids.head(tokens), proj.head(tokens * top), mid.head(tokens * top));
        let (gate, factor) = (proj.cols(0, inner), up.then(|| proj.cols(inner, inner)));
        let (combine, out) = (Some(weights.head(tokens)), out.head(tokens));
        let experts = first.clone();
        let x = x.head(tokens);
        let up = ExpertMatmul { x, experts, ids: ids.clone(), combine: None, out: proj, scale: 1.0, accumulate: false };
        let then = Activation { gate, up: factor, row_gate: None, out: mid.clone(), act };
        let (x, experts) = (mid, second.clone());
        let down = ExpertMatmul { x, experts, ids, combine, out, scale: 0.5, accumulate: true };
        vec![up.into(), then.into(), down.into()]
    };
    let results = [&proj, &mid, &out];
    let clear = || -> Result<()> {
        for t in results {
            cuda.write(&t.buf, 0, &vec![0; t.buf.bytes() as usize])?;
        }
        cuda.fill_random(&out, 7, 1.0).map(|_| ())
    };
    let left = |tokens: usize| -> Result<Vec<Vec<u8>>> {
        let of = |t: &Tensor<Buf>| pollster::block_on(cuda.read(&t.head(t.rows() / ids.rows() * tokens)));
        results.into_iter().map(of).collect()
    };
    clear()?;
    ops(tokens).into_iter().try_for_each(|op| cuda.run(|r| r.op(op.clone())))?;
    let (apart, apart_first) = (left(tokens)?, left(1)?);
    clear()?;
    let tape = cuda.record(|r| ops(tokens).into_iter().try_for_each(|op| r.op(op)))?;
    cuda.play(&tape)?;
    let together = left(tokens)?;
    clear()?;
    cuda.run(|r| ops(1).into_iter().try_for_each(|op| r.op(op)))?;
    let few = tokens * top < 32;
    let (alone, zero) = (!few || left(1)? == apart_first, apart.iter().any(|v| v.iter().all(|b| *b == 0)));
    let same = apart == together && alone && !zero;
    Ok(if same { Ok(()) } else { Err(format!("joined {}, alone {alone}, all zero {zero}", apart == together).into()) })
}

/// Random numbers on a device.
fn random(cuda: &Cuda, dtype: DType, dims: &[usize]) -> Result<Tensor<Buf>> {
    let bytes = dims.iter().product::<usize>() * dtype.bytes();
    let t = Tensor::new(cuda.alloc("random", bytes.next_multiple_of(16) as u64)?, dtype, dims);
    cuda.fill_random(&t, t.buf.id() as u32, 1.0)?;
    Ok(t)
}

/// Weights `[experts, N, K]`.
fn random_experts(cuda: &Cuda, dims: [usize; 3]) -> Result<Vec<ExpertRange<Buf>>> {
    let blocks = vec![RowBlock::plain(random(cuda, DType::Bf16, &dims)?, 0)];
    Ok(vec![ExpertRange { first: 0, experts: dims[0], blocks }])
}

/// A step of one token of a sequence whose state is in slot 1 and goes to `dst`.
fn one_token(cuda: &Cuda, dst: u32) -> Result<Step<Buf>> {
    let chunks = vec![Chunk { len: 1, src: Src::Slot(1), dst }];
    let rows =
        [Row { first_position: 70, tokens: vec![TokenRef::Known(0)], chunks, outputs: vec![0], ..Row::default() }];
    let words = encode(&rows, bucket_of(&rows));
    let ints = cuda.alloc("ints", 4 * words.len() as u64)?;
    cuda.write(&ints, 0, &words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
    Ok(Step::new(ints, bucket_of(&rows)))
}

/// What the ops leave in `results` one by one and together, after `before` each time.
fn same(
    cuda: &Cuda,
    ops: &[Op<Buf>],
    results: &[&Tensor<Buf>],
    before: &dyn Fn() -> Result<()>,
) -> Result<std::result::Result<(), Failed>> {
    let left = || -> Result<Vec<Vec<u8>>> { results.iter().map(|t| pollster::block_on(cuda.read(t))).collect() };
    before()?;
    ops.iter().try_for_each(|op| cuda.run(|r| r.op(op.clone())))?;
    let apart = left()?;
    before()?;
    let tape = cuda.record(|r| ops.iter().try_for_each(|op| r.op(op.clone())))?;
    cuda.play(&tape)?;
    let together = left()?;
    let zero = apart.iter().any(|v| v.iter().all(|b| *b == 0));
    Ok(if apart == together && !zero { Ok(()) } else { Err(format!("bits differ, or all are zero: {zero}").into()) })
}

/// The choice of one token's experts from the product before it, and both halves of them.
fn compare_choice(
    [experts, top, width, inner]: [usize; 4],
    router: Router,
    act: Act,
    up: bool,
) -> Result<std::result::Result<(), Failed>> {
    let (cuda, n) = (Cuda::open(Options::default())?, if up { 2 * inner } else { inner });
    let tensor = |dtype: DType, dims: &[usize]| random(&cuda, dtype, dims);
    let (x, logits) = (tensor(DType::Bf16, &[1, width])?, tensor(DType::F32, &[1, experts])?);
    let ids = Tensor::new(cuda.alloc("ids", 4 * top as u64)?, DType::U32, &[1, top]);
    let weights = tensor(DType::F32, &[1, top])?;
    let (proj, mid) = (tensor(DType::Bf16, &[top, n])?, tensor(DType::Bf16, &[top, inner])?);
    let out = tensor(DType::Bf16, &[1, width])?;
    let w = Weight { blocks: vec![RowBlock::plain(tensor(DType::Bf16, &[experts, width])?, 0)], n: experts, k: width };
    let (to, scale) = (logits.clone(), 1.0);
    let product =
        Matmul { x: x.clone(), w, columns: None, bias: None, out: to, scale, accumulate: false, precise: false };
    let bias = matches!(router, Router::Sigmoid { .. }).then(|| tensor(DType::F32, &[experts])).transpose()?;
    let (step, combine) = (one_token(&cuda, 1)?, Some(weights.clone()));
    let route = Route { step, logits: logits.clone(), bias, ids: ids.clone(), weights: weights.clone(), router };
    let (of, to) = (random_experts(&cuda, [experts, n, width])?, proj.clone());
    let first = ExpertMatmul { x, experts: of, ids: ids.clone(), combine: None, out: to, scale, accumulate: false };
    let (gate, factor) = (proj.cols(0, inner), up.then(|| proj.cols(inner, inner)));
    let then = Activation { gate, up: factor, row_gate: None, out: mid.clone(), act };
    let (of, x, to) = (random_experts(&cuda, [experts, width, inner])?, mid.clone(), out.clone());
    let second = ExpertMatmul { x, experts: of, ids: ids.clone(), combine, out: to, scale: 0.5, accumulate: true };
    let results = [&ids, &weights, &proj, &mid, &out];
    let clear = || -> Result<()> {
        for t in [&logits].into_iter().chain(results) {
            cuda.write(&t.buf, 0, &vec![0; t.buf.bytes() as usize])?;
        }
        cuda.fill_random(&out, 7, 1.0).map(|_| ())
    };
    same(&cuda, &[product.into(), route.into(), first.into(), then.into(), second.into()], &results, &clear)
}

/// Two products of `k` columns with `n` rows each, after the norm of their input or of neighbouring inputs.
fn compare_twins(norm: bool, k: usize, n: [usize; 2]) -> Result<std::result::Result<(), Failed>> {
    let cuda = Cuda::open(Options::default())?;
    let tensor = |dtype: DType, dims: &[usize]| random(&cuda, dtype, dims);
    let (mid, outs) =
        (tensor(DType::Bf16, &[1, 2 * k])?, [tensor(DType::F32, &[1, n[0]])?, tensor(DType::Bf16, &[1, n[1]])?]);
    let mut ops: Vec<Op<Buf>> = Vec::new();
    let inputs = if norm { [mid.cols(0, k), mid.cols(0, k)] } else { [mid.cols(0, k), mid.cols(k, k)] };
    if norm {
        let (x, weight, out) = (tensor(DType::Bf16, &[1, k])?, tensor(DType::F32, &[k])?, inputs[0].clone());
        let op = RmsNorm { x, add: None, weight, gate: None, out, accumulate: false, eps: 1e-5, groups: 1 };
        ops.push(op.into());
    }
    for (x, out) in inputs.into_iter().zip(&outs) {
        let n = out.row_len();
        let w = Weight { blocks: vec![RowBlock::plain(tensor(DType::Bf16, &[n, k])?, 0)], n, k };
        ops.push(
            Matmul { x, w, columns: None, bias: None, out: out.clone(), scale: 0.5, accumulate: false, precise: false }
                .into(),
        );
    }
    let clear = || outs.iter().try_for_each(|t| cuda.write(&t.buf, 0, &vec![0; t.buf.bytes() as usize]));
    same(&cuda, &ops, &outs.each_ref(), &clear)
}

/// The product of two inputs and its convolution, for one token whose state goes to slot `dst`.
fn compare_gated(channels: usize, dst: u32) -> Result<std::result::Result<(), Failed>> {
    let cuda = Cuda::open(Options::default())?;
    let tensor = |dtype: DType, dims: &[usize]| random(&cuda, dtype, dims);
    let both = tensor(DType::Bf16, &[1, 3 * channels])?;
    let (mid, out) = (tensor(DType::Bf16, &[1, channels])?, tensor(DType::Bf16, &[1, channels])?);
    let (pool, weight) = (tensor(DType::Bf16, &[3, channels, 2])?, tensor(DType::F32, &[channels, 4])?);
    let (gate, up) = (both.cols(0, channels), Some(both.cols(2 * channels, channels)));
    let product = Activation { gate, up, row_gate: None, out: mid.clone(), act: Act::Identity };
    let (step, x) = (one_token(&cuda, dst)?, mid.clone());
    let conv = Conv1d { step, x, weight, pool: pool.clone(), out: out.clone(), act: Act::Identity };
    let clear = || -> Result<()> {
        for t in [&mid, &out] {
            cuda.write(&t.buf, 0, &vec![0; t.buf.bytes() as usize])?;
        }
        cuda.fill_random(&pool, 3, 1.0).map(|_| ())
    };
    same(&cuda, &[product.into(), conv.into()], &[&mid, &out, &pool], &clear)
}
