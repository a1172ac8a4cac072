//! Ops of one token as one kernel: a norm or an activation, the product that follows it, and the convolution behind that.
//! Launches bound a decode step of a small model, and the product's weight is on its way meanwhile.

use selkie_core::{
    ops::{Act, Activation, Conv1d, Matmul, Op, RmsNorm},
    tensor::{DType, Tensor},
};

use super::{
    Target, experts,
    matmul::{self, Prologue},
    pointwise::norm_access,
    same_view, wide,
};
use crate::launch::{Address, Work};

/// Whether `ops`, one op or several that [`fused`] takes, may become one kernel with the next op.
pub fn may_go_on<B: Address>(ops: &[Op<B>], target: &Target) -> bool {
    target.tuned
        && target.bulk
        && match ops {
            [Op::RmsNorm(a)] => a.x.rows() == 1 && !a.accumulate,
            [Op::Activation(a)] => a.gate.rows() == 1,
            [Op::ExpertMatmul(a)] => experts::may_go_on(a, target),
            [.., Op::Matmul(a)] => a.x.rows() == 1 && !a.accumulate,
            _ => false,
        }
}

/// One kernel for several ops, which leaves what they leave one by one, to the same bits.
pub fn fused<B: Address>(ops: &[Op<B>], target: &Target) -> Option<Work> {
    if let [Op::ExpertMatmul(a), Op::Activation(act)] = ops {
        return experts::with_activation(a, act, target);
    }
    let (ahead, product, conv) = match ops {
        [first, Op::Matmul(p)] => (Some(prologue(first, p)?), p, None),
        [Op::Matmul(p), Op::Conv1d(c)] => (None, p, Some(c)),
        [first, Op::Matmul(p), Op::Conv1d(c)] => (Some(prologue(first, p)?), p, Some(c)),
        _ => return None,
    };
    if conv.is_some_and(|c| !behind(c, product)) {
        return None;
    }
    // Every block reads what is read while others write.
    let read: Vec<_> =
        ahead.iter().flat_map(|p| std::iter::once(p.first).chain(p.second)).chain([&product.x]).collect();
    let written = [Some(&product.out), conv.map(|c| &c.out)];
    if written.iter().flatten().any(|w| read.iter().any(|r| r.buf.id() == w.buf.id())) {
        return None;
    }
    matmul::around(product, ahead.as_ref(), conv, target)
}

/// What comes before a product that reads all of it.
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
    // All of a row stays in the registers of at most 256 threads, and the sums of its groups in shared memory.
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
    // The gate of the row is a column of the same matrix.
    let behind = |g: &Tensor<B>| {
        let same = g.buf.id() == a.gate.buf.id() && g.dtype == a.gate.dtype;
        g.offset.checked_sub(a.gate.offset).filter(|&by| same && by > 0)
    };
    let row_gate = match &a.row_gate {
        Some(g) => behind(g)?,
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
fn behind<B: Address>(c: &Conv1d<B>, product: &Matmul<B>) -> bool {
    let (x, out, b) = (&c.x, &product.out, &c.step.bucket);
    b.tokens == 1
        && b.chunks == 1
        && x.buf.id() == out.buf.id()
        && x.dtype == out.dtype
        && x.offset >= out.offset
        && x.offset + x.row_len() <= out.offset + out.row_len()
}
