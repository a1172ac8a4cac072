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
                // Another browser compiles the same shaders to other instructions: states say which one it was.
                return Ok(Device::Wgpu(backend.named(format!("{name} in {}", browser())), name));
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

/// The browser and its version, as far as it says.
fn browser() -> String {
    /// The more special ones first: most browsers claim to be others as well.
    const NAMES: [&str; 6] = ["Edg", "OPR", "Firefox", "HeadlessChrome", "Chrome", "Version"];
    let navigator = js::get(&js_sys::global(), "navigator");
    let agent = navigator.and_then(|n| js::get(&n, "userAgent")).and_then(|a| a.as_string()).unwrap_or_default();
    let products: Vec<(&str, &str)> = agent.split_whitespace().filter_map(|product| product.split_once('/')).collect();
    let found = NAMES.iter().find_map(|name| products.iter().find(|(product, _)| product == name));
    found.map_or_else(|| "a browser".into(), |(name, version)| format!("{name} {version}"))
}
