use proptest::{prelude::*, test_runner::TestRng};
use serde_json::Map;

use super::*;
use crate::{
    config::parse_object,
    reply::{Event, Format, Parser, Start, Tools},
};

const TOKENIZER: &[u8] = include_bytes!("../../models/demo/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../../models/demo/tokenizer_config.json");

struct Model {
    tokenizer: Arc<Tokenizer>,
    grammars: Grammars,
    bytes: Vec<Vec<u8>>,
    end: u32,
}

fn model() -> Model {
    let tokenizer = Tokenizer::new("tokenizer.json", TOKENIZER, Some(&parse_object("c", CONFIG).unwrap())).unwrap();
    let tokenizer = Arc::new(tokenizer);
    let vocab = tokenizer.vocab_size() + 5;
    let end = tokenizer.token_id("<|end|>").unwrap();
    let grammars = Grammars::new(&tokenizer, vocab, &[end]).unwrap();
    let bytes = tokenizer.token_bytes(vocab);
    Model { tokenizer, grammars, bytes, end }
}

impl Model {
    fn allowed(&self, matcher: &mut Matcher) -> Vec<u32> {
        let mut mask = vec![0; self.bytes.len().div_ceil(32)];
        matcher.mask(&mut mask).unwrap();
        let set = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let allowed: Vec<u32> = (0..self.bytes.len() as u32).filter(set).collect();
        assert!(!allowed.is_empty() || matcher.is_over());
        assert_eq!(allowed.len(), mask.iter().map(|word| word.count_ones() as usize).sum::<usize>());
        allowed
    }

    /// The text of a random walk through the mask. After a while it takes short ways to the end.
    fn walk(&self, mut matcher: Matcher, rng: &mut TestRng) -> String {
        let mut text = Vec::new();
        // Free text in XML ends with its tag only.
        let tag = self.tokenizer.encode_plain("\n</parameter>\n").unwrap();
        for step in 0..5000 {
            let allowed = self.allowed(&mut matcher);
            if step > 60 && allowed.len() > self.bytes.len() / 2 && allowed.contains(&tag[0]) {
                for id in &tag {
                    text.extend_from_slice(&self.bytes[*id as usize]);
                    matcher.commit(*id).unwrap();
                }
                continue;
            }
            if allowed.contains(&self.end) && (step > 60 || allowed.len() == 1 || rng.random_range(0..4) == 0) {
                return String::from_utf8(text).unwrap();
            }
            let words: Vec<u32> = allowed.into_iter().filter(|id| *id != self.end).collect();
            let closes = |id: &&u32| {
                let bytes = &self.bytes[**id as usize];
                bytes.iter().all(|b| b"\"}])>/".contains(b)) || (step % 3 == 0 && bytes.iter().all(u8::is_ascii_digit))
            };
            let closing: Vec<u32> = words.iter().filter(closes).copied().collect();
            let from = if step > 60 && !closing.is_empty() { closing } else { words };
            let id = from[rng.random_range(0..from.len())];
            assert!(!self.bytes[id as usize].is_empty(), "token {id} has no text");
            text.extend_from_slice(&self.bytes[id as usize]);
            matcher.commit(id).unwrap();
            if matcher.is_over() {
                return String::from_utf8(text).unwrap();
            }
        }
        panic!("no end: {}", String::from_utf8_lossy(&text));
    }

    /// Whether a text is allowed as a whole, token by token.
    fn takes(&self, structure: &Structure, lead: Lead, text: &str) -> bool {
        let mut matcher = self.grammars.matcher(structure, lead).unwrap();
        for id in self.tokenizer.encode_plain(text).unwrap() {
            if matcher.is_over() || !self.allowed(&mut matcher).contains(&id) {
                return false;
            }
            matcher.commit(id).unwrap();
        }
        matcher.may_end()
    }
}

