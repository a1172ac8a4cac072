//! Device memory, the staging ring for writes, and reads in flight.

use std::{
    cell::Cell,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    task::{Context as Wake, Poll},
};

use cudarc::driver::{result, sys};
use selkie_core::{Error, Result, backend::Handle, ranks::Arriving};

use crate::{
    backend::Cuda,
    driver::{Context, Event, Retained, Stream, memory, named},
    faults::Faults,
    launch::Address,
};

/// Device bytes; freed with the last handle.
#[derive(Clone, Debug)]
pub struct Buf(Rc<Allocation>);

#[derive(Debug)]
struct Allocation {
    address: u64,
    bytes: u64,
    id: usize,
    _context: Rc<Context>,
}

thread_local! {
    static NEXT_ID: Cell<usize> = const { Cell::new(1) };
}

impl Buf {
    /// `bytes` zeroed bytes; `label` names them when they do not fit.
    pub fn alloc(context: &Rc<Context>, stream: &Stream, label: &str, bytes: u64) -> Result<Self> {
        // 16 spare bytes: the widest access of a kernel that is guarded by element, not by width.
        // SAFETY: a plain allocation.
        let address = match unsafe { result::malloc_sync(bytes.max(1) as usize + 16) } {
            Ok(p) => p,
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = memory().map_or(0, |(free, _)| free);
                return Err(Error::OutOfMemory { what: label.into(), asked: bytes, free });
            }
            Err(e) => return named(label, Err(e)),
        };
        let id = NEXT_ID.replace(NEXT_ID.get() + 1);
        let buf = Self(Rc::new(Allocation { address, bytes, id, _context: context.clone() }));
        // SAFETY: the range was just allocated.
        named(label, unsafe { result::memset_d8_async(address, 0, bytes as usize + 16, stream.raw) })?;
        Ok(buf)
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

impl Address for Buf {
    fn address(&self) -> u64 {
        self.0.address
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated once; freeing waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Pinned host memory.
#[derive(Debug)]
pub struct Pinned {
    /// The first byte.
    pub at: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// `write_combined` memory is fast to fill and very slow to read.
    fn new(bytes: usize, write_combined: bool) -> Result<Self> {
        Self::alloc(bytes, if write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 })
    }

    /// Memory that kernels can write to.
    pub fn mapped(bytes: usize) -> Result<Self> {
        Self::alloc(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP)
    }

    /// Where kernels find [`mapped`](Self::mapped) memory.
    pub fn on_device(&self) -> Result<u64> {
        let mut at = 0;
        // SAFETY: mapped when it was allocated; `at` is valid for the call.
        named("mapped memory", unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, self.at.cast(), 0) }.result())?;
        Ok(at)
    }

    fn alloc(bytes: usize, flags: u32) -> Result<Self> {
        // SAFETY: a plain allocation.
        let at = named("pinned memory", unsafe { result::malloc_host(bytes, flags) })?;
        Ok(Self { at: at.cast(), bytes })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once.
        let _ = unsafe { result::free_host(self.at.cast()) };
    }
}

/// Pinned segments that writes pass through: the caller's bytes are free as soon as they are copied here.
#[derive(Debug)]
pub struct Ring {
    segments: Vec<Segment>,
    current: usize,
    used: usize,
}

#[derive(Debug)]
struct Segment {
    memory: Pinned,
    /// Reached when the copies out of the segment are done; meaningful once it was left.
    done: Event,
    left: bool,
}

const SEGMENT_BYTES: usize = 4 << 20;
const SEGMENTS: usize = 4;

impl Ring {
    /// Allocates the segments.
    pub fn new() -> Result<Self> {
        let segment =
            |_| Ok(Segment { memory: Pinned::new(SEGMENT_BYTES, true)?, done: Event::new(false)?, left: false });
        Ok(Self { segments: (0..SEGMENTS).map(segment).collect::<Result<_>>()?, current: 0, used: 0 })
    }

    /// Copies `bytes` to the device address, in the order of the stream.
    pub fn write(&mut self, stream: &Stream, to: u64, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            if self.used == SEGMENT_BYTES {
                let s = &mut self.segments[self.current];
                s.done.record(stream)?;
                s.left = true;
                self.current = (self.current + 1) % SEGMENTS;
                self.used = 0;
                let s = &mut self.segments[self.current];
                if s.left {
                    s.done.wait("write")?;
                    s.left = false;
                }
            }
            let n = (bytes.len() - at).min(SEGMENT_BYTES - self.used);
            let memory = &self.segments[self.current].memory;
            debug_assert!(self.used + n <= memory.bytes);
            // SAFETY: the part of the segment is within it, not in flight, and stays so until its event is reached; the
            // device range is the caller's, checked against the buffer.
            unsafe {
                let part = std::slice::from_raw_parts_mut(memory.at.add(self.used), n);
                part.copy_from_slice(&bytes[at..at + n]);
                named("write", result::memcpy_htod_async(to + at as u64, part, stream.raw))?;
            }
            at += n;
            // Copies of the next write start at a cache line of their own.
            self.used = (self.used + n).next_multiple_of(64).min(SEGMENT_BYTES);
        }
        Ok(())
    }
}

