//! Bundles between a device and the CPU: what one has computed, the other continues.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use selkie_core::Result;
use selkie_core::backend::Backend;
use selkie_core::bundle::{Identity, Reader};
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::{Engine, EngineOptions, Event, Export, Import, Request};
use selkie_core::model_dir::ModelFiles;
use selkie_core::session::load;
use selkie_core::source::Dir;
use selkie_core::state::Realm;

use crate::{Difference, MARGIN, Tolerance, common, golden, lacks};

const ANSWER: usize = 16;

/// A model on a backend, for one text.
struct Side<B: Backend> {
    engine: Engine<B>,
    model: Identity,
}

/// Ids and logits of an answer, the tokens reused, and whether they were converted.
struct Answer {
    ids: Vec<u32>,
    logits: Vec<Box<[f32]>>,
    reused: usize,
    converted: bool,
}

impl<B: Backend> Side<B> {
    async fn load(backend: B, folder: &Path) -> Result<Self> {
        let files = ModelFiles::open(Arc::new(Dir::open(folder)?), || 0).await?;
        let options = EngineOptions {
            slots: Some(10),
            kv_pages: Some(16),
            context: Some(512),
            logits: true,
            ..EngineOptions::default()
        };
        let engine = load(backend, &files, &options, &mut |_| {}).await?;
        Ok(Self { engine, model: files.identity(&mut |_| {}).await? })
    }

    async fn answer(&mut self, prompt: &[u32], origin: &str, max_tokens: usize) -> Result<Answer> {
        let mut answer = Answer { ids: Vec::new(), logits: Vec::new(), reused: 0, converted: false };
        self.engine.poison_free()?;
        let prompt = prompt.to_vec();
        self.engine.submit(Request { prompt, max_tokens, origin: origin.into(), ..Request::default() })?;
        while !self.engine.is_idle() {
            for event in self.engine.step().await? {
                match event {
                    Event::Token { token, logits, .. } => {
                        answer.ids.push(token);
                        answer.logits.extend(logits);
                    }
                    Event::Finished(end) => {
                        (answer.reused, answer.converted) = end.cache.map_or((0, false), |c| (c.reused, c.converted));
                    }
                }
            }
        }
        Ok(answer)
    }

    async fn export(&self, tokens: &[u32], origin: &str) -> Result<Vec<u8>> {
        let what = Export {
            model: self.model.clone(),
            name: String::new(),
            tokens: tokens.to_vec(),
            ends: Vec::new(),
            messages: None,
            realm: Realm { origin: origin.into(), ..Realm::default() },
            states: 4,
            from: 0,
        };
        let mut out = Vec::new();
        self.engine.export(what, "out", &mut out).await?;
        Ok(out)
    }

    fn import(&mut self, bytes: &[u8]) -> Result<String> {
        self.engine.poison_free()?;
        let into = Import { model: self.model.clone(), namespace: String::new(), exact_only: false, pieces: false };
        Ok(self.engine.import(&mut Reader::open(Cursor::new(bytes), "in")?, &into)?.origin)
    }
}

/// All values of a bundle, tensor by tensor.
fn values(bytes: &[u8]) -> Result<Vec<(String, Vec<f32>)>> {
    let mut all: Vec<(String, Vec<f32>)> = Vec::new();
    Reader::open(Cursor::new(bytes), "x")?.rows(&mut |part, first, bytes| {
        if first == 0 {
            all.push((part.name(), Vec::new()));
        }
        all.last_mut().expect("one was pushed").1.extend(part.dtype.to_f32(bytes));
        Ok(())
    })?;
    Ok(all)
}

/// Greedy ids are equal up to a choice that lies within the margin.
fn same(what: &str, got: &Answer, want: &Answer) -> Result<(), Failed> {
    for ((a, b), logits) in got.ids.iter().zip(&want.ids).zip(&want.logits) {
        if a != b {
            let lead = logits[*b as usize] - logits[*a as usize];
            if lead > MARGIN {
                return Err(format!("{what}: {:?} for {:?}, {lead} apart", got.ids, want.ids).into());
            }
            break;
        }
    }
    Ok(())
}

/// One way: `from` computes a prompt, `to` continues.
async fn one_way<A: Backend, B: Backend>(
    from: &mut Side<A>,
    to: &mut Side<B>,
    seed: u32,
    tolerance: Tolerance,
) -> Result<(), Failed> {
    let vocab = from.engine.spec().vocab as u32;
    let ids = |n: u32, seed: u32| (0..n).map(move |i| 3 + ((i * 7919 + seed * 104_729) >> 3) % (vocab - 3));
    let text = |e: selkie_core::Error| Failed::from(e.to_string());
    let prompt: Vec<u32> = ids(140, seed).collect();
    from.answer(&prompt, "", 1).await.map_err(text)?;
    let out = from.export(&prompt, "").await.map_err(text)?;
    let more = [prompt.clone(), ids(20, seed + 1).collect()].concat();
    let want = from.answer(&more, "", ANSWER).await.map_err(text)?;

    let origin = to.import(&out).map_err(text)?;
    if origin != from.engine.numerics() {
        return Err(format!("the origin is {origin:?}").into());
    }
    let own = to.answer(&more, "", ANSWER).await.map_err(text)?;
    let got = to.answer(&more, &origin, ANSWER).await.map_err(text)?;
    let found = ((own.reused, own.converted), (got.reused, got.converted));
    if found != ((0, false), (128, true)) {
        return Err(format!("reused tokens, and whether they were converted: {found:?}").into());
    }
    same("continued", &got, &want)?;
    same("computed from the start", &own, &want)?;

    // In and out changes no value; what both compute is equal within rounding.
    let again = to.export(&prompt, &origin).await.map_err(text)?;
    let computed = to.export(&prompt, "").await.map_err(text)?;
    let (out, again, computed) = (values(&out), values(&again), values(&computed));
    let (out, again, computed) = (out.map_err(text)?, again.map_err(text)?, computed.map_err(text)?);
    if out != again {
        return Err("a value changed between two transfers".into());
    }
    for ((name, got), (_, want)) in computed.iter().zip(&out) {
        Difference::new(got, want)?.within(name, tolerance.states, tolerance.rms)?;
    }
    Ok(())
}

/// A trial per family: from the CPU to the device and back.
pub fn on<B: Backend>(name: &'static str, open: fn() -> Result<B>, tolerance: Tolerance) -> Vec<Trial> {
    let trials = golden::families().into_iter().map(|folder| {
        let family = folder.file_name().expect("a folder").to_string_lossy().into_owned();
        let lacks = lacks(name, open, &folder);
        let run = move |_: &B| {
            pollster::block_on(async {
                let text = |e: selkie_core::Error| Failed::from(e.to_string());
                let mut cpu = Side::load(CpuBackend::new(), &folder).await.map_err(text)?;
                let mut device = Side::load(open().map_err(text)?, &folder).await.map_err(text)?;
                one_way(&mut cpu, &mut device, 1, tolerance).await?;
                one_way(&mut device, &mut cpu, 2, tolerance).await
            })
        };
        (format!("{family} bundle, from the CPU and back"), lacks, run)
    });
    common::on(name, open, trials)
}
