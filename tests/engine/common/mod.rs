//! Shared by the tests of several backends: a missing device is reported as ignored, never as passed.
//!
//! `SELKIE_REQUIRE=cuda,wgpu` turns a missing device of these backends into a failure. A name stands for all its variants
//! (`wgpu` for `wgpu-plain`, `wgpu-split` and so on) except [`APART`]. Those need hardware that few machines with such a device
//! have, and are required by their own names only.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use libtest_mimic::{Arguments, Failed, Trial};
use selkie_core::backend::Backend;
use selkie_core::format::Products;
use selkie_core::ops::Feature;
use selkie_core::{Error, Result};
use selkie_wgpu::{Options, WgpuBackend};

/// Variants that need more than the device.
pub const APART: [&str; 4] = ["wgpu-coop", "wgpu-coop-exact", "cuda-2-ranks", "cuda-f32-2-ranks"];

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
    // Backends are not `Send`: each thread that runs tests opens its own. It is never closed: nothing waits for these
    // threads, and a driver faults if it closes devices while the process exits.
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
        let lane = lane(name, &test);
        let run = move || on_thread(lane, move || f(opened(name, open).map_err(|e| e.to_string())?));
        Trial::test(format!("{name} {test}"), run).with_ignored_flag(ignored)
    };
    tests.into_iter().map(trial).collect()
}

/// The thread of a backend's test. A software device spends most of its time in a shader compiler, which works on one core, so
/// wgpu has two; each compiles for its own ops and formats, or models. A device in hardware has one.
fn lane(backend: &str, test: &str) -> String {
    if !backend.starts_with("wgpu") {
        return backend.to_owned();
    }
    if !opened("wgpu", wgpu).is_ok_and(WgpuBackend::is_software) {
        return "wgpu".to_owned();
    }
    let word = |text: &str| text.find([' ', ',']).unwrap_or(text.len());
    let shared = match test.split_once('/') {
        Some((op, case)) => &test[..op.len() + 1 + word(case)],
        None => &test[..word(test)],
    };
    let mut hasher = DefaultHasher::new();
    shared.hash(&mut hasher);
    format!("{backend} {}", hasher.finish() % 2)
}

/// Runs `f` on the thread called `lane`, after what it was given before. The thread starts with its first work and never ends.
fn on_thread<T: Send + 'static>(lane: String, f: impl FnOnce() -> T + Send + 'static) -> T {
    type Work = Box<dyn FnOnce() + Send>;
    static THREADS: Mutex<BTreeMap<String, Sender<Work>>> = Mutex::new(BTreeMap::new());
    let (done, result) = channel();
    let work: Work = Box::new(move || {
        let _ = done.send(catch_unwind(AssertUnwindSafe(f)));
    });
    let start = || {
        let (sender, receiver) = channel::<Work>();
        thread::spawn(move || receiver.into_iter().for_each(|work| work()));
        sender
    };
    let sender = THREADS.lock().expect("no thread panics with the lock").entry(lane).or_insert_with(start).clone();
    sender.send(work).expect("a thread that never ends");
    result.recv().expect("an answer").unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs the trials and ends the process: one at a time where there is a CUDA device, elsewhere several, of different lanes.
pub fn run(mut trials: Vec<Trial>) -> ! {
    let mut args = Arguments::from_args();
    let cuda = trials.iter().any(|trial| trial.name().starts_with("cuda") && !trial.has_ignored_flag());
    args.test_threads.get_or_insert(if cuda { 1 } else { 4 });
    // The trials of a lane are spread over the whole run.
    let of = |trial: &Trial| trial.name().split_once(' ').map_or(String::new(), |(backend, test)| lane(backend, test));
    let mut sizes = HashMap::<String, usize>::new();
    let places: Vec<(String, usize)> = trials
        .iter()
        .map(|trial| {
            let (lane, size) = (of(trial), &mut *sizes.entry(of(trial)).or_default());
            *size += 1;
            (lane, *size)
        })
        .collect();
    let share = |(lane, place): &(String, usize)| *place as f64 / sizes[lane] as f64;
    let mut order: Vec<(f64, Trial)> = places.iter().map(share).zip(trials.drain(..)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    libtest_mimic::run(&args, order.into_iter().map(|(_, trial)| trial).collect()).exit()
}

/// The preferred adapter; `WGPU_ADAPTER` names another. Products in f32.
pub fn wgpu() -> Result<WgpuBackend> {
    wgpu_with(Options { f32: true, ..Options::default() })
}

/// The same with products on cooperative matrices, where the adapter has them.
pub fn wgpu_coop() -> Result<WgpuBackend> {
    coop(Products::Fast)
}

/// [`wgpu_coop`] with all factors in two parts.
pub fn wgpu_coop_exact() -> Result<WgpuBackend> {
    coop(Products::Exact)
}

fn coop(products: Products) -> Result<WgpuBackend> {
    let backend = wgpu_with(Options { products, ..Options::default() })?;
    if !backend.facts().cooperative {
        return Err(Error::NoDevice { backend: "wgpu", why: "the adapter has no cooperative matrices".into() });
    }
    Ok(backend)
}

/// The same with limits of the caller's.
pub fn wgpu_with(options: Options) -> Result<WgpuBackend> {
    let name = std::env::var("WGPU_ADAPTER").ok();
    pollster::block_on(WgpuBackend::open(name.as_deref(), options))
}
