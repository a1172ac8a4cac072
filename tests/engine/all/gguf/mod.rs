//! GGUF files: the reference models written as such files, models of random blocks, tokenizers, and files that are broken.

mod broken;
mod convert;
mod families;
mod quantised;
mod tokenizers;
mod writer;
pub mod written;

use std::{collections::HashMap, ops::Range, path::Path, sync::Arc};

use pollster::block_on;
use safetensors::SafeTensors;
use selkie_core::{
    Error, Result,
    checkpoint::Checkpoint,
    config::Config,
    convert::Target,
    cpu::CpuBackend,
    format::Products,
    model_dir::ModelFiles,
    models,
    source::{Bytes, Dir, LocalFuture, Source},
};

use crate::models::{direct_logits, golden_folders};
use writer::Writer;

/// Files in memory, of which one is the model.
#[derive(Default)]
pub struct Memory {
    files: HashMap<String, Bytes>,
    gguf: String,
    /// What the user named: the file, unless this is a folder.
    label: String,
}

impl Memory {
    /// A GGUF file.
    pub fn of(name: &str, bytes: Vec<u8>) -> Self {
        Self {
            files: HashMap::from([(name.to_owned(), bytes.into())]),
            gguf: name.into(),
            label: format!("memory/{name}"),
        }
    }

    fn with(mut self, name: &str, bytes: Vec<u8>) -> Self {
        self.files.insert(name.into(), bytes.into());
        self
    }
}

impl Source for Memory {
    fn label(&self) -> String {
        self.label.clone()
    }
    fn path(&self, name: &str) -> String {
        format!("memory/{name}")
    }
    fn gguf(&self) -> Result<Option<String>> {
        Ok(Some(self.gguf.clone()))
    }
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok(self.files.get(name).map(|b| b.len() as u64))))
    }
    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let bytes = self.files[name].get(range.start as usize..range.end as usize);
        Box::pin(std::future::ready(bytes.ok_or_else(|| Error::model(self.path(name), "truncated"))))
    }
}

pub fn open(source: Memory) -> Result<ModelFiles> {
    block_on(ModelFiles::open(Arc::new(source), || 0))
}

/// Logits of every position of a prompt that is computed in two steps, on the CPU with exact products.
fn logits(config: &Config, checkpoint: &Checkpoint, ids: &[u32]) -> Result<Vec<f32>> {
    let first = ids.len() * 2 / 3;
    logits_by(Products::Exact, config, checkpoint, ids, &[first, ids.len() - first])
}

/// The same with products of a kind, in steps of these sizes.
pub fn logits_by(
    products: Products,
    config: &Config,
    checkpoint: &Checkpoint,
    ids: &[u32],
    steps: &[usize],
) -> Result<Vec<f32>> {
    direct_logits(&CpuBackend::with(products), &models::read(config)?, checkpoint, ids, steps)
}

/// Token ids that every reference model has.
pub fn some_ids() -> Vec<u32> {
    (0..70).map(|i| (i * 37 + 11) % 250).collect()
}

#[test]
fn reference_models_are_the_same_from_gguf() {
    let ids = some_ids();
    let mut converted = Vec::new();
    for folder in golden_folders() {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let Some(golden) = families::convert(&folder) else { continue };
        let dir = Arc::new(Dir::open(&folder).unwrap());
        let safe = block_on(ModelFiles::open(dir, || 0)).unwrap();
        let file = open(Memory::of("model.gguf", golden.out.bytes())).unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = logits(&safe.config, &safe.checkpoint, &ids).unwrap();
        let got = logits(&file.config, &file.checkpoint, &ids).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(file.checkpoint.passed_over(), [""; 0], "{name}");
        assert!(file.checkpoint.skipped().is_empty(), "{name}: {:?}", file.checkpoint.skipped());
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max);
        let limit = if ["llama", "qwen3", "lfm2"].contains(&name.as_str()) { 0.0 } else { 1e-5 };
        assert!(got.len() == want.len() && worst <= limit, "{name}: logits differ by {worst:e}");
        converted.push(name);
    }
    let expected = "bamba falcon_h1 falcon_h1_norm falcon_mamba granite_all_attention granitemoehybrid granitemoehybrid_dense jamba \
         lfm2 lfm2_moe llama llama_bias3 mamba mamba2 nemotron_h nemotron_h_groups nemotron_h_latent nemotron_h_moe qwen3 \
         qwen3_5_moe_text qwen3_5_text qwen3_next";
    for name in expected.split_whitespace() {
        assert!(converted.iter().any(|c| c == name), "{name} is not among {converted:?}");
    }
}

