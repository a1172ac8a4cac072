//! Answers, in no protocol's words, and the trait that says them in one.

use selkie_core::{
    engine::{FinishReason, Timing},
    reply::Event,
};
use serde_json::{Value, json};

use super::{refusal::Refusal, speech::Said, sse::Out};

/// One answer that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What it says; nothing without a tokenizer.
    pub said: Said,
    /// What only its end showed.
    pub last: Vec<Event>,
    /// The tokens, an end-of-sequence token included.
    pub ids: Vec<u32>,
    /// Log probabilities of the tokens in OpenAI's form, if they were asked for.
    pub logprobs: Option<Value>,
    /// Log probabilities of the prompt in vLLM's form, if they were asked for.
    pub prompt_logprobs: Option<Value>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Messages that were left out of the prompt, because it was longer than the context.
    pub dropped: usize,
    /// It ended at a stop string.
    pub at_stop: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the cache.
    pub matched: usize,
    /// Reused tokens that came from host memory and from disk.
    pub host: usize,
    pub disk: usize,
    /// It goes on from converted values.
    pub converted: bool,
    /// Tokens of the prompt that were not computed.
    pub reused: usize,
    /// Why not more; `None` if the cache was not asked.
    pub reason: Option<&'static str>,
    /// The seed, if the request named one.
    pub seed: Option<u64>,
    /// Where the time went.
    pub timing: Timing,
}

impl Ended {
    /// The reason of the end in OpenAI's words.
    pub fn openai_finish(&self) -> &'static str {
        match self.finish {
            FinishReason::Length => "length",
            _ if !self.said.calls.is_empty() => "tool_calls",
            FinishReason::Stop | FinishReason::Cancelled | FinishReason::Failed => "stop",
        }
    }

    /// What only this server says: what was reused, and why not more.
    fn own(&self) -> Value {
        let t = &self.timing;
        let mut own = json!({
            "matched_tokens": self.matched,
            "reused_tokens": self.reused,
            "host_tokens": self.host,
            "disk_tokens": self.disk,
            "reason": self.reason,
            "dropped_messages": self.dropped,
            "seed": self.seed,
            "queue_ms": t.queue_ms,
            "prefill_ms": t.prefill_ms,
            "decode_ms": t.decode_ms,
        });
        if self.converted {
            own["converted"] = true.into();
        }
        own
    }
}

/// Tokens of a request with all its answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompts, each counted once.
    pub prompt: usize,
    /// Of the prompts, not computed for the first of their answers.
    pub cached: usize,
    /// Of all answers.
    pub completion: usize,
    /// Of their reasoning.
    pub reasoning: usize,
}

impl Usage {
    /// Of answers in order, `n` to a prompt.
    pub fn of(answers: &[Ended], n: usize) -> Self {
        let firsts = || answers.iter().step_by(n);
        Self {
            prompt: firsts().map(|a| a.prompt_tokens).sum(),
            cached: firsts().map(|a| a.reused).sum(),
            completion: answers.iter().map(|a| a.ids.len()).sum(),
            reasoning: answers.iter().map(|a| a.said.reasoning_tokens).sum(),
        }
    }

    /// In OpenAI's words.
    pub fn openai(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
            "completion_tokens_details": { "reasoning_tokens": self.reasoning },
        })
    }
}

/// The extension of answers: the report of the first one and, of several, of each.
pub fn extension(answers: &[Ended]) -> Value {
    let mut first = answers.first().map_or(Value::Null, Ended::own);
    if answers.len() > 1 {
        first["choices"] = answers.iter().map(Ended::own).collect();
    }
    first
}

/// What is the same in all parts of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    /// The request's id.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Answers to each prompt.
    pub n: usize,
    /// Tokens of the first prompt.
    pub prompt_tokens: usize,
}

/// The content in parts of an answer.
pub fn content(events: &[Event]) -> String {
    let content = |event: &'_ Event| match event {
        Event::Content(text) | Event::CallBroken { text, .. } => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(content).collect()
}

