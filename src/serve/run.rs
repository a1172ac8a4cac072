//! Runs a request in the engine: its choices, their updates in order, and its end.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use selkie_core::{
    Error,
    controls::Logprobs,
    engine::FinishReason,
    reply::Event,
    session::{Answer, Ask, Completion, Model, Overrides, Prepared, Prompt, Text, Token, Update},
};

use serde_json::{Map, Value};

use super::{
    gate::Places,
    guard::Caller,
    keys::prefix_namespace,
    refusal::Refusal,
    speech::{Listener, Said, Speech},
    voice::Ended,
    wanted::Wanted,
};
use crate::logprobs;

/// Tokens from which a prompt is computed for the first of its choices, and reused for the others.
const WORTH_REUSING: usize = 65;

/// A request whose prompts are tokens, checked and ready for the engine.
pub struct Ready {
    choices: Vec<Choice>,
    /// Choices of each prompt.
    n: usize,
    namespace: String,
    places: Places,
}

impl Ready {
    /// Renders, tokenises and checks the prompts, which takes a while for long ones.
    ///
    /// # Errors
    /// If a prompt cannot be used.
    pub fn new(
        model: &Model,
        speech: &Speech,
        wanted: Wanted,
        caller: &Caller,
        places: Places,
    ) -> Result<Self, Refusal> {
        let n = wanted.n;
        let namespace = prefix_namespace(&caller.namespace, &wanted.salt);
        let structured = wanted.structure.is_some() || !wanted.tools.tools.is_empty();
        let mut choices = Vec::with_capacity(wanted.choices());
        for prompt in wanted.prompts {
            let values = match &prompt {
                Prompt::Conversation(chat) => Some(chat.values.clone()),
                Prompt::Messages(_) => Some(Map::new()),
                _ => None,
            };
            let chat = values.is_some();
            let heard = values.filter(|_| !speech.is_plain(&wanted.tools));
            // With log probabilities, those of an echo are reported as the answer's.
            let scores = wanted.prompt_logprobs.max(wanted.controls.logprobs.filter(|_| wanted.echo));
            let mut echo = None;
            let (prompt, waits, tail) = if n == 1 && heard.is_none() && !structured && scores.is_none() && !wanted.echo
            {
                (prompt, false, None)
            } else {
                let given = if let Prompt::Text(text) = &prompt { Some(text.clone()) } else { None };
                let encoded = model.encode(prompt, wanted.when_full, wanted.max_tokens)?;
                let (waits, tail) = (encoded.ids.len() >= WORTH_REUSING, chat.then(|| encoded.tail.clone()));
                if wanted.echo || scores.is_some() {
                    let text = match given {
                        Some(text) => text,
                        None if wanted.echo => model.text().tokenizer()?.decode(&encoded.ids)?,
                        None => String::new(),
                    };
                    echo = Some(Echo {
                        ids: encoded.ids.clone(),
                        text: wanted.echo.then_some(text),
                        own: wanted.prompt_logprobs,
                        listed: wanted.controls.logprobs,
                        stream: wanted.stream,
                    });
                }
                (Prompt::Encoded(encoded), waits, tail)
            };
            let constraint = speech.constraint(model, tail.as_deref(), &wanted.tools, wanted.structure.as_ref())?;
            for i in 0..n {
                let seed = wanted.overrides.seed.map(|seed| choice_seed(seed, i as u64));
                let ask = Ask {
                    prompt: prompt.clone(),
                    sampling: Overrides { seed, ..wanted.overrides.clone() },
                    max_tokens: wanted.max_tokens,
                    when_full: wanted.when_full,
                    stop: wanted.stop.clone(),
                    namespace: namespace.clone(),
                    // A salt gives nobody a share of its own.
                    share: caller.namespace.clone(),
                    priority: wanted.priority,
                    ignore_eos: wanted.ignore_eos,
                    stop_token_ids: wanted.stop_token_ids.clone(),
                    controls: wanted.controls.clone(),
                    prompt_logprobs: scores,
                    constraint: constraint.clone(),
                    ..Ask::default()
                };
                let prepared = Some(model.prepare(ask)?);
                let ids = format!("call_{}_{}_", caller.id, choices.len());
                let listener = heard.as_ref().zip(tail.as_ref());
                let listener = listener.map(|(values, tail)| speech.listener(tail, &wanted.tools, values, ids));
                let report =
                    wanted.controls.logprobs.map(|_| Report { chat, stream: wanted.stream, tokens: Vec::new(), at: 0 });
                let echo = echo.clone();
                choices.push(Choice { prepared, waits: waits && i > 0, answer: None, seed, listener, report, echo });
            }
        }
        Ok(Self { choices, n, namespace, places })
    }

    /// The tokens of each prompt.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        let first = self.choices.iter().step_by(self.n);
        let prompt = |choice: &Choice| choice.prepared.as_ref().map_or_else(Vec::new, |p| p.prompt().to_vec());
        first.map(prompt).collect()
    }

    /// The namespace in which they run.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }
}

