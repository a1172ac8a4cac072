//! Thin owners over the driver's handles. All of them live on the thread that opened the device.

use std::{cell::Cell, ffi::CString, rc::Rc, sync::Arc};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};
use selkie_core::{Error, Result};

/// Why the driver cannot be used, if it cannot. Must be asked before the first call: a missing library would be a panic.
pub fn missing() -> Option<String> {
    // SAFETY: only opens a library.
    if !unsafe { sys::is_culib_present() } {
        return Some("the NVIDIA driver (libcuda) was not found by the loader".into());
    }
    match result::init() {
        Ok(()) => None,
        Err(e) => Some(format!("the NVIDIA driver does not start: {}", explain(e))),
    }
}

/// The driver's own words.
pub fn explain(e: DriverError) -> String {
    let text = e.error_string().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{:?}: {text}", e.0)
}

/// Names the call or op in a driver error.
pub fn named<T>(op: &str, r: std::result::Result<T, DriverError>) -> Result<T> {
    r.map_err(|e| Error::Device { op: op.into(), why: explain(e) })
}

/// The primary context of a device, current on this thread.
#[derive(Debug)]
pub struct Context {
    owner: Arc<Retained>,
}

impl Context {
    /// Retains the primary context and makes it current.
    pub fn open(ordinal: usize) -> Result<Rc<Self>> {
        let owner = Arc::new(Retained::open(ordinal)?);
        owner.enter()?;
        Ok(Rc::new(Self { owner }))
    }

    /// The driver's number of the device.
    pub(crate) fn device(&self) -> sys::CUdevice {
        self.owner.device
    }

    /// For an owner that may live on another thread.
    pub fn retain(&self) -> Arc<Retained> {
        self.owner.clone()
    }

    /// A device attribute.
    pub fn attribute(&self, what: sys::CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device is valid.
        named("cuDeviceGetAttribute", unsafe { result::device::get_attribute(self.device(), what) })
    }

    /// The device's name.
    pub fn name(&self) -> Result<String> {
        named("cuDeviceGetName", result::device::get_name(self.device()))
    }
}

/// A primary context that stays alive, on any thread.
#[derive(Debug)]
pub struct Retained {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver's handles are those of the process, and its calls may come from any thread.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Retained {
    /// Retains the primary context of a device.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let device = named("cuDeviceGet", result::device::get(ordinal as i32))?;
        // SAFETY: `device` is valid; released once, in `drop`.
        let raw = named("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self { device, raw })
    }

    /// The driver's number of the device.
    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The handle.
    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Makes it current on this thread.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained.
        named("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.raw) })
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once by the owner of this value.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Free and total bytes of the current device.
pub fn memory() -> Result<(u64, u64)> {
    named("cuMemGetInfo", result::mem_get_info()).map(|(free, total)| (free as u64, total as u64))
}

/// A non-blocking stream.
#[derive(Debug)]
pub struct Stream {
    /// The raw handle.
    pub raw: sys::CUstream,
    _context: Rc<Context>,
}

impl Stream {
    /// A new stream; the default one cannot be captured.
    pub fn new(context: &Rc<Context>) -> Result<Rc<Self>> {
        let raw = named("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Rc::new(Self { raw, _context: context.clone() }))
    }

    /// What is enqueued from here on runs after the point that `event` marks.
    pub fn follow(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive.
        named("cuStreamWaitEvent", unsafe { result::stream::wait_event(self.raw, event.raw, flags) })
    }

    /// Waits for everything enqueued.
    pub fn wait(&self, op: &str) -> Result<()> {
        // SAFETY: the stream is alive.
        named(op, unsafe { result::stream::synchronize(self.raw) })
    }

    /// An error if something enqueued has failed so far.
    pub fn look(&self, op: &str) -> Result<()> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            found => named(op, found.result()),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
}

impl Event {
    /// An event, with or without a time stamp.
    pub fn new(timed: bool) -> Result<Self> {
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        Ok(Self { raw: named("cuEventCreate", result::event::create(flags))? })
    }

    /// Marks the stream's present end.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive.
        named("cuEventRecord", unsafe { result::event::record(self.raw, stream.raw) })
    }

    /// Whether the marked point is reached; an error of the device before it.
    pub fn is_reached(&self, op: &str) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            reached => named(op, reached).map(|()| true),
        }
    }

