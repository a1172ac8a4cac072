//! Prompts become ids: rendered, measured and tokenised, beside the engine's thread where there are threads.

use std::sync::Arc;

use crate::{
    Error, Result,
    chat::{self, ChatTemplate},
    model_dir::ModelFiles,
    session::Prompt,
    tokenizer::Tokenizer,
};

/// Ids of a prompt, and where its messages end.
pub(super) type Ids = (Vec<u32>, Vec<usize>);

/// A prompt with what it takes to encode it.
pub(super) struct Task {
    prompt: Prompt,
    tokenizer: Option<Arc<Tokenizer>>,
    chat: Option<Arc<ChatTemplate>>,
    /// Longest text in bytes.
    most_bytes: usize,
}

impl Task {
    /// `context` is the longest sequence in tokens.
    ///
    /// # Errors
    /// What can be told at once: [`Error::BadRequest`] for an empty prompt, a role that is none and text that cannot fit;
    /// [`Error::BadModel`] if tokenizer or chat template are missing.
    pub fn new(prompt: Prompt, files: &ModelFiles, context: usize) -> Result<Self> {
        let mut task = Self { prompt, tokenizer: None, chat: None, most_bytes: 0 };
        let texts: Vec<&str> = match &task.prompt {
            Prompt::Ids(_) => return Ok(task),
            // A tokenizer may put a token around every text; that alone is no prompt.
            Prompt::Text(text) if text.is_empty() => return Err(Error::BadRequest("the prompt is empty".into())),
            Prompt::Text(text) => vec![text],
            Prompt::Messages(messages) => {
                task.chat = Some(files.chat()?.clone());
                chat::check(messages)?;
                messages.iter().map(|m| m.content.as_str()).collect()
            }
        };
        let tokenizer = files.tokenizer()?;
        task.most_bytes = tokenizer.most_bytes(context);
        task.tokenizer = Some(tokenizer.clone());
        // A template may leave out parts of earlier messages, so all of them together may be somewhat longer.
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        let all = said(&task.prompt);
        if longest > task.most_bytes || all / MESSAGES_BEYOND > task.most_bytes {
            let bytes = if longest > task.most_bytes { longest } else { all };
            let most = task.most_bytes;
            return Err(Error::BadRequest(format!(
                "{bytes} bytes of text cannot fit: the context of {context} tokens holds at most {most}"
            )));
        }
        Ok(task)
    }

    /// Whether this takes no time.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn is_ready(&self) -> bool {
        self.tokenizer.is_none()
    }

    /// # Errors
    /// What template and tokenizer say; [`Error::BadRequest`] if the template makes more text than can fit.
    pub fn run(self) -> Result<Ids> {
        match (self.prompt, self.tokenizer, self.chat) {
            (Prompt::Ids(ids), ..) => Ok((ids, Vec::new())),
            (Prompt::Text(text), Some(tokenizer), _) => Ok((tokenizer.encode(&text)?, Vec::new())),
            (Prompt::Messages(messages), Some(tokenizer), Some(chat)) => {
                let prompt = chat.encode_within(&tokenizer, &messages, true, self.most_bytes)?;
                Ok((prompt.ids, prompt.boundaries))
            }
            _ => unreachable!("text has a tokenizer, messages have a template"),
        }
    }
}

/// How many times the longest text all messages of a chat may have together.
const MESSAGES_BEYOND: usize = 4;

#[cfg(not(target_arch = "wasm32"))]
pub(super) use threads::Desk;

