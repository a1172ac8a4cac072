//! The handle of a running engine.

use std::{
    pin::Pin,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use futures_channel::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded},
    oneshot,
};

use super::{
    Answer, Ask, Encoded, Prompt, Text, WhenFull,
    answer::Reading,
    driver::{Driver, News, Order, Shared, Submission},
    reader::Reader,
};
use crate::{
    Error, Result,
    engine::{AnyEngine, Request, Sizes, Stats},
    model_dir::ModelFiles,
    state::{CacheEvent, GRID},
};

/// What is known of a loaded model.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name of the model: the last part of its path.
    pub name: String,
    /// Where its files came from, as shown in messages.
    pub label: String,
    /// Its family, e.g. `nemotron_h`.
    pub family: String,
    /// A letter per layer.
    pub layer_map: String,
    /// Number of its parameters.
    pub parameters: u64,
    /// Bytes of the loaded weights.
    pub weight_bytes: u64,
    /// Name of the backend: `cpu`, `cuda` or `wgpu`.
    pub backend: &'static str,
    /// Name of the device.
    pub device: String,
    /// Tokens of the longest sequence, prompt and answer together.
    pub context: usize,
    /// Ids are less than this.
    pub vocab: usize,
    /// Sequences that run at a time.
    pub max_batch: usize,
    /// Slots for recurrent states.
    pub slots: usize,
    /// KV pages.
    pub pages: usize,
    /// Tokens of a page, and the distance of states that can be reused.
    pub block: usize,
    /// Distinguishes models whose cached states must not be mixed, see [`ModelFiles::fingerprint`].
    pub fingerprint: u64,
    /// How the memory for states and pages is divided.
    pub sizes: Sizes,
}

impl Facts {
    /// Of the model in `files`, which `engine` has loaded.
    ///
    /// # Errors
    /// Those of the files' source.
    pub async fn new(files: &ModelFiles, engine: &dyn AnyEngine) -> Result<Self> {
        let (spec, caps, sizes) = (engine.spec(), engine.caps(), engine.sizes());
        Ok(Self {
            name: files.name.clone(),
            label: files.label().to_owned(),
            family: spec.family.clone(),
            layer_map: spec.layer_map.clone(),
            parameters: spec.parameters,
            weight_bytes: engine.weight_bytes(),
            backend: caps.backend,
            device: caps.device.clone(),
            context: sizes.longest(),
            vocab: spec.vocab,
            max_batch: sizes.limits.max_batch,
            slots: sizes.split.slots,
            pages: sizes.split.pages,
            block: GRID,
            fingerprint: files.fingerprint().await?,
            sizes: sizes.clone(),
        })
    }
}

/// The state of an engine after a step.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Totals since it was loaded.
    pub counters: Stats,
    /// Requests in the batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Those of them whose share waits for a prefix that another request computes.
    pub deferred: usize,
    /// Shares with requests in the queue.
    pub waiting_shares: usize,
    /// Slots that are not free: of running requests, and cached ones.
    pub slots_used: usize,
    /// States in the prefix cache.
    pub slots_cached: usize,
    /// Pages that are not free: of running requests, and cached ones.
    pub pages_used: usize,
    /// Nodes of the prefix cache: pages, unless the model has no attention.
    pub pages_cached: usize,
}

impl Snapshot {
    /// Adds that of another engine.
    pub fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.running += other.running;
        self.waiting += other.waiting;
        self.deferred += other.deferred;
        self.waiting_shares += other.waiting_shares;
        self.slots_used += other.slots_used;
        self.slots_cached += other.slots_cached;
        self.pages_used += other.pages_used;
        self.pages_cached += other.pages_cached;
    }
}

/// A loaded model: a handle that is cheap to clone and can be used from any thread.
///
/// The engine ends when all handles and answers are gone; the last one waits for that.
///
/// ```
/// use std::sync::Arc;
///
/// use selkie_core::{
///     chat::Message, cpu::CpuBackend, engine::{AnyEngine, EngineOptions}, model_dir::ModelFiles, session::*, source::Dir,
/// };
///
/// # fn main() -> selkie_core::Result<()> {
/// let files = pollster::block_on(ModelFiles::open(Arc::new(Dir::open("../models/demo")?), || 0))?;
/// let text = Text::new(&files)?;
/// let model = Model::spawn(text, move || {
///     pollster::block_on(async {
///         let options = EngineOptions::default();
///         let engine = load(CpuBackend::new(), &files, &options, &mut |_| {}).await?;
///         Ok((Facts::new(&files, &engine).await?, Box::new(engine) as Box<dyn AnyEngine>))
///     })
/// })?;
///
/// let messages = vec![Message::new("user", "What is 17 + 25?")];
/// let mut answer = String::new();
/// for update in model.submit(Ask { prompt: Prompt::Messages(messages), ..Ask::default() })? {
///     match update {
///         Update::Text { text, .. } => answer += &text,
///         Update::Done(completion) => assert_eq!(completion.text.as_ref(), Some(&answer)),
///     }
/// }
/// assert_eq!(answer, "17 + 25 = 42.");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

