//! Nemotron-H: a residual step per layer, each a Mamba-2 mixer, attention without positions, an MLP or a mixture of experts.

use super::{
    Architecture, Branch, Head, Norm, NormKind, SubLayer,
    readers::{act, conv_taps, dt_limit, heads_or, mamba_groups, require_act, top_k},
};
use crate::{
    Result,
    blocks::{
        attention,
        mamba2::{self, Gating},
        mlp, moe,
    },
    config::{Config, LayerType, MOST_LAYERS},
    ops::Router,
};

/// The head's layers, as in the pattern of the trunk.
const HEAD_PATTERN: &str = "mtp_hybrid_override_pattern";

pub(super) fn read(c: &Config) -> Result<Architecture> {
    let eps = c.eps_or("layer_norm_epsilon|norm_eps|rms_norm_eps", 1e-5)?;
    let mut a = Architecture::start(c, "nemotron_h", 4096, false, norm("norm_f.weight", eps))?;
    a.prefixes = &["backbone.", "model."];
    a.embedding = &["embeddings.weight", "embed_tokens.weight"];
    let sizes = Sizes { c, width: a.width, eps };
    for (i, layer) in layer_types(c)?.into_iter().enumerate() {
        a.layers.push(vec![sizes.step(layer, &format!("layers.{i}."))?]);
    }
    a.head = sizes.head()?;
    Ok(a)
}

fn norm(name: impl Into<String>, eps: f32) -> Norm {
    Norm { name: name.into(), eps, kind: NormKind::Plain }
}

/// The list takes precedence over the pattern. Both have an entry per layer, so `num_hidden_layers` is not needed.
fn layer_types(c: &Config) -> Result<Vec<LayerType>> {
    const PATTERN: &str = "hybrid_override_pattern";
    const LIST: &str = "layers_block_type|layer_types";
    let listed = c.has(LIST);
    let types = match c.layer_types(LIST)? {
        Some(types) => types,
        None => {
            let parse =
                |l| LayerType::from_pattern(l).ok_or_else(|| c.bad(PATTERN, format_args!("unknown layer {l:?}")));
            c.str(PATTERN)?.chars().map(parse).collect::<Result<_>>()?
        }
    };
    if types.is_empty() || types.len() > MOST_LAYERS {
        let key = if listed { LIST } else { PATTERN };
        return Err(c.bad(key, format_args!("{} layers; 1 to {MOST_LAYERS} are supported", types.len())));
    }
    Ok(types)
}

struct Sizes<'a> {
    c: &'a Config,
    width: usize,
    eps: f32,
}

