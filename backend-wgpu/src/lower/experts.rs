//! Lowers products with the experts that the router chose.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{ExpertMatmul, ExpertRange, RowBlock};

use super::dense::Tile;
use super::{Facts, eights, lanes};
use crate::kernel::{Builder, Kernel, shader};

/// Maximum tokens whose choices are multiplied one at a time, and maximum experts that are counted in workgroup memory.
const FEW_TOKENS: usize = 8;
const MOST_EXPERTS: usize = 2048;

pub(super) fn expert_matmul<B: Handle>(op: &ExpertMatmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    if let Some(plan) = Grouped::pick(op, facts) {
        return plan.kernels(op, facts);
    }
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
    // Every range adds the contribution of its experts.
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
        .weight("w", block)
        .view("out", if accumulate { InPlace } else { Write }, &op.out);
    if let Some(combine) = &op.combine {
        b = b.view("combine", Read, combine);
    }
    Ok(b.build("expert_matmul", op.out.rows() * n_tiles, facts.max_binding))
}

/// Maximum scratch bytes of steps of this many tokens or fewer. A step too large for a binding does not use the arena, but a
/// smaller one can.
pub(super) fn scratch<B: Handle>(op: &ExpertMatmul<B>, facts: &Facts) -> u64 {
    Grouped::plan(op).map_or(0, |plan| plan.bytes(op).min(facts.max_binding / 16 * 16))
}

/// Choices sorted by expert and multiplied in tiles: each weight is read once per tile of choices.
struct Grouped {
    tile: Tile,
    entries: usize,
    experts: usize,
    /// Maximum number of tiles in m.
    tiles: usize,
    /// Word offsets in the scratch arena: the experts of the tiles and, with `combine`, the products.
    expert_at: usize,
    products_at: usize,
}

impl Grouped {
    fn pick<B: Handle>(op: &ExpertMatmul<B>, facts: &Facts) -> Option<Self> {
        Self::plan(op).filter(|plan| plan.bytes(op) <= facts.max_binding)
    }

    /// The plan, without a check against the size of a binding.
    fn plan<B: Handle>(op: &ExpertMatmul<B>) -> Option<Self> {
        let entries = op.ids.len();
        let experts: usize = op.experts.iter().map(|r| r.experts).sum();
        let m = if entries >= 24 * experts { 32 } else { 16 };
        let tiles = entries / m + experts.min(entries);
        let expert_at = m * tiles;
        let products_at = expert_at + tiles.next_multiple_of(64);
        (op.ids.rows() > FEW_TOKENS && experts <= MOST_EXPERTS && op.out.row_len().is_multiple_of(4)).then_some(Self {
            tile: Tile { m, blocks: [1, 1], k: 16 },
            entries,
            experts,
            tiles,
            expert_at,
            products_at,
        })
    }

    /// Scratch bytes.
    fn bytes<B: Handle>(&self, op: &ExpertMatmul<B>) -> u64 {
        let products = if op.combine.is_some() { self.entries * op.out.row_len() } else { 0 };
        4 * (self.products_at + products) as u64
    }

    fn kernels<B: Handle>(&self, op: &ExpertMatmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
        let choices = op.ids.row_len();
        let order = Builder::new(shader!("expert_order"))
            .constant("EXPERTS", self.experts)
            .constant("BM", self.tile.m)
            .param("entries", self.entries)
            .param("choices", choices)
            .param("tiles", self.tiles)
            .view("ids", Read, &op.ids)
            .scratch_words("order", Write, 0, [1, self.expert_at])
            .scratch_words("expert", Write, self.expert_at, [1, self.tiles]);
        let mut kernels = vec![order.build("expert_matmul", 1, facts.max_binding)];
        for (range, block) in op.experts.iter().flat_map(|r| r.blocks.iter().map(move |b| (r, b))) {
            kernels.push(self.product(op, range, block, facts)?);
        }
        if let Some(combine) = &op.combine {
            let n = op.out.row_len();
            let b = Builder::new(shader!("expert_combine"))
                .flag("ACCUMULATE", op.accumulate)
                .param("n", n)
                .param("tokens", op.out.rows())
                .param("choices", choices)
                .float("scale", op.scale)
                .view("ids", Read, &op.ids)
                .view("combine", Read, combine)
                .scratch("products", Read, self.products_at, [self.entries, n])
                .vectors("out", if op.accumulate { InPlace } else { Write }, &op.out);
            kernels.push(b.build("expert_matmul", (op.out.rows() * n / 4).div_ceil(64), facts.max_binding));
        }
        Ok(kernels)
    }

    fn product<B: Handle>(
        &self,
        op: &ExpertMatmul<B>,
        range: &ExpertRange<B>,
        block: &RowBlock<B>,
        facts: &Facts,
    ) -> Result<Kernel<B>> {
        let (n, k) = (block.w.dims()[1], op.x.row_len());
        eights("expert_matmul", block, k)?;
        let combine = op.combine.is_some();
        let b = self
            .tile
            .constants(Builder::new(shader!("matmul_tile")))
            .flag("GROUPED", true)
            .flag("PRODUCTS", combine)
            .flag("COLUMNS", false)
            .flag("BIAS", false)
            .flag("ACCUMULATE", false)
            .param("n", n)
            .param("k", k)
            .param("col", block.col)
            .param("m_tiles", self.tiles)
            .param("first", range.first)
            .param("experts", range.experts)
            // Number of choices that share a row of x.
            .param("share", if combine { 1 } else { op.ids.row_len() })
            .float("scale", 1.0)
            .vectors("x", Read, &op.x)
            .weight("w", block);
        let dims = [self.entries, op.out.row_len()];
        let b =
            if combine { b.scratch_words("out", Write, self.products_at, dims) } else { b.view("out", Write, &op.out) };
        let b = b.scratch_words("order", Read, 0, [1, self.expert_at]).scratch_words(
            "expert",
            Read,
            self.expert_at,
            [1, self.tiles],
        );
        Ok(b.build("expert_matmul", self.tiles * n.div_ceil(self.tile.n()), facts.max_binding))
    }
}
