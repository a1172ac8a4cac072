//! The causal convolution on the CPU.

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{math, par, view};
use crate::ops::{Act, Conv1d};

/// Channels of a task.
const TILE: usize = 64;

impl Conv1d<Buf> {
    pub(super) fn run(&self) {
        let (taps, act) = (self.weight.row_len() - 1, self.act);
        let tables = Tables::of(&self.step);
        let (x, weight) = (view::read::<f32>(&self.x), view::read::<f32>(&self.weight));
        let (mut pool, mut out) = (view::write(&self.pool), view::write(&self.out));
        let pools = pool.rows().tiles(usize::MAX, TILE * (taps - 1));
        let tiles = pools.into_iter().zip(out.rows().tiles(usize::MAX, TILE)).collect();
        par::for_each(tiles, self.x.len() * (taps + 8), |i, (mut pool, mut out)| {
            let band = Band { tables: &tables, x: &x, weight: &weight, first: i * TILE, act };
            for from in (0..out.row(0).len()).step_by(LANES) {
                let (pool, out) = (&mut pool, &mut out);
                dispatch!(Isa::best(), |s| match taps {
                    2 => band.run::<_, 2>(s, from, pool, out),
                    3 => band.run::<_, 3>(s, from, pool, out),
                    4 => band.run::<_, 4>(s, from, pool, out),
                    5 => band.run::<_, 5>(s, from, pool, out),
                    6 => band.run::<_, 6>(s, from, pool, out),
                    7 => band.run::<_, 7>(s, from, pool, out),
                    _ => band.run::<_, 8>(s, from, pool, out),
                });
            }
        });
    }
}

/// Consecutive channels of a convolution.
struct Band<'a> {
    tables: &'a Tables<'a>,
    x: &'a Rows<'a>,
    weight: &'a Rows<'a>,
    /// First channel.
    first: usize,
    act: Act,
}

impl Band<'_> {
    /// The 16 (at the end fewer) channels from `from` of the band on. `pool` and `out` hold the band's channels.
    #[inline(always)]
    fn run<S: Simd, const K: usize>(&self, s: S, from: usize, pool: &mut RowsMut<'_>, out: &mut RowsMut<'_>) {
        let lanes = (out.row(0).len() - from).min(LANES);
        let channel = self.first + from;
        let weight = &self.weight.flat()[channel * (K + 1)..(channel + lanes) * (K + 1)];
        let mut taps = [s.zero(); K];
        for j in 0..K {
            taps[j] = gather(s, weight, K + 1, j);
        }
        let bias = gather(s, weight, K + 1, K);
        for row in self.tables.rows() {
            // The last K inputs, oldest first. Entry 0 is unused until the current token shifts the window.
            let mut window = [s.zero(); K];
            for (i, chunk) in self.tables.chunks(row).enumerate() {
                if i == 0
                    && let Some(src @ 1..) = chunk.src
                {
                    let state = &pool.row(src)[from * (K - 1)..(from + lanes) * (K - 1)];
                    for j in 1..K {
                        window[j] = gather(s, state, K - 1, j - 1);
                    }
                }
                for t in chunk.start..chunk.start + chunk.len {
                    for j in 1..K {
                        window[j - 1] = window[j];
                    }
                    window[K - 1] = s.load_partial(&self.x.row(t)[channel..channel + lanes]);
                    let mut v = bias;
                    for j in 0..K {
                        v = s.fma(taps[j], window[j], v);
                    }
                    let v = if self.act == Act::Silu { math::silu(s, v) } else { v };
                    s.store_partial(v, &mut out.row_mut(t)[from..from + lanes]);
                }
                if chunk.dst != 0 {
                    let state = &mut pool.row_mut(chunk.dst)[from * (K - 1)..(from + lanes) * (K - 1)];
                    for j in 1..K {
                        let inputs = s.to_array(window[j]);
                        for (state, input) in state.chunks_exact_mut(K - 1).zip(inputs) {
                            state[j - 1] = input;
                        }
                    }
                }
            }
        }
        for t in (0..out.rows()).filter(|t| self.tables.is_padding(*t)) {
            out.row_mut(t)[from..from + lanes].fill(0.0);
        }
    }
}

/// Column `j` of at most 16 rows of `columns` elements, then zeros.
#[inline(always)]
fn gather<S: Simd>(s: S, rows: &[f32], columns: usize, j: usize) -> S::V {
    let mut v = [0.0; LANES];
    for (v, row) in v.iter_mut().zip(rows.chunks_exact(columns)) {
        *v = row[j];
    }
    s.load(&v)
}
