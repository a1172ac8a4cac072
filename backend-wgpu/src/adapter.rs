//! Lists the adapters and opens one.

use selkie_core::backend::DeviceInfo;
use selkie_core::error::{Error, Result};
use selkie_core::format::Products;

/// How to open an adapter.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Ask for WebGPU's default limits even where the adapter has more.
    pub force_default_limits: bool,
    /// Split pools and weights as if a binding held only this many bytes: for tests of the splits on small models.
    pub max_piece: Option<u64>,
    /// Use no subgroup operations even where the adapter has them.
    pub no_subgroups: bool,
    /// Products in f32 even where the adapter has faster ones with f16 factors.
    pub f32: bool,
    /// Overrides the choice of shaders: `true` as for a browser's software device, where barriers are expensive, `false` as
    /// for hardware. `None` decides by the adapter.
    pub few_barriers: Option<bool>,
    /// KV pages in 8 bits, see [`selkie_core::kv8`].
    pub kv8: bool,
    /// Exact ones round activations neither where a recipe says so nor for faster products.
    pub products: Products,
}

/// Adapters in order of preference: discrete, integrated, virtual, software. In a browser at most one, which the browser
/// chooses.
pub(crate) async fn list() -> Vec<wgpu::Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    if cfg!(target_arch = "wasm32") {
        let fast = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        return instance.request_adapter(&fast).await.into_iter().collect();
    }
    let mut all = instance.enumerate_adapters(wgpu::Backends::PRIMARY).await;
    all.sort_by_key(|a| rank(a.get_info().device_type));
    all
}

fn rank(kind: wgpu::DeviceType) -> usize {
    match kind {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    }
}

/// Whether the adapter is emulated on the CPU.
pub(crate) fn is_software(info: &wgpu::AdapterInfo) -> bool {
    info.device_type == wgpu::DeviceType::Cpu
}

/// Name and driver interface; software devices are marked.
pub(crate) fn describe(info: &wgpu::AdapterInfo) -> String {
    let software = if is_software(info) { ", software" } else { "" };
    format!("{} ({:?}{software})", info.name, info.backend)
}

/// Whether the adapter has what `shaders/matmul_coop.wgsl` needs: cooperative matrices of 16 x 16 x 16 in subgroups of 32 with
/// f16 factors and f32 sums, and enough workgroup memory for its tiles.
pub(crate) fn has_cooperative_matrices(adapter: &wgpu::Adapter) -> bool {
    let info = adapter.get_info();
    let wanted = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16;
    adapter.features().contains(wanted)
        && (info.subgroup_min_size, info.subgroup_max_size) == (32, 32)
        && adapter.limits().max_compute_workgroup_storage_size >= 48 << 10
        && adapter.cooperative_matrix_properties().iter().any(|p| {
            use wgpu::CooperativeScalarType::{F16, F32};
            [p.m_size, p.n_size, p.k_size] == [16; 3]
                && (p.ab_type, p.cr_type) == (F16, F32)
                && !p.saturating_accumulation
        })
}

/// Whether shaders may multiply integers of 8 bits, four in a word. Where naga compiles them, they always may.
pub(crate) fn has_dots() -> bool {
    let features =
        || wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle()).wgsl_language_features();
    !cfg!(target_arch = "wasm32") || features().contains(wgpu::WgslLanguageFeatures::Packed4x8IntegerDotProduct)
}

/// `Err` with the reason if the engine cannot run on the adapter.
fn usable(adapter: &wgpu::Adapter) -> Result<(), String> {
    let (has, needs) = (adapter.limits(), wgpu::Limits::default());
    let checks = [
        (
            "storage buffers per stage",
            has.max_storage_buffers_per_shader_stage,
            needs.max_storage_buffers_per_shader_stage,
        ),
        (
            "invocations per workgroup",
            has.max_compute_invocations_per_workgroup,
            needs.max_compute_invocations_per_workgroup,
        ),
        ("bytes of workgroup memory", has.max_compute_workgroup_storage_size, needs.max_compute_workgroup_storage_size),
        (
            "workgroups per dimension",
            has.max_compute_workgroups_per_dimension,
            needs.max_compute_workgroups_per_dimension,
        ),
    ];
    match checks.into_iter().find(|(_, has, needs)| has < needs) {
        Some((what, has, needs)) => Err(format!("it has {has} {what}, but {needs} are needed")),
        None => Ok(()),
    }
}

/// Whether a search for a GPU can succeed. On Linux a GPU has a device file; without one the search is skipped, because it
/// takes a third of a second and makes some drivers print messages. On other systems always true.
pub fn may_have_hardware() -> bool {
    !cfg!(target_os = "linux")
        || ["/dev/dri", "/dev/nvidia0", "/dev/dxg"].iter().any(|p| std::path::Path::new(p).exists())
}

/// The devices of this backend: discrete first, software last. Without any, a single entry that gives the reason.
pub async fn devices() -> Vec<DeviceInfo> {
    let adapters = list().await;
    let info = |(index, adapter): (usize, &wgpu::Adapter)| DeviceInfo {
        backend: "wgpu",
        index: Some(index),
        name: Some(describe(&adapter.get_info())),
        memory: None,
        usable: usable(adapter),
    };
    let mut all: Vec<DeviceInfo> = adapters.iter().enumerate().map(info).collect();
    if all.is_empty() {
        let why = if cfg!(target_arch = "wasm32") {
            "this browser offers no WebGPU adapter"
        } else {
            "no Vulkan, Metal or DirectX 12 driver was found: install one (on Linux the loader libvulkan1 and the \
                   GPU's driver, or mesa-vulkan-drivers for a software device)"
        };
        all.push(DeviceInfo { backend: "wgpu", index: None, name: None, memory: None, usable: Err(why.into()) });
    }
    all
}

/// Finds an adapter by its number in [`devices`] or by a part of its name, ignoring case. Without a name, the first usable one.
pub(crate) async fn find(which: Option<&str>) -> Result<wgpu::Adapter> {
    let no_device = |why: String| Error::NoDevice { backend: "wgpu", why };
    let adapters = list().await;
    let names = || adapters.iter().enumerate().map(|(i, a)| format!("{i}: {}", describe(&a.get_info())));
    if adapters.is_empty() {
        let none = devices().await.into_iter().find_map(|d| d.usable.err());
        return Err(no_device(none.unwrap_or_else(|| "there is none".into())));
    }
    let index = match which {
        None => adapters.iter().position(|a| usable(a).is_ok()).unwrap_or(0),
        Some(name) => {
            let by_number = name.parse().ok().filter(|i: &usize| *i < adapters.len());
            let lower = name.to_lowercase();
            let matches = |a: &wgpu::Adapter| describe(&a.get_info()).to_lowercase().contains(&lower);
            let by_name = || adapters.iter().position(matches);
            by_number.or_else(by_name).ok_or_else(|| {
                no_device(format!(
                    "no adapter is called {name:?}; available: {}",
                    names().collect::<Vec<_>>().join(", ")
                ))
            })?
        }
    };
    let adapter = adapters.into_iter().nth(index).expect("an index of the list");
    usable(&adapter).map_err(|why| no_device(format!("{}: {why}", describe(&adapter.get_info()))))?;
    Ok(adapter)
}
