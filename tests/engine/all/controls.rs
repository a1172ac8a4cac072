//! Rules over the logits of a request: their formulas, constraints and ends.

use std::sync::{Arc, Mutex};

use pollster::block_on;
use selkie_core::{
    Error, Result,
    controls::{Constraint, Controls, Logprobs},
    engine::{EngineOptions, Event, FinishReason, Finished, Request, SeqId},
    sample::Sampling,
};

use super::{
    behind::{Behind, Log},
    engine::{VOCAB, engine, engine_on, prompt, run},
};

/// Allows one token after the other, then nothing.
#[derive(Clone)]
struct Script {
    tokens: Vec<u32>,
    taken: usize,
    /// It is over after its last token.
    ends: bool,
    /// Shared with the test, which sees when the request has dropped it.
    log: Log,
}

impl Script {
    fn boxed(tokens: &[u32], ends: bool, log: &Log) -> Box<dyn Constraint + Send> {
        Box::new(Self { tokens: tokens.to_vec(), taken: 0, ends, log: log.clone() })
    }
}

impl Constraint for Script {
    fn mask(&mut self, out: &mut [u32]) -> Result<()> {
        self.log.lock().unwrap().push("mask");
        if let Some(&token) = self.tokens.get(self.taken) {
            out[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }
    fn commit(&mut self, token: u32) -> Result<()> {
        self.log.lock().unwrap().push("commit");
        assert_eq!(token, self.tokens[self.taken]);
        self.taken += 1;
        if token == 13 { Err(Error::BadRequest("13 is no lucky number".into())) } else { Ok(()) }
    }
    fn is_over(&self) -> bool {
        self.ends && self.taken == self.tokens.len()
    }
    fn boxed_clone(&self) -> Box<dyn Constraint + Send> {
        Box::new(self.clone())
    }
}

fn log() -> Log {
    Arc::new(Mutex::new(Vec::new()))
}

fn error(end: &Finished) -> String {
    end.error.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// The log-softmax of logits in f64.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

/// Each token of a greedy answer is the largest of the model's logits under the rules, written down again here.
#[test]
fn greedy_answers_follow_the_rules() {
    let mut engine = engine(&EngineOptions { logits: true, ..EngineOptions::default() });
    let bias: Vec<(u32, f32)> = (0..40).map(|i| (i * 8 + 1, (i % 7) as f32 - 3.0)).collect();
    let odd: Vec<u32> = (0..VOCAB).filter(|id| id % 2 == 1).collect();
    for (controls, repetition_penalty) in [
        (Controls { presence_penalty: 1.5, ..Controls::default() }, 1.0),
        (Controls { frequency_penalty: -0.5, ..Controls::default() }, 1.0),
        (Controls { logit_bias: bias.clone(), ..Controls::default() }, 1.0),
        (Controls { allowed_tokens: Some(odd.clone()), ..Controls::default() }, 1.0),
        (
            Controls {
                presence_penalty: 0.4,
                frequency_penalty: 0.3,
                logit_bias: bias,
                min_tokens: 9,
                allowed_tokens: Some(odd),
                logprobs: Some(4),
            },
            1.2,
        ),
    ] {
        let prompt = prompt(70);
        let sampling = Sampling { repetition_penalty, ..Sampling::default() };
        let max_tokens = 24;
        let request = Request { prompt: prompt.clone(), max_tokens, sampling, controls, ..Request::default() };
        let c = request.controls.clone();
        engine.submit(request).unwrap();
        let mut answer: Vec<u32> = Vec::new();
        while !engine.is_idle() {
            for event in block_on(engine.step()).unwrap() {
                let Event::Token { token, logits, logprobs, .. } = event else { continue };
                let logits = logits.unwrap();
                assert_eq!(token, best(&logits, &c, repetition_penalty, &prompt, &answer), "{c:?} after {answer:?}");
                assert_eq!(logprobs.is_some(), c.logprobs.is_some());
                answer.push(token);
            }
        }
        assert_eq!(answer.len(), max_tokens);
    }
}

/// The token that greedy sampling takes.
fn best(logits: &[f32], c: &Controls, repetition: f32, prompt: &[u32], answer: &[u32]) -> u32 {
    let value = |id: u32| {
        let mut x = f64::from(logits[id as usize]);
        if c.allowed_tokens.as_ref().is_some_and(|ids| !ids.contains(&id)) {
            return f64::NEG_INFINITY;
        }
        x += c.logit_bias.iter().find(|(of, _)| *of == id).map_or(0.0, |(_, bias)| f64::from(*bias));
        let n = answer.iter().filter(|of| **of == id).count() as f64;
        if n > 0.0 || prompt.contains(&id) {
            x = if x > 0.0 { x / f64::from(repetition) } else { x * f64::from(repetition) };
        }
        let presence = if n > 0.0 { f64::from(c.presence_penalty) } else { 0.0 };
        x - f64::from(c.frequency_penalty) * n - presence
    };
    (0..logits.len() as u32).rev().max_by(|&a, &b| value(a).total_cmp(&value(b))).unwrap()
}

/// They are those of the model, whatever the rules; an f32 holds them to 1e-6.
#[test]
fn log_probabilities_are_the_log_softmax_of_the_raw_logits() {
    let mut engine = engine(&EngineOptions { logits: true, ..EngineOptions::default() });
    let bias = vec![(17, 30.0)];
    for (n, logit_bias) in [(0, vec![]), (1, vec![]), (20, vec![]), (3, bias)] {
        let sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
        let controls = Controls { logprobs: Some(n), logit_bias, ..Controls::default() };
        let request = Request { prompt: prompt(20), max_tokens: 9, sampling, controls, ..Request::default() };
        engine.submit(request).unwrap();
        let mut seen = 0;
        while !engine.is_idle() {
            for event in block_on(engine.step()).unwrap() {
                let Event::Token { token, logits, logprobs, .. } = event else { continue };
                let (want, Logprobs { chosen, top }) = (log_softmax(&logits.unwrap()), *logprobs.unwrap());
                let close = |got: f32, want: f64| (f64::from(got) - want).abs() <= 1e-6 * (1.0 + want.abs());
                assert!(close(chosen, want[token as usize]), "{chosen}, not {}", want[token as usize]);
                let mut order: Vec<u32> = (0..VOCAB).collect();
                order.sort_by(|&a, &b| want[b as usize].total_cmp(&want[a as usize]).then(a.cmp(&b)));
                assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), order[..n.into()]);
                assert!(top.iter().all(|&(id, lp)| close(lp, want[id as usize])));
                seen += 1;
            }
        }
        assert_eq!(seen, 9);
    }
}

#[test]
fn a_text_does_not_end_before_min_tokens() {
    let mut engine = engine(&EngineOptions::default());
    let request = Request { prompt: prompt(9), max_tokens: 30, ..Request::default() };
    let (plain, _) = run(&mut engine, request.clone());
    // Biased so that it always comes.
    let stop = plain[0];
    for min_tokens in [0, 1, 7, 30] {
        let controls = Controls { min_tokens, logit_bias: vec![(stop, 100.0)], ..Controls::default() };
        let (tokens, end) = run(&mut engine, Request { controls, stop_ids: vec![stop], ..request.clone() });
        let expected = if min_tokens == 30 { FinishReason::Length } else { FinishReason::Stop };
        assert_eq!((tokens.len(), end.reason), ((min_tokens + 1).min(30), expected));
        assert_eq!(tokens.iter().position(|id| *id == stop).unwrap_or(30), min_tokens);
    }
}

/// Runs several requests at once; the tokens and the end of each.
fn together(requests: Vec<Request>) -> Vec<(Vec<u32>, Finished)> {
    let mut engine = engine(&EngineOptions::default());
    let ids: Vec<SeqId> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut found: Vec<(Vec<u32>, Option<Finished>)> = ids.iter().map(|_| (Vec::new(), None)).collect();
    while !engine.is_idle() {
        for event in block_on(engine.step()).unwrap() {
            let (Event::Token { id, .. } | Event::Finished(Finished { id, .. })) = &event;
            let of = &mut found[ids.iter().position(|other| other == id).unwrap()];
            match event {
                Event::Token { token, .. } => of.0.push(token),
                Event::Finished(end) => of.1 = Some(end),
            }
        }
    }
    found.into_iter().map(|(tokens, end)| (tokens, end.unwrap())).collect()
}

#[test]
fn constraints_say_what_comes_and_when_it_ends() {
    let plain = Request { prompt: prompt(9), max_tokens: 12, ..Request::default() };
    let alone = together(vec![plain.clone()]).remove(0).0;
    let script =
        |tokens: &[u32], ends| Request { constraint: Some(Script::boxed(tokens, ends, &log())), ..plain.clone() };
    let narrow = Controls { allowed_tokens: Some(vec![5, 6]), ..Controls::default() };
    let found = together(vec![
        script(&[7, 300, 7], true),
        plain.clone(),
        script(&[7, 300], false),
        Request { stop_ids: vec![300], ..script(&[7, 300, 8], true) },
        script(&[7, 13, 9], true),
        Request { controls: narrow, ..script(&[5, 7], true) },
        Request {
            controls: Controls { min_tokens: 2, ..Controls::default() },
            stop_ids: vec![8],
            ..script(&[8], true)
        },
        plain.clone(),
    ]);
    let ends: Vec<_> = found.iter().map(|(tokens, end)| (&tokens[..], end.reason)).collect();
    use FinishReason::{Failed, Length, Stop};
    assert_eq!(ends[0], (&[7, 300, 7][..], Stop));
    assert_eq!(ends[1], (&alone[..], Length));
    assert_eq!(ends[2], (&[7, 300][..], Failed));
    assert_eq!(ends[3], (&[7, 300][..], Stop));
    assert_eq!(ends[4], (&[7, 13][..], Failed));
    assert_eq!(ends[5], (&[5][..], Failed));
    assert_eq!(ends[6], (&[][..], Failed));
    assert_eq!(ends[7], (&alone[..], Length));
    assert!(error(&found[2].1).starts_with("the constraint allows no token"), "{}", error(&found[2].1));
    assert_eq!(error(&found[4].1), "13 is no lucky number");
    assert!(error(&found[5].1).contains("the list of allowed tokens"), "{}", error(&found[5].1));
    assert!(error(&found[6].1).contains("min_tokens"), "{}", error(&found[6].1));
}

/// Beside a request with rules, so that every step has the ops for them.
#[test]
fn a_request_that_ends_leaves_nothing_behind() {
    let mut engine = engine(&EngineOptions { max_batch: 2, ..EngineOptions::default() });
    let plain = Request { prompt: prompt(9), max_tokens: 12, ..Request::default() };
    let (alone, _) = run(&mut engine, plain.clone());
    let log = log();
    let harsh = Controls { frequency_penalty: 2.0, logit_bias: vec![(alone[0], -100.0)], ..Controls::default() };
    let neighbour = Request { controls: harsh.clone(), max_tokens: 500, ..plain.clone() };
    engine.submit(neighbour).unwrap();
    let script = Request { constraint: Some(Script::boxed(&[7; 100], false, &log)), ..plain.clone() };
    for request in [script, Request { controls: harsh, ..plain.clone() }] {
        let id = engine.submit(request).unwrap();
        for _ in 0..3 {
            block_on(engine.step()).unwrap();
        }
        engine.cancel(id);
        assert_eq!(Arc::strong_count(&log), 1, "the constraint is still there");
        // In the same lane.
        let id = engine.submit(plain.clone()).unwrap();
        let (mut tokens, mut ended) = (Vec::new(), false);
        while !ended {
            for event in block_on(engine.step()).unwrap() {
                match event {
                    Event::Token { id: of, token, .. } if of == id => tokens.push(token),
                    Event::Finished(end) => ended |= end.id == id,
                    Event::Token { .. } => {}
                }
            }
        }
        assert_eq!(tokens, alone);
    }
}

#[test]
fn impossible_rules_are_refused() {
    let mut engine = engine(&EngineOptions::default());
    let none = Controls::default;
    for (controls, expected) in [
        (Controls { logprobs: Some(21), ..none() }, "logprobs is 21; it must be from 0 to 20"),
        (Controls { presence_penalty: 2.1, ..none() }, "presence penalty is 2.1; it must be from -2 to 2"),
        (Controls { frequency_penalty: f32::NAN, ..none() }, "frequency penalty is NaN"),
        (
            Controls { logit_bias: vec![(320, 1.0)], ..none() },
            "logit bias: token id 320 is outside the vocabulary of 320",
        ),
        (Controls { logit_bias: vec![(3, -101.0)], ..none() }, "the logit bias of token 3 is -101"),
        (Controls { logit_bias: vec![(3, 1.0), (4, 1.0), (3, 2.0)], ..none() }, "logit bias: token 3 is there twice"),
        (Controls { min_tokens: 6, ..none() }, "min_tokens is 6, more than the 5 tokens of max_tokens"),
        (Controls { allowed_tokens: Some(vec![]), ..none() }, "allowed tokens: the list is empty"),
        (Controls { allowed_tokens: Some(vec![400]), ..none() }, "allowed tokens: token id 400 is outside"),
        (
            Controls { allowed_tokens: Some(vec![9]), min_tokens: 1, ..none() },
            "allowed tokens: all of them end the text",
        ),
    ] {
        let request = Request { prompt: prompt(3), max_tokens: 5, stop_ids: vec![9], controls, ..Request::default() };
        let why = engine.submit(request).unwrap_err().to_string();
        assert!(why.starts_with(expected), "{why}");
    }
    assert!(engine.is_idle());
}

/// A step without rules is one tape and needs no memory of its own; one with a constraint is two, and the mask is made from the last id
/// after the device got the forward pass.
#[test]
fn only_rules_cost_anything() {
    let log = log();
    let mut engine = engine_on(Behind::logged(log.clone()), &EngineOptions::default());
    let mut steps = |request: Request| {
        engine.submit(request).unwrap();
        let mut steps = Vec::new();
        while !engine.is_idle() {
            log.lock().unwrap().clear();
            block_on(engine.step()).unwrap();
            steps.push(log.lock().unwrap().clone());
        }
        steps
    };
    let plain = Request { prompt: prompt(9), max_tokens: 6, ..Request::default() };
    let all = steps(plain.clone());
    assert_eq!(all[0], ["write", "write", "write", "run", "read"]);
    assert_eq!(all[3], ["write", "play", "read"]);
    let script = Request { constraint: Some(Script::boxed(&[7; 9], false, &log)), ..plain.clone() };
    assert_eq!(steps(script)[3], ["write", "play", "commit", "mask", "write", "play", "read"]);
    // The lane's rules are taken back once.
    assert_eq!(steps(plain.clone())[0], ["write", "write", "write", "write", "run", "read"]);
    let again = steps(plain);
    assert_eq!((&again[0], &again[3]), (&all[0], &all[3]));
}
