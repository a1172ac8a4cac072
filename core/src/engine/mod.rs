//! Running models: the loop that plans a step, runs it, reads the sampled ids and tells the callers.
//!
//! [`schedule`] decides, in numbers only, which tokens each step computes; [`plan`] has the type of its decisions; [`runner`]
//! enqueues them on the device; [`Engine`] connects the three. It lives on one thread; others talk to it through
//! [`Model`](crate::session::Model).

mod admit;
mod ahead;
mod any;
mod constrained;
mod costs;
pub mod direct;
pub mod draft;
mod fair;
mod flight;
mod gauge;
mod guide;
mod keep;
mod landing;
mod line;
mod load;
mod lower;
mod news;
mod options;
mod outgoing;
pub mod plan;
pub mod pools;
mod results;
mod row;
pub mod runner;
mod sampling;
pub mod schedule;
pub mod sequence;
pub mod stats;
mod tail;
mod transfer;
mod verify;
mod way;

use std::{collections::HashMap, sync::Arc};

pub use any::{AnyEngine, Exporting, Keeping, Retiring, Stepping};
pub use constrained::Constrained;
pub use draft::{Drafter, MOST_DRAFTS, Mtp, Ngram, Speculate};
pub use landing::Coverage;
pub use news::{Event, FinishReason, Finished, Timing};
pub use options::{EngineOptions, MOST_BATCH, MOST_STEP_TOKENS, Sizes};
pub use outgoing::{Arrived, Leaving, Piece};
pub use plan::{Plan, PlanRow, SeqId};
pub use runner::Runner;
pub use schedule::{Commit, Scheduler};
pub use sequence::Request;
pub use stats::{DraftStats, Stats};
pub use tail::Needs;
pub use transfer::{Export, Exported, Import, Imported};

use crate::backend::{Backend, Caps};
use crate::bundle::numerics;
use crate::checkpoint::Checkpoint;
use crate::controls::{LaneRules, Logprobs, MOST_TOP};
use crate::error::{Error, Result};
use crate::layer::Division;
use crate::models::{self, Architecture, ModelSpec};
use crate::sample::Sampling;
use crate::state::CacheEvent;
use crate::step::TokenRef;
use crate::weights::{Loader, Progress};

use self::ahead::Looking;
use self::flight::{Flight, Incoming, Output};
use self::guide::Guide;
use self::lower::Lower;
use self::outgoing::Outgoing;
use self::runner::RunnerLimits;

/// A request that has not ended.
struct Live {
    sampling: Sampling,
    stop_ids: Vec<u32>,
    /// None: a request without rules.
    guide: Option<Guide>,
    /// Of how many tokens log probabilities are reported at each place of the prompt.
    scores: Option<u8>,
    /// Those of the prompt so far.
    scored: Vec<Logprobs>,
    /// All of them, from the first token on.
    prompt_logprobs: Option<Arc<[Logprobs]>>,
    prompt_tokens: usize,
    completion_tokens: usize,
    submitted: f64,
    admitted: Option<f64>,
    first_token: Option<f64>,
}

/// A model on a device with its states, its prefix tree and its requests.
///
/// ```
/// # use std::sync::Arc;
/// use selkie_core::{
///     checkpoint::Checkpoint, config::Config, cpu::CpuBackend, engine::*, models, source::Dir, source::read_small,
/// };
///
/// # fn main() -> selkie_core::Result<()> { pollster::block_on(async {
/// let dir = Arc::new(Dir::open("../tests/golden/nemotron_h")?);
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
    /// The step that is being read. It stays here until all of it has arrived, even if the future that waits is
    /// dropped.
    landing: Option<Flight<B>>,
    /// Drafts that the model's head is making, before the next step.
    looking: Option<Looking<B>>,
    /// Ends that no step has reported yet: cancellations.
    ended: Vec<Event>,
    keep_logits: bool,
    clock: fn() -> f64,
    most_step_tokens: usize,
    speculate: Speculate,
    landed: Option<(usize, f64)>,
    /// A step began and was not completed.
    failed: bool,
    weight_bytes: u64,
    division: Division,
    /// Boxed: most engines have none.
    lower: Option<Box<Lower>>,
    outgoing: Option<Outgoing>,
}

