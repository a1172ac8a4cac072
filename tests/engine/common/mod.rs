//! Shared by the tests of several backends: a missing device is reported as ignored, never as passed.
//!
//! `SELKIE_REQUIRE=cuda,wgpu` turns a missing device of these backends into a failure. A name stands for all its variants
//! (`wgpu` for `wgpu-plain`, `wgpu-split` and so on) except [`APART`]. Those need hardware that few machines with such a device
//! have, and are required by their own names only.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;

use libtest_mimic::{Failed, Trial};
use selkie_core::backend::Backend;
use selkie_core::ops::Feature;
use selkie_core::tensor::DType;
use selkie_core::{Error, Result};
use selkie_wgpu::{Options, WgpuBackend};

/// Variants that need more than the device.
pub const APART: [&str; 3] = ["wgpu-coop", "cuda-2-ranks", "cuda-f32-2-ranks"];

/// Whether `list`, the value of `SELKIE_REQUIRE`, names this backend or the backend of which it is a variant.
pub fn required(list: &str, backend: &str) -> bool {
    let family = backend.split('-').next().expect("a first part");
    list.split(',').map(str::trim).any(|name| name == backend || (name == family && !APART.contains(&backend)))
}

/// Stands for all tests of a backend that has no device here.
pub fn absent(backend: &'static str, why: String) -> Trial {
    let required = std::env::var("SELKIE_REQUIRE").is_ok_and(|list| required(&list, backend));
    Trial::test(format!("{backend} ({why})"), move || Err(Failed::from(why))).with_ignored_flag(!required)
}

thread_local! {
    // Backends are not `Send`: each thread that runs tests opens its own. It is never closed: the runner does not wait
    // for its threads, and a driver faults if it closes devices while the process exits.
    static OPEN: RefCell<HashMap<&'static str, &'static dyn Any>> = RefCell::default();
}

/// The backend of this thread called `name`.
///
/// # Errors
/// Those of `open`.
pub fn opened<B: Backend>(name: &'static str, open: fn() -> Result<B>) -> Result<&'static B> {
    if let Some(b) = OPEN.with_borrow(|all| all.get(name).copied()) {
        return Ok(b.downcast_ref().expect("one type per name"));
    }
    let b: &'static B = Box::leak(Box::new(open()?));
    OPEN.with_borrow_mut(|all| all.insert(name, b));
    Ok(b)
}

/// Whether a backend that opens has no kernels for something. Its tests are reported as ignored.
pub fn lacks<B: Backend>(name: &'static str, open: fn() -> Result<B>, feature: Feature) -> bool {
    opened(name, open).is_ok_and(|backend| !backend.has(feature))
}

/// The trials that `tests` lists for a backend, or one ignored trial with the reason if it has no device. A trial is a
/// name, whether it is ignored by default, and a function of the backend.
pub fn on<B: Backend, F>(
    name: &'static str,
    open: fn() -> Result<B>,
    tests: impl IntoIterator<Item = (String, bool, F)>,
) -> Vec<Trial>
where
    F: FnOnce(&B) -> Result<(), Failed> + Send + 'static,
{
    match opened(name, open) {
        Ok(_) => {}
        Err(Error::NoDevice { why, .. }) => return vec![absent(name, why)],
        Err(e) => {
            let message = e.to_string();
            return vec![Trial::test(format!("{name} opens"), move || Err(message.into()))];
        }
    }
    let trial = |(test, ignored, f): (String, bool, F)| {
        let run = move || f(opened(name, open).map_err(|e| e.to_string())?);
        Trial::test(format!("{name} {test}"), run).with_ignored_flag(ignored)
    };
    tests.into_iter().map(trial).collect()
}

/// The preferred adapter; `WGPU_ADAPTER` names another. Products in f32.
pub fn wgpu() -> Result<WgpuBackend> {
    wgpu_with(Options { f32: true, ..Options::default() })
}

/// The same with products on cooperative matrices, where the adapter has them.
pub fn wgpu_coop() -> Result<WgpuBackend> {
    let backend = wgpu_with(Options::default())?;
    if backend.caps().products == DType::F32 {
        return Err(Error::NoDevice { backend: "wgpu", why: "the adapter has no cooperative matrices".into() });
    }
    Ok(backend)
}

/// The same with limits of the caller's.
pub fn wgpu_with(options: Options) -> Result<WgpuBackend> {
    let name = std::env::var("WGPU_ADAPTER").ok();
    pollster::block_on(WgpuBackend::open(name.as_deref(), options))
}
