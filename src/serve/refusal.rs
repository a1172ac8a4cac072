//! Requests that are not answered: a status, and a body in the words of the protocol that was spoken.

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode, header},
};
use selkie_core::Error;
use serde_json::{Value, json};

/// The protocol of a path, which decides the form of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and everything that is no other.
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
    /// Ollama's.
    Ollama,
}

impl Dialect {
    /// That of a path.
    pub fn of(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// Why a request is refused or has failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Of the answer.
    pub status: u16,
    /// The reason, and what to do.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// A name for programs.
    pub code: Option<&'static str>,
    /// Seconds after which another try makes sense.
    pub retry_after: Option<u64>,
}

impl Refusal {
    /// One with a status.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A request that makes no sense.
    pub fn bad(message: String) -> Self {
        Self::new(400, message)
    }

    /// A field that makes no sense.
    pub fn field(name: &str, message: String) -> Self {
        Self { param: Some(name.to_owned()), ..Self::new(400, message) }
    }

    /// The same with a name for programs.
    pub fn coded(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The kind of error in OpenAI's words.
    fn openai_kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            501 => "invalid_request_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The kind of error in Anthropic's words.
    fn anthropic_kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the answer.
    pub fn body(&self, dialect: Dialect) -> Value {
        let message = &self.message;
        match dialect {
            Dialect::OpenAi => {
                let (kind, code) = (self.openai_kind(), self.code);
                json!({ "error": { "message": message, "type": kind, "param": self.param, "code": code } })
            }
            Dialect::Anthropic => {
                json!({ "type": "error", "error": { "type": self.anthropic_kind(), "message": message } })
            }
            Dialect::Ollama => json!({ "error": message }),
        }
    }

    /// The answer.
    pub fn response(&self, dialect: Dialect) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body(dialect).to_string()));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        Self::from(&e)
    }
}

impl From<&Error> for Refusal {
    fn from(e: &Error) -> Self {
        let message = e.to_string();
        match e {
            Error::TooLong { .. } => Self::bad(message).coded("context_length_exceeded"),
            Error::BadRequest(_) => Self::bad(message),
            // A template that raises, or ids beyond the vocabulary: the request met a limit of the model.
            Error::BadModel { .. } | Error::Unsupported { .. } => Self::bad(message),
            _ => Self::new(500, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_by_protocol() {
        let refusal = Refusal::field("top_p", "`top_p` must be a number from 0 to 1".into());
        assert_eq!(
            refusal.body(Dialect::of("/v1/chat/completions")),
            json!({"error": {"message": "`top_p` must be a number from 0 to 1", "type": "invalid_request_error",
                             "param": "top_p", "code": null}})
        );
        let busy = Refusal { retry_after: Some(3), ..Refusal::new(429, "full") };
        assert_eq!(
            busy.body(Dialect::of("/v1/messages/count_tokens")),
            json!({"type": "error", "error": {"type": "rate_limit_error", "message": "full"}})
        );
        assert_eq!(busy.body(Dialect::of("/api/chat")), json!({"error": "full"}));
        let response = busy.response(Dialect::OpenAi);
        assert_eq!((response.status().as_u16(), response.headers()["retry-after"].as_bytes()), (429, &b"3"[..]));
    }

    #[test]
    fn engine_errors_have_a_status() {
        let long = Error::TooLong { why: "300 tokens".into(), tokens: None };
        assert_eq!(Refusal::from(&long).code, Some("context_length_exceeded"));
        assert_eq!(Refusal::from(&Error::NotFinite).status, 500);
    }
}
