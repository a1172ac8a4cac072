//! Lowers embedding, norms, linear layers, activations and gathering of rows.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::format::Format;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Activation, Embed, Gather, Matmul, RmsNorm, Round, RowBlock};

use super::{Facts, act, coop, eights, gemv, quads};
use crate::kernel::{Builder, Kernel, shader};

pub(super) fn embed<B: Handle>(op: &Embed<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let kernel = |block: &RowBlock<B>| {
        eights("embed", block, op.table.k)?;
        Ok(Builder::new(shader!("embed"))
            .param("first", block.col)
            .param("count", block.w.rows())
            .param("width", op.table.k)
            .float("scale", op.scale)
            .step(&op.step)
            .view("last", Read, &op.last)
            .weight("table", block)
            .vectors("out", Write, &op.out)
            .build("embed", op.step.bucket.tokens, facts.max_binding))
    };
    op.table.blocks.iter().map(kernel).collect()
}

pub(super) fn gather<B: Handle>(op: &Gather<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    quads("gather", "the width", op.x.row_len())?;
    Ok(vec![
        Builder::new(shader!("gather"))
            .param("width", op.x.row_len())
            .step(&op.step)
            .vectors("x", Read, &op.x)
            .vectors("out", Write, &op.out)
            .build("gather", op.step.bucket.outputs, facts.max_binding),
    ])
}

/// A norm, which with `then` also rounds its output for that product.
pub(super) fn rms_norm<B: Handle>(op: &RmsNorm<B>, then: Option<&Matmul<B>>, facts: &Facts) -> Kernel<B> {
    let len = op.x.row_len() / op.groups;
    let before = op.gate.as_ref().is_some_and(|g| g.before);
    let out = if op.accumulate { InPlace } else { Write };
    // Groups that are not whole quads are read and written element by element.
    let odd = !len.is_multiple_of(4);
    let threads = len.div_ceil(4).next_power_of_two().clamp(32, 256);
    let mut b = Builder::new(shader!("rms_norm"))
        .constant("WG", threads)
        .constant("HELD", len.div_ceil(4 * threads))
        .subgroup(facts.subgroup, threads)
        .flag("ADD", op.add.is_some())
        .flag("GATE", op.gate.is_some())
        .flag("GATE_BEFORE", before)
        .flag("GATE_AFTER", op.gate.is_some() && !before)
        .flag("ACCUMULATE", op.accumulate)
        .flag("ODD", odd)
        .flag("ROUNDS", then.is_some())
        .constant("ACT", op.gate.as_ref().map_or(0, |g| act(g.act)))
        .param("len", len)
        .param("parts", op.groups)
        .param("shared_weight", usize::from(op.weight.len() == len))
        .float("eps", op.eps)
        .float("add_scale", op.add.as_ref().map_or(0.0, |(_, scale)| *scale));
    let view = |b: Builder<B>, name, access, t| if odd { b.view(name, access, t) } else { b.vectors(name, access, t) };
    b = view(b, "x", if op.add.is_some() { InPlace } else { Read }, &op.x);
    b = view(b, "weight", Read, &op.weight);
    b = view(b, "out", out, &op.out);
    if let Some((add, _)) = &op.add {
        b = view(b, "add", Read, add);
    }
    if let Some(gate) = &op.gate {
        b = view(b, "z", Read, &gate.z);
    }
    if let Some(op) = then {
        b = gemv::rounded(b, "codes", Write, op, Builder::scratch_words);
    }
    b.build("rms_norm", op.x.rows() * op.groups, facts.max_binding)
}

