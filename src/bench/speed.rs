//! `selkie bench model`: tokens per second beside what the machine's memory and arithmetic allow.

use std::rc::Rc;

use selkie_core::{
    Error, Result,
    backend::{Backend, Handle, Ops},
    cpu::probe,
    engine::{EngineOptions, Event, Request, Timing},
    model_dir::ModelFiles,
    ops::Op,
    session::Session,
    step::{Bucket, PAGE, Step},
    tensor::{DType, Tensor},
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

/// Tokens of a prefill step.
const STEP_TOKENS: usize = 512;

/// Measures and prints.
pub fn run(args: &BenchModelArgs) -> Outcome {
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
    prompt_tokens: usize,
    decode_tokens: usize,
    /// Tokens per second.
    prefill: f64,
    decode: f64,
    /// Weights that one decoded token reads, in bytes.
    token_bytes: u64,
    /// Operations of the prompt.
    prompt_flops: u64,
    /// What the machine can do.
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

    fn run<B: Backend>(self, backend: B) -> Outcome<Facts> {
        let (prompt, decode) = (self.args.prompt_tokens, self.args.decode_tokens);
        let options = EngineOptions {
            max_batch: 1,
            step_tokens: STEP_TOKENS.min(prompt),
            context: Some(prompt + decode + 1),
            prefix_cache: false,
            ..EngineOptions::default()
        };
        let mut session = model::load(backend, self.files, &options)?;
        let is_cpu = session.engine().caps().backend == "cpu";
        let mut prefill_ms = f64::INFINITY;
        let mut decode_ms = f64::INFINITY;
        // The first run touches the weights and compiles what is compiled late.
        for run in 0..=self.args.runs {
            let timing = pollster::block_on(generate(&mut session, prompt, decode))?;
            if run > 0 {
                prefill_ms = prefill_ms.min(timing.prefill_ms);
                decode_ms = decode_ms.min(timing.decode_ms);
            }
        }
        let (token_bytes, _) = work(&session, 1)?;
        let steps = prompt / options.step_tokens;
        let rest = prompt % options.step_tokens;
        let mut prompt_flops = steps as u64 * work(&session, options.step_tokens)?.1;
        if rest > 0 {
            prompt_flops += work(&session, rest)?.1;
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let machine =
            is_cpu.then(|| Machine { threads, read: probe::read_bandwidth(threads), matmul: probe::matmul_rate() });
        let engine = session.engine();
        Ok(Facts {
            model: self.files.label().to_owned(),
            family: engine.spec().family.clone(),
            parameters: engine.spec().parameters,
            weight_bytes: engine.weight_bytes(),
            backend: engine.caps().backend,
            device: engine.caps().device.clone(),
            prompt_tokens: prompt,
            decode_tokens: decode,
            prefill: prompt as f64 / prefill_ms * 1e3,
            decode: decode as f64 / decode_ms * 1e3,
            token_bytes,
            prompt_flops,
            machine,
        })
    }
}

/// One request of `prompt` tokens, of which the first token is free and `decode` are timed.
async fn generate<B: Backend>(session: &mut Session<B>, prompt: usize, decode: usize) -> Result<Timing> {
    let engine = session.engine_mut();
    let ids = Random(SEED).ids(prompt, engine.spec().vocab);
    engine.submit(Request { prompt: ids, max_tokens: decode + 1, ..Request::default() })?;
    while !engine.is_idle() {
        for event in engine.step().await? {
            if let Event::Finished(end) = event {
                return Ok(end.timing);
            }
        }
    }
    Err(Error::Device { op: "bench".into(), why: "the request did not end".into() })
}

/// An [`Ops`] that runs nothing and adds up what would be done.
#[derive(Default)]
struct Tally {
    weight_bytes: u64,
    flops: u64,
}

impl<Buf: Handle> Ops<Buf> for Tally {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        let cost = op.cost();
        // Their bytes are the weights, and an activation that is small beside them.
        if ["matmul", "expert_matmul"].contains(&op.name()) {
            self.weight_bytes += cost.bytes;
        }
        self.flops += cost.flops;
        Ok(())
    }
}

/// Bytes of weights and operations of a step of `tokens` tokens of one sequence.
fn work<B: Backend>(session: &Session<B>, tokens: usize) -> Result<(u64, u64)> {
    let runner = session.engine().runner();
    let bucket = Bucket::holding(tokens, 1, tokens.div_ceil(PAGE), 1, tokens.div_ceil(PAGE));
    let ints = runner.backend().alloc("step integers", 4 * bucket.words() as u64)?;
    let last = Tensor::new(runner.backend().alloc("last ids", 4)?, DType::U32, &[1]);
    let mut tally = Tally::default();
    runner.model().forward(&mut tally, &Step::new(ints, bucket), runner.pools(), &last)?;
    Ok((tally.weight_bytes, tally.flops))
}

impl Facts {
    /// Bytes of weights per second while decoding.
    fn decode_bytes(&self) -> f64 {
        self.token_bytes as f64 * self.decode
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
        lines.push(format!("({} prompt tokens, {} generated)", self.prompt_tokens, self.decode_tokens));
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
            "prompt_tokens": self.prompt_tokens,
            "decode_tokens": self.decode_tokens,
            "prefill_tokens_per_second": self.prefill,
            "decode_tokens_per_second": self.decode,
            "decode_weight_bytes_per_token": self.token_bytes,
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
