//! `selkie bench model`: tokens per second, compared with the limits of the machine's memory and arithmetic.

use std::{rc::Rc, time::Instant};

use selkie_core::{
    Error, Result,
    backend::{Backend, Handle, Ops},
    cpu::probe,
    engine::{EngineOptions, Event, Request},
    model_dir::ModelFiles,
    ops::Op,
    session::Session,
    state::budget::RUNNING_SLOTS,
    step::{Bucket, PAGE, Step},
    tensor::{DType, Tensor},
    timer::Timer,
};
use serde_json::{Value, json};

use super::{Random, SEED};
use crate::{
    args::BenchModelArgs,
    backend::{self, Job},
    failure::Outcome,
    model,
    terminal::{Output, size, thousands},
};

/// Measures and prints.
pub fn run(args: &BenchModelArgs) -> Outcome {
    let tokens = args.batch.saturating_mul(args.prompt_tokens.saturating_add(args.decode_tokens));
    super::check_tokens(tokens, "--batch, --prompt-tokens and --decode-tokens")?;
    let files = super::open(&args.target)?;
    let facts = backend::run(&args.target.model.backend, Speed { args, files: &files })?;
    let mut out = Output::new();
    if args.target.json { out.json(&facts.json()) } else { out.text(&facts.text()) }
}

struct Speed<'a> {
    args: &'a BenchModelArgs,
    files: &'a Rc<ModelFiles>,
}

struct Facts {
    model: String,
    family: String,
    parameters: u64,
    weight_bytes: u64,
    backend: &'static str,
    device: String,
    batch: usize,
    step_tokens: usize,
    prompt_tokens: usize,
    decode_tokens: usize,
    /// Tokens per second of all sequences together.
    prefill: f64,
    decode: f64,
    /// Bytes of weights that a step of one token per sequence reads.
    step_bytes: u64,
    /// Operations of one prompt.
    prompt_flops: u64,
    /// Loading time in seconds.
    load: f64,
    /// Lines from the backend.
    notes: Vec<String>,
    /// The limits of the machine.
    machine: Option<Machine>,
}

/// Rates of the processor, measured in the same run.
struct Machine {
    threads: usize,
    /// Bytes per second.
    read: f64,
    /// Operations per second.
    matmul: f64,
}

impl Job for Speed<'_> {
    type Out = Facts;

    fn run<B: Timer>(self, backend: B) -> Outcome<Facts> {
        let (prompt, decode) = (self.args.prompt_tokens, self.args.decode_tokens);
        let batch = self.args.batch;
        let step_tokens = self.args.step_tokens.min(batch * prompt).max(batch);
        // The first sequence continues while the other prompts are computed.
        let longest = decode + 1 + (batch * prompt).div_ceil(step_tokens) + batch;
        let options = EngineOptions {
            max_batch: batch,
            step_tokens,
            context: Some(prompt + longest),
            prefix_cache: false,
            // Memory for all sequences at once, also if the device does not report its memory.
            slots: Some(batch.saturating_mul(RUNNING_SLOTS as usize)),
            kv_pages: Some(batch.saturating_mul((prompt + longest).div_ceil(PAGE))),
            ..EngineOptions::default()
        };
        let start = Instant::now();
        let mut session = model::load(backend, self.files, &options)?;
        let load = start.elapsed().as_secs_f64();
        let is_cpu = session.engine().caps().backend == "cpu";
        let mut best = Times { prefill: f64::INFINITY, decode: f64::INFINITY };
        // The first run is a warm-up: it reads the weights once and triggers lazy compilation.
        for run in 0..=self.args.runs {
            let times = pollster::block_on(generate(&mut session, self.args, longest))?;
            if run > 0 {
                best.prefill = best.prefill.min(times.prefill);
                best.decode = best.decode.min(times.decode);
            }
        }
        let (step_bytes, _) = work(&session, batch, batch)?;
        let step = step_tokens.min(prompt);
        let mut prompt_flops = (prompt / step) as u64 * work(&session, step, 1)?.1;
        if !prompt.is_multiple_of(step) {
            prompt_flops += work(&session, prompt % step, 1)?.1;
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let machine =
            is_cpu.then(|| Machine { threads, read: probe::read_bandwidth(threads), matmul: probe::matmul_rate() });
        let engine = session.engine();
        let notes = pollster::block_on(engine.runner().backend().facts())?;
        Ok(Facts {
            load,
            notes,
            model: self.files.label().to_owned(),
            family: engine.spec().family.clone(),
            parameters: engine.spec().parameters,
            weight_bytes: engine.weight_bytes(),
            backend: engine.caps().backend,
            device: engine.caps().device.clone(),
            batch,
            step_tokens,
            prompt_tokens: prompt,
            decode_tokens: decode,
            prefill: (batch * prompt) as f64 / best.prefill,
            decode: (batch * decode) as f64 / best.decode,
            step_bytes,
            prompt_flops,
            machine,
        })
    }
}

/// Seconds of the two phases of a run.
struct Times {
    /// From the submission to the first token of the last sequence.
    prefill: f64,
    /// After that, `decode_tokens` tokens of every sequence.
    decode: f64,
}

