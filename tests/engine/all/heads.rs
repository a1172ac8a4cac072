//! Heads for drafts: their logits against the references of `tests/heads`, and what they may change, which is nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pollster::block_on;
use safetensors::SafeTensors;
use selkie_core::{
    checkpoint::Checkpoint,
    config::Config,
    convert::{Conversion, Target},
    cpu::CpuBackend,
    engine::{
        Engine, EngineOptions, Event, Request, Speculate,
        direct::{Cut, Direct, Sequence, Share},
    },
    model_dir::ModelFiles,
    models::{self, Architecture, Limits},
    source::Dir,
    weights::Loader,
};

use crate::{
    behind::Behind,
    drafts::contents,
    gguf::{self, written},
    models::TestModel,
    promise::{Drafts, run},
};

/// Largest difference of a logit, in units of 1 + |reference|.
const TOLERANCE: f32 = 1e-4;
const LIMITS: Limits = Limits { max_tokens: 128, max_outputs: 128 };

fn folders() -> Vec<PathBuf> {
    let heads = Path::new(env!("CARGO_MANIFEST_DIR")).join("../heads");
    let mut all: Vec<_> = std::fs::read_dir(heads).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.is_dir());
    all.sort();
    assert_eq!(all.len(), 5);
    all
}

/// What the formulas give: `ids` `[T]`, `logits` `[T, V]`, `heads` `[T - 1, V]` of the head at the positions from 1 on, and those
/// `chain` `[K, V]` of the ids `more` `[K]` after the end, each from the head's result of the one before.
struct Reference {
    ids: Vec<u32>,
    logits: Vec<f32>,
    heads: Vec<f32>,
    more: Vec<u32>,
    chain: Vec<f32>,
}

impl Reference {
    fn read(dir: &Path) -> Self {
        let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| bytemuck::pod_collect_to_vec::<u8, u32>(file.tensor(name).unwrap().data());
        let floats = |name: &str| words(name).into_iter().map(f32::from_bits).collect();
        Self {
            ids: words("ids"),
            logits: floats("logits"),
            heads: floats("heads"),
            more: words("more"),
            chain: floats("chain"),
        }
    }
}

fn open(dir: &Path) -> (Architecture, Checkpoint) {
    let config = std::fs::read(dir.join("config.json")).unwrap();
    let config = Config::parse("config.json", &config).unwrap();
    let checkpoint = block_on(Checkpoint::open(Arc::new(Dir::open(dir).unwrap()))).unwrap();
    (models::read(&config).unwrap(), checkpoint)
}

fn compare(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs() / (1.0 + w.abs())).fold(0.0, f32::max);
    println!("{what}: {worst:.1e}");
    assert!(worst <= TOLERANCE && got.iter().all(|x| x.is_finite()), "{what}: {worst}");
}

/// The head's logits at each position from 1 on, after a trunk that computes `first` tokens at once and then one by one.
async fn heads_after(direct: &mut Direct<'_, CpuBackend>, ids: &[u32], first: usize) -> (Vec<f32>, Sequence) {
    let (mut sequence, mut heads) = (Sequence::default(), Vec::new());
    let (at_once, rest) = ids.split_at(first);
    if first > 0 {
        direct.step(&mut [Share { sequence: &mut sequence, ids: at_once, cuts: &[] }]).await.unwrap();
    }
    for id in rest {
        if sequence.len > 0 {
            heads.extend(direct.drafts(&mut sequence, &[*id]).await.unwrap());
        }
        direct.step(&mut [Share { sequence: &mut sequence, ids: &[*id], cuts: &[] }]).await.unwrap();
    }
    (heads, sequence)
}

/// A model out of a GGUF file that the engine writes of it.
fn as_gguf(files: &ModelFiles) -> ModelFiles {
    let plan = block_on(Conversion::plan(files, Target::F32, true)).unwrap();
    assert!(!plan.without_head);
    gguf::open(gguf::Memory::of("model.gguf", written::write_plan(&plan).unwrap().0)).unwrap()
}

#[test]
fn logits_are_those_of_the_formulas() {
    for dir in folders() {
        let name = dir.file_name().unwrap().to_string_lossy();
        let (architecture, checkpoint) = open(&dir);
        logits(&name, &architecture, &checkpoint, &Reference::read(&dir));
        let file = as_gguf(&written::folder(&dir));
        let architecture = models::read(&file.config).unwrap();
        logits(&format!("{name} as GGUF"), &architecture, &file.checkpoint, &Reference::read(&dir));
        // A file is converted with what it has.
        let again = as_gguf(&file);
        assert!(architecture.head_parameters(&again.checkpoint).is_some(), "{name}");
        assert_eq!(block_on(again.fingerprint()).unwrap(), block_on(file.fingerprint()).unwrap(), "{name}");
    }
}

