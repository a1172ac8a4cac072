//! Qwen3-Next: three Gated DeltaNet layers to one of gated attention, each followed by experts (or a SwiGLU MLP). All norms
//! over the model width and over heads are zero-centred.

use super::{
    Architecture, Branch, Head, Norm, NormKind, SubLayer, llama,
    readers::{conv_taps, heads_or, layer_types, no_such_layer, require_act, require_bool, require_no_window, top_k},
};
use crate::{
    Result,
    blocks::{
        attention::{self, QkNorm},
        gated_delta::{self, Projections},
        mlp, moe,
    },
    config::{Config, LayerType},
    ops::{Act, Router},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = Norm { name: "norm.weight".into(), eps, kind: NormKind::ZeroCentred };
    let mut a = Architecture::start(c, "qwen3_next", 32_768, false, norm)?;
    common(c)?;
    let dense = c.opt_usizes("mlp_only_layers")?.unwrap_or_default();
    let sparse_step = c.usize_or("decoder_sparse_step", 1)?;
    let experts = c.count_or("num_experts", 512)?;
    for (i, ty) in types(c)?.into_iter().enumerate() {
        let prefix = format!("layers.{i}.");
        let feed_forward = if experts > 0 && !dense.contains(&i) && (i + 1).is_multiple_of(sparse_step) {
            moe(c, a.width, (experts, 10), c.bool_or("norm_topk_prob", true)?, &prefix)?
        } else {
            vec![mlp(c, a.width, &prefix)?]
        };
        a.layers.push(layer(&prefix, eps, mixer(c, &prefix, ty, a.width, Projections::PerKeyHead)?, feed_forward));
    }
    // Its layer is one more, after those of the trunk.
    let feed_forward = match experts {
        0 => vec![mlp(c, a.width, HEAD)?],
        _ => moe(c, a.width, (experts, 10), c.bool_or("norm_topk_prob", true)?, HEAD)?,
    };
    a.head = head(c, a.width, feed_forward)?;
    Ok(a)
}

/// Refuses options that neither this family nor Qwen3.5 supports.
pub(super) fn common(c: &Config) -> Result<()> {
    require_act(c, "hidden_act", "silu")?;
    match c.str_or("output_gate_type", "silu")? {
        "silu" | "swish" => {}
        other => return Err(c.bad("output_gate_type", format_args!("{other:?} is not supported, only \"silu\""))),
    }
    require_bool(c, "attn_output_gate", true)?;
    require_no_window(c)
}

/// The dense feed-forward part of a layer.
pub(super) fn mlp(c: &Config, width: usize, prefix: &str) -> Result<Branch> {
    Ok(Branch::new(format!("{prefix}mlp."), llama::mlp(width, c.usize("intermediate_size")?, false)))
}

/// Every fourth layer attends, or every `full_attention_interval`th, unless they are listed.
pub(super) fn types(c: &Config) -> Result<Vec<LayerType>> {
    let interval = c.usize_or("full_attention_interval", 4)?;
    layer_types(c, |i| if (i + 1).is_multiple_of(interval) { LayerType::Attention } else { LayerType::Recurrent })
}

/// The token mixer of a layer.
pub(super) fn mixer(
    c: &Config,
    prefix: &str,
    layer: LayerType,
    width: usize,
    projections: Projections,
) -> Result<Branch> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    Ok(match layer {
        LayerType::Recurrent => Branch::new(format!("{prefix}linear_attn."), delta(c, width, eps, projections)?),
        LayerType::Attention => Branch::new(format!("{prefix}self_attn."), attention(c, width, eps)?),
        other => return Err(no_such_layer(c, other)),
    })
}

/// A layer of a token mixer and a feed-forward part, with zero-centred norms under the usual names.
pub(super) fn layer(prefix: &str, eps: f32, mixer: Branch, feed_forward: Vec<Branch>) -> Vec<SubLayer> {
    let norm = |leaf: &str| Norm { name: format!("{prefix}{leaf}.weight"), eps, kind: NormKind::ZeroCentred };
    vec![
        SubLayer::pre_norm(norm("input_layernorm"), vec![mixer]),
        SubLayer::pre_norm(norm("post_attention_layernorm"), feed_forward),
    ]
}

/// Where the layer of the head is, outside of the model's prefix.
pub(super) const HEAD: &str = "/mtp.layers.0.";

/// The head for drafts: one layer with attention, of the sizes of the trunk's. None where the configuration has another number of
/// layers, or embeddings of their own.
pub(super) fn head(c: &Config, width: usize, feed_forward: Vec<Branch>) -> Result<Option<Head>> {
    if c.usize_or("mtp_num_hidden_layers|num_nextn_predict_layers", 1).ok() != Some(1)
        || c.bool_or("mtp_use_dedicated_embeddings", false).unwrap_or(true)
    {
        return Ok(None);
    }
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let plan = attention::Plan { first: 1, ..attention(c, width, eps)? };
    let norm = |leaf: &str| Norm { name: format!("/mtp.{leaf}.weight"), eps, kind: NormKind::ZeroCentred };
    Ok(Some(Head {
        embedding_norm: norm("pre_fc_norm_embedding"),
        hidden_norm: norm("pre_fc_norm_hidden"),
        projection: "/mtp.fc.weight".into(),
        steps: layer(HEAD, eps, Branch::new(format!("{HEAD}self_attn."), plan), feed_forward),
        norm: norm("norm"),
    }))
}

fn delta(c: &Config, width: usize, eps: f32, projections: Projections) -> Result<gated_delta::Plan> {
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
        beta_scale: 1.0,
        projections,
    })
}

fn attention(c: &Config, width: usize, eps: f32) -> Result<attention::Plan> {
    let heads = heads_or(c, 256)?;
    Ok(attention::Plan {
        gated: true,
        bias: c.bool_or("attention_bias", false)?,
        qk_norm: Some(QkNorm::per_head(NormKind::ZeroCentred, eps)),
        rope: Some(Rope::read_or(c, heads.head_dim, 1e4, 0.25)?),
        ..attention::Plan::new(width, heads)
    })
}

/// The experts, and the shared one with its gate per token. `top` are the experts and the default number of them per
/// token.
pub(super) fn moe(
    c: &Config,
    width: usize,
    (experts, top): (usize, usize),
    renorm: bool,
    layer: &str,
) -> Result<Vec<Branch>> {
    let prefix = format!("{layer}mlp.");
    let plan = moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_tok", top, experts)?,
        inner: c.usize_or("moe_intermediate_size", 512)?,
        router: "gate",
        router_bias: None,
        rule: Router::SoftmaxTopK { renorm },
        input: moe::Experts { stacked: "experts.gate_up_proj", each: &["experts.{}.gate_proj", "experts.{}.up_proj"] },
        output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.down_proj"] },
        gated: true,
        act: Act::Silu,
        latent: None,
    };
    let mut branches = vec![Branch::new(prefix.clone(), plan)];
    let inner = c.count_or("shared_expert_intermediate_size", 512)?;
    if inner > 0 {
        // The gate's name is next to the expert's, not below it.
        branches.push(Branch::new(format!("{prefix}shared_expert"), shared(width, inner)));
    }
    Ok(branches)
}

fn shared(width: usize, inner: usize) -> mlp::Plan {
    mlp::Plan {
        input: mlp::Input::Separate { gate: ".gate_proj", up: ".up_proj" },
        output: ".down_proj",
        row_gate: Some("_gate"),
        ..llama::mlp(width, inner, false)
    }
}
