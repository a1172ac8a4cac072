//! Embedding, norms, linear layers, pointwise activations, picking rows.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Activation, Embed, Gather, Matmul, Op, RmsNorm, RowBlock};
use selkie_core::tensor::Tensor;

use super::{Facts, act, eights, lanes, quads};
use crate::kernel::{Builder, Kernel, shader};

/// Most rows of a product that take the matrix-vector shader.
const FEW_ROWS: usize = 8;

pub(super) fn embed<B: Handle>(op: &Embed<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let kernel = |block: &RowBlock<B>| {
        eights("embed", block, op.table.k)?;
        Ok(Builder::new(shader!("embed"))
            .param("first", block.col)
            .param("count", block.w.rows())
            .param("width", op.table.k)
            .float("scale", op.scale)
            .step(&op.step)
            .view("last", Read, &op.last)
            .vectors("table", Read, &block.w)
            .vectors("out", Write, &op.out)
            .build("embed", op.step.bucket.tokens, facts.max_binding))
    };
    op.table.blocks.iter().map(kernel).collect()
}

pub(super) fn gather<B: Handle>(op: &Gather<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    quads("gather", "the width", op.x.row_len())?;
    Ok(vec![
        Builder::new(shader!("gather"))
            .param("width", op.x.row_len())
            .step(&op.step)
            .vectors("x", Read, &op.x)
            .vectors("out", Write, &op.out)
            .build("gather", op.step.bucket.outputs, facts.max_binding),
    ])
}

pub(super) fn rms_norm<B: Handle>(op: &RmsNorm<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let len = op.x.row_len() / op.groups;
    quads("rms_norm", "a group", len)?;
    let before = op.gate.as_ref().is_some_and(|g| g.before);
    let threads = (len / 4).next_power_of_two().clamp(32, 256);
    let mut b = Builder::new(shader!("rms_norm"))
        .constant("WG", threads)
        .constant("HELD", len.div_ceil(4 * threads))
        .subgroup(facts.subgroup, threads)
        .flag("ADD", op.add.is_some())
        .flag("GATE", op.gate.is_some())
        .flag("GATE_BEFORE", before)
        .flag("GATE_AFTER", op.gate.is_some() && !before)
        .constant("ACT", op.gate.as_ref().map_or(0, |g| act(g.act)))
        .param("len", len)
        .param("parts", op.groups)
        .param("shared_weight", usize::from(op.weight.len() == len))
        .float("eps", op.eps)
        .float("add_scale", op.add.as_ref().map_or(0.0, |(_, scale)| *scale))
        .vectors("x", if op.add.is_some() { InPlace } else { Read }, &op.x)
        .vectors("weight", Read, &op.weight)
        .vectors("out", Write, &op.out);
    if let Some((add, _)) = &op.add {
        b = b.vectors("add", Read, add);
    }
    if let Some(gate) = &op.gate {
        b = b.vectors("z", Read, &gate.z);
    }
    Ok(vec![b.build("rms_norm", op.x.rows() * op.groups, facts.max_binding)])
}

pub(super) fn activation<B: Handle>(op: &Activation<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let width = op.out.row_len();
    quads("activation", "the width", width)?;
    let mut b = Builder::new(shader!("activation"))
        .constant("ACT", act(op.act))
        .flag("UP", op.up.is_some())
        .flag("ROW_GATE", op.row_gate.is_some())
        .param("tokens", op.out.rows())
        .param("width", width)
        .vectors("gate", Read, &op.gate)
        .vectors("out", Write, &op.out);
    if let Some(up) = &op.up {
        b = b.vectors("up", Read, up);
    }
    if let Some(row_gate) = &op.row_gate {
        b = b.view("row_gate", Read, row_gate);
    }
    Ok(vec![b.build("activation", (op.out.len() / 4).div_ceil(256), facts.max_binding)])
}

pub(super) fn matmul<B: Handle>(op: &Matmul<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    op.w.blocks.iter().map(|block| product(op, block, &Fused::default(), facts)).collect()
}

/// Whether two views are of the same elements.
fn same<B: Handle>(a: &Tensor<B>, b: &Tensor<B>) -> bool {
    let place = |t: &Tensor<B>| (t.buf.id(), t.dtype, t.offset, t.row_stride);
    place(a) == place(b) && a.dims() == b.dims()
}

/// What a product of few rows does beside the product.
struct Fused<'a, B> {
    /// The norm that makes its x.
    norm: Option<&'a RmsNorm<B>>,
    /// The activation of what it makes.
    activation: Option<&'a Activation<B>>,
}

impl<B> Default for Fused<'_, B> {
    fn default() -> Self {
        Self { norm: None, activation: None }
    }
}

