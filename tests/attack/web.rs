//! `web`: idle connections do not keep others out.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use crate::binary::*;

/// More than the server's places.
const CROWD: usize = 80;

struct Site {
    _dir: TempDir,
    child: Child,
    address: SocketAddr,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Site {
    /// A page, a file of 20 MB and, where the system has them, a pipe without a writer.
    fn start(name: &str) -> Self {
        let dir = TempDir::new(name);
        dir.write("index.html", "x");
        fs::File::create(dir.path("big")).unwrap().set_len(20 << 20).unwrap();
        #[cfg(unix)]
        assert!(std::process::Command::new("mkfifo").arg(dir.path("pipe")).status().unwrap().success());
        let (child, address) = listening(selkie().args(["web", "--port", "0", "--dir", dir.dir()]));
        Self { _dir: dir, child, address }
    }

    fn ask(&self, target: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// How long the page takes.
    fn page(&self) -> Duration {
        let start = Instant::now();
        let mut head = [0; 12];
        self.ask("/").read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        start.elapsed()
    }
}

#[test]
fn connections_that_say_nothing_lose_their_places() {
    let site = Site::start("attack_web_idle");
    let idle: Vec<TcpStream> = (0..CROWD).map(|_| TcpStream::connect(site.address).unwrap()).collect();
    let took = site.page();
    assert!(took < Duration::from_secs(8), "{took:?}");
    drop(idle);
}

#[test]
fn slow_readers_lose_their_places() {
    let site = Site::start("attack_web_slow");
    let mut slow: Vec<TcpStream> = (0..CROWD).map(|_| site.ask("/big")).collect();
    // Each reads a little now and then, so that no single write waits for long.
    let reader = thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(15);
        while Instant::now() < end && slow.len() > 20 {
            thread::sleep(Duration::from_millis(500));
            slow.retain_mut(|s| matches!(s.read(&mut [0; 1500]), Ok(1..)));
        }
    });
    thread::sleep(Duration::from_secs(1));
    let took = site.page();
    assert!(took < Duration::from_secs(12), "{took:?}");
    reader.join().unwrap();
}

/// More connections than places: the others wait.
#[test]
fn a_burst_is_answered_completely() {
    let site = Site::start("attack_web_burst");
    let burst: Vec<TcpStream> = (0..2 * CROWD).map(|_| site.ask("/")).collect();
    for mut stream in burst {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"x"));
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_in_the_folder_is_no_file() {
    let site = Site::start("attack_web_pipe");
    let mut answer = Vec::new();
    site.ask("/pipe").read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 404"));
}
