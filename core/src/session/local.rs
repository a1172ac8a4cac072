//! A model whose engine runs where its requests come from: for a page, which has one thread, and for tests.

use std::{
    collections::BTreeMap,
    task::{Context, Poll, Waker},
};

use super::{Answer, Ask, Driver, Facts, Model, Text, Update};
use crate::{
    Result,
    backend::Backend,
    engine::{AnyEngine, EngineOptions, SeqId},
    model_dir::ModelFiles,
    weights::Progress,
};

/// A model, its driver and all answers. The engine runs in [`Local::step`] only.
pub struct Local {
    model: Model,
    driver: Driver,
    /// Those that have not ended.
    answers: BTreeMap<SeqId, Answer>,
    next: u64,
}

impl Local {
    /// Loads the model in `files` onto `backend` and reports progress to `report`.
    ///
    /// # Errors
    /// Those of [`load`](super::load).
    pub async fn load<B: Backend + 'static>(
        backend: B,
        files: &ModelFiles,
        options: &EngineOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let text = Text::new(files)?;
        let engine = super::load(backend, files, options, report).await?;
        let facts = Facts::new(files, &engine).await?;
        Ok(Self::new(Model::new(text, facts, Box::new(engine))))
    }

    /// A handle with its driver.
    pub fn new((model, driver): (Model, Driver)) -> Self {
        Self { model, driver, answers: BTreeMap::new(), next: 0 }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Those of [`Model::submit`].
    pub fn submit(&mut self, ask: Ask) -> Result<SeqId> {
        let answer = self.model.submit(ask)?;
        self.driver.take_orders();
        let id = SeqId(self.next);
        self.next += 1;
        self.answers.insert(id, answer);
        Ok(id)
    }

    /// Ends a request early; its last update comes with the next step.
    pub fn cancel(&mut self, id: SeqId) {
        if let Some(answer) = self.answers.get(&id) {
            answer.cancel();
            self.driver.take_orders();
        }
    }

    /// Whether nothing is queued or running.
    pub fn is_idle(&self) -> bool {
        self.answers.is_empty() && self.driver.engine().is_idle()
    }

    /// Runs one step of the engine and returns its updates, in order for each request. There may be none while a prompt is
    /// computed.
    ///
    /// The future may be dropped before it is ready: nothing is lost, and the next call continues at the same point.
    ///
    /// # Errors
    /// Those of the device. The engine cannot be used after that. An error of one request ends only that request.
    pub async fn step(&mut self) -> Result<Vec<(SeqId, Update)>> {
        self.driver.turn().await?;
        let mut news = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        self.answers.retain(|id, answer| {
            while let Poll::Ready(Some(update)) = answer.poll_next(&mut context) {
                news.push((*id, update));
            }
            !answer.is_ended()
        });
        Ok(news)
    }

    /// The handle.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The engine.
    pub fn engine(&self) -> &dyn AnyEngine {
        self.driver.engine()
    }

    /// The engine, for its cache and its counters. Requests submitted there have no text here.
    pub fn engine_mut(&mut self) -> &mut dyn AnyEngine {
        self.driver.engine_mut()
    }
}
