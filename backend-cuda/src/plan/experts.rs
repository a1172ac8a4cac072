//! Products of the experts that tokens chose: grouped by expert on tensor cores, or pair by pair.

use selkie_core::{
    Result,
    ops::{ExpertMatmul, ExpertRange, RowBlock},
    tensor::{DType, Tensor},
};

use super::{Target, vector, wide};
use crate::{
    launch::{Address, Args, Launch, Work, address},
    spec::{File, Spec},
};

/// Fewer pairs than this are cheaper one by one.
const FEW_PAIRS: usize = 32;

/// The one block of weights, and pairs of a tile, if the grouped kernel takes this op.
fn grouped<'a, B: Address>(a: &'a ExpertMatmul<B>, target: &Target) -> Option<(&'a RowBlock<B>, usize)> {
    let [ExpertRange { experts, blocks, .. }] = &a.experts[..] else { return None };
    let [block] = &blocks[..] else { return None };
    let pairs = a.ids.len();
    let fits = target.tuned && pairs >= FEW_PAIRS && a.x.row_len().is_multiple_of(8) && wide(&[&a.x, &block.w]);
    fits.then(|| (block, pair_tile(pairs, *experts)))
}

/// Pairs of a tile, from the mean number of pairs of an expert.
fn pair_tile(pairs: usize, experts: usize) -> usize {
    match pairs / experts {
        0..=12 => 16,
        13..=64 => 64,
        _ => 128,
    }
}

/// Copies in flight, and shared memory of a block of the grouped kernel.
fn tile_shared(bm: usize) -> (usize, usize) {
    let stages = if bm == 16 { 4 } else { 3 };
    (stages, stages * (bm + 128) * 72 * 2)
}

/// Bytes of the list of pairs by expert, and where the products begin.
fn list_bytes<B: Address>(a: &ExpertMatmul<B>) -> usize {
    let experts: usize = a.experts.iter().map(|r| r.experts).sum();
    (4 * (2 * (experts + 1) + a.ids.len())).next_multiple_of(256)
}

/// The list, and the products of all pairs before they are combined.
pub(super) fn scratch<B: Address>(a: &ExpertMatmul<B>) -> u64 {
    let products = if a.combine.is_some() { 4 * a.ids.len() * a.out.row_len() } else { 0 };
    (list_bytes(a) + products) as u64
}

pub(super) fn expert_matmul<B: Address>(a: &ExpertMatmul<B>, target: &Target) -> Result<Vec<Work>> {
    let (tokens, top, k, n) = (a.ids.rows(), a.ids.row_len(), a.x.row_len(), a.out.row_len());
    let products = target.scratch + list_bytes(a) as u64;
    let grouped = grouped(a, target);
    // Where the products go before they are combined: rounded like any activation in the grouped case.
    let product = if grouped.is_some() { DType::Bf16 } else { DType::F32 };
    let (to, to_stride, to_dtype) = match a.combine {
        Some(_) => (products, n, product),
        None => (address(&a.out), a.out.row_stride, a.out.dtype),
    };
    let mut work = Vec::new();
    if let Some((block, bm)) = grouped {
        let experts = block.w.rows();
        let spec = Spec::new(File::ExpertSort).int("E", experts).int("TOP", top).int("BM", bm);
        let args = Args::new().rows(&a.ids).int(a.ids.len() as u64).int(target.scratch);
        work.push(Work::Kernel(Launch::new(spec, [1, 1, 1], 1024, args)));
        let (stages, shared) = tile_shared(bm);
        let spec = Spec::new(File::ExpertGrouped)
            .int("K", k)
            .int("N", n)
            .int("E", experts)
            .int("BM", bm)
            .int("STAGES", stages)
            .int("TOP", top)
            .flag("X_PER_PAIR", a.combine.is_some())
            .ty("out_t", to_dtype);
        let args = Args::new().rows(&a.x).rows(&block.w).int(target.scratch).int(to).int(to_stride as u64);
        let grid = [n.div_ceil(128), a.ids.len().div_ceil(bm) + experts.min(a.ids.len()), 1];
        work.push(Work::Kernel(Launch::new(spec, grid, 128, args).with_shared(shared)));
    } else {
        for range in &a.experts {
            for block in &range.blocks {
                let rows = block.w.dims()[1];
                let spec = Spec::new(File::ExpertMatmul)
                    .int("VEC", pair_vector(&a.x, &block.w, k))
                    .int("K", k)
                    .int("TOP", top)
                    .flag("X_PER_PAIR", a.combine.is_some())
                    .ty("x_t", a.x.dtype)
                    .ty("w_t", block.w.dtype)
                    .ty("out_t", to_dtype);
                let args = Args::new()
                    .rows(&a.x)
                    .rows(&block.w)
                    .int(range.first as u64)
                    .int(range.experts as u64)
                    .int(rows as u64)
                    .rows(&a.ids)
                    .int(to + (block.col * to_dtype.bytes()) as u64)
                    .int(to_stride as u64);
                work.push(Work::Kernel(Launch::new(spec, [tokens * top, rows.div_ceil(32), 1], 256, args)));
            }
        }
    }
    if let Some(weights) = &a.combine {
        let vec = vector(n, &[&a.out]).min(4);
        let spec = Spec::new(File::ExpertCombine)
            .int("VEC", vec)
            .int("N", n)
            .int("TOP", top)
            .flag("ACCUMULATE", a.accumulate)
            .ty("product_t", product)
            .ty("out_t", a.out.dtype);
        let args = Args::new().int(products).rows(&a.ids).rows(weights).rows(&a.out).float(a.scale);
        work.push(Work::Kernel(Launch::new(spec, [tokens, n.div_ceil(256 * vec), 1], 256, args)));
    }
    Ok(work)
}

/// Width of the loads along k, for rows that follow each other without a gap.
fn pair_vector<B: Address>(x: &Tensor<B>, w: &Tensor<B>, k: usize) -> usize {
    let v = vector(k, &[x, w]);
    if v == 8 && (x.dtype.bytes() == 4 || w.dtype.bytes() == 4) { 4 } else { v }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_the_load_of_an_expert() {
        assert_eq!(pair_tile(64 * 6, 128), 16);
        assert_eq!(pair_tile(512 * 6, 128), 64);
        assert_eq!(pair_tile(8192 * 6, 128), 128);
        assert!([16, 64, 128].iter().all(|&bm| tile_shared(bm).1 <= 120 << 10));
    }
}
