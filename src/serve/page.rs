//! The browser page: files of a [`Site`], whole, in ranges and by version.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header},
};
use http_body::Frame;

use super::{app::App, info};
use crate::web::files::{Body as Content, Found, Site};

/// Bytes of a file per write.
const PIECE: u64 = 64 << 10;
/// The page may load nothing from elsewhere, except models from servers that the user names.
const POLICY: &str = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; \
    connect-src 'self' https: http://localhost:*; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const HEADERS: [(HeaderName, &str); 5] = [
    (header::CACHE_CONTROL, "no-cache"),
    (header::ACCEPT_RANGES, "bytes"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CONTENT_SECURITY_POLICY, POLICY),
];

/// Any path without a handler: a file of the page if there is one.
pub async fn find(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    match &app.site {
        Some(site) if app.names.is_empty() || is_read(&request) => {
            // By this query the page knows that the server has a model, which it then begins with.
            if !app.names.is_empty() && request.uri() == "/" {
                let mut response = response(307, Body::empty());
                set(&mut response, header::LOCATION, "/?server");
                return response;
            }
            let response = answer(site, &request);
            // With a model, the clients of its protocols expect errors in their form.
            if response.status() == StatusCode::NOT_FOUND && !app.names.is_empty() {
                return info::unknown(request).await;
            }
            response
        }
        _ => info::unknown(request).await,
    }
}

fn is_read(request: &Request) -> bool {
    [Method::GET, Method::HEAD].contains(request.method())
}

