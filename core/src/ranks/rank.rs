//! A rank: a device on a thread of its own, which does what it is told.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel},
    },
    thread,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Link, Member};
use crate::{
    backend::{Backend, Caps, LOOK, Ops},
    cpu::{CpuBackend, par},
    error::{Error, Result},
    format::{Format, Products},
    ops::{Op, Rebind, RowBlock},
    source::Bytes,
    survive::panic_text,
    tensor::Tensor,
    timer::Timer,
};

/// A device that can be one of several ranks. It is opened, used and dropped on the rank's thread.
pub trait RankDevice: Timer {
    /// Name of the backend.
    const NAME: &'static str;

    /// What the devices of all ranks have in common.
    type Setting: Clone + Send + Serialize + DeserializeOwned + 'static;

    /// Opens the device of a rank: number `device` of those that there are. All ranks open theirs concurrently and may wait
    /// for one another, as long as [`Member::check`] lets them.
    ///
    /// # Errors
    /// Those of the device.
    fn open_rank(setting: Self::Setting, device: usize, member: Member) -> Result<Self>;

    /// Waits for everything that runs, if freeing memory under a step might keep other ranks from going on.
    ///
    /// # Errors
    /// Those of the device.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Starts a read that another thread waits for.
    ///
    /// # Errors
    /// Those of [`Backend::read`].
    fn start_read(&self, src: &Tensor<Self::Buf>) -> Result<Box<dyn Arriving>>;
}

/// Bytes on their way to any thread.
pub trait Arriving: Send {
    /// The bytes if they have arrived, once; an error of the device.
    fn take(&mut self) -> Option<Result<Vec<u8>>>;
}

impl Arriving for Option<Result<Vec<u8>>> {
    fn take(&mut self) -> Option<Result<Vec<u8>>> {
        self.take()
    }
}

/// What a rank is told, in the order of the calls. Buffers and tapes go by numbers.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Command {
    Alloc {
        id: u64,
        label: Arc<str>,
        bytes: u64,
    },
    Fill {
        tensor: Tensor<u64>,
        seed: u32,
        half: f32,
    },
    FreeMemory,
    Scratch(Box<Op<u64>>),
    Reserve(u64),
    CodedBytes {
        format: Format,
        dims: Arc<[usize]>,
    },
    Arrange(RowBlock<u64>),
    /// Answered when everything before it is done, as far as the host does it.
    Confirm,
    Expect(Arc<[Op<u64>]>),
    Write {
        id: u64,
        at: u64,
        /// Sent to another process after the command.
        #[serde(skip)]
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
    Read(Tensor<u64>),
    Flush,
}

/// What a rank answers.
pub(super) enum Answer {
    Done,
    Alloc(Result<()>),
    Filled(bool),
    FreeMemory(Option<u64>),
    Bytes(u64),
    Read(Box<dyn Arriving>),
}

/// A command, and who waits for the answer.
pub(super) struct Told {
    pub command: Command,
    pub to: Option<SyncSender<Answer>>,
}

/// What a rank's device is, once it is open.
pub(super) struct Opened {
    /// Its name for people.
    pub device: String,
    /// Of a device of this process.
    pub caps: Option<Caps>,
}

/// The threads of a rank, and what its device is.
pub(super) struct Started {
    pub threads: Vec<thread::JoinHandle<()>>,
    pub opened: Receiver<Result<Opened>>,
}

impl RankDevice for CpuBackend {
    const NAME: &'static str = "cpu";

    type Setting = Products;

    /// The ranks divide the threads of a process' pool.
    fn open_rank(products: Products, _: usize, member: Member) -> Result<Self> {
        par::own_team((par::threads() / member.ranks()).max(1));
        Ok(Self::of_rank(products, member))
    }

    fn start_read(&self, src: &Tensor<Self::Buf>) -> Result<Box<dyn Arriving>> {
        Ok(Box::new(Some(self.read(src).into_inner())))
    }
}

