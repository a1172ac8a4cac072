//! Model families: a configuration, the layers as data, tensor names and the forward pass.
//!
//! A family is a function from the configuration to an [`Architecture`]: layers of mixers with their sizes and tensor names.
//! One decoder loads and runs any of them, so that a new family of known mixers is one file and one line in [`FAMILIES`].

mod architecture;
mod bamba;
mod decoder;
mod falcon_h1;
mod granitemoehybrid;
mod head;
mod jamba;
mod kimi_linear;
mod lfm2;
mod llama;
mod mamba;
mod mamba2;
mod nemotron_h;
mod olmo_hybrid;
mod program;
mod qwen3;
mod qwen3_5;
mod qwen3_next;
mod readers;
mod zamba2;

pub use architecture::{Architecture, Branch, Input, Norm, Output, SubLayer};
pub use head::{Head, Hidden};
pub use program::Program;

use crate::backend::{Backend, Ops};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::layer::{LayerPools, LayerState};
use crate::step::Step;
use crate::tensor::Tensor;
use crate::weights::Loader;

pub use crate::weights::NormKind;

/// A kind of model that can be loaded.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `model_type` in the configuration.
    pub model_type: &'static str,
    /// Reads the rest of the configuration.
    pub read: fn(&Config) -> Result<Architecture>,
}

/// Every family.
pub const FAMILIES: &[Family] = &[
    Family { model_type: "nemotron_h", read: nemotron_h::read },
    Family { model_type: "mamba2", read: mamba2::read },
    Family { model_type: "granitemoehybrid", read: granitemoehybrid::read },
    Family { model_type: "qwen3_next", read: qwen3_next::read },
    Family { model_type: "llama", read: llama::read },
    Family { model_type: "qwen3", read: qwen3::read },
    Family { model_type: "bamba", read: bamba::read },
    Family { model_type: "lfm2", read: lfm2::read },
    Family { model_type: "lfm2_moe", read: lfm2::read_moe },
    Family { model_type: "mamba", read: mamba::read },
    Family { model_type: "falcon_mamba", read: mamba::read_falcon },
    Family { model_type: "jamba", read: jamba::read },
    Family { model_type: "falcon_h1", read: falcon_h1::read },
    Family { model_type: "olmo_hybrid", read: olmo_hybrid::read },
    Family { model_type: "zamba2", read: zamba2::read },
    Family { model_type: "kimi_linear", read: kimi_linear::read },
    Family { model_type: "qwen3_5_text", read: qwen3_5::read },
    Family { model_type: "qwen3_5_moe_text", read: qwen3_5::read_moe },
    // The text parts of checkpoints with vision, if their `text_config` has no type.
    Family { model_type: "qwen3_5", read: qwen3_5::read },
    Family { model_type: "qwen3_5_moe", read: qwen3_5::read_moe },
];

/// Most parameters of a model: far more than any has, and few enough to count exactly.
const MOST_PARAMETERS: u64 = 1 << 50;

