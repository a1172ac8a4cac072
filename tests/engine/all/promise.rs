//! The promise: cache on = cache off, alone = batched, bit for bit on the CPU backend.
//!
//! Random requests that share prefixes, fork, grow, stop and are cancelled run through an engine of random size. Every
//! free slot and page is filled with NaN between steps. Half of the engines have a lower tier, most of them a tiny one.
//! Tokens **and logits** of each request must equal those of the same request alone in a large engine with the cache off.
//! Every second case runs as on an asynchronous device: the next step is planned before the last one's tokens are known.
//! Two in three requests have rules over their logits: penalties, biases, forbidden tokens, a constraint that depends on
//! its own tokens, log probabilities. In cases of their own most have at most a constraint and a bias and draft: with drafters that know
//! the right tokens and use that well, badly or now and then, and with what the constraint forces. `SELKIE_PROMISE_CASES` and `SELKIE_PROMISE_SEED` make a longer run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pollster::block_on;
use selkie_core::backend::Backend;
use selkie_core::controls::{Constraint, Controls, Logprobs};
use selkie_core::engine::{Engine, EngineOptions, Event, FinishReason, MOST_DRAFTS, Request, SeqId, Speculate};
use selkie_core::sample::Sampling;
use selkie_core::state::{CapturePolicy, Reason, Report};
use selkie_core::tier::{ColdDtype, DiskOptions, Rates, TierOptions, Where};

use crate::{
    behind::Behind,
    drafts,
    flat::Memory,
    models::{TestModel, coded_models, golden_models, micro_models},
    random::Random,
    rule::Rule,
};

/// What drafts in a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drafts {
    None,
    /// Drafters that requests bring, and n-grams.
    Given,
    /// The model's head, for most requests.
    Head,
}

/// A request and its constraint, which the request's own text does not show.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub request: Request,
    rule: Option<Rule>,
}

impl Asked {
    pub fn plain(request: Request) -> Self {
        Self { request, rule: None }
    }

    /// Without rules that keep it from drafting. Some have a constraint and a bias.
    pub fn drafts(&mut self, random: &mut Random, vocab: usize) {
        let Request { sampling, controls, prompt_logprobs, .. } = &mut self.request;
        (sampling.repetition_penalty, *controls, *prompt_logprobs) = (1.0, Controls::default(), None);
        self.rule = random.one_in(3).then(|| Rule::random(random, vocab));
        if self.rule.is_some() && random.one_in(2) {
            controls.logit_bias = vec![(random.below(vocab) as u32, 2.0)];
        }
    }

    pub fn request(&self) -> Request {
        let constraint = self.rule.clone().map(|rule| Box::new(rule) as Box<dyn Constraint + Send>);
        Request { constraint, ..self.request.clone() }
    }
}

/// Rules over the logits of a request.
fn controls(random: &mut Random, vocab: usize, max_tokens: usize) -> Controls {
    let mut ids: Vec<u32> = (0..vocab as u32).filter(|_| random.one_in(3)).collect();
    if ids.is_empty() {
        ids.push(0);
    }
    // The stop ids are below.
    ids.push(vocab as u32 - 1);
    ids.dedup();
    let biased = (0..vocab as u32).filter(|_| random.one_in(8)).collect::<Vec<_>>();
    Controls {
        logprobs: random.pick(&[None, Some(0), Some(1), Some(5), Some(20)]),
        presence_penalty: random.pick(&[0.0, 0.0, 0.7, -0.5]),
        frequency_penalty: random.pick(&[0.0, 0.0, 0.3, 1.9]),
        logit_bias: if random.one_in(3) {
            biased.into_iter().map(|id| (id, id as f32 / 9.0 - 1.5)).collect()
        } else {
            vec![]
        },
        min_tokens: random.pick(&[0, 0, 1, 5, 30]).min(max_tokens),
        allowed_tokens: random.one_in(5).then_some(ids),
    }
}

