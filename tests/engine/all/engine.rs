//! The engine by token ids, with a small random model on the CPU.

use std::sync::Arc;

use selkie_core::{
    Error,
    backend::Backend,
    checkpoint::Checkpoint,
    config::Config,
    cpu::CpuBackend,
    engine::{Engine, EngineOptions, Event, FinishReason, Finished, Request},
    models,
    sample::Sampling,
    source::Dir,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/llama");
pub(super) const VOCAB: u32 = 320;

pub(super) fn engine(options: &EngineOptions) -> Engine<CpuBackend> {
    engine_on(CpuBackend::new(), options)
}

pub(super) fn engine_on<B: Backend>(backend: B, options: &EngineOptions) -> Engine<B> {
    let config = std::fs::read(format!("{MODEL}/config.json")).unwrap();
    let architecture = models::read(&Config::parse("config.json", &config).unwrap()).unwrap();
    pollster::block_on(async {
        let checkpoint = Checkpoint::open(Arc::new(Dir::open(MODEL).unwrap())).await.unwrap();
        Engine::load(backend, &architecture, &checkpoint, b"llama", options, &mut |_| {}).await.unwrap()
    })
}

/// The tokens of one request and how it ended.
pub(super) fn run(engine: &mut Engine<CpuBackend>, request: Request) -> (Vec<u32>, Finished) {
    engine.submit(request).unwrap();
    let (mut tokens, mut end) = (Vec::new(), None);
    while !engine.is_idle() {
        for event in pollster::block_on(engine.step()).unwrap() {
            match event {
                Event::Token { token, .. } => tokens.push(token),
                Event::Finished(finished) => assert!(end.replace(finished).is_none()),
            }
        }
    }
    (tokens, end.unwrap())
}

pub(super) fn prompt(count: u32) -> Vec<u32> {
    (0..count).map(|i| 3 + i * 37 % 300).collect()
}

#[test]
fn every_stop_id_ends_a_request() {
    let mut engine = engine(&EngineOptions::default());
    let request = Request { prompt: prompt(9), max_tokens: 12, ..Request::default() };
    let (tokens, end) = run(&mut engine, request.clone());
    assert_eq!((tokens.len(), end.reason), (12, FinishReason::Length));
    // A token that comes late, and an id that never comes, in both orders.
    let at = (1..12).rev().find(|&i| !tokens[..i].contains(&tokens[i])).expect("several tokens");
    let never = (0..VOCAB).find(|id| !tokens.contains(id)).unwrap();
    for stop_ids in [vec![never, tokens[at]], vec![tokens[at], never]] {
        let (stopped, end) = run(&mut engine, Request { stop_ids, ..request.clone() });
        assert_eq!((&stopped[..], end.reason), (&tokens[..=at], FinishReason::Stop));
        assert_eq!(end.completion_tokens, at + 1);
    }
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    let mut engine = engine(&EngineOptions::default());
    assert_eq!(engine.spec().vocab, VOCAB as usize);
    let mut with = |id| engine.submit(Request { prompt: vec![5, id, 7], max_tokens: 1, ..Request::default() });
    assert!(with(VOCAB - 1).is_ok());
    for id in [VOCAB, u32::MAX] {
        let Err(Error::BadRequest(why)) = with(id) else { panic!("{id} is taken") };
        assert!(why.contains(&id.to_string()) && why.contains("320"), "{why}");
    }
}

#[test]
fn the_longest_request_is_what_pages_and_context_hold() {
    for (options, longest) in [
        // The last token is sampled and needs no page.
        (EngineOptions { kv_pages: Some(5), ..EngineOptions::default() }, 5 * 64 + 1),
        (EngineOptions { kv_pages: Some(5), context: Some(100), ..EngineOptions::default() }, 100),
        (EngineOptions { kv_pages: Some(100), ..EngineOptions::default() }, 2048),
    ] {
        let mut engine = engine(&options);
        assert_eq!(engine.sizes().longest(), longest);
        let request = |max_tokens| Request { prompt: prompt(90), max_tokens, ..Request::default() };
        assert!(engine.submit(request(longest - 90)).is_ok());
        assert!(matches!(engine.submit(request(longest - 89)), Err(Error::TooLong { .. })), "{longest}");
    }
}

/// A penalty far below 1 makes tokens that occurred before likely: the first sampled tokens come from the prompt, which
/// holds a small part of the vocabulary.
#[test]
fn the_repetition_penalty_knows_the_prompt() {
    let mut engine = engine(&EngineOptions::default());
    for start in [1, 100, 200] {
        let prompt: Vec<u32> = (start..start + 20).collect();
        let request = Request { prompt: prompt.clone(), max_tokens: 1, ..Request::default() };
        let (plain, _) = run(&mut engine, request.clone());
        assert!(!prompt.contains(&plain[0]), "this prompt shows nothing");
        let sampling = Sampling { repetition_penalty: 1e-3, ..Sampling::default() };
        let (tokens, _) = run(&mut engine, Request { sampling, ..request });
        assert!(prompt.contains(&tokens[0]), "{tokens:?}");
    }
}
