//! From a request that generates to its answer, whatever its protocol.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{HeaderValue, Response, header},
};
use selkie_core::chat::system_clock;
use serde_json::Value;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{sleep, timeout},
};

use super::{
    app::{App, Phase},
    fields::Fields,
    guard::Caller,
    handover::{self, Opened},
    metrics::Broken,
    refusal::{Dialect, Refusal},
    replicas::Placed,
    run::{News, Ready, Run},
    sse::{self, Out},
    voice::{Ended, Head, Tokens, Voice},
    wanted::Wanted,
};

/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);
/// How long a request may wait for [`BODIES`].
const BODY_WAIT: Duration = Duration::from_secs(10);
/// KiB of bodies that may be in memory at a time, before they are prompts.
static BODIES: Semaphore = Semaphore::const_new(256 << 10);

/// Makes the voice of an answer.
pub type Speak = Box<dyn FnOnce(Head) -> Box<dyn Voice> + Send>;

/// Reads a request of a protocol.
pub type Read = fn(&Fields<'_>) -> Result<(Wanted, Speak), Refusal>;

/// Answers a request that generates.
pub async fn generate(app: Arc<App>, request: Request, read: Read) -> Response<Body> {
    let dialect = Dialect::of(request.uri().path());
    match attempt(app, request, read).await {
        Ok(response) => response,
        Err(refusal) => refusal.response(dialect),
    }
}

async fn attempt(app: Arc<App>, request: Request, read: Read) -> Result<Response<Body>, Refusal> {
    let model = app.ready()?.clone();
    let (caller, body) = receive(&app, request).await?;
    // Reading, rendering and tokenising may take long; this thread has other requests to serve.
    let work = {
        let (app, caller) = (app.clone(), caller.clone());
        move || {
            let fields = Fields::body(&body.bytes)?;
            app.check_name(fields.get::<String>("model")?.as_deref())?;
            let (mut wanted, speak) = read(&fields)?;
            let meetings = app.handover.meetings(&fields)?;
            app.handover.limit(&mut wanted, &meetings);
            let places = app.gate.take(wanted.choices(), app.metrics.mean_seconds());
            let places = places.inspect_err(|e| {
                if e.status == 429 {
                    app.metrics.refused()
                }
            })?;
            let (n, stream) = (wanted.n, wanted.stream);
            let ready = Ready::new(&model, app.speech(&model), wanted, &caller, places)?;
            Ok((ready, speak, n, stream, meetings))
        }
    };
    let (ready, speak, n, stream, meetings) = blocking(work).await?;
    let (all, namespace) = (ready.prompts(), ready.namespace().to_owned());
    let placed = app.place(all.first().map_or(&[][..], Vec::as_slice), &namespace).await?;
    let prompts = meetings.into_iter().zip(all).collect();
    let rooms = handover::prepare(&app, &placed.model, prompts, &namespace).await?;
    app.ready()?;
    let run = Run::start(&placed.model, ready);
    app.metrics.started(run.len());
    let head = Head {
        id: caller.id,
        model: app.name().to_owned(),
        created: system_clock(),
        n,
        prompt_tokens: run.prompt_tokens(),
    };
    let mut answering = Answering::new(app, run, speak(head), rooms, placed);
    if stream {
        let comments = answering.voice.has_comments();
        return Ok(streamed(comments, sse::body(comments, |out| async move { answering.stream(&out).await })));
    }
    let answers = answering.collect(None).await?;
    Ok(json(&answering.voice.whole(&answers)))
}

/// A body, and its share of the memory for bodies.
pub struct Received {
    /// As it came.
    pub bytes: Bytes,
    _share: SemaphorePermit<'static>,
}

/// The caller and the body of a request.
///
/// # Errors
/// If the body is too long or too slow, or there is no memory for it.
pub async fn receive(app: &App, request: Request) -> Result<(Caller, Received), Refusal> {
    let (mut parts, body) = request.into_parts();
    let caller = parts.extensions.remove::<Caller>().ok_or_else(|| Refusal::new(500, "the request has no caller"))?;
    let most = app.limits.body;
    let too_long = || Refusal::new(413, format!("the body has more than {most} bytes, which --max-body allows"));
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_long());
    }
    let kib = (length.unwrap_or(most as u64) >> 10).min(200 << 10) as u32 + 1;
    let Ok(Ok(share)) = timeout(BODY_WAIT, BODIES.acquire_many(kib)).await else {
        let why = "too many long requests arrive at the same time; try again later";
        return Err(Refusal { retry_after: Some(5), ..Refusal::new(503, why) });
    };
    match timeout(BODY_TIME, to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok((caller, Received { bytes, _share: share })),
        Ok(Err(e)) if is_length(&e) => Err(too_long()),
        Ok(Err(_)) => Err(Refusal::bad("the body did not arrive".into())),
        Err(_) => Err(Refusal::new(408, "the body did not arrive in time")),
    }
}

