//! Products of many rows of rounded activations with 8-bit floats, as products of their codes.

use selkie_core::{
    format::Format,
    ops::{Matmul, Round},
};

use super::{
    Arena, Device, aligned,
    pick::{Matrix, Product},
};
use crate::{
    arguments::{At, CodesRows, RoundCodes},
    codes::{Layout, TILE, UNIT_WARPS},
    launch::{Address, Gemm, Launch, Work, address},
    spec::{File, Spec},
};

/// Rows of x from which on codes are brought into the order of the library. Fewer are multiplied from the layout in which they are.
const LEAST_ROWS: usize = 65;
/// Rows and columns of w that share a scale.
const SQUARE: usize = 128;
/// Most bytes of codes of w that are brought into the order of their rows at a time.
const CODES_BYTES: usize = 256 << 20;

/// Whether the library takes the product, for a number of rows that it takes.
fn fits<B: Address>(op: &Matmul<B>, device: &Device) -> bool {
    let blocks = || op.w.blocks.iter();
    let writes = |w: Matrix| Product::with(op, w, |p| p.library_writes());
    device.tuned
        && device.eight
        && op.x.rows() >= LEAST_ROWS
        && blocks().all(|b| b.format == Format::F8 && b.squares && b.w.rows().is_multiple_of(16))
        && blocks().all(|b| writes(Matrix::of(b)))
}

/// Rows of w at a time.
fn rows_at_once<B: Address>(op: &Matmul<B>) -> usize {
    let most = op.w.blocks.iter().map(|b| b.w.rows()).max().unwrap_or(0);
    most.min((CODES_BYTES / op.w.k / SQUARE).max(1) * SQUARE)
}

/// Scales of a row of blocks of w.
fn pitch(k: usize) -> usize {
    (k / SQUARE).next_multiple_of(4)
}

/// Bytes of the codes and the scales of x, and of those of `n` rows of w.
fn parts(m: usize, k: usize, n: usize) -> [usize; 4] {
    [m * k, 4 * m * (k / SQUARE), n * k, 4 * n.div_ceil(SQUARE) * pitch(k)].map(|bytes| bytes.next_multiple_of(256))
}

/// Bytes of the scratch memory of a product of rounded rows.
pub(super) fn scratch<B: Address>(op: &Matmul<B>, device: &Device) -> u64 {
    if !fits(op, device) {
        return 0;
    }
    parts(op.x.rows(), op.w.k, rows_at_once(op)).iter().sum::<usize>() as u64
}

/// The product of the rounded rows `round.out`, which are not written, if the library takes it.
pub(super) fn launch<B: Address>(
    round: &Round<B>,
    op: &Matmul<B>,
    device: &Device,
    arena: &Arena,
) -> Option<Vec<Work>> {
    let (m, k) = (op.x.rows(), op.w.k);
    if !(fits(op, device) && m.is_multiple_of(4) && super::same_view(&op.x, &round.out)) {
        return None;
    }
    aligned("round", 8, &[&round.x]).ok()?;
    let rows = rows_at_once(op);
    let [x, x_scales, w, _] = parts(m, k, rows);
    let x_at = [arena.scratch, arena.scratch + x as u64];
    let w_at = [x_at[1] + x_scales as u64, x_at[1] + (x_scales + w) as u64];
    let spec = Spec::new(File::RoundCodes).int("DIM", k).ty("x_t", round.x.dtype);
    let args = RoundCodes { x: (&round.x).into(), codes: At(x_at[0]), scales: At(x_at[1]) };
    let mut work = vec![Work::Kernel(Launch::new(spec, [m, k.div_ceil(256 * 8), 1], 256, &args))];
    for block in &op.w.blocks {
        let matrix = Matrix::of(block);
        let layout = Layout::of(matrix.format, k).expect("rows of codes");
        for first in (0..matrix.rows).step_by(rows) {
            let n = rows.min(matrix.rows - first);
            let spec = Spec::new(File::CodesRows).int("FORMAT", layout.format).int("K", k).int("PITCH", pitch(k));
            let args = CodesRows {
                w: At(matrix.at + layout.bytes(first) as u64),
                n: n as u64,
                codes: At(w_at[0]),
                scales: At(w_at[1]),
            };
            let blocks = (n.div_ceil(TILE) * layout.units).div_ceil(UNIT_WARPS);
            work.push(Work::Kernel(Launch::new(spec, [blocks, 1, 1], 32 * UNIT_WARPS, &args)));
            work.push(Work::Gemm(Gemm {
                mnk: [m, n, k],
                at: [x_at[0], w_at[0], address(&op.out.cols(matrix.col + first, n))],
                strides: [k, k, op.out.row_stride],
                out: op.out.dtype,
                scale: op.scale,
                accumulate: op.accumulate,
                scales: Some([x_at[1], w_at[1]]),
            }));
        }
        if op.columns.is_some() || op.bias.is_some() {
            work.push(Work::Kernel(Product::with(op, matrix, |p| p.columns_and_bias())));
        }
    }
    Some(work)
}