    /// Waits until the marked point is reached.
    pub fn wait(&self, op: &str) -> Result<()> {
        // SAFETY: the event is alive.
        named(op, unsafe { result::event::synchronize(self.raw) })
    }

    /// Microseconds from `start` to `self`, both reached.
    pub fn since(&self, start: &Self) -> Result<f32> {
        // SAFETY: both events are alive.
        named("cuEventElapsedTime", unsafe { result::event::elapsed(start.raw, self.raw) }).map(|ms| ms * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

/// A loaded image with one kernel.
#[derive(Debug)]
pub struct Kernel {
    module: sys::CUmodule,
    /// The kernel.
    pub function: sys::CUfunction,
    /// Most bytes of dynamic shared memory that a launch may ask for.
    shared: Cell<u32>,
    /// It may start while the kernel before it runs, because it waits for it by itself.
    pub early: bool,
}

impl Kernel {
    /// Loads an image. `started` is the structure of that name in `common.cuh`.
    pub fn load(image: &[u8], entry: &str, started: [u64; 2]) -> std::result::Result<Self, DriverError> {
        // SAFETY: the image is complete, its checksum was compared or it comes from the compiler.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        let name = CString::new(entry).expect("kernel names hold no zero byte");
        // SAFETY: the module is loaded.
        let function = match unsafe { result::module::get_function(module, name) } {
            Ok(f) => f,
            Err(e) => {
                // SAFETY: loaded above, not used again.
                let _ = unsafe { result::module::unload(module) };
                return Err(e);
            }
        };
        let kernel = Self { module, function, shared: Cell::new(0), early: false };
        kernel.set("started", &started)?;
        Ok(kernel)
    }

    /// Lets launches ask for `bytes` of dynamic shared memory. The default limit of 48 KiB counts the kernel's static shared memory too,
    /// so any amount asks for itself.
    pub fn allow_shared(&self, bytes: u32) -> std::result::Result<(), DriverError> {
        if bytes > self.shared.get() {
            let what = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(self.function, what, bytes as i32) }?;
            self.shared.set(bytes);
        }
        Ok(())
    }

    /// Writes a constant of the image, if it has one of that name.
    fn set(&self, name: &str, value: &[u64]) -> std::result::Result<(), DriverError> {
        let name = CString::new(name).expect("names hold no zero byte");
        // SAFETY: the module is loaded.
        match unsafe { result::module::get_global(self.module, name) } {
            // SAFETY: the constant has room for the value.
            Ok((at, bytes)) if bytes >= size_of_val(value) => unsafe { result::memcpy_htod_sync(at, value) },
            Err(e) if e.0 != sys::CUresult::CUDA_ERROR_NOT_FOUND => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, unloaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// An instantiated graph.
#[derive(Debug)]
pub struct Graph {
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `f` enqueues on `stream`.
    pub fn capture(stream: &Stream, f: impl FnOnce() -> Result<()>) -> Result<Self> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive and not capturing.
        named("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream.raw, mode) })?;
        let done = f();
        // The capture ends in any case; an error of `f` comes first.
        // SAFETY: capture began above.
        let graph = named("cuStreamEndCapture", unsafe { result::stream::end_capture(stream.raw) });
        done?;
        let graph = graph?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` is valid until destroyed below, `exec` is valid for the call.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }.result();
        // SAFETY: as above; the executable graph does not need it any more.
        let _ = unsafe { result::graph::destroy(graph) };
        named("cuGraphInstantiate", made)?;
        Ok(Self { exec })
    }

    /// Does what the first launch would do beforehand.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive.
        named("cuGraphUpload", unsafe { sys::cuGraphUpload(self.exec, stream.raw) }.result())
    }

    /// Enqueues the graph.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive.
        named("a recorded step", unsafe { result::graph::launch(self.exec, stream.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created in `capture`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}
