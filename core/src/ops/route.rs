//! Mixture-of-experts routing: the experts of each token and their weights.

use super::{Access, Cost, ensure, expect, moved};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::view::Rows;
use crate::cpu::{self, math, view};
use crate::step::{NONE, Step};
use crate::tensor::{DType, Tensor};

/// How logits become experts and weights. All of it in f32; ties go to the lower expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Router {
    /// Softmax over all experts, then top-k; divided by the sum of the k if `renorm` (Qwen; Jamba without).
    SoftmaxTopK {
        /// Divide by the sum of the chosen.
        renorm: bool,
    },
    /// Top-k of the logits, then softmax over the k (Granite).
    TopKSoftmax,
    /// Sigmoid; `bias` is added for the choice only; groups ranked by the sum of their two best, `topk_group` of
    /// `groups` kept; weights divided by (sum + `sum_eps`) if `renorm`, times `scale` (Nemotron-H, Kimi, LFM2).
    Sigmoid {
        /// Groups of experts.
        groups: usize,
        /// Groups kept.
        topk_group: usize,
        /// Divide by the sum of the chosen.
        renorm: bool,
        /// Added to that sum.
        sum_eps: f32,
        /// Factor on the weights.
        scale: f32,
    },
}

/// Routing of every token. A padding token gets no expert: its ids are [`crate::step::NONE`], its weights 0.
#[derive(Clone, Debug)]
pub struct Route<Buf> {
    /// Tells padding.
    pub step: Step<Buf>,
    /// `[T, E] f32`.
    pub logits: Tensor<Buf>,
    /// `[E] f32`, for the choice only.
    pub bias: Option<Tensor<Buf>>,
    /// `[T, k] u32`, ascending, so that every backend sums a token's experts in the same order.
    pub ids: Tensor<Buf>,
    /// `[T, k] f32`, in the order of `ids`.
    pub weights: Tensor<Buf>,
    /// The rule.
    pub router: Router,
}

impl<Buf: Handle> Route<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let mut t = vec![(Read, &self.step.ints), (Read, &self.logits), (Write, &self.ids), (Write, &self.weights)];
        t.extend(self.bias.iter().map(|b| (Read, b)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: moved(&self.tensors()), flops: 10 * self.logits.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (t, e, k) = (self.step.bucket.tokens, self.logits.row_len(), self.ids.row_len());
        expect("route", "logits", &self.logits, &[t, e]);
        expect("route", "ids", &self.ids, &[t, k]);
        expect("route", "weights", &self.weights, &[t, k]);
        ensure!("route", self.logits.dtype == DType::F32 && self.weights.dtype == DType::F32, "not f32");
        ensure!("route", self.ids.dtype == DType::U32, "ids are not u32");
        ensure!("route", (1..=e).contains(&k) && k <= 32, "top {k} of {e}");
        if let Some(b) = &self.bias {
            expect("route", "bias", b, &[e]);
        }
        if let Router::Sigmoid { groups, topk_group, .. } = self.router {
            ensure!("route", groups > 0 && e % groups == 0 && (1..=groups).contains(&topk_group), "{groups} groups");
            ensure!("route", k <= topk_group * (e / groups), "top {k} of {topk_group} groups of {}", e / groups);
        }
    }
}

impl Route<cpu::Buf> {
    pub(super) fn reference(&self) {
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
    // Stable, so equals stay in ascending order; the values are ordered, since NaN is gone.
    order.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).unwrap_or(std::cmp::Ordering::Equal));
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
