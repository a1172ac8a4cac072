//! The one who computes: a socket where prompts are fetched.

use std::{fs::File, io, io::Read, sync::Arc, time::Duration};

use selkie_core::engine::{Export, Exported};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, SemaphorePermit, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    Offer, realm,
    rooms::{Room, Rooms},
    whole_blocks,
    wire::{BUNDLE, Line, SIGN_OF_LIFE, WAIT, fate},
};
use crate::serve::{
    answer::blocking,
    app::App,
    metrics::Handed,
    refusal::Refusal,
    spool::{self, PIECE, on_disk},
    state::{files, identity},
};

/// Connections at a time; more wait.
const CONNECTIONS: usize = 256;
/// Bundles on their way at a time: each has a file.
static BUNDLES: Semaphore = Semaphore::const_new(4);
/// How long a request may come later than the one who fetches its prompt.
const APPEARS: Duration = Duration::from_secs(5);
/// The deepest state is enough to go on.
const STATES: usize = 1;

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
                    let gone = timeout(time, give(&app, &rooms, stream)).await;
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
async fn give(app: &Arc<App>, rooms: &Rooms, stream: TcpStream) -> io::Result<()> {
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
    let mut work = std::pin::pin!(begin(app, &room, from));
    let begun = loop {
        tokio::select! {
            begun = &mut work => break begun,
            () = line.left() => return Err(io::ErrorKind::ConnectionReset.into()),
            () = sleep(SIGN_OF_LIFE) => line.write(&[WAIT]).await?,
        }
    };
    match begun {
        Ok(saving) => {
            let handed = send(&mut line, saving).await?;
            app.metrics.handed(&handed);
            Ok(())
        }
        Err(refusal) => line.nothing(&refusal.message).await,
    }
}

/// The offer of this server as JSON.
async fn offer(app: &Arc<App>) -> Result<Vec<u8>, Refusal> {
    let (model, files) = (app.ready()?.clone(), files(app)?);
    let numerics = model.with(|engine| engine.numerics()).await.map_err(|e| Refusal::from(&*e))?;
    serde_json::to_vec(&Offer::own(app, &files, numerics)?).map_err(|e| Refusal::new(500, e.to_string()))
}

/// A bundle that is being written.
struct Saving {
    /// Reads what is there.
    file: File,
    /// How much that is. Closed after the last byte.
    written: watch::Receiver<u64>,
    work: JoinHandle<Result<(File, Exported), Refusal>>,
    _place: SemaphorePermit<'static>,
}

/// Waits for the prompt and begins to save its state, without the pages of its first `from` tokens.
async fn begin(app: &Arc<App>, room: &Room, from: usize) -> Result<Saving, Refusal> {
    if !room.computed().await {
        return Err(Refusal::new(503, "the request for this room has failed"));
    }
    let place = BUNDLES.acquire().await.map_err(|_| Refusal::new(503, "the server ends"))?;
    let (model, files, most) = (app.ready()?.clone(), files(app)?, app.limits.state);
    let tokens = whole_blocks(&room.tokens).to_vec();
    let (name, realm) = (app.name().to_owned(), realm(&room.namespace));
    let (out, file) = blocking(spool::pair).await?;
    let (progress, mut written) = watch::channel(0);
    let work = tokio::spawn(blocking(move || {
        let model_id = identity(&files)?;
        let what =
            Export { model: model_id, name, tokens, ends: Vec::new(), messages: None, realm, states: STATES, from };
        spool::export_into(&model, what, "the prompt", most, out, progress)
    }));
    match written.changed().await {
        Ok(()) => {
            written.mark_changed();
            Ok(Saving { file, written, work, _place: place })
        }
        // It has failed before the first byte.
        Err(_) => Err(ended(work).await.err().unwrap_or_else(|| Refusal::new(500, "an empty bundle"))),
    }
}

async fn ended(work: JoinHandle<Result<(File, Exported), Refusal>>) -> Result<(File, Exported), Refusal> {
    work.await.map_err(|e| Refusal::new(500, e.to_string()))?
}

/// Sends a bundle while it is written. The engine does not wait for the connection.
async fn send(line: &mut Line, saving: Saving) -> io::Result<Handed> {
    let Saving { mut file, mut written, work, _place } = saving;
    line.write(&[BUNDLE]).await?;
    let mut sent = 0;
    while written.changed().await.is_ok() {
        let there = *written.borrow_and_update();
        while sent < there {
            let mut piece = vec![0; (there - sent).min(PIECE as u64) as usize];
            let read = blocking(move || {
                file.read_exact(&mut piece).map_err(on_disk)?;
                Ok((file, piece))
            });
            let (same, piece) = read.await.map_err(|refusal| io::Error::other(refusal.message))?;
            file = same;
            line.send_piece(&piece).await?;
            sent += piece.len() as u64;
        }
    }
    let (_, saved) = ended(work).await.map_err(|refusal| io::Error::other(refusal.message))?;
    line.send_piece(&[]).await?;
    Ok(Handed::Over { tokens: saved.tokens, bytes: saved.bytes })
}
