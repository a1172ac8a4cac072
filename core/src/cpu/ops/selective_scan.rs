//! The selective scan on the CPU, token by token.

use std::ops::Range;

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{dot, math, par, state, view};
use crate::ops::{ScanForm, SelectiveScan};

/// Heads (channels) of a task in [`ScanForm::PerChannel`].
const CHANNELS: usize = 32;

impl SelectiveScan<Buf> {
    pub(super) fn run(&self) {
        let (first_head, heads_per_group) = (self.first_head, self.heads_per_group);
        let [p, n] = [self.pool.dims()[2], self.pool.dims()[3]];
        let heads = if self.form == ScanForm::PerHead { 1 } else { CHANNELS };
        let inputs = Inputs {
            tables: Tables::of(&self.step),
            x: view::read(&self.x),
            b: view::read(&self.b),
            c: view::read(&self.c),
            dt: view::read(&self.dt),
            par: view::read(&self.par),
            form: self.form,
            dt_limit: self.dt_limit,
            p,
            n,
        };
        let (mut pool, mut y) = (view::write(&self.pool), view::write(&self.y));
        let pools = pool.rows().tiles(usize::MAX, heads * p * n);
        let tiles = pools.into_iter().zip(y.rows().tiles(usize::MAX, heads * p)).collect();
        par::for_each(tiles, 2 * self.x.len() * n, |i, (pool, y)| {
            let mut scratch = Vec::new();
            let tiles = pool.tiles(usize::MAX, p * n).into_iter().zip(y.tiles(usize::MAX, p));
            for (h, (mut pool, mut y)) in tiles.enumerate() {
                let h = i * heads + h;
                let group = (first_head + h) / heads_per_group;
                dispatch!(Isa::best(), |s| inputs.scan(s, (h, group), &mut pool, &mut y, &mut scratch));
            }
        });
    }
}

/// What all heads read.
struct Inputs<'a> {
    tables: Tables<'a>,
    x: Rows<'a>,
    b: Rows<'a>,
    c: Rows<'a>,
    dt: Rows<'a>,
    par: Rows<'a>,
    form: ScanForm,
    dt_limit: (f32, f32),
    p: usize,
    n: usize,
}