pub(super) fn activation<B: Handle>(op: &Activation<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let width = op.out.row_len();
    quads("activation", "the width", width)?;
    let mut b = Builder::new(shader!("activation"))
        .constant("ACT", act(op.act))
        .flag("UP", op.up.is_some())
        .flag("ROW_GATE", op.row_gate.is_some())
        .param("tokens", op.out.rows())
        .param("width", width)
        .vectors("gate", Read, &op.gate)
        .vectors("out", Write, &op.out);
    if let Some(up) = &op.up {
        b = b.vectors("up", Read, up);
    }
    if let Some(row_gate) = &op.row_gate {
        b = b.view("row_gate", Read, row_gate);
    }
    Ok(vec![b.build("activation", (op.out.len() / 4).div_ceil(256), facts.max_binding)])
}

pub(super) fn round<B: Handle>(op: &Round<B>, facts: &Facts) -> Kernel<B> {
    Builder::new(shader!("round"))
        .param("tokens", op.out.rows())
        .param("width", op.out.row_len())
        .vectors("x", Read, &op.x)
        .vectors("out", Write, &op.out)
        .build("round", (op.out.len() / 4).div_ceil(256), facts.max_binding)
}

/// Whether the factors of a product of many rows have 22 bits: two parts of f16 of what f16 does not hold.
pub(super) fn precise<B: Handle>(op: &Matmul<B>, facts: &Facts) -> bool {
    op.precise || facts.precise
}

/// Weights from which on eight rows are faster with cooperative matrices, measured on an H200.
const LARGE: usize = 1 << 24;

/// Whether the product uses cooperative matrices: its scratch has to fit into a binding.
fn cooperative<B: Handle>(op: &Matmul<B>, facts: &Facts) -> bool {
    takes_cooperative(op, facts) && coop::scratch(op, facts) <= facts.max_binding
}

/// Whether cooperative matrices take the product. Native only: browsers have none, and the constant `false` lets the wasm
/// build drop those shaders.
fn takes_cooperative<B: Handle>(op: &Matmul<B>, facts: &Facts) -> bool {
    let native = cfg!(not(target_family = "wasm"));
    // Eight rows of a large weight are limited by arithmetic elsewhere; codes would be decoded twice for a tile that is half empty,
    // and precise factors multiplied twice.
    let once = !precise(op, facts) && op.w.blocks.iter().all(|b| b.format == Format::Plain);
    let large = once && op.w.n * op.w.k >= LARGE;
    let few = gemv::FEW_ROWS - usize::from(large);
    native && facts.cooperative && op.x.rows() > few && op.w.blocks.iter().all(|b| coop::takes(b, op.w.k))
}

/// Maximum scratch bytes of the product with this many rows or fewer.
pub(super) fn matmul_scratch<B: Handle>(op: &Matmul<B>, facts: &Facts) -> u64 {
    let cooperative = if takes_cooperative(op, facts) { coop::scratch(op, facts).min(facts.max_binding) } else { 0 };
    gemv::scratch(op, facts).max(cooperative)
}

pub(super) fn matmul<B: Handle>(op: &Matmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    if cooperative(op, facts) {
        return Ok(coop::matmul(op, facts));
    }
    let dots = op.w.blocks.iter().any(|block| gemv::has_dots(op, block, facts));
    let round = dots.then(|| Ok(gemv::round(op, facts)));
    round.into_iter().chain(op.w.blocks.iter().map(|block| product(op, block, facts))).collect()
}

fn product<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, facts: &Facts) -> Result<Kernel<B>> {
    let (m, n, k) = (op.x.rows(), block.w.rows(), op.w.k);
    if eights("matmul", block, k).is_err() {
        return Ok(odd(op, block, facts));
    }
    if facts.few_barriers {
        return without_barriers(op, block, facts);
    }
    if m <= gemv::FEW_ROWS {
        return gemv::product(op, block, &gemv::Fused::default(), facts);
    }
    eights("matmul", block, k)?;
    let tile = Tile::pick(m, n);
    let m_tiles = m.div_ceil(tile.m);
    let b = tile.constants(Builder::new(shader!("matmul_tile"))).flag("GROUPED", false).flag("PRODUCTS", false);
    let b = operands(b, op, block, ("m_tiles", m_tiles));
    Ok(b.build("matmul", m_tiles * n.div_ceil(tile.n()), facts.max_binding))
}

