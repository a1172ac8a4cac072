//! `selkie serve` over real sockets, with the demo model on the CPU.

#[path = "serve/attack.rs"]
mod attack;
#[path = "serve/bench.rs"]
mod bench;
mod binary;
#[path = "serve/client.rs"]
mod client;
#[path = "serve/controls.rs"]
mod controls;
#[cfg(target_os = "linux")]
#[path = "serve/crowd.rs"]
mod crowd;
#[path = "serve/handover.rs"]
mod handover;
#[path = "serve/processes.rs"]
mod processes;
#[path = "serve/replicas.rs"]
mod replicas;
#[path = "serve/soak.rs"]
mod soak;
#[path = "serve/state.rs"]
mod state;
#[path = "serve/tools.rs"]
mod tools;

use std::{
    io::Read,
    thread,
    time::{Duration, Instant},
};

use binary::*;
use client::{Server, receive};
use serde_json::{Value, json};

const QUESTION: &str = "What is 17 + 25?";
/// An answer that does not end by itself within the test.
const ENDLESS: &str = r#"{"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": true, "stream": true}"#;

fn chat(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": text }] })
}

/// A system prompt that is longer than a page.
fn long_system() -> String {
    "You are a careful helper who answers in one short sentence. The code of the red box is 4812. ".repeat(8)
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn a_question_is_answered_whole_and_in_pieces() {
    let server = Server::start(&[]);
    let answer = server.post("/v1/chat/completions", &chat(QUESTION));
    assert_eq!((answer.status, content(&answer.json())), (200, "17 + 25 = 42."));
    assert_eq!(answer.json()["usage"]["total_tokens"], 25);
    assert_eq!(answer.header("access-control-allow-origin"), None);
    let mut body = chat(QUESTION);
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    body["model"] = "demo".into();
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = answer.events(true);
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "17 + 25 = 42.");
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(events[1..].iter().all(|e| e["choices"][0]["delta"].get("role").is_none()));
    let [.., end, usage] = &events[..] else { panic!("{}", answer.text()) };
    assert_eq!(end["choices"][0]["finish_reason"], "stop");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(12)));
}

/// Temperature 0: the same texts and ids as `selkie batch`, whatever runs at the same time, cache on or off, streamed or not.
#[test]
fn answers_are_those_of_batch() {
    let system = long_system();
    let ask = |text: &str| json!([{ "role": "system", "content": system }, { "role": "user", "content": text }]);
    let questions: Vec<Value> =
        [QUESTION, "What is the code of the red box?", "Tell me a story about a fox.", "Hello!"]
            .iter()
            .map(|text| ask(text))
            .collect();
    let lines: String = questions
        .iter()
        .map(|messages| json!({ "messages": messages, "temperature": 0, "max_tokens": 40 }).to_string() + "\n")
        .collect();
    let answers = stdout(run_with_input(&["batch", "-", "--backend", "cpu"], &lines));
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for args in [&[][..], &["--no-prefix-cache"], &["--slots", "3", "--kv-pages", "12", "--max-batch", "2"]] {
        let server = Server::start(args);
        thread::scope(|scope| {
            for worker in 0..3 {
                let (server, questions, answers) = (&server, &questions, &answers);
                scope.spawn(move || {
                    for (messages, wanted) in questions.iter().zip(answers) {
                        let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 40,
                            "return_token_ids": true, "stream": worker == 1 });
                        let answer = server.post("/v1/chat/completions", &body);
                        let (text, ids) =
                            if worker == 1 { joined(&answer.events(true)) } else { whole(&answer.json()) };
                        assert_eq!((&Value::from(text), &ids), (&wanted["text"], &wanted["ids"]), "{args:?}");
                    }
                });
            }
        });
        assert_eq!(server.get("/load").json()["server_load"], 0);
    }
}

fn whole(answer: &Value) -> (String, Value) {
    (content(answer).to_owned(), answer["choices"][0]["token_ids"].clone())
}

fn joined(events: &[Value]) -> (String, Value) {
    let text = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    let ids = events.iter().filter_map(|e| e["choices"][0]["token_ids"].as_array()).flatten().cloned().collect();
    (text, ids)
}

#[test]
fn a_chat_that_outgrows_the_context_goes_on_without_its_oldest_turns() {
    let server = Server::start(&[]);
    let long = "a box of red apples ".repeat(200);
    let mut messages = Vec::new();
    for _ in 0..6 {
        messages.extend([json!({ "role": "user", "content": long }), json!({ "role": "assistant", "content": long })]);
    }
    messages.push(json!({ "role": "user", "content": QUESTION }));
    let mut body = json!({ "messages": messages, "max_tokens": 4 });
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    body["when_full"] = "drop-oldest".into();
    let answer = server.post("/v1/chat/completions", &body).json();
    let dropped = answer["selkie"]["dropped_messages"].as_u64().unwrap();
    assert!((2..12).contains(&dropped) && dropped.is_multiple_of(2), "{answer}");
    // What the page draws.
    let engine = server.get("/engine").json();
    assert_eq!((&engine["name"], &engine["info"]["backend"]), (&json!("demo"), &json!("cpu")));
    assert!(!engine["stats"]["tree"].as_array().unwrap().is_empty(), "{engine}");
}

