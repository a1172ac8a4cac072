//! The prefix cache through `selkie batch`, on every kind of model: the reused tokens, the reasons, and equal answers.

mod binary;

use std::fs;

use binary::*;
use serde_json::{Value, json};

/// A hybrid, others with a gated delta rule and experts, one without attention and one with nothing else.
const FAMILIES: [&str; 5] = ["nemotron_h", "granitemoehybrid", "qwen3_next", "mamba2", "llama"];

/// `count` ids that differ for every `of`.
fn ids(of: u32, count: u32) -> Vec<u32> {
    let mut x = of.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 16) % 280 + 4
    };
    (0..count).map(|_| next()).collect()
}

fn request(prompt: &[u32], max_tokens: usize) -> Value {
    json!({ "prompt_ids": prompt, "max_tokens": max_tokens })
}

/// Answers and counters of a run; every line must succeed.
fn batch(family: &str, requests: &[Value], more: &[&str]) -> (Vec<Value>, Value) {
    let dir = TempDir::new(&format!("prefix-{family}-{:?}", std::thread::current().id()));
    let (model, stats) = (repository(&format!("tests/golden/{family}")), dir.arg("stats.json"));
    let model = model.to_str().unwrap();
    let input: String = requests.iter().map(|r| format!("{r}\n")).collect();
    let args = ["batch", "-", "-o", "-", "--backend", "cpu", "-m", model, "--stats", &stats];
    let out = run_with_input(&[&args[..], more].concat(), &input);
    let answers: Vec<Value> = stdout(out).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), requests.len());
    let stats: Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    for answer in &answers {
        assert_eq!(answer["usage"]["cached_tokens"], answer["cache"]["reused_tokens"], "{answer}");
    }
    let sum = |path: &str| answers.iter().map(|a| a.pointer(path).unwrap().as_u64().unwrap()).sum::<u64>();
    let served = stats["tokens_prefilled"].as_u64().unwrap() + sum("/cache/reused_tokens");
    assert_eq!(served, sum("/usage/prompt_tokens"), "{family} {more:?}: {stats}");
    let reasons: u64 = stats["reasons"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(reasons, requests.len() as u64);
    (answers, stats)
}

fn column(answers: &[Value], path: &str) -> Vec<Value> {
    answers.iter().map(|a| a.pointer(path).unwrap().clone()).collect()
}

fn reused(answers: &[Value]) -> Value {
    column(answers, "/cache/reused_tokens").into()
}

fn texts(answers: &[Value]) -> Vec<Value> {
    column(answers, "/ids")
}

#[test]
fn the_reference_scenario_on_every_kind_of_model() {
    let digits: [&[u32]; 8] = [&[1, 2], &[1, 3], &[1, 4], &[1, 2, 5], &[1, 4, 5], &[1, 3, 5], &[1, 3], &[1, 3]];
    let requests = digits.map(|digits| {
        let body = digits.iter().flat_map(|&d| ids(d, 256));
        request(&[ids(90, 7), body.collect(), ids(91, 6)].concat(), 3)
    });
    for family in FAMILIES {
        let (alone, _) = batch(family, &requests, &["--sequential", "--no-prefix-cache"]);
        assert!(column(&alone, "/cache/reason").iter().all(|r| r == "off"));
        for (policy, expected) in [
            ("one-per-prefill", json!([0, 0, 256, 512, 512, 256, 256, 512])),
            ("default", json!([0, 0, 256, 512, 512, 512, 512, 512])),
        ] {
            let (answers, stats) = batch(family, &requests, &["--sequential", "--capture-policy", policy]);
            let pages_only = family == "llama";
            let expected = if pages_only { json!([0, 256, 256, 512, 512, 512, 512, 512]) } else { expected };
            assert_eq!(reused(&answers), expected, "{family} {policy}");
            assert_eq!(stats["states_held"], if pages_only { 0 } else { 7 }, "{family} {policy}");
            assert_eq!(texts(&answers), texts(&alone), "{family} {policy}");
        }
    }
}

