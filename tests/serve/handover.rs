//! Prompts that one server computes and another one answers.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    ENDLESS, QUESTION,
    binary::*,
    client::{Answer, Server, receive},
    long_system,
};

/// A server that computes prompts, and where they are fetched.
struct Prefill {
    server: Server,
    port: u16,
}

impl Prefill {
    fn start(more: &[&str]) -> Self {
        let port = free_port();
        let server = Server::start(&[&["--role", "prefill", "--handover-port", &port.to_string()], more].concat());
        Self { server, port }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn decode(more: &[&str]) -> Server {
    Server::start(&[&["--role", "decode"], more].concat())
}

/// A question after a long beginning.
fn ask(question: &str) -> Value {
    let messages = json!([{ "role": "system", "content": long_system() }, { "role": "user", "content": question }]);
    json!({ "messages": messages, "temperature": 0, "max_tokens": 20, "ignore_eos": true })
}

/// The same with the fields that a router adds, and a room of its own.
fn meeting(body: &Value, host: &str, port: u16) -> Value {
    static ROOM: AtomicU64 = AtomicU64::new(1 << 62);
    let mut body = body.clone();
    body["bootstrap_host"] = host.into();
    body["bootstrap_port"] = port.into();
    body["bootstrap_room"] = ROOM.fetch_add(1, Ordering::Relaxed).into();
    body
}

const PATH: &str = "/v1/chat/completions";

/// What a router does: the same request to both. The answers of both.
fn both(prefill: &Prefill, decode: &Server, body: &Value) -> (Answer, Answer) {
    let body = meeting(body, "127.0.0.1", prefill.port);
    thread::scope(|scope| {
        let first = scope.spawn(|| prefill.server.post(PATH, &body));
        let second = decode.post(PATH, &body);
        (first.join().unwrap(), second)
    })
}

fn text(answer: &Answer) -> String {
    let json = answer.json();
    let text = json["choices"][0]["message"]["content"].as_str().or(json["choices"][0]["text"].as_str());
    text.unwrap_or_else(|| panic!("{}", answer.text())).to_owned()
}

fn reused(answer: &Answer) -> u64 {
    answer.json()["selkie"]["reused_tokens"].as_u64().unwrap_or_else(|| panic!("{}", answer.text()))
}

fn handed(server: &Server, result: &str) -> f64 {
    server.metric("selkie:handover_total", &format!("result=\"{result}\""))
}

/// What a server of its own answers.
fn alone(bodies: &[Value]) -> Vec<String> {
    alone_with(&[], bodies)
}

/// The same of a server with more options.
fn alone_with(more: &[&str], bodies: &[Value]) -> Vec<String> {
    let server = Server::start(&[&["--no-prefix-cache"], more].concat());
    bodies.iter().map(|body| text(&server.post(PATH, body))).collect()
}

#[test]
fn a_prompt_that_one_server_computed_is_answered_by_another() {
    let (prefill, decode) = (Prefill::start(&[]), decode(&[]));
    let mut longer = ask(QUESTION);
    longer["messages"][0]["content"] = format!("{}{}", long_system(), "A fox had a lantern. ".repeat(40)).into();
    let bodies = [ask(QUESTION), ask(QUESTION), longer, ask("Hello!")];
    let wanted = alone(&bodies);
    let mut bytes = Vec::new();
    for (body, wanted) in bodies.iter().zip(&wanted) {
        let (first, second) = both(&prefill, &decode, body);
        assert_eq!((first.status, &first.json()["usage"]["completion_tokens"]), (200, &json!(1)), "{}", first.text());
        assert_eq!(&text(&second), wanted);
        let prompt = second.json()["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(reused(&second), (prompt - 1) / 64 * 64, "only what follows the last state was computed");
        bytes.push(decode.metric("selkie:handover_bytes_total", ""));
    }
    // The second time there was nothing to fetch, and of a longer prompt only what was new.
    assert_eq!((bytes[1], handed(&decode, "known") >= 1.0, handed(&decode, "not")), (bytes[0], true, 0.0));
    let whole = Prefill::start(&[]);
    let fresh = self::decode(&[]);
    assert_eq!(text(&both(&whole, &fresh, &bodies[2]).1), wanted[2]);
    assert!(bytes[2] - bytes[1] < fresh.metric("selkie:handover_bytes_total", ""), "{bytes:?}");
    prefill.server.until("it is counted there", || handed(&prefill.server, "over") == handed(&decode, "over"));

    // In pieces, and the one who answers first.
    let mut body = meeting(&ask("Where is the fox?"), "127.0.0.1", prefill.port);
    body["stream"] = true.into();
    let stream = decode.open(PATH, "", &body.to_string());
    thread::sleep(Duration::from_millis(300));
    assert_eq!(prefill.server.post(PATH, &body).events(true).len(), 3);
    let said: String = receive(stream)
        .events(true)
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(vec![said], alone(&[ask("Where is the fox?")]));

    // Without a room each answers by itself.
    for server in [&prefill.server, &decode] {
        assert_eq!(vec![text(&server.post(PATH, &bodies[3]))], wanted[3..]);
    }
    for server in [&prefill.server, &decode] {
        assert_eq!(server.get("/load").json()["server_load"], 0);
    }
}

#[test]
fn several_prompts_have_a_room_each() {
    let (prefill, decode) = (Prefill::start(&[]), decode(&[]));
    let prompt = |name: &str| format!("{name}: {}", "a box of red apples ".repeat(40));
    let body = json!({ "prompt": [prompt("Iris"), prompt("Leo")], "temperature": 0, "max_tokens": 8,
        "bootstrap_host": ["127.0.0.1", "127.0.0.1"], "bootstrap_port": [prefill.port, prefill.port],
        "bootstrap_room": [5, 6] });
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| prefill.server.post("/v1/completions", &body));
        let second = decode.post("/v1/completions", &body);
        (first.join().unwrap().json(), second.json())
    });
    assert_eq!((first["usage"]["completion_tokens"].as_u64(), handed(&decode, "over")), (Some(2), 2.0), "{second}");
    let mut plain = body.clone();
    plain.as_object_mut().unwrap().retain(|name, _| !name.starts_with("bootstrap"));
    let wanted = Server::start(&[]).post("/v1/completions", &plain).json();
    for i in 0..2 {
        assert_eq!(second["choices"][i]["text"], wanted["choices"][i]["text"]);
    }
}

