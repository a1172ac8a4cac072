//! Attention over KV pages on the CPU.

use crate::cpu::Buf;
use crate::cpu::pages::Pages;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{dot, par, view};
use crate::ops::Attention;
use crate::step::{NONE, PAGE};

/// Tokens of a task.
const TILE: usize = 16;

impl Attention<Buf> {
    pub(super) fn run(&self) {
        let kv_heads = self.pool.k.dims()[1];
        let columns = self.q.row_len() / kv_heads;
        let tables = Tables::of(&self.step);
        let q = view::read::<f32>(&self.q);
        let (keys, values) = (Pages::of(&self.pool.k), Pages::of(&self.pool.v));
        let mut out = view::write(&self.out);
        let seen: usize = tables.positions().iter().map(|p| *p as usize + 1).sum();
        let inputs = Inputs {
            tables: &tables,
            q: &q,
            keys: &keys,
            values: &values,
            hd: self.head_dim,
            scale: self.scale,
            window: self.window,
            hidden: self.first as usize,
        };
        par::for_each(out.rows().tiles(TILE, columns), 2 * seen * self.q.row_len(), |i, out| {
            dispatch!(Isa::best(), |s| inputs.run(s, i % kv_heads, i / kv_heads * TILE, out));
        });
    }
}

/// What all tasks read.
struct Inputs<'a> {
    tables: &'a Tables<'a>,
    q: &'a Rows<'a>,
    keys: &'a Pages<'a>,
    values: &'a Pages<'a>,
    hd: usize,
    scale: f32,
    window: Option<u32>,
    /// Positions that only their own queries see.
    hidden: usize,
}

/// The running softmax of one query.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    /// Of no key.
    pub(super) fn new() -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0 }
    }

    /// Adds the keys of one page. Their `scores` are lost, those of keys that the query does not see are -inf; `values` are
    /// `[n, hd]` from number `from` of the page on. A key's lane does not depend on how much of the page the query sees.
    #[inline(always)]
    pub(super) fn add<S: Simd>(
        &mut self,
        s: S,
        scores: &mut [f32; PAGE],
        from: usize,
        values: &[f32],
        out: &mut [f32],
    ) {
        let hd = out.len();
        let max = scores.iter().fold(self.max, |max, score| if *score > max { *score } else { max });
        let mut sum = s.zero();
        for p in scores.as_chunks_mut::<LANES>().0 {
            let v = s.exp(s.sub(s.load(p), s.splat(max)));
            s.store(v, p);
            sum = s.add(sum, v);
        }
        if max > self.max {
            let rescale = s.exp(s.splat(self.max - max));
            self.sum *= s.to_array(rescale)[0];
            for x in out.chunks_mut(LANES) {
                s.store_partial(s.mul(s.load_partial(x), rescale), x);
            }
            self.max = max;
        }
        self.sum += s.reduce_sum(sum);
        let (wide, rest) = out.as_chunks_mut::<{ 4 * LANES }>();
        let narrow = wide.len() * 4 * LANES;
        for (i, x) in wide.iter_mut().enumerate() {
            let x = x.as_chunks_mut::<LANES>().0;
            let mut acc = [s.load(&x[0]), s.load(&x[1]), s.load(&x[2]), s.load(&x[3])];
            for (v, p) in values.chunks_exact(hd).zip(&scores[from..]) {
                let (v, p) = (v[i * 4 * LANES..].as_chunks::<LANES>().0, s.splat(*p));
                for c in 0..4 {
                    acc[c] = s.fma(p, s.load(&v[c]), acc[c]);
                }
            }
            for c in 0..4 {
                s.store(acc[c], &mut x[c]);
            }
        }
        for (i, x) in rest.chunks_mut(LANES).enumerate() {
            let mut acc = s.load_partial(x);
            for (v, p) in values.chunks_exact(hd).zip(&scores[from..]) {
                acc = s.fma(s.splat(*p), s.load_partial(&v[narrow + i * LANES..]), acc);
            }
            s.store_partial(acc, x);
        }
    }

    /// Divides by the sum of the weights; no keys give 0.
    pub(super) fn finish(self, out: &mut [f32]) {
        let factor = if self.sum > 0.0 { 1.0 / self.sum } else { 0.0 };
        out.iter_mut().for_each(|x| *x *= factor);
    }
}

