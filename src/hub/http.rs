//! Requests to the hub: redirects, authorisation, errors.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use ureq::{
    Agent, Body,
    http::{HeaderMap, Request, Response},
    tls::{Certificate, RootCerts, TlsConfig},
};

use crate::hub::{
    address::{host, is_loopback, join, origin, without_query},
    fault::Fault,
    progress::Progress,
    settings::Settings,
};

/// Most redirects that one request follows.
const MOST_REDIRECTS: usize = 10;
/// Time for a connection, for the head of an answer, and for its body. What came before the last one is used.
const CONNECT: Duration = Duration::from_secs(20);
const ANSWER: Duration = Duration::from_secs(60);
const BODY: Duration = Duration::from_secs(120);

/// What the hub says about a file, in the headers of its answer.
#[derive(Clone, Debug, Default)]
pub struct Meta {
    /// Names the content: sha256 for files in large-file storage.
    pub etag: Option<String>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Whether the content is in large-file storage.
    pub linked: bool,
}

/// An answer that is no error.
pub struct Reply {
    /// 200, 206, or a redirect to another host that was not followed.
    pub status: u16,
    /// Where it came from.
    pub url: String,
    /// What the hub itself says.
    pub meta: Meta,
    /// First byte and total of a part of a file.
    pub part: Option<(u64, Option<u64>)>,
    /// The content.
    pub body: Body,
}

/// A connection to the hub, shared by threads.
pub struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    /// What the person at the terminal sees of it.
    pub progress: Progress,
    /// Other hosts to which the hub sent us, all of them named.
    named: Mutex<BTreeSet<String>>,
}

impl Client {
    /// Reads the system's certificates; no request is made.
    pub fn new(settings: &Settings) -> Self {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            tracing::warn!(
                "this system has no certificates, so https fails; install ca-certificates or set SSL_CERT_FILE"
            );
        }
        let certs = found.certs.iter().map(|c| Certificate::from_der(c).to_owned());
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::from(certs))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("selkie/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_recv_body(Some(BODY))
            .build();
        // A token that others on the way can read is none.
        let safe = settings.endpoint.starts_with("https:") || is_loopback(settings.host());
        let token = settings.token().filter(|_| {
            if !safe {
                tracing::warn!("HF_ENDPOINT is a http: address, to which the token is not sent");
            }
            safe
        });
        Self {
            agent: Agent::new_with_config(config),
            endpoint: settings.endpoint.clone(),
            token,
            progress: Progress::new(),
            named: Mutex::default(),
        }
    }

    /// Whether requests carry a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Asks for a document or, with `range`, for a part of it. Redirects are followed.
    ///
    /// # Errors
    /// Every status of 400 and more is one.
    pub fn get(&self, url: &str, range: Option<Range<u64>>) -> Result<Reply, Fault> {
        self.request("GET", url, range, true)
    }

    /// Asks what the hub says about a file, and nobody else.
    ///
    /// # Errors
    /// As for [`Client::get`].
    pub fn head(&self, url: &str) -> Result<Reply, Fault> {
        self.request("HEAD", url, None, false)
    }

    fn request(&self, method: &str, url: &str, range: Option<Range<u64>>, leave: bool) -> Result<Reply, Fault> {
        let (mut url, mut meta) = (url.to_owned(), Meta::default());
        for _ in 0..=MOST_REDIRECTS {
            let ours = origin(&url) == origin(&self.endpoint);
            let response = self.once(method, &url, range.clone(), ours)?;
            if ours {
                meta.read(response.headers());
            }
            let status = response.status().as_u16();
            if status >= 400 {
                return Err(refusal(&url, &response));
            }
            let next = match status {
                301 | 302 | 303 | 307 | 308 => Some(redirect(&url, response.headers())?),
                _ => None,
            };
            match next {
                Some(next) if leave || origin(&next) == origin(&self.endpoint) => {
                    self.name(&next);
                    url = next;
                }
                _ => {
                    let part = part(response.headers());
                    return Ok(Reply { status, url, meta, part, body: response.into_body() });
                }
            }
        }
        Err(Fault::Nonsense(format!("{url}: more than {MOST_REDIRECTS} redirects")))
    }

    /// Says once to which other host the hub sends us, before we follow.
    fn name(&self, next: &str) {
        let host = host(next).unwrap_or_default();
        let ours = origin(next) == origin(&self.endpoint);
        if !ours && self.named.lock().expect("nobody panicked").insert(host.to_owned()) {
            self.progress.say(format_args!(
                "the files come from {host}, as {} says",
                origin(&self.endpoint).unwrap_or_default()
            ));
        }
    }

    /// One request. The token goes to the hub itself and to no other host.
    fn once(&self, method: &str, url: &str, range: Option<Range<u64>>, ours: bool) -> Result<Response<Body>, Fault> {
        tracing::debug!("{method} {} {range:?}", without_query(url));
        let mut request = Request::builder().method(method).uri(url);
        if let Some(range) = range {
            request = request.header("range", format!("bytes={}-{}", range.start, range.end - 1));
        }
        if let Some(token) = self.token.as_ref().filter(|_| ours) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(()).map_err(|e| Fault::Nonsense(format!("{}: {e}", without_query(url))))?;
        self.agent.run(request).map_err(|e| failed(url, e))
    }
}

