//! Granite 4: Mamba-2 or attention, then experts beside a shared MLP (or the MLP alone), with fixed multipliers throughout.

use super::{
    Architecture, Norm, NormKind, SubLayer,
    architecture::{conv_taps, dt_limit, heads, mamba_groups, require_act, top_k},
};
use crate::{
    Result,
    blocks::{Plan, attention, mamba2, mlp, moe},
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
    let count = c.layers("num_hidden_layers")?;
    let types = match c.layer_types("layer_types|layers_block_type")? {
        Some(types) if types.len() != count => {
            return Err(c.bad("layer_types", format_args!("{} entries for {count} layers", types.len())));
        }
        Some(types) => types,
        None => vec![LayerType::Recurrent; count],
    };
    for (i, layer) in types.into_iter().enumerate() {
        let prefix = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer: (String, Plan) = match layer {
            LayerType::Recurrent => (prefix("mamba."), mamba(c, a.width, eps)?.into()),
            LayerType::Attention => (prefix("self_attn."), attention(c, a.width)?.into()),
            other => return Err(c.bad("layer_types", format_args!("{other:?} is no layer of this family"))),
        };
        let mut feed_forward: Vec<(String, Plan)> = Vec::new();
        if let Some(plan) = experts(c, a.width)? {
            feed_forward.push((prefix("block_sparse_moe."), plan.into()));
        }
        feed_forward.push((prefix("shared_mlp."), shared(c, a.width)?.into()));
        a.layers.push(vec![
            SubLayer { norm: norm(prefix("input_layernorm.weight")), mixers: vec![mixer], residual },
            SubLayer { norm: norm(prefix("post_attention_layernorm.weight")), mixers: feed_forward, residual },
        ]);
    }
    Ok(a)
}

fn mamba(c: &Config, width: usize, eps: f32) -> Result<mamba2::Plan> {
    let heads = c.usize_or("mamba_n_heads", 128)?;
    let head_dim = match c.value("mamba_d_head").and_then(|v| v.as_str()) {
        None if c.has("mamba_d_head") => c.usize("mamba_d_head")?,
        None | Some("auto") => {
            let inner = c.width("mamba_expand", &[c.usize_or("mamba_expand", 2)?, width])?;
            c.divides(("mamba_expand", inner), ("mamba_n_heads", heads))?;
            inner / heads
        }
        Some(other) => return Err(c.bad("mamba_d_head", format_args!("{other:?} is neither a number nor \"auto\""))),
    };
    let plan = mamba2::Plan {
        width,
        heads,
        head_dim,
        state: c.usize_or("mamba_d_state", 256)?,
        groups: c.usize_or("mamba_n_groups", 1)?,
        kernel: conv_taps(c, "mamba_d_conv")?,
        conv_bias: c.bool_or("mamba_conv_bias", true)?,
        bias: c.bool_or("mamba_proj_bias", false)?,
        eps,
        dt_limit: dt_limit(c)?,
    };
    mamba_groups(c, &plan, "mamba_n_heads", "mamba_n_groups")?;
    Ok(plan)
}

fn attention(c: &Config, width: usize) -> Result<attention::Plan> {
    let heads = heads(c)?;
    // Anything but exactly "rope" means no positions.
    let rope = match c.opt_str("position_embedding_type")? {
        Some("rope") => Some(Rope::read(c, heads.head_dim, 1e4)?),
        _ => None,
    };
    Ok(attention::Plan {
        width,
        heads,
        output: "o_proj",
        gated: false,
        bias: c.bool_or("attention_bias", false)?,
        qk_norm: None,
        rope,
        scale: c.f32_or("attention_multiplier", 1.0)?,
        window: None,
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
        row_gate: None,
    })
}
