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
    sync::{Semaphore, mpsc::unbounded_channel},
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

/// Memory for bundles on their way into the cache, of all prompts together: 1 GiB, or one bundle if that is larger.
static ROOM: Semaphore = Semaphore::const_new(UNITS as usize);
const UNITS: u32 = 1024;
/// Bytes of a unit of it.
const UNIT: u64 = 1 << 20;

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
        let into = Import { model: identity(&files).map_err(message)?, namespace, exact_only: true, pieces: false };
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

/// Puts all bundles, of at most `most` bytes together, into the cache: each while the next ones come.
async fn receive(line: &mut Line, model: &Model, into: &Import, most: u64) -> Result<Handed, String> {
    let (to, mut bundles) = unbounded_channel();
    let arrive = async {
        let (mut bytes, mut last) = (0, false);
        while !last {
            last = answered(line, &[PAGES, LAST]).await? == LAST;
            let length = line.length(most - bytes).await.map_err(|e| fate(&e))?;
            let room = ROOM.acquire_many(length.div_ceil(UNIT).clamp(1, UNITS.into()) as u32).await;
            let begun = Instant::now();
            let bundle = line.bundle(length).await.map_err(|e| fate(&e))?;
            tracing::debug!("a bundle of {length} bytes has come in {:?}", begun.elapsed());
            bytes += length;
            // Nobody takes it if one before could not be used: that is the error then.
            let _ = to.send((bundle, last, room));
        }
        Ok::<_, String>(bytes)
    };
    let enter = async {
        let (mut tokens, mut end) = (0, false);
        while !end && let Some((bundle, last, _room)) = bundles.recv().await {
            // After the last one nothing follows that it could wait for.
            let into = Import { pieces: !last, ..into.clone() };
            (tokens, end) = (import(model, bundle, into).await.map_err(message)?.tokens, last);
        }
        Ok(tokens)
    };
    let (bytes, tokens) = tokio::try_join!(arrive, enter)?;
    Ok(Handed::Over { tokens, bytes })
}

/// Its checksums are compared before the engine is asked.
async fn import(model: &Model, bundle: Zeroed, into: Import) -> Result<Imported, Refusal> {
    let begun = Instant::now();
    let check = move || {
        let mut bundle = Reader::open(Cursor::new(bundle), NAME)?;
        bundle.verify()?;
        Ok(bundle)
    };
    let mut bundle = blocking(check).await?;
    let checked = begun.elapsed();
    let imported = model.with(move |engine| engine.import(&mut bundle, &into)).await;
    let imported = imported.map_err(|e| Refusal::from(&*e))??;
    tracing::debug!("a bundle was checked in {checked:?} and is in the cache after {:?}", begun.elapsed());
    Ok(imported)
}

fn message(refusal: Refusal) -> String {
    refusal.message
}
