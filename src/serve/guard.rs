//! What every request passes before and after its handler: host, key, form, its id and a line in the log.

use std::{sync::Arc, time::Instant};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header},
    middleware::Next,
    response::Response,
};

use super::{
    app::App,
    refusal::{Dialect, Refusal},
    state::BINARY,
};

const REQUEST_ID: &str = "x-request-id";
const JSON: &str = "application/json";

/// Who asks, in a request's extensions.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The request's id.
    pub id: String,
    /// The namespace of the key.
    pub namespace: String,
}

/// Checks a request, passes it on, and marks the answer.
pub async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let id = given_id(request.headers()).unwrap_or_else(|| app.new_id());
    let mut response = match app.hosts.as_ref().map_or(Ok(()), |hosts| hosts.check(request.headers())) {
        Ok(()) => {
            request.extensions_mut().insert(Caller { id: id.clone(), namespace: String::new() });
            next.run(request).await
        }
        Err(refusal) => refusal.response(Dialect::of(&path)),
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // The path alone: a query may hold anything.
    let status = response.status().as_u16();
    tracing::info!("{id} {status} {method} {path:?} {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    response
}

/// Checks a request to the model: its form, and its key.
pub async fn model_only(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let namespace = match check(&app, &request) {
        Ok(namespace) => namespace,
        Err(refusal) => return refusal.response(Dialect::of(request.uri().path())),
    };
    if let Some(caller) = request.extensions_mut().get_mut::<Caller>() {
        caller.namespace = namespace;
    }
    next.run(request).await
}

/// The namespace of a request to the model.
fn check(app: &App, request: &Request) -> Result<String, Refusal> {
    // A form of a foreign site can send text, but neither of these.
    let kind = if request.uri().path() == "/v1/state/load" { BINARY } else { JSON };
    if app.hosts.is_some() && request.method() == Method::POST && !is_kind(request.headers(), kind) {
        return Err(Refusal::new(415, format!("send the header `Content-Type: {kind}`")));
    }
    app.keys.as_ref().map_or(Ok(String::new()), |keys| keys.namespace(request.headers()))
}

fn is_kind(headers: &HeaderMap, kind: &str) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(kind)
}

/// The id that a client gave: short, and fit for a header and a line of a log.
fn given_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    (!id.is_empty() && id.len() <= 128 && id.chars().all(plain)).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_ids() {
        let with = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())])
        };
        for (value, json) in
            [("application/json", true), ("Application/JSON; charset=utf-8", true), ("text/plain", false), ("", false)]
        {
            assert_eq!(is_kind(&with("content-type", value), JSON), json, "{value}");
        }
        assert_eq!(given_id(&with(REQUEST_ID, "a-b_7.1")).as_deref(), Some("a-b_7.1"));
        assert_eq!(given_id(&with(REQUEST_ID, "a b")), None);
        assert_eq!(given_id(&HeaderMap::new()), None);
    }
}
