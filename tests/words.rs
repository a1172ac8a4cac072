//! The command line in the hands of people and scripts: what it takes for a prompt, what it says and what it keeps quiet about,
//! settings, chats with commands, and lines of OpenAI's batch API.

mod binary;

use std::fs;

use binary::*;
use serde_json::{Value, json};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn cpu(args: &[&str], input: &str) -> std::process::Output {
    let args: Vec<&str> = args.iter().copied().chain(["--backend", "cpu"]).collect();
    run_with_input(&args, input)
}

#[test]
fn a_lone_word_is_a_question_back() {
    for (word, near) in [("chatt", "did you mean `chat`?"), ("listen", "no command `listen`"), ("run", "`chat`")] {
        let out = run(&[word]);
        assert_eq!(out.status.code(), Some(2));
        let why = stderr(&out);
        assert!(why.contains(near) && why.contains(&format!("`selkie generate {word}`")), "{why}");
        assert_eq!(stdout_of(&out), "");
    }
    let text = stdout(cpu(&["generate", "hello", "--max-tokens", "2"], ""));
    assert!(!text.trim().is_empty());
}

fn stdout_of(out: &std::process::Output) -> String {
    String::from_utf8(out.stdout.clone()).unwrap()
}

#[test]
fn standard_input_is_a_prompt_or_joins_one() {
    let ids = |args: &[&str], input: &str| -> u64 {
        let args: Vec<&str> = args.iter().copied().chain(["--json", "--max-tokens", "1"]).collect();
        let out: Value = serde_json::from_str(&stdout(cpu(&args, input))).unwrap();
        out["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let alone = ids(&["generate"], "What is 17 + 25?\n");
    assert_eq!(alone, ids(&["What is 17 + 25?"], ""));
    assert_eq!(alone, ids(&["-"], "What is 17 + 25?\n"));
    let joined = ids(&["Summarise this:"], "What is 17 + 25?\n");
    assert_eq!(joined, ids(&["Summarise this:\n\nWhat is 17 + 25?"], ""));
    assert!(joined > alone);
    // `echo ... | selkie`
    assert_eq!(stdout(run_with_input(&[], "What is 17 + 25?\n")), "17 + 25 = 42.\n");
    let out = run_with_input(&[], "");
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("there is no prompt"), "{}", stderr(&out));
}

#[test]
fn quiet_says_nothing_but_results_and_errors() {
    let out = cpu(&["-q", "What is 17 + 25?"], "");
    assert_eq!((stderr(&out), stdout(out)), (String::new(), "17 + 25 = 42.\n".to_owned()));
    let out = cpu(&["-q", "-m", "/no/such/model", "Hello there"], "");
    assert!(stderr(&out).contains("/no/such/model"));
    let out = cpu(&["chat", "-q"], "What is 17 + 25?\n/reset\n");
    assert_eq!(stderr(&out), "");
}

#[test]
fn a_broken_log_filter_is_said_and_debug_says_more() {
    let run = |filter: &str, flag: &str| {
        let out =
            selkie().args([flag, "What is 17 + 25?", "--backend", "cpu"]).env("SELKIE_LOG", filter).output().unwrap();
        assert!(out.status.success());
        stderr(&out)
    };
    let said = run("selkie=nonsense", "-v");
    assert!(said.contains("SELKIE_LOG=selkie=nonsense") && said.contains("write for example"), "{said}");
    let (info, debug) = (run("", "-v"), run("", "-vv"));
    assert!(debug.contains("DEBUG") && !info.contains("DEBUG"), "{debug}");
}

#[test]
fn the_version_names_commit_and_backends() {
    let text = stdout(run(&["--version"]));
    assert!(text.starts_with("selkie ") && text.contains("backends: cuda, wgpu, cpu"), "{text}");
    let commit = text.split(['(', ')']).nth(1).unwrap();
    assert!(commit == "unknown" || (commit.len() >= 7 && commit.chars().all(|c| c.is_ascii_hexdigit())), "{text}");
    assert_eq!(stdout(run(&["-V"])), text.lines().next().unwrap().to_owned() + "\n");
}

#[test]
fn shells_and_man_get_their_files() {
    for (shell, part) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef selkie"),
        ("fish", "complete -c selkie"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let script = stdout(run(&["completions", shell]));
        assert!(script.contains(part) && script.contains("capture-policy"), "{shell}");
        assert!(!script.contains("render-chat-templates"), "{shell}");
    }
    assert!(stdout(run(&["man"])).contains(".TH selkie 1"));
    assert!(stdout(run(&["man", "batch"])).contains("IN.jsonl"));
    assert_eq!(run(&["man", "nothing"]).status.code(), Some(2));
    let dir = TempDir::new("man");
    stdout(run(&["man", "--dir", dir.dir()]));
    assert!(
        ["selkie.1", "selkie-chat.1", "selkie-batch.1"].iter().all(|page| dir.names().contains(&(*page).to_owned())),
        "{:?}",
        dir.names()
    );
}

#[test]
fn settings_come_from_the_file_and_the_environment() {
    let dir = TempDir::new("settings");
    fs::create_dir(dir.path("selkie")).unwrap();
    let with = |config: &str, model: &str, args: &[&str]| {
        dir.write("selkie/config.json", config);
        let model = if model.is_empty() { None } else { Some(("SELKIE_MODEL", model)) };
        selkie().args(args).env("XDG_CONFIG_HOME", dir.dir()).envs(model).output().unwrap()
    };
    // A model that is not there shows which one was taken.
    let config = r#"{"model": "/from/the/file", "backend": "cpu", "max_tokens": 3}"#;
    let prompt = &["What is 17 + 25?"][..];
    assert!(stderr(&with(config, "", prompt)).contains("/from/the/file"));
    assert!(stderr(&with(config, "/from/the/environment", prompt)).contains("/from/the/environment"));
    let out = with(config, "/from/the/environment", &["-m", "/from/the/line", "What is 17 + 25?"]);
    assert!(stderr(&out).contains("/from/the/line"));
    let out = with(r#"{"backend": "cpu", "max_tokens": 3}"#, "", prompt);
    assert!(stderr(&out).contains("cut at the token limit · cpu"), "{}", stderr(&out));
    assert_eq!(stdout(out), "17 +\n");

    let shown: Value = serde_json::from_str(&stdout(with(config, "/e", &["config", "--json"]))).unwrap();
    assert_eq!(shown["set"]["model"], json!({"value": "/e", "from": "SELKIE_MODEL"}));
    assert_eq!(shown["set"]["backend"]["from"], shown["file"]);
    let text = stdout(with(config, "", &["config"]));
    assert!(
        text.contains("/from/the/file") && text.lines().any(|l| l.starts_with("memory") && l.ends_with("default")),
        "{text}"
    );

    for args in [&["What is 17 + 25?"][..], &["chat"], &["config"]] {
        let out = with(r#"{"modle": "x"}"#, "", args);
        assert_eq!(out.status.code(), Some(2));
        let why = stderr(&out);
        assert!(why.contains("config.json") && why.contains("no key `modle`; did you mean `model`?"), "{why}");
    }
    // Help is given all the same.
    assert!(stdout(with("{", "", &["--help"])).contains("Usage"));
}

#[test]
fn a_pointer_of_git_lfs_is_recognised() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 14000000\n";
    for file in ["model.gguf", "tokenizer.json", "config.json"] {
        let model = copy_of("models/demo", &format!("lfs_{file}"));
        model.write(file, pointer);
        let out = cpu(&["-m", model.dir(), "What is 17 + 25?"], "");
        let why = stderr(&out);
        assert!(why.contains(file) && why.contains("git-lfs pointer") && why.contains("git lfs pull"), "{why}");
        assert_eq!(out.status.code(), Some(1));
    }
}

#[test]
fn a_folder_with_a_gguf_file_is_recognised() {
    let dir = TempDir::new("gguf_folder");
    let file = dir.write("model.gguf", "GGUF, but not a valid one");
    for model in [dir.dir(), &*file] {
        let out = cpu(&["-m", model, "What is 17 + 25?"], "");
        let why = stderr(&out);
        assert!(why.contains("model.gguf") && !why.contains("config.json"), "{why}");
        assert_eq!(out.status.code(), Some(1));
    }
}

#[test]
fn commands_of_a_chat() {
    let dir = TempDir::new("chat_commands");
    let (markdown, messages) = (dir.arg("chat.md"), dir.arg("chat.json"));
    let input = format!(
        "/SYSTEM The code of the red box is 4812.\nWhat is the code of the red box?\nHello!\\\nWhat is 17 + 25?\n/set temperature 0.5\n/set heat 3\n/stats\n\
         /save {markdown}\n/save {messages}\n/clear\n/sytem x\n/bye\nnever read\n"
    );
    let out = cpu(&["chat"], &input);
    let said = stderr(&out);
    let answers = stdout(out);
    assert_eq!(answers.lines().next(), Some("The code of the red box is 4812."));
    for part in [
        "The system prompt is set, and the conversation begins anew.",
        "temperature is 0.5 from now on.",
        "there is no value \"heat\"",
        "2 answers, ",
        "prompt tokens reused",
        "tokens of context used",
        "The conversation begins anew.",
        "There is no command /sytem; did you mean /system?",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("cpu ("), "model and device are no part of every line: {said}");
    let saved = fs::read_to_string(markdown).unwrap();
    assert!(
        saved.contains("## System\n\nThe code of the red box is 4812.\n\n## You\n\nWhat is the code of the red box?"),
        "{saved}"
    );
    let saved = json(messages);
    assert_eq!(saved["messages"][3]["content"], "Hello!\nWhat is 17 + 25?");
    assert_eq!(saved["messages"][2], json!({"role": "assistant", "content": "The code of the red box is 4812."}));
}

#[test]
fn another_try_is_another_answer() {
    let out = cpu(&["chat"], "Tell me a story about a fox named Leo and a lantern.\n/retry\n");
    let said = stderr(&out);
    assert!(said.contains("another try, at temperature 0.7"), "{said}");
    // With a seed of one's own it is the same, and that is said.
    let out = cpu(&["chat", "--seed", "1"], "What is 17 + 25?\n/retry\n");
    assert!(stderr(&out).contains("/set temperature 0.7 samples"), "{}", stderr(&out));
    assert_eq!(stdout(out), "17 + 25 = 42.\n17 + 25 = 42.\n");
}

#[test]
fn a_full_context_of_a_chat() {
    let turn = "Tell me a story about a fox named Leo and a lantern.\n";
    let limits = ["--context", "256", "--max-tokens", "40"];
    let chat = |more: &[&str], input: &str| cpu(&[&["chat"][..], &limits, more].concat(), input);
    let out = chat(&[], &turn.repeat(8));
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("The conversation with your message is ") && said.contains("216 fit with an answer of 40 tokens"),
        "{said}"
    );
    assert!(said.contains("/set when-full drop-oldest"), "{said}");

    let system = "The code of the red box is 4812. ".repeat(10);
    let out = chat(&["--when-full", "drop-oldest", "--system", &system], &turn.repeat(8));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    let left_out = said.lines().filter(|l| l.contains("the context was full: the oldest")).count();
    assert!((1..7).contains(&left_out), "not in every turn: {said}");
    assert!(said.contains("the system prompt is reused, the rest was computed again"), "{said}");

    let out = chat(&[], &"What is 17 + 25? ".repeat(100));
    let said = stderr(&out);
    assert!(said.contains("Your message is 1,") && said.contains("256 fit. It was not sent."), "{said}");
}

#[test]
fn a_full_context_of_a_batch_line() {
    let mut messages = vec![json!({"role": "system", "content": "The code of the red box is 4812."})];
    for _ in 0..40 {
        messages.push(json!({"role": "user", "content": "Tell me a story about a fox named Leo."}));
        messages.push(json!({"role": "assistant", "content": "Once there was a fox named Leo. He had a lantern."}));
    }
    messages.push(json!({"role": "user", "content": "What is the code of the red box?"}));
    let line = |policy: Value| json!({"messages": messages, "max_tokens": 30, "when_full": policy}).to_string() + "\n";
    let args = ["batch", "-", "--context", "512"];
    let out = cpu(&args, &(line(json!("error")) + &line(json!("drop-oldest")) + &line(Value::Null)));
    let answers = lines(&stdout_of(&out));
    assert!(answers[0]["error"].as_str().unwrap().contains("the context holds 512"), "{}", answers[0]);
    assert_eq!(answers[1]["text"], "The code of the red box is 4812.");
    let dropped = answers[1]["left_out_messages"].as_u64().unwrap();
    assert!(dropped > 0 && dropped < 80 && dropped.is_multiple_of(2), "{dropped}");
    assert!(answers[2]["error"].is_string());
    let out = cpu(&[&args[..], &["--when-full", "drop-oldest"]].concat(), &line(Value::Null));
    assert_eq!(lines(&stdout(out))[0]["left_out_messages"], dropped);
    let out = cpu(&args, &line(json!("drop")));
    assert!(stderr(&out).contains("line 1: "), "{}", stderr(&out));
}

#[test]
fn errors_of_a_batch_are_shown_three_of_them() {
    let out = cpu(&["batch", "-"], &"no JSON\n".repeat(1005));
    let said = stderr(&out);
    assert!(said.contains("line 3: not JSON: ") && !said.contains("line 4"), "{said}");
    assert!(said.contains("and 1,002 more, see their answers"), "{said}");
    assert!(said.contains("1,005 requests · 1,005 failed"), "{said}");
    assert_eq!(lines(&stdout_of(&out))[4]["line"], 5);
}

/// A line as OpenAI's documentation shows it.
fn openai(id: &str, body: Value) -> Value {
    json!({"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body})
}

#[test]
fn lines_of_openais_batch_api_are_answered_in_its_form() {
    let ask = json!([{"role": "user", "content": "What is 17 + 25?"}]);
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "What is 17 "}, {"type": "text", "text": "+ 25?"}]}]);
    let input = [
        openai("request-1", json!({"model": "gpt-4o-mini", "messages": ask, "max_tokens": 50, "temperature": 0})),
        openai(
            "parts",
            json!({"messages": parts, "max_completion_tokens": 3, "n": 1, "stream": false, "frequency_penalty": 0.0}),
        ),
        json!({"custom_id": "text", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": "<|bos|><|user|>What is 17 + 25?<|assistant|>", "stop": ["42"]}}),
        json!({"id": "own", "messages": ask}),
        openai("tools", json!({"messages": ask, "tools": []})),
        openai("two", json!({"messages": ask, "n": 2})),
        json!({"custom_id": "other", "method": "POST", "url": "/v1/embeddings", "body": {}}),
        openai("picture", json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})),
    ];
    let text: String = input.iter().map(|line| format!("{line}\n")).collect();
    let out = cpu(&["batch", "-"], &text);
    let answers = lines(&stdout_of(&out));
    let body = &answers[0]["response"]["body"];
    assert_eq!(answers[0]["custom_id"], "request-1");
    assert_eq!((&answers[0]["error"], &answers[0]["response"]["status_code"]), (&Value::Null, &json!(200)));
    assert_eq!(
        (&body["object"], &body["choices"][0]["message"]["role"]),
        (&json!("chat.completion"), &json!("assistant"))
    );
    assert_eq!(body["choices"][0]["message"]["content"], "17 + 25 = 42.");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["usage"]["total_tokens"], 25);
    assert_eq!(answers[1]["response"]["body"]["choices"][0]["message"]["content"], "17 +");
    assert_eq!(answers[1]["response"]["body"]["choices"][0]["finish_reason"], "length");
    assert_eq!(answers[2]["response"]["body"]["choices"][0]["text"], "17 + 25 = ");
    assert_eq!(answers[3]["text"], "17 + 25 = 42.");
    for (answer, needle) in answers[4..].iter().zip(["tools", "`n` can only be 1", "/v1/embeddings", "content"]) {
        assert_eq!(answer["response"]["status_code"], 400, "{answer}");
        let why = answer["response"]["body"]["error"]["message"].as_str().unwrap();
        assert!(why.contains(needle) && why.starts_with("line "), "{why}");
    }
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn a_run_of_openais_lines_is_resumed() {
    let dir = TempDir::new("openai_resume");
    let ask =
        |id: &str, text: &str| openai(id, json!({"messages": [{"role": "user", "content": text}], "max_tokens": 5}));
    let bad = openai("b", json!({"messages": [], "max_tokens": 5}));
    let input = dir.write("in.jsonl", format!("{}\n{bad}\n", ask("a", "What is 17 + 25?")));
    let out = dir.arg("out.jsonl");
    assert_eq!(cpu(&["batch", &input, "-o", &out], "").status.code(), Some(1));
    let first = fs::read_to_string(&out).unwrap();
    dir.write("in.jsonl", format!("{}\n{}\n", ask("a", "What is 17 + 25?"), ask("b", "What is 81 - 36?")));
    let again = cpu(&["batch", &input, "-o", &out, "--resume"], "");
    assert!(stderr(&again).contains("1 answered before"), "{}", stderr(&again));
    let second = fs::read_to_string(&out).unwrap();
    assert_eq!(first.lines().next(), second.lines().next());
    assert_eq!(lines(&second)[1]["response"]["status_code"], 200);
}

