//! `selkie bench serve`: which cases it has, and that each answers all requests. Nothing is timed.

use serde_json::{Value, json};

use crate::binary::*;

/// The report of a run with three clients and short prompts, and its cases.
fn bench(more: &[&str]) -> (Value, Vec<Value>) {
    let small = ["--clients", "3", "--shared-tokens", "70", "--own-tokens", "5", "--decode-tokens", "4"];
    let args = [&["bench", "serve", "--backend", "cpu", "--runs", "2", "--json"], &small[..], more].concat();
    let report: Value = serde_json::from_str(&stdout(run(&args))).unwrap();
    let cases = report["cases"].as_array().unwrap().clone();
    (report, cases)
}

fn names(cases: &[Value]) -> Vec<&str> {
    cases.iter().map(|case| case["case"].as_str().unwrap()).collect()
}

#[test]
fn every_case_answers_the_same_requests() {
    let (report, cases) = bench(&["--requests", "7", "--idle-connections", "5"]);
    assert_eq!((&report["requests"], &report["made_up_tokenizer"]), (&json!(7), &json!(false)));
    assert_eq!(names(&cases), ["no_http", "http", "http_idle"]);
    for case in &cases {
        // Two rounds, without the warm-up.
        assert_eq!((&case["requests"], &case["tokens"]), (&json!(14), &json!(56)), "{case}");
        let ms = ["mean", "p50", "p99"].map(|key| case["first_token_ms"][key].as_f64().unwrap());
        assert!(ms[0] > 0.0 && ms[1] <= ms[2] && case["tokens_per_second"].as_f64().unwrap() > 0.0, "{case}");
        assert_eq!(case["decode_tokens_per_second"], Value::Null, "clients have several requests");
    }
    let compared: Vec<&Value> = cases.iter().map(|case| &case["compared_with"]).collect();
    assert_eq!(compared, [&Value::Null, &json!("no_http"), &json!("http")]);
}

#[test]
fn answers_that_come_whole() {
    let (report, cases) = bench(&["--no-stream"]);
    assert_eq!((&report["requests"], &report["streamed"]), (&json!(12), &json!(false)));
    assert!(cases.iter().all(|case| case["tokens"] == 96 && case["first_token_ms"].is_null()), "{report}");
    assert_eq!(names(&bench(&["--no-http"]).1), ["no_http"]);
}

/// Random weights have a made-up tokenizer, which structures need.
#[test]
fn structured_answers_of_random_weights() {
    let config = repository("tests/golden/qwen3_next/config.json");
    let (report, cases) = bench(&["--schema", "--config", config.to_str().unwrap()]);
    assert_eq!((&report["requests"], &report["made_up_tokenizer"]), (&json!(3), &json!(true)));
    assert_eq!(names(&cases), ["no_http", "http", "http_schema"]);
    assert!(cases.iter().all(|case| case["requests"] == 6 && case["tokens"] == 24), "{report}");
    assert!(cases.iter().all(|case| case["decode_tokens_per_second"].is_number()), "{report}");
    for options in [["--schema", "--no-stream"], ["--schema", "--no-http"], ["--schema", "--requests=3"]] {
        assert_eq!(run(&[&["bench", "serve"], &options[..]].concat()).status.code(), Some(2), "{options:?}");
    }
}
