//! Products per head on the CPU.

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, Simd, dispatch};
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{dot, par, view};
use crate::ops::HeadMatmul;

/// Tokens of a task.
const TILE: usize = 16;

impl HeadMatmul<Buf> {
    pub(super) fn run(&self) {
        let (heads, columns, width) = (self.heads, self.out.row_len() / self.heads, self.x.row_len() / self.heads);
        let (x, w) = (view::read::<f32>(&self.x), view::read::<f32>(&self.w));
        let mut out = view::write(&self.out);
        par::for_each(out.rows().tiles(TILE, columns), self.x.rows() * self.w.len(), |i, mut out| {
            let at = (i % heads, i / heads * TILE, width);
            dispatch!(Isa::best(), |s| multiply(s, at, &x, &w, &mut out));
        });
    }
}

/// One head, whose columns of x begin at `head * width`, for the tokens from `first` on.
#[inline(always)]
fn multiply<S: Simd>(
    s: S,
    (head, first, width): (usize, usize, usize),
    x: &Rows<'_>,
    w: &Rows<'_>,
    out: &mut RowsMut<'_>,
) {
    let columns = out.row_len();
    let k = w.row(0).len();
    let w = &w.flat()[head * columns * k..(head + 1) * columns * k];
    // Four rows of the matrix stay in the cache for all tokens.
    for (i, rows) in w.chunks(4 * k).enumerate() {
        for t in 0..out.rows() {
            let x = &x.row(first + t)[head * width..][..k];
            let out = &mut out.row_mut(t)[4 * i..];
            match rows.len() == 4 * k {
                true => out[..4].copy_from_slice(&dot::dot4(s, x, rows)),
                false => rows.chunks(k).zip(out).for_each(
                    #[inline(always)]
                    |(row, out)| *out = dot::dot(s, x, row),
                ),
            }
        }
    }
}
