//! Cases of `attention`.

use super::batch::{Batch, Tables, cut, paged, with_pages};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::ops::{Attention, KvPool, Op};
use selkie_core::step::PAGE;
use selkie_core::tensor::DType;

/// Value of page entries that no token has written yet: finite, as stale keys are, but large enough to spoil a result.
const NOISE: f32 = 3e4;

/// `[pages, KH, 64, hd]`: page 0 zero, random numbers at every position of the rows before `until`, [`NOISE`] from there
/// on, NaN in pages of no row.
pub(super) fn random_pages(
    rng: &mut Rng,
    batch: &Batch,
    (kv_heads, hd): (usize, usize),
    until: impl Fn(&selkie_core::step::Row) -> usize,
) -> Vec<f32> {
    let len = kv_heads * PAGE * hd;
    if rng.blank {
        return vec![0.0; batch.pages() * len];
    }
    let mut v = vec![f32::NAN; batch.pages() * len];
    v[..len].fill(0.0);
    for r in &batch.rows {
        for (i, &page) in r.pages.iter().enumerate() {
            for kh in 0..kv_heads {
                for slot in 0..PAGE {
                    let known = i * PAGE + slot < until(r);
                    let at = page as usize * len + (kh * PAGE + slot) * hd;
                    // A page of several rows keeps what the first one put there.
                    if known && !(v[at].is_nan() || v[at].abs() == NOISE) {
                        continue;
                    }
                    for x in &mut v[at..at + hd] {
                        *x = if known { rng.range(-1.7, 1.7) } else { NOISE };
                    }
                }
            }
        }
    }
    v
}

#[derive(Clone)]
pub(super) struct Attn {
    batch: Batch,
    heads: usize,
    kv_heads: usize,
    hd: usize,
    window: Option<u32>,
    first: u32,
    scale: Option<f32>,
    /// q is columns of a wider matrix, and so is out.
    views: bool,
    /// Pages in 8 bits.
    coded: bool,
}

impl Attn {
    fn scale(&self) -> f32 {
        self.scale.unwrap_or(1.0 / (self.hd as f32).sqrt())
    }
}

