//! The crate as its users see it. One program, so that the engine is compiled for it once.

mod behind;
mod bundle;
mod bundle_format;
mod cold;
mod constrained;
mod controls;
mod drafts;
mod engine;
mod fairness;
mod flat;
mod gguf;
mod guess;
mod heads;
mod mlx;
mod model;
mod prefix_scenarios;
mod promise;
mod random;
mod ranks;
mod rule;
mod scaled;
mod session;
mod sim;
mod state_engine;
mod tiers;
mod wrapped;