/// Whether a value is one of a schema of the kinds that [`schemas`] makes.
fn fits(value: &Value, schema: &Value) -> bool {
    if let Some(list) = schema.get("enum").and_then(Value::as_array) {
        return list.contains(value);
    }
    if let Some(list) = schema.get("anyOf").and_then(Value::as_array) {
        return list.iter().any(|schema| fits(value, schema));
    }
    let at_least = |key: &str, n: usize| schema.get(key).and_then(Value::as_u64).is_none_or(|least| n as u64 >= least);
    let at_most = |key: &str, n: usize| schema.get(key).and_then(Value::as_u64).is_none_or(|most| n as u64 <= most);
    match (schema["type"].as_str().unwrap(), value) {
        ("string", Value::String(text)) => at_most("maxLength", text.chars().count()),
        ("integer", Value::Number(n)) => n.as_f64().unwrap().fract() == 0.0,
        ("number", Value::Number(_)) | ("boolean", Value::Bool(_)) | ("null", Value::Null) => true,
        ("array", Value::Array(list)) => {
            list.iter().all(|item| fits(item, &schema["items"]))
                && at_least("minItems", list.len())
                && at_most("maxItems", list.len())
        }
        ("object", Value::Object(map)) => {
            let properties = schema["properties"].as_object().unwrap();
            let required = schema["required"].as_array().unwrap();
            required.iter().all(|key| map.contains_key(key.as_str().unwrap()))
                && map.iter().all(|(key, value)| properties.get(key).is_some_and(|schema| fits(value, schema)))
        }
        _ => false,
    }
}

fn schemas() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        (1..20u32).prop_map(|n| json!({ "type": "string", "maxLength": n })),
        Just(json!({ "type": "integer" })),
        Just(json!({ "type": "number" })),
        Just(json!({ "type": "boolean" })),
        Just(json!({ "type": "null" })),
        Just(json!({ "enum": ["a", "b \"c\" é", 7, null] })),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            (inner.clone(), 0..3u32, 0..3u32)
                .prop_map(|(items, a, b)| json!({ "type": "array", "items": items, "minItems": a, "maxItems": a + b })),
            proptest::collection::vec(inner.clone(), 1..3).prop_map(|list| json!({ "anyOf": list })),
            proptest::collection::vec((inner, any::<bool>()), 0..4).prop_map(|list| {
                let names = ["x", "a_long_name", "é", "with \"quotes\""];
                let of = |i: usize| names[i].to_owned();
                let properties: Map<String, Value> =
                    list.iter().enumerate().map(|(i, (schema, _))| (of(i), schema.clone())).collect();
                let required: Vec<String> = (0..list.len()).filter(|i| list[*i].1).map(of).collect();
                json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
            }),
        ]
    })
}

#[test]
fn random_walks_through_random_schemas_end_in_valid_json() {
    let model = model();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let run = (schemas(), Just(()).prop_perturb(|(), rng| rng));
    let result = runner.run(&run, |(schema, mut rng)| {
        let matcher = model.grammars.matcher(&Structure::Schema(schema.clone()), Lead::None).unwrap();
        let text = model.walk(matcher, &mut rng);
        let valid = serde_json::from_str::<&serde_json::value::RawValue>(&text);
        valid.map_err(|e| TestCaseError::fail(format!("{schema}: {text}: {e}")))?;
        // A number may be too large for a value.
        let Ok(value) = serde_json::from_str(&text) else { return Ok(()) };
        prop_assert!(fits(&value, &schema), "{schema}: {text}");
        Ok(())
    });
    result.unwrap();
}

