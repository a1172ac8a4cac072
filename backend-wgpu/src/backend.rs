//! The [`Backend`] implementation: buffers, steps, tapes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use selkie_core::backend::{Backend, Caps, Handle, Int8, Ops};
use selkie_core::error::{Error, Result};
use selkie_core::format::Products;
use selkie_core::ops::{Feature, Op};
use selkie_core::source::Bytes;
use selkie_core::tensor::{DType, Tensor};

use crate::adapter::{self, Options};
use crate::buffer::{Buf, Read};
use crate::cache_file::CacheFile;
use crate::device::Gpu;
use crate::kernel::Kernel;
use crate::lower::{self, Facts, lower_step};
use crate::pipelines::{Dispatch, Pipelines};

/// Optional features, used if the adapter has them.
const WANTED: wgpu::Features =
    wgpu::Features::PIPELINE_CACHE.union(wgpu::Features::TIMESTAMP_QUERY).union(wgpu::Features::SUBGROUP);

/// A step that is not a tape is split into at most this many submissions, each of at least [`LEAST_PART`] dispatches: a
/// submission costs 25 to 40 µs.
const MOST_PARTS: usize = 6;
const LEAST_PART: usize = 48;

/// A GPU through Vulkan, Metal, DirectX 12 or the browser. Activations, KV pages and states are f32; weights keep their
/// stored dtype.
pub struct WgpuBackend {
    caps: Caps,
    facts: Facts,
    pub(crate) gpu: Arc<Gpu>,
    pipelines: RefCell<Pipelines>,
    /// Ops of the measured steps; their shaders are compiled at load.
    measured: RefCell<Vec<Op<Buf>>>,
    /// Dispatches of the last tape, dispatches of all tapes played, and the host time of all.
    #[cfg(not(target_arch = "wasm32"))]
    played: Cell<(usize, usize, std::time::Duration)>,
    /// Scratch memory; its contents are valid within one op only.
    arena: RefCell<Option<Buf>>,
    /// Overwritten between measurements to flush the caches.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) flush: RefCell<Option<Buf>>,
    next_id: Cell<usize>,
    gone: Rc<RefCell<Vec<usize>>>,
    software: bool,
}

/// An open step: the ops so far.
#[derive(Default)]
pub struct Rec {
    ops: Vec<Op<Buf>>,
}

/// A recorded step: dispatches, and handles to the buffers that they use.
pub struct Tape {
    pub(crate) dispatches: Vec<Dispatch>,
    /// The commands of the next replay, encoded while the device ran the last one. A command buffer can be submitted only
    /// once.
    ready: RefCell<Option<wgpu::CommandBuffer>>,
    _bufs: Vec<Buf>,
}

/// The device's queue, which runs uploads and steps in order.
#[cfg(target_arch = "wasm32")]
#[derive(Clone)]
pub struct Queue(Arc<Gpu>);

#[cfg(target_arch = "wasm32")]
impl Queue {
    /// Resolves when everything enqueued before this call is done.
    pub fn done(&self) -> impl Future<Output = ()> + use<> {
        self.0.done()
    }
}

/// Frees the device's memory immediately; otherwise it would stay until the page's garbage collection.
#[cfg(target_arch = "wasm32")]
impl Drop for WgpuBackend {
    fn drop(&mut self) {
        self.gpu.device.destroy();
    }
}

