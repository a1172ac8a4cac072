//! The reference models as mlx-lm converts and quantises them: renamed, stacked and split by its rules, in all its sizes.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use half::bf16;
use pollster::block_on;
use selkie_core::{Result, convert::Target, format::Products, model_dir::ModelFiles, source::Dir};
use serde_json::{Map, Value, json};

use crate::{
    gguf::{logits_by, some_ids, written::write},
    scaled::Files,
};

/// A tensor, and bits and group of one that is quantised.
#[derive(Clone)]
struct Tensor {
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
    size: Option<(usize, usize)>,
}

type Tensors = BTreeMap<String, Tensor>;

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Tensor { dtype: "F32", shape: shape.to_vec(), bytes, size: None }
}

fn open(tensors: &Tensors, config: &Map<String, Value>) -> Result<ModelFiles> {
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for (name, t) in tensors {
        let from = data.len();
        data.extend(&t.bytes);
        header.insert(name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [from, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    let config = Value::Object(config.clone()).to_string().into_bytes();
    let files = Files([("config.json", config), ("model.safetensors", file)]);
    block_on(ModelFiles::open(Arc::new(files), || 0))
}

/// Configuration and tensors of a reference model. Norms have 10 bits after the point, so that 1 can be added to them exactly.
fn reference(name: &str) -> (Map<String, Value>, Tensors) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden").join(name);
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let files = block_on(ModelFiles::open(Arc::new(Dir::open(&folder).unwrap()), || 0)).unwrap();
    let mut tensors = Tensors::new();
    // mlx-lm drops heads for drafts.
    for name in files.checkpoint.names().filter(|name| !name.contains("mtp.")) {
        let shape = files.checkpoint.info(name).unwrap().shape.clone();
        let raw = block_on(files.checkpoint.get(name, &shape)).unwrap();
        let mut values = raw.dtype.to_f32(&raw.bytes);
        if name.contains("norm") {
            values.iter_mut().for_each(|x| *x = (*x * 1024.0).round() / 1024.0);
        }
        tensors.insert(name.into(), floats(&shape, &values));
    }
    (serde_json::from_slice(&config).unwrap(), tensors)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The sizes of the matrices of a kind, of `k` columns: all of MLX's in turn.
fn size(kind: &str, k: usize) -> Option<(usize, usize)> {
    let groups: Vec<usize> = [32, 64, 128].into_iter().filter(|g| k.is_multiple_of(*g)).collect();
    let sum = kind.bytes().fold(7usize, |sum, b| sum * 31 % 1_000_003 + usize::from(b));
    Some(([2, 3, 4, 5, 6, 8][sum % 6], *groups.get(sum / 6 % groups.len().max(1))?))
}

/// Codes, scales, biases and decoded elements of a matrix, as `mx.quantize` defines them.
fn quantise(of: &Tensor, (bits, group): (usize, usize)) -> ([Tensor; 3], Tensor) {
    let (mut words, mut scales, mut biases, mut decoded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let k = *of.shape.last().unwrap();
    for row in values(of).chunks(k) {
        let (mut held, mut count) = (0u64, 0);
        for group in row.chunks(group) {
            let (low, high) = group.iter().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
            let most = (1u32 << bits) - 1;
            let scale = bf16::from_f32(((high - low) / most as f32).max(1e-6));
            let bias = bf16::from_f32(low);
            for x in group {
                let code = ((x - bias.to_f32()) / scale.to_f32()).round().clamp(0.0, most as f32);
                decoded.push(scale.to_f32() * code + bias.to_f32());
                held |= (code as u64) << count;
                count += bits;
                while count >= 8 {
                    words.push(held as u8);
                    (held, count) = (held >> 8, count - 8);
                }
            }
            scales.extend(scale.to_le_bytes());
            biases.extend(bias.to_le_bytes());
        }
    }
    let of_row = |last: usize| [&of.shape[..of.shape.len() - 1], &[last]].concat();
    let codes = Tensor { dtype: "U32", shape: of_row(k * bits / 32), bytes: words, size: Some((bits, group)) };
    let beside = |bytes| Tensor { dtype: "BF16", shape: of_row(k / group), bytes, size: None };
    ([codes, beside(scales), beside(biases)], floats(&of.shape, &decoded))
}

/// The name without the number of an expert: all of a stack have one size, and so have the halves of `input_linear`.
fn kind(name: &str) -> String {
    match name.split_once("experts.").and_then(|(before, after)| Some((before, after.split_once('.')?.1))) {
        Some((before, after)) => format!("{before}{after}"),
        None => name.to_owned(),
    }
}

/// Every matrix that mlx-lm quantises as codes, and the same model with their values.
fn quantised(tensors: &Tensors) -> (Tensors, Tensors) {
    let (mut coded, mut plain) = (Tensors::new(), Tensors::new());
    for (name, tensor) in tensors {
        let linear = name.ends_with(".weight") && tensor.shape.len() > 1 && !name.contains("conv");
        match size(&kind(name), *tensor.shape.last().unwrap_or(&1)).filter(|_| linear) {
            Some(size) => {
                let (parts, decoded) = quantise(tensor, size);
                let stem = name.strip_suffix(".weight").unwrap();
                coded
                    .extend(["weight", "scales", "biases"].map(|leaf| format!("{stem}.{leaf}")).into_iter().zip(parts));
                plain.insert(name.clone(), decoded);
            }
            None => {
                coded.insert(name.clone(), tensor.clone());
                plain.insert(name.clone(), tensor.clone());
            }
        }
    }
    (coded, plain)
}

/// Stacks `BEFORE.experts.E.NAME.LEAF` to `BEFORE.switch_mlp.NEW.LEAF`.
fn stack(tensors: &mut Tensors, names: &[(&str, &str)]) {
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, tensor) in std::mem::take(tensors) {
        let parts = name.split_once(".experts.").and_then(|(before, after)| {
            let [e, leaf, end] = *after.split('.').collect::<Vec<_>>() else { return None };
            let (_, new) = names.iter().find(|(old, _)| *old == leaf)?;
            Some((format!("{before}.switch_mlp.{new}.{end}"), e.parse().ok()?))
        });
        match parts {
            Some((stacked, e)) => drop(stacks.entry(stacked).or_default().insert(e, tensor)),
            None => drop(tensors.insert(name, tensor)),
        }
    }
    for (name, all) in stacks {
        let first = all[&0].clone();
        let shape = [&[all.len()], &*first.shape].concat();
        let bytes = all.into_values().flat_map(|t| t.bytes).collect();
        tensors.insert(name, Tensor { shape, bytes, ..first });
    }
}

/// Splits the rows of `FROM.LEAF` in the middle.
fn split(tensors: &mut Tensors, from: &str, to: [&str; 2]) {
    let names: Vec<String> = tensors.keys().filter(|name| name.contains(from)).cloned().collect();
    for name in names {
        let whole = tensors.remove(&name).unwrap();
        let axis = whole.shape.len() - 2;
        let matrices: usize = whole.shape[..axis].iter().product();
        let half = whole.bytes.len() / matrices / 2;
        let mut shape = whole.shape.clone();
        shape[axis] /= 2;
        for (i, to) in to.iter().enumerate() {
            let bytes = whole.bytes.chunks(half).skip(i).step_by(2).flatten().copied().collect();
            tensors.insert(name.replace(from, to), Tensor { shape: shape.clone(), bytes, ..whole.clone() });
        }
    }
}

fn rename(tensors: &mut Tensors, new: impl Fn(&str) -> String) {
    *tensors = std::mem::take(tensors).into_iter().map(|(name, tensor)| (new(&name), tensor)).collect();
}

/// What `sanitize` does in mlx-lm's file of a family.
fn sanitise(family: &str, tensors: &mut Tensors) {
    for (_, conv) in
        tensors.iter_mut().filter(|(name, _)| name.contains("conv1d.weight") || name.contains("conv.weight"))
    {
        conv.shape = vec![conv.shape[0], conv.shape[2], 1];
    }
    let same = [("gate_proj", "gate_proj"), ("up_proj", "up_proj"), ("down_proj", "down_proj")];
    match family {
        "nemotron_h" => stack(tensors, &[("up_proj", "fc1"), ("down_proj", "fc2")]),
        "granitemoehybrid" if tensors.keys().any(|name| name.contains("block_sparse_moe")) => {
            let to = ["gate_proj", "up_proj"].map(|leaf| format!("block_sparse_moe.switch_mlp.{leaf}"));
            split(tensors, "block_sparse_moe.input_linear", [&to[0], &to[1]]);
            rename(tensors, |n| n.replace("block_sparse_moe.output_linear", "block_sparse_moe.switch_mlp.down_proj"));
        }
        "granitemoehybrid" => {
            split(tensors, "shared_mlp.input_linear", ["mlp.gate_proj", "mlp.up_proj"]);
            rename(tensors, |n| n.replace("shared_mlp.output_linear", "mlp.down_proj"));
        }
        "lfm2_moe" => {
            rename(tensors, |n| n.replace("w1.", "gate_proj.").replace("w2.", "down_proj.").replace("w3.", "up_proj."));
            stack(tensors, &same);
        }
        _ => stack(tensors, &same),
    }
    if family.starts_with("qwen3_next") || family.starts_with("qwen3_5") {
        let ends = [
            ".input_layernorm.weight",
            ".post_attention_layernorm.weight",
            "model.norm.weight",
            ".q_norm.weight",
            ".k_norm.weight",
        ];
        for (_, norm) in tensors.iter_mut().filter(|(name, _)| ends.iter().any(|end| name.ends_with(end))) {
            *norm = floats(&norm.shape, &values(norm).iter().map(|x| x + 1.0).collect::<Vec<_>>());
        }
    }
    if family.starts_with("qwen3_5") {
        rename(tensors, |n| format!("language_model.{n}"));
    }
}

/// The key `quantization`: one size for all, and those of the layers that have another.
fn recipe(tensors: &Tensors) -> Value {
    let mut recipe = Map::from_iter([("group_size".into(), json!(64)), ("bits".into(), json!(4))]);
    recipe.insert("mode".into(), json!("affine"));
    for (name, tensor) in tensors {
        match (name.strip_suffix(".weight"), tensor.size) {
            (Some(stem), Some((bits, group))) if (bits, group) != (4, 64) => {
                recipe.insert(stem.into(), json!({"bits": bits, "group_size": group}));
            }
            (Some(stem), None) if tensor.shape.len() > 1 => drop(recipe.insert(stem.into(), json!(false))),
            _ => {}
        }
    }
    Value::Object(recipe)
}

fn logits(of: &ModelFiles, products: Products) -> Vec<f32> {
    logits_by(products, &of.config, &of.checkpoint, &some_ids(), &[50, 20]).unwrap()
}

fn nothing_is_left(name: &str, of: &ModelFiles) {
    assert_eq!(of.checkpoint.passed_over(), [""; 0], "{name}");
    assert!(of.checkpoint.skipped().is_empty(), "{name}: {:?}", of.checkpoint.skipped());
}

const MODELS: &str = "falcon_mamba granite_all_attention granitemoehybrid granitemoehybrid_dense jamba jamba_odd_rank lfm2 lfm2_moe \
     llama llama_bias3 mamba mamba2 nemotron_h nemotron_h_groups nemotron_h_latent nemotron_h_moe qwen3 qwen3_5_moe_text qwen3_5_text \
     qwen3_next";

#[test]
fn models_quantised_by_mlx_equal_their_decoded_values_bit_for_bit() {
    let (mut sizes, mut models) = (std::collections::BTreeSet::new(), 0);
    for name in MODELS.split_whitespace() {
        let (mut config, tensors) = reference(name);
        let (mut coded, plain) = quantised(&tensors);
        let plain = open(&plain, &config).unwrap();
        let want = logits(&plain, Products::Exact);
        sanitise(config["model_type"].as_str().unwrap(), &mut coded);
        sizes.extend(coded.values().filter_map(|t| t.size));
        let recipe = recipe(&coded);
        config.extend([("quantization".into(), recipe.clone()), ("quantization_config".into(), recipe)]);
        let files = open(&coded, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Of some models no row is whole groups.
        let any = coded.values().any(|t| t.size.is_some());
        assert_eq!(files.checkpoint.is_coded(), any, "{name}");
        models += usize::from(any);
        assert!(logits(&files, Products::Exact) == want, "{name}");
        nothing_is_left(name, &files);
        let gguf = |files| write(files, Target::F32).map(|(bytes, _)| bytes).map_err(|e| e.to_string());
        assert!(gguf(&files) == gguf(&plain), "{name}: {:?} as GGUF", gguf(&files).err());
        let fast = logits(&files, Products::Fast);
        assert!((fast != want) == any && fast.iter().all(|x| x.is_finite()), "{name}");
    }
    assert!(sizes.len() > 12 && models >= 16, "{sizes:?} in {models} models");
}

#[test]
fn models_that_mlx_has_converted_are_the_same() {
    for name in MODELS.split_whitespace() {
        let (config, mut tensors) = reference(name);
        let want = logits(&open(&tensors, &config).unwrap(), Products::Exact);
        sanitise(config["model_type"].as_str().unwrap(), &mut tensors);
        let files = open(&tensors, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(logits(&files, Products::Exact) == want, "{name}");
        nothing_is_left(name, &files);
    }
}

/// Multiplies weights of Falcon-H1 as mlx-lm does.
fn folded(config: &Map<String, Value>, tensors: &mut Tensors) {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let of = |key: &str| config[key].as_f64().unwrap() as f32;
    let list = |key: &str, i: usize| config[key][i].as_f64().unwrap() as f32;
    let groups = size("mamba_n_groups") * size("mamba_d_state");
    let sections = [size("mamba_d_ssm"), size("mamba_d_ssm"), groups, groups, size("mamba_n_heads")];
    for (name, tensor) in tensors.iter_mut() {
        let ends = |end: &str| name.ends_with(end);
        let factor = match () {
            () if ends("embed_tokens.weight") => of("embedding_multiplier"),
            () if ends("lm_head.weight") => of("lm_head_multiplier"),
            () if ends("o_proj.weight") => of("attention_out_multiplier"),
            () if ends("out_proj.weight") => of("ssm_out_multiplier"),
            () if ends("gate_proj.weight") => list("mlp_multipliers", 0),
            () if ends("down_proj.weight") => list("mlp_multipliers", 1),
            () if ends("in_proj.weight") => of("ssm_in_multiplier"),
            () => continue,
        };
        let mut values: Vec<f32> = values(tensor).iter().map(|x| x * factor).collect();
        if ends("in_proj.weight") {
            let row = tensor.shape[1];
            let by_row =
                sections.iter().enumerate().flat_map(|(i, n)| std::iter::repeat_n(list("ssm_multipliers", i), *n));
            values.chunks_mut(row).zip(by_row).for_each(|(row, m)| row.iter_mut().for_each(|x| *x *= m));
        }
        *tensor = floats(&tensor.shape, &values);
    }
}

#[test]
fn factors_of_falcon_h1_that_mlx_has_multiplied_into_weights_are_left_out() {
    for (name, tied) in [("falcon_h1", false), ("falcon_h1_norm", false), ("falcon_h1", true)] {
        let (mut config, mut tensors) = reference(name);
        let mut converted = tensors.clone();
        sanitise("falcon_h1", &mut converted);
        let refused = open(&converted, &config).err().unwrap().to_string();
        assert!(refused.contains("attention_in_multiplier") && refused.contains("GGUF"), "{refused}");
        config.extend([("attention_in_multiplier".into(), json!(1.0)), ("tie_word_embeddings".into(), json!(tied))]);
        if tied {
            tensors.remove("lm_head.weight");
        }
        let want = logits(&open(&tensors, &config).unwrap(), Products::Exact);
        folded(&config, &mut tensors);
        sanitise("falcon_h1", &mut tensors);
        let got = logits(&open(&tensors, &config).unwrap(), Products::Exact);
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max);
        assert!(got.len() == want.len() && worst < 1e-5, "{name}: logits differ by {worst:e}");
    }
}

#[test]
fn other_sizes_and_modes_are_refused_by_name() {
    let (mut config, tensors) = reference("qwen3");
    let (coded, _) = quantised(&tensors);
    for (recipe, name) in [
        (json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), "MLX mxfp4"),
        (json!({"group_size": 16, "bits": 4, "mode": "nvfp4"}), "MLX nvfp4"),
        (json!({"group_size": 64, "bits": 7}), "MLX (bits 7)"),
        (json!({"group_size": 48, "bits": 4}), "MLX (group_size 48)"),
        (json!({"bits": "four"}), "MLX (bits \"four\")"),
        (json!({"bits": 4, "lm_head": {"bits": 1}}), "MLX (bits 1)"),
        (json!({"bits": 4, "lm_head": {"mode": "mxfp8"}}), "MLX mxfp8"),
    ] {
        config.insert("quantization".into(), recipe);
        let error = open(&coded, &config).err().unwrap().to_string();
        assert!(error.contains(&format!("weights quantised by {name}")) && error.contains("GGUF"), "{error}");
    }
    // Of one size, not all of these matrices are.
    config.insert("quantization".into(), json!({"group_size": 64, "bits": 4}));
    let error = open(&coded, &config).err().unwrap().to_string();
    assert!(
        error.contains("tensor `") && error.contains("do not fit one another with 4 bits and groups of 64"),
        "{error}"
    );
}
