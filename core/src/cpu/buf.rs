//! Host memory with a counted handle, and a lease that keeps views of it from aliasing.

use std::cell::Cell;
use std::rc::Rc;

use crate::backend::Handle;
use crate::source::Bytes;
use crate::zeroed::Zeroed;

/// Alignment of buffers: a cache line, and the widest vector.
const ALIGN: usize = 64;

/// A counted handle to host bytes: an allocation of the backend, or bytes adopted where they lie (read-only).
///
/// Neither `Send` nor `Sync`: views are made on one thread, and only views go to others.
#[derive(Clone)]
pub struct Buf(Rc<Inner>);

struct Inner {
    ptr: *mut u8,
    len: usize,
    owner: Owner,
    /// Views that are alive: -1 a writer, else the number of readers.
    lease: Cell<isize>,
}

enum Owner {
    /// An allocation, and the total of its backend, which is reduced by the length in the end.
    Own { _bytes: Zeroed, total: Rc<Cell<u64>> },
    /// Keeps the bytes alive.
    Adopted { _bytes: Bytes },
}

impl Buf {
    /// `len` zeroed bytes, committed by the system when they are first touched; `None` if there are not that many.
    /// `total` counts the bytes that are alive.
    pub(super) fn zeroed(len: usize, total: &Rc<Cell<u64>>) -> Option<Self> {
        let mut bytes = Zeroed::new(len.checked_add(ALIGN)?)?;
        let start = bytes.as_mut_ptr();
        // SAFETY: the size has room for this.
        let ptr = unsafe { start.add(start.align_offset(ALIGN)) };
        total.set(total.get() + len as u64);
        let owner = Owner::Own { _bytes: bytes, total: total.clone() };
        Some(Self(Rc::new(Inner { ptr, len, owner, lease: Cell::new(0) })))
    }

    /// The bytes where they lie.
    pub(super) fn adopted(bytes: &Bytes) -> Self {
        let (ptr, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        Self(Rc::new(Inner { ptr, len, owner: Owner::Adopted { _bytes: bytes.clone() }, lease: Cell::new(0) }))
    }

    /// First byte; writable unless the bytes are adopted.
    pub(super) fn ptr(&self) -> *mut u8 {
        self.0.ptr
    }

    /// Bytes that views may only read.
    pub(super) fn is_adopted(&self) -> bool {
        matches!(self.0.owner, Owner::Adopted { .. })
    }

    /// The count of views alive, see [`super::view`].
    pub(super) fn lease(&self) -> &Cell<isize> {
        &self.0.lease
    }
}

impl Handle for Buf {
    fn id(&self) -> usize {
        Rc::as_ptr(&self.0) as usize
    }

    fn bytes(&self) -> u64 {
        self.0.len as u64
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({:p}, {} bytes)", self.0.ptr, self.0.len)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Owner::Own { total, .. } = &self.owner {
            total.set(total.get() - self.len as u64);
        }
    }
}
