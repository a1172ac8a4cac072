//! The wgpu backend of selkie: WGSL shaders on Vulkan, Metal, DirectX 12 and, from the same code, in the browser.
//!
//! `lower` turns ops into [`kernel::Kernel`]s, `pipelines` turns kernels into dispatches, and a step is one compute pass of
//! dispatches. Everything works within WebGPU's default limits: 8 storage buffers, 128 MiB per binding, 16 KiB of workgroup
//! memory, 256 invocations.

mod adapter;
mod backend;
mod buffer;
mod cache_file;
mod codes;
mod device;
pub mod kernel;
pub mod lower;
mod pipelines;
#[cfg(target_arch = "wasm32")]
mod signal;
#[cfg(not(target_arch = "wasm32"))]
mod timer;

pub use adapter::{Options, devices, may_have_hardware};
#[cfg(target_arch = "wasm32")]
pub use backend::Queue;
pub use backend::{Rec, Tape, WgpuBackend};
pub use buffer::{Buf, Read};

/// The output of a future that is ready at the first poll, else `None`. Natively wgpu answers error scopes immediately.
#[cfg(not(target_arch = "wasm32"))]
fn ready<T>(f: impl Future<Output = T>) -> Option<T> {
    use std::task::{Context, Poll, Waker};
    match std::pin::pin!(f).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(v) => Some(v),
        Poll::Pending => None,
    }
}
