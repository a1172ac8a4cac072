//! Chooses the backend that runs a job. The engine is generic over backends, so a job is a value with a generic method; a
//! closure cannot be generic.

use selkie_core::{
    backend::{Backend, DeviceInfo},
    cpu::CpuBackend,
    timer::Timer,
};

use selkie_cuda::Cuda;
use selkie_wgpu::WgpuBackend;

use crate::{
    args::{BackendArgs, BackendName, StateType},
    failure::{Failure, Outcome},
};

/// A job for the chosen backend.
pub trait Job {
    /// The job's result.
    type Out;
    /// Runs the job.
    fn run<B: Timer>(self, backend: B) -> Outcome<Self::Out>;
}

/// Runs `job` on the backend that `args` name. Only `auto` tries another one if a backend has no usable device.
pub fn run<J: Job>(args: &BackendArgs, job: J) -> Outcome<J::Out> {
    let adapter = args.adapter.as_deref();
    let bf16_state = args.state_dtype == StateType::Bf16;
    match (args.name, adapter) {
        (BackendName::Cuda | BackendName::Cpu, Some(_)) => {
            Err(Failure::Usage("--adapter chooses a device of the wgpu backend: add --backend wgpu".into()))
        }
        (BackendName::Wgpu | BackendName::Cpu, _) | (_, Some(_)) if bf16_state => {
            Err(Failure::Usage("--state-dtype bf16 is for the CUDA backend: the others keep states in f32".into()))
        }
        (BackendName::Wgpu, _) | (BackendName::Auto, Some(_)) => job.run(wgpu(adapter)?),
        // Only CUDA devices store such states, so `auto` has no choice.
        (BackendName::Auto, None) if !bf16_state => auto(job),
        (BackendName::Cuda | BackendName::Auto, None) => {
            job.run(Cuda::open(selkie_cuda::Options { bf16_state, ..Default::default() })?)
        }
        (BackendName::Cpu, None) => job.run(CpuBackend::new()),
    }
}

fn wgpu(adapter: Option<&str>) -> Outcome<WgpuBackend> {
    Ok(pollster::block_on(WgpuBackend::open(adapter, Default::default()))?)
}

/// The first backend with a usable device: CUDA, a GPU through wgpu, the CPU.
fn auto<J: Job>(job: J) -> Outcome<J::Out> {
    for d in selkie_cuda::devices() {
        match d.usable {
            Ok(()) => {
                tracing::info!("backend auto: cuda ({})", d.name);
                return job.run(Cuda::open(selkie_cuda::Options { device: d.index, ..Default::default() })?);
            }
            Err(why) => tracing::info!("backend auto: not cuda: {why}"),
        }
    }
    if !selkie_wgpu::may_have_hardware() {
        tracing::info!("backend auto: not wgpu: this machine has no GPU");
        return job.run(CpuBackend::new());
    }
    match wgpu(None) {
        // The CPU backend is faster than a GPU that is emulated on the CPU.
        Ok(backend) if backend.is_software() => {
            tracing::info!("backend auto: not wgpu: {} is a software device", backend.caps().device);
        }
        Ok(backend) => {
            tracing::info!("backend auto: wgpu ({})", backend.caps().device);
            return job.run(backend);
        }
        Err(why) => tracing::info!("backend auto: not wgpu: {}", why.message().unwrap_or_default()),
    }
    job.run(CpuBackend::new())
}

/// The devices of all backends, in the order in which `--backend auto` tries them.
pub fn devices() -> Vec<DeviceInfo> {
    let mut all = selkie_cuda::devices();
    all.extend(pollster::block_on(selkie_wgpu::devices()));
    let cpu = CpuBackend::new();
    let caps = cpu.caps();
    all.push(DeviceInfo {
        backend: caps.backend,
        index: 0,
        name: caps.device.clone(),
        memory: caps.memory,
        usable: Ok(()),
    });
    all
}
