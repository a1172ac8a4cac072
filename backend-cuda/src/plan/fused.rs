//! Ops of one token as one kernel: a prologue (RMS norm or activation), the product that reads it, and the convolution after
//! the product, a product of two inputs and its convolution, or two short products. Launches bound a decode step of a small model, and the product's
//! weights arrive while the prologue runs. Experts compute their activation too, and for one token their choice; those of many
//! tokens sort once for both halves.

use std::borrow::Cow;

use selkie_core::{
    ops::{Act, Activation, Conv1d, ExpertMatmul, Matmul, Op, RmsNorm, Round},
    tensor::{DType, Tensor},
};

use super::{
    Arena, Device, Hazards, act, eight, experts,
    pick::{self, Product},
    plan,
    pointwise::norm_access,
    same_view, state, wide,
};
use crate::{
    arguments::FusedProduct,
    launch::{Address, Work},
    spec::Spec,
};

/// Whether `ops`, one op or several that [`fused`] takes, may become one kernel with the next op.
pub fn may_fuse<B: Address>(ops: &[Op<B>], device: &Device) -> bool {
    if !(device.tuned && device.bulk_copies) {
        return false;
    }
    if matches!(ops, [.., Op::Round(_)]) {
        return true;
    }
    let Some(Unrounded { ops, .. }) = unrounded(ops) else { return false };
    match &ops[..] {
        [Op::Route(a)] => experts::may_begin(a),
        [Op::Route(route), Op::ExpertMatmul(a)] | [Op::Route(route), Op::ExpertMatmul(a), Op::Activation(_)] => {
            experts::may_choose(route, a, device)
        }
        // The second half of the experts takes over the tables of the first.
        [Op::ExpertMatmul(a), Op::Activation(_)] => experts::may_share_tables(a, device),
        [Op::RmsNorm(a)] => a.x.rows() == 1 && !a.accumulate,
        [Op::Activation(a)] => a.gate.rows() == 1,
        [Op::ExpertMatmul(a)] => experts::may_fuse(a, device),
        [.., Op::Matmul(a)] => a.x.rows() == 1 && !a.accumulate,
        _ => false,
    }
}

/// Ops without roundings, whose inputs the products after them have instead.
struct Unrounded<'a, B: Clone> {
    ops: Cow<'a, [Op<B>]>,
    /// Of each op, whether its input is rounded.
    rounds: Vec<bool>,
}

/// `None` if another op than the product of what it writes follows a rounding.
fn unrounded<B: Address>(ops: &[Op<B>]) -> Option<Unrounded<'_, B>> {
    if !ops.iter().any(|op| matches!(op, Op::Round(_))) {
        return Some(Unrounded { ops: ops.into(), rounds: vec![false; ops.len()] });
    }
    let (mut all, mut rounds, mut before) = (Vec::new(), Vec::new(), None::<&Round<B>>);
    for op in ops {
        if let Op::Round(round) = op {
            before = Some(round);
            continue;
        }
        rounds.push(before.is_some());
        all.push(match (before.take(), op) {
            (None, op) => op.clone(),
            (Some(round), Op::Matmul(a)) if same_view(&a.x, &round.out) => {
                Matmul { x: round.x.clone(), ..a.clone() }.into()
            }
            (Some(round), Op::ExpertMatmul(a)) if same_view(&a.x, &round.out) => {
                ExpertMatmul { x: round.x.clone(), ..a.clone() }.into()
            }
            (Some(_), _) => return None,
        });
    }
    Some(Unrounded { ops: all.into(), rounds })
}

/// The kernels of several ops, fewer than those of the ops one by one. They write everything that those write, but for
/// rounded inputs, and to the same bits, unless codes are multiplied. `arena` has the scratch memory that any of the ops needs.
pub fn fused<B: Address>(ops: &[Op<B>], device: &Device, arena: &Arena, hazards: &Hazards) -> Option<Vec<Work>> {
    // A rounding waits for the product.
    if let [before @ .., round @ Op::Round(_)] = ops {
        let mut work = match before {
            [one] => plan(one, device, arena, hazards).ok()?,
            several => fused(several, device, arena, hazards)?,
        };
        work.extend(plan(round, device, arena, hazards).ok()?);
        return Some(work);
    }
    let Unrounded { ops: all, rounds } = unrounded(ops)?;
    match &all[..] {
        [Op::Route(route), Op::ExpertMatmul(a), rest @ ..] => {
            experts::with_choice(route, a, rest, &rounds, device, hazards)
        }
        [Op::ExpertMatmul(a)] => experts::rounded(a, device, hazards).map(|work| vec![work]),
        [Op::ExpertMatmul(a), Op::Activation(act)] => {
            experts::with_activation(a, rounds[0], act, device, arena, hazards)
        }
        [Op::ExpertMatmul(a), Op::Activation(act), Op::ExpertMatmul(_)] if !rounds[..2].contains(&true) => {
            let [.., before, Op::ExpertMatmul(down)] = ops else { return None };
            let round = match before {
                Op::Round(_) => plan(before, device, arena, hazards).ok()?,
                _ => Vec::new(),
            };
            experts::both_halves(a, act, round, down, device, arena, hazards)
        }
        [Op::Activation(a), Op::Conv1d(c)] => state::gated_conv1d(a, c, hazards).map(|work| vec![work]),
        ops => one_kernel(ops, &rounds, device, hazards).map(|work| vec![work]),
    }
    .or_else(|| match ops {
        [Op::Round(round), Op::Matmul(product)] => eight::launch(round, product, device, arena),
        _ => None,
    })
}

