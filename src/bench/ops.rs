//! `selkie bench ops`: the cases of the op tests, timed.

use std::time::Instant;

use selkie_core::{
    Result,
    backend::{Backend, Ops},
    cases::{self, Case, Loaded, Size},
    tensor::{DType, Tensor},
};
use serde_json::{Value, json};

use crate::{
    args::BenchOpsArgs,
    backend::{self, Job},
    failure::{Failure, Outcome},
    terminal::Output,
};

/// Seconds of one measurement, and how many are made; the best counts.
const SECONDS: f64 = 0.05;
const MEASUREMENTS: usize = 3;

/// Measures and prints.
pub fn run(args: &BenchOpsArgs) -> Outcome {
    backend::run(&args.backend, Speed { args })
}

struct Speed<'a> {
    args: &'a BenchOpsArgs,
}

/// The time of one case.
struct Row {
    case: String,
    seconds: f64,
    bytes: u64,
    flops: u64,
}

impl Job for Speed<'_> {
    type Out = ();

    fn run<B: Backend>(self, backend: B) -> Outcome {
        let wanted = |case: &Case| {
            let named = self.args.filter.as_ref().is_none_or(|f| case.id().contains(f));
            named && (self.args.all || case.size > Size::Small)
        };
        let cases: Vec<Case> = cases::all().into_iter().filter(wanted).collect();
        if cases.is_empty() {
            return Err(Failure::Other("no case has such a name; --all takes the small ones too".into()));
        }
        let mut out = Output::new();
        let mut rows = Vec::new();
        if !self.args.json {
            out.line(&format!("{:>12}  {:>8}  {:>9}  case on {}", "time", "GB/s", "GFLOP/s", backend.caps().device))?;
        }
        for case in &cases {
            let row = pollster::block_on(measure(&backend, case))?;
            if !self.args.json {
                out.line(&row.text())?;
            }
            rows.push(row);
        }
        if self.args.json {
            let caps = backend.caps();
            let rows: Vec<Value> = rows.iter().map(Row::json).collect();
            out.json(&json!({ "backend": caps.backend, "device": caps.device, "cases": rows }))?;
        }
        Ok(())
    }
}

async fn measure<B: Backend>(backend: &B, case: &Case) -> Result<Row> {
    let loaded = Loaded::new(backend, case)?;
    let cost = loaded.op.cost();
    // Reading anything waits for everything before.
    let fence = Tensor::new(backend.alloc("fence", 4)?, DType::U32, &[1]);
    let tape = backend.record(|ops| ops.op(loaded.op.clone()))?;
    let time = async |count: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            backend.play(&tape)?;
        }
        backend.read(&fence).await?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    time(1).await?;
    let count = (SECONDS / time(1).await?.max(1e-7)).ceil() as usize;
    let mut seconds = f64::INFINITY;
    for _ in 0..MEASUREMENTS {
        seconds = seconds.min(time(count).await?);
    }
    Ok(Row { case: case.id(), seconds, bytes: cost.bytes, flops: cost.flops })
}

impl Row {
    fn text(&self) -> String {
        let per_second = |n: u64| n as f64 / self.seconds / 1e9;
        let time = format!("{:.1} µs", self.seconds * 1e6);
        format!("{time:>12}  {:>8.2}  {:>9.2}  {}", per_second(self.bytes), per_second(self.flops), self.case)
    }

    fn json(&self) -> Value {
        json!({ "case": self.case, "seconds": self.seconds, "bytes": self.bytes, "flops": self.flops })
    }
}
