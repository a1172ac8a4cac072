//! Ranks of which every op is checked: on inputs that are equal on all ranks it must give equal outputs, and what all ranks reduce
//! or gather must be equal. A rank that chose another algorithm than the others would be found here.

use std::{cell::RefCell, collections::BTreeMap};

use selkie_core::{
    Error, Result,
    backend::{Backend, Caps, Handle, Ops},
    format::Format,
    ops::{Access, Feature, Op, RowBlock},
    ranks::{Buf, Ranks, Reading},
    source::Bytes,
    tensor::{DType, Tensor},
};

/// Ranks that run one op at a time.
pub struct Equal {
    inner: Ranks,
    compared: RefCell<BTreeMap<&'static str, usize>>,
}

/// The ops of a step.
pub struct Rec(Vec<Op<Buf>>);

impl Equal {
    pub fn new(inner: Ranks) -> Self {
        Self { inner, compared: RefCell::default() }
    }

    /// How often the outputs of each op were compared.
    pub fn compared(&self) -> BTreeMap<&'static str, usize> {
        self.compared.borrow().clone()
    }

    fn follow(&self, ops: &[Op<Buf>]) -> Result<()> {
        for op in ops {
            let tensors = op.tensors();
            let meets = matches!(op, Op::AllReduce(_) | Op::AllGather(_));
            let equal = |t: &Tensor<Buf>| self.is_equal(t);
            // Rows of padding keep what was there before.
            let as_before = || tensors.iter().try_fold(true, |all, (_, t)| Ok::<_, Error>(all && equal(t)?));
            let compare = meets || as_before()?;
            self.inner.run(|rec| rec.op(op.clone()))?;
            if !compare {
                continue;
            }
            for (i, (_, t)) in tensors.iter().enumerate().filter(|(_, (access, _))| *access != Access::Read) {
                if !equal(t)? {
                    let why = format!("tensor {i}, {:?}, is not the same on all ranks", t.dims());
                    return Err(Error::Device { op: op.name().into(), why });
                }
            }
            *self.compared.borrow_mut().entry(op.name()).or_default() += 1;
        }
        Ok(())
    }

    fn is_equal(&self, t: &Tensor<Buf>) -> Result<bool> {
        let first = self.bytes(0, t)?;
        (1..self.caps().ranks).try_fold(true, |all, rank| Ok(all && self.bytes(rank, t)? == first))
    }

    /// What a rank has of a tensor, which may be some columns of a wider one.
    fn bytes(&self, rank: usize, t: &Tensor<Buf>) -> Result<Vec<u8>> {
        if t.is_contiguous() {
            return pollster::block_on(self.inner.read_on(rank, t));
        }
        let all = Tensor::new(t.buf.clone(), DType::U8, &[t.buf.bytes() as usize]);
        let all = pollster::block_on(self.inner.read_on(rank, &all))?;
        let (from, size) = (t.byte_offset(), t.dtype.bytes());
        let row = |i: usize| &all[from + i * t.row_stride * size..][..t.row_len() * size];
        Ok((0..t.rows()).flat_map(row).copied().collect())
    }
}

impl Ops<Buf> for Rec {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        self.0.push(op);
        Ok(())
    }
}

impl Backend for Equal {
    type Buf = Buf;
    type Rec<'a> = Rec;
    type Tape = Vec<Op<Buf>>;
    type Read = Reading;

    fn caps(&self) -> &Caps {
        self.inner.caps()
    }
    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        self.inner.alloc(label, bytes)
    }
    fn coded_bytes(&self, format: Format, dims: &[usize]) -> u64 {
        self.inner.coded_bytes(format, dims)
    }
    fn arrange(&self, block: &RowBlock<Buf>) -> Result<()> {
        self.inner.arrange(block)
    }
    fn has(&self, feature: Feature) -> bool {
        self.inner.has(feature)
    }
    fn adopt(&self, bytes: &Bytes) -> Option<Buf> {
        self.inner.adopt(bytes)
    }
    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(dst, at, bytes)
    }
    fn write_on(&self, rank: usize, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write_on(rank, dst, at, bytes)
    }
    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.inner.scratch(op)
    }
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.inner.reserve(bytes)
    }
    fn run(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<()> {
        self.play(&self.record(f)?)
    }
    fn record(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<Self::Tape> {
        let mut rec = Rec(Vec::new());
        f(&mut rec)?;
        Ok(rec.0)
    }
    fn play(&self, tape: &Self::Tape) -> Result<()> {
        self.follow(tape)
    }
    fn read(&self, src: &Tensor<Buf>) -> Reading {
        self.inner.read(src)
    }
}
