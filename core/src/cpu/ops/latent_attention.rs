//! Attention over latents on the CPU: one form for prompts and for decode.

use super::attention::Softmax;
use crate::cpu::Buf;
use crate::cpu::simd::{Isa, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::Rows;
use crate::cpu::{dot, par, view};
use crate::ops::LatentAttention;
use crate::step::{NONE, PAGE};

/// Tokens of a task.
const TILE: usize = 16;

impl LatentAttention<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let seen: usize = tables.positions().iter().map(|p| *p as usize + 1).sum();
        let [latent, shared] = [&self.pool.k, &self.pool.v].map(|t| t.row_len() / PAGE);
        let (q, queries) = (view::read(&self.q), view::read(&self.queries));
        let (latents, tails) = (view::read(&self.pool.k), view::read(&self.pool.v));
        let (heads, width) = (self.heads, self.queries.row_len() / self.heads);
        let inputs = Inputs { tables, q, queries, latents, tails, latent, shared, width, scale: self.scale };
        let mut out = view::write(&self.out);
        par::for_each(out.rows().tiles(TILE, latent), 2 * seen * self.q.row_len(), |i, mut out| {
            let (head, first) = (i % heads, i / heads * TILE);
            for t in 0..out.rows() {
                dispatch!(Isa::best(), |s| inputs.attend(s, head, first + t, out.row_mut(t)));
            }
        });
    }
}

/// What all tasks read.
struct Inputs<'a> {
    tables: Tables<'a>,
    q: Rows<'a>,
    queries: Rows<'a>,
    latents: Rows<'a>,
    tails: Rows<'a>,
    latent: usize,
    shared: usize,
    /// Columns of a head of `queries`.
    width: usize,
    scale: f32,
}

impl Inputs<'_> {
    /// One head of token `t`.
    #[inline(always)]
    fn attend<S: Simd>(&self, s: S, head: usize, t: usize, out: &mut [f32]) {
        let row = self.tables.token_row()[t];
        if row == NONE {
            return;
        }
        let q = &self.q.row(t)[head * self.latent..][..self.latent];
        let tail = &self.queries.row(t)[..(head + 1) * self.width];
        let tail = &tail[tail.len() - self.shared..];
        let end = self.tables.positions()[t] as usize + 1;
        out.fill(0.0);
        let mut running = Softmax::new();
        for (block, page) in self.tables.pages(row as usize)[..end.div_ceil(PAGE)].iter().enumerate() {
            let count = PAGE.min(end - block * PAGE);
            let latents = &self.latents.row(*page as usize)[..count * self.latent];
            let tails = &self.tails.row(*page as usize)[..count * self.shared];
            let mut scores = [f32::NEG_INFINITY; PAGE];
            for ((k, v), score) in latents.chunks(self.latent).zip(tails.chunks(self.shared)).zip(&mut scores) {
                *score = (dot::dot(s, q, k) + dot::dot(s, tail, v)) * self.scale;
            }
            running.add(s, &mut scores, 0, latents, out);
        }
        running.finish(out);
    }
}
