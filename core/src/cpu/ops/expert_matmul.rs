//! Expert products on the CPU: choices sorted by expert, one product per expert that was chosen.

use std::cell::RefCell;

use crate::cpu::Buf;
use crate::cpu::gemm::{self, Product, WeightRows};
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::view::RowBytes;
use crate::cpu::{par, view};
use crate::format::Products;
use crate::ops::ExpertMatmul;
use crate::step::NONE;

thread_local! {
    /// Inputs and products by expert, kept from call to call.
    static SCRATCH: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Tokens of a task that combines.
const TILE: usize = 8;

impl ExpertMatmul<Buf> {
    pub(super) fn run(&self, how: Products) {
        SCRATCH.with_borrow_mut(|[inputs, products]| self.grouped(how, inputs, products));
    }

    /// Choices sorted by expert, one matrix product per chosen expert.
    fn grouped(&self, how: Products, inputs: &mut Vec<f32>, products: &mut Vec<f32>) {
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
            let weights: Vec<_> = range.blocks.iter().map(|b| (b.col, b.w.dims()[1], view::read_bytes(b))).collect();
            let rows = |(col, n, w): &(usize, usize, RowBytes<'_>)| {
                let rows = w.row(expert - range.first);
                let row_bytes = rows.len() / n;
                WeightRows { ptr: rows.as_ptr(), dtype: w.dtype, format: w.format, n: *n, row_bytes, col: *col }
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
                columns: std::ptr::null(),
                bias: std::ptr::null(),
                accumulate: false,
                int8: how == Products::Fast,
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
