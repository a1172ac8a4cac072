//! The backend: opening a device, running and recording steps.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use cudarc::driver::{result, sys};
use selkie_core::{
    Error, Result,
    backend::{Backend, Caps, DeviceInfo, Handle},
    ops::Op,
    source::Bytes,
    tensor::{DType, Tensor},
    timer::Timer,
};

use crate::{
    blas::{self, Blas},
    driver::{self, Context, Event, Kernel, Stream, named},
    faults::Faults,
    launch::{Address, Args, Launch, Work, address},
    memory::{Buf, Pool, Read, Ring},
    nvrtc::{self, DiskCache},
    plan::{self, Target},
    record::{Ready, Rec, Tape},
    spec::{File, Spec},
};

/// How to open a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Index of the device.
    pub device: usize,
    /// Only the kernels that take every shape: slower, for tests.
    pub generic: bool,
    /// f32 activations, KV pages, convolution states and matrix products: slower, for comparing with references.
    pub f32: bool,
    /// Recurrent states in bf16 instead of f32: half the memory and traffic, computed in f32 and rounded where a slot is
    /// written.
    pub bf16_state: bool,
}

/// Oldest supported compute capability: bf16 tensor cores.
const OLDEST: (i32, i32) = (8, 0);

/// The CUDA devices of this machine, or one entry with the reason why there is none.
pub fn devices() -> Vec<DeviceInfo> {
    let none =
        |why| vec![DeviceInfo { backend: "cuda", index: 0, name: "none".into(), memory: None, usable: Err(why) }];
    if let Some(why) = driver::missing().or_else(nvrtc::missing) {
        return none(why);
    }
    let count = match result::device::get_count() {
        Ok(0) => return none("the NVIDIA driver reports no device".into()),
        Ok(n) => n,
        Err(e) => return none(driver::explain(e)),
    };
    (0..count)
        .map(|i| {
            let index = i as usize;
            describe(i).unwrap_or_else(|e| DeviceInfo {
                backend: "cuda",
                index,
                name: "unknown".into(),
                memory: None,
                usable: Err(driver::explain(e)),
            })
        })
        .collect()
}

