//! Names for device errors that arrive late: every kernel writes its number to a word of host memory when it starts. The word
//! stays readable after a device fault.

use std::{cell::RefCell, rc::Rc};

use cudarc::driver::sys;
use selkie_core::{Error, Result};

use crate::{
    driver::Stream,
    memory::Pinned,
    spec::{NAMES_FAULTS, Spec},
};

/// The word and the kernels that its numbers stand for.
pub struct Faults {
    word: Pinned,
    /// Op and variant of kernel number `i + 1`; 0 stands for none.
    kernels: RefCell<Vec<(&'static str, String)>>,
    /// Kernels write their numbers.
    on: bool,
    stream: Rc<Stream>,
}

impl Faults {
    /// Nothing has started on `stream`.
    pub fn new(stream: &Rc<Stream>) -> Result<Rc<Self>> {
        let word = Pinned::mapped(8)?;
        // SAFETY: the memory was just allocated, 8 bytes of it.
        unsafe { word.at.cast::<u32>().write_volatile(0) };
        Ok(Rc::new(Self { word, kernels: RefCell::default(), on: *NAMES_FAULTS, stream: stream.clone() }))
    }

    /// The `Started` structure of `common.cuh` for a kernel's image.
    pub fn add(&self, op: &'static str, spec: &Spec) -> Result<[u64; 2]> {
        let at = self.word.on_device()?;
        let mut kernels = self.kernels.borrow_mut();
        kernels.push((op, spec.to_string()));
        Ok([if self.on { at } else { 0 }, kernels.len() as u64])
    }

    /// `e`, or if a kernel has brought the device down, the same with the op of the kernel that started last.
    pub fn name(&self, e: Error) -> Error {
        let Error::Device { op, why } = e else { return e };
        // SAFETY: the stream is alive.
        let state = unsafe { sys::cuStreamQuery(self.stream.raw) };
        let down = !matches!(state, sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY);
        // SAFETY: allocated in `new`; the device writes whole words.
        let number = unsafe { self.word.at.cast::<u32>().read_volatile() } as usize;
        match self.kernels.borrow().get(number.wrapping_sub(1)).filter(|_| down) {
            Some((started, variant)) => Error::Device {
                op: (*started).into(),
                why: format!(
                    "{why}; the last kernel that started was {variant}; a library product may have followed it"
                ),
            },
            None if down => {
                let why = format!("{why}; run it again with SELKIE_CUDA_NAME_FAULTS=1 to learn in which op");
                Error::Device { op, why }
            }
            None => Error::Device { op, why },
        }
    }
}
