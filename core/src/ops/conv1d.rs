//! Depthwise causal convolution with its state, driven by the chunk table.
//!
//! `out[t, c] = act(bias[c] + Σ_j w[c, j] * u[t - K + 1 + j, c])`, tap K-1 being the current token
//! (`architectures`: cross-correlation, no flip). Taps reach back through the packed tokens of the same row, then into
//! the state of the row's first chunk's `src`. A chunk's `dst` receives the K-1 raw inputs that end with its last token.

use super::{Access, Act, Cost, ensure, expect};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{self, par, view};
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// Convolution of some channels. See the module for the formula, `crate::step` for the tables.
#[derive(Clone, Debug)]
pub struct Conv1d<Buf> {
    /// Chunk, row and token tables.
    pub step: Step<Buf>,
    /// `[T, C]`: raw inputs.
    pub x: Tensor<Buf>,
    /// `[C, K + 1] f32`: taps, oldest first, then the bias (0 without one).
    pub weight: Tensor<Buf>,
    /// `[S, C, K - 1]`, oldest input first. Slot 0 reads as zero and swallows writes.
    pub pool: Tensor<Buf>,
    /// `[T, C]`; rows of padding tokens receive 0.
    pub out: Tensor<Buf>,
    /// Silu or identity.
    pub act: Act,
}

impl<Buf: Handle> Conv1d<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        vec![(Read, &self.step.ints), (Read, &self.x), (Read, &self.weight), (InPlace, &self.pool), (Write, &self.out)]
    }

    pub(super) fn cost(&self) -> Cost {
        let state = self.pool.row_len() * self.pool.dtype.bytes() * self.step.bucket.rows;
        let bytes = 2 * self.x.len() * self.x.dtype.bytes() + 4 * self.weight.len() + 2 * state;
        Cost { bytes: bytes as u64, flops: 2 * (self.x.len() * self.weight.row_len()) as u64 }
    }

    pub(super) fn check(&self) {
        let (t, c, k) = (self.step.bucket.tokens, self.x.row_len(), self.weight.row_len() - 1);
        expect("conv1d", "x", &self.x, &[t, c]);
        expect("conv1d", "out", &self.out, &[t, c]);
        expect("conv1d", "weight", &self.weight, &[c, k + 1]);
        expect("conv1d", "pool", &self.pool, &[self.pool.rows(), c, k - 1]);
        ensure!("conv1d", (2..=8).contains(&k), "{k} taps");
        ensure!("conv1d", self.weight.dtype == DType::F32, "weight is not f32");
        ensure!("conv1d", matches!(self.act, Act::Silu | Act::Identity), "activation {:?}", self.act);
    }
}

/// Channels of a task.
const TILE: usize = 64;

impl Conv1d<cpu::Buf> {
    pub(super) fn reference(&self) {
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
            // The last K inputs, oldest first; before a token is taken in, the oldest has no use.
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
                    s.store_partial(self.act.apply(s, v), &mut out.row_mut(t)[from..from + lanes]);
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
