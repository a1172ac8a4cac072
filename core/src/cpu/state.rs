//! The walk of a recurrent op over its chunks: which memory holds the state.

use super::tables::{ChunkEntry, Tables};
use super::view::RowsMut;

/// Runs every chunk of every row in order. `pool` is `[S, state]`, one head's part of the slots; `scan(state, chunk)`
/// advances the state over the chunk's tokens in place.
///
/// The state is advanced in its destination: the chunk's `dst` slot, or `scratch` if there is none.
/// Inlined, because `scan` computes with vectors.
#[inline(always)]
pub(crate) fn walk(
    tables: &Tables<'_>,
    pool: &mut RowsMut<'_>,
    scratch: &mut Vec<f32>,
    mut scan: impl FnMut(&mut [f32], ChunkEntry),
) {
    for row in tables.rows() {
        // Slot that holds the row's state; 0 while `scratch` does.
        let mut at = 0;
        for chunk in tables.chunks(row) {
            let fresh = chunk.src == Some(0);
            match (chunk.src.unwrap_or(at), chunk.dst) {
                (0, 0) if fresh => {
                    scratch.clear();
                    scratch.resize(pool.row_len(), 0.0);
                }
                (0, 0) => {}
                (0, dst) if fresh => pool.row_mut(dst).fill(0.0),
                (0, dst) => pool.row_mut(dst).copy_from_slice(scratch),
                (from, 0) => {
                    scratch.clear();
                    scratch.extend_from_slice(pool.row(from));
                }
                (from, dst) => pool.copy_row(from, dst),
            }
            scan(if chunk.dst == 0 { &mut *scratch } else { pool.row_mut(chunk.dst) }, chunk);
            at = chunk.dst;
        }
    }
}
