//! Ctrl-C and SIGTERM: the first one asks the program to stop, the second one ends it immediately.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::failure::{Failure, Outcome};

/// How long a signal may go unnoticed while nothing else happens.
pub const ATTENTION: Duration = Duration::from_millis(50);

/// Whether the program was asked to stop.
pub struct Interrupt {
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// Takes the signals from now on. The second one ends the process from within the signal handler, so it works
    /// at any time.
    ///
    /// SIGHUP keeps its meaning: `nohup` sets it to be ignored, and a handler would undo that.
    ///
    /// # Errors
    /// If the system refuses the handlers.
    pub fn listen() -> Outcome<Self> {
        let (signal, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for s in [SIGINT, SIGTERM] {
            // Handlers run in the order of registration, so the first signal finds `asked` unset here.
            flag::register_conditional_shutdown(s, 128 + s, asked.clone())
                .and_then(|_| flag::register_usize(s, signal.clone(), s as usize))
                .and_then(|_| flag::register(s, asked.clone()))
                .map_err(|e| Failure::Other(format!("signal handlers: {e}")))?;
        }
        Ok(Self { signal })
    }

    /// [`Failure::Stopped`] once a signal has come.
    ///
    /// # Errors
    /// That one.
    pub fn check(&self) -> Outcome {
        match self.signal.load(Ordering::Relaxed) {
            0 => Ok(()),
            // Shells tell a process that a signal ended by this code.
            signal => Err(Failure::Stopped { code: 128 + signal as u8, why: "interrupted".into() }),
        }
    }
}
