//! The gated delta rule on the CPU, token by token.

use std::ops::Range;

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{math, par, state, view};
use crate::ops::GatedDelta;
use crate::step::PAGE;

impl GatedDelta<Buf> {
    pub(super) fn run(&self) {
        let (first_head, heads_per_key) = (self.first_head, self.heads_per_key);
        let [dk, dv] = [self.pool.dims()[2], self.pool.dims()[3]];
        let inputs = Inputs {
            tables: Tables::of(&self.step),
            q: view::read(&self.q),
            k: view::read(&self.k),
            v: view::read(&self.v),
            a: view::read(&self.a),
            b: view::read(&self.b),
            par: view::read(&self.par),
            beta_scale: self.beta_scale,
            gates: self.a.row_len() / self.pool.dims()[1],
            dk,
            dv,
        };
        let (mut pool, mut out) = (view::write(&self.pool), view::write(&self.out));
        let pools = pool.rows().tiles(usize::MAX, dk * dv);
        let tiles = pools.into_iter().zip(out.rows().tiles(usize::MAX, dv)).collect();
        par::for_each(tiles, 4 * self.v.len() * dk, |h, (mut pool, mut out)| {
            let mut scratch = Vec::new();
            let key_head = (first_head + h) / heads_per_key;
            dispatch!(Isa::best(), |s| inputs.scan(s, (h, key_head), &mut pool, &mut out, &mut scratch));
        });
    }
}

/// What all heads read.
struct Inputs<'a> {
    tables: Tables<'a>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    a: Rows<'a>,
    b: Rows<'a>,
    par: Rows<'a>,
    beta_scale: f32,
    /// Decays per head: 1, or one per key channel.
    gates: usize,
    dk: usize,
    dv: usize,
}

