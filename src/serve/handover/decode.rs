//! The one who answers: it fetches the state of a prompt from the server that computes it.

use std::{io::Cursor, sync::Arc};

use selkie_core::{
    bundle::Reader,
    engine::{Import, Imported},
    session::Model,
    zeroed::Zeroed,
};
use tokio::{
    net::{TcpStream, lookup_host},
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    Meeting, Offer, realm, whole_blocks,
    wire::{LAST, Line, NOTHING, OFFER, PAGES, STALL, WAIT, fate},
};
use crate::serve::{
    answer::blocking,
    app::App,
    metrics::Handed,
    refusal::Refusal,
    state::{files, identity},
};

/// The bundle's name in messages.
const NAME: &str = "what was handed over";

/// Servers that prompts may be fetched from: those of this machine, and named ones. Without that, whoever sends a request could
/// have this server connect to anything, and take states from there.
pub struct Peers {
    named: Vec<String>,
}

impl Peers {
    /// With the names of other machines.
    pub fn new(named: Vec<String>) -> Self {
        Self { named }
    }

    /// Fetches the state of a prompt into the cache. The error says why that was not possible.
    pub async fn fetch(
        &self,
        app: &Arc<App>,
        model: &Model,
        at: Meeting,
        prompt: Vec<u32>,
        namespace: &str,
    ) -> Result<Handed, String> {
        let namespace = namespace.to_owned();
        let (Some(host), Some(port)) = (&at.host, at.port) else {
            return Err("the request names no host and port for it".into());
        };
        let files = files(app).map_err(message)?;
        let (tokens, own_realm) = (whole_blocks(&prompt).to_vec(), realm(&namespace));
        let has = model.with(move |engine| (engine.scheduler().coverage(&own_realm, &tokens), engine.numerics())).await;
        let (has, numerics) = has.map_err(|e| e.to_string())?;
        let own = Offer::own(app, &files, numerics).map_err(message)?;
        let mut line = Line::new(self.connect(host, port).await?);
        let lost = |e: std::io::Error| fate(&e);
        line.hello(at.room).await.map_err(lost)?;
        answered(&mut line, &[OFFER]).await?;
        let (offer, theirs) = line.offered(prompt.len()).await.map_err(lost)?;
        let offer: Offer = serde_json::from_slice(&offer).map_err(|e| format!("its offer is not understood: {e}"))?;
        if let Some(why) = offer.differs(&own) {
            return Err(why);
        }
        if theirs.is_none_or(|theirs| theirs != prompt) {
            return Err("it computes another prompt for the same request".into());
        }
        if has.usable == whole_blocks(&prompt).len() {
            return Ok(Handed::Known);
        }
        line.write(&(has.known as u32).to_le_bytes()).await.map_err(lost)?;
        let into = Import { model: identity(&files).map_err(message)?, namespace, exact_only: true, pieces: true };
        receive(&mut line, model, &into, app.limits.state).await
    }

    async fn connect(&self, host: &str, port: u16) -> Result<TcpStream, String> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let named = self.named.iter().any(|name| name.eq_ignore_ascii_case(host));
        let found = timeout(STALL, lookup_host((host, port))).await;
        let found = found.map_err(|_| format!("{host:?} is not found in time"))?;
        let found: Vec<_> = found.map_err(|e| format!("{host:?} is not found: {e}"))?.collect();
        let mut why = format!("{host:?} is not on this machine; `--prefill-host {host}` allows it");
        for address in found.into_iter().filter(|address| named || address.ip().is_loopback()) {
            match timeout(STALL, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(e)) => why = format!("{address}: {e}"),
                Err(_) => why = format!("{address} does not answer"),
            }
        }
        Err(why)
    }
}

/// Waits for one of these marks.
async fn answered(line: &mut Line, wanted: &[u8]) -> Result<u8, String> {
    loop {
        match line.number(1).await.map_err(|e| fate(&e))? as u8 {
            WAIT => {}
            NOTHING => return Err(line.reason().await.map_err(|e| fate(&e))?),
            mark if wanted.contains(&mark) => return Ok(mark),
            mark => return Err(format!("it sends a mark {mark}, which has no place here")),
        }
    }
}

/// Puts all bundles, of at most `most` bytes together, into the cache: each while the next one comes.
async fn receive(line: &mut Line, model: &Model, into: &Import, most: u64) -> Result<Handed, String> {
    let (mut bytes, mut last) = (0, false);
    let mut importing: Option<JoinHandle<Result<Imported, Refusal>>> = None;
    let mut tokens = 0;
    while !last {
        last = answered(line, &[PAGES, LAST]).await? == LAST;
        let begun = Instant::now();
        let bundle = line.bundle(most - bytes).await.map_err(|e| fate(&e))?;
        tracing::debug!("a bundle of {} bytes has come in {:?}", bundle.len(), begun.elapsed());
        bytes += bundle.len() as u64;
        if let Some(before) = importing.take() {
            imported(before).await?;
        }
        importing = Some(tokio::spawn(import(model.clone(), bundle, into.clone())));
    }
    if let Some(importing) = importing {
        tokens = imported(importing).await?.tokens;
    }
    Ok(Handed::Over { tokens, bytes })
}

/// Its checksums are compared before the engine is asked.
async fn import(model: Model, bundle: Zeroed, into: Import) -> Result<Imported, Refusal> {
    blocking(move || {
        let begun = Instant::now();
        let mut bundle = Reader::open(Cursor::new(bundle), NAME)?;
        bundle.verify()?;
        let checked = begun.elapsed();
        let work = model.with(move |engine| engine.import(&mut bundle, &into));
        let imported = work.wait().map_err(|e| Refusal::from(&*e))??;
        tracing::debug!("a bundle was checked in {checked:?} and is in the cache after {:?}", begun.elapsed());
        Ok(imported)
    })
    .await
}

async fn imported(work: JoinHandle<Result<Imported, Refusal>>) -> Result<Imported, String> {
    work.await.map_err(|e| e.to_string())?.map_err(message)
}

fn message(refusal: Refusal) -> String {
    refusal.message
}