#[test]
fn a_prompt_that_ends_on_the_grid_leaves_its_last_block_to_compute() {
    let (prefill, decode) = (Prefill::start(&[]), decode(&[]));
    // The second one is a beginning of the first.
    for (length, known) in [(192, 128), (128, 64), (64, 0), (65, 64)] {
        let ids: Vec<u32> = (0..length).map(|i| 4 + i * 7 % 900).collect();
        let body = meeting(&json!({ "prompt": ids, "max_tokens": 3 }), "127.0.0.1", prefill.port);
        let answer = thread::scope(|scope| {
            scope.spawn(|| prefill.server.post("/v1/completions", &body));
            decode.post("/v1/completions", &body)
        });
        assert_eq!((answer.status, reused(&answer)), (200, known), "{length} tokens");
    }
}

/// The next `bytes` bytes of a connection.
fn take(line: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    line.read_exact(&mut all).unwrap();
    all
}

/// The next length, and so many times `each` bytes after it.
fn skip(line: &mut TcpStream, each: usize) {
    let count = u32::from_le_bytes(take(line, 4).try_into().unwrap()) as usize;
    take(line, each * count);
}

/// The marks before the bundles of a prompt, in order.
fn marks(port: u16, room: u64) -> Vec<u8> {
    let mut line = TcpStream::connect(("127.0.0.1", port)).unwrap();
    line.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    line.write_all(&[&b"selkieH3"[..], &room.to_le_bytes()].concat()).unwrap();
    assert_eq!(take(&mut line, 1), [1]);
    skip(&mut line, 1);
    skip(&mut line, 4);
    line.write_all(&[0; 4]).unwrap();
    let mut marks = Vec::new();
    while marks.last() != Some(&4) {
        let mark = take(&mut line, 1)[0];
        if mark != 0 {
            marks.push(mark);
            let bytes = u64::from_le_bytes(take(&mut line, 8).try_into().unwrap());
            take(&mut line, bytes as usize);
        }
    }
    marks
}