/// What a request gave: tokens, logits, log probabilities, and how it ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Output(
    pub Vec<u32>,
    pub Vec<Box<[f32]>>,
    Vec<Option<Box<Logprobs>>>,
    pub Option<FinishReason>,
    Arc<[Logprobs]>,
);

impl Output {
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Token { token, logits, logprobs, prompt_logprobs, .. } => {
                if let Some(scored) = prompt_logprobs {
                    assert!(self.0.is_empty(), "log probabilities of a prompt come with the first token");
                    self.4 = scored;
                }
                self.0.push(token);
                self.1.push(logits.unwrap());
                self.2.push(logprobs);
            }
            Event::Finished(end) => (self.3, self.4) = (Some(end.reason), end.prompt_logprobs),
        }
    }
}

/// Runs requests alone, with the cache off, and keeps the results, since the same requests recur.
pub(super) struct Alone<'a> {
    engine: Engine<Behind>,
    known: HashMap<String, Output>,
    model: &'a TestModel,
}

impl<'a> Alone<'a> {
    pub fn new(model: &'a TestModel, context: usize) -> Self {
        let options = EngineOptions {
            max_batch: 1,
            prefix_cache: false,
            step_tokens: 4096,
            context: Some(context),
            logits: true,
            ..EngineOptions::default()
        };
        Self { engine: model.engine(&options, false), known: HashMap::new(), model }
    }

    pub fn run(&mut self, asked: &Asked) -> Output {
        // Drafters change nothing.
        let request = Request { drafter: None, ..asked.request.clone() };
        let asked = &Asked { request, rule: asked.rule.clone() };
        let key = format!("{asked:?}");
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        self.engine.submit(asked.request()).unwrap();
        let mut output = Output::default();
        while !self.engine.is_idle() {
            block_on(self.engine.step()).unwrap().into_iter().for_each(|event| output.take(event));
        }
        self.known.insert(key, output.clone());
        assert!(!output.0.is_empty(), "{}: nothing sampled", self.model.name);
        output
    }
}

/// Requests of one case: prompts over a few shared stems, so that prefixes meet, diverge and grow.
pub(super) fn requests(random: &mut Random, vocab: usize, context: usize) -> Vec<Asked> {
    // Such requests reuse nothing, so they are in some cases of the long runs only.
    let scores = random.0 > 12 && random.0 % 4 == 3;
    let mut texts: Vec<Vec<u32>> = vec![Vec::new()];
    let count = 3 + random.below(7);
    let mut out = Vec::new();
    for _ in 0..count {
        let mut prompt = random.pick(&texts);
        let all = prompt.len();
        prompt.truncate(random.pick(&[all, all, all, all, all - all / 8, all / 2, 0]));
        let more = random.pick(&[1, 3, 17, 63, 64, 65, 90, 128, 200]);
        let mut boundaries = vec![prompt.len()];
        prompt.extend((0..more).map(|_| random.below(vocab) as u32));
        let max_tokens = random.pick(&[1, 2, 9, 40, 80]);
        prompt.truncate(context - max_tokens);
        boundaries.push(prompt.len());
        texts.push(prompt.clone());
        let sampled = random.one_in(3);
        let sampling = Sampling {
            temperature: if sampled { 0.8 } else { 0.0 },
            top_k: if sampled { 20 } else { 0 },
            repetition_penalty: random.pick(&[1.0, 1.3]),
            seed: random.next() % 3,
            ..Sampling::default()
        };
        let stop_ids = if random.one_in(4) { vec![random.below(vocab) as u32] } else { Vec::new() };
        let namespace = random.pick(&["", "", "", "tenant"]).to_string();
        boundaries.retain(|_| !random.one_in(3));
        let controls = if random.one_in(3) { Controls::default() } else { controls(random, vocab, max_tokens) };
        // Masks of both kinds could forbid everything.
        let free = controls == Controls::default() || controls.allowed_tokens.is_none() && controls.min_tokens == 0;
        let rule = (free && random.one_in(3)).then(|| Rule::random(random, vocab));
        let constraint = None;
        let origin = String::new();
        // Of a generator of their own, so that seeds name the prompts that they always named.
        let mut other = Random(!random.0);
        let (share, priority) = (other.pick(&["", "", "a", "b"]).to_string(), other.pick(&[0, 0, 0, -1, 3]));
        let prompt_logprobs = if scores { other.pick(&[None, None, Some(3)]) } else { None };
        let request = Request {
            prompt,
            max_tokens,
            namespace,
            origin,
            share,
            priority,
            prompt_logprobs,
            boundaries,
            sampling,
            stop_ids,
            controls,
            constraint,
            drafter: None,
            forced: Arc::default(),
        };
        out.push(Asked { request, rule });
    }
    out
}

