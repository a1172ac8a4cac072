//! The CPU backend and the maths under it.

pub mod math;
pub mod simd;
