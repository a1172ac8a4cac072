//! The [`Backend`]: buffers, steps, tapes.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use selkie_core::backend::{Backend, Caps, Handle, Ops};
use selkie_core::error::{Error, Result};
use selkie_core::ops::Op;
use selkie_core::source::Bytes;
use selkie_core::tensor::{DType, Tensor};

use crate::adapter::{self, Options};
use crate::buffer::{Buf, Read};
use crate::cache_file::CacheFile;
use crate::device::Gpu;
use crate::kernel::{Kernel, Spec};
use crate::lower::{Facts, lower};
use crate::pipelines::{Dispatch, Pipelines};

/// A GPU through Vulkan, Metal, DirectX 12 or the browser. Activations, KV pages and states in f32; weights as they are
/// stored.
pub struct WgpuBackend {
    caps: Caps,
    facts: Facts,
    gpu: Arc<Gpu>,
    pipelines: RefCell<Pipelines>,
    /// What the measured ops will need, to be compiled at load.
    wanted: RefCell<HashSet<Spec>>,
    next_id: Cell<usize>,
    gone: Rc<RefCell<Vec<usize>>>,
    software: bool,
}

/// An open step: the kernels so far.
pub struct Rec<'a> {
    facts: &'a Facts,
    kernels: Vec<Kernel<Buf>>,
}

/// A recorded step: dispatches, and handles to what they touch.
pub struct Tape {
    dispatches: Vec<Dispatch>,
    _bufs: Vec<Buf>,
}

/// The device's queue: uploads and steps in order.
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

/// A page's buffers would live until its garbage is collected.
#[cfg(target_arch = "wasm32")]
impl Drop for WgpuBackend {
    fn drop(&mut self) {
        self.gpu.device.destroy();
    }
}

impl WgpuBackend {
    /// Opens an adapter: its number in [`crate::devices`], or a part of its name; without either the first usable one.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason.
    pub async fn open(which: Option<&str>, options: Options) -> Result<Self> {
        let adapter = adapter::find(which).await?;
        let info = adapter.get_info();
        let has = adapter.limits();
        let limits = if options.force_default_limits { wgpu::Limits::default() } else { has.clone() };
        let no_device = |e: String| Error::NoDevice { backend: "wgpu", why: format!("{}: {e}", info.name) };
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("selkie"),
                required_features: adapter.features() & wgpu::Features::PIPELINE_CACHE,
                required_limits: limits.clone(),
                ..Default::default()
            })
            .await
            .map_err(|e| no_device(e.to_string()))?;
        // Whole vectors of 16 bytes.
        let max_binding = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) / 16 * 16;
        let caps = Caps {
            backend: "wgpu",
            device: adapter::describe(&info),
            memory: None,
            free: None,
            act: DType::F32,
            kv: DType::F32,
            conv: DType::F32,
            state: DType::F32,
            max_binding: options.max_piece.map_or(max_binding, |piece| piece.min(max_binding)),
            asynchronous: true,
        };
        let cache = CacheFile::open(&device, &info);
        let gpu = Arc::new(Gpu::new(device, queue));
        let gone = Rc::default();
        let pipelines = RefCell::new(Pipelines::new(&gpu, cache, &gone));
        Ok(Self {
            caps,
            facts: Facts { max_binding },
            gpu,
            pipelines,
            wanted: RefCell::default(),
            next_id: Cell::new(1),
            gone,
            software: adapter::is_software(&info),
        })
    }

    /// Whether the device is a program on the CPU, which nobody wants unless they ask for it.
    pub fn is_software(&self) -> bool {
        self.software
    }

    /// Pipelines compiled so far.
    pub fn pipelines(&self) -> usize {
        self.pipelines.borrow().len()
    }

    /// Destroys the device under the backend, as a driver's reset does: for tests of what follows.
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

    /// Why nothing works on the device any more, if so.
    ///
    /// # Errors
    /// The first error that nobody waited for.
    pub fn check(&self) -> Result<()> {
        self.gpu.deferred.check()
    }

    /// Waits until the browser has compiled all shaders and made all buffers asked for so far; tells `report` how many of
    /// how many.
    ///
    /// # Errors
    /// [`Error::Compile`], [`Error::OutOfMemory`] and whatever else went wrong since the device was opened.
    #[cfg(target_arch = "wasm32")]
    pub async fn settle(&self, report: &mut dyn FnMut(usize, usize)) -> Result<()> {
        self.gpu.settle(report).await
    }

    /// To wait for the device without holding the backend.
    #[cfg(target_arch = "wasm32")]
    pub fn queue(&self) -> Queue {
        Queue(self.gpu.clone())
    }

    fn lowered(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Vec<Kernel<Buf>>> {
        let mut rec = Rec { facts: &self.facts, kernels: vec![] };
        f(&mut rec)?;
        Ok(rec.kernels)
    }

    fn submit(&self, dispatches: &[Dispatch]) {
        let mut encoder =
            self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("step") });
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            dispatches.iter().for_each(|d| d.encode(&mut pass));
        }
        self.gpu.queue.submit([encoder.finish()]);
    }
}

impl Ops<Buf> for Rec<'_> {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        self.kernels.extend(lower(&op, self.facts)?);
        Ok(())
    }
}

impl Backend for WgpuBackend {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = Read;

    fn caps(&self) -> &Caps {
        &self.caps
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
        // The device writes words; a last part of one is padded where nothing follows.
        let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
        if !at.is_multiple_of(4) || (!rest.is_empty() && end != dst.bytes()) {
            return Err(error(format!("{} bytes at {at} are no whole words", bytes.len())));
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
        // No shader needs scratch. What cannot be lowered fails when it is recorded.
        if let Ok(kernels) = lower(op, &self.facts) {
            self.wanted.borrow_mut().extend(kernels.into_iter().map(|k| k.spec));
        }
        0
    }

    fn reserve(&self, _: u64) -> Result<()> {
        let wanted = self.wanted.take();
        self.pipelines.borrow_mut().compile(&wanted)
    }

    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        self.gpu.deferred.check()?;
        let kernels = self.lowered(f)?;
        let dispatches = self.pipelines.borrow_mut().dispatches(&kernels)?;
        self.submit(&dispatches);
        Ok(())
    }

    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        let kernels = self.lowered(f)?;
        let dispatches = self.pipelines.borrow_mut().dispatches(&kernels)?;
        let mut bufs: Vec<Buf> = kernels.into_iter().flat_map(|k| k.buffers).map(|(b, ..)| b).collect();
        bufs.sort_by_key(Handle::id);
        bufs.dedup_by_key(|b| b.id());
        Ok(Tape { dispatches, _bufs: bufs })
    }

    fn play(&self, tape: &Tape) -> Result<()> {
        self.gpu.deferred.check()?;
        self.submit(&tape.dispatches);
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
