//! Products with the experts that the router chose.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{ExpertMatmul, ExpertRange, RowBlock};

use super::{Facts, eights, lanes};
use crate::kernel::{Builder, Kernel, shader};

pub(super) fn expert_matmul<B: Handle>(op: &ExpertMatmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let blocks = op.experts.iter().enumerate().flat_map(|(i, r)| r.blocks.iter().map(move |b| (i, r, b)));
    blocks.map(|(i, range, block)| product(op, i, range, block, facts)).collect()
}

fn product<B: Handle>(
    op: &ExpertMatmul<B>,
    number: usize,
    range: &ExpertRange<B>,
    block: &RowBlock<B>,
    facts: &Facts,
) -> Result<Kernel<B>> {
    let (n, k) = (block.w.dims()[1], op.x.row_len());
    let eight = eights("expert_matmul", block, k)?;
    // Every range adds its experts' part to the sum.
    let accumulate = op.combine.is_some() && (op.accumulate || number > 0);
    let lanes = lanes(k, if eight { 8 } else { 4 });
    let n_tiles = n.div_ceil(256 / lanes);
    let mut b = Builder::new(shader!("expert_matmul"))
        .constant("LANES", lanes)
        .flag("EIGHT", eight)
        .flag("COMBINE", op.combine.is_some())
        .flag("ACCUMULATE", accumulate)
        .param("n", n)
        .param("k", k)
        .param("col", block.col)
        .param("choices", op.ids.row_len())
        .param("first", range.first)
        .param("experts", range.experts)
        .param("n_tiles", n_tiles)
        .float("scale", if op.combine.is_some() { op.scale } else { 1.0 })
        .vectors("x", Read, &op.x)
        .view("ids", Read, &op.ids)
        .vectors("w", Read, &block.w)
        .view("out", if accumulate { InPlace } else { Write }, &op.out);
    if let Some(combine) = &op.combine {
        b = b.view("combine", Read, combine);
    }
    Ok(b.build("expert_matmul", op.out.rows() * n_tiles, facts.max_binding))
}
