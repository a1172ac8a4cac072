//! Hand-over: a worker computes prompts (`--role prefill`), another one answers them (`--role decode`). A router such as SGLang's
//! sends the same request to both, with `bootstrap_host`, `bootstrap_port` and `bootstrap_room`. Of its prompt the first worker
//! computes one token and opens a [room](rooms); the second one comes there, see [`wire`], and puts what it gets, bundles, into its
//! prefix cache: pages while the prompt is computed, then its state. It then computes only what follows. Whatever goes wrong, it computes the prompt itself.

mod decode;
mod prefill;
mod rooms;
mod wire;

use std::{sync::Arc, time::Duration};

use selkie_core::{
    model_dir::ModelFiles,
    session::Model,
    state::{GRID, Realm},
};
use serde::Deserialize;
use tokio::{
    net::TcpListener,
    time::{Instant, timeout_at},
};

use super::{
    app::{App, Phase},
    fields::Fields,
    metrics::Handed,
    refusal::Refusal,
    wanted::Wanted,
};
use crate::{
    args::{HandoverArgs, Role},
    failure::{Failure, Outcome},
};
use decode::Peers;
pub use rooms::Opened;
use rooms::Rooms;

/// What this server does of a request with a room.
pub enum Part {
    /// All of it; rooms are left unread.
    Both,
    /// It computes prompts, for those who come to these rooms.
    Prefill(Arc<Rooms>),
    /// It answers with what these servers have computed.
    Decode(Peers),
}

impl Part {
    /// That of a role.
    pub fn new(args: &HandoverArgs) -> Self {
        match args.role {
            Role::Both => Self::Both,
            Role::Prefill => Self::Prefill(Rooms::new()),
            Role::Decode => Self::Decode(Peers::new(args.prefill_host.clone())),
        }
    }

    /// Where the prompts of a request are handed over; nowhere for a server that does all of it.
    ///
    /// # Errors
    /// If a field of a room is of another form.
    pub fn meetings(&self, fields: &Fields<'_>) -> Result<Vec<Meeting>, Refusal> {
        match self {
            Self::Both => Ok(Vec::new()),
            _ => Meeting::read(fields),
        }
    }

    /// Leaves of a request what this server does for it, if it has a room.
    pub fn limit(&self, wanted: &mut Wanted, meetings: &[Meeting]) {
        if matches!(self, Self::Prefill(_)) && !meetings.is_empty() {
            (wanted.n, wanted.max_tokens, wanted.controls.min_tokens) = (1, Some(1), 0);
        }
    }
}

/// Pieces of prompts that may be on their way at a time.
const PIECES: usize = 8;

/// Those of a server with this role.
pub fn pieces(args: &HandoverArgs) -> usize {
    if args.role == Role::Prefill { PIECES } else { 0 }
}

/// A socket for those who fetch prompts, if this server hands some over.
///
/// # Errors
/// If the port is taken.
pub fn bind(args: &HandoverArgs) -> Outcome<Option<std::net::TcpListener>> {
    if args.role != Role::Prefill {
        return Ok(None);
    }
    let (ip, port) = (args.handover_listen, args.handover_port);
    std::net::TcpListener::bind((ip, port)).map(Some).map_err(|e| {
        Failure::Other(format!("cannot hand over on {ip} port {port}: {e}; --handover-port takes another one"))
    })
}

/// Hands over until the server ends.
pub async fn serve(listener: TcpListener, app: Arc<App>) {
    if let Part::Prefill(rooms) = &app.handover {
        prefill::serve(listener, &app, rooms).await;
    }
}

/// The place where one prompt is handed over.
#[derive(Debug, PartialEq)]
pub struct Meeting {
    host: Option<String>,
    port: Option<u16>,
    room: u64,
}

/// Routers send a list if there are several prompts or answers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Each<T> {
    Many(Vec<Option<T>>),
    One(T),
}

impl<T: Clone> Each<T> {
    fn at(&self, i: usize) -> Option<T> {
        match self {
            Self::Many(all) => all.get(i).cloned().flatten(),
            Self::One(one) => Some(one.clone()),
        }
    }
}

impl Meeting {
    /// Those of a request, in the order of its prompts.
    fn read(fields: &Fields<'_>) -> Result<Vec<Self>, Refusal> {
        let host: Option<Each<String>> = fields.get("bootstrap_host")?;
        let port: Option<Each<u16>> = fields.get("bootstrap_port")?;
        let rooms = match fields.get("bootstrap_room")? {
            None => Vec::new(),
            Some(Each::One(room)) => vec![Some(room)],
            Some(Each::Many(rooms)) => rooms,
        };
        let meeting = |(i, room): (usize, Option<u64>)| {
            let (host, port) = (host.as_ref().and_then(|h| h.at(i)), port.as_ref().and_then(|p| p.at(i)));
            Some(Self { host, port, room: room? })
        };
        Ok(rooms.into_iter().enumerate().map_while(meeting).collect())
    }
}