#[test]
fn a_head_that_other_programs_refuse_is_written_only_if_asked_for() {
    for dir in folders() {
        let files = written::folder(&dir);
        let alone = dir.ends_with("nemotron_h_mlp");
        for selkie_only in [false, true] {
            let plan = block_on(Conversion::plan(&files, Target::Bf16, selkie_only)).unwrap();
            assert_eq!(plan.without_head, alone && !selkie_only, "{}", dir.display());
            let for_selkie = if alone && selkie_only { vec!["its head for drafts"] } else { Vec::new() };
            assert_eq!(plan.for_selkie, for_selkie, "{}", dir.display());
            let file = gguf::open(gguf::Memory::of("a.gguf", written::write_plan(&plan).unwrap().0)).unwrap();
            let head = models::read(&file.config).unwrap().head_parameters(&file.checkpoint);
            assert_eq!(head.is_some(), !plan.without_head, "{}", dir.display());
        }
    }
}

fn logits(name: &str, architecture: &Architecture, checkpoint: &Checkpoint, want: &Reference) {
    let architecture = architecture.with_head(checkpoint).unwrap();
    let (backend, mut report) = (CpuBackend::new(), |_| {});
    let mut loader = Loader::new(&backend, checkpoint, &mut report);
    let model = block_on(models::build(&architecture, &mut loader, LIMITS)).unwrap();
    let vocab = architecture.vocab;
    let mut direct = Direct::new(&backend, model.as_ref(), LIMITS, 8, 8).unwrap();
    let trunk = block_on(direct.prompt(&mut Sequence::default(), &want.ids, &[])).unwrap();
    compare(&format!("{name}, the trunk"), &trunk, &want.logits);
    for first in [0, 1, 9, 64, 67] {
        let (heads, mut end) = block_on(heads_after(&mut direct, &want.ids, first));
        compare(
            &format!("{name}, the head after {first} tokens"),
            &heads,
            &want.heads[first.saturating_sub(1) * vocab..],
        );
        let chain = block_on(direct.drafts(&mut end, &want.more)).unwrap();
        compare(&format!("{name}, drafts of drafts after {first} tokens"), &chain, &want.chain);
        direct.release(end);
    }
    // A state that was captured has what the head needs.
    let mut whole = Sequence::default();
    let cuts = [Cut { at: 64, capture: true }];
    let shares = &mut [Share { sequence: &mut whole, ids: &want.ids, cuts: &cuts }];
    let mut captured = block_on(direct.step(shares)).unwrap().remove(0).captures.remove(0);
    let head = block_on(direct.drafts(&mut captured, &want.ids[64..65])).unwrap();
    compare(&format!("{name}, the head after a capture"), &head, &want.heads[63 * vocab..64 * vocab]);
}

/// Small models with heads: random ones, and those of the references.
pub(super) fn models() -> Vec<TestModel> {
    let nemotron = r#"{"model_type":"nemotron_h","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "head_dim":8,"mamba_num_heads":2,"mamba_head_dim":8,"ssm_state_size":8,"n_groups":1,"conv_kernel":4,"vocab_size":40,
        "hybrid_override_pattern":"ME*E","max_position_embeddings":1024,"n_routed_experts":4,"num_experts_per_tok":2,
        "moe_intermediate_size":8,"n_shared_experts":0,"num_nextn_predict_layers":1,"mtp_hybrid_override_pattern":"*E"}"#;
    let qwen = r#"{"model_type":"qwen3_5_text","hidden_size":16,"num_hidden_layers":3,"full_attention_interval":3,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"linear_num_key_heads":1,"linear_num_value_heads":2,
        "linear_key_head_dim":8,"linear_value_head_dim":8,"intermediate_size":24,"vocab_size":40,
        "max_position_embeddings":1024}"#;
    let mlps = r#"{"model_type":"nemotron_h","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,
        "head_dim":8,"intermediate_size":24,"mamba_num_heads":2,"mamba_head_dim":8,"ssm_state_size":8,"n_groups":1,
        "conv_kernel":4,"vocab_size":40,"hybrid_override_pattern":"M-*-","max_position_embeddings":1024,
        "num_nextn_predict_layers":1,"mtp_hybrid_override_pattern":"*-"}"#;
    let micro = [
        ("micro nemotron with a head", nemotron),
        ("micro nemotron with a head of attention and MLP", mlps),
        ("micro qwen with a head", qwen),
    ];
    let micro = micro.map(|(name, config)| TestModel::micro(name, config));
    micro.into_iter().chain(folders().iter().filter_map(|dir| TestModel::golden(dir))).collect()
}

#[test]
fn drafts_of_the_head_change_nothing() {
    let [.., accepted] = run(models(), 60, Drafts::Head);
    assert!(accepted > 500, "{accepted} drafts accepted");
}

/// A chat of three turns, and what the cache holds after it.
fn chat(model: &TestModel, drafts: Option<usize>) -> (Vec<u32>, Engine<Behind>) {
    let mut options = EngineOptions { context: Some(512), speculate: Speculate::Mtp, ..EngineOptions::default() };
    options.drafts = drafts.unwrap_or(1);
    let (mut engine, mut text) = (model.engine(&options, true), vec![1, 2, 3]);
    for turn in 0..3 {
        text.push(turn);
        let mut request = Request { prompt: text.clone(), max_tokens: 100, ..Request::default() };
        // A penalty that changes nothing keeps a request from drafting.
        request.sampling.repetition_penalty = if drafts.is_some() { 1.0 } else { 1.0 + f32::EPSILON };
        engine.submit(request).unwrap();
        while !engine.is_idle() {
            engine.poison_free().unwrap();
            for event in block_on(engine.step()).unwrap() {
                if let Event::Token { token, .. } = event {
                    text.push(token);
                }
            }
        }
    }
    (text, engine)
}

