//! Which backend runs a job. The engine is generic over backends, so a job is a value with a generic method instead of a
//! closure.

use selkie_core::{
    Error,
    backend::{Backend, DeviceInfo},
    cpu::CpuBackend,
};

use selkie_cuda::{Cuda, Options};

use crate::{
    args::BackendName,
    failure::{Failure, Outcome},
};

/// Something to do on whichever backend was chosen.
pub trait Job {
    /// What comes out of it.
    type Out;
    /// Does it.
    fn run<B: Backend>(self, backend: B) -> Outcome<Self::Out>;
}

/// Runs `job` on the backend called `name`. Only `auto` looks further when a backend has no usable device.
pub fn run<J: Job>(name: BackendName, job: J) -> Outcome<J::Out> {
    match name {
        BackendName::Cuda => job.run(Cuda::open(Options::default())?),
        BackendName::Wgpu => Err(no_device("wgpu", selkie_wgpu::devices())),
        BackendName::Cpu => job.run(CpuBackend::new()),
        BackendName::Auto => {
            for d in devices() {
                match (d.usable, d.backend) {
                    (Ok(()), "cuda") => {
                        tracing::info!("backend auto: {} ({})", d.backend, d.name);
                        return job.run(Cuda::open(Options { device: d.index, ..Options::default() })?);
                    }
                    (Ok(()), backend) => tracing::info!("backend auto: {backend} ({})", d.name),
                    (Err(why), backend) => tracing::info!("backend auto: not {backend}: {why}"),
                }
            }
            job.run(CpuBackend::new())
        }
    }
}

fn no_device(backend: &'static str, devices: Vec<DeviceInfo>) -> Failure {
    let why = devices.into_iter().find_map(|d| d.usable.err()).unwrap_or_else(|| "there is none".into());
    Error::NoDevice { backend, why }.into()
}

/// The devices of all backends, in the order in which `--backend auto` tries them.
pub fn devices() -> Vec<DeviceInfo> {
    let mut all = selkie_cuda::devices();
    all.extend(selkie_wgpu::devices());
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
