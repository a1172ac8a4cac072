//! Lowers ops to dispatches: chooses shader, constants and grid. Pure functions of an op's shapes and the device's [`Facts`],
//! so that every kernel can be built and validated without a device.

mod attention;
mod choice;
mod coop;
mod dense;
mod experts;
mod gemv;
mod latent;
mod scan;

use selkie_core::backend::Handle;
use selkie_core::error::{Error, Result};
use selkie_core::ops::{Access, Act, Op, RowBlock};
use selkie_core::tensor::{DType, Tensor};

use crate::kernel::{Builder, Kernel, shader};

pub use gemv::ROUNDED;

/// Storage buffers that a dispatch may bind within WebGPU's default limits.
const MOST_BINDINGS: usize = 8;

/// The properties of a device that lowering depends on.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Largest storage binding in bytes.
    pub max_binding: u64,
    /// Threads per subgroup, if subgroups can be used and have one size.
    pub subgroup: Option<usize>,
    /// Cooperative matrices of 16 x 16 with f16 factors and f32 sums in subgroups of 32, and enough workgroup memory.
    pub cooperative: bool,
    /// All products with cooperative matrices are [precise](selkie_core::ops::Matmul::precise).
    pub precise: bool,
    /// Large products of few rows with coded weights are those of integers ([`ROUNDED`]), of activations rounded to 8 bits.
    pub dots: bool,
    /// The device is software, where every barrier costs time per thread and a pipeline takes seconds to compile: use few
    /// shaders, without barriers, even if they do more work.
    pub few_barriers: bool,
}

/// The dispatches of `op`, in order.
///
/// # Errors
/// [`Error::Unsupported`] for shapes that no shader supports.
pub fn lower<B: Handle>(op: &Op<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let kernels = match op {
        Op::Embed(op) => dense::embed(op, facts)?,
        Op::RmsNorm(op) => vec![dense::rms_norm(op, None, facts)],
        Op::Matmul(op) => dense::matmul(op, facts)?,
        Op::Activation(op) => dense::activation(op, facts)?,
        Op::Round(op) => vec![dense::round(op, facts)],
        Op::Gather(op) => dense::gather(op, facts)?,
        Op::RopeKv(op) => attention::rope_kv(op, facts)?,
        Op::Attention(op) => attention::attention(op, facts)?,
        Op::Conv1d(op) => scan::conv1d(op, facts)?,
        Op::SelectiveScan(op) => scan::selective_scan(op, facts)?,
        Op::GatedDelta(op) => scan::gated_delta(op, facts)?,
        Op::HeadMatmul(op) => latent::head_matmul(op, facts)?,
        Op::LatentKv(op) => latent::latent_kv(op, facts)?,
        Op::LatentAttention(op) => latent::latent_attention(op, facts)?,
        Op::Route(op) => choice::route(op, facts)?,
        Op::Adjust(op) => vec![choice::adjust(op, facts)],
        Op::Sample(op) => choice::sample(op, facts),
        Op::Logprobs(op) => choice::logprobs(op, facts),
        Op::ExpertMatmul(op) => experts::expert_matmul(op, facts)?,
        Op::AllReduce(_) | Op::AllGather(_) | Op::RankNorm(_) => {
            let why = "there are no shaders for it; --backend cpu has it";
            return Err(Error::Unsupported { what: format!("{} on wgpu", op.name()), why: why.into() });
        }
    };
    for k in &kernels {
        if let Some((_, _, bytes)) = k.buffers.iter().find(|(_, _, bytes)| *bytes > facts.max_binding) {
            let why = format!("it needs {bytes} bytes of a buffer, but a binding holds {}", facts.max_binding);
            return Err(Error::Unsupported { what: format!("{} on this device", k.op), why });
        }
    }
    Ok(kernels.into_iter().filter(|k| k.grid.iter().all(|n| *n > 0)).collect())
}

/// Scratch bytes that `op` needs at most, in this step or a smaller one: fewer rows can need more.
pub fn scratch<B: Handle>(op: &Op<B>, facts: &Facts) -> u64 {
    // An op that cannot be lowered fails later, when it is recorded.
    let kernels = lower(op, facts).unwrap_or_default();
    let own = kernels.iter().map(Kernel::scratch).max().unwrap_or(0);
    match op {
        Op::Matmul(op) => own.max(dense::matmul_scratch(op, facts)),
        Op::Attention(op) => own.max(attention::scratch(op, facts)),
        Op::ExpertMatmul(op) => own.max(experts::scratch(op, facts)),
        Op::SelectiveScan(op) => own.max(scan::scan_scratch(op, facts)),
        Op::GatedDelta(op) => own.max(scan::delta_scratch(op, facts)),
        _ => own,
    }
}

/// The dispatches of a step. Consecutive ops are fused into one dispatch where a shader supports it: a dependent dispatch
/// costs a GPU about 2 µs, and a decode step has hundreds.
///
/// # Errors
/// Those of [`lower`].
pub fn lower_step<B: Handle>(mut ops: &[Op<B>], facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let mut kernels = vec![];
    while let Some(op) = ops.first() {
        let (count, some) = match gemv::fused(ops, facts)? {
            Some(fused) => fused,
            None => (1, lower(op, facts)?),
        };
        kernels.extend(some);
        ops = &ops[count..];
    }
    Ok(kernels)
}

/// A dispatch that reads all of `src` (`[n] u32`, n a multiple of 16384) and writes nothing to `out`.
pub fn read_probe<B: Handle>(src: &Tensor<B>, out: &Tensor<B>, max_binding: u64) -> Kernel<B> {
    let kernel = Builder::new(shader!("read_probe")).vectors("src", Access::Read, src).view("out", Access::Write, out);
    kernel.build("read_probe", src.len() / 16384, max_binding)
}

/// The number of an activation in the shaders.
fn act(act: Act) -> usize {
    match act {
        Act::Identity => 0,
        Act::Silu => 1,
        Act::Sigmoid => 2,
        Act::Relu2 => 3,
        Act::Gelu => 4,
    }
}

fn demand(ok: bool, op: &str, why: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::Unsupported { what: format!("{op} on the wgpu backend"), why: why() }) }
}

/// Requires a multiple of 4: shaders access four elements at a time.
fn quads(op: &str, name: &str, n: usize) -> Result<()> {
    demand(n.is_multiple_of(4), op, || format!("{name} is {n}, not a multiple of 4"))
}

/// Whether rows of a weight can be read eight elements at a time. Fails if a row does not start at a word boundary.
fn eights<B: Handle>(op: &str, block: &RowBlock<B>, k: usize) -> Result<bool> {
    quads(op, "the inner dimension", k)?;
    let halves = matches!(block.w.dtype, DType::Bf16 | DType::F16);
    let odd = halves && !(block.w.offset.is_multiple_of(2) && block.w.row_stride.is_multiple_of(2));
    demand(!odd, op, || "a row of a 16-bit weight starts inside a word".into())?;
    Ok(k.is_multiple_of(8))
}

/// Threads that share a row of `k` weights, each reading `step` elements at a time: a power of two.
fn lanes(k: usize, step: usize) -> usize {
    k.div_ceil(step).next_power_of_two().clamp(8, 256)
}
