//! Engine options of a page.

use selkie_core::{
    Result,
    backend::Caps,
    engine::{EngineOptions, MOST_DRAFTS},
    models::ModelSpec,
};

/// The options, with a memory budget that suits model and machine unless one was given.
pub fn for_page(
    spec: &ModelSpec,
    caps: &Caps,
    weights: u64,
    asked: &crate::request::LoadOptions,
    step_tokens: usize,
) -> Result<EngineOptions> {
    let options = EngineOptions {
        memory: asked.memory_bytes,
        max_batch: asked.max_batch.unwrap_or(crate::budget::MAX_BATCH),
        step_tokens,
        context: Some(asked.context_tokens.unwrap_or(crate::budget::MAX_CONTEXT)),
        prefix_cache: asked.prefix_cache.unwrap_or(true),
        speculate: asked.speculate.into(),
        drafts: asked.drafts.unwrap_or(MOST_DRAFTS),
        clock: crate::js::now,
        ..EngineOptions::default()
    };
    if options.memory.is_some() {
        return Ok(options);
    }
    let shape = options.sizes(spec, caps, None)?.shape;
    let memory = crate::budget::memory(&shape, &options, weights, crate::js::device_memory());
    Ok(EngineOptions { memory: Some(memory), ..options })
}