#[test]
fn what_was_reused_is_said() {
    let server = Server::start(&[]);
    let body = |question: &str| json!({ "messages": [{ "role": "system", "content": long_system() }, { "role": "user", "content": question }] });
    let first = server.post("/v1/chat/completions", &body(QUESTION)).json();
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(first["selkie"]["reason"], "first_sight");
    let second = server.post("/v1/chat/completions", &body("Hello!")).json();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= 64 && cached.is_multiple_of(64), "{second}");
    assert_eq!(second["selkie"]["reused_tokens"], cached);
    let message = server.post(
        "/v1/messages",
        &json!({ "max_tokens": 5, "system": long_system(),
        "messages": [{ "role": "user", "content": "Hello!" }] }),
    );
    assert_eq!(message.json()["usage"]["cache_read_input_tokens"], cached, "{}", message.text());
    assert_eq!(server.metric("vllm:prefix_cache_hits_total", ""), 2.0 * cached as f64);
    assert_eq!(server.metric("selkie:prefix_cache_requests_total", "first_sight"), 1.0);
}

#[test]
fn each_choice_is_its_own_request() {
    let server = Server::start(&[]);
    for prompt in ["Once upon a time".to_owned(), long_system()] {
        let ask = |n: u32, seed: &Value| {
            let body = json!({ "prompt": prompt, "n": n, "seed": seed, "temperature": 0.9, "max_tokens": 12 });
            server.post("/v1/completions", &body).json()
        };
        let all = ask(3, &json!(7));
        let choices = all["selkie"]["choices"].as_array().unwrap();
        assert_eq!(choices[0]["seed"], 7);
        for (i, choice) in choices.iter().enumerate() {
            let alone = ask(1, &choice["seed"]);
            assert_eq!(alone["choices"][0]["text"], all["choices"][i]["text"], "choice {i} of {prompt:?}");
        }
        assert_ne!(all["choices"][0]["text"], all["choices"][1]["text"]);
        if prompt.len() > 100 {
            assert!(choices[1..].iter().all(|c| c["reused_tokens"].as_u64().unwrap() >= 64), "{all}");
        }
    }
}

#[test]
fn prompts_of_a_completion() {
    let server = Server::start(&[]);
    let text = "Once upon a time";
    let ids = server.post("/tokenize", &json!({ "prompt": text })).json()["tokens"].clone();
    assert_eq!(server.post("/detokenize", &json!({ "tokens": ids })).json()["prompt"], text);
    let ask = |prompt: Value| server.post("/v1/completions", &json!({ "prompt": prompt, "max_tokens": 6 })).json();
    let one = ask(json!(text));
    assert_eq!(one["choices"][0]["finish_reason"], "length");
    assert_eq!(ask(json!([text, text]))["choices"].as_array().unwrap().len(), 2);
    assert_eq!(ask(json!([ids]))["usage"], ask(ids)["usage"]);
    assert_eq!(one["usage"]["completion_tokens"], 6);
}