/// A product with the ops around it.
fn one_kernel<B: Address>(ops: &[Op<B>], rounds: &[bool], device: &Device, hazards: &Hazards) -> Option<Work> {
    let (first, product, conv, pair) = match ops {
        [first @ .., Op::Matmul(p), Op::Matmul(other)] => (first, p, None, Some(other)),
        [first @ .., Op::Matmul(p)] => (first, p, None, None),
        [first @ .., Op::Matmul(p), Op::Conv1d(c)] => (first, p, Some(c), None),
        _ => return None,
    };
    if pair.is_some() && rounds[first.len()..].contains(&true) {
        return None;
    }
    let rounds = rounds[first.len()];
    let prologue = match first {
        [] => None,
        [first] => Some(prologue(first, product)?),
        _ => return None,
    };
    if conv.is_some_and(|c| !reads_product(c, product)) {
        return None;
    }
    // Where the kernel computes the input, it is that of both products.
    if pair.is_some_and(|other| prologue.is_some() && !same_view(&other.x, &product.x)) {
        return None;
    }
    // Every block reads the inputs while others write: they must be different buffers.
    let read: Vec<_> =
        prologue.iter().flat_map(|p| std::iter::once(p.first).chain(p.second)).chain([&product.x]).collect();
    let written = [Some(&product.out), conv.map(|c| &c.out), pair.map(|other| &other.out)];
    let mut inputs = read.iter().copied().chain(pair.map(|other| &other.x));
    if inputs.any(|r| written.iter().flatten().any(|w| r.buf.id() == w.buf.id())) {
        return None;
    }
    if pair.is_some_and(|other| other.out.buf.id() == product.out.buf.id()) {
        return None;
    }
    pick::fuse_neighbours(product, &Neighbours { prologue, rounds, conv, pair }, device, hazards)
}

/// The ops that a product's kernel computes with it.
pub(super) struct Neighbours<'a, B> {
    /// The op before the product.
    prologue: Option<Prologue<'a, B>>,
    /// The input is rounded.
    rounds: bool,
    /// The op after it.
    conv: Option<&'a Conv1d<B>>,
    /// Another product, of the same input or of another.
    pair: Option<&'a Matmul<B>>,
}

/// The op before a product.
struct Prologue<'a, B> {
    /// RMS norm instead of an activation.
    norm: bool,
    /// Input of the norm or the activation.
    first: &'a Tensor<B>,
    /// Gate of the norm, or second factor.
    second: Option<&'a Tensor<B>>,
    /// Elements from `first` to the gate of the row; 0 = none.
    row_gate: usize,
    act: Act,
    /// Weight and epsilon of a norm.
    weight: Option<(&'a Tensor<B>, f32)>,
    /// Access width, size and threads of a group of a norm.
    shape: [usize; 3],
    /// As in `rms_norm.cu`.
    gate: usize,
}

