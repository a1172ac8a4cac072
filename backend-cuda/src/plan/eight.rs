//! Products of more than 8 rows of rounded activations with 8-bit floats, as products of their codes: of up to 64 rows in a kernel of our
//! own, of more in cuBLASLt.

use selkie_core::{
    format::Format,
    ops::{Matmul, Round},
};

use super::{
    Arena, Device, aligned, codes_wgmma,
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

/// Bytes of the sums of the kernel that takes up to 64 rows, if it takes the product.
fn few<B: Address>(op: &Matmul<B>, device: &Device) -> Option<usize> {
    let of = |block| Product::with(op, Matrix::of(block), |p| codes_wgmma::scratch_of_eights(&p, device));
    op.w.blocks.iter().map(of).try_fold(0, |most, bytes| Some(most.max(bytes? as usize)))
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
    if let Some(sums) = few(op, device) {
        return (parts(op.x.rows(), op.w.k, 0).iter().sum::<usize>() + sums) as u64;
    }
    if !fits(op, device) {
        return 0;
    }
    parts(op.x.rows(), op.w.k, rows_at_once(op)).iter().sum::<usize>() as u64
}

/// The kernel that writes the codes and the scales of x.
fn round_codes<B: Address>(round: &Round<B>, [codes, scales]: [u64; 2]) -> Work {
    let (m, k) = (round.x.rows(), round.x.row_len());
    let spec = Spec::new(File::RoundCodes).int("DIM", k).ty("x_t", round.x.dtype);
    let args = RoundCodes { x: (&round.x).into(), codes: At(codes), scales: At(scales) };
    Work::Kernel(Launch::new(spec, [m, k.div_ceil(256 * 8), 1], 256, &args))
}

/// The product of up to 64 rounded rows, if a kernel takes it.
fn launch_few<B: Address>(round: &Round<B>, op: &Matmul<B>, device: &Device, arena: &Arena) -> Option<Vec<Work>> {
    few(op, device)?;
    let [x, x_scales, ..] = parts(op.x.rows(), op.w.k, 0);
    let x_at = [arena.scratch, arena.scratch + x as u64];
    let of = |block| {
        let sums = x_at[1] + x_scales as u64;
        Product::with(op, Matrix::of(block), |p| codes_wgmma::launch_eights(&p, x_at, sums, device, arena))
            .map(Work::Kernel)
    };
    std::iter::once(Some(round_codes(round, x_at))).chain(op.w.blocks.iter().map(of)).collect()
}

/// The product of the rounded rows `round.out`, which are not written, if a kernel or the library takes it.
pub(super) fn launch<B: Address>(
    round: &Round<B>,
    op: &Matmul<B>,
    device: &Device,
    arena: &Arena,
) -> Option<Vec<Work>> {
    let (m, k) = (op.x.rows(), op.w.k);
    if !super::same_view(&op.x, &round.out) {
        return None;
    }
    aligned("round", 8, &[&round.x]).ok()?;
    if let Some(work) = launch_few(round, op, device, arena) {
        return Some(work);
    }
    if !(fits(op, device) && m.is_multiple_of(4)) {
        return None;
    }
    let rows = rows_at_once(op);
    let [x, x_scales, w, _] = parts(m, k, rows);
    let x_at = [arena.scratch, arena.scratch + x as u64];
    let w_at = [x_at[1] + x_scales as u64, x_at[1] + (x_scales + w) as u64];
    let mut work = vec![round_codes(round, x_at)];
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
