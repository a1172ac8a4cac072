//! `selkie bench ops`: times single ops at the sizes of published models.

use std::{ops::RangeInclusive, time::Instant};

use selkie_cases::{
    self as cases, Case, Dtypes, OpReport, Size,
    timed::{Shape, shapes},
};
use selkie_core::{
    Error, Result,
    backend::{Backend, Ops},
    cpu::probe,
    tensor::DType,
    timer::Timer,
};
use serde_json::{Value, json};

use crate::{
    args::BenchOpsArgs,
    backend::{self, on},
    failure::{Failure, Outcome},
    terminal::{self, Output},
};

/// Calls per recorded step when the warm time is measured.
const MANY: usize = 20;
/// Number of measurements, whose median is reported, and the microseconds after which no more are made.
const COLD: usize = 31;
const WARM: usize = 7;
const ENOUGH: f64 = 2e6;
/// Limits of the light load before a shape, in microseconds. The load lasts as long as the device was idle while cases and inputs
/// were computed: the clocks of a GPU fall after about 2 s without work and need 0.3 s of load to recover.
const WAKE: RangeInclusive<f64> = 2e4..=4e5;
/// Shapes with more work than this are skipped on a CPU, unless `--all` is given.
const HEAVY: f64 = 2e9;

/// Measures and prints.
pub fn run(args: &BenchOpsArgs) -> Outcome {
    let place = args.backend.place()?;
    if place.kv8 {
        return Err(Failure::Usage(
            "`bench ops` has shapes with exact pages only: leave out --kv-dtype, or time a model with `bench model`"
                .into(),
        ));
    }
    let report = on!(backend::open(&place)?, b => measure_all(&b, args))?;
    if args.json {
        Output::new().json(&report.json)?;
    }
    if report.failed { Err(Failure::Reported) } else { Ok(()) }
}

/// What a run found.
struct Report {
    json: Value,
    /// Whether an op failed one of its cases.
    failed: bool,
}

/// The largest rates of a device, in bytes and operations per second.
struct Ceilings {
    read: f64,
    matmul: f64,
}

impl Ceilings {
    /// Known for the GPU that was measured (plain copies, large bf16 products in a short burst) and for this CPU.
    fn of(caps: &selkie_core::backend::Caps) -> Option<Self> {
        if caps.backend == "cpu" {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            return Some(Self { read: probe::read_bandwidth(threads), matmul: probe::matmul_rate() });
        }
        caps.device.contains("H200").then_some(Self { read: 4.3e12, matmul: 790e12 })
    }
}

/// The times of one shape, in microseconds.
struct Row {
    shape: Shape,
    /// One call after the caches were flushed, and the same minus an empty step.
    cold: f64,
    net: f64,
    /// Mean of many calls in one recorded step.
    warm: f64,
    bytes: u64,
    flops: u64,
    /// The lower bound that follows from the device's rates.
    floor: Option<f64>,
}

