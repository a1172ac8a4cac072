//! Structured output: which tokens may come next, by a JSON schema, a regular expression, a list of choices, a grammar in Lark's
//! language, or the calls of tools in a model's own format.
//!
//! [`Grammars`] holds what depends on the tokenizer only and is made once per model. A [`Matcher`] belongs to one answer. Both are
//! made outside of the engine's thread: a large schema takes tens of milliseconds. Grammars are not trusted: their nesting and
//! size are bounded here, the work of one token by llguidance's limits.

mod calls;

use std::{collections::HashSet, sync::Arc};

use llguidance::{
    ParserFactory,
    api::{GrammarWithLexer, TopLevelGrammar},
    toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv},
};
use serde_json::{Value, json};

use crate::{
    Error, Result,
    controls::Constraint,
    reply::{CallFormat, Reasoning},
    survive::survived,
    tokenizer::Tokenizer,
};

/// Most bytes of a grammar's text.
const MAX_BYTES: usize = 1 << 20;
/// Deepest nesting of brackets in a grammar or a regular expression.
const MAX_DEPTH: usize = 100;
/// Deepest nesting of a schema.
const MAX_SCHEMA_DEPTH: usize = 64;
/// White space between two tokens of JSON: that of one line, or a new line with its indentation. Without a bound, weak models
/// write nothing else any more.
const WHITE_SPACE: &str = r" |\n[ \t]{0,16}";
/// Bytes of forced text that are tokenised for each token that is guessed.
const FORCED_BYTES: usize = 32;
/// Longest reason of a fault in characters.
const MAX_WHY: usize = 400;
/// Stack of the thread that compiles, in bytes: descent is recursive.
#[cfg(not(target_arch = "wasm32"))]
const STACK: usize = 64 << 20;

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Structure {
    /// JSON of this schema.
    Schema(Value),
    /// Any object of JSON.
    JsonObject,
    /// A text that matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, whose rule `start` is the whole.
    Lark(String),
    /// Calls of tools in OpenAI's form, at least one.
    Calls {
        /// How the model writes them.
        format: CallFormat,
        /// The tools to choose from.
        tools: Vec<Value>,
        /// Whether there may be several.
        many: bool,
        /// Text may come before, between and after calls, and there may be none.
        optional: bool,
    },
    /// One of these two.
    Either(Box<Structure>, Box<Structure>),
}

/// What may come before the structure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lead {
    /// Nothing.
    #[default]
    None,
    /// Reasoning, if the model begins it.
    Reasoning(Reasoning),
    /// The rest of reasoning that the prompt has begun.
    RestOfReasoning,
}

/// The tokens of a model, prepared for grammars.
pub struct Grammars {
    factory: ParserFactory,
    /// Texts of special tokens.
    specials: HashSet<String>,
    vocab: usize,
}

/// The state of one answer.
pub struct Matcher {
    inner: llguidance::Matcher,
    vocab: usize,
    /// The token committed last.
    last: Option<u32>,
}

