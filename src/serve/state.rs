//! `/v1/state/save` and `/v1/state/load`: bundles over HTTP, out of and into the caller's namespace.
//!
//! They are on their way in files, see [`spool`](super::spool). Clients name no path.

use std::{
    fs::File,
    future::poll_fn,
    io::{Seek, SeekFrom, Write},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderValue, Response, header},
};
use http_body::Body as _;
use selkie_core::{
    Error,
    bundle::{Identity, Reader},
    chat::{Conversation, End},
    engine::{Export, Import, Imported},
    model_dir::ModelFiles,
    session::{Ask, Encoded, Model, Prompt, Update, WhenFull},
    state::Realm,
};
use serde_json::json;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use super::{
    answer::{blocking, json as answer, receive},
    app::App,
    fields::Fields,
    guard::Caller,
    keys::prefix_namespace,
    openai::{conversation, prompts},
    page::Pieces,
    refusal::{Dialect, Refusal},
    replicas::Replicas,
    speech::ToolUse,
    spool::{self, PIECE, on_disk, spool, too_long},
};
use crate::bundle::{STATES, export};

/// The bundle's name in messages.
const NAME: &str = "the bundle";
/// Media type of bundles.
pub const BINARY: &str = "application/octet-stream";
/// How long a client may send nothing of a bundle.
const STALL_TIME: Duration = Duration::from_secs(30);
/// How long a request may wait for [`TRANSFERS`].
const WAIT: Duration = Duration::from_secs(10);
/// Bundles that may be on their way at a time: each has a file.
static TRANSFERS: Semaphore = Semaphore::const_new(2);

/// `/v1/state/save`: the state after a prompt as a bundle. The prompt is computed if the cache has it not.
pub async fn save(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    attempt_save(app, request).await.unwrap_or_else(|refusal| refusal.response(Dialect::OpenAi))
}

/// `/v1/state/load`: the prefix of a bundle becomes one of the caller's.
pub async fn load(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    attempt_load(app, request).await.unwrap_or_else(|refusal| refusal.response(Dialect::OpenAi))
}

async fn attempt_save(app: Arc<App>, request: Request) -> Result<Response<Body>, Refusal> {
    app.ready()?;
    let files = files(&app)?;
    let (caller, body) = receive(&app, request).await?;
    let transfer = transfer().await?;
    let (wanted, places) = {
        let app = app.clone();
        blocking(move || {
            let fields = Fields::body(&body.bytes)?;
            app.check_name(fields.get::<String>("model")?.as_deref())?;
            let wanted = Wanted::read(&fields, app.ready()?, &caller)?;
            Ok((wanted, app.gate.take(1, app.metrics.mean_seconds())?))
        })
        .await?
    };
    let placed = app.place(&wanted.prompt.ids, &wanted.namespace).await?;
    let model = placed.model.clone();
    let ask = wanted.ask();
    let prepared = {
        let model = model.clone();
        blocking(move || Ok(model.prepare(ask)?)).await?
    };
    let mut answer = model.send([prepared]).pop().ok_or_else(|| Refusal::new(500, "the request was lost"))?;
    while let Some(update) = answer.next().await {
        if let Update::Done(done) = update
            && let Some(e) = done.error()
        {
            return Err(e.into());
        }
    }
    drop(places);
    let most = app.limits.state;
    let (name, work_model) = (app.name().to_owned(), model);
    let (file, bytes) = blocking(move || {
        let what = wanted.export(name, identity(&files)?);
        let (file, saved) = spool::export(&work_model, what, NAME, most)?;
        Ok((file, saved.bytes))
    })
    .await?;
    let mut response = Response::new(Body::new(Pieces::new(file, bytes, Some(Box::new(transfer)))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(BINARY));
    response.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
    Ok(response)
}

async fn attempt_load(app: Arc<App>, request: Request) -> Result<Response<Body>, Refusal> {
    let files = files(&app)?;
    app.ready()?;
    let (mut parts, body) = request.into_parts();
    let caller = parts.extensions.remove::<Caller>().ok_or_else(|| Refusal::new(500, "the request has no caller"))?;
    let most = app.limits.state;
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most) {
        return Err(too_long(most));
    }
    let _transfer = transfer().await?;
    let file = arrive(body, most).await?;
    let imported = blocking(move || {
        let into = Import { model: identity(&files)?, namespace: caller.namespace, exact_only: true, pieces: false };
        let models = app.replicas.get().into_iter().flat_map(Replicas::models);
        // Each engine has a cache of its own.
        let load = |model| import(model, file.try_clone().map_err(on_disk)?, into.clone());
        let mut all: Vec<Imported> = models.map(load).collect::<Result<_, _>>()?;
        all.pop().ok_or_else(|| Refusal::new(503, "the server has no engine"))
    })
    .await?;
    Ok(answer(&json!({
        "object": "state",
        "tokens": imported.tokens,
        "states": imported.states,
        "pages": imported.pages,
    })))
}