fn answer(site: &Site, request: &Request) -> Response<Body> {
    if !is_read(request) {
        let mut response = refuse(405, "Only GET and HEAD are served here.");
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    if request.uri().authority().is_some() || !target.starts_with('/') {
        return refuse(400, "The request names no path.");
    }
    // Opening a file takes a moment.
    let Some(found) = tokio::task::block_in_place(|| site.find(target)) else {
        return refuse(404, "There is no such file.");
    };
    let asked = Asked::of(request.headers());
    if asked.has(&found.etag) {
        let mut response = response(304, Body::empty());
        set(&mut response, header::ETAG, &found.etag);
        return response;
    }
    let (status, range) = match asked.range(found.len, &found.etag) {
        Ok(None) => (200, 0..found.len),
        Ok(Some(range)) => (206, range),
        Err(Unsatisfiable) => {
            let mut response = refuse(416, "The file is shorter than that.");
            set(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", found.len));
            return response;
        }
    };
    send(found, status, range, request.method() == Method::HEAD)
}

fn send(found: Found, status: u16, range: Range<u64>, head: bool) -> Response<Body> {
    let Found { body, len, etag, mime } = found;
    let bytes = range.end - range.start;
    let body = match body {
        _ if head => Body::empty(),
        Content::Bytes(all) => Body::from(&all[range.start as usize..range.end as usize]),
        Content::File(mut file) => match file.seek(SeekFrom::Start(range.start)) {
            Ok(_) => Body::new(Pieces::new(file, bytes, None)),
            Err(_) => return refuse(404, "There is no such file."),
        },
    };
    let mut response = response(status, body);
    set(&mut response, header::CONTENT_TYPE, mime);
    set(&mut response, header::ETAG, &etag);
    set(&mut response, header::CONTENT_LENGTH, &bytes.to_string());
    if status == 206 {
        set(&mut response, header::CONTENT_RANGE, &format!("bytes {}-{}/{len}", range.start, range.end - 1));
    }
    response
}

fn response(status: u16, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).expect("a constant");
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn refuse(status: u16, why: &'static str) -> Response<Body> {
    let mut response = response(status, Body::from(format!("{why}\n")));
    set(&mut response, header::CONTENT_TYPE, "text/plain; charset=utf-8");
    response
}

fn set(response: &mut Response<Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// A part of a file, read as it is sent.
pub struct Pieces {
    file: File,
    left: u64,
    /// What is held until it was sent.
    _held: Option<Box<dyn Send>>,
}

impl Pieces {
    /// The next `left` bytes; `held` is dropped after them.
    pub fn new(file: File, left: u64, held: Option<Box<dyn Send>>) -> Self {
        Self { file, left, _held: held }
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let mut piece = vec![0; self.left.min(PIECE) as usize];
        Poll::Ready(Some(tokio::task::block_in_place(|| self.file.read(&mut piece)).and_then(|count| {
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            piece.truncate(count);
            self.left -= count as u64;
            Ok(Frame::data(piece.into()))
        })))
    }
}

/// What a request wants of a file.
#[derive(Debug, Default)]
struct Asked {
    range: Option<String>,
    if_range: Option<String>,
    if_none_match: Option<String>,
}

/// A range that begins after the end.
#[derive(Debug, PartialEq, Eq)]
struct Unsatisfiable;

impl Asked {
    fn of(headers: &HeaderMap) -> Self {
        let value = |name| headers.get(name).and_then(|v| v.to_str().ok()).map(|v| v.trim().to_owned());
        Self {
            range: value(header::RANGE),
            if_range: value(header::IF_RANGE),
            if_none_match: value(header::IF_NONE_MATCH),
        }
    }

    /// Whether the client has the version `etag` already.
    fn has(&self, etag: &str) -> bool {
        self.if_none_match
            .as_ref()
            .is_some_and(|list| list.split(',').any(|tag| tag.trim() == etag || tag.trim() == "*"))
    }

    /// The requested bytes of a file of `len` bytes; `None`: all, which is also the answer to ranges that are
    /// not understood and to several ranges.
    ///
    /// # Errors
    /// If none of them exist.
    fn range(&self, len: u64, etag: &str) -> Result<Option<Range<u64>>, Unsatisfiable> {
        if self.if_range.as_ref().is_some_and(|version| version != etag) {
            return Ok(None);
        }
        let spec = self.range.as_ref().and_then(|r| r.strip_prefix("bytes=")).and_then(|r| r.split_once('-'));
        let Some((first, last)) = spec else { return Ok(None) };
        let range = match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => first..last.saturating_add(1).min(len),
            (Some(first), None) if last.is_empty() => first..len,
            (None, Some(count)) if first.is_empty() => len.saturating_sub(count)..len,
            _ => return Ok(None),
        };
        if range.is_empty() { Err(Unsatisfiable) } else { Ok(Some(range)) }
    }
}

/// Digits only: `u64::from_str` would take a sign.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let range = |range: &str, len| Asked { range: Some(range.into()), ..Asked::default() }.range(len, "\"e\"");
        assert_eq!(range("bytes=0-0", 10), Ok(Some(0..1)));
        assert_eq!(range("bytes=3-", 10), Ok(Some(3..10)));
        assert_eq!(range("bytes=3-99999999999999999999", 10), Ok(Some(3..10)));
        assert_eq!(range("bytes=-4", 10), Ok(Some(6..10)));
        assert_eq!(range("bytes=-40", 10), Ok(Some(0..10)));
        for beyond in ["bytes=10-", "bytes=10-12", "bytes=-0"] {
            assert_eq!(range(beyond, 10), Err(Unsatisfiable), "{beyond}");
        }
        assert_eq!(range("bytes=0-", 0), Err(Unsatisfiable));
        for other in ["bytes=4-3", "bytes=0-1,3-4", "bytes=", "bytes=-", "bytes=a-b", "bytes=+1-2", "items=0-1", "0-1"]
        {
            assert_eq!(range(other, 10), Ok(None), "{other}");
        }
    }

    #[test]
    fn conditions() {
        let asked =
            |name: HeaderName, value| Asked::of(&HeaderMap::from_iter([(name, HeaderValue::from_static(value))]));
        assert!(
            asked(header::IF_NONE_MATCH, "\"a\", \"b\"").has("\"b\"") && asked(header::IF_NONE_MATCH, "*").has("\"b\"")
        );
        assert!(!asked(header::IF_NONE_MATCH, "\"a\"").has("\"b\"") && !Asked::default().has("\"b\""));
        let with = |if_range: &str| Asked {
            range: Some("bytes=0-0".into()),
            if_range: Some(if_range.into()),
            ..Asked::default()
        };
        assert_eq!(with("\"a\"").range(9, "\"a\""), Ok(Some(0..1)));
        assert_eq!(with("\"b\"").range(9, "\"a\""), Ok(None));
    }
}
