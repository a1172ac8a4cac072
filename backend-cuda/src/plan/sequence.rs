//! The ops of a step in order: which become one kernel, and what each may read before the kernels before it are complete.

use std::collections::HashSet;

use selkie_core::{
    Result,
    ops::{Access, ExpertMatmul, Op, Round},
};

use super::{Arena, Device, Hazards, fused, may_fuse, plan, scratch};
use crate::{
    launch::{Address, Work},
    spec::Waits,
};

/// Ops that are computed together and their launches, in order.
#[derive(Debug)]
pub struct Planned<B> {
    /// One op, or several that share kernels.
    pub ops: Vec<Op<B>>,
    /// Their launches.
    pub work: Vec<Work>,
}

/// Plans the ops of one step as they come. Each is planned once; a chain that grows by an op is planned again as a whole.
#[derive(Debug)]
pub struct Sequencer<B> {
    device: Device,
    /// Ops that may share kernels with the next.
    pending: Vec<Op<B>>,
    /// Their kernels, if there are several.
    pending_work: Option<Vec<Work>>,
    /// Buffers that this step has written.
    written: HashSet<usize>,
    /// Buffers written by kernels that may still run when the next one starts.
    running: HashSet<usize>,
}

impl<B: Address> Sequencer<B> {
    /// A step without ops.
    pub fn new(device: Device) -> Self {
        Self { device, pending: Vec::new(), pending_work: None, written: HashSet::new(), running: HashSet::new() }
    }

    /// Adds `op` and hands over what is complete with it. `arena` provides at least the given bytes of scratch memory.
    ///
    /// # Errors
    /// Those of [`plan`], of `arena` and of `emit`.
    pub fn push(
        &mut self,
        op: Op<B>,
        arena: &mut dyn FnMut(u64) -> Result<Arena>,
        emit: &mut dyn FnMut(Planned<B>) -> Result<()>,
    ) -> Result<()> {
        self.pending.push(op);
        if self.pending.len() > 1 {
            let bytes = self.pending.iter().map(|op| scratch(op, &self.device)).max().unwrap_or(0);
            let joined = fused(&self.pending, &self.device, &arena(bytes)?, &self.hazards(&self.pending));
            if joined.is_some() {
                self.pending_work = joined;
            } else {
                let op = self.pending.pop();
                // A rounding goes on with its product, not with the ops before it.
                let joined = self.pending.len() > 1;
                let round = self.pending.pop_if(|last| joined && matches!(last, Op::Round(_)));
                if round.is_some() {
                    self.pending_work.iter_mut().for_each(|work| work.truncate(work.len() - 1));
                }
                self.finish(arena, emit)?;
                return round.into_iter().chain(op).try_for_each(|op| self.push(op, arena, emit));
            }
        }
        if may_fuse(&self.pending, &self.device) { Ok(()) } else { self.finish(arena, emit) }
    }

    /// Hands over the pending ops without waiting for further fusion.
    ///
    /// # Errors
    /// As of [`Sequencer::push`].
    pub fn finish(
        &mut self,
        arena: &mut dyn FnMut(u64) -> Result<Arena>,
        emit: &mut dyn FnMut(Planned<B>) -> Result<()>,
    ) -> Result<()> {
        let ops = std::mem::take(&mut self.pending);
        let Some(last) = ops.last() else { return Ok(()) };
        let work = match self.pending_work.take() {
            Some(work) => work,
            None => {
                let arena = arena(scratch(last, &self.device))?;
                plan(last, &self.device, &arena, &self.hazards(&ops))?
            }
        };
        // A kernel that triggers late has seen everything before it complete.
        if matches!(work.last(), Some(Work::Kernel(l)) if l.spec.file().waits() == Waits::Late) {
            self.running.clear();
        }
        for (access, t) in ops.iter().flat_map(Op::tensors) {
            if access != Access::Read {
                self.written.insert(t.buf.id());
                self.running.insert(t.buf.id());
            }
        }
        emit(Planned { ops, work })
    }

    /// The hazards of ops that are computed together after those handed over so far.
    fn hazards(&self, ops: &[Op<B>]) -> Hazards {
        let unwritten = |(access, t): &(Access, &selkie_core::tensor::Tensor<B>)| {
            *access != Access::InPlace || !self.written.contains(&t.buf.id())
        };
        let running = |t: &selkie_core::tensor::Tensor<B>| self.running.contains(&t.buf.id());
        Hazards {
            state_unwritten: ops.last().is_some_and(|op| op.tensors().iter().all(unwritten)),
            inputs_complete: match ops {
                [Op::ExpertMatmul(a), ..] => !running(&a.ids) && (a.combine.is_some() || !running(&a.x)),
                [Op::Round(round), Op::ExpertMatmul(a), ..] => {
                    !running(&a.ids) && (a.combine.is_some() || !running(&round.x))
                }
                [Op::Route(route), Op::ExpertMatmul(ExpertMatmul { x, .. }), ..]
                | [Op::Route(route), Op::Round(Round { x, .. }), ..] => !running(&route.logits) && !running(x),
                _ => false,
            },
        }
    }
}
