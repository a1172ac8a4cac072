//! Model families: a configuration, the layers as data, tensor names and the forward pass.

use crate::backend::{Backend, Ops};
use crate::error::Result;
use crate::ops::KvPool;
use crate::step::Step;
use crate::tensor::Tensor;

/// What one layer keeps per sequence, in any combination. Nothing else knows that a model is hybrid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerState {
    /// Keys and values per token.
    pub kv: Option<KvShape>,
    /// `[C, K - 1]`: the last raw inputs of a convolution.
    pub conv: Option<[usize; 2]>,
    /// `[H, P, N]`: a recurrent state (`[Hv, dk, dv]` for Gated DeltaNet, `[DI, 1, N]` for Mamba-1).
    pub recurrent: Option<[usize; 3]>,
}

/// Heads and head dim of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub heads: usize,
    /// Elements of a key or value.
    pub head_dim: usize,
}

/// Facts about a model that need no weights: what `inspect` shows and what the pools are sized from.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// The config's `model_type`.
    pub family: String,
    /// Vocabulary size V (rows of the output matrix).
    pub vocab: usize,
    /// Model width D.
    pub width: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// A letter per layer: `M` Mamba-2, `G` Gated DeltaNet, `*` attention, `-` MLP, `E` MoE (token mixer before
    /// channel mixer where a layer has both).
    pub layer_map: String,
    /// What each layer keeps.
    pub layers: Vec<LayerState>,
    /// End-of-sequence ids from the config.
    pub eos: Vec<u32>,
}

/// The device memory of one layer's states, split so that every piece can be bound: see `crate::engine::pools`.
#[derive(Clone, Debug)]
pub struct LayerPools<Buf> {
    /// Blocks of KV heads, in order; empty without attention.
    pub kv: Vec<KvPool<Buf>>,
    /// `[S, channels of the block, K - 1]`, blocks in order.
    pub conv: Vec<Tensor<Buf>>,
    /// `[S, heads of the block, P, N]`, blocks in order.
    pub recurrent: Vec<Tensor<Buf>>,
}

/// A loaded model on a backend. One virtual call a step.
pub trait Model<B: Backend> {
    /// Facts about the model.
    fn spec(&self) -> &ModelSpec;

    /// Records one step: embeds the step's tokens, runs the layers over `pools` (one entry per layer) and leaves the
    /// logits of the step's outputs in the first rows of [`Model::logits`]. `last` is `[L] u32`: what each lane sampled
    /// last, for ids taken on the device.
    fn forward(
        &self,
        ops: &mut dyn Ops<B::Buf>,
        step: &Step<B::Buf>,
        pools: &[LayerPools<B::Buf>],
        last: &Tensor<B::Buf>,
    ) -> Result<()>;

    /// `[max outputs, V] f32`.
    fn logits(&self) -> &Tensor<B::Buf>;
}
