//! The backend: opening a device, running and recording steps.

use std::{cell::RefCell, collections::HashMap, rc::Rc, time::Instant};

use cudarc::driver::{result, sys};
use selkie_core::{
    Error, Result,
    backend::{Backend, Caps, DeviceInfo, Handle, Int8},
    format::{Format, Products},
    ops::{Feature, Op, RowBlock},
    saved::{HostMemory, Room, Saving},
    source::Bytes,
    tensor::{DType, Tensor},
    timer::Timer,
};
use serde::{Deserialize, Serialize};

use crate::{
    arguments,
    blas::{self, Blas},
    codes,
    compiler::Compiler,
    copies::Copies,
    driver::{self, Context, Event, Kernel, Stream, named},
    faults::Faults,
    group::{Areas, Seat},
    host::HostPool,
    launch::{Address, Gemm, Launch, Work, address},
    memory::{Buf, Pool, Read, Ring},
    nvrtc::{self, DiskCache},
    plan::{self, Arena, Device},
    record::{Ready, Rec, Tape, Times},
    spec::{File, Spec, Waits},
};

/// How to open a device.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
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
    /// KV pages in 8 bits, see [`selkie_core::kv8`].
    pub kv8: bool,
    /// Exact ones do not round activations where a recipe says so.
    pub products: Products,
}

/// Oldest supported compute capability: bf16 tensor cores.
const OLDEST: (i32, i32) = (8, 0);

/// The CUDA devices of this machine, or one entry with the reason why there is none.
pub fn devices() -> Vec<DeviceInfo> {
    let none = |why| vec![DeviceInfo { backend: "cuda", index: None, name: None, memory: None, usable: Err(why) }];
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
            describe(i).unwrap_or_else(|e| DeviceInfo {
                backend: "cuda",
                index: Some(i as usize),
                name: None,
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
        index: Some(index as usize),
        name: Some(result::device::get_name(device)?),
        // SAFETY: the device is valid.
        memory: Some(unsafe { result::device::total_mem(device) }? as u64),
        usable,
    })
}

