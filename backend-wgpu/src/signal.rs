//! A one-shot value that a callback sets and a future awaits.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::device::lock;

/// A future of the value that [`Signal::set`] receives on a clone.
pub struct Signal<T>(Arc<Mutex<State<T>>>);

struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> Signal<T> {
    /// An unset signal.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State { value: None, waker: None })))
    }

    /// Sets the value and wakes the future.
    pub fn set(&self, value: T) {
        let mut state = lock(&self.0);
        state.value = Some(value);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

impl<T> Clone for Signal<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Future for Signal<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut state = lock(&self.0);
        match state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