/// A request that was rendered, tokenised and checked, see [`Model::prepare`].
pub struct Prepared {
    request: Request,
    reader: Reader,
}

impl Prepared {
    /// The tokens of its prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }
}

/// What handles and answers share.
pub(super) struct Inner {
    text: Arc<Text>,
    facts: Facts,
    shared: Arc<Shared>,
    /// `None` while this is dropped.
    orders: Option<UnboundedSender<Order>>,
    tickets: AtomicU64,
    #[cfg(not(target_arch = "wasm32"))]
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Model {
    /// A handle, and the loop that somebody has to poll for it.
    pub fn new(text: Arc<Text>, facts: Facts, engine: Box<dyn AnyEngine>) -> (Self, Driver) {
        let (orders, queue) = unbounded();
        let shared = Arc::new(Shared::default());
        let driver = Driver::new(engine, queue, shared.clone());
        let inner = Inner {
            text,
            facts,
            shared,
            orders: Some(orders),
            tickets: AtomicU64::new(0),
            #[cfg(not(target_arch = "wasm32"))]
            thread: None,
        };
        (Self { inner: Arc::new(inner) }, driver)
    }

    /// Queues a request. It is rendered, tokenised and checked here, which takes milliseconds for long text; then it is sent,
    /// and nothing waits for the engine.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt, ids out of range and impossible sampling values; [`Error::TooLong`] for a
    /// prompt that can never fit; [`Error::BadModel`] for text or stop strings without a tokenizer, messages without a chat
    /// template, and if tokenizer or template fail on the text; [`Error::Ended`] if the engine has failed.
    pub fn submit(&self, ask: Ask) -> Result<Answer> {
        let prepared = self.prepare(ask)?;
        Ok(self.send([prepared]).pop().expect("an answer a request"))
    }

    /// The part of [`Model::submit`] that takes time, for a thread that may be blocked.
    ///
    /// # Errors
    /// Those of [`Model::submit`].
    pub fn prepare(&self, ask: Ask) -> Result<Prepared> {
        self.health().map_err(Error::Ended)?;
        let (request, reader) = self.inner.text.request(ask, &self.inner.facts)?;
        Ok(Prepared { request, reader })
    }

    /// Queues requests of this model. The engine sees all of them before its next step.
    pub fn send(&self, prepared: impl IntoIterator<Item = Prepared>) -> Vec<Answer> {
        let (channels, prepared): (Vec<_>, Vec<_>) = prepared
            .into_iter()
            .map(|one| {
                let (to, events) = unbounded();
                (events, (one, to))
            })
            .unzip();
        let readings = self.post(prepared).into_iter();
        readings.zip(channels).map(|(reading, events)| Answer::new(reading, events)).collect()
    }

    /// Sends requests with the channels for their events.
    pub(super) fn post(&self, prepared: Vec<(Prepared, UnboundedSender<News>)>) -> Vec<Reading> {
        let (mut all, mut readings) = (Vec::new(), Vec::new());
        for (Prepared { request, reader }, events) in prepared {
            let ticket = self.inner.tickets.fetch_add(1, Ordering::Relaxed);
            all.push(Submission { ticket, request, events });
            readings.push(Reading::new(reader, ticket, self.inner.clone()));
        }
        if !all.is_empty() {
            self.inner.order(Order::Submit(all));
        }
        readings
    }

    /// Renders and tokenises a prompt, as [`Model::prepare`] does; `max_tokens`: what the request allows the answer.
    ///
    /// # Errors
    /// Those of [`Model::submit`] that concern the prompt alone.
    pub fn encode(&self, prompt: Prompt, when_full: WhenFull, max_tokens: Option<usize>) -> Result<Encoded> {
        self.inner.text.encode(prompt, when_full, self.inner.facts.context, max_tokens)
    }

    /// The model's text side.
    pub fn text(&self) -> &Arc<Text> {
        &self.inner.text
    }

    /// Facts that are fixed at load.
    pub fn facts(&self) -> &Facts {
        &self.inner.facts
    }

    /// The engine's state after its last step. Waits for no step.
    pub fn stats(&self) -> Snapshot {
        self.inner.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the engine runs.
    ///
    /// # Errors
    /// Why it ended: an error of the device, or a panic.
    pub fn health(&self) -> Result<(), Arc<Error>> {
        self.inner.shared.failure.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Calls `f` with the engine between two steps: to look at its tree, or to empty its cache.
    pub fn with<T: Send + 'static>(&self, f: impl FnOnce(&mut dyn AnyEngine) -> T + Send + 'static) -> Reply<T> {
        let (send, reply) = oneshot::channel();
        // Whoever asked may be gone.
        self.inner.order(Order::With(Box::new(move |engine| {
            let result = f(engine);
            Box::new(move || drop(send.send(result)))
        })));
        Reply { reply, shared: self.inner.shared.clone() }
    }

    /// The events of the prefix tree from now on.
    pub fn cache_events(&self) -> CacheEvents {
        let (send, events) = unbounded();
        self.inner.order(Order::Watch(send));
        CacheEvents { events }
    }
}

impl Inner {
    pub fn order(&self, order: Order) {
        let Some(orders) = &self.orders else { return };
        // It fails only if the engine has ended.
        if let Err(e) = orders.unbounded_send(order)
            && let Order::Submit(all) = e.into_inner()
        {
            let reason = self.reason();
            all.iter().for_each(|one| one.fail(&reason));
        }
    }

    /// Why a channel of the engine has closed.
    pub fn reason(&self) -> Arc<Error> {
        self.shared.reason()
    }
}

impl Shared {
    fn reason(&self) -> Arc<Error> {
        let gone = || Arc::new(Error::Device { op: "engine".into(), why: "it is no longer there".into() });
        self.failure.get().cloned().unwrap_or_else(gone)
    }
}

/// The result of [`Model::with`], once the engine comes to it.
pub struct Reply<T> {
    reply: oneshot::Receiver<T>,
    shared: Arc<Shared>,
}

impl<T> Future for Reply<T> {
    type Output = Result<T, Arc<Error>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.reply).poll(context).map(|reply| reply.map_err(|_| self.shared.reason()))
    }
}

