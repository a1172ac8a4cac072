//! The write of latents on the CPU.

use crate::cpu::Buf;
use crate::cpu::pages::PagesMut;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::{dot, view};
use crate::ops::LatentKv;
use crate::step::{NONE, PAGE};

impl LatentKv<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let (kv, weight) = (view::read::<f32>(&self.kv), view::read::<f32>(&self.weight));
        let weight = weight.flat();
        let latent = weight.len();
        let (mut latents, mut tails) = (PagesMut::of(&self.pool.k), PagesMut::of(&self.pool.v));
        let mut normed = vec![0.0; latent];
        for (t, (&row, &position)) in tables.token_row().iter().zip(tables.positions()).enumerate() {
            if row == NONE {
                continue;
            }
            let page = tables.pages(row as usize)[position as usize / PAGE] as usize;
            let offset = position as usize % PAGE;
            let (from, rest) = kv.row(t).split_at(latent);
            dispatch!(Isa::best(), |s| norm(s, from, weight, self.eps, &mut normed));
            latents.put(&normed, page, 0, offset);
            tails.put(rest, page, 0, offset);
        }
    }
}

#[inline(always)]
fn norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = s.splat(1.0 / (dot::sum_squares(s, x) / x.len() as f32 + eps).sqrt());
    for ((x, w), out) in x.chunks(LANES).zip(weight.chunks(LANES)).zip(out.chunks_mut(LANES)) {
        s.store_partial(s.mul(s.mul(s.load_partial(x), scale), s.load_partial(w)), out);
    }
}
