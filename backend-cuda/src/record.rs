//! Steps: ops as they come, or captured into a graph.

use std::{
    collections::HashSet,
    rc::Rc,
    time::{Duration, Instant},
};

use cudarc::driver::{result, sys};
use selkie_core::{
    Result,
    backend::{Handle, Ops},
    ops::Op,
};

use crate::{
    backend::Cuda,
    driver::{Graph, Kernel, Stream, named},
    launch::{Gemm, Launch, Work},
    memory::Buf,
    plan::{Planned, Sequencer},
};

/// Work that needs no compiler and no measurement any more.
pub(crate) enum Ready {
    Kernel(Rc<Kernel>, Launch),
    Gemm(Gemm),
}

/// Launches a kernel; `after_kernel` says whether a kernel of the same step was launched before it, and is true afterwards.
fn launch(
    stream: &Stream,
    kernel: &Kernel,
    l: &Launch,
    after_kernel: &mut bool,
) -> std::result::Result<(), result::DriverError> {
    let [x, y, z] = l.grid;
    if x == 0 || y == 0 || z == 0 {
        return Ok(());
    }
    let early = std::mem::replace(after_kernel, true) && kernel.early && l.early;
    let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: i32::from(early) };
    let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: l.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: l.shared,
        hStream: stream.raw,
        attrs: &raw mut attribute,
        numAttrs: u32::from(early),
    };
    let mut params: Vec<*mut std::ffi::c_void> =
        l.args.starts.iter().map(|&i| (&raw const l.args.words[i]).cast_mut().cast()).collect();
    // SAFETY: `Launch::new` took the values of the parameters that the kernel's signature was printed from
    // (`arguments.rs`); addresses come from checked tensors that the caller keeps alive; the driver copies the values before
    // it returns.
    unsafe { sys::cuLaunchKernelEx(&raw const config, kernel.function, params.as_mut_ptr(), std::ptr::null_mut()) }
        .result()
}

/// Work of a step in order, each with the name of its op.
type Steps = Vec<(&'static str, Work)>;

/// An open step.
pub struct Rec<'a> {
    cuda: &'a Cuda,
    sequencer: Sequencer<Buf>,
    /// The step is captured; else ops run as they come.
    capture: bool,
    /// Work that is not enqueued yet: all of a step to capture; of a step that runs, everything from the first kernel on that is not
    /// loaded. Missing kernels are so compiled concurrently.
    deferred: Steps,
    /// The buffers that `deferred` uses.
    keep: Vec<Buf>,
    /// A kernel of this step was launched.
    after_kernel: bool,
}

impl<'a> Rec<'a> {
    pub(crate) fn new(cuda: &'a Cuda, capture: bool) -> Self {
        Self {
            cuda,
            sequencer: Sequencer::new(*cuda.device()),
            capture,
            deferred: Vec::new(),
            keep: Vec::new(),
            after_kernel: false,
        }
    }

    /// Plans `op`, or what is pending if there is none.
    fn sequence(&mut self, op: Option<Op<Buf>>) -> Result<()> {
        let Self { cuda, sequencer, capture, deferred, keep, after_kernel } = self;
        let mut arena = |bytes| cuda.arena(bytes);
        let mut emit = |planned| take(cuda, planned, *capture, deferred, keep, after_kernel);
        match op {
            Some(op) => sequencer.push(op, &mut arena, &mut emit),
            None => sequencer.finish(&mut arena, &mut emit),
        }
    }

    /// Enqueues the rest of a step that runs.
    pub(crate) fn run(mut self) -> Result<()> {
        self.sequence(None)?;
        if self.deferred.is_empty() {
            return Ok(());
        }
        let ready = self.cuda.prepare(std::mem::take(&mut self.deferred))?;
        ready.iter().try_for_each(|(op, r)| self.cuda.enqueue(op, r, &mut self.after_kernel))
    }

    /// Starts to compile what the step needs and forgets it.
    pub(crate) fn request(mut self) -> Result<()> {
        self.sequence(None)
    }

    /// Captures the step.
    pub(crate) fn tape(mut self) -> Result<Tape> {
        self.sequence(None)?;
        let ready = self.cuda.prepare(std::mem::take(&mut self.deferred))?;
        self.cuda.tape(ready, self.keep)
    }
}

