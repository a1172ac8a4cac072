//! Structured output with drafts: the same answers in fewer steps.

use std::{path::Path, sync::Arc};

use pollster::block_on;
use selkie_core::{
    engine::{DraftStats, Drafter, EngineOptions, Event, FinishReason, Finished, Request, Speculate},
    grammar::{Grammars, Lead, Matcher, Structure},
    sample::Sampling,
    tokenizer::Tokenizer,
};
use serde_json::{Value, json};

use crate::{models::TestModel, promise::Output};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");

/// Guesses nothing, so that all drafts are those of the constraint.
struct Silent;

impl Drafter for Silent {
    fn draft(&mut self, _: &[u32], _: usize) -> Vec<u32> {
        Vec::new()
    }
    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(Self)
    }
}

/// The demo model with its tokenizer.
struct Demo {
    model: TestModel,
    tokenizer: Arc<Tokenizer>,
    end: u32,
}

impl Demo {
    fn open() -> Self {
        let read = |name: &str| std::fs::read(Path::new(DEMO).join(name)).unwrap();
        let config = serde_json::from_slice(&read("tokenizer_config.json")).unwrap();
        let tokenizer = Arc::new(Tokenizer::new("tokenizer.json", &read("tokenizer.json"), Some(&config)).unwrap());
        let end = tokenizer.token_id("<|end|>").unwrap();
        Self { model: TestModel::golden(Path::new(DEMO)).unwrap(), tokenizer, end }
    }

    fn matcher(&self, schema: &Value) -> Matcher {
        let grammars = Grammars::new(&self.tokenizer, self.model.architecture.spec().vocab, &[self.end]).unwrap();
        grammars.matcher(&Structure::Schema(schema.clone()), Lead::None).unwrap()
    }

    /// A request for an object whose keys and some of whose values the schema forces.
    fn request(&self, temperature: f32, seed: u64) -> Request {
        let schema = json!({
            "type": "object",
            "properties": {
                "temperature_of_the_water": { "type": "integer" },
                "is_it_windy_today": { "type": "boolean" },
                "description_of_the_weather": { "enum": ["sunny and warm all day", "rainy and cold all night"] },
                "country": { "const": "the little kingdom by the sea" }
            },
            "required": ["temperature_of_the_water", "is_it_windy_today", "description_of_the_weather", "country"],
            "additionalProperties": false
        });
        Request {
            prompt: self.tokenizer.encode_plain("Tell me about the weather.").unwrap(),
            max_tokens: 200,
            sampling: Sampling { temperature, seed, ..Sampling::default() },
            stop_ids: vec![self.end],
            constraint: Some(Box::new(self.matcher(&schema))),
            drafter: Some(Box::new(Silent)),
            ..Request::default()
        }
    }

    /// Answers to requests that run together, the steps that they took, and the drafts.
    fn answers(&self, speculate: Speculate, late: bool) -> (Vec<Output>, u64, DraftStats) {
        let options = EngineOptions { context: Some(512), logits: true, speculate, ..EngineOptions::default() };
        let mut engine = self.model.engine(&options, late);
        let requests = [(0.0, 0), (1.0, 1), (1.0, 2)];
        let ids = requests.map(|(temperature, seed)| engine.submit(self.request(temperature, seed)).unwrap());
        let mut found = vec![Output::default(); ids.len()];
        while !engine.is_idle() {
            engine.poison_free().unwrap();
            for event in block_on(engine.step()).unwrap() {
                let (Event::Token { id, .. } | Event::Finished(Finished { id, .. })) = &event;
                let at = ids.iter().position(|other| other == id).unwrap();
                found[at].take(event);
            }
        }
        engine.scheduler().audit().unwrap();
        let stats = engine.stats();
        (found, stats.steps, stats.drafts)
    }
}

#[test]
fn forced_text_takes_fewer_steps_and_changes_no_answer() {
    let demo = Demo::open();
    let (right, steps, none) = demo.answers(Speculate::Off, false);
    assert_eq!(none.tokens, 0);
    for output in &right {
        let text = demo.tokenizer.decode(&output.0).unwrap();
        let value: Value = serde_json::from_str(text.trim_end_matches("<|end|>")).unwrap();
        assert_eq!(value["country"], "the little kingdom by the sea", "{text}");
        assert_eq!(output.3, Some(FinishReason::Stop));
    }
    // The demo model has read no such text and often writes it in other tokens than those guessed.
    for (speculate, late, saved) in [
        (Speculate::Ngram, false, steps / 4),
        (Speculate::Ngram, true, steps / 4),
        (Speculate::Auto, false, 10),
        (Speculate::Auto, true, 10),
    ] {
        let (found, fewer, drafts) = demo.answers(speculate, late);
        let label = format!("{speculate:?}, late {late}: {fewer} steps instead of {steps}, {drafts:?}");
        assert!(found == right, "{label}: another answer");
        assert!(drafts.accepted() > 40 && fewer + saved < steps, "{label}");
    }
}
