//! The one who computes: a socket where prompts are fetched.

use std::{
    io::{self, Write},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use selkie_core::{
    bundle::Identity,
    engine::{Export, Piece},
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::{Semaphore, oneshot},
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

use super::{
    Offer, realm,
    rooms::{Room, Rooms},
    whole_blocks,
    wire::{LAST, Line, PAGES, PIECE, SIGN_OF_LIFE, WAIT, fate},
};
use crate::serve::{
    app::App,
    metrics::Handed,
    refusal::Refusal,
    state::{files, identity},
};

/// Connections at a time; more wait.
const CONNECTIONS: usize = 256;
/// How long a request may come later than the one who fetches its prompt.
const APPEARS: Duration = Duration::from_secs(5);
/// Time between two looks at what is computed. The engine answers between steps, so this is for those that have not begun.
const PAUSE: Duration = Duration::from_millis(5);

/// Answers all who come.
pub async fn serve(listener: TcpListener, app: &Arc<App>, rooms: &Arc<Rooms>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (app, rooms) = (app.clone(), rooms.clone());
                tokio::spawn(async move {
                    let _place = place;
                    let time = app.limits.handover;
                    let latest = Instant::now() + time;
                    let gone = timeout(time, give(&app, &rooms, stream, latest)).await;
                    let why = match gone {
                        Ok(Ok(())) => return,
                        Ok(Err(e)) => fate(&e),
                        Err(_) => super::too_late(time),
                    };
                    app.metrics.handed(&Handed::Not);
                    tracing::warn!("a prompt was not handed over: {why}");
                });
            }
            // Too many open files, for example.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Hands one prompt over.
async fn give(app: &Arc<App>, rooms: &Rooms, stream: TcpStream, latest: Instant) -> io::Result<()> {
    let mut line = Line::new(stream);
    let number = line.asked().await?;
    let Ok(room) = timeout(APPEARS, rooms.take(number)).await else {
        return line.nothing("no request for this room has come").await;
    };
    let offer = match offer(app).await {
        Ok(offer) => offer,
        Err(refusal) => return line.nothing(&refusal.message).await,
    };
    line.offer(&offer, &room.tokens).await?;
    let mut from = match line.number(4).await {
        Ok(from) => from as usize,
        // It needs nothing, or has another model.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut all = 0;
    loop {
        let piece = match waiting(&mut line, next(app, &room, from)).await? {
            Ok(piece) => piece,
            Err(refusal) => return line.nothing(&refusal.message).await,
        };
        let last = piece.is_last();
        from = piece.depth();
        let bytes;
        (line, bytes) = send(line, piece, latest).await?;
        all += bytes;
        if last {
            app.metrics.handed(&Handed::Over { tokens: from, bytes: all });
            return Ok(());
        }
    }
}

/// What `work` gives. The other side hears from this one until then, and may leave.
async fn waiting<T>(line: &mut Line, work: impl Future<Output = T>) -> io::Result<T> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            () = line.left() => return Err(io::ErrorKind::ConnectionReset.into()),
            () = sleep(SIGN_OF_LIFE) => line.write(&[WAIT]).await?,
        }
    }
}

/// The offer of this server as JSON.
async fn offer(app: &Arc<App>) -> Result<Vec<u8>, Refusal> {
    let (model, files) = (app.ready()?.clone(), files(app)?);
    let numerics = model.with(|engine| engine.numerics()).await.map_err(|e| Refusal::from(&*e))?;
    serde_json::to_vec(&Offer::own(app, &files, numerics)?).map_err(|e| Refusal::new(500, e.to_string()))
}

/// The next piece of a prompt after its first `from` tokens, as soon as there is one.
async fn next(app: &App, room: &Room, from: usize) -> Result<Piece, Refusal> {
    let model = identity(&*files(app)?)?;
    loop {
        let over = room.is_over();
        if over && !room.computed().await {
            return Err(Refusal::new(503, "the request for this room has failed"));
        }
        if let Some(piece) = copy(app, &model, room, from, over).await? {
            return Ok(piece);
        }
        tokio::select! {
            _ = room.computed(), if !over => {}
            () = sleep(PAUSE) => {}
        }
    }
}

/// What the cache has of it now; with the state if it is `whole`.
async fn copy(app: &App, model: &Identity, room: &Room, from: usize, whole: bool) -> Result<Option<Piece>, Refusal> {
    let what = Export {
        model: model.clone(),
        name: app.name().to_owned(),
        tokens: whole_blocks(&room.tokens).to_vec(),
        ends: Vec::new(),
        messages: None,
        realm: realm(&room.namespace),
        states: 1,
        from,
    };
    let (send, arrived) = oneshot::channel();
    // Whoever waits for it may be gone.
    let hand_on = Box::new(move |piece| drop(send.send(piece)));
    let begun = app.ready()?.with(move |engine| engine.copy_out(what, whole, hand_on)).await;
    if !begun.map_err(|e| Refusal::from(&*e))?? {
        return Ok(None);
    }
    arrived.await.map(Some).map_err(|_| Refusal::new(503, "the engine has ended"))
}

/// Sends a piece as a bundle, from a thread of its own; how many bytes that was.
async fn send(mut line: Line, piece: Piece, latest: Instant) -> io::Result<(Line, u64)> {
    line.write(&[if piece.is_last() { LAST } else { PAGES }]).await?;
    let mut out = Out { line, runtime: Handle::current(), latest };
    let work = spawn_blocking(move || {
        let bytes = piece.write(&mut out)?;
        out.runtime.block_on(out.line.send_piece(&[]))?;
        Ok((out.line, bytes))
    });
    work.await.map_err(io::Error::other)?
}

/// A bundle on its way out of a thread.
struct Out {
    line: Line,
    runtime: Handle,
    latest: Instant,
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The one who waits for this thread may have left it.
        if Instant::now() > self.latest {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let now = &bytes[..bytes.len().min(PIECE)];
        self.runtime.block_on(self.line.send_piece(now))?;
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
