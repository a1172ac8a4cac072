//! The CUDA backend of selkie: kernels of `kernels/` compiled by NVRTC for the device found, cuBLASLt, CUDA graphs.
//!
//! The driver, NVRTC and cuBLASLt are opened at run time. Where one is missing, [`devices`] and [`Cuda::open`] say so;
//! nothing falls back.
//!
//! While kernels are being written, the environment variable `SELKIE_KERNELS` names a folder whose files stand in for those of
//! `kernels/` that were built in.

pub mod arguments;
mod backend;
mod blas;
mod cache;
mod codes;
mod compiler;
mod copies;
mod driver;
mod faults;
mod group;
mod host;
pub mod launch;
mod memory;
pub mod nvrtc;
pub mod plan;
mod record;
pub mod spec;

pub use backend::{Cuda, Options, devices};
pub use group::ranks;
pub use memory::{Buf, Read};
pub use record::{Rec, Tape};
