//! A model whose engine has a thread of its own: many askers, slow and vanished readers, an engine that fails.

use std::{
    sync::{Arc, Barrier, Mutex, mpsc},
    thread,
    time::Duration,
};

use selkie_core::{
    Error, Result,
    backend::Backend,
    chat::Message,
    cpu::CpuBackend,
    engine::{AnyEngine, EngineOptions, FinishReason},
    model_dir::ModelFiles,
    session::{Answers, Ask, Completion, Facts, Model, Overrides, Prompt, Text, Update, load},
    source::Dir,
    state::CacheEvent,
};

use crate::wrapped::Wrapped;

/// How long something may take that takes milliseconds.
const LONG: Duration = Duration::from_secs(60);
const STORY: &str = "Tell me a story about a fox named Leo and a lantern.";

fn spawn<B: Backend + 'static>(backend: impl FnOnce() -> B + Send + 'static) -> Result<Model> {
    let files = pollster::block_on(ModelFiles::open(Arc::new(Dir::open("../../models/demo")?), || 0))?;
    let text = Text::new(&files)?;
    Model::spawn(text, move || {
        pollster::block_on(async {
            let options = EngineOptions { max_batch: 4, ..EngineOptions::default() };
            let engine = load(backend(), &files, &options, &mut |_| {}).await?;
            Ok((Facts::new(&files, &engine).await?, Box::new(engine) as Box<dyn AnyEngine>))
        })
    })
}

fn demo() -> Model {
    spawn(CpuBackend::new).unwrap()
}

/// A model that calls `before` at each step.
fn faulty(before: impl Fn() -> Result<()> + Send + 'static) -> Model {
    let wrap = || {
        let inner = CpuBackend::new();
        let caps = inner.caps().clone();
        Wrapped { inner, caps, polls: 1, before: Box::new(move |_| before()) }
    };
    spawn(wrap).unwrap()
}

fn chat(text: &str) -> Ask {
    Ask { prompt: Prompt::Messages(vec![Message::new("user", text)]), ..Ask::default() }
}

/// The same at a temperature, so that the answer depends on every bit of the logits.
fn sampled(text: &str, seed: u64) -> Ask {
    let sampling = Overrides { temperature: Some(1.0), seed: Some(seed), ..Overrides::default() };
    Ask { sampling, max_tokens: Some(40), ..chat(text) }
}

#[test]
fn handles_and_answers_can_go_anywhere() {
    fn anywhere<T: Send + Sync>() {}
    anywhere::<Model>();
    anywhere::<Text>();
    anywhere::<Facts>();
    fn elsewhere<T: Send>() {}
    elsewhere::<selkie_core::session::Answer>();
    elsewhere::<selkie_core::session::Chat>();
}

