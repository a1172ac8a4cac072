//! `selkie bench model`: tokens per second, compared with the limits of the machine's memory and arithmetic.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use selkie_core::{
    Error, Result,
    cpu::probe,
    engine::{AnyEngine, EngineOptions, Event, Request},
    model_dir::ModelFiles,
    state::budget::RUNNING_SLOTS,
    step::{Bucket, PAGE},
};
use serde_json::{Value, json};

use super::{
    Random, SEED,
    bound::{Rates, Work},
};
use crate::{
    args::BenchModelArgs,
    backend::Loaded,
    failure::Outcome,
    model,
    terminal::{Output, size, thousands},
};

/// Repetitions after the warm-up, if the user does not say.
const RUNS: usize = 3;
/// There are no more repetitions after this time, if the user does not say.
const LONG: Duration = Duration::from_secs(2);

/// Measures and prints.
pub fn run(args: &BenchModelArgs) -> Outcome {
    let tokens = args.batch.saturating_mul(args.prompt_tokens.saturating_add(args.decode_tokens));
    super::check_tokens(tokens, "--batch, --prompt-tokens and --decode-tokens")?;
    let files = super::open(&args.target)?;
    let facts = measure(args, &files)?;
    let mut out = Output::new();
    if args.target.json { out.json(&facts.json()) } else { out.text(&facts.text()) }
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
    /// A step of one token per sequence, halfway through decoding.
    step: Work,
    /// All steps of one prompt.
    prompt: Work,
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

fn measure(args: &BenchModelArgs, files: &Arc<ModelFiles>) -> Outcome<Facts> {
    let (prompt, decode) = (args.prompt_tokens, args.decode_tokens);
    let batch = args.batch;
    let step_tokens = args.step_tokens.min(batch * prompt).max(batch);
    // The first sequence continues while the other prompts are computed.
    let longest = decode + 1 + (batch * prompt).div_ceil(step_tokens) + batch;
    let options = EngineOptions {
        max_batch: batch,
        step_tokens,
        context: Some(prompt + longest),
        prefix_cache: false,
        // Memory for all sequences together, also if the device does not report its memory.
        slots: Some(batch.saturating_mul(RUNNING_SLOTS as usize)),
        kv_pages: Some(batch.saturating_mul((prompt + longest).div_ceil(PAGE))),
        ..EngineOptions::default()
    };
    let backend = model::backend(&args.target.model.backend)?;
    let start = Instant::now();
    let mut engine = model::load_engine(backend, files, &options)?;
    let load = start.elapsed().as_secs_f64();
    let is_cpu = engine.caps().backend == "cpu";
    let mut best = Times { prefill: f64::INFINITY, decode: f64::INFINITY };
    // The first run is a warm-up: it reads the weights once and triggers lazy compilation. Only on a CPU, which compiles
    // nothing, may it take so long that it is the only one.
    let mut start = Instant::now();
    for run in 0..=args.runs.unwrap_or(RUNS) {
        let times = pollster::block_on(generate(&mut *engine, args, longest))?;
        if run == 0 && !is_cpu {
            start = Instant::now();
            continue;
        }
        let last = args.runs.is_none() && start.elapsed() > LONG;
        if run > 0 || last {
            best.prefill = best.prefill.min(times.prefill);
            best.decode = best.decode.min(times.decode);
        }
        if last {
            break;
        }
    }
    let pages = (prompt + decode / 2).div_ceil(PAGE);
    let step = engine.work(Bucket { tokens: batch, rows: batch, chunks: batch, outputs: batch, pages })?;
    let of_prompt = of_prompt(&*engine, prompt, step_tokens)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine =
        is_cpu.then(|| Machine { threads, read: probe::read_bandwidth(threads), matmul: probe::matmul_rate() });
    let notes = engine.notes()?;
    Ok(Facts {
        load,
        notes,
        model: files.label().to_owned(),
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
        step,
        prompt: of_prompt,
        machine,
    })
}

/// Seconds of the two phases of a run.
struct Times {
    /// From the submission to the first token of the last sequence.
    prefill: f64,
    /// After that, `decode_tokens` tokens of every sequence.
    decode: f64,
}

/// Runs sequences of at most `longest` new tokens; times the tokens generated while every sequence decodes.
async fn generate(engine: &mut dyn AnyEngine, args: &BenchModelArgs, longest: usize) -> Result<Times> {
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
                Event::Finished(end) => {
                    let early = || Error::Device { op: "bench".into(), why: "a request ended too early".into() };
                    return Err(end.error.and_then(Arc::into_inner).unwrap_or_else(early));
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

/// All steps of a prompt, each counted as if it were the first.
fn of_prompt(engine: &dyn Loaded, prompt: usize, step_tokens: usize) -> Result<Work> {
    let of = |tokens: usize| {
        let pages = tokens.div_ceil(PAGE);
        engine.work(Bucket::holding(tokens, 1, pages, 1, pages))
    };
    let step = step_tokens.min(prompt);
    let mut work = of(step)?.times((prompt / step) as u64);
    if !prompt.is_multiple_of(step) {
        let rest = of(prompt % step)?;
        work.flops += rest.flops;
        work.products += rest.products;
    }
    Ok(work)
}

impl Facts {
    /// Bytes of weights per second while decoding.
    fn decode_bytes(&self) -> f64 {
        self.step.weights as f64 * self.decode / self.batch as f64
    }

    /// What the device reaches in kernels that do one thing only.
    fn rates(&self) -> Option<Rates> {
        let measured = |m: &Machine| Rates { read: m.read, products: m.matmul, attention: m.matmul };
        self.machine.as_ref().map(measured).or_else(|| Rates::of(&self.device))
    }

    /// Most tokens per second of both phases at these rates: (prefill, decode).
    fn bounds(&self, rates: &Rates) -> (f64, f64) {
        let prefill = self.prompt_tokens as f64 / self.prompt.prompt_seconds(self.prompt_tokens, rates);
        (prefill, self.batch as f64 / self.step.decode_seconds(rates))
    }

    /// Operations per second while prefilling.
    fn prefill_flops(&self) -> f64 {
        self.prompt.flops as f64 / self.prompt_tokens as f64 * self.prefill
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
        if let Some(rates) = self.rates() {
            let (prefill, decode) = self.bounds(&rates);
            lines.push(format!(
                "bound    prefill {} tokens/s ({} reached), decode {} ({} reached): {} per step",
                thousands(prefill),
                share(self.prefill, prefill),
                thousands(decode),
                share(self.decode, decode),
                size(self.step.held)
            ));
        }
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
            "decode_weight_bytes_per_step": self.step.weights,
            "decode_bytes_per_step": self.step.held,
            "bound": self.rates().map(|rates| {
                let (prefill, decode) = self.bounds(&rates);
                json!({
                    "read_bytes_per_second": rates.read,
                    "product_flops_per_second": rates.products,
                    "attention_flops_per_second": rates.attention,
                    "prefill_tokens_per_second": prefill,
                    "decode_tokens_per_second": decode,
                    "prefill_share": self.prefill / prefill,
                    "decode_share": self.decode / decode,
                })
            }),
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