/// The tokens of a part of an answer.
#[derive(Clone, Debug, Default)]
pub struct Tokens<'a> {
    /// Their ids.
    pub ids: &'a [u32],
    /// Their log probabilities in OpenAI's form, if they were asked for.
    pub logprobs: Option<Value>,
    /// Those of the prompt in vLLM's form, with the first tokens, if they were asked for.
    pub prompt_logprobs: Option<Value>,
}

/// Says answers in the words of a protocol, in pieces or as a whole.
pub trait Voice: Send {
    /// Whether a quiet stream may have comments in it.
    fn has_comments(&self) -> bool {
        true
    }

    /// Before anything else; `choices` answers will come.
    fn begin(&mut self, out: &Out, choices: usize);

    /// More of an answer that was taken apart. There may be no events: the tokens make no whole character yet, for example.
    fn said(&mut self, out: &Out, choice: usize, events: &[Event], tokens: Tokens);

    /// The end of an answer.
    fn end(&mut self, out: &Out, choice: usize, ended: &Ended);

    /// After the ends of all answers.
    fn finish(&mut self, out: &Out, answers: &[Ended]);

    /// Instead of the rest.
    fn fail(&mut self, out: &Out, why: &Refusal);

    /// All of the answers at once.
    fn whole(&self, answers: &[Ended]) -> Value;
}

/// Answers for the tests of the protocols.
#[cfg(test)]
pub mod tests {
    use super::*;

    /// A head.
    pub fn head() -> Head {
        Head { id: "7f".into(), model: "demo".into(), created: 5, n: 1, prompt_tokens: 100 }
    }

    /// An answer of three tokens to a prompt of 100, of which 64 were reused.
    pub fn ended(text: &str, finish: FinishReason) -> Ended {
        Ended {
            said: Said { content: text.into(), ..Said::default() },
            last: Vec::new(),
            ids: vec![1, 2, 3],
            logprobs: None,
            prompt_logprobs: None,
            finish,
            dropped: 0,
            at_stop: false,
            prompt_tokens: 100,
            matched: 64,
            host: 0,
            disk: 0,
            converted: false,
            reused: 64,
            reason: Some("first_sight"),
            seed: None,
            timing: Timing::default(),
        }
    }

    /// What a voice says of one answer in two pieces: the events' data, and the names where they have any.
    pub fn streamed(voice: &mut dyn Voice) -> Vec<(Option<String>, Value)> {
        let out = Out::default();
        let ended = ended("17 + 25", FinishReason::Stop);
        voice.begin(&out, 1);
        let part = |text: &str| [Event::Content(text.into())];
        voice.said(&out, 0, &part("17 +"), Tokens { ids: &[1, 2], ..Tokens::default() });
        voice.said(&out, 0, &part(" 25"), Tokens { ids: &[3], ..Tokens::default() });
        voice.end(&out, 0, &ended);
        voice.finish(&out, &[ended]);
        let text = out.take();
        let parse = |data: &str| serde_json::from_str(data).unwrap_or_else(|_| Value::from(data));
        text.split_terminator("\n\n")
            .map(|event| match event.strip_prefix("event: ") {
                Some(named) => {
                    let (name, data) = named.split_once("\ndata: ").unwrap();
                    (Some(name.to_owned()), parse(data))
                }
                None => (None, parse(event.strip_prefix("data: ").unwrap())),
            })
            .collect()
    }

    #[test]
    fn usage_counts_prompts_once() {
        let answers = vec![ended("a", FinishReason::Stop); 4];
        assert_eq!(Usage::of(&answers, 2), Usage { prompt: 200, cached: 128, completion: 12, reasoning: 0 });
        let own = extension(&answers[..1]);
        assert_eq!((&own["reused_tokens"], &own["reason"]), (&json!(64), &json!("first_sight")));
        assert_eq!(own.get("choices"), None);
        assert_eq!(extension(&answers)["choices"].as_array().unwrap().len(), 4);
    }
}
