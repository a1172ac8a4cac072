//! Connections: each has a thread, a time limit, and ends after one answer.

use std::{
    io::{self, Read, Seek, SeekFrom, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
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
/// How long the other side may take nothing of an answer.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// The headers of every answer: the page may load nothing from elsewhere, except models from servers that the user names.
const HEADERS: &str = "Connection: close\r\n\
    Cache-Control: no-cache\r\n\
    Accept-Ranges: bytes\r\n\
    X-Content-Type-Options: nosniff\r\n\
    Referrer-Policy: no-referrer\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n\
    Content-Security-Policy: default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; \
    connect-src 'self' https: http://localhost:*; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n";

/// Answers connections forever.
pub fn serve(listener: &TcpListener, site: &Site) -> ! {
    let port = listener.local_addr().map_or(0, |address| address.port());
    let open = AtomicUsize::new(0);
    thread::scope(|scope| {
        loop {
            // Errors here are those of single connections, or a lack of file descriptors, which passes.
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let open = &open;
            let connection = move || {
                if let Err(e) = answer(&stream, site, port) {
                    tracing::debug!("connection: {e}");
                }
                open.fetch_sub(1, Ordering::Relaxed);
            };
            if thread::Builder::new().spawn_scoped(scope, connection).is_err() {
                open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    })
}

fn answer(mut stream: &TcpStream, site: &Site, port: u16) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIME))?;
    match receive(stream, port)? {
        Ok(request) => {
            let status = send(stream, site, &request)?;
            tracing::info!("{status} {:?}", request.target);
        }
        Err((status, why)) => {
            tracing::info!("{status} {why}");
            let allow = if status == 405 { "Allow: GET, HEAD\r\n" } else { "" };
            refuse(stream, status, why, allow, false)?;
        }
    }
    // Closing with something unread would reset the connection, and the answer with it.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut rest = [0; 4096];
    for _ in 0..64 {
        if matches!(stream.read(&mut rest), Ok(0) | Err(_)) {
            break;
        }
    }
    Ok(())
}

/// Reads the head of a request, within [`READ_TIME`] altogether.
fn receive(mut stream: &TcpStream, port: u16) -> io::Result<Result<Request, Refusal>> {
    let start = Instant::now();
    let mut head = Vec::new();
    let mut part = [0; 2048];
    loop {
        let left = READ_TIME.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(Err((408, "The request did not arrive in time.")));
        }
        stream.set_read_timeout(Some(left))?;
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
fn send(mut stream: &TcpStream, site: &Site, request: &Request) -> io::Result<u16> {
    let Some(mut found) = site.find(&request.target) else {
        return refuse(stream, 404, "There is no such file.", "", request.head);
    };
    let (len, mime, etag) = (found.len, found.mime, &found.etag);
    if request.has(etag) {
        write!(stream, "HTTP/1.1 304 Not Modified\r\n{HEADERS}ETag: {etag}\r\n\r\n")?;
        return Ok(304);
    }
    let (status, range) = match request.range(len, etag) {
        Ok(None) => ("200 OK", 0..len),
        Ok(Some(range)) => ("206 Partial Content", range),
        Err(Unsatisfiable) => {
            let extra = format!("Content-Range: bytes */{len}\r\n");
            return refuse(stream, 416, "The file is shorter than that.", &extra, request.head);
        }
    };
    let bytes = range.end - range.start;
    let mut head =
        format!("HTTP/1.1 {status}\r\n{HEADERS}Content-Type: {mime}\r\nETag: {etag}\r\nContent-Length: {bytes}\r\n");
    if status.starts_with("206") {
        head += &format!("Content-Range: bytes {}-{}/{len}\r\n", range.start, range.end - 1);
    }
    stream.write_all((head + "\r\n").as_bytes())?;
    if !request.head {
        found.file.seek(SeekFrom::Start(range.start))?;
        io::copy(&mut found.file.take(bytes), &mut stream)?;
    }
    Ok(if status.starts_with("206") { 206 } else { 200 })
}

fn refuse(mut stream: &TcpStream, status: u16, why: &str, extra: &str, head: bool) -> io::Result<u16> {
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
    stream.write_all(text.as_bytes())?;
    Ok(status)
}
