//! Rotary position embedding of q and k (half-split convention), per-head norms before it, and the write of k and v
//! into their pages.

use super::{Access, Cost, ensure, expect};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::{self, view};
use crate::step::{NONE, PAGE, Step};
use crate::tensor::{DType, Tensor};

/// The KV pages of some heads of one layer.
#[derive(Clone, Debug)]
pub struct KvPool<Buf> {
    /// `[pages, KH, 64, hd]`.
    pub k: Tensor<Buf>,
    /// `[pages, KH, 64, hd]`.
    pub v: Tensor<Buf>,
}

impl<Buf: Handle> KvPool<Buf> {
    pub(super) fn check(&self, op: &str, heads: usize, head_dim: usize) {
        let dims = [self.k.rows(), heads, PAGE, head_dim];
        expect(op, "k pages", &self.k, &dims);
        expect(op, "v pages", &self.v, &dims);
    }
}

/// For every token of the step: norm, rotate and store. Padding tokens are skipped; page 0 swallows nothing because no
/// real token has it. Full pages of other sequences are never written.
#[derive(Clone, Debug)]
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
        Cost { bytes: bytes as u64, flops: 6 * (self.q.len() + self.k.len()) as u64 }
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

impl RopeKv<cpu::Buf> {
    pub(super) fn reference(&self) {
        let hd = self.head_dim;
        let tables = Tables::of(&self.step);
        let (q, k, v) = (view::read::<f32>(&self.q), view::read::<f32>(&self.k), view::read::<f32>(&self.v));
        let norm = self.norm.as_ref().map(|(n, eps)| (view::read::<f32>(n), *eps));
        let norm = |i: usize| norm.as_ref().map(|(n, eps)| (n.row(i), *eps));
        let inv_freq = self.inv_freq.as_ref().map(view::read::<f32>);
        let (mut q_out, mut k_pool, mut v_pool) =
            (view::write(&self.q_out), view::write(&self.pool.k), view::write(&self.pool.v));
        let (mut q_out, mut k_pool, mut v_pool) = (q_out.rows(), k_pool.rows(), v_pool.rows());
        let mut angles = Vec::new();
        for (t, (&row, &position)) in tables.token_row().iter().zip(tables.positions()).enumerate() {
            if row == NONE {
                continue;
            }
            if let Some(f) = &inv_freq {
                angles.clear();
                angles.extend(f.flat().iter().map(|f| (position as f32 * f).sin_cos()));
            }
            for (q, out) in q.row(t).chunks(hd).zip(q_out.row_mut(t).chunks_mut(hd)) {
                out.copy_from_slice(q);
                dispatch!(Isa::best(), |s| rotate(s, norm(0), &angles, out));
            }
            let page = tables.pages(row as usize)[position as usize / PAGE] as usize;
            let offset = position as usize % PAGE;
            let (keys, values) = (k_pool.row_mut(page), v_pool.row_mut(page));
            for (h, (k, v)) in k.row(t).chunks(hd).zip(v.row(t).chunks(hd)).enumerate() {
                let at = (h * PAGE + offset) * hd;
                let out = &mut keys[at..at + hd];
                out.copy_from_slice(k);
                dispatch!(Isa::best(), |s| rotate(s, norm(1), &angles, out));
                values[at..at + hd].copy_from_slice(v);
            }
        }
    }
}

/// Norm and rotation of one head in place; `angles` holds (sin, cos) of each rotated pair.
#[inline(always)]
fn rotate<S: Simd>(s: S, norm: Option<(&[f32], f32)>, angles: &[(f32, f32)], head: &mut [f32]) {
    if let Some((weight, eps)) = norm {
        let mut sum = s.zero();
        for x in head.chunks(LANES) {
            sum = s.fma(s.load_partial(x), s.load_partial(x), sum);
        }
        let scale = s.splat(1.0 / (s.reduce_sum(sum) / head.len() as f32 + eps).sqrt());
        for (x, w) in head.chunks_mut(LANES).zip(weight.chunks(LANES)) {
            s.store_partial(s.mul(s.mul(s.load_partial(x), scale), s.load_partial(w)), x);
        }
    }
    let (a, b) = head[..2 * angles.len()].split_at_mut(angles.len());
    for ((a, b), (sin, cos)) in a.iter_mut().zip(b).zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