pub(super) fn options(random: &mut Random, requests: &[Asked], context: usize) -> EngineOptions {
    let pages = |r: &Request| (r.prompt.len() + r.max_tokens - 1).div_ceil(64);
    let largest = requests.iter().map(|asked| pages(&asked.request)).max().unwrap();
    EngineOptions {
        memory: None,
        slots: Some(random.pick(&[1, 1, 2, 3, 5, 9, 40])),
        kv_pages: Some(largest + random.pick(&[0, 0, 1, 2, 5, 60])),
        max_batch: random.pick(&[1, 2, 3, 8]),
        step_tokens: random.pick(&[1, 2, 7, 63, 64, 65, 100, 128, 500]),
        context: Some(context),
        prefix_cache: !random.one_in(6),
        policy: random.pick(&[CapturePolicy::Default, CapturePolicy::OnePerPrefill]),
        tiers: tiers(random),
        logits: true,
        ..EngineOptions::default()
    }
}

/// Lower tiers for half of the cases, from room for one value on. Those on disk are in a directory of their own, or in files like
/// those of a page, every second of which lose what is written after some bytes.
fn tiers(random: &mut Random) -> TierOptions {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let dir = || {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        std::env::temp_dir().join(format!("selkie-promise-{}-{number}", std::process::id()))
    };
    let disk = random.one_in(6).then(|| DiskOptions {
        place: match random.below(4) {
            0 => Where::Flat(Memory::default().flats(|| 0)),
            1 => Where::Flat(Memory::with_room(random.below(100_000)).flats(|| 0)),
            _ => Where::Dir(dir()),
        },
        bytes: random.pick(&[20_000, 1 << 30]),
        ttl: Duration::from_secs(3600),
        identity: b"a model of the test".to_vec(),
    });
    let never = Rates { copy: Some(0.0), disk: None, prompt: Some(1.0) };
    TierOptions {
        host: random.pick(&[0, 0, 5000, 20_000, 1 << 30]),
        disk,
        cold: ColdDtype::Exact,
        rates: random.pick(&[Rates::ALWAYS, Rates::ALWAYS, Rates::ALWAYS, Rates::default(), never]),
    }
}

