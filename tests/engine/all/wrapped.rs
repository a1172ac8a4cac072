//! A backend of the CPU with late reads and faults.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use selkie_core::{
    Result,
    backend::{Backend, Caps},
    cpu::CpuBackend,
    ops::Op,
    source::Bytes,
    tensor::Tensor,
};

/// What is called before a step.
pub type Before<B> = Box<dyn Fn(&B) -> Result<()>>;

/// The CPU, or ranks of it, changed.
pub struct Wrapped<B: Backend = CpuBackend> {
    pub inner: B,
    /// May present it as an asynchronous device.
    pub caps: Caps,
    /// How often a read is not ready.
    pub polls: usize,
    /// Called before each step.
    pub before: Before<B>,
}

pub struct LateRead<R> {
    inner: R,
    /// Polls left until it is ready.
    polls: usize,
}

impl<R: Future + Unpin> Future for LateRead<R> {
    type Output = R::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<R::Output> {
        if self.polls == 0 {
            return Pin::new(&mut self.inner).poll(context);
        }
        self.polls -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<B: Backend + 'static> Backend for Wrapped<B>
where
    B::Read: Unpin,
{
    type Buf = B::Buf;
    type Rec<'a> = B::Rec<'a>;
    type Tape = B::Tape;
    type Read = LateRead<B::Read>;

    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Self::Buf> {
        self.inner.alloc(label, bytes)
    }
    fn adopts(&self) -> bool {
        self.inner.adopts()
    }
    fn adopt(&self, bytes: &Bytes) -> Option<Self::Buf> {
        self.inner.adopt(bytes)
    }
    fn write(&self, dst: &Self::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, at, bytes)
    }
    fn write_on(&self, rank: usize, dst: &Self::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write_on(rank, dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Self::Buf>) -> u64 {
        self.inner.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.inner.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<()> {
        (self.before)(&self.inner)?;
        self.inner.run(f)
    }
    fn record(&self, f: impl FnOnce(&mut Self::Rec<'_>) -> Result<()>) -> Result<Self::Tape> {
        self.inner.record(f)
    }
    fn play(&self, tape: &Self::Tape) -> Result<()> {
        (self.before)(&self.inner)?;
        self.inner.play(tape)
    }
    fn read(&self, src: &Tensor<Self::Buf>) -> Self::Read {
        LateRead { inner: self.inner.read(src), polls: self.polls }
    }
}
