//! The recipe by which a model's weights were quantised, as its files name it.

use serde_json::Value;

use super::{MAX_JSON, mlx};
use crate::{
    Error, Result,
    checkpoint::{Checkpoint, Layout, Sizes},
    config::Config,
    source::{Source, read_small},
};

const SEPARATE: &str = "hf_quant_config.json";
const KNOWN: &str = "read are MLX (affine), gptq (2, 4 and 8 bits), awq (gemm), fp8, compressed-tensors (pack-quantized of 4 and 8 bits, int-quantized, \
    float-quantized, nvfp4-pack-quantized) and modelopt (FP8, NVFP4, MIXED_PRECISION); use such a release of the model, an unquantised one, or a GGUF file";

/// The checkpoint, with integers read as its recipe says, and with the names of Hugging Face. One that holds codes of another recipe
/// is refused.
///
/// # Errors
/// [`Error::Unsupported`] with the recipe's name; [`Error::BadModel`] naming a tensor; those of the source.
pub(super) async fn apply(source: &dyn Source, config: &mut Config, checkpoint: Checkpoint) -> Result<Checkpoint> {
    let sizes = mlx::sizes(config);
    let known = sizes.as_ref().and_then(|sizes| sizes.as_ref().ok());
    let mut checkpoint = checkpoint.with_mlx(known, config.str_or("model_type", "")?)?;
    mlx::unfold(config, &checkpoint)?;
    for layout in config.value("quantization_config").map(layouts).unwrap_or_default() {
        checkpoint = checkpoint.with_integers(layout)?;
    }
    if config.value("quantization_config").is_some_and(rounds) {
        checkpoint = checkpoint.with_rounding();
    }
    check(source, config, &checkpoint, sizes).await?;
    Ok(checkpoint)
}

/// Whether a recipe rounds activations for all weights of 8-bit floats. Where one of modelopt has a fixed scale for them, that is stored.
fn rounds(recipe: &Value) -> bool {
    match recipe["quant_method"].as_str() {
        Some("fp8") => true,
        Some("compressed-tensors") => {
            let groups = recipe["config_groups"].as_object();
            let eight = |of: &Value| of["num_bits"] == 8 && of["type"] == "float";
            let mut groups = groups.into_iter().flat_map(|g| g.values()).filter(|g| eight(&g["weights"])).peekable();
            groups.peek().is_some() && groups.all(|g| eight(&g["input_activations"]))
        }
        Some("modelopt") => recipe["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN",
        _ => false,
    }
}

async fn check(
    source: &dyn Source,
    config: &Config,
    checkpoint: &Checkpoint,
    mlx: Option<Result<Sizes, String>>,
) -> Result<()> {
    if !checkpoint.holds_unknown_codes() {
        return Ok(());
    }
    let refused = match (mlx, config.value("quantization_config")) {
        (Some(mlx), _) => mlx.err().map(|name| (config.file().to_owned(), name)),
        (_, Some(recipe)) if recipe.is_object() => refused(recipe).map(|name| (config.file().to_owned(), name)),
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

/// How a recipe stores integers, as far as they are read.
fn layouts(recipe: &Value) -> Vec<Layout> {
    let bits = |of: &Value| of.as_u64().filter(|bits| [2, 4, 8].contains(bits));
    let word = |key: &str, default: &str| recipe[key].as_str().unwrap_or(default).to_ascii_lowercase();
    match (recipe["quant_method"].as_str(), bits(&recipe["bits"])) {
        (Some("gptq"), Some(_)) => {
            let any_order = recipe["desc_act"].as_bool().unwrap_or(false);
            match word("checkpoint_format", "gptq").as_str() {
                "gptq" => vec![Layout::Gptq { less_one: true, any_order }],
                "gptq_v2" => vec![Layout::Gptq { less_one: false, any_order }],
                _ => Vec::new(),
            }
        }
        (Some("awq"), Some(4)) if word("version", "gemm") == "gemm" => vec![Layout::Awq],
        (Some("compressed-tensors"), _) => {
            let groups = recipe["config_groups"].as_object().into_iter().flat_map(|g| g.values());
            let mut layouts: Vec<Layout> =
                groups.filter_map(|group| of_group(group, &recipe["format"], bits)).collect();
            layouts.dedup();
            // Which matrices are of which size is said by patterns of names, which are not read.
            let packed = |l: &&Layout| matches!(l, Layout::Packed { .. });
            if layouts.iter().filter(packed).count() > 1 { Vec::new() } else { layouts }
        }
        _ => Vec::new(),
    }
}

/// The layout of a group of compressed-tensors.
fn of_group(group: &Value, format: &Value, bits: impl Fn(&Value) -> Option<u64>) -> Option<Layout> {
    let bits = bits(&group["weights"]["num_bits"])? as usize;
    match group["format"].as_str().or(format.as_str())? {
        "pack-quantized" => Some(Layout::Packed { bits }),
        "int-quantized" if bits == 8 => Some(Layout::Bytes),
        _ => None,
    }
}

/// The name of a recipe that is not read.
fn refused(recipe: &Value) -> Option<String> {
    let method = recipe["quant_method"].as_str().unwrap_or("a recipe without a name");
    match method {
        _ if !layouts(recipe).is_empty() => None,
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