/// The events of the prefix tree, see [`Model::cache_events`].
pub struct CacheEvents {
    events: UnboundedReceiver<Vec<CacheEvent>>,
}

impl CacheEvents {
    /// Those of the next step that has some, oldest first; `None` after the engine's end.
    pub async fn next(&mut self) -> Option<Vec<CacheEvent>> {
        self.events.recv().await.ok()
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod thread {
    use std::{
        sync::{Arc, mpsc::channel},
        thread::{Builder, current},
        time::Duration,
    };

    use super::{CacheEvent, CacheEvents, Facts, Inner, Model, Reply};
    use crate::{
        Error, Result,
        backend::LOOK,
        engine::AnyEngine,
        session::{Chat, Text, block},
        survive::panic_text,
    };

    /// The stack of the engine's thread in bytes: that of a main thread.
    const STACK: usize = 8 << 20;

    impl Model {
        /// Builds an engine on a thread of its own, where it is run and dropped, and returns when it is loaded.
        ///
        /// # Errors
        /// Those of `build`; [`Error::Panicked`] if it panics, [`Error::Device`] if there is no thread.
        pub fn spawn(
            text: Arc<Text>,
            build: impl FnOnce() -> Result<(Facts, Box<dyn AnyEngine>)> + Send + 'static,
        ) -> Result<Self> {
            let (send, built) = channel();
            let run = move || match build() {
                Ok((facts, engine)) => {
                    let (model, driver) = Self::new(text, facts, engine);
                    // The caller waits for it.
                    let _ = send.send(Ok(model));
                    drop(send);
                    match driver.engine().caps().ranks {
                        1 => block::on(driver.run()),
                        // One of them may fail while there is nothing to do.
                        _ => block::on_often(driver.run(), LOOK),
                    }
                }
                Err(e) => drop(send.send(Err(e))),
            };
            let thread = Builder::new().name("engine".into()).stack_size(STACK).spawn(run).map_err(|e| {
                let why = format!("a thread for the engine could not be started: {e}");
                Error::Device { op: "load".into(), why }
            })?;
            match built.recv() {
                Ok(Ok(mut model)) => {
                    let inner = Arc::get_mut(&mut model.inner).expect("nobody else has this handle yet");
                    inner.thread = Some(thread);
                    Ok(model)
                }
                Ok(Err(e)) => {
                    // It ends now.
                    let _ = thread.join();
                    Err(e)
                }
                Err(_) => {
                    Err(Error::Panicked(thread.join().map_or_else(|e| panic_text(&*e), |()| "while loading".into())))
                }
            }
        }
    }

    impl Model {
        /// A conversation.
        pub fn chat(&self) -> Chat {
            Chat::new(self.clone())
        }
    }

    impl Drop for Inner {
        /// Ends the engine, and waits for that: a device should be free when its last handle is gone.
        fn drop(&mut self) {
            drop(self.orders.take());
            // On its own thread the engine drops handles that came to it with an order.
            if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != current().id()) {
                // A panic was reported to those who asked.
                let _ = thread.join();
            }
        }
    }

    impl<T> Reply<T> {
        /// Waits for it.
        ///
        /// # Errors
        /// Why the engine ended.
        pub fn wait(self) -> Result<T, Arc<Error>> {
            block::on(self)
        }
    }

    impl CacheEvents {
        /// The same as [`CacheEvents::next`], blocking; `None` too if there are none for so long.
        pub fn wait(&mut self, at_most: Duration) -> Option<Vec<CacheEvent>> {
            block::on_for(self.next(), at_most).flatten()
        }
    }
}
