//! A layer's state: its shape per sequence, and the device memory that holds it for all sequences.

use std::ops::Range;

use crate::kv8;
use crate::ops::KvPool;
use crate::tensor::{DType, Tensor};

/// State of one layer per sequence, in any combination. Nothing else knows that a model is hybrid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerState {
    /// Keys and values per token.
    pub kv: Option<KvShape>,
    /// `[C, K - 1]`: the last raw inputs of a convolution.
    pub conv: Option<[usize; 2]>,
    /// `[H, P, N]`: a recurrent state (`[Hv, dk, dv]` for Gated DeltaNet, `[DI, 1, N]` for Mamba-1).
    pub recurrent: Option<[usize; 3]>,
}

impl LayerState {
    /// The state of a layer that has both.
    ///
    /// # Panics
    /// If both have state of one kind: a layer has room for one.
    pub fn and(self, other: Self) -> Self {
        fn one<T>(kind: &str, a: Option<T>, b: Option<T>) -> Option<T> {
            assert!(a.is_none() || b.is_none(), "two mixers of a layer keep {kind}");
            a.or(b)
        }
        Self {
            kv: one("keys and values", self.kv, other.kv),
            conv: one("a convolution state", self.conv, other.conv),
            recurrent: one("a recurrent state", self.recurrent, other.recurrent),
        }
    }
}

/// What one of several ranks has of a layer's state: units of the whole one, in the order in which it has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateShare {
    /// KV heads.
    pub kv: Vec<Range<usize>>,
    /// Channels of the convolution.
    pub conv: Vec<Range<usize>>,
    /// Heads of the recurrent state.
    pub recurrent: Vec<Range<usize>>,
}

impl StateShare {
    /// All of a state.
    pub fn whole(of: LayerState) -> Self {
        let all = |units: Option<usize>| units.map(|n| 0..n).into_iter().collect();
        Self {
            kv: all(of.kv.map(|kv| kv.heads)),
            conv: all(of.conv.map(|[channels, _]| channels)),
            recurrent: all(of.recurrent.map(|[heads, ..]| heads)),
        }
    }

    /// That of a layer that has both, see [`LayerState::and`].
    pub fn and(self, other: Self) -> Self {
        let both = |a: Vec<_>, b| [a, b].concat();
        Self {
            kv: both(self.kv, other.kv),
            conv: both(self.conv, other.conv),
            recurrent: both(self.recurrent, other.recurrent),
        }
    }
}

/// The states of a model and how its ranks share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Division {
    /// The whole state of each layer.
    pub layers: Vec<LayerState>,
    /// Of each rank, what it has of each layer's.
    pub shares: Vec<Vec<StateShare>>,
}

/// Heads and widths of a KV cache. With latents there is one head: its key is the latent, which is key and value of all
/// heads, and its value the part of the keys that is not made from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

impl KvShape {
    /// Elements that a token's key and value of a head take in pages of a dtype.
    pub fn stored(&self, dtype: DType) -> [usize; 2] {
        [self.key_dim, self.value_dim].map(|dim| kv8::stored(dtype, dim))
    }
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
