//! Matrix products with cooperative matrices: f16 factors, or precise ones in two parts of f16, and f32 sums.

use selkie_core::backend::Handle;
use selkie_core::format::Format;
use selkie_core::ops::Access::{self, InPlace, Read, Write};
use selkie_core::ops::{Matmul, RowBlock};
use selkie_core::tensor::{DType, Tensor};

use super::{Facts, dense::precise};
use crate::kernel::{Builder, Kernel, shader};

/// Packed rows are padded to a multiple of this, the height of the largest tile.
const ROWS: usize = 128;

/// Whether a block of weights can be read in slices of 32 of K, 8 elements at a time.
pub(super) fn takes<B: Handle>(block: &RowBlock<B>, k: usize) -> bool {
    let w = &block.w;
    let vectors = matches!(w.dtype, DType::Bf16 | DType::F16)
        && w.offset.is_multiple_of(8)
        && (w.rows() <= 1 || w.row_stride.is_multiple_of(8));
    k.is_multiple_of(32) && (coded(block) || vectors)
}

fn coded<B: Handle>(block: &RowBlock<B>) -> bool {
    block.format != Format::Plain
}

/// The output tile of a workgroup: see `matmul_coop.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Matrices per subgroup in m and n.
    matrices: [usize; 2],
    /// Subgroups in m and n.
    subgroups: [usize; 2],
}

impl Tile {
    fn pick(m: usize, n: usize) -> Self {
        let tile = |matrices, subgroups| Self { matrices, subgroups };
        match m {
            ..=16 => tile([1, 2], [1, 2]),
            17..=32 => tile([2, 1], [1, 4]),
            33..=FEW => tile([2, 2], [2, 2]),
            // Large tiles read less, provided that there are enough of them to occupy most of the device.
            _ if m.div_ceil(128) * n.div_ceil(128) >= 64 => tile([4, 4], [2, 2]),
            _ => tile([2, 4], [2, 2]),
        }
    }

    fn m(&self) -> usize {
        16 * self.matrices[0] * self.subgroups[0]
    }

    fn n(&self) -> usize {
        16 * self.matrices[1] * self.subgroups[1]
    }

    /// Adds the tile's constants, for slices of `slice` elements of K.
    fn constants<B: Handle>(&self, b: Builder<B>, slice: usize) -> Builder<B> {
        let threads = 32 * self.subgroups[0] * self.subgroups[1];
        b.flag("COOPERATIVE", true)
            .constant("XT", self.matrices[0])
            .constant("WT", self.matrices[1])
            .constant("SM", self.subgroups[0])
            .constant("SN", self.subgroups[1])
            .constant("STEPS", slice / 16)
            .constant("X_LOADS", self.m() * slice / 8 / threads)
            .constant("W_LOADS", self.n() * slice / 8 / threads)
    }
}

/// Maximum rows of a product whose time is the time to read its weights: throughput depends on bytes in flight.
const FEW: usize = 64;
/// Columns of the tiles of such products.
const FEW_COLUMNS: usize = 64;

/// How a product is divided among workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    tile: Tile,
    /// Tiles in m and n.
    tiles: [usize; 2],
    /// Number of parts of K, and the length of each part but the last.
    parts: usize,
    k_part: usize,
    /// Length of a slice of K, and the number of slices loaded ahead.
    slice: usize,
    ahead: usize,
}

impl Plan {
    /// Chosen by measurement on an H200, which runs two or three workgroups per multiprocessor. K is split if the tiles alone
    /// would leave most of a large device idle. The product is over `segments` of the length of K.
    /// Coded slices are not loaded ahead: every load of one decodes it, in code of its own.
    fn pick(m: usize, n: usize, k: usize, segments: usize, coded: bool) -> Self {
        let tile = Tile::pick(m, n);
        let tiles = [m.div_ceil(tile.m()), n.div_ceil(tile.n())];
        let fits = |[slice, ahead]: &[usize; 2]| k.is_multiple_of(slice * ahead);
        let [slice, ahead] = match m {
            ..=FEW if !coded => [[64, 4], [64, 1], [32, 1]].into_iter().find(fits).unwrap_or([32, 1]),
            _ => [32, 1],
        };
        let parts = (places(m) / (tiles[0] * tiles[1])).clamp(1, segments * most_parts(m, k));
        let k_part = (segments * k).div_ceil(slice * ahead * parts) * slice * ahead;
        Self { tile, tiles, parts: (segments * k).div_ceil(k_part), k_part, slice, ahead }
    }