#[test]
fn every_kind_of_structure() {
    let model = model();
    let none = Lead::None;
    let list = json!({ "type": "array", "items": { "$ref": "#/$defs/n" }, "$defs": { "n": { "type": "integer" } } });
    for (structure, good, bad) in [
        (Structure::Schema(list), "[1, 22,-3]", "[1, \"a\"]"),
        (Structure::JsonObject, "{\"a\": [1, {\"b\": null}]}", "[1]"),
        (Structure::Regex("[a-c]+/\\d{2}".into()), "abc/42", "abc/4"),
        (Structure::Choice(vec!["yes \"é\"".into(), "no".into()]), "yes \"é\"", "yes"),
        (Structure::Lark("start: WORD (\", \" WORD)*\nWORD: /[a-z]+/".into()), "a, bc", "a,bc"),
    ] {
        assert!(model.takes(&structure, none, good), "{structure:?}");
        assert!(!model.takes(&structure, none, bad), "{structure:?}");
        // Reasoning comes before it, with any text.
        let think = Lead::Reasoning(Reasoning::Think);
        assert!(model.takes(&structure, think, good), "{structure:?}");
        assert!(model.takes(&structure, think, &format!("<think>\nhm {bad}\n</think>\n\n{good}")), "{structure:?}");
        assert!(!model.takes(&structure, think, "??"), "{structure:?}");
        assert!(!model.takes(&structure, think, &format!("<think>a</think>{bad}")), "{structure:?}");
        assert!(model.takes(&structure, Lead::RestOfReasoning, &format!("hm</think>{good}")), "{structure:?}");
        assert!(!model.takes(&structure, Lead::RestOfReasoning, good), "{structure:?}");
    }
    // The end is known as soon as nothing can follow, and a copy goes its own way.
    let mut matcher = model.grammars.matcher(&Structure::Choice(vec!["yes".into(), "no".into()]), none).unwrap();
    let mut copy = matcher.boxed_clone();
    for id in model.tokenizer.encode_plain("yes").unwrap() {
        assert!(!matcher.is_over());
        matcher.commit(id).unwrap();
    }
    assert!(matcher.is_over());
    assert_eq!(model.allowed(&mut matcher), [model.end]);
    for id in model.tokenizer.encode_plain("no").unwrap() {
        copy.commit(id).unwrap();
    }
    assert!(copy.is_over());
}

#[test]
fn a_token_that_is_not_allowed_is_an_error() {
    let model = model();
    let mut matcher = model.grammars.matcher(&Structure::JsonObject, Lead::None).unwrap();
    let id = model.tokenizer.encode_plain("x").unwrap()[0];
    let e = matcher.commit(id).unwrap_err();
    assert!(e.to_string().contains("cannot follow its grammar"), "{e}");
}

#[test]
fn faults_are_named() {
    let model = model();
    let deep = |n: usize| (0..n).fold(json!({ "type": "null" }), |inner, _| json!({ "type": "array", "items": inner }));
    for (structure, why) in [
        (Structure::Schema(json!({ "type": "strin" })), "strin"),
        (Structure::Schema(json!({ "type": "string", "pattern": "(" })), "the JSON schema cannot be followed"),
        (Structure::Schema(json!({ "$ref": "#/$defs/none" })), "none"),
        (Structure::Schema(json!([1])), "not an object"),
        (Structure::Schema(deep(100)), "64 levels"),
        (Structure::Regex("a(b".into()), "the regular expression cannot be followed"),
        (Structure::Regex("(".repeat(100_000)), "100 levels"),
        (Structure::Choice(vec![]), "empty"),
        (Structure::Lark("start: nothing".into()), "nothing"),
        (Structure::Lark("x".repeat(MAX_BYTES + 1)), "bytes"),
    ] {
        let started = std::time::Instant::now();
        let e = model.grammars.matcher(&structure, Lead::None).err().unwrap_or_else(|| panic!("{why}"));
        assert!(matches!(&e, Error::BadRequest(text) if text.contains(why) && text.len() < 600), "{e}");
        assert!(started.elapsed().as_secs() < 20, "{why}");
    }
}

