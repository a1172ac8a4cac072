//! Running models: the loop that plans a step, runs it, reads the sampled ids and tells the callers.
//!
//! [`schedule`] decides, in numbers only, which tokens each step computes; [`plan`] has the type of its decisions; [`runner`]
//! enqueues them on the device; [`Engine`] connects the three. It lives on one thread: a server talks to it through channels.

mod admit;
pub mod direct;
mod options;
pub mod plan;
pub mod pools;
mod row;
pub mod runner;
pub mod schedule;
pub mod sequence;
pub mod stats;

use std::{collections::HashMap, pin::Pin, sync::Arc};

pub use options::{EngineOptions, MOST_BATCH, MOST_STEP_TOKENS, Sizes};
pub use plan::{Plan, PlanRow, SeqId};
pub use runner::Runner;
pub use schedule::{Commit, Scheduler};
pub use sequence::Request;
pub use stats::Stats;

use crate::backend::{Backend, Caps};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::models::{self, Architecture, ModelSpec};
use crate::state::{CacheEvent, Report};
use crate::step::NONE;
use crate::weights::{Loader, Progress};

use self::runner::RunnerLimits;

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled a stop id.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
    /// The caller cancelled it.
    Cancelled,
    /// It could not go on; its error says why. Other requests are not affected.
    Failed,
}

/// Milliseconds that a request spent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From submission to the step that gave it its first token.
    pub queue_ms: f64,
    /// From there to its first sampled token.
    pub prefill_ms: f64,
    /// From there to its end.
    pub decode_ms: f64,
}

/// What became of a request.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Which request.
    pub id: SeqId,
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens sampled, a stop id included.
    pub completion_tokens: usize,
    /// What the cache gave; `None` if it was cancelled before it ran.
    pub cache: Option<Report>,
    /// Where its time went.
    pub timing: Timing,
    /// What ended it if `reason` is [`FinishReason::Failed`], else `None`.
    pub error: Option<Arc<Error>>,
}

/// News for the callers, in the order in which it happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request has one more token.
    Token {
        /// Which request.
        id: SeqId,
        /// The sampled id; a stop id too.
        token: u32,
        /// `[V]`, with [`EngineOptions::logits`].
        logits: Option<Box<[f32]>>,
    },
    /// A request has ended.
    Finished(Finished),
}

/// A request that has not ended.
struct Live {
    request: Request,
    prompt_tokens: usize,
    completion_tokens: usize,
    submitted: f64,
    admitted: Option<f64>,
    first_token: Option<f64>,
}

/// A step on its way: whose tokens it samples, and the reads that will bring them.
struct Flight<B: Backend> {
    tokens: usize,
    /// Milliseconds of the engine's clock.
    enqueued: f64,
    outputs: Vec<SeqId>,
    ids: Option<Incoming<B::Read>>,
    logits: Option<Incoming<B::Read>>,
}

/// A read that keeps what it brought, so that waiting for it may be given up and taken up again.
enum Incoming<R> {
    Pending(Pin<Box<R>>),
    Arrived(Vec<u8>),
}

impl<R: Future<Output = Result<Vec<u8>>>> Incoming<R> {
    fn new(read: R) -> Self {
        Self::Pending(Box::pin(read))
    }

    async fn arrive(&mut self) -> Result<()> {
        if let Self::Pending(read) = self {
            let bytes = read.as_mut().await?;
            *self = Self::Arrived(bytes);
        }
        Ok(())
    }

    /// The bytes; none before they have arrived.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Pending(_) => &[],
            Self::Arrived(bytes) => bytes,
        }
    }
}

impl<B: Backend> Flight<B> {
    /// Waits for everything that the step brings.
    async fn arrive(&mut self) -> Result<()> {
        for read in self.ids.iter_mut().chain(&mut self.logits) {
            read.arrive().await?;
        }
        Ok(())
    }
}

