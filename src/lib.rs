//! selkie: an inference engine for hybrid language models, which combine attention with recurrent layers, on the CPU, on
//! NVIDIA GPUs and through Vulkan, Metal or DX12.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use selkie::Device;
//!
//! let model = selkie::demo()?.device(Device::Cpu).load()?;
//! let mut chat = model.chat();
//! let mut answer = String::new();
//! for piece in chat.ask("What is 17 + 25?")? {
//!     answer += &piece?;
//! }
//! assert_eq!(answer, "17 + 25 = 42.");
//! # Ok(()) }
//! ```
//!
//! [`open`] takes a directory, a GGUF file or a name; [`Model::submit`] takes a request and returns its [`Answer`], which can
//! be read by a thread or by a task of any runtime. The engine is on a thread of its own. The crate `selkie-core` has the
//! parts: engine, scheduler, prefix tree, ops.

mod args;
mod backend;
mod batch;
mod bench;
mod bundle;
mod chat;
#[doc(hidden)]
pub mod cli;
mod convert;
mod costs;
mod devices;
mod embedded;
mod failure;
mod generate;
mod hub;
mod input_file;
mod inspect;
mod interrupt;
mod logits;
mod logprobs;
mod model;
mod open;
mod output_file;
mod render;
#[cfg(feature = "serve")]
mod serve;
mod settings;
mod shell;
mod states;
mod terminal;
#[cfg(feature = "serve")]
mod web;

pub use open::{Device, Opener, demo, open};
pub use selkie_core::{
    Error, Result,
    chat::{Conversation, Message, ToolCall},
    controls::{Constraint, Controls},
    engine::{EngineOptions, Exported, FinishReason, Finished, Imported, Speculate, Timing},
    format::Products,
    model_dir::ModelFiles,
    sample::Sampling,
    session::{
        Answer, Answers, Ask, Chat, Completion, Encoded, Facts, Model, Overrides, Pieces, Prepared, Prompt, Snapshot,
        Text, Token, Update, WhenFull,
    },
    weights::Progress,
};
pub use states::{load_state, save_state};
