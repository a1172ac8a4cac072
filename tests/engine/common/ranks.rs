//! Models on several ranks, of the CPU and of two CUDA devices: every reference folder whose sizes divide, in whole and in uneven steps, and what is refused.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use selkie_core::{
    Result,
    cpu::CpuBackend,
    engine::direct::{Direct, Sequence},
    format::Products,
    ranks::Ranks,
};
use selkie_cuda::Options;

use crate::{
    CPU, CUDA, LIMITS, Tolerance, check, coded_logits, coded_model, common, equal::Equal, golden::folders, heads,
    lacks, load, sessions,
};

/// Folder, ranks and the reason of each refusal.
const REFUSED: &[(&str, usize, &str)] = &[
    ("kimi_linear_groups", 2, "`layers.0.self_attn.`: 5 heads do not divide over 2 ranks; possible are 1"),
    ("kimi_linear_groups", 4, "`layers.0.self_attn.`: 5 heads do not divide over 4 ranks; possible are 1"),
    ("qwen3_window", 2, "`layers.0.self_attn.`: 3 KV heads do not divide over 2 ranks"),
    ("qwen3_window", 4, "`layers.0.self_attn.`: 6 heads do not divide over 4 ranks"),
    ("falcon_h1", 4, "`layers.0.mamba.`: 6 heads do not divide over 4 ranks; possible are 1, 2"),
    ("falcon_h1_norm", 4, "`layers.0.mamba.`: 6 heads do not divide over 4 ranks; possible are 1, 2"),
    ("nemotron_h_latent", 4, "`layers.0.mixer.`: 6 heads do not divide over 4 ranks; possible are 1, 2"),
];

/// Ways to cut a prompt into steps.
const CUTS: [(&str, &[usize]); 2] = [("", &[]), (" in uneven steps", &[1, 30, 3, 64, 7, 50, 1, 1])];

fn open<const RANKS: usize>() -> Result<Ranks> {
    Ranks::open(RANKS, Products::default())
}

/// Models on one rank, which is the way of several without others, and on two and four.
pub fn trials() -> Vec<Trial> {
    let mut trials = on("cpu-1-rank", 1, open::<1>, CPU, |dir| dir.ends_with("granitemoehybrid"));
    trials.extend(on("cpu-2-ranks", 2, open::<2>, CPU, |_| true));
    trials.extend(on("cpu-4-ranks", 4, open::<4>, CPU, |_| true));
    trials.extend(sessions::on("cpu-2-ranks", open::<2>, Products::default()));
    trials.extend(heads::on("cpu-2-ranks", open::<2>, CPU));
    trials.extend(equal_on("cpu-2-ranks", open::<2>));
    trials.extend(coded("cpu-exact-2-ranks", || Ranks::open(2, Products::Exact), CPU));
    let f32 = || selkie_cuda::ranks(&[0, 1], Options { f32: true, ..Options::default() });
    trials.extend(on("cuda-f32-2-ranks", 2, f32, CUDA, |_| true));
    trials.extend(sessions::on("cuda-f32-2-ranks", f32, Products::Exact));
    trials.extend(heads::on("cuda-f32-2-ranks", f32, CUDA));
    trials.extend(equal_on("cuda-f32-2-ranks", f32));
    trials.extend(coded("cuda-f32-2-ranks", f32, CUDA));
    trials
}

fn on(
    name: &'static str,
    ranks: usize,
    open: fn() -> Result<Ranks>,
    tolerance: Tolerance,
    which: fn(&Path) -> bool,
) -> Vec<Trial> {
    let test = |dir: PathBuf| {
        let folder = dir.file_name().expect("a folder").to_string_lossy().into_owned();
        let refusal = REFUSED.iter().find(|(refused, of, _)| *refused == folder && *of == ranks);
        let lacks = refusal.is_none() && lacks(name, open, &dir);
        CUTS[..if refusal.is_some() { 1 } else { 2 }]
            .iter()
            .map(|&(label, steps)| {
                let (dir, id) = (dir.clone(), format!("{name} {folder}{label}"));
                let run = move |backend: &Ranks| match refusal {
                    Some((.., why)) => refused(backend, &dir, why),
                    None => {
                        let found = pollster::block_on(check(backend, &dir, tolerance, 2, steps))?;
                        eprintln!("{id}: {found}");
                        Ok(())
                    }
                };
                (format!("{folder}{label}"), lacks, run)
            })
            .collect::<Vec<_>>()
    };
    common::on(name, open, folders().into_iter().filter(|dir| which(dir)).flat_map(test))
}

