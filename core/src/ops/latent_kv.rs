//! The write of latents into their pages: an RMS norm of the latent, and the part of the keys that all heads share as it is.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, KvPool, ensure, expect};
use crate::backend::Handle;
use crate::kv8;
use crate::step::{PAGE, Step};
use crate::tensor::{DType, Tensor};

/// For every token of the step: `k = norm(kv[..R])`, `v = kv[R..]` in its page. Padding tokens are skipped, as are page 0 and
/// full pages of other sequences.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatentKv<Buf> {
    /// Positions and page tables.
    pub step: Step<Buf>,
    /// `[T, R + S]`.
    pub kv: Tensor<Buf>,
    /// `[R] f32`: weight of the norm.
    pub weight: Tensor<Buf>,
    /// Added to the mean square.
    pub eps: f32,
    /// The layer's pages: of one head, k `[pages, 1, 64, R]` and v `[pages, 1, 64, S]`, each with a scale per token if they have
    /// 8 bits.
    pub pool: KvPool<Buf>,
}

impl<Buf: Handle> LatentKv<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let reads = [&self.step.ints, &self.kv, &self.weight].map(|t| (Read, t));
        reads.into_iter().chain([(InPlace, &self.pool.k), (InPlace, &self.pool.v)]).collect()
    }

    pub(super) fn cost(&self) -> Cost {
        let bytes = self.kv.len() * (self.kv.dtype.bytes() + self.pool.k.dtype.bytes());
        Cost { bytes: bytes as u64, held: 0, flops: 4 * self.kv.len() as u64 }
    }

    pub(super) fn check(&self) {
        let [latent, shared] = self.pool.check_latent("latent_kv");
        expect("latent_kv", "kv", &self.kv, &[self.step.bucket.tokens, latent + shared]);
        expect("latent_kv", "weight", &self.weight, &[latent]);
        ensure!("latent_kv", self.weight.dtype == DType::F32, "weight is not f32");
    }
}

impl<Buf: Handle> KvPool<Buf> {
    /// R and S of pages with latents.
    pub fn latent_widths(&self) -> [usize; 2] {
        [&self.k, &self.v].map(|t| kv8::elements(t.dtype, t.row_len() / PAGE))
    }

    /// [`Self::latent_widths`] of pages of one head and one dtype.
    pub(super) fn check_latent(&self, op: &str) -> [usize; 2] {
        assert!(self.k.dtype == self.v.dtype, "{op}: latents in {:?}, shared keys in {:?}", self.k.dtype, self.v.dtype);
        let widths @ [latent, shared] = self.latent_widths();
        let dims = |width| [self.k.rows(), 1, PAGE, kv8::stored(self.k.dtype, width)];
        expect(op, "pages of latents", &self.k, &dims(latent));
        expect(op, "pages of shared keys", &self.v, &dims(shared));
        widths
    }
}
