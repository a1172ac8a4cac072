//! Bundles through the command line: a chat that is stopped and goes on, a batch that begins warm, and refusals.

mod binary;

use std::fs;

use binary::*;
use serde_json::{Value, json};

const TALK: [&str; 3] =
    ["Tell me a story about a fox named Leo and a lantern.", "What is 17 + 25?", "Where is the key?"];

fn chat(lines: &[&str], more: &[&str]) -> (String, String) {
    let args = ["chat", "--backend", "cpu", "--max-tokens", "60"];
    let out = run_with_input(&[&args[..], more].concat(), &lines.iter().map(|l| format!("{l}\n")).collect::<String>());
    let notes = stderr(&out);
    (stdout(out), notes)
}

#[test]
fn a_chat_goes_on_where_it_was_saved() {
    let dir = TempDir::new("bundle-chat");
    let file = dir.arg("talk.bundle");
    let (whole, _) = chat(&TALK, &[]);
    let (first, notes) = chat(&TALK[..2], &["--save", &file]);
    assert!(notes.contains("talk.bundle: ") && notes.contains(" state"), "{notes}");
    let (second, notes) = chat(&TALK[2..], &["--load", &file, "--exact-only"]);
    assert_eq!(first + &second, whole);
    assert!(notes.contains("need not be computed, exact") && notes.contains("reused"), "{notes}");
    assert!(!notes.contains("converted"), "{notes}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let shown = stdout(run(&["bundle", "inspect", &file]));
    assert!(shown.contains("conversation  yes") && shown.contains("numerics      cpu act=F32"), "{shown}");
    let facts: Value = serde_json::from_str(&stdout(run(&["bundle", "inspect", &file, "--json"]))).unwrap();
    assert_eq!(facts["covered_tokens"].as_u64().unwrap() % 64, 0);
    assert!(
        facts["tensors"].as_array().unwrap().iter().any(|t| t["name"].as_str().unwrap().contains(".recurrent.")),
        "{facts}"
    );
    assert!(stdout(run(&["bundle", "verify", &file])).contains("all checksums are right"));

    // /save with this ending, within a chat.
    let other = dir.arg("now.bundle");
    chat(&[TALK[0], &format!("/save {other}"), TALK[1]], &[]);
    assert!(stdout(run(&["bundle", "verify", &other])).contains("all checksums are right"));
}

#[test]
fn a_batch_begins_warm() {
    let dir = TempDir::new("bundle-warm");
    let file = dir.arg("rules.bundle");
    let rules = "Anna was in the kitchen. Anna took the key. Anna went to the garden. ".repeat(6);
    let made = run(&["bundle", "make", "--backend", "cpu", "--system", &rules, "-o", &file]);
    assert!(stderr(&made).contains("rules.bundle: "), "{}", stderr(&made));
    stdout(made);
    let line = |question: &str| {
        let messages = json!([{ "role": "system", "content": rules }, { "role": "user", "content": question }]);
        format!("{}\n", json!({ "messages": messages, "max_tokens": 12 }))
    };
    let input: String = TALK.iter().map(|q| line(q)).collect();
    let batch = |more: &[&str]| -> Vec<Value> {
        let args = ["batch", "-", "-o", "-", "--backend", "cpu", "--sequential"];
        let out = stdout(run_with_input(&[&args[..], more].concat(), &input));
        out.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    };
    let (cold, warm) = (batch(&[]), batch(&["--warm", &file, "--exact-only"]));
    let column = |answers: &[Value], path: &str| -> Vec<Value> {
        answers.iter().map(|a| a.pointer(path).unwrap().clone()).collect()
    };
    assert_eq!(column(&cold, "/ids"), column(&warm, "/ids"));
    assert_eq!(cold[0]["cache"]["reused_tokens"], 0);
    assert!(warm[0]["cache"]["reused_tokens"].as_u64().unwrap() >= 64, "{}", warm[0]);
    assert_eq!(warm[0]["cache"]["converted"], false);
}

#[test]
fn bundles_that_do_not_fit_are_refused_by_name() {
    let dir = TempDir::new("bundle-refused");
    let file = dir.arg("a.bundle");
    let model = repository("tests/golden/nemotron_h").to_str().unwrap().to_owned();
    stdout(run(&["bundle", "make", "--backend", "cpu", "--raw", &"one two three ".repeat(60), "-o", &file]));
    let fails = |args: &[&str], why: &str| {
        let out = run_with_input(args, "Hello there\n");
        let said = stderr(&out);
        assert!(!out.status.success() && said.contains("a.bundle") && said.contains(why), "{args:?}: {said}");
    };
    fails(&["chat", "--backend", "cpu", "--load", &file], "holds no conversation");
    fails(&["bundle", "verify", &file, "-m", &model], "of another model");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, &bytes).unwrap();
    fails(&["bundle", "verify", &file], "does not have the checksum");
    fails(&["batch", "-", "-o", "-", "--backend", "cpu", "--warm", &file], "does not have the checksum");
    fs::write(&file, &bytes[..middle]).unwrap();
    fails(&["bundle", "inspect", &file], "truncated");
    let short = run(&["bundle", "make", "--backend", "cpu", "--raw", "Hello", "-o", &dir.arg("b.bundle")]);
    assert!(stderr(&short).contains("64 tokens") && !fs::exists(dir.arg("b.bundle")).unwrap(), "{}", stderr(&short));
    let nothing = run(&["bundle", "make", "-o", &dir.arg("b.bundle")]);
    assert_eq!(nothing.status.code(), Some(2));
}

#[test]
fn the_python_reader_reads_it() {
    let dir = TempDir::new("bundle-python");
    let file = dir.arg("a.bundle");
    stdout(run(&["bundle", "make", "--backend", "cpu", "--raw", &"one two three ".repeat(60), "-o", &file]));
    let reader = repository("examples/read_bundle.py");
    let Ok(out) = std::process::Command::new("python3").arg(reader).arg(&file).output() else {
        eprintln!("there is no python3 here");
        return;
    };
    let said = stdout(out);
    assert!(said.contains("\"format\": \"selkie-bundle\"") && said.contains(".recurrent."), "{said}");
}