/// Puts the bundle in a file into the cache of an engine.
fn import(model: &Model, file: File, into: Import) -> Result<Imported, Refusal> {
    let mut bundle = Reader::open(file, NAME)?;
    let work = model.with(move |engine| engine.import(&mut bundle, &into));
    let imported = work.wait().map_err(|e| Refusal::from(&*e))?;
    imported.map_err(|e| match e {
        // The option for other values is the command line's: no request over HTTP could use them.
        Error::BadRequest(why) => Refusal::bad(why.split("; without the option").next().unwrap_or_default().into()),
        e => e.into(),
    })
}

/// What is saved.
struct Wanted {
    prompt: Encoded,
    /// The conversation as JSON, if its messages alone give the same prompt again.
    messages: Option<String>,
    namespace: String,
    share: String,
    priority: i32,
    states: usize,
}

impl Wanted {
    /// Reads a request: `messages` as for a chat, or a `prompt` as for a completion.
    fn read(fields: &Fields<'_>, model: &Model, caller: &Caller) -> Result<Self, Refusal> {
        let (prompt, messages) = match fields.raw("messages") {
            Some(_) => {
                let talk = conversation(fields, ToolUse::openai(fields)?.tools)?;
                let alone = talk.tools.is_empty() && talk.values.is_empty();
                let messages = alone.then(|| serde_json::to_string(&talk.messages).ok()).flatten();
                (Prompt::Conversation(Conversation { end: End::Messages, ..talk }), messages)
            }
            None => match <[Prompt; 1]>::try_from(prompts(fields)?) {
                Ok([prompt]) => (prompt, None),
                Err(_) => return Err(fields.refuse("prompt", "must be one text or one list of token ids")),
            },
        };
        let salt: String = fields.get("cache_salt")?.unwrap_or_default();
        Ok(Self {
            prompt: model.encode(prompt, WhenFull::Error, Some(1))?,
            messages,
            namespace: prefix_namespace(&caller.namespace, &salt),
            share: caller.namespace.clone(),
            priority: fields.get("priority")?.unwrap_or_default(),
            states: fields.count("states", 1, 1 << 16)?.map_or(STATES, |n| n as usize),
        })
    }

    /// A request that computes the prompt.
    fn ask(&self) -> Ask {
        Ask {
            prompt: Prompt::Encoded(self.prompt.clone()),
            max_tokens: Some(1),
            namespace: self.namespace.clone(),
            share: self.share.clone(),
            priority: self.priority,
            ..Ask::default()
        }
    }

    fn export(self, name: String, model: Identity) -> Export {
        let realm = Realm { namespace: self.namespace, ..Realm::default() };
        export(model, name, self.prompt, self.messages, realm, self.states)
    }
}

/// The files of the model, which are there since before it was loaded.
pub fn files(app: &App) -> Result<Arc<ModelFiles>, Refusal> {
    app.files.clone().ok_or_else(|| Refusal::new(501, "this server has no files of its model").coded("not_served"))
}

/// Digests of the model's files. The first call reads all weights.
pub fn identity(files: &ModelFiles) -> Result<Identity, Refusal> {
    Ok(pollster::block_on(files.identity(&mut |_| {}))?)
}

/// A place for a bundle on its way.
async fn transfer() -> Result<SemaphorePermit<'static>, Refusal> {
    match timeout(WAIT, TRANSFERS.acquire()).await {
        Ok(Ok(place)) => Ok(place),
        _ => {
            let why = "too many states are saved and loaded at the same time; try again later";
            Err(Refusal { retry_after: Some(10), ..Refusal::new(503, why) })
        }
    }
}

/// Writes a body into a file as it arrives; the file is at its start.
async fn arrive(mut body: Body, most: u64) -> Result<File, Refusal> {
    let mut file = blocking(spool).await?;
    let (mut piece, mut all) = (Vec::new(), 0);
    loop {
        let data = match timeout(STALL_TIME, next_data(&mut body)).await {
            Ok(Ok(data)) => data,
            Ok(Err(_)) => return Err(Refusal::bad("the bundle did not arrive".into())),
            Err(_) => return Err(Refusal::new(408, "the bundle did not arrive in time")),
        };
        all += data.as_ref().map_or(0, Bytes::len) as u64;
        if all > most {
            return Err(too_long(most));
        }
        let ended = data.is_none();
        piece.extend_from_slice(&data.unwrap_or_default());
        if ended || piece.len() >= PIECE {
            let full = std::mem::take(&mut piece);
            file = blocking(move || {
                file.write_all(&full).map_err(on_disk)?;
                Ok(file)
            })
            .await?;
        }
        if ended {
            file.seek(SeekFrom::Start(0)).map_err(on_disk)?;
            return Ok(file);
        }
    }
}

/// The next bytes of a body; `None` at its end.
async fn next_data(body: &mut Body) -> Result<Option<Bytes>, axum::Error> {
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
        if let Ok(data) = frame?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}
