//! `selkie serve`: the model behind HTTP, in the protocols of OpenAI, Anthropic and Ollama.
//!
//! A request passes [`guard`], becomes a [`wanted::Wanted`] in the file of its protocol, runs in [`run`], and a
//! [`voice::Voice`] says its answer. Rendering and tokenising happen on threads for such work, decoding where an answer is
//! read; the engine's thread waits for neither, nor for a slow client.

use std::{net::TcpListener, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    routing::{MethodRouter, get, post},
};
use selkie_core::{engine::EngineOptions, session::Model};
use tokio::time::{sleep, timeout};

use crate::{
    args::{BackendName, Role, ServeArgs, ServerArgs},
    bundle,
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    model,
    terminal::{self, Output},
    web::{self, files::Site},
};

use answer::{Read, generate};
use app::{App, Limits, Phase};
use handover::Part;
use host::Hosts;
use listen::Connections;
pub use local::Local;
use replicas::Replicas;

#[cfg(test)]
mod fault_tests;

mod answer;
mod anthropic;
mod app;
mod blocks;
mod fields;
mod gate;
mod guard;
mod handover;
mod host;
mod info;
mod keys;
mod kv_events;
mod listen;
mod local;
mod metrics;
mod ollama;
mod openai;
mod page;
mod refusal;
mod replicas;
mod responses;
mod run;
mod speech;
mod spool;
mod sse;
mod state;
mod voice;
mod wanted;

/// How often signals and the engine's health are looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long the server says that its engine has failed before it ends: probes are to see it.
const LAST_WORDS: Duration = Duration::from_secs(4);
/// Connections at a time to the page alone.
const PAGE_CONNECTIONS: usize = 256;

/// Serves until a signal comes, and the running answers are complete.
///
/// # Errors
/// If it cannot listen, the model cannot be loaded, or the engine fails.
pub fn run(args: &ServeArgs) -> Outcome {
    let ServerArgs { listen, port, .. } = args.server;
    let listener = TcpListener::bind((listen, port))
        .map_err(|e| Failure::Other(format!("cannot listen on {listen} port {port}: {e}; --port takes another one")))?;
    let address = listener.local_addr().map_err(|e| Failure::Other(format!("the new socket has no address: {e}")))?;
    let keys = args.server.keys.as_deref().map(keys::Keys::read).transpose()?;
    let files = model::open(&args.model)?;
    let names = match &*args.server.served_model_name {
        [] => vec![args.model.model.as_ref().map_or_else(|| "demo".into(), |_| files.name.clone())],
        names => names.to_vec(),
    };
    let options = model::engine_options_of_long_runs(&args.pool, model::DEFAULT_MAX_BATCH);
    let options = EngineOptions { outgoing: handover::pieces(&args.handover), ..options };
    let replicas = args.server.replicas;
    let places = options.max_batch.saturating_mul(replicas).saturating_add(args.server.max_queue);
    let limits = Limits {
        body: usize::try_from(args.server.max_body).unwrap_or(usize::MAX),
        state: args.server.max_state,
        answer: Duration::from_secs(args.server.answer_time as u64),
        handover: Duration::from_secs(args.handover.handover_time as u64),
    };
    check_role(args)?;
    check_replicas(args)?;
    let handover = handover::bind(&args.handover)?;
    let local = listen.is_loopback();
    let open = !local && keys.is_none();
    let hosts = local.then(|| Hosts::new(address.port(), args.server.allow_host.clone()));
    let mut app = App::new(names, places, limits);
    app.formats = (args.server.tool_call_parser, args.server.reasoning_parser);
    (app.keys, app.hosts, app.site) = (keys, hosts, web::found());
    (app.files, app.handover) = (Some(files.clone()), Part::new(&args.handover));
    let app = Arc::new(app);
    let interrupt = Interrupt::listen()?;
    Output::new().text(&format!("http://{address}/\n"))?;
    if open {
        terminal::note("other machines may use this server without a key; --keys FILE asks for one");
    }
    let runtime = runtime()?;
    let backend = args.model.backend.clone();
    let divided = args.handover.role != Role::Both;
    let load = move || {
        if divided {
            // Both servers compare it; the first call reads all weights.
            bundle::identity(&files)?;
        }
        model::load_replicas(&backend, &files, &options, replicas)
    };
    let ended = runtime.block_on(live(app, Sockets { http: listener, handover }, args, interrupt, load));
    // Nothing is left that anybody waits for.
    runtime.shutdown_background();
    ended
}

