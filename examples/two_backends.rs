//! Runs one op on the CPU and on a GPU through wgpu, and compares the results.
//!
//! `cargo run --release --example two_backends`; without a GPU or a software driver it says so and runs the CPU only.

use selkie_core::backend::{Backend, Ops};
use selkie_core::cpu::CpuBackend;
use selkie_core::ops::{Op, RmsNorm};
use selkie_core::tensor::{DType, Tensor};
use selkie_wgpu::{Options, WgpuBackend};

const ROWS: usize = 3;
const WIDTH: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let x: Vec<f32> = (0..ROWS * WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
    let weight: Vec<f32> = (0..WIDTH).map(|i| 1.0 + i as f32 / WIDTH as f32).collect();
    let cpu = pollster::block_on(rms_norm(&CpuBackend::new(), &x, &weight))?;
    println!("cpu: {:?} ...", &cpu[..4]);
    let gpu = match pollster::block_on(WgpuBackend::open(None, Options::default())) {
        Ok(gpu) => gpu,
        Err(e) => {
            println!("wgpu: {e}");
            return Ok(());
        }
    };
    let out = pollster::block_on(rms_norm(&gpu, &x, &weight))?;
    println!("wgpu, {}: {:?} ...", gpu.caps().device, &out[..4]);
    let difference = cpu.iter().zip(&out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("largest difference: {difference:e}");
    assert!(difference < 1e-5, "the backends disagree");
    Ok(())
}

/// `x * rsqrt(mean(x²) + eps) * weight` for the rows of `x`, on any backend.
async fn rms_norm<B: Backend>(backend: &B, x: &[f32], weight: &[f32]) -> selkie_core::Result<Vec<f32>> {
    let upload = |label, values: &[f32], dims: &[usize]| {
        let buf = backend.alloc(label, 4 * values.len() as u64)?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        backend.write(&buf, 0, &bytes)?;
        selkie_core::Result::Ok(Tensor::new(buf, DType::F32, dims))
    };
    let out = Tensor::new(backend.alloc("out", 4 * x.len() as u64)?, DType::F32, &[ROWS, WIDTH]);
    let op = Op::from(RmsNorm {
        x: upload("x", x, &[ROWS, WIDTH])?,
        add: None,
        weight: upload("weight", weight, &[WIDTH])?,
        gate: None,
        out: out.clone(),
        eps: 1e-6,
        groups: 1,
        accumulate: false,
    });
    // An engine asks at load for the scratch memory of its largest step.
    backend.reserve(backend.scratch(&op))?;
    backend.run(|step| step.op(op))?;
    Ok(DType::F32.to_f32(&backend.read(&out).await?))
}
