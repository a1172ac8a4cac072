//! `selkie convert` through the real binary: the demo model as GGUF files of several types.

mod binary;

use binary::*;
use serde_json::Value;

const DEMO: &str = "models/demo";

fn demo() -> String {
    repository(DEMO).to_str().unwrap().to_owned()
}

fn convert(more: &[&str]) -> std::process::Output {
    let args: Vec<&str> = ["convert"].into_iter().chain(more.iter().copied()).collect();
    run(&args)
}

#[test]
fn the_demo_in_fewer_bits_still_answers() {
    let dir = TempDir::new("convert");
    let plain = dir.arg("bf16.gguf");
    stdout(convert(&["-m", &demo(), "-o", &plain, "--type", "bf16"]));
    let before = std::fs::metadata(&plain).unwrap().len();
    for (kind, most) in [("q8_0", 0.6), ("q4_k_m", 0.4)] {
        let file = dir.arg(&format!("{kind}.gguf"));
        let out = convert(&["-m", &demo(), "-o", &file, "--type", kind, "--json"]);
        let facts: Value = serde_json::from_str(&stdout(out)).unwrap();
        let bytes = std::fs::metadata(&file).unwrap().len();
        assert_eq!(facts["bytes"], bytes);
        assert_eq!(facts["selkie_only"], false);
        assert!((bytes as f64) < most * before as f64, "{kind}: {bytes} of {before}");
        assert_eq!(stdout(run(&["-m", &file, "What is 17 + 25?", "--backend", "cpu"])), "17 + 25 = 42.\n", "{kind}");
        assert_eq!(dir.names().iter().filter(|n| n.ends_with(".tmp")).count(), 0);
    }
    // A file is converted like a folder; its tokenizer goes with it.
    let (from, to) = (dir.arg("q8_0.gguf"), dir.arg("again.gguf"));
    let table = stdout(convert(&["-m", &from, "-o", &to, "--type", "Q6_K"]));
    assert!(table.contains("blk.0.ssm_in.weight") && table.contains("Q6_K"), "{table}");
    assert_eq!(stdout(run(&["-m", &to, "What is 17 + 25?", "--backend", "cpu"])), "17 + 25 = 42.\n");
}

#[test]
fn a_model_is_never_written_over_itself() {
    let dir = TempDir::new("convert-onto");
    let file = dir.arg("demo.gguf");
    stdout(convert(&["-m", &demo(), "-o", &file, "--type", "q8_0"]));
    let before = std::fs::read(&file).unwrap();
    let out = convert(&["-m", &file, "-o", &file, "--type", "q4_0"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("demo.gguf: this is a file of the model that is converted"), "{}", stderr(&out));
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

/// The demo's folder with a changed tokenizer.
fn with_tokenizer(dir: &TempDir, change: impl FnOnce(&mut Value)) {
    for name in ["config.json", "tokenizer_config.json", "model.gguf"] {
        std::fs::copy(repository(DEMO).join(name), dir.path(name)).unwrap();
    }
    let mut tokenizer = json(repository("models/demo/tokenizer.json"));
    change(&mut tokenizer);
    dir.write("tokenizer.json", tokenizer.to_string());
}

#[test]
fn a_tokenizer_that_others_do_not_know_is_for_selkie_only() {
    let dir = TempDir::new("convert-only");
    with_tokenizer(&dir, |t| {
        t["pre_tokenizer"]["pretokenizers"][0] = serde_json::json!({"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": false});
    });
    let file = dir.arg("demo.gguf");
    let args = ["-m", dir.dir(), "-o", &file, "--type", "q8_0"];
    let out = convert(&args);
    assert_eq!(out.status.code(), Some(1));
    let why = stderr(&out);
    assert!(why.contains("tokenizer.json: a pre-tokeniser with patterns of its own"), "{why}");
    assert!(why.contains("--selkie-only"), "{why}");
    assert!(!dir.path("demo.gguf").exists());
    let out = convert(&[&args[..], &["--selkie-only"]].concat());
    let said = stderr(&out);
    stdout(out);
    assert!(said.contains("the file is for selkie alone"), "{said}");
    assert_eq!(stdout(run(&["-m", &file, "What is 17 + 25?", "--backend", "cpu"])), "17 + 25 = 42.\n");
}

#[test]
fn what_cannot_be_written_is_refused_with_a_way_out() {
    let dir = TempDir::new("convert-refused");
    let file = dir.arg("model.gguf");
    let out = convert(&["-m", &demo(), "-o", &file, "--type", "q3_k"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("q4_k_m"), "{}", stderr(&out));
    let zamba = repository("tests/golden/zamba2");
    let out = convert(&["-m", zamba.to_str().unwrap(), "-o", &file, "--type", "q8_0"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("\"zamba2\"") && stderr(&out).contains("use the folder"), "{}", stderr(&out));
    assert!(dir.names().is_empty(), "{:?}", dir.names());
}
