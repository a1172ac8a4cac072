//! From an op to launches: pure functions of shapes, strides and bucket, tested without a GPU. Nothing here depends on
//! the integers of a step, so that a recorded step can be replayed with others.

mod attention;
mod codes;
mod codes_wgmma;
mod eight;
mod experts;
mod fused;
mod gemv;
mod grouped;
mod latent;
mod pick;
mod pointwise;
pub(crate) mod ranks;
mod sequence;
mod skinny;
mod state;

use selkie_core::{
    Error, Result,
    ops::{Act, Op},
    tensor::{DType, Tensor},
};

use crate::launch::{Address, Work, address};

pub use fused::{fused, may_fuse};
pub(crate) use pointwise::sample_spec;
pub use sequence::{Planned, Sequencer};

/// Facts about the device that plans depend on.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// Multiprocessors.
    pub sms: usize,
    /// Most shared memory of a block, in bytes.
    pub shared: usize,
    /// It copies in bulk between global and shared memory, and kernels may start early (compute capability 9.0 or later).
    pub bulk_copies: bool,
    /// It has warpgroup products (compute capability 9.0).
    pub wgmma: bool,
    /// cuBLASLt is there.
    pub blas: bool,
    /// It multiplies codes of 8-bit floats.
    pub eight: bool,
    /// Kernels that take only some shapes may be used.
    pub tuned: bool,
    /// Which of several ranks it is.
    pub rank: usize,
    /// Ranks that share a model.
    pub ranks: usize,
}

/// Addresses of the backend's own memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arena {
    /// The scratch memory; as large as [`scratch`] asks for.
    pub scratch: u64,
    /// A u32 for every multiprocessor, zero between kernels: blocks count on them.
    pub tickets: u64,
    /// The addresses of all ranks' areas, see `ranks.cuh`.
    pub areas: u64,
}

/// Effects of earlier ops of the same step on an op's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hazards {
    /// No earlier op of the step wrote what this one updates in place, so it may be read before `griddepcontrol.wait`.
    pub state_unwritten: bool,
    /// Of an expert product: the expert ids (and, without `combine`, x) were complete before the previous kernel launched, so
    /// they may be read before `griddepcontrol.wait`.
    pub inputs_complete: bool,
}

#[cfg(test)]
impl Device {
    /// An H200, but for `shared` KiB of shared memory a block.
    fn like_h200(shared: usize) -> Self {
        Self {
            sms: 132,
            shared: shared << 10,
            bulk_copies: true,
            wgmma: true,
            blas: true,
            eight: true,
            tuned: true,
            rank: 0,
            ranks: 1,
        }
    }
}

/// The launches of an op, in order.
///
/// # Errors
/// [`Error::Unsupported`] for a shape or an alignment that no kernel takes.
pub fn plan<B: Address>(op: &Op<B>, device: &Device, arena: &Arena, hazards: &Hazards) -> Result<Vec<Work>> {
    match op {
        Op::Embed(a) => pointwise::embed(a),
        Op::RmsNorm(a) => pointwise::rms_norm(a),
        Op::Matmul(a) => pick::matmul(a, device, arena, hazards),
        Op::Activation(a) => pointwise::activation(a),
        Op::RopeKv(a) => pointwise::rope_kv(a),
        Op::Round(a) => pointwise::round(a),
        Op::Attention(a) => attention::attention(a, device, arena),
        Op::Conv1d(a) => state::conv1d(a, hazards),
        Op::SelectiveScan(a) => state::selective_scan(a, device, hazards),
        Op::GatedDelta(a) => state::gated_delta(a, device, arena, hazards),
        Op::HeadMatmul(a) => latent::head_matmul(a, device),
        Op::LatentKv(a) => latent::latent_kv(a),
        Op::LatentAttention(a) => latent::latent_attention(a, device, arena),
        Op::AllReduce(a) => ranks::all_reduce(a, device, arena),
        Op::AllGather(a) => ranks::all_gather(a, device, arena),
        Op::RankNorm(a) => ranks::rank_norm(a, device, arena),
        Op::Route(a) => pointwise::route(a),
        Op::ExpertMatmul(a) => experts::expert_matmul(a, device, arena, hazards),
        Op::Gather(a) => pointwise::gather(a),
        Op::Adjust(a) => pointwise::adjust(a),
        Op::Sample(a) => pointwise::sample(a),
        Op::Logprobs(a) => pointwise::logprobs(a),
    }
}

/// Bytes of the scratch memory that [`plan`] uses for `op`.
pub fn scratch<B: Address>(op: &Op<B>, device: &Device) -> u64 {
    match op {
        Op::Matmul(a) => pick::scratch(a, device),
        Op::Attention(a) => attention::scratch(a, device),
        Op::LatentAttention(a) => latent::scratch(a, device),
        Op::ExpertMatmul(a) => grouped::scratch(a),
        Op::GatedDelta(a) => state::delta_scratch(a, device),
        _ => 0,
    }
}

/// Elements of the widest access (8, 4, 2 or 1) that `dim` columns of all of `tensors` allow: offsets and row strides are
/// multiples of it, and it is at most 16 bytes of the narrowest type.
fn vector<B: Address>(dim: usize, tensors: &[&Tensor<B>]) -> usize {
    let fits = |v: usize| {
        dim.is_multiple_of(v)
            && tensors.iter().all(|t| t.offset % v == 0 && (t.rows() <= 1 || t.row_stride % v == 0))
            && tensors.iter().any(|t| t.dtype.bytes() * v <= 16)
    };
    [8, 4, 2].into_iter().find(|v| fits(*v)).unwrap_or(1)
}

/// Bytes of a multiprocessor's shared memory that a kernel with large rings leaves free: blocks of the small kernels before it
/// run on the same multiprocessor while it already copies.
const SMEM_LEFT_FREE: usize = 20 << 10;

/// Whether two views are of the same elements, read as the same type.
fn same_view<B: Address>(a: &Tensor<B>, b: &Tensor<B>) -> bool {
    a.buf.id() == b.buf.id()
        && a.offset == b.offset
        && a.dims() == b.dims()
        && (a.rows() <= 1 || a.row_stride == b.row_stride)
        && a.dtype == b.dtype
}

/// An error unless every tensor can be read `n` elements at a time.
fn aligned<B: Address>(op: &str, n: usize, tensors: &[&Tensor<B>]) -> Result<()> {
    match tensors.iter().find(|t| t.offset % n != 0 || (t.rows() > 1 && t.row_stride % n != 0)) {
        None => Ok(()),
        Some(t) => Err(Error::Unsupported {
            what: format!("{op} over a view at element {} with row stride {}", t.offset, t.row_stride),
            why: format!("the CUDA kernels take multiples of {n}"),
        }),
    }
}

/// An error unless `n`, a dim called `what`, is a multiple of 4.
fn fours(op: &str, what: &str, n: usize) -> Result<()> {
    if n.is_multiple_of(4) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{op} with {what} {n}"),
        why: "the CUDA kernels take multiples of 4; --backend cpu takes every size".into(),
    })
}

/// Whether all rows of bf16 tensors can be read 16 bytes at a time.
fn wide<B: Address>(tensors: &[&Tensor<B>]) -> bool {
    tensors.iter().all(|t| t.dtype == DType::Bf16 && address(t) % 16 == 0 && (t.rows() <= 1 || t.row_stride % 8 == 0))
}

/// The number of an activation in `common.cuh`.
fn act(a: Act) -> usize {
    match a {
        Act::Identity => 0,
        Act::Silu => 1,
        Act::Sigmoid => 2,
        Act::Relu2 => 3,
        Act::Gelu => 4,
    }
}
