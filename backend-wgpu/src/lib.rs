//! The wgpu backend of selkie. This version has none yet: it reports that, and nothing here pretends to work.

use selkie_core::backend::DeviceInfo;

/// The devices of this backend.
pub fn devices() -> Vec<DeviceInfo> {
    vec![DeviceInfo {
        backend: "wgpu",
        index: 0,
        name: "none".into(),
        memory: None,
        usable: Err("the wgpu backend is not built into this version".into()),
    }]
}
