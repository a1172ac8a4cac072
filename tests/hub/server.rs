//! A server that speaks the hub's protocol, and can misbehave.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

use ring::digest;
use serde_json::{Value, json};

/// A request that came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// GET or HEAD.
    pub method: String,
    /// With the query.
    pub path: String,
    /// The bytes asked for.
    pub range: Option<Range<usize>>,
    /// The value of `Authorization`.
    pub token: Option<String>,
    /// Whether it came to the storage and not to the hub.
    pub at_storage: bool,
}

/// A file of a repository.
#[derive(Clone)]
pub struct File {
    pub bytes: Vec<u8>,
    /// Whether it is in large-file storage, where its etag is its sha256.
    pub large: bool,
}

/// How the server behaves.
#[derive(Clone, Default)]
pub struct Behaviour {
    /// Name, revision and file to content.
    pub files: BTreeMap<(String, String, String), File>,
    /// Sends the large files from another address.
    pub storage: bool,
    /// Answers with this status and error code unless the token is right.
    pub token: Option<(String, u16, &'static str)>,
    /// So many answers for large files break after so many bytes.
    pub cuts: (usize, usize),
    /// Answers for large files stop after so many bytes and never go on.
    pub stall: Option<usize>,
    /// Knows no ranges.
    pub whole: bool,
    /// Lists neither sizes nor etags.
    pub bare_list: bool,
    /// Sends other bytes for large files than it lists.
    pub corrupt: bool,
    /// Lists this size for large files.
    pub claims: Option<u64>,
    /// Answers so many requests with 503 first.
    pub busy: usize,
    /// Old names and their new ones.
    pub renamed: BTreeMap<String, String>,
    /// After the next list, large files are these bytes.
    pub changes: Option<Vec<u8>>,
    /// Has only the newest content of a file, whatever commit is asked for.
    pub any_commit: bool,
}

/// The server; its threads end with the process.
pub struct Server {
    port: u16,
    storage_port: u16,
    behaviour: Arc<Mutex<Behaviour>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    pub fn start(behaviour: Behaviour) -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, storage) = (listen(), listen());
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let (port, storage_port) = (port(&hub), port(&storage));
        let server = Self { port, storage_port, behaviour: Arc::new(Mutex::new(behaviour)), seen: Arc::default() };
        for (listener, at_storage) in [(hub, false), (storage, true)] {
            let (behaviour, seen) = (server.behaviour.clone(), server.seen.clone());
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let work =
                        Connection { behaviour: behaviour.clone(), seen: seen.clone(), at_storage, storage_port };
                    thread::spawn(move || work.run(stream));
                }
            });
        }
        server
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The host that large files come from, if it is another one.
    pub fn storage_host(&self) -> String {
        format!("127.0.0.1:{}", self.storage_port)
    }

    /// Changes how it behaves from now on.
    pub fn set(&self) -> MutexGuard<'_, Behaviour> {
        self.behaviour.lock().unwrap()
    }

    /// The requests since the last call, oldest first.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

/// The etag of a file: of small ones the hash of a git blob.
pub fn etag(file: &File) -> String {
    let sum = if file.large {
        digest::digest(&digest::SHA256, &file.bytes)
    } else {
        let blob = [format!("blob {}\0", file.bytes.len()).as_bytes(), &file.bytes].concat();
        digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &blob)
    };
    sum.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// The commit of a revision: a hash of its files.
pub fn commit(behaviour: &Behaviour, name: &str, revision: &str) -> Option<String> {
    let files = behaviour.files.iter().filter(|((n, r, _), _)| n == name && r == revision);
    let all: Vec<String> = files.map(|((_, _, path), file)| format!("{path} {}\n", etag(file))).collect();
    let sum = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, all.concat().as_bytes());
    (!all.is_empty()).then(|| sum.as_ref().iter().map(|b| format!("{b:02x}")).collect())
}

struct Connection {
    behaviour: Arc<Mutex<Behaviour>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    at_storage: bool,
    storage_port: u16,
}

