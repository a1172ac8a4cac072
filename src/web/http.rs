//! The part of HTTP/1.1 that serving files needs: one GET or HEAD per connection. `httparse` parses; this module checks.

use std::{net::Ipv6Addr, ops::Range};

/// Most bytes of a request's head.
pub const MAX_HEAD: usize = 16 << 10;
const MAX_HEADERS: usize = 64;

/// A request that may be answered.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// HEAD instead of GET.
    pub head: bool,
    /// Path and query, beginning with `/`.
    pub target: String,
    range: Option<String>,
    if_range: Option<String>,
    if_none_match: Option<String>,
}

/// Why a request is not answered: status and a sentence.
pub type Refusal = (u16, &'static str);

impl Request {
    /// Reads the head of a request to the server at `port`; `None` if more of it has to come.
    ///
    /// # Errors
    /// What to answer instead.
    pub fn parse(head: &[u8], port: u16) -> Result<Option<Self>, Refusal> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) if head.len() < MAX_HEAD => return Ok(None),
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Err((431, "The request's headers are too long."));
            }
            Err(_) => return Err((400, "This is no HTTP request.")),
        }
        let values = |name: &str| {
            let name = name.to_owned();
            request.headers.iter().filter(move |h| h.name.eq_ignore_ascii_case(&name)).map(|h| h.value)
        };
        let value =
            |name: &str| values(name).next().and_then(|v| std::str::from_utf8(v).ok()).map(|v| v.trim().to_owned());
        // Refuses other host names, against DNS rebinding: a foreign site whose name was made to point to this machine.
        if values("host").count() != 1 || !value("host").is_some_and(|host| is_own_host(&host, port)) {
            return Err((403, "This server answers to its address and to localhost only."));
        }
        let head = match request.method {
            Some("GET") => false,
            Some("HEAD") => true,
            _ => return Err((405, "Only GET and HEAD are served here.")),
        };
        let target = request.path.unwrap_or_default();
        if !target.starts_with('/') {
            return Err((400, "The request names no path."));
        }
        Ok(Some(Self {
            head,
            target: target.to_owned(),
            range: value("range"),
            if_range: value("if-range"),
            if_none_match: value("if-none-match"),
        }))
    }

    /// Whether the client has the version `etag` already.
    pub fn has(&self, etag: &str) -> bool {
        self.if_none_match
            .as_ref()
            .is_some_and(|list| list.split(',').any(|tag| tag.trim() == etag || tag.trim() == "*"))
    }

    /// The bytes that are asked for of a file of `len` bytes; `None`: all, which is also the answer to ranges that are
    /// not understood and to several at once.
    ///
    /// # Errors
    /// If none of them exist.
    pub fn range(&self, len: u64, etag: &str) -> Result<Option<Range<u64>>, Unsatisfiable> {
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

/// A range that begins behind the end.
#[derive(Debug, PartialEq, Eq)]
pub struct Unsatisfiable;

/// Digits only: `u64::from_str` would take a sign.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// Whether a Host header names this server: `localhost` or an IP address, at its port.
fn is_own_host(host: &str, port: u16) -> bool {
    let (name, at) = match host.rsplit_once(':') {
        Some((name, at)) if !at.ends_with(']') => (name, at),
        _ => (host, "80"),
    };
    let v6 = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
    let address = v6.map_or_else(|| name.parse::<std::net::Ipv4Addr>().is_ok(), |n| n.parse::<Ipv6Addr>().is_ok());
    number(at) == Some(port.into()) && (name.eq_ignore_ascii_case("localhost") || address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<Request>, u16> {
        Request::parse(text.as_bytes(), 8080).map_err(|(status, _)| status)
    }

    #[test]
    fn heads_come_in_pieces() {
        let whole = "GET /a?b HTTP/1.1\r\nhOSt: localhost:8080\r\nRange: bytes=1-2\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), Ok(None), "{end}");
        }
        let request = parse(whole).unwrap().unwrap();
        assert_eq!((request.head, &*request.target), (false, "/a?b"));
    }

    #[test]
    fn hosts() {
        for host in ["localhost:8080", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "192.168.0.7:8080"] {
            assert!(is_own_host(host, 8080), "{host}");
        }
        assert!(is_own_host("localhost", 80) && is_own_host("[::1]", 80));
        for host in [
            "",
            "localhost",
            "localhost:80",
            "evil.example:8080",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example:8080",
            "127.0.0.1",
            "[::1]",
            "::1:8080",
            "localhost:8080:8080",
            "localhost:+8080",
            "user@localhost:8080",
            "localhost.:8080",
        ] {
            assert!(!is_own_host(host, 8080), "{host}");
        }
    }

    #[test]
    fn requests_that_are_refused() {
        for (text, status) in [
            ("GET / HTTP/1.1\r\n\r\n", 403),
            ("GET / HTTP/1.1\r\nHost: evil.example:8080\r\n\r\n", 403),
            ("GET / HTTP/1.1\r\nHost: localhost:8080\r\nHost: evil.example\r\n\r\n", 403),
            ("POST / HTTP/1.1\r\nHost: localhost:8080\r\n\r\n", 405),
            ("GET http://localhost:8080/ HTTP/1.1\r\nHost: localhost:8080\r\n\r\n", 400),
            ("GET / HTTP/9\r\n\r\n", 400),
            ("\u{16}\u{3}\u{1}", 400),
        ] {
            assert_eq!(parse(text), Err(status), "{text:?}");
        }
        let long = format!("GET / HTTP/1.1\r\nHost: localhost:8080\r\nX: {}", "x".repeat(MAX_HEAD));
        assert_eq!(parse(&long), Err(431));
        assert_eq!(parse(&format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(MAX_HEADERS + 1))), Err(431));
    }

    #[test]
    fn ranges() {
        let range = |range: &str, len| {
            let text = format!("GET / HTTP/1.1\r\nHost: localhost:8080\r\nRange: {range}\r\n\r\n");
            parse(&text).unwrap().unwrap().range(len, "\"e\"")
        };
        assert_eq!(range("bytes=0-0", 10), Ok(Some(0..1)));
        assert_eq!(range("bytes=3-", 10), Ok(Some(3..10)));
        assert_eq!(range("bytes=3-99999999999999999999", 10), Ok(Some(3..10)));
        assert_eq!(range("bytes=-4", 10), Ok(Some(6..10)));
        assert_eq!(range("bytes=-40", 10), Ok(Some(0..10)));
        for behind in ["bytes=10-", "bytes=10-12", "bytes=-0"] {
            assert_eq!(range(behind, 10), Err(Unsatisfiable), "{behind}");
        }
        assert_eq!(range("bytes=0-", 0), Err(Unsatisfiable));
        for other in ["bytes=4-3", "bytes=0-1,3-4", "bytes=", "bytes=-", "bytes=a-b", "bytes=+1-2", "items=0-1", "0-1"]
        {
            assert_eq!(range(other, 10), Ok(None), "{other}");
        }
    }

    #[test]
    fn conditions() {
        let request = |header: &str| {
            parse(&format!("GET / HTTP/1.1\r\nHost: localhost:8080\r\nRange: bytes=1-1\r\n{header}\r\n\r\n"))
                .unwrap()
                .unwrap()
        };
        assert_eq!(request("If-Range: \"old\"").range(10, "\"e\""), Ok(None));
        assert_eq!(request("If-Range: \"e\"").range(10, "\"e\""), Ok(Some(1..2)));
        assert!(request("If-None-Match: \"x\", \"e\"").has("\"e\""));
        assert!(!request("If-None-Match: \"x\"").has("\"e\"") && !request("A: b").has("\"e\""));
    }
}