/// Runs one case and compares everything, but answers that say that they are converted. Returns the tokens reused, how many of them
/// came from host memory and disk, drafts, and answers that said so: a run shows that it reused something.
fn case(model: &TestModel, alone: &mut Alone<'_>, seed: u64, drafts: Drafts, cold: ColdDtype) -> [usize; 5] {
    let context = 512;
    let mut random = Random(seed);
    let vocab = model.architecture.spec().vocab;
    let mut requests = requests(&mut random, vocab, context);
    let mut options = options(&mut random, &requests, context);
    if drafts != Drafts::None {
        let mut random = Random(seed ^ 0xd4af);
        if drafts == Drafts::Given {
            drafts::give(&mut random, model, alone, &mut requests, cold == ColdDtype::Exact);
            options.speculate = random.pick(&[Speculate::Ngram, Speculate::Ngram, Speculate::Auto]);
        } else {
            let mut other = Random(seed ^ 0x9a3b);
            requests.iter_mut().filter(|_| !random.one_in(4)).for_each(|asked| asked.drafts(&mut other, vocab));
            options.speculate = random.pick(&[Speculate::Mtp, Speculate::Mtp, Speculate::Auto]);
        }
        options.drafts = random.pick(&[1, 2, 3, MOST_DRAFTS, MOST_DRAFTS]);
        options.slots = options.slots.map(|slots| slots + random.pick(&[0, 0, 4, 30]));
    }
    if cold != ColdDtype::Exact {
        options.tiers.cold = cold;
        options.tiers.host = options.tiers.host.max(random.pick(&[0, 5000, 20_000, 1 << 30]));
    }
    let pipelined = seed.is_multiple_of(2);
    let label = format!("{}, seed {seed}, pipelined {pipelined}, {options:?}", model.name);
    let mut engine = model.engine(&options, pipelined);
    let mut waiting: Vec<(usize, Asked)> = requests.iter().cloned().enumerate().rev().collect();
    if options.tiers.any() {
        // What was evicted is wanted again.
        waiting = [waiting.clone(), waiting].concat();
    }
    let mut running: HashMap<SeqId, (usize, Output)> = HashMap::new();
    let (mut reused, mut lifted, mut prompt_tokens, mut cancelled, mut converted) = (0, [0, 0], 0, false, 0);
    let mut steps = 0;
    while !(waiting.is_empty() && engine.is_idle()) {
        steps += 1;
        assert!(steps < 100_000, "{label}: no end");
        while !waiting.is_empty() && (engine.is_idle() || random.one_in(3)) {
            let (index, asked) = waiting.pop().unwrap();
            let id = engine.submit(asked.request()).unwrap_or_else(|e| panic!("{label}: {e}"));
            running.insert(id, (index, Output::default()));
        }
        if random.one_in(60) && !running.is_empty() {
            let mut ids: Vec<_> = running.keys().copied().collect();
            ids.sort();
            engine.cancel(random.pick(&ids));
            cancelled = true;
        }
        if random.one_in(100) {
            engine.clear_cache();
        }
        engine.poison_free().unwrap();
        for event in block_on(engine.step()).unwrap_or_else(|e| panic!("{label}: {e}")) {
            match event {
                Event::Token { id, .. } => running.get_mut(&id).unwrap().1.take(event),
                Event::Finished(end) => {
                    let (index, output) = running.remove(&end.id).unwrap();
                    if let Some(report) = end.cache {
                        reused += report.reused;
                        assert!(report.host + report.disk <= report.reused, "{label}: {report:?}");
                        lifted = [lifted[0] + report.host, lifted[1] + report.disk];
                        prompt_tokens += requests[index].request.prompt.len();
                        if report.converted {
                            let why = end.error.map_or(String::new(), |e| e.to_string());
                            assert!(why.is_empty() || why.contains("the constraint allows no token"), "{label}: {why}");
                            let finite = output.1.iter().flatten().all(|x| x.is_finite());
                            assert!(finite && cold != ColdDtype::Exact, "{label}: request {index}");
                            converted += 1;
                            continue;
                        }
                    }
                    let expected = alone.run(&requests[index]);
                    let request = &requests[index].request;
                    let n = output.0.len();
                    if end.reason != FinishReason::Cancelled {
                        assert_eq!(n, expected.0.len(), "{label}: length of request {index}");
                        assert_eq!(Some(end.reason), expected.3, "{label}: end of request {index}");
                    }
                    let scored = &end.prompt_logprobs;
                    assert_eq!(**scored, expected.4[..scored.len()], "{label}: log probabilities of prompt {index}");
                    assert!(
                        n == 0 || output.4 == *scored,
                        "{label}: those of prompt {index} come with its first token"
                    );
                    let whole = request.prompt_logprobs.is_some() && n > 0;
                    assert!(!whole || scored.len() + 1 == request.prompt.len(), "{label}: {} scored", scored.len());
                    assert_eq!(output.2, expected.2[..n], "{label}: log probabilities of request {index}");
                    assert_eq!(output.0, expected.0[..n], "{label}: tokens of request {index}");
                    for (i, (a, b)) in output.1.iter().zip(&expected.1).enumerate() {
                        let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{label}: logits of token {i} of request {index}");
                    }
                }
            }
        }
        engine.scheduler().audit().unwrap_or_else(|e| panic!("{label}: {e}"));
    }
    assert!(running.is_empty(), "{label}: lost requests");
    let stats = engine.stats();
    if !cancelled {
        assert_eq!(stats.tokens_prefilled as usize + reused, prompt_tokens, "{label}: {stats:?}");
    }
    let tiers = stats.tiers;
    assert!(tiers.host_bytes <= options.tiers.host, "{label}: {tiers:?}");
    if !cancelled {
        assert_eq!([tiers.host_tokens as usize, tiers.disk_tokens as usize], lifted, "{label}: {tiers:?}");
    }
    engine.clear_cache();
    let scheduler = engine.scheduler();
    assert_eq!((scheduler.slots().used(), scheduler.pages().used()), (0, 0), "{label}: leak");
    for layer in engine.runner().pools() {
        let kv = layer.kv.iter().flat_map(|kv| [&kv.k, &kv.v]);
        for pool in layer.conv.iter().chain(&layer.recurrent).chain(kv) {
            let null = block_on(engine.runner().backend().read(&pool.head(1))).unwrap();
            assert!(null.iter().all(|&b| b == 0), "{label}: entry 0 of a pool was written");
        }
    }
    if let Some(DiskOptions { place: Where::Dir(dir), .. }) = &options.tiers.disk {
        drop(engine);
        std::fs::remove_dir_all(dir).unwrap();
    }
    [reused, lifted[0], lifted[1], stats.drafts.accepted() as usize, converted]
}

