//! Lowers routing to experts, sampling of tokens and the ops around it.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Adjust, Logprobs, MOST_TOP, Route, Router, RuleWords, Sample};

use super::{Facts, demand};
use crate::kernel::{Builder, Kernel, shader};

pub(super) fn route<B: Handle>(op: &Route<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let (experts, k) = (op.logits.row_len(), op.ids.row_len());
    demand(experts <= 1024, "route", || format!("{experts} experts; at most 1024 are supported"))?;
    let (rule, groups, kept, renorm, sum_eps, scale) = match op.router {
        Router::SoftmaxTopK { renorm } => (0, 1, 1, renorm, 0.0, 1.0),
        Router::TopKSoftmax => (1, 1, 1, false, 0.0, 1.0),
        Router::Sigmoid { groups, topk_group, renorm, sum_eps, scale } => {
            (2, groups, topk_group, renorm, sum_eps, scale)
        }
    };
    let mut b = Builder::new(shader!("route"))
        .constant("EXPERTS", experts)
        .constant("TOP", k)
        .constant("RULE", rule)
        .constant("GROUPS", groups)
        .constant("KEPT", kept)
        .flag("RENORM", renorm)
        .flag("BIAS", op.bias.is_some())
        .float("sum_eps", sum_eps)
        .float("scale", scale)
        .step(&op.step)
        .view("logits", Read, &op.logits)
        .view("ids", Write, &op.ids)
        .view("weights", Write, &op.weights);
    if let Some(bias) = &op.bias {
        b = b.view("bias", Read, bias);
    }
    Ok(vec![b.build("route", op.step.bucket.tokens, facts.max_binding)])
}

/// Ids per part of a large vocabulary, and the largest vocabulary that one workgroup searches alone.
const PART: usize = 2048;
const ALONE: usize = 8192;

pub(super) fn sample<B: Handle>(op: &Sample<B>, facts: &Facts) -> Vec<Kernel<B>> {
    let (vocab, outputs) = (op.logits.row_len(), op.step.bucket.outputs);
    let parts = if vocab > ALONE { vocab.div_ceil(PART) } else { 0 };
    let base = |find| {
        let b = Builder::new(shader!("sample"))
            .flag("FIND", find)
            .flag("FOUND", !find && parts > 0)
            .constant("PART", PART)
            .constant("LOADS", PART / 256)
            .param("vocab", vocab)
            .step(&op.step)
            .view("logits", Read, &op.logits)
            .view("lanes", Read, &op.lanes)
            .atomics("seen", &op.seen);
        match parts {
            0 => b,
            _ => b.param("parts", parts).scratch("parts", if find { Write } else { Read }, 0, [outputs * parts, 4]),
        }
    };
    let choose = base(false).view("last", InPlace, &op.last).view("ids", Write, &op.ids);
    let choose = choose.build("sample", outputs, facts.max_binding);
    match parts {
        0 => vec![choose],
        _ => vec![base(true).build("sample", outputs * parts, facts.max_binding), choose],
    }
}

/// Ids per workgroup of an adjustment.
const TILE: usize = 1024;

pub(super) fn adjust<B: Handle>(op: &Adjust<B>, facts: &Facts) -> Kernel<B> {
    let (vocab, outputs) = (op.logits.row_len(), op.step.bucket.outputs);
    let (at, tiles) = (RuleWords { vocab }, vocab.div_ceil(TILE));
    Builder::new(shader!("adjust"))
        .constant("TILE", TILE)
        .constant("RULED", RuleWords::RULED as usize)
        .constant("MASKED", RuleWords::MASKED as usize)
        .constant("COUNTED", RuleWords::COUNTED as usize)
        .constant("REPETITION", RuleWords::REPETITION)
        .constant("FREQUENCY", RuleWords::FREQUENCY)
        .constant("PRESENCE", RuleWords::PRESENCE)
        .constant("ENTRIES", RuleWords::ENTRIES)
        .constant("HEADER", at.entries())
        .param("vocab", vocab)
        .param("tiles", tiles)
        .param("mask", at.mask())
        .param("counts", at.counts())
        .step(&op.step)
        .view("logits", Read, &op.logits)
        .view("rules", Read, &op.rules)
        .view("seen", Read, &op.seen)
        .view("out", Write, &op.out)
        .build("adjust", outputs * tiles, facts.max_binding)
}

pub(super) fn logprobs<B: Handle>(op: &Logprobs<B>, facts: &Facts) -> Vec<Kernel<B>> {
    /// Largest logit, sum, and key and id of the most likely tokens of a part.
    const PART_WORDS: usize = 2 + 2 * MOST_TOP;
    let (vocab, outputs) = (op.logits.row_len(), op.step.bucket.outputs);
    let parts = vocab.div_ceil(PART);
    let base = |find| {
        Builder::new(shader!("logprobs"))
            .flag("FIND", find)
            .constant("PART", PART)
            .constant("LOADS", PART / 256)
            .constant("PART_WORDS", PART_WORDS)
            .constant("COUNTED", RuleWords::COUNTED as usize)
            .constant("TOP", RuleWords::TOP)
            .param("vocab", vocab)
            .param("parts", parts)
            .step(&op.step)
            .view("logits", Read, &op.logits)
            .view("ids", Read, &op.ids)
            .scratch_words("parts", if find { Write } else { Read }, 0, [outputs * parts, PART_WORDS])
    };
    let find = base(true).view("rules", Read, &op.rules).build("logprobs", outputs * parts, facts.max_binding);
    let join = base(false)
        .param("counts", RuleWords { vocab }.counts())
        .view("rules", InPlace, &op.rules)
        .view("report", Write, &op.report);
    vec![find, join.build("logprobs", outputs, facts.max_binding)]
}