/// Measures, and prints a line for each shape unless JSON is asked for.
fn measure_all<B: Timer>(backend: &B, args: &BenchOpsArgs) -> Result<Report, Failure> {
    let caps = backend.caps().clone();
    let mut all = shapes();
    if caps.act == DType::Bf16 {
        all.extend(shapes().iter().filter_map(|s| s.with_state(DType::Bf16)));
        all.sort_by_key(|s| shapes().iter().position(|other| other.op == s.op));
    }
    all.retain(|s| args.filter.as_ref().is_none_or(|f| s.id().contains(f)));
    if all.is_empty() {
        return Err(Failure::Other("no op or shape has a name that contains this text".into()));
    }
    let mut out = Output::new();
    let ceilings = Ceilings::of(&caps);
    let (mut rows, mut checked, mut failed) = (Vec::new(), Vec::<(Checked, OpReport)>::new(), false);
    let empty = pollster::block_on(empty(backend))?;
    let mut idle = Instant::now();
    if !args.json {
        out.line(&format!("{} ({}): an empty step takes {empty:.2} µs", caps.backend, caps.device))?;
        out.line(&Row::header())?;
    }
    for shape in &all {
        let key = Checked { op: shape.op, state: shape.state.unwrap_or(caps.state) };
        if !checked.iter().any(|(k, _)| *k == key) {
            let report = pollster::block_on(check(backend, &key))?;
            for (case, why) in &report.failures {
                terminal::note(format!("{case}: {why}"));
            }
            checked.push((key, report));
        }
        let wrong = checked.iter().find(|(k, _)| *k == key).map_or(0, |(_, r)| r.failures.len());
        let measured = match wrong {
            0 => pollster::block_on(measure(backend, shape, empty, ceilings.as_ref(), args.all, idle))?,
            n => {
                failed = true;
                Measured::Not(format!("failed its cases ({n} of them)"))
            }
        };
        idle = Instant::now();
        match measured {
            Measured::Row(row) => {
                if !args.json {
                    out.line(&row.text())?;
                }
                rows.push(row.json());
            }
            Measured::Not(why) => {
                if !args.json {
                    out.line(&format!("{}: {why}", shape.id()))?;
                }
                rows.push(json!({ "op": shape.op, "shape": shape.name, "not_measured": why }));
            }
        }
    }
    let cases: Vec<Value> = checked.iter().map(|(k, r)| k.json(r)).collect();
    let json = json!({
        "backend": caps.backend,
        "device": caps.device,
        "version": env!("CARGO_PKG_VERSION"),
        "empty_us": empty,
        "bytes_per_second_at_best": ceilings.as_ref().map(|c| c.read),
        "flops_per_second_at_best": ceilings.as_ref().map(|c| c.matmul),
        "cases": cases,
        "shapes": rows,
    });
    Ok(Report { json, failed })
}

/// The op and state dtype that a run of cases covers.
#[derive(Clone, Copy, PartialEq)]
struct Checked {
    op: &'static str,
    state: DType,
}

impl Checked {
    fn json(&self, report: &OpReport) -> Value {
        let failed: Vec<&str> = report.failures.iter().map(|(case, _)| case.as_str()).collect();
        json!({ "op": self.op, "state": format!("{:?}", self.state), "run": report.cases, "failed": failed })
    }
}

/// Runs the cases of an op first: the time of a wrong op means nothing.
async fn check<B: Backend>(backend: &B, of: &Checked) -> Result<OpReport> {
    // The shapes of published models take long on a CPU and have the same kernels there.
    let largest = if backend.caps().backend == "cpu" { Size::Large } else { Size::Bench };
    let takes = |c: &Case| c.op == of.op && c.size <= largest;
    let cases: Vec<Case> = cases::all().into_iter().filter(takes).collect();
    let dtypes = Dtypes { state: of.state, ..backend.caps().into() };
    cases::run_all(backend, &cases, dtypes).await
}

/// Keeps the device busy with light work. Heavy work would heat it until it slows down.
async fn wake<B: Timer>(backend: &B, tape: &B::Tape, microseconds: f64) -> Result<()> {
    let start = Instant::now();
    while start.elapsed().as_secs_f64() * 1e6 < microseconds {
        // Several per submission: the clocks also fall while a device waits for the host.
        for _ in 0..8 {
            backend.flush()?;
        }
        backend.time(tape).await?;
    }
    Ok(())
}

async fn empty<B: Timer>(backend: &B) -> Result<f64> {
    let tape = backend.empty()?;
    wake(backend, &tape, *WAKE.end()).await?;
    median(backend, &tape, COLD, true).await
}

