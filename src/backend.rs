//! Chooses the backend. Engines are compiled for each of them here and nowhere else; the rest of the program has them as
//! [`Loaded`].

use selkie_core::{
    Error, Result,
    backend::{Backend, Caps, DeviceInfo},
    cpu::{CpuBackend, par},
    engine::{AnyEngine, Engine, EngineOptions},
    format::Products,
    model_dir::ModelFiles,
    models,
    ranks::{self, Ranks, Rendezvous},
    session,
    step::Bucket,
    timer::Timer,
    weights::Progress,
};
use selkie_cuda::Cuda;
use selkie_wgpu::WgpuBackend;

use crate::{bench::Work, costs, open::Device};

/// Where a model is to run.
#[derive(Clone, Debug)]
pub struct Place {
    pub device: Device,
    /// An adapter of wgpu: its number in the list of devices, or a part of its name.
    pub adapter: Option<String>,
    /// Recurrent states are stored in bf16 (CUDA).
    pub bf16_state: bool,
    /// KV pages are in 8 bits.
    pub kv8: bool,
    /// With coded weights, on the CPU.
    pub products: Products,
    /// Ranks that share the model, on the CPU.
    pub ranks: usize,
    /// CUDA devices; several share the model.
    pub gpus: Vec<usize>,
    /// Where the ranks that share the model meet if each is a process; `gpus` has at most the device of this one.
    pub process: Option<Rendezvous>,
    /// Which engine of `replicas` this is: the number of its CUDA device, or it has its share of the CPU's threads.
    pub replica: usize,
    /// Engines of this process with the same model.
    pub replicas: usize,
}

impl Default for Place {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            adapter: None,
            bf16_state: false,
            kv8: false,
            products: Products::default(),
            ranks: 1,
            gpus: Vec::new(),
            process: None,
            replica: 0,
            replicas: 1,
        }
    }
}

/// An opened backend.
pub enum Opened {
    Cuda(Cuda),
    Wgpu(WgpuBackend),
    Cpu(CpuBackend),
    Ranks(Ranks),
}

/// Evaluates an expression with the backend, whichever it is.
macro_rules! on {
    ($opened:expr, $backend:ident => $e:expr) => {
        match $opened {
            $crate::backend::Opened::Cuda($backend) => $e,
            $crate::backend::Opened::Wgpu($backend) => $e,
            $crate::backend::Opened::Cpu($backend) => $e,
            $crate::backend::Opened::Ranks($backend) => $e,
        }
    };
}
pub(crate) use on;

impl Opened {
    /// See [`Backend::caps`].
    pub fn caps(&self) -> &Caps {
        on!(self, b => b.caps())
    }

    /// See [`Backend::free_memory`].
    pub fn free_memory(&self) -> Option<u64> {
        on!(self, b => b.free_memory())
    }
}

/// An engine with what measurements need.
pub trait Loaded: AnyEngine {
    /// See [`Timer::facts`].
    ///
    /// # Errors
    /// Those of that method.
    fn notes(&self) -> Result<Vec<String>>;
    /// The work of a step of this shape.
    ///
    /// # Errors
    /// Those of an allocation.
    fn work(&self, bucket: Bucket) -> Result<Work>;
}

impl<B: Timer> Loaded for Engine<B> {
    fn notes(&self) -> Result<Vec<String>> {
        pollster::block_on(self.runner().backend().facts())
    }

    fn work(&self, bucket: Bucket) -> Result<Work> {
        Work::of_step(self.runner(), bucket)
    }
}

/// Loads a model.
///
/// # Errors
/// Those of [`session::load`].
pub fn load(
    backend: Opened,
    files: &ModelFiles,
    options: &EngineOptions,
    report: &mut dyn FnMut(Progress),
) -> Result<Box<dyn Loaded>> {
    // Says whose memory it is that there is too little of.
    let named = |e| match e {
        Error::OutOfMemory { what, asked, free } => {
            Error::OutOfMemory { what: format!("{what} of {}", files.label()), asked, free }
        }
        e => e,
    };
    if files.checkpoint.is_random() && backend.caps().backend == "cpu" {
        // Weights of a file are mapped. Random weights take memory, about two bytes each, and of 4 bits at least a half.
        let parameters = models::read(&files.config)?.spec().parameters;
        let asked = if files.checkpoint.is_coded() { parameters / 2 } else { parameters.saturating_mul(2) };
        let asked = asked / backend.caps().ranks as u64;
        if let Some(free) = backend.free_memory().filter(|free| asked > *free) {
            return Err(named(Error::OutOfMemory { what: "random weights".into(), asked, free }));
        }
    }
    let mut options = options.clone();
    if let Some(disk) = &mut options.tiers.disk {
        // Files of a directory outlive the model, so they are named by all of it.
        let total = files.checkpoint.bytes();
        let model = pollster::block_on(files.identity(&mut |done| report(Progress { done, total })))?;
        disk.identity = [model.weights, model.config].map(|digest| digest.0).concat();
    }
    let options = &options;
    on!(backend, b => {
        let mut engine = pollster::block_on(session::load(b, files, options, report)).map_err(named)?;
        costs::learn(&mut engine, files, options)?;
        Ok(Box::new(engine))
    })
}

