//! Lowers routing to experts and sampling of tokens.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Route, Router, Sample};

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
