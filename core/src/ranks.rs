//! Several ranks as one backend: tensor parallelism.
//!
//! The engine records a step once. Its tensors have the sizes of one rank's share, and every rank has a buffer for each handle.
//! A rank is a backend in a thread or a process of its own, a CUDA device or the CPU with a team of helpers; it receives, in order,
//! allocations, writes, steps and reads, and decides nothing. Ranks meet in three ops only: [`AllReduce`](crate::ops::AllReduce),
//! [`AllGather`](crate::ops::AllGather) and [`RankNorm`](crate::ops::RankNorm).
//!
//! What is not a share (activations of the stream, logits, sampled ids) is computed by every rank, with equal bits, and read from
//! rank 0. A rank that fails or panics ends the work of all with its reason: the next command or read is an error.

use std::{
    cell::Cell,
    collections::VecDeque,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, sync_channel},
    },
    task::{Context, Poll},
    thread,
    time::{Duration, Instant},
};

use crate::{
    backend::{Backend, Caps, Handle, LOOK, Ops},
    cpu::CpuBackend,
    error::{Error, Result},
    format::{Format, Products},
    ops::{Op, Rebind, RowBlock},
    saved::{Filling, Room, Saving},
    source::{Bytes, LocalFuture},
    tensor::{DType, Tensor},
    timer::Timer,
};

mod process;
mod rank;
mod wire;

use rank::{Answer, Command, Opened, Started, Told, spawn};

pub use crate::cpu::{DEADLINE, Member};
pub use process::{Rendezvous, follow};
pub use rank::{Arriving, RankDevice};

/// Most ranks of a backend.
pub const MOST_RANKS: usize = 64;

/// Bytes of large writes that may wait for a rank: reading files is faster than some devices.
const WRITES_IN_FLIGHT: u64 = 256 << 20;

/// Ranks that share the weights of a model.
pub struct Ranks {
    caps: Caps,
    links: Rc<Links>,
    memory: Memory,
    next: Cell<u64>,
    /// Bytes of large writes since the ranks were last waited for.
    unconfirmed: Cell<u64>,
}

/// Where ranks allocate.
enum Memory {
    /// All in the host's, of which so much was free at the start. The backend is asked for free memory and computes nothing.
    Host(CpuBackend, Option<u64>),
    /// Each in its own device's.
    Devices,
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

/// A read of one rank: polling waits for it, since the engine's thread has nothing else to do.
pub struct Reading {
    state: Asked,
    patience: Patience,
    rank: usize,
    links: Rc<Links>,
}

/// How far a read is.
enum Asked {
    Told(Receiver<Answer>),
    Arriving(Box<dyn Arriving>),
    Taken,
}

/// Since when a rank has completed nothing, and what it had completed then.
struct Patience {
    since: Instant,
    done: u64,
}

/// The shares of a row on their way to the host, rank by rank.
struct Shares {
    reads: VecDeque<Reading>,
    room: Filling,
}

/// The way to the ranks.
struct Links {
    ranks: Vec<Link>,
    member: Member,
    deadline: Duration,
    /// Bytes that are allocated on each rank.
    allocated: Cell<u64>,
    threads: Vec<thread::JoinHandle<()>>,
}

struct Link {
    commands: Sender<Told>,
    /// Commands and ops that it has completed.
    done: Arc<AtomicU64>,
}

impl Ranks {
    /// `ranks` ranks of the CPU, which divide the threads of the process' pool.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for no rank or more than [`MOST_RANKS`]; [`Error::Device`] if the system gives no thread.
    pub fn open(ranks: usize, products: Products) -> Result<Self> {
        Self::with_deadline(ranks, products, DEADLINE)
    }

    fn with_deadline(ranks: usize, products: Products, deadline: Duration) -> Result<Self> {
        Ok(Self::start::<CpuBackend>(products, &vec![0; ranks], deadline)?.on_the_host(products))
    }

    /// [`Ranks::open`], with each rank in a process of its own; this one is rank 0, whatever `at` says. Waits for the others,
    /// see [`follow`].
    ///
    /// # Errors
    /// As [`Ranks::open`]; [`Error::Device`] for a rank that does not come.
    pub fn open_across(at: &Rendezvous, products: Products) -> Result<Self> {
        Ok(Self::across::<CpuBackend>(at, products, 0)?.on_the_host(products))
    }

    fn on_the_host(self, products: Products) -> Self {
        let host = CpuBackend::with(products);
        let free_at_start = host.free_memory();
        Self { memory: Memory::Host(host, free_at_start), ..self }
    }

