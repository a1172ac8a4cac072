//! The reader's side of requests.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_channel::mpsc::UnboundedReceiver;

use super::{
    Update,
    driver::{Event, News, Order},
    model::Inner,
    reader::Reader,
};
use crate::{
    Error,
    controls::Logprobs,
    engine::{FinishReason, Finished, SeqId, Timing},
};

/// A request that was sent, and its reader. Dropping it ends the request.
pub(super) struct Reading {
    reader: Reader,
    ticket: u64,
    inner: Arc<Inner>,
    /// Log probabilities of the prompt, once they are known.
    prompt_logprobs: Arc<[Logprobs]>,
    /// The last event has come.
    over: bool,
}

impl Reading {
    pub fn new(reader: Reader, ticket: u64, inner: Arc<Inner>) -> Self {
        Self { reader, ticket, inner, prompt_logprobs: Arc::default(), over: false }
    }

    /// Takes an event and passes on what it tells.
    fn take(&mut self, event: Event, mut tell: impl FnMut(Update)) {
        let end = match event {
            Event::Token(token) => {
                let Some(update) = self.reader.token(token) else { return };
                if self.reader.has_enough() {
                    self.cancel();
                }
                return tell(update);
            }
            Event::Prompt(scored) => {
                self.prompt_logprobs = scored;
                return;
            }
            Event::End(end) => *end,
            Event::Failed(e) => self.failed(e),
        };
        self.over = true;
        let (rest, completion) = self.reader.finish(end);
        rest.into_iter().for_each(&mut tell);
        tell(Update::Done(completion));
    }

    fn cancel(&self) {
        self.inner.order(Order::Cancel(self.ticket));
    }

    /// The end of a request whose engine said nothing more.
    fn failed(&self, e: Arc<Error>) -> Finished {
        Finished {
            id: SeqId(self.ticket),
            reason: FinishReason::Failed,
            prompt_tokens: self.reader.prompt_tokens,
            completion_tokens: 0,
            cache: None,
            timing: Timing::default(),
            prompt_logprobs: self.prompt_logprobs.clone(),
            error: Some(e),
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.over {
            self.cancel();
        }
    }
}

/// The answer to a request, as it is generated. It is decoded where it is read; the engine does not wait for that. Dropping
/// it ends the request before the engine's next step.
pub struct Answer {
    reading: Reading,
    events: UnboundedReceiver<News>,
    /// Not told yet.
    news: VecDeque<Update>,
}

impl Answer {
    pub(super) fn new(reading: Reading, events: UnboundedReceiver<News>) -> Self {
        Self { reading, events, news: VecDeque::new() }
    }

    /// The next update; `None` after [`Update::Done`]. Needs no runtime, and may be dropped before it is ready.
    pub async fn next(&mut self) -> Option<Update> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The same for a stream.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Update>> {
        loop {
            if let Some(update) = self.news.pop_front() {
                return Poll::Ready(Some(update));
            }
            if self.reading.over {
                return Poll::Ready(None);
            }
            let event = match ready!(Pin::new(&mut self.events.recv()).poll(context)) {
                Ok((_, event)) => event,
                Err(_) => Event::Failed(self.reading.inner.reason()),
            };
            self.reading.take(event, |update| self.news.push_back(update));
        }
    }

    /// Ends the request early, before the engine's next step. Its tokens up to then and [`Update::Done`] still come.
    pub fn cancel(&self) {
        self.reading.cancel();
    }

    /// At the places of the prompt's tokens from the second one on, with [`Ask::prompt_logprobs`](super::Ask::prompt_logprobs).
    /// They are there from the first token on, and none before it.
    pub fn prompt_logprobs(&self) -> &[Logprobs] {
        &self.reading.prompt_logprobs
    }

    /// Whether nothing follows.
    pub fn is_ended(&self) -> bool {
        self.reading.over && self.news.is_empty()
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.reading.reader.prompt_tokens
    }
}

#[cfg(not(target_arch = "wasm32"))]
pub use blocking::{Answers, Updates};

#[cfg(not(target_arch = "wasm32"))]
mod blocking {
    use std::{
        collections::{HashMap, VecDeque},
        pin::Pin,
        task::{Context, Poll, ready},
        time::Duration,
    };

    use futures_channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};

    use super::{Answer, News, Reading, Update};
    use crate::session::{Completion, Model, Prepared, block};

    impl Answer {
        /// The next update, blocking; `None` if none comes for so long, or [it has ended](Answer::is_ended).
        pub fn wait(&mut self, at_most: Duration) -> Option<Update> {
            block::on_for(self.next(), at_most).flatten()
        }

        /// Reads to the end, blocking.
        pub fn finish(mut self) -> Completion {
            loop {
                match block::on(self.next()) {
                    Some(Update::Text { .. }) => {}
                    Some(Update::Done(completion)) => return completion,
                    None => unreachable!("an answer ends once, and that consumes it"),
                }
            }
        }
    }

    impl IntoIterator for Answer {
        type Item = Update;
        type IntoIter = Updates;

        fn into_iter(self) -> Updates {
            Updates(self)
        }
    }

    /// The updates of an answer, blocking.
    pub struct Updates(Answer);

    impl Iterator for Updates {
        type Item = Update;

        fn next(&mut self) -> Option<Update> {
            block::on(self.0.next())
        }
    }

    /// The answers to many requests, read by one thread in the order in which the engine makes them.
    pub struct Answers<K> {
        model: Model,
        to: UnboundedSender<News>,
        events: UnboundedReceiver<News>,
        /// Those that have not ended, by ticket.
        open: HashMap<u64, (K, Reading)>,
        /// Not told yet.
        news: VecDeque<(K, Update)>,
    }

    impl<K: Clone> Answers<K> {
        /// None yet.
        pub fn new(model: &Model) -> Self {
            let (to, events) = unbounded();
            Self { model: model.clone(), to, events, open: HashMap::new(), news: VecDeque::new() }
        }

        /// Sends requests of its model, which the engine sees all at once. A key tells their answers from the others.
        pub fn send(&mut self, requests: impl IntoIterator<Item = (K, Prepared)>) {
            let (keys, prepared): (Vec<K>, Vec<_>) =
                requests.into_iter().map(|(k, p)| (k, (p, self.to.clone()))).unzip();
            let readings = self.model.post(prepared);
            self.open.extend(keys.into_iter().zip(readings).map(|(key, reading)| (reading.ticket, (key, reading))));
        }

        /// Number of those whose end was not told.
        pub fn len(&self) -> usize {
            self.open.len() + self.news.iter().filter(|(_, update)| matches!(update, Update::Done(_))).count()
        }

        /// Whether the ends of all were told.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// The next update of any of them, blocking; `None` if none comes for so long, or there are none.
        pub fn wait(&mut self, at_most: Duration) -> Option<(K, Update)> {
            block::on_for(std::future::poll_fn(|context| self.poll(context)), at_most).flatten()
        }

        fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(K, Update)>> {
            loop {
                if let Some(news) = self.news.pop_front() {
                    return Poll::Ready(Some(news));
                }
                if self.open.is_empty() {
                    return Poll::Ready(None);
                }
                let (ticket, event) =
                    ready!(Pin::new(&mut self.events.recv()).poll(context)).expect("it holds a sender");
                let Some((key, reading)) = self.open.get_mut(&ticket) else { continue };
                reading.take(event, |update| self.news.push_back((key.clone(), update)));
                if reading.over {
                    self.open.remove(&ticket);
                }
            }
        }
    }
}
