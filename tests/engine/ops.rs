//! Every op on every backend against the f64 references of `selkie_cases`.
//!
//! `cargo test --test ops` runs what fits the machine; `-- --include-ignored cpu` adds the shapes of published models, which
//! take long on a CPU.

mod common;

use std::collections::{HashMap, HashSet};

use libtest_mimic::{Failed, Trial};
use selkie_cases::{self as cases, Size};
use selkie_core::backend::{Backend, Ops};
use selkie_core::cpu::CpuBackend;
use selkie_core::format::{Format, Products};
use selkie_core::ops::{Act, Activation, Op};
use selkie_core::ranks::Ranks;
use selkie_core::tensor::{DType, Tensor};
use selkie_core::{Error, Result};
use selkie_cuda::{Cuda, Options};
use selkie_wgpu::WgpuBackend;
use selkie_wgpu::kernel::Spec;
use selkie_wgpu::lower::{Facts, lower};

fn ops_on<B: Backend>(name: &'static str, open: fn() -> Result<B>, largest: Size) -> Vec<Trial> {
    some_ops_on(name, open, largest, |_| true)
}

fn some_ops_on<B: Backend>(
    name: &'static str,
    open: fn() -> Result<B>,
    largest: Size,
    which: impl Fn(&cases::Case) -> bool,
) -> Vec<Trial> {
    some_trials(name, open, which, |case| case.size <= largest)
}

/// A trial of each case that `which` selects; those that `runs` does not select are ignored by default.
fn some_trials<B: Backend>(
    name: &'static str,
    open: fn() -> Result<B>,
    which: impl Fn(&cases::Case) -> bool,
    runs: impl Fn(&cases::Case) -> bool,
) -> Vec<Trial> {
    let test = |(i, case): (usize, cases::Case)| {
        let run = move |backend: &B| {
            let case = &cases::all()[i];
            let report = pollster::block_on(cases::run(backend, case)).map_err(|e| Failed::from(e.to_string()))?;
            if report.ok() { Ok(()) } else { Err(report.to_string().into()) }
        };
        let lacks = case.feature().is_some_and(|f| common::lacks(name, open, f));
        (case.id(), lacks || !runs(&case), run)
    };
    common::on(name, open, cases::all().into_iter().enumerate().filter(|(_, case)| which(case)).map(test))
}

/// `SELKIE_REQUIRE=wgpu` must not leave `wgpu-plain` out.
fn requirements() -> Result<(), Failed> {
    for (list, backend, expected) in [
        ("nvrtc,wgpu,browser", "wgpu", true),
        ("nvrtc, wgpu", "wgpu-plain", true),
        ("wgpu", "wgpu-few-barriers", true),
        ("wgpu", "wgpu-split-80k", true),
        ("wgpu", "wgpu-coop", false),
        ("wgpu-coop", "wgpu-coop", true),
        ("wgpu-coop", "wgpu", false),
        ("wgpu", "wgpu-coop-exact", false),
        ("cuda", "cuda-bf16-state", true),
        ("wgpu", "cuda", false),
        ("", "wgpu", false),
    ] {
        if common::required(list, backend) != expected {
            return Err(format!("SELKIE_REQUIRE={list:?} and {backend}: not {expected}").into());
        }
    }
    Ok(())
}

type Check = fn(&WgpuBackend) -> Result<(), Failed>;

/// Failures become errors that name the op or the buffer; calls after a lost device fail.
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
        // A backend of its own, since nothing works on it afterwards.
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

/// A buffer beyond the limit of a binding is bound in part: the same op on two parts of one length reads each of them.
fn parts_of_a_buffer(_: &WgpuBackend) -> Result<(), Failed> {
    let text = |e: Error| Failed::from(e.to_string());
    let b = common::wgpu_with(selkie_wgpu::Options { force_default_limits: true, ..PLAIN }).map_err(text)?;
    let far = b.facts().max_binding;
    let (large, out) = (b.alloc("large", far + 1024).map_err(text)?, b.alloc("out", 256).map_err(text)?);
    for (at, value) in [(0, 1f32), (far, 2.0)] {
        b.write(&large, at, &value.to_le_bytes().repeat(64)).map_err(text)?;
        let mut gate = Tensor::new(large.clone(), DType::F32, &[1, 64]);
        gate.offset = at as usize / 4;
        let out = Tensor::new(out.clone(), DType::F32, &[1, 64]);
        let op = Activation { gate, up: None, row_gate: None, out: out.clone(), act: Act::Identity };
        b.run(|ops| ops.op(op.into())).map_err(text)?;
        let got = DType::F32.to_f32(&pollster::block_on(b.read(&out)).map_err(text)?);
        if got != [value; 64] {
            return Err(format!("at byte {at}: {got:?}").into());
        }
    }
    Ok(())
}

