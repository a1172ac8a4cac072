//! Rounding of activations to 8-bit floats on the CPU.

use crate::cpu::{Buf, par, view};
use crate::format::{EIGHT_GROUP, round_eight};
use crate::ops::Round;

/// Rows of a task.
const TILE: usize = 8;

impl Round<Buf> {
    pub(super) fn run(&self) {
        let x = view::read(&self.x);
        let mut out = view::write(&self.out);
        par::for_each(out.rows().tiles(TILE, self.out.row_len()), 8 * self.out.len(), |i, mut tile| {
            for r in 0..tile.rows() {
                let groups = x.row(i * TILE + r).as_chunks::<EIGHT_GROUP>().0;
                for (x, out) in groups.iter().zip(tile.row_mut(r).as_chunks_mut::<EIGHT_GROUP>().0) {
                    round_eight(x, out);
                }
            }
        });
    }
}
