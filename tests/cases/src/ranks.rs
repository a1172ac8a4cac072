//! Cases of `all_reduce`, `all_gather` and `rank_norm`. All ranks get the same arguments, so that a case runs on any number of them;
//! ranks with different values are in the tests of `selkie_core::ranks`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Table, act};
use selkie_core::backend::Handle;
use selkie_core::ops::{Act, AllGather, AllReduce, Gate, Op, RankNorm, RmsNorm};
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Sum {
    rows: usize,
    d: usize,
    accumulate: bool,
    /// Gaps between the rows of `out`.
    views: bool,
}

impl super::Spec for Sum {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, dims, n) = (Host::default(), [self.rows, self.d], self.rows * self.d);
        h.float("x", d.act, &dims, rng.vec(n, 1.0));
        match self.accumulate {
            true => h.float("out", d.act, &dims, rng.vec(n, 1.0)),
            false => h.out("out", d.act, &dims),
        }
        if self.views {
            h.spread("out", 4, 8);
        }
        h.float("ranks", DType::F32, &[1], vec![d.ranks as f32]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let ranks = f64::from(h.get("ranks")[0]);
        let held = |i: usize| if self.accumulate { f64::from(h.get("out")[i]) } else { 0.0 };
        let sum = |(i, &x): (usize, &f32)| Want::Near(held(i) + ranks * f64::from(x));
        vec![("out", h.get("x").iter().enumerate().map(sum).collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        AllReduce { x: b.t("x"), out: b.t("out"), accumulate: self.accumulate }.into()
    }
}

pub(super) fn all_reduce(to: &mut Table) {
    let base = Sum { rows: 5, d: 64, accumulate: false, views: false };
    to.add("base", base.clone());
    to.add("added", Sum { accumulate: true, ..base.clone() });
    to.add("one odd row", Sum { rows: 1, d: 37, accumulate: true, ..base.clone() });
    to.add("gaps between rows", Sum { rows: 9, accumulate: true, views: true, ..base.clone() });
    to.sized(Size::Large, "long", Sum { rows: 301, d: 1024, accumulate: true, views: true });
    to.sized(Size::Large, "longer than one round", Sum { rows: 601, d: 2048, ..base });
}

#[derive(Clone)]
pub(super) struct Columns {
    rows: usize,
    n: usize,
}

impl super::Spec for Columns {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = Host::default();
        h.float("x", d.act, &[self.rows, self.n], rng.vec(self.rows * self.n, 1.0));
        h.out("out", d.act, &[self.rows, self.n * d.ranks]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (x, all) = (h.get("x"), h.array("out").dims[1]);
        let column = |i: usize| Want::Near(x[i / all * self.n + i % all % self.n].into());
        vec![("out", (0..self.rows * all).map(column).collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        AllGather { x: b.t("x"), out: b.t("out") }.into()
    }
}

pub(super) fn all_gather(to: &mut Table) {
    to.add("base", Columns { rows: 5, n: 40 });
    to.add("one row", Columns { rows: 1, n: 7 });
    to.sized(Size::Large, "long", Columns { rows: 301, n: 1000 });
}

#[derive(Clone)]
pub(super) struct Norm {
    rows: usize,
    d: usize,
    /// Whether the gate comes before the norm.
    gate: Option<bool>,
    /// The mean is over all ranks, or over each alone.
    all: bool,
}

impl super::Spec for Norm {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, dims, n) = (Host::default(), [self.rows, self.d], self.rows * self.d);
        h.float("x", d.act, &dims, rng.vec(n, 1.0));
        h.float("weight", DType::F32, &[self.d], rng.ranged(self.d, 0.5, 1.5));
        if self.gate.is_some() {
            h.float("z", d.act, &dims, rng.vec(n, 1.5));
        }
        h.out("out", d.act, &dims);
        h.float(
            "ranks",
            DType::F32,
            &[if self.all { d.ranks } else { 1 }],
            vec![1.0; if self.all { d.ranks } else { 1 }],
        );
        h
    }

    /// The mean over ranks with equal values is that of one.
    fn want(&self, h: &Host) -> Wants {
        let (x, weight) = (h.get("x"), h.get("weight"));
        let mut out = Vec::with_capacity(x.len());
        for t in 0..self.rows {
            let gate = |c: usize| self.gate.map_or(1.0, |_| act(Act::Silu, h.get("z")[t * self.d + c].into()));
            let (before, after) = (self.gate == Some(true), self.gate == Some(false));
            let value = |c: usize| f64::from(x[t * self.d + c]) * if before { gate(c) } else { 1.0 };
            let mean = (0..self.d).map(|c| value(c).powi(2)).sum::<f64>() / self.d as f64;
            out.extend((0..self.d).map(|c| {
                let normed = value(c) / (mean + 1e-5).sqrt() * f64::from(weight[c]);
                Want::Near(normed * if after { gate(c) } else { 1.0 })
            }));
        }
        vec![("out", out)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let norm = RmsNorm {
            x: b.t("x"),
            add: None,
            weight: b.t("weight"),
            gate: self.gate.map(|before| Gate { z: b.t("z"), act: Act::Silu, before }),
            out: b.t("out"),
            accumulate: false,
            eps: 1e-5,
            groups: 1,
        };
        RankNorm { norm, ranks: b.t("ranks").len() }.into()
    }
}

pub(super) fn rank_norm(to: &mut Table) {
    let base = Norm { rows: 5, d: 64, gate: None, all: true };
    to.add("base", base.clone());
    to.add("gate first", Norm { gate: Some(true), ..base.clone() });
    to.add("norm first", Norm { gate: Some(false), d: 100, ..base.clone() });
    to.sized(Size::Large, "many rows", Norm { rows: 1100, gate: Some(true), ..base.clone() });
    to.add("each rank alone", Norm { gate: Some(true), all: false, ..base });
}