    /// Whether KV pages are in 8 bits, see [`crate::kv8`].
    pub fn kv8(mut self, on: bool) -> Self {
        if on {
            self.caps.kv = DType::I8;
        }
        self
    }

    /// A rank on each of some devices, which have memory of their own.
    ///
    /// # Errors
    /// As [`Ranks::open`]; those of the devices.
    pub fn on<D: RankDevice>(setting: D::Setting, devices: &[usize]) -> Result<Self> {
        Self::start::<D>(setting, devices, DEADLINE)
    }

    /// Ranks in processes of their own; this one is rank 0, whatever `at` says, on number `device` of its devices. Waits for the
    /// others, see [`follow`].
    ///
    /// # Errors
    /// As [`Ranks::open`]; those of the devices; [`Error::BadRequest`] if this process cannot listen at the rendezvous;
    /// [`Error::Device`] for a rank that does not come.
    pub fn across<D: RankDevice>(at: &Rendezvous, setting: D::Setting, device: usize) -> Result<Self> {
        check_number(at.ranks)?;
        let members = Member::group(at.ranks, DEADLINE);
        let guests = process::gather::<D>(at, &setting, &members)?;
        let own = spawn::<D>(members[0].clone(), setting, device)?;
        Self::of(&members[0], std::iter::once(own).chain(guests), DEADLINE)
    }

    fn start<D: RankDevice>(setting: D::Setting, devices: &[usize], deadline: Duration) -> Result<Self> {
        check_number(devices.len())?;
        let members = Member::group(devices.len(), deadline);
        let spawn = |(member, device): (&Member, &usize)| spawn::<D>(member.clone(), setting.clone(), *device);
        let started: Result<Vec<_>> = members.iter().zip(devices).map(spawn).collect();
        Self::of(&members[0], started?.into_iter(), deadline)
    }

