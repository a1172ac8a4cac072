//! Cases of `round`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::ops::{Op, Round};

/// 128 numbers as the op rounds them.
pub(super) fn eight(group: &[f32]) -> impl Iterator<Item = f64> {
    let most = group.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
    let scale = (most / 448.0).log2().ceil().max(-100.0).exp2();
    group.iter().map(move |&x| {
        let y = f64::from(x) / scale;
        // Four bits of a number, multiples of 2^-9 of the smallest.
        let step = (y.abs().log2().floor().max(-6.0) - 3.0).exp2();
        (y / step).round_ties_even() * step * scale
    })
}

#[derive(Clone)]
pub(super) struct Eight {
    rows: usize,
    cols: usize,
    rms: f32,
    /// The groups of a row differ in size by up to so many powers of two.
    spread: u32,
    /// Columns of wider matrices.
    views: bool,
}

impl Spec for Eight {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, dims) = (Host::default(), [self.rows, self.cols]);
        let mut x = rng.vec(self.rows * self.cols, self.rms);
        for (i, group) in x.chunks_mut(128).enumerate() {
            let factor = (-(i as f32 * 7.0) % (self.spread as f32 + 1.0)).exp2();
            group.iter_mut().for_each(|x| *x *= factor);
        }
        h.float("x", d.act, &dims, x);
        h.out("out", d.act, &dims);
        if self.views {
            h.spread("x", 8, 16);
            h.spread("out", 8, 24);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        vec![("out", h.get("x").chunks(128).flat_map(eight).map(Want::Exact).collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Round { x: b.t("x"), out: b.t("out") }.into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Eight { rows: 5, cols: 384, rms: 1.0, spread: 0, views: false };
    to.add("base", base.clone());
    to.add("one row", Eight { rows: 1, ..base.clone() });
    to.add("300 rows of 128", Eight { rows: 300, cols: 128, ..base.clone() });
    to.add("groups of different size", Eight { spread: 40, ..base.clone() });
    to.add("numbers below the smallest scale", Eight { rms: 1e-30, spread: 4, ..base.clone() });
    to.add("large numbers", Eight { rms: 1e30, ..base.clone() });
    to.add("numbers near the largest", Eight { rms: 1e37, ..base.clone() });
    to.add("zeros", Eight { rms: 0.0, ..base.clone() });
    to.add("columns of wider matrices", Eight { views: true, ..base.clone() });
    for rows in [1, 512] {
        to.sized(Size::Bench, &format!("{rows} x 21504"), Eight { rows, cols: 21504, ..base.clone() });
    }
}