/// A model on a device with its states, its prefix tree and its requests.
///
/// ```
/// # use std::rc::Rc;
/// use selkie_core::{
///     checkpoint::Checkpoint, config::Config, cpu::CpuBackend, engine::*, models, source::Dir, source::read_small,
/// };
///
/// # fn main() -> selkie_core::Result<()> { pollster::block_on(async {
/// let dir = Rc::new(Dir::open("../tests/golden/nemotron_h")?);
/// let config = read_small(&*dir, "config.json", 1 << 20).await?.expect("a model has one");
/// let config = Config::parse("config.json", &config)?;
/// let checkpoint = Checkpoint::open(dir).await?;
/// let architecture = models::read(&config)?;
/// let options = EngineOptions::default();
/// let mut engine =
///     Engine::load(CpuBackend::new(), &architecture, &checkpoint, b"nemotron_h", &options, &mut |_| {}).await?;
///
/// engine.submit(Request { prompt: vec![5, 6, 7], max_tokens: 4, ..Request::default() })?;
/// let mut tokens = Vec::new();
/// while !engine.is_idle() {
///     for event in engine.step().await? {
///         match event {
///             Event::Token { token, .. } => tokens.push(token),
///             Event::Finished(end) => assert_eq!(end.reason, FinishReason::Length),
///         }
///     }
/// }
/// assert_eq!(tokens.len(), 4);
/// # Ok(()) }) }
/// ```
pub struct Engine<B: Backend> {
    runner: Runner<B>,
    scheduler: Scheduler,
    sizes: Sizes,
    live: HashMap<SeqId, Live>,
    /// The last step, on an asynchronous device.
    flight: Option<Flight<B>>,
    /// The step that is being read. It stays here until all of it has arrived, whatever becomes of those who wait.
    landing: Option<Flight<B>>,
    /// Ends that no step reported yet: cancellations.
    ended: Vec<Event>,
    keep_logits: bool,
    clock: fn() -> f64,
    most_step_tokens: usize,
    landed: Option<(usize, f64)>,
    /// A step began and did not end well.
    failed: bool,
    weight_bytes: u64,
}

