//! Tokenizers rebuilt from what GGUF files say.

use std::path::Path;

use serde_json::Value as Json;

use super::{
    Memory, families, golden_folders, open,
    writer::{Value, Writer},
};

const TEXTS: [&str; 8] = [
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand a tab ",
    "Grüße, señor — naïve café №42",
    "Привет, мир! Как дела?",
    "日本語のテキスト、そして中文。",
    "मानक हिन्दी और 👩‍👩‍👧 emoji 🎉",
    "fn main() { println!(\"{}\", x_1 + 2); } // comment",
    "",
];

fn model() -> Writer {
    families::convert(&golden_folders().into_iter().find(|f| f.ends_with("lfm2")).unwrap()).unwrap().out
}

/// The demo's vocabulary, which is byte-level BPE, as keys of a file.
fn demo(out: &mut Writer, pre: &str) -> Vec<u8> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
    let bytes = std::fs::read(file).unwrap();
    let json: Json = serde_json::from_slice(&bytes).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let n =
        vocab.values().chain(added.iter().map(|t| &t["id"])).map(|id| id.as_u64().unwrap() + 1).max().unwrap() as usize;
    let (mut tokens, mut kinds) = (vec![String::new(); n], vec![1; n]);
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = text.clone();
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().into();
        kinds[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merge = |m: &Json| match m {
        Json::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    out.key("tokenizer.ggml.model", "gpt2");
    out.key("tokenizer.ggml.pre", pre);
    out.key("tokenizer.ggml.tokens", Value::Texts(tokens));
    out.key("tokenizer.ggml.token_type", Value::I32s(kinds));
    out.key("tokenizer.ggml.merges", Value::Texts(merges));
    out.key("tokenizer.ggml.add_bos_token", false);
    bytes
}

#[test]
fn the_demos_ids_come_out_of_a_gguf_file_too() {
    let mut out = model();
    let json = demo(&mut out, "gpt-2");
    let own = open(Memory::of("model.gguf", out.bytes())).unwrap();
    let beside = open(Memory::of("model.gguf", out.bytes()).with("tokenizer.json", json)).unwrap();
    let (own, beside) = (own.tokenizer().unwrap(), beside.tokenizer().unwrap());
    assert!(beside.file().ends_with("tokenizer.json"));
    for text in TEXTS {
        let ids = own.encode(text).unwrap();
        assert_eq!(ids, beside.encode(text).unwrap(), "{text:?}");
        assert_eq!(own.decode(&ids).unwrap(), text);
    }
}

#[test]
fn every_known_split_keeps_the_text_and_an_unknown_one_is_refused_by_name() {
    for pre in ["llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2", "starcoder"] {
        let mut out = model();
        demo(&mut out, pre);
        let files = open(Memory::of("model.gguf", out.bytes())).unwrap_or_else(|e| panic!("{pre}: {e}"));
        let tokenizer = files.tokenizer().unwrap();
        for text in TEXTS {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text, "{pre}");
        }
    }
    let mut out = model();
    demo(&mut out, "brand-new");
    let error = open(Memory::of("model.gguf", out.bytes())).err().unwrap().to_string();
    assert!(error.contains("pre-tokeniser \"brand-new\"") && error.contains("tokenizer.json"), "{error}");
}

#[test]
fn sentence_pieces_merge_by_score() {
    let mut out = model();
    let pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "bc", "ab", "▁ab", "abc", "▁abc"];
    let mut tokens: Vec<String> = pieces.map(String::from).into();
    let mut kinds = vec![2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    let mut scores = vec![0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -4.0, -1.0, -2.0, -3.0, -5.0, -6.0];
    for byte in 0..256 {
        tokens.push(format!("<0x{byte:02X}>"));
        kinds.push(6);
        scores.push(-20.0);
    }
    out.key("tokenizer.ggml.model", "llama");
    out.key("tokenizer.ggml.tokens", Value::Texts(tokens));
    out.key("tokenizer.ggml.token_type", Value::I32s(kinds));
    out.key("tokenizer.ggml.scores", Value::F32s(scores));
    out.key("tokenizer.ggml.bos_token_id", 1usize);
    out.key("tokenizer.ggml.eos_token_id", 2usize);
    out.key("tokenizer.ggml.unknown_token_id", 0usize);
    let files = open(Memory::of("model.gguf", out.bytes())).unwrap();
    let t = files.tokenizer().unwrap();
    // `bc` is the best pair of ` abc`, then ` a` and `bc` make no piece but ` abc` does.
    assert_eq!(t.encode("abc").unwrap(), [1, 12]);
    assert_eq!(t.encode("ab a").unwrap(), [1, 10, 7]);
    // Bytes stand for what no piece has.
    let e = 13;
    assert_eq!(t.encode("é").unwrap(), [1, 3, e + 0xc3, e + 0xa9]);
    assert_eq!(t.decode(&t.encode("abc é").unwrap()).unwrap(), "abc é");
    assert_eq!(files.eos().unwrap(), [2]);
}

#[test]
fn ends_and_the_template_come_out_of_the_file() {
    let mut out = model();
    demo(&mut out, "gpt-2");
    out.key("tokenizer.chat_template", "{{ messages[0].content }}");
    out.key("tokenizer.ggml.eos_token_id", 5usize);
    out.key("tokenizer.ggml.eot_token_id", 7usize);
    let files = open(Memory::of("model.gguf", out.bytes())).unwrap();
    assert!(files.chat().is_ok());
    let eos = files.eos().unwrap();
    assert!(eos.contains(&5) && eos.contains(&7), "{eos:?}");
}
