//! The engine as a JavaScript class.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    pin::{Pin, pin},
    task::{Poll, Waker},
};

use selkie_core::{
    Error,
    backend::{Backend, Caps},
    bundle::Identity,
    cpu::CpuBackend,
    engine::{AnyEngine, Engine, EngineOptions, SeqId, Speculate},
    model_dir::ModelFiles,
    models,
    session::{Facts, Local, Model, Text, picture},
};
use selkie_wgpu::Queue;
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use crate::{
    device::{self, Device},
    error,
    files::ModelFile,
    js, model, options,
    pace::Pace,
    report,
    request::{LoadOptions, Request},
    tier::{self, StateFolder},
};

/// Maximum and initial tokens of a step on a GPU, on a software adapter and on the CPU.
const GPU_STEP: (usize, usize) = (512, 128);
const SOFTWARE_STEP: (usize, usize) = (64, 16);
const CPU_STEP: (usize, usize) = (256, 32);

/// A loaded model with its states, its prefix tree and its requests.
#[wasm_bindgen]
pub struct WasmEngine {
    /// `None` while a step runs.
    pub(crate) session: RefCell<Option<Local>>,
    /// Digests of the model's files, once they were read for a bundle.
    pub(crate) identity: RefCell<Option<Identity>>,
    /// Of the step that runs.
    waker: RefCell<Option<Waker>>,
    /// That step is to return now.
    interrupted: Cell<bool>,
    /// Of the GPU, if it runs on one.
    queue: Option<Queue>,
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
    /// Loads a model. `files` are `{ name, size, read(offset, length) }`; `on_progress` gets `{ stage, loaded, total }`; evicted states
    /// go to files in `states`. Without these it loads all the same, and says why there are none.
    pub async fn load(
        files: Vec<ModelFile>,
        options: JsValue,
        on_progress: Option<js_sys::Function>,
        states: Option<StateFolder>,
    ) -> Result<WasmEngine, JsValue> {
        let asked: LoadOptions = js::parse(&options).map_err(|e| error::error("bad_request", &e))?;
        let (source, files) = model::open(files, asked.label.clone()).await?;
        let fail = |e: Error| source.error(&e);
        let architecture = models::read(&files.config).map_err(fail)?;
        let guesses = Speculate::from(asked.speculate);
        let spec = guesses.architecture(&architecture, &files.checkpoint).map_err(fail)?.spec();
        let text = Text::new(&files).map_err(fail)?;
        let progress = |stage: &str, loaded: u64, total: u64| {
            if let Some(f) = &on_progress {
                let p = json!({ "stage": stage, "loaded": loaded, "total": total });
                // Exceptions of the listener are ignored.
                let _ = f.call1(&JsValue::NULL, &js::object(&p));
            }
        };
        let weights = files.checkpoint.bytes();
        let fitting = |caps: &Caps, (most, _): (usize, usize)| -> Result<EngineOptions, JsValue> {
            let options = options::for_page(&spec, caps, weights, &asked, most).map_err(fail)?;
            let sizes = options.sizes(&spec, caps, None).map_err(fail)?;
            match model::problem(&files, &spec, caps, &sizes) {
                Some(why) => Err(error::error("too_large", &why)),
                None => Ok(options),
            }
        };
        let mut weights_loaded = |loaded, total| progress("weights", loaded, total);
        let disk;
        let (engine, step, device, fallback, queue, software) = match device::open(asked.backend).await? {
            Device::Wgpu(backend, name) => {
                let step = if backend.is_software() { SOFTWARE_STEP } else { GPU_STEP };
                let options = fitting(backend.caps(), step)?;
                disk = tier::open(states.as_ref(), &files, backend.caps()).await;
                let options = tier::with(options, &disk);
                let (queue, software) = (backend.queue(), backend.is_software());
                source.feed(queue.clone());
                let engine = load(backend, &files, &options, &mut weights_loaded).await.map_err(fail)?;
                let gpu = engine.runner().backend();
                // A software adapter would compile for seconds what a short first question does not need.
                if !software {
                    engine.runner().expect_steps(step.0).map_err(fail)?;
                }
                gpu.settle(&mut |done, of| progress("pipelines", done as u64, of as u64)).await.map_err(fail)?;
                (Box::new(engine) as Box<dyn AnyEngine>, step, name, None, Some(queue), software)
            }
            Device::Cpu(fallback) => {
                let backend = CpuBackend::new();
                let options = fitting(backend.caps(), CPU_STEP)?;
                disk = tier::open(states.as_ref(), &files, backend.caps()).await;
                let options = tier::with(options, &disk);
                let engine = load(backend, &files, &options, &mut weights_loaded).await.map_err(fail)?;
                let name = engine.caps().device.clone();
                (Box::new(engine) as Box<dyn AnyEngine>, CPU_STEP, name, fallback, None, false)
            }
        };
        progress("weights", weights, weights);
        let facts = Facts::new(&files, &*engine).await.map_err(fail)?;
        let session = Local::new(Model::new(text, facts, engine));
        let mut info = picture::info(session.model());
        info["device"] = device.clone().into();
        info["fallback"] = fallback.into();
        info["software"] = software.into();
        info["diskCache"] = matches!(disk, Ok(Some(_))).into();
        info["diskCacheProblem"] = disk.as_ref().err().cloned().into();
        Ok(Self {
            session: RefCell::new(Some(session)),
            identity: RefCell::new(disk.ok().flatten().map(|(_, identity)| identity)),
            waker: RefCell::default(),
            interrupted: Cell::new(false),
            queue,
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
        self.with(|s| s.submit(request.ask(seed)).map(|id| id.0 as f64))?.map_err(|e| error::from_core(&e))
    }

    /// Runs one step and returns its updates; none if there is nothing to do, or if it was interrupted.
    pub async fn step(&self) -> Result<JsValue, JsValue> {
        let mut session = self.session.take().ok_or_else(busy)?;
        self.interrupted.set(false);
        let result = {
            let mut step = pin!(self.step_of(&mut session));
            poll_fn(|context| {
                // What the device runs goes on; the next step waits for it.
                if self.interrupted.get() {
                    return Poll::Ready(Ok(Vec::new()));
                }
                self.waker.replace(Some(context.waker().clone()));
                step.as_mut().poll(context)
            })
            .await
        };
        self.session.replace(Some(session));
        result.map(|updates| js::object(&updates.into())).map_err(|e| error::from_core(&e))
    }

    /// Lets a step that waits for the device return now, so that a request can be cancelled. A step may take long.
    pub fn interrupt(&self) {
        self.interrupted.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Writes some of what the cache holds to disk, while nothing runs; false if there is no more.
    pub async fn keep(&self) -> Result<bool, JsValue> {
        let mut session = self.session.take().ok_or_else(busy)?;
        let more = session.engine_mut().keep().await;
        self.session.replace(Some(session));
        more.map_err(|e| error::from_core(&e))
    }

    /// Goes on without a disk. What is there stays.
    #[wasm_bindgen(js_name = closeDisk)]
    pub fn close_disk(&self) -> Result<(), JsValue> {
        self.with(|s| s.engine_mut().close_disk())
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

    /// Empties the prefix cache, on disk too.
    #[wasm_bindgen(js_name = clearCache)]
    pub fn clear_cache(&self) -> Result<(), JsValue> {
        self.with(|s| s.engine_mut().clear_cache())
    }

    /// Turns the prefix cache on or off. Fails while a request runs.
    #[wasm_bindgen(js_name = setPrefixCache)]
    pub fn set_prefix_cache(&self, on: bool) -> Result<(), JsValue> {
        self.with(|s| s.engine_mut().set_prefix_cache(on))?.map_err(|e| error::from_core(&e))
    }

    /// Counters, pools and the prefix tree.
    pub fn stats(&self) -> Result<JsValue, JsValue> {
        self.with(|s| {
            let mut stats = picture::stats(s.engine(), None);
            stats["device"] = self.device.clone().into();
            let tiers = s.engine().stats().tiers;
            stats["disk"] = json!({ "values": tiers.disk_values, "bytes": tiers.disk_bytes });
            js::object(&stats)
        })
    }
}

impl WasmEngine {
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Local) -> T) -> Result<T, JsValue> {
        self.session.borrow_mut().as_mut().map(f).ok_or_else(busy)
    }

    async fn step_of(&self, session: &mut Local) -> selkie_core::Result<Vec<Value>> {
        let mut pace = self.pace.get();
        session.engine_mut().set_step_tokens(pace.tokens());
        let updates = session.step().await?;
        if updates.is_empty()
            && let Some(queue) = &self.queue
        {
            // Without a wait, steps without output would queue up on the device, and a stop would take effect after all of them.
            let before = self.enqueued.replace(Some(Box::pin(queue.done())));
            if let Some(before) = before {
                before.await;
            }
        }
        if let Some((tokens, enqueued)) = session.engine().landed() {
            // The step started when it was enqueued, or when the previous one ended.
            let now = js::now();
            pace.took(tokens, now - enqueued.max(self.landed.replace(now)));
            self.pace.set(pace);
        }
        Ok(updates.into_iter().filter_map(report::update).collect())
    }
}

/// Loads onto a backend.
async fn load<B: Backend>(
    backend: B,
    files: &ModelFiles,
    options: &EngineOptions,
    report: &mut dyn FnMut(u64, u64),
) -> selkie_core::Result<Engine<B>> {
    selkie_core::session::load(backend, files, options, &mut |p| report(p.done, p.total)).await
}

pub(crate) fn busy() -> JsValue {
    error::error("busy", "a step is running: await it first")
}
