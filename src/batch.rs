//! `selkie batch`: a file of requests in, a file of answers out.

use std::{
    collections::HashMap,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use selkie_core::{
    engine::DraftStats,
    session::{Answers as Readers, Completion, Model, Token, Update, WhenFull},
    state::Reason,
    tier::TierStats,
    units,
};
use serde_json::{Value, json};

use crate::{
    args::BatchArgs,
    bundle,
    failure::{Failure, Outcome},
    input_file,
    interrupt::{ATTENTION, Interrupt},
    model,
    output_file::{self, OutputFile},
    terminal,
};
use answers::Answers;
use request::{Line, Reply};

mod answers;
mod journal;
mod openai;
mod request;

/// Requests that are encoded and queued in advance, as a multiple of those that run.
const QUEUED_BATCHES: usize = 4;

/// Maximum size of the input, in bytes.
const MAX_INPUT_BYTES: u64 = 1 << 32;

/// Maximum number of failed lines that are reported one by one.
const SHOWN_FAILURES: usize = 3;

/// Answers all requests of the input.
pub fn run(args: &BatchArgs) -> Outcome {
    let output = match &args.output {
        Some(path) => path.clone(),
        None if !io::stdout().is_terminal() => "-".into(),
        None => {
            return Err(Failure::Usage("name a file for the answers: -o OUT.jsonl, or -o - for the terminal".into()));
        }
    };
    check_places(args, &output)?;
    let input = input_file::load(&args.input, MAX_INPUT_BYTES)?;
    let lines = Line::all(&input);
    let files = model::open(&args.model)?;
    let interrupt = Interrupt::listen()?;
    let answers = Answers::open(args, &output, &lines)?;
    let answered = answers.answered();
    if args.resume && answered.iter().all(|done| *done) {
        answers.finish()?;
        let requests = units::thousands(lines.len());
        terminal::dim_note(format_args!("all {requests} requests are answered in {}", output.display()));
        return Ok(());
    }
    let stats = args.stats.as_deref().map(OutputFile::create).transpose()?;
    let options = model::engine_options_of_long_runs(&args.pool, model::DEFAULT_MAX_BATCH);
    let window = if args.sequential { 1 } else { QUEUED_BATCHES * options.max_batch };
    let resumed = answered.iter().filter(|done| **done).count();
    bundle::check_exact(args.exact_only, &options)?;
    let warm = args.warm.as_deref().map(bundle::open).transpose()?;
    let model = model::load(&args.model.backend, &files, &options)?;
    let origin = match warm {
        Some(bundle) => bundle::insert(&model, &files, bundle, args.exact_only)?.origin,
        None => String::new(),
    };
    let mut run = Run {
        running: Readers::new(&model),
        model,
        origin,
        when_full: args.when_full.into(),
        output,
        answers,
        replies: HashMap::new(),
        totals: Totals { resumed, ..Totals::default() },
        started: Instant::now(),
        bar: progress_bar(lines.len(), resumed),
    };
    let todo: Vec<(usize, Line)> = lines.iter().copied().enumerate().filter(|(place, _)| !answered[*place]).collect();
    match run.all(&todo, window, &interrupt) {
        Ok(()) => run.end(lines.len(), stats),
        Err(why) => Err(run.stop(why)),
    }
}

/// Refuses outputs that would overwrite the input or each other.
fn check_places(args: &BatchArgs, output: &Path) -> Outcome {
    let partial = output_file::resolve(output).ok().map(|target| journal::partial(&target));
    let output = Some(output).filter(|path| *path != Path::new("-"));
    let places = [
        ("the input", Some(args.input.as_path())),
        ("--output", output),
        ("kept for --resume", output.and(partial.as_deref())),
        ("--stats", args.stats.as_deref()),
        ("--warm", args.warm.as_deref()),
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

/// A finished request, and its tokens if they have log probabilities.
type Answered<'a> = (&'a Completion, &'a [Token]);

#[derive(Default)]
struct Totals {
    resumed: usize,
    failed: usize,
    prompt_tokens: usize,
    reused_tokens: usize,
    completion_tokens: usize,
}

struct Run<'a> {
    model: Model,
    /// Of the values that `--warm` has converted; empty without any.
    origin: String,
    when_full: WhenFull,
    output: PathBuf,
    answers: Answers,
    /// Queued and running requests, by the index of their lines.
    running: Readers<usize>,
    /// For each of them its line, how it is answered, and its tokens if it reports log probabilities.
    replies: HashMap<usize, (Line<'a>, Reply, Vec<Token>)>,
    totals: Totals,
    started: Instant,
    bar: ProgressBar,
}

impl<'a> Run<'a> {
    fn all(&mut self, todo: &[(usize, Line<'a>)], window: usize, interrupt: &Interrupt) -> Outcome {
        let mut todo = todo.iter();
        loop {
            interrupt.check()?;
            let room = window - self.running.len();
            let next: Vec<_> = todo.by_ref().take(room).copied().collect();
            self.start(&next, interrupt)?;
            if self.running.is_empty() && todo.len() == 0 {
                return Ok(());
            }
            let (place, completion) = match self.running.wait(ATTENTION) {
                Some((place, Update::Done(completion))) => (place, completion),
                Some((place, Update::Text { tokens, .. })) => {
                    if let Some((.., all)) = self.replies.get_mut(&place) {
                        all.extend(tokens.into_iter().filter(|token| token.logprob.is_some()));
                    }
                    continue;
                }
                None => continue,
            };
            let Some((line, reply, tokens)) = self.replies.remove(&place) else { continue };
            if let Some(e) = completion.error() {
                // Not the request's own fault.
                self.model.health()?;
                let why = e.to_string();
                self.fail(place, &line, &reply, &why)?;
                continue;
            }
            self.totals.prompt_tokens += completion.end.prompt_tokens;
            self.totals.reused_tokens += completion.reused();
            self.totals.completion_tokens += completion.ids.len();
            self.answer(place, &line, &reply, Ok((&completion, &tokens)))?;
        }
    }

    /// Submits lines together. Those that are no valid requests are answered immediately with an error.
    fn start(&mut self, lines: &[(usize, Line<'a>)], interrupt: &Interrupt) -> Outcome {
        let mut encoded = Vec::new();
        for (place, line) in lines {
            interrupt.check()?;
            let (reply, ask) = line.ask(*place, self.when_full);
            let ask = ask.and_then(|mut ask| {
                if ask.namespace.is_empty() {
                    ask.origin.clone_from(&self.origin);
                }
                self.model.prepare(ask).map_err(|e| e.to_string())
            });
            match ask {
                Ok(ask) => {
                    self.replies.insert(*place, (*line, reply, Vec::new()));
                    encoded.push((*place, ask));
                }
                Err(why) => {
                    self.model.health()?;
                    self.fail(*place, line, &reply, &why)?;
                }
            }
        }
        self.running.send(encoded);
        Ok(())
    }

    fn fail(&mut self, place: usize, line: &Line, reply: &Reply, why: &str) -> Outcome {
        let why = format!("line {}: {why}", line.number);
        self.totals.failed += 1;
        if self.totals.failed <= SHOWN_FAILURES {
            self.bar.suspend(|| terminal::note(&why));
        }
        self.answer(place, line, reply, Err(&why))
    }

    fn answer(&mut self, place: usize, line: &Line, reply: &Reply, result: Result<Answered, &str>) -> Outcome {
        let text = reply.line(result, line, &self.model);
        self.answers.add(place, text)?;
        self.bar.inc(1);
        let seconds = self.started.elapsed().as_secs_f64();
        let t = &self.totals;
        let rate = terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9));
        let [reused, of] = [t.reused_tokens, t.prompt_tokens].map(units::thousands);
        self.bar.set_message(format!("{rate} tokens/s, {reused} of {of} tokens reused"));
        Ok(())
    }

    /// Reports how many more lines failed than were reported one by one.
    fn tell_failures(&self) {
        let more = self.totals.failed.saturating_sub(SHOWN_FAILURES);
        if more > 0 {
            let place = match self.output.to_str() {
                Some("-") => "their answers".into(),
                _ => self.output.display().to_string(),
            };
            let more = units::thousands(more);
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
        let facts = self.model.facts();
        let t = self.totals;
        let n = units::thousands;
        let before = if t.resumed > 0 { format!("{} answered before · ", n(t.resumed)) } else { String::new() };
        terminal::dim_note(format_args!(
            "{} requests · {before}{} failed · {} tokens · {} tokens/s · reused {} of {} tokens · {} ({})",
            n(requests),
            n(t.failed),
            n(t.completion_tokens),
            terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9)),
            n(t.reused_tokens),
            n(t.prompt_tokens),
            facts.backend,
            facts.device,
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
        let (facts, now) = (self.model.facts(), self.model.stats());
        let s = &now.counters;
        let reasons: serde_json::Map<String, Value> =
            Reason::ALL.iter().map(|r| (r.name().to_owned(), s.reason(*r).into())).collect();
        json!({
            "backend": facts.backend,
            "device": facts.device,
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
            "drafts": drafts(&s.drafts),
            "captures": s.captures,
            "captures_skipped": s.captures_skipped,
            "evictions": { "slots": s.evictions.slots, "nodes": s.evictions.nodes },
            "tiers": tiers(&s.tiers),
            "preemptions": s.preemptions,
            "states_held": now.slots_cached,
            "pages_held": now.pages_cached,
            "slots": facts.slots,
            "kv_pages": facts.pages,
            "peak_slots": s.peak_slots,
            "peak_pages": s.peak_pages,
        })
    }
}

/// Counters of drafts.
pub fn drafts(d: &DraftStats) -> Value {
    json!({ "rows": d.rows, "tokens": d.tokens, "accepted": d.accepted(), "accepted_at": d.accepted_at })
}

/// Counters of the tiers below the device.
pub fn tiers(t: &TierStats) -> Value {
    json!({
        "host": {
            "tokens": t.host_tokens, "values": t.host_values, "bytes": t.host_bytes, "evicted": t.host_evicted,
        },
        "disk": { "tokens": t.disk_tokens, "values": t.disk_values, "bytes": t.disk_bytes },
        "loads": t.loads,
        "declined": t.declined,
        "demoted": t.demoted,
        "converted": t.converted,
    })
}

fn progress_bar(requests: usize, answered: usize) -> ProgressBar {
    let style = "{bar:30} {pos} of {len} requests, {msg}";
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
    bar.with_position(answered as u64).with_style(ProgressStyle::with_template(style).expect("the template is valid"))
}
