//! Broken models: every mutation of a good one is opened and generates a token, or is refused with a message that names
//! a file, a key or a tensor. Either takes seconds at most, and neither panics.
//!
//! The same seed gives the same cases. `SELKIE_FUZZ_CASES=N` runs N cases of each kind instead of the few of CI,
//! `SELKIE_FUZZ_SEED=S` other ones; a failure names its kind, seed and number.

mod binary;
#[path = "fuzz/mutate.rs"]
mod mutate;

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    process::Stdio,
    sync::Arc,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use selkie_core::{
    Error, Result,
    cpu::CpuBackend,
    engine::EngineOptions,
    model_dir::ModelFiles,
    session::{Ask, Local, Overrides, Prompt},
    source::{Bytes, LocalFuture, Source},
};
use serde_json::{Map, Value, json};

use binary::{TempDir, repository, selkie};
use mutate::Random;

/// Longest time of a case.
const LIMIT: Duration = Duration::from_secs(10);

/// Models of one shape each, small enough to run in milliseconds.
const MODELS: [&str; 9] = [
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "mamba2",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_window",
    "llama",
    "qwen3",
];

/// Files by name.
type Files = BTreeMap<String, Vec<u8>>;

/// A model in memory.
struct Memory(Files);

impl Source for Memory {
    fn label(&self) -> String {
        "model".into()
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok(self.0.get(name).map(|bytes| bytes.len() as u64))))
    }

    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let bytes = &self.0[name][range.start as usize..range.end as usize];
        Box::pin(std::future::ready(Ok(bytes.to_vec().into())))
    }
}

fn golden(model: &str) -> Files {
    ["config.json", "model.safetensors"]
        .map(|name| (name.to_owned(), fs::read(repository(&format!("tests/golden/{model}/{name}"))).unwrap()))
        .into()
}

fn demo() -> Files {
    ["config.json", "generation_config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"]
        .map(|name| (name.to_owned(), fs::read(repository(&format!("models/demo/{name}"))).unwrap()))
        .into()
}

/// Opens and loads a model and asks it for one token.
fn open_and_run(files: Files) -> Result<()> {
    pollster::block_on(async {
        let files = ModelFiles::open(Arc::new(Memory(files)), || 0).await?;
        let options = EngineOptions {
            slots: Some(4),
            kv_pages: Some(4),
            max_batch: 1,
            step_tokens: 64,
            context: Some(64),
            ..EngineOptions::default()
        };
        let mut session = Local::load(CpuBackend::new(), &files, &options, &mut |_| {}).await?;
        session.submit(Ask {
            prompt: Prompt::Ids(vec![1, 2, 3, 4, 5]),
            sampling: Overrides { seed: Some(1), ..Overrides::default() },
            max_tokens: Some(1),
            ..Ask::default()
        })?;
        while !session.is_idle() {
            session.step().await?;
        }
        Ok(())
    })
}

/// Whether a message names a place to look at.
fn names_a_place(message: &str) -> bool {
    [
        "model/",
        "config.json",
        "tokenizer.json",
        "index.json",
        "safetensors",
        "chat_template",
        "chat template",
        "key `",
        "tensor `",
    ]
    .iter()
    .any(|place| message.contains(place))
}

/// How a case ended: it ran, it was refused, or it should not have ended like that.
enum End {
    Ran,
    Refused,
    Wrong(String),
}

fn in_process(files: Files) -> End {
    match catch_unwind(AssertUnwindSafe(|| open_and_run(files))) {
        Ok(Ok(())) => End::Ran,
        // Valid requests depend on the model: here the vocabulary is too small for the ids.
        Ok(Err(Error::BadRequest(_) | Error::TooLong { .. })) => End::Refused,
        Ok(Err(e)) if names_a_place(&e.to_string()) => End::Refused,
        Ok(Err(e)) => End::Wrong(format!("a message without a place: {e}")),
        Err(_) => End::Wrong("panic".into()),
    }
}

/// The same through the binary, with text: a separate process, in case it crashes.
fn through_binary(files: Files, name: &str) -> End {
    let dir = TempDir::new(name);
    for (file, bytes) in files {
        dir.write(&file, bytes);
    }
    let mut command = selkie();
    command.args(["generate", "-m", dir.dir(), "--backend", "cpu", "--max-tokens", "1", "Hello <|end|> w\u{f6}rld 😀"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stderr.take().unwrap();
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut pipe, &mut text);
        let _ = done.send(String::from_utf8_lossy(&text).into_owned());
    });
    let Ok(message) = ended.recv_timeout(LIMIT) else {
        let _ = child.kill();
        let _ = child.wait();
        return End::Wrong("it takes too long".into());
    };
    match child.wait().unwrap().code() {
        _ if message.contains("panicked") => End::Wrong(message),
        Some(0) => End::Ran,
        Some(1) if names_a_place(&message) => End::Refused,
        code => End::Wrong(format!("exit code {code:?}: {message}")),
    }
}