/// The architecture that a configuration describes.
///
/// # Errors
/// [`Error::Unsupported`] for an unknown `model_type`, with the known ones; [`Error::BadModel`] naming the key.
pub fn read(config: &Config) -> Result<Architecture> {
    // The files of the original state-spaces releases have no model_type.
    let model_type = if !config.has("model_type") && config.has("ssm_cfg") { "mamba2" } else { config.model_type()? };
    match FAMILIES.iter().find(|f| f.model_type == model_type) {
        Some(family) => {
            let architecture = (family.read)(config)?;
            let parameters = architecture.spec().parameters;
            if parameters > MOST_PARAMETERS {
                let why =
                    "with the layers and experts of this file it makes more than 2^50 parameters; one of them is wrong";
                return Err(config.bad("hidden_size|d_model", why));
            }
            Ok(architecture)
        }
        None => Err(Error::Unsupported {
            what: format!("{}: model_type {model_type:?}", config.file()),
            why: format!(
                "the supported types are {}",
                FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// Facts about the model of a configuration; needs no weights.
///
/// # Errors
/// As [`read`].
pub fn spec(config: &Config) -> Result<ModelSpec> {
    Ok(read(config)?.spec())
}

/// Sizes of a model's activation buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most packed tokens of a step, padding not counted.
    pub max_tokens: usize,
    /// Most positions of a step whose logits are computed.
    pub max_outputs: usize,
}

/// Loads the weights of an architecture and allocates its activations.
///
/// # Errors
/// Those of the checkpoint, naming the tensor, and of the backend; [`Error::Unsupported`] if it has no kernels for a layer.
pub async fn build<B: Backend>(
    architecture: &Architecture,
    loader: &mut Loader<'_, B>,
    limits: Limits,
) -> Result<Box<dyn Model<B>>> {
    let backend = loader.backend();
    // Refuses what the ranks of a device cannot share, before anything is loaded.
    architecture.spec_on(backend.caps().ranks)?;
    if let Some(feature) = architecture.features().find(|f| !backend.has(*f)) {
        return Err(Error::Unsupported {
            what: format!("{} ({}) on {}", architecture.family, feature.name(), backend.caps().backend),
            why: "this backend has no kernels for it; choose another one (--backend wgpu or --backend cpu)".into(),
        });
    }
    Ok(Box::new(decoder::Decoder::load(architecture, loader, limits).await?))
}

/// Facts about a model that need no weights, for `inspect` and for the sizes of the pools.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// The config's `model_type`.
    pub family: String,
    /// Vocabulary size V (rows of the output matrix).
    pub vocab: usize,
    /// Model width D.
    pub width: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// A letter per residual step: `M` Mamba-2, `S` Mamba-1, `G` Gated DeltaNet, `K` Kimi Delta
    /// Attention, `C` short convolution, `*` attention, `-` MLP,
    /// `L` a linear layer between mixers, `E` MoE (token mixer before channel mixer where a layer has both).
    pub layer_map: String,
    /// State of each layer, and of the head if it is loaded.
    pub layers: Vec<LayerState>,
    /// End-of-sequence ids from the config.
    pub eos: Vec<u32>,
    /// Number of weights.
    pub parameters: u64,
    /// Weights that a pass of the head reads, the output matrix included, as a share of those. 0 if it is not loaded.
    pub head_cost: f32,
}

/// A loaded model on a backend. One virtual call per step.
pub trait Model<B: Backend> {
    /// Facts about the model.
    fn spec(&self) -> &ModelSpec;

    /// Records one step: embeds the step's tokens, runs the layers over `pools` (one entry per layer) and leaves the
    /// logits of the step's outputs in the first rows of [`Model::logits`]. `last` is `[L] u32`: the last sampled token
    /// of each lane, for ids taken on the device.
    fn forward(
        &self,
        ops: &mut dyn Ops<B::Buf>,
        step: &Step<B::Buf>,
        pools: &[LayerPools<B::Buf>],
        last: &Tensor<B::Buf>,
    ) -> Result<()>;

    /// Records one pass of the head over a step of rows of one token, which write no slot, and leaves the logits of its outputs
    /// in the first rows of [`Model::logits`]. `pools` and `last` as for [`Model::forward`].
    ///
    /// # Panics
    /// If the model was built without its head.
    fn draft(
        &self,
        ops: &mut dyn Ops<B::Buf>,
        step: &Step<B::Buf>,
        pools: &[LayerPools<B::Buf>],
        last: &Tensor<B::Buf>,
        hidden: Hidden,
    ) -> Result<()>;

    /// Whether it was built with its head.
    fn has_head(&self) -> bool;

    /// `[max outputs, V] f32`.
    fn logits(&self) -> &Tensor<B::Buf>;
}

#[cfg(test)]
mod tests;
