//! Host memory for copies of device bytes that outlive what they were copied from, and copies on their way there.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use crate::{
    error::Result,
    source::{Bytes, LocalFuture},
};

/// Where a backend wants such copies to lie: host memory that its device reads and writes by itself, if there is such memory.
pub trait HostMemory {
    /// `bytes` bytes of any content; `None` if there is no room for them now.
    fn take(&self, bytes: usize) -> Option<Box<dyn Room>>;
}

/// Host memory with one owner. Any thread may fill it, and any thread may drop what it became.
pub trait Room: Send {
    /// Its bytes.
    fn bytes(&mut self) -> &mut [u8];
    /// The bytes, which nobody changes any more.
    fn freeze(self: Box<Self>) -> Bytes;
}

/// A copy to host memory in flight. Dropping it is allowed at any time.
pub trait Saving {
    /// The bytes if they have arrived, once; an error of the device.
    fn take(&mut self) -> Option<Result<Bytes>>;
    /// Waits for the bytes, once; if the future is dropped, they can still be had. An error of the device.
    fn arrive(&mut self) -> LocalFuture<'_, Result<Bytes>>;
}

/// Ordinary memory, as much as there is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

impl HostMemory for Heap {
    fn take(&self, bytes: usize) -> Option<Box<dyn Room>> {
        // A page has little memory, and without enough of it ends.
        if cfg!(target_arch = "wasm32") {
            let mut room = Vec::new();
            room.try_reserve_exact(bytes).ok()?;
            room.resize(bytes, 0);
            return Some(Box::new(room));
        }
        Some(Box::new(vec![0; bytes]))
    }
}

impl Room for Vec<u8> {
    fn bytes(&mut self) -> &mut [u8] {
        self
    }

    fn freeze(self: Box<Self>) -> Bytes {
        (*self).into()
    }
}

/// Room that is filled from its beginning.
pub(crate) struct Filling {
    room: Box<dyn Room>,
    filled: usize,
}

impl Filling {
    pub fn new(room: Box<dyn Room>) -> Self {
        Self { room, filled: 0 }
    }

    /// Adds the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.room.bytes()[self.filled..][..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    /// All of it, once.
    pub fn whole(&mut self) -> Bytes {
        std::mem::replace(&mut self.room, Box::new(Vec::new())).freeze()
    }
}

/// A copy made of reads, whose results come one after the other.
pub(crate) struct Reads<R> {
    reads: VecDeque<Pin<Box<R>>>,
    room: Filling,
}

impl<R: Future<Output = Result<Vec<u8>>>> Reads<R> {
    /// Fills `room`, which has as many bytes as the reads have together.
    pub fn new(reads: impl Iterator<Item = R>, room: Box<dyn Room>) -> Self {
        Self { reads: reads.map(Box::pin).collect(), room: Filling::new(room) }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes>> {
        while let Some(first) = self.reads.front_mut() {
            let Poll::Ready(bytes) = first.as_mut().poll(context) else { return Poll::Pending };
            self.reads.pop_front();
            match bytes {
                Ok(bytes) => self.room.push(&bytes),
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        Poll::Ready(Ok(self.room.whole()))
    }
}

impl<R: Future<Output = Result<Vec<u8>>>> Saving for Reads<R> {
    fn take(&mut self) -> Option<Result<Bytes>> {
        match self.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(bytes) => Some(bytes),
            Poll::Pending => None,
        }
    }

    fn arrive(&mut self) -> LocalFuture<'_, Result<Bytes>> {
        Box::pin(poll_fn(|context| self.poll(context)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// Arrives at the second poll.
    struct Late(Option<Result<Vec<u8>>>, bool);

    impl Future for Late {
        type Output = Result<Vec<u8>>;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            if !std::mem::replace(&mut self.1, true) {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(self.0.take().expect("it arrives once"))
        }
    }

    fn reads(parts: Vec<Result<Vec<u8>>>, bytes: usize) -> Reads<Late> {
        Reads::new(parts.into_iter().map(|part| Late(Some(part), false)), Heap.take(bytes).unwrap())
    }

    #[test]
    fn reads_arrive_one_after_the_other_and_as_one() {
        let parts = || vec![Ok(vec![1, 2]), Ok(Vec::new()), Ok(vec![3])];
        let mut saving = reads(parts(), 3);
        for _ in 0..3 {
            assert!(saving.take().is_none());
        }
        assert_eq!(saving.take().unwrap().unwrap()[..], [1, 2, 3]);
        let mut saving = reads(parts(), 3);
        assert!(saving.take().is_none());
        assert_eq!(pollster::block_on(saving.arrive()).unwrap()[..], [1, 2, 3]);
        let lost = Error::BadRequest("the device is gone".into());
        assert!(pollster::block_on(reads(vec![Ok(vec![1]), Err(lost)], 2).arrive()).is_err());
    }
}
