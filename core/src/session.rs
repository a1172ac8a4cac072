//! Text on top of the engine: prompts as text, chats or ids in, pieces of text out.
//!
//! The command line, the browser and a server share this path. A piece of text ends between characters, a stop string is
//! never part of it, and what a request ends with says why it ended.
//!
//! A request's failure is its own end: whatever its prompt does to template or tokenizer, and whatever its tokens do to them, no
//! other request is held up or ends. Prompts are prepared on other threads where there are threads; where there are none, as in a
//! browser's worker, preparing one takes its time on the only one.

mod prepare;

use std::{collections::HashMap, rc::Rc, sync::Arc};

use self::prepare::{Desk, Ids, Task};

use crate::{
    Error, Result,
    backend::Backend,
    chat::Message,
    engine::{Engine, EngineOptions, Event, FinishReason, Finished, Request, SeqId, Timing},
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
    /// Why it failed, if it did.
    pub fn error(&self) -> Option<&Error> {
        self.end.error.as_deref()
    }

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
    desk: Desk,
    next_id: u64,
    /// Requests whose prompts are being prepared.
    waiting: HashMap<SeqId, Start>,
    /// Requests in the engine, by its own ids.
    running: HashMap<SeqId, Running>,
    /// What no step reported yet.
    news: Vec<Update>,
}

/// A request but for its prompt.
struct Start {
    sampling: Sampling,
    max_tokens: Option<usize>,
    stops: StopStrings,
    namespace: String,
    kind: Kind,
    /// Bytes of text of the prompt.
    said: usize,
}

/// What a prompt was given as.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Ids,
    Text,
    Messages,
}