/// What two ranks compute twice must be equal bit for bit, op by op.
fn equal_on(name: &'static str, open: fn() -> Result<Ranks>) -> Vec<Trial> {
    let test = |dir: PathBuf| {
        let folder = dir.file_name().expect("a folder").to_string_lossy().into_owned();
        let lacks = lacks(name, open, &dir);
        let run = move |_: &Ranks| pollster::block_on(equal(open().map_err(|e| e.to_string())?, &dir));
        (format!("{folder} is equal on all ranks"), lacks, run)
    };
    let divides = |dir: &PathBuf| !REFUSED.iter().any(|(folder, ranks, _)| *ranks == 2 && dir.ends_with(folder));
    common::on(name, open, folders().into_iter().filter(divides).map(test))
}

async fn equal(ranks: Ranks, dir: &Path) -> Result<(), Failed> {
    let text = |e: selkie_core::Error| Failed::from(e.to_string());
    let backend = Equal::new(ranks);
    let model = load(&backend, dir).await?;
    let ids: Vec<u32> = (0..40).map(|i| (i * i + 3) % 60).collect();
    let mut direct = Direct::new(&backend, model.as_ref(), LIMITS, 2, 8).map_err(text)?;
    direct.prompt(&mut Sequence::default(), &ids, &[1, 30, 3]).await.map_err(text)?;
    let compared = backend.compared();
    // Norms of the stream, the sums added to it, and the logits.
    for op in ["rms_norm", "all_reduce", "all_gather"] {
        let steps = compared.get(op).copied().unwrap_or(0);
        if steps < 4 {
            return Err(format!("{op} was compared {steps} times in 4 steps: {compared:?}").into());
        }
    }
    Ok(())
}

/// Random codes, divided at their blocks: of the demo model's sizes. Blocks of 256 are longer than a rank's rows.
fn coded(name: &'static str, open: fn() -> Result<Ranks>, tolerance: Tolerance) -> Vec<Trial> {
    let demo = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let models = [("demo", "q8_0"), ("demo", "iq4_nl"), ("demo", "nvfp4")];
    let tests = models.map(|(model, recipe)| {
        let run = move |backend: &Ranks| {
            let dir = demo();
            let ids: Vec<u32> = (0..70).map(|i| (i * i + 3) % 250).collect();
            let one = CpuBackend::with(Products::Exact);
            let want = pollster::block_on(coded_logits(&one, (&dir, &[]), recipe, &ids))?;
            let got = pollster::block_on(coded_logits(backend, (&dir, &[]), recipe, &ids))?;
            eprintln!("{name} {model} {recipe}: {}", tolerance.logits("logits", &got, &want)?);
            Ok(())
        };
        (format!("{model} in {recipe}"), false, Box::new(run) as Check)
    });
    let long = move |backend: &Ranks| match pollster::block_on(coded_model(backend, (&demo(), &[]), "q4_k_m")) {
        Err(e) if e.message().is_some_and(|text| text.contains("its blocks have 256 elements")) => Ok(()),
        Err(e) => Err(format!("{:?}", e.message()).into()),
        Ok(_) => Err("it was loaded".into()),
    };
    let long = ("demo in q4_k_m is refused".to_owned(), false, Box::new(long) as Check);
    common::on(name, open, tests.into_iter().chain([long]))
}

type Check = Box<dyn FnOnce(&Ranks) -> Result<(), Failed> + Send>;

fn refused(backend: &Ranks, dir: &Path, why: &str) -> Result<(), Failed> {
    match pollster::block_on(load(backend, dir)) {
        Err(e) if e.message().is_some_and(|text| text.contains(why)) => Ok(()),
        Err(e) => Err(format!("{:?}, not {why:?}", e.message()).into()),
        Ok(_) => Err("it was loaded".into()),
    }
}
