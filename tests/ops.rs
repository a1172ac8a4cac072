//! Every op on every backend against the f64 references of `selkie_core::cases`.
//!
//! `cargo test --test ops` runs what fits the machine; `-- --include-ignored cpu` adds the shapes of published models, which
//! take long on a CPU.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::backend::{Backend, Ops};
use selkie_core::cases::{self, Size};
use selkie_core::cpu::CpuBackend;
use selkie_core::ops::{Act, Activation, Conv1d, Gate, Matmul, Op, RmsNorm, RowBlock, Weight};
use selkie_core::step::{Chunk, Row, Step, bucket_of, encode};
use selkie_core::tensor::{DType, Tensor};
use selkie_core::{Error, Result};
use selkie_cuda::{Cuda, Options};
use selkie_wgpu::{Buf, WgpuBackend};

fn ops_on<B: Backend>(name: &'static str, open: fn() -> Result<B>, largest: Size) -> Vec<Trial> {
    some_ops_on(name, open, largest, |_| true)
}

fn some_ops_on<B: Backend>(
    name: &'static str,
    open: fn() -> Result<B>,
    largest: Size,
    which: fn(&cases::Case) -> bool,
) -> Vec<Trial> {
    let test = |(i, case): (usize, cases::Case)| {
        let run = move |backend: &B| {
            let case = &cases::all()[i];
            let report = pollster::block_on(cases::run(backend, case)).map_err(|e| Failed::from(e.to_string()))?;
            if report.ok() { Ok(()) } else { Err(report.to_string().into()) }
        };
        (case.id(), case.size > largest, run)
    };
    common::on(name, open, cases::all().into_iter().enumerate().filter(|(_, case)| which(case)).map(test))
}

fn bindings() -> Result<(), Failed> {
    for case in cases::all().into_iter().filter(|c| c.size != Size::Bench) {
        let n = case.bindings() + 1;
        if n > 8 {
            return Err(format!("{} binds {n} buffers, scratch included", case.id()).into());
        }
    }
    Ok(())
}

type Together = Box<dyn FnOnce(&WgpuBackend) -> Result<(), Failed> + Send>;
type Check = fn(&WgpuBackend) -> Result<(), Failed>;

/// What goes wrong becomes an error that names the op or the buffer, and no later call pretends otherwise.
fn wgpu_failures() -> Vec<(String, bool, Check)> {
    let memory: Check = |b| match b.alloc("a pool", 1 << 50) {
        Err(Error::OutOfMemory { what, asked, .. }) if what == "a pool" && asked == 1 << 50 => Ok(()),
        other => Err(format!("{other:?}").into()),
    };
    let outside: Check = |b| {
        let buf = b.alloc("x", 16).map_err(|e| e.to_string())?;
        match b.write(&buf, 8, &[0; 12]) {
            Err(Error::Device { op, .. }) if op == "write" => Ok(()),
            other => Err(format!("{other:?}").into()),
        }
    };
    let lost: Check = |_| {
        // Of its own, since nothing works on it any more.
        let b = common::wgpu().map_err(|e| e.to_string())?;
        let buf = b.alloc("x", 16).map_err(|e| e.to_string())?;
        b.lose();
        match pollster::block_on(b.read(&Tensor::new(buf, DType::F32, &[4]))) {
            Err(Error::Device { .. }) => Ok(()),
            other => Err(format!("{other:?}").into()),
        }
    };
    [("an allocation that no device has room for", memory), ("a write past the end", outside), ("a lost device", lost)]
        .map(|(name, check)| (format!("fails: {name}"), false, check))
        .into()
}

/// A norm, a product and an activation in a row, which wgpu makes one dispatch of, and the same one by one.
fn wgpu_fusions() -> Vec<(String, bool, Together)> {
    let case = |rows: usize, k: usize, n: usize, gate: bool, up: bool| -> (String, bool, Together) {
        let name =
            format!("fuses {rows} x {k} -> {n}{}{}", if gate { ", gate" } else { "" }, if up { ", up" } else { "" });
        (name, false, Box::new(move |b: &WgpuBackend| fusion(b, rows, k, n, gate, up).map_err(|e| e.to_string())?))
    };
    vec![
        case(1, 256, 48, false, false),
        case(1, 3072, 36, true, true),
        case(3, 72, 40, true, false),
        case(8, 520, 64, false, true),
        ("fuses a convolution".into(), false, Box::new(|b: &WgpuBackend| convolution(b).map_err(|e| e.to_string())?)),
    ]
}

/// Values that are the same in every run, uniform in -1 .. 1.
fn filled(b: &WgpuBackend, name: &str, seed: u32, dims: &[usize]) -> Result<Tensor<Buf>> {
    let buf = b.alloc(name, 4 * dims.iter().product::<usize>() as u64)?;
    let value = |i: usize| (((i as u32 + 1) * seed) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..dims.iter().product()).map(value).collect();
    b.write(&buf, 0, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())?;
    Ok(Tensor::new(buf, DType::F32, dims))
}

/// Whether `ops` in one step leave in `results` what they leave one by one.
fn together(b: &WgpuBackend, ops: &[Op<Buf>], results: &[(&str, &Tensor<Buf>)]) -> Result<Result<(), Failed>> {
    let read = |(_, t): &(&str, &Tensor<Buf>)| -> Result<Vec<f32>> {
        let bytes = pollster::block_on(b.read(t))?;
        Ok(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    };
    let all = || results.iter().map(read).collect::<Result<Vec<_>>>();
    b.run(|rec| ops.iter().try_for_each(|op| rec.op(op.clone())))?;
    let together = all()?;
    for op in ops {
        b.run(|rec| rec.op(op.clone()))?;
    }
    for (((name, _), a), b) in results.iter().zip(together).zip(all()?) {
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max);
        if worst >= 1e-4 || worst.is_nan() || b.iter().all(|v| *v == 0.0) {
            return Ok(Err(format!("{name} differs by {worst}").into()));
        }
    }
    Ok(Ok(()))
}

