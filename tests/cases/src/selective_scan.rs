//! Cases of `selective_scan`.

use super::batch::{Batch, Tables, cut, find, row, stateful};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Decay, Size, Spec, Table, softplus};
use selkie_core::backend::Handle;
use selkie_core::ops::{Op, ScanForm, SelectiveScan};
use selkie_core::step::CARRY;
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Scan {
    batch: Batch,
    form: ScanForm,
    /// Heads of the layer, and the block of them that the op computes.
    layer_heads: usize,
    first_head: usize,
    heads: usize,
    p: usize,
    n: usize,
    groups: usize,
    decay: Decay,
    dt_limit: (f32, f32),
    /// Gaps between the rows of all matrices.
    views: bool,
}

impl Scan {
    fn par_rows(&self) -> usize {
        match self.form {
            ScanForm::PerHead => 3,
            ScanForm::PerChannel => self.n + 2,
        }
    }
}

impl Spec for Scan {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t) = (Host::default(), self.batch.bucket.tokens);
        let (hp, gn) = (self.heads * self.p, self.groups * self.n);
        h.step(&self.batch);
        h.float("x", d.act, &[t, hp], rng.tokens(&self.batch, hp, 1.0));
        h.float("b", d.act, &[t, gn], rng.tokens(&self.batch, gn, 0.5));
        h.float("c", d.act, &[t, gn], rng.tokens(&self.batch, gn, 0.5));
        h.float("dt", d.act, &[t, self.heads], self.decay.steps(rng.tokens(&self.batch, self.heads, 1.0), self.heads));
        let rows = self.par_rows();
        let (a, bias) = self.decay.ranges();
        let mut par = vec![];
        for r in 0..rows {
            let (lo, hi) = match rows - r {
                1 => bias,
                2 => (-1.0, 1.0),
                _ => a,
            };
            par.extend(rng.ranged(self.heads, lo, hi));
        }
        h.float("par", DType::F32, &[rows, self.heads], par);
        let dims = [self.batch.slots(), self.heads, self.p, self.n];
        h.float("pool", d.state, &dims, rng.slots(&self.batch, hp * self.n, 0.7));
        h.out("y", d.act, &[t, hp]);
        h.spread("par", self.first_head, self.layer_heads - self.heads);
        // Eight buffers are all that WebGPU binds, scratch included.
        h.join(&["x", "b", "c"], if self.views { 8 } else { 0 });
        if self.views {
            h.spread("dt", 12, 20);
            h.spread("y", 4, 8);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (heads, p, n, gn) = (self.heads, self.p, self.n, self.groups * self.n);
        let (x, b, c, dt) = (h.get("x"), h.get("b"), h.get("c"), h.get("dt"));
        let (par, pool) = (h.get("par"), h.get("pool"));
        let d_row = self.par_rows() - 2;
        let len = heads * p * n;
        let mut y = vec![Want::Exact(0.0); tables.bucket.tokens * heads * p];
        let mut states = vec![Want::Keep; pool.len()];
        let mut s: Vec<f64> = vec![];
        for chunk in tables.chunks() {
            if chunk.src != CARRY {
                s = pool[chunk.src as usize * len..][..len].iter().map(|&v| f64::from(v)).collect();
            }
            for t in chunk.start..chunk.start + chunk.len {
                for head in 0..heads {
                    let group = (self.first_head + head) / (self.layer_heads / self.groups);
                    let row = |m: &[f32], i: usize| f64::from(m[t * gn + group * n + i]);
                    let dt = softplus(f64::from(dt[t * heads + head]) + f64::from(par[(d_row + 1) * heads + head]));
                    let dt = dt.clamp(self.dt_limit.0.into(), self.dt_limit.1.into());
                    let decays: Vec<f64> = (0..n)
                        .map(|i| if self.form == ScanForm::PerHead { 0 } else { i })
                        .map(|a| (dt * f64::from(par[a * heads + head])).exp())
                        .collect();
                    for i in 0..p {
                        let at = (head * p + i) * n;
                        let xi = f64::from(x[t * heads * p + head * p + i]);
                        let mut sum = f64::from(par[d_row * heads + head]) * xi;
                        for j in 0..n {
                            s[at + j] = decays[j] * s[at + j] + dt * xi * row(b, j);
                            sum += s[at + j] * row(c, j);
                        }
                        y[t * heads * p + head * p + i] = Want::Near(sum);
                    }
                }
            }
            if chunk.dst != 0 {
                let to = states[chunk.dst * len..][..len].iter_mut();
                to.zip(&s).for_each(|(w, &v)| *w = Want::Near(v));
            }
        }
        vec![("y", y), ("pool", states)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        SelectiveScan {
            step: b.step(),
            x: b.t("x"),
            b: b.t("b"),
            c: b.t("c"),
            dt: b.t("dt"),
            par: b.t("par"),
            pool: b.t("pool"),
            y: b.t("y"),
            form: self.form,
            heads_per_group: self.layer_heads / self.groups,
            first_head: self.first_head,
            dt_limit: self.dt_limit,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Scan {
        batch: Batch::new(vec![cut(37, 99, 1, &[0, 2, 3])]),
        form: ScanForm::PerHead,
        layer_heads: 4,
        first_head: 0,
        heads: 4,
        p: 8,
        n: 16,
        groups: 2,
        decay: Decay::Usual,
        dt_limit: (0.0, f32::INFINITY),
        views: false,
    };
    let channels =
        Scan { form: ScanForm::PerChannel, layer_heads: 24, heads: 24, p: 1, n: 16, groups: 1, ..base.clone() };
    to.add("base", base.clone());
    for (name, batch) in stateful() {
        to.add(name, Scan { batch, ..base.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.add(name, Scan { decay, ..base.clone() });
        to.add(&format!("per channel, {name}"), Scan { decay, ..channels.clone() });
    }
    to.add("dt within limits", Scan { dt_limit: (0.2, 0.9), ..base.clone() });
    to.add("dt at least 0.001", Scan { dt_limit: (0.001, f32::INFINITY), decay: Decay::Weak, ..base.clone() });
    to.add("one group", Scan { groups: 1, ..base.clone() });
    to.add("a group per head", Scan { groups: 4, ..base.clone() });
    to.add("odd sizes", Scan { layer_heads: 6, heads: 6, p: 12, n: 20, groups: 3, ..base.clone() });
    to.add("p 64, n 128", Scan { layer_heads: 2, heads: 2, p: 64, n: 128, groups: 1, ..base.clone() });
    to.add("p 32, n 64", Scan { layer_heads: 3, heads: 3, p: 32, n: 64, groups: 1, ..base.clone() });
    let block = Scan { layer_heads: 12, first_head: 5, heads: 4, p: 32, n: 64, groups: 3, views: true, ..base.clone() };
    to.add("p 32, n 64, long rows of a block across groups", Scan { batch: find("long rows"), ..block });
    let common = Scan { layer_heads: 2, heads: 2, p: 64, n: 128, groups: 1, ..base.clone() };
    for (name, batch) in stateful() {
        to.sized(Size::Large, &format!("p 64, n 128, {name}"), Scan { batch, ..common.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.sized(Size::Large, &format!("p 64, n 128, {name}"), Scan { decay, ..common.clone() });
    }
    // Falcon-H1 has states of 256, in heads of 128 or 64.
    for (p, heads) in [(128, 1), (64, 2)] {
        let falcon = Scan { layer_heads: heads, heads, p, n: 256, groups: 1, ..base.clone() };
        to.add(&format!("p {p}, n 256, captures"), Scan { batch: find("captures"), ..falcon.clone() });
        for name in ["decode of 8 rows", "verification of 3 rows", "63 tokens", "long rows", "padding"] {
            let batch = find(name);
            to.sized(Size::Large, &format!("p {p}, n 256, {name}"), Scan { batch, views: true, ..falcon.clone() });
        }
        for (name, decay) in Decay::ALL {
            to.sized(Size::Large, &format!("p {p}, n 256, {name}"), Scan { decay, ..falcon.clone() });
        }
    }
    let block =
        Scan { layer_heads: 12, first_head: 5, heads: 4, p: 32, n: 256, groups: 3, views: true, ..base.clone() };
    to.add("p 32, n 256, long rows of a block across groups", Scan { batch: find("long rows"), ..block });
    // Widths that a device may cut into blocks of channels.
    let wide = Scan { layer_heads: 96, heads: 96, ..channels.clone() };
    for (name, batch) in stateful() {
        to.sized(Size::Large, &format!("96 channels, {name}"), Scan { batch, ..wide.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.sized(Size::Large, &format!("96 channels, {name}"), Scan { decay, ..wide.clone() });
    }
    let block = Scan { layer_heads: 256, first_head: 40, heads: 128, views: true, ..wide.clone() };
    to.sized(Size::Large, "128 of 256 channels, long rows", Scan { batch: find("long rows"), ..block });
    to.sized(Size::Large, "96 channels, dt within limits", Scan { dt_limit: (0.2, 0.9), ..wide });
    let batch = Batch::new(vec![cut(0, 256, 0, &[0, 1, 0, 2])]);
    let jamba = Scan { batch, layer_heads: 8192, heads: 8192, ..channels.clone() };
    to.sized(Size::Bench, "256 tokens, Jamba-Mini", jamba);
    to.add("p 80, n 128", Scan { layer_heads: 1, heads: 1, p: 80, n: 128, groups: 1, ..base.clone() });
    to.add("views", Scan { views: true, ..base.clone() });
    to.add("last block of heads", Scan { layer_heads: 12, first_head: 8, heads: 4, groups: 3, ..base.clone() });
    to.add("a block across groups", Scan { layer_heads: 12, first_head: 2, heads: 5, groups: 3, ..base.clone() });
    to.add("per channel", channels.clone());
    for name in ["decode of 8 rows", "captures", "verification", "padding"] {
        let batch = find(name);
        to.add(&format!("per channel, {name}"), Scan { batch, ..channels.clone() });
    }
    to.add("per channel, a block", Scan { layer_heads: 64, first_head: 40, views: true, ..channels.clone() });
    to.add("per channel, n 4", Scan { n: 4, ..channels.clone() });
    // Falcon-Mamba and Jamba.
    let wide = Scan { layer_heads: 8192, heads: 8192, views: true, ..channels.clone() };
    for name in ["decode in place", "short chunks"] {
        to.add(&format!("per channel, 8192 channels, {name}"), Scan { batch: find(name), ..wide.clone() });
    }
    let batch = Batch::new(vec![cut(37, 43, 1, &[2, 3])]);
    to.sized(Size::Large, "per channel, 8192 channels, 43 tokens", Scan { batch, ..wide });
    let nemotron = Scan { layer_heads: 128, heads: 128, p: 64, n: 128, groups: 8, views: true, ..base };
    let rows = |n: u32| Batch::new((0..n).map(|i| row(70, &[(1, i + 1, i + 1)])).collect());
    for n in [1, 8] {
        to.sized(Size::Bench, &format!("decode of {n}, Nemotron-H-8B"), Scan { batch: rows(n), ..nemotron.clone() });
    }
    // A device may use different kernels for many heads and for few.
    let batch = find("verification of 3 rows").padded();
    to.sized(Size::Bench, "verification of 3 rows, Nemotron-H-8B", Scan { batch, ..nemotron.clone() });
    let batch = Batch::new(vec![cut(0, 256, 0, &[0, 1, 0, 2])]);
    to.sized(Size::Bench, "256 tokens, Nemotron-H-8B", Scan { batch, ..nemotron });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{F32, assert_close, near};

    fn spec(batch: Batch) -> Scan {
        Scan {
            batch,
            form: ScanForm::PerHead,
            layer_heads: 2,
            first_head: 0,
            heads: 2,
            p: 4,
            n: 8,
            groups: 1,
            decay: Decay::Usual,
            dt_limit: (0.0, f32::INFINITY),
            views: false,
        }
    }

    /// The dual form of one chunk that starts from state `s`, `[P, N]` of one head.
    #[test]
    fn step_form_equals_the_dual_form() {
        let spec = spec(Batch::new(vec![row(0, &[(50, 1, 2)])]));
        let (q, p, n) = (50, spec.p, spec.n);
        let h = spec.host(&F32, &mut Rng::new("dual"));
        let want = spec.want(&h);
        let (x, b, c, par) = (h.get("x"), h.get("b"), h.get("c"), h.get("par"));
        for head in 0..2 {
            let f = |v: f32| f64::from(v);
            let dt: Vec<f64> = (0..q).map(|t| softplus(f(h.get("dt")[t * 2 + head]) + f(par[4 + head]))).collect();
            let cum: Vec<f64> = (0..q).map(|t| dt[..=t].iter().sum::<f64>() * f(par[head])).collect();
            let s0 = |i: usize, j: usize| f(h.get("pool")[((2 + head) * p + i) * n + j]);
            for i in 0..p {
                for t in 0..q {
                    let mut y = f(par[2 + head]) * f(x[t * 2 * p + head * p + i]);
                    for s in 0..=t {
                        let cb: f64 = (0..n).map(|j| f(c[t * n + j]) * f(b[s * n + j])).sum();
                        y += cb * (cum[t] - cum[s]).exp() * dt[s] * f(x[s * 2 * p + head * p + i]);
                    }
                    y += (0..n).map(|j| cum[t].exp() * s0(i, j) * f(c[t * n + j])).sum::<f64>();
                    assert_close(near(&want[0].1[t * 2 * p + head * p + i]), y);
                }
                for j in 0..n {
                    let z: f64 = (0..q)
                        .map(|s| (cum[q - 1] - cum[s]).exp() * dt[s] * f(x[s * 2 * p + head * p + i]) * f(b[s * n + j]))
                        .sum();
                    let end = cum[q - 1].exp() * s0(i, j) + z;
                    assert_close(near(&want[1].1[((4 + head) * p + i) * n + j]), end);
                }
            }
        }
    }

    #[test]
    fn cuts_change_nothing() {
        let whole = spec(Batch::new(vec![row(0, &[(64, 1, 2)])]));
        let parts = spec(Batch::new(vec![row(0, &[(1, 1, 0), (30, CARRY, 0), (33, CARRY, 2)])]));
        let a = whole.want(&whole.host(&F32, &mut Rng::new("cut")));
        let b = parts.want(&parts.host(&F32, &mut Rng::new("cut")));
        assert_eq!(a, b);
    }
}