impl Spec for Attn {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, t, cols) = (Host::default(), self.batch.bucket.tokens, self.heads * self.hd);
        h.step(&self.batch);
        h.float("q", d.act, &[t, cols], rng.tokens(&self.batch, cols, 1.5));
        let dims = [self.batch.pages(), self.kv_heads, PAGE, self.hd];
        for name in ["k_pages", "v_pages"] {
            let values = random_pages(rng, &self.batch, (self.kv_heads, self.hd), selkie_core::step::Row::end);
            h.pages(name, if self.coded { DType::I8 } else { d.kv }, dims, values);
        }
        h.out("out", d.act, &[t, cols]);
        if self.views {
            h.spread("q", 16, 24);
            h.spread("out", 8, 16);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let tables = Tables::new(h.ints("ints"), self.batch.bucket);
        let (hd, cols) = (self.hd, self.heads * self.hd);
        let (q, k, v) = (h.get("q"), h.get("k_pages"), h.get("v_pages"));
        let mut out = vec![Want::Keep; tables.bucket.tokens * cols];
        for t in 0..tables.bucket.tokens {
            let Some(row) = tables.row(t) else { continue };
            let position = tables.position(t);
            let window = self.window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
            let first = window.max(position.min(self.first as usize));
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let q = &q[t * cols + head * hd..][..hd];
                let at = |p: usize| ((tables.page(row, p) * self.kv_heads + kv_head) * PAGE + p % PAGE) * hd;
                let scores: Vec<f64> = (first..=position)
                    .map(|p| {
                        let dot: f64 = q.iter().zip(&k[at(p)..]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                        dot * f64::from(self.scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sum = vec![0.0; hd];
                for (w, p) in weights.iter().zip(first..) {
                    sum.iter_mut().zip(&v[at(p)..]).for_each(|(s, &v)| *s += w / total * f64::from(v));
                }
                for (w, s) in out[t * cols + head * hd..].iter_mut().zip(sum) {
                    *w = Want::Near(s);
                }
            }
        }
        vec![("out", out)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Attention {
            step: b.step(),
            q: b.t("q"),
            pool: KvPool { k: b.t("k_pages"), v: b.t("v_pages") },
            out: b.t("out"),
            head_dim: self.hd,
            scale: self.scale(),
            window: self.window,
            first: self.first,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let find = |name: &str| paged().into_iter().find(|(n, _)| *n == name).expect("a batch of that name").1;
    let base = Attn {
        batch: find("rows of many lengths"),
        heads: 4,
        kv_heads: 2,
        hd: 16,
        window: None,
        first: 0,
        scale: None,
        views: false,
        coded: false,
    };
    to.add("base", base.clone());
    for (name, batch) in paged() {
        to.add(name, Attn { batch, ..base.clone() });
    }
    for hd in [12, 64, 80, 96, 128, 256] {
        let (heads, kv_heads) = if hd >= 128 { (2, 1) } else { (4, 2) };
        for (when, batch) in [("prefill", find("off the grid")), ("decode", find("decode of 8 rows"))] {
            to.add(&format!("head dim {hd}, {when}"), Attn { batch, heads, kv_heads, hd, ..base.clone() });
        }
    }
    // Qwen3.5: 4 or 8 query heads per KV head of 256.
    for ratio in [4, 8] {
        for name in ["rows of many lengths", "verification", "decode far out"] {
            let wide = Attn { batch: find(name), heads: ratio, kv_heads: 1, hd: 256, views: true, ..base.clone() };
            to.add(&format!("head dim 256, {ratio} query heads per KV head, {name}"), wide);
        }
    }
    for window in [1, 64, 100] {
        let wide = Attn { heads: 2, kv_heads: 1, hd: 256, window: Some(window), ..base.clone() };
        to.sized(Size::Large, &format!("head dim 256, window of {window}, prefill"), wide);
    }
    for ratio in [1, 3, 4, 5, 6, 7, 8, 12, 16] {
        for (when, batch) in [("prefill", find("off the grid")), ("decode", find("verification"))] {
            let name = format!("{ratio} query heads per KV head, {when}");
            to.add(&name, Attn { batch, heads: ratio, kv_heads: 1, ..base.clone() });
        }
    }
    to.add("3 KV heads of 2", Attn { heads: 6, kv_heads: 3, ..base.clone() });
    for window in [1, 5, 64, 100, 4096] {
        to.add(&format!("window of {window}"), Attn { window: Some(window), ..base.clone() });
        let batch = find("decode of 8 rows");
        to.add(&format!("window of {window}, decode"), Attn { batch, window: Some(window), ..base.clone() });
    }
    to.add("window, far out", Attn { batch: find("decode far out"), window: Some(70), ..base.clone() });
    for first in [1, 70] {
        to.add(&format!("positions from {first} on"), Attn { first, ..base.clone() });
        let batch = find("decode of 8 rows");
        to.add(&format!("positions from {first} on, decode"), Attn { batch, first, ..base.clone() });
        to.add(
            &format!("positions from {first} on, far out"),
            Attn { batch: find("decode far out"), first, ..base.clone() },
        );
        let wide = Attn { heads: 2, kv_heads: 1, hd: 256, first, ..base.clone() };
        to.sized(Size::Large, &format!("head dim 256, positions from {first} on, prefill"), wide);
    }
    to.add("positions from 1 on, window of 5", Attn { first: 1, window: Some(5), ..base.clone() });
    to.add("sharp softmax", Attn { scale: Some(8.0), ..base.clone() });
    to.add("flat softmax", Attn { scale: Some(0.001), ..base.clone() });
    to.add("columns of wider matrices", Attn { views: true, ..base.clone() });
    let coded = Attn { coded: true, ..base.clone() };
    for (name, batch) in paged() {
        to.add(&format!("pages in 8 bits, {name}"), Attn { batch, ..coded.clone() });
    }
    for hd in [12, 64, 80, 128, 256] {
        for (when, batch) in [("prefill", find("off the grid")), ("decode", find("decode of 8 rows"))] {
            let coded = Attn { batch, heads: 4, kv_heads: 1, hd, views: true, ..coded.clone() };
            to.add(&format!("pages in 8 bits, head dim {hd}, {when}"), coded);
        }
    }
    for (name, window, first) in
        [("decode far out", Some(70), 0), ("off the grid", Some(5), 1), ("verification", None, 70)]
    {
        let batch = find(name);
        to.add(&format!("pages in 8 bits, some are not seen, {name}"), Attn { batch, window, first, ..coded.clone() });
    }
    let rows = |n: u32, first: u32, tokens: u32| {
        Batch::new(with_pages((0..n).map(|i| cut(first + i, tokens, 0, &[])).collect()))
    };
    let nemotron = Attn { heads: 32, kv_heads: 8, hd: 128, views: true, ..base.clone() };
    let qwen = Attn { heads: 16, kv_heads: 2, hd: 256, views: true, ..base };
    for (model, base) in [("Nemotron-H-8B", nemotron), ("Qwen3-Next", qwen)] {
        for (name, batch) in [
            ("decode at 4096", rows(1, 4096, 1)),
            ("decode of 8 at 1024", rows(8, 1024, 1)),
            ("512 tokens", rows(1, 0, 512)),
            ("256 tokens on from 512", rows(1, 512, 256)),
        ] {
            to.sized(Size::Bench, &format!("{name}, {model}"), Attn { batch, ..base.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{F32, assert_close, near};

    #[test]
    fn equal_scores_average_the_window() {
        let batch = Batch::new(with_pages(vec![cut(64, 2, 0, &[])]));
        let spec = Attn {
            batch,
            heads: 1,
            kv_heads: 1,
            hd: 4,
            window: Some(2),
            first: 0,
            scale: Some(0.0),
            views: false,
            coded: false,
        };
        let h = spec.host(&F32, &mut Rng::new("average"));
        let want = spec.want(&h);
        let v = h.get("v_pages");
        let pages = &spec.batch.rows[0].pages;
        let at = |p: usize, i: usize| f64::from(v[(pages[p / 64] as usize * 64 + p % 64) * 4 + i]);
        for i in 0..4 {
            assert_close(near(&want[0].1[i]), (at(63, i) + at(64, i)) / 2.0);
            assert_close(near(&want[0].1[4 + i]), (at(64, i) + at(65, i)) / 2.0);
        }
    }

    #[test]
    fn one_key_gives_its_value() {
        let batch = Batch::new(with_pages(vec![cut(0, 1, 0, &[])]));
        let spec = Attn {
            batch,
            heads: 2,
            kv_heads: 1,
            hd: 4,
            window: None,
            first: 0,
            scale: None,
            views: false,
            coded: false,
        };
        let h = spec.host(&F32, &mut Rng::new("one"));
        let want = spec.want(&h);
        let v = &h.get("v_pages")[spec.batch.rows[0].pages[0] as usize * 256..];
        (0..8).for_each(|i| assert_close(near(&want[0].1[i]), v[i % 4].into()));
        assert_eq!(h.array("out").dtype, DType::F32);
    }
}
