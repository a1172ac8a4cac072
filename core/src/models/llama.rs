//! Llama: attention and SwiGLU, no recurrent layer.

use super::{
    Architecture, Norm, NormKind, SubLayer,
    architecture::{heads, require_act},
};
use crate::{
    Result,
    blocks::{attention, mlp},
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
        width: a.width,
        heads,
        output: "o_proj",
        gated: false,
        bias: c.bool_or("attention_bias", false)?,
        qk_norm: None,
        rope: Some(Rope::read(c, heads.head_dim, 1e4)?),
        scale: (heads.head_dim as f32).sqrt().recip(),
        window: None,
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
        row_gate: None,
    }
}

/// A pre-norm transformer layer under the usual names.
pub(super) fn layer(i: usize, eps: f32, attention: attention::Plan, mlp: mlp::Plan) -> Vec<SubLayer> {
    let norm = |leaf: &str| Norm { name: format!("layers.{i}.{leaf}.weight"), eps, kind: NormKind::Plain };
    let step = |norm_leaf: &str, prefix: &str, plan| SubLayer {
        norm: norm(norm_leaf),
        mixers: vec![(format!("layers.{i}.{prefix}."), plan)],
        residual: 1.0,
    };
    vec![step("input_layernorm", "self_attn", attention.into()), step("post_attention_layernorm", "mlp", mlp.into())]
}