impl<B: Backend> Engine<B> {
    /// Loads the weights and allocates everything a step needs. `fingerprint` names the model's contents: equal
    /// fingerprints must mean equal weights, since cached prefixes are named by it.
    ///
    /// # Errors
    /// A bad or unsupported checkpoint, or memory that does not suffice, with what was asked and what is free.
    pub async fn load(
        backend: B,
        architecture: &Architecture,
        checkpoint: &Checkpoint,
        fingerprint: &[u8],
        options: &EngineOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let spec = architecture.spec();
        let caps = backend.caps();
        let name = format!("{} {:?} {:?} {:?} {:?}", caps.backend, caps.act, caps.kv, caps.conv, caps.state);
        let fingerprint = [fingerprint, name.as_bytes()].concat();
        // Once before minutes of loading, so that options that can't work fail early, and once with what is left.
        let free = backend.free_memory();
        let sizes = options.sizes(&spec, caps, free)?;
        sizes.check(free)?;
        Scheduler::new(sizes.shape, sizes.limits, &fingerprint)?;
        let limits = models::Limits { max_tokens: options.step_tokens, max_outputs: options.max_batch };
        let mut loader = Loader::new(&backend, checkpoint, report);
        let model = models::build(architecture, &mut loader, limits).await?;
        let weight_bytes = loader.loaded();
        let free = backend.free_memory();
        let sizes = options.sizes(&spec, backend.caps(), free)?;
        sizes.check(free)?;
        let pools = pools::alloc(&backend, &spec, sizes.split.slots, sizes.split.pages)?;
        let limits =
            RunnerLimits { lanes: options.max_batch, tokens: options.step_tokens, pages: sizes.pages_of_a_sequence() };
        let scheduler = Scheduler::new(sizes.shape, sizes.limits.clone(), &fingerprint)?;
        Ok(Self {
            runner: Runner::new(backend, model, pools, limits)?,
            scheduler,
            sizes,
            live: HashMap::new(),
            flight: None,
            landing: None,
            ended: Vec::new(),
            keep_logits: options.logits,
            clock: options.clock,
            most_step_tokens: options.step_tokens,
            landed: None,
            failed: false,
            weight_bytes,
        })
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt, an id outside the vocabulary, impossible sampling values, and a request
    /// that can never fit; both numbers are named.
    pub fn submit(&mut self, request: Request) -> Result<SeqId> {
        request.sampling.check()?;
        let vocab = self.spec().vocab;
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::BadRequest(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let (sampling, stop_ids) = (request.sampling, request.stop_ids.clone());
        let prompt_tokens = request.prompt.len();
        let id = self.scheduler.submit(request)?;
        let request = Request { sampling, stop_ids, ..Request::default() };
        let live = Live {
            request,
            prompt_tokens,
            completion_tokens: 0,
            submitted: (self.clock)(),
            admitted: None,
            first_token: None,
        };
        self.live.insert(id, live);
        Ok(id)
    }

    /// Ends a request at any moment; its `Finished` event comes with the next step. Unknown ids are ignored.
    pub fn cancel(&mut self, id: SeqId) {
        if self.live.contains_key(&id) {
            let event = self.finish(id, FinishReason::Cancelled, None);
            self.ended.push(event);
        }
    }

    /// Nothing to do until the next submission.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty() && self.ended.is_empty() && self.flight.is_none() && self.landing.is_none()
    }

    /// Plans and runs one step and returns what happened. On an asynchronous device the next step is enqueued
    /// before the ids of the last one are read, so a token is reported one step late.
    ///
    /// The future may be dropped before it is ready: nothing is lost, and the next call goes on where this one waited. A request
    /// whose logits are not finite ends with [`FinishReason::Failed`]; the others go on.
    ///
    /// # Errors
    /// A device error. The engine is of no use after that.
    pub async fn step(&mut self) -> Result<Vec<Event>> {
        self.landed = None;
        if self.failed {
            return Err(Error::Device {
                op: "step".into(),
                why: "an earlier step failed; load the model again".into(),
            });
        }
        if !self.ended.is_empty() {
            // A cancellation does not wait for the device.
            return Ok(std::mem::take(&mut self.ended));
        }
        if self.landing.is_none() {
            self.start()?;
        }
        let Some(flight) = &mut self.landing else { return Ok(Vec::new()) };
        if let Err(e) = flight.arrive().await {
            self.failed = true;
            return Err(e);
        }
        let flight = self.landing.take().expect("it has just arrived");
        Ok(self.land(flight))
    }

    /// Plans and enqueues a step. Waits for nothing.
    fn start(&mut self) -> Result<()> {
        let plan = self.scheduler.plan();
        // A plan commits cache changes before the device has run. If the step does not complete, the cached states are wrong, so
        // the engine stays failed.
        self.failed = true;
        let next = if plan.rows.is_empty() { None } else { Some(self.enqueue(&plan)?) };
        self.failed = false;
        let asynchronous = self.runner.backend().caps().asynchronous;
        self.landing = if asynchronous { std::mem::replace(&mut self.flight, next) } else { next };
        Ok(())
    }

    fn enqueue(&mut self, plan: &Plan) -> Result<Flight<B>> {
        let now = (self.clock)();
        for id in &plan.admitted {
            let row = plan.rows.iter().find(|r| r.seq == *id).expect("an admitted request has a row");
            let live = self.live.get_mut(id).expect("a planned request is live");
            live.admitted.get_or_insert(now);
            let known = self.scheduler.tokens(*id).expect("a planned request is known");
            self.runner.open_lane(row.row.lane, &live.request.sampling, known)?;
        }
        let tokens = plan.rows.iter().map(|r| r.row.tokens.len()).sum();
        let outputs: Vec<SeqId> = plan.rows.iter().flat_map(|r| r.row.outputs.iter().map(|_| r.seq)).collect();
        let ids = self.runner.step(&plan.rows)?.map(Incoming::new);
        let logits = (self.keep_logits && !outputs.is_empty()).then(|| self.runner.read_logits(outputs.len()));
        let logits = logits.map(Incoming::new);
        Ok(Flight { tokens, enqueued: now, outputs, ids, logits })
    }

    /// Commits the ids of a step that has arrived.
    fn land(&mut self, flight: Flight<B>) -> Vec<Event> {
        self.landed = Some((flight.tokens, flight.enqueued));
        let Some(ids) = &flight.ids else { return Vec::new() };
        let logits: Option<Vec<f32>> = flight.logits.as_ref().map(|l| bytemuck::pod_collect_to_vec(l.bytes()));
        let now = (self.clock)();
        let mut events = Vec::new();
        for (i, (&id, bytes)) in flight.outputs.iter().zip(ids.bytes().chunks_exact(4)).enumerate() {
            let token = u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            if token == NONE {
                // If it is live: it may have ended while the step was on its way.
                if self.live.contains_key(&id) {
                    events.push(self.finish(id, FinishReason::Failed, Some(Error::NotFinite)));
                }
                continue;
            }
            // None: it ended while the step was on its way.
            let Some(commit) = self.scheduler.commit(id, token) else { continue };
            let live = self.live.get_mut(&id).expect("a committed request is live");
            live.first_token.get_or_insert(now);
            live.completion_tokens += 1;
            let stop = live.request.stop_ids.contains(&token);
            let logits = logits.as_ref().map(|all| {
                let vocab = all.len() / flight.outputs.len();
                all[i * vocab..][..vocab].into()
            });
            events.push(Event::Token { id, token, logits });
            if stop {
                events.push(self.finish(id, FinishReason::Stop, None));
            } else if commit == Commit::Last {
                events.push(self.finish(id, FinishReason::Length, None));
            }
        }
        events
    }

    fn finish(&mut self, id: SeqId, reason: FinishReason, error: Option<Error>) -> Event {
        let live = self.live.remove(&id).expect("only a live request ends");
        let cache = self.scheduler.end(id);
        let now = (self.clock)();
        let (admitted, first) = (live.admitted.unwrap_or(now), live.first_token.unwrap_or(now));
        Event::Finished(Finished {
            id,
            reason,
            prompt_tokens: live.prompt_tokens,
            completion_tokens: live.completion_tokens,
            cache,
            timing: Timing {
                queue_ms: admitted - live.submitted,
                prefill_ms: first - admitted,
                decode_ms: now - first,
            },
            error: error.map(Arc::new),
        })
    }

    /// Facts about the model.
    pub fn spec(&self) -> &ModelSpec {
        self.runner.model().spec()
    }

    /// Facts about the device.
    pub fn caps(&self) -> &Caps {
        self.runner.backend().caps()
    }

    /// Budget, slots and pages.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Bytes of the loaded weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Counters since load.
    pub fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    /// The scheduler, to look at: queue, pools, tree.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The device side, to look at: pools, model.
    pub fn runner(&self) -> &Runner<B> {
        &self.runner
    }

    /// Forgets all cached prefixes.
    pub fn clear_cache(&mut self) {
        self.scheduler.clear_cache();
    }

    /// Starts or stops keeping and reusing prefixes. What is kept stays.
    ///
    /// # Errors
    /// [`Error::BadRequest`] while requests are queued or running.
    pub fn set_prefix_cache(&mut self, on: bool) -> Result<()> {
        if !self.live.is_empty() {
            return Err(Error::BadRequest("the prefix cache is switched while nothing runs".into()));
        }
        self.scheduler.set_prefix_cache(on);
        Ok(())
    }

    /// Changes the tokens of a step, within 1 and [`EngineOptions::step_tokens`].
    pub fn set_step_tokens(&mut self, tokens: usize) {
        self.scheduler.set_step_tokens(tokens.clamp(1, self.most_step_tokens));
    }

    /// The step that the last call of [`step`](Self::step) landed, if any: its tokens, and when it was enqueued in milliseconds
    /// of the engine's clock.
    pub fn landed(&self) -> Option<(usize, f64)> {
        self.landed
    }

    /// Starts or stops collecting the events of the prefix tree.
    pub fn subscribe(&mut self, on: bool) {
        self.scheduler.subscribe(on);
    }

    /// The tree's events since the last call, oldest first.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.scheduler.take_events()
    }

    /// Fills every slot and page without a holder with NaN: for tests that prove that no op reads them.
    ///
    /// # Errors
    /// A device error.
    pub fn poison_free(&self) -> Result<()> {
        let free = |pool: &crate::state::Pool, n: usize| {
            (1..=n as u32).filter(|&i| pool.holders(i) == 0).map(|i| i as usize).collect::<Vec<_>>()
        };
        let slots = free(self.scheduler.slots(), self.sizes.split.slots);
        let pages = free(self.scheduler.pages(), self.sizes.split.pages);
        self.runner.poison(&slots, &pages)
    }
}
