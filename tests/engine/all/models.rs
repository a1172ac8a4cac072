//! The models that random requests run on.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use pollster::block_on;
use selkie_core::{
    Result,
    backend::Backend,
    checkpoint::Checkpoint,
    config::Config,
    cpu::CpuBackend,
    engine::{
        Engine, EngineOptions,
        direct::{Direct, Sequence},
    },
    format::Products,
    models::{self, Architecture, Limits},
    source::{Dir, read_small},
    weights::Loader,
};

use crate::behind::Behind;

/// An architecture and weights for it.
pub(super) struct TestModel {
    pub name: String,
    pub architecture: Architecture,
    checkpoint: Checkpoint,
    products: Products,
    kv8: bool,
}

impl TestModel {
    pub fn micro(name: &str, config: &str) -> Self {
        let config = Config::parse("config.json", config.as_bytes()).unwrap();
        let (architecture, checkpoint) = (models::read(&config).unwrap(), Checkpoint::random(7));
        Self { name: name.into(), architecture, checkpoint, products: Products::Fast, kv8: false }
    }

    /// The same architecture with random weights in codes.
    fn coded(self, recipe: &str, products: Products) -> Self {
        let checkpoint = Checkpoint::random_coded(7, recipe.parse().unwrap());
        Self { name: format!("{} in {recipe}, {products:?}", self.name), checkpoint, products, ..self }
    }

    /// The same model with products that round no activations.
    pub fn exact(self) -> Self {
        Self { products: Products::Exact, ..self }
    }

    /// The same model with pages in 8 bits.
    pub fn in_8_bits(self) -> Self {
        Self { name: format!("{}, pages in 8 bits", self.name), kv8: true, ..self }
    }

    /// Whether it has pages at all.
    pub fn has_pages(&self) -> bool {
        self.architecture.spec().layers.iter().any(|layer| layer.kv.is_some())
    }

    /// The model of a reference folder, if its family is supported.
    pub fn golden(path: &Path) -> Option<Self> {
        let dir = Arc::new(Dir::open(path).unwrap());
        let config = block_on(read_small(dir.as_ref(), "config.json", 1 << 20)).unwrap()?;
        let config = Config::parse("config.json", &config).unwrap();
        let family = models::FAMILIES.iter().find(|f| config.model_type().is_ok_and(|t| t == f.model_type))?;
        Some(Self {
            name: path.file_name().unwrap().to_string_lossy().into(),
            architecture: (family.read)(&config).unwrap(),
            checkpoint: block_on(Checkpoint::open(dir)).unwrap(),
            products: Products::Fast,
            kv8: false,
        })
    }

    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    pub fn engine(&self, options: &EngineOptions, asynchronous: bool) -> Engine<Behind> {
        self.on(Behind::of(CpuBackend::with(self.products).kv8(self.kv8), asynchronous), options)
    }

    pub fn on<B: Backend>(&self, backend: B, options: &EngineOptions) -> Engine<B> {
        let (name, mut report) = (self.name.as_bytes(), |_| {});
        block_on(Engine::load(backend, &self.architecture, &self.checkpoint, name, options, &mut report)).unwrap()
    }
}