/// Starts a thread.
pub(super) fn start(name: String, work: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>> {
    let started = thread::Builder::new().name(name.clone()).spawn(work);
    started.map_err(|e| Error::Device { op: format!("start of {name}"), why: e.to_string() })
}

/// Starts a rank in a thread of its own, which says what its device is.
pub(super) fn spawn<D: RankDevice>(member: Member, setting: D::Setting, device: usize) -> Result<(Link, Started)> {
    let (commands, told) = channel();
    let (say, opened) = sync_channel(1);
    let done = Arc::new(AtomicU64::new(0));
    let (name, counter) = (format!("rank {}", member.rank()), done.clone());
    let life = move || {
        let work = || match D::open_rank(setting, device, member.clone()) {
            Ok(device) => {
                let caps = device.caps().clone();
                let _ = say.send(Ok(Opened { device: caps.device.clone(), caps: Some(caps) }));
                let mut rank = Rank::new(device, counter);
                // Said before the device is closed, which may wait for the others.
                if let Err(e) = rank.follow(&told) {
                    member.fail(e.to_string());
                }
            }
            Err(e) => {
                member.fail(e.to_string());
                let _ = say.send(Err(e));
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            member.fail(format!("it panicked: {}", panic_text(&*panic)));
        }
    };
    let thread = start(name, life)?;
    Ok((Link { commands, done }, Started { threads: vec![thread], opened }))
}

/// A rank: its backend, and its buffers and tapes by number.
struct Rank<D: RankDevice> {
    // Tapes and buffers go before the device.
    tapes: HashMap<u64, D::Tape>,
    bufs: HashMap<u64, D::Buf>,
    device: D,
    done: Arc<AtomicU64>,
}

impl<D: RankDevice> Rank<D> {
    fn new(device: D, done: Arc<AtomicU64>) -> Self {
        Self { tapes: HashMap::new(), bufs: HashMap::new(), device, done }
    }

    /// Does what it is told until nobody can tell it any more.
    fn follow(&mut self, told: &Receiver<Told>) -> Result<()> {
        loop {
            match told.recv_timeout(LOOK) {
                Ok(Told { command, to }) => {
                    let answer = self.obey(command)?;
                    // Whoever asked may have given up.
                    to.map(|to| to.send(answer));
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.device.look()?;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            self.count();
        }
    }

    fn count(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    fn obey(&mut self, command: Command) -> Result<Answer> {
        match command {
            Command::Alloc { id, label, bytes } => {
                return Ok(Answer::Alloc(self.device.alloc(&label, bytes).map(|buf| {
                    self.bufs.insert(id, buf);
                })));
            }
            Command::Fill { tensor, seed, half } => {
                return Ok(Answer::Filled(self.device.fill_random(&self.own_tensor(&tensor), seed, half)?));
            }
            Command::FreeMemory => return Ok(Answer::FreeMemory(self.device.free_memory())),
            Command::Scratch(op) => return Ok(Answer::Bytes(self.device.scratch(&self.own(&op)))),
            Command::CodedBytes { format, dims } => return Ok(Answer::Bytes(self.device.coded_bytes(format, &dims))),
            Command::Read(from) => return Ok(Answer::Read(self.device.start_read(&self.own_tensor(&from))?)),
            Command::Confirm => {}
            Command::Reserve(bytes) => self.device.reserve(bytes)?,
            Command::Arrange(block) => self.device.arrange(&block.rebind(&mut |id| self.bufs[id].clone()))?,
            Command::Write { id, at, bytes } => self.device.write(&self.bufs[&id], at, &bytes)?,
            Command::Free(id) => {
                self.device.settle()?;
                self.bufs.remove(&id);
                self.tapes.remove(&id);
            }
            Command::Expect(ops) => self.device.expect(|rec| ops.iter().try_for_each(|op| rec.op(self.own(op))))?,
            Command::Run(ops) => self.device.run(|rec| {
                ops.iter().try_for_each(|op| {
                    rec.op(self.own(op))?;
                    self.count();
                    Ok(())
                })
            })?,
            Command::Record { id, ops } => {
                let tape = self.device.record(|rec| ops.iter().try_for_each(|op| rec.op(self.own(op))))?;
                self.tapes.insert(id, tape);
            }
            Command::Play(id) => self.device.play(&self.tapes[&id])?,
            Command::Flush => self.device.flush()?,
        }
        Ok(Answer::Done)
    }

    /// An op on this rank's buffers.
    fn own(&self, op: &Op<u64>) -> Op<D::Buf> {
        op.rebind(&mut |id| self.bufs[id].clone())
    }

    fn own_tensor(&self, tensor: &Tensor<u64>) -> Tensor<D::Buf> {
        tensor.rebind(&mut |id| self.bufs[id].clone())
    }
}