/// Adds the arguments of a product of many rows; `grid` is the parameter that maps workgroups to tiles.
fn operands<B: Handle>(b: Builder<B>, op: &Matmul<B>, block: &RowBlock<B>, grid: (&'static str, usize)) -> Builder<B> {
    let b = b
        .flag("COLUMNS", op.columns.is_some())
        .flag("BIAS", op.bias.is_some())
        .flag("ACCUMULATE", op.accumulate)
        .param("m", op.x.rows())
        .param("n", block.w.rows())
        .param("k", op.w.k)
        .param("col", block.col)
        .float("scale", op.scale)
        .param(grid.0, grid.1)
        .vectors("x", Read, &op.x)
        .weight("w", block)
        .view("out", if op.accumulate { InPlace } else { Write }, &op.out);
    let b = op.columns.iter().fold(b, |b, columns| b.view("columns", Read, columns));
    op.bias.iter().fold(b, |b, bias| b.view("bias", Read, bias))
}

/// Products that no other shader takes, element by element: see `matmul_odd.wgsl`.
fn odd<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, facts: &Facts) -> Kernel<B> {
    let items = op.x.rows() * block.w.rows();
    let b = operands(Builder::new(shader!("matmul_odd")), op, block, ("items", items));
    b.build("matmul", items.div_ceil(64), facts.max_binding)
}

/// A product of any number of rows with one of two thread layouts, without barriers: see `matmul_rows.wgsl`.
fn without_barriers<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, facts: &Facts) -> Result<Kernel<B>> {
    const COLUMNS: usize = 4;
    let (m, n) = (op.x.rows(), block.w.rows());
    let rows = if m == 1 { 1 } else { 8 };
    let b = Builder::new(shader!("matmul_rows"))
        .constant("ROWS", COLUMNS)
        .constant("MR", rows)
        .flag("EIGHT", eights("matmul", block, op.w.k)?);
    let b = operands(b, op, block, ("columns", n.div_ceil(COLUMNS)));
    let threads = n.div_ceil(COLUMNS) * m.div_ceil(rows);
    Ok(b.build("matmul", threads.div_ceil(64), facts.max_binding))
}

/// Tiling of a product of many rows in f32: see `matmul_tile.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Rows of x.
    pub m: usize,
    /// Blocks of 4 x 4 per thread in m and n.
    pub blocks: [usize; 2],
    /// Depth of a slice.
    pub k: usize,
}

impl Tile {
    fn pick(m: usize, n: usize) -> Self {
        // Large tiles read less, provided that there are enough of them.
        if m > 32 && m.div_ceil(64) * n.div_ceil(128) >= 64 {
            return Self { m: 64, blocks: [1, 2], k: 16 };
        }
        Self { m: m.next_power_of_two().clamp(16, 64), blocks: [1, 1], k: 16 }
    }

    /// Columns.
    pub fn n(&self) -> usize {
        64 * self.blocks[1]
    }

    pub fn constants<B: Handle>(&self, b: Builder<B>) -> Builder<B> {
        let threads = self.m / self.blocks[0] * 4;
        b.constant("BM", self.m)
            .constant("XQ", self.blocks[0])
            .constant("WQ", self.blocks[1])
            .constant("BK", self.k)
            .constant("FETCHES", ((self.m + self.n()) * self.k / 16).div_ceil(threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_tiles_are_for_many() {
        assert_eq!(Tile::pick(512, 4096), Tile { m: 64, blocks: [1, 2], k: 16 });
        assert_eq!(Tile::pick(512, 768), Tile { m: 64, blocks: [1, 1], k: 16 });
        assert_eq!(Tile::pick(9, 18560).m, 16);
        assert_eq!(Tile::pick(33, 64).m, 64);
    }
}