impl Connection {
    fn run(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        while let Some(request) = self.read(&mut lines) {
            self.seen.lock().unwrap().push(request.clone());
            if self.answer(&request, &mut &stream).is_none() {
                break;
            }
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }

    fn read(&self, lines: &mut impl BufRead) -> Option<Seen> {
        let mut line = String::new();
        lines.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let mut words = line.split(' ');
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut seen = Seen { method, path, range: None, token: None, at_storage: self.at_storage };
        loop {
            let mut line = String::new();
            lines.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim().split_once(": ") else { return Some(seen) };
            match &*name.to_lowercase() {
                "range" => {
                    let (start, end) = value.strip_prefix("bytes=")?.split_once('-')?;
                    seen.range = Some(start.parse().ok()?..end.parse::<usize>().ok()? + 1);
                }
                "authorization" => seen.token = Some(value.into()),
                _ => {}
            }
        }
    }

    /// `None` ends the connection.
    fn answer(&self, request: &Seen, out: &mut impl Write) -> Option<()> {
        let mut behaviour = self.behaviour.lock().unwrap();
        if behaviour.busy > 0 {
            behaviour.busy -= 1;
            return reply(out, "503 Busy", "", b"");
        }
        let path = request.path.split('?').next()?;
        if !self.at_storage
            && let Some((token, status, code)) = &behaviour.token
            && request.token.as_deref() != Some(&*format!("Bearer {token}"))
        {
            return reply(out, &format!("{status} Refused"), &format!("X-Error-Code: {code}\r\n"), b"");
        }
        if let Some(rest) = path.strip_prefix("/api/models/") {
            let (name, revision) = rest.split_once("/revision/")?;
            if let Some(new) = behaviour.renamed.get(name) {
                let location = format!("Location: /api/models/{new}/revision/{revision}?blobs=true\r\n");
                return reply(out, "307 Moved", &location, b"");
            }
            let list = list(&behaviour, name, &revision.replace("%2F", "/"));
            if let Some(bytes) = behaviour.changes.take() {
                behaviour.files.values_mut().filter(|f| f.large).for_each(|f| f.bytes = bytes.clone());
            }
            return match list {
                Some(list) => reply(out, "200 OK", "Content-Type: application/json\r\n", list.to_string().as_bytes()),
                None if behaviour.files.keys().any(|(n, ..)| n == name) => {
                    reply(out, "404 Not Found", "X-Error-Code: RevisionNotFound\r\n", b"")
                }
                None => reply(out, "401 Unauthorized", "X-Error-Code: RepoNotFound\r\n", b""),
            };
        }
        let (name, rest) = path[1..].split_once("/resolve/")?;
        let (wanted, file_name) = rest.split_once('/')?;
        let name = behaviour.renamed.get(name).cloned().unwrap_or_else(|| name.to_owned());
        let found = behaviour.files.iter().find(|((n, r, f), _)| {
            *n == name
                && f == file_name
                && (behaviour.any_commit || commit(&behaviour, n, r).as_deref() == Some(wanted))
        });
        let Some((_, file)) = found else {
            return reply(out, "404 Not Found", "X-Error-Code: EntryNotFound\r\n", b"");
        };
        let file = file.clone();
        let mut head = match file.large {
            true => format!("X-Linked-Etag: \"{}\"\r\nX-Linked-Size: {}\r\n", etag(&file), file.bytes.len()),
            false => format!("ETag: \"{}\"\r\n", etag(&file)),
        };
        if file.large && behaviour.storage && !self.at_storage {
            head += &format!("Location: http://127.0.0.1:{}{path}?signature=1\r\n", self.storage_port);
            return reply(out, "302 Found", &head, b"");
        }
        self.send(request, behaviour, file, head, out)
    }

    fn send(
        &self,
        request: &Seen,
        mut behaviour: MutexGuard<'_, Behaviour>,
        mut file: File,
        mut head: String,
        out: &mut impl Write,
    ) -> Option<()> {
        if behaviour.corrupt && file.large {
            file.bytes.reverse();
        }
        let size = file.bytes.len();
        let range = request.range.clone().filter(|_| !behaviour.whole);
        let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
        let range = range.map_or(0..size, |r| r.start..r.end.min(size));
        if status.starts_with("206") {
            head += &format!("Content-Range: bytes {}-{}/{size}\r\n", range.start, range.end - 1);
        }
        let bytes = &file.bytes[range];
        if request.method == "HEAD" {
            write!(out, "HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\n\r\n", bytes.len()).ok()?;
            return Some(());
        }
        let stall = behaviour.stall.filter(|_| file.large);
        let cut = (file.large && behaviour.cuts.0 > 0).then(|| {
            behaviour.cuts.0 -= 1;
            behaviour.cuts.1
        });
        drop(behaviour);
        let most = stall.or(cut).unwrap_or(usize::MAX).min(bytes.len());
        write!(out, "HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\n\r\n", bytes.len()).ok()?;
        out.write_all(&bytes[..most]).ok()?;
        if stall.is_some() {
            loop {
                thread::park();
            }
        }
        cut.is_none().then_some(())
    }
}

fn list(behaviour: &Behaviour, name: &str, revision: &str) -> Option<Value> {
    let of = |((n, r, _), _): &(&(String, String, String), &File)| n == name && r == revision;
    let files: Vec<Value> = behaviour
        .files
        .iter()
        .filter(of)
        .map(|((_, _, path), file)| match (behaviour.bare_list, file.large) {
            (true, _) => json!({ "rfilename": path }),
            (_, false) => json!({ "rfilename": path, "size": file.bytes.len(), "blobId": etag(file) }),
            (_, true) => {
                let size = behaviour.claims.unwrap_or(file.bytes.len() as u64);
                let large = json!({ "sha256": etag(file), "size": size, "pointerSize": 130 });
                json!({ "rfilename": path, "size": size, "blobId": "0".repeat(40), "lfs": large })
            }
        })
        .collect();
    let commit = commit(behaviour, name, revision)?;
    Some(json!({ "id": name, "sha": commit, "private": false, "gated": false, "siblings": files }))
}

fn reply(out: &mut impl Write, status: &str, head: &str, body: &[u8]) -> Option<()> {
    write!(out, "HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\n\r\n", body.len()).ok()?;
    out.write_all(body).ok()
}