/// Ops that a backend may make one kernel of: a trial of each case, which is wrong if there is a difference.
fn differences_on<B: Backend, C: Send + 'static>(
    name: &'static str,
    open: fn() -> Result<B>,
    cases: Vec<C>,
    title: fn(&C) -> String,
    difference: fn(&C, &B) -> Result<Option<String>>,
) -> Vec<Trial> {
    let trial = |case: C| {
        let title = title(&case);
        let run = move |b: &B| match difference(&case, b) {
            Ok(None) => Ok(()),
            Ok(Some(what)) => Err(what.into()),
            Err(e) => Err(e.to_string().into()),
        };
        (title, false, run)
    };
    common::on(name, open, cases.into_iter().map(trial))
}

/// Several ops that wgpu makes one dispatch of, and the same one by one.
fn fusions_on(name: &'static str, open: fn() -> Result<WgpuBackend>) -> Vec<Trial> {
    let title = |case: &cases::Chain| format!("fuses {}", case.name);
    differences_on(name, open, cases::chains(), title, |case, b| pollster::block_on(case.difference(b)))
}

/// Products of rounded activations, with the ops before them.
fn rounded_on<B: Backend>(name: &'static str, open: fn() -> Result<B>) -> Vec<Trial> {
    let title = |case: &cases::Rounded| format!("rounds {}", case.name());
    differences_on(name, open, cases::rounded(), title, |case, b| pollster::block_on(case.difference(b)))
}

/// The experts' choice and both their halves, in one step and one by one.
fn expert_chains_on<B: Backend>(name: &'static str, open: fn() -> Result<B>) -> Vec<Trial> {
    let title = |case: &cases::ExpertChain| format!("experts {}", case.name());
    differences_on(name, open, cases::expert_chains(), title, |case, b| pollster::block_on(case.difference(b)))
}

/// The shader variants that a device with these facts has for an op.
fn variants(op: &Op<cases::Plain>, facts: &Facts) -> Vec<Spec> {
    // If no variant takes the shape, the case itself fails.
    lower(op, facts).unwrap_or_default().into_iter().map(|kernel| kernel.spec).collect()
}

/// The cases for a software device: the small ones, once with the same shaders, and, for each shader variant that none of
/// them needs, the next case that does.
/// A device in hardware runs all up to a size.
#[derive(Default)]
struct Coverage {
    /// Backends on a software device, and ids of the cases that each runs.
    runs: HashMap<&'static str, HashSet<String>>,
    /// Variants that no case of these runs, and a case that needs each.
    missing: Vec<String>,
}

impl Coverage {
    fn new() -> Self {
        let mut facts = Vec::new();
        for wgpu in &WGPUS {
            if let Some(b) = common::opened(wgpu.name, wgpu.open).ok().filter(|b| b.is_software()) {
                facts.push((wgpu, b.facts()));
            }
        }
        if facts.is_empty() {
            return Self::default();
        }
        let mut cases = cases::all();
        cases.sort_by_key(|case| case.size);
        let (mut runs, mut seen, mut needed) = (HashMap::<_, HashSet<String>>::new(), HashSet::new(), HashMap::new());
        for case in cases {
            let (op, mut run) = (case.plain_op(), Vec::new());
            for (wgpu, facts) in &facts {
                let variants = variants(&op, facts);
                for spec in &variants {
                    needed.entry(spec.clone()).or_insert_with(|| format!("{} {}", wgpu.name, case.id()));
                }
                if (wgpu.which)(&case) {
                    let new = variants.iter().filter(|spec| seen.insert((*spec).clone())).count() > 0;
                    if new || (case.size == Size::Small && !run.contains(&variants)) {
                        runs.entry(wgpu.name).or_default().insert(case.id());
                    }
                    run.push(variants);
                }
            }
        }
        let missing = needed.into_iter().filter(|(spec, _)| !seen.contains(spec));
        Self { runs, missing: missing.map(|(spec, case)| format!("{} of {case}", spec.label())).collect() }
    }

    /// Whether `wgpu` runs a case by default.
    fn runs(&self, wgpu: &Wgpu, case: &cases::Case) -> bool {
        self.runs.get(wgpu.name).map_or(case.size <= wgpu.largest, |ids| ids.contains(&case.id()))
    }

    fn check(&self) -> Result<(), Failed> {
        if self.missing.is_empty() { Ok(()) } else { Err(self.missing.join("\n").into()) }
    }
}