impl WgpuBackend {
    /// Opens an adapter by its number in [`crate::devices`] or a part of its name; with `None`, the first usable one.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason.
    pub async fn open(which: Option<&str>, options: Options) -> Result<Self> {
        let adapter = adapter::find(which).await?;
        let cooperative = adapter::has_cooperative_matrices(&adapter) && !options.force_default_limits && !options.f32;
        let info = adapter.get_info();
        let has = adapter.limits();
        let limits = if options.force_default_limits { wgpu::Limits::default() } else { has.clone() };
        let mut features = WANTED;
        if cooperative {
            features |= wgpu::Features::SHADER_F16 | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        }
        let no_device = |e: String| Error::NoDevice { backend: "wgpu", why: format!("{}: {e}", info.name) };
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("selkie"),
                required_features: adapter.features() & features,
                required_limits: limits.clone(),
                // SAFETY: the only experimental feature requested is cooperative matrices, and only where they are used.
                experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
                ..Default::default()
            })
            .await
            .map_err(|e| no_device(e.to_string()))?;
        // Whole vectors of 16 bytes.
        let max_binding = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) / 16 * 16;
        let software = adapter::is_software(&info);
        // Only for the browsers' software device: native software adapters stand in for hardware in tests.
        let few_barriers = options.few_barriers.unwrap_or(software && cfg!(target_arch = "wasm32"));
        let precise = options.products == Products::Exact;
        let dots = !precise && !few_barriers && adapter::has_dots();
        let caps = Caps {
            backend: "wgpu",
            device: adapter::describe(&info),
            memory: None,
            act: DType::F32,
            products: if cooperative && !precise { DType::F16 } else { DType::F32 },
            int8: if dots { lower::ROUNDED } else { Int8::Never },
            rounds: !precise,
            kv: if options.kv8 { DType::I8 } else { DType::F32 },
            conv: DType::F32,
            state: DType::F32,
            max_binding: options.max_piece.map_or(max_binding, |piece| piece.min(max_binding)),
            asynchronous: true,
            ranks: 1,
        };
        let one_size = info.subgroup_min_size == info.subgroup_max_size && info.subgroup_min_size.is_power_of_two();
        let subgroups = device.features().contains(wgpu::Features::SUBGROUP) && one_size && !options.no_subgroups;
        let subgroup = subgroups.then_some(info.subgroup_min_size as usize);
        let cache = CacheFile::open(&device, &info);
        let gpu = Arc::new(Gpu::new(device, queue));
        let gone = Rc::default();
        let pipelines = RefCell::new(Pipelines::new(&gpu, cache, &gone));
        Ok(Self {
            caps,
            facts: Facts { max_binding, subgroup, cooperative, precise, dots, few_barriers },
            gpu,
            pipelines,
            measured: RefCell::default(),
            #[cfg(not(target_arch = "wasm32"))]
            played: Cell::default(),
            arena: RefCell::default(),
            #[cfg(not(target_arch = "wasm32"))]
            flush: RefCell::default(),
            next_id: Cell::new(1),
            gone,
            software,
        })
    }

    /// Facts that determine the choice of shader variants.
    pub fn facts(&self) -> Facts {
        self.facts
    }

    /// Gives the device another name: a browser does not tell it to wgpu.
    #[cfg(target_arch = "wasm32")]
    pub fn named(mut self, device: String) -> Self {
        self.caps.device = device;
        self
    }

    /// Whether the device is emulated on the CPU. Such a device is used only on request.
    pub fn is_software(&self) -> bool {
        self.software
    }

    /// Pipelines compiled so far.
    pub fn pipelines(&self) -> usize {
        self.pipelines.borrow().len()
    }

    /// Destroys the device as a driver reset does, for tests of the error path.
    pub fn lose(&self) {
        self.gpu.device.destroy();
    }

    /// Overwrites a whole buffer with zeros.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn clear(&self, buf: &Buf) {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        encoder.clear_buffer(buf.buffer(), 0, None);
        self.gpu.queue.submit([encoder.finish()]);
    }

    /// Waits until the browser has compiled all shaders and allocated all buffers requested so far; calls `report` with the
    /// number done and the total.
    ///
    /// # Errors
    /// [`Error::Compile`], [`Error::OutOfMemory`] and any other error since the device was opened.
    #[cfg(target_arch = "wasm32")]
    pub async fn settle(&self, report: &mut dyn FnMut(usize, usize)) -> Result<()> {
        self.gpu.settle(report).await
    }

    /// A handle for waiting for the device without borrowing the backend.
    #[cfg(target_arch = "wasm32")]
    pub fn queue(&self) -> Queue {
        Queue(self.gpu.clone())
    }

    fn lowered(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<Vec<Kernel<Buf>>> {
        let mut rec = Rec::default();
        f(&mut rec)?;
        lower_step(&rec.ops, &self.facts)
    }

    fn arena_bytes(&self) -> u64 {
        self.arena.borrow().as_ref().map_or(0, Handle::bytes)
    }

    fn dispatches(&self, kernels: &[Kernel<Buf>]) -> Result<Vec<Dispatch>> {
        let (arena, bytes) = (self.arena.borrow(), self.arena_bytes());
        for k in kernels {
            assert!(k.scratch() <= bytes, "{} needs {} bytes of scratch, {bytes} are reserved", k.op, k.scratch());
        }
        self.pipelines.borrow_mut().dispatches(kernels, arena.as_ref())
    }

    /// A tape of kernels.
    pub(crate) fn tape(&self, kernels: Vec<Kernel<Buf>>) -> Result<Tape> {
        let dispatches = self.dispatches(&kernels)?;
        let mut bufs: Vec<Buf> = kernels.into_iter().flat_map(|k| k.buffers).filter_map(|(b, ..)| b).collect();
        bufs.extend(self.arena.borrow().clone());
        bufs.sort_by_key(Handle::id);
        bufs.dedup_by_key(|b| b.id());
        Ok(Tape { dispatches, ready: RefCell::default(), _bufs: bufs })
    }

    /// Pipelines compiled so far.
    pub fn compiled(&self) -> usize {
        self.pipelines.borrow().len()
    }

    /// Lines about pipelines and tapes for benchmark output.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn counts(&self) -> Vec<String> {
        let pipelines = self.pipelines.borrow();
        let mut lines = vec![format!(
            "{} pipelines compiled in {:.0} ms, {}",
            pipelines.len(),
            pipelines.compiling.as_secs_f64() * 1e3,
            if pipelines.warm() { "with the file of an earlier run" } else { "without a file of an earlier run" },
        )];
        let (last, dispatches, time) = self.played.get();
        if dispatches > 0 {
            let each = time.as_secs_f64() * 1e6 / dispatches as f64;
            lines.push(format!("{last} dispatches in the last decode step, {each:.2} µs of API calls each"));
        }
        lines
    }

    /// The dispatches as one compute pass.
    fn encode(&self, dispatches: &[Dispatch]) -> wgpu::CommandBuffer {
        let mut encoder =
            self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("step") });
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            dispatches.iter().for_each(|d| d.encode(&mut pass));
        }
        encoder.finish()
    }
}

