//! Several ranks as one backend: tensor parallelism on the CPU.
//!
//! The engine records a step once. Its tensors have the sizes of one rank's share, and every rank has a buffer for each handle.
//! A rank is a CPU backend in a thread of its own, with its own team of helpers; it receives, in order, allocations, writes, steps and
//! reads, and decides nothing. Ranks meet in three ops only: [`AllReduce`](crate::ops::AllReduce),
//! [`AllGather`](crate::ops::AllGather) and [`RankNorm`](crate::ops::RankNorm).
//!
//! What is not a share (activations of the stream, logits, sampled ids) is computed by every rank, with equal bits, and read from
//! rank 0. A rank that fails or panics ends the work of all with its reason: the next command or read is an error.

use std::{
    cell::Cell,
    collections::HashMap,
    future::{Ready, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread,
    time::Duration,
};

use crate::{
    backend::{Backend, Caps, Handle, Ops},
    cpu::{self, CpuBackend, DEADLINE, Member, par},
    error::{Error, Result},
    format::Products,
    ops::{Op, Rebind},
    saved::{Reads, Room, Saving},
    source::Bytes,
    survive::panic_text,
    tensor::Tensor,
    timer::Timer,
};

/// Most ranks of a backend.
pub const MOST_RANKS: usize = 64;

/// The CPU as ranks that share the weights of a model.
pub struct Ranks {
    caps: Caps,
    links: Rc<Links>,
    /// Asked for free memory; it computes nothing.
    host: CpuBackend,
    free_at_start: Option<u64>,
    next: Cell<u64>,
}

/// A counted handle to bytes of the same size on every rank.
#[derive(Clone)]
pub struct Buf(Rc<Inner>);

struct Inner {
    id: u64,
    bytes: u64,
    links: Rc<Links>,
}

/// A step being recorded. It holds the buffers until the ranks were told.
pub struct Rec(Vec<Op<Buf>>);

/// A step that every rank has recorded, and the buffers that it touches.
pub struct Tape {
    id: Buf,
    _ops: Vec<Op<Buf>>,
}

/// What a rank is told, in the order of the calls. Buffers and tapes go by numbers.
#[derive(Clone)]
enum Command {
    Alloc {
        id: u64,
        label: Arc<str>,
        bytes: u64,
    },
    Write {
        id: u64,
        at: u64,
        bytes: Bytes,
    },
    /// Forgets a buffer or a tape.
    Free(u64),
    Run(Arc<[Op<u64>]>),
    Record {
        id: u64,
        ops: Arc<[Op<u64>]>,
    },
    Play(u64),
    Read {
        from: Tensor<u64>,
        to: SyncSender<Vec<u8>>,
    },
    Flush,
}

/// The way to the ranks.
struct Links {
    ranks: Vec<Link>,
    member: Member,
    deadline: Duration,
    /// Bytes that are allocated on each rank.
    allocated: Cell<u64>,
}

struct Link {
    commands: Sender<Command>,
    /// Commands and ops that it has completed.
    done: Arc<AtomicU64>,
}

impl Ranks {
    /// `ranks` ranks, which divide the threads of the process' pool.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for no rank or more than [`MOST_RANKS`]; [`Error::Device`] if the system gives no thread.
    pub fn open(ranks: usize, products: Products) -> Result<Self> {
        Self::with_deadline(ranks, products, DEADLINE)
    }

    fn with_deadline(ranks: usize, products: Products, deadline: Duration) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Error::BadRequest(format!("{ranks} ranks; 1 to {MOST_RANKS} are possible")));
        }
        let host = CpuBackend::with(products);
        let threads = (par::threads() / ranks).max(1);
        let members = Member::group(ranks, deadline);
        let member = members[0].clone();
        let links: Result<Vec<Link>> = members.into_iter().map(|m| start(m, products, threads)).collect();
        let links = Links { ranks: links?, member, deadline, allocated: Cell::new(0) };
        let device = format!("{}, {ranks} rank{}", host.caps().device, if ranks == 1 { "" } else { "s" });
        let caps = Caps { device, ranks, ..host.caps().clone() };
        let free_at_start = host.free_memory();
        Ok(Self { caps, links: Rc::new(links), host, free_at_start, next: Cell::new(0) })
    }

    fn handle(&self, bytes: u64) -> Buf {
        let id = self.next.replace(self.next.get() + 1);
        self.links.allocated.update(|all| all + bytes);
        Buf(Rc::new(Inner { id, bytes, links: self.links.clone() }))
    }

    fn write_to(&self, ranks: &[Link], dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        if at.checked_add(bytes.len() as u64).is_none_or(|end| end > dst.bytes()) {
            let why = format!("{} bytes at {at} of a buffer of {}", bytes.len(), dst.bytes());
            return Err(Error::Device { op: "write".into(), why });
        }
        let command = Command::Write { id: dst.0.id, at, bytes: bytes.to_vec().into() };
        self.links.tell(ranks, &command)
    }
}

