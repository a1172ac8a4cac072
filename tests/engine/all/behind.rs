//! A device that answers late.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use selkie_core::backend::{Backend, Caps};
use selkie_core::cpu::{Buf, CpuBackend, Rec, Tape};
use selkie_core::error::Result;
use selkie_core::format::Products;
use selkie_core::ops::Op;
use selkie_core::source::Bytes;
use selkie_core::tensor::Tensor;

/// What a test sees of the work on a device and of a constraint, in order.
pub type Log = Arc<Mutex<Vec<&'static str>>>;

/// The CPU, which runs each step immediately, presented as an asynchronous device.
pub struct Behind {
    cpu: CpuBackend,
    caps: Caps,
    /// If a test looks at it.
    log: Option<Log>,
    /// Saved bytes that were asked for an odd number of times: they are near the second time.
    fetched: RefCell<HashSet<*const u8>>,
}

impl Behind {
    pub fn new(asynchronous: bool, products: Products) -> Self {
        Self::of(CpuBackend::with(products), asynchronous)
    }

    /// This one, as a device that is or is not asynchronous.
    pub fn of(cpu: CpuBackend, asynchronous: bool) -> Self {
        let caps = Caps { asynchronous, ..cpu.caps().clone() };
        Self { cpu, caps, log: None, fetched: RefCell::default() }
    }

    /// An asynchronous device that logs.
    pub fn logged(log: Log) -> Self {
        Self { log: Some(log), ..Self::new(true, Products::Fast) }
    }

    fn note(&self, what: &'static str) {
        if let Some(log) = &self.log {
            log.lock().unwrap().push(what);
        }
    }
}

impl Backend for Behind {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = <CpuBackend as Backend>::Read;

    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn free_memory(&self) -> Option<u64> {
        self.cpu.free_memory()
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        self.note("alloc");
        self.cpu.alloc(label, bytes)
    }
    fn adopts(&self) -> bool {
        true
    }
    fn adopt(&self, bytes: &Bytes) -> Option<Buf> {
        self.cpu.adopt(bytes)
    }
    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.note("write");
        self.cpu.write(dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.cpu.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.cpu.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        self.note("run");
        self.cpu.run(f)
    }
    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        self.cpu.record(f)
    }
    fn play(&self, tape: &Tape) -> Result<()> {
        self.note("play");
        self.cpu.play(tape)
    }
    fn read(&self, src: &Tensor<Buf>) -> Self::Read {
        self.note("read");
        self.cpu.read(src)
    }
    fn fetch(&self, saved: &Bytes) -> Result<bool> {
        let at = saved.as_ptr();
        let mut fetched = self.fetched.borrow_mut();
        Ok(fetched.remove(&at) || !fetched.insert(at))
    }
}
