//! The wgpu device: asynchronous errors, waiting for results, uploads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use selkie_core::error::{Error, Result};

#[cfg(target_arch = "wasm32")]
use crate::signal::Signal;

/// Uploads are submitted in portions of this size, so that their staging memory is reused.
const SUBMIT_BYTES: u64 = 8 << 20;

/// The first asynchronous error. It fails the next call that can report an error.
#[derive(Default)]
pub struct Deferred(Mutex<Option<Fault>>);

/// Creates the error; called once per report, because errors cannot be cloned.
type Fault = Box<dyn Fn() -> Error + Send>;

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while a lock is held leaves its data valid.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deferred {
    /// Keeps the first error only: the others follow from it.
    pub fn set(&self, op: &str, why: impl Into<String>) {
        let (op, why): (String, String) = (op.into(), why.into());
        self.fail(move || Error::Device { op: op.clone(), why: why.clone() });
    }

    /// The same with any error.
    pub fn fail(&self, error: impl Fn() -> Error + Send + 'static) {
        lock(&self.0).get_or_insert_with(|| Box::new(error));
    }

    /// Fails if an error occurred. The error is kept, because no later result can be trusted.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.0) {
            Some(error) => Err(error()),
            None => Ok(()),
        }
    }
}

/// The op that a wgpu message refers to, from the label of a pipeline, bind group or buffer in the message.
fn op_of(message: &str) -> String {
    let label = message.split("'").nth(1).map(str::trim).filter(|l| !l.is_empty() && l.len() < 80);
    label.unwrap_or("wgpu").split('.').next().unwrap_or("wgpu").to_owned()
}

/// Device and queue, with the objects that must outlive them.
pub struct Gpu {
    /// The device.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    /// Asynchronous errors.
    pub deferred: Arc<Deferred>,
    /// Bytes written since the last submission.
    pending: Mutex<u64>,
    /// Error scopes that the browser has not answered yet.
    #[cfg(target_arch = "wasm32")]
    answers: Mutex<Vec<Signal<()>>>,
    #[cfg(not(target_arch = "wasm32"))]
    waiter: waiter::Waiter,
}

