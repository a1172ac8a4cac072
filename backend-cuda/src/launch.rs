//! A launch as plain data: what [`crate::plan`] makes of an op and what a stream or a graph takes.

use selkie_core::{
    backend::Handle,
    step::Step,
    tensor::{DType, Tensor},
};

use crate::spec::Spec;

/// A handle whose bytes have a device address. Tests plan with handles that are only numbers.
pub trait Address: Handle {
    /// Address of the first byte.
    fn address(&self) -> u64;
}

/// Address of a tensor's first element.
pub fn address<B: Address>(t: &Tensor<B>) -> u64 {
    t.buf.address() + t.byte_offset() as u64
}

/// Kernel arguments: each starts at an 8-byte word of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Args {
    /// Raw bytes of all arguments.
    pub words: Vec<u64>,
    /// First word of each.
    pub starts: Vec<usize>,
}

impl Args {
    /// No arguments yet.
    pub fn new() -> Self {
        Self { words: Vec::with_capacity(24), starts: Vec::with_capacity(20) }
    }

    /// A 32- or 64-bit integer or an address; kernels read as many bytes as their parameter has.
    pub fn int(mut self, v: u64) -> Self {
        self.starts.push(self.words.len());
        self.words.push(v);
        self
    }

    /// An f32.
    pub fn float(self, v: f32) -> Self {
        self.int(u64::from(v.to_bits()))
    }

    /// Address and row stride of a tensor.
    pub fn rows<B: Address>(self, t: &Tensor<B>) -> Self {
        self.int(address(t)).int(t.row_stride as u64)
    }

    /// Address and row stride, or two zeros.
    pub fn maybe_rows<B: Address>(self, t: Option<&Tensor<B>>) -> Self {
        match t {
            Some(t) => self.rows(t),
            None => self.int(0).int(0),
        }
    }

    /// Address of a tensor without gaps.
    pub fn at<B: Address>(self, t: &Tensor<B>) -> Self {
        self.int(address(t))
    }

    /// Address, or null.
    pub fn maybe_at<B: Address>(self, t: Option<&Tensor<B>>) -> Self {
        self.int(t.map_or(0, address))
    }

    /// The `Step` structure of `common.cuh`.
    pub fn step<B: Address>(mut self, s: &Step<B>) -> Self {
        let b = &s.bucket;
        let pair = |lo: usize, hi: usize| lo as u64 | (hi as u64) << 32;
        self.starts.push(self.words.len());
        self.words.extend([address(&s.ints), pair(b.tokens, b.rows), pair(b.chunks, b.outputs), pair(b.pages, 0)]);
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
    /// May start while the kernel before it runs, if its source says how it waits.
    pub early: bool,
    /// Arguments.
    pub args: Args,
}

impl Launch {
    /// A launch without dynamic shared memory.
    pub fn new(spec: Spec, grid: [usize; 3], threads: usize, args: Args) -> Self {
        Self { spec, grid: grid.map(|g| g as u32), threads: threads as u32, shared: 0, early: true, args }
    }

    /// Starts early only if `early`: a kernel that has nothing to do before it must wait starts sooner when it is launched late.
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

/// A library product: `out[M, N] = scale * x[M, K] w[N, K]ᵀ (+ out)`, bf16 inputs.
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
}

/// A piece of an op.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// One of our kernels.
    Kernel(Launch),
    /// A product through cuBLASLt.
    Gemm(Gemm),
}
