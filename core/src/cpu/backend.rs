//! The CPU as a [`Backend`]: runs ops immediately.

use std::cell::Cell;
use std::future::{Ready, ready};
use std::rc::Rc;

use super::simd::Isa;
use super::{Buf, Member, par, view};
use crate::backend::{Backend, Caps, Handle, Int8, Ops};
use crate::error::{Error, Result};
use crate::format::Products;
use crate::ops::Op;
use crate::source::Bytes;
use crate::tensor::{DType, Tensor};

/// The reference backend, and the fallback where there is no GPU. All arithmetic in f32; weights as they are stored.
///
/// Results depend on nothing but an op's inputs: not on threads, not on the instruction set, not on how tokens are split
/// into rows, chunks and steps.
pub struct CpuBackend {
    caps: Caps,
    products: Products,
    member: Member,
    free_at_start: Option<u64>,
    /// Bytes of the allocations that are alive; they may not be committed yet.
    allocated: Rc<Cell<u64>>,
}

/// An open step: runs each op immediately, or keeps it for a [`Tape`].
pub struct Rec<'a> {
    products: Products,
    member: &'a Member,
    tape: Option<&'a mut Vec<Op<Buf>>>,
}

/// A recorded step: its ops in order.
pub struct Tape(Vec<Op<Buf>>);

impl CpuBackend {
    /// A backend on all threads of this process' pool.
    pub fn new() -> Self {
        Self::with(Products::default())
    }

    /// [`CpuBackend::new`], with activations rounded in products with coded weights or not.
    pub fn with(products: Products) -> Self {
        Self::of_rank(products, Member::alone())
    }

    /// Whether KV pages are in 8 bits, see [`crate::kv8`].
    pub fn kv8(mut self, on: bool) -> Self {
        if on {
            self.caps.kv = DType::I8;
        }
        self
    }

    /// The backend of one rank, on the threads of the calling thread's team. It holds a share of the weights, which the
    /// caller has chosen.
    pub fn of_rank(products: Products, member: Member) -> Self {
        let memory = system::memory();
        let threads = par::threads();
        let caps = Caps {
            backend: "cpu",
            device: format!(
                "{}, {}, {threads} thread{}",
                system::cpu_name(),
                Isa::best().name(),
                if threads == 1 { "" } else { "s" }
            ),
            memory: memory.map(|m| m.total),
            act: DType::F32,
            products: DType::F32,
            int8: if products == Products::Fast { Int8::Always } else { Int8::Never },
            rounds: products == Products::Fast,
            kv: DType::F32,
            conv: DType::F32,
            state: DType::F32,
            max_binding: isize::MAX as u64,
            asynchronous: false,
            ranks: 1,
        };
        Self { caps, products, member, free_at_start: memory.map(|m| m.available), allocated: Rc::default() }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Ops<Buf> for Rec<'_> {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        match &mut self.tape {
            Some(ops) => ops.push(op),
            None => op.run(self.products, self.member)?,
        }
        Ok(())
    }
}