    /// Rows and columns of the partial sums of one part of K: whole tiles.
    fn sums(&self) -> [usize; 2] {
        [self.tiles[0] * self.tile.m(), self.tiles[1] * self.tile.n()]
    }
}

/// Target number of workgroups for a product of `m` rows, if K is long enough.
fn places(m: usize) -> usize {
    if m <= FEW { 900 } else { 256 }
}

/// Maximum parts of a segment; with shorter parts or more partial sums the product gets slower.
fn most_parts(m: usize, k: usize) -> usize {
    match m {
        ..=16 => (k / 1024).clamp(1, 8),
        17..=32 => (k / 1024).clamp(1, 6),
        33..=FEW => (k / 1024).clamp(1, 4),
        _ => (k / 2048).clamp(1, 8),
    }
}

/// Maximum words of partial sums for products of at most `m` rows. Fewer rows can need more, because K is cut into more parts.
fn most_sums(m: usize, n: usize, k: usize, segments: usize) -> usize {
    let few = m.min(FEW).next_multiple_of(16).next_power_of_two() * n.next_multiple_of(FEW_COLUMNS);
    let few = few.max((segments * most_parts(1, k) * few).min(places(1) * FEW * FEW_COLUMNS));
    if m <= FEW {
        return few;
    }
    match segments * most_parts(m, k) {
        1 => few,
        parts => few.max((parts * m.next_multiple_of(ROWS) * n.next_multiple_of(ROWS)).min(places(m) * ROWS * ROWS)),
    }
}

/// Segments of a product with a row block, each as long as K: see `matmul_coop.wgsl`.
fn segments<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, facts: &Facts) -> usize {
    match (precise(op, facts), coded(block)) {
        (false, _) => 1,
        (true, false) => 2,
        (true, true) => 3,
    }
}

/// Layout of packed x in the scratch arena: f16 rows of segments, padded to whole tiles, then each row's scale. The padding rows
/// are uninitialised; their results are not used.
struct Packed {
    rows: usize,
    words: usize,
    segments: usize,
}

impl Packed {
    fn of<B: Handle>(op: &Matmul<B>, facts: &Facts) -> Self {
        let segments = op.w.blocks.iter().map(|block| segments(op, block, facts)).max().unwrap_or(1);
        Self { rows: op.x.rows().next_multiple_of(ROWS), words: segments * op.w.k / 2, segments }
    }

    fn views<B: Handle>(&self, b: Builder<B>, access: Access) -> Builder<B> {
        b.scratch_floats("packed", access, 0, [self.rows, self.words]).scratch_floats(
            "unit",
            access,
            self.rows * self.words,
            [self.rows, 4],
        )
    }

    /// Words of the arena in use.
    fn end(&self) -> usize {
        self.rows * (self.words + 4)
    }

    fn kernel<B: Handle>(&self, x: &Tensor<B>, facts: &Facts) -> Kernel<B> {
        let eights = x.row_len() / 8;
        let threads = eights.next_power_of_two().clamp(32, 256);
        let b = Builder::new(shader!("matmul_pack"))
            .constant("WG", threads)
            .constant("HELD", eights.div_ceil(threads))
            .constant("SEGMENTS", self.segments)
            .flag("PRECISE", self.segments > 1)
            .flag("CODED", self.segments > 2)
            .param("k", x.row_len())
            .vectors("x", Read, x);
        self.views(b, Write).build("matmul", x.rows(), facts.max_binding)
    }
}

/// Packs the rows of x, then multiplies with every row block of the weight.
pub(super) fn matmul<B: Handle>(op: &Matmul<B>, facts: &Facts) -> Vec<Kernel<B>> {
    let packed = Packed::of(op, facts);
    let mut kernels = vec![packed.kernel(&op.x, facts)];
    op.w.blocks.iter().for_each(|block| product(op, block, &packed, facts, &mut kernels));
    kernels
}

/// Maximum scratch bytes of the product with this many rows or fewer.
pub(super) fn scratch<B: Handle>(op: &Matmul<B>, facts: &Facts) -> u64 {
    let sums = |block: &RowBlock<B>| most_sums(op.x.rows(), block.w.rows(), op.w.k, segments(op, block, facts));
    4 * (Packed::of(op, facts).end() + op.w.blocks.iter().map(sums).max().unwrap_or(0)) as u64
}