/// An open CUDA device. Fields are dropped in order: users of the stream before the stream, the context last.
pub struct Cuda {
    /// Once there is host memory for states and pages.
    copies: RefCell<Option<Rc<Copies>>>,
    kernels: RefCell<HashMap<Spec, Rc<Kernel>>>,
    pub(crate) blas: Option<Blas>,
    ring: RefCell<Ring>,
    pool: Pool,
    pub(crate) scratch: RefCell<Option<Buf>>,
    tickets: Buf,
    /// Written over to flush the L2, by benches.
    flush: RefCell<Option<Buf>>,
    caps: Caps,
    pub(crate) compiler: RefCell<Compiler>,
    device: Device,
    /// Waits after every op, so that a device error names it.
    pub(crate) synchronous: bool,
    faults: Rc<Faults>,
    /// Memory that ranks exchange values through, if there are several.
    areas: Option<Areas>,
    seat: Option<Seat>,
    pub(crate) stream: Rc<Stream>,
    pub(crate) context: Rc<Context>,
}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the missing library or device; never another backend.
    pub fn open(options: Options) -> Result<Self> {
        Self::open_seat(options, None)
    }

    /// Opens the device of a rank.
    pub(crate) fn open_seat(options: Options, seat: Option<Seat>) -> Result<Self> {
        let none = |why: String| Error::NoDevice { backend: "cuda", why };
        let mut found = devices();
        let count = found.len();
        if options.device >= count {
            return Err(none(format!("there is no device {}, the last is {}", options.device, count - 1)));
        }
        let device = found.swap_remove(options.device);
        device.usable.map_err(none)?;
        let name = device.name.unwrap_or_default();
        let (major, minor) = named("cuDeviceGetAttribute", capability(options.device as sys::CUdevice))?;
        let arch = nvrtc::arch(major, minor);
        let mut compiler = Compiler::new(&arch, DiskCache::open(&arch, nvrtc::version()?));
        // Every model samples, and no kernel takes longer to compile: begun here, it is done when the device is open.
        compiler.request(&plan::sample_spec(1));
        let context = Context::open(options.device)?;
        let stream = Stream::new(&context)?;
        let sms = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let (_, total) = driver::memory()?;
        let blas = match blas::missing() {
            None if !options.f32 && !options.generic => Some(Blas::open(&context, &stream, &name)?),
            _ => None,
        };
        let activations = if options.f32 { DType::F32 } else { DType::Bf16 };
        let (rank, ranks) = seat.as_ref().map_or((0, 1), Seat::rank);
        let mut cuda = Self {
            copies: RefCell::default(),
            kernels: RefCell::default(),
            ring: RefCell::new(Ring::new()?),
            pool: Pool::default(),
            scratch: RefCell::default(),
            tickets: Buf::alloc(&context, &stream, "tickets", 4 * sms as u64)?,
            flush: RefCell::default(),
            caps: Caps {
                backend: "cuda",
                device: name,
                memory: Some(total),
                act: activations,
                products: activations,
                int8: Int8::Never,
                rounds: options.products == Products::Fast,
                kv: if options.kv8 { DType::I8 } else { activations },
                conv: activations,
                state: if options.bf16_state { DType::Bf16 } else { DType::F32 },
                max_binding: u64::MAX,
                asynchronous: true,
                ranks: 1,
            },
            compiler: RefCell::new(compiler),
            device: Device {
                sms,
                shared: context
                    .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                    as usize,
                bulk_copies: major >= 9,
                wgmma: arch == "sm_90a",
                blas: blas.is_some(),
                eight: blas.as_ref().is_some_and(Blas::takes_codes),
                tuned: !options.generic,
                rank,
                ranks,
            },
            blas,
            synchronous: std::env::var_os("SELKIE_CUDA_SYNC").is_some(),
            faults: Faults::new(&stream)?,
            areas: None,
            seat,
            stream,
            context,
        };
        if let Some(seat) = &cuda.seat {
            cuda.areas = Some(seat.meet(&cuda)?);
        }
        Ok(cuda)
    }

    /// Facts for plans.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The arena with at least `bytes` of scratch memory.
    pub(crate) fn arena(&self, bytes: u64) -> Result<Arena> {
        if bytes > 0 {
            self.reserve(bytes)?;
        }
        let scratch = self.scratch.borrow().as_ref().map_or(0, |b| b.address());
        let areas = self.areas.as_ref().map_or(0, |areas| areas.table.address());
        Ok(Arena { scratch, tickets: self.tickets.address(), areas })
    }

    /// The kernel of a variant, if it is loaded.
    pub(crate) fn loaded_kernel(&self, spec: &Spec) -> Option<Rc<Kernel>> {
        self.kernels.borrow().get(spec).cloned()
    }

    /// `work` as it can be enqueued, if it needs neither the compiler nor a measurement.
    pub(crate) fn loaded(&self, work: &Work) -> Option<Ready> {
        match work {
            Work::Kernel(l) => {
                let kernel = self.loaded_kernel(&l.spec).filter(|kernel| kernel.allow_shared(l.shared).is_ok());
                kernel.map(|kernel| Ready::Kernel(kernel, l.clone()))
            }
            Work::Gemm(g) => self.blas.as_ref().filter(|blas| blas.has_chosen(g)).map(|_| Ready::Gemm(g.clone())),
        }
    }

    /// Starts to make the image of a kernel that is not loaded.
    pub(crate) fn request(&self, work: &Work) {
        if let Work::Kernel(l) = work
            && self.loaded_kernel(&l.spec).is_none()
        {
            self.compiler.borrow_mut().request(&l.spec);
        }
    }

    /// Chooses the algorithm of a product; returns 1 if it was not chosen before.
    pub(crate) fn choose(&self, g: &Gemm) -> Result<usize> {
        let blas = self.blas.as_ref().expect("products are planned only with cuBLASLt");
        if blas.has_chosen(g) {
            return Ok(0);
        }
        self.settle_rank()?;
        blas.choose(&self.context, &self.stream, g, self.seat.as_ref()).map(|()| 1)
    }

    /// The kernel of a launch, from disk or from the compiler the first time.
    pub(crate) fn kernel(&self, op: &'static str, launch: &Launch, times: &mut Times) -> Result<Rc<Kernel>> {
        let kernel = match self.loaded_kernel(&launch.spec) {
            Some(k) => k,
            None => self.load_kernel(op, &launch.spec, times)?,
        };
        kernel.allow_shared(launch.shared).or_else(|e| named(&format!("loading {}", launch.spec), Err(e)))?;
        Ok(kernel)
    }

    fn load_kernel(&self, op: &'static str, spec: &Spec, times: &mut Times) -> Result<Rc<Kernel>> {
        self.settle_rank()?;
        let entry = spec.entry();
        let started = self.faults.add(op, spec)?;
        let asked = Instant::now();
        let image = self.compiler.borrow_mut().take(spec)?;
        let here = Instant::now();
        times.waiting += here - asked;
        let load = |bytes: &[u8]| Kernel::load(bytes, &entry, started);
        let mut kernel = match load(&image.bytes) {
            // A driver may refuse an image that an older compiler left on disk.
            Err(_) if image.stored => {
                let image = self.compiler.borrow().compile(spec)?;
                named(&format!("loading {spec}"), load(&image.bytes))?
            }
            loaded => named(&format!("loading {spec}"), loaded)?,
        };
        times.loading += here.elapsed();
        kernel.early = self.device.bulk_copies && spec.file().waits() != Waits::Never;
        let kernel = Rc::new(kernel);
        self.kernels.borrow_mut().insert(spec.clone(), kernel.clone());
        Ok(kernel)
    }

    /// Whether its kernels wait for those of other ranks.
    pub(crate) fn is_rank(&self) -> bool {
        self.seat.is_some()
    }

    /// Waits for everything enqueued, if it is one of several ranks: before calls that may wait for the device under a lock of the
    /// driver (they allocate, free, or load kernels), since another rank may need that lock to launch what the device waits for.
    pub(crate) fn settle_rank(&self) -> Result<()> {
        if self.is_rank() { self.stream.wait("the steps before").map_err(|e| self.faults.name(e)) } else { Ok(()) }
    }

    /// Where reads arrive.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Names late errors.
    pub(crate) fn faults(&self) -> Rc<Faults> {
        self.faults.clone()
    }

    /// Copies bytes to a buffer, in the order of the stream.
    pub(crate) fn write_to(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.ring.borrow_mut().write(&self.stream, dst.address() + at, bytes)
    }

    fn copies(&self) -> Result<Rc<Copies>> {
        if let Some(copies) = &*self.copies.borrow() {
            return Ok(copies.clone());
        }
        let copies = Rc::new(Copies::new(self)?);
        self.copies.replace(Some(copies.clone()));
        Ok(copies)
    }

    /// A launch outside of plans.
    fn own(&self, op: &'static str, launch: Launch) -> Result<Vec<(&'static str, Ready)>> {
        self.prepare(vec![(op, Work::Kernel(launch))])
    }

    /// Runs a launch outside of plans.
    pub(crate) fn run_alone(&self, op: &'static str, launch: Launch) -> Result<()> {
        self.own(op, launch)?.iter().try_for_each(|(op, ready)| self.enqueue(op, ready, &mut false))
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

    fn look(&self) -> Result<()> {
        self.stream.look("the steps before").map_err(|e| self.faults().name(e))
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        self.settle_rank()?;
        Buf::alloc(&self.context, &self.stream, label, bytes)
    }

    fn coded_bytes(&self, format: Format, dims: &[usize]) -> u64 {
        codes::bytes(format, dims)
    }

    fn arrange(&self, block: &RowBlock<Buf>) -> Result<()> {
        self.arrange_rows(block).map_err(|e| self.faults.name(e))
    }

    fn has(&self, feature: Feature) -> bool {
        feature != Feature::Ranks
    }

    fn adopt(&self, _: &Bytes) -> Option<Buf> {
        None
    }

    fn fill_random(&self, t: &Tensor<Buf>, seed: u32, half: f32) -> Result<bool> {
        assert!(t.is_contiguous(), "random values for a view with gaps");
        let spec = Spec::new(File::Fill).ty("out_t", t.dtype);
        let args = arguments::Fill { out: t.into(), n: t.len() as u64, seed, scale: half };
        let launch = Launch::new(spec, [self.device.sms * 8, 1, 1], 256, &args);
        self.run_alone("fill", launch)?;
        Ok(true)
    }

    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() as u64 <= dst.bytes(), "write of {} bytes at {at} of {}", bytes.len(), dst.bytes());
        self.write_to(dst, at, bytes).map_err(|e| self.faults.name(e))
    }

    fn scratch(&self, op: &Op<Buf>) -> u64 {
        plan::scratch(op, &self.device)
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

    fn expect(&self, step: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        let mut rec = Rec::new(self, true);
        step(&mut rec)?;
        rec.request()
    }

    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        let mut rec = Rec::new(self, false);
        f(&mut rec).and_then(|()| rec.run()).map_err(|e| self.faults.name(e))
    }

    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        let mut rec = Rec::new(self, true);
        f(&mut rec)?;
        rec.tape()
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

    fn host_memory(&self, bytes: u64) -> Result<Box<dyn HostMemory>> {
        self.copies()?;
        Ok(Box::new(HostPool::new(&self.context, bytes)?))
    }

    fn save(&self, pools: &[Tensor<Buf>], row: usize, room: Box<dyn Room>) -> Result<Box<dyn Saving>> {
        self.copies()?.save(self, pools, row, room).map_err(|e| self.faults.name(e))
    }

    fn fetch(&self, saved: &Bytes) -> Result<bool> {
        self.copies()?.fetch(saved).map_err(|e| self.faults.name(e))
    }

    fn restore(&self, saved: &Bytes, pools: &[Tensor<Buf>], row: usize) -> Result<()> {
        self.copies()?.restore(self, saved, pools, row).map_err(|e| self.faults.name(e))
    }

    fn restored(&self) -> Option<(u64, f64)> {
        Some(self.copies.borrow().as_ref().map_or((0, 0.0), |copies| copies.restored()))
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
        let launch = Launch::new(Spec::new(File::Empty), [1, 1, 1], 32, &arguments::Empty {});
        self.tape(self.own("empty", launch)?, Vec::new())
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
