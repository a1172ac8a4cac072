//! `selkie generate`: one prompt, one answer.

use std::{
    io::{self, IsTerminal},
    sync::atomic::{AtomicBool, Ordering},
};

use selkie_core::{
    chat::Message,
    controls::Controls,
    engine::FinishReason,
    model_dir::ModelFiles,
    session::{Answer, Ask, Completion, Facts, Model, Overrides, Prompt, Text, Token, Update},
    tokenizer::MAX_TEXT_BYTES,
    units,
};
use serde_json::{Value, json};

use crate::{
    args::{GenerateArgs, SamplingArgs},
    failure::{Failure, Outcome},
    input_file,
    interrupt::ATTENTION,
    logprobs, model,
    terminal::{self, Output},
};

/// Answers the prompt.
pub fn run(args: &GenerateArgs) -> Outcome {
    let text = text(args.prompt.as_deref())?;
    let files = model::open(&args.model)?;
    let controls = Controls { logprobs: args.logprobs, ..Controls::default() };
    let ask = Ask { prompt: prompt(args, &files, text), controls, ..ask(&args.sampling, &*Text::new(&files)?)? };
    let model = model::load(&args.model.backend, &files, &model::engine_options(&args.pool, 1))?;
    let mut out = if args.json { Output::new() } else { Output::prose() };
    let running = model.submit(ask)?;
    let never = AtomicBool::new(false);
    let done = if args.json {
        let mut reported = Vec::new();
        let done = answer(&model, running, &never, |_, tokens| {
            reported.extend(tokens);
            Ok(())
        })?;
        out.json(&completion_json(&done, &reported, model.facts()))?;
        done
    } else {
        let mut last = '\n';
        let done = answer(&model, running, &never, |text, _| {
            last = text.chars().last().unwrap_or(last);
            out.text(text)
        })?;
        out.end()?;
        if last != '\n' {
            out.text("\n")?;
        }
        done
    };
    // A program that reads the JSON has all of it already.
    if !args.json || out.is_terminal() {
        terminal::dim_note(closing_line(&done, model.facts()));
    }
    Ok(())
}

/// The prompt as typed, followed by what is piped in.
fn text(typed: Option<&str>) -> Outcome<String> {
    let given = typed.filter(|text| *text != "-");
    let terminal = io::stdin().is_terminal();
    let piped = match (typed, terminal) {
        (Some(_), true) if given.is_some() => String::new(),
        (None, true) => {
            return Err(Failure::Usage("there is no prompt: give it in quotes, or pipe text in; see --help".into()));
        }
        _ => stdin()?,
    };
    match (given.unwrap_or_default(), piped) {
        (given, piped) if given.is_empty() && piped.is_empty() => match typed {
            Some(_) => Err(Failure::Other("the prompt is empty".into())),
            None => Err(Failure::Usage("there is no prompt, and standard input is empty; see --help".into())),
        },
        (given, piped) if piped.is_empty() => Ok(given.to_owned()),
        ("", piped) => Ok(piped),
        (given, piped) => Ok(format!("{given}\n\n{piped}")),
    }
}

fn stdin() -> Outcome<String> {
    let waiting = terminal::Stage::begin("waiting for standard input (`< /dev/null` leaves it out)".into());
    let read = input_file::read(io::stdin().lock(), MAX_TEXT_BYTES as u64);
    drop(waiting);
    let bytes = read.map_err(|e| Failure::Other(format!("standard input: {e}")))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        Failure::Other(format!("standard input: not UTF-8 from byte {} on", e.utf8_error().valid_up_to()))
    })?;
    // The line feed that `echo` adds is not part of the prompt.
    Ok(text.strip_suffix('\n').map(|t| t.strip_suffix('\r').unwrap_or(t)).unwrap_or(&text).to_owned())
}

fn prompt(args: &GenerateArgs, files: &ModelFiles, text: String) -> Prompt {
    if args.raw {
        return Prompt::Text(text);
    }
    if files.chat.is_none() && args.system.is_none() {
        tracing::info!("the model has no chat template: it continues the prompt as it is");
        return Prompt::Text(text);
    }
    let system = args.system.iter().map(|s| Message::new("system", s.as_str()));
    Prompt::Messages(system.chain([Message::new("user", text)]).collect())
}

/// A request without a prompt, with the command line's sampling values over the model's defaults.
pub fn ask(args: &SamplingArgs, text: &Text) -> Outcome<Ask> {
    let sampling = text.sampling(&args.overrides()).map_err(|e| Failure::Usage(e.to_string()))?;
    if sampling.is_greedy() && (args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some()) {
        terminal::hint("note: at temperature 0 the likeliest token is always taken; --temperature 1 samples");
    }
    let stop = args.stop.clone();
    Ok(Ask { sampling: Overrides::from(sampling), max_tokens: args.max_tokens, stop, ..Ask::default() })
}

