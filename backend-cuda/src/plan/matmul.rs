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
    let (m, k) = (a.x.rows(), a.w.k);
    // Reading x again with every slice is dear beyond two rows; then the library is faster.
    if inputs && (m <= 2 || m <= FEW && (!target.blas || few_shape(m, k, target.shared).resident)) {
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

/// How a block of the kernel for few rows is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewShape {
    warps: usize,
    stages: usize,
    /// Inner dimension of a slice.
    depth: usize,
    /// x is copied once instead of with every slice.
    resident: bool,
    /// Dynamic shared memory.
    shared: usize,
    /// Blocks of a multiprocessor.
    blocks: usize,
}

fn few_shape(m: usize, k: usize, shared: usize) -> FewShape {
    let warps = if k <= 1024 { 4 } else { 8 };
    let fixed = 2 * warps * m * 16 * 4 + 1024;
    // A small x fits beside the rings; the x of one row is cheap to copy again.
    let wants_resident = m > 1 || (4096..=8192).contains(&k);
    // Deep slices where the inner dimension is long, unless the device has too little shared memory for two of them.
    for depth in if k >= 4096 { [128, 64] } else { [64, 64] } {
        let x_bytes = m * (k.next_multiple_of(depth * warps) + 8) * 2;
        for resident in [true, false] {
            if resident && !(wants_resident && x_bytes <= 68 << 10 && x_bytes * 2 <= shared) {
                continue;
            }
            for stages in [4, 3, 2] {
                let ring = warps * stages * (16 + if resident { 0 } else { 8 }) * (depth + 8) * 2;
                let dynamic = ring + if resident { x_bytes } else { 0 };
                if dynamic + fixed <= shared {
                    let blocks = (shared / (dynamic + fixed)).clamp(1, 4);
                    return FewShape { warps, stages, depth, resident, shared: dynamic, blocks };
                }
            }
        }
    }
    panic!("matmul: {m} rows of {k} do not fit into {shared} bytes of shared memory");
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
                let f = few_shape(m, k, target.shared);
                let spec = Spec::new(File::MatmulFew)
                    .int("K", k)
                    .int("M", m)
                    .int("MT", 1)
                    .int("WARPS", f.warps)
                    .int("STAGES", f.stages)
                    .int("DEPTH", f.depth)
                    .flag("X_RESIDENT", f.resident)
                    .flag("ACCUMULATE", a.accumulate)
                    .flag("HAS_BIAS", a.bias.is_some())
                    .ty("out_t", out.dtype);
                let args = Args::new().rows(&a.x).rows(&block.w).int(n as u64).int(bias).rows(&out).float(a.scale);
                let grid = [n.div_ceil(16).min(target.sms * f.blocks), 1, 1];
                let launch = Launch::new(spec, grid, 32 * f.warps, args).with_shared(f.shared);
                work.push(Work::Kernel(launch));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_fit_into_shared_memory() {
        for shared in [99 << 10, 163 << 10, 227 << 10] {
            for k in [768, 2048, 4096, 8192, 21504] {
                for m in 1..=FEW {
                    let f = few_shape(m, k, shared);
                    assert!(f.shared + 2 * f.warps * m * 64 <= shared, "{m} x {k}: {f:?}");
                }
            }
        }
        assert!(few_shape(8, 4096, 227 << 10).resident);
        assert!(!few_shape(8, 21504, 227 << 10).resident);
    }
}
