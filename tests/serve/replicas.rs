//! Several engines behind one server.

use std::thread;

use serde_json::{Value, json};

use crate::{ENDLESS, QUESTION, binary::*, client::Server, content, long_system};

const PATH: &str = "/v1/chat/completions";

fn ask(name: &str, question: &str) -> Value {
    let system = format!("Your name is {name}. {}", long_system());
    let messages = json!([{ "role": "system", "content": system }, { "role": "user", "content": question }]);
    json!({ "messages": messages, "temperature": 0, "max_tokens": 20 })
}

#[test]
fn requests_go_where_their_prefix_is() {
    let server = Server::start(&["--replicas", "3"]);
    let alone = Server::start(&["--no-prefix-cache"]);
    let names = ["Iris", "Leo", "Mona", "Otto"];
    let all: Vec<Value> = names.iter().flat_map(|name| [ask(name, QUESTION), ask(name, "Hello!")]).collect();
    let wanted: Vec<Value> = all.iter().map(|body| alone.post(PATH, body).json()).collect();
    let firsts: Vec<_> = all.iter().step_by(2).collect();
    thread::scope(|scope| {
        for body in &firsts {
            scope.spawn(|| server.post(PATH, body));
        }
    });
    for (body, wanted) in all.iter().zip(&wanted) {
        let answer = server.post(PATH, body).json();
        assert_eq!(content(&answer), content(wanted));
        assert!(answer["selkie"]["reused_tokens"].as_u64().unwrap() >= 64, "it came to another engine: {answer}");
    }
    // Sums over the engines.
    assert_eq!(
        server.metric("vllm:request_success_total", "\"stop\"")
            + server.metric("vllm:request_success_total", "\"length\""),
        12.0
    );
    let prompts: u64 = wanted.iter().map(|answer| answer["usage"]["prompt_tokens"].as_u64().unwrap()).sum();
    let again: u64 = wanted.iter().step_by(2).map(|answer| answer["usage"]["prompt_tokens"].as_u64().unwrap()).sum();
    assert_eq!(server.metric("vllm:prompt_tokens_total", ""), (prompts + again) as f64);
    assert_eq!(server.get("/server_info").json()["max_running_requests"], 48);
}

#[test]
fn requests_without_a_prefix_go_to_the_engine_with_the_fewest() {
    let server = Server::start(&["--replicas", "2", "--max-batch", "1", "--max-queue", "2"]);
    let streams: Vec<_> = (0..2).map(|_| server.open("/v1/completions", "", ENDLESS)).collect();
    server.until("each engine runs one", || server.metric("vllm:num_requests_running", "") == 2.0);
    assert_eq!(server.metric("vllm:num_requests_waiting", ""), 0.0);
    drop(streams);
    server.until("they have ended", || server.metric("vllm:num_requests_running", "") == 0.0);
}

#[test]
fn a_state_is_loaded_into_every_engine() {
    let one = Server::start(&[]);
    let body = ask("Iris", QUESTION);
    let bundle = one.post("/v1/state/save", &json!({ "messages": body["messages"] })).body;
    let server = Server::start(&["--replicas", "2", "--max-batch", "1"]);
    let head = format!(
        "POST /v1/state/load HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: {}\r\n\r\n",
        server.address,
        bundle.len()
    );
    assert_eq!(server.send(&[head.as_bytes(), &bundle].concat()).status, 200);
    // One engine is busy; the other one has it too.
    let stream = server.open("/v1/completions", "", ENDLESS);
    server.until("one engine is busy", || server.metric("vllm:num_requests_running", "") == 1.0);
    assert!(server.post(PATH, &body).json()["selkie"]["reused_tokens"].as_u64().unwrap() >= 64);
    drop(stream);
    let saved = server.post("/v1/state/save", &json!({ "messages": body["messages"] }));
    assert_eq!((saved.status, saved.body.len()), (200, bundle.len()));
}

#[test]
fn options_of_one_engine_are_refused() {
    for more in [
        &["--backend", "auto"][..],
        &["--backend", "cpu", "--ranks", "2"],
        &["--backend", "cpu", "--role", "decode"],
        &["--backend", "cpu", "--kv-events", "tcp://127.0.0.1:0"],
    ] {
        let out = run(&[&["serve", "--port", "0", "--replicas", "2"], more].concat());
        assert!(out.status.code() == Some(2) && stderr(&out).contains("--replicas"), "{more:?}: {}", stderr(&out));
    }
}
