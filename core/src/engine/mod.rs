//! Running models: the memory of their states, and the loops that feed them steps.
//!
//! [`schedule`] decides, in numbers only, what each step computes; [`plan`] is what it hands over.

mod admit;
pub mod plan;
pub mod pools;
mod row;
pub mod runner;
pub mod schedule;
pub mod sequence;
pub mod stats;

pub use plan::{Plan, PlanChunk, PlanRow, SeqId, Src, TokenRef};
pub use schedule::{Commit, Scheduler};
pub use sequence::Request;
pub use stats::Stats;
