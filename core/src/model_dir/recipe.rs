//! The recipe by which a model's weights were quantised, as its files name it.

use serde_json::Value;

use super::MAX_JSON;
use crate::{
    Error, Result,
    checkpoint::Checkpoint,
    config::Config,
    source::{Source, read_small},
};

const SEPARATE: &str = "hf_quant_config.json";
const KNOWN: &str = "read are fp8, compressed-tensors (float-quantized, nvfp4-pack-quantized) and modelopt (FP8, NVFP4, MIXED_PRECISION); \
    use such a release of the model, an unquantised one, or a GGUF file";

/// Refuses a checkpoint that holds codes of a recipe that is not read.
///
/// # Errors
/// [`Error::Unsupported`] with the recipe's name; those of the source.
pub(super) async fn check(source: &dyn Source, config: &Config, checkpoint: &Checkpoint) -> Result<()> {
    if !checkpoint.holds_unknown_codes() {
        return Ok(());
    }
    let refused = match (config.value("quantization_config"), config.value("quantization")) {
        (Some(recipe), _) if recipe.is_object() => refused(recipe).map(|name| (config.file().to_owned(), name)),
        // MLX writes the second key alone.
        (_, Some(recipe)) if recipe.is_object() => Some((config.file().to_owned(), "MLX".to_owned())),
        _ => match read_small(source, SEPARATE, MAX_JSON).await? {
            Some(bytes) => {
                let recipe: Value = serde_json::from_slice(&bytes).unwrap_or_default();
                algorithm(&recipe["quantization"]).map(|name| (source.path(SEPARATE), name))
            }
            None => None,
        },
    };
    match refused {
        None => Ok(()),
        Some((file, name)) => {
            Err(Error::Unsupported { what: format!("{file}: weights quantised by {name}"), why: KNOWN.into() })
        }
    }
}

/// The name of a recipe that is not read.
fn refused(recipe: &Value) -> Option<String> {
    let method = recipe["quant_method"].as_str().unwrap_or("a recipe without a name");
    match method {
        "fp8" => None,
        "modelopt" => algorithm(recipe),
        "compressed-tensors" => {
            let groups = recipe["config_groups"].as_object();
            let formats = groups.into_iter().flat_map(|g| g.values()).map(|g| &g["format"]).chain([&recipe["format"]]);
            let known = ["float-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense"];
            let other = formats.filter_map(Value::as_str).find(|format| !known.contains(format));
            other.map(|format| format!("{method} {format}"))
        }
        _ => {
            let bits = recipe["bits"].as_u64().map(|bits| format!(" ({bits} bits)"));
            Some(method.to_owned() + &bits.unwrap_or_default())
        }
    }
}

/// modelopt's algorithm, if it is not read.
fn algorithm(recipe: &Value) -> Option<String> {
    let name = recipe["quant_algo"].as_str()?;
    let known = ["FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"].contains(&name) || name.starts_with("FP8_");
    (!known).then(|| format!("modelopt {name}"))
}
