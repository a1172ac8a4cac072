//! Compiles the planner's kernels for the shapes of the supported models with NVRTC, without a GPU: for sm_90a those of every
//! shape, with every dtype for three of them; for the other targets those of one shape and every kernel that it does not take.
//! Prints registers, spills and time; a spill that is not listed is an error, and so is a kernel that no variant used.
//!
//! Ignored, not passed, where NVRTC is missing; `SELKIE_REQUIRE=nvrtc` turns that into a failure.

use std::{
    collections::BTreeSet,
    ffi::CString,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use cudarc::nvrtc::result;
use libtest_mimic::{Arguments, Failed, Trial};
use selkie_cuda::{
    arguments::Parameter,
    nvrtc,
    spec::{File, Spec},
};

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
    trials.push(Trial::test("parameters have the sizes that the host writes", parameters).with_ignored_flag(ignored));
    trials.push(Trial::test("heads that are no multiple of 4 are refused", || {
        // The row of four heads of 6 is one.
        let taken: Vec<usize> = [4, 6, 12, 30, 60].into_iter().filter(|&hd| shapes::takes_heads_of(hd)).collect();
        if taken == [4, 12, 60] { Ok(()) } else { Err(format!("{taken:?} are taken").into()) }
    }));
    trials.push(Trial::test("experts of many tokens are sorted once", || {
        use File::*;
        let apart = [ExpertSort, ExpertGrouped, Activation, ExpertSort, ExpertGrouped, ExpertCombine];
        let expected = [
            (("sm_90a", 512), &[ExpertSort, ExpertWgmma, ExpertWgmma, ExpertCombine][..]),
            (("sm_90a", 9), &apart[..]),
            (("sm_100a", 512), &apart[..]),
            (("sm_90a", 5), &[ExpertStream, ExpertStream][..]),
        ];
        let wrong = expected.iter().find(|((arch, tokens), files)| shapes::expert_kernels(arch, *tokens) != *files);
        wrong.map_or(Ok(()), |((arch, tokens), _)| {
            Err(format!("{arch}, {tokens} tokens: {:?}", shapes::expert_kernels(arch, *tokens)).into())
        })
    }));
    trials.push(Trial::test("coded experts of few pairs are sorted once", || {
        use File::*;
        let apart =
            [Round, ExpertSort, ExpertGroupedCodes, Activation, Round, ExpertSort, ExpertGroupedCodes, ExpertCombine];
        let expected = [
            (("sm_90a", 64), &[Round, ExpertSort, ExpertRingCodes, Round, ExpertRingCodes, ExpertCombine][..]),
            (("sm_90a", 2048), &apart[..]),
            (("sm_80", 64), &apart[..]),
            (("sm_90a", 1), &[ExpertStreamCodes, ExpertStreamCodes][..]),
        ];
        let wrong =
            expected.iter().find(|((arch, tokens), files)| shapes::coded_expert_kernels(arch, *tokens) != *files);
        wrong.map_or(Ok(()), |((arch, tokens), _)| {
            Err(format!("{arch}, {tokens} tokens: {:?}", shapes::coded_expert_kernels(arch, *tokens)).into())
        })
    }));
    trials.push(Trial::test("short products of one token share a kernel", || {
        use File::*;
        let layer = [MatmulSkinnyBulk, MatmulSkinnyBulk, ExpertStream, ExpertStream];
        let found = shapes::mixture_kernels("sm_90a", 1);
        if found == [layer.to_vec(), vec![MatmulSkinnyBulk]] { Ok(()) } else { Err(format!("{found:?}").into()) }
    }));
    trials.push(Trial::test("a rounding goes with its product", || {
        let expected = [
            ("sm_90a", &[File::Route, File::MatmulCodes][..]),
            ("sm_80", &[File::Route, File::Round, File::MatmulCodes]),
        ];
        let wrong = expected.iter().find(|(arch, files)| shapes::rounding_kernels(arch) != *files);
        wrong.map_or(Ok(()), |(arch, _)| Err(format!("{arch}: {:?}", shapes::rounding_kernels(arch)).into()))
    }));
    libtest_mimic::run(&args, trials).exit();
}

/// Kernels that the planner never returns for a target, with any shape.
fn absent(arch: &str, shared: usize) -> BTreeSet<File> {
    let mut absent = BTreeSet::new();
    if arch != "sm_90a" {
        absent.extend([File::AttentionWgmma, File::ExpertWgmma, File::LatentAttentionWgmma, File::MatmulCodesWgmma]);
        // Products of codes.
        absent.extend([File::CodesRows, File::RoundCodes]);
    }
    if arch.starts_with("sm_8") {
        // Bulk copies.
        absent.extend([File::ExpertRingCodes, File::ExpertStream, File::ExpertStreamCodes]);
        absent.extend([File::Gemv, File::MatmulSkinnyBulk]);
    }
    if shared < 128 << 10 {
        // The stages of the chunked recurrences need more shared memory.
        absent.extend([
            File::GatedDeltaChunk,
            File::GatedDeltaPrepare,
            File::GatedDeltaPrepareChannel,
            File::SelectiveScanChannel,
            File::SelectiveScanChunk,
        ]);
    }
    absent
}

