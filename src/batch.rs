//! `selkie batch`: a file of requests in, a file of answers out, in the same order.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::Write,
    path::Path,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use selkie_core::{
    Error,
    backend::Backend,
    chat::Message,
    engine::SeqId,
    model_dir::ModelFiles,
    session::{Ask, Overrides, Prompt, Session, Update},
    state::Reason,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

use crate::{
    args::BatchArgs,
    backend::{self, Job},
    failure::{self, Failure, Outcome},
    generate, input_file, model,
    output_file::{self, OutputFile},
    terminal::{self, Output},
};

/// Requests that are encoded and queued beyond those that run, as a multiple of them.
const QUEUED_BATCHES: usize = 4;

/// Longest input that is read, in bytes.
const MAX_INPUT_BYTES: u64 = 1 << 32;

/// Set by Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Answers all requests of the input.
pub fn run(args: &BatchArgs) -> Outcome {
    if let Some(stats) = args.stats.as_deref().filter(|stats| output_file::collide(&args.output, stats)) {
        let why = "both --output and --stats; give each a file of its own";
        return Err(Failure::Usage(format!("{}: this is {why}", stats.display())));
    }
    let input = read_input(&args.input)?;
    let files = model::open(&args.model)?;
    // Nothing is left behind when the run is stopped, so it must end by itself.
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed)).map_err(|e| Failure::Other(e.to_string()))?;
    let answers = match args.output.to_str() {
        Some("-") => Answers::Stdout(Output::new()),
        _ => Answers::File(OutputFile::create(&args.output)?),
    };
    let stats = args.stats.as_deref().map(OutputFile::create).transpose()?;
    backend::run(&args.model.backend, Batch { args, files: &files, input: &input, answers, stats })
}

fn read_input(path: &Path) -> Outcome<Vec<u8>> {
    if path == "-" {
        let read = input_file::read(std::io::stdin().lock(), MAX_INPUT_BYTES);
        return read.map_err(|e| Failure::Other(format!("standard input: {e}")));
    }
    let read = File::open(path).and_then(|file| input_file::read(file, MAX_INPUT_BYTES));
    Ok(read.map_err(|e| Error::io(path, e))?)
}

/// A line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the fields of a request")]
struct Line {
    /// Kept as text: a number must not come back in another spelling.
    id: Option<Box<RawValue>>,
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    messages: Option<Vec<Turn>>,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    namespace: Option<String>,
}

/// A message of a chat.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `role` and `content`")]
struct Turn {
    role: String,
    content: String,
}

/// One stop string or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "`stop` must be a string or a list of strings")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// What can be told of a line that is no request.
#[derive(Default, Deserialize)]
struct OnlyId {
    id: Option<Box<RawValue>>,
}

/// A line of the output.
#[derive(Serialize)]
struct Answer<'a> {
    id: Option<&'a RawValue>,
    #[serde(flatten)]
    rest: Value,
}

impl Line {
    /// The request; `seed` is for those that name none.
    fn ask(self, files: &ModelFiles, seed: u64) -> Result<Ask, String> {
        let given = [self.prompt.is_some(), self.prompt_ids.is_some(), self.messages.is_some()];
        let prompt = match (self.prompt, self.prompt_ids, self.messages) {
            (Some(text), None, None) => Prompt::Text(text),
            (None, Some(ids), None) => Prompt::Ids(ids),
            (None, None, Some(turns)) => {
                Prompt::Messages(turns.into_iter().map(|t| Message::new(&t.role, t.content)).collect())
            }
            _ => {
                let n = given.iter().filter(|g| **g).count();
                return Err(format!("a request has one of `prompt`, `prompt_ids` and `messages`; this one has {n}"));
            }
        };
        let overrides = Overrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        Ok(Ask {
            prompt,
            sampling: overrides.over(files.generation.sampling(seed)),
            max_tokens: self.max_tokens,
            stop: match self.stop {
                None => Vec::new(),
                Some(Stop::One(text)) => vec![text],
                Some(Stop::Several(texts)) => texts,
            },
            namespace: self.namespace.unwrap_or_default(),
        })
    }
}

struct Batch<'a> {
    args: &'a BatchArgs,
    files: &'a Rc<ModelFiles>,
    input: &'a [u8],
    answers: Answers,
    stats: Option<OutputFile>,
}

impl Job for Batch<'_> {
    type Out = ();

    fn run<B: Backend>(self, backend: B) -> Outcome {
        let options = model::engine_options(&self.args.pool, model::DEFAULT_MAX_BATCH);
        let window = if self.args.sequential { 1 } else { QUEUED_BATCHES * options.max_batch };
        let lines: Vec<(usize, &[u8])> = self
            .input
            .split(|b| *b == b'\n')
            .enumerate()
            .map(|(i, line)| (i + 1, line.trim_ascii()))
            .filter(|(_, line)| !line.is_empty())
            .collect();
        let mut run = Run {
            session: model::load(backend, self.files, &options)?,
            answers: self.answers,
            running: HashMap::new(),
            ready: BTreeMap::new(),
            written: 0,
            totals: Totals::default(),
            started: Instant::now(),
            bar: progress_bar(lines.len()),
        };
        run.all(&lines, window)?;
        run.end(lines.len(), self.stats)
    }
}