/// Runs sequences of at most `longest` new tokens; times the tokens generated while every sequence decodes.
async fn generate<B: Backend>(session: &mut Session<B>, args: &BenchModelArgs, longest: usize) -> Result<Times> {
    let engine = session.engine_mut();
    let mut random = Random(SEED);
    let vocab = engine.spec().vocab;
    let start = Instant::now();
    let mut live = Vec::new();
    for _ in 0..args.batch {
        let prompt = random.ids(args.prompt_tokens, vocab);
        live.push(engine.submit(Request { prompt, max_tokens: longest, ..Request::default() })?);
    }
    let (mut waiting, mut decoded) = (live.clone(), 0);
    let (mut prefill, mut decode) = (0.0, None);
    while decode.is_none() {
        let all_decode = waiting.is_empty();
        for event in engine.step().await? {
            match event {
                Event::Token { .. } if all_decode => decoded += 1,
                Event::Token { id, .. } => {
                    waiting.retain(|w| *w != id);
                    if waiting.is_empty() {
                        prefill = start.elapsed().as_secs_f64();
                    }
                }
                Event::Finished(_) => {
                    return Err(Error::Device { op: "bench".into(), why: "a request ended too early".into() });
                }
            }
        }
        if decoded >= args.batch * args.decode_tokens {
            decode = Some(start.elapsed().as_secs_f64() - prefill);
        }
    }
    live.drain(..).for_each(|id| engine.cancel(id));
    while !engine.is_idle() {
        engine.step().await?;
    }
    Ok(Times { prefill, decode: decode.unwrap_or_default() })
}

/// An [`Ops`] that runs nothing and adds up the cost of the ops.
#[derive(Default)]
struct Tally {
    weight_bytes: u64,
    flops: u64,
}

impl<Buf: Handle> Ops<Buf> for Tally {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        let cost = op.cost();
        // Their bytes are the weights, plus an activation that is small in comparison.
        if ["matmul", "expert_matmul"].contains(&op.name()) {
            self.weight_bytes += cost.bytes;
        }
        self.flops += cost.flops;
        Ok(())
    }
}

/// Bytes of weights and operations of a step of `tokens` tokens in `rows` sequences.
fn work<B: Backend>(session: &Session<B>, tokens: usize, rows: usize) -> Result<(u64, u64)> {
    let runner = session.engine().runner();
    let pages = (tokens / rows).div_ceil(PAGE);
    let bucket = Bucket::holding(tokens, rows, rows * pages, rows, pages);
    let ints = runner.backend().alloc("step integers", 4 * bucket.words() as u64)?;
    let last = Tensor::new(runner.backend().alloc("last ids", 4 * rows as u64)?, DType::U32, &[rows]);
    let mut tally = Tally::default();
    runner.model().forward(&mut tally, &Step::new(ints, bucket), runner.pools(), &last)?;
    Ok((tally.weight_bytes, tally.flops))
}

impl Facts {
    /// Bytes of weights per second while decoding.
    fn decode_bytes(&self) -> f64 {
        self.step_bytes as f64 * self.decode / self.batch as f64
    }

    /// Operations per second while prefilling.
    fn prefill_flops(&self) -> f64 {
        self.prompt_flops as f64 / self.prompt_tokens as f64 * self.prefill
    }

    fn text(&self) -> String {
        let share = |part: f64, whole: f64| format!("{:.0} %", 100.0 * part / whole);
        let mut lines = vec![
            format!("{}: {}, {} parameters", self.model, self.family, thousands(self.parameters as f64)),
            format!("{} of weights on {} ({})", size(self.weight_bytes), self.backend, self.device),
        ];
        let mut prefill =
            format!("prefill  {:>9} tokens/s   {:.1} GFLOP/s", thousands(self.prefill), self.prefill_flops() / 1e9);
        let mut decode = format!(
            "decode   {:>9} tokens/s   {:.1} GB/s of weights",
            thousands(self.decode),
            self.decode_bytes() / 1e9
        );
        if let Some(m) = &self.machine {
            prefill += &format!(
                ", {} of the {:.1} of a large matrix product",
                share(self.prefill_flops(), m.matmul),
                m.matmul / 1e9
            );
            decode += &format!(
                ", {} of the {:.1} that {} threads read from memory",
                share(self.decode_bytes(), m.read),
                m.read / 1e9,
                m.threads
            );
        }
        lines.extend([prefill, decode]);
        let sequences = if self.batch == 1 { String::new() } else { format!("{} sequences: ", self.batch) };
        lines.push(format!(
            "({sequences}{} prompt tokens in steps of {}, {} generated)",
            self.prompt_tokens, self.step_tokens, self.decode_tokens
        ));
        lines.push(format!("loaded in {:.2} s", self.load));
        lines.extend(self.notes.iter().cloned());
        lines.join("\n") + "\n"
    }

    fn json(&self) -> Value {
        json!({
            "model": self.model,
            "family": self.family,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "backend": self.backend,
            "device": self.device,
            "version": env!("CARGO_PKG_VERSION"),
            "batch": self.batch,
            "step_tokens": self.step_tokens,
            "load_seconds": self.load,
            "notes": self.notes,
            "prompt_tokens": self.prompt_tokens,
            "decode_tokens": self.decode_tokens,
            "prefill_tokens_per_second": self.prefill,
            "decode_tokens_per_second": self.decode,
            "decode_weight_bytes_per_step": self.step_bytes,
            "decode_bytes_per_second": self.decode_bytes(),
            "prefill_flops_per_second": self.prefill_flops(),
            "machine": self.machine.as_ref().map(|m| json!({
                "threads": m.threads,
                "read_bytes_per_second": m.read,
                "matmul_flops_per_second": m.matmul,
                "decode_share_of_read": self.decode_bytes() / m.read,
                "prefill_share_of_matmul": self.prefill_flops() / m.matmul,
            })),
        })
    }
}
