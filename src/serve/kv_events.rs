//! KV events: what the prefix cache holds, for routers that place requests by it. Published by ZMQ in vLLM's form: frames
//! `[topic, sequence number (u64, big-endian), payload]`, see [`wire`].
//!
//! Events carry prompts as token ids, so that nothing is published unless it is asked for.

mod ledger;
mod wire;

use std::{
    collections::VecDeque,
    time::{SystemTime, UNIX_EPOCH},
};

use selkie_core::{session::Model, state::Realm};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use crate::{
    args::{KvFormat, ServerArgs},
    failure::{Failure, Outcome},
};
use ledger::Ledger;

/// Batches that a consumer which missed some can ask for again.
const KEPT: usize = 10_000;
/// Ends a replay: a sequence number of −1 and no payload.
const END: [u8; 8] = [0xff; 8];

/// Sockets that are bound.
pub struct Publisher {
    topic: String,
    format: KvFormat,
    namespace: String,
    events: PubSocket,
    replay: Option<RouterSocket>,
    kept: VecDeque<(u64, Vec<u8>)>,
    next: u64,
}

impl Publisher {
    /// Binds the sockets; none if no events are asked for.
    ///
    /// # Errors
    /// If an address is malformed or taken.
    pub async fn bind(args: &ServerArgs) -> Outcome<Option<Self>> {
        let Some(address) = &args.kv_events else { return Ok(None) };
        let refused = |option: &str, address: &str, e: ZmqError| {
            Failure::Other(format!("{option} {address}: {e}; an address is like tcp://127.0.0.1:5557"))
        };
        let mut events = PubSocket::new();
        events.bind(address).await.map_err(|e| refused("--kv-events", address, e))?;
        let replay = match &args.kv_events_replay {
            Some(address) => {
                let mut socket = RouterSocket::new();
                socket.bind(address).await.map_err(|e| refused("--kv-events-replay", address, e))?;
                Some(socket)
            }
            None => None,
        };
        let (topic, namespace) = (args.kv_events_topic.clone(), args.kv_events_namespace.clone());
        let format = args.kv_events_format;
        Ok(Some(Self { topic, format, namespace, events, replay, kept: VecDeque::new(), next: 0 }))
    }

    /// Publishes until the engine ends.
    pub async fn run(mut self, model: Model) {
        let realm = Realm { namespace: self.namespace.clone(), ..Realm::default() };
        let Ok(root) = model.with(move |engine| engine.scheduler().root(&realm)).await else { return };
        let mut ledger = Ledger::new(root);
        let mut tree = model.cache_events();
        // The engine ends with its last handle.
        drop(model);
        loop {
            tokio::select! {
                events = tree.next() => {
                    let Some(events) = events else { return };
                    let changes: Vec<_> = events.iter().filter_map(|event| ledger.apply(event)).collect();
                    if !changes.is_empty() {
                        self.publish(wire::batch(now(), &changes, self.format)).await;
                    }
                }
                Some(request) = asked(&mut self.replay) => self.replay(request).await,
            }
        }
    }

    async fn publish(&mut self, payload: Vec<u8>) {
        let frames = [self.topic.clone().into_bytes(), self.next.to_be_bytes().to_vec(), payload.clone()];
        // A subscriber that is gone or too slow loses the message, and can ask for it again.
        if let Err(e) = self.events.send(message(frames)).await {
            tracing::debug!("KV event {}: {e}", self.next);
        }
        self.kept.push_back((self.next, payload));
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
        self.next += 1;
    }

    /// Answers `[identity, empty, first sequence number]` with all batches from there on.
    async fn replay(&mut self, request: ZmqMessage) {
        let Some(socket) = &mut self.replay else { return };
        let frames = request.into_vec();
        let (Some(identity), Some(first)) = (frames.first(), frames.last()) else { return };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else { return };
        let first = u64::from_be_bytes(first);
        let kept = self.kept.iter().filter(|(number, _)| *number >= first);
        let batches = kept.map(|(number, payload)| (number.to_be_bytes(), payload.clone()));
        for (number, payload) in batches.chain([(END, Vec::new())]) {
            let frames = [identity.to_vec(), Vec::new(), number.to_vec(), payload];
            if let Err(e) = socket.send(message(frames)).await {
                tracing::debug!("replay of KV events: {e}");
                return;
            }
        }
    }
}

/// The next request for a replay; none if there is no socket for it.
async fn asked(socket: &mut Option<RouterSocket>) -> Option<ZmqMessage> {
    match socket {
        Some(socket) => socket.recv().await.ok(),
        None => std::future::pending().await,
    }
}

fn message<const N: usize>(frames: [Vec<u8>; N]) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame.into()));
    message
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
