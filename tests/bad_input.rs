//! With any wrong input, the program names the file and the cause on standard error, ends with the right exit code and
//! leaves no output.

mod binary;

use std::{fs, path::Path, process::Output};

use binary::*;
use selkie_core::units::thousands;
use serde_json::json;

/// Exit code 1, nothing on standard output, and every one of `needles` in the message.
fn refused(out: &Output, needles: &[&str]) {
    ends_with(out, 1, needles);
}

fn ends_with(out: &Output, code: i32, needles: &[&str]) {
    let message = stderr(out);
    assert_eq!(out.status.code(), Some(code), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    for needle in needles {
        assert!(message.contains(needle), "no {needle:?} in: {message}");
    }
    assert_eq!(String::from_utf8_lossy(&out.stdout), "", "{message}");
}

/// A short greedy generation with the model in `dir`.
fn generate(dir: &TempDir) -> Output {
    run(&["generate", "-m", dir.dir(), "--backend", "cpu", "--raw", "Hello", "--max-tokens", "1"])
}

/// The logits of two tokens with the model in `dir`, for models without a tokenizer; the output must not appear.
fn logits(dir: &TempDir, ids: &str) -> Output {
    let name = Path::new(dir.dir()).file_name().unwrap().to_str().unwrap();
    let out = TempDir::new(&format!("{name}.out"));
    let (ids, file) = (out.write("ids.json", ids), out.arg("logits.safetensors"));
    let result = run(&["logits", "-m", dir.dir(), "--backend", "cpu", "--ids", &ids, "--out", &file]);
    if !result.status.success() {
        assert_eq!(out.names(), ["ids.json"]);
    }
    result
}

#[test]
fn missing_directory() {
    refused(&run(&["-m", "/no/such/model", "Hello!"]), &["/no/such/model"]);
    refused(&run(&["inspect", "-m", "/no/such/model"]), &["/no/such/model"]);
    let file = repository("Cargo.toml");
    refused(&run(&["inspect", "-m", file.to_str().unwrap()]), &["Cargo.toml", "directory"]);
}

#[test]
fn directory_without_config() {
    let dir = TempDir::new("no_config");
    refused(&generate(&dir), &[dir.dir(), "config.json"]);
    refused(&run(&["inspect", "-m", dir.dir()]), &[dir.dir(), "config.json"]);
}

#[test]
fn unknown_model_type_lists_the_known_ones() {
    let dir = copy_of("tests/golden/llama", "unknown_type");
    edit_json(&dir, "config.json", |c| c["model_type"] = "rwkv9".into());
    refused(&logits(&dir, "[1, 2]"), &["config.json", "rwkv9", "nemotron_h", "qwen3_next", "llama"]);
}

#[test]
fn config_that_is_no_json() {
    let dir = copy_of("tests/golden/llama", "config_no_json");
    dir.write("config.json", "{\"model_type\": \"llama\",");
    refused(&logits(&dir, "[1, 2]"), &["config.json"]);
}

#[test]
fn missing_config_key() {
    let dir = copy_of("tests/golden/llama", "missing_key");
    edit_json(&dir, "config.json", |c| {
        c.as_object_mut().unwrap().remove("hidden_size");
    });
    refused(&logits(&dir, "[1, 2]"), &["config.json", "hidden_size"]);
}

#[test]
fn ill_typed_config_key() {
    let dir = copy_of("tests/golden/llama", "ill_typed_key");
    for value in [json!("sixty-four"), json!(-64), json!(6.4), json!([64]), json!(1u64 << 60), json!(0)] {
        edit_json(&dir, "config.json", |c| c["hidden_size"] = value.clone());
        refused(&logits(&dir, "[1, 2]"), &["config.json", "hidden_size"]);
    }
}

#[test]
fn truncated_weights() {
    let dir = copy_of("tests/golden/llama", "truncated");
    let bytes = fs::read(dir.path("model.safetensors")).unwrap();
    for length in [0, 5, 8, 100, bytes.len() - 1] {
        dir.write("model.safetensors", &bytes[..length]);
        refused(&logits(&dir, "[1, 2]"), &["model.safetensors"]);
    }
    fs::remove_file(dir.path("model.safetensors")).unwrap();
    refused(&logits(&dir, "[1, 2]"), &[dir.dir(), "model.safetensors"]);
}

#[test]
fn lying_header() {
    let dir = copy_of("tests/golden/llama", "lying");
    let bytes = fs::read(dir.path("model.safetensors")).unwrap();
    for claimed in [u64::MAX, 1 << 40, bytes.len() as u64] {
        let mut changed = bytes.clone();
        changed[..8].copy_from_slice(&claimed.to_le_bytes());
        dir.write("model.safetensors", changed);
        refused(&logits(&dir, "[1, 2]"), &["model.safetensors", "header"]);
    }
    for offsets in [json!([0, 1u64 << 50]), json!([8, 0]), json!([0, 2]), json!("all")] {
        dir.write("model.safetensors", &bytes);
        edit_header(&dir, |h| h["model.norm.weight"]["data_offsets"] = offsets);
        refused(&logits(&dir, "[1, 2]"), &["model.safetensors", "model.norm.weight"]);
    }
    dir.write("model.safetensors", &bytes);
    edit_header(&dir, |h| h["model.norm.weight"]["shape"] = json!([u64::MAX, 2]));
    refused(&logits(&dir, "[1, 2]"), &["model.safetensors", "model.norm.weight"]);
}

#[test]
fn missing_tensor() {
    let dir = copy_of("tests/golden/llama", "missing_tensor");
    edit_header(&dir, |h| {
        let tensor = h.as_object_mut().unwrap().remove("model.layers.1.mlp.down_proj.weight").unwrap();
        h["another"] = tensor;
    });
    refused(&logits(&dir, "[1, 2]"), &["model.safetensors", "model.layers.1.mlp.down_proj.weight", "missing"]);
}

#[test]
fn tensor_of_wrong_shape() {
    let dir = copy_of("tests/golden/llama", "wrong_shape");
    edit_header(&dir, |h| {
        let shape = h["model.layers.1.mlp.down_proj.weight"]["shape"].as_array_mut().unwrap();
        shape.reverse();
    });
    refused(&logits(&dir, "[1, 2]"), &["model.safetensors", "model.layers.1.mlp.down_proj.weight", "64", "112"]);
}

#[test]
fn tensor_of_an_unsupported_dtype() {
    let dir = copy_of("tests/golden/llama", "wrong_dtype");
    let (file, tensor) = ("model.safetensors", "model.layers.1.mlp.down_proj.weight");
    edit_header(&dir, |h| {
        // The same number of bytes.
        h[tensor]["dtype"] = match h[tensor]["dtype"].as_str().unwrap() {
            "F32" => "I32",
            _ => "I16",
        }
        .into();
    });
    refused(&logits(&dir, "[1, 2]"), &[file, tensor, "dtype"]);
}

#[test]
fn broken_tokenizer() {
    let dir = copy_of("models/demo", "broken_tokenizer");
    for content in ["", "{}", "{\"model\": 5}", "not JSON"] {
        dir.write("tokenizer.json", content);
        refused(&generate(&dir), &["tokenizer.json"]);
    }
}

#[test]
fn chat_template_that_raises() {
    let dir = copy_of("models/demo", "raising_template");
    let args = ["generate", "-m", dir.dir(), "--backend", "cpu", "Hello"];
    edit_json(&dir, "tokenizer_config.json", |c| {
        c["chat_template"] = "{{ raise_exception('only on Sundays') }}".into();
    });
    refused(&run(&args), &["tokenizer_config.json", "only on Sundays"]);
    edit_json(&dir, "tokenizer_config.json", |c| c["chat_template"] = "{% for m in %}".into());
    refused(&run(&args), &["tokenizer_config.json", "template"]);
    edit_json(&dir, "tokenizer_config.json", |c| {
        c["chat_template"] = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}".into();
    });
    refused(&run(&args), &["tokenizer_config.json", "template"]);
}