#[test]
fn pages_leave_while_the_prompt_is_computed() {
    let prefill = Prefill::start(&["--step-tokens", "64"]);
    let ids: Vec<u32> = (0..1500).map(|i| 4 + i * 7 % 900).collect();
    let body = meeting(&json!({ "prompt": ids, "max_tokens": 3 }), "127.0.0.1", prefill.port);
    let marks = thread::scope(|scope| {
        scope.spawn(|| prefill.server.post("/v1/completions", &body));
        marks(prefill.port, body["bootstrap_room"].as_u64().unwrap())
    });
    assert!(marks.len() > 2 && marks[..marks.len() - 1].iter().all(|mark| *mark == 2), "{marks:?}");
    // Nobody takes the rest of another prompt; the engine has room for the next ones again.
    for start in 0..10 {
        let ids: Vec<u32> = (0..700).map(|i| 4 + (start + i * 11) % 900).collect();
        let body = meeting(&json!({ "prompt": ids, "max_tokens": 3 }), "127.0.0.1", prefill.port);
        thread::scope(|scope| {
            scope.spawn(|| prefill.server.post("/v1/completions", &body));
            let mut leaves = TcpStream::connect(("127.0.0.1", prefill.port)).unwrap();
            let room = body["bootstrap_room"].as_u64().unwrap();
            leaves.write_all(&[&b"selkieH3"[..], &room.to_le_bytes()].concat()).unwrap();
            assert_eq!(take(&mut leaves, 1), [1]);
            skip(&mut leaves, 1);
            skip(&mut leaves, 4);
            leaves.write_all(&[0; 4]).unwrap();
            while take(&mut leaves, 1) == [0] {}
        });
    }
    let body = meeting(&ask(QUESTION), "127.0.0.1", prefill.port);
    let decode = decode(&[]);
    thread::scope(|scope| {
        scope.spawn(|| prefill.server.post(PATH, &body));
        assert!(reused(&decode.post(PATH, &body)) > 0);
    });
}

