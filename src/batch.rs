//! `selkie batch`: a file of requests in, a file of answers out.

use std::{collections::HashMap, io::Write, path::Path, rc::Rc, time::Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use selkie_core::{
    backend::Backend,
    engine::SeqId,
    model_dir::ModelFiles,
    session::{Session, Update},
    state::Reason,
};
use serde_json::{Value, json, value::RawValue};

use crate::{
    args::BatchArgs,
    backend::{self, Job},
    failure::{Failure, Outcome},
    generate, input_file,
    interrupt::Interrupt,
    model,
    output_file::{self, OutputFile},
    terminal,
};
use answers::Answers;
use request::Line;

mod answers;
mod journal;
mod request;

/// Requests that are encoded and queued in advance, as a multiple of those that run.
const QUEUED_BATCHES: usize = 4;

/// Maximum size of the input, in bytes.
const MAX_INPUT_BYTES: u64 = 1 << 32;

/// Maximum number of failed lines that are reported one by one.
const SHOWN_FAILURES: usize = 3;

/// Answers all requests of the input.
pub fn run(args: &BatchArgs) -> Outcome {
    check_places(args)?;
    let input = input_file::load(&args.input, MAX_INPUT_BYTES)?;
    let lines = Line::all(&input);
    let files = model::open(&args.model)?;
    let interrupt = Interrupt::listen()?;
    let answers = Answers::open(args, &lines)?;
    let answered = answers.answered();
    if args.resume && answered.iter().all(|done| *done) {
        answers.finish()?;
        terminal::dim_note(format_args!("all {} requests are answered in {}", lines.len(), args.output.display()));
        return Ok(());
    }
    let stats = args.stats.as_deref().map(OutputFile::create).transpose()?;
    backend::run(&args.model.backend, Batch { args, files: &files, lines, interrupt, answers, answered, stats })
}

/// Refuses outputs that would overwrite the input or each other.
fn check_places(args: &BatchArgs) -> Outcome {
    let partial = output_file::resolve(&args.output).ok().map(|target| journal::partial(&target));
    let output = Some(args.output.as_path()).filter(|path| *path != Path::new("-"));
    let places = [
        ("the input", Some(args.input.as_path())),
        ("--output", output),
        ("kept for --resume", output.and(partial.as_deref())),
        ("--stats", args.stats.as_deref()),
    ];
    for (i, (a, first)) in places.iter().enumerate() {
        for (b, second) in &places[i + 1..] {
            if let (Some(first), Some(second)) = (first, second)
                && output_file::collide(first, second)
            {
                let why = format!("{}: this is both {a} and {b}; give each a file of its own", second.display());
                return Err(Failure::Usage(why));
            }
        }
    }
    Ok(())
}

struct Batch<'a> {
    args: &'a BatchArgs,
    files: &'a Rc<ModelFiles>,
    lines: Vec<Line<'a>>,
    interrupt: Interrupt,
    answers: Answers,
    /// For each line, whether an earlier run has answered it.
    answered: Vec<bool>,
    stats: Option<OutputFile>,
}

impl Job for Batch<'_> {
    type Out = ();

    fn run<B: Backend>(self, backend: B) -> Outcome {
        let options = model::engine_options(&self.args.pool, model::DEFAULT_MAX_BATCH);
        let window = if self.args.sequential { 1 } else { QUEUED_BATCHES * options.max_batch };
        let resumed = self.answered.iter().filter(|done| **done).count();
        let mut run = Run {
            session: model::load(backend, self.files, &options)?,
            args: self.args,
            answers: self.answers,
            running: HashMap::new(),
            totals: Totals { resumed, ..Totals::default() },
            started: Instant::now(),
            bar: progress_bar(self.lines.len(), resumed),
        };
        let todo: Vec<(usize, Line)> =
            self.lines.iter().copied().enumerate().filter(|(place, _)| !self.answered[*place]).collect();
        match run.all(&todo, window, &self.interrupt) {
            Ok(()) => run.end(self.lines.len(), self.stats),
            Err(why) => Err(run.stop(why)),
        }
    }
}

#[derive(Default)]
struct Totals {
    resumed: usize,
    failed: usize,
    prompt_tokens: usize,
    reused_tokens: usize,
    completion_tokens: usize,
}

struct Run<'a, B: Backend> {
    session: Session<B>,
    args: &'a BatchArgs,
    answers: Answers,
    /// For each queued or running request: its index, line and id.
    running: HashMap<SeqId, (usize, Line<'a>, Option<Box<RawValue>>)>,
    totals: Totals,
    started: Instant,
    bar: ProgressBar,
}