impl<B: Backend> Engine<B> {
    /// Loads the weights and allocates everything a step needs. `fingerprint` names the model's contents: equal
    /// fingerprints must mean equal weights, since cached prefixes are named by it.
    ///
    /// # Errors
    /// A bad or unsupported checkpoint, or too little memory, with the bytes requested and free.
    pub async fn load(
        backend: B,
        architecture: &Architecture,
        checkpoint: &Checkpoint,
        fingerprint: &[u8],
        options: &EngineOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let caps = backend.caps();
        let architecture = &options.speculate.architecture(architecture, checkpoint)?;
        let spec = architecture.spec_on(caps.ranks)?;
        let mut name = format!("{} {:?} {:?} {:?} {:?}", caps.backend, caps.act, caps.kv, caps.conv, caps.state);
        if architecture.drafts {
            // Its states are more than those of the model without its head.
            name += " head";
        }
        let fingerprint = [fingerprint, name.as_bytes()].concat();
        // Checked before minutes of loading, so that impossible options fail early, and again with the memory that is
        // left.
        let free = backend.free_memory();
        let sizes = options.sizes(&spec, caps, free)?;
        sizes.check(free)?;
        Scheduler::new(sizes.shape, sizes.limits.clone(), &fingerprint)?;
        let limits = models::Limits { max_tokens: options.step_tokens, max_outputs: sizes.limits.outputs() };
        // Before memory is measured, of which it takes some.
        let lower = Lower::open(&options.tiers, &backend, &spec.layers, options.clock)?;
        let outgoing = Outgoing::open(options, &backend, &spec.layers)?;
        let division = architecture.division(caps.ranks);
        let mut loader = Loader::new(&backend, checkpoint, report);
        let model = models::build(architecture, &mut loader, limits).await?;
        let weight_bytes = loader.finish();
        let free = backend.free_memory();
        let sizes = options.sizes(&spec, backend.caps(), free)?;
        sizes.check(free)?;
        let pools = pools::alloc(&backend, &spec, sizes.split.slots, sizes.split.pages)?;
        let limits = RunnerLimits {
            lanes: options.max_batch,
            tokens: options.step_tokens,
            outputs: sizes.limits.outputs(),
            drafts: sizes.limits.drafts,
            pages: sizes.pages_of_a_sequence(),
        };
        let mut scheduler = Scheduler::new(sizes.shape, sizes.limits.clone(), &fingerprint)?;
        if let Some(lower) = &lower {
            // Names on disk are for other processes too, so the model is named beyond doubt.
            let own = options.tiers.disk.as_ref().map_or(&fingerprint, |disk| &disk.identity);
            let head: &[u8] = if architecture.drafts { b" head" } else { b"" };
            let numerics = numerics(backend.caps());
            let cold = lower.converts().then(|| format!("{numerics}, states as int8"));
            scheduler.keep_evicted([own, numerics.as_bytes(), head].concat(), cold);
        }
        Ok(Self {
            runner: Runner::new(backend, model, pools, limits)?,
            scheduler,
            sizes,
            live: HashMap::new(),
            flight: None,
            landing: None,
            looking: None,
            ended: Vec::new(),
            keep_logits: options.logits,
            clock: options.clock,
            most_step_tokens: options.step_tokens,
            speculate: options.speculate,
            landed: None,
            failed: false,
            weight_bytes,
            division,
            lower: lower.map(Box::new),
            outgoing,
        })
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt, an id outside the vocabulary, impossible sampling values and rules, and a
    /// request that can never fit; both numbers are named. Too little memory for the buffers of the first request with rules.
    pub fn submit(&mut self, mut request: Request) -> Result<SeqId> {
        request.sampling.check()?;
        let vocab = self.spec().vocab;
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::BadRequest(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let guide = Guide::new(&mut request, vocab)?;
        let scores = request.prompt_logprobs;
        if scores.is_some_and(|n| usize::from(n) > MOST_TOP) {
            return Err(Error::BadRequest(format!("prompt_logprobs must be from 0 to {MOST_TOP}")));
        }
        if guide.is_some() || scores.is_some() {
            self.runner.expect_rules()?;
        }
        self.choose_drafter(&mut request, guide.as_ref());
        let (sampling, stop_ids) = (request.sampling, std::mem::take(&mut request.stop_ids));
        let prompt_tokens = request.prompt.len();
        let id = self.scheduler.submit(request)?;
        let live = Live {
            sampling,
            stop_ids,
            guide,
            scores,
            scored: Vec::new(),
            prompt_logprobs: None,
            prompt_tokens,
            completion_tokens: 0,
            submitted: (self.clock)(),
            admitted: None,
            first_token: None,
        };
        self.live.insert(id, live);
        Ok(id)
    }

    /// Leaves a request its drafter, gives it one, or takes it away. Penalties make a token's logits depend on counts of those before
    /// it, and log probabilities are read per step, so requests with either do not draft. A constraint says itself what it forces.
    fn choose_drafter(&self, request: &mut Request, guide: Option<&Guide>) {
        let plain = request.prompt_logprobs.is_none() && request.sampling.repetition_penalty == 1.0;
        let given = request.drafter.take();
        if !plain || self.speculate == Speculate::Off {
            return;
        }
        let constraint = guide.and_then(Guide::to_draft);
        if guide.is_some() && constraint.is_none() {
            return;
        }
        let other = given.unwrap_or_else(|| self.speculate.drafter(self.runner.model().has_head()));
        request.drafter = Some(match constraint {
            Some(constraint) => Box::new(Constrained::new(constraint, request.prompt.len(), other)),
            None => other,
        });
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
        let nothing_leaves = self.outgoing.as_ref().is_none_or(Outgoing::is_empty);
        self.live.is_empty()
            && self.ended.is_empty()
            && self.flight.is_none()
            && self.landing.is_none()
            && nothing_leaves
    }

    /// Plans and runs one step and returns what happened. On an asynchronous device the next step is enqueued
    /// before the ids of the last one are read, so a token is reported one step late.
    ///
    /// The future may be dropped before it is ready: nothing is lost, and the next call continues at the same point. A
    /// request whose logits are not finite ends with [`FinishReason::Failed`]; the others go on.
    ///
    /// # Errors
    /// A device error. The engine cannot be used after that.
    pub async fn step(&mut self) -> Result<Vec<Event>> {
        self.landed = None;
        self.check_usable()?;
        if !self.ended.is_empty() {
            // A cancellation does not wait for the device.
            return Ok(std::mem::take(&mut self.ended));
        }
        if self.landing.is_none() {
            if let Err(e) = self.look_ahead().await {
                self.failed = true;
                return Err(e);
            }
            self.start()?;
        }
        if self.landing.is_none() && self.flight.is_none() {
            // Nothing runs: what a request waits for can only come from a lower tier.
            self.settle().await?;
        }
        let Some(flight) = &mut self.landing else { return Ok(Vec::new()) };
        if let Err(e) = flight.arrive().await {
            self.failed = true;
            return Err(e);
        }
        let flight = self.landing.take().expect("it has just arrived");
        let mut events = self.land(flight);
        // Commits may evict, and the next caller may write what is free.
        self.failed = true;
        self.demote()?;
        self.failed = false;
        // The device computes the next step's logits while masks are made from the ids that have just arrived.
        if let Some(mut next) = self.flight.take_if(|next| next.held.is_some()) {
            self.failed = true;
            self.sample(&mut next, &mut events)?;
            self.failed = false;
            self.flight = Some(next);
        }
        Ok(events)
    }

    fn check_usable(&self) -> Result<()> {
        match self.failed {
            false => Ok(()),
            true => {
                let why = "an earlier step failed; load the model again";
                Err(Error::Device { op: "step".into(), why: why.into() })
            }
        }
    }

    /// Plans and enqueues a step. Waits for nothing.
    fn start(&mut self) -> Result<()> {
        self.failed = true;
        self.collect()?;
        self.lift()?;
        // Lanes whose drafts are in flight could not take part in a step, and it would take as long without them. Those that the
        // head drafts for would be in it without drafts.
        let waits = self.flight.as_ref().is_some_and(Flight::has_drafts)
            || self.flight.is_some() && self.scheduler.waits_for_head();
        let plan = if waits { Plan::default() } else { self.scheduler.plan() };
        self.demote()?;
        // A plan commits cache changes before the device has run. If the step does not complete, the cached states are wrong, so
        // the engine stays failed.
        let next = if plan.rows.is_empty() { None } else { Some(self.enqueue(&plan)?) };
        self.failed = false;
        let asynchronous = self.runner.backend().caps().asynchronous;
        self.landing = if asynchronous { std::mem::replace(&mut self.flight, next) } else { next };
        Ok(())
    }

    fn enqueue(&mut self, plan: &Plan) -> Result<Flight<B>> {
        let now = (self.clock)();
        for id in &plan.admitted {
            self.open_lane(*id, plan, now)?;
        }
        let tokens = plan.rows.iter().map(|r| r.row.tokens.len() - r.row.drafts()).sum();
        let outputs = self.outputs(plan);
        let mut flight = Flight {
            tokens,
            enqueued: now,
            outputs,
            dead: Vec::new(),
            held: None,
            ids: None,
            logits: None,
            reports: None,
            scores: None,
        };
        let guides = || flight.outputs.iter().filter_map(|output| self.live.get(&output.id)?.guide.as_ref());
        let needs = guides().fold(Needs::default(), |all, guide| all.and(guide.needs()));
        let scores = flight.outputs.iter().any(|output| output.target.is_some());
        if !needs.any() && !scores {
            flight.ids = self.runner.step(&plan.rows)?.map(Incoming::new);
            self.keep_logits(&mut flight);
            return Ok(flight);
        }
        let waits = self.waits(&flight.outputs);
        let begun = self.runner.begin(&plan.rows)?;
        if scores {
            flight.scores = Some(Incoming::new(self.runner.read_logits(flight.outputs.len())));
        }
        flight.held = Some((begun, needs));
        if !waits {
            let mut events = Vec::new();
            self.sample(&mut flight, &mut events)?;
            self.ended.append(&mut events);
        }
        Ok(flight)
    }

    /// The outputs of a step in the order of its rows. Those before the last token of a prompt are compared with it.
    fn outputs(&self, plan: &Plan) -> Vec<Output> {
        let of_row = |r: &PlanRow| {
            let prompt = self.live.get(&r.seq).map_or(0, |live| live.prompt_tokens);
            let (id, lane, first) = (r.seq, r.row.lane, r.row.first_position as usize + 1);
            let target = move |o: u32| Some(first + o as usize).filter(|at| *at < prompt);
            let draft = |o: u32| match r.row.tokens.get(o as usize + 1) {
                Some(TokenRef::Draft(id)) => Some(*id),
                _ => None,
            };
            let output = move |&o: &u32| Output { id, lane, target: target(o), draft: draft(o) };
            r.row.outputs.iter().map(output).collect::<Vec<_>>()
        };
        plan.rows.iter().flat_map(of_row).collect()
    }

    /// Gives an admitted request its lane.
    fn open_lane(&mut self, id: SeqId, plan: &Plan, now: f64) -> Result<()> {
        let row = plan.rows.iter().find(|r| r.seq == id).expect("an admitted request has a row");
        let live = self.live.get_mut(&id).expect("a planned request is live");
        live.admitted.get_or_insert(now);
        let known = self.scheduler.tokens(id).expect("a planned request is known");
        let (lane, rules) = (row.row.lane, live.guide.as_ref().map(Guide::rules));
        let mut sampling = live.sampling;
        if rules.is_some_and(LaneRules::adjusts) {
            // It is applied before, at its place among the rules.
            sampling.repetition_penalty = 1.0;
        }
        self.runner.open_lane(lane, &sampling, known)?;
        self.runner.open_rules(lane, rules, &known[live.prompt_tokens..])
    }

    fn keep_logits(&self, flight: &mut Flight<B>) {
        let n = flight.outputs.len();
        flight.logits = (self.keep_logits && n > 0).then(|| Incoming::new(self.runner.read_logits(n)));
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
            prompt_logprobs: live.prompt_logprobs.unwrap_or_else(|| live.scored.into()),
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
        let mut stats = self.scheduler.stats();
        if let Some(lower) = &self.lower {
            stats.tiers = lower.stats(&stats.tiers);
        }
        stats
    }

    /// The scheduler, to look at: queue, pools, tree.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The device side, to look at: pools, model.
    pub fn runner(&self) -> &Runner<B> {
        &self.runner
    }

    /// Forgets all cached prefixes, those in lower tiers too.
    pub fn clear_cache(&mut self) {
        self.scheduler.clear_cache();
        if let Some(lower) = &mut self.lower {
            lower.clear();
        }
    }

    /// Starts or stops keeping and reusing prefixes. Prefixes that are in the cache stay.
    ///
    /// # Errors
    /// [`Error::BadRequest`] while requests are queued or running.
    pub fn set_prefix_cache(&mut self, on: bool) -> Result<()> {
        if !self.live.is_empty() {
            return Err(Error::BadRequest(
                "the prefix cache can only be switched while no request is queued or running; wait until they end"
                    .into(),
            ));
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
