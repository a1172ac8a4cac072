//! Cases of `rms_norm`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, act};
use selkie_core::backend::Handle;
use selkie_core::ops::{Act, Gate, Op, RmsNorm};
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Norm {
    rows: usize,
    d: usize,
    groups: usize,
    /// One weight for all groups.
    shared: bool,
    add: Option<f32>,
    /// The activation, and whether the gate comes before the norm.
    gate: Option<(Act, bool)>,
    /// The norm is added to `out`.
    accumulate: bool,
    eps: f32,
    rms: f32,
    /// Gaps between the rows of all matrices.
    views: bool,
}

impl Spec for Norm {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, dims) = (Host::default(), [self.rows, self.d]);
        h.float("x", d.act, &dims, rng.vec(self.rows * self.d, self.rms));
        if self.add.is_some() {
            h.float("add", d.act, &dims, rng.vec(self.rows * self.d, self.rms));
        }
        let n = if self.shared { self.d / self.groups } else { self.d };
        h.float("weight", DType::F32, &[n], rng.ranged(n, 0.5, 1.5));
        if self.gate.is_some() {
            h.float("z", d.act, &dims, rng.vec(self.rows * self.d, 1.5));
        }
        match self.accumulate {
            true => h.float("out", d.act, &dims, rng.vec(self.rows * self.d, self.rms)),
            false => h.out("out", d.act, &dims),
        }
        if self.views {
            for name in ["x", "add", "z", "out"]
                .into_iter()
                .filter(|n| h.arrays.iter().any(|a| a.name == *n))
                .collect::<Vec<_>>()
            {
                h.spread(name, 8, 12);
            }
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (d, part) = (self.d, self.d / self.groups);
        let x = h.get("x");
        let sums: Vec<f64> = match self.add {
            Some(f) => x.iter().zip(h.get("add")).map(|(&x, &a)| f64::from(x) + f64::from(f) * f64::from(a)).collect(),
            None => x.iter().map(|&x| x.into()).collect(),
        };
        let weight = h.get("weight");
        let mut out = vec![Want::Keep; x.len()];
        for start in (0..x.len()).step_by(part) {
            let gate = |i: usize| self.gate.map(|(f, _)| act(f, h.get("z")[i].into()));
            let before = |i: usize| if let Some((_, true)) = self.gate { gate(i).expect("a gate") } else { 1.0 };
            let after = |i: usize| if let Some((_, false)) = self.gate { gate(i).expect("a gate") } else { 1.0 };
            let t: Vec<f64> = (start..start + part).map(|i| sums[i] * before(i)).collect();
            let mean = t.iter().map(|v| v * v).sum::<f64>() / part as f64;
            for (j, v) in t.iter().enumerate() {
                let w = f64::from(weight[if self.shared { j } else { (start + j) % d }]);
                let held = if self.accumulate { f64::from(h.get("out")[start + j]) } else { 0.0 };
                out[start + j] = Want::Near(held + v / (mean + f64::from(self.eps)).sqrt() * w * after(start + j));
            }
        }
        let mut wants = vec![("out", out)];
        if self.add.is_some() {
            wants.push(("x", sums.into_iter().map(Want::Near).collect()));
        }
        wants
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        RmsNorm {
            x: b.t("x"),
            add: self.add.map(|f| (b.t("add"), f)),
            weight: b.t("weight"),
            gate: self.gate.map(|(act, before)| Gate { z: b.t("z"), act, before }),
            out: b.t("out"),
            accumulate: self.accumulate,
            eps: self.eps,
            groups: self.groups,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Norm {
        rows: 5,
        d: 64,
        groups: 1,
        shared: false,
        add: None,
        gate: None,
        accumulate: false,
        eps: 1e-5,
        rms: 1.0,
        views: false,
    };
    to.add("base", base.clone());
    for rows in [1, 8, 33, 130] {
        to.add(&format!("{rows} rows"), Norm { rows, ..base.clone() });
    }
    // 5 is the rank of the time step of a Mamba-1 of width 80.
    for d in [4, 5, 12, 100, 250, 260, 1536, 4100] {
        to.add(&format!("width {d}"), Norm { d, ..base.clone() });
    }
    to.add("residual", Norm { add: Some(1.0), ..base.clone() });
    to.add("scaled residual", Norm { add: Some(0.246), rows: 33, d: 2052, ..base.clone() });
    to.add("groups", Norm { groups: 4, ..base.clone() });
    to.add("groups with one weight", Norm { groups: 4, shared: true, ..base.clone() });
    to.add("many small groups", Norm { groups: 16, shared: true, ..base.clone() });
    for (name, f) in [("silu", Act::Silu), ("sigmoid", Act::Sigmoid)] {
        to.add(&format!("{name} gate before"), Norm { gate: Some((f, true)), ..base.clone() });
        to.add(&format!("{name} gate after"), Norm { gate: Some((f, false)), ..base.clone() });
    }
    to.add("grouped, gate before", Norm { gate: Some((Act::Silu, true)), groups: 8, d: 1024, ..base.clone() });
    let heads = Norm { gate: Some((Act::Silu, false)), groups: 4, d: 512, shared: true, ..base.clone() };
    to.add("per head, gate after", heads);
    for (rows, d) in [(1, 64), (33, 100), (3, 3840)] {
        to.add(&format!("added to the output, {rows} x {d}"), Norm { rows, d, accumulate: true, ..base.clone() });
    }
    to.add("added to columns of a wider matrix", Norm { views: true, accumulate: true, ..base.clone() });
    to.add("tiny numbers", Norm { rms: 1e-4, ..base.clone() });
    to.add("large numbers", Norm { rms: 1e4, ..base.clone() });
    to.add("large eps", Norm { eps: 0.5, ..base.clone() });
    to.add("columns of wider matrices", Norm { views: true, add: Some(1.0), ..base.clone() });
    to.add("gate from a wider matrix", Norm { views: true, gate: Some((Act::Silu, true)), groups: 2, ..base.clone() });
    for rows in [1, 512] {
        let wide = Norm { rows, d: 4096, ..base.clone() };
        to.sized(Size::Bench, &format!("{rows} x 4096, residual"), Norm { add: Some(1.0), ..wide });
        let mamba = Norm { rows, d: 8192, groups: 8, gate: Some((Act::Silu, true)), ..base.clone() };
        to.sized(Size::Bench, &format!("{rows} x 8192, Mamba-2 gate"), mamba);
        let delta = Norm { rows, d: 4096, groups: 32, shared: true, gate: Some((Act::Silu, false)), ..base.clone() };
        to.sized(Size::Bench, &format!("{rows} x 32 heads, Gated DeltaNet gate"), delta);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{assert_close, near};

    #[test]
    fn hand_computed_groups() {
        let spec = Norm {
            rows: 1,
            d: 4,
            groups: 2,
            shared: true,
            add: Some(2.0),
            gate: None,
            accumulate: false,
            eps: 0.0,
            rms: 1.0,
            views: false,
        };
        let mut h = Host::default();
        h.float("x", DType::F32, &[1, 4], vec![1.0, 0.0, 0.0, 1.0]);
        h.float("add", DType::F32, &[1, 4], vec![1.0, 2.0, 0.0, 2.0]);
        h.float("weight", DType::F32, &[2], vec![1.0, 10.0]);
        let w = spec.want(&h);
        // Sums 3, 4 | 0, 5; root mean squares sqrt(12.5) in both groups.
        let r = 12.5f64.sqrt();
        for (w, v) in w[0].1.iter().zip([3.0 / r, 40.0 / r, 0.0, 50.0 / r]) {
            assert_close(near(w), v);
        }
        assert_eq!(w[1].1, [3.0, 4.0, 0.0, 5.0].map(Want::Near));
    }
}
