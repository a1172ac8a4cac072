//! The CUDA backend of selkie: kernels of `kernels/` compiled by NVRTC for the device found, cuBLASLt, CUDA graphs.
//!
//! The driver, NVRTC and cuBLASLt are opened at run time. Where one is missing, [`devices`] and [`Cuda::open`] say so;
//! nothing falls back.

mod backend;
mod blas;
mod cache;
mod driver;
mod faults;
pub mod launch;
mod memory;
pub mod nvrtc;
pub mod plan;
pub mod spec;

pub use backend::{Cuda, Options, Rec, Tape, devices};
pub use memory::{Buf, Read};