/// The tokens and the tokenizer of a model.
struct Tokens {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let encode = |text: &str| self.tokenizer.encode_plain(text).unwrap_or_default();
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    /// Otherwise masks would force these tokens where others are as good, and they would do so before the model was asked.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Grammars {
    /// For a model with logits of `vocab` tokens, whose texts end with one of `stop_ids`.
    ///
    /// # Errors
    /// [`Error::BadModel`] if the tokenizer's tokens cannot be used.
    pub fn new(tokenizer: &Arc<Tokenizer>, vocab: usize, stop_ids: &[u32]) -> Result<Self> {
        let bad = |why: &dyn std::fmt::Display| {
            Error::model(tokenizer.file(), format!("its tokens cannot be used for structured output: {why}"))
        };
        let mut words = tokenizer.token_bytes(vocab);
        for (id, text) in tokenizer.special_tokens().filter(|(id, _)| (*id as usize) < vocab) {
            words[id as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
        }
        let mut ends: Vec<u32> = stop_ids.iter().copied().filter(|id| (*id as usize) < vocab).collect();
        for id in &ends {
            if tokenizer.special_text(*id).is_none() {
                words[*id as usize].clear();
            }
        }
        if ends.is_empty() {
            // A place beyond the vocabulary, which no mask shows.
            ends.push(vocab as u32);
            words.push(Vec::new());
        }
        let made = survived(|| {
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, ends[0]), &words).with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(Tokens { trie, tokenizer: tokenizer.clone() });
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
        });
        let mut factory = made.ok_or_else(|| bad(&"they contradict each other"))?.map_err(|e| bad(&e))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let specials = tokenizer.special_tokens().map(|(_, text)| text.to_owned()).collect();
        Ok(Self { factory, specials, vocab })
    }

    /// The matcher of an answer.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the structure is wrong or too large, naming its fault.
    pub fn matcher(&self, structure: &Structure, lead: Lead) -> Result<Matcher> {
        let what = structure.name();
        let refuse = |why: &str| {
            let why: String = why.trim().chars().take(MAX_WHY).collect();
            Error::BadRequest(format!("{what} cannot be followed: {why}"))
        };
        structure.check().map_err(|why| refuse(&why))?;
        let grammar = self.grammar(structure, lead);
        let inner = on_own_stack(|| {
            let made = llguidance::Matcher::new(self.factory.create_parser(grammar));
            match made.get_error() {
                Some(why) => Err(why),
                None => Ok(made),
            }
        })
        .map_err(|why| refuse(&why))?;
        Ok(Matcher { inner, vocab: self.vocab, last: None })
    }

    fn grammar(&self, structure: &Structure, lead: Lead) -> TopLevelGrammar {
        let mut answers = Vec::new();
        let start = self.alternatives(structure, &mut answers);
        if lead == Lead::None && answers.len() == 1 {
            return TopLevelGrammar { grammars: answers, max_tokens: None };
        }
        let reasoning = match lead {
            Lead::None => None,
            Lead::Reasoning(reasoning) => Some(reasoning),
            Lead::RestOfReasoning => Some(Reasoning::Think),
        };
        let lark = match reasoning.map(Reasoning::tags) {
            None => format!("start: {start}\n"),
            Some((open, close)) => {
                let thought = match lead {
                    Lead::RestOfReasoning => "thought GAP".to_owned(),
                    _ => format!("({} thought GAP)?", self.mark(open)),
                };
                let rule = up_to("thought", &self.mark(close));
                format!("start: {thought} ({start})\nGAP: /\\s{{0,4}}/\n{rule}")
            }
        };
        answers.insert(0, GrammarWithLexer::from_lark(lark));
        TopLevelGrammar { grammars: answers, max_tokens: None }
    }

    /// The grammars of a structure, with names, and the expression that chooses between them.
    fn alternatives(&self, structure: &Structure, all: &mut Vec<GrammarWithLexer>) -> String {
        if let Structure::Either(one, other) = structure {
            return format!("{} | {}", self.alternatives(one, all), self.alternatives(other, all));
        }
        let name = format!("answer{}", all.len());
        let reference = format!("@{name}");
        all.push(GrammarWithLexer { name: Some(name), ..self.single(structure) });
        reference
    }

    /// The grammar of a structure that is no choice of several.
    fn single(&self, structure: &Structure) -> GrammarWithLexer {
        match structure {
            Structure::Schema(schema) => GrammarWithLexer::from_json_schema(tidy(schema)),
            Structure::JsonObject => GrammarWithLexer::from_json_schema(tidy(&json!({ "type": "object" }))),
            Structure::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Structure::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                GrammarWithLexer::from_lark(format!("start: {}\n", texts.join(" | ")))
            }
            Structure::Lark(text) => GrammarWithLexer::from_lark(text.clone()),
            Structure::Calls { format, tools, many, optional } => {
                GrammarWithLexer::from_lark(calls::lark(*format, tools, *many, *optional, &|text| self.mark(text)))
            }
            // A choice has grammars of its own.
            Structure::Either(one, _) => self.single(one),
        }
    }

    /// A mark in Lark: a special token, or a string.
    fn mark(&self, text: &str) -> String {
        if self.specials.contains(text) { text.to_owned() } else { Value::from(text).to_string() }
    }
}

/// A rule for any text up to and with this mark in Lark: a special token, or a string.
fn up_to(rule: &str, mark: &str) -> String {
    let lazy = if mark.starts_with('"') { "[lazy]" } else { "" };
    format!("{rule}{lazy}: /(?s:.*)/ {mark}\n")
}

impl Structure {
    fn name(&self) -> &'static str {
        match self {
            Self::Schema(_) => "the JSON schema",
            Self::JsonObject => "the structure",
            Self::Regex(_) => "the regular expression",
            Self::Choice(_) => "the list of choices",
            Self::Lark(_) => "the grammar",
            Self::Calls { .. } => "the parameters of a tool",
            Self::Either(..) => "the structure, or the parameters of a tool,",
        }
    }

    /// Bounds on what is not trusted.
    fn check(&self) -> Result<(), String> {
        let text = |text: &str| {
            if text.len() > MAX_BYTES {
                return Err(format!("it has {} bytes; at most {MAX_BYTES} are allowed", text.len()));
            }
            if depth(text) > MAX_DEPTH {
                return Err(format!("its brackets are nested deeper than {MAX_DEPTH} levels"));
            }
            Ok(())
        };
        let schema = |value: &Value| match is_within(value, MAX_SCHEMA_DEPTH) {
            true => Ok(()),
            false => Err(format!("it is nested deeper than {MAX_SCHEMA_DEPTH} levels")),
        };
        match self {
            Self::Schema(value) if !value.is_object() && !value.is_boolean() => Err("it is not an object".into()),
            Self::Schema(value) => schema(value),
            Self::JsonObject => Ok(()),
            Self::Regex(regex) => text(regex),
            Self::Lark(lark) => text(lark),
            Self::Choice(texts) if texts.is_empty() => Err("it is empty".into()),
            Self::Choice(texts) if texts.iter().map(String::len).sum::<usize>() > MAX_BYTES => {
                Err(format!("it has more than {MAX_BYTES} bytes"))
            }
            Self::Choice(_) => Ok(()),
            Self::Calls { tools, .. } if tools.is_empty() => Err("there are no tools".into()),
            Self::Calls { tools, .. } => tools.iter().try_for_each(schema),
            Self::Either(one, other) => one.check().and_then(|()| other.check()),
        }
    }
}