#[test]
fn the_end_of_an_answer() {
    let server = Server::start(&["--served-model-name", "a", "--served-model-name", "b/c"]);
    let ask = |more: Value| {
        let mut body = chat(QUESTION);
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body).json()
    };
    let stopped = ask(json!({ "stop": [" =", "never"], "model": "b/c" }));
    assert_eq!((content(&stopped), &stopped["choices"][0]["finish_reason"]), ("17 + 25", &json!("stop")));
    assert_eq!(stopped["model"], "a");
    let cut = ask(json!({ "max_completion_tokens": 2, "max_tokens": 9 }));
    assert_eq!((content(&cut), &cut["choices"][0]["finish_reason"]), ("17", &json!("length")));
    let on = ask(json!({ "ignore_eos": true, "min_tokens": 30, "max_tokens": 30 }));
    assert_eq!(on["usage"]["completion_tokens"], 30);
    let stopped = server.post(
        "/v1/messages",
        &json!({ "max_tokens": 50, "stop_sequences": [" ="],
        "messages": [{ "role": "user", "content": QUESTION }] }),
    );
    assert_eq!(
        (&stopped.json()["stop_reason"], &stopped.json()["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" ="))
    );
    assert_eq!(server.get("/v1/models/b/c").json()["id"], "b/c");
    assert_eq!(server.get("/v1/models/d").status, 404);
    let other = server.post("/v1/completions", &json!({ "prompt": "x", "model": "d" }));
    assert_eq!((other.status, other.param().as_deref()), (404, Some("model")));
}

#[test]
fn other_protocols() {
    let server = Server::start(&[]);
    let said = json!([{ "role": "user", "content": QUESTION }]);
    let message = server.post("/v1/messages", &json!({ "model": "demo", "max_tokens": 99, "messages": said })).json();
    assert_eq!(message["content"][0]["text"], "17 + 25 = 42.");
    assert_eq!(message["stop_reason"], "end_turn");
    let count = server.post("/v1/messages/count_tokens", &json!({ "messages": said })).json();
    assert_eq!(count["input_tokens"], message["usage"]["input_tokens"]);
    let stream = server.post("/v1/messages", &json!({ "max_tokens": 99, "messages": said, "stream": true }));
    let text: String =
        stream.events(false).iter().filter_map(|e| e["delta"]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(text, "17 + 25 = 42.");
    let refused = server.post("/v1/messages", &json!({ "messages": said }));
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (400, &json!("invalid_request_error")));

    let response = server.post("/v1/responses", &json!({ "input": QUESTION })).json();
    assert_eq!(response["output"][0]["content"][0]["text"], "17 + 25 = 42.");
    let stream = server.post("/v1/responses", &json!({ "input": QUESTION, "stream": true }));
    let last = stream.events(false).pop().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"], {
        let mut output = response["output"].clone();
        output[0]["id"] = last["response"]["output"][0]["id"].clone();
        output
    });

    let lines = server.post("/api/chat", &json!({ "model": "demo", "messages": said }));
    let lines: Vec<Value> = lines.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().filter_map(|l| l["message"]["content"].as_str()).collect();
    assert_eq!((text.as_str(), &lines.last().unwrap()["done_reason"]), ("17 + 25 = 42.", &json!("stop")));
    assert_eq!(server.get("/api/tags").json()["models"][0]["name"], "demo");

    let render = server.post("/v1/chat/completions/render", &json!({ "messages": said })).json();
    assert_eq!(render["count"], count["input_tokens"]);
    let info = server.get("/server_info").json();
    assert_eq!((&info["block_size"], &info["backend"]), (&json!(64), &json!("cpu")));
    assert!(server.get("/model_info").json()["vocab_size"].as_u64().unwrap() > 100);
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    let absent = server.post("/v1/embeddings", &json!({}));
    assert!(absent.text().contains("not served"), "{}", absent.text());
}

#[test]
fn keys_have_namespaces_of_their_own() {
    let dir = TempDir::new("serve_keys");
    let keys = json!({ "key-of-team-one-a": "one", "key-of-team-one-b": "one", "key-of-team-two-a": "two" });
    let file = dir.write("keys.json", keys.to_string());
    let server = Server::start(&["--keys", &file]);
    let mut body = json!({ "messages": [{ "role": "user", "content": long_system() }], "max_tokens": 2 });
    let reused = |key: &str, body: &Value| {
        let head = format!("Authorization: Bearer {key}\r\n");
        let answer = server.post_with("/v1/chat/completions", &head, &body.to_string());
        answer.json()["selkie"]["reused_tokens"].as_u64().unwrap_or_else(|| panic!("{}", answer.text()))
    };
    assert_eq!(reused("key-of-team-one-a", &body), 0);
    assert!(reused("key-of-team-one-a", &body) > 0);
    assert!(reused("key-of-team-one-b", &body) > 0, "keys of one namespace share");
    assert_eq!(reused("key-of-team-two-a", &body), 0, "other namespaces do not");
    body["cache_salt"] = "a secret of a user".into();
    assert_eq!(reused("key-of-team-one-a", &body), 0, "nor do other salts");
    assert!(reused("key-of-team-one-a", &body) > 0);
    for (path, status) in [("/v1/models", 401), ("/server_info", 401), ("/health", 200), ("/metrics", 200)] {
        assert_eq!(server.get(path).status, status, "{path}");
    }
    let wrong = server.post_with("/v1/messages", "x-api-key: key-of-team-three\r\n", "{}");
    assert_eq!((wrong.status, &wrong.json()["error"]["type"]), (401, &json!("authentication_error")));
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = Server::start(&["--max-batch", "1", "--max-queue", "1"]);
    let mut first = server.open("/v1/completions", "", ENDLESS);
    first.read_exact(&mut [0; 200]).unwrap();
    let second = server.open("/v1/completions", "", ENDLESS);
    server.until("two places are taken", || server.get("/load").json()["server_load"] == 2);
    let third = server.post_with("/v1/completions", "", ENDLESS);
    assert_eq!((third.status, &third.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(third.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    server.until("one of them waits", || server.metric("vllm:num_requests_waiting", "") == 1.0);
    assert_eq!(server.metric("vllm:admission_rejections_total", ""), 1.0);
    // More at once than there ever can be.
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "x", "n": 3 })).status, 400);
    drop((first, second));
    server.until("the clients' requests end", || server.get("/load").json()["server_load"] == 0);
    assert_eq!(server.post("/v1/chat/completions", &chat(QUESTION)).status, 200);
}

