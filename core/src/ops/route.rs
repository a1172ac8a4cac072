//! Mixture-of-experts routing: the experts of each token and their weights.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect, moved, size};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// How logits become experts and weights. All of it in f32; ties go to the lower expert.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Route<Buf> {
    /// Says which tokens are padding.
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
        let held = self.bias.as_ref().map_or(0, size);
        Cost { bytes: moved(&self.tensors()), held, flops: 10 * self.logits.len() as u64 }
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
