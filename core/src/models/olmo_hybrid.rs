//! Olmo-Hybrid: Gated DeltaNet after norms, with a convolution per vector, and in some layers attention. The norms of
//! attention layers and of their MLPs come after the mixers.

use super::{
    Architecture, Branch, Input, Norm, NormKind, Output, SubLayer, llama,
    readers::{conv_taps, heads, layer_types, no_such_layer, require_act, require_no_window},
};
use crate::{
    Result,
    blocks::{
        Plan,
        attention::{self, QkNorm},
        gated_delta::{self, Projections},
    },
    config::{Config, LayerType},
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "olmo_hybrid", 65_536, false, norm("norm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    require_no_window(c)?;
    let (delta, attention) = (delta(c, a.width)?, attention(c, a.width, eps)?);
    let mlp = llama::mlp(a.width, c.usize("intermediate_size")?, false);
    for (i, layer) in types(c)?.into_iter().enumerate() {
        let branch = |leaf: &str, plan: Plan| vec![Branch::new(format!("layers.{i}.{leaf}."), plan)];
        // Files that transformers saved again have the second name for some norms.
        let norm = |leaf: &str, other: &str| norm(format!("layers.{i}.{leaf}.weight|layers.{i}.{other}.weight"));
        let mlp = branch("mlp", mlp.clone().into());
        a.layers.push(match layer {
            LayerType::Recurrent => vec![
                SubLayer::pre_norm(
                    norm("attention_layer_norm", "input_layernorm"),
                    branch("linear_attn", delta.clone().into()),
                ),
                SubLayer::pre_norm(norm("feedforward_layer_norm", "post_attention_layernorm"), mlp),
            ],
            LayerType::Attention => vec![
                post_norm(
                    norm("post_attention_layernorm", "feedforward_layer_norm"),
                    branch("self_attn", attention.clone().into()),
                ),
                post_norm(norm("post_feedforward_layernorm", "post_feedforward_layer_norm"), mlp),
            ],
            other => return Err(no_such_layer(c, other)),
        });
    }
    Ok(a)
}

/// `x += norm(Σ branch(x))`.
fn post_norm(norm: Norm, branches: Vec<Branch>) -> SubLayer {
    SubLayer { input: Input::Stream, branches, output: Output::AddNormed(norm) }
}

/// Unless the types are listed, every fourth layer attends, and the last one if there is no fourth.
fn types(c: &Config) -> Result<Vec<LayerType>> {
    let last = c.layers("num_hidden_layers")? - 1;
    layer_types(c, |i| match i % 4 == 3 || last < 3 && i == last {
        true => LayerType::Attention,
        false => LayerType::Recurrent,
    })
}

fn delta(c: &Config, width: usize) -> Result<gated_delta::Plan> {
    let heads = c.usize("num_attention_heads")?;
    let key_heads = c.usize_or("linear_num_key_heads", heads)?;
    let value_heads = c.usize_or("linear_num_value_heads", heads)?;
    c.divides(("linear_num_value_heads", value_heads), ("linear_num_key_heads", key_heads))?;
    let key_dim = match c.opt_usize("linear_key_head_dim")? {
        Some(dim) => dim,
        None => c.width("hidden_size", &[3 * width / (4 * key_heads)])?,
    };
    let value_dim = c.usize_or("linear_value_head_dim", 2 * key_dim)?;
    c.width("linear_num_key_heads", &[key_heads, key_dim])?;
    c.width("linear_num_value_heads", &[value_heads, value_dim])?;
    Ok(gated_delta::Plan {
        width,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel: conv_taps(c, "linear_conv_kernel_dim")?,
        // Fixed, independent of `rms_norm_eps`.
        eps: 1e-5,
        beta_scale: if c.bool_or("linear_allow_neg_eigval", true)? { 2.0 } else { 1.0 },
        projections: Projections::PerVector,
    })
}

fn attention(c: &Config, width: usize, eps: f32) -> Result<attention::Plan> {
    let heads = heads(c)?;
    Ok(attention::Plan {
        bias: c.bool_or("attention_bias", false)?,
        qk_norm: Some(QkNorm { whole: true, ..QkNorm::per_head(NormKind::Plain, eps) }),
        rope: rope(c, heads.head_dim)?,
        ..attention::Plan::new(width, heads)
    })
}

/// Positions only if the file gives a base for them.
fn rope(c: &Config, head_dim: usize) -> Result<Option<Rope>> {
    let inside = c.opt_object("rope_parameters|rope_scaling")?;
    let based = c.has("rope_theta") || inside.is_some_and(|o| o.has("rope_theta"));
    if based { Rope::read(c, head_dim, 1e4).map(Some) } else { Ok(None) }
}
