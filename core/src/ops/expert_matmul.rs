//! Grouped matrix products over the experts that the router chose.

use std::cell::RefCell;

use super::{Access, Cost, RowBlock, ensure, expect, moved};
use crate::backend::Handle;
use crate::cpu::gemm::{self, Product, WeightRows};
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::view::RowBytes;
use crate::cpu::{self, par, view};
use crate::step::NONE;
use crate::tensor::{DType, Tensor};

/// Consecutive experts whose weights lie in the same row blocks.
#[derive(Clone, Debug)]
pub struct ExpertRange<Buf> {
    /// First expert.
    pub first: usize,
    /// Number of experts E.
    pub experts: usize,
    /// Each `[E, n, K]`; together they cover the N output columns once.
    pub blocks: Vec<RowBlock<Buf>>,
}

/// Either half of an expert MLP.
///
/// Without `combine`: `out[t * k + j] = x[t] W(ids[t, j])ᵀ`, one output row per (token, choice).
/// With `combine`: `out[t] (+)= Σ_j weights[t, j] * (x[t * k + j] W(ids[t, j])ᵀ)`, summed in ascending j.
/// Choices with id [`crate::step::NONE`] are skipped: their rows are not written, and they add nothing.
#[derive(Clone, Debug)]
pub struct ExpertMatmul<Buf> {
    /// `[T, K]`, or `[T * k, K]` with `combine`.
    pub x: Tensor<Buf>,
    /// Ranges in ascending order that cover all experts.
    pub experts: Vec<ExpertRange<Buf>>,
    /// `[T, k] u32`, ascending within a token.
    pub ids: Tensor<Buf>,
    /// `[T, k] f32`.
    pub combine: Option<Tensor<Buf>>,
    /// `[T * k, N]`, or `[T, N]` with `combine`.
    pub out: Tensor<Buf>,
    /// With `combine`: factor on the sum.
    pub scale: f32,
    /// With `combine`: adds to what `out` holds.
    pub accumulate: bool,
}

impl<Buf: Handle> ExpertMatmul<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let out = if self.accumulate { InPlace } else { Write };
        let mut t = vec![(Read, &self.x), (Read, &self.ids), (out, &self.out)];
        t.extend(self.combine.iter().map(|c| (Read, c)));
        t.extend(self.experts.iter().flat_map(|r| &r.blocks).map(|b| (Read, &b.w)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let (t, k, n) = (self.ids.rows(), self.ids.row_len(), self.out.row_len());
        let experts: usize = self.experts.iter().map(|r| r.experts).sum();
        let weights: u64 =
            self.experts.iter().flat_map(|r| &r.blocks).map(|b| (b.w.len() * b.w.dtype.bytes()) as u64).sum();
        // A step touches at most one expert per choice.
        let touched = weights * (t * k).min(experts) as u64 / experts.max(1) as u64;
        Cost { bytes: moved(&self.tensors()) - weights + touched, flops: 2 * (t * k * n * self.x.row_len()) as u64 }
    }

    pub(super) fn check(&self) {
        let (t, k, n) = (self.ids.rows(), self.ids.row_len(), self.out.row_len());
        let (x_rows, out_rows) = if self.combine.is_some() { (t * k, t) } else { (t, t * k) };
        expect("expert_matmul", "x", &self.x, &[x_rows, self.x.row_len()]);
        expect("expert_matmul", "out", &self.out, &[out_rows, n]);
        ensure!("expert_matmul", self.ids.dtype == DType::U32, "ids are not u32");
        ensure!("expert_matmul", self.combine.is_some() || !self.accumulate, "accumulates without combining");
        if let Some(c) = &self.combine {
            expect("expert_matmul", "combine", c, &[t, k]);
        }
        let mut next = 0;
        for r in &self.experts {
            ensure!("expert_matmul", r.first == next, "experts {next}..{} are missing", r.first);
            next += r.experts;
            let rows: usize = r.blocks.iter().map(|b| b.w.dims()[1]).sum();
            ensure!("expert_matmul", rows == n, "blocks of {rows} rows for {n} columns");
            for b in &r.blocks {
                expect("expert_matmul", "block", &b.w, &[r.experts, b.w.dims()[1], self.x.row_len()]);
            }
        }
    }
}

