//! Drafts change no answer and leave no trace.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use pollster::block_on;
use selkie_core::{
    backend::Backend,
    engine::{DraftStats, Drafter, Engine, EngineOptions, Event, Request, Speculate},
    sample::Sampling,
    state::{Limits, PrefixHash, StateShape},
};

use crate::{
    behind::Behind,
    guess::{Guesser, Habit},
    models::{TestModel, coded_models, golden_models, micro_models},
    promise::{Alone, Asked, Drafts, run},
    random::Random,
    sim::{Job, Sim, reference},
};

/// Drafters for requests, most of which then have no rules that forbid drafts; the default one for some. See [`Guesser::exact`].
pub fn give(random: &mut Random, model: &TestModel, alone: &mut Alone<'_>, requests: &mut [Asked], exact: bool) {
    let mut other = Random(!random.0);
    for asked in requests {
        if !random.one_in(4) {
            asked.drafts(&mut other, model.architecture.spec().vocab);
        }
        if !random.one_in(5) {
            let text = [&asked.request.prompt[..], &alone.run(asked).0].concat();
            let vocab = model.architecture.spec().vocab as u32;
            let guesser =
                Guesser { habit: random.pick(&Habit::ALL), text, exact, vocab, random: Random(random.next()) };
            asked.request.drafter = Some(Box::new(guesser));
        }
    }
}

#[test]
fn drafts_change_nothing() {
    let [.., accepted] = run(micro_models(), 200, Drafts::Given);
    assert!(accepted > 10_000, "{accepted} drafts accepted");
}

#[test]
fn drafts_change_nothing_in_codes_and_real_families() {
    run(coded_models(), 4, Drafts::Given);
    run(golden_models(), 4, Drafts::Given);
}

/// States and pages of the tree by name, as bytes.
pub fn contents(engine: &Engine<Behind>) -> HashMap<PrefixHash, Vec<u8>> {
    let (tree, runner) = (engine.scheduler().tree(), engine.runner());
    let mut found = HashMap::new();
    for (_, node) in tree.iter() {
        let mut bytes = Vec::new();
        for layer in runner.pools() {
            let states = layer.conv.iter().chain(&layer.recurrent).map(|pool| (pool, node.slot));
            let pages = layer.kv.iter().flat_map(|kv| [&kv.k, &kv.v]).map(|pool| (pool, node.page));
            for (pool, entry) in states.chain(pages).filter(|(_, entry)| *entry != 0) {
                bytes.extend(block_on(runner.backend().read(&pool.slice_rows(entry as usize, 1))).unwrap());
            }
        }
        found.insert(node.hash, bytes);
    }
    found
}

#[test]
fn drafts_leave_the_same_states_and_pages_and_turns_reuse_as_much() {
    for model in micro_models() {
        let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(&model, 512));
        for (habit, sampled) in Habit::ALL.into_iter().flat_map(|habit| [(habit, false), (habit, true)]) {
            let mut left = Vec::new();
            for speculate in [Speculate::Off, Speculate::Ngram] {
                let options = EngineOptions { context: Some(512), speculate, ..EngineOptions::default() };
                let mut engine = model.engine(&options, sampled);
                let (mut text, mut reports) = (vec![1, 2, 3], Vec::new());
                // Turns of a chat: each continues the answer of the one before, whose states are decode captures.
                for turn in 0..3 {
                    text.push(turn);
                    let sampling = Sampling { temperature: if sampled { 1.0 } else { 0.0 }, ..Sampling::default() };
                    let request = Request { prompt: text.clone(), max_tokens: 150, sampling, ..Request::default() };
                    let right = alone.run(&Asked::plain(request.clone())).0;
                    let known = [&text[..], &right].concat();
                    let guesser =
                        Guesser { habit, text: known.clone(), exact: true, vocab: vocab as u32, random: Random(9) };
                    engine.submit(Request { drafter: Some(Box::new(guesser)), ..request }).unwrap();
                    while !engine.is_idle() {
                        engine.poison_free().unwrap();
                        for event in block_on(engine.step()).unwrap() {
                            match event {
                                Event::Token { token, .. } => text.push(token),
                                Event::Finished(end) => reports.push(end.cache),
                            }
                        }
                    }
                    assert_eq!(text, known, "{}, {habit:?}: turn {turn}", model.name);
                }
                assert_eq!(engine.stats().drafts.rows > 0, speculate != Speculate::Off);
                left.push((reports, contents(&engine)));
            }
            assert!(left[0] == left[1], "{}, {habit:?}, sampled {sampled}: what the cache holds differs", model.name);
        }
    }
}