fn is_length(e: &axum::Error) -> bool {
    std::error::Error::source(e).is_some_and(|source| source.to_string().contains("length limit"))
}

/// Runs work that may take a while on another thread.
///
/// # Errors
/// Those of the work; 500 if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(Refusal::new(500, "the request met a fault of the server")),
    }
}

/// An answer with a JSON body.
pub fn json(value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn streamed(events: bool, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let kind = if events { "text/event-stream; charset=utf-8" } else { "application/x-ndjson" };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect the pieces.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A request that is being answered. Dropping it ends the request.
struct Answering {
    app: Arc<App>,
    run: Run,
    voice: Box<dyn Voice>,
    /// Those who wait for its prompts, if it is computed for others.
    rooms: Vec<Option<Opened>>,
    /// Choices that have not ended.
    open: usize,
    failed: bool,
    _placed: Placed,
}

impl Answering {
    fn new(app: Arc<App>, run: Run, voice: Box<dyn Voice>, rooms: Vec<Option<Opened>>, placed: Placed) -> Self {
        Self { app, open: run.len(), run, voice, rooms, failed: false, _placed: placed }
    }

    async fn stream(&mut self, out: &Out) {
        self.voice.begin(out, self.run.len());
        match self.collect(Some(out)).await {
            Ok(answers) => self.voice.finish(out, &answers),
            Err(why) => self.voice.fail(out, &why),
        }
    }

    /// All answers, in order; pieces of them go to `out`.
    async fn collect(&mut self, out: Option<&Out>) -> Result<Vec<Ended>, Refusal> {
        let app = self.app.clone();
        let mut late = std::pin::pin!(sleep(app.limits.answer));
        let mut ending = std::pin::pin!(app.reached(Phase::Ending));
        let mut answers: Vec<Option<Ended>> = vec![None; self.run.len()];
        let mut last: Vec<Option<Instant>> = vec![None; self.run.len()];
        loop {
            let news = tokio::select! {
                news = self.run.next() => news,
                () = &mut late => Err(too_late(&app)),
                () = &mut ending => Err(Refusal::new(503, "the server is shutting down")),
            };
            match news.inspect_err(|_| self.failed = true)? {
                Some(News::Said { choice, events, ids, logprobs, prompt_logprobs }) => {
                    if let Some(before) = last[choice].replace(Instant::now()) {
                        self.app.metrics.token(before.elapsed());
                    }
                    if let Some(out) = out {
                        self.voice.said(out, choice, &events, Tokens { ids: &ids, logprobs, prompt_logprobs });
                    }
                }
                Some(News::Ended(choice, ended)) => {
                    self.open -= 1;
                    self.app.metrics.ended(&ended);
                    // Such a request has one answer to each prompt.
                    self.rooms.get_mut(choice).and_then(Option::take).into_iter().for_each(Opened::computed);
                    if let Some(out) = out {
                        self.voice.said(out, choice, &ended.last, Tokens::default());
                        self.voice.end(out, choice, &ended);
                    }
                    answers[choice] = Some(*ended);
                }
                None => return Ok(answers.into_iter().flatten().collect()),
            }
        }
    }
}

fn too_late(app: &App) -> Refusal {
    let seconds = app.limits.answer.as_secs();
    Refusal::new(408, format!("the answer took more than {seconds} s, which --answer-time allows"))
}

impl Drop for Answering {
    fn drop(&mut self) {
        let how = if self.failed { Broken::Failed } else { Broken::Aborted };
        self.app.metrics.broken(how, self.open);
    }
}