#[test]
fn keys_keep_their_namespaces() {
    let dir = TempDir::new("serve_handover_keys");
    let keys = dir.write("keys.json", r#"{"key-of-the-first-team": "first", "key-of-the-second-team": "second"}"#);
    let (prefill, decode) = (Prefill::start(&["--keys", &keys]), decode(&["--keys", &keys]));
    let body = meeting(&ask(QUESTION), "127.0.0.1", prefill.port);
    let post = |server: &Server, key: &str, body: &Value| {
        server.post_with(PATH, &format!("x-api-key: key-of-the-{key}-team\r\n"), &body.to_string())
    };
    let got = thread::scope(|scope| {
        scope.spawn(|| post(&prefill.server, "first", &body));
        post(&decode, "first", &body)
    });
    assert!(reused(&got) >= 64, "{}", got.text());
    assert!(reused(&post(&decode, "second", &ask(QUESTION))) == 0, "it entered one namespace");
    assert!(reused(&post(&decode, "first", &ask(QUESTION))) >= 64);
}

/// A peer that accepts and does one thing.
fn peer(act: impl Fn(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || listener.incoming().flatten().for_each(act));
    port
}

#[test]
fn whatever_goes_wrong_the_prompt_is_computed_here() {
    let wanted = &alone(&[ask(QUESTION)])[0];
    let mut other = ask(QUESTION);
    other["messages"][1]["content"] = "Hello!".into();
    let silent = peer(|stream| {
        thread::sleep(Duration::from_secs(60));
        drop(stream);
    });
    let closes = peer(drop);
    let babbles = peer(|mut stream| drop(stream.write_all(&[7; 4096])));
    let promises = peer(|mut stream| drop(stream.write_all(&[1, 255, 255, 255, 255, 0, 0])));
    let waits = peer(|mut stream| {
        while stream.write_all(&[0]).is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    let nobody = free_port();
    for (what, host, port) in [
        ("nobody listens", "127.0.0.1", nobody),
        ("another machine", "192.0.2.1", nobody),
        ("no such name", "there.is.no.such.host.invalid", nobody),
        ("a peer that closes", "localhost", closes),
        ("a peer with another protocol", "127.0.0.1", babbles),
        ("a peer with a long offer", "127.0.0.1", promises),
        ("a peer that only waits", "127.0.0.1", waits),
        ("a silent peer", "127.0.0.1", silent),
    ] {
        let decode = decode(&["--handover-time", "2"]);
        let start = Instant::now();
        let answer = decode.post(PATH, &meeting(&ask(QUESTION), host, port));
        assert_eq!((&text(&answer), reused(&answer)), (wanted, 0), "{what}");
        assert!(start.elapsed() < Duration::from_secs(15), "{what}: {:?}", start.elapsed());
        assert_eq!((handed(&decode, "not"), handed(&decode, "over")), (1.0, 0.0), "{what}");
        assert_eq!(decode.get("/load").json()["server_load"], 0, "{what}");
    }

    // A room that nobody opens, one with another prompt, and a request without a port.
    let (prefill, decode) = (Prefill::start(&[]), decode(&[]));
    assert_eq!(&text(&decode.post(PATH, &meeting(&ask(QUESTION), "127.0.0.1", prefill.port))), wanted);
    let mut body = meeting(&other, "127.0.0.1", prefill.port);
    prefill.server.post(PATH, &body);
    body["messages"] = ask(QUESTION)["messages"].clone();
    assert_eq!(&text(&decode.post(PATH, &body)), wanted);
    body["bootstrap_port"] = Value::Null;
    assert_eq!(&text(&decode.post(PATH, &body)), wanted);
    assert_eq!(handed(&decode, "not"), 3.0);
}

#[test]
fn another_model_hands_nothing_over() {
    let other = repository("tests/golden/nemotron_h");
    let prefill = Prefill::start(&["-m", other.to_str().unwrap()]);
    let decode = decode(&[]);
    let ids: Vec<u32> = (0..150).map(|i| 4 + i * 7 % 50).collect();
    let body = json!({ "prompt": ids, "temperature": 0, "max_tokens": 8 });
    let divided = meeting(&body, "127.0.0.1", prefill.port);
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| prefill.server.post("/v1/completions", &divided));
        let second = decode.post("/v1/completions", &divided);
        (first.join().unwrap(), second)
    });
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!((reused(&second), handed(&decode, "not")), (0, 1.0));
    assert_eq!(text(&second), text(&Server::start(&[]).post("/v1/completions", &body)));
}

#[test]
fn a_server_that_is_killed_in_the_middle_is_not_waited_for() {
    let mut prefill = Prefill::start(&["--max-batch", "1"]);
    let decode = decode(&[]);
    // Its only place is taken, so the prompt waits.
    let mut stream = prefill.server.open("/v1/completions", "", ENDLESS);
    stream.read_exact(&mut [0; 200]).unwrap();
    let body = meeting(&ask(QUESTION), "127.0.0.1", prefill.port);
    let waiting = prefill.server.open(PATH, "", &body.to_string());
    prefill.server.until("it waits", || prefill.server.metric("vllm:num_requests_waiting", "") == 1.0);
    let answer = decode.open(PATH, "", &body.to_string());
    thread::sleep(Duration::from_millis(1500));
    prefill.server.child.kill().unwrap();
    let start = Instant::now();
    assert_eq!(vec![text(&receive(answer))], alone(&[ask(QUESTION)]));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(handed(&decode, "not"), 1.0);
    drop(waiting);
}

