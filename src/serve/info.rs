//! Requests that generate nothing: what is served and how it is, and text to tokens and back.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderValue, Response, header},
};
use selkie_core::{
    chat::Conversation,
    session::{Model, Prompt, WhenFull, picture},
    state::Realm,
};
use serde_json::{Value, json};

use super::{
    answer::{blocking, json as answer, receive},
    app::App,
    blocks,
    fields::Fields,
    guard::Caller,
    ollama,
    openai::conversation,
    refusal::{Dialect, Refusal},
    replicas::Replicas,
    speech::ToolUse,
};

type Answer = Response<Body>;

/// `/health`, `/ping`, `/ready`: 200, or 503 with the reason.
pub async fn health(State(app): State<Arc<App>>) -> Answer {
    match app.ready() {
        Ok(_) => answer(&json!({ "status": "ok" })),
        Err(refusal) => refusal.response(Dialect::OpenAi),
    }
}

/// `/v1/models`
pub async fn models(State(app): State<Arc<App>>) -> Answer {
    let data: Vec<Value> = app.names.iter().map(|name| card(&app, name)).collect();
    answer(&json!({ "object": "list", "data": data }))
}

/// `/v1/models/{name}`; names may have slashes.
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer {
    match app.check_name(Some(&name)) {
        Ok(()) => answer(&card(&app, &name)),
        Err(refusal) => refusal.response(Dialect::OpenAi),
    }
}

fn card(app: &App, name: &str) -> Value {
    let context = app.model().map(|model| model.facts().context);
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "selkie",
        "root": app.name(),
        "parent": null,
        "max_model_len": context,
        "permission": [],
    })
}

/// `/version`
pub async fn version() -> Answer {
    answer(&json!({ "version": env!("CARGO_PKG_VERSION"), "commit": env!("SELKIE_COMMIT") }))
}

/// `/metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Answer {
    let Some((facts, now)) = app.replicas.get().and_then(Replicas::summed) else {
        return Refusal::new(503, "the model is being loaded").response(Dialect::OpenAi);
    };
    let mut response = Response::new(Body::from(app.metrics.text(app.name(), &facts, &now)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `/load`: requests that run or wait.
pub async fn load(State(app): State<Arc<App>>) -> Answer {
    answer(&json!({ "server_load": app.gate.taken() }))
}

/// `/server_info`, which routers ask for.
pub async fn server_info(State(app): State<Arc<App>>) -> Answer {
    with_model(&app, |model| {
        let summed = app.replicas.get().and_then(Replicas::summed);
        let (facts, now) = summed.unwrap_or_else(|| (model.facts().clone(), model.stats()));
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "served_model_name": app.name(),
            "model_path": app.name(),
            "status": "ready",
            "backend": facts.backend,
            "device": facts.device,
            "max_model_len": facts.context,
            "max_running_requests": facts.max_batch,
            "max_total_num_tokens": facts.pages * facts.block,
            "page_size": facts.block,
            "block_size": facts.block,
            "state_slots": facts.slots,
            "kv_pages": facts.pages,
            "step_tokens": facts.sizes.limits.step_tokens,
            "running": now.running,
            "waiting": now.waiting,
        })
    })
}

/// `/engine`: what the page shows of the model and its cache. With keys, only what the caller's own prompts left is drawn.
pub async fn engine(State(app): State<Arc<App>>, request: Request) -> Answer {
    let namespace = request.extensions().get::<Caller>().map(|caller| caller.namespace.clone());
    let result = async {
        let model = app.ready()?.clone();
        let only = app.keys.as_ref().and(namespace).map(|namespace| Realm { namespace, ..Realm::default() });
        let stats = model.with(move |engine| picture::stats(engine, only.as_ref())).await;
        let stats = stats.map_err(|e| Refusal::from(&*e))?;
        Ok::<_, Refusal>(json!({ "name": app.name(), "info": picture::info(&model), "stats": stats }))
    };
    match result.await {
        Ok(value) => answer(&value),
        Err(refusal) => refusal.response(Dialect::OpenAi),
    }
}

/// `/model_info`, which routers ask for.
pub async fn model_info(State(app): State<Arc<App>>) -> Answer {
    with_model(&app, |model| {
        let facts = model.facts();
        json!({
            "model_path": app.name(),
            "tokenizer_path": app.name(),
            "is_generation": true,
            "model_type": facts.family,
            "architectures": [facts.family],
            "layers": facts.layer_map,
            "parameters": facts.parameters,
            "weight_bytes": facts.weight_bytes,
            "vocab_size": facts.vocab,
            "max_context_length": facts.context,
            "fingerprint": format!("{:016x}", facts.fingerprint),
        })
    })
}