/// The reference was made from the decoded weights by other code, see `models/demo/training`. Products of integers round
/// activations: with them the ids are compared, and of the logits the distance.
#[test]
fn the_demo_model_has_the_logits_of_its_reference() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let files = written::folder(&dir);
    let entries: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
    let reference = std::fs::read(dir.join("reference.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&reference).unwrap();
    let ids = |list: &serde_json::Value| -> Vec<u32> {
        list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let mut compared = 0;
    for (i, entry) in entries.as_array().unwrap().iter().enumerate() {
        let Ok(rows) = reference.tensor(&format!("prompt{i}.logits")) else { continue };
        let want: Vec<f32> = bytemuck::pod_collect_to_vec(rows.data());
        let (prompt, answer) = (ids(&entry["prompt_ids"]), ids(&entry["answer_ids"]));
        let asked: Vec<u32> = [&prompt[..], &answer[..rows.shape()[0] - 1]].concat();
        let steps: Vec<usize> = asked.chunks(200).map(<[u32]>::len).collect();
        for products in [Products::Exact, Products::Fast] {
            let all = logits_by(products, &files.config, &files.checkpoint, &asked, &steps).unwrap();
            let got = &all[(prompt.len() - 1) * rows.shape()[1]..];
            assert_eq!(got.len(), want.len());
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / (1.0 + w.abs())).fold(0.0, f32::max);
            let distance = written::distance(got, &want);
            println!("prompt {i}, {products:?}: {worst:.1e}, all of them {distance:.1e}");
            let near = if products == Products::Exact { worst <= 1e-4 } else { distance <= 0.02 };
            assert!(near, "prompt {i}, {products:?}: {worst}, {distance}");
            for (row, id) in got.chunks(rows.shape()[1]).zip(&answer) {
                let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
                assert_eq!(best as u32, *id, "prompt {i}, {products:?}");
            }
        }
        compared += 1;
    }
    assert_eq!(compared, 7);
}

#[test]
fn a_configuration_beside_the_file_counts_where_it_can_describe_it() {
    let file = |name: &str| {
        let folder = golden_folders().into_iter().find(|f| f.ends_with(name)).unwrap();
        let config = std::fs::read(folder.join("config.json")).unwrap();
        let bytes = written::write(&written::folder(&folder), Target::F32).unwrap().0;
        Memory { label: "memory".into(), ..Memory::of("model.gguf", bytes).with("config.json", config) }
    };
    let files = open(file("nemotron_h")).unwrap();
    assert!(files.gguf().is_none() && files.config.file().ends_with("config.json"));
    logits(&files.config, &files.checkpoint, &some_ids()).unwrap();
    for (name, arch) in [("qwen3_5_text", "qwen35"), ("falcon_h1", "falcon-h1")] {
        let why = open(file(name)).err().unwrap().to_string();
        assert!(why.contains(arch) && why.contains("give the GGUF file itself"), "{why}");
    }
}

#[test]
fn tensors_that_are_copied_permuted_or_split_are_equal_bit_for_bit() {
    let mut compared = 0;
    for folder in golden_folders() {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        // The weights of these hold the family's multipliers, or rows more than once.
        if name.starts_with("falcon_h1") || name.starts_with("qwen3_5") {
            continue;
        }
        let Some(golden) = families::convert(&folder) else { continue };
        let (_, safe) = convert::open(&folder);
        let file = open(Memory::of("model.gguf", golden.out.bytes())).unwrap();
        for tensor in safe.names().filter(|n| file.checkpoint.contains(n)) {
            let small_change = ["A_log", "layernorm", "norm.weight", "_norm"].iter().any(|part| tensor.contains(part));
            let shape = &safe.info(tensor).unwrap().shape;
            let values = |c: &Checkpoint| {
                let raw = block_on(c.get(tensor, shape)).unwrap_or_else(|e| panic!("{name}: {e}"));
                raw.dtype.to_f32(&raw.bytes)
            };
            let (got, want) = (values(&file.checkpoint), values(&safe));
            if small_change {
                let near = got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-6 * (1.0 + b.abs()));
                assert!(near, "{name}: {tensor}");
            } else {
                assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: {tensor}");
                compared += 1;
            }
        }
    }
    assert!(compared > 300, "{compared} tensors");
}

#[test]
fn a_split_model_is_the_model() {
    let golden = families::convert(&golden_folders().into_iter().find(|f| f.ends_with("lfm2")).unwrap()).unwrap();
    let ids: Vec<u32> = (0..20).collect();
    let whole = open(Memory::of("model.gguf", golden.out.bytes())).unwrap();
    let want = logits(&whole.config, &whole.checkpoint, &ids).unwrap();
    let parts = golden.out.split("m", 3);
    let mut source = Memory::of(&parts[0].0, parts[0].1.clone());
    for (name, bytes) in &parts[1..] {
        source = source.with(name, bytes.clone());
    }
    let split = open(source).unwrap();
    assert_eq!(logits(&split.config, &split.checkpoint, &ids).unwrap(), want);
    let error = open(Memory::of(&parts[0].0, parts[0].1.clone())).err().unwrap().to_string();
    assert!(error.contains("m-00002-of-00003.gguf: no such file"), "{error}");
    let renamed = open(Memory::of("m.gguf", parts[0].1.clone())).err().unwrap().to_string();
    assert!(renamed.contains("one of 3 files"), "{renamed}");
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Writer)| {
        let golden = families::convert(&golden_folders().into_iter().find(|f| f.ends_with("llama")).unwrap()).unwrap();
        let mut out = golden.out;
        change(&mut out);
        let files = open(Memory::of("model.gguf", out.bytes()));
        files.and_then(|f| logits(&f.config, &f.checkpoint, &[1, 2, 3])).unwrap_err().to_string()
    };
    let error = refused(&|w| w.keys[0].1 = "plamo2".into());
    assert!(error.contains("architecture \"plamo2\" is not supported") && error.contains("nemotron_h_moe"), "{error}");
    let error = refused(&|w| {
        let t = w.tensors.get_mut("blk.0.attn_v.weight").unwrap();
        // Rows of 256 of Q2_K have 84 bytes.
        *t = (vec![1, 256], 10, vec![0; 84]);
    });
    assert!(error.contains("`model.layers.0.self_attn.v_proj.weight`"), "{error}");
    let error = refused(&|w| w.key("llama.rope.scaling.type", "yarn"));
    assert!(error.contains("yarn"), "{error}");
    let error = refused(&|w| w.keys.retain(|(k, _)| k != "llama.block_count"));
    assert!(error.contains("key `llama.block_count` is missing"), "{error}");
}
