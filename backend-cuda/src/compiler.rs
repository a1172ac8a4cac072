//! Images of kernels: from disk or from NVRTC, on threads of their own, so that a step's kernels are compiled concurrently with
//! each other and with the work of the device's thread.

use std::{
    collections::{HashMap, VecDeque},
    num::NonZero,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use selkie_core::{Error, Result};

use crate::{
    nvrtc::{self, DiskCache},
    spec::Spec,
};

/// Most threads: a step has a few dozen kernels.
const MOST_THREADS: usize = 32;

/// An image that can be loaded.
#[derive(Debug)]
pub struct Image {
    /// The CUBIN.
    pub bytes: Vec<u8>,
    /// It was read from the cache on disk.
    pub stored: bool,
}

/// Counters of the threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Images that NVRTC made.
    pub compiled: usize,
    /// Sum of the times that this took on each thread.
    pub compiling: Duration,
    /// Images read from disk.
    pub stored: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Variants that no thread has begun.
    queue: VecDeque<Spec>,
    /// None until it is made; taken out when it is asked for.
    images: HashMap<Spec, Option<Result<Image>>>,
    threads: usize,
    totals: Totals,
}

#[derive(Debug)]
struct Shared {
    arch: String,
    disk: DiskCache,
    state: Mutex<State>,
    made: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes images until the queue is empty.
    fn work(&self) {
        let mut state = self.state();
        while let Some(spec) = state.queue.pop_front() {
            drop(state);
            let started = Instant::now();
            let image = match self.disk.load(&spec) {
                Some(bytes) => Ok(Image { bytes, stored: true }),
                // cudarc panics if the library lacks a symbol; the waiting thread must receive an error.
                None => panic::catch_unwind(AssertUnwindSafe(|| self.compile(&spec))).unwrap_or_else(|_| {
                    let log = "the loaded NVRTC lacks a function that is needed".into();
                    Err(Error::Compile { label: spec.to_string(), log })
                }),
            };
            state = self.state();
            match &image {
                Ok(Image { stored: true, .. }) => state.totals.stored += 1,
                _ => {
                    state.totals.compiled += 1;
                    state.totals.compiling += started.elapsed();
                }
            }
            state.images.insert(spec, Some(image));
            self.made.notify_all();
        }
        state.threads -= 1;
    }

    fn compile(&self, spec: &Spec) -> Result<Image> {
        let image = nvrtc::compile(spec, &self.arch)?;
        self.disk.store(spec, &image.bytes);
        Ok(Image { bytes: image.bytes, stored: false })
    }
}

/// The threads. Dropping it waits for those that compile: NVRTC must not be unloaded meanwhile.
#[derive(Debug)]
pub struct Compiler {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    most_threads: usize,
}

impl Compiler {
    /// Compiles for `arch` where `disk` has no image.
    pub fn new(arch: &str, disk: DiskCache) -> Self {
        let shared = Shared { arch: arch.into(), disk, state: Mutex::default(), made: Condvar::new() };
        let most_threads = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
        Self { shared: Arc::new(shared), threads: Vec::new(), most_threads }
    }

    /// Starts to make the image of `spec`, unless it is made or asked for already.
    pub fn request(&mut self, spec: &Spec) {
        let mut state = self.shared.state();
        if state.images.contains_key(spec) {
            return;
        }
        state.images.insert(spec.clone(), None);
        state.queue.push_back(spec.clone());
        if state.threads < self.most_threads {
            state.threads += 1;
            drop(state);
            self.threads.retain(|t| !t.is_finished());
            let shared = self.shared.clone();
            self.threads.push(thread::spawn(move || shared.work()));
        }
    }

    /// Waits for the image of `spec` and hands it over.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn take(&mut self, spec: &Spec) -> Result<Image> {
        self.request(spec);
        let mut state = self.shared.state();
        if let Some(at) = state.queue.iter().position(|s| s == spec) {
            // Before those that nothing waits for yet.
            let spec = state.queue.remove(at);
            state.queue.extend(spec.clone());
            state.queue.rotate_right(1);
        }
        loop {
            if let Some(image) = state.images.get_mut(spec).and_then(Option::take) {
                state.images.remove(spec);
                return image;
            }
            state = self.shared.made.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Compiles the image of `spec` on this thread and ignores the one on disk.
    ///
    /// # Errors
    /// As of [`Compiler::take`].
    pub fn compile(&self, spec: &Spec) -> Result<Image> {
        self.shared.compile(spec)
    }

    /// Counters since the device was opened.
    pub fn totals(&self) -> Totals {
        self.shared.state().totals
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        self.shared.state().queue.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing left to wait for.
            let _ = thread.join();
        }
    }
}
