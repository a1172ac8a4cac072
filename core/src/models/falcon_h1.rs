//! Falcon-H1: Mamba-2 and attention in parallel in every layer, then SwiGLU, with fixed multipliers on most
//! projections.

use super::{
    Architecture, Branch, Norm, NormKind, SubLayer, llama,
    readers::{expanded, heads, mamba2, require_act},
};
use crate::{
    Result,
    blocks::{
        attention,
        mamba2::{self, Gating},
        mlp,
    },
    config::Config,
    rope::Rope,
};

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm { name, eps, kind: NormKind::Plain };
    let mut a = Architecture::start(c, "falcon_h1", 8192, false, norm("final_layernorm.weight".into()))?;
    require_act(c, "hidden_act", "silu")?;
    a.embedding_scale = c.f32_or("embedding_multiplier", 1.0)?;
    a.logits_scale = c.f32_or("lm_head_multiplier", 1.0)?;
    let (mamba, attention) = (mamba(c, a.width, eps)?, attention(c, a.width)?);
    let [gate_scale, down] = multipliers(c, "mlp_multipliers")?;
    let mlp =
        mlp::Plan { gate_scale, ..llama::mlp(a.width, c.usize("intermediate_size")?, c.bool_or("mlp_bias", false)?) };
    let of_mamba = c.f32_or("ssm_out_multiplier", 1.0)?;
    let of_attention = c.f32_or("attention_out_multiplier", 1.0)?;
    for i in 0..c.layers("num_hidden_layers")? {
        let name = |leaf: &str| format!("layers.{i}.{leaf}");
        a.layers.push(vec![
            SubLayer::pre_norm(
                norm(name("input_layernorm.weight")),
                vec![
                    Branch::new(name("mamba."), mamba.clone()).scaled(of_mamba),
                    Branch::new(name("self_attn."), attention.clone()).scaled(of_attention),
                ],
            ),
            SubLayer::pre_norm(
                norm(name("pre_ff_layernorm.weight")),
                vec![Branch::new(name("feed_forward."), mlp.clone()).scaled(down)],
            ),
        ]);
    }
    Ok(a)
}

/// The N multipliers of a key; 1 if the key is missing.
fn multipliers<const N: usize>(c: &Config, key: &str) -> Result<[f32; N]> {
    match c.opt_f32s(key)? {
        None => Ok([1.0; N]),
        Some(list) => <[f32; N]>::try_from(list)
            .map_err(|list| c.bad(key, format_args!("{} multipliers; there are {N}", list.len()))),
    }
}

fn mamba(c: &Config, width: usize, eps: f32) -> Result<mamba2::Plan> {
    // Null differs from missing here.
    let inner = match c.is_null("mamba_d_ssm") {
        true => expanded(c, "mamba_expand", width)?,
        false => c.usize_or("mamba_d_ssm", 1024)?,
    };
    let plan = mamba2(c, width, inner, eps)?;
    if plan.heads * plan.head_dim != inner {
        let why = format_args!("{} heads of {} are not `mamba_d_ssm`, {inner}", plan.heads, plan.head_dim);
        return Err(c.bad("mamba_n_heads", why));
    }
    let gate = match (c.bool_or("mamba_rms_norm", false)?, c.bool_or("mamba_norm_before_gate", true)?) {
        (false, _) => Gating::WithoutNorm,
        (true, true) => Gating::AfterNorm,
        (true, false) => Gating::BeforeNorm,
    };
    Ok(mamba2::Plan {
        bias: [c.bool_or("mamba_proj_bias", false)?, c.bool_or("projectors_bias", false)?],
        input_scale: c.f32_or("ssm_in_multiplier", 1.0)?,
        scales: multipliers(c, "ssm_multipliers")?,
        gate,
        ..plan
    })
}

fn attention(c: &Config, width: usize) -> Result<attention::Plan> {
    let heads = heads(c)?;
    Ok(attention::Plan {
        bias: c.bool_or("attention_bias", false)?,
        input_scale: c.f32_or("attention_in_multiplier", 1.0)?,
        key_scale: c.f32_or("key_multiplier", 1.0)?,
        rope: Some(Rope::read(c, heads.head_dim, 1e4)?),
        ..attention::Plan::new(width, heads)
    })
}
