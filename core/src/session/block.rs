//! Waiting for a future on a thread.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{Thread, current, park, park_timeout},
    time::{Duration, Instant},
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// The result of `future`.
pub(super) fn on<T>(future: impl Future<Output = T>) -> T {
    until(future, None).expect("without a limit it becomes ready")
}

/// The result of `future`, which is polled `every` so often even if nothing wakes it.
pub(super) fn on_often<T>(future: impl Future<Output = T>, every: Duration) -> T {
    let mut future = pin!(future);
    loop {
        if let Some(value) = on_for(future.as_mut(), every) {
            return value;
        }
    }
}

/// The result of `future` if it is ready within `at_most`.
pub(super) fn on_for<T>(future: impl Future<Output = T>, at_most: Duration) -> Option<T> {
    // A time beyond the clock's range is no limit.
    until(future, Instant::now().checked_add(at_most))
}

fn until<T>(future: impl Future<Output = T>, end: Option<Instant>) -> Option<T> {
    thread_local! {
        static WAKER: Waker = Waker::from(Arc::new(Unpark(current())));
    }
    let waker = WAKER.with(Waker::clone);
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        match end.map(|end| end.saturating_duration_since(Instant::now())) {
            None => park(),
            Some(Duration::ZERO) => return None,
            Some(left) => park_timeout(left),
        }
    }
}
