//! What `config.json` says of a model that MLX's tools have converted.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{
    Result,
    checkpoint::{Checkpoint, Size, Sizes},
    config::Config,
};

/// The sizes in which matrices are quantised: `bits`, `group_size` and `mode` of the key `quantization`, and the same for single
/// layers by their paths. The error is the name of what is not read; `None` of another recipe.
pub(super) fn sizes(config: &Config) -> Option<Result<Sizes, String>> {
    let recipe = config.value("quantization")?.as_object()?;
    let other = config.value("quantization_config").is_some_and(|other| !other["quant_method"].is_null());
    (!other).then(|| read(recipe))
}

fn read(recipe: &Map<String, Value>) -> Result<Sizes, String> {
    let all = size(recipe)?;
    let mut layers = BTreeMap::new();
    for (path, value) in recipe {
        let own = match value {
            Value::Bool(quantised) => quantised.then_some(all),
            Value::Object(own) => Some(size(own)?),
            _ => continue,
        };
        layers.insert(path.clone(), own);
    }
    Ok(Sizes { all, layers })
}

/// Sizes that are not named are those of `mx.quantize`.
fn size(of: &Map<String, Value>) -> Result<Size, String> {
    let number = |key: &str, default: usize, known: &[usize]| match of.get(key).filter(|n| !n.is_null()) {
        None => Ok(default),
        Some(n) => known.iter().copied().find(|k| n.as_u64() == Some(*k as u64)).ok_or(format!("MLX ({key} {n})")),
    };
    match of.get("mode").and_then(Value::as_str) {
        None | Some("affine") => {}
        Some(mode) => return Err(format!("MLX {mode}")),
    }
    Ok(Size { bits: number("bits", 4, &Size::BITS)?, group: number("group_size", 64, &Size::GROUPS)? })
}

/// mlx-lm multiplies weights of Falcon-H1 by its factors, so these are 1 for the converted model. The factor on keys it leaves out.
///
/// # Errors
/// [`crate::Error::BadModel`] for options with which the weights alone do not say what they were.
pub(super) fn unfold(config: &mut Config, checkpoint: &Checkpoint) -> Result<()> {
    if config.str_or("model_type", "")? != "falcon_h1" || !checkpoint.is_of_mlx() {
        return Ok(());
    }
    if config.f32_or("attention_in_multiplier", 1.0)? != 1.0 {
        let why =
            "MLX's tools do not multiply values by it; use a release for Hugging Face transformers, or a GGUF file";
        return Err(config.bad("attention_in_multiplier", why));
    }
    for key in ["attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias"] {
        if config.bool_or(key, false)? {
            return Err(config.bad(key, "MLX's tools multiply weights by the model's factors, but no biases"));
        }
    }
    // A tied output matrix has the factor of the embeddings.
    let output = match config.bool_or("tie_word_embeddings", false)? {
        true => config.f32_or("lm_head_multiplier", 1.0)? / config.f32_or("embedding_multiplier", 1.0)?,
        false => 1.0,
    };
    let keys = json!({
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": output,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "mlp_multipliers": [1.0, 1.0],
    });
    config.replace(keys.as_object().cloned().unwrap_or_default());
    Ok(())
}