/// The convolution of one token's columns: from one slot to another, after the product that makes them.
fn convolution(b: &WgpuBackend) -> Result<Result<(), Failed>> {
    let (k, n, channels) = (256, 60, 40);
    let row = Row {
        lane: 0,
        first_position: 5,
        ids: vec![1],
        chunks: vec![Chunk { len: 1, src: 2, dst: 1 }],
        pages: vec![],
        outputs: vec![0],
    };
    let bucket = bucket_of(std::slice::from_ref(&row));
    let ints = encode(&[row], bucket);
    let buf = b.alloc("ints", 4 * ints.len() as u64)?;
    b.write(&buf, 0, &ints.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())?;
    let out = filled(b, "out", 0, &[1, n])?;
    let (pool, conv) = (filled(b, "pool", 17, &[3, channels, 3])?, filled(b, "conv", 0, &[1, channels])?);
    let weight = Weight { blocks: vec![RowBlock { w: filled(b, "w", 1_299_709, &[n, k])?, col: 0 }], n, k };
    let x = filled(b, "x", 7919, &[1, k])?;
    let product = Matmul { x, w: weight, bias: None, out: out.clone(), scale: 1.0, accumulate: false };
    let next = Conv1d {
        step: Step::new(buf, bucket),
        x: out.cols(12, channels),
        weight: filled(b, "taps", 31, &[channels, 5])?,
        pool: pool.clone(),
        out: conv.clone(),
        act: Act::Silu,
    };
    together(b, &[product.into(), next.into()], &[("out", &out), ("pool", &pool), ("conv", &conv)])
}

fn fusion(b: &WgpuBackend, rows: usize, k: usize, n: usize, gate: bool, up: bool) -> Result<Result<(), Failed>> {
    let tensor = |name: &str, seed: u32, dims: &[usize]| filled(b, name, seed, dims);
    let (x, z, norm) = (tensor("x", 7919, &[rows, k])?, tensor("z", 104_729, &[rows, k])?, tensor("norm", 31, &[k])?);
    let width = if up { 2 * n } else { n };
    let w = tensor("w", 1_299_709, &[width, k])?;
    let (u, out, mid) = (tensor("u", 0, &[rows, k])?, tensor("out", 0, &[rows, width])?, tensor("mid", 0, &[rows, n])?);
    let gate = gate.then(|| Gate { z: z.clone(), act: Act::Silu, before: true });
    let weight = Weight { blocks: vec![RowBlock { w, col: 0 }], n: width, k };
    let ops: [Op<_>; 3] = [
        RmsNorm { x, add: None, weight: norm, gate, out: u.clone(), eps: 1e-5, groups: 1 }.into(),
        Matmul { x: u.clone(), w: weight, bias: None, out: out.clone(), scale: 0.5, accumulate: false }.into(),
        Activation {
            gate: out.cols(0, n),
            up: up.then(|| out.cols(n, n)),
            row_gate: None,
            out: mid.clone(),
            act: if up { Act::Silu } else { Act::Relu2 },
        }
        .into(),
    ];
    together(b, &ops, &[("u", &u), ("out", &out), ("mid", &mid)])
}

/// On a software device only correctness counts.
fn wgpu_sizes() -> Size {
    if common::wgpu().is_ok_and(|b| b.is_software()) { Size::Small } else { Size::Bench }
}

fn main() {
    let mut args = Arguments::from_args();
    // A device is opened once per thread, and the CPU backend has threads of its own.
    args.test_threads.get_or_insert(1);
    let mut trials = vec![Trial::test("no op binds more than 8 buffers", bindings)];
    trials.extend(ops_on("cpu", || Ok(CpuBackend::new()), Size::Large));
    trials.extend(ops_on("cuda", || Cuda::open(Options::default()), Size::Bench));
    trials.extend(ops_on("cuda-generic", || Cuda::open(Options { generic: true, ..Options::default() }), Size::Large));
    trials.extend(ops_on("cuda-f32", || Cuda::open(Options { f32: true, ..Options::default() }), Size::Large));
    let bf16_state = || Cuda::open(Options { bf16_state: true, ..Options::default() });
    let recurrent = |case: &cases::Case| ["selective_scan", "gated_delta"].contains(&case.op);
    trials.extend(some_ops_on("cuda-bf16-state", bf16_state, Size::Bench, recurrent));
    trials.extend(ops_on("wgpu", common::wgpu, wgpu_sizes()));
    let plain = || common::wgpu_with(selkie_wgpu::Options { no_subgroups: true, f32: true, ..Default::default() });
    trials.extend(ops_on("wgpu-plain", plain, Size::Small));
    let few_barriers = || {
        common::wgpu_with(selkie_wgpu::Options {
            few_barriers: Some(true),
            no_subgroups: true,
            f32: true,
            ..Default::default()
        })
    };
    trials.extend(some_ops_on("wgpu-few-barriers", few_barriers, Size::Small, |case| {
        ["matmul", "selective_scan", "attention"].contains(&case.op)
    }));
    trials.extend(ops_on("wgpu-coop", common::wgpu_coop, Size::Bench));
    trials.extend(common::on("wgpu", common::wgpu, wgpu_failures()));
    trials.extend(common::on("wgpu", common::wgpu, wgpu_fusions()));
    trials.extend(common::on("wgpu-plain", plain, wgpu_fusions()));
    libtest_mimic::run(&args, trials).exit();
}