/// Bytes that a chat says.
pub(super) fn said(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Ids(_) => 0,
        Prompt::Text(text) => text.len(),
        Prompt::Messages(messages) => messages.iter().map(|m| m.content.len()).sum(),
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod threads {
    use std::{
        sync::{
            Arc, Mutex, PoisonError,
            mpsc::{Receiver, RecvTimeoutError, Sender, channel},
        },
        time::{Duration, Instant},
    };

    use super::{Ids, Task};
    use crate::{Error, Result, engine::SeqId, survive::survived};

    /// Prompts that are prepared at a time.
    const THREADS: usize = 4;
    /// How long a request may hold up others: ordinary prompts take a few milliseconds.
    const PATIENCE: Duration = Duration::from_millis(50);
    /// How long one is waited for that holds up nobody. The first chat starts a process and compiles the template.
    const LONG_PATIENCE: Duration = Duration::from_secs(1);

    type Job = (SeqId, Task);
    type Answer = (SeqId, Result<Ids>);

    /// Threads that prepare prompts. They end with it, once they are done with what they have.
    pub(in crate::session) struct Desk {
        jobs: Sender<Job>,
        queue: Arc<Mutex<Receiver<Job>>>,
        answer: Sender<Answer>,
        answers: Receiver<Answer>,
        threads: usize,
        /// Jobs without an answer.
        open: usize,
    }

    impl Desk {
        pub fn new() -> Self {
            let ((jobs, queue), (answer, answers)) = (channel(), channel());
            Self { jobs, queue: Arc::new(Mutex::new(queue)), answer, answers, threads: 0, open: 0 }
        }

        /// Begins with a task; `Some` is its result if that comes soon. `alone`: it holds up nobody. What other tasks have come to
        /// meanwhile goes to `others`.
        pub fn begin(&mut self, id: SeqId, task: Task, alone: bool, others: &mut Vec<Answer>) -> Option<Result<Ids>> {
            if task.is_ready() {
                return Some(task.run());
            }
            if self.threads < THREADS && self.threads <= self.open {
                match self.thread() {
                    Ok(()) => self.threads += 1,
                    Err(e) if self.threads == 0 => {
                        let why = format!("a thread for prompts could not be started: {e}");
                        return Some(Err(Error::Device { op: "encode".into(), why }));
                    }
                    // The others will do.
                    Err(_) => {}
                }
            }
            // The receiver lives as long as this.
            let _ = self.jobs.send((id, task));
            self.open += 1;
            let end = Instant::now() + if alone { LONG_PATIENCE } else { PATIENCE };
            loop {
                match self.wait(end) {
                    Some((of, result)) if of == id => return Some(result),
                    Some(other) => others.push(other),
                    None => return None,
                }
            }
        }

        /// Results that have come; with `wait` there is some time for the first one to come.
        pub fn take(&mut self, wait: bool) -> Vec<Answer> {
            let mut all = Vec::new();
            while self.open > 0 {
                let patience = if wait && all.is_empty() { PATIENCE } else { Duration::ZERO };
                let Some(answer) = self.wait(Instant::now() + patience) else { break };
                all.push(answer);
            }
            all
        }

        fn wait(&mut self, end: Instant) -> Option<Answer> {
            match self.answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(answer) => {
                    self.open -= 1;
                    Some(answer)
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
            }
        }

        fn thread(&self) -> std::io::Result<()> {
            let (queue, answer) = (self.queue.clone(), self.answer.clone());
            let run = move || {
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((id, task)) = job else { return };
                    let result = survived(|| task.run()).unwrap_or_else(|| {
                        let why = "template or tokenizer could not be used on this prompt";
                        Err(Error::BadRequest(why.into()))
                    });
                    if answer.send((id, result)).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("prompts".into()).spawn(run).map(drop)
        }
    }
}

/// Where there is one thread, prompts are prepared on it.
#[cfg(target_arch = "wasm32")]
pub(super) struct Desk;

#[cfg(target_arch = "wasm32")]
impl Desk {
    pub fn new() -> Self {
        Self
    }

    pub fn begin(
        &mut self,
        _: crate::engine::SeqId,
        task: Task,
        _: bool,
        _: &mut Vec<(crate::engine::SeqId, Result<Ids>)>,
    ) -> Option<Result<Ids>> {
        Some(task.run())
    }

    pub fn take(&mut self, _: bool) -> Vec<(crate::engine::SeqId, Result<Ids>)> {
        Vec::new()
    }
}
