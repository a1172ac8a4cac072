//! Cases of `gated_delta`.

use super::batch::{Batch, Tables, cut, every_length, find, row, stateful, uneven_chunks};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Decay, Size, Spec, Table, sigmoid, softplus};
use selkie_core::backend::Handle;
use selkie_core::ops::{GatedDelta, Op};
use selkie_core::step::CARRY;
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Delta {
    batch: Batch,
    key_heads: usize,
    /// Value heads that share a key head.
    per_key: usize,
    /// The block of value heads that the op computes.
    first_head: usize,
    heads: usize,
    dk: usize,
    dv: usize,
    beta_scale: f32,
    decay: Decay,
    /// Every row of a state has a decay of its own.
    each: bool,
    /// Gaps between the rows of all matrices.
    views: bool,
}

impl Delta {
    /// Decays of a token.
    fn gates(&self) -> usize {
        self.heads * if self.each { self.dk } else { 1 }
    }
}

fn normalized(v: &[f32], factor: f64) -> Vec<f64> {
    let sum: f64 = v.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let f = factor / (sum + 1e-6).sqrt();
    v.iter().map(|&x| f64::from(x) * f).collect()
}

impl Spec for Delta {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t) = (Host::default(), self.batch.bucket.tokens);
        let (keys, values) = (self.key_heads * self.dk, self.heads * self.dv);
        h.step(&self.batch);
        h.float("q", d.act, &[t, keys], rng.tokens(&self.batch, keys, 1.0));
        h.float("k", d.act, &[t, keys], rng.tokens(&self.batch, keys, 1.0));
        h.float("v", d.act, &[t, values], rng.tokens(&self.batch, values, 1.0));
        let gates = self.gates();
        h.float("a", d.act, &[t, gates], self.decay.steps(rng.tokens(&self.batch, gates, 1.0), gates));
        h.float("b", d.act, &[t, self.heads], rng.tokens(&self.batch, self.heads, 1.5));
        let (a, bias) = self.decay.ranges();
        let mut par = rng.ranged(gates, a.0, a.1);
        par.extend(rng.ranged(gates, bias.0, bias.1));
        h.float("par", DType::F32, &[2, gates], par);
        let dims = [self.batch.slots(), self.heads, self.dk, self.dv];
        h.float("pool", d.state, &dims, rng.slots(&self.batch, values * self.dk, 0.5));
        h.out("out", d.act, &[t, values]);
        let per_head = gates / self.heads;
        h.spread("par", self.first_head * per_head, (self.key_heads * self.per_key - self.heads) * per_head);
        // Eight buffers are all that WebGPU binds, scratch included.
        h.join(&["q", "k", "v"], if self.views { 8 } else { 0 });
        h.join(&["b", "a"], if self.views { 4 } else { 0 });
        if self.views {
            h.spread("out", 4, 8);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (heads, dk, dv, keys) = (self.heads, self.dk, self.dv, self.key_heads * self.dk);
        let (q, k, v, a, b) = (h.get("q"), h.get("k"), h.get("v"), h.get("a"), h.get("b"));
        let (par, pool, gates) = (h.get("par"), h.get("pool"), self.gates());
        let len = heads * dk * dv;
        let mut out = vec![Want::Exact(0.0); tables.bucket.tokens * heads * dv];
        let mut states = vec![Want::Keep; pool.len()];
        let mut state: Vec<f64> = vec![];
        for chunk in tables.chunks() {
            if chunk.src != CARRY {
                state = pool[chunk.src as usize * len..][..len].iter().map(|&v| f64::from(v)).collect();
            }
            for t in chunk.start..chunk.start + chunk.len {
                for head in 0..heads {
                    let key = (self.first_head + head) / self.per_key * dk;
                    let q = normalized(&q[t * keys + key..][..dk], 1.0 / (dk as f64).sqrt());
                    let k = normalized(&k[t * keys + key..][..dk], 1.0);
                    let beta = f64::from(self.beta_scale) * sigmoid(b[t * heads + head].into());
                    let s = &mut state[head * dk * dv..(head + 1) * dk * dv];
                    for (i, row) in s.chunks_mut(dv).enumerate() {
                        let gate = if self.each { head * dk + i } else { head };
                        let raw = f64::from(a[t * gates + gate]) + f64::from(par[gates + gate]);
                        let decay = (f64::from(par[gate]) * softplus(raw)).exp();
                        row.iter_mut().for_each(|s| *s *= decay);
                    }
                    for j in 0..dv {
                        let predicted: f64 = (0..dk).map(|i| k[i] * s[i * dv + j]).sum();
                        let delta = beta * (f64::from(v[(t * heads + head) * dv + j]) - predicted);
                        let mut o = 0.0;
                        for i in 0..dk {
                            s[i * dv + j] += k[i] * delta;
                            o += q[i] * s[i * dv + j];
                        }
                        out[(t * heads + head) * dv + j] = Want::Near(o);
                    }
                }
            }
            if chunk.dst != 0 {
                let to = states[chunk.dst * len..][..len].iter_mut();
                to.zip(&state).for_each(|(w, &v)| *w = Want::Near(v));
            }
        }
        vec![("out", out), ("pool", states)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        GatedDelta {
            step: b.step(),
            q: b.t("q"),
            k: b.t("k"),
            v: b.t("v"),
            a: b.t("a"),
            b: b.t("b"),
            par: b.t("par"),
            pool: b.t("pool"),
            out: b.t("out"),
            heads_per_key: self.per_key,
            first_head: self.first_head,
            beta_scale: self.beta_scale,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Delta {
        batch: Batch::new(vec![cut(37, 99, 1, &[0, 2, 3])]),
        key_heads: 2,
        per_key: 2,
        first_head: 0,
        heads: 4,
        dk: 16,
        dv: 12,
        beta_scale: 1.0,
        decay: Decay::Usual,
        each: false,
        views: false,
    };
    to.add("base", base.clone());
    for (name, batch) in stateful() {
        to.add(name, Delta { batch, ..base.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.add(name, Delta { decay, ..base.clone() });
    }
    to.add("views", Delta { views: true, ..base.clone() });
    to.add("negative eigenvalues", Delta { beta_scale: 2.0, ..base.clone() });
    to.add("a key head per value head", Delta { key_heads: 4, per_key: 1, ..base.clone() });
    to.add("3 value heads per key head", Delta { per_key: 3, heads: 6, ..base.clone() });
    to.add("dk 20, dv 36", Delta { dk: 20, dv: 36, ..base.clone() });
    // Long rows are chunked on some devices, short ones are not.
    to.add("dk 64, dv 64", Delta { dk: 64, dv: 64, ..base.clone() });
    let batch = find("verification of 3 rows");
    to.add("dk 64, dv 64, verification of 3 rows", Delta { batch, dk: 64, dv: 64, ..base.clone() });
    let one = Delta { key_heads: 1, per_key: 1, heads: 1, dk: 64, dv: 32, ..base.clone() };
    for (kind, each) in [("", false), ("a decay per channel, ", true)] {
        for (name, batch) in [("uneven chunks", uneven_chunks()), ("rows of 1 to 130 tokens", every_length())] {
            let spec = Delta { batch, each, ..one.clone() };
            to.sized(Size::Large, &format!("{kind}dk 64, dv 32, {name}"), spec);
        }
    }
    to.add("dk 96, dv 192", Delta { key_heads: 1, per_key: 1, heads: 1, dk: 96, dv: 192, ..base.clone() });
    to.add("dk 128, dv 128", Delta { key_heads: 1, heads: 2, dk: 128, dv: 128, ..base.clone() });
    let common = Delta { key_heads: 1, heads: 2, dk: 128, dv: 128, ..base.clone() };
    for (name, batch) in stateful() {
        to.sized(Size::Large, &format!("dk 128, dv 128, {name}"), Delta { batch, ..common.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.sized(Size::Large, &format!("dk 128, dv 128, {name}"), Delta { decay, ..common.clone() });
    }
    let block = Delta { key_heads: 4, first_head: 3, heads: 3, dk: 128, dv: 32, views: true, ..base.clone() };
    let narrow = Delta { batch: find("long rows"), dk: 96, dv: 96, ..block.clone() };
    to.sized(Size::Large, "dk 96, dv 96, long rows of a block across key heads", narrow);
    to.add("dk 128, dv 32, long rows of a block across key heads", Delta { batch: find("long rows"), ..block });
    // Olmo-Hybrid: keys of 96 with values of 192, a key head per value head, and beta up to 2.
    let olmo = Delta { key_heads: 2, per_key: 1, heads: 2, dk: 96, dv: 192, beta_scale: 2.0, ..base.clone() };
    for name in ["verification of 3 rows", "captures"] {
        to.add(&format!("dk 96, dv 192, {name}"), Delta { batch: find(name), ..olmo.clone() });
    }
    for name in ["decode of 8 rows", "63 tokens", "long rows", "padding"] {
        let batch = find(name);
        to.sized(Size::Large, &format!("dk 96, dv 192, {name}"), Delta { batch, views: true, ..olmo.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.sized(Size::Large, &format!("dk 96, dv 192, {name}"), Delta { decay, ..olmo.clone() });
    }
    let block =
        Delta { key_heads: 4, per_key: 2, first_head: 3, heads: 3, dk: 64, dv: 32, views: true, ..base.clone() };
    to.add("dk 64, dv 32, long rows of a block across key heads", Delta { batch: find("long rows"), ..block });
    to.add("dk 256, dv 128", Delta { key_heads: 1, per_key: 1, heads: 1, dk: 256, dv: 128, ..base.clone() });
    per_channel(to, &base);
    to.add("last block of heads", Delta { key_heads: 4, first_head: 6, heads: 2, ..base.clone() });
    to.add("a block across key heads", Delta { key_heads: 4, first_head: 3, heads: 3, ..base.clone() });
    let qwen = Delta { key_heads: 16, heads: 32, dk: 128, dv: 128, views: true, ..base };
    let rows = |n: u32| Batch::new((0..n).map(|i| row(70, &[(1, i + 1, i + 1)])).collect());
    for n in [1, 8] {
        to.sized(Size::Bench, &format!("decode of {n}, Qwen3-Next"), Delta { batch: rows(n), ..qwen.clone() });
    }
    // A device may use different kernels for many heads and for few.
    let batch = find("verification of 3 rows").padded();
    to.sized(Size::Bench, "verification of 3 rows, Qwen3-Next", Delta { batch, ..qwen.clone() });
    let batch = Batch::new(vec![cut(0, 256, 0, &[0, 1, 0, 2])]);
    to.sized(Size::Bench, "256 tokens, Qwen3-Next", Delta { batch: batch.clone(), ..qwen });
    let olmo = Delta { key_heads: 30, heads: 30, views: true, ..olmo };
    to.sized(Size::Bench, "decode of 1, Olmo-Hybrid", Delta { batch: rows(1), ..olmo.clone() });
    to.sized(Size::Bench, "256 tokens, Olmo-Hybrid", Delta { batch, ..olmo });
}

/// Kimi Delta Attention: a decay per key channel.
fn per_channel(to: &mut Table, base: &Delta) {
    let each = Delta { key_heads: 4, per_key: 1, each: true, dv: 16, ..base.clone() };
    for (name, batch) in stateful() {
        to.add(&format!("a decay per channel, {name}"), Delta { batch, ..each.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.add(&format!("a decay per channel, {name}"), Delta { decay, ..each.clone() });
    }
    let kimi = Delta { key_heads: 2, heads: 2, dk: 128, dv: 128, ..each.clone() };
    for name in ["verification of 3 rows", "captures"] {
        to.add(&format!("a decay per channel, dk 128, {name}"), Delta { batch: find(name), ..kimi.clone() });
    }
    for name in ["decode of 8 rows", "63 tokens", "long rows", "padding"] {
        let batch = find(name);
        let name = format!("a decay per channel, dk 128, {name}");
        to.sized(Size::Large, &name, Delta { batch, views: true, ..kimi.clone() });
    }
    for (name, decay) in Decay::ALL {
        to.sized(Size::Large, &format!("a decay per channel, dk 128, {name}"), Delta { decay, ..kimi.clone() });
    }
    // Some devices take chunks of long rows at once, of keys of 64 and of a block across key heads too.
    let chunked = Delta { dk: 64, dv: 64, per_key: 2, batch: find("long rows"), ..each.clone() };
    for (name, decay) in Decay::ALL {
        to.sized(
            Size::Large,
            &format!("a decay per channel, dk 64, dv 64, {name}"),
            Delta { decay, ..chunked.clone() },
        );
    }
    for (name, decay) in Decay::ALL {
        let one = Delta { key_heads: 1, per_key: 1, heads: 1, dk: 96, dv: 32, batch: uneven_chunks(), ..each.clone() };
        let name = format!("a decay per channel, dk 96, dv 32, {name}, uneven chunks");
        to.sized(Size::Large, &name, Delta { decay, ..one });
    }
    let block = Delta { first_head: 3, heads: 3, dk: 128, decay: Decay::Any, views: true, ..chunked };
    to.sized(Size::Large, "a decay per channel, dk 128, dv 64, every decay, a block across key heads", block);
    to.add("a decay per channel, dk 20, dv 36", Delta { dk: 20, dv: 36, ..each.clone() });
    to.add("a decay per channel, dk 64, dv 32", Delta { dk: 64, dv: 32, batch: find("long rows"), ..each.clone() });
    to.add("a decay per channel, dk 192", Delta { key_heads: 1, heads: 1, dk: 192, dv: 32, ..each.clone() });
    to.add("a decay per channel, 2 value heads per key head", Delta { key_heads: 2, per_key: 2, ..each.clone() });
    let block = Delta { key_heads: 6, first_head: 2, heads: 3, views: true, ..each };
    to.add("a decay per channel, block of heads", block.clone());
    for (dk, dv) in [(32, 16), (96, 48), (96, 96), (192, 32)] {
        let long = Delta { batch: find("long rows"), per_key: 2, first_head: 3, dk, dv, ..block.clone() };
        to.add(&format!("a decay per channel, dk {dk}, dv {dv}, long rows of a block across key heads"), long);
    }
    let kimi = Delta { key_heads: 32, heads: 32, views: true, ..kimi };
    let batch = Batch::new((0..8).map(|i| row(70, &[(1, i + 1, i + 1)])).collect());
    to.sized(Size::Bench, "decode of 8, Kimi-Linear", Delta { batch, ..kimi.clone() });
    let batch = Batch::new(vec![cut(0, 256, 0, &[0, 1, 0, 2])]);
    to.sized(Size::Bench, "256 tokens, Kimi-Linear", Delta { batch, ..kimi });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{F32, assert_close, near};

    fn spec(batch: Batch) -> Delta {
        Delta {
            batch,
            key_heads: 1,
            per_key: 1,
            first_head: 0,
            heads: 1,
            dk: 8,
            dv: 4,
            beta_scale: 2.0,
            decay: Decay::Usual,
            each: false,
            views: true,
        }
    }

    #[test]
    fn step_form_equals_the_chunk_form() {
        let spec = spec(Batch::new(vec![row(0, &[(40, 1, 2)])]));
        let (n, dk, dv) = (40, spec.dk, spec.dv);
        let h = spec.host(&F32, &mut Rng::new("wy"));
        let want = spec.want(&h);
        let f = |name: &str, i: usize| f64::from(h.get(name)[i]);
        let q: Vec<_> = (0..n).map(|t| normalized(&h.get("q")[t * dk..][..dk], (dk as f64).powf(-0.5))).collect();
        let k: Vec<_> = (0..n).map(|t| normalized(&h.get("k")[t * dk..][..dk], 1.0)).collect();
        let beta: Vec<f64> = (0..n).map(|t| 2.0 * sigmoid(f("b", t))).collect();
        let g: Vec<f64> = (0..n).map(|t| f("par", 0) * softplus(f("a", t) + f("par", 1))).collect();
        let c: Vec<f64> = (0..n).map(|t| g[..=t].iter().sum()).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let s0 = |i: usize, j: usize| f("pool", (dk + i) * dv + j);
        for j in 0..dv {
            // Forward substitution of (I + A) Δ = β (v - exp(c) k S).
            let mut delta = vec![0.0; n];
            for t in 0..n {
                let ks: f64 = (0..dk).map(|i| k[t][i] * s0(i, j)).sum();
                let mut d = beta[t] * (f("v", t * dv + j) - c[t].exp() * ks);
                for s in 0..t {
                    d -= beta[t] * dot(&k[t], &k[s]) * (c[t] - c[s]).exp() * delta[s];
                }
                delta[t] = d;
                let qs: f64 = (0..dk).map(|i| q[t][i] * s0(i, j)).sum();
                let seen: f64 = (0..=t).map(|s| dot(&q[t], &k[s]) * (c[t] - c[s]).exp() * delta[s]).sum();
                assert_close(near(&want[0].1[t * dv + j]), c[t].exp() * qs + seen);
            }
            for i in 0..dk {
                let added: f64 = (0..n).map(|s| (c[n - 1] - c[s]).exp() * k[s][i] * delta[s]).sum();
                assert_close(near(&want[1].1[(2 * dk + i) * dv + j]), c[n - 1].exp() * s0(i, j) + added);
            }
        }
    }

    #[test]
    fn cuts_change_nothing() {
        let whole = spec(Batch::new(vec![row(0, &[(64, 1, 2)])]));
        let parts = spec(Batch::new(vec![row(0, &[(5, 1, 0), (1, CARRY, 0), (58, CARRY, 2)])]));
        let a = whole.want(&whole.host(&F32, &mut Rng::new("cut")));
        let b = parts.want(&parts.host(&F32, &mut Rng::new("cut")));
        assert_eq!(a, b);
    }
}
