//! The engine's side: one loop that takes orders between steps and sends out what the steps gave.

use std::{
    collections::HashMap,
    future::poll_fn,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::Poll,
};

use futures_channel::mpsc::{TryRecvError, UnboundedReceiver, UnboundedSender};

use super::{Snapshot, Token};
use crate::{
    Error, Result,
    controls::Logprobs,
    engine::{self, AnyEngine, Finished, Request, SeqId},
    state::CacheEvent,
    survive::panic_text,
};

/// Something to do with the engine between two steps. What it returns sends the reply: whoever has that sees the new snapshot.
pub(super) type Visit = Box<dyn FnOnce(&mut dyn AnyEngine) -> Box<dyn FnOnce() + Send> + Send>;

/// What a handle wants from the engine.
pub(super) enum Order {
    /// Requests that the same step is to see.
    Submit(Vec<Submission>),
    /// The end of a request, by its ticket.
    Cancel(u64),
    /// The tree's events from now on.
    Watch(UnboundedSender<Vec<CacheEvent>>),
    /// A look at the engine, or a change.
    With(Visit),
}

/// A request on its way to the engine.
pub(super) struct Submission {
    /// Its name between handle and driver.
    pub ticket: u64,
    pub request: Request,
    pub events: UnboundedSender<News>,
}

impl Submission {
    /// Tells its reader, who may be gone, that nothing comes of it.
    pub fn fail(&self, e: &Arc<Error>) {
        let _ = self.events.unbounded_send((self.ticket, Event::Failed(e.clone())));
    }
}

/// An event and the ticket of its request: several may share a channel.
pub(super) type News = (u64, Event);

/// News of a request for its reader: small, since readers may be slow.
pub(super) enum Event {
    Token(Token),
    /// Log probabilities of the prompt, before the first token, if the request asked for them.
    Prompt(Arc<[Logprobs]>),
    /// The last one.
    End(Box<Finished>),
    /// The last one too: the request, or the engine, failed.
    Failed(Arc<Error>),
}

/// What handles see without an order.
#[derive(Default)]
pub(super) struct Shared {
    pub snapshot: Mutex<Snapshot>,
    /// Why the engine ended, if it did not end because nobody needed it.
    pub failure: OnceLock<Arc<Error>>,
}

/// Runs an engine for the handles that it came with. Needs no runtime: any executor can poll it.
pub struct Driver {
    engine: Box<dyn AnyEngine>,
    orders: UnboundedReceiver<Order>,
    shared: Arc<Shared>,
    live: HashMap<SeqId, Live>,
    tickets: HashMap<u64, SeqId>,
    watchers: Vec<UnboundedSender<Vec<CacheEvent>>>,
}

struct Live {
    ticket: u64,
    events: UnboundedSender<News>,
}

impl Driver {
    pub(super) fn new(engine: Box<dyn AnyEngine>, orders: UnboundedReceiver<Order>, shared: Arc<Shared>) -> Self {
        let (live, tickets, watchers) = (HashMap::new(), HashMap::new(), Vec::new());
        let driver = Self { engine, orders, shared, live, tickets, watchers };
        driver.publish();
        driver
    }

    /// The engine.
    pub fn engine(&self) -> &dyn AnyEngine {
        &*self.engine
    }

    /// The engine, to look at or to change. Nobody reads the answers to requests that are submitted there.
    pub fn engine_mut(&mut self) -> &mut dyn AnyEngine {
        &mut *self.engine
    }

    /// Runs until all handles and answers are gone. An error of the device and a panic end all requests with their reason.
    pub async fn run(mut self) {
        loop {
            match caught(self.wait_and_turn()).await {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return self.retire().await,
                Ok(Err(e)) => return self.fail(e),
                Err(why) => return self.fail(Error::Panicked(why)),
            }
        }
    }

    /// Keeps what another process may use. Nobody is left to hear of an error.
    async fn retire(&mut self) {
        if let Ok(Err(e)) | Err(e) = caught(self.engine.retire()).await.map_err(Error::Panicked) {
            tracing::warn!("what the prefix cache holds could not be kept: {e}");
        }
    }

    /// Waits for an order if there is nothing else to do, then makes a turn. False: nobody needs the engine any more. Each time
    /// that it is polled while it waits it looks whether the device has failed.
    async fn wait_and_turn(&mut self) -> Result<bool> {
        if self.engine.is_idle() {
            let mut next = pin!(self.orders.recv());
            let order = poll_fn(|context| match self.engine.look() {
                Ok(()) => next.as_mut().poll(context).map(Ok),
                Err(e) => Poll::Ready(Err(e)),
            });
            let Ok(order) = order.await? else { return Ok(false) };
            self.take(order);
        }
        self.turn().await
    }