/// Runs the cases of a kind; `make` gives a description and the files. At least one of `ran` cases must run.
fn run_kind(
    kind: &'static str,
    cases: usize,
    one_runs_of: usize,
    make: fn(&mut Random) -> (String, Files),
    judge: impl Fn(Files) -> End + Send + 'static,
) {
    let number = |name| std::env::var(name).ok().map(|n| n.parse().unwrap_or_else(|_| panic!("{name} is a number")));
    let cases = number("SELKIE_FUZZ_CASES").unwrap_or(cases as u64);
    let seed = number("SELKIE_FUZZ_SEED").unwrap_or(1);
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        for case in 0..cases {
            let (what, files) = make(&mut Random::new(seed, kind, case));
            let _ = send.send((case, what, None));
            let start = Instant::now();
            let end = judge(files);
            let end = if start.elapsed() > LIMIT { End::Wrong("it takes too long".into()) } else { end };
            let _ = send.send((case, String::new(), Some(end)));
        }
    });
    let (mut ran, mut wrong, mut last) = (0, Vec::new(), String::new());
    loop {
        match receive.recv_timeout(2 * LIMIT) {
            Ok((_, what, None)) => last = what,
            Ok((_, _, Some(End::Ran))) => ran += 1,
            Ok((_, _, Some(End::Refused))) => {}
            Ok((case, _, Some(End::Wrong(why)))) => {
                wrong.push(format!("{kind} {case} of seed {seed}: {last}\n  {why}"))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{kind} of seed {seed} hangs: {last}"),
        }
    }
    assert!(wrong.is_empty(), "{} of {cases} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(ran * one_runs_of as u64 >= cases, "only {ran} of {cases} models ran");
}

#[test]
fn configurations() {
    let make = |r: &mut Random| {
        let model = *r.pick(&MODELS);
        let mut files = golden(model);
        let what = r.mutate_json_file(files.get_mut("config.json").unwrap(), mutate::CONFIG_KEYS);
        (format!("{model}: {what}"), files)
    };
    run_kind("config", 250, 20, make, in_process);
}

#[test]
fn weights() {
    let make = |r: &mut Random| {
        let model = *r.pick(&MODELS);
        let mut files = golden(model);
        let what = r.mutate_safetensors(files.get_mut("model.safetensors").unwrap());
        (format!("{model}: {what}"), files)
    };
    run_kind("weights", 250, 20, make, in_process);
}

#[test]
fn shards() {
    let make = |r: &mut Random| {
        let model = *r.pick(&MODELS);
        let (what, files) = split(r, golden(model));
        (format!("{model}: {what}"), files)
    };
    run_kind("shards", 150, 20, make, in_process);
}

#[test]
fn generation_configs() {
    let make = |r: &mut Random| {
        let mut files = golden("llama");
        let all = json!({"do_sample": true, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.1,
            "repetition_penalty": 1.1, "eos_token_id": [2]});
        let mut bytes = all.to_string().into_bytes();
        let what = r.mutate_json_file(&mut bytes, &["eos_token_id", "temperature", "text_config"]);
        files.insert("generation_config.json".into(), bytes);
        (what, files)
    };
    run_kind("generation", 150, 20, make, in_process);
}

#[test]
fn tokenizers() {
    let make = |r: &mut Random| {
        let mut files = demo();
        let file = *r.pick(&["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]);
        let what = r.mutate_json_file(files.get_mut(file).unwrap(), mutate::TOKENIZER_KEYS);
        (format!("{file}: {what}"), files)
    };
    run_kind("tokenizer", 60, 20, make, |files| through_binary(files, "fuzz_tokenizer"));
}

#[test]
fn templates() {
    let make = |r: &mut Random| {
        let mut files = demo();
        let source = r.template(3);
        files.insert("chat_template.jinja".into(), source.clone().into_bytes());
        (source, files)
    };
    run_kind("template", 60, 20, make, |files| through_binary(files, "fuzz_template"));
}

/// A model in several files with an index; in most cases something is wrong with it.
fn split(r: &mut Random, mut files: Files) -> (String, Files) {
    let whole = files.remove("model.safetensors").unwrap();
    let (header, data) = mutate::parts(&whole);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let parts = 1 + r.below(3);
    let mut map = Map::new();
    for part in 0..parts {
        let (mut entries, mut bytes) = (Map::new(), Vec::new());
        let tensors = header.iter().filter(|(name, _)| *name != "__metadata__").enumerate();
        for (_, (name, entry)) in tensors.filter(|(i, _)| i % parts == part) {
            let range = mutate::range(entry);
            let mut entry = entry.clone();
            entry["data_offsets"] = json!([bytes.len(), bytes.len() + range.len()]);
            bytes.extend(&data[range]);
            entries.insert(name.clone(), entry);
            map.insert(name.clone(), format!("part-{part}.safetensors").into());
        }
        let header = Value::from(entries).to_string();
        files.insert(format!("part-{part}.safetensors"), mutate::safetensors(header.as_bytes(), &bytes));
    }
    let names: Vec<String> = map.keys().cloned().collect();
    let index = |map: Map<String, Value>| json!({"metadata": {"total_size": whole.len()}, "weight_map": map});
    let what = match r.below(5) {
        0 => {
            let name = r.pick(&names).clone();
            let to = r.pick(&mutate::hostile()).clone();
            map.insert(name.clone(), to.clone());
            format!("{name} in {to}")
        }
        1 => {
            let to =
                *r.pick(&["../part-0.safetensors", "/etc/passwd", "none.safetensors", "", ".", "a\0b", "config.json"]);
            names.iter().for_each(|name| _ = map.insert(name.clone(), to.into()));
            format!("all in {to:?}")
        }
        2 => {
            let part = format!("part-{}.safetensors", r.below(parts));
            let what = r.mutate_safetensors(files.get_mut(&part).unwrap());
            format!("{part}: {what}")
        }
        3 => {
            let mut bytes = index(map).to_string().into_bytes();
            let what = r.mutate_json_file(&mut bytes, &["weight_map"]);
            files.insert("model.safetensors.index.json".into(), bytes);
            return (what, files);
        }
        _ => "nothing".into(),
    };
    files.insert("model.safetensors.index.json".into(), index(map).to_string().into_bytes());
    (what, files)
}