struct Running {
    /// The session's id.
    id: SeqId,
    stream: TextStream,
    stops: StopStrings,
    text: String,
    ids: Vec<u32>,
    /// A stop string was found; tokens that were under way are not part of the answer.
    stopped: bool,
    /// Its tokens could not be made text.
    failed: Option<Error>,
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
        Ok(Self {
            engine,
            files,
            stop_ids,
            desk: Desk::new(),
            next_id: 0,
            waiting: HashMap::new(),
            running: HashMap::new(),
            news: Vec::new(),
        })
    }

    /// Queues a request. A prompt that takes long to prepare (50 ms while others run) is prepared beside them, and what is wrong with it
    /// ends the request: [`FinishReason::Failed`].
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an empty prompt, ids out of range, impossible sampling values and a prompt that can never
    /// fit; [`Error::BadModel`] for text or stop strings without a tokenizer, messages without a chat template, and if
    /// tokenizer or template fail on the text. Nothing else is affected.
    pub fn submit(&mut self, ask: Ask) -> Result<SeqId> {
        let Ask { prompt, sampling, max_tokens, stop, namespace } = ask;
        sampling.check()?;
        if !stop.is_empty() {
            self.files.tokenizer()?;
        }
        let stops = StopStrings::new(stop)?;
        let kind = match prompt {
            Prompt::Ids(_) => Kind::Ids,
            Prompt::Text(_) => Kind::Text,
            Prompt::Messages(_) => Kind::Messages,
        };
        let start = Start { sampling, max_tokens, stops, namespace, kind, said: prepare::said(&prompt) };
        let task = Task::new(prompt, &self.files, self.engine.sizes().longest())?;
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let mut others = Vec::new();
        let alone = self.engine.is_idle() && self.waiting.is_empty();
        let ids = self.desk.begin(id, task, alone, &mut others);
        for (id, ids) in others {
            self.prepared(id, ids);
        }
        match ids {
            Some(ids) => self.start(id, start, ids?)?,
            None => drop(self.waiting.insert(id, start)),
        }
        Ok(id)
    }

    /// A prompt that was waited for has become ids, or has not.
    fn prepared(&mut self, id: SeqId, ids: Result<Ids>) {
        // None: it was cancelled.
        let Some(start) = self.waiting.remove(&id) else { return };
        if let Err(e) = ids.and_then(|ids| self.start(id, start, ids)) {
            self.end_early(id, FinishReason::Failed, Some(e));
        }
    }

    /// Hands a request to the engine.
    fn start(&mut self, id: SeqId, start: Start, (ids, boundaries): Ids) -> Result<()> {
        let Start { sampling, max_tokens, stops, namespace, kind, said } = start;
        self.check(&ids, kind)?;
        let stream = TextStream::new(if kind == Kind::Text { &ids } else { &[] });
        let left = self.engine.sizes().longest().saturating_sub(ids.len());
        let max_tokens = max_tokens.unwrap_or_else(|| left.clamp(1, DEFAULT_MAX_TOKENS));
        let stop_ids = self.stop_ids.clone();
        let request = Request { prompt: ids, boundaries, sampling, max_tokens, stop_ids, namespace };
        let inner = self.engine.submit(request).map_err(|e| match (e, &self.files.chat) {
            (Error::BadRequest(why), Some(chat)) if kind == Kind::Messages => {
                let made = format!("the chat template of {} made the prompt of {said} bytes of messages", chat.file());
                Error::BadRequest(format!("{why}; {made}"))
            }
            (e, _) => e,
        })?;
        let (text, ids) = (String::new(), Vec::new());
        self.running.insert(inner, Running { id, stream, stops, text, ids, stopped: false, failed: None });
        Ok(())
    }

    /// Checks ids against the model's vocabulary; what is wrong with ids of the model's own tokenizer is its file's fault.
    fn check(&self, ids: &[u32], kind: Kind) -> Result<()> {
        let vocab = self.engine.spec().vocab;
        let Some(tokenizer) = self.files.tokenizer.as_ref().filter(|_| kind != Kind::Ids) else {
            return check_ids(ids, vocab);
        };
        let why = match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => format!(
                "it gives token id {id}, and by vocab_size in config.json the model has ids 0 to {}; take tokenizer.json and config.json of one model",
                vocab - 1
            ),
            None if ids.is_empty() => "it makes no token of this prompt; give other text, or token ids".into(),
            None => return Ok(()),
        };
        Err(Error::model(tokenizer.file(), why))
    }

    /// Reports the end of a request that never reached the engine.
    fn end_early(&mut self, id: SeqId, reason: FinishReason, error: Option<Error>) {
        let (timing, error) = (Timing::default(), error.map(Arc::new));
        let end = Finished { id, reason, prompt_tokens: 0, completion_tokens: 0, cache: None, timing, error };
        let text = self.files.tokenizer.is_some().then(String::new);
        self.news.push(Update::Done { id, completion: Completion { text, ids: Vec::new(), finish: reason, end } });
    }

    /// Ends a request early; its [`Update::Done`] comes with the next step.
    pub fn cancel(&mut self, id: SeqId) {
        if self.waiting.remove(&id).is_some() {
            self.end_early(id, FinishReason::Cancelled, None);
        } else if let Some((inner, _)) = self.running.iter().find(|(_, running)| running.id == id) {
            self.engine.cancel(*inner);
        }
    }

    /// Whether nothing is queued or running.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.news.is_empty() && self.engine.is_idle()
    }

    /// Runs one step of the engine: what it brought, in the order in which it came. That may be nothing, while a prompt is
    /// being prepared or computed.
    ///
    /// The future may be dropped before it is ready: nothing is lost, the next call goes on from there.
    ///
    /// # Errors
    /// Those of the device, after which the session is of no use. What is wrong with one request ends that one.
    pub async fn step(&mut self) -> Result<Vec<Update>> {
        let nothing_else = self.engine.is_idle() && self.news.is_empty();
        for (id, ids) in self.desk.take(nothing_else) {
            self.prepared(id, ids);
        }
        if self.news.is_empty() && !self.engine.is_idle() {
            for event in self.engine.step().await? {
                match event {
                    Event::Token { id, token, .. } => self.token(id, token),
                    Event::Finished(end) => self.finish(end),
                }
            }
        }
        Ok(std::mem::take(&mut self.news))
    }

    fn token(&mut self, inner: SeqId, token: u32) {
        let Some(running) = self.running.get_mut(&inner).filter(|r| !r.stopped && r.failed.is_none()) else { return };
        running.ids.push(token);
        let Some(tokenizer) = &self.files.tokenizer else { return };
        match running.stream.push(tokenizer, token) {
            Ok(piece) => running.show(&piece, &mut self.news),
            Err(e) => running.failed = Some(e),
        }
        if running.stopped || running.failed.is_some() {
            self.engine.cancel(inner);
        }
    }

    fn finish(&mut self, mut end: Finished) {
        let Some(mut running) = self.running.remove(&end.id) else { return };
        if let Some(tokenizer) = &self.files.tokenizer
            && !running.stopped
            && running.failed.is_none()
        {
            match running.stream.finish(tokenizer) {
                Ok(piece) => running.show(&piece, &mut self.news),
                Err(e) => running.failed = Some(e),
            }
            if !running.stopped {
                let held = running.stops.finish();
                running.text(held, &mut self.news);
            }
        }
        let id = running.id;
        end.id = id;
        if let Some(e) = running.failed {
            (end.reason, end.error) = (FinishReason::Failed, Some(Arc::new(e)));
        }
        let finish = if running.stopped { FinishReason::Stop } else { end.reason };
        let text = self.files.tokenizer.is_some().then_some(running.text);
        self.news.push(Update::Done { id, completion: Completion { text, ids: running.ids, finish, end } });
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
    fn show(&mut self, piece: &str, news: &mut Vec<Update>) {
        let (text, stopped) = self.stops.push(piece);
        self.stopped = stopped;
        self.text(text, news);
    }

    fn text(&mut self, text: String, news: &mut Vec<Update>) {
        if !text.is_empty() {
            self.text += &text;
            news.push(Update::Text { id: self.id, text });
        }
    }
}