#[test]
fn equal_prompts_are_computed_once_in_turn_and_together() {
    for family in FAMILIES {
        let (answers, _) = batch(family, &vec![request(&ids(1, 512), 2); 4], &["--sequential"]);
        assert_eq!(reused(&answers), json!([0, 448, 448, 448]), "{family}");
        for more in [&[] as &[&str], &["--step-tokens", "100", "--capture-policy", "one-per-prefill"]] {
            let (answers, stats) = batch(family, &vec![request(&ids(2, 301), 9); 8], more);
            assert_eq!(reused(&answers), json!([0, 256, 256, 256, 256, 256, 256, 256]), "{family} {more:?}");
            assert_eq!(stats["tokens_prefilled"], 301 + 7 * 45);
        }
    }
}

#[test]
fn a_prefix_of_200_or_210_tokens_reuses_192_and_short_prompts_have_nothing_to_reuse() {
    for shared in [200, 210] {
        let requests = [1, 2, 3].map(|i| request(&[ids(9, shared), ids(i, 40)].concat(), 2));
        for step_tokens in ["7", "512"] {
            let (answers, _) = batch("nemotron_h", &requests, &["--sequential", "--step-tokens", step_tokens]);
            assert_eq!(reused(&answers), json!([0, 192, 192]), "{shared}");
        }
    }
    let requests = [1, 63, 64, 65].map(|n| request(&ids(n, n), 1));
    let (answers, _) = batch("nemotron_h", &requests, &["--sequential"]);
    assert_eq!(column(&answers, "/cache/reason"), ["full", "full", "full", "first_sight"]);
}

#[test]
fn the_smallest_pools_give_the_same_answers() {
    let requests: Vec<Value> = (0..9u32)
        .map(|i| {
            let mut request = request(&[ids(i % 3, 90 + 64 * (i % 2)), ids(50 + i, 5 + i)].concat(), 70);
            request["namespace"] = if i % 4 == 3 { "other".into() } else { "".into() };
            if i % 2 == 1 {
                (request["temperature"], request["seed"]) = (json!(0.8), json!(i));
            }
            request
        })
        .collect();
    for family in FAMILIES {
        let (alone, _) = batch(family, &requests, &["--sequential", "--no-prefix-cache"]);
        // Four pages are what the longest of them needs.
        for (slots, pages, step) in [("1", "4", "33"), ("2", "5", "64"), ("3", "9", "1"), ("600", "600", "512")] {
            let more = ["--slots", slots, "--kv-pages", pages, "--step-tokens", step, "--max-batch", "4"];
            let (answers, _) = batch(family, &requests, &more);
            assert_eq!(texts(&answers), texts(&alone), "{family} {more:?}");
        }
        // More slots than batch and context can use leave enough memory for the pages.
        batch(family, &requests, &["--slots", "700"]);
    }
}

/// Three slots, and no guesses, which would take one of them: one is written, two keep states. The second text's state is the least
/// recently used one when the third needs a slot.
#[test]
fn the_counters_of_a_run_are_what_happened() {
    let requests = [1, 2, 1, 3, 1].map(|i| request(&ids(i, 300), 3));
    let more = ["--sequential", "--slots", "3", "--kv-pages", "100", "--speculate", "off"];
    let (answers, mut stats) = batch("nemotron_h", &requests, &more);
    assert_eq!(reused(&answers), json!([0, 0, 256, 0, 256]));
    let stats = stats.as_object_mut().unwrap();
    for measured in ["device", "version", "seconds"] {
        assert!(stats.remove(measured).is_some(), "{measured}");
    }
    let expected = json!({
        "backend": "cpu",
        "requests": 5,
        "answered_before": 0,
        "failed": 0,
        "reasons": { "off": 0, "prompt_logprobs": 0, "host": 0, "disk": 0, "evicted": 0, "policy": 0, "no_state": 0, "full": 2, "first_sight": 3 },
        // A prompt is one step; the last of three tokens is never computed.
        "steps": 5 * 3,
        "tokens_prefilled": 3 * 300 + 2 * 44,
        "tokens_reused": 2 * 256,
        "tokens_recomputed": 0,
        "tokens_generated": 5 * 3,
        "drafts": { "rows": 0, "tokens": 0, "accepted": 0, "accepted_at": [0, 0, 0, 0, 0, 0, 0] },
        "captures": 3,
        "captures_skipped": 0,
        "evictions": { "slots": 1, "nodes": 0 },
        "tiers": {
            "host": { "tokens": 0, "values": 0, "bytes": 0, "evicted": 0 },
            "disk": { "tokens": 0, "values": 0, "bytes": 0 },
            "loads": 0,
            "declined": 0,
            "demoted": 0,
            "converted": 0,
        },
        "preemptions": 0,
        "states_held": 2,
        "pages_held": 3 * 4,
        "slots": 3,
        "kv_pages": 100,
        "peak_slots": 3,
        "peak_pages": 2 * 4 + 5,
    });
    assert_eq!(stats, expected.as_object().unwrap());
}

