//! Causal attention over latents: a page holds one latent per token, which is key and value of every head, and a part of the
//! key that all heads share.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, KvPool, ensure, expect, size};
use crate::backend::Handle;
use crate::step::{PAGE, Step};
use crate::tensor::Tensor;

/// `out[t, h] = Σ_s softmax_s(scale (q[t, h] · k[s] + tail[t, h] · v[s])) k[s]` over all positions s of the token's row up to
/// its own, where k are the latents, v the shared parts and `tail` the last S elements of a head of `queries`. Softmax in
/// f32; keys are walked in absolute blocks of 64, as in [`super::Attention`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatentAttention<Buf> {
    /// Row table, positions, page tables.
    pub step: Step<Buf>,
    /// `[T, H * R]`: queries in the space of the latents.
    pub q: Tensor<Buf>,
    /// `[T, H * W]`, W at least S: queries whose last S elements multiply the shared part.
    pub queries: Tensor<Buf>,
    /// Pages as of [`super::LatentKv`], this step's tokens included.
    pub pool: KvPool<Buf>,
    /// `[T, H * R]`; rows of padding tokens are not written.
    pub out: Tensor<Buf>,
    /// Query heads H.
    pub heads: usize,
    /// Factor on the products.
    pub scale: f32,
}

impl<Buf: Handle> LatentAttention<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let reads = [&self.step.ints, &self.q, &self.queries, &self.pool.k, &self.pool.v].map(|t| (Read, t));
        reads.into_iter().chain([(Write, &self.out)]).collect()
    }

    pub(super) fn cost(&self) -> Cost {
        let b = &self.step.bucket;
        let [latent, shared] = self.pool.latent_widths();
        let keys = b.pages * PAGE;
        let page = (self.pool.k.row_len() + self.pool.v.row_len()) * self.pool.k.dtype.bytes();
        let held = (b.rows * b.pages * page) as u64;
        let flops = 2 * (keys * b.tokens * self.heads * (2 * latent + shared)) as u64;
        Cost { bytes: size(&self.q) + size(&self.queries) + size(&self.out) + held, held, flops }
    }

    pub(super) fn check(&self) {
        let (t, h) = (self.step.bucket.tokens, self.heads);
        let [latent, shared] = self.pool.check_latent("latent_attention");
        expect("latent_attention", "q", &self.q, &[t, h * latent]);
        expect("latent_attention", "out", &self.out, &[t, h * latent]);
        let width = self.queries.row_len();
        expect("latent_attention", "queries", &self.queries, &[t, width]);
        ensure!(
            "latent_attention",
            width.is_multiple_of(h) && width / h >= shared,
            "{width} columns, {h} heads of {shared}"
        );
    }
}
