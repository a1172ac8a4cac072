//! Rotary position embedding of q and k (half-split convention), per-head norms before it, and the write of k and v
//! into their pages.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect};
use crate::backend::Handle;
use crate::kv8;
use crate::step::{PAGE, Step};
use crate::tensor::{DType, Tensor};

/// The KV pages of some heads of one layer. In a layer with latents there is one head: k is the latent, and v the part of the
/// keys that is not made from it. Pages in 8 bits, see [`kv8`], have `hd + 4` bytes in place of `hd` elements.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KvPool<Buf> {
    /// `[pages, KH, 64, hd]`, or `[pages, 1, 64, R]`.
    pub k: Tensor<Buf>,
    /// `[pages, KH, 64, hd]`, or `[pages, 1, 64, S]`.
    pub v: Tensor<Buf>,
}

impl<Buf: Handle> KvPool<Buf> {
    pub(super) fn check(&self, op: &str, heads: usize, head_dim: usize) {
        let dims = [self.k.rows(), heads, PAGE, kv8::stored(self.k.dtype, head_dim)];
        expect(op, "k pages", &self.k, &dims);
        expect(op, "v pages", &self.v, &dims);
    }
}

/// For every token of the step: norm, rotate and store. Padding tokens are skipped, and no real token has page 0, so it
/// is never written. Full pages of other sequences are never written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RopeKv<Buf> {
    /// Positions and page tables.
    pub step: Step<Buf>,
    /// `[T, H * hd]`.
    pub q: Tensor<Buf>,
    /// `[T, KH * hd]`.
    pub k: Tensor<Buf>,
    /// `[T, KH * hd]`.
    pub v: Tensor<Buf>,
    /// `[2, hd] f32`: weights of the per-head RMS norms of q and of k, with `1 +` folded in (Qwen3).
    pub norm: Option<(Tensor<Buf>, f32)>,
    /// `[R] f32`: angle per position of each of the R rotated pairs (the first 2R dims of a head); none = no rotation.
    pub inv_freq: Option<Tensor<Buf>>,
    /// `[T, H * hd]`: the rotated q.
    pub q_out: Tensor<Buf>,
    /// The layer's pages for these KV heads.
    pub pool: KvPool<Buf>,
    /// Head dim.
    pub head_dim: usize,
}

impl<Buf: Handle> RopeKv<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let mut t = vec![(Read, &self.step.ints), (Read, &self.q), (Read, &self.k), (Read, &self.v)];
        t.extend(self.norm.iter().map(|(n, _)| (Read, n)));
        t.extend(self.inv_freq.iter().map(|f| (Read, f)));
        t.extend([(Write, &self.q_out), (InPlace, &self.pool.k), (InPlace, &self.pool.v)]);
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let bytes = 2 * (self.q.len() + self.k.len() + self.v.len()) * self.q.dtype.bytes();
        Cost { bytes: bytes as u64, held: 0, flops: 6 * (self.q.len() + self.k.len()) as u64 }
    }

    pub(super) fn check(&self) {
        let (t, hd) = (self.step.bucket.tokens, self.head_dim);
        let (q, kv) = (self.q.row_len(), self.k.row_len());
        ensure!("rope_kv", q % hd == 0 && kv % hd == 0 && hd % 2 == 0, "q {q}, kv {kv}, head dim {hd}");
        expect("rope_kv", "q", &self.q, &[t, q]);
        expect("rope_kv", "k", &self.k, &[t, kv]);
        expect("rope_kv", "v", &self.v, &[t, kv]);
        expect("rope_kv", "q_out", &self.q_out, &[t, q]);
        self.pool.check("rope_kv", kv / hd, hd);
        if let Some((n, _)) = &self.norm {
            expect("rope_kv", "norm", n, &[2, hd]);
            ensure!("rope_kv", n.dtype == DType::F32 && n.is_contiguous(), "norm is not a plain f32 matrix");
        }
        if let Some(f) = &self.inv_freq {
            ensure!("rope_kv", f.dtype == DType::F32 && 2 * f.len() <= hd, "{} pairs of {hd}", f.len());
        }
    }
}