fn with_model(app: &App, say: impl FnOnce(&Model) -> Value) -> Answer {
    match app.ready() {
        Ok(model) => answer(&say(model)),
        Err(refusal) => refusal.response(Dialect::OpenAi),
    }
}

/// `/tokenize`: a prompt, or messages with the chat template, as token ids.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Answer {
    on_text(app, request, |_, model, fields| {
        let ids = match fields.raw("messages") {
            Some(_) => encode(model, chat(fields)?)?,
            None => {
                let text: String = fields.need("prompt")?;
                model.text().tokenizer()?.encode(&text)?
            }
        };
        let mut said = json!({ "count": ids.len(), "max_model_len": model.facts().context });
        if fields.flag("return_token_strs")? {
            let tokenizer = model.text().tokenizer()?;
            let strings: Result<Vec<String>, _> = ids.iter().map(|id| tokenizer.decode(&[*id])).collect();
            said["token_strs"] = strings?.into();
        }
        said["tokens"] = ids.into();
        Ok(said)
    })
    .await
}

/// `/detokenize`: token ids as text.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Answer {
    on_text(app, request, |_, model, fields| {
        let ids: Vec<u32> = fields.need("tokens")?;
        let vocab = model.facts().vocab;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(fields.refuse("tokens", &format!("has {id}, and the model has ids 0 to {}", vocab - 1)));
        }
        Ok(json!({ "prompt": model.text().tokenizer()?.decode(&ids)? }))
    })
    .await
}

/// `/v1/chat/completions/render`: the prompt of a chat as token ids, without an answer.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Answer {
    on_text(app, request, |app, model, fields| {
        let ids = encode(model, chat(fields)?)?;
        Ok(json!({ "model": app.name(), "count": ids.len(), "token_ids": ids }))
    })
    .await
}

/// `/v1/messages/count_tokens`: the length of Anthropic's prompt.
pub async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Answer {
    on_text(app, request, |_, model, fields| {
        let (talk, _) = blocks::conversation(fields)?;
        Ok(json!({ "input_tokens": encode(model, talk)?.len() }))
    })
    .await
}

/// `/api/tags`: the model in Ollama's words.
pub async fn tags(State(app): State<Arc<App>>) -> Answer {
    answer(&ollama::tags(&app.names, app.model().map(Model::facts), app.created))
}

/// `/v1/responses/{id}`: answers are not kept.
pub async fn not_stored() -> Answer {
    let why = "answers are not stored by this server; send the conversation with the next request";
    Refusal::new(404, why).coded("not_stored").response(Dialect::OpenAi)
}

/// The chat of a request in OpenAI's form.
fn chat(fields: &Fields<'_>) -> Result<Conversation, Refusal> {
    conversation(fields, ToolUse::openai(fields)?.tools)
}

fn encode(model: &Model, talk: Conversation) -> Result<Vec<u32>, Refusal> {
    Ok(model.encode(Prompt::Conversation(talk), WhenFull::Error, Some(1))?.ids)
}

/// Answers a request about text, away from the thread that serves others.
async fn on_text(
    app: Arc<App>,
    request: Request,
    work: impl FnOnce(&App, &Model, &Fields<'_>) -> Result<Value, Refusal> + Send + 'static,
) -> Answer {
    let dialect = Dialect::of(request.uri().path());
    let result = async {
        let model = app.ready()?.clone();
        let (_, body) = receive(&app, request).await?;
        blocking(move || {
            let fields = Fields::body(&body.bytes)?;
            app.check_name(fields.get::<String>("model")?.as_deref())?;
            work(&app, &model, &fields)
        })
        .await
    };
    match result.await {
        Ok(value) => answer(&value),
        Err(refusal) => refusal.response(dialect),
    }
}

/// Endpoints of other kinds of model.
pub async fn not_served(request: Request) -> Answer {
    let path = request.uri().path();
    let why =
        format!("{path} is not served: this server generates text; it has no embeddings and no other kinds of models");
    Refusal::new(501, why).coded("not_served").response(Dialect::of(path))
}

/// Any other path.
pub async fn unknown(request: Request) -> Answer {
    let path: String = request.uri().path().chars().take(200).collect();
    Refusal::new(404, format!("there is nothing at {path}")).coded("unknown_path").response(Dialect::of(&path))
}

/// A known path with another method.
pub async fn wrong_method(request: Request) -> Answer {
    let why = format!("{} is not a method of {}", request.method(), request.uri().path());
    Refusal::new(405, why).response(Dialect::of(request.uri().path()))
}