/// Starts a rank.
fn start(member: Member, products: Products, threads: usize) -> Result<Link> {
    let (commands, told) = channel();
    let done = Arc::new(AtomicU64::new(0));
    let (name, counter) = (format!("rank {}", member.rank()), done.clone());
    let life = move || {
        par::own_team(threads);
        let work = || Rank::new(member.clone(), products, counter).follow(&told);
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => member.fail(e.to_string()),
            Err(panic) => member.fail(format!("it panicked: {}", panic_text(&*panic))),
        }
    };
    let started = thread::Builder::new().name(name.clone()).spawn(life);
    started.map_err(|e| Error::Device { op: format!("start of {name}"), why: e.to_string() })?;
    Ok(Link { commands, done })
}

impl Links {
    /// Sends a command to some ranks.
    fn tell(&self, ranks: &[Link], command: &Command) -> Result<()> {
        for rank in ranks {
            rank.commands.send(command.clone()).map_err(|_| self.ended())?;
        }
        Ok(())
    }

    fn tell_all(&self, command: &Command) -> Result<()> {
        self.tell(&self.ranks, command)
    }

    /// The bytes of a tensor on one rank, after everything that it was told before.
    fn read(&self, rank: usize, from: Tensor<u64>) -> Result<Vec<u8>> {
        let (to, answer) = sync_channel(1);
        let link = &self.ranks[rank];
        self.tell(std::slice::from_ref(link), &Command::Read { from, to })?;
        loop {
            let done = link.done.load(Ordering::Relaxed);
            match answer.recv_timeout(self.deadline) {
                // What the others did since is worth nothing if one of them has failed.
                Ok(bytes) => return self.member.check().map(|()| bytes),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
                Err(RecvTimeoutError::Timeout) if link.done.load(Ordering::Relaxed) != done => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.member.fail(format!("rank {rank} completed nothing within {:?}", self.deadline));
                    return Err(self.ended());
                }
            }
        }
    }

    /// Why a rank takes no more commands.
    fn ended(&self) -> Error {
        let unknown = || Error::Device { op: "ranks".into(), why: "a rank ended without a reason".into() };
        self.member.check().err().unwrap_or_else(unknown)
    }
}

/// A rank: its backend, and its buffers and tapes by number.
struct Rank {
    backend: CpuBackend,
    bufs: HashMap<u64, cpu::Buf>,
    tapes: HashMap<u64, cpu::Tape>,
    done: Arc<AtomicU64>,
}

impl Rank {
    fn new(member: Member, products: Products, done: Arc<AtomicU64>) -> Self {
        let backend = CpuBackend::of_rank(products, member);
        Self { backend, bufs: HashMap::new(), tapes: HashMap::new(), done }
    }

    /// Does what it is told until nobody can tell it any more.
    fn follow(mut self, told: &Receiver<Command>) -> Result<()> {
        while let Ok(command) = told.recv() {
            self.obey(command)?;
            self.count();
        }
        Ok(())
    }

    fn count(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Alloc { id, label, bytes } => {
                self.bufs.insert(id, self.backend.alloc(&label, bytes)?);
            }
            Command::Write { id, at, bytes } => self.backend.write(&self.bufs[&id], at, &bytes)?,
            Command::Free(id) => {
                self.bufs.remove(&id);
                self.tapes.remove(&id);
            }
            Command::Run(ops) => self.backend.run(|rec| {
                ops.iter().try_for_each(|op| {
                    rec.op(self.own(op))?;
                    self.count();
                    Ok(())
                })
            })?,
            Command::Record { id, ops } => {
                let tape = self.backend.record(|rec| ops.iter().try_for_each(|op| rec.op(self.own(op))))?;
                self.tapes.insert(id, tape);
            }
            Command::Play(id) => self.backend.play(&self.tapes[&id])?,
            Command::Read { from, to } => {
                let bytes = self.backend.read(&from.rebind(&mut |id| self.bufs[id].clone())).into_inner()?;
                // The reader may have given up.
                let _ = to.send(bytes);
            }
            Command::Flush => self.backend.flush()?,
        }
        Ok(())
    }

    /// An op on this rank's buffers.
    fn own(&self, op: &Op<u64>) -> Op<cpu::Buf> {
        op.rebind(&mut |id| self.bufs[id].clone())
    }
}