/// Refuses options with which there is nothing to hand over.
fn check_role(args: &ServeArgs) -> Outcome {
    let why = match args.handover.role {
        Role::Both => return Ok(()),
        _ if args.pool.no_prefix_cache => "the prefix cache, where states are handed over: leave --no-prefix-cache out",
        _ => return Ok(()),
    };
    Err(Failure::Usage(format!("--role prefill and decode need {why}")))
}

/// Refuses options that concern one engine.
fn check_replicas(args: &ServeArgs) -> Outcome {
    let backend = &args.model.backend;
    let why = match args.server.replicas {
        1 => return Ok(()),
        _ if !matches!(backend.name, BackendName::Cpu | BackendName::Cuda) => "name the backend: --backend cpu or cuda",
        _ if backend.ranks > 1 || !backend.gpus.is_empty() => "--ranks and --gpus are of one engine: leave them out",
        _ if backend.place()?.process.is_some() => "a rank is of one engine: start a server without ranks",
        _ if args.handover.role != Role::Both => "--role is for servers with one engine",
        _ if args.server.kv_events.is_some() => "--kv-events tells of one engine's cache: start a server for each",
        _ if args.pool.tiers.options().disk.is_some() => {
            "a directory of the disk cache is one engine's: start a server for each"
        }
        _ => return Ok(()),
    };
    Err(Failure::Usage(format!("--replicas: {why}")))
}

/// Few threads: the work is the engine's, which has its own. Those that prepare prompts are as many as cores.
fn runtime() -> Outcome<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(cores.clamp(1, 4)).max_blocking_threads(cores.clamp(2, 16)).thread_name("serve");
    builder.enable_io().enable_time().build().map_err(|e| Failure::Other(format!("the server's threads: {e}")))
}

/// Serves the browser page at `port`, and nothing else, for ever.
///
/// # Errors
/// If it cannot.
pub fn page_only(listener: TcpListener, port: u16, site: Site) -> Outcome {
    let mut app = App::new(Vec::new(), 0, Limits::default());
    (app.hosts, app.site) = (Some(Hosts::new(port, Vec::new())), Some(site));
    let app = Arc::new(app);
    let router = finish(Router::new(), &app);
    runtime()?.block_on(async {
        let rules = Connections { many: false, ..Connections::new(PAGE_CONNECTIONS) };
        listen::serve(on_runtime(listener)?, router, rules, app.phase.subscribe()).await;
        Ok(())
    })
}

/// The socket as the runtime has them.
fn on_runtime(listener: TcpListener) -> Outcome<tokio::net::TcpListener> {
    let made = listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener));
    made.map_err(|e| Failure::Other(format!("the socket cannot be used: {e}")))
}

/// Where a server listens.
struct Sockets {
    http: TcpListener,
    /// For those who fetch prompts.
    handover: Option<TcpListener>,
}

