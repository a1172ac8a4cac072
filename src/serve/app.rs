//! What all requests share: the model once it is loaded, places, counters, keys, limits, and the phase of the server.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use selkie_core::{
    chat::system_clock,
    model_dir::ModelFiles,
    reply::{CallFormat, Reasoning},
    session::Model,
};
use tokio::sync::watch;

use super::{
    gate::Gate,
    handover::Part,
    host::Hosts,
    keys::Keys,
    metrics::Metrics,
    refusal::Refusal,
    replicas::{Placed, Replicas},
    speech::Speech,
};
use crate::web::files::Site;

/// Limits of requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Most bytes of a body.
    pub body: usize,
    /// Most bytes of a bundle.
    pub state: u64,
    /// How long an answer may take.
    pub answer: Duration,
    /// How long a prompt may take that another server computes.
    pub handover: Duration,
}

/// Where the server is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Requests are taken.
    Open,
    /// The ones that run are answered, others are refused.
    Draining,
    /// The ones that run are ended.
    Ending,
}

/// The state of the server.
pub struct App {
    /// Names of the model; the first one is reported.
    pub names: Vec<String>,
    /// Engines with it, once it is loaded.
    pub replicas: OnceLock<Replicas>,
    /// Its files.
    pub files: Option<Arc<ModelFiles>>,
    /// How its answers are read, once one was.
    speech: OnceLock<Speech>,
    /// Formats of calls and reasoning that replace what the chat template shows.
    pub formats: (Option<CallFormat>, Option<Reasoning>),
    /// Places of running and waiting answers.
    pub gate: Arc<Gate>,
    /// Counters.
    pub metrics: Metrics,
    /// Keys that requests need, if any.
    pub keys: Option<Keys>,
    /// Names by which requests must call the server, if it is for this machine only.
    pub hosts: Option<Hosts>,
    /// The browser page, if there is one.
    pub site: Option<Site>,
    /// What this server does of requests that are divided.
    pub handover: Part,
    /// Limits of requests.
    pub limits: Limits,
    /// Changes once or twice.
    pub phase: watch::Sender<Phase>,
    /// Seconds since 1970 of the start.
    pub created: u64,
    ids: Ids,
}

/// Names of requests: no two are equal, and none tells how many there were in other processes.
struct Ids {
    random: u64,
    next: AtomicU64,
}

impl App {
    /// A server that opens. It has no model yet, and none at all if there are no names; `places` is for answers.
    pub fn new(names: Vec<String>, places: usize, limits: Limits) -> Self {
        Self {
            names,
            replicas: OnceLock::new(),
            files: None,
            speech: OnceLock::new(),
            formats: (None, None),
            gate: Gate::new(places),
            metrics: Metrics::new(),
            keys: None,
            hosts: None,
            site: None,
            handover: Part::Both,
            limits,
            phase: watch::Sender::new(Phase::Open),
            created: system_clock(),
            ids: Ids { random: RandomState::new().hash_one(0), next: AtomicU64::new(0) },
        }
    }

    /// The name of the model in answers.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// A new name for a request.
    pub fn new_id(&self) -> String {
        format!("{:016x}{:08x}", self.ids.random, self.ids.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The model, if it is loaded.
    pub fn model(&self) -> Option<&Model> {
        self.replicas.get()?.models().next()
    }

    /// A place in one of the engines for a prompt.
    ///
    /// # Errors
    /// As [`App::ready`].
    pub async fn place(&self, prompt: &[u32], namespace: &str) -> Result<Placed, Refusal> {
        self.ready()?;
        let placed = match self.replicas.get() {
            Some(replicas) => replicas.place(prompt, namespace).await,
            None => None,
        };
        placed.ok_or_else(|| Refusal::new(503, "the server has no engine"))
    }

    /// The model, if all of its engines can answer.
    ///
    /// # Errors
    /// 503 with the reason while it is loaded, after its engine has failed, and when the server ends.
    pub fn ready(&self) -> Result<&Model, Refusal> {
        let later = |why: String| Refusal { retry_after: Some(5), ..Refusal::new(503, why) };
        if *self.phase.borrow() != Phase::Open {
            return Err(later("the server is shutting down".into()).coded("shutting_down"));
        }
        let loading = || later("the model is being loaded".into()).coded("loading");
        let replicas = self.replicas.get().ok_or_else(loading)?;
        match replicas.models().find_map(|model| model.health().err()) {
            None => self.model().ok_or_else(loading),
            Some(e) => Err(Refusal::new(503, format!("the engine has failed: {e}")).coded("engine_failed")),
        }
    }

    /// How answers of the model are read.
    pub fn speech(&self, model: &Model) -> &Speech {
        self.speech.get_or_init(|| Speech::new(model, self.formats.0, self.formats.1))
    }

    /// Checks the name of a model in a request; requests may leave it out.
    ///
    /// # Errors
    /// 404 for another one.
    pub fn check_name(&self, name: Option<&str>) -> Result<(), Refusal> {
        match name {
            Some(name) if !self.names.iter().any(|known| known == name) => {
                let names = self.names.join("`, `");
                let short: String = name.chars().take(100).collect();
                let why = format!("there is no model `{short}` here; this server has `{names}`");
                Err(Refusal { param: Some("model".into()), ..Refusal::new(404, why).coded("model_not_found") })
            }
            _ => Ok(()),
        }
    }

    /// Waits for a phase.
    pub async fn reached(&self, phase: Phase) {
        // The sender is a part of this.
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_answered_before_the_model_is_loaded_or_after_the_end() {
        let app = App::new(vec!["a".into(), "b".into()], 1, Limits::default());
        let code = |app: &App| app.ready().err().map(|refusal| (refusal.status, refusal.code.unwrap()));
        assert_eq!(code(&app), Some((503, "loading")));
        app.phase.send_replace(Phase::Draining);
        assert_eq!(code(&app), Some((503, "shutting_down")));
        assert!(app.check_name(None).is_ok() && app.check_name(Some("b")).is_ok());
        let other = app.check_name(Some("c")).unwrap_err();
        assert!(other.status == 404 && other.message.contains("`a`, `b`"), "{}", other.message);
        assert_ne!(app.new_id(), app.new_id());
    }
}