/// Returns the tokens that came from host memory and from disk, and those that were drafts.
pub(super) fn run(models: Vec<TestModel>, cases: u64, drafts: Drafts) -> [usize; 3] {
    let [host, disk, accepted, _] = run_cold(models, cases, drafts, ColdDtype::Exact);
    [host, disk, accepted]
}

/// The same with such states in the lower tiers; also returns the answers that said that they are converted.
pub(super) fn run_cold(models: Vec<TestModel>, cases: u64, drafts: Drafts, cold: ColdDtype) -> [usize; 4] {
    let number = |name| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let cases = number("SELKIE_PROMISE_CASES").unwrap_or(cases);
    let seed = number("SELKIE_PROMISE_SEED").unwrap_or(1);
    let (next, lifted) = (AtomicUsize::new(0), Mutex::new([0; 4]));
    let work = || {
        while let Some(model) = models.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut alone = Alone::new(model, 512);
            let mut sum = [0; 5];
            for i in 0..cases {
                sum.iter_mut().zip(case(model, &mut alone, seed + i, drafts, cold)).for_each(|(sum, n)| *sum += n);
            }
            let [reused, host, disk, accepted, converted] = sum;
            println!(
                "{}: {cases} cases from seed {seed}, {reused} tokens reused, {host} from host memory, {disk} from disk, \
                 {accepted} drafts accepted, {converted} converted",
                model.name
            );
            assert!(reused > 0, "{}: no case reused anything", model.name);
            assert_eq!(accepted > 0, drafts != Drafts::None, "{}: {accepted} drafts accepted", model.name);
            let mut lifted = lifted.lock().unwrap();
            lifted.iter_mut().zip([host, disk, accepted, converted]).for_each(|(sum, n)| *sum += n);
        }
    };
    // Two models at a time: the last test to end leaves no core idle.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(work);
        }
    });
    lifted.into_inner().unwrap()
}