/// Reads an answer to its end. `show` receives its text and its tokens as they come; a text may be empty. If `stop` is set, the request is cancelled.
pub fn answer(
    model: &Model,
    mut answer: Answer,
    stop: &AtomicBool,
    mut show: impl FnMut(&str, Vec<Token>) -> Outcome,
) -> Outcome<Completion> {
    let facts = model.facts();
    let mut stage = Some(terminal::Stage::begin(match facts.backend {
        "cpu" => "computing the prompt".into(),
        _ => format!("compiling kernels for {}, then computing the prompt", facts.device),
    }));
    loop {
        if stop.load(Ordering::Relaxed) {
            answer.cancel();
        }
        let Some(update) = answer.wait(ATTENTION) else { continue };
        drop(stage.take());
        match update {
            Update::Text { text, tokens } if text.is_empty() && tokens.iter().all(|t| t.logprob.is_none()) => {}
            Update::Text { text, tokens } => show(&text, tokens)?,
            Update::Done(completion) => return ended(completion),
        }
    }
}

/// The completion, or why it is none.
fn ended(mut completion: Completion) -> Outcome<Completion> {
    match completion.end.error.take() {
        None => Ok(completion),
        Some(error) => Err(error.into()),
    }
}

/// The finished request as JSON; `batch` writes the same fields.
pub fn completion_json(done: &Completion, tokens: &[Token], facts: &Facts) -> Value {
    let mut value = completion_fields(done, tokens);
    value["backend"] = facts.backend.into();
    value["device"] = facts.device.clone().into();
    value
}

/// Text, ids, reason, usage, cache and timing of a finished request, and the log probabilities of its tokens if they have some.
pub fn completion_fields(done: &Completion, tokens: &[Token]) -> Value {
    let (end, t) = (&done.end, &done.end.timing);
    let mut value = json!({
        "text": done.text,
        "ids": done.ids,
        "finish_reason": finish_name(done.finish),
        "error": done.error().map(|e| e.to_string()),
        "left_out_messages": done.dropped,
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": done.ids.len(),
            "cached_tokens": done.reused(),
        },
        "cache": {
            "matched_tokens": end.cache.map_or(0, |c| c.matched),
            "reused_tokens": done.reused(),
            "host_tokens": end.cache.map_or(0, |c| c.host),
            "disk_tokens": end.cache.map_or(0, |c| c.disk),
            "reason": end.cache.map(|c| c.reason.name()),
            "converted": done.is_converted(),
        },
        "timing": { "queue_ms": micro(t.queue_ms), "prefill_ms": micro(t.prefill_ms), "decode_ms": micro(t.decode_ms) },
    });
    if let Some(logprobs) = logprobs::own(tokens) {
        value["logprobs"] = logprobs;
    }
    value
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

/// The cost of an answer, in one line.
pub fn closing_line(done: &Completion, facts: &Facts) -> String {
    let t = &done.end.timing;
    let mut parts = vec![tokens(done), format!("first token after {:.3} s", (t.queue_ms + t.prefill_ms) / 1e3)];
    parts.extend(rate(done).map(|rate| format!("{rate} tokens/s")));
    parts.extend(reused(done).map(|reused| format!("{reused} tokens")));
    parts.extend(unusual_end(done));
    parts.push(format!("{} ({})", facts.backend, facts.device));
    parts.join(" · ")
}

/// The same for a turn of a chat, which has told model and device already: less than a line of most terminals.
pub fn short_line(done: &Completion) -> String {
    let mut parts = vec![tokens(done)];
    parts.extend(rate(done).map(|rate| format!("{rate}/s")));
    parts.extend(reused(done));
    parts.extend(unusual_end(done));
    parts.join(" · ")
}

fn tokens(done: &Completion) -> String {
    let n = done.ids.len();
    format!("{} token{}", units::thousands(n), if n == 1 { "" } else { "s" })
}

fn rate(done: &Completion) -> Option<String> {
    let (n, ms) = (done.ids.len(), done.end.timing.decode_ms);
    (n > 1 && ms > 0.0).then(|| terminal::thousands((n - 1) as f64 / ms * 1e3))
}

fn reused(done: &Completion) -> Option<String> {
    let [reused, of] = [done.reused(), done.end.prompt_tokens].map(units::thousands);
    let converted = if done.is_converted() { "converted, " } else { "" };
    let from = match done.end.cache {
        Some(cache) if cache.disk > 0 => ", with disk",
        Some(cache) if cache.host > 0 => ", with host memory",
        _ => "",
    };
    (done.reused() > 0).then(|| format!("{converted}reused {reused} of {of}{from}"))
}

fn unusual_end(done: &Completion) -> Option<String> {
    match done.finish {
        FinishReason::Stop => None,
        FinishReason::Length => Some("cut at the token limit".into()),
        FinishReason::Cancelled => Some("stopped".into()),
        FinishReason::Failed => Some("failed".into()),
    }
}
