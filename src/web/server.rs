//! Connections: each has a thread, time limits, and ends after one answer.
//!
//! A connection takes one of a fixed number of places. Those beyond wait in the backlog of the socket; while one waits,
//! whoever makes no use of a place loses it.

use std::{
    io::{self, BufReader, Read, Seek, SeekFrom, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    files::Site,
    http::{MAX_HEAD, Refusal, Request, Unsatisfiable},
};

/// Connections at a time; a browser opens six.
const MAX_CONNECTIONS: usize = 64;
/// How long a request may take to arrive.
const READ_TIME: Duration = Duration::from_secs(10);
/// The same while others wait for a place.
const CROWDED_READ_TIME: Duration = Duration::from_secs(2);
/// How long an answer may take, beside [`MIN_RATE`].
const WRITE_TIME: Duration = Duration::from_secs(30);
/// The same while others wait for a place.
const CROWDED_WRITE_TIME: Duration = Duration::from_secs(3);
/// Bytes in a second at which the other side must take an answer.
const MIN_RATE: u64 = 32 << 10;
/// The same while others wait for a place.
const CROWDED_MIN_RATE: u64 = 1 << 20;
/// How often the limits are looked at.
const TICK: Duration = Duration::from_millis(250);
/// Bytes of a file that are sent at once.
const PIECE: usize = 64 << 10;
/// The headers of every answer: the page may load nothing from elsewhere, except models from servers that the user names.
const HEADERS: &str = "Connection: close\r\n\
    Cache-Control: no-cache\r\n\
    Accept-Ranges: bytes\r\n\
    X-Content-Type-Options: nosniff\r\n\
    Referrer-Policy: no-referrer\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n\
    Content-Security-Policy: default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; \
    connect-src 'self' https: http://localhost:*; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n";

/// The places that connections take.
#[derive(Default)]
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
    /// Somebody waits for one.
    crowded: AtomicBool,
}

impl Places {
    /// Takes a place, once there is one.
    fn take(&self) -> Place<'_> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken >= MAX_CONNECTIONS {
            self.crowded.store(true, Ordering::Relaxed);
            taken = self.freed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        self.crowded.store(false, Ordering::Relaxed);
        *taken += 1;
        Place(self)
    }

    fn crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }
}

/// One place, free again when this is dropped.
struct Place<'a>(&'a Places);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

/// Answers connections forever.
pub fn serve(listener: &TcpListener, site: &Site) -> ! {
    let port = listener.local_addr().map_or(0, |address| address.port());
    let places = Places::default();
    thread::scope(|scope| {
        loop {
            // Errors here are those of single connections, or a lack of file descriptors, which passes.
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            let place = places.take();
            let connection = move || {
                if let Err(e) = answer(&stream, site, port, place.0) {
                    tracing::debug!("connection: {e}");
                }
                drop(place);
            };
            // Without a thread the connection is closed and its place is free again.
            let _ = thread::Builder::new().spawn_scoped(scope, connection);
        }
    })
}

fn answer(mut stream: &TcpStream, site: &Site, port: u16, places: &Places) -> io::Result<()> {
    stream.set_write_timeout(Some(TICK))?;
    match receive(stream, port, places)? {
        Ok(request) => {
            let mut out = Paced { stream, places, start: Instant::now(), sent: 0 };
            let status = send(&mut out, site, &request)?;
            tracing::info!("{status} {:?}", request.target);
        }
        Err((status, why)) => {
            tracing::info!("{status} {why}");
            let allow = if status == 405 { "Allow: GET, HEAD\r\n" } else { "" };
            let mut out = Paced { stream, places, start: Instant::now(), sent: 0 };
            refuse(&mut out, status, why, allow, false)?;
        }
    }
    // Closing with something unread would reset the connection, and the answer with it.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(TICK))?;
    let (mut rest, end) = ([0; 4096], Instant::now() + Duration::from_secs(1));
    while Instant::now() < end && !matches!(stream.read(&mut rest), Ok(0) | Err(_)) {}
    Ok(())
}

