//! Connections: limits on their number and on silence, and their end when the server drains.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, http::Request};
use hyper::{
    rt::{Read, ReadBufCursor, Write},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Sleep, sleep},
};
use tower_service::Service;

use super::app::Phase;

/// How long the head of a request may take, and a connection may be idle, in a server.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a client may take none of an answer.
const STALL_TIME: Duration = Duration::from_secs(30);
/// Bytes of a head; hyper refuses longer ones with 431.
const MAX_HEAD: usize = 64 << 10;
/// Headers of a request.
const MAX_HEADERS: usize = 100;

/// The number of connections for which there are file descriptors, at most `most`. Raises the limit of the process if it can.
#[cfg(unix)]
fn affordable(most: usize) -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};
    /// For model files, pipes and what libraries open.
    const OTHERS: u64 = 128;
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = most as u64 + OTHERS;
    if limit.current.is_some_and(|now| now < wanted) {
        limit.current = Some(limit.maximum.map_or(wanted, |highest| wanted.min(highest)));
        // If it is refused, the old one counts.
        let _ = setrlimit(Resource::Nofile, limit);
    }
    let have = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    most.min(have.saturating_sub(OTHERS).max(1) as usize)
}

/// The number of connections for which there are handles: any.
#[cfg(not(unix))]
fn affordable(most: usize) -> usize {
    most
}

/// What connections may do.
#[derive(Clone, Copy, Debug)]
pub struct Connections {
    /// How many there are at a time; more wait.
    pub most: usize,
    /// Each may have many requests.
    pub many: bool,
    /// How long the head of a request may take, and a connection may be idle.
    pub silence: Duration,
}

impl Connections {
    /// Those of a server: many requests, a few seconds of silence.
    pub fn new(most: usize) -> Self {
        Self { most, many: true, silence: HEAD_TIME }
    }
}

/// Answers connections until the server drains; then waits until all of them have ended.
pub async fn serve(listener: TcpListener, router: Router, rules: Connections, phase: watch::Receiver<Phase>) {
    let most = affordable(rules.most);
    let places = Arc::new(Semaphore::new(most));
    let mut draining = phase.clone();
    loop {
        let (stream, place) = tokio::select! {
            next = accept(&listener, &places) => next,
            _ = draining.wait_for(|now| *now >= Phase::Draining) => break,
        };
        tokio::spawn(connection(stream, router.clone(), rules, phase.clone(), place));
    }
    drop(listener);
    // All places: no connection is left.
    let _ = places.acquire_many(u32::try_from(most).unwrap_or(u32::MAX)).await;
}

/// The next connection that has a place. Those without one wait in the backlog of the socket.
async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let place = places.clone().acquire_owned().await.expect("nobody closes the semaphore");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, place),
            // Errors of single connections, or a lack of file descriptors, which passes.
            Err(e) => {
                tracing::debug!("accept: {e}");
                sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    router: Router,
    rules: Connections,
    mut phase: watch::Receiver<Phase>,
    place: OwnedSemaphorePermit,
) {
    let _ = stream.set_nodelay(true);
    let io = Impatient { io: TokioIo::new(stream), stalled: None };
    let service =
        service_fn(move |request: Request<hyper::body::Incoming>| router.clone().call(request.map(Body::new)));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(rules.silence).max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
    builder.keep_alive(rules.many);
    let mut connection = std::pin::pin!(builder.serve_connection(io, service));
    // What `wait_for` returns is a lock, which must not be held.
    let drains = async { drop(phase.wait_for(|now| *now >= Phase::Draining).await) };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drains => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!("connection: {e}");
    }
    drop(place);
}

/// A connection whose writes fail if the other side takes nothing for [`STALL_TIME`].
struct Impatient {
    io: TokioIo<TcpStream>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    fn watch<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(STALL_TIME)));
        match stalled.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Read for Impatient {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for Impatient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.watch(cx, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(cx);
        self.watch(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.watch(cx, result)
    }
}
