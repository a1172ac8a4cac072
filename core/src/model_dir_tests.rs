use std::{fs, path::PathBuf};

use pollster::block_on;

use super::*;
use crate::{
    chat::{Message, system_clock},
    source::Dir,
};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo");

/// A directory of its own for a test, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("selkie-model-dir-{}-{test}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn with_demo(test: &str) -> Self {
        let scratch = Self::new(test);
        for file in ["config.json", "generation_config.json", TOKENIZER, TOKENIZER_CONFIG, "model.gguf"] {
            fs::copy(format!("{DEMO}/{file}"), scratch.0.join(file)).unwrap();
        }
        scratch
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.0.join(file), bytes).unwrap();
    }

    fn open(&self) -> Result<ModelFiles> {
        open(self.0.to_str().unwrap())
    }

    fn message(&self) -> String {
        let message = self.open().err().expect("the model should be refused").to_string();
        let dir = self.0.to_str().unwrap();
        assert!(message.starts_with(dir), "{message}");
        message[dir.len()..].trim_start_matches('/').to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open(path: &str) -> Result<ModelFiles> {
    block_on(ModelFiles::open(Arc::new(Dir::open(path)?), system_clock))
}

#[test]
fn the_demo_model_is_complete() {
    let model = open(DEMO).unwrap();
    assert_eq!((model.name.as_str(), model.config.model_type().unwrap()), ("demo", "nemotron_h"));
    assert_eq!(model.eos().unwrap(), [2]);
    assert!(model.generation.sampling(0).is_greedy());
    let chat = [Message::new("user", "What is 17 + 25?")];
    let prompt = model.chat().unwrap().encode(model.tokenizer().unwrap(), &chat, true).unwrap();
    assert_eq!((prompt.ids[0], *prompt.ids.last().unwrap()), (1, 4));
    assert!(model.checkpoint.bytes() > 7 << 20);
}

#[test]
fn every_reference_model_is_opened_without_a_tokenizer() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let mut opened = 0;
    for entry in fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        if path.join("config.json").exists() {
            let model = open(path.to_str().unwrap()).unwrap();
            assert!(model.tokenizer().err().unwrap().to_string().contains("token ids only"));
            assert!(model.chat().is_err());
            opened += 1;
        }
    }
    assert!(opened >= 17, "{opened}");
}

#[test]
fn what_is_wrong_with_a_directory_is_named() {
    let empty = Scratch::new("empty");
    assert_eq!(
        empty.message(),
        ": there is no config.json; give the directory of a Hugging Face model, with config.json and the weights"
    );
    empty.write("config.json", r#"{"model_type": "llama"}"#);
    assert!(empty.message().contains("neither model.safetensors nor model.safetensors.index.json"));
    for (test, file, bytes, expected) in [
        ("config", "config.json", &b"{\"a\": "[..], "config.json: not valid JSON"),
        (
            "generation",
            "generation_config.json",
            b"{\"top_p\": []}",
            "generation_config.json: key `top_p`: expected a finite",
        ),
        ("tokenizer", TOKENIZER, b"{\"model\": 3}", "tokenizer.json: not a valid tokenizer"),
        ("settings", TOKENIZER_CONFIG, b"[]", "tokenizer_config.json: expected a JSON object"),
        (
            "list",
            TOKENIZER_CONFIG,
            b"{\"chat_template\": 3}",
            "tokenizer_config.json: key `chat_template`: expected a string",
        ),
        ("jinja", "chat_template.jinja", b"\xff", "chat_template.jinja: not UTF-8"),
        ("weights", "model.safetensors", b"\x10\0\0\0\0\0\0\0{", "model.safetensors: the header claims 16 bytes"),
    ] {
        let scratch = Scratch::with_demo(test);
        scratch.write(file, bytes);
        let message = scratch.message();
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_template_is_found_in_each_of_its_places() {
    let chat = [Message::new("user", "x")];
    let text = |scratch: &Scratch| {
        let model = scratch.open().unwrap();
        let tokenizer = model.tokenizer().unwrap();
        tokenizer.decode(&model.chat().unwrap().encode(tokenizer, &chat, true).unwrap().ids).unwrap()
    };
    let scratch = Scratch::with_demo("places");
    let list = r#"{"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "list"}]}"#;
    scratch.write(TOKENIZER_CONFIG, list);
    assert_eq!(text(&scratch), "list");
    scratch.write("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!(text(&scratch), "json");
    scratch.write("chat_template.jinja", "jinja");
    assert_eq!(text(&scratch), "jinja");
}

#[test]
fn a_bare_configuration_is_enough_for_random_weights() {
    let scratch = Scratch::new("random");
    scratch.write("config.json", r#"{"model_type": "llama", "eos_token_id": 3}"#);
    let source = Arc::new(Dir::open(&scratch.0).unwrap());
    let model = block_on(ModelFiles::open_random(source, system_clock, 1, None)).unwrap();
    assert!(model.checkpoint.is_random() && model.tokenizer.is_none());
    assert_eq!(model.eos().unwrap(), [3]);
    block_on(model.fingerprint()).unwrap();
}

#[test]
fn the_fingerprint_tells_models_apart() {
    let fingerprint = |model: &ModelFiles| block_on(model.fingerprint()).unwrap();
    let demo = fingerprint(&open(DEMO).unwrap());
    let scratch = Scratch::with_demo("fingerprint");
    assert_eq!(fingerprint(&scratch.open().unwrap()), demo);
    // Other weights of the same shapes.
    let mut bytes = fs::read(scratch.0.join("model.gguf")).unwrap();
    let start = bytes.len() / 2;
    bytes[start..].iter_mut().for_each(|b| *b ^= 1);
    fs::remove_file(scratch.0.join("model.gguf")).unwrap();
    scratch.write("model.gguf", bytes);
    assert_ne!(fingerprint(&scratch.open().unwrap()), demo);
    let other = Scratch::with_demo("fingerprint-config");
    other.write("config.json", fs::read_to_string(format!("{DEMO}/config.json")).unwrap() + " ");
    assert_ne!(fingerprint(&other.open().unwrap()), demo);
}
