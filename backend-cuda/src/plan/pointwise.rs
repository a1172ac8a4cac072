//! Ops that touch each element once: embedding, norms, activations, RoPE, gather, sampling and the ops around it.

use selkie_core::{
    Result,
    ops::{Activation, Adjust, Embed, Gather, Logprobs, RmsNorm, RopeKv, Round, Route, Router, RuleWords, Sample},
    tensor::DType,
};

use super::{act, aligned, vector};
use crate::{
    arguments,
    codes::Layout,
    launch::{Address, Launch, Work},
    spec::{File, Spec},
};

/// Column tiles of 256 threads.
fn tiles(dim: usize, vec: usize) -> usize {
    dim.div_ceil(256 * vec)
}

pub(super) fn embed<B: Address>(a: &Embed<B>) -> Result<Vec<Work>> {
    let mut work = Vec::new();
    for block in &a.table.blocks {
        let dim = a.table.k;
        let (spec, columns) = match Layout::of(block.format, dim) {
            // A thread decodes 8 elements.
            Some(layout) => (Spec::new(File::EmbedCodes).int("FORMAT", layout.format), tiles(dim, 8)),
            None => {
                let vec = vector(dim, &[&block.w, &a.out]);
                (Spec::new(File::Embed).int("VEC", vec), tiles(dim, vec))
            }
        };
        let spec = spec.int("DIM", dim).ty("table_t", block.w.dtype).ty("out_t", a.out.dtype);
        let args = arguments::Embed {
            st: (&a.step).into(),
            last: (&a.last).into(),
            table: (&block.w).into(),
            first: block.col as u32,
            rows: block.w.rows() as u32,
            out: (&a.out).into(),
            scale: a.scale,
        };
        let grid = [a.step.bucket.tokens, columns, 1];
        work.push(Work::Kernel(Launch::new(spec, grid, 256, &args)));
    }
    Ok(work)
}

pub(super) fn gather<B: Address>(a: &Gather<B>) -> Result<Vec<Work>> {
    let dim = a.x.row_len();
    let vec = vector(dim, &[&a.x, &a.out]);
    let spec = Spec::new(File::Gather).int("VEC", vec).int("DIM", dim).ty("x_t", a.x.dtype).ty("out_t", a.out.dtype);
    let args = arguments::Gather { st: (&a.step).into(), x: (&a.x).into(), out: (&a.out).into() };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.step.bucket.outputs, tiles(dim, vec), 1], 256, &args))])
}

pub(super) fn activation<B: Address>(a: &Activation<B>) -> Result<Vec<Work>> {
    let dim = a.gate.row_len();
    let mut views = vec![&a.gate, &a.out];
    views.extend(&a.up);
    let vec = vector(dim, &views);
    let dtype = |t: &Option<_>| t.as_ref().map_or(DType::F32, |t: &selkie_core::tensor::Tensor<B>| t.dtype);
    let spec = Spec::new(File::Activation)
        .int("VEC", vec)
        .int("DIM", dim)
        .int("ACT", act(a.act))
        .flag("HAS_UP", a.up.is_some())
        .flag("HAS_ROW_GATE", a.row_gate.is_some())
        .ty("gate_t", a.gate.dtype)
        .ty("up_t", dtype(&a.up))
        .ty("row_gate_t", dtype(&a.row_gate))
        .ty("out_t", a.out.dtype);
    let args = arguments::Activation {
        gate: (&a.gate).into(),
        up: a.up.as_ref().into(),
        row_gate: a.row_gate.as_ref().into(),
        out: (&a.out).into(),
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.gate.rows(), tiles(dim, vec), 1], 256, &args))])
}

pub(super) fn round<B: Address>(a: &Round<B>) -> Result<Vec<Work>> {
    let dim = a.x.row_len();
    aligned("round", 4, &[&a.x, &a.out])?;
    let vec = vector(dim, &[&a.x, &a.out]);
    let spec = Spec::new(File::Round).int("VEC", vec).int("DIM", dim).ty("x_t", a.x.dtype);
    let args = arguments::Round { x: (&a.x).into(), out: (&a.out).into() };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.x.rows(), tiles(dim, vec), 1], 256, &args))])
}

/// Threads that hold a group of a norm, and groups of a block.
fn norm_shape(group: usize, vec: usize) -> (usize, usize) {
    let threads = group.div_ceil(vec).next_power_of_two().clamp(32, 512);
    (threads, if threads == 32 { 4 } else { 1 })
}