    /// Takes all orders and, unless there is nothing to do, runs one step. False: all handles and answers are gone.
    ///
    /// The future may be dropped before it is ready: nothing is lost, and the next call continues at the same point.
    ///
    /// # Errors
    /// Those of the device. The engine cannot be used after that.
    pub async fn turn(&mut self) -> Result<bool> {
        if !self.take_orders() {
            return Ok(false);
        }
        if !self.engine.is_idle() {
            let events = self.engine.step().await?;
            let scheduler = self.engine.scheduler();
            tracing::debug!(
                "step: {} events, {} running, {} waiting",
                events.len(),
                scheduler.running(),
                scheduler.waiting()
            );
            // Before the events: who knows that a request has ended sees it counted.
            self.publish();
            events.into_iter().for_each(|event| self.deliver(event));
        }
        self.tell_watchers();
        Ok(true)
    }

    /// Takes all orders. False: all handles and answers are gone.
    pub(super) fn take_orders(&mut self) -> bool {
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.take(order),
                Err(e) => return e == TryRecvError::Empty,
            }
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Submit(all) => all.into_iter().for_each(|one| self.submit(one)),
            // One that has ended is not known any more.
            Order::Cancel(ticket) => {
                if let Some(id) = self.tickets.get(&ticket) {
                    self.engine.cancel(*id);
                }
            }
            Order::Watch(watcher) => {
                self.watchers.push(watcher);
                self.engine.subscribe(true);
            }
            Order::With(f) => {
                let reply = f(&mut *self.engine);
                self.publish();
                reply();
            }
        }
    }

    fn submit(&mut self, mut submission: Submission) {
        match self.engine.submit(mem::take(&mut submission.request)) {
            Ok(id) => {
                let Submission { ticket, events, .. } = submission;
                self.tickets.insert(ticket, id);
                self.live.insert(id, Live { ticket, events });
            }
            Err(e) => submission.fail(&Arc::new(e)),
        }
    }

    /// Sends an event of the engine to its reader, who may be gone.
    fn deliver(&mut self, event: engine::Event) {
        match event {
            engine::Event::Token { id, token, logprobs, prompt_logprobs, .. } => {
                if let Some(live) = self.live.get(&id) {
                    if let Some(scored) = prompt_logprobs {
                        let _ = live.events.unbounded_send((live.ticket, Event::Prompt(scored)));
                    }
                    let (logprob, top) = logprobs.map(|l| (l.chosen, l.top)).unzip();
                    let token = Token { id: token, logprob, top: top.unwrap_or_default() };
                    let _ = live.events.unbounded_send((live.ticket, Event::Token(token)));
                }
            }
            engine::Event::Finished(end) => {
                if let Some(live) = self.live.remove(&end.id) {
                    self.tickets.remove(&live.ticket);
                    let _ = live.events.unbounded_send((live.ticket, Event::End(Box::new(end))));
                }
            }
        }
    }

    fn tell_watchers(&mut self) {
        if self.watchers.is_empty() {
            return;
        }
        let events = self.engine.take_cache_events();
        if !events.is_empty() {
            self.watchers.retain(|watcher| watcher.unbounded_send(events.clone()).is_ok());
            if self.watchers.is_empty() {
                self.engine.subscribe(false);
            }
        }
    }

    fn publish(&self) {
        let scheduler = self.engine.scheduler();
        let snapshot = Snapshot {
            counters: self.engine.stats(),
            running: scheduler.running(),
            waiting: scheduler.waiting(),
            deferred: scheduler.deferred(),
            waiting_shares: scheduler.waiting_shares(),
            slots_used: scheduler.slots().used(),
            slots_cached: scheduler.cached_states(),
            pages_used: scheduler.pages().used(),
            pages_cached: scheduler.cached_pages(),
        };
        *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// Ends all requests, those on their way too.
    fn fail(mut self, e: Error) {
        let e = self.shared.failure.get_or_init(|| Arc::new(e)).clone();
        for live in self.live.values() {
            let _ = live.events.unbounded_send((live.ticket, Event::Failed(e.clone())));
        }
        self.orders.close();
        while let Ok(order) = self.orders.try_recv() {
            if let Order::Submit(all) = order {
                all.iter().for_each(|one| one.fail(&e));
            }
        }
        // What a panic left half changed may panic again.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self)));
    }
}

/// The result of a future, or the message of its panic. Where panics end the process they still do.
async fn caught<T>(future: impl Future<Output = T>) -> std::result::Result<T, String> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(payload) => Poll::Ready(Err(panic_text(&*payload))),
    })
    .await
}