/// News of a request.
pub enum News {
    /// More of a choice.
    Said {
        /// Which.
        choice: usize,
        /// What it says, maybe nothing.
        events: Vec<Event>,
        /// Tokens.
        ids: Vec<u32>,
        /// Their log probabilities, if they were asked for.
        logprobs: Option<Value>,
        /// Those of the prompt, once in a stream, if they were asked for.
        prompt_logprobs: Option<Value>,
    },
    /// A choice has ended.
    Ended(usize, Box<Ended>),
}

/// A request in the engine. Dropping it cancels what still runs.
pub struct Run {
    choices: Vec<Choice>,
    n: usize,
    model: Model,
    /// Where the search for news begins, so that no choice starves the others.
    next: usize,
    _places: Places,
}

struct Choice {
    /// The request, until it is sent.
    prepared: Option<Prepared>,
    /// It is sent once the first choice of its prompt has computed that.
    waits: bool,
    answer: Option<Answer>,
    seed: Option<u64>,
    /// Takes the answer apart, unless it is all content.
    listener: Option<Listener>,
    /// The log probabilities so far, if they were asked for.
    report: Option<Report>,
    /// What is said of the prompt, if anything.
    echo: Option<Echo>,
}

/// A prompt that is a part of the answer, or has log probabilities.
#[derive(Clone)]
struct Echo {
    ids: Vec<u32>,
    /// It is said before the answer.
    text: Option<String>,
    /// Most likely tokens in a list of the prompt's own.
    own: Option<u8>,
    /// Most likely tokens in the list of all tokens.
    listed: Option<u8>,
    /// With the first tokens, or else at the end.
    stream: bool,
}

impl Echo {
    /// Its tokens with their log probabilities; the first one has none.
    fn tokens(&self, scored: &[Logprobs]) -> Vec<Token> {
        let most = usize::from(self.listed.unwrap_or_default());
        let scored = [None].into_iter().chain(scored.iter().map(Some));
        let token = |(id, scored): (&u32, Option<&Logprobs>)| Token {
            id: *id,
            logprob: scored.map(|s| s.chosen),
            top: scored.map(|s| s.top.iter().take(most).copied().collect()).unwrap_or_default(),
        };
        self.ids.iter().zip(scored).map(token).collect()
    }

    /// The prompt's own list.
    fn list(&self, scored: &[Logprobs], text: &Text) -> Option<Value> {
        let most = usize::from(self.own?);
        let mut scored = scored.to_vec();
        scored.iter_mut().for_each(|s| s.top.truncate(most));
        Some(logprobs::prompt(&self.ids, &scored, text))
    }
}

/// Tokens whose log probabilities are reported.
struct Report {
    /// In the form of a chat, or else of a completion.
    chat: bool,
    /// With every piece, or else at the end.
    stream: bool,
    /// Those that wait for the end.
    tokens: Vec<Token>,
    /// Characters of the texts of all before the next one.
    at: usize,
}

impl Report {
    fn form(&mut self, tokens: &[Token], text: &Text) -> Option<Value> {
        if self.chat { logprobs::chat(tokens, text) } else { logprobs::completion(tokens, text, &mut self.at) }
    }

    /// Takes more tokens; what is said of them now.
    fn add(&mut self, tokens: Vec<Token>, text: &Text) -> Option<Value> {
        if self.stream {
            return self.form(&tokens, text);
        }
        self.tokens.extend(tokens);
        None
    }

    /// What is said at the end.
    fn end(mut self, text: &Text) -> Option<Value> {
        let tokens = std::mem::take(&mut self.tokens);
        self.form(&tokens, text)
    }
}

impl Run {
    /// Sends a request. Of several choices of one long prompt, the first computes it and the others reuse it.
    pub fn start(model: &Model, ready: Ready) -> Self {
        let Ready { choices, n, places, .. } = ready;
        let mut run = Self { choices, n, model: model.clone(), next: 0, _places: places };
        let now = (0..run.choices.len()).filter(|i| !run.choices[*i].waits).collect();
        run.send(now);
        run
    }

    fn send(&mut self, mut which: Vec<usize>) {
        which.retain(|i| self.choices[*i].prepared.is_some());
        let prepared: Vec<Prepared> = which.iter().filter_map(|i| self.choices[*i].prepared.take()).collect();
        for (i, answer) in which.iter().zip(self.model.send(prepared)) {
            self.choices[*i].answer = Some(answer);
        }
    }