fn capability(device: sys::CUdevice) -> std::result::Result<(i32, i32), result::DriverError> {
    let attribute = |what| {
        // SAFETY: the device is valid.
        unsafe { result::device::get_attribute(device, what) }
    };
    Ok((
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

fn describe(index: i32) -> std::result::Result<DeviceInfo, result::DriverError> {
    let device = result::device::get(index)?;
    let (major, minor) = capability(device)?;
    let usable = match (major, minor) >= OLDEST {
        true => Ok(()),
        false => Err(format!("its compute capability is {major}.{minor}, and {}.{} is needed", OLDEST.0, OLDEST.1)),
    };
    Ok(DeviceInfo {
        backend: "cuda",
        index: index as usize,
        name: result::device::get_name(device)?,
        // SAFETY: the device is valid.
        memory: Some(unsafe { result::device::total_mem(device) }? as u64),
        usable,
    })
}

/// An open CUDA device. Fields are dropped in order: what uses the stream before the stream, the context last.
pub struct Cuda {
    kernels: RefCell<HashMap<Spec, Rc<Kernel>>>,
    pub(crate) blas: Option<Blas>,
    ring: RefCell<Ring>,
    pool: Pool,
    pub(crate) scratch: RefCell<Option<Buf>>,
    tickets: Buf,
    /// Written over to flush the L2, by benches.
    flush: RefCell<Option<Buf>>,
    caps: Caps,
    arch: String,
    disk: DiskCache,
    sms: usize,
    /// Most shared memory of a block, in bytes.
    shared: usize,
    generic: bool,
    /// Compute capability 9.0 or later: kernels of a step may start while the one before them runs, and copy in bulk.
    hopper: bool,
    /// Waits after every op, so that a device error names it.
    pub(crate) synchronous: bool,
    faults: Rc<Faults>,
    pub(crate) stream: Rc<Stream>,
    context: Rc<Context>,
}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the missing library or device; never another backend.
    pub fn open(options: Options) -> Result<Self> {
        let none = |why: String| Error::NoDevice { backend: "cuda", why };
        let mut found = devices();
        let count = found.len();
        if options.device >= count {
            return Err(none(format!("there is no device {}, the last is {}", options.device, count - 1)));
        }
        let device = found.swap_remove(options.device);
        device.usable.map_err(none)?;
        let (major, minor) = named("cuDeviceGetAttribute", capability(options.device as sys::CUdevice))?;
        let context = Context::open(options.device)?;
        let stream = Stream::new(&context)?;
        let sms = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let arch = nvrtc::arch(major, minor);
        let (_, total) = driver::memory()?;
        let blas = match blas::missing() {
            None if !options.f32 && !options.generic => Some(Blas::open(&context, &stream, &device.name)?),
            _ => None,
        };
        let activations = if options.f32 { DType::F32 } else { DType::Bf16 };
        Ok(Self {
            kernels: RefCell::default(),
            blas,
            ring: RefCell::new(Ring::new()?),
            pool: Pool::default(),
            scratch: RefCell::default(),
            tickets: Buf::alloc(&context, &stream, "tickets", 4 * sms as u64)?,
            flush: RefCell::default(),
            caps: Caps {
                backend: "cuda",
                device: device.name.clone(),
                memory: Some(total),
                act: activations,
                products: activations,
                kv: activations,
                conv: activations,
                state: if options.bf16_state { DType::Bf16 } else { DType::F32 },
                max_binding: u64::MAX,
                asynchronous: true,
            },
            disk: DiskCache::open(&arch, nvrtc::version()?),
            arch,
            sms,
            shared: context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
            generic: options.generic,
            hopper: major >= 9,
            synchronous: std::env::var_os("SELKIE_CUDA_SYNC").is_some(),
            faults: Faults::new(&stream)?,
            stream,
            context,
        })
    }

    pub(crate) fn target(&self, untouched: bool, settled: bool) -> Target {
        Target {
            sms: self.sms,
            shared: self.shared,
            bulk: self.hopper,
            wgmma: self.arch == "sm_90a",
            blas: self.blas.is_some(),
            tuned: !self.generic,
            tickets: self.tickets.address(),
            scratch: self.scratch.borrow().as_ref().map_or(0, |b| b.address()),
            untouched,
            settled,
        }
    }

    /// The loaded kernel of a variant, from disk or from the compiler the first time.
    fn kernel(&self, op: &'static str, launch: &Launch) -> Result<Rc<Kernel>> {
        if let Some(k) = self.kernels.borrow().get(&launch.spec) {
            return Ok(k.clone());
        }
        let (spec, entry) = (&launch.spec, launch.spec.entry());
        let started = self.faults.add(op, spec)?;
        let load = |image: &[u8]| Kernel::load(image, &entry, launch.shared, started);
        let stored = self.disk.load(spec).and_then(|image| load(&image).ok());
        let mut kernel = match stored {
            Some(k) => k,
            None => {
                let image = nvrtc::compile(spec, &self.arch)?;
                let kernel = named(&format!("loading {spec}"), load(&image.bytes))?;
                self.disk.store(spec, &image.bytes);
                kernel
            }
        };
        kernel.early = self.hopper && spec.waits();
        let kernel = Rc::new(kernel);
        self.kernels.borrow_mut().insert(spec.clone(), kernel.clone());
        Ok(kernel)
    }

    /// Compiles and measures what `work` needs, so that running it does neither.
    pub(crate) fn prepare(&self, op: &'static str, work: &Work) -> Result<Ready> {
        match work {
            Work::Kernel(l) => Ok(Ready::Kernel(self.kernel(op, l)?, l.clone())),
            Work::Gemm(g) => {
                let blas = self.blas.as_ref().expect("planned only with cuBLASLt");
                blas.choose(&self.context, &self.stream, g)?;
                Ok(Ready::Gemm(g.clone()))
            }
        }
    }

    /// Plans an op and makes sure that scratch, kernels and algorithms are there.
    pub(crate) fn ready(&self, op: &Op<Buf>, target: &Target) -> Result<Vec<Ready>> {
        let need = plan::scratch(op, target);
        if need > self.scratch.borrow().as_ref().map_or(0, |b| b.bytes()) {
            self.reserve(need)?;
        }
        // With the arena as it is now.
        let target = Target { scratch: self.target(false, false).scratch, ..*target };
        plan::plan(op, &target)?.iter().map(|w| self.prepare(op.name(), w)).collect()
    }
}

impl Backend for Cuda {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = Read;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn free_memory(&self) -> Option<u64> {
        driver::memory().ok().map(|(free, _)| free)
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        Buf::alloc(&self.context, &self.stream, label, bytes)
    }

    fn adopt(&self, _: &Bytes) -> Option<Buf> {
        None
    }

    fn fill_random(&self, t: &Tensor<Buf>, seed: u32, half: f32) -> Result<bool> {
        assert!(t.is_contiguous(), "random values for a view with gaps");
        let spec = Spec::new(File::Fill).ty("out_t", t.dtype);
        let args = Args::new().int(address(t)).int(t.len() as u64).int(u64::from(seed)).float(half);
        let launch = Launch::new(spec, [self.sms * 8, 1, 1], 256, args);
        let ready = self.prepare("fill", &Work::Kernel(launch))?;
        self.enqueue("fill", &ready, &mut false)?;
        Ok(true)
    }

    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() as u64 <= dst.bytes(), "write of {} bytes at {at} of {}", bytes.len(), dst.bytes());
        let done = self.ring.borrow_mut().write(&self.stream, dst.address() + at, bytes);
        done.map_err(|e| self.faults.name(e))
    }

    fn scratch(&self, op: &Op<Buf>) -> u64 {
        plan::scratch(op, &self.target(false, false))
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        if self.scratch.borrow().as_ref().is_some_and(|b| b.bytes() >= bytes) {
            return Ok(());
        }
        let buf = self.alloc("scratch", bytes)?;
        // Recorded steps keep the arena that they were recorded with; whatever runs now uses the old one to its end,
        // since freeing waits for the device.
        self.scratch.replace(Some(buf));
        Ok(())
    }

    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        let mut rec = Rec::new(self, None);
        f(&mut rec).and_then(|()| rec.flush()).map_err(|e| self.faults.name(e))
    }

    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        let mut rec = Rec::new(self, Some(Vec::new()));
        f(&mut rec)?;
        rec.flush()?;
        self.tape(rec.recorded.unwrap_or_default(), rec.keep)
    }

    fn play(&self, tape: &Tape) -> Result<()> {
        let launched = tape.graph.launch(&self.stream);
        let done = launched.and_then(|()| if self.synchronous { self.stream.wait("a recorded step") } else { Ok(()) });
        done.map_err(|e| self.faults.name(e))
    }

    fn read(&self, src: &Tensor<Buf>) -> Read {
        assert!(src.is_contiguous(), "a read of a view with gaps");
        let bytes = src.len() * src.dtype.bytes();
        Read::start(&self.pool, &self.faults, &self.stream, address(src), bytes)
    }
}

/// More than the largest L2.
const FLUSH_BYTES: u64 = 256 << 20;

impl Timer for Cuda {
    fn flush(&self) -> Result<()> {
        let mut kept = self.flush.borrow_mut();
        let buf = match &*kept {
            Some(b) => b.clone(),
            None => kept.insert(self.alloc("flush", FLUSH_BYTES)?).clone(),
        };
        // SAFETY: the range is the whole buffer.
        named("flush", unsafe { result::memset_d8_async(buf.address(), 0, FLUSH_BYTES as usize, self.stream.raw) })
    }

    fn empty(&self) -> Result<Tape> {
        let launch = Launch::new(Spec::new(File::Empty), [1, 1, 1], 32, Args::new());
        self.tape(vec![("empty", self.prepare("empty", &Work::Kernel(launch))?)], Vec::new())
    }

    async fn time(&self, tape: &Tape) -> Result<f64> {
        let (start, end) = (Event::new(true)?, Event::new(true)?);
        start.record(&self.stream)?;
        self.play(tape)?;
        end.record(&self.stream)?;
        end.wait("a timed step")?;
        Ok(f64::from(end.since(&start)?))
    }
}
