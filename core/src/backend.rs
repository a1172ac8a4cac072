//! The backend boundary: everything that a device does for the engine, without models or policy.
//!
//! Model code is written once over [`Ops`]; a backend executes recorded ops on its device. There is no tensor algebra
//! and no graph compiler: an [`Op`] is a semantic step (a convolution with its state, attention over pages) that
//! writes into tensors that exist already. Inside a step nothing is allocated, compiled or awaited.

use std::{future::Future, time::Duration};

use crate::error::Result;
use crate::format::Format;
use crate::ops::{Feature, Op, RowBlock};
use crate::saved::{Heap, HostMemory, Reads, Room, Saving};
use crate::source::Bytes;
use crate::tensor::{DType, Tensor};

/// A counted handle to device bytes.
pub trait Handle: Clone + 'static {
    /// Same number for handles to the same bytes, different for others that are alive.
    fn id(&self) -> usize;
    /// Size in bytes.
    fn bytes(&self) -> u64;
}

/// Which products with codes that are integers round their activations to 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int8 {
    /// None.
    Never,
    /// [`Matmul`](crate::ops::Matmul) of few rows of x.
    Few {
        /// At most so many.
        rows: usize,
        /// Weights that the product has at least.
        weights: usize,
    },
    /// All, those with experts too.
    Always,
}

impl Int8 {
    /// Its word in the numerics of bundles.
    pub(crate) fn word(self) -> String {
        match self {
            Self::Never => "false".into(),
            Self::Few { rows, weights } => format!("{rows}x{weights}"),
            Self::Always => "true".into(),
        }
    }

    /// Whether [`Matmul`](crate::ops::Matmul) of `x` rows of x and `w` weights does.
    pub fn takes(self, x: usize, w: usize) -> bool {
        match self {
            Self::Never => false,
            Self::Few { rows, weights } => x <= rows && w >= weights,
            Self::Always => true,
        }
    }
}

/// Facts about a device, as plain data.
#[derive(Clone, Debug)]
pub struct Caps {
    /// Name of the backend: `cpu`, `cuda` or `wgpu`.
    pub backend: &'static str,
    /// Name of the device, for people.
    pub device: String,
    /// Bytes of device memory, where that can be asked.
    pub memory: Option<u64>,
    /// Dtype of activations.
    pub act: DType,
    /// Precision of the factors in products of many rows: that of the weights, or less than `act`. Products that are
    /// [precise](crate::ops::Matmul::precise) have 22 bits.
    pub products: DType,
    /// The products with codes that are integers whose activations are rounded to 8 bits, see [`crate::format::round_group`].
    pub int8: Int8,
    /// Activations are rounded where a recipe says so, see [`crate::ops::Round`].
    pub rounds: bool,
    /// Dtype of KV pages.
    pub kv: DType,
    /// Dtype of convolution states.
    pub conv: DType,
    /// Dtype of recurrent states.
    pub state: DType,
    /// Largest view that one op may bind, in bytes; pools and weights are split so that every piece fits.
    pub max_binding: u64,
    /// Ops run asynchronously: the next step should be enqueued before the ids of the last one are read.
    pub asynchronous: bool,
    /// Ranks W that hold a share of the weights and states each and run the same ops; 1 for a single device. Sizes of memory
    /// are those of one rank.
    pub ranks: usize,
}

/// A device that a backend found, or the reason why it found none.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name of the backend: `cpu`, `cuda` or `wgpu`.
    pub backend: &'static str,
    /// The backend's number for the device; `None` for the entry that says why there is no device.
    pub index: Option<usize>,
    /// Name of the device, for people; `None` if there is no device.
    pub name: Option<String>,
    /// Bytes of device memory, where that can be asked.
    pub memory: Option<u64>,
    /// `Err` with the reason and a remedy if the engine cannot run there.
    pub usable: Result<(), String>,
}

/// An open step: ops are recorded into it, in order.
pub trait Ops<Buf: Handle> {
    /// Adds `op`. Errors name the op.
    fn op(&mut self, op: Op<Buf>) -> Result<()>;
}

/// How often whoever waits asks [`Backend::look`] of a device on which others wait.
pub const LOOK: Duration = Duration::from_millis(250);

