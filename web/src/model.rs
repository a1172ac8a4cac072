//! A model before it is loaded: its facts, and whether it fits.

use std::sync::Arc;

use selkie_core::{
    backend::{Backend, Caps},
    cpu::CpuBackend,
    engine::{Sizes, pools},
    model_dir::ModelFiles,
    models,
};
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::{
    device::{self, Device, Wanted},
    error,
    files::{Files, ModelFile},
    js, options,
    request::LoadOptions,
};

const MIB: f64 = 1048576.0;
/// Memory of a wasm module that is available for a model, of the 4 GiB that 32 bits address.
const MODULE_BYTES: u64 = 3584 << 20;
/// Browsers report at most about this much memory.
const MEMORY_TOLD: u64 = 8 << 30;

/// Reads everything but the weights.
pub async fn open(files: Vec<ModelFile>, label: Option<String>) -> Result<(Arc<Files>, Arc<ModelFiles>), JsValue> {
    let files = Arc::new(Files::new(label.unwrap_or_else(|| "the model".into()), files));
    files.complete()?;
    let model = ModelFiles::open(files.clone(), js::unix_time).await.map_err(|e| files.error(&e))?;
    Ok((files, Arc::new(model)))
}

/// Why a model cannot run on a device, with numbers; `None` if it fits.
pub fn problem(model: &ModelFiles, spec: &models::ModelSpec, caps: &Caps, sizes: &Sizes) -> Option<String> {
    let (weights, states) = (model.checkpoint.bytes(), sizes.split.bytes(&sizes.shape));
    let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / MIB);
    if caps.backend == "cpu" {
        return (weights + states > MODULE_BYTES).then(|| {
            format!(
                "the model needs {} ({} of weights, {} of states), and a page without WebGPU has {}",
                mib(weights + states),
                mib(weights),
                mib(states),
                mib(MODULE_BYTES)
            )
        });
    }
    let row = |info: &selkie_core::checkpoint::TensorInfo| {
        let rows: usize = info.shape.iter().rev().skip(1).product();
        (info.range.end - info.range.start) / rows.max(1) as u64
    };
    let widest = model.checkpoint.names().filter_map(|n| model.checkpoint.info(n)).map(row).max().unwrap_or(0);
    if widest > caps.max_binding {
        let (needs, has) = (mib(widest), mib(caps.max_binding));
        return Some(format!("one row of a matrix needs {needs}, and the GPU's largest buffer has {has}"));
    }
    pools::check(spec, caps, sizes.split.slots, sizes.split.pages).err().map(|e| e.to_string())
}

/// Why a model would not load on a machine with little memory.
fn scarce(weights: u64, sizes: &Sizes) -> Option<String> {
    let needs = weights + sizes.split.bytes(&sizes.shape);
    let has = js::device_memory().filter(|has| *has < MEMORY_TOLD && needs > has / 4 * 3)?;
    Some(format!(
        "the model needs {:.0} MiB, and this device has about {:.0} MiB for everything",
        needs as f64 / MIB,
        has as f64 / MIB
    ))
}

/// The facts of a model and whether it fits. Only headers are read.
#[wasm_bindgen]
pub async fn inspect(files: Vec<ModelFile>, backend: Option<String>) -> Result<JsValue, JsValue> {
    let wanted: Wanted = match backend {
        None => Wanted::Auto,
        Some(name) => serde_json::from_value(name.into()).map_err(|e| error::error("bad_request", &e.to_string()))?,
    };
    let (source, model) = open(files, None).await?;
    let fail = |e| source.error(&e);
    let spec = models::spec(&model.config).map_err(fail)?;
    let (caps, device) = match device::open(wanted).await? {
        Device::Wgpu(backend, name) => (backend.caps().clone(), name),
        Device::Cpu(_) => {
            let caps = CpuBackend::new().caps().clone();
            let name = caps.device.clone();
            (caps, name)
        }
    };
    let weights = model.checkpoint.bytes();
    let options = options::for_page(&spec, &caps, weights, &LoadOptions::default(), 64).map_err(fail)?;
    let sizes = options.sizes(&spec, &caps, None).map_err(fail)?;
    let problem = problem(&model, &spec, &caps, &sizes).or_else(|| scarce(weights, &sizes));
    Ok(js::object(&json!({
        "family": spec.family,
        "parameters": spec.parameters,
        "weightBytes": weights,
        "contextTokens": spec.context,
        "bytesPerSlot": sizes.shape.slot_bytes,
        "bytesPerPage": sizes.shape.page_bytes,
        "backend": caps.backend,
        "device": device,
        "fits": problem.is_none(),
        "problem": problem,
    })))
}