/// Serves from the start of loading to the end of draining.
async fn live(
    app: Arc<App>,
    sockets: Sockets,
    args: &ServeArgs,
    interrupt: Interrupt,
    load: impl FnOnce() -> Outcome<Vec<Model>> + Send + 'static,
) -> Outcome {
    let rules = Connections::new(args.server.max_connections);
    let phase = app.phase.subscribe();
    let mut server = tokio::spawn(listen::serve(on_runtime(sockets.http)?, router(app.clone()), rules, phase));
    if let Some(listener) = sockets.handover {
        tokio::spawn(handover::serve(on_runtime(listener)?, app.clone()));
    }
    let events = kv_events::Publisher::bind(&args.server).await?;
    let mut loading = tokio::task::spawn_blocking(load);
    let models = loop {
        tokio::select! {
            loaded = &mut loading => {
                break loaded.map_err(|_| Failure::Other("loading the model met a fault of the program".into()))??;
            }
            () = sleep(TICK) => interrupt.check()?,
        }
    };
    let replicas = Replicas::new(models.clone());
    let Some(first) = models.first() else { return Err(Failure::Other("no engine was loaded".into())) };
    if let Some(events) = events {
        tokio::spawn(events.run(first.clone()));
    }
    let facts = first.facts();
    terminal::dim_note(format_args!("{} is served on {} ({}); Ctrl-C ends", app.name(), facts.backend, facts.device));
    let _ = app.replicas.set(replicas);
    let ended = until_asked(&models, &interrupt).await;
    app.phase.send_replace(Phase::Draining);
    if timeout(Duration::from_secs(args.server.drain_time as u64), &mut server).await.is_err() {
        app.phase.send_replace(Phase::Ending);
        // Time to say so.
        let _ = timeout(Duration::from_secs(1), &mut server).await;
    }
    ended
}

/// Waits for a signal, or for a failure of the engine.
async fn until_asked(models: &[Model], interrupt: &Interrupt) -> Outcome {
    loop {
        sleep(TICK).await;
        if let Some(e) = models.iter().find_map(|model| model.health().err()) {
            sleep(LAST_WORDS).await;
            return Err(Failure::Other(format!("the engine has failed: {e}")));
        }
        if interrupt.check().is_err() {
            terminal::dim_note(format_args!("no more requests are taken; the running ones are answered"));
            return Ok(());
        }
    }
}

fn router(app: Arc<App>) -> Router {
    let absent = || post(info::not_served);
    let model = Router::new()
        .route("/v1/chat/completions", generates(openai::read_chat))
        .route("/v1/completions", generates(openai::read_completion))
        .route("/v1/responses", generates(responses::read))
        .route("/v1/responses/{id}", get(info::not_stored))
        .route("/v1/messages", generates(anthropic::read))
        .route("/v1/messages/count_tokens", post(info::count_tokens))
        .route("/v1/state/save", post(state::save))
        .route("/v1/state/load", post(state::load))
        .route("/api/chat", generates(ollama::read))
        .route("/api/tags", get(info::tags))
        .route("/api/version", get(info::version))
        .route("/v1/chat/completions/render", post(info::render))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*name}", get(info::model))
        .route("/tokenize", post(info::tokenize))
        .route("/detokenize", post(info::detokenize))
        .route("/engine", get(info::engine))
        .route("/load", get(info::load))
        .route("/server_info", get(info::server_info))
        .route("/model_info", get(info::model_info))
        .route("/get_model_info", get(info::model_info))
        .route("/v1/embeddings", absent())
        .route("/v1/rerank", absent())
        .route("/v1/moderations", absent())
        .route("/v1/images/generations", absent())
        .route("/v1/audio/speech", absent())
        .route("/v1/audio/transcriptions", absent())
        .method_not_allowed_fallback(info::wrong_method)
        .route_layer(middleware::from_fn_with_state(app.clone(), guard::model_only));
    // These tell nothing of prompts, and probes have no key.
    let free = Router::new()
        .route("/health", get(info::health))
        .route("/ping", get(info::health))
        .route("/ready", get(info::health))
        .route("/readyz", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/version", get(info::version))
        .method_not_allowed_fallback(info::wrong_method);
    finish(model.merge(free), &app)
}

/// Adds what every request passes, and the page.
fn finish(routes: Router<Arc<App>>, app: &Arc<App>) -> Router {
    let guard = middleware::from_fn_with_state(app.clone(), guard::guard);
    routes.fallback(page::find).layer(guard).with_state(app.clone())
}

/// An endpoint that generates.
fn generates(read: Read) -> MethodRouter<Arc<App>> {
    post(move |State(app): State<Arc<App>>, request: Request| generate(app, request, read))
}
