//! Rotation and the write of keys and values on the CPU.

use crate::cpu::Buf;
use crate::cpu::pages::PagesMut;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::RopeKv;
use crate::step::{NONE, PAGE};

impl RopeKv<Buf> {
    pub(super) fn run(&self) {
        let hd = self.head_dim;
        let tables = Tables::of(&self.step);
        let (q, k, v) = (view::read::<f32>(&self.q), view::read::<f32>(&self.k), view::read::<f32>(&self.v));
        let norm = self.norm.as_ref().map(|(n, eps)| (view::read::<f32>(n), *eps));
        let norm = |i: usize| norm.as_ref().map(|(n, eps)| (n.row(i), *eps));
        let inv_freq = self.inv_freq.as_ref().map(view::read::<f32>);
        let mut q_out = view::write(&self.q_out);
        let mut q_out = q_out.rows();
        let (mut keys, mut values) = (PagesMut::of(&self.pool.k), PagesMut::of(&self.pool.v));
        let (mut angles, mut rotated) = (Vec::new(), vec![0.0; hd]);
        for (t, (&row, &position)) in tables.token_row().iter().zip(tables.positions()).enumerate() {
            if row == NONE {
                continue;
            }
            if let Some(f) = &inv_freq {
                angles.clear();
                angles.extend(f.flat().iter().map(|f| (position as f32 * f).sin_cos()));
            }
            for (q, out) in q.row(t).chunks(hd).zip(q_out.row_mut(t).chunks_mut(hd)) {
                out.copy_from_slice(q);
                dispatch!(Isa::best(), |s| rotate(s, norm(0), &angles, out));
            }
            let page = tables.pages(row as usize)[position as usize / PAGE] as usize;
            let offset = position as usize % PAGE;
            for (h, (k, v)) in k.row(t).chunks(hd).zip(v.row(t).chunks(hd)).enumerate() {
                rotated.copy_from_slice(k);
                dispatch!(Isa::best(), |s| rotate(s, norm(1), &angles, &mut rotated));
                keys.put(&rotated, page, h, offset);
                values.put(v, page, h, offset);
            }
        }
    }
}

/// Norm and rotation of one head in place; `angles` holds (sin, cos) of each rotated pair.
#[inline(always)]
fn rotate<S: Simd>(s: S, norm: Option<(&[f32], f32)>, angles: &[(f32, f32)], head: &mut [f32]) {
    if let Some((weight, eps)) = norm {
        let mut sum = s.zero();
        for x in head.chunks(LANES) {
            sum = s.fma(s.load_partial(x), s.load_partial(x), sum);
        }
        let scale = s.splat(1.0 / (s.reduce_sum(sum) / head.len() as f32 + eps).sqrt());
        for (x, w) in head.chunks_mut(LANES).zip(weight.chunks(LANES)) {
            s.store_partial(s.mul(s.mul(s.load_partial(x), scale), s.load_partial(w)), x);
        }
    }
    let (a, b) = head[..2 * angles.len()].split_at_mut(angles.len());
    for ((a, b), (sin, cos)) in a.iter_mut().zip(b).zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