    /// Tokens of the first prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.choices.first().and_then(|c| c.answer.as_ref()).map_or(0, Answer::prompt_tokens)
    }

    /// The number of choices.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// The next news; `None` once all choices have ended.
    ///
    /// # Errors
    /// If a choice has failed; the others are of no use then.
    pub async fn next(&mut self) -> Result<Option<News>, Refusal> {
        let Some((choice, update)) = poll_fn(|cx| self.poll(cx)).await else { return Ok(None) };
        if choice.is_multiple_of(self.n) {
            self.send((choice + 1..choice + self.n).collect());
        }
        match update {
            Update::Text { text, mut tokens } => {
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let mut events = self.hear(choice, text, &ids);
                let Choice { answer, report, echo, .. } = &mut self.choices[choice];
                let mut prompt_logprobs = None;
                // A stream says what it says of the prompt with the first token, as vLLM's does.
                if let (Some(echo), Some(answer)) = (echo.take_if(|echo| echo.stream), answer) {
                    let scored = answer.prompt_logprobs();
                    prompt_logprobs = echo.list(scored, self.model.text());
                    if let Some(text) = &echo.text {
                        events.insert(0, Event::Content(text.clone()));
                        tokens.splice(0..0, echo.tokens(scored));
                    }
                }
                let logprobs = report.as_mut().and_then(|report| report.add(tokens, self.model.text()));
                Ok(Some(News::Said { choice, events, ids, logprobs, prompt_logprobs }))
            }
            Update::Done(completion) => {
                let ended = self.ended(choice, completion)?;
                Ok(Some(News::Ended(choice, Box::new(ended))))
            }
        }
    }

    fn hear(&mut self, choice: usize, text: String, ids: &[u32]) -> Vec<Event> {
        let Some(listener) = &mut self.choices[choice].listener else {
            return if text.is_empty() { Vec::new() } else { vec![Event::Content(text)] };
        };
        // Special tokens have no text of their own.
        let tokenizer = self.model.text().tokenizer().ok().filter(|_| text.is_empty());
        let special = tokenizer.and_then(|t| ids.iter().find_map(|id| t.special_text(*id)));
        listener.hear(&text, special)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        let mut running = false;
        for step in 0..self.choices.len() {
            let i = (self.next + step) % self.choices.len();
            let Some(answer) = &mut self.choices[i].answer else { continue };
            match answer.poll_next(cx) {
                Poll::Ready(Some(update)) => {
                    self.next = i + 1;
                    return Poll::Ready(Some((i, update)));
                }
                Poll::Ready(None) => self.choices[i].answer = None,
                Poll::Pending => running = true,
            }
        }
        if running { Poll::Pending } else { Poll::Ready(None) }
    }

    fn ended(&mut self, choice: usize, done: Completion) -> Result<Ended, Refusal> {
        if let Some(e) = done.error() {
            return Err(failed(e));
        }
        if done.finish == FinishReason::Cancelled {
            return Err(Refusal::new(503, "the server is shutting down"));
        }
        let at_stop = done.finish == FinishReason::Stop
            && !done.ids.last().is_some_and(|id| self.model.text().stop_ids().contains(id));
        let cache = done.end.cache;
        let text = done.text.unwrap_or_default();
        let (mut said, last) = match self.choices[choice].listener.take() {
            Some(listener) => listener.finish(),
            None => (Said { content: text, ..Said::default() }, Vec::new()),
        };
        let mut report = self.choices[choice].report.take();
        let (echo, scored) = (self.choices[choice].echo.take(), &done.end.prompt_logprobs);
        if let Some(echo) = echo.as_ref().filter(|echo| echo.text.is_some()) {
            said.content.insert_str(0, echo.text.as_deref().unwrap_or_default());
            if let Some(report) = &mut report {
                report.tokens.splice(0..0, echo.tokens(scored));
            }
        }
        let prompt_logprobs = echo.and_then(|echo| echo.list(scored, self.model.text()));
        let logprobs = report.and_then(|report| report.end(self.model.text()));
        Ok(Ended {
            logprobs,
            prompt_logprobs,
            said,
            last,
            ids: done.ids,
            finish: done.finish,
            dropped: done.dropped,
            at_stop,
            prompt_tokens: done.end.prompt_tokens,
            matched: cache.map_or(0, |c| c.matched),
            host: cache.map_or(0, |c| c.host),
            disk: cache.map_or(0, |c| c.disk),
            converted: cache.is_some_and(|c| c.converted),
            reused: cache.map_or(0, |c| c.reused),
            reason: cache.map(|c| c.reason.name()),
            seed: self.choices[choice].seed,
            timing: done.end.timing,
        })
    }
}

/// An error that came after the request was accepted.
fn failed(e: &Error) -> Refusal {
    let refusal = Refusal::from(e);
    if refusal.status == 400 { Refusal { status: 500, ..refusal } } else { refusal }
}

/// The seed of a choice: the request's for the first, a mix of it and the number for others, with at most 53 bits, so that
/// JSON carries it everywhere. A request with that seed alone has the same answer.
pub fn choice_seed(seed: u64, choice: u64) -> u64 {
    if choice == 0 {
        return seed;
    }
    // The finaliser of splitmix64.
    let mut z = seed.wrapping_add(choice.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_choices_differ() {
        assert_eq!(choice_seed(7, 0), 7);
        let seeds: std::collections::HashSet<u64> =
            (0..100).flat_map(|seed| (0..100).map(move |i| choice_seed(seed, i))).collect();
        assert_eq!(seeds.len(), 10_000);
        assert!((1..100).all(|i| choice_seed(u64::MAX, i) < 1 << 53));
    }
}
