//! Reference-counted device buffers, and reads from them.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use selkie_core::backend::Handle;
use selkie_core::error::{Error, Result};

use crate::device::{Gpu, lock};

/// A reference-counted handle to a device buffer.
#[derive(Clone)]
pub struct Buf(Rc<Inner>);

struct Inner {
    buffer: wgpu::Buffer,
    id: usize,
    bytes: u64,
    /// Collects the ids of dropped buffers, so that maps keyed by id can remove their entries.
    gone: Rc<RefCell<Vec<usize>>>,
}

impl Buf {
    /// A handle to `buffer`; the caller asked for `bytes` bytes, the buffer may be larger.
    pub(crate) fn new(buffer: wgpu::Buffer, id: usize, bytes: u64, gone: &Rc<RefCell<Vec<usize>>>) -> Self {
        Self(Rc::new(Inner { buffer, id, bytes, gone: gone.clone() }))
    }

    pub(crate) fn buffer(&self) -> &wgpu::Buffer {
        &self.0.buffer
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a browser the memory would otherwise stay until garbage collection. Submitted work still completes.
        #[cfg(target_arch = "wasm32")]
        self.buffer.destroy();
        self.gone.borrow_mut().push(self.id);
    }
}

impl Handle for Buf {
    fn id(&self) -> usize {
        self.0.id
    }

    fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({}, {} bytes)", self.0.id, self.0.bytes)
    }
}

/// A read in flight.
pub struct Read(State);

enum State {
    Failed(Option<Error>),
    Mapping { gpu: Arc<Gpu>, staging: wgpu::Buffer, skip: usize, len: usize, map: Arc<Mutex<Map>> },
}

#[derive(Default)]
struct Map {
    done: Option<Result<(), wgpu::BufferAsyncError>>,
    waker: Option<Waker>,
}

impl Read {
    pub(crate) fn failed(e: Error) -> Self {
        Self(State::Failed(Some(e)))
    }

    /// Submits a copy of `len` bytes from byte `at` of `buffer`, after everything submitted earlier.
    pub(crate) fn new(gpu: &Arc<Gpu>, buffer: &wgpu::Buffer, at: u64, len: usize) -> Self {
        if let Err(e) = gpu.deferred.check() {
            return Self::failed(e);
        }
        // Copies are in whole words.
        let from = at / 4 * 4;
        let size = (at + len as u64).next_multiple_of(4).max(from + 4) - from;
        let staging = gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("read"),
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, from, &staging, 0, size);
        let submitted = gpu.queue.submit([encoder.finish()]);
        let map = Arc::new(Mutex::new(Map::default()));
        let mapped = map.clone();
        staging.slice(..).map_async(wgpu::MapMode::Read, move |result| {
            let mut map = lock(&mapped);
            map.done = Some(result);
            if let Some(waker) = map.waker.take() {
                waker.wake();
            }
        });
        gpu.watch(submitted);
        Self(State::Mapping { gpu: gpu.clone(), staging, skip: (at - from) as usize, len, map })
    }
}

impl Future for Read {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Failed(e) => Poll::Ready(Err(e.take().expect("a future is not polled after it is ready"))),
            State::Mapping { gpu, staging, skip, len, map } => {
                let mut state = lock(map);
                let Some(done) = &state.done else {
                    state.waker = Some(cx.waker().clone());
                    return Poll::Pending;
                };
                gpu.deferred.check()?;
                // Only this read uses the buffer and nothing unmaps it, so mapping fails only if the device is lost. A browser
                // may report the loss later.
                let lost =
                    |why: String| Error::Device { op: "device".into(), why: format!("the device was lost: {why}") };
                done.clone().map_err(|e| lost(e.to_string()))?;
                let view = staging.slice(..).get_mapped_range().map_err(|e| lost(e.to_string()))?;
                let bytes = view[*skip..*skip + *len].to_vec();
                drop(view);
                // In a browser the buffer would otherwise stay until garbage collection.
                staging.destroy();
                Poll::Ready(Ok(bytes))
            }
        }
    }
}
