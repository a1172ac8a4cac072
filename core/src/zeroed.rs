//! Memory that the system supplies zeroed and commits when it is first touched.

use std::ops::{Deref, DerefMut};

/// From this size on, pages of 2 MiB are asked for. To commit 4 KiB at a time takes seconds for a large model, most of all in
/// a virtual machine; for little memory large pages would waste some.
#[cfg(not(target_arch = "wasm32"))]
const LARGE: usize = 16 << 20;

/// Zeroed bytes, at any alignment.
pub enum Zeroed {
    /// A little.
    Heap(Vec<u8>),
    /// Much.
    #[cfg(not(target_arch = "wasm32"))]
    Map(memmap2::MmapMut),
}

impl Zeroed {
    /// `len` bytes; `None` if there are not that many.
    pub fn new(len: usize) -> Option<Self> {
        #[cfg(not(target_arch = "wasm32"))]
        if len >= LARGE {
            let map = memmap2::MmapMut::map_anon(len).ok()?;
            // A wish: a system without large pages gives small ones.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            return Some(Self::Map(map));
        }
        bytemuck::allocation::try_zeroed_vec(len).ok().map(Self::Heap)
    }
}

impl Deref for Zeroed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            #[cfg(not(target_arch = "wasm32"))]
            Self::Map(map) => map,
        }
    }
}

impl DerefMut for Zeroed {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            #[cfg(not(target_arch = "wasm32"))]
            Self::Map(map) => map,
        }
    }
}

impl AsRef<[u8]> for Zeroed {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_memory_is_zeroed_and_writable() {
        for len in [0, 1, 4096, LARGE - 1, LARGE, LARGE + 5] {
            let mut bytes = Zeroed::new(len).unwrap();
            assert_eq!(bytes.len(), len);
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(7);
            assert!(bytes.as_ref().iter().all(|byte| *byte == 7));
        }
        assert!(Zeroed::new(usize::MAX / 2).is_none());
    }
}