impl Meta {
    /// Takes what the answer of the hub says; what an earlier one on the way said stays.
    fn read(&mut self, headers: &HeaderMap) {
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let linked = text("x-linked-etag");
        if self.etag.is_none() {
            self.etag = linked.or(text("etag")).map(|e| e.trim_start_matches("W/").trim_matches('"').to_owned());
            self.linked = linked.is_some();
        }
        let size = text("x-linked-size").or(text("content-length").filter(|_| linked.is_none()));
        self.size = self.size.or(size.and_then(|s| s.parse().ok()));
    }
}

fn failed(url: &str, e: ureq::Error) -> Fault {
    use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    use ureq::{Error as E, Timeout as T};
    let host = host(url).unwrap_or(url).to_owned();
    let unreachable = match &e {
        E::HostNotFound | E::ConnectionFailed | E::Tls(_) | E::Rustls(_) | E::InvalidProxyUrl => true,
        E::Timeout(T::Resolve | T::Connect) => true,
        E::Io(e) => matches!(e.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable) || untrusted(e),
        _ => false,
    };
    let why = match e {
        E::HostNotFound => "its name is unknown to this machine's resolver".to_owned(),
        E::Io(e) if untrusted(&e) => {
            format!("{e}; a certificate that this system does not know goes into a file that SSL_CERT_FILE names")
        }
        E::Io(e) => e.to_string(),
        e => e.to_string(),
    };
    if unreachable {
        Fault::Unreachable { host, why }
    } else {
        Fault::Cut(format!("the connection to {host} broke: {why}"))
    }
}

/// Whether the other side is not who it says it is.
fn untrusted(e: &std::io::Error) -> bool {
    e.get_ref().is_some_and(|e| e.downcast_ref().is_some_and(|e| matches!(e, rustls::Error::InvalidCertificate(_))))
}

fn refusal(url: &str, response: &Response<Body>) -> Fault {
    let code = response.headers().get("x-error-code").and_then(|v| v.to_str().ok()).unwrap_or_default();
    Fault::Status { status: response.status().as_u16(), code: code.into(), host: host(url).unwrap_or(url).into() }
}

/// Where an answer sends us; never from https to http.
fn redirect(url: &str, headers: &HeaderMap) -> Result<String, Fault> {
    let nonsense = |why: &str| Fault::Nonsense(format!("{}: {why}", without_query(url)));
    let location = headers.get("location").and_then(|v| v.to_str().ok());
    let next = location.and_then(|l| join(url, l)).ok_or_else(|| nonsense("a redirect to nowhere"))?;
    if url.starts_with("https:") && !next.starts_with("https:") {
        return Err(nonsense("a redirect to an address that is not encrypted"));
    }
    Ok(next)
}

/// First byte and total, from `Content-Range: bytes 0-9/100`.
fn part(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get("content-range")?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_say_where_they_begin() {
        let part_of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("content-range", text.parse().unwrap());
            part(&headers)
        };
        assert_eq!(part_of("bytes 5-9/100"), Some((5, Some(100))));
        assert_eq!(part_of("bytes 5-9/*"), Some((5, None)));
        assert_eq!(part_of("5-9/100"), None);
    }
}