#[test]
fn a_request_that_leaves_fails_its_room_and_strangers_get_nothing() {
    let prefill = Prefill::start(&["--max-batch", "1"]);
    let mut stream = prefill.server.open("/v1/completions", "", ENDLESS);
    stream.read_exact(&mut [0; 200]).unwrap();
    let body = meeting(&ask(QUESTION), "127.0.0.1", prefill.port);
    let waiting = prefill.server.open(PATH, "", &body.to_string());
    prefill.server.until("it waits", || prefill.server.metric("vllm:num_requests_waiting", "") == 1.0);
    let decode = decode(&[]);
    let answer = decode.open(PATH, "", &body.to_string());
    thread::sleep(Duration::from_millis(500));
    drop(waiting);
    assert_eq!(reused(&receive(answer)), 0);
    drop(stream);
    // Rooms that nobody fetches cost nothing that is missed; a stranger who guesses none gets nothing.
    for _ in 0..40 {
        assert_eq!(prefill.server.post(PATH, &meeting(&ask("Hello!"), "127.0.0.1", prefill.port)).status, 200);
    }
    let mut guess = TcpStream::connect(("127.0.0.1", prefill.port)).unwrap();
    guess.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    guess.write_all(&[&b"selkieH3"[..], &7u64.to_le_bytes()].concat()).unwrap();
    let mut said = Vec::new();
    guess.read_to_end(&mut said).unwrap();
    assert_eq!(said[0], 3, "{said:?}");
    let mut stranger = TcpStream::connect(("127.0.0.1", prefill.port)).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    said.clear();
    let _ = stranger.read_to_end(&mut said);
    assert!(said.is_empty(), "{said:?}");
    prefill.server.until("nothing runs", || prefill.server.get("/load").json()["server_load"] == 0);
    assert_eq!(prefill.server.post(PATH, &ask(QUESTION)).status, 200);
}

#[test]
fn ranks_hand_over_to_as_many_ranks() {
    // Rounded activations would make more of the rounding of sums, by which ranks differ, than a greedy text without an end bears.
    let (one, two) = (&["--products", "exact"][..], &["--products", "exact", "--ranks", "2"][..]);
    let wanted = alone_with(one, &[ask(QUESTION)]);
    for (there, here) in [(two, two), (two, one), (one, two)] {
        let (prefill, decode) = (Prefill::start(there), decode(here));
        let answer = both(&prefill, &decode, &ask(QUESTION)).1;
        assert_eq!(text(&answer), wanted[0], "{there:?} to {here:?}");
        let prompt = answer.json()["usage"]["prompt_tokens"].as_u64().unwrap();
        // Other numbers of ranks round sums differently, so their states are not taken over: the prompt is computed here.
        let (over, tokens) = if there == here { (1.0, (prompt - 1) / 64 * 64) } else { (0.0, 0) };
        assert_eq!(reused(&answer), tokens, "{there:?} to {here:?}: {}", answer.text());
        assert_eq!(handed(&decode, "over"), over, "{there:?} to {here:?}");
    }
}

#[test]
fn roles_that_cannot_be_played_are_refused() {
    let cpu = ["serve", "--backend", "cpu", "--port", "0", "--role", "prefill"];
    let out = run(&[&cpu[..], &["--no-prefix-cache"]].concat());
    assert!(out.status.code() == Some(2) && stderr(&out).contains("prefix cache"), "{}", stderr(&out));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let out = run(&[&cpu[..], &["--handover-port", &port]].concat());
    assert!(out.status.code() == Some(1) && stderr(&out).contains("--handover-port"), "{}", stderr(&out));
}
