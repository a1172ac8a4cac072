//! The engine in a web page: core and the wgpu or CPU backend behind a JavaScript class.
//!
//! The page runs it in a worker. Nothing here depends on the page: files are objects with a `read` method, answers are plain
//! objects, and errors are `Error` objects with a `code`. [`budget`] and [`pace`] add what a page needs: a memory budget that suits a
//! phone, and steps so short that a stop takes effect at once.

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
mod report;
#[cfg(target_arch = "wasm32")]
mod request;
#[cfg(target_arch = "wasm32")]
mod session;