/// The first ops of `ops` in one dispatch, and how many they are: a product of few rows with the norm before it, the
/// activation after it, or both. What lies between them is written as if they were alone.
pub(super) fn fused<B: Handle>(ops: &[Op<B>], facts: &Facts) -> Result<Option<(usize, Kernel<B>)>> {
    let (norm, rest) = match ops {
        [Op::RmsNorm(norm), rest @ ..] => (Some(norm), rest),
        _ => (None, ops),
    };
    let Some((Op::Matmul(op), rest)) = rest.split_first() else { return Ok(None) };
    let [block] = op.w.blocks.as_slice() else { return Ok(None) };
    if op.x.rows() > FEW_ROWS || !op.w.k.is_multiple_of(8) {
        return Ok(None);
    }
    let norm = norm.filter(|norm| {
        let reads = [Some(&norm.x), Some(&norm.weight), norm.gate.as_ref().map(|g| &g.z)];
        let whole = norm.groups == 1 && norm.add.is_none() && norm.gate.as_ref().is_none_or(|g| g.before);
        // Other workgroups still read what the first ones write.
        let apart = reads.into_iter().flatten().all(|t| t.buf.id() != op.out.buf.id() && t.buf.id() != op.x.buf.id());
        whole && apart && same(&norm.out, &op.x) && op.x.row_stride.is_multiple_of(4) && op.x.offset.is_multiple_of(4)
    });
    let activation = match rest.first() {
        Some(Op::Activation(act)) => Some(act).filter(|act| {
            let inner = act.out.row_len();
            let (m, n) = (op.x.rows(), op.w.n);
            let sides = match &act.up {
                None => n == inner && same(&act.gate, &op.out),
                Some(up) if n == 2 * inner => {
                    same(&act.gate, &op.out.cols(0, inner)) && same(up, &op.out.cols(inner, inner))
                }
                Some(_) => false,
            };
            let reads = [Some(&op.x), norm.map(|n| &n.x)];
            let apart = reads.into_iter().flatten().all(|t| t.buf.id() != act.out.buf.id());
            let apart = apart && act.out.buf.id() != op.out.buf.id();
            sides && apart && act.row_gate.is_none() && !op.accumulate && act.out.rows() == m && block.col == 0
        }),
        _ => None,
    };
    // A norm that does not fit stays in front; the product is looked at again after it.
    if ops.len() == rest.len() + 2 && norm.is_none() || norm.is_none() && activation.is_none() {
        return Ok(None);
    }
    let count = 1 + usize::from(norm.is_some()) + usize::from(activation.is_some());
    Ok(Some((count, product(op, block, &Fused { norm, activation }, facts)?)))
}

fn product<B: Handle>(op: &Matmul<B>, block: &RowBlock<B>, fused: &Fused<'_, B>, facts: &Facts) -> Result<Kernel<B>> {
    let (m, n, k) = (op.x.rows(), block.w.rows(), op.w.k);
    let eight = eights("matmul", block, k)?;
    let few = m <= FEW_ROWS;
    let sides = if fused.activation.is_some_and(|act| act.up.is_some()) { 2 } else { 1 };
    let mut b = Builder::new(if few { shader!("matmul_vec") } else { shader!("matmul_tile") })
        .flag("BIAS", op.bias.is_some())
        .flag("ACCUMULATE", op.accumulate)
        .param("m", m)
        .param("n", n / sides)
        .param("k", k)
        .param("col", block.col)
        .float("scale", op.scale)
        .vectors("x", Read, fused.norm.map_or(&op.x, |norm| &norm.x))
        .vectors("w", Read, &block.w)
        .view("out", if op.accumulate { InPlace } else { Write }, &op.out);
    if let Some(bias) = &op.bias {
        b = b.view("bias", Read, bias);
    }
    let groups = if few {
        let plan = Gemv::pick(k, if eight { 8 } else { 4 });
        b = plan.constants(b, facts, k).constant("MR", m).flag("EIGHT", eight).constant("SIDES", sides);
        b = b.flag("NORM", fused.norm.is_some()).flag("ACTIVATE", fused.activation.is_some());
        if let Some(norm) = fused.norm {
            b = b.vectors("norm", Read, &norm.weight).vectors("u", Write, &norm.out).float("eps", norm.eps);
            b = b.flag("GATE", norm.gate.is_some());
            if let Some(gate) = &norm.gate {
                b = b.constant("GATE_ACT", act(gate.act)).vectors("z", Read, &gate.z);
            }
        }
        if let Some(activation) = fused.activation {
            b = b.constant("ACT", act(activation.act)).view("mid", Write, &activation.out);
        }
        n.div_ceil(plan.threads / plan.lanes * plan.rows)
    } else {
        let tile = m.next_power_of_two().clamp(16, 64);
        let m_tiles = m.div_ceil(tile);
        b = b.constant("BM", tile).param("m_tiles", m_tiles);
        m_tiles * n.div_ceil(64)
    };
    Ok(b.build("matmul", groups, facts.max_binding))
}

/// How few rows are multiplied: see `matmul_vec.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gemv {
    /// Threads of a workgroup.
    threads: usize,
    /// Threads that share weight rows.
    lanes: usize,
    /// Weight rows that they share.
    rows: usize,
    /// Loads of a row that a thread has in flight.
    deep: usize,
}

impl Gemv {
    /// `step` elements are taken at a time.
    fn pick(k: usize, step: usize) -> Self {
        let lanes = lanes(k, step);
        Self { threads: 256, lanes, rows: 2, deep: (k / (step * lanes)).clamp(1, 4) }
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