impl Ops<Buf> for Rec {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        self.ops.push(op);
        Ok(())
    }
}

impl Backend for WgpuBackend {
    type Buf = Buf;
    type Rec<'a> = Rec;
    type Tape = Tape;
    type Read = Read;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn has(&self, feature: Feature) -> bool {
        feature != Feature::Ranks
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        let most = self.gpu.device.limits().max_buffer_size;
        let out_of_memory = |free| Error::OutOfMemory { what: label.into(), asked: bytes, free };
        // Shaders read vectors of 16 bytes.
        let size = bytes.max(1).checked_next_multiple_of(16).filter(|size| *size <= most);
        let size = size.ok_or_else(|| out_of_memory(most))?;
        let create = || {
            self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        };
        let what = label.to_owned();
        let error = move |_| Error::OutOfMemory { what: what.clone(), asked: bytes, free: 0 };
        let buffer = self.gpu.scoped(&[wgpu::ErrorFilter::OutOfMemory], create, error)?;
        let id = self.next_id.replace(self.next_id.get() + 1);
        Ok(Buf::new(buffer, id, bytes, &self.gone))
    }

    fn adopt(&self, _: &Bytes) -> Option<Buf> {
        None
    }

    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.gpu.deferred.check()?;
        let error = |why: String| Error::Device { op: "write".into(), why };
        let end = at.checked_add(bytes.len() as u64).filter(|end| *end <= dst.bytes());
        let end = end.ok_or_else(|| error(format!("{} bytes at {at} of a buffer of {}", bytes.len(), dst.bytes())))?;
        // The device writes whole words; at the end of the buffer a partial word is padded.
        let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
        if !at.is_multiple_of(4) || (!rest.is_empty() && end != dst.bytes()) {
            return Err(Error::Unsupported {
                what: format!("{} bytes at byte {at} of a buffer on the wgpu backend", bytes.len()),
                why: "writes must be whole words of 4 bytes: the row length of matrices must be a multiple of 4".into(),
            });
        }
        if !words.is_empty() {
            self.gpu.upload(dst.buffer(), at, words);
        }
        if !rest.is_empty() {
            let mut last = [0; 4];
            last[..rest.len()].copy_from_slice(rest);
            self.gpu.upload(dst.buffer(), at + words.len() as u64, &last);
        }
        Ok(())
    }

    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.measured.borrow_mut().push(op.clone());
        lower::scratch(op, &self.facts)
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        if bytes > self.arena_bytes() {
            self.arena.replace(Some(self.alloc("scratch", bytes)?));
        }
        let kernels = lower_step(&self.measured.take(), &self.facts)?;
        self.pipelines.borrow_mut().compile(kernels.iter().map(|k| &k.spec))
    }

    fn expect(&self, step: impl FnOnce(&mut Rec) -> Result<()>) -> Result<()> {
        let kernels = self.lowered(step)?;
        self.pipelines.borrow_mut().compile(kernels.iter().map(|k| &k.spec))
    }

    fn run(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<()> {
        self.gpu.deferred.check()?;
        let kernels = self.lowered(f)?;
        let dispatches = self.dispatches(&kernels)?;
        // Submitted in parts, so that the device starts while the rest is encoded, which takes 1 to 2.5 µs per dispatch.
        for part in dispatches.chunks(dispatches.len().div_ceil(MOST_PARTS).max(LEAST_PART)) {
            self.gpu.queue.submit([self.encode(part)]);
        }
        Ok(())
    }

    fn record(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<Tape> {
        self.tape(self.lowered(f)?)
    }

    fn play(&self, tape: &Tape) -> Result<()> {
        self.gpu.deferred.check()?;
        #[cfg(not(target_arch = "wasm32"))]
        let start = std::time::Instant::now();
        let step = tape.ready.take().unwrap_or_else(|| self.encode(&tape.dispatches));
        self.gpu.queue.submit([step]);
        tape.ready.replace(Some(self.encode(&tape.dispatches)));
        #[cfg(not(target_arch = "wasm32"))]
        {
            let (_, dispatches, time) = self.played.get();
            let count = tape.dispatches.len();
            self.played.set((count, dispatches + count, time + start.elapsed()));
        }
        Ok(())
    }

    fn read(&self, src: &Tensor<Buf>) -> Read {
        if !src.is_contiguous() || src.byte_end() as u64 > src.buf.bytes() {
            let why = format!("a read of {:?} with row stride {}", src.dims(), src.row_stride);
            return Read::failed(Error::Device { op: "read".into(), why });
        }
        Read::new(&self.gpu, src.buf.buffer(), src.byte_offset() as u64, src.len() * src.dtype.bytes())
    }
}
