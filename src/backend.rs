//! Which backend runs a job.

use selkie_core::backend::DeviceInfo;

/// The devices of all backends, in the order in which `--backend auto` tries them.
pub fn devices() -> Vec<DeviceInfo> {
    let mut all = selkie_cuda::devices();
    all.extend(selkie_wgpu::devices());
    all
}
