//! Running models: the memory of their states, and the loops that feed them steps.

pub mod pools;
pub mod runner;
