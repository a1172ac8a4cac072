//! Llama: attention and SwiGLU, no recurrent layer.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer,
    readers::{heads, require_act},
};
use crate::{
    Result,
    blocks::{Plan, attention, mlp},
    config::Config,
    ops::Act,
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-6)?;
    let norm = Norm { name: "norm.weight".into(), eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "llama", 2048, false, norm)?;
    require_act(c, "hidden_act", "silu")?;
    let heads = heads(c)?;
    let attention = attention::Plan {
        bias: c.bool_or("attention_bias", false)?,
        rope: Some(Rope::read(c, heads.head_dim, 1e4)?),
        ..attention::Plan::new(a.width, heads)
    };
    let mlp = mlp(a.width, c.usize("intermediate_size")?, c.bool_or("mlp_bias", false)?);
    for i in 0..c.layers("num_hidden_layers")? {
        a.layers.push(layer(i, eps, attention.clone(), mlp.clone()));
    }
    Ok(a)
}

/// A SwiGLU MLP under the usual names.
pub(super) fn mlp(width: usize, inner: usize, bias: bool) -> mlp::Plan {
    mlp::Plan {
        width,
        inner,
        input: mlp::Input::Separate { gate: "gate_proj", up: "up_proj" },
        output: "down_proj",
        act: Act::Silu,
        bias,
        gate_scale: 1.0,
        row_gate: None,
        adapter: None,
    }
}

/// A pre-norm transformer layer under the usual names.
pub(super) fn layer(i: usize, eps: f32, attention: attention::Plan, mlp: mlp::Plan) -> Vec<SubLayer> {
    let norm = |leaf: &str| Norm { name: format!("layers.{i}.{leaf}.weight"), eps, kind: NormKind::Plain };
    let branch = |leaf: &str, plan: Plan| vec![Branch::new(format!("layers.{i}.{leaf}."), plan)];
    vec![
        SubLayer::pre_norm(norm("input_layernorm"), branch("self_attn", attention.into())),
        SubLayer::pre_norm(norm("post_attention_layernorm"), branch("mlp", mlp.into())),
    ]
}