impl<'a, B: Backend> Run<'a, B> {
    fn all(&mut self, todo: &[(usize, Line<'a>)], window: usize, interrupt: &Interrupt) -> Outcome {
        let mut todo = todo.iter();
        loop {
            while self.running.len() < window
                && let Some((place, line)) = todo.next()
            {
                interrupt.check()?;
                self.start(*place, *line)?;
            }
            if self.running.is_empty() {
                return Ok(());
            }
            interrupt.check()?;
            for update in pollster::block_on(self.session.step())? {
                let Update::Done { id, completion } = update else { continue };
                let Some((place, line, id)) = self.running.remove(&id) else { continue };
                if let Some(e) = completion.error() {
                    let why = e.to_string();
                    self.fail(place, &line, id.as_deref(), &why)?;
                    continue;
                }
                self.totals.prompt_tokens += completion.end.prompt_tokens;
                self.totals.reused_tokens += completion.reused();
                self.totals.completion_tokens += completion.ids.len();
                self.answer(place, &line, id.as_deref(), generate::completion_fields(&completion))?;
            }
        }
    }

    /// Submits a line, or answers it with an error at once if it is not a valid request.
    fn start(&mut self, place: usize, line: Line<'a>) -> Outcome {
        let (id, ask) = line.ask(place, self.session.files());
        match ask.and_then(|ask| self.session.submit(ask).map_err(|e| e.to_string())) {
            Ok(request) => {
                self.running.insert(request, (place, line, id));
                Ok(())
            }
            Err(why) => self.fail(place, &line, id.as_deref(), &why),
        }
    }

    fn fail(&mut self, place: usize, line: &Line, id: Option<&RawValue>, why: &str) -> Outcome {
        let why = format!("line {}: {why}", line.number);
        self.totals.failed += 1;
        if self.totals.failed <= SHOWN_FAILURES {
            self.bar.suspend(|| terminal::note(&why));
        }
        self.answer(place, line, id, request::error_fields(&why))
    }

    fn answer(&mut self, place: usize, line: &Line, id: Option<&RawValue>, rest: Value) -> Outcome {
        self.answers.add(place, request::answer(id, rest, line))?;
        self.bar.inc(1);
        let seconds = self.started.elapsed().as_secs_f64();
        let t = &self.totals;
        let rate = terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9));
        self.bar.set_message(format!("{rate} tokens/s, {} of {} tokens reused", t.reused_tokens, t.prompt_tokens));
        Ok(())
    }

    /// Reports how many more lines failed than were reported one by one.
    fn tell_failures(&self) {
        let more = self.totals.failed.saturating_sub(SHOWN_FAILURES);
        if more > 0 {
            let place = match self.args.output.to_str() {
                Some("-") => "their answers".into(),
                _ => self.args.output.display().to_string(),
            };
            terminal::note(format_args!("and {more} more, see {place}"));
        }
    }

    /// Ends a run that failed or was stopped: returns the reason and the state of the output.
    fn stop(self, why: Failure) -> Failure {
        self.bar.finish_and_clear();
        self.tell_failures();
        let kept = self.answers.stop();
        match why {
            Failure::OutputClosed => Failure::OutputClosed,
            Failure::Stopped { code, why } => Failure::Stopped { code, why: format!("{why}; {kept}") },
            other => Failure::Other(format!("{}; {kept}", other.message().unwrap_or_default())),
        }
    }

    fn end(self, requests: usize, stats: Option<OutputFile>) -> Outcome {
        self.bar.finish_and_clear();
        self.tell_failures();
        let seconds = self.started.elapsed().as_secs_f64();
        let counters = self.stats(requests, seconds);
        let caps = self.session.engine().caps();
        let t = self.totals;
        let before = if t.resumed > 0 { format!("{} answered before · ", t.resumed) } else { String::new() };
        terminal::dim_note(format_args!(
            "{requests} requests · {before}{} failed · {} tokens · {} tokens/s · reused {} of {} tokens · {} ({})",
            t.failed,
            t.completion_tokens,
            terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9)),
            t.reused_tokens,
            t.prompt_tokens,
            caps.backend,
            caps.device,
        ));
        self.answers.finish()?;
        // After the answers, which do not depend on it.
        if let Some(mut file) = stats {
            file.write_all(format!("{counters:#}\n").as_bytes()).map_err(|e| file.error(e))?;
            file.commit()?;
        }
        if t.failed > 0 { Err(Failure::Reported) } else { Ok(()) }
    }

    fn stats(&self, requests: usize, seconds: f64) -> Value {
        let engine = self.session.engine();
        let (caps, s, scheduler, sizes) = (engine.caps(), engine.stats(), engine.scheduler(), engine.sizes());
        let reasons: serde_json::Map<String, Value> =
            Reason::ALL.iter().map(|r| (r.name().to_owned(), s.reason(*r).into())).collect();
        json!({
            "backend": caps.backend,
            "device": caps.device,
            "version": env!("CARGO_PKG_VERSION"),
            "requests": requests,
            "answered_before": self.totals.resumed,
            "failed": self.totals.failed,
            "seconds": seconds,
            "reasons": reasons,
            "steps": s.steps,
            "tokens_prefilled": s.tokens_prefilled,
            "tokens_reused": s.tokens_reused,
            "tokens_recomputed": s.tokens_recomputed,
            "tokens_generated": s.tokens_generated,
            "captures": s.captures,
            "captures_skipped": s.captures_skipped,
            "evictions": { "slots": s.evictions.slots, "nodes": s.evictions.nodes },
            "preemptions": s.preemptions,
            "states_held": scheduler.cached_states(),
            "pages_held": scheduler.cached_pages(),
            "slots": sizes.split.slots,
            "kv_pages": sizes.split.pages,
            "peak_slots": s.peak_slots,
            "peak_pages": s.peak_pages,
        })
    }
}

fn progress_bar(requests: usize, answered: usize) -> ProgressBar {
    let style = "{bar:30} {pos} of {len} requests, {msg}";
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
    bar.with_position(answered as u64).with_style(ProgressStyle::with_template(style).expect("the template is valid"))
}
