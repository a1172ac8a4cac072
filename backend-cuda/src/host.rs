//! Pinned host memory for values: one range for all of them, out of which each gets a part and to which it returns.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use cudarc::driver::sys;
use selkie_core::{
    Error, Result,
    saved::{HostMemory, Room},
    source::Bytes,
    zeroed::Zeroed,
};

use crate::driver::{Context, Retained, named};

/// Parts begin and end at multiples of this.
const GRAIN: usize = 4096;
/// Smaller parts are taken from the front of the range and others from its end, so that pages do not divide the room of states.
const LARGE: usize = 4 << 20;
/// Threads that commit the range. One takes a quarter of a second for a GiB.
const THREADS: usize = 8;

/// The range. It lives as long as any part of it.
pub struct HostPool(Arc<Range>);

struct Range {
    free: Mutex<Free>,
    start: *mut u8,
    bytes: Zeroed,
    context: Arc<Retained>,
}

// SAFETY: `start` is only used for parts, which are disjoint while they live, see `Free`.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl HostPool {
    /// At least `bytes` bytes, all of which are taken from the system now.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is not that much memory that can be pinned.
    pub fn new(context: &Context, bytes: u64) -> Result<Self> {
        let none = || Error::OutOfMemory { what: "pinned host memory".into(), asked: bytes, free: 0 };
        let len = usize::try_from(bytes).ok().and_then(|len| len.max(1).checked_next_multiple_of(LARGE));
        let mut memory = len.and_then(Zeroed::new).ok_or_else(none)?;
        commit(&mut memory);
        let (start, len) = (memory.as_mut_ptr(), memory.len());
        let context = context.retain();
        // SAFETY: the memory belongs to the range, which unregisters it before it is freed.
        let pinned = unsafe { sys::cuMemHostRegister_v2(start.cast(), len, 0) };
        match pinned {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(none()),
            other => named("pinning host memory", other.result())?,
        }
        let free = Mutex::new(Free(BTreeMap::from([(0, len)])));
        Ok(Self(Arc::new(Range { free, start, bytes: memory, context })))
    }
}

/// Touches every page, by several threads.
fn commit(memory: &mut [u8]) {
    let part = memory.len().div_ceil(THREADS);
    thread::scope(|scope| {
        for part in memory.chunks_mut(part) {
            scope.spawn(|| part.iter_mut().step_by(GRAIN).for_each(|byte| *byte = 0));
        }
    });
}

impl HostMemory for HostPool {
    fn take(&self, bytes: usize) -> Option<Box<dyn Room>> {
        let at = self.0.free().take(bytes.checked_next_multiple_of(GRAIN)?)?;
        Some(Box::new(Part { range: self.0.clone(), at, bytes }))
    }
}

impl Range {
    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // The last part may be dropped by a thread that has no context.
        let _ = self.context.enter();
        debug_assert_eq!(self.bytes.as_ptr(), self.start.cast_const());
        // SAFETY: registered once; no copy is in flight, since each holds its part.
        let _ = unsafe { sys::cuMemHostUnregister(self.start.cast()) };
    }
}

/// A part of the range with one owner.
struct Part {
    range: Arc<Range>,
    at: usize,
    bytes: usize,
}

impl Room for Part {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the part lies in the range, and no other living part overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.range.start.add(self.at), self.bytes) }
    }

    fn freeze(self: Box<Self>) -> Bytes {
        Bytes::new(Arc::new(*self))
    }
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as in `bytes`; whoever has a reference to a part cannot change it.
        unsafe { std::slice::from_raw_parts(self.range.start.add(self.at), self.bytes) }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.range.free().give(self.at, self.bytes.next_multiple_of(GRAIN));
    }
}

/// What is free: first byte and length, no two of them adjacent.
struct Free(BTreeMap<usize, usize>);

impl Free {
    /// The first byte of `len` that nobody else gets until they are given back; `None` if no free range is that long.
    fn take(&mut self, len: usize) -> Option<usize> {
        let fits = |(_, size): &(&usize, &usize)| **size >= len;
        let found = if len < LARGE { self.0.iter().find(fits) } else { self.0.iter().rev().find(fits) };
        let (at, size) = found.map(|(at, size)| (*at, *size))?;
        self.0.remove(&at);
        let taken = if len < LARGE { at } else { at + size - len };
        let left = if len < LARGE { at + len } else { at };
        if size > len {
            self.0.insert(left, size - len);
        }
        Some(taken)
    }

    fn give(&mut self, mut at: usize, mut len: usize) {
        if let Some(after) = self.0.remove(&(at + len)) {
            len += after;
        }
        if let Some((&before, &size)) = self.0.range(..at).next_back()
            && before + size == at
        {
            (at, len) = (before, size + len);
        }
        self.0.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_come_back() {
        const ALL: usize = 64 << 20;
        let mut free = Free(BTreeMap::from([(0, ALL)]));
        let (mut held, mut seed): (Vec<(usize, usize)>, u64) = (Vec::new(), 7);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = [GRAIN, 3 * GRAIN, LARGE, LARGE + GRAIN][(seed >> 40) as usize % 4];
            match free.take(len) {
                Some(at) if seed >> 62 != 0 => {
                    assert!(at + len <= ALL && held.iter().all(|(a, l)| at + len <= *a || a + l <= at));
                    held.push((at, len));
                }
                Some(at) => free.give(at, len),
                None => {
                    let (at, len) = held.swap_remove((seed >> 33) as usize % held.len());
                    free.give(at, len);
                }
            }
            let known: usize = held.iter().map(|(_, len)| len).chain(free.0.values()).sum();
            assert_eq!(known, ALL);
        }
        held.drain(..).for_each(|(at, len)| free.give(at, len));
        assert_eq!(free.0, BTreeMap::from([(0, ALL)]));
        // Small parts from the front, large ones from the end.
        assert_eq!((free.take(GRAIN), free.take(LARGE)), (Some(0), Some(ALL - LARGE)));
        assert_eq!(free.take(ALL), None);
    }
}