impl Matcher {
    /// Whether the text may end here.
    pub fn may_end(&mut self) -> bool {
        self.inner.is_stopped() || self.inner.is_accepting().unwrap_or(false)
    }
}

impl Constraint for Matcher {
    fn mask(&mut self, out: &mut [u32]) -> Result<()> {
        let mask = self.inner.compute_mask_or_eos().map_err(|e| fault(&e))?;
        let words = mask.as_slice();
        let len = out.len().min(words.len());
        out[..len].copy_from_slice(&words[..len]);
        // Places beyond the vocabulary stay zero.
        if let Some(last) = out.get_mut(self.vocab / 32) {
            *last &= (1u32 << (self.vocab % 32)) - 1;
        }
        Ok(())
    }

    fn commit(&mut self, token: u32) -> Result<()> {
        self.last = Some(token);
        self.inner.consume_token(token).map_err(|e| fault(&e))
    }

    fn is_over(&self) -> bool {
        self.inner.is_stopped()
    }

    fn boxed_clone(&self) -> Box<dyn Constraint + Send> {
        Box::new(Self { inner: self.inner.deep_clone(), ..*self })
    }

    fn ahead(&self) -> Box<dyn Constraint + Send> {
        // What the lexer has learnt is shared, under a lock.
        Box::new(Self { inner: self.inner.clone(), ..*self })
    }

    fn forced(&mut self, most: usize) -> Vec<u32> {
        let mut bytes = self.inner.compute_ff_bytes();
        let Ok(env) = self.inner.tok_env() else { return Vec::new() };
        if bytes.is_empty() || most == 0 {
            return Vec::new();
        }
        bytes.truncate(most.saturating_mul(FORCED_BYTES));
        // Behind the last token, since tokens depend on what is before them, unless the two would be joined.
        let last: Vec<u32> = self.last.into_iter().collect();
        let whole = env.tokenize_bytes_marker(&[env.tok_trie().decode_raw(&last), bytes.clone()].concat()).0;
        let tokens = match whole.strip_prefix(&last[..]) {
            Some(tokens) => tokens.to_vec(),
            None => env.tokenize_bytes_marker(&bytes).0,
        };
        tokens.into_iter().take(most).take_while(|token| (*token as usize) < self.vocab).collect()
    }

    fn allowed(&mut self, tokens: &[u32]) -> usize {
        self.inner.validate_tokens(tokens).unwrap_or(0)
    }
}

/// The schema with bounded white space, unless it has options of its own.
fn tidy(schema: &Value) -> Value {
    let mut schema = if *schema == Value::Bool(true) { json!({}) } else { schema.clone() };
    if let Some(map) = schema.as_object_mut() {
        map.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    schema
}

fn fault(e: &dyn std::fmt::Display) -> Error {
    let why: String = e.to_string().chars().take(MAX_WHY).collect();
    Error::BadRequest(format!("the answer cannot follow its grammar: {why}"))
}

/// Deepest nesting of brackets, counted without understanding the text.
fn depth(text: &str) -> usize {
    let (mut now, mut most) = (0usize, 0);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '(' | '[' | '{' => {
                now += 1;
                most = most.max(now);
            }
            ')' | ']' | '}' => now = now.saturating_sub(1),
            _ => {}
        }
    }
    most
}

fn is_within(value: &Value, depth: usize) -> bool {
    match value {
        Value::Array(list) => depth > 0 && list.iter().all(|value| is_within(value, depth - 1)),
        Value::Object(map) => depth > 0 && map.values().all(|value| is_within(value, depth - 1)),
        _ => true,
    }
}

/// Runs `make` on a stack for deep recursion; a panic becomes an error.
#[cfg(not(target_arch = "wasm32"))]
fn on_own_stack<T: Send>(make: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        let thread =
            thread.spawn_scoped(scope, || survived(make)).map_err(|e| format!("no thread could be started: {e}"))?;
        thread.join().ok().flatten().unwrap_or_else(|| Err("it could not be compiled".into()))
    })
}

#[cfg(target_arch = "wasm32")]
fn on_own_stack<T>(make: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    make()
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;