/// Opens the backend of `place`. Only [`Device::Auto`] tries another one if a backend has no usable device. If ranks are
/// processes, rank 0 waits here for the others.
///
/// # Errors
/// [`Error::NoDevice`] with the reason; [`Error::BadRequest`] if the parts of `place` contradict each other.
pub fn open(place: &Place) -> Result<Opened> {
    let adapter = place.adapter.as_deref();
    match (place.device, adapter) {
        (device, _) if place.ranks != 1 && device != Device::Cpu => {
            Err(Error::BadRequest("ranks are of the CPU: ask for that backend, or name several CUDA devices".into()))
        }
        (device, _) if !place.gpus.is_empty() && device != Device::Cuda => {
            Err(Error::BadRequest("the devices that share a model are of CUDA: ask for that backend".into()))
        }
        (Device::Cuda | Device::Cpu, Some(_)) => {
            Err(Error::BadRequest("an adapter is a device of the wgpu backend: ask for that one".into()))
        }
        (Device::Wgpu | Device::Cpu, _) | (_, Some(_)) if place.bf16_state => {
            Err(Error::BadRequest("states in bf16 are for the CUDA backend: the others keep them in f32".into()))
        }
        (Device::Wgpu, _) | (Device::Auto, Some(_)) => wgpu(adapter, place).map(Opened::Wgpu),
        // Only CUDA devices store such states, so there is no choice.
        (Device::Auto, None) if !place.bf16_state => auto(place),
        (Device::Cuda | Device::Auto, None) => {
            let (bf16_state, kv8, products) = (place.bf16_state, place.kv8, place.products);
            let options = selkie_cuda::Options { bf16_state, kv8, products, ..Default::default() };
            if let Some(at) = &place.process {
                return Ranks::across::<Cuda>(at, options, own_device(place, at)).map(Opened::Ranks);
            }
            match place.gpus[..] {
                [] => Cuda::open(selkie_cuda::Options { device: place.replica, ..options }).map(Opened::Cuda),
                [device] => Cuda::open(selkie_cuda::Options { device, ..options }).map(Opened::Cuda),
                _ => selkie_cuda::ranks(&place.gpus, options).map(Opened::Ranks),
            }
        }
        (Device::Cpu, None) if place.ranks != 1 || place.process.is_some() => {
            let ranks = match &place.process {
                Some(at) => Ranks::open_across(at, place.products),
                None => Ranks::open(place.ranks, place.products),
            };
            Ok(Opened::Ranks(ranks?.kv8(place.kv8)))
        }
        (Device::Cpu, None) => Ok(cpu(place)),
    }
}

/// Is a rank other than 0 of those that `place` says, until rank 0 ends. Only the device is this process' choice; the rest is rank
/// 0's.
///
/// # Errors
/// Those of [`ranks::follow`].
pub fn follow(place: &Place, at: &Rendezvous) -> Result<()> {
    match place.device {
        Device::Cpu => ranks::follow::<CpuBackend>(at, 0),
        _ => ranks::follow::<Cuda>(at, own_device(place, at)),
    }
}

/// The CUDA device of a rank in a process of its own.
fn own_device(place: &Place, at: &Rendezvous) -> usize {
    place.gpus.first().copied().unwrap_or(at.rank)
}

fn wgpu(adapter: Option<&str>, place: &Place) -> Result<WgpuBackend> {
    let options = selkie_wgpu::Options { kv8: place.kv8, products: place.products, ..Default::default() };
    pollster::block_on(WgpuBackend::open(adapter, options))
}

/// The first backend with a usable device: CUDA, a GPU through wgpu, the CPU.
fn auto(place: &Place) -> Result<Opened> {
    for d in selkie_cuda::devices() {
        match d.usable {
            Ok(()) => {
                tracing::info!("backend auto: cuda ({})", d.name.unwrap_or_default());
                let device = d.index.unwrap_or_default();
                let (kv8, products) = (place.kv8, place.products);
                return Cuda::open(selkie_cuda::Options { device, kv8, products, ..Default::default() })
                    .map(Opened::Cuda);
            }
            Err(why) => tracing::info!("backend auto: not cuda: {why}"),
        }
    }
    if !selkie_wgpu::may_have_hardware() {
        tracing::info!("backend auto: not wgpu: this machine has no GPU");
        return Ok(cpu(place));
    }
    match wgpu(None, place) {
        // The CPU backend is faster than a GPU that is emulated on the CPU.
        Ok(backend) if backend.is_software() => {
            tracing::info!("backend auto: not wgpu: {} is a software device", backend.caps().device);
        }
        Ok(backend) => {
            tracing::info!("backend auto: wgpu ({})", backend.caps().device);
            return Ok(Opened::Wgpu(backend));
        }
        Err(why) => tracing::info!("backend auto: not wgpu: {why}"),
    }
    Ok(cpu(place))
}

fn cpu(place: &Place) -> Opened {
    if place.replicas > 1 {
        // This is the engine's thread, which is its own.
        par::own_team(par::threads() / place.replicas);
    }
    Opened::Cpu(CpuBackend::with(place.products).kv8(place.kv8))
}

/// The devices of all backends, in the order in which `--backend auto` tries them.
pub fn devices() -> Vec<DeviceInfo> {
    let mut all = selkie_cuda::devices();
    all.extend(pollster::block_on(selkie_wgpu::devices()));
    let cpu = CpuBackend::new();
    let caps = cpu.caps();
    all.push(DeviceInfo {
        backend: caps.backend,
        index: Some(0),
        name: Some(caps.device.clone()),
        memory: caps.memory,
        usable: Ok(()),
    });
    all
}
