//! The engine of selkie: models, ops, recurrent state, prefix cache, scheduling and the CPU backend.
//!
//! Nothing here names a GPU library; the crate also builds for `wasm32-unknown-unknown`.
//! ARCHITECTURE.md at the repository root is the map.

pub mod backend;
pub mod blocks;
pub mod bundle;
#[cfg(not(target_arch = "wasm32"))]
pub mod cache_dir;
pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod controls;
#[cfg(not(target_arch = "wasm32"))]
pub mod convert;
pub mod cpu;
pub mod digest;
pub mod engine;
pub mod error;
pub mod fnv;
pub mod format;
pub mod generation;
pub mod gguf;
#[cfg(feature = "grammar")]
pub mod grammar;
pub mod kv8;
pub mod layer;
pub mod model_dir;
pub mod models;
pub mod ops;
#[cfg(not(target_arch = "wasm32"))]
pub mod ranks;
pub mod reply;
pub mod rope;
pub mod sample;
pub mod saved;
pub mod session;
pub mod source;
pub mod state;
pub mod step;
pub mod stop;
mod survive;
pub mod tensor;
pub mod tier;
#[cfg(not(target_arch = "wasm32"))]
pub mod timer;
pub mod tokenizer;
pub mod units;
pub mod weights;
pub mod zeroed;

pub use error::{Error, Result};
