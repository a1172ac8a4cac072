//! The engine without the type of its backend, so that callers are compiled once.

use std::{io::Write, pin::Pin};

use super::{
    Arrived, Engine, Event, Export, Exported, Import, Imported, Leaving, Request, Scheduler, SeqId, Sizes, Stats,
};
use crate::{
    backend::{Backend, Caps},
    bundle::Reader,
    error::Result,
    models::ModelSpec,
    state::CacheEvent,
};

/// What [`AnyEngine::step`] returns: one allocation a step.
pub type Stepping<'a> = Pin<Box<dyn Future<Output = Result<Vec<Event>>> + 'a>>;

/// What [`AnyEngine::retire`] returns.
pub type Retiring<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// What [`AnyEngine::keep`] returns.
pub type Keeping<'a> = Pin<Box<dyn Future<Output = Result<bool>> + 'a>>;

/// What [`AnyEngine::export`] returns.
pub type Exporting<'a> = Pin<Box<dyn Future<Output = Result<Exported>> + 'a>>;

/// An [`Engine`] on some backend. The methods are those of the engine.
pub trait AnyEngine {
    /// See [`Engine::submit`].
    ///
    /// # Errors
    /// Those of that method.
    fn submit(&mut self, request: Request) -> Result<SeqId>;
    /// See [`Engine::cancel`].
    fn cancel(&mut self, id: SeqId);
    /// See [`Engine::is_idle`].
    fn is_idle(&self) -> bool;
    /// See [`Backend::look`].
    ///
    /// # Errors
    /// Those of that method.
    fn look(&self) -> Result<()>;
    /// See [`Engine::step`].
    fn step(&mut self) -> Stepping<'_>;
    /// See [`Engine::retire`].
    fn retire(&mut self) -> Retiring<'_>;
    /// See [`Engine::keep`].
    fn keep(&mut self) -> Keeping<'_>;
    /// See [`Engine::close_disk`].
    fn close_disk(&mut self);
    /// See [`Engine::spec`].
    fn spec(&self) -> &ModelSpec;
    /// See [`Engine::caps`].
    fn caps(&self) -> &Caps;
    /// See [`Engine::sizes`].
    fn sizes(&self) -> &Sizes;
    /// See [`Engine::weight_bytes`].
    fn weight_bytes(&self) -> u64;
    /// See [`Engine::stats`].
    fn stats(&self) -> Stats;
    /// See [`Engine::scheduler`].
    fn scheduler(&self) -> &Scheduler;
    /// See [`Engine::clear_cache`].
    fn clear_cache(&mut self);
    /// See [`Engine::set_prefix_cache`].
    ///
    /// # Errors
    /// Those of that method.
    fn set_prefix_cache(&mut self, on: bool) -> Result<()>;
    /// See [`Engine::set_step_tokens`].
    fn set_step_tokens(&mut self, tokens: usize);
    /// See [`Engine::landed`].
    fn landed(&self) -> Option<(usize, f64)>;
    /// See [`Engine::subscribe`].
    fn subscribe(&mut self, on: bool);
    /// See [`Engine::take_cache_events`].
    fn take_cache_events(&mut self) -> Vec<CacheEvent>;
    /// See [`Engine::numerics`].
    fn numerics(&self) -> String;
    /// See [`Engine::export`].
    fn export<'a>(&'a self, what: Export, file: &'a str, out: &'a mut dyn Write) -> Exporting<'a>;
    /// See [`Engine::copy_out`].
    ///
    /// # Errors
    /// Those of that method.
    fn copy_out(&mut self, what: Export, whole: bool, arrived: Arrived) -> Result<Option<Leaving>>;
    /// See [`Engine::import`].
    ///
    /// # Errors
    /// Those of that method.
    fn import(&mut self, bundle: &mut Reader<'_>, into: &Import) -> Result<Imported>;
}

impl<B: Backend> AnyEngine for Engine<B> {
    fn submit(&mut self, request: Request) -> Result<SeqId> {
        self.submit(request)
    }
    fn cancel(&mut self, id: SeqId) {
        self.cancel(id);
    }
    fn is_idle(&self) -> bool {
        self.is_idle()
    }
    fn look(&self) -> Result<()> {
        self.runner().backend().look()
    }
    fn step(&mut self) -> Stepping<'_> {
        Box::pin(self.step())
    }
    fn retire(&mut self) -> Retiring<'_> {
        Box::pin(self.retire())
    }
    fn keep(&mut self) -> Keeping<'_> {
        Box::pin(self.keep())
    }
    fn close_disk(&mut self) {
        self.close_disk();
    }
    fn spec(&self) -> &ModelSpec {
        self.spec()
    }
    fn caps(&self) -> &Caps {
        self.caps()
    }
    fn sizes(&self) -> &Sizes {
        self.sizes()
    }
    fn weight_bytes(&self) -> u64 {
        self.weight_bytes()
    }
    fn stats(&self) -> Stats {
        self.stats()
    }
    fn scheduler(&self) -> &Scheduler {
        self.scheduler()
    }
    fn clear_cache(&mut self) {
        self.clear_cache();
    }
    fn set_prefix_cache(&mut self, on: bool) -> Result<()> {
        self.set_prefix_cache(on)
    }
    fn set_step_tokens(&mut self, tokens: usize) {
        self.set_step_tokens(tokens);
    }
    fn landed(&self) -> Option<(usize, f64)> {
        self.landed()
    }
    fn subscribe(&mut self, on: bool) {
        self.subscribe(on);
    }
    fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.take_cache_events()
    }
    fn numerics(&self) -> String {
        self.numerics()
    }
    fn export<'a>(&'a self, what: Export, file: &'a str, out: &'a mut dyn Write) -> Exporting<'a> {
        Box::pin(self.export(what, file, out))
    }
    fn copy_out(&mut self, what: Export, whole: bool, arrived: Arrived) -> Result<Option<Leaving>> {
        self.copy_out(what, whole, arrived)
    }
    fn import(&mut self, bundle: &mut Reader<'_>, into: &Import) -> Result<Imported> {
        self.import(bundle, into)
    }
}
