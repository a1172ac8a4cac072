//! Wakers that call a Python function. The engine's thread must not wait for the interpreter's lock, so another thread calls.

use std::{
    sync::{
        Arc, LazyLock,
        mpsc::{Sender, channel},
    },
    task::Waker,
};

use pyo3::prelude::*;

/// Calls a function once for every wake.
pub struct Wake(Py<PyAny>);

static CALLS: LazyLock<Sender<Arc<Wake>>> = LazyLock::new(|| {
    let (calls, due) = channel::<Arc<Wake>>();
    std::thread::spawn(move || {
        for wake in due {
            // An event loop that was closed refuses the call; nobody waits there any more.
            Python::attach(|py| {
                drop(wake.0.call0(py));
                drop(wake);
            });
        }
    });
    calls
});

impl Wake {
    pub fn waker(function: Py<PyAny>) -> Waker {
        Waker::from(Arc::new(Self(function)))
    }
}

impl std::task::Wake for Wake {
    fn wake(self: Arc<Self>) {
        // The thread lives as long as the module.
        let _ = CALLS.send(self);
    }
}