impl<B: Address> Neighbours<'_, B> {
    /// The product alone.
    pub const fn none() -> Self {
        Self { prologue: None, rounds: false, conv: None, pair: None }
    }

    /// Whether it is the product alone.
    pub fn is_none(&self) -> bool {
        self.prologue.is_none() && !self.rounds && self.conv.is_none() && self.pair.is_none()
    }

    /// Whether the input is rounded before the product.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Whether that is all there is besides the product.
    pub fn is_rounding(&self) -> bool {
        self.rounds && self.prologue.is_none() && self.conv.is_none()
    }

    /// Another product.
    pub fn pair(&self) -> Option<&Matmul<B>> {
        self.pair
    }

    /// Adds the constants of the product and its neighbours to those of its kernel.
    pub fn constants(&self, spec: Spec, p: &Product<B>) -> Spec {
        let (prologue, conv) = (self.prologue.as_ref(), self.conv);
        let [vec, group, threads] = prologue.map_or([1, 1, 32], |p| p.shape);
        spec.flag("ACCUMULATE", p.op.accumulate)
            .flag("HAS_COLUMNS", p.op.columns.is_some())
            .flag("HAS_BIAS", p.op.bias.is_some())
            .flag("ROUND", self.rounds)
            .int("PROLOGUE", prologue.map_or(0, |p| if p.norm { 1 } else { 2 }))
            .int("ACT", prologue.map_or(0, |p| act(p.act)))
            .flag("HAS_SECOND", prologue.is_some_and(|p| p.second.is_some()))
            .int("ROW_GATE", prologue.map_or(0, |p| p.row_gate))
            .int("VEC", vec)
            .int("GROUP", group)
            .int("THREADS", threads)
            .int("GATE", prologue.map_or(0, |p| p.gate))
            .flag("SHARED_WEIGHT", prologue.and_then(|p| p.weight).is_some_and(|(w, _)| w.len() == group))
            .flag("CONV", conv.is_some())
            .int("CONV_FIRST", conv.map_or(0, |c| c.x.offset - p.out.offset))
            .int("CHANNELS", conv.map_or(1, |c| c.x.row_len()))
            .int("TAPS", conv.map_or(2, |c| c.weight.row_len() - 1))
            .int("CONV_ACT", conv.map_or(0, |c| act(c.act)))
            .ty("out_t", p.out.dtype)
            .ty("pool_t", conv.map_or(DType::F32, |c| c.pool.dtype))
            .ty("conv_t", conv.map_or(DType::F32, |c| c.out.dtype))
    }

    /// The arguments of the product and its neighbours.
    pub fn arguments(&self, p: &Product<B>, hazards: &Hazards) -> FusedProduct {
        let (prologue, conv) = (self.prologue.as_ref(), self.conv);
        let weight = prologue.and_then(|p| p.weight);
        FusedProduct {
            x: (&p.op.x).into(),
            w: p.w.argument(),
            n: p.n() as i32,
            columns: p.columns(),
            bias: p.bias(),
            out: p.out.into(),
            scale: p.op.scale,
            first: prologue.map(|p| p.first).into(),
            second: prologue.and_then(|p| p.second).into(),
            norm_weight: weight.map(|w| w.0).into(),
            eps: weight.map_or(0.0, |w| w.1),
            ints: conv.map(|c| &c.step.ints).into(),
            conv_weight: conv.map(|c| &c.weight).into(),
            pool: conv.map(|c| &c.pool).into(),
            conv_out: conv.map(|c| &c.out).into(),
            state_unwritten: u32::from(hazards.state_unwritten),
        }
    }
}

/// The prologue, if `first` writes what the product reads.
fn prologue<'a, B: Address>(first: &'a Op<B>, product: &Matmul<B>) -> Option<Prologue<'a, B>> {
    match first {
        Op::RmsNorm(a) if same_view(&product.x, &a.out) => norm(a),
        Op::Activation(a) if same_view(&product.x, &a.out) => activation(a),
        _ => None,
    }
}

fn norm<B: Address>(a: &RmsNorm<B>) -> Option<Prologue<'_, B>> {
    let z = a.gate.as_ref().map(|g| &g.z);
    let (vec, threads) = norm_access(a);
    let bf16 = a.x.dtype == DType::Bf16 && z.is_none_or(|z| z.dtype == DType::Bf16);
    // A row stays in the registers of at most 256 threads, and the sums of its groups in shared memory.
    let fits = a.x.row_len() <= 8192 && a.groups * (threads / 32) <= 128;
    (bf16 && a.add.is_none() && !a.accumulate && fits).then_some(Prologue {
        norm: true,
        first: &a.x,
        second: z,
        row_gate: 0,
        act: a.gate.as_ref().map_or(Act::Identity, |g| g.act),
        weight: Some((&a.weight, a.eps)),
        shape: [vec, a.x.row_len() / a.groups, threads],
        gate: a.gate.as_ref().map_or(0, |g| if g.before { 1 } else { 2 }),
    })
}

fn activation<B: Address>(a: &Activation<B>) -> Option<Prologue<'_, B>> {
    let mut inputs = vec![&a.gate];
    inputs.extend(&a.up);
    // The gate of the row must be a later column of the same matrix.
    let distance = |g: &Tensor<B>| {
        let same = g.buf.id() == a.gate.buf.id() && g.dtype == a.gate.dtype;
        g.offset.checked_sub(a.gate.offset).filter(|&by| same && by > 0)
    };
    let row_gate = match &a.row_gate {
        Some(g) => distance(g)?,
        None => 0,
    };
    (a.gate.row_len().is_multiple_of(8) && wide(&inputs)).then_some(Prologue {
        norm: false,
        first: &a.gate,
        second: a.up.as_ref(),
        row_gate,
        act: a.act,
        weight: None,
        shape: [1, 1, 32],
        gate: 0,
    })
}

/// Whether a convolution of one token reads columns of a product.
fn reads_product<B: Address>(c: &Conv1d<B>, product: &Matmul<B>) -> bool {
    let (x, out, b) = (&c.x, &product.out, &c.step.bucket);
    b.tokens == 1
        && b.chunks == 1
        && x.buf.id() == out.buf.id()
        && x.dtype == out.dtype
        && x.offset >= out.offset
        && x.offset + x.row_len() <= out.offset + out.row_len()
}
