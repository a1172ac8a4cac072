//! Qwen3-Next: three Gated DeltaNet layers to one of gated attention, each followed by experts (or a SwiGLU MLP). All norms
//! over the model width and over heads are zero-centred.

use super::{
    Architecture, Norm, NormKind, SubLayer,
    architecture::{conv_taps, heads_or, require_act, top_k},
};
use crate::{
    Result,
    blocks::{Plan, attention, gated_delta, mlp, moe},
    config::{Config, LayerType},
    ops::{Act, Router},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::ZeroCentred };
    let mut a = Architecture::start(c, "qwen3_next", 32_768, false, norm("norm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    let types = layer_types(c)?;
    let dense = c.opt_usizes("mlp_only_layers")?.unwrap_or_default();
    let sparse_step = c.usize_or("decoder_sparse_step", 1)?;
    let experts = c.count_or("num_experts", 512)?;
    for (i, layer) in types.into_iter().enumerate() {
        let prefix = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer: (String, Plan) = match layer {
            LayerType::Recurrent => (prefix("linear_attn."), delta(c, a.width, eps)?.into()),
            LayerType::Attention => (prefix("self_attn."), attention(c, a.width, eps)?.into()),
            other => return Err(c.bad("layer_types", format_args!("{other:?} is no layer of this family"))),
        };
        let feed_forward = if experts > 0 && !dense.contains(&i) && (i + 1).is_multiple_of(sparse_step) {
            moe(c, a.width, experts, prefix("mlp."))?
        } else {
            vec![(prefix("mlp."), swiglu(a.width, c.usize("intermediate_size")?, None).into())]
        };
        a.layers.push(vec![
            SubLayer { norm: norm(prefix("input_layernorm.weight")), mixers: vec![mixer], residual: 1.0 },
            SubLayer { norm: norm(prefix("post_attention_layernorm.weight")), mixers: feed_forward, residual: 1.0 },
        ]);
    }
    Ok(a)
}

fn layer_types(c: &Config) -> Result<Vec<LayerType>> {
    let count = c.layers("num_hidden_layers")?;
    match c.layer_types("layer_types|layers_block_type")? {
        Some(types) if types.len() != count => {
            Err(c.bad("layer_types", format_args!("{} entries for {count} layers", types.len())))
        }
        Some(types) => Ok(types),
        None => {
            let interval = c.usize_or("full_attention_interval", 4)?;
            let at =
                |i: usize| if (i + 1).is_multiple_of(interval) { LayerType::Attention } else { LayerType::Recurrent };
            Ok((0..count).map(at).collect())
        }
    }
}

fn delta(c: &Config, width: usize, eps: f32) -> Result<gated_delta::Plan> {
    let (key_heads, value_heads) = (c.usize_or("linear_num_key_heads", 16)?, c.usize_or("linear_num_value_heads", 32)?);
    c.divides(("linear_num_value_heads", value_heads), ("linear_num_key_heads", key_heads))?;
    let (key_dim, value_dim) = (c.usize_or("linear_key_head_dim", 128)?, c.usize_or("linear_value_head_dim", 128)?);
    c.width("linear_num_key_heads", &[key_heads, key_dim])?;
    c.width("linear_num_value_heads", &[value_heads, value_dim])?;
    Ok(gated_delta::Plan {
        width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel: conv_taps(c, "linear_conv_kernel_dim")?,
        eps,
        projections: gated_delta::Projections::PerKeyHead,
    })
}

fn attention(c: &Config, width: usize, eps: f32) -> Result<attention::Plan> {
    let heads = heads_or(c, 256)?;
    Ok(attention::Plan {
        width,
        heads,
        output: "o_proj",
        gated: true,
        bias: c.bool_or("attention_bias", false)?,
        qk_norm: Some((NormKind::ZeroCentred, eps)),
        rope: Some(Rope::read_or(c, heads.head_dim, 1e4, 0.25)?),
        scale: (heads.head_dim as f32).sqrt().recip(),
        window: None,
    })
}

fn swiglu(width: usize, inner: usize, row_gate: Option<&'static str>) -> mlp::Plan {
    mlp::Plan {
        width,
        inner,
        input: mlp::Input::Separate { gate: "gate_proj", up: "up_proj" },
        output: "down_proj",
        act: Act::Silu,
        bias: false,
        row_gate,
    }
}

/// The experts, and the shared one beside them with its gate per token.
fn moe(c: &Config, width: usize, experts: usize, prefix: String) -> Result<Vec<(String, Plan)>> {
    let plan = moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_tok", 10, experts)?,
        inner: c.usize_or("moe_intermediate_size", 512)?,
        router: "gate",
        router_bias: None,
        rule: Router::SoftmaxTopK { renorm: c.bool_or("norm_topk_prob", true)? },
        input: moe::Experts { stacked: "experts.gate_up_proj", each: &["experts.{}.gate_proj", "experts.{}.up_proj"] },
        output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.down_proj"] },
        gated: true,
        act: Act::Silu,
        latent: None,
    };
    let mut mixers: Vec<(String, Plan)> = vec![(prefix.clone(), plan.into())];
    let inner = c.count_or("shared_expert_intermediate_size", 512)?;
    if inner > 0 {
        // The gate is named beside the expert, not below it.
        mixers.push((format!("{prefix}shared_expert"), shared(width, inner).into()));
    }
    Ok(mixers)
}

fn shared(width: usize, inner: usize) -> mlp::Plan {
    mlp::Plan {
        input: mlp::Input::Separate { gate: ".gate_proj", up: ".up_proj" },
        output: ".down_proj",
        ..swiglu(width, inner, Some("_gate"))
    }
}
