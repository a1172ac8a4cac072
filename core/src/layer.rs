//! What a layer keeps: the shape of its state per sequence, and the device memory that holds the states of all sequences.

use crate::ops::KvPool;
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

/// The device memory of one layer's states, split into blocks that one binding can hold.
#[derive(Clone, Debug)]
pub struct LayerPools<Buf> {
    /// Blocks of KV heads, in order; empty without attention.
    pub kv: Vec<KvPool<Buf>>,
    /// `[S, channels of the block, K - 1]`, blocks in order.
    pub conv: Vec<Tensor<Buf>>,
    /// `[S, heads of the block, P, N]`, blocks in order.
    pub recurrent: Vec<Tensor<Buf>>,
}