    /// Ranks that have been started, once their devices are open.
    fn of(member: &Member, started: impl Iterator<Item = (Link, Started)>, deadline: Duration) -> Result<Self> {
        let (mut ranks, mut threads, mut opening) = (Vec::new(), Vec::new(), Vec::new());
        for (link, Started { threads: own, opened }) in started {
            ranks.push(link);
            threads.extend(own);
            opening.push(opened);
        }
        // Ranks that wait for one another give up first: they know for whom.
        let links = Links { ranks, member: member.clone(), deadline: 2 * deadline, allocated: Cell::new(0), threads };
        let opened: Result<Vec<Opened>> =
            opening.iter().map(|opened| opened.recv().unwrap_or_else(|_| Err(links.ended()))).collect();
        let mut opened = opened?;
        let ranks = opened.len();
        let first = opened.swap_remove(0).caps.expect("rank 0 is of this process");
        // CPUs compute the same bits.
        if let Some(other) = opened.iter().find(|o| first.backend != CpuBackend::NAME && o.device != first.device) {
            return Err(Error::BadRequest(format!(
                "{} and {} cannot share a model: their kernels round differently",
                first.device, other.device
            )));
        }
        let device = format!("{}, {ranks} rank{}", first.device, if ranks == 1 { "" } else { "s" });
        Ok(Self {
            caps: Caps { device, ranks, ..first },
            links: Rc::new(links),
            memory: Memory::Devices,
            next: Cell::new(0),
            unconfirmed: Cell::new(0),
        })
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
        self.links.tell(ranks, &command)?;
        // The integers of a step are few.
        if bytes.len() > 1 << 20 {
            self.unconfirmed.update(|sent| sent + bytes.len() as u64);
        }
        if self.unconfirmed.get() > WRITES_IN_FLIGHT {
            self.links.ask_all(&Command::Confirm, |answer| matches!(answer, Answer::Done).then_some(()))?;
            self.unconfirmed.set(0);
        }
        Ok(())
    }
}

impl Drop for Links {
    /// Ends the ranks and waits for them, since a driver faults if a device is closed while the process exits; not after a
    /// failure, when a rank may wait for one that is gone.
    fn drop(&mut self) {
        self.ranks.clear();
        if self.member.check().is_ok() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl Links {
    /// Sends a command to some ranks.
    fn tell(&self, ranks: &[Link], command: &Command) -> Result<()> {
        ranks.iter().try_for_each(|rank| self.send(rank, command, None))
    }

    fn send(&self, rank: &Link, command: &Command, to: Option<SyncSender<Answer>>) -> Result<()> {
        rank.commands.send(Told { command: command.clone(), to }).map_err(|_| self.ended())
    }

    fn tell_all(&self, command: &Command) -> Result<()> {
        self.tell(&self.ranks, command)
    }

    /// Asks every rank and waits for the answers, in the order of ranks. `of` takes the kind of answer that the command has.
    fn ask_all<T>(&self, command: &Command, of: impl Fn(Answer) -> Option<T>) -> Result<Vec<T>> {
        let mut answers = Vec::with_capacity(self.ranks.len());
        for rank in &self.ranks {
            let (to, answer) = sync_channel(1);
            self.send(rank, command, Some(to))?;
            answers.push(answer);
        }
        let answers = answers.iter().enumerate().map(|(rank, answer)| self.wait(rank, answer));
        answers.map(|answer| Ok(of(answer?).expect("the answer to this command"))).collect()
    }

    /// The largest number of bytes that a rank answers; 0 after an error, which comes again with the next command.
    fn most_bytes(&self, command: &Command) -> u64 {
        let of = |answer| if let Answer::Bytes(bytes) = answer { Some(bytes) } else { None };
        self.ask_all(command, of).unwrap_or_default().into_iter().max().unwrap_or(0)
    }

    /// Waits for an answer of a rank for as long as it completes other work.
    fn wait(&self, rank: usize, answer: &Receiver<Answer>) -> Result<Answer> {
        let mut patience = self.patience(rank);
        loop {
            match answer.recv_timeout(LOOK.min(self.deadline)) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
                Err(RecvTimeoutError::Timeout) => self.check(rank, &mut patience)?,
            }
        }
    }

    fn patience(&self, rank: usize) -> Patience {
        Patience { since: Instant::now(), done: self.ranks[rank].done.load(Ordering::Relaxed) }
    }

    /// An error if a rank has failed, or if this one has completed nothing for too long.
    fn check(&self, rank: usize, patience: &mut Patience) -> Result<()> {
        self.member.check()?;
        if patience.since.elapsed() < self.deadline {
            return Ok(());
        }
        let before = std::mem::replace(patience, self.patience(rank)).done;
        if patience.done != before {
            return Ok(());
        }
        self.member.fail(format!("rank {rank} completed nothing within {:?}", self.deadline));
        Err(self.ended())
    }

    /// The bytes of a tensor on one rank, after everything that it was told before.
    fn read(self: &Rc<Self>, rank: usize, from: Tensor<u64>) -> Reading {
        let (to, answer) = sync_channel(1);
        // A rank that cannot be told has dropped the answer's other end.
        let _ = self.send(&self.ranks[rank], &Command::Read(from), Some(to));
        Reading { state: Asked::Told(answer), patience: self.patience(rank), rank, links: self.clone() }
    }

    /// Why a rank takes no more commands.
    fn ended(&self) -> Error {
        let unknown = || Error::Device { op: "ranks".into(), why: "a rank ended without a reason".into() };
        self.member.check().err().unwrap_or_else(unknown)
    }
}

impl Reading {
    fn wait(&mut self) -> Result<Vec<u8>> {
        if let Asked::Told(answer) = &self.state {
            self.state = arriving(self.links.wait(self.rank, answer)?);
        }
        self.patience = self.links.patience(self.rank);
        let mut polls = 0u32;
        loop {
            if let Some(bytes) = self.take() {
                return bytes;
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1 << 12) {
                self.links.check(self.rank, &mut self.patience)?;
            }
            std::hint::spin_loop();
        }
    }

    /// The bytes if they have arrived, once.
    fn take(&mut self) -> Option<Result<Vec<u8>>> {
        if let Asked::Told(answer) = &self.state {
            match answer.try_recv() {
                Ok(answer) => self.state = arriving(answer),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => return Some(Err(self.links.ended())),
            }
        }
        let Asked::Arriving(arriving) = &mut self.state else { panic!("a read is taken once") };
        let bytes = arriving.take()?;
        self.state = Asked::Taken;
        // What the others did since is worth nothing if one of them has failed.
        Some(self.links.member.check().and(bytes))
    }
}

fn arriving(answer: Answer) -> Asked {
    match answer {
        Answer::Read(arriving) => Asked::Arriving(arriving),
        _ => panic!("a read is answered by one"),
    }
}

/// An error unless a model can have so many ranks.
fn check_number(ranks: usize) -> Result<()> {
    match ranks {
        1..=MOST_RANKS => Ok(()),
        _ => Err(Error::BadRequest(format!("{ranks} ranks; 1 to {MOST_RANKS} are possible"))),
    }
}

impl Saving for Shares {
    fn take(&mut self) -> Option<Result<Bytes>> {
        while let Some(first) = self.reads.front_mut() {
            let Some(bytes) = first.take() else {
                return first.links.check(first.rank, &mut first.patience).err().map(Err);
            };
            self.reads.pop_front();
            match bytes {
                Ok(bytes) => self.room.push(&bytes),
                Err(e) => return Some(Err(e)),
            }
        }
        Some(Ok(self.room.whole()))
    }

