//! Heads for drafts on a device: their logits against the references of `tests/heads`, and the ids of an engine that drafts with
//! them against those of one that does not.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use safetensors::SafeTensors;
use selkie_core::backend::Backend;
use selkie_core::checkpoint::Checkpoint;
use selkie_core::config::Config;
use selkie_core::engine::direct::{Direct, Sequence};
use selkie_core::engine::{Request, Speculate};
use selkie_core::models;
use selkie_core::source::Dir;
use selkie_core::weights::Loader;
use selkie_core::{Error, Result};

use crate::{LIMITS, Tolerance, common, drafts};

const MODELS: [&str; 5] = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "nemotron_h_mlp"];

/// Drafts after a whole prompt, and after one that a decode step ends.
async fn logits<B: Backend>(backend: &B, folder: &Path, tolerance: Tolerance) -> Result<String, Failed> {
    let text = |e: Error| Failed::from(e.to_string());
    let config = Config::parse("config.json", &std::fs::read(folder.join("config.json"))?).map_err(text)?;
    let checkpoint = Checkpoint::open(std::sync::Arc::new(Dir::open(folder).map_err(text)?)).await.map_err(text)?;
    let architecture = models::read(&config).and_then(|a| a.with_head(&checkpoint)).map_err(text)?;
    let mut report = |_| ();
    let mut loader = Loader::new(backend, &checkpoint, &mut report);
    let model = models::build(&architecture, &mut loader, LIMITS).await.map_err(text)?;
    let bytes = std::fs::read(folder.join("reference.safetensors"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let words = |name: &str| {
        let data = file.tensor(name).expect(name).data();
        data.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<u32>>()
    };
    let floats = |name: &str| words(name).into_iter().map(f32::from_bits).collect::<Vec<f32>>();
    let (ids, heads, vocab) = (words("ids"), floats("heads"), architecture.vocab);
    let mut direct = Direct::new(backend, model.as_ref(), LIMITS, 4, 8).map_err(text)?;
    let mut sequence = Sequence::default();
    let mut worst = crate::Difference::default();
    for end in [1, 40, 64, 65, ids.len() - 1] {
        let from = sequence.len;
        direct.prompt(&mut sequence, &ids[from..end], &[]).await.map_err(text)?;
        let got = direct.drafts(&mut sequence, &ids[end..=end]).await.map_err(text)?;
        let want = &heads[(end - 1) * vocab..end * vocab];
        worst = worst.max(tolerance.logits(&format!("a draft after {end} tokens"), &got, want)?);
    }
    direct.prompt(&mut sequence, &ids[ids.len() - 1..], &[]).await.map_err(text)?;
    let chain = direct.drafts(&mut sequence, &words("more")).await.map_err(text)?;
    worst = worst.max(tolerance.logits("drafts of drafts", &chain, &floats("chain"))?);
    Ok(format!("drafts {worst}"))
}

async fn ids<B: Backend>(open: fn() -> Result<B>, folder: &Path) -> Result<(), Failed> {
    let text = |e: Error| Failed::from(e.to_string());
    let mut off = drafts::engine(open().map_err(text)?, folder, Speculate::Off).await.map_err(text)?;
    let mut on = drafts::engine(open().map_err(text)?, folder, Speculate::Mtp).await.map_err(text)?;
    for count in [1, 4] {
        let requests = || {
            let prompt = |seed: u32| (0..50 + 3 * seed).map(move |i| 3 + (i * 31 + seed * 17) % 60).collect();
            (0..count).map(move |seed| Request { prompt: prompt(seed), max_tokens: 40, ..Request::default() }).collect()
        };
        let want = drafts::answer(&mut off, requests()).await.map_err(text)?;
        let got = drafts::answer(&mut on, requests()).await.map_err(text)?;
        drafts::compare(&got, &want, count as usize)?;
    }
    let drafts = on.stats().drafts;
    // Those of random weights are right by chance.
    if drafts.tokens < 200 {
        return Err(format!("{drafts:?}").into());
    }
    Ok(())
}

/// A trial per model.
pub fn on<B: Backend>(name: &'static str, open: fn() -> Result<B>, tolerance: Tolerance) -> Vec<Trial> {
    let trials = MODELS.map(|model| {
        let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../heads").join(model);
        let run = move |backend: &B| {
            let found = pollster::block_on(logits(backend, &folder, tolerance))?;
            eprintln!("{name} head of {model}: {found}");
            pollster::block_on(ids(open, &folder))
        };
        (format!("head: {model}"), false, run)
    });
    common::on(name, open, trials)
}
