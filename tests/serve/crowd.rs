//! Ten thousand connections that want nothing, by hand: each end needs a file descriptor for each.
//!
//! ```sh
//! ulimit -n 11000; cargo test --release --test serve ten_thousand -- --ignored --nocapture
//! ```

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{QUESTION, chat, client::Server, content, soak::memory};

const CONNECTIONS: usize = 10_000;
/// How long a good client waits at most. Alone it is answered in a fraction of a second.
const DEADLINE: Duration = Duration::from_secs(10);
/// Bodies may take 60 s, heads and silence 10.
const REAPED: Duration = Duration::from_secs(80);

/// Open files of the server, its connections included.
fn files(server: &Server) -> usize {
    fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap().count()
}

/// One of four kinds: silent, half a head, half a body, or silent after an answer.
fn open(server: &Server, kind: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).expect("a connection; `ulimit -n` must allow them");
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let host = server.address;
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n");
    match kind {
        0 => {}
        1 => stream.write_all(head.as_bytes()).unwrap(),
        2 => stream.write_all(format!("{head}Content-Length: 100\r\n\r\n{{\"prompt\": ").as_bytes()).unwrap(),
        _ => {
            stream.write_all(format!("GET /version HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
            let mut answer = [0; 1024];
            let read = stream.read(&mut answer).unwrap();
            assert!(answer[..read].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..read]));
        }
    }
    stream
}

/// Asks until it is told to stop. The times of all answers, sorted.
fn good_client(server: &Server, stop: &AtomicBool) -> Vec<Duration> {
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        assert_eq!(content(&server.post("/v1/chat/completions", &chat(QUESTION)).json()), "17 + 25 = 42.");
        times.push(start.elapsed());
        assert!(start.elapsed() < DEADLINE, "answered after {:?}", start.elapsed());
        thread::sleep(Duration::from_millis(100));
    }
    times.sort();
    times
}

/// Asks for some seconds. What the answers took.
fn asks(server: &Server) -> String {
    let stop = AtomicBool::new(false);
    let times = thread::scope(|scope| {
        let client = scope.spawn(|| good_client(server, &stop));
        thread::sleep(Duration::from_secs(5));
        stop.store(true, Ordering::Relaxed);
        client.join().unwrap()
    });
    format!("{} answers, median {:.0?}, longest {:.0?}", times.len(), times[times.len() / 2], times[times.len() - 1])
}

fn open_all(server: &Server, few: usize) -> Vec<TcpStream> {
    let crowd = (0..CONNECTIONS).map(|i| open(server, i % 4)).collect();
    server.until("all are accepted", || files(server) >= few + CONNECTIONS);
    crowd
}

#[test]
#[ignore = "by hand: it needs 10,000 file descriptors and two minutes"]
fn ten_thousand_connections_harm_nobody() {
    let server = Server::start(&["--max-connections", "10100"]);
    println!("alone: {}", asks(&server));
    let (few, before, start) = (files(&server), memory(&server).unwrap(), Instant::now());
    let crowd = open_all(&server, few);
    println!("{CONNECTIONS} connections opened in {:.1?}; beside them {}", start.elapsed(), asks(&server));
    let now = memory(&server).unwrap();
    let bytes = (now.saturating_sub(before) << 10) / CONNECTIONS as u64;
    println!("{before} KiB before, {now} with them: {bytes} bytes for each");
    assert!(bytes < 64 << 10, "{bytes} bytes for each");
    // The clients do nothing: the server closes all of them.
    while files(&server) > few + 2 {
        assert!(start.elapsed() < REAPED, "{} files are open, {few} at first", files(&server));
        thread::sleep(Duration::from_millis(500));
    }
    println!("all closed {:.0?} after the first was opened", start.elapsed());
    drop(crowd);
    // An allocator spreads over more memory for a while, and then no more.
    let mut peaks = Vec::new();
    for _ in 0..12 {
        let crowd = open_all(&server, few);
        peaks.push(memory(&server).unwrap());
        drop(crowd);
        server.until("all have left", || files(&server) <= few + 2);
    }
    println!("KiB with twelve crowds more, one after another: {peaks:?}");
    let [.., last_but_two, _, last] = peaks[..] else { unreachable!("there are twelve") };
    assert!(last < last_but_two + last_but_two / 20, "memory grows: {peaks:?} KiB");
    println!("at the end: {}", asks(&server));
    assert_eq!(server.get("/load").json()["server_load"], 0);
}
