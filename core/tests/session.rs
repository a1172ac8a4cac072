//! Text in and out over the engine, with the demo model and one without a tokenizer.

use std::{collections::HashMap, rc::Rc};

use selkie_core::{
    chat::Message,
    cpu::CpuBackend,
    engine::{EngineOptions, FinishReason, SeqId},
    model_dir::ModelFiles,
    sample::Sampling,
    session::{Ask, Completion, Overrides, Prompt, Session, Update},
    source::Dir,
};

fn session(dir: &str) -> Session<CpuBackend> {
    pollster::block_on(async {
        let files = Rc::new(ModelFiles::open(Rc::new(Dir::open(dir).unwrap()), || 0).await.unwrap());
        let options = EngineOptions::default();
        Session::load(CpuBackend::new(), files, &options, &mut |_| {}).await.unwrap()
    })
}

fn demo() -> Session<CpuBackend> {
    session("../models/demo")
}

fn chat(text: &str) -> Ask {
    Ask { prompt: Prompt::Messages(vec![Message::new("user", text)]), ..Ask::default() }
}

/// Runs everything to its end; the pieces of text and the completion of every request.
fn finish(session: &mut Session<CpuBackend>) -> HashMap<SeqId, (Vec<String>, Completion)> {
    let mut pieces: HashMap<SeqId, Vec<String>> = HashMap::new();
    let mut done = HashMap::new();
    while !session.is_idle() {
        for update in pollster::block_on(session.step()).unwrap() {
            match update {
                Update::Text { id, text } => {
                    assert!(!text.is_empty() && !done.contains_key(&id));
                    pieces.entry(id).or_default().push(text);
                }
                Update::Done { id, completion } => {
                    assert!(done.insert(id, (pieces.remove(&id).unwrap_or_default(), completion)).is_none());
                }
            }
        }
    }
    done
}

#[test]
fn several_requests_stream_side_by_side() {
    let mut s = demo();
    let questions = [("What is 17 + 25?", "17 + 25 = 42."), ("What is 81 - 36?", "81 - 36 = 45.")];
    let ids = questions.map(|(q, _)| s.submit(chat(q)).unwrap());
    let done = finish(&mut s);
    for (id, (_, want)) in ids.iter().zip(questions) {
        let (pieces, completion) = &done[id];
        assert!(pieces.len() > 3, "{pieces:?}");
        assert_eq!(pieces.concat(), want);
        assert_eq!(completion.text.as_deref(), Some(want));
        assert_eq!(completion.finish, FinishReason::Stop);
        assert_eq!(completion.ids.last(), Some(&2));
    }
}

#[test]
fn a_stop_string_ends_the_request_and_is_never_shown() {
    let mut s = demo();
    let id = s.submit(Ask { stop: vec!["= 4".into()], ..chat("What is 17 + 25?") }).unwrap();
    let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
    assert_eq!((pieces.concat().as_str(), completion.finish), ("17 + 25 ", FinishReason::Stop));
    // What was held back comes with the end.
    let id = s.submit(Ask { stop: vec!["42.?".into()], ..chat("What is 17 + 25?") }).unwrap();
    assert_eq!(finish(&mut s)[&id].0.concat(), "17 + 25 = 42.");
    let id = s.submit(Ask { stop: vec!["= 42".into()], max_tokens: Some(7), ..chat("What is 17 + 25?") }).unwrap();
    let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
    assert_eq!((pieces.concat().as_str(), completion.finish), ("17 + 25 =", FinishReason::Length));
}

#[test]
fn a_cancelled_request_ends_with_what_it_has() {
    let mut s = demo();
    let id = s.submit(chat("Tell me a story about a fox named Leo and a lantern.")).unwrap();
    for _ in 0..5 {
        pollster::block_on(s.step()).unwrap();
    }
    s.cancel(id);
    let (_, completion) = finish(&mut s).remove(&id).unwrap();
    assert_eq!(completion.finish, FinishReason::Cancelled);
    assert!((1..=5).contains(&completion.ids.len()));
    assert!("In the kitchen lived a fox".starts_with(completion.text.unwrap().as_str()));
}

#[test]
fn the_next_turn_reuses_the_one_before() {
    let mut s = demo();
    let story = "Anna was in the kitchen. Anna took the key. Anna went to the garden. ".repeat(6);
    let mut messages = vec![Message::new("user", format!("{story}Where is the key?"))];
    let id = s.submit(Ask { prompt: Prompt::Messages(messages.clone()), ..Ask::default() }).unwrap();
    let (_, first) = finish(&mut s).remove(&id).unwrap();
    assert_eq!(first.reused(), 0);
    messages.push(Message::new("assistant", first.text.unwrap()));
    messages.push(Message::new("user", "Where is Anna?"));
    let id = s.submit(Ask { prompt: Prompt::Messages(messages), ..Ask::default() }).unwrap();
    let (_, second) = finish(&mut s).remove(&id).unwrap();
    assert_eq!(second.reused(), (first.end.prompt_tokens - 1) / 64 * 64);
}

#[test]
fn without_a_tokenizer_there_are_ids_only() {
    let mut s = session("../tests/golden/llama");
    let id = s.submit(Ask { prompt: Prompt::Ids(vec![5, 6, 7]), max_tokens: Some(3), ..Ask::default() }).unwrap();
    let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
    assert!(pieces.is_empty() && completion.text.is_none() && !completion.ids.is_empty());
    for prompt in [Prompt::Text("Hello".into()), Prompt::Messages(vec![Message::new("user", "Hello")])] {
        assert!(s.submit(Ask { prompt, ..Ask::default() }).is_err());
    }
    let stop = Ask { prompt: Prompt::Ids(vec![5]), stop: vec!["x".into()], ..Ask::default() };
    assert!(s.submit(stop).is_err());
    assert!(s.is_idle());
}

#[test]
fn given_values_come_before_the_models_own() {
    let own = Sampling { temperature: 0.7, top_p: 0.9, seed: 3, ..Sampling::default() };
    assert_eq!(Overrides::default().over(own), own);
    let given = Overrides { temperature: Some(0.0), seed: Some(8), ..Overrides::default() };
    assert_eq!(given.over(own), Sampling { temperature: 0.0, seed: 8, ..own });
}
