//! A backend that records the experts of each token, or replaces them by those of another run, and one that rounds the
//! outputs of ops to bf16.

use std::cell::RefCell;
use std::collections::VecDeque;

use half::bf16;
use selkie_core::Result;
use selkie_core::backend::{Backend, Caps, Handle, Ops};
use selkie_core::ops::{Access, Feature, Op};
use selkie_core::source::Bytes;
use selkie_core::tensor::{DType, Tensor};

/// Experts `[T, k]` and their weights, as bytes, of one `route` op.
pub type Choice = (Vec<u8>, Vec<u8>);

/// A backend with its routing under observation.
pub struct Routing<B: Backend> {
    inner: B,
    seen: RefCell<Vec<(B::Read, B::Read)>>,
    given: RefCell<VecDeque<Choice>>,
    rounding: bool,
}

impl<B: Backend> Routing<B> {
    pub fn new(inner: B) -> Self {
        Self { inner, seen: RefCell::default(), given: RefCell::default(), rounding: false }
    }

    /// Rounds activations, pages and convolution states to bf16 after every op, as a device that keeps them so; recurrent
    /// states and routing stay as they are. For a backend that runs ops immediately.
    pub fn rounding(inner: B) -> Self {
        Self { rounding: true, ..Self::new(inner) }
    }

    fn round(&self, op: &Op<B::Buf>) -> Result<()> {
        let recurrent = ["selective_scan", "gated_delta"].contains(&op.name());
        for (access, t) in op.tensors() {
            if access == Access::Read || t.dtype != DType::F32 || (recurrent && access == Access::InPlace) {
                continue;
            }
            // All of the buffer: rounding rounded values changes nothing.
            let all = Tensor::new(t.buf.clone(), DType::F32, &[t.buf.bytes() as usize / 4]);
            let bytes = pollster::block_on(self.inner.read(&all))?;
            let round = |x: f32| bf16::from_f32(x).to_f32().to_le_bytes();
            let bytes: Vec<u8> = DType::F32.to_f32(&bytes).into_iter().flat_map(round).collect();
            self.inner.write(&t.buf, 0, &bytes)?;
        }
        Ok(())
    }

    /// From now on the `route` ops give these instead of their own, in this order, as long as there are some.
    pub fn give(&self, choices: Vec<Choice>) {
        self.given.replace(choices.into());
    }

    /// The choices of the `route` ops since the last call, in order.
    pub async fn take(&self) -> Result<Vec<Choice>> {
        let mut all = Vec::new();
        for (ids, weights) in self.seen.take() {
            all.push((ids.await?, weights.await?));
        }
        Ok(all)
    }
}

/// An open step.
pub struct Rec<'a, B: Backend> {
    ops: &'a mut dyn Ops<B::Buf>,
    routing: &'a Routing<B>,
}

impl<B: Backend> Ops<B::Buf> for Rec<'_, B> {
    fn op(&mut self, op: Op<B::Buf>) -> Result<()> {
        self.ops.op(op.clone())?;
        // Ops of a step whose kernels are loaded run immediately, so this happens after the op and before the next.
        if self.routing.rounding && op.name() != "route" {
            self.routing.round(&op)?;
        }
        if let Op::Route(route) = op {
            let inner = &self.routing.inner;
            self.routing.seen.borrow_mut().push((inner.read(&route.ids), inner.read(&route.weights)));
            if let Some((ids, weights)) = self.routing.given.borrow_mut().pop_front() {
                inner.write(&route.ids.buf, route.ids.byte_offset() as u64, &ids)?;
                inner.write(&route.weights.buf, route.weights.byte_offset() as u64, &weights)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> Backend for Routing<B> {
    type Buf = B::Buf;
    type Rec<'a> = Rec<'a, B>;
    type Tape = B::Tape;
    type Read = B::Read;

    fn caps(&self) -> &Caps {
        self.inner.caps()
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<B::Buf> {
        self.inner.alloc(label, bytes)
    }
    fn has(&self, feature: Feature) -> bool {
        self.inner.has(feature)
    }
    fn adopts(&self) -> bool {
        self.inner.adopts()
    }
    fn adopt(&self, bytes: &Bytes) -> Option<B::Buf> {
        self.inner.adopt(bytes)
    }
    fn write(&self, dst: &B::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, at, bytes)
    }
    fn scratch(&self, op: &Op<B::Buf>) -> u64 {
        self.inner.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.inner.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Rec<'_, B>) -> Result<()>) -> Result<()> {
        self.inner.run(|ops| f(&mut Rec { ops, routing: self }))
    }
    fn record(&self, f: impl FnOnce(&mut Rec<'_, B>) -> Result<()>) -> Result<B::Tape> {
        self.inner.record(|ops| f(&mut Rec { ops, routing: self }))
    }
    fn play(&self, tape: &B::Tape) -> Result<()> {
        self.inner.play(tape)
    }
    fn read(&self, src: &Tensor<B::Buf>) -> B::Read {
        self.inner.read(src)
    }
}
