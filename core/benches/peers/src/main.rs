//! Matrix products compared with the machine's own limits, as ratios of one run:
//! `cargo run --release --manifest-path core/benches/peers/Cargo.toml`.

use std::time::Instant;

use selkie_core::cpu::gemm::{Product, WeightRows, matmul_on};
use selkie_core::cpu::simd::Isa;
use selkie_core::cpu::{par, probe};
use selkie_core::tensor::DType;

/// Best seconds of `runs` calls.
fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Seconds of one product `[m, k] x [n, k]`, the mean over `copies` distinct weights, the best of `runs`.
fn product(isa: Isa, threads: usize, [m, n, k]: [usize; 3], dtype: DType, copies: usize, runs: usize) -> f64 {
    let x: Vec<f32> = (0..m * k).map(|i| (i % 13) as f32 - 6.0).collect();
    let mut out = vec![0f32; m * n];
    // 1.0 in every type's low half too, so that no conversion meets subnormal numbers.
    let w: Vec<u32> = vec![0x3f80_3f80; (copies * n * k * dtype.bytes()).div_ceil(4)];
    best(runs, || {
        for c in 0..copies {
            let ptr = w.as_ptr().cast::<u8>().wrapping_add(c * n * k * dtype.bytes());
            let p = Product {
                x: x.as_ptr(),
                x_stride: k,
                w: &[WeightRows { ptr, dtype, n, row_stride: k, col: 0 }],
                out: out.as_mut_ptr(),
                out_stride: n,
                m,
                k,
                scale: 1.0,
                bias: std::ptr::null(),
                columns: std::ptr::null(),
                accumulate: false,
                int8: false,
            };
            // SAFETY: the vectors hold what the views describe.
            unsafe { matmul_on(isa, &p, threads) };
        }
    }) / copies as f64
}

fn gemm_crate(m: usize, n: usize, k: usize, threads: usize) -> f64 {
    let x = vec![0.5f32; m * k];
    let w = vec![0.25f32; n * k];
    let mut out = vec![0f32; m * n];
    let how = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    best(5, || {
        // SAFETY: `out` is m x n, `x` m x k and the transposed `w` k x n.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                n as isize,
                false,
                x.as_ptr(),
                1,
                k as isize,
                w.as_ptr(),
                k as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                how,
            );
        }
    })
}

fn main() {
    let isas = Isa::all();
    let isa = isas[0];
    println!("{} threads, {}", par::threads(), isas.iter().map(|i| i.name()).collect::<Vec<_>>().join(" "));
    for threads in [par::threads(), 1] {
        println!("\n{threads} threads: 512 rows, GFLOP/s (share of the gemm crate's f32)");
        for (n, k) in [(2048, 2048), (2048, 4096), (4096, 2048), (4096, 4096)] {
            let flop = 2.0 * (512 * n * k) as f64;
            let peer = flop / gemm_crate(512, n, k, threads);
            print!("  [512, {k}] x [{n}, {k}]  gemm {:6.1}", peer / 1e9);
            for dtype in [DType::F32, DType::Bf16, DType::F16] {
                let own = flop / product(isa, threads, [512, n, k], dtype, 1, 5);
                print!("  {dtype:?} {:6.1} ({:.2})", own / 1e9, own / peer);
            }
            println!();
        }
        let read = probe::read_bandwidth(threads);
        println!("{threads} threads: read {:.1} GB/s; weights streamed, GB/s (share of it)", read / 1e9);
        for m in [1, 2, 4, 8] {
            for dtype in [DType::Bf16, DType::F16, DType::F32] {
                let (n, k) = (4096, 2048);
                let own = (n * k * dtype.bytes()) as f64 / product(isa, threads, [m, n, k], dtype, 32, 3);
                print!("  {m} x {dtype:?} {:5.1} ({:.2})", own / 1e9, own / read);
            }
            println!();
        }
    }
    println!("\nother instruction sets, 1 thread: GFLOP/s at [512, 2048] x [2048, 2048] bf16, GB/s at 1 row");
    for &isa in &isas {
        let m = if isa.name() == "plain" { 16 } else { 512 };
        let rate = 2.0 * (m * 2048 * 2048) as f64 / product(isa, 1, [m, 2048, 2048], DType::Bf16, 1, 3);
        let read = (4096 * 2048 * 2) as f64 / product(isa, 1, [1, 4096, 2048], DType::Bf16, 8, 3);
        println!("  {:7} {:6.1} {:5.1}", isa.name(), rate / 1e9, read / 1e9);
    }
    println!("\nsmall products, 1 row bf16, us: 1 thread, all threads");
    for (n, k) in [(256, 256), (768, 256), (256, 1024), (1024, 512), (2048, 512), (4096, 256), (2048, 1024)] {
        let one = product(isa, 1, [1, n, k], DType::Bf16, 200_000_000 / (n * k * 40), 20);
        let all = product(isa, par::threads(), [1, n, k], DType::Bf16, 200_000_000 / (n * k * 40), 20);
        println!("  [{n}, {k}] {:7.1} {:7.1}", one * 1e6, all * 1e6);
    }
}
