//! Products of few rows, and fusion of neighbouring ops into their dispatch.

use selkie_core::backend::{Handle, Int8};
use selkie_core::error::Result;
use selkie_core::ops::Access::{self, InPlace, Read, Write};
use selkie_core::ops::{Activation, Conv1d, Matmul, Op, RmsNorm, RowBlock};
use selkie_core::tensor::Tensor;

use super::{Facts, MOST_BINDINGS, act, dense, eights, lanes};
use crate::codes;
use crate::kernel::{Builder, Kernel, shader};

/// Maximum weights of a product that is fused with the norm of its x. Every workgroup repeats the norm, which must cost less
/// than the 5 µs of a separate dispatch.
const NORMED_WEIGHTS: usize = 1 << 24;

/// Maximum rows for the matrix-vector shader.
pub(super) const FEW_ROWS: usize = 8;

/// Products with coded weights that are those of integers. Smaller ones are limited by the number of dispatches, of which one
/// rounds x and another is a norm that cannot be fused. Measured on an H200.
pub const ROUNDED: Int8 = Int8::Few { rows: FEW_ROWS, weights: 1 << 22 };

/// The ops that are fused with a product of few rows.
pub(super) struct Fused<'a, B> {
    /// The norm that produces x, and whether its output must also be written.
    norm: Option<(&'a RmsNorm<B>, bool)>,
    /// The activation of the product's output.
    activation: Option<&'a Activation<B>>,
    /// The convolution of some columns of the output.
    conv: Option<&'a Conv1d<B>>,
}

impl<B> Default for Fused<'_, B> {
    fn default() -> Self {
        Self { norm: None, activation: None, conv: None }
    }
}

/// Whether the product is one of integers.
pub(super) fn has_dots<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, facts: &Facts) -> bool {
    facts.dots && ROUNDED.takes(op.x.rows(), op.w.n * op.w.k) && codes::has_dots(block.format)
}

/// Scratch bytes of x rounded, of as many rows as are.
pub(super) fn scratch<B: Handle>(op: &Matmul<B>, facts: &Facts) -> u64 {
    let some = facts.dots && op.w.blocks.iter().any(|b| codes::has_dots(b.format));
    if some { (op.x.rows().min(FEW_ROWS) * op.w.k / 2 * 3) as u64 } else { 0 }
}