#[test]
fn eight_threads_get_the_answers_that_each_gets_alone() {
    let questions = ["What is 17 + 25?", STORY, "What is 81 - 36?", "Tell me a story about a bird and a bell."];
    let ask = |i: usize| sampled(questions[i % 4], i as u64);
    let alone: Vec<Completion> = (0..8).map(|i| demo().submit(ask(i)).unwrap().finish()).collect();
    let (model, together) = (demo(), Barrier::new(8));
    let all: Vec<Completion> = thread::scope(|scope| {
        let start = |i: usize| {
            let (model, together) = (model.clone(), &together);
            scope.spawn(move || {
                together.wait();
                model.submit(ask(i)).unwrap().finish()
            })
        };
        let threads: Vec<_> = (0..8).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (one, alone) in all.iter().zip(&alone) {
        assert_eq!((&one.ids, &one.text, one.finish), (&alone.ids, &alone.text, alone.finish));
    }
    assert!(alone.iter().any(|a| a.ids != alone[0].ids));
    let now = model.stats();
    assert_eq!((now.running, now.waiting, now.counters.reasons.iter().sum::<u64>()), (0, 0, 8));
}

#[test]
fn a_dropped_answer_ends_its_request_before_the_next_step() {
    // Each step takes a permit, so the number of steps is known.
    let (permit, permits) = mpsc::channel();
    let permits = Mutex::new(permits);
    let model = faulty(move || {
        permits.lock().unwrap().recv().expect("there are permits");
        Ok(())
    });
    let mut answer = model.submit(Ask { max_tokens: Some(500), ..chat(STORY) }).unwrap();
    for _ in 0..5 {
        permit.send(()).unwrap();
    }
    let first = answer.wait(LONG);
    assert!(matches!(first, Some(Update::Text { .. })), "{first:?}");
    drop(answer);
    // The step that may be waiting, and one more.
    for _ in 0..2 {
        permit.send(()).unwrap();
    }
    let left = model.with(|engine| engine.scheduler().running() + engine.scheduler().waiting());
    assert_eq!(left.wait().unwrap(), 0);
    assert!(model.stats().counters.tokens_generated <= 7);
}

#[test]
fn a_cancelled_answer_keeps_what_it_has() {
    let model = demo();
    let mut answer = model.submit(chat(STORY)).unwrap();
    let mut text = String::new();
    while text.is_empty() {
        if let Some(Update::Text { text: piece, .. }) = answer.wait(LONG) {
            text += &piece;
        }
    }
    answer.cancel();
    let done = answer.finish();
    let whole = model.submit(chat(STORY)).unwrap().finish();
    // It may have ended meanwhile.
    assert!(matches!(done.finish, FinishReason::Cancelled | FinishReason::Stop), "{:?}", done.finish);
    assert!(done.text.as_ref().unwrap().starts_with(&text));
    assert!(whole.text.unwrap().starts_with(&done.text.unwrap()));
}

#[test]
fn a_slow_reader_delays_nobody() {
    let model = demo();
    let mut slow = model.submit(Ask { max_tokens: Some(40), ..sampled(STORY, 3) }).unwrap();
    // Both run to their ends although nobody reads the first.
    let quick = model.submit(chat("What is 17 + 25?")).unwrap().finish();
    assert_eq!(quick.text.as_deref(), Some("17 + 25 = 42."));
    while model.stats().running + model.stats().waiting > 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let mut ids = Vec::new();
    let done = loop {
        match slow.wait(Duration::ZERO).expect("all of it is there") {
            Update::Text { tokens, .. } => ids.extend(tokens.iter().map(|token| token.id)),
            Update::Done(done) => break done,
        }
    };
    assert_eq!((ids.as_slice(), slow.is_ended()), (done.ids.as_slice(), true));
    assert!(slow.wait(LONG).is_none());
}

/// Submits two requests to a model that fails in its fourth step; why they end.
fn ends(model: &Model) -> [String; 2] {
    let asks = [STORY, "Tell me a story about a bird and a bell."].map(|text| model.prepare(chat(text)).unwrap());
    let mut answers = Answers::new(model);
    answers.send(asks.into_iter().enumerate());
    let mut ends = [const { String::new() }; 2];
    while !answers.is_empty() {
        if let Some((i, Update::Done(done))) = answers.wait(LONG) {
            assert_eq!(done.finish, FinishReason::Failed);
            assert!(!done.ids.is_empty(), "the tokens until then are kept");
            ends[i] = done.error().expect("a failed request has a reason").to_string();
        }
    }
    assert!(model.health().is_err());
    assert!(answers.wait(LONG).is_none());
    let e = model.submit(chat("Hello")).map(drop).unwrap_err();
    assert!(matches!(&e, Error::Ended(why) if why.to_string() == ends[0]), "{e}");
    assert_eq!(model.with(|_| ()).wait().unwrap_err().to_string(), ends[0]);
    ends
}

/// Fails at the fourth step.
fn at_fourth(fail: impl Fn() -> Result<()> + Send) -> impl Fn() -> Result<()> + Send {
    let steps = Mutex::new(0);
    move || {
        let mut steps = steps.lock().unwrap();
        *steps += 1;
        if *steps < 4 { Ok(()) } else { fail() }
    }
}

#[test]
fn a_panic_of_the_engine_ends_all_answers_with_its_message() {
    let ends = ends(&faulty(at_fourth(|| panic!("a fuse blew"))));
    assert!(ends.iter().all(|end| end.contains("the engine panicked: a fuse blew")), "{ends:?}");
}

#[test]
fn a_device_error_ends_all_answers_with_its_reason() {
    let lost = || Err(Error::Device { op: "matmul".into(), why: "the device was lost".into() });
    let ends = ends(&faulty(at_fourth(lost)));
    assert_eq!(ends, ["device error in matmul: the device was lost"; 2]);
}

#[test]
fn a_model_that_cannot_be_built_says_why() {
    let panics = || -> CpuBackend { panic!("no such luck") };
    let e = spawn(panics).map(drop).unwrap_err();
    assert!(matches!(&e, Error::Panicked(why) if why == "no such luck"), "{e}");
    let files = pollster::block_on(ModelFiles::open(Arc::new(Dir::open("../../models/demo").unwrap()), || 0)).unwrap();
    let fails = || Err(Error::BadRequest("not today".into()));
    let e = Model::spawn(Text::new(&files).unwrap(), fails).map(drop).unwrap_err();
    assert_eq!(e.to_string(), "not today");
}

#[test]
fn an_answer_outlives_its_model() {
    let answer = demo().submit(chat("What is 17 + 25?")).unwrap();
    assert_eq!(answer.finish().text.as_deref(), Some("17 + 25 = 42."));
}

#[test]
fn the_tree_can_be_watched() {
    let model = demo();
    let mut events = model.cache_events();
    let story = "Anna was in the kitchen. Anna took the key. Anna went to the garden. ".repeat(6);
    model.submit(chat(&format!("{story}Where is the key?"))).unwrap().finish();
    let stored = events.wait(LONG).unwrap();
    assert!(stored.iter().all(|event| matches!(event, CacheEvent::Stored { tokens, .. } if tokens.len() == 64)));
    assert!(!stored.is_empty() && model.stats().pages_cached > 0);
    model.with(|engine| engine.clear_cache()).wait().unwrap();
    assert_eq!(model.stats().pages_cached, 0);
    while events.wait(LONG).expect("the tree was cleared").last() != Some(&CacheEvent::Cleared) {}
}

#[test]
fn a_chat_keeps_its_history() {
    let mut chat = demo().chat().system("Answer in one short sentence.");
    let answer: Vec<String> = chat.ask("What is 17 + 25?").unwrap().map(|piece| piece.unwrap()).collect();
    assert!(answer.len() > 3 && answer.iter().all(|piece| !piece.is_empty()), "{answer:?}");
    let mut pieces = chat.ask(STORY).unwrap();
    let begun = pieces.next().unwrap().unwrap();
    drop(pieces);
    let roles: Vec<&str> = chat.messages().iter().map(|m| m.role.as_str()).collect();
    assert_eq!(roles[..5], ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(chat.messages()[2].content, answer.concat());
    assert_eq!(chat.messages()[4].content, begun);
    let too_long = "What is 17 + 25? ".repeat(10_000);
    let before = chat.messages().len();
    assert!(matches!(chat.ask(too_long), Err(Error::TooLong { .. })));
    assert_eq!(chat.messages().len(), before);
}