/// Access width of a norm, and threads that hold a group.
pub(super) fn norm_access<B: Address>(a: &RmsNorm<B>) -> (usize, usize) {
    let group = a.x.row_len() / a.groups;
    let mut views = vec![&a.x, &a.out];
    views.extend(a.add.iter().map(|(t, _)| t));
    views.extend(a.gate.iter().map(|g| &g.z));
    // The weight is a vector: its offset decides, its row stride is 1.
    let vec = if a.weight.offset.is_multiple_of(4) { vector(group, &views) } else { 1 };
    (vec, norm_shape(group, vec).0)
}

pub(super) fn rms_norm<B: Address>(a: &RmsNorm<B>) -> Result<Vec<Work>> {
    let (rows, group) = (a.x.rows(), a.x.row_len() / a.groups);
    let vec = norm_access(a).0;
    let (threads, per_block) = norm_shape(group, vec);
    let dtype = |t: Option<&selkie_core::tensor::Tensor<B>>| t.map_or(DType::F32, |t| t.dtype);
    let (add, gate) = (a.add.as_ref().map(|(t, _)| t), a.gate.as_ref().map(|g| &g.z));
    let spec = Spec::new(File::RmsNorm)
        .int("VEC", vec)
        .int("GROUP", group)
        .int("GROUPS", a.groups)
        .int("THREADS", threads)
        .int("PER_BLOCK", per_block)
        .flag("HAS_ADD", add.is_some())
        .int("GATE", a.gate.as_ref().map_or(0, |g| if g.before { 1 } else { 2 }))
        .int("GATE_ACT", a.gate.as_ref().map_or(0, |g| act(g.act)))
        .flag("SHARED_WEIGHT", a.weight.len() == group)
        .flag("ACCUMULATE", a.accumulate)
        .ty("x_t", a.x.dtype)
        .ty("add_t", dtype(add))
        .ty("gate_t", dtype(gate))
        .ty("out_t", a.out.dtype);
    let units = rows * a.groups;
    let args = arguments::RmsNorm {
        x: (&a.x).into(),
        add: add.into(),
        add_scale: a.add.as_ref().map_or(0.0, |(_, s)| *s),
        weight: (&a.weight).into(),
        gate: gate.into(),
        out: (&a.out).into(),
        eps: a.eps,
        units: units as u32,
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [units.div_ceil(per_block), 1, 1], threads * per_block, &args))])
}

pub(super) fn rope_kv<B: Address>(a: &RopeKv<B>) -> Result<Vec<Work>> {
    let hd = a.head_dim;
    let (q_heads, kv_heads) = (a.q.row_len() / hd, a.k.row_len() / hd);
    let vec = vector(hd, &[&a.q, &a.k, &a.v, &a.q_out, &a.pool.k, &a.pool.v]);
    let spec = Spec::new(File::RopeKv)
        .int("VEC", vec)
        .int("HEAD_DIM", hd)
        .int("Q_HEADS", q_heads)
        .int("KV_HEADS", kv_heads)
        .int("PAIRS", a.inv_freq.as_ref().map_or(0, |f| f.len()))
        .flag("HAS_NORM", a.norm.is_some())
        .ty("q_t", a.q.dtype)
        .ty("k_t", a.k.dtype)
        .ty("v_t", a.v.dtype)
        .ty("q_out_t", a.q_out.dtype)
        .ty("kv_t", a.pool.k.dtype);
    let args = arguments::RopeKv {
        st: (&a.step).into(),
        q: (&a.q).into(),
        k: (&a.k).into(),
        v: (&a.v).into(),
        norm: a.norm.as_ref().map(|(n, _)| n).into(),
        eps: a.norm.as_ref().map_or(0.0, |(_, eps)| *eps),
        inv_freq: a.inv_freq.as_ref().into(),
        q_out: (&a.q_out).into(),
        k_pages: (&a.pool.k).into(),
        v_pages: (&a.pool.v).into(),
    };
    let grid = [a.step.bucket.tokens, (q_heads + 2 * kv_heads).div_ceil(8), 1];
    Ok(vec![Work::Kernel(Launch::new(spec, grid, 256, &args))])
}

/// A rule of routing as kernels have it.
pub(super) struct Rule {
    kind: usize,
    renorm: bool,
    /// Groups of experts, and those kept.
    pub groups: [usize; 2],
    pub sum_eps: f32,
    pub scale: f32,
}

impl From<&Router> for Rule {
    fn from(router: &Router) -> Self {
        let one = Self { kind: 0, renorm: true, groups: [1, 1], sum_eps: 0.0, scale: 1.0 };
        match *router {
            Router::SoftmaxTopK { renorm } => Self { renorm, ..one },
            Router::TopKSoftmax => Self { kind: 1, ..one },
            Router::Sigmoid { groups, topk_group, renorm, sum_eps, scale } => {
                Self { kind: 2, renorm, groups: [groups, topk_group], sum_eps, scale }
            }
        }
    }
}