impl Inputs<'_> {
    /// The query heads of one KV head for the tokens from `first` on: `out` holds their rows and columns.
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, kv_head: usize, first: usize, mut out: RowsMut<'_>) {
        let hd = self.hd;
        let heads = out.row_mut(0).len() / hd;
        let token_row = self.tables.token_row();
        let mut running: Vec<Softmax> = Vec::new();
        let mut rooms = [Vec::new(), Vec::new()];
        let mut from = 0;
        while from < out.rows() {
            let row = token_row[first + from];
            let same = (from..out.rows()).take_while(|i| token_row[first + i] == row).count();
            let tokens = from..from + same;
            from += same;
            if row == NONE {
                continue;
            }
            running.clear();
            running.resize(same * heads, Softmax::new());
            tokens.clone().for_each(|i| out.row_mut(i).fill(0.0));
            let ranges = || tokens.clone().map(|i| self.range(first + i));
            let begin = ranges().map(|(from, _)| from / PAGE).min().unwrap_or(0);
            let end = ranges().map(|(_, to)| to.div_ceil(PAGE)).max().unwrap_or(0);
            for block in begin..end {
                let page = self.tables.pages(row as usize)[block] as usize;
                let [keys, values] = &mut rooms;
                let keys = self.keys.head(page, kv_head, hd, keys);
                let values = self.values.head(page, kv_head, hd, values);
                for (i, running) in tokens.clone().zip(running.chunks_mut(heads)) {
                    let (from, to) = self.range(first + i);
                    let in_block = from.max(block * PAGE)..to.min((block + 1) * PAGE);
                    if in_block.is_empty() {
                        continue;
                    }
                    let (from, to) = (in_block.start % PAGE, in_block.end - block * PAGE);
                    let q = &self.q.row(first + i)[kv_head * heads * hd..][..heads * hd];
                    let out = out.row_mut(i).chunks_mut(hd);
                    for ((q, out), running) in q.chunks(hd).zip(out).zip(running) {
                        let part = from * hd..to * hd;
                        attend(s, q, &keys[part.clone()], &values[part], (from, self.scale), running, out);
                    }
                }
            }
            for (i, running) in tokens.zip(running.chunks(heads)) {
                for (out, running) in out.row_mut(i).chunks_mut(hd).zip(running) {
                    running.finish(out);
                }
            }
        }
    }

    /// The positions that token `t` sees, the last one exclusive.
    fn range(&self, t: usize) -> (usize, usize) {
        let end = self.tables.positions()[t] as usize + 1;
        let window = self.window.map_or(0, |w| end.saturating_sub(w as usize));
        (window.max(self.hidden.min(end - 1)), end)
    }
}

/// Adds the keys of one page to a running softmax. `keys` and `values` are `[n, hd]`, the first key is number `from` of its
/// page.
#[inline(always)]
fn attend<S: Simd>(
    s: S,
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    (from, scale): (usize, f32),
    running: &mut Softmax,
    out: &mut [f32],
) {
    let hd = q.len();
    let mut scores = [f32::NEG_INFINITY; PAGE];
    let seen = &mut scores[from..from + keys.len() / hd];
    let (fours, rest) = seen.as_chunks_mut::<4>();
    let (key_fours, key_rest) = keys.split_at(fours.len() * 4 * hd);
    for (k, four) in key_fours.chunks_exact(4 * hd).zip(fours) {
        *four = dot::dot4(s, q, k);
    }
    for (k, score) in key_rest.chunks_exact(hd).zip(rest) {
        *score = dot::dot(s, q, k);
    }
    seen.iter_mut().for_each(|score| *score *= scale);
    running.add(s, &mut scores, from, values, out);
}
