//! Jamba: Mamba-1 with norms of B, C and the time step, attention without positions in one layer of a period, and SwiGLU or a
//! mixture of such experts.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer, llama,
    readers::{conv_taps, expanded, heads, require_act, require_bool, require_no_window, size_or_auto, top_k},
};
use crate::{
    Result,
    blocks::{
        attention,
        mamba1::{self, Norms},
        moe,
    },
    config::Config,
    ops::{Act, Router},
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "jamba", 262_144, false, norm("final_layernorm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    require_bool(c, "mamba_inner_layernorms", true)?;
    require_no_window(c)?;
    let attends = in_period(c, "attn_layer_period", 8, "attn_layer_offset", 4)?;
    let mixes = in_period(c, "expert_layer_period", 2, "expert_layer_offset", 1)?;
    let (mamba, attention) = (mamba(c, a.width, eps)?, attention::Plan::new(a.width, heads(c)?));
    let mlp = llama::mlp(a.width, c.usize("intermediate_size")?, false);
    let experts = experts(c, a.width)?;
    for i in 0..c.layers("num_hidden_layers")? {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer = match attends(i) {
            true => Branch::new(name("self_attn."), attention.clone()),
            false => Branch::new(name("mamba."), mamba.clone()),
        };
        let feed_forward = match experts.clone().filter(|_| mixes(i)) {
            Some(plan) => Branch::new(name("feed_forward."), plan),
            None => Branch::new(name("feed_forward."), mlp.clone()),
        };
        a.layers.push(vec![
            SubLayer::pre_norm(norm(name("input_layernorm.weight")), vec![mixer]),
            SubLayer::pre_norm(norm(name("pre_ff_layernorm.weight")), vec![feed_forward]),
        ]);
    }
    Ok(a)
}

/// Whether a layer is at the offset of its period.
fn in_period(c: &Config, key: &str, period: usize, offset_key: &str, offset: usize) -> Result<impl Fn(usize) -> bool> {
    let (period, offset) = (c.usize_or(key, period)?, c.count_or(offset_key, offset)?);
    if offset >= period {
        return Err(c.bad(offset_key, format_args!("{offset} is not less than `{key}`, {period}")));
    }
    Ok(move |i| i % period == offset)
}

fn mamba(c: &Config, width: usize, eps: f32) -> Result<mamba1::Plan> {
    Ok(mamba1::Plan {
        width,
        inner: expanded(c, "mamba_expand", width)?,
        state: c.usize_or("mamba_d_state", 16)?,
        rank: size_or_auto(c, "mamba_dt_rank", || Ok(width.div_ceil(16)))?,
        kernel: conv_taps(c, "mamba_d_conv")?,
        conv_bias: c.bool_or("mamba_conv_bias", true)?,
        bias: c.bool_or("mamba_proj_bias", false)?,
        norms: Norms::Stored(eps),
    })
}

/// Experts of the size of the dense layers; with one expert the layer is dense.
fn experts(c: &Config, width: usize) -> Result<Option<moe::Plan>> {
    let experts = c.usize_or("num_experts|num_local_experts", 16)?;
    if experts == 1 {
        return Ok(None);
    }
    Ok(Some(moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_tok", 2, experts)?,
        inner: c.usize("intermediate_size")?,
        router: "router",
        router_bias: None,
        rule: Router::SoftmaxTopK { renorm: false },
        input: moe::Experts { stacked: "experts.gate_up_proj", each: &["experts.{}.gate_proj", "experts.{}.up_proj"] },
        output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.down_proj"] },
        gated: true,
        act: Act::Silu,
        latent: None,
    }))
}