/// Each is refused or followed, in bounded time.
#[test]
fn hostile_structures_take_bounded_time() {
    let model = model();
    let wide: Map<String, Value> = (0..5000).map(|i| (format!("k{i}"), json!({ "type": "string" }))).collect();
    let mut doubled = json!({ "type": "string" });
    for _ in 0..30 {
        doubled = json!({ "anyOf": [doubled.clone(), { "type": "array", "items": { "$ref": "#" } }] });
    }
    for structure in [
        Structure::Regex("(a{1000}){1000}{1000}".into()),
        Structure::Regex("(.*a){40}[ab]{200}".into()),
        Structure::Regex("(a|b|ab)*c{50000}".into()),
        Structure::Schema(json!({ "type": "object", "properties": wide })),
        Structure::Schema(doubled),
        Structure::Schema(json!({ "type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 100_000 })),
        Structure::Schema(json!({ "type": "array", "minItems": 1_000_000, "items": { "type": "integer" } })),
        Structure::Schema(json!({ "$ref": "#" })),
        Structure::Lark("start: a\na: a a | \"x\" |".into()),
        Structure::Choice((0..20_000).map(|i| format!("choice {i}")).collect()),
    ] {
        let started = std::time::Instant::now();
        if let Ok(mut matcher) = model.grammars.matcher(&structure, Lead::None) {
            let mut mask = vec![0; model.bytes.len().div_ceil(32)];
            for _ in 0..20 {
                mask.fill(0);
                if matcher.is_over() || matcher.mask(&mut mask).is_err() {
                    break;
                }
                let Some(id) = (0..model.bytes.len() as u32).find(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
                else {
                    break;
                };
                if matcher.commit(id).is_err() {
                    break;
                }
            }
        }
        let shown: String = format!("{structure:?}").chars().take(80).collect();
        assert!(started.elapsed().as_secs() < 20, "{shown}");
    }
}

fn tools() -> Vec<Value> {
    let weather = json!({ "type": "object", "properties": {
        "city": { "type": "string" }, "unit": { "enum": ["C", "F"] }, "days": { "$ref": "#/$defs/n" } },
        "required": ["city"], "additionalProperties": false, "$defs": { "n": { "type": "integer" } } });
    vec![
        json!({ "type": "function", "function": { "name": "get_weather", "parameters": weather } }),
        json!({ "type": "function", "function": { "name": "get_time" } }),
    ]
}

/// The calls of an answer, which has nothing else but white space unless `text`.
fn calls(format: CallFormat, answer: &str, text: bool) -> Vec<(String, Value)> {
    let format = Format { calls: Some(format), reasoning: None };
    let mut parser = Parser::new(&format, Tools::new(&tools()), Start::default());
    let mut events = parser.push(answer);
    events.extend(parser.finish());
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            Event::CallStarted { name, .. } => calls.push((name, String::new())),
            Event::Arguments { text, .. } => calls.last_mut().unwrap().1 += &text,
            Event::CallEnded { .. } => {}
            other => assert!(text, "{other:?} in {answer:?}"),
        }
    }
    calls.into_iter().map(|(name, arguments)| (name, serde_json::from_str(&arguments).unwrap())).collect()
}

#[test]
fn required_calls_are_calls_in_every_format() {
    let model = model();
    for format in CallFormat::ALL {
        for many in [false, true] {
            let structure = Structure::Calls { format, tools: tools(), many, optional: false };
            let mut most = 0;
            for seed in 0..20u8 {
                let mut rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &[seed; 32]);
                let matcher = model.grammars.matcher(&structure, Lead::None).unwrap();
                let answer = model.walk(matcher, &mut rng);
                let calls = calls(format, &answer, false);
                most = most.max(calls.len());
                assert!(!calls.is_empty() && (many || calls.len() == 1), "{answer}");
                for (name, arguments) in calls {
                    assert!(["get_weather", "get_time"].contains(&&*name), "{answer}");
                    assert!(name != "get_weather" || arguments["city"].is_string(), "{answer}");
                    assert!(arguments.get("days").is_none_or(Value::is_i64), "{answer}");
                }
            }
            assert_eq!(most > 1, many, "{format:?}");
        }
    }
}

#[test]
fn optional_calls_let_text_pass_and_bind_calls() {
    let model = model();
    for format in CallFormat::ALL {
        let structure = Structure::Calls { format, tools: tools(), many: true, optional: true };
        let takes = |text: &str| model.takes(&structure, Lead::None, text);
        let (open, close) = format.tags();
        assert!(takes("Just text, with <b>tags</b> [x]."), "{format:?}");
        assert!(!takes(&format!("Look: {open}nothing{close}")), "{format:?}");
        let call = match format {
            CallFormat::Hermes => "\n{\"name\": \"get_time\", \"arguments\": {}}\n",
            CallFormat::Jamba => "[\n    {\"name\": \"get_time\", \"arguments\": {}}\n]",
            CallFormat::Xml => "\n<function=get_time>\n</function>\n",
            CallFormat::Python => "[get_time()]",
            CallFormat::Kimi => {
                "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            }
        };
        let text = format!("Look: {open}{call}{close} So.");
        assert!(takes(&text), "{format:?}");
        assert_eq!(calls(format, &text, true).len(), 1);
    }
}

#[test]
fn special_tokens_are_marks() {
    // The demo's `<|user|>` is a special token: its text is no way to write it.
    let model = model();
    let structure = Structure::Lark("start: \"a\" <|user|> \"b\"".into());
    assert!(!model.takes(&structure, Lead::None, "a<|user|>b"));
    let mut matcher = model.grammars.matcher(&structure, Lead::None).unwrap();
    for id in [model.tokenizer.encode_plain("a").unwrap()[0], model.tokenizer.token_id("<|user|>").unwrap()] {
        assert!(model.allowed(&mut matcher).contains(&id));
        matcher.commit(id).unwrap();
    }
    assert!(!matcher.may_end());
}

#[test]
fn forced_text_is_guessed_in_tokens_and_masks_stay_as_they_are() {
    let model = model();
    let schema = json!({
        "type": "object",
        "properties": { "little_kingdom": { "const": "by the sea" }, "size": { "type": "integer" } },
        "required": ["little_kingdom", "size"],
        "additionalProperties": false
    });
    let mut matcher = model.grammars.matcher(&Structure::Schema(schema), Lead::None).unwrap();
    let mut asked = matcher.inner.deep_clone();
    let mut guessed = 0;
    let text = r#"{"little_kingdom": "by the sea", "size": 42}"#;
    for id in model.tokenizer.encode_plain(text).unwrap() {
        let mut ahead = matcher.ahead();
        let forced = ahead.forced(7);
        assert_eq!(ahead.allowed(&forced), forced.len());
        assert!(matcher.forced(2).len() <= 2);
        guessed += usize::from(forced.first() == Some(&id));
        let mask = asked.compute_mask().unwrap();
        let allowed = model.allowed(&mut matcher);
        assert!(allowed.iter().all(|id| mask.is_allowed(*id)), "a mask has changed");
        assert_eq!(allowed.len(), (0..model.bytes.len() as u32).filter(|id| mask.is_allowed(*id)).count());
        matcher.commit(id).unwrap();
        asked.consume_token(id).unwrap();
    }
    assert!(guessed > 8, "{guessed} tokens guessed");
    assert!(matcher.is_over() && matcher.forced(7).is_empty());
}

#[test]
fn only_tokens_that_may_come_are_allowed() {
    let model = model();
    let mut matcher = model.grammars.matcher(&Structure::Regex("(yes|no), thank you".into()), Lead::None).unwrap();
    let right = model.tokenizer.encode_plain("no, thank you").unwrap();
    assert_eq!(matcher.allowed(&right), right.len());
    let wrong = [&right[..2], &right[..1]].concat();
    assert_eq!(matcher.allowed(&wrong), 2);
    assert_eq!(matcher.allowed(&[]), 0);
    // Nothing was taken.
    assert_eq!(matcher.allowed(&right), right.len());
    assert!(matcher.forced(7).is_empty());
}