impl Handle for Buf {
    fn id(&self) -> usize {
        self.0.id as usize
    }

    fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.links.allocated.update(|all| all - self.bytes);
        // Ranks that have ended hold nothing.
        let _ = self.links.tell_all(&Command::Free(self.id));
    }
}

impl Rec {
    fn by_number(&self) -> Arc<[Op<u64>]> {
        self.0.iter().map(|op| op.rebind(&mut |buf| buf.0.id)).collect()
    }
}

impl Ops<Buf> for Rec {
    fn op(&mut self, op: Op<Buf>) -> Result<()> {
        op.check();
        self.0.push(op);
        Ok(())
    }
}

impl Backend for Ranks {
    type Buf = Buf;
    type Rec<'a> = Rec;
    type Tape = Tape;
    type Read = Ready<Result<Vec<u8>>>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Of one rank: what is free, divided by the ranks.
    fn free_memory(&self) -> Option<u64> {
        let ranks = self.caps.ranks as u64;
        let at_start = self.free_at_start?.saturating_sub(self.links.allocated.get().saturating_mul(ranks));
        Some(self.host.free_memory()?.min(at_start) / ranks)
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        if let Some(free) = self.free_memory().filter(|free| bytes > *free) {
            return Err(Error::OutOfMemory { what: label.into(), asked: bytes, free });
        }
        let buf = self.handle(bytes);
        self.links.tell_all(&Command::Alloc { id: buf.0.id, label: label.into(), bytes })?;
        Ok(buf)
    }

    /// Ranks hold their shares, which lie scattered in the file.
    fn adopt(&self, _: &Bytes) -> Option<Buf> {
        None
    }

    fn write(&self, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.write_to(&self.links.ranks, dst, at, bytes)
    }

    fn write_on(&self, rank: usize, dst: &Buf, at: u64, bytes: &[u8]) -> Result<()> {
        self.write_to(&self.links.ranks[rank..=rank], dst, at, bytes)
    }

    fn scratch(&self, _: &Op<Buf>) -> u64 {
        0
    }

    fn reserve(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn run(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<()> {
        let mut rec = Rec(Vec::new());
        f(&mut rec)?;
        self.links.tell_all(&Command::Run(rec.by_number()))
    }

    fn record(&self, f: impl FnOnce(&mut Rec) -> Result<()>) -> Result<Tape> {
        let mut rec = Rec(Vec::new());
        f(&mut rec)?;
        let id = self.handle(0);
        self.links.tell_all(&Command::Record { id: id.0.id, ops: rec.by_number() })?;
        Ok(Tape { id, _ops: rec.0 })
    }

    fn play(&self, tape: &Tape) -> Result<()> {
        self.links.tell_all(&Command::Play(tape.id.0.id))
    }

    /// Reads from rank 0. The engine reads only values that are equal on all ranks.
    fn read(&self, src: &Tensor<Buf>) -> Self::Read {
        ready(self.links.read(0, src.rebind(&mut |buf| buf.0.id)))
    }

    /// The shares of all ranks, one rank after the other.
    fn save(&self, pools: &[Tensor<Buf>], row: usize, room: Box<dyn Room>) -> Result<Box<dyn Saving>> {
        let share = |(rank, pool): (usize, &Tensor<Buf>)| {
            ready(self.links.read(rank, pool.slice_rows(row, 1).rebind(&mut |buf| buf.0.id)))
        };
        let all = (0..self.caps.ranks).flat_map(|rank| pools.iter().map(move |pool| (rank, pool)));
        Ok(Box::new(Reads::new(all.map(share), room)))
    }

    fn restore(&self, saved: &Bytes, pools: &[Tensor<Buf>], row: usize) -> Result<()> {
        let mut at = 0;
        for rank in 0..self.caps.ranks {
            for pool in pools {
                let bytes = pool.row_len() * pool.dtype.bytes();
                let first = pool.slice_rows(row, 1).byte_offset() as u64;
                self.write_on(rank, &pool.buf, first, &saved[at..at + bytes])?;
                at += bytes;
            }
        }
        Ok(())
    }
}

impl Timer for Ranks {
    fn flush(&self) -> Result<()> {
        self.links.tell_all(&Command::Flush)
    }
}

#[cfg(test)]
#[path = "ranks_tests.rs"]
mod tests;
