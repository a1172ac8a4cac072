//! The CPU backend and the maths under it.

mod backend;
mod buf;
pub mod dot;
pub mod gemm;
mod group;
mod int8;
pub mod math;
mod ops;
mod pages;
pub mod par;
pub mod probe;
pub mod simd;
mod state;
mod tables;
#[cfg(not(target_arch = "wasm32"))]
mod team;
mod tile;
mod view;
mod weight;

pub use backend::{CpuBackend, Rec, Tape};
pub use buf::Buf;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use group::Group;
pub use group::{DEADLINE, Member};

#[cfg(test)]
mod tests;