/// A device that runs ops.
pub trait Backend: Sized + 'static {
    /// A counted handle to device bytes.
    type Buf: Handle;
    /// An open step.
    type Rec<'a>: Ops<Self::Buf>;
    /// A closed step that can be played again and owns what it touches: a CUDA graph, a list of dispatches or of calls.
    type Tape: 'static;
    /// A read in flight: the only thing that waits.
    type Read: Future<Output = Result<Vec<u8>>> + 'static;

    /// Facts about the device.
    fn caps(&self) -> &Caps;
    /// Bytes of device memory free now, where that can be asked.
    fn free_memory(&self) -> Option<u64> {
        None
    }
    /// Whether the device has failed at what runs on it or ran last, without waiting.
    ///
    /// # Errors
    /// Its failure.
    fn look(&self) -> Result<()> {
        Ok(())
    }
    /// `bytes` zeroed bytes. `label` names them in errors and debuggers.
    fn alloc(&self, label: &str, bytes: u64) -> Result<Self::Buf>;
    /// Bytes of a buffer for coded rows: `dims` are `[n, bytes]` or, for experts, `[E, n, bytes]`. Not fewer than are stored.
    fn coded_bytes(&self, format: Format, dims: &[usize]) -> u64 {
        let _ = format;
        dims.iter().map(|d| *d as u64).product()
    }
    /// Brings coded rows into the order in which the device's kernels read them. They were written to the start of a buffer of
    /// [`Backend::coded_bytes`] as they are stored. Called once for each block, before an op reads it.
    fn arrange(&self, block: &RowBlock<Self::Buf>) -> Result<()> {
        let _ = block;
        Ok(())
    }
    /// Whether it has kernels for what not every backend has.
    fn has(&self, feature: Feature) -> bool {
        let _ = feature;
        true
    }
    /// Whether the device computes in host memory, so that [`Backend::adopt`] works.
    fn adopts(&self) -> bool {
        false
    }
    /// Uses host bytes in place, read-only and at any alignment; `None` if the device cannot, and the caller uploads
    /// them.
    fn adopt(&self, bytes: &Bytes) -> Option<Self::Buf>;
    /// Fills a contiguous tensor with values uniform in `-half .. half`, equal for equal seeds, and returns `true`;
    /// `false` if the device cannot, and the caller uploads some. For the weights of benches.
    fn fill_random(&self, t: &Tensor<Self::Buf>, seed: u32, half: f32) -> Result<bool> {
        let _ = (t, seed, half);
        Ok(false)
    }
    /// Copies `bytes` to `dst` from byte `at` on, ordered before everything played later.
    fn write(&self, dst: &Self::Buf, at: u64, bytes: &[u8]) -> Result<()>;
    /// [`Backend::write`] to the bytes of one rank; `write` is for all of them.
    fn write_on(&self, rank: usize, dst: &Self::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        debug_assert_eq!(rank, 0, "a backend with one rank");
        self.write(dst, at, bytes)
    }
    /// Scratch bytes that `op` needs on this device, in this step or in any with fewer tokens, rows or chunks. Called at load,
    /// for the largest step.
    fn scratch(&self, op: &Op<Self::Buf>) -> u64;
    /// Makes the scratch arena at least `bytes` large. Called at load, never within a step.
    fn reserve(&self, bytes: u64) -> Result<()>;
    /// Announces a step like one that will run soon, so that a device can compile its kernels concurrently with earlier
    /// work. Nothing runs.
    fn expect(&self, step: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<()> {
        let _ = step;
        Ok(())
    }
    /// Records a step and runs it once.
    fn run(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<()>;
    /// Records a step for [`Backend::play`] without running it.
    fn record(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<Self::Tape>;
    /// Runs a recorded step.
    fn play(&self, tape: &Self::Tape) -> Result<()>;
    /// Reads the elements of `src` (contiguous), after everything run before. A deferred device error fails it.
    fn read(&self, src: &Tensor<Self::Buf>) -> Self::Read;
    /// [`Backend::read`] of what one rank has; `read` is of rank 0.
    fn read_on(&self, rank: usize, src: &Tensor<Self::Buf>) -> Self::Read {
        debug_assert_eq!(rank, 0, "a backend with one rank");
        self.read(src)
    }
    /// Host memory for `bytes` bytes of copies that [`Backend::save`] makes. Called at load, before states and pages get what is
    /// left of the device's memory.
    fn host_memory(&self, bytes: u64) -> Result<Box<dyn HostMemory>> {
        let _ = bytes;
        Ok(Box::new(Heap))
    }
    /// Copies row `row` of each of some contiguous tensors, one after the other, into `room`, which has as many bytes: what
    /// everything run before has left there, whatever is run later. Waits for nothing.
    fn save(&self, pools: &[Tensor<Self::Buf>], row: usize, room: Box<dyn Room>) -> Result<Box<dyn Saving>> {
        let reads = pools.iter().map(|pool| self.read(&pool.slice_rows(row, 1)));
        // Reads are enqueued now, not when they are awaited.
        Ok(Box::new(Reads::new(reads, room)))
    }
    /// Begins to bring saved bytes to the device; true once [`Backend::restore`] of them delays nothing that runs. It may be left out.
    ///
    /// # Errors
    /// A device error.
    fn fetch(&self, saved: &Bytes) -> Result<bool> {
        let _ = saved;
        Ok(true)
    }
    /// Copies saved bytes back into row `row` of such tensors, ordered after everything run before and before everything run
    /// later. Waits for nothing.
    fn restore(&self, saved: &Bytes, pools: &[Tensor<Self::Buf>], row: usize) -> Result<()> {
        let mut at = 0;
        for pool in pools {
            let bytes = pool.row_len() * pool.dtype.bytes();
            self.write(&pool.buf, pool.slice_rows(row, 1).byte_offset() as u64, &saved[at..at + bytes])?;
            at += bytes;
        }
        Ok(())
    }
    /// Bytes of the restores that the device has completed since the last call, and the milliseconds that they took it; `None` if a
    /// restore takes the caller's time.
    fn restored(&self) -> Option<(u64, f64)> {
        None
    }
}

/// An [`Ops`] that runs nothing and finds the largest scratch any op needs.
pub struct Measure<'a, B: Backend> {
    backend: &'a B,
    /// Largest scratch so far, in bytes.
    pub scratch: u64,
}

impl<'a, B: Backend> Measure<'a, B> {
    /// Starts with no scratch.
    pub fn new(backend: &'a B) -> Self {
        Self { backend, scratch: 0 }
    }
}

impl<B: Backend> Ops<B::Buf> for Measure<'_, B> {
    fn op(&mut self, op: Op<B::Buf>) -> Result<()> {
        op.check();
        self.scratch = self.scratch.max(self.backend.scratch(&op));
        Ok(())
    }
}
