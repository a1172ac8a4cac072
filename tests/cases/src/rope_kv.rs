//! Cases of `rope_kv`.

use super::attention::random_pages;
use super::batch::{Batch, Tables, cut, paged, with_pages};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::kv8;
use selkie_core::ops::{KvPool, Op, RopeKv};
use selkie_core::step::PAGE;
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Rope {
    batch: Batch,
    heads: usize,
    kv_heads: usize,
    hd: usize,
    /// Rotated pairs of a head.
    pairs: usize,
    norm: bool,
    /// Gaps between the rows of all matrices.
    views: bool,
    /// Pages in 8 bits.
    coded: bool,
}

const EPS: f32 = 1e-6;

impl Rope {
    /// Norm and rotation of one head.
    fn turned(&self, x: &[f32], norm: Option<&[f32]>, inv_freq: Option<&[f32]>, position: usize) -> Vec<f64> {
        let mut y: Vec<f64> = x.iter().map(|&v| v.into()).collect();
        if let Some(w) = norm {
            let mean = y.iter().map(|v| v * v).sum::<f64>() / y.len() as f64;
            let f = 1.0 / (mean + f64::from(EPS)).sqrt();
            y.iter_mut().zip(w).for_each(|(y, &w)| *y *= f * f64::from(w));
        }
        let pairs = inv_freq.map_or(0, <[f32]>::len);
        for i in 0..pairs {
            // The angle is an f32 by contract: far out its rounding is larger than any error of sine and cosine.
            let angle = f64::from(position as f32 * inv_freq.expect("pairs")[i]);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (y[i], y[i + pairs]);
            (y[i], y[i + pairs]) = (a * cos - b * sin, b * cos + a * sin);
        }
        y
    }
}

impl Spec for Rope {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t) = (Host::default(), self.batch.bucket.tokens);
        let (q, kv) = (self.heads * self.hd, self.kv_heads * self.hd);
        h.step(&self.batch);
        for (name, cols) in [("q", q), ("k", kv), ("v", kv)] {
            h.float(name, d.act, &[t, cols], rng.tokens(&self.batch, cols, 1.5));
        }
        if self.norm {
            h.float("norm", DType::F32, &[2, self.hd], rng.ranged(2 * self.hd, 0.5, 1.5));
        }
        if self.pairs > 0 {
            let f = (0..self.pairs).map(|i| 10_000f32.powf(-(i as f32) / self.pairs as f32)).collect();
            h.float("inv_freq", DType::F32, &[self.pairs], f);
        }
        h.out("q_out", d.act, &[t, q]);
        let dims = [self.batch.pages(), self.kv_heads, PAGE, self.hd];
        for name in ["k_pages", "v_pages"] {
            let before = |r: &selkie_core::step::Row| r.first_position as usize;
            let dtype = if self.coded { DType::I8 } else { d.kv };
            h.pages(name, dtype, dims, random_pages(rng, &self.batch, (self.kv_heads, self.hd), before));
        }
        // Eight buffers are all that WebGPU binds, scratch included.
        h.join(&["q", "k", "v"], if self.views { 24 } else { 0 });
        if self.views {
            h.spread("q_out", 8, 16);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (hd, q_cols, kv_cols) = (self.hd, self.heads * self.hd, self.kv_heads * self.hd);
        let norm = |i: usize| h.has("norm").then(|| &h.get("norm")[i * hd..(i + 1) * hd]);
        let inv_freq = h.has("inv_freq").then(|| h.get("inv_freq"));
        let mut q_out = vec![Want::Keep; tables.bucket.tokens * q_cols];
        let span = kv8::span(h.array("k_pages").dtype, hd);
        let mut k_pages = vec![Want::Keep; self.batch.pages() * self.kv_heads * span];
        let mut v_pages = k_pages.clone();
        for t in 0..tables.bucket.tokens {
            let Some(row) = tables.row(t) else { continue };
            let p = tables.position(t);
            for head in 0..self.heads {
                let at = t * q_cols + head * hd;
                let q = self.turned(&h.get("q")[at..at + hd], norm(0), inv_freq, p);
                put(&mut q_out[at..at + hd], 0, &q, false);
            }
            for head in 0..self.kv_heads {
                let from = t * kv_cols + head * hd;
                let at = (tables.page(row, p) * self.kv_heads + head) * span;
                let k = self.turned(&h.get("k")[from..from + hd], norm(1), inv_freq, p);
                let v = self.turned(&h.get("v")[from..from + hd], None, None, p);
                for (to, row) in [(&mut k_pages, k), (&mut v_pages, v)] {
                    put(&mut to[at..at + span], p % PAGE, &row, self.coded);
                }
            }
        }
        vec![("q_out", q_out), ("k_pages", k_pages), ("v_pages", v_pages)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        RopeKv {
            step: b.step(),
            q: b.t("q"),
            k: b.t("k"),
            v: b.t("v"),
            norm: b.opt("norm").map(|n| (n, EPS)),
            inv_freq: b.opt("inv_freq"),
            q_out: b.t("q_out"),
            pool: KvPool { k: b.t("k_pages"), v: b.t("v_pages") },
            head_dim: self.hd,
        }
        .into()
    }
}

