//! The one who answers: it fetches the state of a prompt from the server that computes it.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    sync::Arc,
};

use selkie_core::{bundle::Reader, engine::Import, session::Model};
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use super::{
    Meeting, Offer, realm, whole_blocks,
    wire::{BUNDLE, Line, NOTHING, OFFER, STALL, WAIT, fate},
};
use crate::serve::{
    answer::blocking,
    app::App,
    metrics::Handed,
    refusal::Refusal,
    spool::{on_disk, spool},
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
        let (Some(host), Some(port)) = (&at.host, at.port) else {
            return Err("the request names no host and port for it".into());
        };
        let files = files(app).map_err(|refusal| refusal.message)?;
        let (tokens, own_realm) = (whole_blocks(&prompt).to_vec(), realm(namespace));
        let has = model.with(move |engine| (engine.scheduler().coverage(&own_realm, &tokens), engine.numerics())).await;
        let (has, numerics) = has.map_err(|e| e.to_string())?;
        let own = Offer::own(app, &files, numerics).map_err(|refusal| refusal.message)?;
        let mut line = Line::new(self.connect(host, port).await?);
        let lost = |e: std::io::Error| fate(&e);
        line.hello(at.room).await.map_err(lost)?;
        answered(&mut line, OFFER).await?;
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
        answered(&mut line, BUNDLE).await?;
        let (file, bytes) = receive(&mut line, app.limits.state).await?;
        let (model, namespace) = (model.clone(), namespace.to_owned());
        let imported = blocking(move || {
            let into = Import { model: identity(&files)?, namespace, exact_only: true };
            let mut bundle = Reader::open(file, NAME)?;
            let work = model.with(move |engine| engine.import(&mut bundle, &into));
            Ok(work.wait().map_err(|e| Refusal::from(&*e))??)
        });
        let imported = imported.await.map_err(|refusal| refusal.message)?;
        Ok(Handed::Over { tokens: imported.tokens, bytes })
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

/// Waits for a mark.
async fn answered(line: &mut Line, wanted: u8) -> Result<(), String> {
    loop {
        match line.number(1).await.map_err(|e| fate(&e))? as u8 {
            WAIT => {}
            NOTHING => return Err(line.reason().await.map_err(|e| fate(&e))?),
            mark if mark == wanted => return Ok(()),
            mark => return Err(format!("it sends a mark {mark} where {wanted} belongs")),
        }
    }
}

/// Writes what arrives, at most `most` bytes, into a file, which is at its start then; and how much it was.
async fn receive(line: &mut Line, most: u64) -> Result<(File, u64), String> {
    let plain = |refusal: Refusal| refusal.message;
    let mut file = blocking(spool).await.map_err(plain)?;
    let mut bytes = 0;
    while let Some(piece) = line.piece().await.map_err(|e| fate(&e))? {
        bytes += piece.len() as u64;
        if bytes > most {
            return Err(format!("it sends more than {most} bytes, which --max-state allows"));
        }
        let write = blocking(move || {
            file.write_all(&piece).map_err(on_disk)?;
            Ok(file)
        });
        file = write.await.map_err(plain)?;
    }
    file.seek(SeekFrom::Start(0)).map_err(|e| plain(on_disk(e)))?;
    Ok((file, bytes))
}
