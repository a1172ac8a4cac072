//! Every op on every backend against the f64 references of `selkie_cases`.
//!
//! `cargo test --test ops` runs what fits the machine; `-- --include-ignored cpu` adds the shapes of published models, which
//! take long on a CPU.

mod common;

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_cases::{self as cases, Size};
use selkie_core::backend::Backend;
use selkie_core::cpu::CpuBackend;
use selkie_core::tensor::{DType, Tensor};
use selkie_core::{Error, Result};
use selkie_cuda::{Cuda, Options};
use selkie_wgpu::WgpuBackend;

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

/// Several ops that wgpu makes one dispatch of, and the same one by one.
fn fusions_on(name: &'static str, open: fn() -> Result<WgpuBackend>) -> Vec<Trial> {
    let case = |chain: cases::Chain| {
        let name = format!("fuses {}", chain.name);
        let run = move |b: &WgpuBackend| match pollster::block_on(chain.difference(b)) {
            Ok(None) => Ok(()),
            Ok(Some(what)) => Err(what.into()),
            Err(e) => Err(e.to_string().into()),
        };
        (name, false, run)
    };
    common::on(name, open, cases::chains().into_iter().map(case))
}

/// On a software device only correctness counts.
fn wgpu_sizes() -> Size {
    if common::wgpu().is_ok_and(|b| b.is_software()) { Size::Small } else { Size::Bench }
}

fn main() {
    let mut args = Arguments::from_args();
    // A device is opened once per thread, and the CPU backend has threads of its own.
    args.test_threads.get_or_insert(1);
    let mut trials = ops_on("cpu", || Ok(CpuBackend::new()), Size::Large);
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
    trials.extend(fusions_on("wgpu", common::wgpu));
    trials.extend(fusions_on("wgpu-plain", plain));
    libtest_mimic::run(&args, trials).exit();
}