impl Gpu {
    /// Wraps a device and registers handlers for its errors.
    pub fn new(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let deferred = Arc::new(Deferred::default());
        let d = deferred.clone();
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
            let message = e.to_string();
            d.set(&op_of(&message), message);
        }));
        let d = deferred.clone();
        device.set_device_lost_callback(move |reason, message| {
            d.set("device", format!("the device was lost ({reason:?}): {message}"));
        });
        #[cfg(not(target_arch = "wasm32"))]
        let waiter = waiter::Waiter::new(device.clone(), deferred.clone());
        Self {
            device,
            queue,
            deferred,
            pending: Mutex::new(0),
            #[cfg(target_arch = "wasm32")]
            answers: Mutex::default(),
            #[cfg(not(target_arch = "wasm32"))]
            waiter,
        }
    }

    /// Copies bytes into a buffer before everything submitted later.
    pub fn upload(&self, buffer: &wgpu::Buffer, at: u64, bytes: &[u8]) {
        self.queue.write_buffer(buffer, at, bytes);
        let mut pending = lock(&self.pending);
        *pending += bytes.len() as u64;
        if *pending >= SUBMIT_BYTES {
            *pending = 0;
            let submitted = self.queue.submit([]);
            self.limit_staging(submitted);
        }
    }

    /// Waits until a portion is copied. Otherwise uploads would accumulate in host memory.
    #[cfg(not(target_arch = "wasm32"))]
    fn limit_staging(&self, submitted: wgpu::SubmissionIndex) {
        let wait = wgpu::PollType::Wait { submission_index: Some(submitted), timeout: None };
        if let Err(e) = self.device.poll(wait) {
            self.deferred.set("write", e.to_string());
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn limit_staging(&self, _: wgpu::SubmissionIndex) {}

    /// Calls `f` within one error scope per filter and returns its result. A browser answers the scopes later: there an error
    /// is deferred, and [`Gpu::settle`] waits for the answers.
    ///
    /// # Errors
    /// `error(message)` if a scope caught an error.
    pub fn scoped<T>(
        &self,
        filters: &[wgpu::ErrorFilter],
        f: impl FnOnce() -> T,
        error: impl Fn(String) -> Error + Clone + Send + 'static,
    ) -> Result<T> {
        let scopes: Vec<_> = filters.iter().map(|f| self.device.push_error_scope(*f)).collect();
        let made = f();
        // Innermost first.
        for scope in scopes.into_iter().rev() {
            self.answer(scope.pop(), error.clone())?;
        }
        Ok(made)
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn answer(&self, scope: impl Future<Output = Option<wgpu::Error>>, error: impl Fn(String) -> Error) -> Result<()> {
        match crate::ready(scope).flatten() {
            Some(e) => Err(error(e.to_string())),
            None => Ok(()),
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn answer(
        &self,
        scope: impl Future<Output = Option<wgpu::Error>> + 'static,
        error: impl Fn(String) -> Error + Send + 'static,
    ) -> Result<()> {
        let (deferred, answered) = (self.deferred.clone(), Signal::new());
        lock(&self.answers).push(answered.clone());
        wasm_bindgen_futures::spawn_local(async move {
            if let Some(e) = scope.await {
                let message = e.to_string();
                deferred.fail(move || error(message.clone()));
            }
            answered.set(());
        });
        Ok(())
    }

    /// Waits for the answers of all error scopes; calls `report` with the number answered and the total.
    ///
    /// # Errors
    /// The first error that was deferred.
    #[cfg(target_arch = "wasm32")]
    pub async fn settle(&self, report: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let answers = std::mem::take(&mut *lock(&self.answers));
        let total = answers.len();
        for (i, answer) in answers.into_iter().enumerate() {
            answer.await;
            report(i + 1, total);
        }
        self.deferred.check()
    }

    /// Resolves when everything submitted before this call is done.
    #[cfg(target_arch = "wasm32")]
    pub fn done(&self) -> Signal<()> {
        let done = Signal::new();
        let set = done.clone();
        self.queue.on_submitted_work_done(move || set.set(()));
        done
    }

    /// Makes callbacks run soon after this submission is done, instead of after everything submitted later.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn watch(&self, submitted: wgpu::SubmissionIndex) {
        self.waiter.watch(submitted);
    }

    /// The event loop runs callbacks.
    #[cfg(target_arch = "wasm32")]
    pub fn watch(&self, _: wgpu::SubmissionIndex) {}
}

/// A thread that waits for the device, since callbacks run only during a poll. In the browser the event loop polls.
#[cfg(not(target_arch = "wasm32"))]
mod waiter {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::JoinHandle;

    use super::Deferred;

    pub struct Waiter {
        /// `None` only while it is dropped.
        submissions: Option<Sender<wgpu::SubmissionIndex>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Waiter {
        pub fn new(device: wgpu::Device, deferred: Arc<Deferred>) -> Self {
            let (submissions, submitted) = channel();
            let errors = deferred.clone();
            let run = move || {
                while let Ok(index) = submitted.recv() {
                    let wait = wgpu::PollType::Wait { submission_index: Some(index), timeout: None };
                    if let Err(e) = device.poll(wait) {
                        errors.set("device", e.to_string());
                    }
                }
            };
            let thread = std::thread::Builder::new().name("wgpu wait".into()).spawn(run);
            if let Err(e) = &thread {
                deferred.set("device", format!("the thread that waits for the device did not start: {e}"));
            }
            Self { submissions: Some(submissions), thread: thread.ok() }
        }

        pub fn watch(&self, submitted: wgpu::SubmissionIndex) {
            if let Some(submissions) = &self.submissions {
                // Fails only if the thread is gone; every read reports that.
                let _ = submissions.send(submitted);
            }
        }
    }

    impl Drop for Waiter {
        fn drop(&mut self) {
            self.submissions = None;
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