impl Sizes<'_> {
    /// A layer whose names begin with `prefix`.
    fn step(&self, layer: LayerType, prefix: &str) -> Result<SubLayer> {
        let mixer = format!("{prefix}mixer.");
        let branches = match layer {
            LayerType::Recurrent => vec![Branch::new(mixer, self.mamba()?)],
            LayerType::Attention => vec![Branch::new(mixer, self.attention()?)],
            LayerType::Mlp => vec![Branch::new(mixer, self.mlp("intermediate_size")?)],
            LayerType::Moe => self.moe(mixer)?,
            other => {
                return Err(self.c.bad("layers_block_type", format_args!("{other:?} is not a layer of this family")));
            }
        };
        Ok(SubLayer::pre_norm(norm(format!("{prefix}norm.weight"), self.eps), branches))
    }

    /// The head for drafts: attention that hides the first position, then experts or an MLP. None where the configuration has no
    /// such one.
    fn head(&self) -> Result<Option<Head>> {
        if self.c.usize_or("num_nextn_predict_layers", 0).ok() != Some(1) {
            return Ok(None);
        }
        let Some(second) = self.head_second() else { return Ok(None) };
        let Ok(second) = self.step(second, "/mtp.layers.1.") else { return Ok(None) };
        let plan = attention::Plan { first: 1, ..self.attention()? };
        let attention = vec![Branch::new("/mtp.layers.0.mixer.", plan)];
        let named = |name: &str| norm(format!("/mtp.layers.{name}.weight"), self.eps);
        Ok(Some(Head {
            embedding_norm: named("0.enorm"),
            hidden_norm: named("0.hnorm"),
            projection: "/mtp.layers.0.eh_proj.weight".into(),
            steps: vec![SubLayer::pre_norm(named("0.norm"), attention), second],
            norm: named("1.final_layernorm"),
        }))
    }

    /// What follows the head's attention, if its list and its pattern name the same head of two layers that can be run.
    fn head_second(&self) -> Option<LayerType> {
        let listed = self.c.layer_types("mtp_layers_block_type").ok()?;
        let pattern = match (self.c.has(HEAD_PATTERN), &listed) {
            (false, Some(types)) => types.clone(),
            _ => {
                let pattern = self.c.str_or(HEAD_PATTERN, "*E").ok()?;
                pattern.chars().map(LayerType::from_pattern).collect::<Option<_>>()?
            }
        };
        match pattern[..] {
            [LayerType::Attention, second @ (LayerType::Moe | LayerType::Mlp)]
                if listed.as_ref().is_none_or(|types| *types == pattern) =>
            {
                Some(second)
            }
            _ => None,
        }
    }

    fn mamba(&self) -> Result<mamba2::Plan> {
        let c = self.c;
        require_act(c, "mamba_hidden_act", "silu")?;
        let plan = mamba2::Plan {
            width: self.width,
            heads: c.usize_or("mamba_num_heads", 128)?,
            head_dim: c.usize_or("mamba_head_dim", 64)?,
            state: c.usize_or("ssm_state_size", 128)?,
            groups: c.usize_or("n_groups|mamba_n_groups", 8)?,
            kernel: conv_taps(c, "conv_kernel|mamba_d_conv")?,
            conv_bias: c.bool_or("use_conv_bias|mamba_conv_bias", true)?,
            bias: [c.bool_or("use_bias|mamba_proj_bias", false)?; 2],
            input_scale: 1.0,
            scales: [1.0; 5],
            gate: Gating::BeforeNorm,
            eps: self.eps,
            dt_limit: dt_limit(c)?,
        };
        mamba_groups(c, &plan, "mamba_num_heads", "n_groups")?;
        Ok(plan)
    }

    fn attention(&self) -> Result<attention::Plan> {
        // The family's own code does not read `attention_bias` of these files either.
        Ok(attention::Plan::new(self.width, heads_or(self.c, 128)?))
    }

    fn mlp(&self, inner: &str) -> Result<mlp::Plan> {
        Ok(mlp::Plan {
            width: self.width,
            inner: self.c.usize(inner)?,
            input: mlp::Input::Ungated("up_proj"),
            output: "down_proj",
            act: act(self.c, "mlp_hidden_act", "relu2")?,
            bias: self.c.bool_or("mlp_bias", false)?,
            gate_scale: 1.0,
            row_gate: None,
            adapter: None,
        })
    }

    /// The experts, and the shared ones.
    fn moe(&self, prefix: String) -> Result<Vec<Branch>> {
        let c = self.c;
        let experts = c.usize("n_routed_experts")?;
        let (groups, topk_group) = (c.usize_or("n_group", 1)?, c.usize_or("topk_group", 1)?);
        c.divides(("n_routed_experts", experts), ("n_group", groups))?;
        if topk_group > groups {
            return Err(c.bad("topk_group", format_args!("{topk_group} of {groups} groups")));
        }
        let (input, output, bias) = ("fc1_latent_proj", "fc2_latent_proj", c.bool_or("mlp_bias", false)?);
        let latent = c.opt_usize("moe_latent_size")?.map(|width| moe::Latent { width, input, output, bias });
        let plan = moe::Plan {
            width: self.width,
            experts,
            top_k: top_k(c, "num_experts_per_tok", 2, topk_group * (experts / groups))?,
            inner: c.usize("moe_intermediate_size")?,
            router: "gate",
            router_bias: Some("gate.e_score_correction_bias"),
            rule: Router::Sigmoid {
                groups,
                topk_group,
                renorm: c.bool_or("norm_topk_prob", true)?,
                sum_eps: 1e-20,
                scale: c.f32_or("routed_scaling_factor", 1.0)?,
            },
            input: moe::Experts { stacked: "experts.up_proj", each: &["experts.{}.up_proj"] },
            output: moe::Experts { stacked: "experts.down_proj", each: &["experts.{}.down_proj"] },
            gated: false,
            act: act(self.c, "mlp_hidden_act", "relu2")?,
            latent,
        };
        let shared = format!("{prefix}shared_experts.");
        let mut branches = vec![Branch::new(prefix, plan)];
        if c.count_or("n_shared_experts", 1)? > 0 {
            branches.push(Branch::new(shared, self.mlp("moe_shared_expert_intermediate_size")?));
        }
        Ok(branches)
    }
}