/// The product with one row block: one kernel, or two if K is split.
fn product<B: Handle>(
    op: &Matmul<B>,
    block: &RowBlock<B>,
    packed: &Packed,
    facts: &Facts,
    kernels: &mut Vec<Kernel<B>>,
) {
    let (m, n, k) = (op.x.rows(), block.w.rows(), op.w.k);
    let quads = [n, block.col, op.out.row_len(), op.out.row_stride, op.out.offset].iter().all(|v| v.is_multiple_of(4));
    let segments = segments(op, block, facts);
    let plan = Plan::pick(m, n, k, segments, coded(block));
    let split = quads && (plan.parts > 1 || m <= FEW);
    let b = packed
        .views(plan.tile.constants(Builder::new(shader!("matmul_coop")), plan.slice), Read)
        .constant("AHEAD", plan.ahead)
        .flag("CODED", coded(block))
        .flag("PRECISE", segments > 1)
        .flag("W_F16", coded(block) || block.w.dtype == DType::F16)
        .flag("SPLIT", split)
        .param("n", n)
        .param("k", segments * k)
        .param("w_k", k)
        .param("x_first", (packed.segments - segments) * k)
        .param("m_tiles", plan.tiles[0])
        .param("n_tiles", plan.tiles[1])
        .weight("w", block);
    let (tiles, limit) = (plan.tiles[0] * plan.tiles[1], facts.max_binding);
    if !split {
        let b = b.flag("WHOLE", quads);
        kernels.push(output(b, op, block, quads).build("matmul", tiles, limit));
        return;
    }
    let [rows, columns] = plan.sums();
    let sums = |b: Builder<B>, access| b.scratch_floats("sums", access, packed.end(), [plan.parts * rows, columns]);
    kernels.push(sums(b.param("k_part", plan.k_part), Write).build("matmul", tiles * plan.parts, limit));
    let b = sums(packed.views(Builder::new(shader!("matmul_sum")), Read), Read)
        .param("n", n)
        .param("parts", plan.parts)
        .param("part_rows", rows);
    kernels.push(output(b, op, block, quads).build("matmul", (m * n / 4).div_ceil(256), limit));
}

/// Adds the output and the arguments that its writer needs.
fn output<B: Handle>(b: Builder<B>, op: &Matmul<B>, block: &RowBlock<B>, quads: bool) -> Builder<B> {
    let access = if op.accumulate { InPlace } else { Write };
    let b = b
        .flag("COLUMNS", op.columns.is_some())
        .flag("BIAS", op.bias.is_some())
        .flag("ACCUMULATE", op.accumulate)
        .param("m", op.x.rows())
        .param("col", block.col)
        .float("scale", op.scale);
    let b = if quads { b.vectors("out", access, &op.out) } else { b.view("out", access, &op.out) };
    let b = op.columns.iter().fold(b, |b, columns| b.vectors("columns", Read, columns));
    op.bias.iter().fold(b, |b, bias| b.vectors("bias", Read, bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k_is_cut_where_tiles_are_few() {
        for (m, n, k, want) in [
            (512, 18560, 4096, 1),
            (512, 4096, 21504, 2),
            (512, 4096, 4096, 2),
            (256, 4096, 21504, 4),
            (64, 18560, 4096, 3),
            (64, 4096, 21504, 4),
            (16, 4096, 21504, 8),
            (9, 16, 64, 1),
        ] {
            assert_eq!(Plan::pick(m, n, k, 1, false).parts, want, "{m} x {n} x {k}");
        }
    }

    #[test]
    fn sums_fit_what_more_rows_reserve() {
        for (n, k) in [(36, 4128), (1536, 4096), (4096, 21504), (18560, 4096), (4096, 64), (4096, 32)] {
            for segments in 1..=3 {
                let mut reserved = 0;
                for m in 9..1500 {
                    let plan = Plan::pick(m, n, k, segments, false);
                    let most = most_sums(m, n, k, segments);
                    let [rows, columns] = plan.sums();
                    let (fits, depth) = (plan.parts * rows * columns <= most, segments * k);
                    assert!(fits || (plan.parts == 1 && m > FEW), "{m} x {n} x {k} x {segments}");
                    assert!(reserved <= most, "{m} x {n} x {k} x {segments}");
                    let parts = (plan.parts - 1) * plan.k_part..plan.parts * plan.k_part;
                    assert!(parts.start < depth && parts.end >= depth, "{m} x {n} x {k} x {segments}");
                    reserved = most;
                }
            }
        }
    }

    #[test]
    fn tiles_fit_the_rows() {
        for (m, n, tile) in
            [(9, 4096, 16), (17, 4096, 32), (33, 4096, 64), (512, 768, 64), (512, 4096, 128), (2048, 18560, 128)]
        {
            assert_eq!(Tile::pick(m, n).m(), tile, "{m} x {n}");
            assert!(ROWS.is_multiple_of(tile));
        }
    }
}
