//! The promise: cache on = cache off, alone = batched, bit for bit on the CPU backend.
//!
//! Random requests that share prefixes, fork, grow, stop and are cancelled run through an engine of random size with every
//! free slot and page filled with NaN between steps; tokens **and logits** of each must equal those of the same request run
//! alone in a large engine with the cache off. Every second case runs as on an asynchronous device: the next step
//! is planned before the last one's tokens are known. `SELKIE_PROMISE_CASES` and `SELKIE_PROMISE_SEED` make a longer run.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use pollster::block_on;
use selkie_core::backend::{Backend, Caps};
use selkie_core::checkpoint::Checkpoint;
use selkie_core::config::Config;
use selkie_core::cpu::{Buf, CpuBackend, Rec, Tape};
use selkie_core::engine::{Engine, EngineOptions, Event, FinishReason, Request, SeqId};
use selkie_core::error::Result;
use selkie_core::models::{self, Architecture};
use selkie_core::ops::Op;
use selkie_core::sample::Sampling;
use selkie_core::source::{Bytes, Dir, read_small};
use selkie_core::state::CapturePolicy;
use selkie_core::tensor::Tensor;

/// A small generator of our own, so that a seed names a case for good (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// The CPU, which runs each step at once, under the name of a device that does not.
struct Behind {
    cpu: CpuBackend,
    caps: Caps,
}

impl Behind {
    fn new(asynchronous: bool) -> Self {
        let cpu = CpuBackend::new();
        let caps = Caps { asynchronous, ..cpu.caps().clone() };
        Self { cpu, caps }
    }
}

impl Backend for Behind {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = <CpuBackend as Backend>::Read;

    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn free_memory(&self) -> Option<u64> {
        self.cpu.free_memory()
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        self.cpu.alloc(label, bytes)
    }
    fn adopts(&self) -> bool {
        true
    }
    fn adopt(&self, bytes: &Bytes) -> Option<Buf> {
        self.cpu.adopt(bytes)
    }
    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.cpu.write(dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.cpu.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.cpu.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        self.cpu.run(f)
    }
    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        self.cpu.record(f)
    }
    fn play(&self, tape: &Tape) -> Result<()> {
        self.cpu.play(tape)
    }
    fn read(&self, src: &Tensor<Buf>) -> Self::Read {
        self.cpu.read(src)
    }
}

struct TestModel {
    name: String,
    architecture: Architecture,
    checkpoint: Checkpoint,
}

impl TestModel {
    fn micro(name: &str, config: &str) -> Self {
        let config = Config::parse("config.json", config.as_bytes()).unwrap();
        Self { name: name.into(), architecture: models::read(&config).unwrap(), checkpoint: Checkpoint::random(7) }
    }

    /// The model of a reference folder, if its family is supported.
    fn golden(path: &Path) -> Option<Self> {
        let dir = Rc::new(Dir::open(path).unwrap());
        let config = block_on(read_small(dir.as_ref(), "config.json", 1 << 20)).unwrap()?;
        let config = Config::parse("config.json", &config).unwrap();
        let family = models::FAMILIES.iter().find(|f| config.model_type().is_ok_and(|t| t == f.model_type))?;
        Some(Self {
            name: path.file_name().unwrap().to_string_lossy().into(),
            architecture: (family.read)(&config).unwrap(),
            checkpoint: block_on(Checkpoint::open(dir)).unwrap(),
        })
    }

    fn engine(&self, options: &EngineOptions, asynchronous: bool) -> Engine<Behind> {
        let (backend, name, mut report) = (Behind::new(asynchronous), self.name.as_bytes(), |_| {});
        block_on(Engine::load(backend, &self.architecture, &self.checkpoint, name, options, &mut report)).unwrap()
    }
}

/// Models so small that thousands of cases run in a minute, one for each kind of layer.
fn micro_models() -> Vec<TestModel> {
    let hybrid = r#"{"model_type":"nemotron_h","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "head_dim":8,"intermediate_size":16,"mamba_num_heads":2,"mamba_head_dim":8,"ssm_state_size":8,"n_groups":1,
        "conv_kernel":4,"vocab_size":40,"hybrid_override_pattern":"M*-M","max_position_embeddings":1024}"#;
    let recurrent = r#"{"model_type":"mamba2","hidden_size":16,"num_heads":4,"head_dim":8,"state_size":8,"n_groups":2,
        "num_hidden_layers":2,"vocab_size":40,"tie_word_embeddings":true}"#;
    let attention = r#"{"model_type":"llama","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "intermediate_size":16,"num_hidden_layers":2,"vocab_size":40,"max_position_embeddings":1024}"#;
    let delta = r#"{"model_type":"qwen3_next","hidden_size":16,"num_hidden_layers":3,"full_attention_interval":3,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"linear_num_key_heads":1,"linear_num_value_heads":2,
        "linear_key_head_dim":8,"linear_value_head_dim":8,"num_experts":4,"num_experts_per_tok":2,
        "moe_intermediate_size":8,"shared_expert_intermediate_size":8,"vocab_size":40,"max_position_embeddings":1024}"#;
    vec![
        TestModel::micro("micro hybrid", hybrid),
        TestModel::micro("micro recurrent", recurrent),
        TestModel::micro("micro attention", attention),
        TestModel::micro("micro delta", delta),
    ]
}

