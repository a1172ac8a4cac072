//! Hostile chat templates, prompts and weights end one request, with a message that names the cause; the others are
//! answered.

mod binary;

use binary::*;
use selkie_core::{gguf::Gguf, source::Dir};
use serde_json::{Value, json};

/// Answers of a batch of a plain prompt and a chat, with the model in `dir`.
fn plain_and_chat(dir: &TempDir) -> [Value; 2] {
    let lines = [json!({"prompt": "Hi", "max_tokens": 2}), json!({"messages": [{"role": "user", "content": "x"}]})];
    let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let out = run_with_input(&["batch", "-", "-o", "-", "-m", dir.dir(), "--backend", "cpu"], &input);
    assert!(!stderr(&out).contains("panicked"), "{}", stderr(&out));
    let answers: Vec<Value> =
        String::from_utf8(out.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let code = out.status.code();
    let answers: [Value; 2] = answers.try_into().unwrap();
    assert_eq!(code, Some(i32::from(!answers[1]["error"].is_null())), "{answers:?}");
    answers
}

#[test]
fn templates_that_take_memory_stack_or_time() {
    let dir = copy_of("models/demo", "templates");
    let namespace = "{% set ns = namespace(x='a') %}";
    let doubling = "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}";
    let nested = "{% set ns.x = [] %}{% for i in range(800) %}{% for j in range(800) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}";
    let upper = "{% set x = 'a' * 20000000 %}{% for i in range(2000) %}{% set y = x|upper %}{% endfor %}hi";
    for (source, expected) in [
        (format!("{namespace}{doubling}"), "rendering it takes"),
        ("{{ 'x\nx'|indent(2000000000) }}".into(), "rendering it takes"),
        ("{{ '%0999999999d'|format(1) }}".into(), "rendering it takes"),
        (format!("{namespace}{{% set ns.x = ns %}}{{{{ ns|tojson }}}}"), "rendering it takes"),
        (format!("{namespace}{nested}{{{{ ns.x|tojson }}}}"), "rendering it takes"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(20_000)), "operators"),
        (format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(20_000)), "elif"),
        ("{{ 1 is divisibleby(0) }}".into(), "the template engine fails on it"),
        (upper.into(), "rendering it takes more than 5 seconds"),
    ] {
        dir.write("chat_template.jinja", &source);
        let [plain, chat] = plain_and_chat(&dir);
        assert_eq!((plain["finish_reason"].as_str(), &plain["error"]), (Some("length"), &Value::Null), "{expected}");
        let why = chat["error"].as_str().unwrap();
        assert!(
            why.contains("chat_template.jinja: the chat template cannot be used") && why.contains(expected),
            "{why}"
        );
        assert_eq!(chat["finish_reason"], "error");
    }
    // A value that contains itself is printed as such.
    dir.write("chat_template.jinja", format!("{namespace}{{% set ns.x = ns %}}{{{{ ns }}}}"));
    assert_eq!(plain_and_chat(&dir)[1]["error"], Value::Null);
}

#[test]
fn a_broken_template_matters_only_to_those_who_chat() {
    let dir = copy_of("models/demo", "compile");
    dir.write("chat_template.jinja", format!("{{{{ 1{} }}}}", "+1".repeat(20_000)));
    stdout(run(&["inspect", "-m", dir.dir()]));
    stdout(run(&["generate", "-m", dir.dir(), "--backend", "cpu", "--raw", "Hello", "--max-tokens", "1"]));
    let out = run(&["generate", "-m", dir.dir(), "--backend", "cpu", "Hello"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("chat_template.jinja"), "{}", stderr(&out));
}

#[test]
fn long_texts_are_refused_by_their_length() {
    let long = "Hello world. ".repeat((20 << 20) / 13);
    let lines = [json!({"prompt": "Hi", "max_tokens": 2}), json!({"prompt": long, "max_tokens": 1})];
    let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let out = run_with_input(&["batch", "-", "-o", "-", "--backend", "cpu"], &input);
    let text = String::from_utf8(out.stdout).unwrap();
    let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers[0]["error"], Value::Null);
    let why = answers[1]["error"].as_str().unwrap();
    assert!(why.contains("bytes of text cannot fit: the context of 8,192 tokens"), "{why}");
    let endless = "a".repeat((32 << 20) + 1);
    for args in [&["generate", "-"][..], &["chat"][..]] {
        let out = run_with_input(&[args, &["--backend", "cpu"]].concat(), &endless);
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("more than 3"), "{}", stderr(&out));
    }
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    let dir = copy_of("models/demo", "nan");
    let mut bytes = std::fs::read(dir.path("model.gguf")).unwrap();
    let gguf = pollster::block_on(Gguf::open(&Dir::open(dir.dir()).unwrap(), "model.gguf")).unwrap();
    let at = gguf.tensors()["output_norm.weight"].range.start as usize;
    bytes[at..at + 4].copy_from_slice(&[0xff, 0x7f, 0xff, 0x7f]);
    dir.write("model.gguf", bytes);
    let why = "the model's logits are not finite: a weight file or config.json is damaged";
    let out = run(&["generate", "-m", dir.dir(), "--backend", "cpu", "--max-tokens", "5", "hi"]);
    assert_eq!((out.status.code(), stderr(&out).contains(why)), (Some(1), true), "{}", stderr(&out));
    let [plain, chat] = {
        let input = "{\"prompt\": \"Hi\"}\n{\"prompt_ids\": [1, 2]}\n";
        let out = run_with_input(&["batch", "-", "-o", "-", "-m", dir.dir(), "--backend", "cpu"], input);
        assert_eq!(out.status.code(), Some(1));
        let text = String::from_utf8(out.stdout).unwrap();
        let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        <[Value; 2]>::try_from(answers).unwrap()
    };
    for answer in [plain, chat] {
        assert!(answer["error"].as_str().unwrap().contains(why) && answer["finish_reason"] == "error", "{answer}");
    }
    let (ids, file) = (dir.write("ids.json", "[1, 2]"), dir.arg("logits.safetensors"));
    let out = run(&["logits", "-m", dir.dir(), "--backend", "cpu", "--ids", &ids, "--out", &file]);
    assert_eq!((out.status.code(), stderr(&out).contains(why)), (Some(1), true), "{}", stderr(&out));
    assert!(!dir.path("logits.safetensors").exists());
}