/// wgpu with options that select other shaders.
struct Wgpu {
    name: &'static str,
    open: fn() -> Result<WgpuBackend>,
    /// Most work that a case may be on a device in hardware.
    largest: Size,
    which: fn(&cases::Case) -> bool,
}

const PLAIN: selkie_wgpu::Options = selkie_wgpu::Options {
    force_default_limits: false,
    max_piece: None,
    no_subgroups: true,
    f32: true,
    few_barriers: None,
    kv8: false,
    products: Products::Fast,
};

const WGPUS: [Wgpu; 4] = [
    Wgpu { name: "wgpu", open: common::wgpu, largest: Size::Bench, which: |_| true },
    Wgpu {
        name: "wgpu-exact",
        open: || {
            let products = Products::Exact;
            common::wgpu_with(selkie_wgpu::Options { no_subgroups: false, products, ..PLAIN })
        },
        largest: Size::Bench,
        which: |case| case.op == "matmul" && case.format != Format::Plain,
    },
    Wgpu { name: "wgpu-plain", open: || common::wgpu_with(PLAIN), largest: Size::Small, which: |_| true },
    Wgpu {
        name: "wgpu-few-barriers",
        open: || common::wgpu_with(selkie_wgpu::Options { few_barriers: Some(true), ..PLAIN }),
        largest: Size::Small,
        which: |case| ["matmul", "selective_scan", "attention"].contains(&case.op),
    },
];

fn main() {
    let mut trials = vec![Trial::test("SELKIE_REQUIRE covers variants", requirements)];
    trials.extend(ops_on("cpu", || Ok(CpuBackend::new()), Size::Large));
    let coded = |case: &cases::Case| case.format != Format::Plain;
    trials.extend(some_ops_on("cpu-exact", || Ok(CpuBackend::with(Products::Exact)), Size::Large, coded));
    // The collectives: every rank gets a case's arguments. Other ops are the same on each.
    let collective = |case: &cases::Case| ["all_reduce", "all_gather", "rank_norm"].contains(&case.op);
    trials.extend(some_ops_on("cpu-3-ranks", || Ranks::open(3, Products::Fast), Size::Large, collective));
    let two = || selkie_cuda::ranks(&[0, 1], Options::default());
    trials.extend(some_ops_on("cuda-2-ranks", two, Size::Large, collective));
    let two = || selkie_cuda::ranks(&[0, 1], Options { f32: true, ..Options::default() });
    trials.extend(some_ops_on("cuda-f32-2-ranks", two, Size::Large, collective));
    let generic = || Cuda::open(Options { generic: true, ..Options::default() });
    trials.extend(ops_on("cuda", || Cuda::open(Options::default()), Size::Bench));
    trials.extend(ops_on("cuda-generic", generic, Size::Large));
    trials.extend(ops_on("cuda-f32", || Cuda::open(Options { f32: true, ..Options::default() }), Size::Large));
    let bf16_state = || Cuda::open(Options { bf16_state: true, ..Options::default() });
    let recurrent = |case: &cases::Case| ["selective_scan", "gated_delta"].contains(&case.op);
    trials.extend(some_ops_on("cuda-bf16-state", bf16_state, Size::Bench, recurrent));
    let coverage = Coverage::new();
    for wgpu in &WGPUS {
        trials.extend(some_trials(wgpu.name, wgpu.open, wgpu.which, |case| coverage.runs(wgpu, case)));
    }
    trials.push(Trial::test("every shader variant that a software device can run is run", move || coverage.check()));
    trials.extend(ops_on("wgpu-coop", common::wgpu_coop, Size::Bench));
    let product = |case: &cases::Case| case.op == "matmul";
    trials.extend(some_ops_on("wgpu-coop-exact", common::wgpu_coop_exact, Size::Bench, product));
    trials.extend(common::on("wgpu", common::wgpu, wgpu_failures()));
    let parts = ("parts of a buffer beyond the limit of a binding".to_owned(), false, parts_of_a_buffer as Check);
    trials.extend(common::on("wgpu", common::wgpu, [parts]));
    trials.extend(expert_chains_on("cuda", || Cuda::open(Options::default())));
    trials.extend(rounded_on("cpu", || Ok(CpuBackend::new())));
    trials.extend(rounded_on("cuda", || Cuda::open(Options::default())));
    trials.extend(rounded_on("cuda-generic", generic));
    trials.extend(rounded_on("cuda-f32", || Cuda::open(Options { f32: true, ..Options::default() })));
    trials.extend(rounded_on("wgpu", common::wgpu));
    trials.extend(fusions_on("wgpu", common::wgpu));
    trials.extend(fusions_on("wgpu-plain", WGPUS[2].open));
    common::run(trials)
}
