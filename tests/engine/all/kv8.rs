//! KV pages in 8 bits through engines on the CPU.

use std::path::Path;

use pollster::block_on;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::{Engine, EngineOptions};

use crate::{
    models::{TestModel, golden_models, micro_models},
    promise::{Drafts, Output, run, serve},
};

fn models(all: Vec<TestModel>) -> Vec<TestModel> {
    all.into_iter().filter(TestModel::takes_8_bits).collect()
}

fn in_8_bits(all: Vec<TestModel>) -> Vec<TestModel> {
    models(all).into_iter().map(TestModel::in_8_bits).collect()
}

#[test]
fn the_promise_holds() {
    let [host, disk, _] = run(in_8_bits(micro_models()), 100, Drafts::None);
    assert!(host > 200 && disk > 20, "{host} tokens from host memory, {disk} from disk");
    run(in_8_bits(micro_models()), 40, Drafts::Given);
    let mut families = in_8_bits(golden_models());
    families
        .retain(|m| ["falcon_h1,", "nemotron_h,", "qwen3_5_text,", "zamba2,"].iter().any(|n| m.name.starts_with(n)));
    assert_eq!(families.len(), 4);
    run(families, 6, Drafts::None);
}

/// Error over the size of the logits, of the same tokens.
fn error(exact: &Output, coded: &Output) -> f64 {
    let same = exact.0.iter().zip(&coded.0).take_while(|(a, b)| a == b).count() + 1;
    let all = exact.1.iter().zip(&coded.1).take(same).flat_map(|(a, b)| a.iter().zip(b.iter()));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (error, size) = all.fold((0.0, 0.0), |(e, s), (a, b)| (e + square(a - b), s + square(*a)));
    (error / size).sqrt()
}

#[test]
fn logits_are_close_to_those_of_exact_pages() {
    let mut worst: f64 = 0.0;
    for model in models(golden_models()) {
        let name = model.name.clone();
        let exact = serve(&model);
        let error = error(&exact, &serve(&model.in_8_bits()));
        println!("{name}: {error:.1e}");
        assert!(error > 0.0, "{name}: nothing was rounded");
        worst = worst.max(error);
    }
    // Attention of zamba2_blocks has the sharpest weights: 2.2e-2.
    assert!(worst < 0.03, "{worst}");
}

#[test]
fn models_with_latents_are_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/kimi_linear");
    let model = TestModel::golden(&path).unwrap();
    let (options, mut report) = (EngineOptions::default(), |_| {});
    let backend = CpuBackend::new().kv8();
    let loaded = block_on(Engine::load(backend, &model.architecture, model.checkpoint(), b"", &options, &mut report));
    let message = loaded.err().expect("no pages for it").to_string();
    assert!(message.contains("latents") && message.contains("--kv-dtype"), "{message}");
}
