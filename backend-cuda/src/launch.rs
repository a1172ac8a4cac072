//! A launch as plain data: [`crate::plan`] makes it from an op, a stream or a graph takes it.

use selkie_core::{
    backend::Handle,
    tensor::{DType, Tensor},
};

use crate::{arguments::Arguments, spec::Spec};

/// A handle whose bytes have a device address. Tests plan with handles that are only numbers.
pub trait Address: Handle {
    /// Address of the first byte.
    fn address(&self) -> u64;
}

/// Address of a tensor's first element.
pub fn address<B: Address>(t: &Tensor<B>) -> u64 {
    t.buf.address() + t.byte_offset() as u64
}

/// Values of a kernel's parameters; each starts at an 8-byte word of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Args {
    /// Raw bytes of all values.
    pub words: Vec<u64>,
    /// First word of each.
    pub starts: Vec<usize>,
}

impl Args {
    /// No values yet, with room for those of `parameters` declarations.
    pub(crate) fn with_capacity(parameters: usize) -> Self {
        Self { words: Vec::with_capacity(2 * parameters + 3), starts: Vec::with_capacity(2 * parameters) }
    }

    /// Adds a value.
    pub(crate) fn with(mut self, words: &[u64]) -> Self {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
        self
    }

    /// Adds values after these.
    pub(crate) fn and(mut self, more: &Self) -> Self {
        self.starts.extend(more.starts.iter().map(|at| at + self.words.len()));
        self.words.extend_from_slice(&more.words);
        self
    }
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The variant.
    pub spec: Spec,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    /// May start while the kernel before it runs, if it waits for its inputs by itself.
    pub early: bool,
    /// Arguments.
    pub args: Args,
}

impl Launch {
    /// A launch without dynamic shared memory.
    ///
    /// # Panics
    /// If `A` is not the declaration of the spec's file.
    pub fn new<A: Arguments>(spec: Spec, grid: [usize; 3], threads: usize, args: &A) -> Self {
        let declared = spec.file().parameters();
        assert!(
            std::ptr::eq(declared, A::PARAMETERS) || declared == A::PARAMETERS,
            "arguments of another kernel: {spec}"
        );
        Self { spec, grid: grid.map(|g| g as u32), threads: threads as u32, shared: 0, early: true, args: args.args() }
    }

    /// Starts early only if `early`: a kernel that has nothing to do before its wait starts sooner when it is launched late.
    pub fn with_early(mut self, early: bool) -> Self {
        self.early = early;
        self
    }

    /// Asks for `bytes` of dynamic shared memory.
    pub fn with_shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }
}

/// A library product: `out[M, N] = scale * x[M, K] w[N, K]ᵀ (+ out)`, of bf16 inputs or of codes of 8-bit floats.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of x, rows of w, inner dim.
    pub mnk: [usize; 3],
    /// Addresses of x, w, out.
    pub at: [u64; 3],
    /// Row strides of x, w, out, in elements.
    pub strides: [usize; 3],
    /// Dtype of out: bf16 or f32.
    pub out: DType,
    /// Factor on the product.
    pub scale: f32,
    /// Adds to out.
    pub accumulate: bool,
    /// Of codes: addresses of the scales of x, `[K / 128, M] f32`, and of w, `[N / 128, K / 128] f32` with rows of a multiple of
    /// four.
    pub scales: Option<[u64; 2]>,
}

/// A piece of an op.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// One of our kernels.
    Kernel(Launch),
    /// A product through cuBLASLt.
    Gemm(Gemm),
}