#[test]
fn a_client_that_leaves_ends_its_request() {
    let server = Server::start(&[]);
    for body in [ENDLESS.to_owned(), ENDLESS.replace("true}", "false}")] {
        let stream = server.open("/v1/completions", "", &body);
        server.until("it runs", || server.metric("vllm:num_requests_running", "") == 1.0);
        drop(stream);
        server.until("it has ended", || server.metric("vllm:num_requests_running", "") == 0.0);
    }
    assert_eq!(server.metric("vllm:request_success_total", "\"abort\""), 2.0);
    assert_eq!(server.get("/load").json()["server_load"], 0);
}

#[test]
fn a_slow_reader_delays_nobody() {
    let server = Server::start(&[]);
    let slow: Vec<_> = (0..4).map(|_| server.open("/v1/completions", "", ENDLESS)).collect();
    server.until("they run", || server.metric("vllm:num_requests_running", "") == 4.0);
    let start = Instant::now();
    for _ in 0..5 {
        assert_eq!(content(&server.post("/v1/chat/completions", &chat(QUESTION)).json()), "17 + 25 = 42.");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    drop(slow);
}

#[cfg(unix)]
#[test]
fn a_signal_drains_and_a_second_one_ends() {
    let body = ENDLESS.replace("8000", "300");
    let mut server = Server::start(&[]);
    let mut stream = server.open("/v1/completions", "", &body);
    stream.read_exact(&mut [0; 200]).unwrap();
    // A connection that was opened before, for a request that comes too late.
    let kept = server.connect();
    server.signal("-TERM");
    thread::sleep(Duration::from_millis(200));
    assert!(std::net::TcpStream::connect(server.address).is_err(), "no more connections are taken");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    drop(kept);
    assert_eq!(server.child.wait().unwrap().code(), Some(0));

    let mut server = Server::start(&[]);
    let mut stream = server.open("/v1/completions", "", ENDLESS);
    stream.read_exact(&mut [0; 200]).unwrap();
    server.signal("-TERM");
    thread::sleep(Duration::from_millis(200));
    server.signal("-TERM");
    let start = Instant::now();
    assert_eq!(server.child.wait().unwrap().code(), Some(143));
    assert!(start.elapsed() < Duration::from_secs(2));

    let mut server = Server::start(&["--drain-time", "1"]);
    let mut stream = server.open("/v1/completions", "", ENDLESS);
    stream.read_exact(&mut [0; 200]).unwrap();
    server.signal("-INT");
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("the server is shutting down"), "an answer that takes longer says why it ends: {rest}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn answers_have_a_time_limit() {
    let server = Server::start(&["--answer-time", "1"]);
    let late = server.post_with("/v1/completions", "", &ENDLESS.replace("true}", "false}"));
    assert_eq!(late.status, 408);
    assert!(late.text().contains("--answer-time"));
    let late = server.post_with("/v1/completions", "", ENDLESS).events(true);
    assert!(late.last().unwrap()["error"]["message"].as_str().unwrap().contains("more than 1 s"));
}

#[test]
fn a_port_that_is_taken_and_keys_that_are_not_there() {
    let server = Server::start(&[]);
    let port = server.address.port().to_string();
    let out = run(&["serve", "--port", &port, "--backend", "cpu"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains(&port) && stderr(&out).contains("--port"), "{}", stderr(&out));
    let out = run(&["serve", "--port", "0", "--keys", "/no/such/keys.json"]);
    assert!(out.status.code() == Some(1) && stderr(&out).contains("/no/such/keys.json"), "{}", stderr(&out));
}

#[test]
fn a_request_has_an_id() {
    let server = Server::start(&[]);
    let given = server.post_with("/v1/completions", "X-Request-Id: my-7\r\n", r#"{"prompt": "x", "max_tokens": 1}"#);
    assert_eq!(given.header("x-request-id"), Some("my-7"));
    assert_eq!(given.json()["id"], "cmpl-my-7");
    let [a, b] = [0, 1].map(|_| server.get("/version").header("x-request-id").unwrap().to_owned());
    assert_ne!(a, b);
    // `receive` is what reads every answer here.
    assert_eq!(receive(server.open("/v1/completions", "", "{}")).param().as_deref(), Some("prompt"));
}