/// Sends as fast as the other side takes it, which must not be too slow.
struct Paced<'a> {
    stream: &'a TcpStream,
    places: &'a Places,
    start: Instant,
    sent: u64,
}

impl Paced<'_> {
    fn is_late(&self) -> bool {
        let (time, rate) =
            if self.places.crowded() { (CROWDED_WRITE_TIME, CROWDED_MIN_RATE) } else { (WRITE_TIME, MIN_RATE) };
        self.start.elapsed() > time + Duration::from_secs(self.sent / rate)
    }
}

impl Write for Paced<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            match self.stream.write(buf) {
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Ok(n) if !self.is_late() => {
                    self.sent += n as u64;
                    return Ok(n);
                }
                Ok(_) => return Err(io::ErrorKind::TimedOut.into()),
                failed => return failed,
            }
            if self.is_late() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the head of a request, within [`READ_TIME`] altogether.
fn receive(mut stream: &TcpStream, port: u16, places: &Places) -> io::Result<Result<Request, Refusal>> {
    let start = Instant::now();
    let mut head = Vec::new();
    let mut part = [0; 2048];
    stream.set_read_timeout(Some(TICK))?;
    loop {
        let time = if places.crowded() { CROWDED_READ_TIME } else { READ_TIME };
        if start.elapsed() > time {
            return Ok(Err((408, "The request did not arrive in time.")));
        }
        let count = match stream.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count.min(MAX_HEAD - head.len()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => continue,
            Err(e) => return Err(e),
        };
        head.extend_from_slice(&part[..count]);
        match Request::parse(&head, port) {
            Ok(None) => {}
            Ok(Some(request)) => return Ok(Ok(request)),
            Err(refusal) => return Ok(Err(refusal)),
        }
    }
}

/// Sends the file that was asked for; returns the status.
fn send(out: &mut Paced, site: &Site, request: &Request) -> io::Result<u16> {
    let Some(mut found) = site.find(&request.target) else {
        return refuse(out, 404, "There is no such file.", "", request.head);
    };
    let (len, mime, etag) = (found.len, found.mime, &found.etag);
    if request.has(etag) {
        write!(out, "HTTP/1.1 304 Not Modified\r\n{HEADERS}ETag: {etag}\r\n\r\n")?;
        return Ok(304);
    }
    let (status, range) = match request.range(len, etag) {
        Ok(None) => ("200 OK", 0..len),
        Ok(Some(range)) => ("206 Partial Content", range),
        Err(Unsatisfiable) => {
            let extra = format!("Content-Range: bytes */{len}\r\n");
            return refuse(out, 416, "The file is shorter than that.", &extra, request.head);
        }
    };
    let bytes = range.end - range.start;
    let mut head =
        format!("HTTP/1.1 {status}\r\n{HEADERS}Content-Type: {mime}\r\nETag: {etag}\r\nContent-Length: {bytes}\r\n");
    if status.starts_with("206") {
        head += &format!("Content-Range: bytes {}-{}/{len}\r\n", range.start, range.end - 1);
    }
    out.write_all((head + "\r\n").as_bytes())?;
    if !request.head {
        found.file.seek(SeekFrom::Start(range.start))?;
        io::copy(&mut BufReader::with_capacity(PIECE, found.file.take(bytes)), out)?;
    }
    Ok(if status.starts_with("206") { 206 } else { 200 })
}

fn refuse(out: &mut Paced, status: u16, why: &str, extra: &str, head: bool) -> io::Result<u16> {
    let reason = match status {
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        416 => "Range Not Satisfiable",
        _ => "Request Header Fields Too Large",
    };
    let body = if head { String::new() } else { format!("{why}\n") };
    let length = why.len() + 1;
    let text = format!(
        "HTTP/1.1 {status} {reason}\r\n{HEADERS}{extra}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    out.write_all(text.as_bytes())?;
    Ok(status)
}
