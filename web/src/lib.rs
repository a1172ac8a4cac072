//! The engine in a web page: a JavaScript class over core and the wgpu or CPU backend.
//!
//! The page runs it in a worker. Nothing here depends on the page: files are objects with a `read` method, answers are plain
//! objects, and errors are `Error` objects with a `code`. A page also needs [`budget`] and [`pace`]: a memory budget that suits a
//! phone, and steps so short that a stop takes effect immediately.

pub mod budget;
pub mod pace;

#[cfg(target_arch = "wasm32")]
mod device;
#[cfg(target_arch = "wasm32")]
mod engine;
#[cfg(target_arch = "wasm32")]
mod error;
#[cfg(target_arch = "wasm32")]
mod files;
#[cfg(target_arch = "wasm32")]
mod js;
#[cfg(target_arch = "wasm32")]
mod model;
#[cfg(target_arch = "wasm32")]
mod options;
#[cfg(target_arch = "wasm32")]
mod report;
#[cfg(target_arch = "wasm32")]
mod request;
#[cfg(target_arch = "wasm32")]
mod state;
#[cfg(target_arch = "wasm32")]
mod tier;
