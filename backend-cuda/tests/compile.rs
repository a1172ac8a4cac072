//! Compiles through NVRTC, without a GPU, what the planner returns for the shapes of the supported models: every variant
//! for sm_90a, the base shapes for the other targets. Prints registers and spills.
//!
//! Ignored, not passed, where NVRTC is missing; `SELKIE_REQUIRE=nvrtc` turns that into a failure.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_cuda::{nvrtc, spec::Spec};

#[path = "shapes/mod.rs"]
mod shapes;

fn main() {
    let args = Arguments::from_args();
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|v| v.split(',').any(|r| r == "nvrtc"));
    let ignored = nvrtc::missing().is_some() && !required;
    let trial = |(arch, kib, all): (&'static str, usize, bool)| {
        let run = move || compile(arch, kib << 10, all);
        Trial::test(format!("every kernel compiles for {arch}"), run).with_ignored_flag(ignored)
    };
    // With the shared memory that a block of these devices may ask for, in KiB.
    let targets = [
        ("sm_90a", 227, true),
        ("sm_80", 163, false),
        ("sm_89", 99, false),
        ("sm_100a", 227, false),
        ("sm_120a", 99, false),
    ];
    let mut trials: Vec<Trial> = targets.map(trial).into();
    trials.push(Trial::test("heads that are no multiple of 4 are refused", || {
        // The row of four heads of 6 is one.
        let taken: Vec<usize> = [4, 6, 12, 30, 60].into_iter().filter(|&hd| shapes::takes_heads_of(hd)).collect();
        if taken == [4, 12, 60] { Ok(()) } else { Err(format!("{taken:?} are taken").into()) }
    }));
    libtest_mimic::run(&args, trials).exit();
}

fn compile(arch: &str, shared: usize, all: bool) -> Result<(), Failed> {
    if let Some(why) = nvrtc::missing() {
        return Err(why.into());
    }
    let filter = std::env::var("SELKIE_KERNEL").unwrap_or_default();
    let specs: BTreeSet<Spec> =
        shapes::specs(arch, all, shared).into_iter().filter(|s| s.file().stem().contains(&filter)).collect();
    let specs: Vec<Spec> = specs.into_iter().collect();
    let (next, report) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let line = match nvrtc::compile(spec, arch) {
                        Ok(image) => Ok((spec.to_string(), resources(&image.log))),
                        Err(e) => Err(e.to_string()),
                    };
                    report.lock().expect("no thread panics with the lock").push(line);
                }
            });
        }
    });
    let mut report = report.into_inner().expect("no thread panicked");
    report.sort();
    let mut failures = Vec::new();
    for line in &report {
        match line {
            Ok((spec, (registers, stack, spills, shared))) => {
                println!(
                    "{arch} {registers:>4} registers {stack:>5} B stack {spills:>5} B spilled {shared:>6} B shared  {spec}"
                );
            }
            Err(e) => failures.push(e.clone()),
        }
    }
    if report.is_empty() {
        failures.push("no kernel was compiled".into());
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n").into()) }
}

/// Registers, bytes of stack, of spill stores, and of shared memory, from the assembler's lines in a log.
fn resources(log: &str) -> (usize, usize, usize, usize) {
    let before = |what: &str| {
        let at = log.find(what)?;
        log[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    (
        before("registers").unwrap_or(0),
        before("bytes stack frame").unwrap_or(0),
        before("bytes spill stores").unwrap_or(0),
        before("bytes smem").unwrap_or(0),
    )
}