/// Pinned buffers of finished reads, used again.
pub type Pool = Arc<Mutex<Vec<Landing>>>;

/// Where a read arrives.
#[derive(Debug)]
pub struct Landing {
    memory: Pinned,
    done: Event,
}

// SAFETY: the driver's handles and its memory are those of the process, and its calls may come from any thread.
unsafe impl Send for Landing {}

impl Landing {
    /// One of the pool, or a new one, that `bytes` bytes of a device address arrive in. `before` comes before one is allocated.
    fn enqueue(
        pool: &Pool,
        stream: &Stream,
        from: u64,
        bytes: usize,
        before: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let kept = {
            let mut free = pool.lock().unwrap_or_else(PoisonError::into_inner);
            free.iter().position(|l| l.memory.bytes >= bytes).map(|i| free.swap_remove(i))
        };
        let landing = match kept {
            Some(l) => l,
            None => {
                before()?;
                Self { memory: Pinned::new(bytes.max(4096).next_power_of_two(), false)?, done: Event::new(false)? }
            }
        };
        // SAFETY: the landing's owner keeps it until the event is reached.
        unsafe {
            let to = std::slice::from_raw_parts_mut(landing.memory.at, bytes);
            named("read", result::memcpy_dtoh_async(to, from, stream.raw))?;
        }
        landing.done.record(stream)?;
        Ok(landing)
    }

    /// The bytes, once the event is reached.
    fn take(self, bytes: usize, pool: &Pool) -> Vec<u8> {
        // SAFETY: the copy is done.
        let data = unsafe { std::slice::from_raw_parts(self.memory.at, bytes) }.to_vec();
        // Large landings are rare and would pin much memory.
        if self.memory.bytes <= 16 << 20 {
            pool.lock().unwrap_or_else(PoisonError::into_inner).push(self);
        }
        data
    }
}

/// A read in flight that another thread waits for.
struct FromRank {
    landing: Option<Landing>,
    bytes: usize,
    pool: Pool,
    context: Arc<Retained>,
}

impl Arriving for FromRank {
    fn take(&mut self) -> Option<Result<Vec<u8>>> {
        let landing = self.landing.as_ref().expect("a read is taken once");
        match landing.done.is_reached("a step run before this read") {
            Ok(false) => None,
            Ok(true) => Some(self.landing.take().map(|l| Ok(l.take(self.bytes, &self.pool))).expect("there until now")),
            Err(e) => Some(Err(e)),
        }
    }
}

impl Drop for FromRank {
    fn drop(&mut self) {
        if let Some(landing) = &self.landing {
            // The copy may still be writing to the landing, which is freed in its context.
            let _ = self.context.enter();
            let _ = landing.done.wait("a dropped read");
        }
    }
}

/// A read in flight. Polling waits for it: the engine's thread has nothing else to do.
pub struct Read {
    state: Option<Result<(Landing, usize, Pool)>>,
    faults: Rc<Faults>,
}

impl Read {
    /// Enqueues a copy of `bytes` bytes from a device address. `keep` is alive until the copy is enqueued, and freeing
    /// device memory waits for the stream.
    pub fn start(pool: &Pool, faults: &Rc<Faults>, stream: &Stream, from: u64, bytes: usize) -> Self {
        let state = Self::enqueue(pool, stream, from, bytes).map_err(|e| faults.name(e));
        Self { state: Some(state), faults: faults.clone() }
    }

    fn enqueue(pool: &Pool, stream: &Stream, from: u64, bytes: usize) -> Result<(Landing, usize, Pool)> {
        Ok((Landing::enqueue(pool, stream, from, bytes, || Ok(()))?, bytes, pool.clone()))
    }

    /// The same for another thread to wait for.
    pub(crate) fn start_for_any(cuda: &Cuda, from: u64, bytes: usize) -> Result<Box<dyn Arriving>> {
        let (pool, context) = (cuda.pool().clone(), cuda.context.retain());
        let settle = || cuda.stream.wait("the steps before");
        let landing = Landing::enqueue(&pool, &cuda.stream, from, bytes, settle);
        let landing = Some(landing.map_err(|e| cuda.faults().name(e))?);
        Ok(Box::new(FromRank { landing, bytes, pool, context }))
    }
}

impl Future for Read {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Wake<'_>) -> Poll<Self::Output> {
        let state = self.state.take().expect("a read is awaited once");
        Poll::Ready(state.and_then(|(landing, bytes, pool)| {
            landing.done.wait("a step run before this read").map_err(|e| self.faults.name(e))?;
            Ok(landing.take(bytes, &pool))
        }))
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        if let Some(Ok((landing, _, _))) = &self.state {
            // The copy may still be writing to the landing.
            let _ = landing.done.wait("a dropped read");
        }
    }
}