impl Inputs<'_> {
    /// Value head `h` with its key head for all tokens; `pool` is `[S, dk * dv]`, `out` is `[T, dv]`.
    #[inline(always)]
    fn scan<S: Simd>(
        &self,
        s: S,
        (h, key_head): (usize, usize),
        pool: &mut RowsMut<'_>,
        out: &mut RowsMut<'_>,
        scratch: &mut Vec<f32>,
    ) {
        let (dk, dv) = (self.dk, self.dv);
        let key = key_head * dk..(key_head + 1) * dk;
        let gates = h * self.gates..(h + 1) * self.gates;
        let (a_neg, dt_bias) = (&self.par.row(0)[gates.clone()], &self.par.row(1)[gates.clone()]);
        let (mut q, mut k, mut decay) = (Vec::new(), Vec::new(), Vec::new());
        let mut block = Vec::new();
        state::walk(
            &self.tables,
            pool,
            scratch,
            #[inline(always)]
            |state, chunk| {
                let tokens = chunk.start..chunk.start + chunk.len;
                // No capacity is needed beyond the longest chunk, so these grow once.
                q.resize(chunk.len * dk, 0.0);
                k.resize(chunk.len * dk, 0.0);
                decay.resize(chunk.len * self.gates, 0.0);
                let mut beta = [0.0; PAGE];
                for (i, t) in tokens.clone().enumerate() {
                    let row = i * dk..(i + 1) * dk;
                    normalise(s, &self.q.row(t)[key.clone()], 1.0 / (dk as f32).sqrt(), &mut q[row.clone()]);
                    normalise(s, &self.k.row(t)[key.clone()], 1.0, &mut k[row]);
                    let sigmoid = math::sigmoid(s, s.splat(self.b.row(t)[h]));
                    beta[i] = s.to_array(s.mul(sigmoid, s.splat(self.beta_scale)))[0];
                    let decay = &mut decay[i * self.gates..(i + 1) * self.gates];
                    decays(s, &self.a.row(t)[gates.clone()], a_neg, dt_bias, decay);
                }
                let run = Run { tokens, q: &q, k: &k, beta, decay: &decay, first_column: h * dv };
                match (chunk.len > 1 && dv.is_multiple_of(2 * LANES), self.gates > 1) {
                    (true, false) => self.columns::<S, 2, false>(s, &run, state, &mut block, out),
                    (true, true) => self.columns::<S, 2, true>(s, &run, state, &mut block, out),
                    (false, false) => self.token_by_token::<S, false>(s, &run, state, out),
                    (false, true) => self.token_by_token::<S, true>(s, &run, state, out),
                }
            },
        );
        for t in (0..out.rows()).filter(|t| self.tables.is_padding(*t)) {
            out.row_mut(t).fill(0.0);
        }
    }

    /// A run in place, each token in two passes over the state. EACH: every row of the state has a decay of its own.
    #[inline(always)]
    fn token_by_token<S: Simd, const EACH: bool>(&self, s: S, run: &Run<'_>, state: &mut [f32], out: &mut RowsMut<'_>) {
        let (dk, dv) = (self.dk, self.dv);
        for (i, t) in run.tokens.clone().enumerate() {
            let (q, k) = (&run.q[i * dk..(i + 1) * dk], &run.k[i * dk..(i + 1) * dk]);
            let (beta, decay) = (s.splat(run.beta[i]), run.decay_of::<EACH>(i, dk));
            let v = &self.v.row(t)[run.first_column..run.first_column + dv];
            for (i, out) in out.row_mut(t).chunks_mut(LANES).enumerate() {
                let columns = i * LANES..i * LANES + out.len();
                let mut predicted = s.zero();
                for (d, (row, k)) in state.chunks(dv).zip(k).enumerate() {
                    let old = s.mul(s.splat(decay[at::<EACH>(d)]), s.load_partial(&row[columns.clone()]));
                    predicted = s.fma(s.splat(*k), old, predicted);
                }
                let delta = s.mul(beta, s.sub(s.load_partial(&v[columns.clone()]), predicted));
                let mut sum = s.zero();
                for (d, ((row, k), q)) in state.chunks_mut(dv).zip(k).zip(q).enumerate() {
                    let row = &mut row[columns.clone()];
                    let old = s.mul(s.splat(decay[at::<EACH>(d)]), s.load_partial(row));
                    let new = s.fma(s.splat(*k), delta, old);
                    s.store_partial(new, row);
                    sum = s.fma(s.splat(*q), new, sum);
                }
                s.store_partial(sum, out);
            }
        }
    }

    /// [`Inputs::token_by_token`], blocked: `16 C` columns of the state stay in the first-level cache for all tokens,
    /// and the pass that updates them for one token also computes the prediction for the next. Each element sees the
    /// same operations.
    #[inline(always)]
    fn columns<S: Simd, const C: usize, const EACH: bool>(
        &self,
        s: S,
        run: &Run<'_>,
        state: &mut [f32],
        block: &mut Vec<[[f32; LANES]; C]>,
        out: &mut RowsMut<'_>,
    ) {
        let (dk, dv) = (self.dk, self.dv);
        let len = run.tokens.len();
        block.resize(dk, [[0.0; LANES]; C]);
        for column in (0..dv).step_by(C * LANES) {
            // For the current token: the block holds the decayed state, `predicted` its product with the key.
            let decay = run.decay_of::<EACH>(0, dk);
            let mut predicted = [s.zero(); C];
            for (d, ((old, row), k)) in block.iter_mut().zip(state.chunks(dv)).zip(run.k).enumerate() {
                let decay = s.splat(decay[at::<EACH>(d)]);
                let row = row[column..].as_chunks::<LANES>().0;
                for c in 0..C {
                    let decayed = s.mul(decay, s.load(&row[c]));
                    s.store(decayed, &mut old[c]);
                    predicted[c] = s.fma(s.splat(*k), decayed, predicted[c]);
                }
            }
            for i in 0..len {
                let t = run.tokens.start + i;
                let v = self.v.row(t)[run.first_column + column..].as_chunks::<LANES>().0;
                let beta = s.splat(run.beta[i]);
                let mut delta = [s.zero(); C];
                for c in 0..C {
                    delta[c] = s.mul(beta, s.sub(s.load(&v[c]), predicted[c]));
                    predicted[c] = s.zero();
                }
                let mut sum = [s.zero(); C];
                let (q, k) = (&run.q[i * dk..(i + 1) * dk], &run.k[i * dk..(i + 1) * dk]);
                if i + 1 < len {
                    let decay = run.decay_of::<EACH>(i + 1, dk);
                    let next = &run.k[(i + 1) * dk..(i + 2) * dk];
                    for (d, (((old, q), k), next)) in block.iter_mut().zip(q).zip(k).zip(next).enumerate() {
                        let decay = s.splat(decay[at::<EACH>(d)]);
                        let (q, k, next) = (s.splat(*q), s.splat(*k), s.splat(*next));
                        for c in 0..C {
                            let new = s.fma(k, delta[c], s.load(&old[c]));
                            sum[c] = s.fma(q, new, sum[c]);
                            let decayed = s.mul(decay, new);
                            s.store(decayed, &mut old[c]);
                            predicted[c] = s.fma(next, decayed, predicted[c]);
                        }
                    }
                } else {
                    for (((old, row), q), k) in block.iter().zip(state.chunks_mut(dv)).zip(q).zip(k) {
                        let row = row[column..].as_chunks_mut::<LANES>().0;
                        for c in 0..C {
                            let new = s.fma(s.splat(*k), delta[c], s.load(&old[c]));
                            sum[c] = s.fma(s.splat(*q), new, sum[c]);
                            s.store(new, &mut row[c]);
                        }
                    }
                }
                let out = out.row_mut(t)[column..].as_chunks_mut::<LANES>().0;
                for c in 0..C {
                    s.store(sum[c], &mut out[c]);
                }
            }
        }
    }
}

