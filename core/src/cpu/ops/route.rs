//! Expert routing on the CPU.

use std::cmp::Ordering;

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::Rows;
use crate::cpu::{math, view};
use crate::ops::{Route, Router};
use crate::step::NONE;

impl Route<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let logits = view::read::<f32>(&self.logits);
        let bias = self.bias.as_ref().map(view::read::<f32>);
        let (mut ids, mut weights) = (view::write::<u32>(&self.ids), view::write::<f32>(&self.weights));
        let (mut ids, mut weights) = (ids.rows(), weights.rows());
        let k = self.ids.row_len();
        for t in 0..ids.rows() {
            let (ids, weights) = (ids.row_mut(t), weights.row_mut(t));
            ids.fill(NONE);
            weights.fill(0.0);
            if tables.is_padding(t) {
                continue;
            }
            let chosen = self.router.choose(logits.row(t), bias.as_ref().map(Rows::flat), k);
            for (i, (id, weight)) in chosen.into_iter().enumerate() {
                (ids[i], weights[i]) = (id as u32, weight);
            }
        }
    }
}

impl Router {
    /// The k experts of a token, ascending, with their weights.
    fn choose(self, logits: &[f32], bias: Option<&[f32]>, k: usize) -> Vec<(usize, f32)> {
        let bias = |e: usize| bias.map_or(0.0, |b| b[e]);
        match self {
            Self::SoftmaxTopK { renorm } => {
                let best = top(k, logits.len(), |e| logits[e] + bias(e));
                let all = softmax(logits);
                let sum = if renorm { best.iter().map(|e| all[*e]).sum() } else { 1.0 };
                best.into_iter().map(|e| (e, all[e] / sum)).collect()
            }
            Self::TopKSoftmax => {
                let best = top(k, logits.len(), |e| logits[e] + bias(e));
                let chosen: Vec<f32> = best.iter().map(|e| logits[*e]).collect();
                best.into_iter().zip(softmax(&chosen)).collect()
            }
            Self::Sigmoid { groups, topk_group, renorm, sum_eps, scale } => {
                let mut scores = logits.to_vec();
                dispatch!(Isa::best(), |s| math::map(s, &mut scores, math::sigmoid));
                let rank = |e: usize| scores[e] + bias(e);
                let len = logits.len() / groups;
                let group_rank = |g: usize| {
                    let two = top(len.min(2), len, |e| rank(g * len + e));
                    two.into_iter().map(|e| rank(g * len + e)).sum()
                };
                let kept =
                    if topk_group < groups { top(topk_group, groups, group_rank) } else { (0..groups).collect() };
                let expert = |i: usize| kept[i / len] * len + i % len;
                let best = top(k, kept.len() * len, |i| rank(expert(i)));
                let best: Vec<usize> = best.into_iter().map(expert).collect();
                let sum = if renorm { best.iter().map(|e| scores[*e]).sum::<f32>() + sum_eps } else { 1.0 };
                best.into_iter().map(|e| (e, scores[e] / sum * scale)).collect()
            }
        }
    }
}

/// The k of `0..n` with the largest values, ascending; the lower one among equals. NaN counts as the least.
fn top(k: usize, n: usize, value: impl Fn(usize) -> f32) -> Vec<usize> {
    let values: Vec<f32> = (0..n).map(value).map(|v| if v.is_nan() { f32::NEG_INFINITY } else { v }).collect();
    let mut order: Vec<usize> = (0..n).collect();
    if (1..n).contains(&k) {
        // The values are ordered, since NaN is gone.
        let before =
            |a: &usize, b: &usize| values[*b].partial_cmp(&values[*a]).unwrap_or(Ordering::Equal).then(a.cmp(b));
        order.select_nth_unstable_by(k - 1, before);
    }
    order.truncate(k);
    order.sort_unstable();
    order
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = logits.iter().map(|x| x - max).collect();
    dispatch!(Isa::best(), |s| math::map(s, &mut p, math::exp));
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}
