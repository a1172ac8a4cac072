//! Tokenizers rebuilt from what GGUF files say.

use std::{path::Path, sync::Arc};

use selkie_core::{fnv, tokenizer::Tokenizer};
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
    byte_level(out, pre, tokens, kinds, merges);
    bytes
}

/// The keys of a byte-level BPE without a token at the beginning.
fn byte_level(out: &mut Writer, pre: &str, tokens: Vec<String>, kinds: Vec<i32>, merges: Vec<String>) {
    out.key("tokenizer.ggml.model", "gpt2");
    out.key("tokenizer.ggml.pre", pre);
    out.key("tokenizer.ggml.tokens", Value::Texts(tokens));
    out.key("tokenizer.ggml.token_type", Value::I32s(kinds));
    out.key("tokenizer.ggml.merges", Value::Texts(merges));
    out.key("tokenizer.ggml.add_bos_token", false);
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

/// A byte-level BPE of `pre/merges.txt`: a token for every byte in the order of their characters, then one for each merge.
fn trained(pre: &str) -> Arc<Tokenizer> {
    let merges: Vec<String> = include_str!("pre/merges.txt").lines().map(String::from).collect();
    // The characters that stand for bytes: themselves where they are visible, else those from 256 on.
    let mut alphabet: Vec<char> =
        ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').chain((256..324).filter_map(char::from_u32)).collect();
    alphabet.sort_unstable();
    let merged = merges.iter().map(|m| m.replace(' ', ""));
    let tokens: Vec<String> = alphabet.iter().map(char::to_string).chain(merged).collect();
    let mut out = model();
    let kinds = vec![1; tokens.len()];
    byte_level(&mut out, pre, tokens, kinds, merges);
    open(Memory::of("model.gguf", out.bytes())).unwrap().tokenizer().unwrap().clone()
}

fn checksum(ids: &[u32]) -> u64 {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    fnv::hash(fnv::START, &bytes)
}

/// Splits, the numbers of texts in which llama.cpp's own rules differ, and checksums of the ids of the others, for every 100 texts.
fn splits() -> Vec<(&'static str, Vec<usize>, Vec<u64>)> {
    let line = |line: &'static str| {
        let (pre, checksums) = line.split_once(' ').unwrap();
        let named = include_str!("pre/different.txt").lines().filter_map(|line| line.split_once(' '));
        let different = named.filter(|(name, _)| *name == pre).flat_map(|(_, numbers)| numbers.split(' '));
        let different = different.map(|n| n.parse().unwrap()).collect();
        (pre, different, checksums.split(' ').map(|hex| u64::from_str_radix(hex, 16).unwrap()).collect())
    };
    include_str!("pre/ids.txt").lines().map(line).collect()
}

#[test]
fn ids_of_every_split_are_those_of_llama_cpp() {
    let texts: Vec<String> =
        include_str!("pre/texts.txt").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let splits = splits();
    assert_eq!((splits.len(), texts.len()), (8, 10_000));
    for (pre, different, checksums) in splits {
        let tokenizer = trained(pre);
        for (hundred, (texts, want)) in texts.chunks(100).zip(checksums).enumerate() {
            let same = texts.iter().enumerate().filter(|(i, _)| !different.contains(&(100 * hundred + i)));
            let of = same.map(|(_, text)| checksum(&tokenizer.encode_plain(text).unwrap()));
            let sum = of.fold(0, |sum: u64, one| sum.rotate_left(1) ^ one);
            assert_eq!(sum, want, "{pre}, texts from {} on", 100 * hundred);
        }
    }
}
