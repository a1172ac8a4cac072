//! Measured rates of this machine's memory and arithmetic: the yardstick for decode and prefill.

use std::time::Instant;

use super::gemm::{Product, WeightRows, matmul};
use super::simd::{Isa, LANES, Simd, dispatch};
use crate::format::Format;
use crate::tensor::DType;

/// Bytes read by [`read_bandwidth`] in one pass: far more than any cache.
const READ_BYTES: usize = 512 << 20;

/// Sums `x` in eight independent vectors, so that only memory limits the speed.
#[inline(always)]
fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut acc = [s.zero(); 8];
    for block in x.as_chunks::<{ 8 * LANES }>().0 {
        for (acc, x) in acc.iter_mut().zip(block.as_chunks::<LANES>().0) {
            *acc = s.add(*acc, s.load(x));
        }
    }
    let mut total = s.zero();
    for acc in acc {
        total = s.add(total, acc);
    }
    s.reduce_sum(total)
}

/// Bytes per second that `threads` threads read from memory together: the best of several passes over 512 MiB.
pub fn read_bandwidth(threads: usize) -> f64 {
    let isa = Isa::best();
    let share = (READ_BYTES / 4).div_ceil(threads.max(1));
    // Each thread commits the memory that it reads.
    let mut parts = vec![Vec::new(); threads.max(1)];
    each(&mut parts, |part| part.resize(share, 1f32));
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        each(&mut parts, |part| _ = std::hint::black_box(dispatch!(isa, |s| sum(s, part))));
        best = best.min(start.elapsed().as_secs_f64());
    }
    (parts.len() * share * 4) as f64 / best
}

/// Does `work` for each part in a thread of its own; in a browser one after the other.
fn each(parts: &mut [Vec<f32>], work: impl Fn(&mut Vec<f32>) + Sync) {
    #[cfg(not(target_arch = "wasm32"))]
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| work(part));
        }
    });
    #[cfg(target_arch = "wasm32")]
    parts.iter_mut().for_each(work);
}

/// Floating-point operations per second of selkie's own matrix product, f32 `[512, 2048] x [2048, 2048]` on all threads:
/// the best of several runs.
pub fn matmul_rate() -> f64 {
    const M: usize = 512;
    const D: usize = 2048;
    let x = vec![0.5f32; M * D];
    let w = vec![0.25f32; D * D];
    let mut out = vec![0f32; M * D];
    let block =
        WeightRows { ptr: w.as_ptr().cast(), dtype: DType::F32, format: Format::Plain, n: D, row_bytes: 4 * D, col: 0 };
    let p = Product {
        x: x.as_ptr(),
        x_stride: D,
        w: &[block],
        out: out.as_mut_ptr(),
        out_stride: D,
        m: M,
        k: D,
        scale: 1.0,
        columns: std::ptr::null(),
        bias: std::ptr::null(),
        accumulate: false,
        int8: false,
    };
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        // SAFETY: the vectors hold what the views describe and live until the call returns.
        unsafe { matmul(&p) };
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (M * D * D) as f64 / best
}
