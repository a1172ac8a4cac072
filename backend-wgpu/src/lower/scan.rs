//! The stateful ops: convolution, selective scan, gated delta rule.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Conv1d, GatedDelta, ScanForm, SelectiveScan};

use super::{Facts, act, demand, quads};
use crate::kernel::{Builder, Kernel, Shader, shader};

/// Most tokens per row for which a convolution walks them one after the other.
const FEW_TOKENS: usize = 4;

pub(super) fn conv1d<B: Handle>(op: &Conv1d<B>, facts: &Facts) -> Vec<Kernel<B>> {
    let b = &op.step.bucket;
    let channels = op.x.row_len();
    let base = |shader: Shader| {
        Builder::new(shader)
            .constant("TAPS", op.weight.row_len() - 1)
            .constant("ACT", act(op.act))
            .param("channels", channels)
            .param("chunks", b.chunks)
            .step(&op.step)
            .view("x", Read, &op.x)
            .view("weight", Read, &op.weight)
    };
    let groups = |entries: usize| (entries * channels).div_ceil(64);
    if b.tokens <= FEW_TOKENS * b.rows {
        let walk = base(shader!("conv1d")).view("pool", InPlace, &op.pool).view("out", Write, &op.out);
        return vec![walk.build("conv1d", groups(b.rows), facts.max_binding)];
    }
    let tokens = base(shader!("conv1d_tokens")).view("pool", Read, &op.pool).view("out", Write, &op.out);
    let states = base(shader!("conv1d_states")).view("pool", InPlace, &op.pool);
    vec![
        tokens.build("conv1d", groups(b.tokens), facts.max_binding),
        states.build("conv1d", groups(b.chunks), facts.max_binding),
    ]
}

pub(super) fn selective_scan<B: Handle>(op: &SelectiveScan<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let &[_, heads, p, n] = op.pool.dims() else { unreachable!("checked: four dims") };
    quads("selective_scan", "the state size", n)?;
    let quads = n / 4;
    // A power of two that divides the quads of a row of the state.
    let lanes = (quads & quads.wrapping_neg()).min(facts.subgroup.map_or(16, |size| size.min(16)));
    let parts = (heads * p).div_ceil(256 / lanes);
    demand(quads / lanes <= 64, "selective_scan", || format!("a state size of {n}"))?;
    Ok(vec![
        Builder::new(shader!("selective_scan"))
            .constant("HEAD_DIM", p)
            .constant("STATE", n)
            .constant("LANES", lanes)
            .constant("VECTORS", quads / lanes)
            .subgroup(facts.subgroup, lanes)
            .flag("PER_CHANNEL", op.form == ScanForm::PerChannel)
            .param("parts", parts)
            .param("state_rows", heads * p)
            .param("first_head", op.first_head)
            .param("heads_per_group", op.heads_per_group)
            .float("dt_low", op.dt_limit.0)
            .float("dt_high", op.dt_limit.1.min(f32::MAX))
            .step(&op.step)
            .view("x", Read, &op.x)
            .vectors("b", Read, &op.b)
            .vectors("c", Read, &op.c)
            .view("dt", Read, &op.dt)
            .view("par", Read, &op.par)
            .vectors("pool", InPlace, &op.pool)
            .view("y", Write, &op.y)
            .build("selective_scan", op.step.bucket.rows * parts, facts.max_binding),
    ])
}

pub(super) fn gated_delta<B: Handle>(op: &GatedDelta<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let &[_, heads, dk, dv] = op.pool.dims() else { unreachable!("checked: four dims") };
    // 4 tokens' keys and queries lie in workgroup memory.
    demand(dk <= 256, "gated_delta", || format!("a key dim of {dk}; at most 256 is supported"))?;
    let parts = dv.div_ceil(32);
    Ok(vec![
        Builder::new(shader!("gated_delta"))
            .constant("KEY", dk)
            .constant("VALUE", dv)
            .param("heads", heads)
            .param("parts", parts)
            .param("first_head", op.first_head)
            .param("heads_per_key", op.heads_per_key)
            .float("query_scale", 1.0 / (dk as f32).sqrt())
            .float("beta_scale", op.beta_scale)
            .step(&op.step)
            .view("q", Read, &op.q)
            .view("k", Read, &op.k)
            .view("v", Read, &op.v)
            .view("a", Read, &op.a)
            .view("b", Read, &op.b)
            .view("par", Read, &op.par)
            .view("pool", InPlace, &op.pool)
            .view("out", Write, &op.out)
            .build("gated_delta", op.step.bucket.rows * heads * parts, facts.max_binding),
    ])
}