async fn median<B: Timer>(backend: &B, tape: &B::Tape, count: usize, cold: bool) -> Result<f64> {
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.len() < count && (times.is_empty() || start.elapsed().as_secs_f64() * 1e6 < ENOUGH) {
        if cold {
            backend.flush()?;
        }
        times.push(backend.time(tape).await?);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

enum Measured {
    Row(Box<Row>),
    Not(String),
}

async fn measure<B: Timer>(
    backend: &B,
    shape: &Shape,
    empty: f64,
    ceilings: Option<&Ceilings>,
    all: bool,
    idle: Instant,
) -> Result<Measured> {
    let timed = match shape.load(backend) {
        Ok(timed) => timed,
        Err(e @ (Error::Unsupported { .. } | Error::OutOfMemory { .. })) => return Ok(Measured::Not(e.to_string())),
        Err(e) => return Err(e),
    };
    let (bytes, flops) = (timed.bytes as f64, timed.flops as f64);
    if backend.caps().backend == "cpu" && !all && bytes.max(flops / 8.0) > HEAVY {
        return Ok(Measured::Not("skipped on a CPU; --all includes it".into()));
    }
    // A warm-up call, for lazy compilation and choice of algorithms.
    backend.run(|ops| ops.op(timed.op.clone()))?;
    let one = backend.record(|ops| ops.op(timed.op.clone()))?;
    backend.time(&one).await?;
    let rough = backend.time(&one).await?;
    let calls = ((ENOUGH / 4.0 / rough) as usize).clamp(1, MANY);
    let many = backend.record(|ops| (0..calls).try_for_each(|_| ops.op(timed.op.clone())))?;
    backend.time(&many).await?;
    wake(backend, &one, (idle.elapsed().as_secs_f64() * 1e6).clamp(*WAKE.start(), *WAKE.end())).await?;
    let cold = median(backend, &one, COLD, true).await?;
    let warm = median(backend, &many, WARM, false).await? / calls as f64;
    let floor = ceilings.map(|c| (bytes / c.read).max(flops / c.matmul) * 1e6);
    let net = cold - empty;
    let (bytes, flops) = (timed.bytes, timed.flops);
    Ok(Measured::Row(Box::new(Row { shape: shape.clone(), cold, net, warm, bytes, flops, floor })))
}

impl Row {
    fn header() -> String {
        format!(
            "{:<44} {:>9} {:>9} {:>9} {:>8} {:>6} {:>6} {:>8}",
            "op/shape, times in µs", "cold", "net", "warm", "floor", "share", "TB/s", "TFLOP/s"
        )
    }

    fn text(&self) -> String {
        let of = |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
        format!(
            "{:<44} {:>9.2} {:>9.2} {:>9.2} {:>8} {:>6} {:>6.2} {:>8.2}",
            self.shape.id(),
            self.cold,
            self.net,
            self.warm,
            of(self.floor, 1),
            of(self.share(), 2),
            self.bytes as f64 / self.warm / 1e6,
            self.flops as f64 / self.warm / 1e6,
        )
    }

    /// The lower bound divided by the net time.
    fn share(&self) -> Option<f64> {
        self.floor.map(|f| f / self.net)
    }

    fn json(&self) -> Value {
        json!({
            "op": self.shape.op,
            "shape": self.shape.name,
            "cold_us": self.cold,
            "net_us": self.net,
            "warm_us": self.warm,
            "bytes": self.bytes,
            "flops": self.flops,
            "floor_us": self.floor,
            "share_of_floor": self.share(),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use selkie_core::cpu::CpuBackend;

    use super::*;

    /// Arguments as they follow `selkie bench ops`.
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchOpsArgs,
    }

    #[test]
    fn shapes_are_timed_whose_op_passes_its_cases() {
        let line = Line::parse_from(["ops", "conv1d/decode of 1", "--json"]);
        let report = measure_all(&CpuBackend::new(), &line.args).unwrap_or_else(|e| panic!("{e:?}"));
        let (cases, shape) = (&report.json["cases"][0], &report.json["shapes"][0]);
        assert!(!report.failed && cases["op"] == "conv1d" && cases["run"].as_u64() > Some(20), "{}", report.json);
        assert_eq!(cases["failed"], json!([]));
        for key in ["cold_us", "warm_us", "bytes", "flops", "floor_us"] {
            assert!(shape[key].as_f64() > Some(0.0), "{key} of {shape}");
        }
    }
}
