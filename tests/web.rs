//! `selkie web` over raw sockets: it serves the files of one folder to this machine and nothing else.

mod binary;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use binary::*;

struct Site {
    dir: TempDir,
    child: Child,
    address: SocketAddr,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|l| l.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        Some(line[name.len() + 1..].trim())
    }
}

impl Site {
    /// A folder `site` with a few files, and next to it a file that is not served.
    fn start(name: &str) -> Self {
        let dir = TempDir::new(name);
        let site = dir.path("site");
        std::fs::create_dir_all(site.join("js")).unwrap();
        std::fs::create_dir_all(site.join(".git")).unwrap();
        std::fs::write(site.join("index.html"), "<!doctype html>start").unwrap();
        std::fs::write(site.join("js/app.js"), "let x = 1;").unwrap();
        std::fs::write(site.join("selkie.wasm"), b"\0asm").unwrap();
        std::fs::write(site.join(".git/config"), "secret").unwrap();
        std::fs::write(site.join("data.bin"), (0..100).collect::<Vec<u8>>()).unwrap();
        dir.write("secret.txt", "secret");
        let (child, address) = listening(selkie().args(["web", "--port", "0", "--dir", site.to_str().unwrap()]));
        Self { dir, child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn send(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(bytes).unwrap();
        receive(stream)
    }

    fn ask(&self, method: &str, target: &str, headers: &str) -> Answer {
        self.send(format!("{method} {target} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n", self.address).as_bytes())
    }

    fn get(&self, target: &str) -> Answer {
        self.ask("GET", target, "")
    }
}

fn receive(mut stream: TcpStream) -> Answer {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").expect("an answer has a head");
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head, body: all[end + 4..].to_vec() }
}

#[test]
fn files_with_their_types() {
    let site = Site::start("web-files");
    for (target, mime, body) in [
        ("/", "text/html; charset=utf-8", &b"<!doctype html>start"[..]),
        ("/index.html?v=1", "text/html; charset=utf-8", b"<!doctype html>start"),
        ("/js/app.js", "text/javascript; charset=utf-8", b"let x = 1;"),
        ("/%73elkie.wasm", "application/wasm", b"\0asm"),
    ] {
        let answer = site.get(target);
        assert_eq!((answer.status, &*answer.body), (200, body), "{target}");
        assert_eq!(answer.header("content-type"), Some(mime));
        assert_eq!(answer.header("content-length"), Some(&*body.len().to_string()));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        let policy = answer.header("content-security-policy").unwrap();
        assert!(policy.contains("script-src 'self' 'wasm-unsafe-eval'"), "{policy}");
        assert_eq!(answer.header("access-control-allow-origin"), None);
        let head = site.ask("HEAD", target, "");
        assert_eq!(
            (head.status, head.body.len(), head.header("content-length")),
            (200, 0, answer.header("content-length"))
        );
    }
    for target in ["/nothing", "/js", "/js/", "/index.html/"] {
        assert_eq!(site.get(target).status, 404, "{target}");
        assert_eq!(site.ask("HEAD", target, "").body, b"");
    }
}

#[test]
fn nothing_outside_the_folder() {
    let site = Site::start("web-escape");
    for target in [
        "/../secret.txt",
        "/js/../../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/.%2e/secret.txt",
        "/%2e%2e%2fsecret.txt",
        "/..\\secret.txt",
        "/..%5csecret.txt",
        "//etc/passwd",
        "/%2fetc/passwd",
        "/etc/passwd",
        "/js/..%00/../secret.txt",
        "/.git/config",
        "/%252e%252e/secret.txt",
        "/%c0%ae%c0%ae/secret.txt",
        "/C:/secret.txt",
    ] {
        let answer = site.get(target);
        assert_eq!(answer.status, 404, "{target}");
        assert!(!String::from_utf8_lossy(&answer.body).contains("secret"), "{target}");
    }
    let whole = format!("http://{}/index.html", site.address);
    for target in ["../secret.txt", "*", &whole] {
        assert_eq!(site.get(target).status, 400, "{target}");
    }
}

#[cfg(unix)]
#[test]
fn links_may_not_lead_out() {
    use std::os::unix::fs::symlink;
    let site = Site::start("web-links");
    symlink(site.dir.path("secret.txt"), site.dir.path("site/out.txt")).unwrap();
    symlink("/etc", site.dir.path("site/etc")).unwrap();
    symlink("js/app.js", site.dir.path("site/in.js")).unwrap();
    assert_eq!(site.get("/out.txt").status, 404);
    assert_eq!(site.get("/etc/passwd").status, 404);
    assert_eq!(site.get("/in.js").body, b"let x = 1;");
}

#[test]
fn other_hosts_and_methods_are_refused() {
    let site = Site::start("web-hosts");
    let port = site.address.port();
    let with = |host: &str| site.send(format!("GET / HTTP/1.1\r\n{host}\r\n\r\n").as_bytes()).status;
    assert_eq!(with(&format!("Host: localhost:{port}")), 200);
    assert_eq!(with(&format!("host:   LOCALHOST:{port}  ")), 200);
    for host in [
        "X: y".to_owned(),
        "Host:".to_owned(),
        "Host: localhost".to_owned(),
        format!("Host: evil.example:{port}"),
        format!("Host: localhost.evil.example:{port}"),
        format!("Host: localhost:{port}\r\nHost: evil.example:{port}"),
    ] {
        assert_eq!(with(&host), 403, "{host}");
    }
    let post = site.ask("POST", "/", "Content-Length: 100000\r\n");
    assert_eq!((post.status, post.header("allow")), (405, Some("GET, HEAD")));
    for method in ["PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get"] {
        assert_eq!(site.ask(method, "/", "").status, 405, "{method}");
    }
    // The server answers even if it does not read the request's body.
    let body = [format!("POST / HTTP/1.1\r\nHost: {}\r\n\r\n", site.address).as_bytes(), &[b'x'; 50_000]].concat();
    assert_eq!(site.send(&body).status, 405);
}

#[test]
fn ranges_and_versions() {
    let site = Site::start("web-ranges");
    let whole = site.get("/data.bin");
    let etag = whole.header("etag").unwrap().to_owned();
    assert_eq!(whole.header("accept-ranges"), Some("bytes"));
    for (range, first, last) in [("0-0", 0, 0), ("10-19", 10, 19), ("90-", 90, 99), ("90-1000", 90, 99), ("-5", 95, 99)]
    {
        let part = site.ask("GET", "/data.bin", &format!("Range: bytes={range}\r\n"));
        assert_eq!(part.status, 206, "{range}");
        assert_eq!(part.header("content-range"), Some(&*format!("bytes {first}-{last}/100")));
        assert_eq!(part.body, (first..=last).collect::<Vec<u8>>());
    }
    let behind = site.ask("GET", "/data.bin", "Range: bytes=100-\r\n");
    assert_eq!((behind.status, behind.header("content-range")), (416, Some("bytes */100")));
    for other in ["bytes=5-1", "bytes=0-1,5-6", "lines=1-2"] {
        assert_eq!(site.ask("GET", "/data.bin", &format!("Range: {other}\r\n")).body.len(), 100, "{other}");
    }
    let again = site.ask("GET", "/data.bin", &format!("If-None-Match: {etag}\r\n"));
    assert_eq!((again.status, again.body.len()), (304, 0));
    assert_eq!(site.ask("GET", "/data.bin", "Range: bytes=0-0\r\nIf-Range: \"old\"\r\n").status, 200);
    std::fs::write(site.dir.path("site/data.bin"), b"changed").unwrap();
    assert_eq!(site.ask("GET", "/data.bin", &format!("If-None-Match: {etag}\r\n")).body, b"changed");
}

#[test]
fn malformed_and_endless_requests() {
    let site = Site::start("web-malformed");
    for bytes in
        [&b"\x16\x03\x01\x00\xa5\x01\x00"[..], b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"\0\0\0\0"]
    {
        assert_eq!(site.send(bytes).status, 400, "{bytes:?}");
    }
    let long = format!("GET / HTTP/1.1\r\nHost: {}\r\nX: {}", site.address, "x".repeat(100_000));
    assert_eq!(site.send(long.as_bytes()).status, 431);
    assert_eq!(site.get(&format!("/{}", "x".repeat(10_000))).status, 404);
    // A client that connects and leaves without a request does no harm.
    drop(site.connect());
    assert_eq!(site.get("/").status, 200);
}

#[test]
fn slow_clients_wait_alone() {
    let site = Site::start("web-slow");
    let mut slow: Vec<TcpStream> = (0..20).map(|_| site.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"GET / HT").unwrap();
    }
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(site.get("/").status, 200);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // They are answered too as soon as they complete their requests.
    let mut last = slow.pop().unwrap();
    thread::sleep(Duration::from_millis(50));
    last.write_all(format!("TP/1.1\r\nHost: {}\r\n\r\n", site.address).as_bytes()).unwrap();
    assert_eq!(receive(last).status, 200);
}

#[test]
fn without_a_page_it_says_how_to_make_one() {
    let dir = TempDir::new("web-nothing");
    let out = run(&["web", "--dir", dir.dir()]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("web/build"), "{}", stderr(&out));
    let out = run(&["web", "--dir", "/no/such/folder"]);
    assert!(stderr(&out).contains("/no/such/folder"), "{}", stderr(&out));
}

#[test]
fn a_port_that_is_taken_is_named() {
    let site = Site::start("web-port");
    let port = site.address.port().to_string();
    let out = run(&["web", "--port", &port, "--dir", &site.dir.arg("site")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains(&port) && stderr(&out).contains("--port"), "{}", stderr(&out));
}
