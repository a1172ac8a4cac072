//! States that leave and enter over HTTP.

use std::{io::Write, thread, time::Duration};

use serde_json::{Value, json};

use crate::{
    QUESTION,
    binary::*,
    client::{Answer, Server, receive},
    long_system,
};

const ONE: &str = "x-api-key: key-of-the-first-team\r\n";
const TWO: &str = "x-api-key: key-of-the-second-team\r\n";

fn load(server: &Server, key: &str, bundle: &[u8]) -> Answer {
    let head = format!(
        "POST /v1/state/load HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/octet-stream\r\n\
         {key}Content-Length: {}\r\n\r\n",
        server.address,
        bundle.len()
    );
    server.send(&[head.as_bytes(), bundle].concat())
}

fn prompt() -> Value {
    json!([{ "role": "system", "content": long_system() }, { "role": "user", "content": QUESTION }])
}

fn ask(server: &Server, key: &str) -> Value {
    let body = json!({ "messages": prompt(), "temperature": 0, "max_tokens": 20 });
    server.post_with("/v1/chat/completions", key, &body.to_string()).json()
}

fn with_keys(dir: &TempDir, more: &[&str]) -> Server {
    let keys = json!({ "key-of-the-first-team": "first", "key-of-the-second-team": "second" });
    Server::start(&[&["--keys", &dir.write("keys.json", keys.to_string())], more].concat())
}

#[test]
fn a_state_goes_from_one_server_to_another() {
    let dir = TempDir::new("serve_state");
    let first = with_keys(&dir, &[]);
    // The prompt is computed, for its namespace only.
    let saved = first.post_with("/v1/state/save", ONE, &json!({ "messages": prompt() }).to_string());
    assert_eq!((saved.status, saved.header("content-type")), (200, Some("application/octet-stream")), "{}", saved.head);
    assert_eq!(saved.header("content-length"), Some(saved.body.len().to_string().as_str()));
    let wanted = ask(&first, ONE);
    assert!(wanted["selkie"]["reused_tokens"].as_u64().unwrap() >= 64, "{wanted}");
    assert_eq!(ask(&first, TWO)["selkie"]["reused_tokens"], 0);
    // `selkie bundle` reads the same file.
    let file = dir.write("state.bundle", &saved.body);
    let facts: Value = serde_json::from_str(&stdout(run(&["bundle", "inspect", &file, "--json"]))).unwrap();

    let second = with_keys(&dir, &[]);
    let loaded = load(&second, TWO, &saved.body);
    assert_eq!(loaded.status, 200, "{}", loaded.text());
    assert_eq!(loaded.json()["tokens"], facts["covered_tokens"]);
    let answer = ask(&second, TWO);
    assert_eq!(answer["selkie"]["reused_tokens"], wanted["selkie"]["reused_tokens"]);
    assert_eq!(answer["choices"][0]["message"], wanted["choices"][0]["message"]);
    assert_eq!(ask(&second, ONE)["selkie"]["reused_tokens"], 0, "a state enters its caller's namespace only");
    // A salt divides a namespace here too.
    let salted = json!({ "messages": prompt(), "cache_salt": "s", "states": 1 });
    let salted = second.post_with("/v1/state/save", TWO, &salted.to_string());
    assert_eq!((salted.status, second.get("/load").status), (200, 401));
}

#[test]
fn states_that_do_not_fit_are_refused_by_name() {
    let dir = TempDir::new("serve_state_refused");
    let server = with_keys(&dir, &["--max-state", "24MiB", "--context", "1024"]);
    let save = |body: Value| server.post_with("/v1/state/save", ONE, &body.to_string());
    let bundle = save(json!({ "messages": prompt() })).body;
    let refused = |bytes: &[u8], part: &str| {
        let answer = load(&server, TWO, bytes);
        assert!(answer.status == 400 && answer.text().contains(part), "{part}: {} {}", answer.status, answer.text());
    };
    refused(b"", "is not a bundle");
    refused(&bundle[..bundle.len() / 2], "the bundle");
    let mut altered = bundle.clone();
    altered[bundle.len() / 2] ^= 1;
    refused(&altered, "does not have the checksum");
    let mut renamed = bundle.clone();
    let at = renamed.windows(7).position(|w| w == b"weights").unwrap() + 12;
    renamed[at] = if renamed[at] == b'0' { b'1' } else { b'0' };
    refused(&renamed, "checksum");
    let answer = load(&server, "", &bundle[..100]);
    assert_eq!(answer.status, 401);
    assert_eq!(server.post_with("/v1/state/load", TWO, "{}").status, 415);
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({ "prompt": ["a", "b"] }), "prompt"),
        (json!({ "prompt": "a", "states": 0 }), "states"),
        (json!({ "messages": [] }), "messages"),
    ] {
        assert_eq!(save(body.clone()).param().as_deref(), Some(param), "{body}");
    }
    let short = save(json!({ "prompt": "a" }));
    assert!(short.status == 400 && short.text().contains("holds nothing"), "{}", short.text());

    // Too many bytes, announced, in chunks, and in what is saved.
    let small = with_keys(&dir, &["--max-state", "10KiB"]);
    assert_eq!(load(&small, ONE, &[0; 11 << 10]).status, 413);
    let head = format!(
        "POST /v1/state/load HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/octet-stream\r\n\
         {ONE}Transfer-Encoding: chunked\r\n\r\n2c00\r\n",
        small.address
    );
    assert_eq!(small.send(&[head.as_bytes(), &[0; 0x2c00], b"\r\n0\r\n\r\n"].concat()).status, 413);
    let saved = small.post_with("/v1/state/save", ONE, &json!({ "messages": prompt() }).to_string());
    assert!(saved.status == 413 && saved.text().contains("--max-state"), "{}", saved.text());
    assert_eq!(small.post_with("/v1/completions", ONE, r#"{"prompt": "x", "max_tokens": 1}"#).status, 200);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_state_harms_nobody() {
    let server = Server::start(&[]);
    let bundle = server.post("/v1/state/save", &json!({ "messages": prompt() })).body;
    for _ in 0..4 {
        let mut stream = server.connect();
        let head = format!(
            "POST /v1/state/load HTTP/1.1\r\nHost: {}\r\nContent-Type: application/octet-stream\r\n\
             Content-Length: {}\r\n\r\n",
            server.address,
            bundle.len()
        );
        stream.write_all(&[head.as_bytes(), &bundle[..bundle.len() / 3]].concat()).unwrap();
        thread::sleep(Duration::from_millis(50));
    }
    let slow: Vec<_> =
        (0..2).map(|_| server.open("/v1/state/save", "", &json!({ "messages": prompt() }).to_string())).collect();
    assert_eq!(server.post("/v1/chat/completions", &crate::chat(QUESTION)).status, 200);
    for stream in slow {
        assert_eq!(receive(stream).body.len(), bundle.len());
    }
    assert_eq!(load(&server, "", &bundle).status, 200);
}
