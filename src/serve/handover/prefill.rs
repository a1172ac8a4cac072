//! The one who computes: a socket where prompts are fetched.

use std::{
    future::pending,
    io::{self, Write},
    pin::pin,
    sync::Arc,
    thread,
    time::Duration,
};

use selkie_core::{
    bundle::Identity,
    engine::{Export, Leaving, Piece},
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    time::{Instant, sleep, timeout},
};

use super::{
    Offer, realm,
    rooms::{Room, Rooms},
    whole_blocks,
    wire::{LAST, Line, PAGES, SIGN_OF_LIFE, STALL, WAIT, fate},
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
/// Bytes that the other side takes within the time for a wait.
const AT_ONCE: usize = 1 << 20;
/// Pieces of a prompt that are copied before they are sent.
const AHEAD: usize = 4;
/// Time between two looks at what is computed. The engine answers between steps, so this is for those that have not begun.
const PAUSE: Duration = Duration::from_millis(5);

/// Pieces in host memory, each with its turn; or why there are no more.
type Copied = Result<(Piece, OwnedSemaphorePermit), Refusal>;
type Copies = UnboundedSender<Copied>;
type Pieces = UnboundedReceiver<Copied>;

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
    let from = match line.number(4).await {
        Ok(from) => from as usize,
        // It needs nothing, or has another model.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        Err(e) => return Err(e),
    };
    let (to, pieces) = unbounded_channel();
    let room = &room;
    let copying = async move {
        if let Err(refusal) = copy_all(app, room, from, &to).await {
            let _ = to.send(Err(refusal));
        }
        // What is on its way has the channel too. The sender decides when this ends.
        drop(to);
        pending::<()>().await;
    };
    tokio::select! {
        sent = send_all(line, pieces, latest) => {
            if let Some(handed) = sent? {
                app.metrics.handed(&handed);
            }
            Ok(())
        }
        () = copying => Ok(()),
    }
}

/// Sends pieces, or why there are no more.
async fn send_all(mut line: Line, mut pieces: Pieces, latest: Instant) -> io::Result<Option<Handed>> {
    let mut all = 0;
    loop {
        let (piece, _turn) = match waiting(&mut line, pieces.recv()).await? {
            Some(Ok(piece)) => piece,
            Some(Err(refusal)) => return line.nothing(&refusal.message).await.map(|()| None),
            None => return line.nothing("the engine has ended").await.map(|()| None),
        };
        let (begun, Leaving { depth, last }) = (Instant::now(), piece.left());
        let bytes;
        (line, bytes) = send(line, piece, latest).await?;
        all += bytes;
        tracing::debug!("a bundle up to token {depth}: {bytes} bytes sent in {:?}", begun.elapsed());
        if last {
            return Ok(Some(Handed::Over { tokens: depth, bytes: all }));
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

/// Has pieces of a prompt copied from its token `from` on, as soon as there are some.
async fn copy_all(app: &App, room: &Room, mut from: usize, to: &Copies) -> Result<(), Refusal> {
    let model = identity(&*files(app)?)?;
    let turns = Arc::new(Semaphore::new(AHEAD));
    let mut since = Instant::now();
    loop {
        let ended = |_| Refusal::new(503, "the server ends");
        let turn = turns.clone().acquire_owned().await.map_err(ended)?;
        let over = room.is_over();
        if !over {
            since = Instant::now();
        }
        if over && !room.computed().await {
            return Err(Refusal::new(503, "the request for this room has failed"));
        }
        match copy(app, &model, room, from, over, to.clone(), turn).await? {
            Some(Leaving { last: true, .. }) => return Ok(()),
            Some(leaving) => (from, since) = (leaving.depth, Instant::now()),
            // Better computed there than waited for.
            None if over && since.elapsed() > STALL => {
                return Err(Refusal::new(503, "other prompts have all memory for what leaves"));
            }
            None => tokio::select! {
                _ = room.computed(), if !over => {}
                () = sleep(PAUSE) => {}
            },
        }
    }
}

/// Begins to copy what the cache has of it now; with the state if it is `whole`.
async fn copy(
    app: &App,
    model: &Identity,
    room: &Room,
    from: usize,
    whole: bool,
    to: Copies,
    turn: OwnedSemaphorePermit,
) -> Result<Option<Leaving>, Refusal> {
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
    // Whoever waits for it may be gone.
    let hand_on = Box::new(move |piece| drop(to.send(Ok((piece, turn)))));
    let begun = app.ready()?.with(move |engine| engine.copy_out(what, whole, hand_on)).await;
    Ok(begun.map_err(|e| Refusal::from(&*e))??)
}

/// Sends a piece as a bundle, from a thread of its own; how many bytes that was.
async fn send(mut line: Line, piece: Piece, latest: Instant) -> io::Result<(Line, u64)> {
    line.write(&[if piece.left().last { LAST } else { PAGES }]).await?;
    line.write(&piece.bytes().to_le_bytes()).await?;
    let mut out = Out { line, runtime: Handle::current(), latest };
    let (done, sent) = oneshot::channel();
    let work = move || drop(done.send(piece.write(&mut out).map(|bytes| (out.line, bytes))));
    // Threads for requests must not wait for a connection.
    thread::Builder::new().name("selkie-handover".into()).spawn(work)?;
    sent.await.map_err(io::Error::other)?
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
        let now = &bytes[..bytes.len().min(AT_ONCE)];
        self.runtime.block_on(self.line.write(now))?;
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