#[test]
fn a_new_chat_under_the_same_system_prompt_reuses_it() {
    let system = json!({ "role": "system", "content": "Answer in one short sentence and be kind. ".repeat(20) });
    let turn = |i: usize| json!({ "role": "user", "content": format!("What is {i} + 25? Say it in a full sentence.") });
    let (mut history, mut requests) = (vec![system.clone()], Vec::new());
    for i in 0..14 {
        history.push(turn(i));
        requests.push(json!({ "messages": history, "max_tokens": 8 }));
        history.push(json!({ "role": "assistant", "content": format!("{i} + 25 = {}.", i + 25) }));
    }
    requests.push(json!({ "messages": [system, { "role": "user", "content": "Hello!" }], "max_tokens": 8 }));
    let input: String = requests.iter().map(|r| format!("{r}\n")).collect();
    let out = run_with_input(&["batch", "-", "-o", "-", "--backend", "cpu", "--sequential"], &input);
    let answers: Vec<Value> = stdout(out).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens = |i: usize, path: &str| answers[i].pointer(path).unwrap().as_u64().unwrap();
    for i in 1..14 {
        // Every turn continues from the last grid point of the turn before it.
        let before = tokens(i - 1, "/usage/prompt_tokens");
        assert!(tokens(i, "/cache/reused_tokens") >= (before - 1) / 64 * 64, "{}", answers[i]);
    }
    // The system prompt is all but the few tokens of the greeting.
    let prompt = tokens(14, "/usage/prompt_tokens");
    assert!(prompt > 192 && tokens(14, "/cache/reused_tokens") >= (prompt - 30) / 64 * 64, "{}", answers[14]);
}

/// What the first run evicts, and what it holds when it ends, is there for the second one.
#[test]
fn a_later_run_goes_on_from_files() {
    for family in FAMILIES {
        let dir = TempDir::new(&format!("tier-{family}"));
        let requests = [1, 2].map(|i| request(&ids(i, 300), 3));
        let more = ["--sequential", "--slots", "2", "--kv-pages", "6", "--disk-cache", &dir.arg("values")];
        let (first, _) = batch(family, &requests, &more);
        let (second, stats) = batch(family, &requests, &more);
        assert_eq!(texts(&second), texts(&first), "{family}");
        assert_eq!(column(&first, "/cache/disk_tokens"), [0, 0], "{family}");
        assert_eq!(column(&second, "/cache/disk_tokens"), [256, 256], "{family}: {stats}");
        assert_eq!(stats["tiers"]["disk"]["tokens"], 512, "{family}: {stats}");
    }
}

/// Answers that go on from states in int8 say so, and nobody gets them who wants exact ones only.
#[test]
fn states_in_int8_are_converted_ones() {
    let dir = TempDir::new("cold");
    let values = dir.arg("values");
    let requests = [1, 2].map(|i| request(&ids(i, 300), 3));
    let more = ["--sequential", "--slots", "2", "--kv-pages", "6", "--disk-cache", &values, "--cold-dtype", "int8"];
    let (first, _) = batch("nemotron_h", &requests, &more);
    let (second, stats) = batch("nemotron_h", &requests, &more);
    let converted = |answers: &[Value]| answers.iter().map(|a| a["cache"]["converted"] == true).collect::<Vec<_>>();
    assert_eq!((converted(&first), converted(&second)), (vec![false; 2], vec![true; 2]), "{stats}");
    assert_eq!(column(&second, "/cache/disk_tokens"), [256, 256], "{stats}");
    assert_eq!(stats["tiers"]["converted"], 2, "{stats}");
    let refused = |args: &[&str]| stderr(&run_with_input(args, ""));
    let without = refused(&["batch", "-", "--cold-dtype", "int8"]);
    assert!(without.contains("--host-cache"), "{without}");
    let both = ["batch", "-", "--cold-dtype", "int8", "--disk-cache", &values, "--warm", "x.bundle", "--exact-only"];
    assert!(refused(&both).contains("--exact-only refuses converted values"), "{}", refused(&both));
}
