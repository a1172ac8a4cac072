//! A session on either backend.

use selkie_core::{
    Result,
    backend::{Backend, Caps},
    cpu::CpuBackend,
    engine::{EngineOptions, Scheduler, SeqId, Sizes},
    model_dir::ModelFiles,
    models::ModelSpec,
    session::{Ask, Session, Update},
};
use selkie_wgpu::{Queue, WgpuBackend};

/// A loaded model. Boxed, because it is moved out while a step runs.
pub enum AnySession {
    /// On a GPU.
    Wgpu(Box<Session<WgpuBackend>>),
    /// In this module's own memory.
    Cpu(Box<Session<CpuBackend>>),
}

/// Evaluates an expression on either session.
macro_rules! on {
    ($any:expr, $s:ident => $e:expr) => {
        match $any {
            AnySession::Wgpu($s) => $e,
            AnySession::Cpu($s) => $e,
        }
    };
}

impl AnySession {
    pub fn submit(&mut self, ask: Ask) -> Result<SeqId> {
        on!(self, s => s.submit(ask))
    }

    pub async fn step(&mut self) -> Result<Vec<Update>> {
        on!(self, s => s.step().await)
    }

    pub fn cancel(&mut self, id: SeqId) {
        on!(self, s => s.cancel(id));
    }

    pub fn is_idle(&self) -> bool {
        on!(self, s => s.is_idle())
    }

    pub fn clear_cache(&mut self) {
        on!(self, s => s.engine_mut().clear_cache());
    }

    pub fn set_prefix_cache(&mut self, on: bool) -> Result<()> {
        on!(self, s => s.engine_mut().set_prefix_cache(on))
    }

    pub fn set_step_tokens(&mut self, tokens: usize) {
        on!(self, s => s.engine_mut().set_step_tokens(tokens));
    }

    /// Tokens of the step that the last call of `step` completed, and when it was enqueued.
    pub fn landed(&self) -> Option<(usize, f64)> {
        on!(self, s => s.engine().landed())
    }

    pub fn files(&self) -> &ModelFiles {
        on!(self, s => s.files())
    }

    pub fn caps(&self) -> &Caps {
        on!(self, s => s.engine().caps())
    }

    pub fn spec(&self) -> &ModelSpec {
        on!(self, s => s.engine().spec())
    }

    pub fn sizes(&self) -> &Sizes {
        on!(self, s => s.engine().sizes())
    }

    pub fn weight_bytes(&self) -> u64 {
        on!(self, s => s.engine().weight_bytes())
    }

    pub fn scheduler(&self) -> &Scheduler {
        on!(self, s => s.engine().scheduler())
    }

    /// The GPU, if there is one.
    pub fn gpu(&self) -> Option<&WgpuBackend> {
        match self {
            Self::Wgpu(s) => Some(s.engine().runner().backend()),
            Self::Cpu(_) => None,
        }
    }

    /// Its queue.
    pub fn queue(&self) -> Option<Queue> {
        self.gpu().map(WgpuBackend::queue)
    }
}

/// The options, with a memory budget that suits model and machine unless one was given.
pub fn options(
    spec: &ModelSpec,
    caps: &Caps,
    weights: u64,
    asked: &crate::request::LoadOptions,
    step_tokens: usize,
) -> Result<EngineOptions> {
    let options = EngineOptions {
        memory: asked.memory_bytes,
        max_batch: asked.max_batch.unwrap_or(crate::budget::MAX_BATCH),
        step_tokens,
        context: Some(asked.context_tokens.unwrap_or(crate::budget::MAX_CONTEXT)),
        prefix_cache: asked.prefix_cache.unwrap_or(true),
        clock: crate::js::now,
        ..EngineOptions::default()
    };
    if options.memory.is_some() {
        return Ok(options);
    }
    let shape = options.sizes(spec, caps, None)?.shape;
    let memory = crate::budget::memory(&shape, &options, weights, crate::js::device_memory());
    Ok(EngineOptions { memory: Some(memory), ..options })
}

/// Loads onto a backend.
pub async fn load<B: Backend>(
    backend: B,
    files: std::rc::Rc<ModelFiles>,
    options: &EngineOptions,
    report: &mut dyn FnMut(u64, u64),
) -> Result<Box<Session<B>>> {
    Session::load(backend, files, options, &mut |p| report(p.done, p.total)).await.map(Box::new)
}
