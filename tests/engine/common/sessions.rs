//! The engine on a device against the engine on the CPU: the demo model answers a batch, and continues from its cached
//! prefixes.

use std::collections::HashMap;
use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use selkie_core::Result;
use selkie_core::backend::Backend;
use selkie_core::chat::Message;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::{EngineOptions, FinishReason, SeqId};
use selkie_core::format::Products;
use selkie_core::model_dir::ModelFiles;
use selkie_core::sample::Sampling;
use selkie_core::session::{Ask, Completion, Local, Prompt, Update};
use selkie_core::source::Dir;

use crate::common;

const QUESTIONS: [&str; 4] = [
    "What is 17 + 25?",
    "Where is the key?",
    "Tell me a story about a fox named Leo and a lantern.",
    "Tell me a story about a bird and a bell.",
];

/// The values that must be equal in two sessions.
#[derive(Debug, PartialEq)]
struct Answer {
    text: Option<String>,
    ids: Vec<u32>,
    finish: FinishReason,
    reused: usize,
}

async fn load<B: Backend + 'static>(backend: B) -> Result<Local> {
    let dir = Dir::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"))?;
    let files = ModelFiles::open(Arc::new(dir), || 0).await?;
    let options = EngineOptions {
        max_batch: 4,
        slots: Some(40),
        kv_pages: Some(64),
        step_tokens: 96,
        ..EngineOptions::default()
    };
    Local::load(backend, &files, &options, &mut |_| {}).await
}

/// Answers all chats together, the last two with a temperature.
async fn answer(session: &mut Local, chats: &[Vec<Message>]) -> Result<Vec<Answer>> {
    let mut order = Vec::new();
    for (i, messages) in chats.iter().enumerate() {
        let temperature = if i < 2 { 0.0 } else { 0.8 };
        let sampling = Sampling { temperature, seed: 7 + i as u64, ..Sampling::default() }.into();
        let prompt = Prompt::Messages(messages.clone());
        order.push(session.submit(Ask { prompt, sampling, max_tokens: Some(12), ..Ask::default() })?);
    }
    let mut done: HashMap<SeqId, Completion> = HashMap::new();
    while !session.is_idle() {
        for (id, update) in session.step().await? {
            if let Update::Done(completion) = update {
                done.insert(id, completion);
            }
        }
    }
    let take = |id| {
        let completion = done.remove(id).expect("every request ends");
        let reused = completion.reused();
        Answer { text: completion.text, ids: completion.ids, finish: completion.finish, reused }
    };
    Ok(order.iter().map(take).collect())
}

/// Two rounds: four chats under one system prompt, and their next turns.
async fn rounds<B: Backend + 'static>(backend: B) -> Result<Vec<Answer>> {
    let mut session = load(backend).await?;
    let system =
        Message::new("system", "Anna was in the kitchen. Anna took the key. Anna went to the garden. ".repeat(6));
    let mut chats: Vec<Vec<Message>> =
        QUESTIONS.iter().map(|q| vec![system.clone(), Message::new("user", *q)]).collect();
    let mut all = answer(&mut session, &chats).await?;
    for (chat, answer) in chats.iter_mut().zip(&all) {
        chat.push(Message::new("assistant", answer.text.clone().expect("the demo has a tokenizer")));
        chat.push(Message::new("user", "Where is Anna?"));
    }
    all.extend(answer(&mut session, &chats).await?);
    Ok(all)
}

/// One trial: the device gives the same answers as the CPU with `products`, those of the device.
pub fn on<B: Backend + 'static>(name: &'static str, open: fn() -> Result<B>, products: Products) -> Vec<Trial> {
    let run = move |_: &B| {
        let text = |e: selkie_core::Error| Failed::from(e.to_string());
        let want = pollster::block_on(rounds(CpuBackend::with(products))).map_err(text)?;
        let got = pollster::block_on(rounds(open().map_err(text)?)).map_err(text)?;
        // Three of the first round wait for the system prompt of one; in the second all have it, and some a turn.
        if want[1..].iter().any(|a| a.reused < 64) || want.iter().all(|a| a.reused < 128) {
            return Err(format!("little is reused: {:?}", want.iter().map(|a| a.reused).collect::<Vec<_>>()).into());
        }
        match got.iter().zip(&want).find(|(got, want)| got != want) {
            Some((got, want)) => Err(format!("{got:#?} is not what the CPU has: {want:#?}").into()),
            None => Ok(()),
        }
    };
    common::on(name, open, [("engine: a batch of chats and their next turns".to_owned(), false, run)])
}