#[test]
fn logits_say_what_was_written() {
    let dir = TempDir::new("logits_said");
    let ids = dir.write("ids.json", "[1, 3, 350, 273]");
    let file = dir.arg("logits.safetensors");
    let out = cpu(&["logits", "--ids", &ids, "--steps", "2", "--out", &file], "");
    let said = stderr(&out);
    assert!(said.contains("logits of 4 tokens, 2 greedy steps, 14 states") && said.contains("KiB"), "{said}");
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

/// Within 1e-6 of themselves plus 1: they are f32.
#[test]
fn log_probabilities_are_those_of_selkie_logits() {
    const STEPS: usize = 5;
    let dir = TempDir::new("logprobs");
    let model = repository("tests/golden/llama");
    let (model, out) = (model.to_str().unwrap(), dir.arg("out.safetensors"));
    let ids = dir.write("ids.json", "[5, 250, 31]");
    let steps = STEPS.to_string();
    stdout(cpu(&["logits", "-m", model, "--ids", &ids, "--out", &out, "--steps", &steps], ""));
    let bytes = fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let (prompt, greedy) = (floats("logits"), floats("greedy_logits"));
    let vocab = prompt.len() / 3;
    let rows = prompt.chunks(vocab).skip(2).chain(greedy.chunks(vocab));
    let request = json!({"prompt_ids": [5, 250, 31], "max_tokens": STEPS, "temperature": 0, "logprobs": 3});
    let answer = lines(&stdout(cpu(&["batch", "-", "-m", model], &format!("{request}\n")))).remove(0);
    let tokens = answer["logprobs"].as_array().unwrap();
    assert_eq!(tokens.len(), STEPS);
    for (row, (token, id)) in rows.zip(tokens.iter().zip(answer["ids"].as_array().unwrap())) {
        let want = log_softmax(row);
        let top = token["top"].as_array().unwrap();
        // Greedy: the token is the first of the most likely ones.
        assert_eq!((&token["id"], &top[0]["id"], &token["logprob"]), (id, id, &top[0]["logprob"]));
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|&a, &b| want[b].total_cmp(&want[a]).then(a.cmp(&b)));
        assert_eq!(top.iter().map(|t| t["id"].as_u64().unwrap() as usize).collect::<Vec<_>>(), order[..3]);
        for (t, id) in top.iter().zip(order) {
            let got = t["logprob"].as_f64().unwrap();
            assert!((got - want[id]).abs() <= 1e-6 * (1.0 + want[id].abs()), "{got}, not {}", want[id]);
        }
    }
}

