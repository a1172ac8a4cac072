//! Text in and out over the engine, with the demo model and one without a tokenizer.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use selkie_core::{
    Error, Result,
    backend::{Backend, Caps},
    chat::Message,
    cpu::CpuBackend,
    engine::{EngineOptions, FinishReason, SeqId},
    model_dir::ModelFiles,
    sample::Sampling,
    session::{Ask, Completion, Local, Overrides, Prompt, Update, WhenFull},
    source::Dir,
};

use crate::wrapped::Wrapped;

fn session(dir: impl AsRef<Path>) -> Local {
    session_on(CpuBackend::new(), dir)
}

fn session_on<B: Backend + 'static>(backend: B, dir: impl AsRef<Path>) -> Local {
    pollster::block_on(async {
        let files = ModelFiles::open(Arc::new(Dir::open(dir.as_ref()).unwrap()), || 0).await.unwrap();
        let options = EngineOptions::default();
        Local::load(backend, &files, &options, &mut |_| {}).await.unwrap()
    })
}

/// The demo model with some files replaced; the directory is removed when it is dropped.
struct Changed(PathBuf);

impl Changed {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"] {
            fs::copy(Path::new("../../models/demo").join(file), dir.join(file)).unwrap();
        }
        for (file, text) in files {
            fs::write(dir.join(file), text).unwrap();
        }
        Self(dir)
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn demo() -> Local {
    session("../../models/demo")
}

fn chat(text: &str) -> Ask {
    Ask { prompt: Prompt::Messages(vec![Message::new("user", text)]), ..Ask::default() }
}

/// Runs everything to its end; the pieces of text and the completion of every request.
fn finish(session: &mut Local) -> HashMap<SeqId, (Vec<String>, Completion)> {
    let mut pieces: HashMap<SeqId, Vec<String>> = HashMap::new();
    let mut ids: HashMap<SeqId, Vec<u32>> = HashMap::new();
    let mut done = HashMap::new();
    while !session.is_idle() {
        for (id, update) in pollster::block_on(session.step()).unwrap() {
            match update {
                Update::Text { text, tokens } => {
                    assert!(!done.contains_key(&id));
                    ids.entry(id).or_default().extend(tokens.iter().map(|token| token.id));
                    pieces.entry(id).or_default().extend(Some(text).filter(|text| !text.is_empty()));
                }
                Update::Done(completion) => {
                    // Some may have come before.
                    assert!(completion.ids.ends_with(&ids.remove(&id).unwrap_or_default()));
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
    // Text that was held back comes with the end.
    let id = s.submit(Ask { stop: vec!["42.?".into()], ..chat("What is 17 + 25?") }).unwrap();
    assert_eq!(finish(&mut s)[&id].0.concat(), "17 + 25 = 42.");
    let id = s.submit(Ask { stop: vec!["= 42".into()], max_tokens: Some(7), ..chat("What is 17 + 25?") }).unwrap();
    let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
    assert_eq!((pieces.concat().as_str(), completion.finish), ("17 + 25 =", FinishReason::Length));
}

/// Tokens after the stop string would be computed for nothing.
#[test]
fn nothing_is_computed_after_a_stop_string() {
    let mut s = demo();
    let ask = |stop: &[&str]| Ask { stop: stop.iter().map(|s| s.to_string()).collect(), ..chat("What is 17 + 25?") };
    let id = s.submit(ask(&[])).unwrap();
    assert_eq!(finish(&mut s)[&id].1.ids.len(), 12);
    let before = s.engine().stats().tokens_generated;
    let id = s.submit(ask(&[" +"])).unwrap();
    let (_, completion) = finish(&mut s).remove(&id).unwrap();
    assert_eq!((completion.text.as_deref(), completion.finish), (Some("17"), FinishReason::Stop));
    assert_eq!(completion.ids.len(), 3);
    assert_eq!(s.engine().stats().tokens_generated - before, 3);
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

/// Message ends are looked for among the newest messages, and at the end of the first.
#[test]
fn a_chat_of_many_messages_keeps_the_end_of_its_system_prompt() {
    let s = demo();
    let encode = |messages: &[Message]| {
        let text = s.model().text();
        text.chat().unwrap().encode(text.tokenizer().unwrap(), messages, true).unwrap()
    };
    let mut messages = vec![Message::new("system", "Answer in one short sentence.")];
    for turn in 0..20 {
        messages.push(Message::new("user", format!("What is {turn} + 25?")));
        messages.push(Message::new("assistant", format!("{}.", turn + 25)));
    }
    messages.pop();
    assert_eq!(messages.len(), 40);
    let long = encode(&messages);
    let short = encode(&[messages[0].clone(), Message::new("user", "Hello!")]);
    assert_eq!(long.boundaries[0], short.boundaries[0]);
    assert_eq!(long.ids[..long.boundaries[0]], short.ids[..short.boundaries[0]]);
    assert!(long.boundaries.len() > 30, "{:?}", long.boundaries);
}

/// The small random model with a tokenizer whose token `n` is `text(n)`, one word each.
fn with_words(name: &str, decoder: &str, text: impl Fn(usize) -> String) -> (PathBuf, Local) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/llama");
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(format!("{golden}/{file}"), dir.join(file)).unwrap();
    }
    let vocab: Vec<String> = (0..320).map(|n| format!("{:?}: {n}", text(n))).collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": {decoder},
            "pre_tokenizer": {{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}},
            "model": {{"type": "WordLevel", "unk_token": {:?}, "vocab": {{{}}}}}}}"#,
        text(0),
        vocab.join(", "),
    );
    fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
    let session = session(dir.to_str().unwrap());
    (dir, session)
}