/// Models so small that thousands of cases run in a minute, one for each kind of layer.
pub(super) fn micro_models() -> Vec<TestModel> {
    let hybrid = r#"{"model_type":"nemotron_h","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "head_dim":8,"intermediate_size":16,"mamba_num_heads":2,"mamba_head_dim":8,"ssm_state_size":8,"n_groups":1,
        "conv_kernel":4,"vocab_size":40,"hybrid_override_pattern":"M*-M","max_position_embeddings":1024}"#;
    let recurrent = r#"{"model_type":"mamba2","hidden_size":16,"num_heads":4,"head_dim":8,"state_size":8,"n_groups":2,
        "num_hidden_layers":2,"vocab_size":40,"tie_word_embeddings":true}"#;
    let attention = r#"{"model_type":"llama","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "intermediate_size":16,"num_hidden_layers":2,"vocab_size":40,"max_position_embeddings":1024}"#;
    let delta = r#"{"model_type":"qwen3_next","hidden_size":16,"num_hidden_layers":3,"full_attention_interval":3,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"linear_num_key_heads":1,"linear_num_value_heads":2,
        "linear_key_head_dim":8,"linear_value_head_dim":8,"num_experts":4,"num_experts_per_tok":2,
        "moe_intermediate_size":8,"shared_expert_intermediate_size":8,"vocab_size":40,"max_position_embeddings":1024}"#;
    let shared = r#"{"model_type":"zamba2","hidden_size":16,"num_hidden_layers":4,"hybrid_layer_ids":[1,2,3],"num_mem_blocks":2,
        "num_attention_heads":2,"intermediate_size":24,"adapter_rank":4,"use_shared_attention_adapter":true,
        "use_mem_rope":true,"n_mamba_heads":4,"mamba_d_state":8,"vocab_size":40,"max_position_embeddings":1024}"#;
    let latent = r#"{"model_type":"kimi_linear","hidden_size":16,"num_hidden_layers":3,"num_attention_heads":2,
        "num_key_value_heads":2,"kv_lora_rank":12,"q_lora_rank":8,"qk_nope_head_dim":8,"qk_rope_head_dim":4,"v_head_dim":12,
        "linear_attn_config":{"full_attn_layers":[2],"kda_layers":[1,3],"num_heads":2,"head_dim":8},"intermediate_size":24,
        "num_experts":4,"num_experts_per_token":2,"num_expert_group":2,"topk_group":1,"moe_intermediate_size":8,
        "vocab_size":40,"model_max_length":1024}"#;
    vec![
        TestModel::micro("micro shared blocks", shared),
        TestModel::micro("micro latents", latent),
        TestModel::micro("micro hybrid", hybrid),
        TestModel::micro("micro recurrent", recurrent),
        TestModel::micro("micro attention", attention),
        TestModel::micro("micro delta", delta),
    ]
}

/// Hybrids in codes whose widths are those of blocks of 32, 64 and 256, with products in 8 bits and exact ones.
pub(super) fn coded_models() -> Vec<TestModel> {
    let hybrid = |hidden: usize| {
        let config = format!(
            r#"{{"model_type":"nemotron_h","hidden_size":{hidden},"num_attention_heads":2,"num_key_value_heads":1,
            "head_dim":32,"intermediate_size":{hidden},"mamba_num_heads":2,"mamba_head_dim":32,"ssm_state_size":8,
            "n_groups":1,"conv_kernel":4,"vocab_size":40,"hybrid_override_pattern":"M*-","max_position_embeddings":1024}}"#
        );
        TestModel::micro(&format!("hybrid of {hidden}"), &config)
    };
    let mut models = Vec::new();
    for products in [Products::Fast, Products::Exact] {
        for (hidden, recipe) in [(32, "q8_0"), (64, "nvfp4"), (96, "q5_0"), (256, "q4_k_m"), (128, "fp8")] {
            models.push(hybrid(hidden).coded(recipe, products));
        }
    }
    models
}

/// The reference folders, by name.
pub(super) fn golden_folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    let entries = std::fs::read_dir(golden).expect("the references are part of the repository");
    let mut folders: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    assert!(folders.len() >= 29, "{} folders", folders.len());
    folders
}

/// A model of each reference folder.
pub(super) fn golden_models() -> Vec<TestModel> {
    let models: Vec<_> = golden_folders().iter().filter_map(|path| TestModel::golden(path)).collect();
    assert!(models.len() >= 29, "{} models", models.len());
    models
}

/// Logits of every position of a prompt that is computed in steps of these sizes, without a scheduler.
pub(super) fn direct_logits<B: Backend>(
    backend: &B,
    architecture: &Architecture,
    checkpoint: &Checkpoint,
    ids: &[u32],
    steps: &[usize],
) -> Result<Vec<f32>> {
    let limits = Limits { max_tokens: 256, max_outputs: 256 };
    let mut report = |_| {};
    let mut loader = Loader::new(backend, checkpoint, &mut report);
    let model = block_on(models::build(architecture, &mut loader, limits))?;
    let mut direct = Direct::new(backend, &*model, limits, 4, 8)?;
    let mut sequence = Sequence::default();
    let logits = block_on(direct.prompt(&mut sequence, ids, steps))?;
    direct.release(sequence);
    Ok(logits)
}