impl Rule {
    /// Adds the constants of `route.cuh`, of a kernel that chooses from `experts` experts, with a bias or without. TOP is not one of them.
    pub fn constants(&self, spec: Spec, experts: usize, bias: bool) -> Spec {
        let [groups, keep] = self.groups;
        spec.int("E", experts)
            .int("KIND", self.kind)
            .flag("RENORM", self.renorm)
            .int("GROUPS", groups)
            .int("KEEP", keep)
            .flag("HAS_BIAS", bias)
    }
}

pub(super) fn route<B: Address>(a: &Route<B>) -> Result<Vec<Work>> {
    let rule = Rule::from(&a.router);
    let spec = Spec::new(File::Route).int("TOP", a.ids.row_len());
    let spec = rule.constants(spec, a.logits.row_len(), a.bias.is_some());
    let args = arguments::Route {
        st: (&a.step).into(),
        logits: (&a.logits).into(),
        bias: a.bias.as_ref().into(),
        ids: (&a.ids).into(),
        weights: (&a.weights).into(),
        sum_eps: rule.sum_eps,
        scale: rule.scale,
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.step.bucket.tokens.div_ceil(4), 1, 1], 128, &args))])
}

pub(super) fn sample<B: Address>(a: &Sample<B>) -> Result<Vec<Work>> {
    let vocab = a.logits.row_len();
    let args = arguments::Sample {
        st: (&a.step).into(),
        logits: (&a.logits).into(),
        vocab: vocab as u32,
        lanes: (&a.lanes).into(),
        seen: (&a.seen).into(),
        last: (&a.last).into(),
        ids: (&a.ids).into(),
    };
    Ok(vec![Work::Kernel(Launch::new(sample_spec(vocab), [a.step.bucket.outputs, 1, 1], 1024, &args))])
}

/// The kernel that samples from `vocab` logits: one for all vocabularies up to 262,144.
pub(crate) fn sample_spec(vocab: usize) -> Spec {
    /// Logits that a block of `sample.cu` reads at once.
    const TILE: usize = 4096;
    let tiles = vocab.div_ceil(TILE).next_power_of_two();
    Spec::new(File::Sample).int("MOST_TILES", tiles.max(64))
}

pub(super) fn adjust<B: Address>(a: &Adjust<B>) -> Result<Vec<Work>> {
    /// Ids per block.
    const TILE: usize = 1024;
    let vocab = a.logits.row_len();
    let at = RuleWords { vocab };
    let spec = Spec::new(File::Adjust)
        .int("TILE", TILE)
        .int("RULED", RuleWords::RULED as usize)
        .int("MASKED", RuleWords::MASKED as usize)
        .int("COUNTED", RuleWords::COUNTED as usize)
        .int("FLAGS", RuleWords::FLAGS)
        .int("REPETITION", RuleWords::REPETITION)
        .int("FREQUENCY", RuleWords::FREQUENCY)
        .int("PRESENCE", RuleWords::PRESENCE)
        .int("ENTRIES", RuleWords::ENTRIES)
        .int("FIRST_ENTRY", at.entries());
    let args = arguments::Adjust {
        st: (&a.step).into(),
        logits: (&a.logits).into(),
        vocab: vocab as u32,
        rules: (&a.rules).into(),
        mask: at.mask() as u32,
        counts: at.counts() as u32,
        seen: (&a.seen).into(),
        out: (&a.out).into(),
    };
    let grid = [a.step.bucket.outputs, vocab.div_ceil(TILE), 1];
    Ok(vec![Work::Kernel(Launch::new(spec, grid, 256, &args))])
}

pub(super) fn logprobs<B: Address>(a: &Logprobs<B>) -> Result<Vec<Work>> {
    let vocab = a.logits.row_len();
    let spec = Spec::new(File::Logprobs)
        .int("COUNTED", RuleWords::COUNTED as usize)
        .int("FLAGS", RuleWords::FLAGS)
        .int("TOP", RuleWords::TOP);
    let args = arguments::Logprobs {
        st: (&a.step).into(),
        logits: (&a.logits).into(),
        vocab: vocab as u32,
        ids: (&a.ids).into(),
        rules: (&a.rules).into(),
        counts: RuleWords { vocab }.counts() as u32,
        report: (&a.report).into(),
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [a.step.bucket.outputs, 1, 1], 1024, &args))])
}