/// Many decoders drop the space before the first word. A continuation of a prompt needs that space, an answer of its
/// own does not.
#[test]
fn a_continued_text_keeps_its_first_space() {
    let decoder = r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#;
    let (dir, mut s) = with_words("first_space", decoder, |n| format!("▁w{n}"));
    let (text, ids) = (Prompt::Text("w5 w6 w7".into()), Prompt::Ids(vec![5, 6, 7]));
    let mut answers = Vec::new();
    for prompt in [text, ids] {
        let id = s.submit(Ask { prompt, max_tokens: Some(3), ..Ask::default() }).unwrap();
        let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
        assert_eq!(completion.ids.len(), 3);
        let words: Vec<String> = completion.ids.iter().map(|id| format!("w{id}")).collect();
        answers.push((pieces.concat(), words.join(" ")));
    }
    assert_eq!(answers[0].0, format!(" {}", answers[0].1));
    assert_eq!(answers[1].0, answers[1].1);
    assert_eq!(answers[0].1, answers[1].1);
    fs::remove_dir_all(dir).unwrap();
}

/// A token that ends within a character is held back until the next one; at the end of the answer it is text like any other.
#[test]
fn a_stop_string_in_the_last_piece_is_found() {
    let decoder = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}"#;
    // In the alphabet of this decoder Ã is the byte C3, the first of two.
    let (dir, mut s) = with_words("last_piece", decoder, |n| format!("x{n}abcÃ"));
    let mut answer = |stop: &[&str]| {
        let stop = stop.iter().map(|s| s.to_string()).collect();
        let ask = Ask { prompt: Prompt::Ids(vec![5, 6, 7]), max_tokens: Some(1), stop, ..Ask::default() };
        let id = s.submit(ask).unwrap();
        let (pieces, completion) = finish(&mut s).remove(&id).unwrap();
        assert_eq!(Some(pieces.concat()), completion.text);
        (pieces.concat(), completion.finish)
    };
    let (whole, end) = answer(&[]);
    assert_eq!(end, FinishReason::Length);
    let start = whole.strip_suffix("bc\u{fffd}").unwrap();
    assert_eq!(answer(&["bc"]), (start.to_owned(), FinishReason::Stop));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_a_prompt_breaks_is_that_request_alone() {
    let dir = Changed::new("panics", &[("chat_template.jinja", "{{ 1 is divisibleby(0) }}")]);
    let mut s = session(&dir.0);
    let message = s.submit(chat("Hello")).unwrap_err().to_string();
    assert!(message.contains("chat_template.jinja") && message.contains("template engine fails"), "{message}");
    let good = s.submit(Ask { prompt: Prompt::Text("Hello".into()), max_tokens: Some(3), ..Ask::default() }).unwrap();
    assert_eq!(finish(&mut s)[&good].1.finish, FinishReason::Length);
}

