//! Attention over latents on the CPU: one form for prompts and for decode.

use super::attention::Softmax;
use crate::cpu::Buf;
use crate::cpu::pages::Pages;
use crate::cpu::simd::{Isa, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Rows, RowsMut};
use crate::cpu::{dot, par, view};
use crate::ops::LatentAttention;
use crate::step::{NONE, PAGE};
use crate::tensor::DType;

/// Tokens of a task.
const TILE: usize = 16;
/// Most heads of a task where pages are decoded, which takes as long as several heads do.
const MOST_HEADS: usize = 4;

impl LatentAttention<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let seen: usize = tables.positions().iter().map(|p| *p as usize + 1).sum();
        let [latent, shared] = self.pool.latent_widths();
        let inputs = Inputs {
            tables,
            q: view::read(&self.q),
            queries: view::read(&self.queries),
            latents: Pages::of(&self.pool.k),
            tails: Pages::of(&self.pool.v),
            latent,
            shared,
            width: self.queries.row_len() / self.heads,
            scale: self.scale,
        };
        let together = self.together();
        let groups = self.heads / together;
        let mut out = view::write(&self.out);
        par::for_each(out.rows().tiles(TILE, together * latent), 2 * seen * self.q.row_len(), |i, out| {
            dispatch!(Isa::best(), |s| inputs.run(s, i % groups * together, i / groups * TILE, out));
        });
    }

    /// Heads of a task.
    fn together(&self) -> usize {
        let most = if self.pool.k.dtype == DType::I8 { MOST_HEADS } else { 1 };
        (1..=most).rev().find(|n| self.heads.is_multiple_of(*n)).unwrap_or(1)
    }
}

/// What all tasks read.
struct Inputs<'a> {
    tables: Tables<'a>,
    q: Rows<'a>,
    queries: Rows<'a>,
    latents: Pages<'a>,
    tails: Pages<'a>,
    latent: usize,
    shared: usize,
    /// Columns of a head of `queries`.
    width: usize,
    scale: f32,
}

/// Latents `[64, R]` and shared keys `[64, S]` of a page.
#[derive(Clone, Copy)]
struct Block<'a> {
    latents: &'a [f32],
    tails: &'a [f32],
}

impl Inputs<'_> {
    /// The heads from `head` on of the tokens from `first` on: `out` holds their rows and columns.
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, head: usize, first: usize, mut out: RowsMut<'_>) {
        let heads = out.row_len() / self.latent;
        let (token_row, positions) = (self.tables.token_row(), self.tables.positions());
        let mut rooms = [Vec::new(), Vec::new()];
        let mut from = 0;
        while from < out.rows() {
            let row = token_row[first + from];
            let tokens = from..(from..out.rows()).find(|i| token_row[first + i] != row).unwrap_or(out.rows());
            from = tokens.end;
            if row == NONE {
                continue;
            }
            let end = |i: usize| positions[first + i] as usize + 1;
            let most = tokens.clone().map(end).max().unwrap_or(0);
            let mut running = vec![Softmax::new(); tokens.len() * heads];
            tokens.clone().for_each(|i| out.row_mut(i).fill(0.0));
            for (number, page) in self.tables.pages(row as usize)[..most.div_ceil(PAGE)].iter().enumerate() {
                let block = self.block(*page as usize, &mut rooms);
                for (i, running) in tokens.clone().zip(running.chunks_mut(heads)) {
                    let count = PAGE.min(end(i).saturating_sub(number * PAGE));
                    for (h, (out, running)) in out.row_mut(i).chunks_mut(self.latent).zip(running).enumerate() {
                        self.attend(s, (first + i, head + h), block, count, running, out);
                    }
                }
            }
            for (i, running) in tokens.zip(running.chunks(heads)) {
                let outs = out.row_mut(i).chunks_mut(self.latent);
                outs.zip(running).for_each(|(out, running)| running.finish(out));
            }
        }
    }

    /// A page, decoded into `rooms` if need be.
    fn block<'s>(&'s self, page: usize, rooms: &'s mut [Vec<f32>; 2]) -> Block<'s> {
        let [latents, tails] = rooms;
        Block {
            latents: self.latents.head(page, 0, self.latent, latents),
            tails: self.tails.head(page, 0, self.shared, tails),
        }
    }

    /// Adds the first `count` keys of a page to the running softmax of a token's head.
    #[inline(always)]
    fn attend<S: Simd>(
        &self,
        s: S,
        (t, head): (usize, usize),
        block: Block<'_>,
        count: usize,
        running: &mut Softmax,
        out: &mut [f32],
    ) {
        if count == 0 {
            return;
        }
        let q = &self.q.row(t)[head * self.latent..][..self.latent];
        let tail = &self.queries.row(t)[..(head + 1) * self.width];
        let tail = &tail[tail.len() - self.shared..];
        let (latents, tails) = (&block.latents[..count * self.latent], &block.tails[..count * self.shared]);
        let mut scores = [f32::NEG_INFINITY; PAGE];
        for ((k, v), score) in latents.chunks(self.latent).zip(tails.chunks(self.shared)).zip(&mut scores) {
            *score = (dot::dot(s, q, k) + dot::dot(s, tail, v)) * self.scale;
        }
        running.add(s, &mut scores, 0, latents, out);
    }
}
