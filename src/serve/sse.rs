//! Answers that come in pieces: the writer's side of a stream, and the body that sends what was written.
//!
//! A stream is one future that waits for the engine and writes; the body polls it. There is no task and no channel between
//! them, so a client that leaves drops body, future and the engine's request at once, and pieces that are there at the
//! same time leave in one write.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes};
use http_body::Frame;
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep};

/// A comment is sent after this time without a piece, so that nothing between takes the connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// The comment.
const COMMENT: &str = ": waiting\n\n";

/// Where a stream writes.
#[derive(Clone, Default)]
pub struct Out(Arc<Mutex<String>>);

impl Out {
    /// An event with data only.
    pub fn data(&self, value: &Value) {
        self.with(|text| push(text, None, &value.to_string()));
    }

    /// The text after which a stream of OpenAI's ends.
    pub fn done(&self) {
        self.with(|text| push(text, None, "[DONE]"));
    }

    /// An event with a name.
    pub fn event(&self, name: &str, value: &Value) {
        self.with(|text| push(text, Some(name), &value.to_string()));
    }

    /// A line of JSON, which is how Ollama streams.
    pub fn line(&self, value: &Value) {
        self.with(|text| {
            text.push_str(&value.to_string());
            text.push('\n');
        });
    }

    fn with(&self, write: impl FnOnce(&mut String)) {
        write(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// What was written since the last call.
    pub fn take(&self) -> String {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Adds an event. `data` is JSON of one line or a word, so it never contains a line break.
fn push(text: &mut String, name: Option<&str>, data: &str) {
    if let Some(name) = name {
        text.push_str("event: ");
        text.push_str(name);
        text.push('\n');
    }
    text.push_str("data: ");
    text.push_str(data);
    text.push_str("\n\n");
}

/// The body of a stream: `write` waits for the engine and writes into its [`Out`].
pub fn body<F: Future<Output = ()> + Send + 'static>(comments: bool, write: impl FnOnce(Out) -> F) -> Body {
    Body::new(stream(comments.then_some(KEEP_ALIVE), write))
}

fn stream<F: Future<Output = ()> + Send + 'static>(every: Option<Duration>, write: impl FnOnce(Out) -> F) -> Stream {
    let out = Out::default();
    let write = Box::pin(write(out.clone()));
    Stream { write: Some(write), out, every, quiet: Box::pin(sleep(every.unwrap_or_default())) }
}

struct Stream {
    /// `None` once it has ended.
    write: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    out: Out,
    /// The time between comments, if the format has them: events have, lines of JSON have not.
    every: Option<Duration>,
    quiet: Pin<Box<Sleep>>,
}

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(write) = &mut self.write
            && write.as_mut().poll(cx).is_ready()
        {
            self.write = None;
        }
        let text = self.out.take();
        let text = match text.is_empty() {
            false => text,
            true if self.write.is_none() => return Poll::Ready(None),
            true if self.every.is_some() && self.quiet.as_mut().poll(cx).is_ready() => COMMENT.to_owned(),
            true => return Poll::Pending,
        };
        if let Some(every) = self.every {
            self.quiet.as_mut().reset(Instant::now() + every);
        }
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_are_lines_that_text_cannot_break() {
        let out = Out::default();
        out.data(&json!({"text": "a\n\ndata: [DONE]\r"}));
        out.event("message_stop", &json!({}));
        out.done();
        let text = out.take();
        assert_eq!(
            text,
            "data: {\"text\":\"a\\n\\ndata: [DONE]\\r\"}\n\nevent: message_stop\ndata: {}\n\ndata: [DONE]\n\n"
        );
        assert_eq!(out.take(), "");
    }

    #[test]
    fn a_quiet_stream_sends_comments_and_an_ended_one_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let every = Duration::from_millis(200);
            let mut body = Box::pin(stream(Some(every), |out| async move {
                out.data(&json!(1));
                out.data(&json!(2));
                sleep(every + every / 2).await;
                out.data(&json!(3));
            }));
            let mut frames = Vec::new();
            while let Some(frame) = std::future::poll_fn(|cx| http_body::Body::poll_frame(body.as_mut(), cx)).await {
                frames.push(String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap());
            }
            assert_eq!(frames, ["data: 1\n\ndata: 2\n\n", COMMENT, "data: 3\n\n"]);
        });
    }
}
