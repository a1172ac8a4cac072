//! Ollama's `/api/chat` and `/api/tags`.

use selkie_core::{
    chat::strftime,
    engine::FinishReason,
    reply::Event,
    session::{Facts, Overrides, Prompt},
};
use serde_json::{Value, json};

use super::{
    answer::Speak,
    fields::Fields,
    refusal::{Dialect, Refusal},
    sse::Out,
    voice::{Ended, Head, Tokens, Voice, content, extension},
    wanted::{Wanted, messages, overrides, stops},
};

/// Reads a request for a chat, with the voice of its answer. Streaming is the default.
///
/// # Errors
/// If it is not one that can be answered.
pub fn read(fields: &Fields<'_>) -> Result<(Wanted, Speak), Refusal> {
    fields.refuse_unless(&[("tools", "[]"), ("format", "\"\""), ("think", "false"), ("logprobs", "false")])?;
    let stream = fields.raw("stream").is_none() || fields.flag("stream")?;
    let mut wanted = Wanted {
        prompts: vec![Prompt::Messages(messages(fields, "messages")?)],
        n: 1,
        stream,
        salt: fields.get("cache_salt")?.unwrap_or_default(),
        ..Wanted::default()
    };
    if let Some(options) = fields.raw("options") {
        let options = Fields::of("options".into(), options)?;
        let penalty = options.number("repeat_penalty", 1e-6, 100.0)?;
        let values = overrides(&options)?;
        wanted.overrides = Overrides { repetition_penalty: penalty.or(values.repetition_penalty), ..values };
        wanted.stop = stops(&options, "stop")?;
        // Negative: without a limit of its own.
        let unlimited = options.raw("num_predict").is_some_and(|n| n.get().starts_with('-'));
        if !unlimited {
            wanted.max_tokens = options.count("num_predict", 1, u64::from(u32::MAX))?.map(|n| n as usize);
        }
        for field in ["presence_penalty", "frequency_penalty"] {
            if options.number(field, -100.0, 100.0)?.is_some_and(|x| x != 0.0) {
                return Err(options.refuse(field, "is not supported by this server; leave it out"));
            }
        }
    }
    Ok((wanted, Box::new(|head| Box::new(Ollama { head }))))
}

/// The body of `/api/tags`.
pub fn tags(names: &[String], facts: Option<&Facts>, created: u64) -> Value {
    let (family, parameters, bytes, print) =
        facts.map_or(("", 0, 0, 0), |f| (&*f.family, f.parameters, f.weight_bytes, f.fingerprint));
    let models: Vec<Value> = names
        .iter()
        .map(|name| {
            json!({
                "name": name,
                "model": name,
                "modified_at": time(created),
                "size": bytes,
                "digest": format!("{print:016x}"),
                "details": {
                    "format": "",
                    "family": family,
                    "families": [family],
                    "parameter_size": format!("{:.1}M", parameters as f64 / 1e6),
                    "quantization_level": "",
                },
            })
        })
        .collect();
    json!({ "models": models })
}

fn time(seconds: u64) -> String {
    strftime("%Y-%m-%dT%H:%M:%SZ", seconds)
}

/// Says answers as this protocol does: lines of JSON.
struct Ollama {
    head: Head,
}

impl Ollama {
    fn piece(&self, text: &str) -> Value {
        json!({
            "model": self.head.model,
            "created_at": time(self.head.created),
            "message": { "role": "assistant", "content": text },
            "done": false,
        })
    }

    /// The last line; times are in nanoseconds.
    fn last(&self, text: &str, answers: &[Ended]) -> Value {
        let mut last = self.piece(text);
        last["done"] = true.into();
        if let Some(ended) = answers.first() {
            let t = &ended.timing;
            let [queue, prefill, decode] = [t.queue_ms, t.prefill_ms, t.decode_ms].map(|ms| (ms * 1e6) as u64);
            let reason = if ended.finish == FinishReason::Length { "length" } else { "stop" };
            last["done_reason"] = reason.into();
            last["total_duration"] = (queue + prefill + decode).into();
            last["load_duration"] = 0.into();
            last["prompt_eval_count"] = ended.prompt_tokens.into();
            last["prompt_eval_duration"] = prefill.into();
            last["eval_count"] = ended.ids.len().into();
            last["eval_duration"] = decode.into();
            last["selkie"] = extension(answers);
        }
        last
    }
}

impl Voice for Ollama {
    fn has_comments(&self) -> bool {
        false
    }

    fn begin(&mut self, _: &Out, _: usize) {}

    fn said(&mut self, out: &Out, _: usize, events: &[Event], _: Tokens) {
        let text = content(events);
        if !text.is_empty() {
            out.line(&self.piece(&text));
        }
    }

    fn end(&mut self, _: &Out, _: usize, _: &Ended) {}

    fn finish(&mut self, out: &Out, answers: &[Ended]) {
        out.line(&self.last("", answers));
    }

    fn fail(&mut self, out: &Out, why: &Refusal) {
        out.line(&why.body(Dialect::Ollama));
    }

    fn whole(&self, answers: &[Ended]) -> Value {
        self.last(answers.first().map_or("", |a| &*a.said.content), answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::voice::tests::{ended, head};

    fn of(body: &str) -> Result<Wanted, Refusal> {
        read(&Fields::body(body.as_bytes()).unwrap()).map(|(wanted, _)| wanted)
    }

    #[test]
    fn options() {
        let chat = |more: &str| of(&format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}]{more}}}"#));
        let wanted =
            chat(r#", "options": {"num_predict": 5, "repeat_penalty": 1.1, "seed": 3, "stop": ["x"], "num_ctx": 9}"#);
        let wanted = wanted.unwrap();
        assert_eq!((wanted.max_tokens, wanted.stream, wanted.overrides.seed), (Some(5), true, Some(3)));
        assert_eq!(wanted.overrides.repetition_penalty, Some(1.1));
        assert_eq!(chat(r#", "stream": false, "options": {"num_predict": -1}"#).unwrap().max_tokens, None);
        for (more, param) in [
            (r#", "format": "json""#, "format"),
            (r#", "options": {"top_p": 3}"#, "options.top_p"),
            (r#", "options": {"num_predict": 0}"#, "options.num_predict"),
        ] {
            assert_eq!(chat(more).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn lines() {
        let (mut voice, out) = (Ollama { head: head() }, Out::default());
        let answers = [ended("17", FinishReason::Stop)];
        voice.begin(&out, 1);
        voice.said(&out, 0, &[Event::Content("17".into())], Tokens::default());
        voice.end(&out, 0, &answers[0]);
        voice.finish(&out, &answers);
        let text = out.take();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[0]["message"]["content"], &lines[0]["done"]), (2, &json!("17"), &json!(false)));
        assert_eq!((&lines[1]["done"], &lines[1]["eval_count"]), (&json!(true), &json!(3)));
        assert_eq!(lines[0]["created_at"], "1970-01-01T00:00:05Z");
    }
}
