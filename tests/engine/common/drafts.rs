//! Drafts on a device: verifying several tokens in a step gives the ids that one token a step gives.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use selkie_core::Result;
use selkie_core::backend::Backend;
use selkie_core::engine::{Drafter, Engine, EngineOptions, Event, Request, SeqId, Speculate};
use selkie_core::model_dir::ModelFiles;
use selkie_core::session::load;
use selkie_core::source::Dir;

use crate::{MARGIN, common};

/// Pages alone, slots alone, both; Mamba-1 and 2, gated delta rule, short convolution.
const FAMILIES: [&str; 6] = ["nemotron_h", "mamba2", "qwen3_next", "llama", "lfm2", "jamba"];
const ANSWER: usize = 40;

/// Guesses a text; one guess in `wrong` is not its token.
#[derive(Clone)]
struct Known {
    text: Vec<u32>,
    wrong: usize,
}

impl Drafter for Known {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        let rest = self.text.iter().enumerate().skip(known.len()).take(most);
        rest.map(|(at, id)| if at % self.wrong == 0 { id ^ 1 } else { *id }).collect()
    }
    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

#[derive(Default)]
pub struct Answer {
    ids: Vec<u32>,
    logits: Vec<Box<[f32]>>,
}

pub async fn engine<B: Backend>(backend: B, folder: &Path, speculate: Speculate) -> Result<Engine<B>> {
    let files = ModelFiles::open(Arc::new(Dir::open(folder)?), || 0).await?;
    let options = EngineOptions {
        slots: Some(40),
        kv_pages: Some(16),
        context: Some(512),
        max_batch: 4,
        logits: true,
        speculate,
        ..EngineOptions::default()
    };
    load(backend, &files, &options, &mut |_| {}).await
}

/// Answers all requests together.
pub async fn answer<B: Backend>(engine: &mut Engine<B>, requests: Vec<Request>) -> Result<Vec<Answer>> {
    let ids = requests.into_iter().map(|request| engine.submit(request)).collect::<Result<Vec<SeqId>>>()?;
    let mut answers: HashMap<SeqId, Answer> = ids.iter().map(|id| (*id, Answer::default())).collect();
    while !engine.is_idle() {
        engine.poison_free()?;
        for event in engine.step().await? {
            if let Event::Token { id, token, logits, .. } = event {
                let answer = answers.get_mut(&id).expect("a request of this call");
                answer.ids.push(token);
                answer.logits.extend(logits);
            }
        }
    }
    Ok(ids.iter().map(|id| answers.remove(id).expect("one each")).collect())
}

/// Refuses an id that differs where the other one leads by more than a rounding.
pub fn compare(got: &[Answer], want: &[Answer], count: usize) -> Result<(), Failed> {
    for (got, want) in got.iter().zip(want) {
        let wrong = (0..ANSWER).find(|i| got.ids[*i] != want.ids[*i]);
        let lead = |i: usize| want.logits[i][want.ids[i] as usize] - want.logits[i][got.ids[i] as usize];
        if let Some(i) = wrong
            && lead(i) > MARGIN
        {
            return Err(format!("token {i} of {count} is {}, not {}", got.ids[i], want.ids[i]).into());
        }
    }
    Ok(())
}

async fn check<B: Backend>(open: fn() -> Result<B>, folder: &Path) -> Result<(), Failed> {
    let text = |e: selkie_core::Error| Failed::from(e.to_string());
    let mut off = engine(open().map_err(text)?, folder, Speculate::Off).await.map_err(text)?;
    let mut on = engine(open().map_err(text)?, folder, Speculate::Ngram).await.map_err(text)?;
    let vocab = off.spec().vocab as u32;
    let prompt = |seed: u32| (0..50 + 3 * seed).map(move |i| 3 + ((i * 7919 + seed * 104_729) >> 3) % (vocab - 3));
    let requests = |count: u32| {
        (0..count).map(move |seed| Request { prompt: prompt(seed).collect(), max_tokens: ANSWER, ..Request::default() })
    };
    // One row of 8 tokens, and as many as there are lanes.
    for (count, wrong) in [(1, 1000), (1, 3), (4, 5)] {
        let want = answer(&mut off, requests(count).collect()).await.map_err(text)?;
        let guided = requests(count).zip(&want).map(|(request, want)| {
            let known = Known { text: [&request.prompt[..], &want.ids].concat(), wrong };
            Request { drafter: Some(Box::new(known)), ..request }
        });
        let got = answer(&mut on, guided.collect()).await.map_err(text)?;
        compare(&got, &want, count as usize)?;
    }
    let drafts = on.stats().drafts;
    if drafts.accepted_at.iter().any(|n| *n < 2) || drafts.accepted() == drafts.tokens {
        return Err(format!("{drafts:?}").into());
    }
    Ok(())
}

/// A trial per family.
pub fn on<B: Backend>(name: &'static str, open: fn() -> Result<B>) -> Vec<Trial> {
    let trials = FAMILIES.map(|family| {
        let run = move |_: &B| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden").join(family);
            pollster::block_on(check(open, &folder))
        };
        (format!("drafts: {family}"), false, run)
    });
    common::on(name, open, trials)
}
