//! The wgpu backend of selkie: WGSL shaders on Vulkan, Metal, DirectX 12 and, from the same code, in the browser.
//!
//! Ops become [`kernel::Kernel`]s (`lower`), kernels become dispatches (`pipelines`), and a step is one compute pass of them.
//! Everything works within WebGPU's default limits: 8 storage buffers, 128 MiB per binding, 16 KiB of workgroup memory,
//! 256 invocations.

mod adapter;
mod backend;
mod buffer;
mod cache_file;
mod device;
pub mod kernel;
pub mod lower;
mod pipelines;
#[cfg(not(target_arch = "wasm32"))]
mod timer;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

pub use adapter::{Options, devices, may_have_hardware};
pub use backend::{Rec, Tape, WgpuBackend};
pub use buffer::{Buf, Read};

/// What a future holds already. wgpu answers error scopes at once on native; the browser answers later.
fn ready<T>(f: impl Future<Output = T>) -> Option<T> {
    match pin!(f).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(v) => Some(v),
        Poll::Pending => None,
    }
}