#[test]
fn a_forced_answer_is_continued_as_if_it_were_sampled() {
    for model in micro_models() {
        let (vocab, mut alone) = (model.architecture.spec().vocab as u32, Alone::new(&model, 512));
        let mut random = Random(5);
        let text: Vec<u32> = (0..153).map(|_| random.next() as u32 % vocab).collect();
        let (prompt, forced) = (text[..3].to_vec(), text[3..].to_vec());
        for speculate in [Speculate::Off, Speculate::Ngram] {
            let options = EngineOptions { context: Some(512), speculate, ..EngineOptions::default() };
            let mut engine = model.engine(&options, false);
            let mut answer = |request: Request| {
                engine.submit(request).unwrap();
                let mut answer = Vec::new();
                while !engine.is_idle() {
                    engine.poison_free().unwrap();
                    let events = block_on(engine.step()).unwrap();
                    answer.extend(
                        events
                            .iter()
                            .filter_map(|e| if let Event::Token { token, .. } = e { Some(*token) } else { None }),
                    );
                }
                answer
            };
            let guesser = Guesser { habit: Habit::Right, text: text.clone(), exact: true, vocab, random: Random(9) };
            let first = Request {
                prompt: prompt.clone(),
                max_tokens: forced.len(),
                forced: forced.clone().into(),
                drafter: Some(Box::new(guesser)),
                ..Request::default()
            };
            assert_eq!(answer(first), forced, "{}", model.name);
            let next = Request { prompt: [&text[..], &[1]].concat(), max_tokens: 20, ..Request::default() };
            let right = alone.run(&Asked::plain(next.clone())).0;
            assert_eq!(answer(next), right, "{}, {speculate:?}", model.name);
            let stats = engine.stats();
            assert!(stats.tokens_reused >= 128, "{stats:?}");
            assert_eq!(stats.drafts.accepted() > 60, speculate != Speculate::Off, "{stats:?}");
        }
    }
}

/// Clocks on which each step takes 1 and 200 ms.
fn fast_clock() -> f64 {
    static TICKS: AtomicU64 = AtomicU64::new(0);
    TICKS.fetch_add(1, Relaxed) as f64
}

fn slow_clock() -> f64 {
    200.0 * fast_clock()
}

#[test]
fn measuring_costs_leaves_nothing_behind() {
    for model in micro_models() {
        let engine = |speculate, clock| {
            model.engine(&EngineOptions { context: Some(512), speculate, clock, ..EngineOptions::default() }, true)
        };
        let measured = |engine: &mut Engine<Behind>| block_on(engine.measure_costs()).unwrap();
        assert_eq!(measured(&mut engine(Speculate::Ngram, fast_clock)), None);
        assert_eq!(measured(&mut engine(Speculate::Auto, slow_clock)), None);
        let mut engine = engine(Speculate::Auto, fast_clock);
        let costs = measured(&mut engine).expect("a new engine that drafts where it pays");
        assert_eq!(costs.times(), [1.0; 4]);
        engine.set_costs(costs);
        let prompt: Vec<u32> = (0..130).map(|i| i % 7).collect();
        let request = Request { prompt, max_tokens: 100, ..Request::default() };
        let mut answer = Vec::new();
        engine.submit(request.clone()).unwrap();
        while !engine.is_idle() {
            for event in block_on(engine.step()).unwrap() {
                if let Event::Token { token, .. } = event {
                    answer.push(token);
                }
            }
        }
        assert_eq!(answer, Alone::new(&model, 512).run(&Asked::plain(request)).0, "{}", model.name);
        assert_eq!(measured(&mut engine), None, "{}: its slots and pages hold something", model.name);
    }
}

/// Requests with prompts of their own, whose drafters are right.
fn jobs(range: std::ops::Range<u32>) -> Vec<Job> {
    let never = 1_000_000;
    let job = |i: u32| {
        let prompt: Vec<u32> = (0..300).map(|p| 1000 * i + p).collect();
        let text = [&prompt[..], &reference(&prompt, 100, never)].concat();
        let guesser = Guesser { habit: Habit::Right, text, exact: true, vocab: 100_000, random: Random(1) };
        let drafter = Some(Box::new(guesser) as Box<dyn Drafter>);
        let request = Request { prompt, max_tokens: 100, drafter, ..Request::default() };
        Job { request, stop: never, gap: 0, cancel_after: None }
    };
    range.map(job).collect()
}

/// What became of the drafts of two requests after others have filled the tree.
fn drafts_beside_a_full_tree(slots: usize, pages: usize) -> DraftStats {
    let shape = StateShape { slot_bytes: 1, page_bytes: 1, context: 1024 };
    let limits = Limits { max_batch: 2, step_tokens: 64, slots, pages, drafts: 7, ..Limits::default() };
    let mut sim = Sim::new(shape, limits, 0);
    sim.run(&jobs(0..20));
    let before = sim.scheduler.stats();
    assert!(before.evictions.slots > 0 && before.evictions.nodes > 0, "{before:?}");
    sim.run(&jobs(20..22));
    let all = sim.scheduler.stats().drafts;
    DraftStats { rows: all.rows - before.drafts.rows, tokens: all.tokens - before.drafts.tokens, ..all }
}

#[test]
fn a_full_tree_leaves_room_for_drafts_and_fewer_slots_for_fewer_of_them() {
    // 100 tokens each, some of them before the prompt of the other is computed, which leaves a step no room.
    let ample = drafts_beside_a_full_tree(50, 40);
    assert!(ample.tokens >= 160 && ample.tokens > 6 * ample.rows, "{ample:?}");
    let few = drafts_beside_a_full_tree(12, 40);
    assert!(few.tokens > 0 && few.tokens < 6 * few.rows, "{few:?}");
}
