//! `selkie generate`: one prompt, one answer.

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use selkie_core::{
    backend::Backend,
    chat::Message,
    engine::{FinishReason, SeqId},
    model_dir::ModelFiles,
    session::{Ask, Completion, Prompt, Session, Update},
    tokenizer::MAX_TEXT_BYTES,
};
use serde_json::{Value, json};

use crate::{
    args::{GenerateArgs, SamplingArgs},
    backend::{self, Job},
    failure::{Failure, Outcome},
    input_file, model,
    terminal::{self, Output},
};

/// Answers the prompt.
pub fn run(args: &GenerateArgs) -> Outcome {
    let text = if args.prompt == "-" { stdin()? } else { args.prompt.clone() };
    if text.is_empty() {
        return Err(Failure::Other("the prompt is empty".into()));
    }
    let files = model::open(&args.model)?;
    let ask = Ask { prompt: prompt(args, &files, text)?, ..ask(&args.sampling, &files)? };
    backend::run(&args.model.backend, Generate { args, files: &files, ask })
}

fn stdin() -> Outcome<String> {
    let read = input_file::read(std::io::stdin().lock(), MAX_TEXT_BYTES as u64);
    let bytes = read.map_err(|e| Failure::Other(format!("standard input: {e}")))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        Failure::Other(format!("standard input: not UTF-8 from byte {} on", e.utf8_error().valid_up_to()))
    })?;
    // The line feed that `echo` adds is not part of the prompt.
    Ok(text.strip_suffix('\n').map(|t| t.strip_suffix('\r').unwrap_or(t)).unwrap_or(&text).to_owned())
}

fn prompt(args: &GenerateArgs, files: &ModelFiles, text: String) -> Outcome<Prompt> {
    if args.raw {
        return Ok(Prompt::Text(text));
    }
    if files.chat.is_none() && args.system.is_none() {
        tracing::info!("the model has no chat template: it continues the prompt as it is");
        return Ok(Prompt::Text(text));
    }
    let system = args.system.iter().map(|s| Message::new("system", s.as_str()));
    Ok(Prompt::Messages(system.chain([Message::new("user", text)]).collect()))
}

/// A request without a prompt, with the command line's sampling values over the model's defaults.
pub fn ask(args: &SamplingArgs, files: &ModelFiles) -> Outcome<Ask> {
    let overrides = args.overrides();
    let sampling = overrides.over(files.generation.sampling(random_seed()));
    sampling.check().map_err(|e| Failure::Usage(e.to_string()))?;
    if sampling.is_greedy() && (args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some()) {
        terminal::note("note: at temperature 0 the likeliest token is always taken; --temperature 1 samples");
    }
    let stop = args.stop.clone();
    Ok(Ask { sampling, max_tokens: args.max_tokens, stop, ..Ask::default() })
}

/// A random seed, used if the user gave none.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}

struct Generate<'a> {
    args: &'a GenerateArgs,
    files: &'a Rc<ModelFiles>,
    ask: Ask,
}

impl Job for Generate<'_> {
    type Out = ();

    fn run<B: Backend>(self, backend: B) -> Outcome {
        let options = model::engine_options(&self.args.pool, 1);
        let mut session = model::load(backend, self.files, &options)?;
        let mut out = Output::new();
        let id = session.submit(self.ask)?;
        let never = AtomicBool::new(false);
        let done = if self.args.json {
            let done = answer(&mut session, id, &never, |_| Ok(()))?;
            out.json(&completion_json(&done, &session))?;
            done
        } else {
            let mut last = '\n';
            let done = answer(&mut session, id, &never, |text| {
                last = text.chars().last().unwrap_or(last);
                out.text(text)
            })?;
            if last != '\n' {
                out.text("\n")?;
            }
            done
        };
        terminal::dim_note(closing_line(&done, &session));
        Ok(())
    }
}

/// Runs the session until request `id` has ended. `show` receives its text as it is generated. If `stop` is set, the request
/// is cancelled.
pub fn answer<B: Backend>(
    session: &mut Session<B>,
    id: SeqId,
    stop: &AtomicBool,
    mut show: impl FnMut(&str) -> Outcome,
) -> Outcome<Completion> {
    loop {
        if stop.load(Ordering::Relaxed) {
            session.cancel(id);
        }
        for update in pollster::block_on(session.step())? {
            match update {
                Update::Text { id: of, text } if of == id => show(&text)?,
                Update::Done { id: of, completion } if of == id => return ended(completion),
                _ => {}
            }
        }
    }
}

/// The completion, or why it is none.
fn ended(mut completion: Completion) -> Outcome<Completion> {
    match completion.end.error.take().map(Arc::try_unwrap) {
        None => Ok(completion),
        Some(Ok(error)) => Err(error.into()),
        Some(Err(error)) => Err(Failure::Other(error.to_string())),
    }
}

/// The finished request as JSON; `batch` writes the same fields.
pub fn completion_json<B: Backend>(done: &Completion, session: &Session<B>) -> Value {
    let caps = session.engine().caps();
    let mut value = completion_fields(done);
    value["backend"] = caps.backend.into();
    value["device"] = caps.device.clone().into();
    value
}

/// Text, ids, reason, usage, cache and timing of a finished request.
pub fn completion_fields(done: &Completion) -> Value {
    let (end, t) = (&done.end, &done.end.timing);
    json!({
        "text": done.text,
        "ids": done.ids,
        "finish_reason": finish_name(done.finish),
        "error": done.error().map(|e| e.to_string()),
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": done.ids.len(),
            "cached_tokens": done.reused(),
        },
        "cache": {
            "matched_tokens": end.cache.map_or(0, |c| c.matched),
            "reused_tokens": done.reused(),
            "reason": end.cache.map(|c| c.reason.name()),
        },
        "timing": { "queue_ms": micro(t.queue_ms), "prefill_ms": micro(t.prefill_ms), "decode_ms": micro(t.decode_ms) },
    })
}

/// Milliseconds down to whole microseconds.
fn micro(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Failed => "error",
    }
}

/// What an answer cost, in one line.
pub fn closing_line<B: Backend>(done: &Completion, session: &Session<B>) -> String {
    let (t, caps) = (&done.end.timing, session.engine().caps());
    let tokens = done.ids.len();
    let mut parts = vec![format!("{tokens} token{}", if tokens == 1 { "" } else { "s" })];
    parts.push(format!("first token after {:.3} s", (t.queue_ms + t.prefill_ms) / 1e3));
    if tokens > 1 && t.decode_ms > 0.0 {
        let rate = (tokens - 1) as f64 / t.decode_ms * 1e3;
        parts.push(format!("{} tokens/s", terminal::thousands(rate)));
    }
    if done.reused() > 0 {
        parts.push(format!("reused {} of {} tokens", done.reused(), done.end.prompt_tokens));
    }
    match done.finish {
        FinishReason::Stop => {}
        FinishReason::Length => parts.push("cut at the token limit".into()),
        FinishReason::Cancelled => parts.push("stopped".into()),
        FinishReason::Failed => parts.push("failed".into()),
    }
    parts.push(format!("{} ({})", caps.backend, caps.device));
    parts.join(" · ")
}
