//! The device behind the backend: errors that arrive late, waiting for results, uploads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use selkie_core::error::{Error, Result};

/// Uploads are handed to the device in portions of this size, so that their staging memory is reused.
const SUBMIT_BYTES: u64 = 8 << 20;

/// The first error that nobody was waiting for; it fails the next call that can report one.
#[derive(Default)]
pub struct Deferred(Mutex<Option<(String, String)>>);

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the locks guard is valid at every moment.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deferred {
    /// Keeps the first error only: the others follow from it.
    pub fn set(&self, op: &str, why: impl Into<String>) {
        lock(&self.0).get_or_insert_with(|| (op.into(), why.into()));
    }

    /// The error, if there is one. It stays: after it no result can be trusted.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.0) {
            Some((op, why)) => Err(Error::Device { op: op.clone(), why: why.clone() }),
            None => Ok(()),
        }
    }
}

/// The op that a wgpu message is about, by the label of a pipeline, bind group or buffer in it.
fn op_of(message: &str) -> String {
    let label = message.split("'").nth(1).map(str::trim).filter(|l| !l.is_empty() && l.len() < 80);
    label.unwrap_or("wgpu").split('.').next().unwrap_or("wgpu").to_owned()
}

/// Device, queue and what must outlive both.
pub struct Gpu {
    /// The device.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    /// Errors that nobody waited for.
    pub deferred: Arc<Deferred>,
    /// Bytes written since the last submission.
    pending: Mutex<u64>,
    #[cfg(not(target_arch = "wasm32"))]
    waiter: waiter::Waiter,
}

impl Gpu {
    /// Takes a device over: its errors come here from now on.
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

    /// Waits until a portion is copied: uploads would otherwise pile up in host memory.
    #[cfg(not(target_arch = "wasm32"))]
    fn limit_staging(&self, submitted: wgpu::SubmissionIndex) {
        let wait = wgpu::PollType::Wait { submission_index: Some(submitted), timeout: None };
        if let Err(e) = self.device.poll(wait) {
            self.deferred.set("write", e.to_string());
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn limit_staging(&self, _: wgpu::SubmissionIndex) {}

    /// Has callbacks of what was submitted run soon.
    pub fn wake(&self) {
        #[cfg(not(target_arch = "wasm32"))]
        self.waiter.wake();
    }
}

/// A thread that waits for the device, since callbacks only run while somebody polls. In the browser the event loop does.
#[cfg(not(target_arch = "wasm32"))]
mod waiter {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::JoinHandle;

    use super::Deferred;

    pub struct Waiter {
        /// `None` only while it is dropped.
        wake: Option<Sender<()>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Waiter {
        pub fn new(device: wgpu::Device, deferred: Arc<Deferred>) -> Self {
            let (wake, woken) = channel();
            let run = move || {
                while woken.recv().is_ok() {
                    while woken.try_recv().is_ok() {}
                    if let Err(e) = device.poll(wgpu::PollType::wait_indefinitely()) {
                        deferred.set("device", e.to_string());
                    }
                }
            };
            let thread = std::thread::Builder::new().name("wgpu wait".into()).spawn(run).ok();
            Self { wake: Some(wake), thread }
        }

        pub fn wake(&self) {
            if let Some(wake) = &self.wake {
                // Without the thread the read's own polling still makes progress.
                let _ = wake.send(());
            }
        }
    }

    impl Drop for Waiter {
        fn drop(&mut self) {
            self.wake = None;
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