/// The tokens of a chunk as one head sees them.
struct Run<'a> {
    tokens: Range<usize>,
    /// `[tokens, dk]`, normalised.
    q: &'a [f32],
    /// `[tokens, dk]`, normalised.
    k: &'a [f32],
    beta: [f32; PAGE],
    /// exp(g) of each token: one number, or `[dk]`.
    decay: &'a [f32],
    /// First column of the head in v.
    first_column: usize,
}

impl Run<'_> {
    /// The decays of token `i`; that of row `d` of the state is number [`at`]`(d)`.
    #[inline(always)]
    fn decay_of<const EACH: bool>(&self, i: usize, dk: usize) -> &[f32] {
        let count = if EACH { dk } else { 1 };
        &self.decay[i * count..(i + 1) * count]
    }
}

/// The place of the decay of row `d` of the state.
#[inline(always)]
fn at<const EACH: bool>(d: usize) -> usize {
    if EACH { d } else { 0 }
}

/// `out = exp(a_neg * softplus(a + dt_bias))`.
#[inline(always)]
fn decays<S: Simd>(s: S, a: &[f32], a_neg: &[f32], dt_bias: &[f32], out: &mut [f32]) {
    let inputs = a.chunks(LANES).zip(a_neg.chunks(LANES)).zip(dt_bias.chunks(LANES));
    for (((a, a_neg), dt_bias), out) in inputs.zip(out.chunks_mut(LANES)) {
        let step = math::softplus(s, s.add(s.load_partial(a), s.load_partial(dt_bias)));
        s.store_partial(s.exp(s.mul(step, s.load_partial(a_neg))), out);
    }
}

/// `out = factor * x / sqrt(Σx² + 1e-6)`.
#[inline(always)]
fn normalise<S: Simd>(s: S, x: &[f32], factor: f32, out: &mut [f32]) {
    let mut sum = s.zero();
    for x in x.chunks(LANES) {
        sum = s.fma(s.load_partial(x), s.load_partial(x), sum);
    }
    let scale = s.splat(factor / (s.reduce_sum(sum) + 1e-6).sqrt());
    for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
        s.store_partial(s.mul(s.load_partial(x), scale), out);
    }
}