/// Adds a view of the scratch arena, by vectors or by words: name, access, first word, dimensions.
type Scratch<B> = fn(Builder<B>, &'static str, Access, usize, [usize; 2]) -> Builder<B>;

/// The views of x rounded: `codes` `[M, K / 4]` and `units` `[M, K / 8]`.
pub(super) fn rounded<B: Handle>(
    b: Builder<B>,
    codes: &'static str,
    access: Access,
    op: &Matmul<B>,
    view: Scratch<B>,
) -> Builder<B> {
    let (m, k) = (op.x.rows(), op.w.k);
    view(view(b, codes, access, 0, [m, k / 4]), "units", access, m * k / 4, [m, k / 8])
}

/// Rounds x for the products of integers.
pub(super) fn round<B: Handle>(op: &Matmul<B>, facts: &Facts) -> Kernel<B> {
    let b = Builder::new(shader!("matmul_round")).param("m", op.x.rows()).param("k", op.w.k).vectors("x", Read, &op.x);
    rounded(b, "codes", Write, op, Builder::scratch).build("matmul", (op.x.len() / 16).div_ceil(64), facts.max_binding)
}

/// Fuses the first ops of `ops` into one dispatch, or two where x is rounded first, and returns their number and the dispatches: a
/// product of few rows with the norm before it, the activation or convolution after it, or both. Intermediate tensors are also written, unless a later op overwrites them
/// unread.
pub(super) fn fused<B: Handle>(ops: &[Op<B>], facts: &Facts) -> Result<Option<(usize, Vec<Kernel<B>>)>> {
    // A fused norm has barriers, and every combination needs another pipeline.
    if facts.few_barriers {
        return Ok(None);
    }
    let (norm, rest) = match ops {
        [Op::RmsNorm(norm), rest @ ..] => (Some(norm), rest),
        _ => (None, ops),
    };
    let Some((Op::Matmul(op), rest)) = rest.split_first() else { return Ok(None) };
    let [block] = op.w.blocks.as_slice() else { return Ok(None) };
    // A norm that cannot be fused becomes its own dispatch; the product is tried again without it.
    let dots = has_dots(op, block, facts);
    let takes = |norm| if dots { rounds(op, norm, facts) } else { takes_norm(op, norm) };
    if op.x.rows() > FEW_ROWS || !op.w.k.is_multiple_of(8) || !norm.is_none_or(takes) {
        return Ok(None);
    }
    // A product of integers takes what its norm or a dispatch of its own has rounded.
    let (rounding, norm) = match norm {
        Some(norm) if dots => (Some(dense::rms_norm(norm, Some(op), facts)), None),
        norm => (dots.then(|| round(op, facts)), norm),
    };
    let mut fused = Fused { norm: norm.map(|norm| (norm, !overwritten(&op.x, rest))), ..Fused::default() };
    // The fused op must not write a tensor that other workgroups still read.
    let reads = |id: usize| [&op.x, norm.map_or(&op.x, |n| &n.x), &op.out].iter().any(|t| t.buf.id() == id);
    let mut kernel = None;
    match rest.first() {
        Some(Op::Activation(next)) if takes_activation(op, next) && !reads(next.out.buf.id()) => {
            fused.activation = Some(next);
        }
        Some(Op::Conv1d(next)) if takes_conv(op, next) && !reads(next.out.buf.id()) => {
            fused.conv = Some(next);
            let with = product(op, block, &fused, facts)?;
            if with.buffers.len() <= MOST_BINDINGS {
                kernel = Some(with);
            } else {
                fused.conv = None;
            }
        }
        _ => {}
    }
    let after = fused.activation.is_some() || fused.conv.is_some();
    if norm.is_none() && rounding.is_none() && !after {
        return Ok(None);
    }
    let kernel = kernel.map_or_else(|| product(op, block, &fused, facts), Ok)?;
    if kernel.buffers.len() > MOST_BINDINGS {
        return Ok(None);
    }
    let before = usize::from(matches!(ops, [Op::RmsNorm(_), ..]));
    Ok(Some((before + 1 + usize::from(after), rounding.into_iter().chain([kernel]).collect())))
}

/// Whether two views cover the same elements.
fn same<B: Handle>(a: &Tensor<B>, b: &Tensor<B>) -> bool {
    let place = |t: &Tensor<B>| (t.buf.id(), t.dtype, t.offset, t.row_stride);
    place(a) == place(b) && a.dims() == b.dims()
}

/// Whether the next op that uses a view's buffer overwrites the view.
fn overwritten<B: Handle>(t: &Tensor<B>, later: &[Op<B>]) -> bool {
    let touching = |op: &Op<B>| -> Vec<bool> {
        let views = op.tensors().into_iter().filter(|(_, v)| v.buf.id() == t.buf.id());
        views.map(|(access, v)| access == Write && same(v, t)).collect()
    };
    later.iter().map(touching).find(|views| !views.is_empty()).is_some_and(|views| views.into_iter().all(|w| w))
}

fn takes_norm<B: Handle>(op: &Matmul<B>, norm: &RmsNorm<B>) -> bool {
    let reads = [Some(&norm.x), Some(&norm.weight), norm.gate.as_ref().map(|g| &g.z)];
    // The first workgroups would overwrite tensors that others still read.
    let apart = reads.into_iter().flatten().all(|t| t.buf.id() != op.out.buf.id() && t.buf.id() != op.x.buf.id());
    let whole =
        norm.groups == 1 && norm.add.is_none() && !norm.accumulate && norm.gate.as_ref().is_none_or(|g| g.before);
    let small = op.w.n * op.w.k <= NORMED_WEIGHTS;
    small && whole && apart && same(&norm.out, &op.x) && op.x.buf.id() != op.out.buf.id()
}

/// Whether a norm can round the input of a product of integers.
fn rounds<B: Handle>(op: &Matmul<B>, norm: &RmsNorm<B>, facts: &Facts) -> bool {
    let whole = (norm.out.row_len() / norm.groups).is_multiple_of(32);
    whole && facts.subgroup.is_some_and(|size| size >= 8) && same(&norm.out, &op.x)
}

fn takes_activation<B: Handle>(op: &Matmul<B>, next: &Activation<B>) -> bool {
    let inner = next.out.row_len();
    let halves = match &next.up {
        None => op.w.n == inner && same(&next.gate, &op.out),
        Some(up) if op.w.n == 2 * inner => {
            same(&next.gate, &op.out.cols(0, inner)) && same(up, &op.out.cols(inner, inner))
        }
        Some(_) => false,
    };
    halves && next.row_gate.is_none() && !op.accumulate && next.out.rows() == op.x.rows()
}

/// Whether the convolution of columns of the product can be fused. It must have a single token: one row of one chunk.
fn takes_conv<B: Handle>(op: &Matmul<B>, next: &Conv1d<B>) -> bool {
    let x = &next.x;
    let inside =
        x.buf.id() == op.out.buf.id() && x.offset >= op.out.offset && x.offset + x.row_len() <= op.out.offset + op.w.n;
    inside && next.step.bucket.tokens == 1 && op.x.rows() == 1 && !op.accumulate && op.scale == 1.0
}

/// The product with one row block of the weight, with the fused ops.
pub(super) fn product<B: Handle>(
    op: &Matmul<B>,
    block: &RowBlock<B>,
    fused: &Fused<'_, B>,
    facts: &Facts,
) -> Result<Kernel<B>> {
    let (m, n, k) = (op.x.rows(), block.w.rows(), op.w.k);
    let eight = eights("matmul", block, k)?;
    let sides = if fused.activation.is_some_and(|next| next.up.is_some()) { 2 } else { 1 };
    let norm = fused.norm.map(|(norm, _)| norm);
    let dots = has_dots(op, block, facts);
    let wide = dots || codes::is_wide(block.format);
    let plan = if wide {
        Gemv::wide(m, k, dots)
    } else {
        let step = if eight { 8 } else { 4 };
        Gemv::pick(m, k, step, norm.is_some(), norm.is_some_and(|norm| norm.gate.is_some()))
    };
    let mut b = plan
        .constants(Builder::new(shader!("matmul_vec")), facts, k)
        .constant("MR", m)
        .constant("SIDES", sides)
        .flag("WIDE", wide)
        .flag("DOTS", dots)
        .flag("EIGHT", eight)
        .flag("COLUMNS", op.columns.is_some())
        .flag("BIAS", op.bias.is_some())
        .flag("ACCUMULATE", op.accumulate)
        .flag("NORM", fused.norm.is_some())
        .flag("ACTIVATE", fused.activation.is_some())
        .flag("CONV", fused.conv.is_some())
        .param("n", n / sides)
        .param("k", k)
        .param("col", block.col)
        .float("scale", op.scale)
        .weight("w", block)
        .view("out", if op.accumulate { InPlace } else { Write }, &op.out);
    b = match dots {
        true => rounded(b, "x", Read, op, Builder::scratch),
        false => b.vectors("x", Read, norm.map_or(&op.x, |norm| &norm.x)),
    };
    if let Some(columns) = &op.columns {
        b = b.view("columns", Read, columns);
    }
    if let Some(bias) = &op.bias {
        b = b.view("bias", Read, bias);
    }
    if let Some((norm, keep)) = fused.norm {
        b = b.vectors("norm", Read, &norm.weight).float("eps", norm.eps);
        b = b.flag("KEEP", keep).flag("GATE", norm.gate.is_some());
        if keep {
            b = b.vectors("u", Write, &norm.out);
        }
        if let Some(gate) = &norm.gate {
            b = b.constant("GATE_ACT", act(gate.act)).vectors("z", Read, &gate.z);
        }
    }
    if let Some(next) = fused.activation {
        b = b.constant("ACT", act(next.act)).view("mid", Write, &next.out);
    }
    if let Some(next) = fused.conv {
        b = b
            .constant("TAPS", next.weight.row_len() - 1)
            .constant("ACT", act(next.act))
            .param("first_channel", next.x.offset - op.out.offset)
            .param("channels", next.x.row_len())
            .step(&next.step)
            .view("taps", Read, &next.weight)
            .view("pool", InPlace, &next.pool)
            .view("mid", Write, &next.out);
    }
    Ok(b.build("matmul", n.div_ceil(plan.threads / plan.lanes * plan.rows), facts.max_binding))
}

/// Work division of a product of few rows: see `matmul_vec.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gemv {
    /// Threads per workgroup.
    threads: usize,
    /// Threads per team; a team shares weight rows.
    lanes: usize,
    /// Weight rows per team.
    rows: usize,
    /// Loads per weight row that a thread has in flight.
    deep: usize,
}