thread_local! {
    /// Inputs and products by expert, kept from call to call.
    static SCRATCH: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Tokens of a task that combines.
const TILE: usize = 8;

impl ExpertMatmul<cpu::Buf> {
    pub(super) fn reference(&self) {
        SCRATCH.with_borrow_mut(|[inputs, products]| self.grouped(inputs, products));
    }

    /// Choices sorted by expert, one matrix product per expert that anybody chose.
    fn grouped(&self, inputs: &mut Vec<f32>, products: &mut Vec<f32>) {
        let (k, n, inner) = (self.ids.row_len(), self.out.row_len(), self.x.row_len());
        let ids = view::read::<u32>(&self.ids);
        let x = view::read::<f32>(&self.x);
        let combine = self.combine.as_ref().map(view::read::<f32>);
        let ids = (0..ids.rows()).flat_map(|t| ids.row(t)).enumerate();
        // (expert, choice), the choice counted over all tokens.
        let mut order: Vec<(u32, usize)> = ids.filter(|(_, id)| **id != NONE).map(|(i, id)| (*id, i)).collect();
        order.sort_unstable();
        inputs.clear();
        for (_, choice) in &order {
            inputs.extend_from_slice(x.row(if combine.is_some() { *choice } else { choice / k }));
        }
        products.resize(products.len().max(order.len() * n), 0.0);
        let mut first = 0;
        for group in order.chunk_by(|a, b| a.0 == b.0) {
            let expert = group[0].0 as usize;
            let range = &self.experts[self.experts.partition_point(|r| r.first <= expert) - 1];
            let weights: Vec<_> = range.blocks.iter().map(|b| (b.col, b.w.dims()[1], view::read_bytes(&b.w))).collect();
            let rows = |(col, n, w): &(usize, usize, RowBytes<'_>)| WeightRows {
                ptr: w.row(expert - range.first).as_ptr(),
                dtype: w.dtype,
                n: *n,
                row_stride: inner,
                col: *col,
            };
            let blocks: Vec<_> = weights.iter().map(rows).collect();
            let (x, out) = (&inputs[first * inner..], &mut products[first * n..]);
            assert!(x.len() >= group.len() * inner && out.len() >= group.len() * n, "a group beyond the scratch");
            let product = Product {
                x: x.as_ptr(),
                x_stride: inner,
                w: &blocks,
                out: out.as_mut_ptr(),
                out_stride: n,
                m: group.len(),
                k: inner,
                scale: 1.0,
                bias: std::ptr::null(),
                accumulate: false,
            };
            // SAFETY: the scratch has the group's rows; `check` compared the blocks with `n` and `inner`, and their
            // views are held until the product is done.
            unsafe { gemm::matmul(&product) };
            first += group.len();
        }
        let mut out = view::write(&self.out);
        let Some(combine) = combine else {
            let mut out = out.rows();
            for ((_, choice), product) in order.iter().zip(products.chunks_exact(n)) {
                out.row_mut(*choice).copy_from_slice(product);
            }
            return;
        };
        // Where the product of each choice is.
        let mut place = vec![None; self.ids.len()];
        for (i, (_, choice)) in order.iter().enumerate() {
            place[*choice] = Some(i * n);
        }
        let (products, how) = (&*products, (self.scale, self.accumulate));
        par::for_each(out.rows().tiles(TILE, n), order.len() * n, |i, mut tile| {
            for r in 0..tile.rows() {
                let t = i * TILE + r;
                let choices = (&place[t * k..(t + 1) * k], combine.row(t));
                dispatch!(Isa::best(), |s| combine_row(s, choices, products, how, tile.row_mut(r)));
            }
        });
    }
}

/// `out (+)= scale * Σ weight * product` over a token's choices in order.
#[inline(always)]
fn combine_row<S: Simd>(
    s: S,
    (places, weights): (&[Option<usize>], &[f32]),
    products: &[f32],
    (scale, accumulate): (f32, bool),
    out: &mut [f32],
) {
    for (i, out) in out.chunks_mut(LANES).enumerate() {
        let mut sum = s.zero();
        for (place, weight) in places.iter().zip(weights) {
            if let Some(place) = place {
                let product = &products[place + i * LANES..][..out.len()];
                sum = s.add(sum, s.mul(s.splat(*weight), s.load_partial(product)));
            }
        }
        sum = s.mul(sum, s.splat(scale));
        if accumulate {
            sum = s.add(s.load_partial(out), sum);
        }
        s.store_partial(sum, out);
    }
}
