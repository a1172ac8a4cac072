//! What mlx-lm stores otherwise than Hugging Face, as data: names, matrices that it splits, and norms with another centre.
//!
//! The facts are those of `sanitize` in the files of ml-explore/mlx-lm, mlx_lm/models. Convolutions with moved axes need nothing:
//! `[C, K, 1]` and `[C, 1, K]` are the same bytes.

use std::{collections::BTreeMap, sync::Arc};

use super::TensorInfo;
use crate::{Error, Result, source::Source};

/// Family (any if it is empty), the weight that it asks for, and the stored ones whose rows, one after the other, are those of
/// it; of stacked matrices those of each.
const NAMES: &[(&str, &str, &[&str])] = &[
    ("", "mixer.experts.up_proj", &["mixer.switch_mlp.fc1"]),
    ("", "mixer.experts.down_proj", &["mixer.switch_mlp.fc2"]),
    ("", "mlp.experts.gate_up_proj", &["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"]),
    ("", "mlp.experts.down_proj", &["mlp.switch_mlp.down_proj"]),
    (
        "",
        "feed_forward.experts.gate_up_proj",
        &["feed_forward.switch_mlp.gate_proj", "feed_forward.switch_mlp.up_proj"],
    ),
    ("", "feed_forward.experts.down_proj", &["feed_forward.switch_mlp.down_proj"]),
    (
        "",
        "block_sparse_moe.input_linear",
        &["block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.switch_mlp.up_proj"],
    ),
    ("", "block_sparse_moe.output_linear", &["block_sparse_moe.switch_mlp.down_proj"]),
    ("granitemoehybrid", "shared_mlp.input_linear", &["mlp.gate_proj", "mlp.up_proj"]),
    ("granitemoehybrid", "shared_mlp.output_linear", &["mlp.down_proj"]),
    ("lfm2_moe", "feed_forward.w1", &["feed_forward.gate_proj"]),
    ("lfm2_moe", "feed_forward.w2", &["feed_forward.down_proj"]),
    ("lfm2_moe", "feed_forward.w3", &["feed_forward.up_proj"]),
];

/// Norms that families with zero-centred ones ask for less 1, and the start of the names of these families.
const CENTRED: [&str; 5] = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
];
const CENTRED_FAMILIES: [&str; 2] = ["qwen3_next", "qwen3_5"];

/// Weights of Kimi-Linear that mlx-lm computes from others.
const COMPUTED: [&str; 2] = [".self_attn.embed_q.weight", ".self_attn.q_conv.conv.weight"];

/// Whether a convolution is `[C, K, 1]`: the sign by which mlx-lm too knows that a model has been converted.
pub(super) fn has_moved_axes(tensors: &BTreeMap<String, TensorInfo>) -> bool {
    tensors
        .iter()
        .any(|(name, info)| name.ends_with("conv1d.weight") && matches!(*info.shape, [_, taps, 1] if taps > 1))
}

/// Gives weights the names and rows that `family` asks for.
pub(super) fn rename(source: &dyn Source, tensors: &mut BTreeMap<String, TensorInfo>, family: &str) -> Result<()> {
    if let Some((name, info)) = tensors.iter().find(|(name, _)| COMPUTED.iter().any(|leaf| name.ends_with(leaf))) {
        return Err(Error::Unsupported {
            what: format!("{}: tensor `{name}` of MLX", source.path(&info.file)),
            why: "it is computed from the model's own weights; use a release for Hugging Face transformers".into(),
        });
    }
    for (_, name, parts) in NAMES.iter().filter(|(of, ..)| of.is_empty() || *of == family) {
        let first = format!("{}.weight", parts[0]);
        let before = |stored: &String| stored.strip_suffix(&first).filter(|s| s.ends_with('.')).map(str::to_owned);
        for prefix in tensors.keys().filter_map(before).collect::<Vec<_>>() {
            let joined = join(source, tensors, &prefix, parts)?;
            tensors.insert(format!("{prefix}{name}.weight"), joined);
        }
    }
    if has_moved_axes(tensors) && CENTRED_FAMILIES.iter().any(|of| family.starts_with(of)) {
        for (_, norm) in tensors.iter_mut().filter(|(name, _)| CENTRED.iter().any(|leaf| name.ends_with(leaf))) {
            norm.less_one = true;
        }
    }
    Ok(())
}

/// The rows of `parts` as one weight.
fn join(
    source: &dyn Source,
    tensors: &mut BTreeMap<String, TensorInfo>,
    prefix: &str,
    parts: &[&str],
) -> Result<TensorInfo> {
    let mut stored = Vec::with_capacity(parts.len());
    for part in parts {
        let name = format!("{prefix}{part}.weight");
        let part = tensors.remove(&name).ok_or_else(|| {
            Error::model(source.label(), format!("tensor `{name}` is missing; the weights are incomplete"))
        })?;
        stored.push(part);
    }
    let [first, others @ ..] = &*stored else { unreachable!("a weight has parts") };
    if others.is_empty() {
        return Ok(stored.remove(0));
    }
    let unfit = |other: &TensorInfo| other.shape != first.shape || first.shape.len() < 2;
    if let Some(other) = others.iter().find(|other| unfit(other)) {
        let why = format!("rows of {:?} and {:?} under `{prefix}` do not fit together", first.shape, other.shape);
        return Err(Error::model(source.path(&other.file), why));
    }
    let mut joined = first.clone();
    let rows = joined.shape.len() - 2;
    joined.shape[rows] = joined.shape[rows].saturating_mul(stored.len());
    Ok(TensorInfo { scaled: None, joined: Some(Arc::new(stored)), ..joined })
}

#[cfg(test)]
#[path = "mlx_tests.rs"]
mod tests;