/// Enqueues or keeps work.
fn take(
    cuda: &Cuda,
    planned: Planned<Buf>,
    capture: bool,
    deferred: &mut Steps,
    keep: &mut Vec<Buf>,
    after_kernel: &mut bool,
) -> Result<()> {
    let Planned { ops, work } = planned;
    let Some(name) = ops.last().map(Op::name) else { return Ok(()) };
    for work in work {
        let loaded = if capture || !deferred.is_empty() { None } else { cuda.loaded(&work) };
        match loaded {
            Some(ready) => cuda.enqueue(name, &ready, after_kernel)?,
            None => {
                cuda.request(&work);
                deferred.push((name, work));
            }
        }
    }
    if !deferred.is_empty() {
        keep.extend(ops.iter().flat_map(Op::tensors).map(|(_, t)| t.buf.clone()));
        // As planned: a later op may replace the arena.
        keep.extend(cuda.scratch.borrow().clone());
    }
    Ok(())
}

impl Ops<Buf> for Rec<'_> {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        self.sequence(Some(op))
    }
}

/// A recorded step: a CUDA graph and everything that it touches.
pub struct Tape {
    pub(crate) graph: Graph,
    _kernels: Vec<Rc<Kernel>>,
    _buffers: Vec<Buf>,
}

impl Cuda {
    /// Compiles, loads and measures what the work needs, so that running it does neither. Work is requested before.
    pub(crate) fn prepare(&self, steps: Steps) -> Result<Vec<(&'static str, Ready)>> {
        let before = self.compiler.borrow().totals();
        let mut times = Times::default();
        // Products are measured while kernels are compiled.
        for (_, work) in &steps {
            if let Work::Gemm(g) = work {
                times.products += self.choose(g)?;
            }
        }
        let mut missing = HashSet::new();
        let mut ready = Vec::with_capacity(steps.len());
        for (op, work) in steps {
            ready.push((
                op,
                match work {
                    Work::Kernel(l) => {
                        if self.loaded_kernel(&l.spec).is_none() {
                            missing.insert(l.spec.clone());
                        }
                        Ready::Kernel(self.kernel(op, &l, &mut times)?, l)
                    }
                    Work::Gemm(g) => Ready::Gemm(g),
                },
            ));
        }
        if !missing.is_empty() || times.products > 0 {
            let after = self.compiler.borrow().totals();
            tracing::debug!(
                "{} kernels made ready in {:.3} s: waited {:.3} s for images and took {:.3} s to load them; since the \
                 device was opened {} were compiled in {:.3} s of all threads together ({} of them since this step's first \
                 ops) and {} read from disk; {} matrix products measured",
                missing.len(),
                times.started.elapsed().as_secs_f64(),
                times.waiting.as_secs_f64(),
                times.loading.as_secs_f64(),
                after.compiled,
                after.compiling.as_secs_f64(),
                after.compiled - before.compiled,
                after.stored,
                times.products,
            );
        }
        Ok(ready)
    }

    /// Enqueues prepared work; `after_kernel` as for [`launch`].
    pub(crate) fn enqueue(&self, op: &'static str, ready: &Ready, after_kernel: &mut bool) -> Result<()> {
        self.enqueue_captured(op, ready, after_kernel)?;
        if self.synchronous { self.stream.wait(op) } else { Ok(()) }
    }

    /// Captures prepared work, which touches `keep`.
    pub(crate) fn tape(&self, list: Vec<(&'static str, Ready)>, mut keep: Vec<Buf>) -> Result<Tape> {
        keep.sort_by_key(Handle::id);
        keep.dedup_by_key(|b| b.id());
        let mut after_kernel = false;
        let all = || list.iter().try_for_each(|(op, r)| self.enqueue_captured(op, r, &mut after_kernel));
        self.settle_rank()?;
        let graph = Graph::capture(&self.stream, all)?;
        if self.is_rank() {
            graph.upload(&self.stream)?;
            self.settle_rank()?;
        }
        let kernels = list.into_iter().filter_map(|(_, r)| match r {
            Ready::Kernel(k, _) => Some(k),
            Ready::Gemm(_) => None,
        });
        Ok(Tape { graph, _kernels: kernels.collect(), _buffers: keep })
    }

    /// Enqueues within a capture, where waiting is not allowed.
    fn enqueue_captured(&self, op: &'static str, ready: &Ready, after_kernel: &mut bool) -> Result<()> {
        match ready {
            Ready::Kernel(kernel, l) => named(op, launch(&self.stream, kernel, l, after_kernel)),
            Ready::Gemm(g) => {
                *after_kernel = true;
                self.blas.as_ref().expect("products are planned only with cuBLASLt").run(&self.stream, g)
            }
        }
    }
}

/// Where the time of a step's first use goes.
pub(crate) struct Times {
    started: Instant,
    /// For images.
    pub waiting: Duration,
    /// To load images.
    pub loading: Duration,
    /// Products whose algorithm was measured.
    products: usize,
}

impl Default for Times {
    fn default() -> Self {
        Self { started: Instant::now(), waiting: Duration::ZERO, loading: Duration::ZERO, products: 0 }
    }
}
