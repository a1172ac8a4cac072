//! Cases of `head_matmul`, `latent_kv` and `latent_attention`.

use super::attention::random_pages;
use super::batch::{Batch, Tables, cut, paged, with_pages};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::rope_kv::put;
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::kv8;
use selkie_core::ops::{HeadMatmul, KvPool, LatentAttention, LatentKv, Op};
use selkie_core::step::{PAGE, Row};
use selkie_core::tensor::DType;

const EPS: f32 = 1e-6;

#[derive(Clone)]
pub(super) struct PerHead {
    tokens: usize,
    heads: usize,
    rows: usize,
    k: usize,
    /// Columns of a head of x.
    width: usize,
    /// x and out are columns of wider matrices.
    views: bool,
}

impl Spec for PerHead {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = Host::default();
        let (columns, out) = (self.heads * self.width, self.heads * self.rows);
        h.float("x", d.act, &[self.tokens, columns], rng.vec(self.tokens * columns, 1.0));
        h.float("w", DType::F32, &[out, self.k], rng.vec(out * self.k, 0.5));
        h.out("out", d.act, &[self.tokens, out]);
        if self.views {
            h.spread("x", 16, 24);
            h.spread("out", 8, 16);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (x, w) = (h.get("x"), h.get("w"));
        let mut out = Vec::with_capacity(self.tokens * self.heads * self.rows);
        for t in 0..self.tokens {
            for row in 0..self.heads * self.rows {
                let x = &x[(t * self.heads + row / self.rows) * self.width..][..self.k];
                let products = x.iter().zip(&w[row * self.k..]).map(|(&a, &b)| f64::from(a) * f64::from(b));
                out.push(Want::Near(products.sum()));
            }
        }
        vec![("out", out)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        HeadMatmul { x: b.t("x"), w: b.t("w"), out: b.t("out"), heads: self.heads }.into()
    }
}

pub(super) fn head_matmul(to: &mut Table) {
    let base = PerHead { tokens: 7, heads: 3, rows: 40, k: 24, width: 24, views: false };
    to.add("base", base.clone());
    for tokens in [1, 4, 16, 17, 65] {
        to.add(&format!("{tokens} tokens"), PerHead { tokens, ..base.clone() });
    }
    to.add("heads wider than the matrices", PerHead { width: 32, ..base.clone() });
    to.add("one head", PerHead { heads: 1, ..base.clone() });
    to.add("an odd number of rows", PerHead { rows: 37, ..base.clone() });
    to.add("columns of wider matrices", PerHead { views: true, width: 28, ..base.clone() });
    let kimi = PerHead { tokens: 3, heads: 2, rows: 512, k: 128, width: 192, views: true };
    to.add("into latents of 512", kimi.clone());
    to.add("out of latents of 512", PerHead { rows: 128, k: 512, width: 512, ..kimi.clone() });
    to.sized(Size::Bench, "256 tokens, Kimi-Linear", PerHead { tokens: 256, heads: 32, ..kimi });
}

#[derive(Clone)]
pub(super) struct Store {
    batch: Batch,
    latent: usize,
    shared: usize,
    views: bool,
    /// Pages in 8 bits.
    coded: bool,
}

impl Spec for Store {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t) = (Host::default(), self.batch.bucket.tokens);
        h.step(&self.batch);
        h.float("kv", d.act, &[t, self.latent + self.shared], rng.tokens(&self.batch, self.latent + self.shared, 1.5));
        h.float("weight", DType::F32, &[self.latent], rng.ranged(self.latent, 0.5, 1.5));
        for (name, width) in [("k_pages", self.latent), ("v_pages", self.shared)] {
            let before = |r: &Row| r.first_position as usize;
            let values = random_pages(rng, &self.batch, (1, width), before);
            let dtype = if self.coded { DType::I8 } else { d.kv };
            h.pages(name, dtype, [self.batch.pages(), 1, PAGE, width], values);
        }
        if self.views {
            h.spread("kv", 16, 24);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (latent, shared) = (self.latent, self.shared);
        let [k_span, v_span] = [latent, shared].map(|width| kv8::span(h.array("k_pages").dtype, width));
        let mut k_pages = vec![Want::Keep; self.batch.pages() * k_span];
        let mut v_pages = vec![Want::Keep; self.batch.pages() * v_span];
        for t in 0..tables.bucket.tokens {
            let Some(row) = tables.row(t) else { continue };
            let p = tables.position(t);
            let (page, slot) = (tables.page(row, p), p % PAGE);
            let (from, rest) = h.get("kv")[t * (latent + shared)..][..latent + shared].split_at(latent);
            let mean = from.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / latent as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            let normed = from.iter().zip(h.get("weight")).map(|(&x, &w)| f64::from(x) * factor * f64::from(w));
            put(&mut k_pages[page * k_span..][..k_span], slot, &normed.collect::<Vec<_>>(), self.coded);
            put(
                &mut v_pages[page * v_span..][..v_span],
                slot,
                &rest.iter().map(|&x| x.into()).collect::<Vec<_>>(),
                self.coded,
            );
        }
        vec![("k_pages", k_pages), ("v_pages", v_pages)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let pool = KvPool { k: b.t("k_pages"), v: b.t("v_pages") };
        LatentKv { step: b.step(), kv: b.t("kv"), weight: b.t("weight"), eps: EPS, pool }.into()
    }
}

fn batch(name: &str) -> Batch {
    paged().into_iter().find(|(n, _)| *n == name).expect("a batch of that name").1
}

pub(super) fn latent_kv(to: &mut Table) {
    let base = Store { batch: batch("rows of many lengths"), latent: 32, shared: 16, views: false, coded: false };
    to.add("base", base.clone());
    // Rows that share pages would both write them, which no step does.
    for (name, batch) in paged().into_iter().filter(|(n, _)| *n != "pages of one prefix") {
        to.add(name, Store { batch, ..base.clone() });
    }
    to.add("columns of a wider matrix", Store { views: true, ..base.clone() });
    to.add("latents of 20, shared keys of 12", Store { latent: 20, shared: 12, ..base.clone() });
    to.add("latents of 512, shared keys of 64", Store { latent: 512, shared: 64, ..base.clone() });
    let coded = Store { coded: true, ..base };
    for name in ["rows of many lengths", "decode of 8 rows", "decode far out"] {
        to.add(&format!("pages in 8 bits, {name}"), Store { batch: batch(name), ..coded.clone() });
    }
    for (latent, shared) in [(20, 12), (64, 80), (512, 64)] {
        let sizes = format!("pages in 8 bits, latents of {latent}, shared keys of {shared}");
        to.add(&sizes, Store { latent, shared, views: true, ..coded.clone() });
    }
}

#[derive(Clone)]
pub(super) struct Latent {
    batch: Batch,
    heads: usize,
    latent: usize,
    shared: usize,
    /// Columns of a head of the queries before their last, which are those of the shared key.
    own: usize,
    scale: f32,
    views: bool,
    /// Pages in 8 bits.
    coded: bool,
}

impl Spec for Latent {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t) = (Host::default(), self.batch.bucket.tokens);
        let (columns, width) = (self.heads * self.latent, self.heads * (self.own + self.shared));
        h.step(&self.batch);
        h.float("q", d.act, &[t, columns], rng.tokens(&self.batch, columns, 1.0));
        h.float("queries", d.act, &[t, width], rng.tokens(&self.batch, width, 1.0));
        for (name, width) in [("k_pages", self.latent), ("v_pages", self.shared)] {
            let values = random_pages(rng, &self.batch, (1, width), Row::end);
            let dtype = if self.coded { DType::I8 } else { d.kv };
            h.pages(name, dtype, [self.batch.pages(), 1, PAGE, width], values);
        }
        h.out("out", d.act, &[t, columns]);
        if self.views {
            h.spread("q", 16, 24);
            h.spread("queries", 8, 8);
            h.spread("out", 8, 16);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (latent, shared, width) = (self.latent, self.shared, self.own + self.shared);
        let (q, queries, k, v) = (h.get("q"), h.get("queries"), h.get("k_pages"), h.get("v_pages"));
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let mut out = vec![Want::Keep; tables.bucket.tokens * self.heads * latent];
        for t in 0..tables.bucket.tokens {
            let Some(row) = tables.row(t) else { continue };
            let at = |p: usize| tables.page(row, p) * PAGE + p % PAGE;
            for head in 0..self.heads {
                let first = (t * self.heads + head) * latent;
                let tail = &queries[(t * self.heads + head) * width + self.own..][..shared];
                let score = |p: usize| {
                    let sum = dot(&q[first..first + latent], &k[at(p) * latent..]) + dot(tail, &v[at(p) * shared..]);
                    sum * f64::from(self.scale)
                };
                let scores: Vec<f64> = (0..=tables.position(t)).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (i, to) in out[first..first + latent].iter_mut().enumerate() {
                    let value = |(p, w): (usize, &f64)| w / total * f64::from(k[at(p) * latent + i]);
                    *to = Want::Near(weights.iter().enumerate().map(value).sum());
                }
            }
        }
        vec![("out", out)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        LatentAttention {
            step: b.step(),
            q: b.t("q"),
            queries: b.t("queries"),
            pool: KvPool { k: b.t("k_pages"), v: b.t("v_pages") },
            out: b.t("out"),
            heads: self.heads,
            scale: self.scale,
        }
        .into()
    }
}

pub(super) fn latent_attention(to: &mut Table) {
    let base = Latent {
        batch: batch("rows of many lengths"),
        heads: 3,
        latent: 32,
        shared: 16,
        own: 8,
        scale: 0.2,
        views: false,
        coded: false,
    };
    to.add("base", base.clone());
    for (name, batch) in paged() {
        to.add(name, Latent { batch, ..base.clone() });
    }
    to.add("columns of wider matrices", Latent { views: true, ..base.clone() });
    to.add("queries of the shared key alone", Latent { own: 0, ..base.clone() });
    to.add("one head", Latent { heads: 1, ..base.clone() });
    to.add("latents of 20, shared keys of 12", Latent { latent: 20, shared: 12, ..base.clone() });
    to.add("sharp softmax", Latent { scale: 4.0, ..base.clone() });
    to.add("flat softmax", Latent { scale: 0.001, ..base.clone() });
    let kimi = Latent { heads: 2, latent: 512, shared: 64, own: 128, scale: 0.07, views: true, ..base.clone() };
    for name in ["off the grid", "decode of 8 rows", "verification"] {
        let name_of = format!("latents of 512, shared keys of 64, {name}");
        to.add(&name_of, Latent { batch: batch(name), ..kimi.clone() });
    }
    to.add("latents of 1024", Latent { batch: batch("decode of 8 rows"), heads: 1, latent: 1024, ..base.clone() });
    // Heads share blocks on some devices, and the last block has fewer.
    for name in ["off the grid", "decode of 8 rows", "decode far out"] {
        let few = Latent { batch: batch(name), heads: 5, latent: 64, views: true, ..base.clone() };
        to.add(&format!("5 heads, latents of 64, {name}"), few);
        let many = Latent { batch: batch(name), heads: 40, latent: 128, shared: 32, ..base.clone() };
        to.add(&format!("40 heads, latents of 128, shared keys of 32, {name}"), many);
    }
    // Queries of several tokens share blocks, with room left or none; more than 64 heads are of two.
    for (heads, latent, shared) in [(24, 128, 16), (32, 256, 48), (80, 128, 64)] {
        for name in ["off the grid", "rows of many lengths", "verification"] {
            let name_of = format!("{heads} heads, latents of {latent}, shared keys of {shared}, {name}");
            to.add(&name_of, Latent { batch: batch(name), heads, latent, shared, views: true, ..base.clone() });
        }
    }
    let wide = Latent { heads: 4, latent: 384, shared: 64, own: 16, scale: 2.0, ..base.clone() };
    for name in ["off the grid", "decode far out"] {
        to.add(&format!("latents of 384, sharp softmax, {name}"), Latent { batch: batch(name), ..wide.clone() });
    }
    coded(to, &base, &kimi);
    let far = Batch::new(with_pages(vec![cut(9000, 1, 0, &[])]));
    let far = Latent { batch: far, heads: 5, latent: 64, ..base };
    to.sized(Size::Large, "decode at 9000", far.clone());
    to.sized(Size::Large, "pages in 8 bits, decode at 9000", Latent { coded: true, ..far });
    let rows = Batch::new(with_pages((0..8).map(|i| cut(1024 + i, 1, 0, &[])).collect()));
    let rows = Latent { batch: rows, heads: 32, ..kimi };
    to.sized(Size::Bench, "decode of 8 at 1024, Kimi-Linear", rows.clone());
    let prompts = Latent { batch: batch("off the grid"), ..rows.clone() };
    to.sized(Size::Bench, "off the grid, Kimi-Linear", prompts);
    to.sized(Size::Bench, "pages in 8 bits, decode of 8 at 1024, Kimi-Linear", Latent { coded: true, ..rows });
}

/// Pages in 8 bits: every batch, and the sizes that other kernels take.
fn coded(to: &mut Table, base: &Latent, kimi: &Latent) {
    let base = Latent { coded: true, ..base.clone() };
    for (name, batch) in paged() {
        to.add(&format!("pages in 8 bits, {name}"), Latent { batch, ..base.clone() });
    }
    let odd = Latent { latent: 20, shared: 12, ..base.clone() };
    to.add("pages in 8 bits, latents of 20, shared keys of 12", odd);
    to.add("pages in 8 bits, sharp softmax", Latent { scale: 4.0, ..base.clone() });
    for name in ["off the grid", "decode of 8 rows", "verification"] {
        let sizes = format!("pages in 8 bits, latents of 512, shared keys of 64, {name}");
        to.add(&sizes, Latent { batch: batch(name), coded: true, ..kimi.clone() });
    }
    for name in ["off the grid", "decode of 8 rows", "decode far out"] {
        let few = Latent { batch: batch(name), heads: 5, latent: 64, views: true, ..base.clone() };
        to.add(&format!("pages in 8 bits, 5 heads, latents of 64, {name}"), few);
        let many = Latent { batch: batch(name), heads: 40, latent: 128, shared: 48, ..base.clone() };
        to.add(&format!("pages in 8 bits, 40 heads, latents of 128, shared keys of 48, {name}"), many);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{F32, assert_close, near};

    #[test]
    fn one_key_gives_its_latent() {
        let batch = Batch::new(with_pages(vec![cut(0, 1, 0, &[])]));
        let spec = Latent { batch, heads: 2, latent: 4, shared: 4, own: 0, scale: 1.0, views: false, coded: false };
        let h = spec.host(&F32, &mut Rng::new("one"));
        let want = spec.want(&h);
        let k = &h.get("k_pages")[spec.batch.rows[0].pages[0] as usize * 4 * PAGE..];
        (0..8).for_each(|i| assert_close(near(&want[0].1[i]), k[i % 4].into()));
    }

    /// Keys and values expanded from the latents, as they are defined, give the same as queries in the latents' space.
    #[test]
    fn absorbed_products_equal_expanded_keys_and_values() {
        let (tokens, heads, latent, key, value) = (5, 2, 6, 4, 3);
        let mut rng = Rng::new("absorbed");
        let [c, q] = [tokens * latent, heads * key].map(|n| rng.vec(n, 1.0));
        let (wk, wv) = (rng.vec(heads * key * latent, 1.0), rng.vec(heads * value * latent, 1.0));
        let at = |m: &[f32], i: usize| f64::from(m[i]);
        for h in 0..heads {
            let expanded = |w: &[f32], rows: usize, t: usize, i: usize| -> f64 {
                (0..latent).map(|r| at(w, (h * rows + i) * latent + r) * at(&c, t * latent + r)).sum()
            };
            let absorbed: Vec<f64> = (0..latent)
                .map(|r| (0..key).map(|i| at(&q, h * key + i) * at(&wk, (h * key + i) * latent + r)).sum())
                .collect();
            let scores = |t: usize| (0..key).map(|i| at(&q, h * key + i) * expanded(&wk, key, t, i)).sum::<f64>();
            let own = |t: usize| (0..latent).map(|r| absorbed[r] * at(&c, t * latent + r)).sum::<f64>();
            (0..tokens).for_each(|t| assert_close(own(t), scores(t)));
            let weights: Vec<f64> = (0..tokens).map(|t| scores(t).exp()).collect();
            for i in 0..value {
                let direct: f64 = (0..tokens).map(|t| weights[t] * expanded(&wv, value, t, i)).sum();
                let attended = |r: usize| (0..tokens).map(|t| weights[t] * at(&c, t * latent + r)).sum::<f64>();
                let late: f64 = (0..latent).map(|r| at(&wv, (h * value + i) * latent + r) * attended(r)).sum();
                assert_close(late / direct, 1.0);
            }
        }
    }
}
