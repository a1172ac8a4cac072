//! LFM2: gated short convolutions, attention with per-head norms in some layers, and SwiGLU. LFM2-MoE has experts
//! except in the first layers.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer,
    readers::{conv_taps_or, heads, layer_types, no_such_layer, require_bool, top_k},
};
use crate::{
    Result,
    blocks::{
        attention::{self, QkNorm},
        mlp, moe, short_conv,
    },
    config::{Config, LayerType},
    ops::{Act, Router},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    architecture(c, "lfm2", |c, width, _| Ok(Feed::Dense(mlp(width, inner(c)?))))
}

pub(super) fn read_moe(c: &Config) -> Result<Architecture> {
    let dense = c.count_or("num_dense_layers", 2)?;
    architecture(c, "lfm2_moe", |c, width, i| match i < dense {
        true => Ok(Feed::Dense(mlp(width, c.usize("intermediate_size")?))),
        false => Ok(Feed::Experts(experts(c, width)?)),
    })
}

enum Feed {
    Dense(mlp::Plan),
    Experts(moe::Plan),
}

fn architecture(
    c: &Config,
    family: &'static str,
    feed: impl Fn(&Config, usize, usize) -> Result<Feed>,
) -> Result<Architecture> {
    let eps = c.eps_or("norm_eps|block_norm_eps", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    // In spite of its name it is the norm after the last layer.
    let mut a = Architecture::start(c, family, 128_000, true, norm("embedding_norm.weight".into()))?;
    require_bool(c, "use_pos_enc", true)?;
    require_bool(c, "block_use_swiglu", true)?;
    for key in ["conv_dim", "conv_dim_out"] {
        if let Some(other) = c.opt_usize(key)?.filter(|n| *n != a.width) {
            return Err(c.bad(key, format_args!("{other} is not supported, only the width of the model, {}", a.width)));
        }
    }
    let heads = heads(c)?;
    let attention = attention::Plan {
        output: "out_proj",
        qk_norm: Some(QkNorm { kind: NormKind::Plain, eps, names: ["q_layernorm", "k_layernorm"], whole: false }),
        rope: Some(Rope::read(c, heads.head_dim, 1e6)?),
        ..attention::Plan::new(a.width, heads)
    };
    let (kernel, bias) = (conv_taps_or(c, "conv_L_cache", 3)?, c.bool_or("conv_bias", false)?);
    let conv = short_conv::Plan { width: a.width, channels: a.width, kernel, bias };
    let listed = c.opt_usizes("full_attn_idxs")?;
    let attends = |i: usize| listed.as_ref().is_none_or(|l| l.contains(&i));
    let types = layer_types(c, |i| if attends(i) { LayerType::Attention } else { LayerType::Conv })?;
    for (i, layer) in types.into_iter().enumerate() {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        let mixer = match layer {
            LayerType::Attention => Branch::new(name("self_attn."), attention.clone()),
            LayerType::Conv => Branch::new(name("conv."), conv.clone()),
            other => return Err(no_such_layer(c, other)),
        };
        let feed_forward = match feed(c, a.width, i)? {
            Feed::Dense(plan) => Branch::new(name("feed_forward."), plan),
            Feed::Experts(plan) => Branch::new(name("feed_forward."), plan),
        };
        a.layers.push(vec![
            SubLayer::pre_norm(norm(name("operator_norm.weight")), vec![mixer]),
            SubLayer::pre_norm(norm(name("ffn_norm.weight")), vec![feed_forward]),
        ]);
    }
    Ok(a)
}

/// The inner width of a dense layer: two thirds of the given one, times a factor, rounded up, unless a switch turns
/// that off.
fn inner(c: &Config) -> Result<usize> {
    const GIVEN: &str = "block_ff_dim|intermediate_size";
    let given = c.usize(GIVEN)?;
    if !c.bool_or("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let factor = c.opt_f64("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let unit = c.usize_or("block_multiple_of", 256)?;
    let adjusted = (factor * (2 * given / 3) as f64) as usize;
    c.width(GIVEN, &[adjusted.div_ceil(unit), unit])
}

fn mlp(width: usize, inner: usize) -> mlp::Plan {
    mlp::Plan {
        width,
        inner,
        input: mlp::Input::Separate { gate: "w1", up: "w3" },
        output: "w2",
        act: Act::Silu,
        bias: false,
        gate_scale: 1.0,
        row_gate: None,
        adapter: None,
    }
}

fn experts(c: &Config, width: usize) -> Result<moe::Plan> {
    let experts = c.usize_or("num_experts", 32)?;
    Ok(moe::Plan {
        width,
        experts,
        top_k: top_k(c, "num_experts_per_tok", 4, experts)?,
        inner: c.usize("moe_intermediate_size")?,
        router: "gate",
        router_bias: c.bool_or("use_expert_bias", true)?.then_some("expert_bias"),
        rule: Router::Sigmoid {
            groups: 1,
            topk_group: 1,
            renorm: c.bool_or("norm_topk_prob", true)?,
            sum_eps: 1e-6,
            scale: c.f32_or("routed_scaling_factor", 1.0)?,
        },
        input: moe::Experts { stacked: "experts.gate_up_proj", each: &["experts.{}.w1", "experts.{}.w3"] },
        output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.w2"] },
        gated: true,
        act: Act::Silu,
        latent: None,
    })
}
