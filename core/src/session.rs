//! Text on top of the engine: prompts as text, chats or ids in, pieces of text out.
//!
//! The command line, the browser and a server share this path. A piece of text ends between characters, a stop string is
//! never part of it, and what a request ends with says why it ended.

use std::{collections::HashMap, rc::Rc};

use crate::{
    Error, Result,
    backend::Backend,
    chat::Message,
    engine::{Engine, EngineOptions, Event, FinishReason, Finished, Request, SeqId},
    model_dir::ModelFiles,
    models,
    sample::Sampling,
    stop::StopStrings,
    tokenizer::{TextStream, check_ids},
    weights::Progress,
};

/// Tokens generated at most when a request does not say.
pub const DEFAULT_MAX_TOKENS: usize = 1024;

/// What a request starts from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text that is continued as it is; special tokens in it count.
    Text(String),
    /// Token ids; they need no tokenizer.
    Ids(Vec<u32>),
    /// A conversation for the model's chat template, which the assistant goes on with.
    Messages(Vec<Message>),
}

impl Default for Prompt {
    /// No ids, which no engine accepts.
    fn default() -> Self {
        Self::Ids(Vec::new())
    }
}

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// What to go on from.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens to generate; `None`: [`DEFAULT_MAX_TOKENS`], or what the context and the KV pages leave.
    pub max_tokens: Option<usize>,
    /// Texts before which the answer ends. They need a tokenizer.
    pub stop: Vec<String>,
    /// The tenant: prefixes are shared within a namespace only.
    pub namespace: String,
}

/// Sampling values as people and programs give them: what is absent comes from the model's own defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// See [`Sampling::seed`].
    pub seed: Option<u64>,
}

impl Overrides {
    /// `defaults` with these values instead of its own.
    pub fn over(&self, defaults: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            seed: self.seed.unwrap_or(defaults.seed),
        }
    }
}

/// What a step brought for a request.
#[derive(Clone, Debug)]
pub enum Update {
    /// More text, never empty.
    Text {
        /// The request.
        id: SeqId,
        /// Whole characters.
        text: String,
    },
    /// The request has ended; nothing follows.
    Done {
        /// The request.
        id: SeqId,
        /// All of the answer.
        completion: Completion,
    },
}

/// A finished request.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The generated text up to a stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// The generated ids, an end-of-sequence token included.
    pub ids: Vec<u32>,
    /// Why it ended; a stop string is [`FinishReason::Stop`] too.
    pub finish: FinishReason,
    /// What the engine tells: cache, times, tokens.
    pub end: Finished,
}

impl Completion {
    /// Prompt tokens that were not computed.
    pub fn reused(&self) -> usize {
        self.end.cache.map_or(0, |cache| cache.reused)
    }
}

/// A loaded model that talks text.
///
/// ```
/// use std::rc::Rc;
///
/// use selkie_core::{
///     chat::Message, cpu::CpuBackend, engine::EngineOptions, model_dir::ModelFiles, session::*, source::Dir,
/// };
///
/// # fn main() -> selkie_core::Result<()> { pollster::block_on(async {
/// let source = Rc::new(Dir::open("../models/demo")?);
/// let files = Rc::new(ModelFiles::open(source, || 0).await?);
/// let options = EngineOptions::default();
/// let mut session = Session::load(CpuBackend::new(), files, &options, &mut |_| {}).await?;
///
/// let messages = vec![Message::new("user", "What is 17 + 25?")];
/// session.submit(Ask { prompt: Prompt::Messages(messages), ..Ask::default() })?;
/// let mut answer = String::new();
/// while !session.is_idle() {
///     for update in session.step().await? {
///         match update {
///             Update::Text { text, .. } => answer += &text,
///             Update::Done { completion, .. } => assert_eq!(completion.text.as_ref(), Some(&answer)),
///         }
///     }
/// }
/// assert_eq!(answer, "17 + 25 = 42.");
/// # Ok(()) }) }
/// ```
pub struct Session<B: Backend> {
    engine: Engine<B>,
    files: Rc<ModelFiles>,
    stop_ids: Vec<u32>,
    running: HashMap<SeqId, Running>,
}

struct Running {
    stream: TextStream,
    stops: StopStrings,
    text: String,
    ids: Vec<u32>,
    /// A stop string was found; tokens that were under way are not part of the answer.
    stopped: bool,
}

