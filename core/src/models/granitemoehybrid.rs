//! Granite 4: Mamba-2 or attention, then experts and a shared MLP (or the MLP alone), with fixed multipliers
//! throughout.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer,
    readers::{expanded, heads, layer_types, mamba2, no_such_layer, require_act, top_k},
};
use crate::{
    Result,
    blocks::{Plan, attention, mlp, moe},
    config::{Config, LayerType},
    ops::{Act, Router},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "granitemoehybrid", 2048, false, norm("norm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    a.embedding_scale = c.f32_or("embedding_multiplier", 1.0)?;
    let divisor = c.f32_or("logits_scaling", 1.0)?;
    if divisor == 0.0 {
        return Err(c.bad("logits_scaling", "logits cannot be divided by 0"));
    }
    a.logits_scale = divisor.recip();
    let residual = c.f32_or("residual_multiplier", 1.0)?;
    for (i, layer) in layer_types(c, |_| LayerType::Recurrent)?.into_iter().enumerate() {
        let prefix = |leaf: &str| format!("layers.{i}.{leaf}");
        let branch = |leaf: &str, plan: Plan| Branch::new(prefix(leaf), plan).scaled(residual);
        let mixer = match layer {
            LayerType::Recurrent => {
                branch("mamba.", mamba2(c, a.width, expanded(c, "mamba_expand", a.width)?, eps)?.into())
            }
            LayerType::Attention => branch("self_attn.", attention(c, a.width)?.into()),
            other => return Err(no_such_layer(c, other)),
        };
        let experts = experts(c, a.width)?.map(|plan| branch("block_sparse_moe.", plan.into()));
        let shared = branch("shared_mlp.", shared(c, a.width)?.into());
        a.layers.push(vec![
            SubLayer::pre_norm(norm(prefix("input_layernorm.weight")), vec![mixer]),
            SubLayer::pre_norm(
                norm(prefix("post_attention_layernorm.weight")),
                experts.into_iter().chain([shared]).collect(),
            ),
        ]);
    }
    Ok(a)
}

fn attention(c: &Config, width: usize) -> Result<attention::Plan> {
    let heads = heads(c)?;
    // Anything but exactly "rope" means no positions.
    let rope = match c.opt_str("position_embedding_type")? {
        Some("rope") => Some(Rope::read(c, heads.head_dim, 1e4)?),
        _ => None,
    };
    Ok(attention::Plan {
        bias: c.bool_or("attention_bias", false)?,
        rope,
        scale: c.f32_or("attention_multiplier", 1.0)?,
        ..attention::Plan::new(width, heads)
    })
}

fn experts(c: &Config, width: usize) -> Result<Option<moe::Plan>> {
    let experts = c.count_or("num_local_experts", 8)?;
    if experts == 0 {
        return Ok(None);
    }
    Ok(Some(moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_tok", 2, experts)?,
        inner: c.usize("intermediate_size")?,
        router: "router.layer",
        router_bias: None,
        rule: Router::TopKSoftmax,
        input: moe::Experts { stacked: "input_linear", each: &[] },
        output: moe::Experts { stacked: "output_linear", each: &[] },
        gated: true,
        act: Act::Silu,
        latent: None,
    }))
}

fn shared(c: &Config, width: usize) -> Result<mlp::Plan> {
    Ok(mlp::Plan {
        width,
        inner: c.usize_or("shared_intermediate_size", 1024)?,
        input: mlp::Input::Fused("input_linear"),
        output: "output_linear",
        act: Act::Silu,
        bias: false,
        gate_scale: 1.0,
        row_gate: None,
        adapter: None,
    })
}