    fn arrive(&mut self) -> LocalFuture<'_, Result<Bytes>> {
        Box::pin(async {
            while let Some(mut first) = self.reads.pop_front() {
                self.room.push(&first.wait()?);
            }
            Ok(self.room.whole())
        })
    }
}

impl Future for Reading {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(self.wait())
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
    type Read = Reading;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Of one rank: what is free in the host's memory, divided by the ranks; or the least of all devices.
    fn free_memory(&self) -> Option<u64> {
        match &self.memory {
            Memory::Host(host, at_start) => {
                let ranks = self.caps.ranks as u64;
                let left = (*at_start)?.saturating_sub(self.links.allocated.get().saturating_mul(ranks));
                Some(host.free_memory()?.min(left) / ranks)
            }
            Memory::Devices => {
                let of = |answer| if let Answer::FreeMemory(free) = answer { Some(free) } else { None };
                let free: Option<Vec<u64>> = self.links.ask_all(&Command::FreeMemory, of).ok()?.into_iter().collect();
                free?.into_iter().min()
            }
        }
    }

    fn look(&self) -> Result<()> {
        self.links.member.check()
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<Buf> {
        if let Memory::Host(..) = self.memory
            && let Some(free) = self.free_memory().filter(|free| bytes > *free)
        {
            return Err(Error::OutOfMemory { what: label.into(), asked: bytes, free });
        }
        let buf = self.handle(bytes);
        let of = |answer| if let Answer::Alloc(done) = answer { Some(done) } else { None };
        let done = self.links.ask_all(&Command::Alloc { id: buf.0.id, label: label.into(), bytes }, of)?;
        done.into_iter().collect::<Result<()>>()?;
        Ok(buf)
    }

    fn coded_bytes(&self, format: Format, dims: &[usize]) -> u64 {
        self.links.most_bytes(&Command::CodedBytes { format, dims: dims.into() })
    }

    fn arrange(&self, block: &RowBlock<Buf>) -> Result<()> {
        self.links.tell_all(&Command::Arrange(block.rebind(&mut |buf| buf.0.id)))
    }

    /// The same values on every rank, also where each has a share: good enough for benches.
    fn fill_random(&self, t: &Tensor<Buf>, seed: u32, half: f32) -> Result<bool> {
        let tensor = t.rebind(&mut |buf: &Buf| buf.0.id);
        let of = |answer| if let Answer::Filled(filled) = answer { Some(filled) } else { None };
        Ok(self.links.ask_all(&Command::Fill { tensor, seed, half }, of)?.into_iter().all(|filled| filled))
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

    fn scratch(&self, op: &Op<Buf>) -> u64 {
        self.links.most_bytes(&Command::Scratch(Box::new(op.rebind(&mut |buf| buf.0.id))))
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        self.links.tell_all(&Command::Reserve(bytes))
    }

    fn expect(&self, step: impl FnOnce(&mut Rec) -> Result<()>) -> Result<()> {
        let mut rec = Rec(Vec::new());
        step(&mut rec)?;
        self.links.tell_all(&Command::Expect(rec.by_number()))
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
        self.read_on(0, src)
    }

    fn read_on(&self, rank: usize, src: &Tensor<Buf>) -> Self::Read {
        self.links.read(rank, src.rebind(&mut |buf| buf.0.id))
    }

    /// The shares of all ranks, one rank after the other.
    fn save(&self, pools: &[Tensor<Buf>], row: usize, room: Box<dyn Room>) -> Result<Box<dyn Saving>> {
        let share = |(rank, pool): (usize, &Tensor<Buf>)| self.read_on(rank, &pool.slice_rows(row, 1));
        let all = (0..self.caps.ranks).flat_map(|rank| pools.iter().map(move |pool| (rank, pool)));
        Ok(Box::new(Shares { reads: all.map(share).collect(), room: Filling::new(room) }))
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