impl Gemv {
    /// Chosen by measurement on an H200, for `step` elements per load. Every workgroup repeats a fused norm, so it takes more
    /// rows, and with a gate more threads. With three or more rows of x, loads and arithmetic limit the time instead of memory
    /// traffic, so weight rows share the loads of x.
    fn pick(m: usize, k: usize, step: usize, norm: bool, gate: bool) -> Self {
        if m > 2 {
            let lanes = lanes(k, step).min(64);
            return Self { threads: 256, lanes, rows: 4, deep: (k / (step * lanes)).clamp(1, 2) };
        }
        let even = |lanes: usize| (k / step).is_multiple_of(lanes);
        let lanes = match lanes(k, step) {
            most if gate => most,
            most => [128, 64].into_iter().find(|n| *n <= most && even(*n)).unwrap_or(most.min(128)),
        };
        let rows = if norm && !gate { 4 } else { 2 };
        Self { threads: 256, lanes, rows, deep: (k / (step * lanes)).clamp(1, 4) }
    }

    /// The same for coded weights that are read 32 elements at a time.
    fn wide(m: usize, k: usize, dots: bool) -> Self {
        let most = if m > 2 && !dots { 32 } else { 64 };
        Self { threads: 256, lanes: lanes(k, 32).min(most), rows: if m > 2 { 4 } else { 2 }, deep: 1 }
    }

    fn constants<B: Handle>(&self, b: Builder<B>, facts: &Facts, k: usize) -> Builder<B> {
        b.constant("WG", self.threads)
            .constant("LANES", self.lanes)
            .constant("ROWS", self.rows)
            .constant("DEEP", self.deep)
            .flag("REST", !k.is_multiple_of(8 * self.lanes * self.deep))
            .subgroup(facts.subgroup, self.lanes)
            .flag("ACROSS", facts.subgroup.is_none_or(|size| self.lanes > size))
    }
}
