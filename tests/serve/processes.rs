//! A process for every rank.

use std::{
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{QUESTION, binary::*, chat, client::Server, content};

/// A port that is free now, and so is the next one.
fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)).is_ok() {
            return port;
        }
    }
}

/// The options of a rank.
fn rank(rank: usize, world: usize, port: u16) -> [String; 6] {
    let options = ["--rank", &rank.to_string(), "--world", &world.to_string(), "--rendezvous"].map(str::to_owned);
    let [a, b, c, d, e] = options;
    [a, b, c, d, e, format!("127.0.0.1:{port}")]
}

fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Texts, ids and what was reused, without times.
fn answers(out: &str) -> Vec<Value> {
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("timing").expect("it has times");
        line
    };
    out.lines().map(line).collect()
}

/// Every rank gets the same command and the same requests; rank 0 alone answers.
#[test]
fn processes_answer_as_threads_do() {
    let lines: String = [QUESTION, "Tell me a story about a fox.", "Hello!"]
        .iter()
        .map(|text| json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 30 }).to_string() + "\n")
        .collect();
    let batch = ["batch", "-", "--backend", "cpu", "--max-batch", "2"];
    let threads = answers(&stdout(run_with_input(&[&batch[..], &["--ranks", "2"]].concat(), &lines)));
    let (by_options, by_variables) = (free_port(), free_port());
    let options = |n: usize| {
        let mut command = selkie();
        command.args(batch).args(rank(n, 2, by_options));
        command
    };
    let variables = |n: usize| {
        let mut command = selkie();
        command.args(batch).env("RANK", n.to_string()).env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", by_variables.to_string());
        command
    };
    let all: [&dyn Fn(usize) -> Command; 2] = [&options, &variables];
    for command in all {
        let other = spawn(&mut command(1));
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("requests-of-ranks.jsonl");
        std::fs::write(&file, &lines).unwrap();
        let first = command(0).stdin(std::fs::File::open(&file).unwrap()).output().unwrap();
        let other = other.wait_with_output().unwrap();
        assert_eq!(answers(&stdout(first)), threads);
        assert!(other.status.success() && other.stdout.is_empty(), "{}", stderr(&other));
        assert!(stderr(&other).contains("rank 1 of 2: follows rank 0"), "{}", stderr(&other));
    }
}

#[test]
fn a_killed_rank_ends_the_service_with_a_reason() {
    let port = free_port();
    let mut other = spawn(selkie().args(["serve", "--backend", "cpu"]).args(rank(1, 2, port)));
    let options = rank(0, 2, port);
    let mut server = Server::start(&options.each_ref().map(String::as_str));
    let answer = server.post("/v1/chat/completions", &chat(QUESTION)).json();
    assert_eq!(content(&answer), "17 + 25 = 42.");
    other.kill().unwrap();
    other.wait().unwrap();
    let began = Instant::now();
    // Nobody asks anything: it is noticed all the same.
    server.until("it has failed", || server.get("/health").status == 503);
    let refused = server.post("/v1/chat/completions", &chat(QUESTION));
    assert!(refused.status == 503 && refused.text().contains("rank 1"), "{}", refused.text());
    let code = loop {
        match server.child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None => thread::sleep(Duration::from_millis(20)),
        }
        assert!(began.elapsed() < Duration::from_secs(15), "it goes on");
    };
    assert_eq!(code, Some(1));
}

#[test]
fn a_rank_ends_with_rank_0() {
    let port = free_port();
    let other = spawn(selkie().args(["serve", "--backend", "cpu"]).args(rank(1, 2, port)));
    let options = rank(0, 2, port);
    let server = Server::start(&options.each_ref().map(String::as_str));
    // Killed.
    drop(server);
    let other = other.wait_with_output().unwrap();
    assert!(other.status.code() == Some(1) && stderr(&other).contains("rank 0"), "{}", stderr(&other));
}

#[test]
fn wrong_ranks_are_refused() {
    let at = ["--rendezvous", "127.0.0.1:1"];
    for (options, why) in [
        (&["--rank", "2", "--world", "2", at[0], at[1]][..], "counted from 0"),
        (&["--rank", "1"], "--world"),
        (&["--rank", "1", "--world", "2", at[0], at[1], "--ranks", "2"], "leave it out"),
        (&["--rank", "1", "--world", "2", at[0], at[1], "--backend", "wgpu"], "of the CPU"),
        (&["--rank", "1", "--world", "2", at[0], at[1], "--gpus", "0,1"], "the one device"),
    ] {
        let backend =
            if options.contains(&"wgpu") || options.contains(&"--gpus") { &[][..] } else { &["--backend", "cpu"] };
        let out = run(&[&["generate", "Hello!"], backend, options].concat());
        assert!(out.status.code() == Some(2) && stderr(&out).contains(why), "{options:?}: {}", stderr(&out));
    }
    let bench = run(&["bench", "speculate", "--rank", "1", "--world", "2", at[0], at[1]]);
    assert!(bench.status.code() == Some(2) && stderr(&bench).contains("bench model"), "{}", stderr(&bench));
    let nowhere = run(&["Hello!", "--backend", "cpu", "--rank", "1", "--world", "2", "--rendezvous", "nowhere"]);
    assert!(nowhere.status.code() == Some(1) && stderr(&nowhere).contains("a host and a port"), "{}", stderr(&nowhere));
}
