//! The ops: fused, semantic steps that every backend implements, one file and one stem each.
//!
//! A file holds the contract: the formula, the arguments with their shapes, [`check`](Op::check) and the cost. The plain f64
//! references that every backend is compared with are the op cases (`tests/cases`). Dims are written outermost first
//! with these letters: T packed tokens, O outputs, D model width, H heads, P Mamba head dim, N state size, G groups,
//! C channels, K conv width or a product's inner dim, E experts, V vocabulary, S slots, L lanes.

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
mod rebind;
mod rms_norm;
mod rope_kv;
mod round;
mod route;
mod rules;
mod sample;
mod selective_scan;

pub use activation::{Act, Activation};
pub use adjust::Adjust;
pub use all_gather::AllGather;
pub use all_reduce::AllReduce;
pub use attention::Attention;
pub use conv1d::Conv1d;
pub use embed::Embed;
pub use expert_matmul::{ExpertMatmul, ExpertRange};
pub use gated_delta::GatedDelta;
pub use gather::Gather;
pub use head_matmul::HeadMatmul;
pub use latent_attention::LatentAttention;
pub use latent_kv::LatentKv;
pub use logprobs::Logprobs;
pub use matmul::{Matmul, RowBlock, Weight};
pub use rank_norm::RankNorm;
pub use rebind::Rebind;
pub use rms_norm::{Gate, RmsNorm};
pub use rope_kv::{KvPool, RopeKv};
pub use round::Round;
pub use route::{Route, Router};
pub use rules::{ENTRY_WORDS, MOST_ENTRIES, MOST_TOP, REPORT_WORDS, RuleWords};
pub use sample::{LANE_WORDS, Sample};
pub use selective_scan::{ScanForm, SelectiveScan};

use serde::{Deserialize, Serialize};

use crate::backend::Handle;
use crate::tensor::Tensor;

/// How an op uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Only written; the previous content is lost.
    Write,
    /// Read and written: an accumulator, a state pool, KV pages.
    InPlace,
}

/// Work of an op at full bucket size, for benches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes that must move at least: each input read once, each output written once.
    pub bytes: u64,
    /// Those of them that stay in memory between steps: of weights, pages that are read, and states. The rest are activations.
    pub held: u64,
    /// Floating-point operations.
    pub flops: u64,
}

/// Ops and forms of ops that some backends have no kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// [`LatentKv`], [`LatentAttention`] and [`HeadMatmul`].
    LatentAttention,
    /// [`GatedDelta`] with a decay per key channel.
    ChannelDecay,
    /// [`AllReduce`], [`AllGather`] and [`RankNorm`].
    Ranks,
}

impl Feature {
    /// Its name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::LatentAttention => "attention over latents",
            Self::ChannelDecay => "a delta rule with a decay per channel",
            Self::Ranks => "sums over ranks",
        }
    }
}

/// Storage buffers that WebGPU guarantees to a shader stage.
const MAX_BINDINGS: usize = 8;

macro_rules! ops {
    ($($name:ident $label:literal),* $(,)?) => {
        /// One recorded op with its arguments.
        #[derive(Clone, Debug, Serialize, Deserialize)]
        pub enum Op<Buf> {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name<Buf>),)*
        }

        $(impl<Buf> From<$name<Buf>> for Op<Buf> {
            fn from(op: $name<Buf>) -> Self {
                Self::$name(op)
            }
        })*

        impl<Buf> Op<Buf> {
            /// The same op over other handles.
            pub fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Op<New> {
                match self { $(Self::$name(op) => Op::$name(op.rebind(to)),)* }
            }
        }

        impl<Buf: Handle> Op<Buf> {
            /// The op's stem: the name of its file in `core/src/ops`, `kernels` and `shaders`.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => $label,)* }
            }

            /// Every tensor that the op touches, and how.
            pub fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
                match self { $(Self::$name(op) => op.tensors(),)* }
            }

            /// Work at full bucket size.
            pub fn cost(&self) -> Cost {
                match self { $(Self::$name(op) => op.cost(),)* }
            }

            fn check_shapes(&self) {
                match self { $(Self::$name(op) => op.check(),)* }
            }
        }
    };
}

