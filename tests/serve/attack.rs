//! Requests that mean harm, or make no sense.

use std::{
    io::Write,
    net::TcpStream,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::client::Server;

/// The server answers, and nothing is left of earlier requests.
fn is_well(server: &Server) {
    let answer = server.post("/v1/completions", &json!({ "prompt": "x", "max_tokens": 1 }));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(server.get("/load").json()["server_load"], 0);
}

#[test]
fn bodies_that_make_no_sense() {
    let server = Server::start(&["--max-body", "64KiB"]);
    let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(30_000), "]".repeat(30_000));
    let wide = format!("{{\"x\": [{}1], \"prompt\": 1.5}}", "[],".repeat(20_000));
    for (body, param) in [
        ("", None),
        ("null", None),
        ("[]", None),
        ("{\"prompt\": \"x\"", None),
        ("{\"prompt\": \"\\ud800\"}", Some("prompt")),
        ("{\"prompt\": \"x\", \"temperature\": 1e400}", Some("temperature")),
        ("{\"prompt\": \"x\", \"max_tokens\": 1e3}", Some("max_tokens")),
        ("{\"prompt\": \"x\", \"n\": 18446744073709551616}", Some("n")),
        ("{\"prompt\": [99999999]}", None),
        ("{\"prompt\": [1], \"max_tokens\": 4000000000}", None),
        ("{\"prompt\": \"x\", \"stop\": [\"\"]}", Some("stop")),
        ("{\"prompt\": \"x\", \"logit_bias\": {\"5\": 1}, \"n\": 0}", None),
        ("{\"prompt\": \"\"}", None),
        (&deep, Some("prompt")),
        (&wide, Some("prompt")),
    ] {
        let answer = server.post_with("/v1/completions", "", body);
        let shown: String = body.chars().take(60).collect();
        assert_eq!(answer.status, 400, "{shown}: {}", answer.text());
        if let Some(param) = param {
            assert_eq!(answer.param().as_deref(), Some(param), "{shown}");
        }
    }
    let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] });
    let refused = server.post("/v1/chat/completions", &image);
    assert!(refused.status == 400 && refused.text().contains("is an image"), "{}", refused.text());
    let long = format!("{{\"prompt\": \"{}\"}}", "x".repeat(70_000));
    assert_eq!(server.post_with("/v1/completions", "", &long).status, 413);
    // In chunks there is no length to look at.
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{long}\r\n0\r\n\r\n",
        server.address,
        long.len()
    );
    assert_eq!(server.send(chunked.as_bytes()).status, 413);
    let words = json!({ "messages": [{ "role": "user", "content": "word ".repeat(9_000) }] });
    let too_long = server.post("/v1/chat/completions", &words);
    assert_eq!((too_long.status, &too_long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    is_well(&server);
}

#[test]
fn foreign_sites_and_forms() {
    let server = Server::start(&["--allow-host", "tunnel:9000"]);
    let port = server.address.port();
    let with = |host: &str, kind: &str| {
        let body = "{\"prompt\": \"x\", \"max_tokens\": 1}";
        let head = format!("POST /v1/completions HTTP/1.1\r\n{host}Connection: close\r\n{kind}");
        server.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).status
    };
    let json = "Content-Type: application/json\r\n";
    assert_eq!(with(&format!("Host: localhost:{port}\r\n"), json), 200);
    assert_eq!(with("Host: tunnel:9000\r\n", json), 200);
    assert_eq!(with(&format!("Host: evil.example:{port}\r\n"), json), 403);
    assert_eq!(with("", json), 403);
    assert_eq!(with(&format!("Host: localhost:{port}\r\nHost: evil.example\r\n"), json), 403);
    for kind in ["", "Content-Type: text/plain\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"] {
        assert_eq!(with(&format!("Host: localhost:{port}\r\n"), kind), 415, "{kind}");
    }
    let preflight = format!(
        "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: https://evil.example\r\n\
         Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n"
    );
    let answer = server.send(preflight.as_bytes());
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (405, None));
}

/// Requests that two servers might cut at different places.
#[test]
fn smuggled_requests() {
    let server = Server::start(&[]);
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n", server.address);
    let body = "{\"prompt\": \"x\", \"max_tokens\": 1}";
    let hidden = format!("GET /version HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    for framing in [
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: +33\r\n",
        "Content-Length: 0x21\r\n",
        "Content-Length: 33, 34\r\n",
        "Content-Length: -1\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        " Transfer-Encoding: chunked\r\n",
    ] {
        let answer = server.send(format!("{head}{framing}Connection: close\r\n\r\n{body}{hidden}").as_bytes());
        assert_eq!(answer.status, 400, "{framing}");
        assert!(!String::from_utf8_lossy(&answer.body).contains("commit"), "{framing}");
    }
    // With both, the chunks count: what a proxy that counts bytes would take for a second request is a part of the first.
    let inner = format!("{{\"prompt\": \"x\", \"max_tokens\": 1, \"y\": \"{}\"}}", hidden.replace("\r\n", " "));
    let both = format!("{head}Connection: close\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n");
    let answer = server.send(format!("{both}{:x}\r\n{inner}\r\n0\r\n\r\n", inner.len()).as_bytes());
    assert!(matches!(answer.status, 200 | 400), "{}", answer.text());
    assert!(!answer.text().contains("commit"), "{}", answer.text());
    is_well(&server);
}

#[test]
fn heads_without_end() {
    let server = Server::start(&[]);
    let head = format!("GET /version HTTP/1.1\r\nHost: {}\r\n", server.address);
    let long = format!("{head}X: {}\r\n\r\n", "x".repeat(200_000));
    assert_eq!(server.send(long.as_bytes()).status, 431);
    let many = format!("{head}{}\r\n", "X: y\r\n".repeat(5_000));
    assert_eq!(server.send(many.as_bytes()).status, 431);
    for bytes in
        [&b"\x16\x03\x01\x00\xa5\x01\x00"[..], b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"\0\0\0\0"]
    {
        assert_eq!(server.send(bytes).status, 400, "{bytes:?}");
    }
    is_well(&server);
}

/// More connections than places: silent ones keep others out for a short time only.
#[test]
fn many_connections() {
    let server = Server::start(&["--max-connections", "50"]);
    let silent: Vec<TcpStream> = (0..45).map(|_| server.connect()).collect();
    let mut slow: Vec<TcpStream> = (0..40).map(|_| server.connect()).collect();
    slow.iter_mut().for_each(|s| s.write_all(b"POST /v1/comp").unwrap());
    let start = Instant::now();
    assert_eq!(server.get("/version").status, 200);
    assert!(start.elapsed() < Duration::from_secs(45), "{:?}", start.elapsed());
    drop((silent, slow));
    is_well(&server);
}

/// What is read from a client that leaves in the middle harms nobody.
#[test]
fn requests_that_break_off() {
    let server = Server::start(&[]);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 46\r\n\r\n\
         {{\"prompt\": \"x\", \"max_tokens\": 3, \"stream\": true}}",
        server.address
    );
    for end in 0..request.len() {
        let mut stream = server.connect();
        stream.write_all(&request.as_bytes()[..end]).unwrap();
    }
    server.until("nothing runs", || server.get("/load").json()["server_load"] == 0);
    is_well(&server);
}
