//! Cases of `route`.

use super::batch::{Batch, Tables, cut};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, sigmoid};
use selkie_core::backend::Handle;
use selkie_core::ops::{Op, Route, Router};
use selkie_core::step::NONE;
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Routing {
    /// Real tokens; the bucket rounds up.
    tokens: usize,
    padded: bool,
    experts: usize,
    k: usize,
    router: Router,
    bias: bool,
    /// Logits are multiples of this, so that many are equal; 0 = all different.
    step: f32,
    rms: f32,
}

impl Routing {
    fn batch(&self) -> Batch {
        let batch = Batch::new(vec![cut(0, self.tokens as u32, 0, &[])]);
        if self.padded { batch.padded() } else { batch }
    }
}

/// Indices of the `k` largest, ties (0 and -0 are equal) to the lower index, ascending.
fn top(scores: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("numbers").then(a.cmp(&b)));
    order.truncate(k);
    order.sort_unstable();
    order
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|v| v / sum).collect()
}

fn routed(router: Router, logits: &[f64], bias: Option<&[f32]>, k: usize) -> (Vec<usize>, Vec<f64>) {
    match router {
        Router::SoftmaxTopK { renorm } => {
            let p = softmax(logits);
            let ids = top(logits, k);
            let sum: f64 = if renorm { ids.iter().map(|&i| p[i]).sum() } else { 1.0 };
            let weights = ids.iter().map(|&i| p[i] / sum).collect();
            (ids, weights)
        }
        Router::TopKSoftmax => {
            let ids = top(logits, k);
            let chosen: Vec<f64> = ids.iter().map(|&i| logits[i]).collect();
            (ids, softmax(&chosen))
        }
        Router::Sigmoid { groups, topk_group, renorm, sum_eps, scale } => {
            let s: Vec<f64> = logits.iter().map(|&x| sigmoid(x)).collect();
            let mut ranked: Vec<f64> =
                s.iter().enumerate().map(|(i, s)| s + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
            let size = logits.len() / groups;
            let group_scores: Vec<f64> = ranked
                .chunks(size)
                .map(|g| {
                    let mut g = g.to_vec();
                    g.sort_by(|a, b| b.total_cmp(a));
                    g.iter().take(2).sum()
                })
                .collect();
            let kept = top(&group_scores, topk_group);
            for (i, r) in ranked.iter_mut().enumerate().filter(|(i, _)| !kept.contains(&(i / size))) {
                debug_assert!(i / size < groups);
                *r = f64::NEG_INFINITY;
            }
            let ids = top(&ranked, k);
            let sum: f64 = if renorm { ids.iter().map(|&i| s[i]).sum::<f64>() + f64::from(sum_eps) } else { 1.0 };
            let weights = ids.iter().map(|&i| s[i] / sum * f64::from(scale)).collect();
            (ids, weights)
        }
    }
}

impl Spec for Routing {
    fn host(&self, _: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, batch) = (Host::default(), self.batch());
        let t = batch.bucket.tokens;
        h.step(&batch);
        let mut logits = rng.tokens(&batch, self.experts, self.rms);
        if self.step > 0.0 {
            logits.iter_mut().for_each(|x| *x = (*x / self.step).round() * self.step);
        }
        h.float("logits", DType::F32, &[t, self.experts], logits);
        if self.bias {
            h.float("bias", DType::F32, &[self.experts], rng.vec(self.experts, 0.3));
        }
        h.out("ids", DType::U32, &[t, self.k]);
        h.out("weights", DType::F32, &[t, self.k]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let batch = self.batch();
        let tables = Tables::new(h.ints("ints"), batch.bucket);
        let bias = h.has("bias").then(|| h.get("bias"));
        let (mut ids, mut weights) = (vec![], vec![]);
        for t in 0..batch.bucket.tokens {
            if tables.row(t).is_none() {
                ids.extend(vec![Want::Exact(NONE.into()); self.k]);
                weights.extend(vec![Want::Exact(0.0); self.k]);
                continue;
            }
            let logits: Vec<f64> =
                h.get("logits")[t * self.experts..][..self.experts].iter().map(|&x| x.into()).collect();
            let (i, w) = routed(self.router, &logits, bias, self.k);
            ids.extend(i.into_iter().map(|i| Want::Exact(i as f64)));
            weights.extend(w.into_iter().map(Want::Near));
        }
        vec![("ids", ids), ("weights", weights)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Route {
            step: b.step(),
            logits: b.t("logits"),
            bias: b.opt("bias"),
            ids: b.t("ids"),
            weights: b.t("weights"),
            router: self.router,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let grouped = |groups, topk_group| Router::Sigmoid { groups, topk_group, renorm: true, sum_eps: 1e-20, scale: 2.5 };
    let rules = [
        ("softmax then top-k, renormalised", Router::SoftmaxTopK { renorm: true }, false),
        ("softmax then top-k", Router::SoftmaxTopK { renorm: false }, false),
        ("top-k then softmax", Router::TopKSoftmax, false),
        ("sigmoid", grouped(1, 1), false),
        ("sigmoid with bias", grouped(1, 1), true),
        ("sigmoid, 4 groups, 2 kept", grouped(4, 2), true),
        ("sigmoid, 8 groups, all kept", grouped(8, 8), true),
        ("sigmoid, 8 groups, 1 kept", grouped(8, 1), true),
        (
            "sigmoid, not renormalised",
            Router::Sigmoid { groups: 1, topk_group: 1, renorm: false, sum_eps: 0.0, scale: 1.0 },
            true,
        ),
        (
            "sigmoid, large eps",
            Router::Sigmoid { groups: 1, topk_group: 1, renorm: true, sum_eps: 0.5, scale: 1.0 },
            true,
        ),
    ];
    for (name, router, bias) in rules {
        let base = Routing { tokens: 11, padded: false, experts: 64, k: 6, router, bias, step: 0.0, rms: 1.5 };
        to.add(name, base.clone());
        to.add(&format!("{name}, padding"), Routing { padded: true, ..base.clone() });
        if !bias {
            to.add(&format!("{name}, ties"), Routing { step: 0.5, ..base.clone() });
            to.add(&format!("{name}, all equal"), Routing { step: 100.0, ..base.clone() });
        }
        to.add(&format!("{name}, one token"), Routing { tokens: 1, ..base.clone() });
        to.add(&format!("{name}, 300 tokens"), Routing { tokens: 300, ..base.clone() });
        to.add(&format!("{name}, top 1"), Routing { k: 1, ..base.clone() });
        to.add(&format!("{name}, top 8"), Routing { k: 8, ..base.clone() });
    }
    let no_bias = Routing {
        tokens: 11,
        padded: false,
        experts: 64,
        k: 6,
        router: grouped(4, 2),
        bias: false,
        step: 0.5,
        rms: 1.5,
    };
    to.add("sigmoid, 4 groups, ties", no_bias.clone());
    to.add("sigmoid, 4 groups, all equal", Routing { step: 100.0, ..no_bias });
    let base = Routing {
        tokens: 11,
        padded: false,
        experts: 8,
        k: 2,
        router: Router::SoftmaxTopK { renorm: true },
        bias: false,
        step: 0.0,
        rms: 1.5,
    };
    to.add("2 of 8", base.clone());
    to.add("8 of 8", Routing { k: 8, ..base.clone() });
    to.add("10 of 512", Routing { experts: 512, k: 10, ..base.clone() });
    to.add("22 of 512, sigmoid", Routing { experts: 512, k: 22, router: grouped(1, 1), bias: true, ..base.clone() });
    to.add("7 of 200", Routing { experts: 200, k: 7, ..base.clone() });
    to.add("6 of 100", Routing { experts: 100, k: 6, ..base.clone() });
    to.add("32 of 40", Routing { experts: 40, k: 32, ..base.clone() });
    to.add("far apart", Routing { rms: 60.0, ..base.clone() });
    to.sized(Size::Bench, "512 tokens, 10 of 512", Routing { tokens: 512, experts: 512, k: 10, ..base.clone() });
    to.sized(Size::Bench, "one token, 10 of 512", Routing { tokens: 1, experts: 512, k: 10, ..base });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::assert_close;

    #[test]
    fn groups_hide_the_best_expert() {
        let router = Router::Sigmoid { groups: 2, topk_group: 1, renorm: true, sum_eps: 0.0, scale: 3.0 };
        // The best expert is alone in its group, the other group's two best have the larger sum.
        let (ids, w) = routed(router, &[2.0, -9.0, -9.0, 1.0, 1.0, -1.0], None, 2);
        assert_eq!(ids, [3, 4]);
        assert_close(w[0], 1.5);
        // The bias chooses but does not weigh.
        let (ids, w) = routed(router, &[2.0, -9.0, -9.0, 1.0, 1.0, -1.0], Some(&[2.0, 2.0, 0.0, 0.0, 0.0, 0.0]), 2);
        assert_eq!(ids, [0, 1]);
        assert_close(w[0] + w[1], 3.0);
        assert!(w[1] < 1e-3);
    }

    #[test]
    fn ties_go_to_the_lower_expert() {
        let (ids, w) = routed(Router::TopKSoftmax, &[0.0, 1.0, 1.0, 1.0], None, 2);
        assert_eq!((ids, w), (vec![1, 2], vec![0.5, 0.5]));
    }
}
