//! A server under test, and the least of an HTTP client.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::binary::*;

/// `selkie serve` with the demo model on the CPU.
pub struct Server {
    pub child: Child,
    pub address: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer, its body without the marks of chunks.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|l| l.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        Some(line[name.len() + 1..].trim())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The data of all events but `[DONE]`, which must be there if `done`.
    pub fn events(&self, done: bool) -> Vec<Value> {
        let mut data: Vec<&str> = self.text().lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        if done {
            assert_eq!(data.pop(), Some("[DONE]"), "{}", self.text());
        }
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// The error's field `param`.
    pub fn param(&self) -> Option<String> {
        self.json()["error"]["param"].as_str().map(str::to_owned)
    }
}

impl Server {
    pub fn start(args: &[&str]) -> Self {
        let (child, address) = listening(selkie().args(["serve", "--port", "0", "--backend", "cpu"]).args(args));
        let server = Self { child, address };
        server.until("it is ready", || server.get("/health").status == 200);
        server
    }

    /// Waits for something that happens soon.
    pub fn until(&self, what: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < end, "{what}: not within 20 s");
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends bytes and reads until the server closes.
    pub fn send(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(bytes);
        receive(stream)
    }

    /// Sends a request and returns the connection.
    pub fn open(&self, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n", self.address);
        let head = format!("{head}Connection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    pub fn post_with(&self, path: &str, headers: &str, body: &str) -> Answer {
        receive(self.open(path, headers, body))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, "", &body.to_string())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address).as_bytes())
    }

    /// A line of `/metrics`, by its beginning.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let answer = self.get("/metrics");
        let line = answer.text().lines().find(|l| l.starts_with(&format!("{name}{{")) && l.contains(label));
        let line = line.unwrap_or_else(|| panic!("no {name} with {label}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Sends a signal.
    #[cfg(unix)]
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
    }
}

pub fn receive(mut stream: TcpStream) -> Answer {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").expect("an answer has a head");
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut answer = Answer { status, head, body: all[end + 4..].to_vec() };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = unchunked(&answer.body);
    }
    answer
}

/// The content of complete chunks.
fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        let Some(chunk) = rest.get(end + 2..end + 2 + length) else { break };
        all.extend_from_slice(chunk);
        rest = rest.get(end + 4 + length..).unwrap_or_default();
    }
    all
}