#[test]
fn rules_over_logits_in_both_forms_of_a_batch() {
    let ask = json!([{"role": "user", "content": "What is 17 + 25?"}]);
    let text = "<|bos|><|user|>What is 17 + 25?<|assistant|>";
    let own = |more: Value| {
        let mut line = json!({"messages": ask, "temperature": 0, "max_tokens": 40});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line
    };
    let completion = |body: Value| json!({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body});
    let input = [
        own(json!({})),
        openai("chat", json!({"messages": ask, "temperature": 0, "logprobs": true, "top_logprobs": 2})),
        completion(json!({"prompt": text, "temperature": 0, "logprobs": 1, "max_tokens": 4})),
        own(json!({"ignore_eos": true, "min_tokens": 40})),
        own(json!({"logprobs": 0, "stop": ["17"], "min_tokens": 5})),
        openai("number", json!({"messages": ask, "logprobs": 2})),
        openai("alone", json!({"messages": ask, "top_logprobs": 2})),
        openai("many", json!({"messages": ask, "logprobs": true, "top_logprobs": 21})),
        own(json!({"presence_penalty": 3})),
        own(json!({"logit_bias": {"9999999": 1}})),
    ];
    let lines_in: String = input.iter().map(|line| format!("{line}\n")).collect();
    let answers = lines(&stdout_of(&cpu(&["batch", "-"], &lines_in)));
    assert_eq!((&answers[0]["text"], &answers[0]["logprobs"]), (&json!("17 + 25 = 42."), &Value::Null));

    let choice = &answers[1]["response"]["body"]["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let joined: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert!(joined.starts_with("17 + 25 = 42.") && joined.ends_with("|>"), "{joined}");
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["token"]), (2, &token["token"]));
        assert_eq!(token["bytes"].as_array().unwrap().len(), token["token"].as_str().unwrap().len());
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let logprobs = &answers[2]["response"]["body"]["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"].as_array().unwrap().len(), 4);
    assert_eq!((&logprobs["text_offset"][0], &logprobs["tokens"][0]), (&json!(0), &content[0]["token"]));
    assert_eq!(logprobs["top_logprobs"][0][content[0]["token"].as_str().unwrap()], logprobs["token_logprobs"][0]);

    assert_eq!((&answers[3]["finish_reason"], answers[3]["ids"].as_array().unwrap().len()), (&json!("length"), 40));
    // The stop string lies within the first tokens, which are not searched.
    assert!(answers[4]["text"].as_str().unwrap().starts_with("17 + 25"), "{}", answers[4]);
    for (answer, needle) in answers[5..8].iter().zip(["true or false", "needs `logprobs`", "from 0 to 20"]) {
        let why = answer["response"]["body"]["error"]["message"].as_str().unwrap();
        assert!(why.contains(needle), "{why}");
    }
    for (answer, needle) in answers[8..].iter().zip(["presence penalty is 3; it must be", "outside the vocabulary"]) {
        assert!(answer["error"].as_str().unwrap().contains(needle), "{answer}");
    }

    // What is forbidden does not come, what is alone allowed does.
    let first = &answers[0]["ids"][0];
    let line = own(json!({"logit_bias": {first.to_string(): -100}, "max_tokens": 1, "frequency_penalty": 0.5}));
    let only = own(json!({"allowed_token_ids": [300, 301], "max_tokens": 6}));
    let answers = lines(&stdout(cpu(&["batch", "-"], &format!("{line}\n{only}\n"))));
    assert_ne!(answers[0]["ids"][0], *first);
    assert!(answers[1]["ids"].as_array().unwrap().iter().all(|id| *id == 300 || *id == 301), "{}", answers[1]);
}

#[test]
fn one_answer_with_log_probabilities() {
    let args = ["generate", "What is 17 + 25?", "--temperature", "0", "--json", "--logprobs", "2"];
    let answer: Value = serde_json::from_str(&stdout(cpu(&args, ""))).unwrap();
    let tokens = answer["logprobs"].as_array().unwrap();
    assert_eq!(tokens.len(), answer["ids"].as_array().unwrap().len());
    assert!(tokens.iter().all(|token| token["top"].as_array().unwrap().len() == 2));
    assert_eq!(cpu(&["generate", "hello", "--logprobs", "2"], "").status.code(), Some(2));
    assert_eq!(cpu(&["generate", "hello", "--json", "--logprobs", "21"], "").status.code(), Some(2));
}