/// Tokens and logits of a request.
type Output = (Vec<u32>, Vec<Box<[f32]>>);

/// The same requests again and again: what each gives alone, cache off.
struct Alone<'a> {
    engine: Engine<Behind>,
    known: HashMap<String, Output>,
    model: &'a TestModel,
}

impl<'a> Alone<'a> {
    fn new(model: &'a TestModel, context: usize) -> Self {
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

    fn run(&mut self, request: &Request) -> Output {
        let key = format!("{request:?}");
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        self.engine.submit(request.clone()).unwrap();
        let mut output = Output::default();
        while !self.engine.is_idle() {
            for event in block_on(self.engine.step()).unwrap() {
                if let Event::Token { token, logits, .. } = event {
                    output.0.push(token);
                    output.1.push(logits.unwrap());
                }
            }
        }
        self.known.insert(key, output.clone());
        assert!(!output.0.is_empty(), "{}: nothing sampled", self.model.name);
        output
    }
}

/// Requests of one case: prompts over a few shared stems, so that prefixes meet, diverge and grow.
fn requests(random: &mut Random, vocab: usize, context: usize) -> Vec<Request> {
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
        out.push(Request { prompt, max_tokens, namespace, boundaries, sampling, stop_ids });
    }
    out
}

fn options(random: &mut Random, requests: &[Request], context: usize) -> EngineOptions {
    let largest = requests.iter().map(|r| (r.prompt.len() + r.max_tokens - 1).div_ceil(64)).max().unwrap();
    EngineOptions {
        memory: None,
        slots: Some(random.pick(&[1, 1, 2, 3, 5, 9, 40])),
        kv_pages: Some(largest + random.pick(&[0, 0, 1, 2, 5, 60])),
        max_batch: random.pick(&[1, 2, 3, 8]),
        step_tokens: random.pick(&[1, 2, 7, 63, 64, 65, 100, 128, 500]),
        context: Some(context),
        prefix_cache: !random.one_in(6),
        policy: random.pick(&[CapturePolicy::Default, CapturePolicy::OnePerPrefill]),
        logits: true,
        ..EngineOptions::default()
    }
}

/// Runs one case and compares everything. Returns the tokens reused, so that a run shows that it reused something.
fn case(model: &TestModel, alone: &mut Alone<'_>, seed: u64) -> usize {
    let context = 512;
    let mut random = Random(seed);
    let vocab = model.architecture.spec().vocab;
    let requests = requests(&mut random, vocab, context);
    let options = options(&mut random, &requests, context);
    let pipelined = seed.is_multiple_of(2);
    let label = format!("{}, seed {seed}, pipelined {pipelined}, {options:?}", model.name);
    let mut engine = model.engine(&options, pipelined);
    let mut waiting: Vec<(usize, Request)> = requests.iter().cloned().enumerate().rev().collect();
    let mut running: HashMap<SeqId, (usize, Output)> = HashMap::new();
    let (mut reused, mut prompt_tokens, mut cancelled) = (0, 0, false);
    let mut steps = 0;
    while !(waiting.is_empty() && engine.is_idle()) {
        steps += 1;
        assert!(steps < 100_000, "{label}: no end");
        while !waiting.is_empty() && (engine.is_idle() || random.one_in(3)) {
            let (index, request) = waiting.pop().unwrap();
            let id = engine.submit(request).unwrap_or_else(|e| panic!("{label}: {e}"));
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
                Event::Token { id, token, logits } => {
                    let output = &mut running.get_mut(&id).unwrap().1;
                    output.0.push(token);
                    output.1.push(logits.unwrap());
                }
                Event::Finished(end) => {
                    let (index, output) = running.remove(&end.id).unwrap();
                    let request = &requests[index];
                    let expected = alone.run(request);
                    let n = output.0.len();
                    if end.reason != FinishReason::Cancelled {
                        assert_eq!(n, expected.0.len(), "{label}: length of request {index}");
                    }
                    assert_eq!(output.0, expected.0[..n], "{label}: tokens of request {index}");
                    for (i, (a, b)) in output.1.iter().zip(&expected.1).enumerate() {
                        let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{label}: logits of token {i} of request {index}");
                    }
                    if let Some(report) = end.cache {
                        reused += report.reused;
                        prompt_tokens += request.prompt.len();
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
    reused
}

fn run(models: Vec<TestModel>, cases: u64) {
    let number = |name| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let cases = number("SELKIE_PROMISE_CASES").unwrap_or(cases);
    let seed = number("SELKIE_PROMISE_SEED").unwrap_or(1);
    for model in &models {
        let mut alone = Alone::new(model, 512);
        let reused: usize = (0..cases).map(|i| case(model, &mut alone, seed + i)).sum();
        println!("{}: {cases} cases from seed {seed}, {reused} tokens reused", model.name);
        assert!(reused > 0, "{}: no case reused anything", model.name);
    }
}

#[test]
fn cache_on_is_cache_off_and_alone_is_batched() {
    run(micro_models(), 500);
}

#[test]
fn so_it_is_for_real_families() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let mut folders: Vec<_> = std::fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    let models: Vec<_> = folders.iter().filter_map(|path| TestModel::golden(path)).collect();
    assert!(models.len() >= 22, "{} models", models.len());
    run(models, 6);
}