#[test]
fn cache_on_is_cache_off_and_alone_is_batched() {
    let [host, disk, _] = run(micro_models(), 500, Drafts::None);
    assert!(host > 1000 && disk > 100, "{host} tokens from host memory, {disk} from disk");
}

#[test]
fn so_it_is_for_codes() {
    run(coded_models(), 12, Drafts::None);
}

#[test]
fn so_it_is_for_real_families() {
    run(golden_models(), 6, Drafts::None);
}

/// The eight requests of the worked example of hybrid prefix caches: their blocks of 256 tokens, by number.
const EIGHT: [&[u64]; 8] = [&[1, 2], &[1, 3], &[1, 4], &[1, 2, 5], &[1, 4, 5], &[1, 3, 5], &[1, 3], &[1, 3]];

/// A request for these blocks, between the few tokens of a template.
fn blocks(numbers: &[u64], vocab: usize) -> Request {
    let block = |of: u64, tokens: usize| {
        let mut random = Random(1000 * of);
        (0..tokens).map(|_| random.below(vocab) as u32).collect::<Vec<_>>()
    };
    let body = numbers.iter().flat_map(|&n| block(n, 256));
    let prompt = block(90, 7).into_iter().chain(body).chain(block(91, 6)).collect();
    Request { prompt, max_tokens: 3, ..Request::default() }
}

/// What a prompt of 269 tokens is answered with.
pub(super) fn serve(model: &TestModel) -> Output {
    let asked = Asked::plain(Request { max_tokens: 16, ..blocks(&[1], model.architecture.spec().vocab) });
    Alone::new(model, 512).run(&asked)
}

/// Serves the eight in turn and compares each with itself alone; returns what each reused.
fn serve_eight(model: &TestModel, alone: &mut Alone<'_>, policy: CapturePolicy) -> Vec<Report> {
    let options = EngineOptions { context: Some(1024), logits: true, policy, ..EngineOptions::default() };
    let mut engine = model.engine(&options, true);
    let mut reports = Vec::new();
    for numbers in EIGHT {
        let request = blocks(numbers, model.architecture.spec().vocab);
        let asked = Asked { request, rule: None };
        let (expected, mut output) = (alone.run(&asked), Output::default());
        engine.submit(asked.request()).unwrap();
        while !engine.is_idle() {
            engine.poison_free().unwrap();
            for event in block_on(engine.step()).unwrap() {
                if let Event::Finished(end) = &event {
                    reports.push(end.cache.unwrap());
                }
                output.take(event);
            }
        }
        assert!(output == expected, "{}, {policy:?}: {numbers:?} differs from itself alone", model.name);
    }
    reports
}

#[test]
fn the_eight_requests_reuse_the_same_on_every_hybrid() {
    use Reason::{FirstSight, Full, NoState};
    for model in golden_models() {
        let spec = model.architecture.spec();
        let stateful = spec.layers.iter().any(|l| l.conv.is_some() || l.recurrent.is_some());
        let mut alone = Alone::new(&model, 1024);
        for (policy, hybrid, again) in [
            (CapturePolicy::OnePerPrefill, [0, 0, 256, 512, 512, 256, 256, 512], NoState),
            (CapturePolicy::Default, [0, 0, 256, 512, 512, 512, 512, 512], Full),
        ] {
            let (reused, [second, seventh]) = match stateful {
                true => (hybrid, [NoState, again]),
                false => ([0, 256, 256, 512, 512, 512, 512, 512], [FirstSight, Full]),
            };
            let reasons = [FirstSight, second, FirstSight, FirstSight, FirstSight, FirstSight, seventh, Full];
            let reports = serve_eight(&model, &mut alone, policy);
            let found: Vec<_> = reports.iter().map(|r| (r.reused, r.reason)).collect();
            let expected: Vec<_> = reused.into_iter().zip(reasons).collect();
            assert_eq!(found, expected, "{}, {policy:?}", model.name);
        }
    }
}