/// What is done before a request runs: rooms are opened for its prompts, or its prompts are fetched.
///
/// # Errors
/// If a room cannot be opened, or the server ends. A prompt that is not fetched is no error.
pub async fn prepare(
    app: &Arc<App>,
    model: &Model,
    prompts: Vec<(Meeting, Vec<u32>)>,
    namespace: &str,
) -> Result<Vec<Option<Opened>>, Refusal> {
    match &app.handover {
        Part::Both => Ok(Vec::new()),
        Part::Prefill(rooms) => {
            prompts.into_iter().map(|(at, prompt)| rooms.open(at.room, prompt, namespace).map(Some)).collect()
        }
        Part::Decode(peers) => {
            let latest = Instant::now() + app.limits.handover;
            for (at, prompt) in prompts {
                let room = at.room;
                let fetched = tokio::select! {
                    fetched = timeout_at(latest, peers.fetch(app, model, at, prompt, namespace)) => fetched,
                    () = app.reached(Phase::Ending) => return Err(Refusal::new(503, "the server is shutting down")),
                };
                match fetched.unwrap_or_else(|_| Err(too_late(app.limits.handover))) {
                    Ok(handed) => app.metrics.handed(&handed),
                    Err(why) => {
                        tracing::warn!("the prompt of room {room} is computed here: {why}");
                        app.metrics.handed(&Handed::Not);
                    }
                }
            }
            Ok(Vec::new())
        }
    }
}

fn too_late(time: Duration) -> String {
    format!("it took more than {} s, which --handover-time allows", time.as_secs())
}

/// What both sides compare before anything is handed over.
#[derive(Clone, Debug, Deserialize, serde::Serialize, PartialEq)]
struct Offer {
    model: String,
    weights: String,
    config: String,
    tokenizer: String,
    numerics: String,
}

impl Offer {
    /// That of this server. The digests were computed when the model was loaded.
    fn own(app: &App, files: &ModelFiles, numerics: String) -> Result<Self, Refusal> {
        let identity = pollster::block_on(files.identity(&mut |_| {}))?;
        let [weights, config, tokenizer] =
            [identity.weights, identity.config, identity.tokenizer].map(|digest| digest.to_string());
        Ok(Self { model: app.name().to_owned(), weights, config, tokenizer, numerics })
    }

    /// Why values of this offer are of no use to a server with another one.
    fn differs(&self, own: &Self) -> Option<String> {
        let pairs = [
            ("weights", &self.weights, &own.weights),
            ("configuration", &self.config, &own.config),
            ("tokenizer", &self.tokenizer, &own.tokenizer),
            ("numerics", &self.numerics, &own.numerics),
        ];
        let (what, theirs, ours) = pairs.into_iter().find(|(_, theirs, ours)| theirs != ours)?;
        let short = |text: &str| text.chars().take(200).collect::<String>();
        let (model, theirs, ours) = (short(&self.model), short(theirs), short(ours));
        Some(format!("it has other {what}: `{model}` has {theirs}, this server {ours}"))
    }
}

/// The part of a prompt whose state can be used: at least its last token is computed by the one who answers.
fn whole_blocks(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1) / GRID * GRID]
}

/// The realm of a namespace, for values that are exact.
fn realm(namespace: &str) -> Realm {
    Realm { namespace: namespace.to_owned(), ..Realm::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Vec<Meeting>, Refusal> {
        Meeting::read(&Fields::body(body.as_bytes()).unwrap())
    }

    #[test]
    fn rooms_of_one_prompt_and_of_several() {
        let at = |host: &str, port, room| Meeting { host: Some(host.into()), port, room };
        let one = r#"{"bootstrap_host": "a", "bootstrap_port": 8998, "bootstrap_room": 9223372036854775807}"#;
        assert_eq!(read(one).unwrap(), [at("a", Some(8998), i64::MAX as u64)]);
        let many = r#"{"bootstrap_host": ["a", "b"], "bootstrap_port": [null, 7], "bootstrap_room": [1, 2]}"#;
        assert_eq!(read(many).unwrap(), [at("a", None, 1), at("b", Some(7), 2)]);
        for none in ["{}", r#"{"bootstrap_host": "a"}"#, r#"{"bootstrap_room": null}"#] {
            assert_eq!(read(none).unwrap(), []);
        }
        for (bad, field) in [
            (r#"{"bootstrap_room": "x"}"#, "bootstrap_room"),
            (r#"{"bootstrap_room": -1}"#, "bootstrap_room"),
            (r#"{"bootstrap_port": 70000, "bootstrap_room": 1}"#, "bootstrap_port"),
            (r#"{"bootstrap_host": 7, "bootstrap_room": 1}"#, "bootstrap_host"),
        ] {
            assert_eq!(read(bad).unwrap_err().param.as_deref(), Some(field), "{bad}");
        }
    }

    #[test]
    fn an_offer_of_another_model_says_what_differs() {
        let own = Offer {
            model: "demo".into(),
            weights: "aa".into(),
            config: "bb".into(),
            tokenizer: "cc".into(),
            numerics: "cpu".into(),
        };
        assert_eq!(Offer { model: "another name".into(), ..own.clone() }.differs(&own), None);
        let why = Offer { weights: "ab".into(), ..own.clone() }.differs(&own).unwrap();
        assert!(why.contains("other weights") && why.contains("ab") && why.contains("aa"), "{why}");
        assert!(Offer { numerics: "wgpu".into(), ..own.clone() }.differs(&own).unwrap().contains("numerics"));
    }
}
