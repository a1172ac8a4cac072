//! Chooses the backend of a page.

use selkie_core::Error;
use selkie_wgpu::{Options, WgpuBackend};
use serde::Deserialize;
use wasm_bindgen::prelude::*;

use crate::{error, js};

/// The requested backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// WebGPU if the browser has it, else the CPU.
    #[default]
    Auto,
    /// WebGPU or an error.
    Wgpu,
    /// The CPU.
    Cpu,
}

/// The opened device.
pub enum Device {
    /// WebGPU, and the GPU's name.
    Wgpu(WgpuBackend, String),
    /// The CPU, and the reason why it is not WebGPU, if WebGPU was allowed.
    Cpu(Option<String>),
}

/// Opens a device.
pub async fn open(wanted: Wanted) -> Result<Device, JsValue> {
    if wanted == Wanted::Cpu {
        return Ok(Device::Cpu(None));
    }
    let why = match gpu() {
        None => "this browser has no WebGPU".to_owned(),
        Some(gpu) => match WgpuBackend::open(None, Options::default()).await {
            Ok(backend) => {
                let name = name(&gpu).await.unwrap_or_else(|| "GPU".into());
                return Ok(Device::Wgpu(backend, name));
            }
            Err(Error::NoDevice { why, .. }) => why,
            Err(e) => e.to_string(),
        },
    };
    match wanted {
        Wanted::Wgpu => Err(error::error("unsupported", &why)),
        _ => Ok(Device::Cpu(Some(why))),
    }
}

#[wasm_bindgen]
extern "C" {
    /// `navigator.gpu`
    type Gpu;

    #[wasm_bindgen(method, catch, js_name = requestAdapter)]
    async fn request_adapter(this: &Gpu, options: &JsValue) -> Result<JsValue, JsValue>;
}

/// WebGPU, in a page or a worker.
fn gpu() -> Option<Gpu> {
    js::get(&js::get(&js_sys::global(), "navigator")?, "gpu").map(JsCast::unchecked_into)
}

/// The adapter's name as far as the browser reports it: a description, or vendor and architecture.
async fn name(gpu: &Gpu) -> Option<String> {
    let options = js::object(&serde_json::json!({ "powerPreference": "high-performance" }));
    let info = js::get(&gpu.request_adapter(&options).await.ok()?, "info")?;
    let text = |key| js::get(&info, key).and_then(|v| v.as_string()).filter(|s| !s.is_empty());
    text("description").or_else(|| {
        let parts: Vec<String> = [text("vendor"), text("architecture")].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(" "))
    })
}