/// A token of a head of a page.
pub(super) fn put(head: &mut [Want], slot: usize, row: &[f64], coded: bool) {
    if coded {
        return code(head, slot, row);
    }
    head[slot * row.len()..].iter_mut().zip(row).for_each(|(to, x)| *to = Want::Near(*x));
}

/// The same in 8 bits.
fn code(head: &mut [Want], slot: usize, row: &[f64]) {
    let most = row.iter().fold(0f64, |most, x| most.max(x.abs()));
    let (codes, scales) = head.split_at_mut(PAGE * row.len());
    for (code, x) in codes[slot * row.len()..].iter_mut().zip(row) {
        *code = Want::Code(127.0 * x / most);
    }
    scales[4 * slot..][..4].copy_from_slice(&[Want::Scale(most / 127.0), Want::Any, Want::Any, Want::Any]);
}

pub(super) fn cases(to: &mut Table) {
    let find = |name: &str| paged().into_iter().find(|(n, _)| *n == name).expect("a batch of that name").1;
    let base = Rope {
        batch: find("rows of many lengths"),
        heads: 4,
        kv_heads: 2,
        hd: 16,
        pairs: 8,
        norm: false,
        views: false,
        coded: false,
    };
    to.add("base", base.clone());
    // Rows that share pages would both write them, which no step does.
    for (name, batch) in paged().into_iter().filter(|(n, _)| *n != "pages of one prefix") {
        to.add(name, Rope { batch, ..base.clone() });
    }
    to.add("norms", Rope { norm: true, ..base.clone() });
    to.add("no rotation", Rope { pairs: 0, ..base.clone() });
    to.add("norms, no rotation", Rope { norm: true, pairs: 0, ..base.clone() });
    to.add("a quarter rotated", Rope { pairs: 2, ..base.clone() });
    to.add("half rotated, norms", Rope { pairs: 4, norm: true, ..base.clone() });
    to.add("odd number of pairs", Rope { pairs: 3, ..base.clone() });
    for hd in [12, 64, 80, 96, 128, 256] {
        to.add(&format!("head dim {hd}"), Rope { hd, pairs: hd / 2, norm: true, ..base.clone() });
    }
    to.add("head dim 256, 32 pairs", Rope { hd: 256, pairs: 32, norm: true, ..base.clone() });
    to.add("one KV head of 7", Rope { heads: 7, kv_heads: 1, ..base.clone() });
    to.add("columns of wider matrices", Rope { views: true, ..base.clone() });
    for name in ["rows of many lengths", "decode of 8 rows", "decode far out"] {
        to.add(&format!("pages in 8 bits, {name}"), Rope { batch: find(name), coded: true, ..base.clone() });
    }
    for hd in [12, 80, 128, 256] {
        let coded = Rope { hd, pairs: hd / 2, norm: true, views: true, coded: true, ..base.clone() };
        to.add(&format!("pages in 8 bits, head dim {hd}"), coded);
    }
    let qwen = Rope { heads: 16, kv_heads: 2, hd: 256, pairs: 32, norm: true, views: true, ..base };
    let batch = Batch::new(with_pages(vec![cut(0, 512, 0, &[])]));
    to.sized(Size::Bench, "512 tokens, Qwen3-Next", Rope { batch, ..qwen.clone() });
    to.sized(Size::Bench, "decode of 8, Qwen3-Next", Rope { batch: find("decode of 8 rows"), ..qwen });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::assert_close;

    #[test]
    fn a_quarter_turn() {
        let (batch, pairs) = (Batch::new(vec![]), 1);
        let spec = Rope { batch, heads: 1, kv_heads: 1, hd: 4, pairs, norm: false, views: false, coded: false };
        let y = spec.turned(&[1.0, 2.0, 3.0, 4.0], None, Some(&[std::f32::consts::FRAC_PI_2]), 1);
        assert!((y[0] + 2.0).abs() < 1e-6 && (y[1] - 1.0).abs() < 1e-6);
        assert_close(y[2], 3.0);
        assert_close(y[3], 4.0);
    }
}