#[test]
fn token_id_out_of_range() {
    let dir = copy_of("tests/golden/llama", "id_range");
    refused(&logits(&dir, "[1, 2, 320]"), &["320", "319"]);
    for ids in ["[1, -2]", "[1, 2.5]", "{\"ids\": [1]}", "[1,", "[4294967296]"] {
        refused(&logits(&dir, ids), &["ids.json"]);
    }
    refused(&logits(&dir, "[]"), &["empty"]);
    refused(&logits(&dir, "[\"a\"]"), &["ids.json", "expected a whole number"]);
    // A byte order mark is allowed.
    assert!(logits(&dir, "\u{feff}[1, 2]").status.success());
}

#[test]
fn empty_prompt() {
    refused(&run(&[""]), &["empty"]);
    refused(&run_with_input(&["-"], ""), &["empty"]);
    refused(&run_with_input(&["--raw", "-"], "\n"), &["empty"]);
}

#[test]
fn prompt_longer_than_the_context() {
    let out = run(&["--context", "64", "--max-tokens", "8", "--raw", &"Hello! ".repeat(40)]);
    refused(&out, &["tokens", "context", "64"]);
    // The model's own context.
    let dir = copy_of("tests/golden/llama", "long_prompt");
    let limit = json(dir.path("config.json"))["max_position_embeddings"].as_u64().unwrap();
    let limit = limit as usize;
    let ids = vec!["1"; limit + 1].join(",");
    refused(&logits(&dir, &format!("[{ids}]")), &[&thousands(limit), &thousands(limit + 1)]);
}