/// Most bytes that a variant of a kernel spills on any target, in steps of 32.
const SPILLS: &[(&str, usize)] = &[
    ("attention_prefill", 64),
    ("gated_delta", 32),
    ("gated_delta_prepare", 32),
    ("latent_attention", 32),
    ("latent_attention_tile", 8),
    ("matmul_codes_wgmma", 96),
    ("matmul_skinny_bulk", 32),
    ("sample", 128),
    ("selective_scan", 32),
];

fn compile(arch: &str, shared: usize, all: bool) -> Result<(), Failed> {
    if let Some(why) = nvrtc::missing() {
        return Err(why.into());
    }
    let filter = std::env::var("SELKIE_KERNEL").unwrap_or_default();
    let specs = shapes::specs(arch, all, shared);
    let used: BTreeSet<File> = specs.iter().map(Spec::file).collect();
    let wanted: BTreeSet<File> = &BTreeSet::from_iter(File::ALL.iter().copied()) - &absent(arch, shared);
    let specs: Vec<Spec> = specs.into_iter().filter(|s| s.file().stem().contains(&filter)).collect();
    let (next, report) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = Instant::now();
                    let line = match nvrtc::compile(spec, arch) {
                        Ok(image) => Ok((spec.to_string(), spec.file(), resources(&image.log), start.elapsed())),
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
    if used != wanted {
        failures.push(format!("variants are of the kernels {used:?}, not of {wanted:?}"));
    }
    for line in &report {
        match line {
            Ok((spec, file, (registers, stack, spills, shared), time)) => {
                let ms = time.as_millis();
                println!(
                    "{arch} {registers:>4} registers {stack:>5} B stack {spills:>5} B spilled {shared:>6} B shared {ms:>5} ms  {spec}"
                );
                let listed = SPILLS.iter().find(|(stem, _)| *stem == file.stem());
                if *spills > listed.map_or(0, |(_, bytes)| *bytes) {
                    failures.push(format!("{spec} spills {spills} bytes on {arch}"));
                }
            }
            Err(e) => failures.push(e.clone()),
        }
    }
    if report.is_empty() {
        failures.push("no kernel was compiled".into());
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n").into()) }
}

/// Compares the parameters of a compiled variant of every kernel with their declaration.
fn parameters() -> Result<(), Failed> {
    if let Some(why) = nvrtc::missing() {
        return Err(why.into());
    }
    let specs = shapes::specs("sm_90a", true, 227 << 10);
    for &file in File::ALL {
        let spec = specs.iter().find(|s| s.file() == file).ok_or_else(|| format!("no variant of {file:?}"))?;
        let found = sizes_in(&ptx(spec)?).ok_or_else(|| format!("{spec}: parameters that are not understood"))?;
        let declared: Vec<usize> = file.parameters().iter().flat_map(Parameter::bytes).copied().collect();
        if found != declared {
            return Err(format!("{spec}: parameters of {found:?} bytes, declared are {declared:?}").into());
        }
    }
    Ok(())
}

fn ptx(spec: &Spec) -> Result<String, Failed> {
    let text = CString::new(spec.text())?;
    let program = result::create_program(&text, None).map_err(|e| format!("{e:?}"))?;
    let options = ["--gpu-architecture=compute_90a", "--std=c++17", "-default-device"].map(String::from);
    // SAFETY: the program is used only until it is destroyed here.
    let ptx = unsafe {
        let made = result::compile_program(program, &options).and_then(|()| result::get_ptx(program));
        result::destroy_program(program).map_err(|e| format!("{e:?}"))?;
        made.map_err(|e| format!("{spec}: {e:?}"))?
    };
    Ok(ptx.iter().map(|c| *c as u8 as char).collect())
}

/// Bytes of each parameter of the only entry in a PTX text.
fn sizes_in(ptx: &str) -> Option<Vec<usize>> {
    let (_, rest) = ptx.split_once(".entry ")?;
    let (list, _) = rest.split_once('(')?.1.split_once(')')?;
    let parameters = list.lines().map(str::trim).filter(|l| l.starts_with(".param"));
    let size = |line: &str| -> Option<usize> {
        let array = line.split_once('[').and_then(|(_, n)| n.split_once(']')?.0.parse().ok());
        let scalar = || line.split_whitespace().nth(1)?.get(2..)?.parse::<usize>().ok().map(|bits| bits / 8);
        array.or_else(scalar)
    };
    parameters.map(size).collect()
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
