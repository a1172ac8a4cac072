//! Text in and out over the engine, with the demo model and one without a tokenizer.

use std::{
    collections::HashMap,
    fs,
    future::Future,
    path::{Path, PathBuf},
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll, Waker},
};

use selkie_core::{
    Result,
    backend::{Backend, Caps},
    chat::Message,
    cpu::CpuBackend,
    engine::{EngineOptions, FinishReason, SeqId},
    model_dir::ModelFiles,
    ops::Op,
    sample::Sampling,
    session::{Ask, Completion, Overrides, Prompt, Session, Update},
    source::{Bytes, Dir},
    tensor::Tensor,
};

fn session(dir: impl AsRef<Path>) -> Session<CpuBackend> {
    session_on(CpuBackend::new(), dir)
}

fn session_on<B: Backend>(backend: B, dir: impl AsRef<Path>) -> Session<B> {
    pollster::block_on(async {
        let files = Rc::new(ModelFiles::open(Rc::new(Dir::open(dir.as_ref()).unwrap()), || 0).await.unwrap());
        let options = EngineOptions::default();
        Session::load(backend, files, &options, &mut |_| {}).await.unwrap()
    })
}

/// The demo model with some files replaced; the directory goes with it.
struct Changed(PathBuf);

impl Changed {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        for file in
            ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
        {
            fs::copy(Path::new("../models/demo").join(file), dir.join(file)).unwrap();
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

fn demo() -> Session<CpuBackend> {
    session("../models/demo")
}

fn chat(text: &str) -> Ask {
    Ask { prompt: Prompt::Messages(vec![Message::new("user", text)]), ..Ask::default() }
}

/// Runs everything to its end; the pieces of text and the completion of every request.
fn finish<B: Backend>(session: &mut Session<B>) -> HashMap<SeqId, (Vec<String>, Completion)> {
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

/// Tokens after the stop string would be computed in vain.
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
        s.files().chat().unwrap().encode(s.files().tokenizer().unwrap(), messages, true).unwrap()
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
fn with_words(name: &str, decoder: &str, text: impl Fn(usize) -> String) -> (PathBuf, Session<CpuBackend>) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama");
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

/// Many decoders drop the space before the first word. Text that goes on from a prompt needs it, an answer that stands alone
/// does not.
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
fn a_prompt_that_takes_long_holds_up_nobody_and_can_be_cancelled() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x";
    let dir = Changed::new("endless", &[("chat_template.jinja", endless)]);
    let mut s = session(&dir.0);
    let quick = s.submit(Ask { prompt: Prompt::Text("Hello".into()), max_tokens: Some(3), ..Ask::default() }).unwrap();
    let [slow, cancelled] = [(), ()].map(|()| s.submit(chat("Hello")).unwrap());
    s.cancel(cancelled);
    let mut order = Vec::new();
    let mut ends = HashMap::new();
    while !s.is_idle() {
        for update in pollster::block_on(s.step()).unwrap() {
            if let Update::Done { id, completion } = update {
                order.push(id);
                ends.insert(id, completion);
            }
        }
    }
    assert_eq!(order, [cancelled, quick, slow]);
    assert_eq!(ends[&cancelled].finish, FinishReason::Cancelled);
    assert_eq!((ends[&quick].finish, ends[&quick].ids.len()), (FinishReason::Length, 3));
    assert_eq!(ends[&slow].finish, FinishReason::Failed);
    let message = ends[&slow].error().unwrap().to_string();
    assert!(message.contains("chat_template.jinja") && message.contains("does not come to an end"), "{message}");
}

#[test]
fn tokens_that_cannot_be_decoded_end_their_request() {
    let tokenizer = fs::read_to_string("../models/demo/tokenizer.json").unwrap();
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
        assert!(message.contains("bytes of text cannot fit: the context of 8192 tokens holds at most"), "{message}");
    }
    assert!(s.is_idle());
}

#[test]
fn ids_beyond_the_vocabulary_are_the_tokenizers_fault() {
    let tokenizer = fs::read_to_string("../models/demo/tokenizer.json").unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let token = serde_json::json!({"id": 2000, "content": "Hello", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    // Ids go on from the last one.
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

/// The CPU, whose reads take some polls; or one that is said to run behind the host's back.
struct Late {
    inner: CpuBackend,
    caps: Caps,
}

struct LateRead {
    inner: <CpuBackend as Backend>::Read,
    polls: usize,
}

impl Future for LateRead {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.polls += 1;
        if self.polls < 4 { Poll::Pending } else { Pin::new(&mut self.inner).poll(context) }
    }
}

impl Backend for Late {
    type Buf = <CpuBackend as Backend>::Buf;
    type Rec<'a> = <CpuBackend as Backend>::Rec<'a>;
    type Tape = <CpuBackend as Backend>::Tape;
    type Read = LateRead;

    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Self::Buf> {
        self.inner.alloc(label, bytes)
    }
    fn adopts(&self) -> bool {
        self.inner.adopts()
    }
    fn adopt(&self, bytes: &Bytes) -> Option<Self::Buf> {
        self.inner.adopt(bytes)
    }
    fn write(&self, dst: &Self::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Self::Buf>) -> u64 {
        self.inner.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.inner.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<()> {
        self.inner.run(f)
    }
    fn record(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<Self::Tape> {
        self.inner.record(f)
    }
    fn play(&self, tape: &Self::Tape) -> Result<()> {
        self.inner.play(tape)
    }
    fn read(&self, src: &Tensor<Self::Buf>) -> Self::Read {
        LateRead { inner: self.inner.read(src), polls: 0 }
    }
}

#[test]
fn a_step_that_is_dropped_while_it_waits_loses_nothing() {
    for asynchronous in [false, true] {
        let inner = CpuBackend::new();
        let caps = Caps { asynchronous, ..inner.caps().clone() };
        let mut s = session_on(Late { inner, caps }, "../models/demo");
        let questions = [("What is 17 + 25?", "17 + 25 = 42."), ("What is 81 - 36?", "81 - 36 = 45.")];
        let ids = questions.map(|(q, _)| s.submit(chat(q)).unwrap());
        let mut texts: HashMap<SeqId, String> = HashMap::new();
        let (mut ended, mut dropped) = (0, 0);
        while !s.is_idle() {
            // Polled once; what waits is dropped.
            let Poll::Ready(updates) = pin!(s.step()).poll(&mut Context::from_waker(Waker::noop())) else {
                dropped += 1;
                continue;
            };
            for update in updates.unwrap() {
                match update {
                    Update::Text { id, text } => *texts.entry(id).or_default() += &text,
                    Update::Done { completion, .. } => {
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
