//! The main job, through the real binary: prompts and files in, text and files out.

mod binary;

use std::{collections::HashMap, fs};

use binary::*;
use serde_json::{Value, json};

/// Tests run on the CPU, even if the machine has a GPU.
fn cpu(args: &[&str]) -> Vec<String> {
    args.iter().copied().chain(["--backend", "cpu"]).map(str::to_owned).collect()
}

fn run_cpu(args: &[&str]) -> std::process::Output {
    let args = cpu(args);
    run(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs `batch` on requests given as JSON values; answers and exit code.
fn batch(requests: &[Value], more: &[&str]) -> (Vec<Value>, i32) {
    let input: String = requests.iter().map(|r| format!("{r}\n")).collect();
    batch_text(&input, more)
}

fn batch_text(input: &str, more: &[&str]) -> (Vec<Value>, i32) {
    let args: Vec<&str> =
        ["batch", "-", "-o", "-", "--backend", "cpu"].into_iter().chain(more.iter().copied()).collect();
    let out = run_with_input(&args, input);
    (lines(&String::from_utf8(out.stdout.clone()).unwrap()), out.status.code().unwrap())
}

#[test]
fn a_prompt_alone_is_answered() {
    let out = run(&["What is 17 + 25?"]);
    assert_eq!(stdout(out.clone()), "17 + 25 = 42.\n");
    let closing = stderr(&out);
    for part in ["tokens", "first token after", "tokens/s"] {
        assert!(closing.contains(part), "{closing}");
    }
}

#[test]
fn a_prompt_from_standard_input() {
    let out = run_with_input(&["--backend", "cpu", "-"], "What is 81 - 36?\n");
    assert_eq!(stdout(out), "81 - 36 = 45.\n");
}

#[test]
fn an_answer_as_json() {
    let out = run_cpu(&["--json", "What is 17 + 25?"]);
    assert_eq!(stderr(&out), "", "the JSON has all of it");
    let answer: Value = serde_json::from_str(&stdout(out)).unwrap();
    assert_eq!(answer["text"], "17 + 25 = 42.");
    assert_eq!(answer["ids"], json!([22, 28, 558, 226, 23, 26, 515, 226, 25, 23, 19, 2]));
    assert_eq!(answer["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens"], 13);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(answer["backend"], "cpu");
}

#[test]
fn all_reference_answers_through_the_chat_template() {
    let reference = json(repository("models/demo/reference.json"));
    let reference = reference.as_array().unwrap();
    let requests: Vec<Value> = reference
        .iter()
        .enumerate()
        .map(|(i, r)| json!({"id": i, "messages": r["messages"], "max_tokens": 400, "temperature": 0}))
        .collect();
    for more in [&[][..], &["--sequential"], &["--sequential", "--no-prefix-cache"]] {
        let (answers, code) = batch(&requests, more);
        assert_eq!((answers.len(), code), (reference.len(), 0));
        for (i, (answer, want)) in answers.iter().zip(reference).enumerate() {
            assert_eq!(answer["id"], i);
            assert_eq!(answer["text"], want["answer"], "{more:?}");
            assert_eq!(answer["ids"], want["answer_ids"], "{more:?}");
            assert_eq!(answer["finish_reason"], "stop");
            assert_eq!(answer["usage"]["prompt_tokens"], want["prompt_ids"].as_array().unwrap().len());
            assert_eq!(answer["usage"]["cached_tokens"], answer["cache"]["reused_tokens"]);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let tell = |seed: &str| {
        stdout(run_cpu(&[
            "Tell me a story about a fox named Leo and a lantern.",
            "--temperature",
            "1.2",
            "--seed",
            seed,
        ]))
    };
    assert_eq!(tell("7"), tell("7"));
    assert_ne!(tell("7"), tell("8"));
}

#[test]
fn stop_strings_and_the_token_limit() {
    let answer = |more: &[&str]| {
        let args: Vec<&str> = ["--json", "What is 17 + 25?"].iter().chain(more).copied().collect();
        let out: Value = serde_json::from_str(&stdout(run_cpu(&args))).unwrap();
        (out["text"].as_str().unwrap().to_owned(), out["finish_reason"].as_str().unwrap().to_owned())
    };
    assert_eq!(answer(&["--stop", " ="]), ("17 + 25".to_owned(), "stop".to_owned()));
    assert_eq!(answer(&["--stop", "nowhere", "--stop", "42"]), ("17 + 25 = ".to_owned(), "stop".to_owned()));
    // Text that only looked like the beginning of a stop string is kept.
    assert_eq!(answer(&["--stop", "42.!"]), ("17 + 25 = 42.".to_owned(), "stop".to_owned()));
    assert_eq!(answer(&["--max-tokens", "3"]), ("17 +".to_owned(), "length".to_owned()));
}

#[test]
fn a_system_prompt_counts() {
    let system = "Your name is Iris. The code of the red box is 4812.";
    let out = run_cpu(&["--system", system, "What is the code of the red box?"]);
    assert_eq!(stdout(out), "The code of the red box is 4812.\n");
}

#[test]
fn raw_prompts_take_special_tokens_and_templates_do_not() {
    assert_eq!(stdout(run_cpu(&["--raw", "<|bos|><|user|>What is 17 + 25?<|assistant|>"])), "17 + 25 = 42.\n");
    let forged = json!({"messages": [{"role": "user", "content": "<|end|>"}], "max_tokens": 1});
    let (answers, _) = batch(&[forged], &[]);
    assert!(answers[0]["usage"]["prompt_tokens"].as_u64().unwrap() > 4, "{}", answers[0]);
}

#[test]
fn a_chat_from_a_pipe_remembers_and_reuses() {
    let story = json(repository("models/demo/reference.json"))[0]["prompt"].as_str().unwrap().to_owned();
    let input = format!("{story}\nWhat is 17 + 25?\n/retry\n/reset\nHello!\n/exit\nnever read\n");
    // With a temperature of one's own, another try keeps it.
    let out = run_with_input(&["chat", "--backend", "cpu", "--temperature", "0"], &input);
    let closing = stderr(&out);
    let text = stdout(out);
    let answers: Vec<&str> = text.lines().collect();
    assert_eq!(answers.len(), 4, "{text}");
    assert_eq!(answers[0], "Emma is in the harbor.");
    assert_eq!(answers[1], answers[2]);
    assert!(answers[3].starts_with("Hello! I am a very small demo model."));
    let closing: Vec<&str> = closing.lines().filter(|l| l.contains(" tokens · ")).collect();
    assert!(!closing[0].contains("reused"), "{closing:?}");
    // The first turn has more than two pages.
    assert!(closing[1].contains("reused 192 of") || closing[1].contains("reused 128 of"), "{closing:?}");
    assert!(closing[2].contains("reused"), "{closing:?}");
    assert!(!closing[3].contains("reused"), "{closing:?}");
}

#[test]
fn batch_keeps_order_and_ids_and_goes_on_after_bad_lines() {
    let input = r#"{"id": {"a": [1, null]}, "prompt_ids": [1, 3, 45, 332, 84, 6, 4], "max_tokens": 4}

{"id": "bad id", "prompt_ids": [1, 99999]}
{"id": 12345678901234567890123, "prompt": "Hello", "max_tokens": 2}
this is no JSON
{"id": 1.0, "prompt": "Hello", "max_tokens": 0}
{"prompt": "Hello", "max_tokens": 2, "stop": "x", "seed": 1, "top_k": 2, "top_p": 0.5, "min_p": 0.1}
{"id": true, "prompt": "a", "prompt_ids": [1]}
{"id": "none"}
{"id": "typo", "prompt": "Hello", "max_token": 3}
{"id": "long", "prompt_ids": [1, 2, 3], "max_tokens": 999999}
{"id": "hot", "prompt": "Hello", "temperature": -1}
"#;
    let args = ["batch", "-", "-o", "-", "--backend", "cpu"];
    let out = run_with_input(&args, input);
    let text = String::from_utf8(out.stdout.clone()).unwrap();
    let ids = [
        r#"{"id":{"a": [1, null]},"#,
        r#"{"id":"bad id","#,
        r#"{"id":12345678901234567890123,"#,
        r#"{"id":null,"#,
        r#"{"id":1.0,"#,
        r#"{"id":null,"#,
        r#"{"id":true,"#,
        r#"{"id":"none","#,
        r#"{"id":"typo","#,
        r#"{"id":"long","#,
        r#"{"id":"hot","#,
    ];
    assert_eq!(text.lines().count(), ids.len(), "{text}");
    for (line, id) in text.lines().zip(ids) {
        assert!(line.starts_with(id), "{line} does not begin with {id}");
    }
    let answers = lines(&text);
    let errors: HashMap<usize, &[&str]> = HashMap::from([
        (1, &["line 3", "99999"][..]),
        (3, &["line 5"]),
        (4, &["line 6", "max_tokens"]),
        (6, &["line 8", "prompt_ids"]),
        (7, &["line 9", "messages"]),
        (8, &["line 10", "max_token"]),
        (9, &["line 11", "999,999"]),
        (10, &["line 12", "temperature"]),
    ]);
    for (i, answer) in answers.iter().enumerate() {
        match errors.get(&i) {
            Some(needles) => {
                assert_eq!(answer["finish_reason"], "error", "{answer}");
                assert_eq!(answer["text"], Value::Null);
                for needle in *needles {
                    assert!(answer["error"].as_str().unwrap().contains(needle), "{answer}");
                }
            }
            None => {
                assert_eq!(answer["error"], Value::Null);
                assert!(answer["text"].is_string());
                assert_ne!(answer["finish_reason"], "error");
            }
        }
    }
    assert_eq!(out.status.code(), Some(1));
    assert!(!stderr(&out).contains("panicked"));
}

#[test]
fn batch_passes_over_a_byte_order_mark() {
    let (answers, code) = batch_text("\u{feff}{\"id\": 1, \"prompt\": \"Hello\", \"max_tokens\": 1}\n", &[]);
    assert_eq!((&answers[0]["id"], &answers[0]["error"], code), (&json!(1), &Value::Null, 0));
}

#[test]
fn lines_without_a_seed_get_one_each() {
    let line = json!({"prompt": "Tell me a story", "temperature": 1.5, "max_tokens": 16});
    let texts = |more: &[&str]| -> Vec<String> {
        let (answers, _) = batch(&vec![line.clone(); 4], more);
        answers.iter().map(|a| a["ids"].to_string()).collect()
    };
    let together = texts(&[]);
    for (i, text) in together.iter().enumerate() {
        assert!(!together[..i].contains(text), "line {i} has the answer of another: {together:?}");
    }
    // The random numbers depend on a line's place, so a file has the same answers every time.
    assert_eq!(together, texts(&["--sequential"]));
}

#[test]
fn batch_says_in_words_what_a_field_must_be() {
    for (field, value, needle) in [
        ("stop", json!(5), "`stop` must be a string or a list of strings"),
        ("max_tokens", json!("x"), "expected a whole number"),
        ("top_k", json!(-3), "expected a whole number"),
        ("temperature", json!("hot"), "expected a number"),
        ("prompt_ids", json!("x"), "expected a list"),
        ("messages", json!(["x"]), "expected an object with `role` and `content`"),
    ] {
        let (answers, code) = batch(&[json!({ field: value })], &[]);
        assert!(answers[0]["error"].as_str().unwrap().contains(needle), "{}", answers[0]);
        assert_eq!(code, 1);
    }
    let (answers, _) = batch(&[json!([]), json!(5)], &[]);
    for answer in answers {
        assert!(answer["error"].as_str().unwrap().contains("expected an object with the fields"), "{answer}");
    }
}

#[test]
fn batch_writes_its_files_whole() {
    let dir = TempDir::new("batch_stats");
    let prompt: Vec<u32> = (0..300).map(|i| 6 + i % 200).collect();
    let request = json!({"prompt_ids": prompt, "max_tokens": 3});
    let input = dir.write("in.jsonl", format!("{request}\n{request}\n"));
    let (out, stats) = (dir.arg("out.jsonl"), dir.arg("stats.json"));
    stdout(run_cpu(&["batch", &input, "-o", &out, "--stats", &stats, "--sequential"]));
    assert_eq!(dir.names(), ["in.jsonl", "out.jsonl", "stats.json"]);
    let answers = lines(&fs::read_to_string(&out).unwrap());
    assert_eq!(answers[0]["cache"]["reused_tokens"], 0);
    assert_eq!(answers[1]["cache"]["reused_tokens"], 256);
    assert_eq!(answers[1]["cache"]["reason"], "full");
    assert_eq!(answers[0]["ids"], answers[1]["ids"]);
    let stats = json(&stats);
    assert_eq!(stats["backend"], "cpu");
    assert_eq!(stats["tokens_prefilled"], 344);
    assert_eq!(stats["tokens_recomputed"], 0);
    assert_eq!(stats["reasons"]["full"], 1);
    assert_eq!(stats["reasons"]["first_sight"], 1);
    for key in ["device", "version", "evictions", "preemptions", "peak_slots", "peak_pages"] {
        assert!(!stats[key].is_null(), "{key} is missing in {stats}");
    }
}

#[test]
fn a_failed_batch_leaves_no_file() {
    let dir = TempDir::new("batch_failed");
    let input = dir.write("in.jsonl", "{\"prompt\": \"Hello\"}\n");
    let model = copy_of("models/demo", "batch_failed_model");
    let bytes = fs::read(model.path("model.gguf")).unwrap();
    model.write("model.gguf", &bytes[..bytes.len() - 10]);
    let out = run_cpu(&["batch", &input, "-o", &dir.arg("out.jsonl"), "-m", model.dir()]);
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(dir.names(), ["in.jsonl"]);
}

#[test]
fn inspect_shows_layers_and_costs() {
    let text = stdout(run_cpu(&["inspect"]));
    for part in ["nemotron_h", "M-M*-M-M*-M*-M-M*-", "slot", "page"] {
        assert!(text.contains(part), "{text}");
    }
    let facts = |more: &[&str]| -> Value {
        serde_json::from_str(&stdout(run_cpu(&[&["inspect", "--json"], more].concat()))).unwrap()
    };
    // Seven Mamba-2 layers: 8 heads of 64 x 64, and 3 taps of 640 channels; four attention layers with 2 heads of 64.
    let (slot, page) = (7 * 4 * (8 * 64 * 64 + 640 * 3), 4 * 2 * 64 * 2 * 64);
    let without = facts(&["--speculate", "off"]);
    assert_eq!((&without["slot_bytes"], &without["page_bytes"]), (&json!(slot), &json!(4 * page)));
    // The head has one more attention layer, and the hidden vector of the last token.
    let facts = facts(&[]);
    assert_eq!((&facts["slot_bytes"], &facts["page_bytes"]), (&json!(slot + 4 * 256), &json!(5 * page)));
    assert_eq!((&facts["family"], &facts["layers"]), (&json!("nemotron_h"), &json!(18)));
    assert_eq!(facts["weight_bytes"].as_u64().unwrap() / 1_000_000, 8);
}

#[test]
fn the_reference_scenario_of_the_prefix_cache() {
    let model = repository("tests/golden/nemotron_h");
    let out = run_cpu(&["bench", "prefix", "-m", model.to_str().unwrap(), "--json"]);
    let columns: Value = serde_json::from_str(&stdout(out)).unwrap();
    assert_eq!(columns[0]["policy"], "one-per-prefill");
    assert_eq!(columns[0]["reused"], json!([0, 0, 256, 512, 512, 256, 256, 512]));
    assert_eq!(columns[1]["policy"], "default");
    assert_eq!(columns[1]["reused"], json!([0, 0, 256, 512, 512, 512, 512, 512]));
    assert_eq!((&columns[0]["states_held"], &columns[1]["states_held"]), (&json!(7), &json!(7)));
    // Pages need no state.
    let model = repository("tests/golden/llama");
    let out = run_cpu(&["bench", "prefix", "-m", model.to_str().unwrap(), "--json"]);
    let columns: Value = serde_json::from_str(&stdout(out)).unwrap();
    for column in columns.as_array().unwrap() {
        assert_eq!(column["reused"], json!([0, 256, 256, 512, 512, 512, 512, 512]));
    }
}

#[test]
fn traffic_is_answered_alike_under_every_budget() {
    let dir = TempDir::new("traffic");
    let model = repository("tests/golden/nemotron_h");
    let svg = dir.arg("traffic.svg");
    let args = ["bench", "prefix", "--traffic", "-m", model.to_str().unwrap(), "--json", "--svg", &svg];
    let small = ["--chats", "4", "--turns", "3", "--system-tokens", "200"];
    // The program itself checks that the answers are equal.
    let out = stdout(run_cpu(&[&args[..], &small].concat()));
    let runs: Value = serde_json::from_str(&out).unwrap();
    let runs = runs["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 9);
    let share = |i: usize| runs[i]["reused_share"].as_f64().unwrap();
    assert_eq!(share(0), 0.0);
    assert!(share(2) > 0.5, "{out}");
    assert!(share(2) >= share(1), "{out}");
    assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg"));
}

#[test]
fn bench_measures_a_bare_configuration() {
    let config = repository("tests/golden/qwen3_next/config.json");
    let args =
        ["bench", "--config", config.to_str().unwrap(), "--prompt-tokens", "70", "--decode-tokens", "4", "--json"];
    let facts: Value = serde_json::from_str(&stdout(run_cpu(&args))).unwrap();
    assert_eq!(facts["family"], "qwen3_next");
    for key in ["prefill_tokens_per_second", "decode_tokens_per_second", "decode_weight_bytes_per_step"] {
        assert!(facts[key].as_f64().unwrap() > 0.0, "{facts}");
    }
    let share = facts["machine"]["decode_share_of_read"].as_f64().unwrap();
    assert!(share > 0.0 && share < 10.0, "{facts}");
    // States and pages move besides the weights.
    let bytes = ["decode_weight_bytes_per_step", "decode_bytes_per_step"].map(|key| facts[key].as_u64().unwrap());
    assert!(bytes[0] < bytes[1] && facts["bound"]["decode_share"].as_f64().unwrap() >= share, "{facts}");
}

#[test]
fn devices_lists_every_backend() {
    let devices: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let devices = devices.as_array().unwrap();
    for backend in ["cuda", "wgpu", "cpu"] {
        let device = devices.iter().find(|d| d["backend"] == backend).unwrap();
        assert_ne!(device["usable"] == true, device["reason"].is_string(), "{device}");
        assert_eq!(device["index"].is_null(), device["usable"] == false && device["name"].is_null(), "{device}");
    }
    assert!(devices.iter().any(|d| d["backend"] == "cpu" && d["usable"] == true));
    assert!(stdout(run(&["devices"])).contains("cpu"));
}

#[test]
fn logits_reproduce_every_reference() {
    // Every recurrent layer has two states.
    for (family, recurrent_layers) in [
        ("nemotron_h", 4),
        ("nemotron_h_moe", 3),
        ("mamba2", 3),
        ("granitemoehybrid", 3),
        ("granitemoehybrid_dense", 3),
        ("qwen3_next", 3),
        ("llama", 0),
        ("qwen3", 0),
    ] {
        assert_eq!(compare_with_reference(family), 2 * recurrent_layers, "{family}");
    }
}

/// A file may store a matrix that its configuration calls tied. The stored one counts, as in transformers.
#[test]
fn what_is_stored_decides_whether_embeddings_are_tied() {
    let out = TempDir::new("tied_out");
    let logits = |dir: &str| {
        let (ids, file) = (out.write("ids.json", "[5, 250, 31]"), out.arg("out.safetensors"));
        stdout(run_cpu(&["logits", "-m", dir, "--ids", &ids, "--out", &file]));
        let bytes = fs::read(&file).unwrap();
        floats(&safetensors::SafeTensors::deserialize(&bytes).unwrap(), "logits")
    };
    let golden = |name: &str| logits(repository(&format!("tests/golden/{name}")).to_str().unwrap());

    let different = copy_of("tests/golden/llama", "tied_different");
    edit_json(&different, "config.json", |c| c["tie_word_embeddings"] = true.into());
    assert_eq!(logits(different.dir()), golden("llama"));

    let swapped = copy_of("tests/golden/llama_bias3", "tied_swapped");
    edit_header(&swapped, |h| {
        let table = h.as_object_mut().unwrap().remove("model.embed_tokens.weight").unwrap();
        h["lm_head.weight"] = table;
    });
    assert_eq!(logits(swapped.dir()), golden("llama_bias3"));
}

/// Runs `selkie logits` on both prompts of a reference folder; the number of states compared.
fn compare_with_reference(family: &str) -> usize {
    let folder = repository(&format!("tests/golden/{family}"));
    let bytes = fs::read(folder.join("reference.safetensors")).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let dir = TempDir::new(&format!("logits_{family}"));
    let mut compared = 0;
    for prompt in ["prompt0", "prompt1"] {
        let ids = ints(&reference, &format!("{prompt}.input_ids"));
        let (ids, out) = (dir.write("ids.json", format!("{ids:?}")), dir.arg("out.safetensors"));
        let model = folder.to_str().unwrap();
        stdout(run_cpu(&["logits", "-m", model, "--ids", &ids, "--steps", "24", "--out", &out]));
        let bytes = fs::read(&out).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().as_ref().unwrap();
        assert_eq!(metadata["backend"], "cpu");
        assert!(!metadata["device"].is_empty());
        assert_eq!(metadata["version"], env!("CARGO_PKG_VERSION"));
        let ours = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = vec![("logits".to_owned(), format!("{prompt}.logits"))];
        let states = reference.names().into_iter().filter(|n| n.starts_with(&format!("{prompt}.state.")));
        for name in states {
            let (layer, kind) = name.split_once(".state.").unwrap().1.split_once('.').unwrap();
            match kind.split('.').next().unwrap() {
                "conv_states" => names.push((format!("state.{layer}.conv"), name.to_owned())),
                "recurrent_states" => names.push((format!("state.{layer}.recurrent"), name.to_owned())),
                _ => {}
            }
        }
        for (our, their) in &names {
            let (shape, mut want) = floats(&reference, their);
            let mut want_shape = shape.clone();
            if our.ends_with(".conv") {
                // The reference keeps the newest K inputs; the oldest of them is never used again.
                let k = shape[2];
                want = want.chunks(k).flat_map(|taps| taps[1..].to_vec()).collect();
                want_shape[2] = k - 1;
            }
            let (shape, got) = floats(&ours, our);
            assert_eq!(shape, want_shape, "{family} {their}");
            close(&got, &want, &format!("{family} {their}"));
            compared += usize::from(our.starts_with("state."));
        }
        let (want, got) = (ints(&reference, &format!("{prompt}.greedy_ids")), ints(&ours, "greedy_ids"));
        let (_, prompt_logits) = floats(&reference, &format!("{prompt}.logits"));
        let (shape, logits) = floats(&reference, &format!("{prompt}.greedy_logits"));
        let (our_shape, our_logits) = floats(&ours, "greedy_logits");
        assert_eq!((shape.as_slice(), our_shape.as_slice()), (&[24, 320][..], &[24, 320][..]));
        let mut before = &prompt_logits[prompt_logits.len() - 320..];
        for (i, after) in logits.chunks(320).enumerate() {
            let mut sorted = before.to_vec();
            sorted.sort_by(f32::total_cmp);
            if want[i] != got[i] && sorted[319] - sorted[318] <= 1e-3 {
                // After a tie the texts differ.
                break;
            }
            assert_eq!(want[i], got[i], "{family} {prompt}: greedy step {i}");
            close(&our_logits[i * 320..][..320], after, &format!("{family} {prompt}: greedy step {i}"));
            before = after;
        }
    }
    compared
}

fn close(got: &[f32], want: &[f32], what: &str) {
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-4 && got.len() == want.len(), "{what}: differs by {worst}");
    assert!(got.iter().all(|x| x.is_finite()), "{what}: not finite");
}

fn floats(file: &safetensors::SafeTensors, name: &str) -> (Vec<usize>, Vec<f32>) {
    let t = file.tensor(name).unwrap_or_else(|_| panic!("{name} is missing"));
    assert_eq!(t.dtype(), safetensors::Dtype::F32, "{name}");
    let values = t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    (t.shape().to_vec(), values)
}

fn ints(file: &safetensors::SafeTensors, name: &str) -> Vec<i32> {
    let t = file.tensor(name).unwrap_or_else(|_| panic!("{name} is missing"));
    assert_eq!(t.dtype(), safetensors::Dtype::I32, "{name}");
    t.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn bf16_states_are_refused_where_there_are_none() {
    for backend in ["cpu", "wgpu"] {
        let out = run(&["--backend", backend, "--state-dtype", "bf16", "Hello!"]);
        assert_eq!(out.status.code(), Some(2));
        let message = String::from_utf8(out.stderr).unwrap();
        assert!(message.contains("--state-dtype bf16 is for the CUDA backend"), "{message}");
    }
}

#[test]
fn keys_and_values_may_be_in_8_bits() {
    let out = run_cpu(&["--kv-dtype", "int8", "--json", "What is 17 + 25?"]);
    let answer: Value = serde_json::from_str(&stdout(out)).unwrap();
    assert_eq!(answer["text"], "17 + 25 = 42.");
}

#[test]
#[cfg(not(feature = "bench-ops"))]
fn bench_ops_names_the_feature_that_it_needs() {
    let out = run(&["bench", "ops"]);
    assert_eq!(out.status.code(), Some(2));
    let message = String::from_utf8(out.stderr).unwrap();
    assert!(message.contains("--features bench-ops"), "{message}");
}
