//! A model as data: what a family's file makes of a configuration, and all that the decoder needs.

use crate::{
    Result,
    blocks::{Plan, mamba2},
    config::{Config, Heads},
    layer::LayerState,
    models::ModelSpec,
    ops::Act,
    weights::NormKind,
};

/// An RMS norm over the model width.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Name of the weight `[D]`, below the model's prefix.
    pub name: String,
    /// Added to the mean square.
    pub eps: f32,
    /// Meaning of the weight.
    pub kind: NormKind,
}

/// `x += residual * Σ mixer(norm(x))`: one residual step of a layer.
#[derive(Clone, Debug)]
pub struct SubLayer {
    /// Norm of the stream.
    pub norm: Norm,
    /// Mixers that read the same normed stream, with the prefix of their tensor names; the first gives the layer its letter. A
    /// mixture of experts comes first, and at most one: routing begins in the order given, the outputs are added in the reverse.
    pub mixers: Vec<(String, Plan)>,
    /// Factor on the mixers' outputs.
    pub residual: f32,
}

/// A decoder-only model.
#[derive(Clone, Debug)]
pub struct Architecture {
    /// The config's `model_type`.
    pub family: &'static str,
    /// Vocabulary size V.
    pub vocab: usize,
    /// Model width D.
    pub width: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// What may stand in front of all tensor names.
    pub prefixes: &'static [&'static str],
    /// Names of the embedding `[V, D]`, below the prefix.
    pub embedding: &'static [&'static str],
    /// Factor on embeddings.
    pub embedding_scale: f32,
    /// Residual steps of each layer.
    pub layers: Vec<Vec<SubLayer>>,
    /// Norm before the output matrix.
    pub norm: Norm,
    /// The output matrix is the embedding, unless another one is stored; otherwise it is `lm_head.weight`.
    pub tied: bool,
    /// Factor on logits.
    pub logits_scale: f32,
}

impl Architecture {
    /// An architecture without layers: the keys that all families share. `context` is the default of a missing
    /// `max_position_embeddings`, `tied` that of `tie_word_embeddings`.
    ///
    /// # Errors
    /// [`crate::Error::BadModel`] naming the key.
    pub fn start(config: &Config, family: &'static str, context: usize, tied: bool, norm: Norm) -> Result<Self> {
        Ok(Self {
            family,
            vocab: config.usize("vocab_size")?,
            width: config.usize("hidden_size|d_model")?,
            context: config.max_positions()?.unwrap_or(context),
            eos: config.eos_token_ids()?,
            prefixes: &["model.", "model.language_model.", "language_model.model."],
            embedding: &["embed_tokens.weight"],
            embedding_scale: 1.0,
            layers: Vec::new(),
            norm,
            tied: config.tied_embeddings(tied)?,
            logits_scale: 1.0,
        })
    }

    /// What can be known without weights.
    pub fn spec(&self) -> ModelSpec {
        let mixers = |layer: &[SubLayer]| layer.iter().flat_map(|s| &s.mixers).map(|(_, p)| p).cloned().collect();
        let by_layer: Vec<Vec<Plan>> = self.layers.iter().map(|l| mixers(l)).collect();
        let state = |plans: &Vec<Plan>| {
            plans.iter().map(Plan::state).fold(LayerState::default(), |a, b| LayerState {
                kv: a.kv.or(b.kv),
                conv: a.conv.or(b.conv),
                recurrent: a.recurrent.or(b.recurrent),
            })
        };
        let matrices = if self.tied { 1 } else { 2 } * (self.vocab * self.width) as u64;
        let norms = (self.width * (1 + self.layers.iter().map(Vec::len).sum::<usize>())) as u64;
        ModelSpec {
            family: self.family.into(),
            vocab: self.vocab,
            width: self.width,
            context: self.context,
            layer_map: self.layers.iter().flatten().map(|s| s.mixers[0].1.letter()).collect(),
            layers: by_layer.iter().map(state).collect(),
            eos: self.eos.clone(),
            parameters: matrices + norms + by_layer.iter().flatten().map(Plan::parameters).sum::<u64>(),
        }
    }
}

// Readers that several families share. They also hold the bounds of the ops, so that a strange configuration is an error
// with a key rather than a failed check inside a step.

/// An activation by its name in the configuration.
pub(super) fn act(c: &Config, key: &str, default: &str) -> Result<Act> {
    Ok(match c.str_or(key, default)? {
        "silu" | "swish" => Act::Silu,
        "relu2" => Act::Relu2,
        "gelu" => Act::Gelu,
        "sigmoid" => Act::Sigmoid,
        other => return Err(c.bad(key, format_args!("activation {other:?} is not supported"))),
    })
}

/// Refuses a model with another activation than the one its family has.
pub(super) fn require_act(c: &Config, key: &str, only: &str) -> Result<()> {
    let found = c.str_or(key, only)?;
    if found != only {
        return Err(c.bad(key, format_args!("activation {found:?} is not supported, only {only:?}")));
    }
    Ok(())
}

/// Heads of the attention layers of a family whose head dim is a number by default, not a share of the model width.
pub(super) fn heads_or(c: &Config, head_dim: usize) -> Result<Heads> {
    if c.has("head_dim|attention_head_dim") {
        return heads(c);
    }
    let heads = c.usize("num_attention_heads")?;
    let kv_heads = c.usize_or("num_key_value_heads", heads)?;
    c.divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    Ok(Heads { heads, kv_heads, head_dim })
}

/// Heads of the attention layers; pages hold keys in pairs of elements.
pub(super) fn heads(c: &Config) -> Result<Heads> {
    let heads = c.heads()?;
    if !heads.head_dim.is_multiple_of(2) {
        return Err(c.bad("head_dim|num_attention_heads", format_args!("an odd head dim, {}", heads.head_dim)));
    }
    Ok(heads)
}

/// Taps of a convolution, 4 by default.
pub(super) fn conv_taps(c: &Config, key: &str) -> Result<usize> {
    let taps = c.usize_or(key, 4)?;
    if !(2..=8).contains(&taps) {
        return Err(c.bad(key, format_args!("{taps} taps; 2 to 8 are supported")));
    }
    Ok(taps)
}

/// Experts of a token, of which `available` can be chosen.
pub(super) fn top_k(c: &Config, key: &str, default: usize, available: usize) -> Result<usize> {
    let k = c.usize_or(key, default)?;
    if k > available.min(32) {
        return Err(c.bad(key, format_args!("{k} experts per token; at most {} are possible", available.min(32))));
    }
    Ok(k)
}

/// Bounds on dt after softplus.
pub(super) fn dt_limit(c: &Config) -> Result<(f32, f32)> {
    Ok(c.time_step_limit()?.unwrap_or((0.0, f32::INFINITY)))
}

/// Checks that heads divide into groups and that the widths are possible.
pub(super) fn mamba_groups(c: &Config, plan: &mamba2::Plan, heads_key: &str, groups_key: &str) -> Result<()> {
    c.divides((heads_key, plan.heads), (groups_key, plan.groups))?;
    c.width(heads_key, &[plan.heads, plan.head_dim])?;
    c.width(groups_key, &[plan.groups, plan.state])?;
    Ok(())
}