#[test]
fn states_and_pages_are_those_of_the_trunk_alone() {
    for model in models() {
        let (text, without) = chat(&model, None);
        assert_eq!(without.stats().drafts.rows, 0);
        let reused = without.stats().tokens_reused;
        assert!(reused >= 192, "{}: {reused} tokens reused", model.name);
        for drafts in [1, 3, 7] {
            let (same, with) = chat(&model, Some(drafts));
            let stats = with.stats();
            assert!(same == text, "{}: {drafts} drafts change the text", model.name);
            assert!(stats.drafts.rows > 100 && stats.drafts.tokens > 100 * drafts as u64, "{:?}", stats.drafts);
            assert_eq!(stats.tokens_reused, reused, "{}: {drafts} drafts", model.name);
            assert!(contents(&with) == contents(&without), "{}: {drafts} drafts leave other values", model.name);
        }
    }
}

/// Answers of at most 200 tokens to `prompts` at once, half of them sampled.
fn answers(engine: &mut Engine<Behind>, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let ids = prompts.iter().enumerate().map(|(i, prompt)| {
        let mut request = Request { prompt: prompt.clone(), max_tokens: 200, stop_ids: vec![2], ..Request::default() };
        if i % 2 == 1 {
            request.sampling.temperature = 0.8;
            request.sampling.seed = i as u64;
        }
        engine.submit(request).unwrap()
    });
    let ids: Vec<_> = ids.collect();
    let mut answers = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in block_on(engine.step()).unwrap() {
            if let Event::Token { id, token, .. } = event {
                answers[ids.iter().position(|i| *i == id).unwrap()].push(token);
            }
        }
    }
    answers
}

#[test]
fn the_demo_model_drafts_most_of_its_stories() {
    let demo = TestModel::golden(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")).unwrap();
    let reference: serde_json::Value =
        serde_json::from_slice(include_bytes!("../../../models/demo/reference.json")).unwrap();
    let ids = |list: &serde_json::Value| -> Vec<u32> {
        list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let entries = &reference.as_array().unwrap()[..6];
    let prompts: Vec<_> = entries.iter().map(|entry| ids(&entry["prompt_ids"])).collect();
    let engine = |speculate| {
        // In a batch on the CPU more rows cost more than they are worth.
        let max_batch = if speculate == Speculate::Auto { 1 } else { 8 };
        demo.engine(&EngineOptions { context: Some(512), max_batch, speculate, ..EngineOptions::default() }, true)
    };
    let want = answers(&mut engine(Speculate::Off), &prompts);
    for speculate in [Speculate::Mtp, Speculate::Auto] {
        let mut on = engine(speculate);
        assert!(answers(&mut on, &prompts) == want, "drafts change the text");
        let drafts = on.stats().drafts;
        // A greedy story has nearly all right, a sampled one less; drafts past the end of an answer count as wrong.
        assert!(drafts.rows > 20 && 2 * drafts.accepted() > drafts.tokens, "{speculate:?}: {drafts:?}");
    }
}

#[test]
fn an_engine_without_a_head_is_refused_with_a_way_out() {
    let (architecture, checkpoint) = open(&folders()[3]);
    let none = Architecture { head: None, ..architecture };
    let message = none.with_head(&checkpoint).unwrap_err().to_string();
    assert!(message.contains("MTP head with qwen3_5") && message.contains("--speculate ngram"), "{message}");
    let load = |speculate| {
        let options = EngineOptions { speculate, ..EngineOptions::default() };
        block_on(Engine::load(CpuBackend::new(), &none, &checkpoint, b"", &options, &mut |_| {}))
    };
    assert!(load(Speculate::Mtp).is_err_and(|e| e.to_string().contains("the model has none")));
    assert!(load(Speculate::Auto).is_ok());
}

#[test]
fn heads_are_counted_and_only_loaded_for_drafts() {
    for dir in folders() {
        let (architecture, checkpoint) = open(&dir);
        let head = architecture.head_parameters(&checkpoint).unwrap();
        let loaded = |speculate| {
            let options = EngineOptions { speculate, ..EngineOptions::default() };
            let engine =
                block_on(Engine::load(CpuBackend::new(), &architecture, &checkpoint, b"", &options, &mut |_| {}));
            let engine = engine.unwrap();
            (engine.weight_bytes(), engine.spec().layers.len())
        };
        let (without, with) = (loaded(Speculate::Off), loaded(Speculate::Mtp));
        assert_eq!(with.1, without.1 + 1);
        // Matrices have two bytes an element; small parameters are loaded with four.
        let bytes = with.0 - without.0;
        assert!((2 * head..2 * head + 4000).contains(&bytes), "{}: {bytes} bytes of {head} weights", dir.display());
    }
}
