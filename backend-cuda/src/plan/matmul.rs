//! Linear layers: our own kernel for few rows, cuBLASLt above, a plain f32 kernel for everything else.

use selkie_core::{
    Result,
    ops::{Matmul, RowBlock},
    tensor::Tensor,
};

use super::{Target, wide};
use crate::{
    launch::{Address, Args, Gemm, Launch, Work, address},
    spec::{File, Spec},
};

/// Rows of x up to which our own kernel reads the weight at memory speed.
pub(crate) const FEW: usize = 8;

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Few,
    Library,
    Plain,
}

fn path<B: Address>(a: &Matmul<B>, block: &RowBlock<B>, out: &Tensor<B>, target: &Target) -> Path {
    let inputs = target.tuned && wide(&[&a.x, &block.w]) && a.w.k.is_multiple_of(8);
    if inputs && a.x.rows() <= FEW {
        Path::Few
    } else if inputs
        && target.blas
        && address(out).is_multiple_of(16)
        && (out.row_stride * out.dtype.bytes()).is_multiple_of(16)
    {
        Path::Library
    } else {
        Path::Plain
    }
}

/// 16-row tiles of W in a block: two where that still gives every multiprocessor a block, which halves the reads of x.
fn tiles(n: usize, m: usize, sms: usize) -> usize {
    if m > 4 && n.div_ceil(32) >= sms { 2 } else { 1 }
}

pub(super) fn matmul<B: Address>(a: &Matmul<B>, target: &Target) -> Result<Vec<Work>> {
    let (m, k) = (a.x.rows(), a.w.k);
    let mut work = Vec::new();
    for block in &a.w.blocks {
        let n = block.w.rows();
        let out = a.out.cols(block.col, n);
        let bias = a.bias.as_ref().map_or(0, |b| address(b) + 4 * block.col as u64);
        match path(a, block, &out, target) {
            Path::Few => {
                let mt = tiles(n, m, target.sms);
                let warps = if k <= 1024 { 4 } else { 8 };
                let spec = Spec::new(File::MatmulFew)
                    .int("K", k)
                    .int("M", m)
                    .int("MT", mt)
                    .int("WARPS", warps)
                    .flag("ACCUMULATE", a.accumulate)
                    .flag("HAS_BIAS", a.bias.is_some())
                    .ty("out_t", out.dtype);
                let args = Args::new().rows(&a.x).rows(&block.w).int(n as u64).int(bias).rows(&out).float(a.scale);
                work.push(Work::Kernel(Launch::new(spec, [n.div_ceil(16 * mt), 1, 1], 32 * warps, args)));
            }
            Path::Library => {
                work.push(Work::Gemm(Gemm {
                    mnk: [m, n, k],
                    at: [address(&a.x), address(&block.w), address(&out)],
                    strides: [a.x.row_stride, block.w.row_stride, out.row_stride],
                    out: out.dtype,
                    scale: a.scale,
                    accumulate: a.accumulate,
                }));
                if a.bias.is_some() {
                    let spec = Spec::new(File::MatmulBias).int("N", n).ty("out_t", out.dtype);
                    let args = Args::new().int(bias).rows(&out);
                    work.push(Work::Kernel(Launch::new(spec, [m, n.div_ceil(256), 1], 256, args)));
                }
            }
            Path::Plain => {
                let spec = Spec::new(File::MatmulPlain)
                    .int("K", k)
                    .flag("ACCUMULATE", a.accumulate)
                    .flag("HAS_BIAS", a.bias.is_some())
                    .ty("x_t", a.x.dtype)
                    .ty("w_t", block.w.dtype)
                    .ty("out_t", out.dtype);
                let args = Args::new()
                    .rows(&a.x)
                    .rows(&block.w)
                    .int(m as u64)
                    .int(n as u64)
                    .int(bias)
                    .rows(&out)
                    .float(a.scale);
                work.push(Work::Kernel(Launch::new(spec, [n.div_ceil(64), m.div_ceil(64), 1], 256, args)));
            }
        }
    }
    Ok(work)
}