#[test]
fn impossible_sampling_values() {
    for (option, value) in [
        ("--temperature", "-1"),
        ("--temperature", "NaN"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
    ] {
        let out = run(&[&format!("{option}={value}"), "Hello!"]);
        ends_with(&out, 2, &[&option[2..].replace('-', " ").split(' ').next().unwrap()[..3], value]);
    }
    // As two arguments too: a negative number is a value, not an option.
    ends_with(&run(&["--temperature", "-1", "Hello!"]), 2, &["temperature", "-1"]);
    for (option, value) in [
        ("--top-k", "-3"),
        ("--seed", "x"),
        ("--max-tokens", "many"),
        ("--max-tokens", "-1"),
        ("--max-tokens", "0"),
        ("--memory", "4 apples"),
    ] {
        ends_with(&run(&[option, value, "Hello!"]), 2, &[option, value]);
    }
    refused(&run(&["--stop", "", "Hello!"]), &["stop string"]);
}

#[test]
fn impossible_generation_config() {
    let dir = copy_of("models/demo", "generation_config");
    edit_json(&dir, "generation_config.json", |c| {
        c["do_sample"] = true.into();
        c["top_p"] = json!(7);
    });
    refused(&generate(&dir), &["generation_config.json", "top"]);
}

#[test]
fn usage() {
    ends_with(&run(&["--no-such-option"]), 2, &["--no-such-option"]);
    ends_with(&run(&["logits"]), 2, &["--ids"]);
    ends_with(&run(&["--backend", "tpu", "Hello!"]), 2, &["tpu", "cuda"]);
}

#[test]
fn closed_stdout_is_no_drama() {
    for args in [&["Hello!"][..], &["inspect"], &["devices"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        // A layer of Mesa's drivers would print lines of its own where this is not set.
        let out = selkie().args(args).env_remove("XDG_RUNTIME_DIR").stdout(writer).output().unwrap();
        assert_eq!(stderr(&out), "", "{args:?}");
        assert!(out.status.success(), "{args:?}");
    }
}

#[test]
fn not_enough_memory() {
    // More slots than any machine has room for.
    let out = run(&["--backend", "cpu", "--slots", "1000000000", "Hello!"]);
    refused(&out, &["memory", "asked", "free"]);
    // Less than one sequence needs.
    let out = run(&["--backend", "cpu", "--memory", "1KiB", "Hello!"]);
    refused(&out, &["memory", "asked", "free"]);
    // More than any machine has; nothing of that size may be tried.
    let out = run(&["--backend", "cpu", "--memory", "100000TiB", "Hello!"]);
    refused(&out, &["not enough memory for recurrent states and KV pages", "asked", "free"]);
    let out = run(&["--backend", "cpu", "--memory", "40MiB", "--kv-pages", "1000000000", "Hello!"]);
    refused(&out, &["1,000,000,000 KV pages", "40.0 MiB free"]);
}

/// Free memory includes a limit on the address space, and the program works without threads that cannot be created.
#[cfg(target_os = "linux")]
#[test]
fn limits_of_the_process() {
    for kib in [31_000, 34_000, 40_000, 60_000] {
        let script = format!("ulimit -v {kib} && exec \"$0\" --backend cpu Hello --max-tokens 2");
        let binary = env!("CARGO_BIN_EXE_selkie");
        let out = std::process::Command::new("sh").args(["-c", &script, binary]).output().unwrap();
        let message = stderr(&out);
        let free: Option<u64> = message.split("asked, ").nth(1).and_then(|m| m.split(' ').next()?.parse().ok());
        match out.status.code() {
            Some(0) => {}
            Some(1) => {
                let memory = free.is_some_and(|free| free < kib << 10);
                assert!(memory || message.contains("could not be started"), "{kib}: {message}");
            }
            // Too little to load the program at all.
            _ => assert!(!message.contains("panicked"), "{kib}: {message}"),
        }
    }
}

/// Less than half of a limited address space is for the model: threads' heaps and the scratch of ops, which cannot be refused, need
/// the rest. Weights of 0.6 GB and activations of 1.5 GB would fit into 4 GiB without them.
#[cfg(target_os = "linux")]
#[test]
fn half_of_the_address_space_is_not_for_the_model() {
    let config = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/mamba2/config.json")).unwrap();
    let dir = TempDir::new("address_space");
    let config = dir.write("case.json", config.replace(r#""head_dim": 16"#, r#""head_dim": 65535"#));
    let script = "ulimit -v 4194304 && exec \"$0\" bench model --backend cpu --prompt-tokens 70 --config \"$1\"";
    let out = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_selkie"), &config])
        .env("RAYON_NUM_THREADS", "16")
        .output()
        .unwrap();
    refused(&out, &["not enough memory", "case.json", "free"]);
}

#[test]
fn a_backend_asked_for_by_name_never_falls_back() {
    let devices = run(&["devices", "--json"]);
    let devices: serde_json::Value = serde_json::from_slice(&devices.stdout).unwrap();
    for backend in ["cuda", "wgpu"] {
        let usable = devices.as_array().unwrap().iter().any(|d| d["backend"] == backend && d["usable"] == true);
        if !usable {
            refused(&run(&["--backend", backend, "Hello!"]), &[backend, "no usable device"]);
        }
    }
}

#[test]
fn batch_input_and_output() {
    let dir = TempDir::new("batch_files");
    let input = dir.write("in.jsonl", "{\"prompt\": \"Hello\", \"max_tokens\": 1}\n");
    refused(&run(&["batch", "/no/such/in.jsonl", "-o", &dir.arg("out.jsonl")]), &["/no/such/in.jsonl"]);
    refused(&run(&["batch", &input, "-o", "/no/such/out.jsonl"]), &["/no/such/out.jsonl"]);
    refused(&run(&["batch", &input, "-o", &dir.arg("out.jsonl"), "-m", "/no/such/model"]), &["/no/such/model"]);
    let out = run(&["batch", &input, "-o", &dir.arg("out.jsonl"), "--stats", "/no/such/stats.json"]);
    refused(&out, &["/no/such/stats.json"]);
    // A directory, existing or not, cannot be an output file, and two outputs cannot be one file.
    for target in [dir.dir(), &dir.arg(""), &dir.arg("new/"), &dir.arg("new/.")] {
        refused(&run(&["batch", &input, "-o", target]), &[target, "directory", "name a file"]);
    }
    let out = run(&["batch", &input, "-o", &dir.arg("x"), "--stats", &dir.arg("./x")]);
    ends_with(&out, 2, &["--output", "--stats", "of its own"]);
    assert_eq!(dir.names(), ["in.jsonl"]);
}

#[test]
fn numbers_too_large_to_be_meant() {
    let most = usize::MAX.to_string();
    for option in ["--batch", "--prompt-tokens", "--decode-tokens", "--step-tokens", "--runs"] {
        ends_with(&run(&["bench", "model", option, &most]), 2, &[option, &most]);
    }
    for option in ["--chats", "--turns", "--system-tokens"] {
        ends_with(&run(&["bench", "prefix", "--traffic", option, &most]), 2, &[option, &most]);
    }
    for (option, value) in [("--max-batch", "65537"), ("--step-tokens", "1048577")] {
        ends_with(&run(&[option, value, "Hello!"]), 2, &[option, value]);
    }
    let out = run(&["bench", "model", "--batch", "65536", "--prompt-tokens", "16777216"]);
    ends_with(&out, 2, &["--batch", "--prompt-tokens", "16777216"]);
    let out = run(&["bench", "prefix", "--traffic", "--chats", "65536", "--turns", "65536"]);
    ends_with(&out, 2, &["--chats", "--turns", "16777216"]);
}
