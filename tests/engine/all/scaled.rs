//! Checkpoints of safetensors files in recipes of 8-bit floats and NVFP4.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use pollster::block_on;
use selkie_core::{
    Error, Result,
    format::Products,
    model_dir::ModelFiles,
    source::{Bytes, LocalFuture, Source},
};

use crate::{gguf::logits_by, random::Random};

const CONFIG: &str = r#"{"model_type":"nemotron_h","hidden_size":128,"num_attention_heads":4,"num_key_value_heads":2,
    "head_dim":32,"intermediate_size":256,"mamba_num_heads":4,"mamba_head_dim":32,"ssm_state_size":16,"n_groups":1,
    "conv_kernel":4,"vocab_size":40,"hybrid_override_pattern":"M*-","max_position_embeddings":1024,
    "quantization_config":RECIPE}"#;

/// `config.json` and `model.safetensors` in memory.
pub struct Files(pub [(&'static str, Vec<u8>); 2]);

impl Source for Files {
    fn label(&self) -> String {
        "memory".into()
    }
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        let size = self.0.iter().find(|f| f.0 == name).map(|f| f.1.len() as u64);
        Box::pin(std::future::ready(Ok(size)))
    }
    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let file = &self.0.iter().find(|f| f.0 == name).expect("one of the files").1;
        let bytes = file.get(range.start as usize..range.end as usize).map(|b| Bytes::from(b.to_vec()));
        Box::pin(std::future::ready(bytes.ok_or_else(|| Error::model("memory", "truncated"))))
    }
}

/// Dtype, shape and bytes by name.
#[derive(Default)]
struct Tensors(BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>);

impl Tensors {
    fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.0.insert(name.into(), ("F32", shape.to_vec(), bytes));
    }

    fn open(&self, recipe: &str) -> Result<ModelFiles> {
        let (mut entries, mut data) = (Vec::new(), Vec::<u8>::new());
        for (name, (dtype, shape, bytes)) in &self.0 {
            let (from, to) = (data.len(), data.len() + bytes.len());
            entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#));
            data.extend(bytes);
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        let config = CONFIG.replace("RECIPE", recipe).into_bytes();
        let files = Files([("config.json", config), ("model.safetensors", file)]);
        block_on(ModelFiles::open(Arc::new(files), || 0))
    }
}

/// A matrix of 8-bit floats with scales of this shape under this name.
fn eight(to: &mut Tensors, name: &str, [n, k]: [usize; 2], leaf: &str, shape: &[usize], random: &mut Random) {
    let codes = (0..n * k).map(|_| random.next() as u8 & 0xbf).collect();
    to.0.insert(format!("{name}.weight"), ("F8_E4M3", vec![n, k], codes));
    let scales = random.floats(shape.iter().product(), 0.1, 0.05);
    to.floats(&format!("{name}.{leaf}"), shape, &scales);
}

/// A matrix of NVFP4 as modelopt writes it, or else as compressed-tensors does.
fn four(to: &mut Tensors, name: &str, [n, k]: [usize; 2], modelopt: bool, random: &mut Random) {
    let codes = (0..n * k / 2).map(|_| random.next() as u8).collect();
    let scales = (0..n * k / 16).map(|_| 0x28 | random.next() as u8 & 15).collect();
    to.0.insert(format!("{name}.weight_scale"), ("F8_E4M3", vec![n, k / 16], scales));
    let (leaf, factor, value) =
        if modelopt { ("weight", "weight_scale_2", 0.06) } else { ("weight_packed", "weight_global_scale", 17.0) };
    to.0.insert(format!("{name}.{leaf}"), ("U8", vec![n, k / 2], codes));
    to.floats(&format!("{name}.{factor}"), &[1], &[value]);
}

/// A matrix of 4 bits as gptq (by columns), awq (likewise) or compressed-tensors writes it.
fn integers(to: &mut Tensors, name: &str, [n, k]: [usize; 2], recipe: &str, random: &mut Random) {
    let (group, scale) = (64, |r: &mut Random, n| r.floats(n, 0.02, 0.01));
    let mut words = |n: usize| (0..n).flat_map(|_| (random.next() as u32).to_le_bytes()).collect::<Vec<u8>>();
    let [codes, zeros] = match recipe {
        "gptq" => [("qweight", [k / 8, n]), ("qzeros", [k / group, n / 8])],
        "awq" => [("qweight", [k, n / 8]), ("qzeros", [k / group, n / 8])],
        _ => [("weight_packed", [n, k / 8]), ("weight_zero_point", [n / 8, k / group])],
    };
    for (leaf, shape) in [codes, zeros] {
        let words = words(shape[0] * shape[1]);
        to.0.insert(format!("{name}.{leaf}"), ("I32", shape.to_vec(), words));
    }
    let values = scale(random, n * k / group);
    match recipe {
        "compressed-tensors" => to.floats(&format!("{name}.weight_scale"), &[n, k / group], &values),
        _ => to.floats(&format!("{name}.scales"), &[k / group, n], &values),
    }
    if recipe == "gptq" {
        let groups = (0..k).flat_map(|c| (c as u32 * 7 % (k / group) as u32).to_le_bytes()).collect();
        to.0.insert(format!("{name}.g_idx"), ("I32", vec![k], groups));
    }
}

/// A hybrid whose layers are stored in the given recipes, all of them mixed.
fn mixed() -> Tensors {
    let mut index = 0;
    hybrid(|to, name, shape, r| {
        index += 1;
        match index {
            1 => eight(to, name, shape, "weight_scale", &[], r),
            2 => eight(to, name, shape, "weight_scale_inv", &[1, 1], r),
            3 => eight(to, name, shape, "weight_scale", &[128, 1], r),
            4 => eight(to, name, shape, "weight_scale", &[64], r),
            5 => four(to, name, shape, true, r),
            6 => four(to, name, shape, false, r),
            7 => eight(to, name, shape, "weight_scale_inv", &[2, 1], r),
            _ => four(to, name, shape, true, r),
        }
    })
}

/// A hybrid whose matrices `store` stores, by name and shape.
fn hybrid(mut store: impl FnMut(&mut Tensors, &str, [usize; 2], &mut Random)) -> Tensors {
    let (mut to, mut random) = (Tensors::default(), Random(3));
    let (d, inner, conv) = (128, 128, 160);
    let mut plain = |to: &mut Tensors, name: &str, shape: &[usize], around: f32, width: f32| {
        let values = random.floats(shape.iter().product(), around, width);
        to.floats(&format!("backbone.{name}"), shape, &values);
    };
    plain(&mut to, "embeddings.weight", &[40, d], 0.0, 1.0);
    plain(&mut to, "norm_f.weight", &[d], 1.0, 0.1);
    for i in 0..3 {
        plain(&mut to, &format!("layers.{i}.norm.weight"), &[d], 1.0, 0.1);
    }
    plain(&mut to, "layers.0.mixer.conv1d.weight", &[conv, 1, 4], 0.0, 0.5);
    plain(&mut to, "layers.0.mixer.conv1d.bias", &[conv], 0.0, 0.1);
    plain(&mut to, "layers.0.mixer.dt_bias", &[4], -2.0, 1.0);
    plain(&mut to, "layers.0.mixer.A_log", &[4], 1.0, 0.5);
    plain(&mut to, "layers.0.mixer.D", &[4], 1.0, 0.5);
    plain(&mut to, "layers.0.mixer.norm.weight", &[inner], 1.0, 0.1);
    let head = random.floats(40 * d, 0.0, 0.1);
    to.floats("lm_head.weight", &[40, d], &head);
    let r = &mut random;
    let layer = |i: usize, leaf: &str| format!("backbone.layers.{i}.mixer.{leaf}");
    for (i, leaf, shape) in [
        (0, "in_proj", [2 * inner + 2 * 16 + 4, d]),
        (0, "out_proj", [d, inner]),
        (1, "q_proj", [128, d]),
        (1, "k_proj", [64, d]),
        (1, "v_proj", [64, d]),
        (1, "o_proj", [d, 128]),
        (2, "up_proj", [256, d]),
        (2, "down_proj", [d, 256]),
    ] {
        store(&mut to, &layer(i, leaf), shape, r);
    }
    to
}

#[test]
fn a_mix_of_recipes_equals_its_decoded_values_bit_for_bit() {
    let coded = mixed().open(r#"{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION"}"#).unwrap();
    // NVFP4 has integer codes.
    equals_its_decoded_values(&coded, true);
}

#[test]
fn integers_with_scales_and_zero_points_equal_their_decoded_values_bit_for_bit() {
    let groups = r#""config_groups":{"a":{"weights":{"num_bits":4}}},"format":"pack-quantized""#;
    for (recipe, config, rounds) in [
        ("gptq", r#""bits":4,"group_size":64,"desc_act":false"#, true),
        // Columns whose groups are in any order are decoded.
        ("gptq", r#""bits":4,"group_size":64,"desc_act":true"#, false),
        ("awq", r#""bits":4,"group_size":64,"version":"gemm""#, true),
        ("compressed-tensors", groups, true),
    ] {
        let tensors = hybrid(|to, name, shape, r| match shape[0] % 8 {
            0 => integers(to, name, shape, recipe, r),
            // Words of 8 rows do not fit it.
            _ => to.floats(&format!("{name}.weight"), &shape, &r.floats(shape[0] * shape[1], 0.0, 0.1)),
        });
        let coded = tensors.open(&format!(r#"{{"quant_method":"{recipe}",{config}}}"#)).unwrap();
        equals_its_decoded_values(&coded, rounds);
    }
}

/// `rounds`: whether products of integers round activations.
fn equals_its_decoded_values(coded: &ModelFiles, rounds: bool) {
    assert!(coded.checkpoint.is_coded());
    let mut decoded = Tensors::default();
    for name in coded.checkpoint.names() {
        let shape = coded.checkpoint.info(name).unwrap().shape.clone();
        let raw = block_on(coded.checkpoint.get(name, &shape)).unwrap();
        decoded.floats(name, &shape, &raw.dtype.to_f32(&raw.bytes));
    }
    let plain = decoded.open("null").unwrap();
    assert!(!plain.checkpoint.is_coded());
    let ids: Vec<u32> = (0..80).map(|i| (i * 29 + 3) % 40).collect();
    let logits =
        |m: &ModelFiles, products, steps: &[usize]| logits_by(products, &m.config, &m.checkpoint, &ids, steps).unwrap();
    let want = logits(&plain, Products::Fast, &[80]);
    assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| x.abs() > 0.1));
    assert_eq!(logits(coded, Products::Exact, &[50, 30]), want);
    let fast = logits(coded, Products::Fast, &[80]);
    assert_eq!(fast != want, rounds);
    assert_eq!(logits(coded, Products::Fast, &[1; 80]), fast);
    assert_eq!(coded.checkpoint.passed_over(), [""; 0]);
}

/// A hybrid of 8-bit floats, with scales of activations in the file or without.
fn eights(input_scales: bool) -> Tensors {
    hybrid(|to, name, shape, r| {
        eight(to, name, shape, "weight_scale", &[1], r);
        if input_scales {
            to.floats(&format!("{name}.input_scale"), &[1], &[0.05]);
        }
    })
}

#[test]
fn activations_are_rounded_where_the_recipe_says_so() {
    let ids: Vec<u32> = (0..80).map(|i| (i * 29 + 3) % 40).collect();
    let logits = |m: &ModelFiles, products, steps: &[usize]| {
        let logits = logits_by(products, &m.config, &m.checkpoint, &ids, steps).unwrap();
        assert!(logits.iter().all(|x| x.is_finite()));
        logits
    };
    let groups = |inputs: &str| {
        let weights = r#"{"num_bits":8,"type":"float","strategy":"tensor"}"#;
        format!(
            r#"{{"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{{"a":{{"weights":{weights},"input_activations":{inputs}}}}}}}"#
        )
    };
    let modelopt = r#"{"quant_method":"modelopt","quant_algo":"FP8"}"#.to_owned();
    let mut rounded: Option<Vec<f32>> = None;
    for (recipe, input_scales, rounds) in [
        (r#"{"quant_method":"fp8","activation_scheme":"dynamic"}"#.to_owned(), false, true),
        (groups(r#"{"num_bits":8,"type":"float","dynamic":true,"strategy":"token"}"#), false, true),
        (groups("null"), false, false),
        (modelopt.clone(), true, true),
        (modelopt, false, false),
    ] {
        let m = eights(input_scales).open(&recipe).unwrap();
        let exact = logits(&m, Products::Exact, &[80]);
        let fast = logits(&m, Products::Fast, &[80]);
        assert_eq!(fast != exact, rounds, "{recipe}");
        // Whatever the number of rows.
        assert_eq!(logits(&m, Products::Fast, &[1; 80]), fast, "{recipe}");
        assert_eq!(logits(&m, Products::Fast, &[50, 7, 23]), fast, "{recipe}");
        if rounds {
            let error = |x: &[f32]| x.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            let size: f64 = exact.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!(error(&fast) / size < 2e-2, "{recipe}: {}", error(&fast) / size);
            // All of these recipes round alike.
            assert_eq!(*rounded.get_or_insert_with(|| fast.clone()), fast, "{recipe}");
        }
        assert_eq!(m.checkpoint.passed_over(), [""; 0]);
    }
}

/// Queries and keys of 8-bit floats with rounded activations, values of plain floats, all three one linear layer.
#[test]
fn a_layer_of_which_one_matrix_is_not_rounded() {
    let ids: Vec<u32> = (0..40).map(|i| (i * 29 + 3) % 40).collect();
    let model = |plain_values: bool, coded: bool| {
        let tensors = hybrid(|to, name, shape, r| match name.ends_with("v_proj") && plain_values {
            true => to.floats(&format!("{name}.weight"), &shape, &r.floats(shape[0] * shape[1], 0.0, 0.1)),
            false => eight(to, name, shape, "weight_scale", &[1], r),
        });
        let m = tensors.open(r#"{"quant_method":"fp8"}"#).unwrap();
        let products = if coded { Products::Fast } else { Products::Exact };
        logits_by(products, &m.config, &m.checkpoint, &ids, &[40]).unwrap()
    };
    for plain_values in [true, false] {
        let (fast, exact) = (model(plain_values, true), model(plain_values, false));
        let sum = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error = sum(&mut fast.iter().zip(&exact).map(|(a, b)| a - b)) / sum(&mut exact.iter().copied());
        assert!(error > 0.0 && error < 2e-2, "{error}");
    }
}

#[test]
fn other_recipes_are_refused_by_name() {
    let mut tensors = mixed();
    tensors.0.insert("backbone.layers.2.mixer.up_proj.qweight".into(), ("I32", vec![1], vec![0; 4]));
    for (recipe, name) in [
        (r#"{"quant_method":"gptq","bits":3}"#, "gptq (3 bits)"),
        (r#"{"quant_method":"gptq","bits":4,"checkpoint_format":"marlin"}"#, "gptq (4 bits)"),
        (r#"{"quant_method":"awq","bits":4,"version":"gemv"}"#, "awq (4 bits)"),
        (r#"{"quant_method":"bitsandbytes"}"#, "bitsandbytes"),
        (r#"{"quant_method":"modelopt","quant_algo":"INT4_AWQ"}"#, "modelopt INT4_AWQ"),
        (
            r#"{"quant_method":"compressed-tensors","config_groups":{"group_0":{"format":"pack-quantized","weights":{"num_bits":3}}}}"#,
            "compressed-tensors pack-quantized",
        ),
    ] {
        let error = tensors.open(recipe).err().unwrap().to_string();
        assert!(error.contains(&format!("weights quantised by {name}")) && error.contains("nvfp4"), "{error}");
    }
}
