//! The ops on the CPU, one file and one stem each: f32 vectors, tasks over the threads of the pool.

mod activation;
mod adjust;
mod all_gather;
mod all_reduce;
mod attention;
mod conv1d;
mod embed;
mod expert_matmul;
mod gated_delta;
mod gather;
mod head_matmul;
mod latent_attention;
mod latent_kv;
mod logprobs;
mod matmul;
mod rank_norm;
mod rms_norm;
mod rope_kv;
mod round;
mod route;
mod sample;
mod selective_scan;

use super::{Buf, Member};
use crate::error::Result;
use crate::format::Products;
use crate::ops::Op;

impl Op<Buf> {
    /// Runs the op on the calling thread and its helpers. The op has passed [`Op::check`]. Fails only if another rank does.
    pub(super) fn run(&self, products: Products, member: &Member) -> Result<()> {
        match self {
            Self::AllReduce(op) => return op.run(member),
            Self::AllGather(op) => return op.run(member),
            Self::RankNorm(op) => return op.run(member),
            Self::Embed(op) => op.run(),
            Self::RmsNorm(op) => op.run(),
            Self::Matmul(op) => op.run(products),
            Self::Activation(op) => op.run(),
            Self::RopeKv(op) => op.run(),
            Self::Round(op) => op.run(),
            Self::Attention(op) => op.run(),
            Self::Conv1d(op) => op.run(),
            Self::SelectiveScan(op) => op.run(),
            Self::GatedDelta(op) => op.run(),
            Self::HeadMatmul(op) => op.run(),
            Self::LatentKv(op) => op.run(),
            Self::LatentAttention(op) => op.run(),
            Self::Route(op) => op.run(),
            Self::ExpertMatmul(op) => op.run(products),
            Self::Gather(op) => op.run(),
            Self::Adjust(op) => op.run(),
            Self::Sample(op) => op.run(),
            Self::Logprobs(op) => op.run(),
        }
        Ok(())
    }
}
