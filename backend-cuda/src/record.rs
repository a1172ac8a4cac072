//! Steps: ops as they come, or captured into a graph.

use std::{collections::HashSet, rc::Rc};

use cudarc::driver::{result, sys};
use selkie_core::{
    Result,
    backend::{Handle, Ops},
    ops::{Access, Op},
};

use crate::{
    backend::Cuda,
    driver::{Graph, Kernel, Stream, named},
    launch::{Gemm, Launch},
    memory::Buf,
    plan,
};

/// Work that needs no compiler and no measurement any more.
pub(crate) enum Ready {
    Kernel(Rc<Kernel>, Launch),
    Gemm(Gemm),
}

/// Launches a kernel; `begun` says whether a kernel of the same step stands before it, and is true afterwards.
fn launch(
    stream: &Stream,
    kernel: &Kernel,
    l: &Launch,
    begun: &mut bool,
) -> std::result::Result<(), result::DriverError> {
    let [x, y, z] = l.grid;
    if x == 0 || y == 0 || z == 0 {
        return Ok(());
    }
    let early = std::mem::replace(begun, true) && kernel.early && l.early;
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
    // SAFETY: the plan passes what the kernel's signature asks for; addresses come from checked tensors that the caller
    // keeps alive; the driver copies the parameters before it returns.
    unsafe { sys::cuLaunchKernelEx(&raw const config, kernel.function, params.as_mut_ptr(), std::ptr::null_mut()) }
        .result()
}

/// An open step.
pub struct Rec<'a> {
    cuda: &'a Cuda,
    /// Work to capture; none = ops run as they come.
    pub(crate) recorded: Option<Vec<(&'static str, Ready)>>,
    pub(crate) keep: Vec<Buf>,
    /// A kernel of this step was launched.
    begun: bool,
    /// Buffers that this step has written.
    written: HashSet<usize>,
    /// Buffers that are written by kernels which may still run when the next one starts.
    running: HashSet<usize>,
    /// Ops that may become one kernel with the next.
    pending: Vec<Op<Buf>>,
}

impl<'a> Rec<'a> {
    pub(crate) fn new(cuda: &'a Cuda, recorded: Option<Vec<(&'static str, Ready)>>) -> Self {
        Self {
            cuda,
            recorded,
            keep: Vec::new(),
            begun: false,
            written: HashSet::new(),
            running: HashSet::new(),
            pending: Vec::new(),
        }
    }
}

impl Rec<'_> {
    /// Whether no earlier op of the step wrote what `op` updates in place.
    fn untouched(&self, op: &Op<Buf>) -> bool {
        op.tensors().iter().all(|(access, t)| *access != Access::InPlace || !self.written.contains(&t.buf.id()))
    }

    /// Whether what experts read of this step was there before the kernel ahead started; what they combine was not.
    fn settled(&self, op: &Op<Buf>) -> bool {
        let Op::ExpertMatmul(a) = op else { return false };
        !self.running.contains(&a.ids.buf.id()) && (a.combine.is_some() || !self.running.contains(&a.x.buf.id()))
    }

    /// Enqueues or records ops: one, or several that are one kernel.
    fn emit(&mut self, ops: &[Op<Buf>]) -> Result<()> {
        let Some(last) = ops.last() else { return Ok(()) };
        let target = self.cuda.target(self.untouched(last), self.settled(&ops[0]));
        let ready = match plan::fused(ops, &target) {
            Some(work) => vec![self.cuda.prepare(last.name(), &work)?],
            None => self.cuda.ready(last, &target)?,
        };
        if matches!(ready.last(), Some(Ready::Kernel(_, l)) if l.spec.starts_next_late()) {
            self.running.clear();
        }
        for (access, t) in ops.iter().flat_map(Op::tensors) {
            if access != Access::Read {
                self.written.insert(t.buf.id());
                self.running.insert(t.buf.id());
            }
            if self.recorded.is_some() {
                self.keep.push(t.buf.clone());
            }
        }
        let name = last.name();
        match &mut self.recorded {
            None => ready.iter().try_for_each(|r| self.cuda.enqueue(name, r, &mut self.begun)),
            Some(list) => {
                // As planned: a later op may replace the arena.
                self.keep.extend(self.cuda.scratch.borrow().clone());
                list.extend(ready.into_iter().map(|r| (name, r)));
                Ok(())
            }
        }
    }

    /// Whoever waits for more goes alone.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let ops = std::mem::take(&mut self.pending);
        self.emit(&ops)
    }
}

impl Ops<Buf> for Rec<'_> {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        let target = self.cuda.target(false, false);
        self.pending.push(op);
        if self.pending.len() > 1 && plan::fused(&self.pending, &target).is_none() {
            let op = self.pending.pop();
            self.flush()?;
            self.pending.extend(op);
        }
        if plan::may_go_on(&self.pending, &target) { Ok(()) } else { self.flush() }
    }
}

/// A recorded step: a CUDA graph and everything that it touches.
pub struct Tape {
    pub(crate) graph: Graph,
    _kernels: Vec<Rc<Kernel>>,
    _buffers: Vec<Buf>,
}

impl Cuda {
    /// Enqueues prepared work; `begun` as for [`launch`].
    pub(crate) fn enqueue(&self, op: &'static str, ready: &Ready, begun: &mut bool) -> Result<()> {
        self.enqueue_captured(op, ready, begun)?;
        if self.synchronous { self.stream.wait(op) } else { Ok(()) }
    }

    /// Captures prepared work, which touches `keep`.
    pub(crate) fn tape(&self, list: Vec<(&'static str, Ready)>, mut keep: Vec<Buf>) -> Result<Tape> {
        keep.sort_by_key(Handle::id);
        keep.dedup_by_key(|b| b.id());
        let mut begun = false;
        let all = || list.iter().try_for_each(|(op, r)| self.enqueue_captured(op, r, &mut begun));
        let graph = Graph::capture(&self.stream, all)?;
        let kernels = list.into_iter().filter_map(|(_, r)| match r {
            Ready::Kernel(k, _) => Some(k),
            Ready::Gemm(_) => None,
        });
        Ok(Tape { graph, _kernels: kernels.collect(), _buffers: keep })
    }

    /// Enqueues within a capture, where waiting is not allowed.
    fn enqueue_captured(&self, op: &'static str, ready: &Ready, begun: &mut bool) -> Result<()> {
        match ready {
            Ready::Kernel(kernel, l) => named(op, launch(&self.stream, kernel, l, begun)),
            Ready::Gemm(g) => {
                *begun = true;
                self.blas.as_ref().expect("prepared").run(&self.stream, g)
            }
        }
    }
}