impl<B: Backend> Session<B> {
    /// Loads the model in `files` onto `backend`, telling `report` how far it is.
    ///
    /// # Errors
    /// Those of [`Engine::load`].
    pub async fn load(
        backend: B,
        files: Rc<ModelFiles>,
        options: &EngineOptions,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let architecture = models::read(&files.config)?;
        let stop_ids = files.eos()?;
        let fingerprint = files.fingerprint().await?.to_le_bytes();
        let engine = Engine::load(backend, &architecture, &files.checkpoint, &fingerprint, options, report).await?;
        Ok(Self { engine, files, stop_ids, running: HashMap::new() })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt, ids out of range, impossible sampling values and a prompt that can never
    /// fit; [`Error::BadModel`] for text or stop strings without a tokenizer, messages without a chat template, and if
    /// tokenizer or template fail on the text.
    pub fn submit(&mut self, ask: Ask) -> Result<SeqId> {
        let Ask { prompt, sampling, max_tokens, stop, namespace } = ask;
        if !stop.is_empty() {
            self.files.tokenizer()?;
        }
        let stops = StopStrings::new(stop)?;
        let continues = matches!(prompt, Prompt::Text(_));
        let (ids, boundaries) = self.encode(prompt)?;
        check_ids(&ids, self.engine.spec().vocab)?;
        let stream = TextStream::new(if continues { &ids } else { &[] });
        let left = self.engine.sizes().longest().saturating_sub(ids.len());
        let max_tokens = max_tokens.unwrap_or_else(|| left.clamp(1, DEFAULT_MAX_TOKENS));
        let stop_ids = self.stop_ids.clone();
        let id = self.engine.submit(Request { prompt: ids, boundaries, sampling, max_tokens, stop_ids, namespace })?;
        let running = Running { stream, stops, text: String::new(), ids: Vec::new(), stopped: false };
        self.running.insert(id, running);
        Ok(id)
    }

    /// Ids of a prompt, and where its messages end.
    fn encode(&self, prompt: Prompt) -> Result<(Vec<u32>, Vec<usize>)> {
        match prompt {
            Prompt::Ids(ids) => Ok((ids, Vec::new())),
            // A tokenizer may put a token around every text; that alone is no prompt.
            Prompt::Text(text) if text.is_empty() => Err(Error::BadRequest("the prompt is empty".into())),
            Prompt::Text(text) => Ok((self.files.tokenizer()?.encode(&text)?, Vec::new())),
            Prompt::Messages(messages) => {
                let prompt = self.files.chat()?.encode(self.files.tokenizer()?, &messages, true)?;
                Ok((prompt.ids, prompt.boundaries))
            }
        }
    }

    /// Ends a request early; its [`Update::Done`] comes with the next step.
    pub fn cancel(&mut self, id: SeqId) {
        self.engine.cancel(id);
    }

    /// Whether nothing is queued or running.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.engine.is_idle()
    }

    /// Runs one step of the engine: what it brought, in the order in which it came. That may be nothing, while a prompt is
    /// being computed.
    ///
    /// # Errors
    /// Those of the device and of the tokenizer.
    pub async fn step(&mut self) -> Result<Vec<Update>> {
        let mut updates = Vec::new();
        for event in self.engine.step().await? {
            match event {
                Event::Token { id, token, .. } => self.token(id, token, &mut updates)?,
                Event::Finished(end) => self.finish(end, &mut updates)?,
            }
        }
        Ok(updates)
    }

    fn token(&mut self, id: SeqId, token: u32, updates: &mut Vec<Update>) -> Result<()> {
        let Some(running) = self.running.get_mut(&id).filter(|r| !r.stopped) else { return Ok(()) };
        running.ids.push(token);
        let Some(tokenizer) = &self.files.tokenizer else { return Ok(()) };
        let piece = running.stream.push(tokenizer, token)?;
        running.show(id, &piece, updates);
        if running.stopped {
            self.engine.cancel(id);
        }
        Ok(())
    }

    fn finish(&mut self, end: Finished, updates: &mut Vec<Update>) -> Result<()> {
        let id = end.id;
        let Some(mut running) = self.running.remove(&id) else { return Ok(()) };
        if let Some(tokenizer) = &self.files.tokenizer
            && !running.stopped
        {
            let piece = running.stream.finish(tokenizer)?;
            running.show(id, &piece, updates);
            if !running.stopped {
                let held = running.stops.finish();
                running.text(id, held, updates);
            }
        }
        let finish = if running.stopped { FinishReason::Stop } else { end.reason };
        let text = self.files.tokenizer.is_some().then_some(running.text);
        updates.push(Update::Done { id, completion: Completion { text, ids: running.ids, finish, end } });
        Ok(())
    }

    /// The engine below.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// The engine below, for its cache and its counters. Requests submitted there have no text here.
    pub fn engine_mut(&mut self) -> &mut Engine<B> {
        &mut self.engine
    }

    /// The model's files.
    pub fn files(&self) -> &Rc<ModelFiles> {
        &self.files
    }
}

impl Running {
    /// Takes a piece of decoded text and shows what cannot be part of a stop string.
    fn show(&mut self, id: SeqId, piece: &str, updates: &mut Vec<Update>) {
        let (text, stopped) = self.stops.push(piece);
        self.stopped = stopped;
        self.text(id, text, updates);
    }

    fn text(&mut self, id: SeqId, text: String, updates: &mut Vec<Update>) {
        if !text.is_empty() {
            self.text += &text;
            updates.push(Update::Text { id, text });
        }
    }
}
