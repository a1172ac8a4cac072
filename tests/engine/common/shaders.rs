//! What the page relies on: a prompt of any length needs no shader that was not compiled at load.

use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use selkie_core::Result;
use selkie_core::engine::{Engine, EngineOptions, Request};
use selkie_core::model_dir::ModelFiles;
use selkie_core::session::load;
use selkie_core::source::{Bytes, LocalFuture, Source};
use selkie_wgpu::WgpuBackend;
use serde_json::json;

use crate::common;

/// The largest step, and the tokens that the first steps of prompts are allowed.
const STEP: usize = 512;
const PACE: [usize; 3] = [128, 256, 512];

/// A `config.json` without weights.
struct Config(Vec<u8>);

impl Source for Config {
    fn label(&self) -> String {
        "a test".into()
    }
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok((name == "config.json").then_some(self.0.len() as u64))))
    }
    fn read<'a>(&'a self, _: &'a str, range: std::ops::Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        Box::pin(std::future::ready(Ok(self.0[range.start as usize..range.end as usize].to_vec().into())))
    }
}

type Model = fn() -> Config;

/// Two layers as wide as in granite-4.0-h-350m: products take other tiles at 64, 128, 192 and more tokens.
fn granite() -> Config {
    let text = include_bytes!("../../../models/configs/granite-4.0-h-350m.json");
    two_layers(text, json!({ "layer_types": ["mamba", "attention"] }))
}

/// A layer of Kimi Delta Attention and one over latents, of few heads as in kimi-linear-48b-a3b.
fn kimi() -> Config {
    let text = include_bytes!("../../../models/configs/kimi-linear-48b-a3b.json");
    let layers = json!({
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
        },
        "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_experts": 16, "moe_intermediate_size": 64,
    });
    two_layers(text, layers)
}

/// A shipped config with two layers, a small vocabulary and these keys.
fn two_layers(text: &[u8], keys: serde_json::Value) -> Config {
    let mut config: serde_json::Value = serde_json::from_slice(text).expect("a shipped config");
    let few = json!({ "num_hidden_layers": 2, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 1 });
    for (key, value) in [few, keys].iter().flat_map(|keys| keys.as_object().expect("an object")) {
        config[key] = value.clone();
    }
    Config(config.to_string().into_bytes())
}

async fn answer(engine: &mut Engine<WgpuBackend>, tokens: usize) -> Result<()> {
    let prompt = (0..tokens as u32).map(|i| 3 + (i * 7919) % 900).collect();
    engine.submit(Request { prompt, max_tokens: 3, ..Request::default() })?;
    for step in 0.. {
        if engine.is_idle() {
            break;
        }
        engine.set_step_tokens(PACE[step.min(PACE.len() - 1)]);
        engine.step().await?;
    }
    Ok(())
}

async fn check(open: fn() -> Result<WgpuBackend>, config: Model) -> Result<(), Failed> {
    let text = |e: selkie_core::Error| Failed::from(e.to_string());
    let files = ModelFiles::open_random(Arc::new(config()), || 0, 1, None).await.map_err(text)?;
    let options = EngineOptions {
        step_tokens: STEP,
        context: Some(2048),
        slots: Some(40),
        kv_pages: Some(64),
        ..EngineOptions::default()
    };
    let mut engine = load(open().map_err(text)?, &files, &options, &mut |_| {}).await.map_err(text)?;
    engine.runner().expect_steps(STEP).map_err(text)?;
    answer(&mut engine, 1).await.map_err(text)?;
    let expected = engine.runner().backend().compiled();
    for tokens in [5, 70, 128, 300, 333, 700, 1200] {
        answer(&mut engine, tokens).await.map_err(text)?;
        let more = engine.runner().backend().compiled() - expected;
        if more > 0 {
            return Err(format!("{more} shaders more than {expected} for a prompt of {tokens} tokens").into());
        }
    }
    Ok(())
}

/// A trial of each model.
pub fn on(name: &'static str, open: fn() -> Result<WgpuBackend>) -> Vec<Trial> {
    let trial = |(model, config): (&str, Model)| {
        let run = move |_: &WgpuBackend| pollster::block_on(check(open, config));
        (format!("shaders: all at load of {model}"), false, run)
    };
    common::on(name, open, [("granite", granite as Model), ("kimi", kimi)].map(trial))
}
