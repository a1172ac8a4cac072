//! The engine as a JavaScript class.

use std::cell::{Cell, RefCell};
use std::pin::Pin;

use selkie_core::{
    Error,
    backend::{Backend, Caps},
    cpu::CpuBackend,
    engine::{EngineOptions, SeqId},
    models,
};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use crate::{
    device::{self, Device},
    error,
    files::ModelFile,
    js, model,
    pace::Pace,
    report,
    request::{LoadOptions, Request},
    session::{self, AnySession},
};

/// Maximum and initial tokens of a step on a GPU, on a software adapter and on the CPU.
const GPU_STEP: (usize, usize) = (512, 128);
const SOFTWARE_STEP: (usize, usize) = (64, 16);
const CPU_STEP: (usize, usize) = (256, 32);

/// A loaded model with its states, its prefix tree and its requests.
#[wasm_bindgen]
pub struct WasmEngine {
    /// `None` while a step runs.
    session: RefCell<Option<AnySession>>,
    pace: Cell<Pace>,
    /// When the last step was completed.
    landed: Cell<f64>,
    /// Resolves when the device has run the last step that had no output to read.
    enqueued: RefCell<Option<Pin<Box<dyn Future<Output = ()>>>>>,
    device: String,
    info: Value,
}

#[wasm_bindgen]
impl WasmEngine {
    /// Loads a model. `files` are `{ name, size, read(offset, length) }`; `on_progress` gets `{ stage, loaded, total }`.
    pub async fn load(
        files: Vec<ModelFile>,
        options: JsValue,
        on_progress: Option<js_sys::Function>,
    ) -> Result<WasmEngine, JsValue> {
        let asked: LoadOptions = js::parse(&options).map_err(|e| error::error("bad_request", &e))?;
        let (source, files) = model::open(files, asked.label.clone()).await?;
        let fail = |e: Error| source.error(&e);
        let spec = models::spec(&files.config).map_err(fail)?;
        let progress = |stage: &str, loaded: u64, total: u64| {
            if let Some(f) = &on_progress {
                let p = json!({ "stage": stage, "loaded": loaded, "total": total });
                // Exceptions of the listener are ignored.
                let _ = f.call1(&JsValue::NULL, &js::object(&p));
            }
        };
        let weights = files.checkpoint.bytes();
        let fitting = |caps: &Caps, (most, _): (usize, usize)| -> Result<EngineOptions, JsValue> {
            let options = session::options(&spec, caps, weights, &asked, most).map_err(fail)?;
            let sizes = options.sizes(&spec, caps, None).map_err(fail)?;
            match model::problem(&files, &spec, caps, &sizes) {
                Some(why) => Err(error::error("too_large", &why)),
                None => Ok(options),
            }
        };
        let mut weights_loaded = |loaded, total| progress("weights", loaded, total);
        let (session, step, device, fallback) = match device::open(asked.backend).await? {
            Device::Wgpu(backend, name) => {
                let step = if backend.is_software() { SOFTWARE_STEP } else { GPU_STEP };
                let options = fitting(backend.caps(), step)?;
                source.feed(backend.queue());
                let session =
                    session::load(backend, files.clone(), &options, &mut weights_loaded).await.map_err(fail)?;
                let gpu = session.engine().runner().backend();
                gpu.settle(&mut |done, of| progress("pipelines", done as u64, of as u64)).await.map_err(fail)?;
                (AnySession::Wgpu(session), step, name, None)
            }
            Device::Cpu(fallback) => {
                let backend = CpuBackend::new();
                let options = fitting(backend.caps(), CPU_STEP)?;
                let session =
                    session::load(backend, files.clone(), &options, &mut weights_loaded).await.map_err(fail)?;
                let name = session.engine().caps().device.clone();
                (AnySession::Cpu(session), CPU_STEP, name, fallback)
            }
        };
        progress("weights", weights, weights);
        let info = report::info(&session, &device, fallback.as_deref());
        Ok(Self {
            session: RefCell::new(Some(session)),
            pace: Cell::new(Pace::new(step.1, step.0)),
            landed: Cell::new(0.0),
            enqueued: RefCell::default(),
            device,
            info,
        })
    }

    /// Facts fixed at load.
    pub fn info(&self) -> JsValue {
        js::object(&self.info)
    }

    /// Queues a request and returns its number.
    pub fn submit(&self, request: JsValue) -> Result<f64, JsValue> {
        let request: Request = js::parse(&request).map_err(|e| error::error("bad_request", &e))?;
        let seed = (js_sys::Math::random() * 9_007_199_254_740_992.0) as u64;
        self.with(|s| {
            let ask = request.ask(&s.files().generation, seed);
            s.submit(ask).map(|id| id.0 as f64)
        })?
        .map_err(|e| error::from_core(&e))
    }

    /// Runs one step and returns its updates; none if there is nothing to do.
    pub async fn step(&self) -> Result<JsValue, JsValue> {
        let mut session = self.session.take().ok_or_else(busy)?;
        let result = self.step_of(&mut session).await;
        self.session.replace(Some(session));
        result.map(|updates| js::object(&updates.into())).map_err(|e| error::from_core(&e))
    }

    /// Ends a request early; its last update comes with the next step.
    pub fn cancel(&self, id: f64) -> Result<(), JsValue> {
        self.with(|s| s.cancel(SeqId(id as u64)))
    }

    /// Whether nothing is queued or running.
    #[wasm_bindgen(js_name = isIdle)]
    pub fn is_idle(&self) -> bool {
        self.with(|s| s.is_idle()).unwrap_or(false)
    }

    /// Empties the prefix cache.
    #[wasm_bindgen(js_name = clearCache)]
    pub fn clear_cache(&self) -> Result<(), JsValue> {
        self.with(AnySession::clear_cache)
    }

    /// Turns the prefix cache on or off. Fails while a request runs.
    #[wasm_bindgen(js_name = setPrefixCache)]
    pub fn set_prefix_cache(&self, on: bool) -> Result<(), JsValue> {
        self.with(|s| s.set_prefix_cache(on))?.map_err(|e| error::from_core(&e))
    }

    /// Counters, pools and the prefix tree.
    pub fn stats(&self) -> Result<JsValue, JsValue> {
        self.with(|s| js::object(&report::stats(s, &self.device)))
    }
}

impl WasmEngine {
    fn with<T>(&self, f: impl FnOnce(&mut AnySession) -> T) -> Result<T, JsValue> {
        self.session.borrow_mut().as_mut().map(f).ok_or_else(busy)
    }

    async fn step_of(&self, session: &mut AnySession) -> selkie_core::Result<Vec<Value>> {
        let mut pace = self.pace.get();
        session.set_step_tokens(pace.tokens());
        let updates = session.step().await?;
        if updates.is_empty()
            && let Some(queue) = session.queue()
        {
            // Without a wait, steps without output would queue up on the device, and a stop would take effect after all of them.
            let before = self.enqueued.replace(Some(Box::pin(queue.done())));
            if let Some(before) = before {
                before.await;
            }
        }
        if let Some((tokens, enqueued)) = session.landed() {
            // The step started when it was enqueued, or when the previous one ended.
            let now = js::now();
            pace.took(tokens, now - enqueued.max(self.landed.replace(now)));
            self.pace.set(pace);
        }
        Ok(updates.into_iter().map(report::update).collect())
    }
}

fn busy() -> JsValue {
    error::error("busy", "a step is running: await it first")
}