impl Inputs<'_> {
    /// Head `h` of a group for all tokens; `pool` is `[S, P * N]`, `y` is `[T, P]`.
    #[inline(always)]
    fn scan<S: Simd>(
        &self,
        s: S,
        (h, group): (usize, usize),
        pool: &mut RowsMut<'_>,
        y: &mut RowsMut<'_>,
        scratch: &mut Vec<f32>,
    ) {
        let n = self.n;
        let group = group * n..(group + 1) * n;
        let par = |i: usize| self.par.row(i)[h];
        let per_channel = self.form == ScanForm::PerChannel;
        let (d, dt_bias) = if per_channel { (par(n), par(n + 1)) } else { (par(1), par(2)) };
        let first_a = par(0);
        let a: Vec<f32> = if per_channel { (0..n).map(par).collect() } else { Vec::new() };
        let (low, high) = self.dt_limit;
        state::walk(
            &self.tables,
            pool,
            scratch,
            #[inline(always)]
            |state, chunk| {
                let end = chunk.start + chunk.len;
                for from in (chunk.start..end).step_by(LANES) {
                    let tokens = from..end.min(from + LANES);
                    let mut raw = [0.0; LANES];
                    for (t, raw) in tokens.clone().zip(&mut raw) {
                        *raw = self.dt.row(t)[h];
                    }
                    let dt = math::softplus(s, s.add(s.load(&raw), s.splat(dt_bias)));
                    let dt = s.max(s.splat(low), s.min(s.splat(high), dt));
                    if per_channel {
                        for (t, dt) in tokens.zip(s.to_array(dt)) {
                            let x = self.x.row(t)[h];
                            let (b, c) = (&self.b.row(t)[group.clone()], &self.c.row(t)[group.clone()]);
                            y.row_mut(t)[0] = channel_token(s, state, &a, (dt, x), b, c) + d * x;
                        }
                    } else {
                        let decay = s.to_array(s.exp(s.mul(dt, s.splat(first_a))));
                        let run = Run { tokens, dt: s.to_array(dt), decay, d, head: h, group: group.clone() };
                        self.head_run(s, &run, state, y);
                    }
                }
            },
        );
        for t in (0..y.rows()).filter(|t| self.tables.is_padding(*t)) {
            y.row_mut(t).fill(0.0);
        }
    }

    /// A few tokens of a head with one decay, `state` being `[P, N]`. All paths do the same operations on each element;
    /// they differ in the values that they keep in registers.
    #[inline(always)]
    fn head_run<S: Simd>(&self, s: S, run: &Run, state: &mut [f32], y: &mut RowsMut<'_>) {
        let (p, n) = (self.p, self.n);
        if !n.is_multiple_of(LANES) || !p.is_multiple_of(4) {
            for (i, t) in run.tokens.clone().enumerate() {
                let (x, b, c) = self.token(run, t);
                for ((state, x), y) in state.chunks_mut(n).zip(x).zip(y.row_mut(t)) {
                    *y = dot::decay_add_dot(s, state, run.decay[i], run.dt[i] * x, b, c) + run.d * x;
                }
            }
            return;
        }
        match (n / LANES, S::WIDE_TILE) {
            _ if run.tokens.len() == 1 => self.one_token(s, run, state, y),
            (1, true) => self.rows::<S, 1, 4, 1>(s, run, state, y),
            (2, true) => self.rows::<S, 2, 4, 1>(s, run, state, y),
            (4, true) => self.rows::<S, 4, 4, 1>(s, run, state, y),
            (8, true) => self.rows::<S, 8, 2, 2>(s, run, state, y),
            (16, true) => self.rows::<S, 16, 1, 4>(s, run, state, y),
            (4, false) => self.rows::<S, 4, 1, 4>(s, run, state, y),
            (8, false) => self.rows::<S, 8, 1, 4>(s, run, state, y),
            _ => {
                for (i, t) in run.tokens.clone().enumerate() {
                    let (dt, decay) = ([run.dt[i]; LANES], [run.decay[i]; LANES]);
                    let one = Run { tokens: t..t + 1, dt, decay, group: run.group.clone(), ..*run };
                    self.one_token(s, &one, state, y);
                }
            }
        }
    }

    /// x of the head, B and C of its group.
    #[inline(always)]
    fn token(&self, run: &Run, t: usize) -> (&[f32], &[f32], &[f32]) {
        let x = &self.x.row(t)[run.head * self.p..(run.head + 1) * self.p];
        (x, &self.b.row(t)[run.group.clone()], &self.c.row(t)[run.group.clone()])
    }

    /// The first token of a run: four rows of the state at a time, each element read and written once.
    #[inline(always)]
    fn one_token<S: Simd>(&self, s: S, run: &Run, state: &mut [f32], y: &mut RowsMut<'_>) {
        let n = self.n;
        let (x, b, c) = self.token(run, run.tokens.start);
        let (b, c) = (b.as_chunks::<LANES>().0, c.as_chunks::<LANES>().0);
        let decay = s.splat(run.decay[0]);
        let y = y.row_mut(run.tokens.start);
        let rows = state.chunks_exact_mut(4 * n).zip(x.as_chunks::<4>().0).zip(y.as_chunks_mut::<4>().0);
        for ((rows, x), y) in rows {
            let mut acc = [s.zero(); 4];
            let mut a = [s.zero(); 4];
            for r in 0..4 {
                a[r] = s.splat(run.dt[0] * x[r]);
            }
            let (r0, rest) = rows.split_at_mut(n);
            let (r1, rest) = rest.split_at_mut(n);
            let (r2, r3) = rest.split_at_mut(n);
            let rows = [r0, r1, r2, r3].map(|r| r.as_chunks_mut::<LANES>().0);
            let [r0, r1, r2, r3] = rows;
            for (((((b, c), r0), r1), r2), r3) in b.iter().zip(c).zip(r0).zip(r1).zip(r2).zip(r3) {
                let (b, c) = (s.load(b), s.load(c));
                let rows = [r0, r1, r2, r3];
                for r in 0..4 {
                    let new = s.fma(a[r], b, s.mul(decay, s.load(rows[r])));
                    s.store(new, rows[r]);
                    acc[r] = s.fma(new, c, acc[r]);
                }
            }
            let sums = s.reduce_sum4(acc);
            for r in 0..4 {
                y[r] = sums[r] + run.d * x[r];
            }
        }
    }

    /// All tokens of a run with R rows of the state in registers, N being `16 V`. Sums of R * T = 4 outputs, those of T
    /// tokens, are added up together.
    #[inline(always)]
    fn rows<S: Simd, const V: usize, const R: usize, const T: usize>(
        &self,
        s: S,
        run: &Run,
        state: &mut [f32],
        y: &mut RowsMut<'_>,
    ) {
        let n = self.n;
        for (block, rows) in state.chunks_exact_mut(R * n).enumerate() {
            let rows = rows.as_chunks_mut::<LANES>().0;
            let mut h = [[s.zero(); V]; R];
            for r in 0..R {
                for v in 0..V {
                    h[r][v] = s.load(&rows[r * V + v]);
                }
            }
            for from in run.tokens.clone().step_by(T) {
                let mut acc = [s.zero(); 4];
                for i in 0..T {
                    let t = from + i;
                    if t < run.tokens.end {
                        let (x, b, c) = self.token(run, t);
                        let (b, c) = (b.as_chunks::<LANES>().0, c.as_chunks::<LANES>().0);
                        let at = t - run.tokens.start;
                        let decay = s.splat(run.decay[at]);
                        let mut a = [s.zero(); R];
                        for r in 0..R {
                            a[r] = s.splat(run.dt[at] * x[block * R + r]);
                        }
                        for v in 0..V {
                            let (b, c) = (s.load(&b[v]), s.load(&c[v]));
                            for r in 0..R {
                                h[r][v] = s.fma(a[r], b, s.mul(decay, h[r][v]));
                                acc[i * R + r] = s.fma(h[r][v], c, acc[i * R + r]);
                            }
                        }
                    }
                }
                let sums = s.reduce_sum4(acc);
                for t in from..run.tokens.end.min(from + T) {
                    let x = &self.x.row(t)[run.head * self.p + block * R..][..R];
                    let y = &mut y.row_mut(t)[block * R..][..R];
                    for r in 0..R {
                        y[r] = sums[(t - from) * R + r] + run.d * x[r];
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    s.store(h[r][v], &mut rows[r * V + v]);
                }
            }
        }
    }
}

/// At most 16 consecutive tokens of one head.
struct Run {
    tokens: Range<usize>,
    /// dt of each token.
    dt: [f32; LANES],
    /// exp(dt A) of each token.
    decay: [f32; LANES],
    d: f32,
    head: usize,
    /// Columns of the head's group in B and C.
    group: Range<usize>,
}

/// One token of a channel, whose decay differs along the state: [`dot::decay_add_dot`] with a vector of decays.
#[inline(always)]
fn channel_token<S: Simd>(s: S, state: &mut [f32], a: &[f32], (dt, x): (f32, f32), b: &[f32], c: &[f32]) -> f32 {
    let (dtx, dt) = (s.splat(dt * x), s.splat(dt));
    let mut sum = s.zero();
    let inputs = a.chunks(LANES).zip(b.chunks(LANES)).zip(c.chunks(LANES));
    for (state, ((a, b), c)) in state.chunks_mut(LANES).zip(inputs) {
        let decay = s.exp(s.mul(dt, s.load_partial(a)));
        let new = s.fma(dtx, s.load_partial(b), s.mul(decay, s.load_partial(state)));
        s.store_partial(new, state);
        sum = s.fma(new, s.load_partial(c), sum);
    }
    s.reduce_sum(sum)
}