#[test]
fn tokens_that_cannot_be_decoded_end_their_request() {
    let tokenizer = fs::read_to_string("../../models/demo/tokenizer.json").unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let strip = serde_json::json!({"type": "Strip", "content": "z", "start": 0, "stop": 2});
    tokenizer["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [tokenizer["decoder"], strip]});
    let dir = Changed::new("decoder", &[("tokenizer.json", &tokenizer.to_string())]);
    let mut s = session(&dir.0);
    // A text that ends in one z panics in the library; it is the context of the first token.
    let bad = s.submit(Ask { prompt: Prompt::Text("z".into()), max_tokens: Some(3), ..Ask::default() });
    let good = s.submit(Ask { prompt: Prompt::Text("Hello".into()), max_tokens: Some(3), ..Ask::default() }).unwrap();
    let done = finish(&mut s);
    assert_eq!(done[&good].1.finish, FinishReason::Length);
    let failed = &done[&bad.unwrap()].1;
    assert_eq!(failed.finish, FinishReason::Failed);
    let message = failed.error().unwrap().to_string();
    assert!(message.contains("tokenizer.json: the tokenizer fails"), "{message}");
}

#[test]
fn text_that_cannot_fit_is_refused_by_its_bytes() {
    let mut s = demo();
    let long = "Hello world. ".repeat(30 << 20 >> 3);
    for prompt in [Prompt::Text(long.clone()), Prompt::Messages(vec![Message::new("user", long)])] {
        let message = s.submit(Ask { prompt, ..Ask::default() }).unwrap_err().to_string();
        assert!(message.contains("bytes of text cannot fit: the context of 8,192 tokens holds at most"), "{message}");
    }
    assert!(s.is_idle());
}

#[test]
fn ids_beyond_the_vocabulary_are_the_tokenizers_fault() {
    let tokenizer = fs::read_to_string("../../models/demo/tokenizer.json").unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let token = serde_json::json!({"id": 2000, "content": "Hello", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    // The ids continue after the last one.
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((0..30).map(|i| {
        let mut one = token.clone();
        (one["id"], one["content"]) = ((1024 + i).into(), format!("Hello{i}").into());
        one
    }));
    let dir = Changed::new("vocabulary", &[("tokenizer.json", &tokenizer.to_string())]);
    let mut s = session(&dir.0);
    let message = s.submit(Ask { prompt: Prompt::Text("Hello7".into()), ..Ask::default() }).unwrap_err().to_string();
    assert!(
        message.contains(
            "tokenizer.json: it gives token id 1031, and by vocab_size in config.json the model has ids 0 to 1023"
        ),
        "{message}"
    );
}

#[test]
fn a_step_that_is_dropped_while_it_waits_loses_nothing() {
    for asynchronous in [false, true] {
        let inner = CpuBackend::new();
        let caps = Caps { asynchronous, ..inner.caps().clone() };
        let mut s = session_on(Wrapped { inner, caps, polls: 3, before: Box::new(|_| Ok(())) }, "../../models/demo");
        let questions = [("What is 17 + 25?", "17 + 25 = 42."), ("What is 81 - 36?", "81 - 36 = 45.")];
        let ids = questions.map(|(q, _)| s.submit(chat(q)).unwrap());
        let mut texts: HashMap<SeqId, String> = HashMap::new();
        let (mut ended, mut dropped) = (0, 0);
        while !s.is_idle() {
            // Polled once. If it waits, the future is dropped.
            let Poll::Ready(updates) = pin!(s.step()).poll(&mut Context::from_waker(Waker::noop())) else {
                dropped += 1;
                continue;
            };
            for (id, update) in updates.unwrap() {
                match update {
                    Update::Text { text, .. } => *texts.entry(id).or_default() += &text,
                    Update::Done(completion) => {
                        assert_eq!(completion.finish, FinishReason::Stop);
                        ended += 1;
                    }
                }
            }
        }
        assert!(ended == 2 && dropped > 20, "{ended} {dropped}");
        for (id, (_, want)) in ids.iter().zip(questions) {
            assert_eq!(texts[id], want, "{asynchronous}");
        }
    }
}

#[test]
fn without_a_tokenizer_there_are_ids_only() {
    let mut s = session("../golden/llama");
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

/// A session with a context of 512 tokens, and a conversation that is longer.
fn full() -> (Local, Vec<Message>) {
    let s = pollster::block_on(async {
        let files = ModelFiles::open(Arc::new(Dir::open("../../models/demo").unwrap()), || 0).await.unwrap();
        let options = EngineOptions { context: Some(512), max_batch: 1, ..EngineOptions::default() };
        Local::load(CpuBackend::new(), &files, &options, &mut |_| {}).await.unwrap()
    });
    let mut messages = vec![Message::new("system", "The code of the red box is 4812. ".repeat(10))];
    for i in 0..20 {
        messages.push(Message::new("user", format!("Tell me a story about {i} foxes and a lantern.")));
        messages.push(Message::new("assistant", format!("Once there were {i} foxes. They had a lantern.")));
    }
    messages.push(Message::new("user", "What is the code of the red box?"));
    (s, messages)
}

fn ask_full(s: &mut Local, messages: &[Message], when_full: WhenFull) -> Result<Completion> {
    let prompt = Prompt::Messages(messages.to_vec());
    let id = s.submit(Ask { prompt, when_full, max_tokens: Some(20), ..Ask::default() })?;
    Ok(finish(s).remove(&id).unwrap().1)
}

#[test]
fn a_full_context_is_an_error_with_both_numbers() {
    let (mut s, messages) = full();
    let e = ask_full(&mut s, &messages, WhenFull::Error).unwrap_err();
    let Error::TooLong { tokens: Some((prompt, 20, 512)), why } = e else { panic!("{e}") };
    assert!(prompt > 512 && why.contains("the context holds 512"), "{why}");
}

#[test]
fn the_oldest_turns_are_left_out_and_the_system_prompt_is_reused() {
    let (mut s, mut messages) = full();
    // A conversation that fits keeps all messages under both policies.
    let first = ask_full(&mut s, &messages[..4], WhenFull::DropOldest).unwrap();
    assert_eq!(first.dropped, 0);
    let done = ask_full(&mut s, &messages, WhenFull::DropOldest).unwrap();
    assert!(done.dropped > 0 && done.dropped.is_multiple_of(2), "{}", done.dropped);
    assert!(done.end.prompt_tokens <= 256, "half of the context is free: {}", done.end.prompt_tokens);
    assert!(done.reused() >= 64 && done.reused() < 192, "the system prompt and not much more: {}", done.reused());
    // One turn less would have left too little room.
    let prompt = |s: &mut Local, dropped: usize| {
        let kept: Vec<Message> = messages[..1].iter().chain(&messages[1 + dropped..]).cloned().collect();
        ask_full(s, &kept, WhenFull::Error).unwrap().end.prompt_tokens
    };
    assert_eq!(prompt(&mut s, done.dropped), done.end.prompt_tokens);
    assert!(prompt(&mut s, done.dropped - 2) > 256);
    // A continuation of the kept messages leaves out nothing more, and reuses all of them.
    messages.drain(1..1 + done.dropped);
    messages.push(Message::new("assistant", done.text.unwrap()));
    messages.push(Message::new("user", "And what is 17 + 25?"));
    let next = ask_full(&mut s, &messages, WhenFull::DropOldest).unwrap();
    assert_eq!(next.dropped, 0);
    assert!(next.reused() >= 192, "{}", next.reused());
}

#[test]
fn a_last_turn_that_is_too_long_alone_is_refused() {
    let (mut s, mut messages) = full();
    messages.last_mut().unwrap().content = "What is 17 + 25? ".repeat(100);
    let e = ask_full(&mut s, &messages, WhenFull::DropOldest).unwrap_err();
    assert!(matches!(e, Error::TooLong { tokens: Some((600.., 20, 512)), .. }), "{e}");
}

#[test]
fn the_names_of_the_policies() {
    assert_eq!(WhenFull::ALL.map(WhenFull::name), ["error", "drop-oldest"]);
    assert_eq!(WhenFull::from_name("drop-oldest"), Some(WhenFull::DropOldest));
    assert_eq!(WhenFull::from_name("drop"), None);
}