ops! {
    Embed "embed",
    RmsNorm "rms_norm",
    Matmul "matmul",
    Activation "activation",
    RopeKv "rope_kv",
    Attention "attention",
    Conv1d "conv1d",
    SelectiveScan "selective_scan",
    GatedDelta "gated_delta",
    HeadMatmul "head_matmul",
    LatentKv "latent_kv",
    LatentAttention "latent_attention",
    Route "route",
    ExpertMatmul "expert_matmul",
    Gather "gather",
    Adjust "adjust",
    Sample "sample",
    Logprobs "logprobs",
    AllReduce "all_reduce",
    AllGather "all_gather",
    RankNorm "rank_norm",
    Round "round",
}

impl<Buf: Handle> Op<Buf> {
    /// Panics, naming the op, if shapes, bounds or aliasing are wrong: that is a bug of ours, never a user's.
    ///
    /// Besides the op's own shapes: every view lies within its buffer, no buffer is both input and output, except for
    /// arguments marked in place, and a kernel can bind all of them: see [`Op::bindings`].
    pub fn check(&self) {
        self.check_shapes();
        let tensors = self.tensors();
        for (_, t) in &tensors {
            assert!(
                t.byte_end() as u64 <= t.buf.bytes(),
                "{}: a view ends at byte {} of a buffer of {}",
                self.name(),
                t.byte_end(),
                t.buf.bytes()
            );
        }
        for (i, (access, t)) in tensors.iter().enumerate().filter(|(_, (a, _))| *a != Access::Read) {
            for (j, (_, other)) in tensors.iter().enumerate() {
                assert!(
                    i == j || t.buf.id() != other.buf.id(),
                    "{}: tensors {i} ({access:?}) and {j} share a buffer",
                    self.name()
                );
            }
        }
        let bindings = self.bindings();
        assert!(bindings <= MAX_BINDINGS, "{}: binds {bindings} buffers, scratch included", self.name());
    }

    /// Buffers that a kernel of the op binds at a time: the distinct ones of its arguments, one row block of a weight
    /// and one for a backend's scratch.
    pub fn bindings(&self) -> usize {
        let tensors = self.tensors();
        let blocks = self.blocks();
        let others = &tensors[..tensors.len() - blocks];
        let first = |i: usize| others[..i].iter().all(|(_, t)| t.buf.id() != others[i].1.buf.id());
        (0..others.len()).filter(|&i| first(i)).count() + blocks.min(1) + 1
    }

    /// What a backend needs to run it, if not every backend has that.
    pub fn feature(&self) -> Option<Feature> {
        match self {
            Self::HeadMatmul(_) | Self::LatentKv(_) | Self::LatentAttention(_) => Some(Feature::LatentAttention),
            Self::GatedDelta(op) if op.decays_per_channel() => Some(Feature::ChannelDecay),
            Self::AllReduce(_) | Self::AllGather(_) | Self::RankNorm(_) => Some(Feature::Ranks),
            _ => None,
        }
    }

    /// Row blocks of the weight, which are the last of [`Op::tensors`].
    fn blocks(&self) -> usize {
        match self {
            Self::Embed(op) => op.table.blocks.len(),
            Self::Matmul(op) => op.w.blocks.len(),
            Self::ExpertMatmul(op) => op.experts.iter().map(|r| r.blocks.len()).sum(),
            _ => 0,
        }
    }
}

/// Asserts a condition on an op's arguments with the op's name in the message.
macro_rules! ensure {
    ($op:literal, $cond:expr, $($msg:tt)+) => {
        assert!($cond, "{}: {}", $op, format_args!($($msg)+))
    };
}
use ensure;

/// Asserts the dims of a tensor.
fn expect<Buf: Clone>(op: &str, name: &str, t: &Tensor<Buf>, dims: &[usize]) {
    assert!(t.dims() == dims, "{op}: {name} is {:?}, not {dims:?}", t.dims());
}

/// Bytes of a tensor's elements.
fn size<Buf: Clone>(t: &Tensor<Buf>) -> u64 {
    (t.len() * t.dtype.bytes()) as u64
}

/// Bytes of every tensor, each counted once (twice if read and written).
fn moved<Buf: Handle>(tensors: &[(Access, &Tensor<Buf>)]) -> u64 {
    tensors.iter().map(|(a, t)| if *a == Access::InPlace { 2 * size(t) } else { size(t) }).sum()
}

#[cfg(test)]
mod tests;
