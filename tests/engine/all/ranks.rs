//! The promise on two ranks: cache on = cache off, alone = batched, bit for bit, with lower tiers; and what a failed rank does.

use std::collections::HashMap;

use pollster::block_on;
use selkie_core::{
    cpu::CpuBackend,
    engine::{Engine, EngineOptions, Event, SeqId},
    format::Products,
    ranks::Ranks,
    tier::{DiskOptions, Where},
};

use crate::{
    models::{TestModel, direct_logits, micro_models},
    promise::{Asked, Output, options, requests},
    random::Random,
};

const CONTEXT: usize = 512;

fn ranks() -> Ranks {
    Ranks::open(2, Products::default()).unwrap()
}

/// The largest relative difference of a model's logits from those of one rank.
fn from_one_rank(model: &TestModel, ranks: &Ranks) -> f32 {
    let ids: Vec<u32> = (0..50).map(|i| i * 7 % 40).collect();
    let (of, steps) = (&model.architecture, [20, 30]);
    let one = direct_logits(&CpuBackend::new(), of, model.checkpoint(), &ids, &steps).unwrap();
    let all = direct_logits(ranks, of, model.checkpoint(), &ids, &steps).unwrap();
    assert_eq!(one.len(), all.len());
    one.iter().zip(&all).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max)
}

/// Runs all requests, three times as many at once as the engine takes; free slots and pages are filled with NaN.
fn run(engine: &mut Engine<Ranks>, all: &[Asked]) -> Vec<Output> {
    let mut outputs = vec![Output::default(); all.len()];
    let ids: HashMap<SeqId, usize> =
        all.iter().enumerate().map(|(i, asked)| (engine.submit(asked.request()).unwrap(), i)).collect();
    while !engine.is_idle() {
        engine.poison_free().unwrap();
        for event in block_on(engine.step()).unwrap() {
            let id = match &event {
                Event::Token { id, .. } => *id,
                Event::Finished(end) => end.id,
            };
            outputs[ids[&id]].take(event);
        }
    }
    outputs
}

/// Runs a case in a small engine with a cache, twice, and its requests alone without one. Returns the tokens reused.
fn case(model: &TestModel, seed: u64) -> usize {
    let mut random = Random(seed);
    let requests = requests(&mut random, 40, CONTEXT);
    let options = EngineOptions { prefix_cache: true, ..options(&mut random, &requests, CONTEXT) };
    let alone = EngineOptions {
        max_batch: 1,
        prefix_cache: false,
        context: Some(CONTEXT),
        logits: true,
        ..EngineOptions::default()
    };
    let mut engine = model.on(ranks(), &alone);
    let want: Vec<Output> =
        requests.iter().map(|asked| run(&mut engine, std::slice::from_ref(asked)).remove(0)).collect();
    let mut engine = model.on(ranks(), &options);
    for round in 0..2 {
        let found = run(&mut engine, &requests);
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            assert_eq!(found, want, "{}, seed {seed}, round {round}, request {i}, {options:?}", model.name);
        }
    }
    if let Some(DiskOptions { place: Where::Dir(dir), .. }) = &options.tiers.disk {
        std::fs::remove_dir_all(dir).unwrap();
    }
    let given: usize = 2 * requests.iter().map(|asked| asked.request.prompt.len()).sum::<usize>();
    given - engine.stats().tokens_prefilled as usize
}

#[test]
fn two_ranks_keep_the_promise() {
    let divides = |model: &&TestModel| model.architecture.spec_on(2).is_ok();
    let models = micro_models();
    let models: Vec<&TestModel> = models.iter().filter(divides).collect();
    assert!(models.len() >= 4, "{} models", models.len());
    let reused: usize = (1..4).flat_map(|seed| models.iter().map(move |model| case(model, seed))).sum();
    assert!(reused > 1000, "{reused} tokens reused");
}

/// Norms over all heads: of queries and keys at once where there are as many of both, else one after the other, else over the ranks.
#[test]
fn norms_over_all_heads_are_those_of_one_rank() {
    for kv_heads in [4, 2] {
        let config = format!(
            r#"{{"model_type":"olmo_hybrid","hidden_size":32,"num_hidden_layers":2,"layer_types":["linear_attention","full_attention"],
            "num_attention_heads":4,"num_key_value_heads":{kv_heads},"linear_num_key_heads":2,"linear_num_value_heads":2,
            "linear_key_head_dim":8,"linear_value_head_dim":8,"intermediate_size":32,"vocab_size":40,
            "max_position_embeddings":1024}}"#
        );
        let worst = from_one_rank(&TestModel::micro("micro norms", &config), &ranks());
        assert!(worst < 1e-5, "{kv_heads} KV heads: {worst}");
    }
}

/// Low-rank additions follow the rows of what they are added to, biases and linear layers between mixers count once.
#[test]
fn shared_blocks_are_those_of_one_rank() {
    let config = r#"{"model_type":"zamba2","hidden_size":32,"num_hidden_layers":4,"hybrid_layer_ids":[1,2,3],"num_mem_blocks":2,
        "num_attention_heads":4,"num_key_value_heads":2,"intermediate_size":24,"adapter_rank":4,
        "use_shared_attention_adapter":true,"use_mem_rope":true,"add_bias_linear":true,"n_mamba_heads":4,"mamba_d_state":8,
        "vocab_size":40,"max_position_embeddings":1024}"#;
    let model = TestModel::micro("micro biases", config);
    for ranks in [2, 4] {
        let worst = from_one_rank(&model, &Ranks::open(ranks, Products::default()).unwrap());
        assert!(worst < 1e-4, "{ranks} ranks: {worst}");
    }
}

#[test]
fn what_does_not_divide_is_refused_before_loading() {
    let models = micro_models();
    let refused = |name: &str, ranks: usize| {
        let model = models.iter().find(|m| m.name == name).unwrap();
        model.architecture.spec_on(ranks).unwrap_err().to_string()
    };
    let hybrid = refused("micro hybrid", 4);
    for part in
        ["nemotron_h on 4 ranks", "`layers.0.mixer.`", "2 heads do not divide over 4 ranks", "possible are 1, 2"]
    {
        assert!(hybrid.contains(part), "{hybrid}");
    }
    let blocks = refused("micro shared blocks", 4);
    let part = "`layers.1.shared_transformer.self_attn.`: 2 heads do not divide over 4 ranks; possible are 1, 2";
    assert!(blocks.contains(part), "{blocks}");
    let vocabulary = refused("micro attention", 3);
    assert!(vocabulary.contains("`vocab_size`: 40 rows"), "{vocabulary}");
}