#[derive(Default)]
struct Totals {
    failed: usize,
    prompt_tokens: usize,
    reused_tokens: usize,
    completion_tokens: usize,
}

struct Run<B: Backend> {
    session: Session<B>,
    answers: Answers,
    /// Place in the output and id of what is queued or running.
    running: HashMap<SeqId, (usize, Option<Box<RawValue>>)>,
    /// Answers that wait for earlier ones.
    ready: BTreeMap<usize, String>,
    written: usize,
    totals: Totals,
    started: Instant,
    bar: ProgressBar,
}

impl<B: Backend> Run<B> {
    fn all(&mut self, lines: &[(usize, &[u8])], window: usize) -> Outcome {
        let mut next = 0;
        loop {
            while next < lines.len() && self.running.len() < window {
                let (number, line) = lines[next];
                self.start(next, number, line);
                next += 1;
            }
            self.write_ready()?;
            if self.running.is_empty() && next == lines.len() {
                return Ok(());
            }
            if INTERRUPTED.load(Ordering::Relaxed) {
                return Err(Failure::Other("interrupted; the output was not written".into()));
            }
            for update in pollster::block_on(self.session.step())? {
                let Update::Done { id, completion } = update else { continue };
                let Some((place, id)) = self.running.remove(&id) else { continue };
                self.totals.prompt_tokens += completion.end.prompt_tokens;
                self.totals.reused_tokens += completion.reused();
                self.totals.completion_tokens += completion.ids.len();
                self.answer(place, id.as_deref(), generate::completion_fields(&completion));
            }
        }
    }

    /// Submits a line, or answers it at once if it is no possible request.
    fn start(&mut self, place: usize, number: usize, line: &[u8]) {
        let parsed: Result<Line, _> = serde_json::from_slice(line);
        let (id, outcome) = match parsed {
            Ok(mut line) => {
                let id = line.id.take();
                let ask = line.ask(self.session.files(), place as u64);
                (id, ask.and_then(|ask| self.session.submit(ask).map_err(|e| e.to_string())))
            }
            Err(e) => {
                let id = serde_json::from_slice::<OnlyId>(line).unwrap_or_default().id;
                // The parser counts lines within the one it was given.
                let why = failure::json_error(&e).replace(" at line 1 column ", " at column ");
                (id, Err(why))
            }
        };
        match outcome {
            Ok(request) => {
                self.running.insert(request, (place, id));
            }
            Err(why) => {
                self.totals.failed += 1;
                self.answer(place, id.as_deref(), error_fields(&format!("line {number}: {why}")));
            }
        }
    }

    fn answer(&mut self, place: usize, id: Option<&RawValue>, rest: Value) {
        let line = serde_json::to_string(&Answer { id, rest }).expect("an answer has string keys only");
        self.ready.insert(place, line);
        self.bar.inc(1);
        let seconds = self.started.elapsed().as_secs_f64();
        let t = &self.totals;
        let rate = terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9));
        self.bar.set_message(format!("{rate} tokens/s, {} of {} tokens reused", t.reused_tokens, t.prompt_tokens));
    }

    fn write_ready(&mut self) -> Outcome {
        while let Some(line) = self.ready.remove(&self.written) {
            self.answers.line(&line)?;
            self.written += 1;
        }
        Ok(())
    }

    fn end(self, requests: usize, stats: Option<OutputFile>) -> Outcome {
        self.bar.finish_and_clear();
        let seconds = self.started.elapsed().as_secs_f64();
        if let Some(mut file) = stats {
            let text = format!("{:#}\n", self.stats(requests, seconds));
            file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
            file.commit()?;
        }
        let caps = self.session.engine().caps();
        let t = self.totals;
        terminal::dim_note(format_args!(
            "{requests} requests · {} failed · {} tokens · {} tokens/s · reused {} of {} tokens · {} ({})",
            t.failed,
            t.completion_tokens,
            terminal::thousands(t.completion_tokens as f64 / seconds.max(1e-9)),
            t.reused_tokens,
            t.prompt_tokens,
            caps.backend,
            caps.device,
        ));
        self.answers.commit()?;
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

/// The fields of an answer that is none.
fn error_fields(why: &str) -> Value {
    json!({
        "text": null,
        "ids": [],
        "finish_reason": "error",
        "error": why,
        "usage": { "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0 },
        "cache": { "matched_tokens": 0, "reused_tokens": 0, "reason": null },
        "timing": { "queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0 },
    })
}

fn progress_bar(requests: usize) -> ProgressBar {
    let style = "{bar:30} {pos} of {len} requests, {msg}";
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
    bar.with_style(ProgressStyle::with_template(style).expect("the template is valid"))
}

/// Where answers go.
enum Answers {
    File(OutputFile),
    Stdout(Output),
}

impl Answers {
    fn line(&mut self, line: &str) -> Outcome {
        match self {
            Self::File(file) => writeln!(file, "{line}").map_err(|e| file.error(e).into()),
            Self::Stdout(out) => out.line(line),
        }
    }

    fn commit(self) -> Outcome {
        match self {
            Self::File(file) => Ok(file.commit()?),
            Self::Stdout(_) => Ok(()),
        }
    }
}