impl Backend for CpuBackend {
    type Buf = Buf;
    type Rec<'a> = Rec<'a>;
    type Tape = Tape;
    type Read = Ready<Result<Vec<u8>>>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        let free = self.free_memory();
        let fits = free.is_none_or(|free| bytes <= free);
        let buf = usize::try_from(bytes).ok().filter(|_| fits).and_then(|len| Buf::zeroed(len, &self.allocated));
        buf.ok_or_else(|| Error::OutOfMemory { what: label.into(), asked: bytes, free: free.unwrap_or(0) })
    }

    /// The smaller of two numbers: the memory available now, and the memory available at the start less all allocations
    /// since then, committed or not.
    fn free_memory(&self) -> Option<u64> {
        let at_start = self.free_at_start?.saturating_sub(self.allocated.get());
        Some(system::memory()?.available.min(at_start))
    }

    fn adopts(&self) -> bool {
        true
    }

    fn adopt(&self, bytes: &Bytes) -> Option<Buf> {
        Some(Buf::adopted(bytes))
    }

    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at.checked_add(bytes.len() as u64);
        if dst.is_adopted() || end.is_none_or(|end| end > dst.bytes()) {
            let why = format!("{} bytes at {at} of a buffer of {}", bytes.len(), dst.bytes());
            return Err(Error::Device { op: "write".into(), why });
        }
        view::fill(dst, at as usize, bytes);
        Ok(())
    }

    fn scratch(&self, _op: &Op<Buf>) -> u64 {
        0
    }

    fn reserve(&self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    fn run(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<()> {
        f(&mut Rec { products: self.products, member: &self.member, tape: None })
    }

    fn record(&self, f: impl FnOnce(&mut Rec<'_>) -> Result<()>) -> Result<Tape> {
        let mut ops = Vec::new();
        f(&mut Rec { products: self.products, member: &self.member, tape: Some(&mut ops) })?;
        Ok(Tape(ops))
    }

    fn play(&self, tape: &Tape) -> Result<()> {
        tape.0.iter().try_for_each(|op| op.run(self.products, &self.member))
    }

    fn read(&self, src: &Tensor<Buf>) -> Self::Read {
        ready(Ok(view::to_vec(src)))
    }
}

/// Bytes that push everything else out of a CPU's caches.
#[cfg(not(target_arch = "wasm32"))]
const FLUSH_BYTES: usize = 128 << 20;

#[cfg(not(target_arch = "wasm32"))]
impl crate::timer::Timer for CpuBackend {
    fn flush(&self) -> Result<()> {
        std::hint::black_box(vec![1u8; FLUSH_BYTES]);
        Ok(())
    }
}

/// The machine's facts, from the operating system.
mod system {
    /// Bytes of main memory.
    #[derive(Clone, Copy)]
    pub struct Memory {
        pub total: u64,
        pub available: u64,
    }

    /// The value of a `name : value` line of a file under `/proc`.
    fn proc_line(file: &str, name: &str) -> Option<String> {
        let text = if cfg!(target_os = "linux") { std::fs::read_to_string(file).ok()? } else { return None };
        let line = text.lines().find(|l| l.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    }

    fn kib(file: &str, name: &str) -> Option<u64> {
        let bytes: u64 = proc_line(file, name)?.split_whitespace().next()?.parse().ok()?;
        Some(bytes * 1024)
    }

    /// Main memory, where the system tells. A limit on the process' address space (`ulimit -v`) counts as well.
    pub fn memory() -> Option<Memory> {
        let available = kib("/proc/meminfo", "MemAvailable")?;
        let available = available.min(address_space_left().unwrap_or(u64::MAX));
        Some(Memory { total: kib("/proc/meminfo", "MemTotal")?, available })
    }

    fn address_space_left() -> Option<u64> {
        let text =
            if cfg!(target_os = "linux") { std::fs::read_to_string("/proc/self/limits").ok()? } else { return None };
        let line = text.lines().find_map(|l| l.strip_prefix("Max address space"))?;
        // `unlimited` is not a number.
        let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
        let status = |name| kib("/proc/self/status", name);
        // What cannot be refused lies there too: the heaps of threads (glibc reserves 64 MiB for each), mapped files, what ops allocate
        // while they run. So less than half is for data, touched or not.
        let data = (limit / 16 * 7).saturating_sub(status("VmData")?);
        Some(data.min(limit.saturating_sub(status("VmSize")?)))
    }

    /// Name of the processor, else its architecture.
    pub fn cpu_name() -> String {
        proc_line("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Act, Activation};

    #[test]
    fn huge_allocations_are_refused_with_numbers() {
        let b = CpuBackend::new();
        for asked in [1 << 50, u64::MAX, u64::MAX / 2] {
            let Err(Error::OutOfMemory { asked: a, what, .. }) = b.alloc("pool", asked) else { panic!("{asked}") };
            assert_eq!((a, what.as_str()), (asked, "pool"));
        }
    }

    #[test]
    fn untouched_allocations_count() {
        let b = CpuBackend::new();
        let Some(free) = b.free_memory() else { return };
        let half = b.alloc("half", free / 2 + 1).unwrap();
        assert!(matches!(b.alloc("other half", free / 2 + 1), Err(Error::OutOfMemory { .. })));
        drop(half);
        assert_eq!(b.allocated.get(), 0);
    }

    #[test]
    fn writes_and_reads() {
        let b = CpuBackend::new();
        let buf = b.alloc("x", 10).unwrap();
        b.write(&buf, 7, &[1, 2, 3]).unwrap();
        assert!(b.write(&buf, 8, &[1, 2, 3]).is_err() && b.write(&buf, u64::MAX, &[1]).is_err());
        let t = Tensor::new(buf, DType::Bf16, &[5]);
        assert_eq!(pollster::block_on(b.read(&t)).unwrap(), [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]);
        let adopted = b.adopt(&Bytes::new(std::sync::Arc::new([5u8; 4]))).unwrap();
        assert!(b.write(&adopted, 0, &[1]).is_err());
    }

    #[test]
    #[should_panic(expected = "write to a buffer that is in use")]
    fn a_view_being_read_cannot_be_written() {
        let b = CpuBackend::new();
        let t = Tensor::new(b.alloc("x", 64).unwrap(), DType::F32, &[4, 4]);
        let _reader = view::read::<f32>(&t);
        let _writer = view::write::<f32>(&t);
    }

    #[test]
    fn a_tape_owns_what_it_touches() {
        let b = CpuBackend::new();
        let matrix = |label| Tensor::new(b.alloc(label, 64).unwrap(), DType::F32, &[4, 4]);
        let (gate, out) = (matrix("x"), matrix("out"));
        let op = Activation { gate, up: None, row_gate: None, out, act: Act::Silu };
        let tape = b.record(|r| r.op(op.into())).unwrap();
        assert_eq!(b.allocated.get(), 128);
        b.play(&tape).unwrap();
        drop(tape);
        assert_eq!(b.allocated.get(), 0);
    }
}
