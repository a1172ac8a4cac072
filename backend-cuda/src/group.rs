//! Devices that are the ranks of a model, in one process or in several.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use cudarc::{cublaslt::sys as blas, driver::sys};
use selkie_core::{
    Error, Result,
    backend::Backend,
    ranks::{Arriving, Member, RankDevice, Ranks},
    tensor::Tensor,
};

use crate::{
    backend::{Cuda, Options, devices},
    blas::Key,
    driver::{Context, Retained, named},
    launch::{Address, address},
    memory::{Buf, Pinned, Read},
    plan::ranks,
};

/// A rank's place in the group, through which ranks tell one another their areas and, rank 0 the others, the algorithms of
/// products: ranks that multiply equal values get equal bits.
#[derive(Clone)]
pub(crate) struct Seat {
    device: usize,
    member: Member,
}

/// Where a rank's area is, as the others are told.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Area {
    /// The same for all ranks of a process.
    process: u64,
    /// Number of the device there.
    device: u64,
    /// Where the device is in the host: numbers differ by process.
    slot: [i32; 4],
    address: u64,
    /// Of the area, for other processes.
    handle: [u8; 64],
}

/// The memory of the others that this rank writes to, and its own.
pub(crate) struct Areas {
    /// Addresses of all areas, and of the watch's word.
    pub table: Buf,
    _watch: Watch,
    /// What keeps the others' within reach. Left before this rank's own goes.
    _peers: Vec<Peer>,
    _own: Buf,
}

/// How often a watch looks.
const WATCH: Duration = Duration::from_millis(50);

/// Tells kernels that wait for another rank when one has failed. The host cannot: its threads may wait for those kernels.
struct Watch {
    /// Not 0 once a rank has failed; kernels read it.
    word: Pinned,
    /// Until it is dropped.
    on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(member: Member) -> Result<Self> {
        let word = Pinned::mapped(4)?;
        // SAFETY: the memory was just allocated, 4 bytes of it, for words.
        let failed: &AtomicU32 = unsafe { AtomicU32::from_ptr(word.at.cast()) };
        failed.store(0, Ordering::Relaxed);
        let (on, off) = channel();
        let look = move || {
            // Once more when it is dropped: kernels may wait until then.
            let mut on = true;
            while on {
                on = off.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout);
                if member.check().is_err() {
                    return failed.store(1, Ordering::Release);
                }
            }
        };
        let thread = thread::Builder::new().name("selkie-watch".into()).spawn(look);
        let thread = thread.map_err(|e| Error::Device { op: "a thread for a rank".into(), why: e.to_string() })?;
        Ok(Self { word, on: Some(on), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The word outlives the thread.
        self.on = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The way to the area of another rank.
enum Peer {
    /// Of this process: its context, which this one reaches.
    Here { _context: Retained },
    /// Of another process: the address at which its memory is mapped here.
    Elsewhere(u64),
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Self::Elsewhere(address) = self {
            // SAFETY: it was mapped once; unmapping waits for what uses it.
            let _ = unsafe { sys::cuIpcCloseMemHandle(*address) };
        }
    }
}

/// A number that the ranks of a process have in common, and no others.
fn process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

impl Seat {
    /// This rank and the number of ranks.
    pub fn rank(&self) -> (usize, usize) {
        (self.member.rank(), self.member.ranks())
    }

    /// The algorithm that rank 0 chooses; on rank 0 by `choose`.
    pub fn algorithm(
        &self,
        key: &Key,
        choose: impl FnOnce() -> Result<blas::cublasLtMatmulAlgo_t>,
    ) -> Result<blas::cublasLtMatmulAlgo_t> {
        let name = format!("the algorithm of the product {key:?}");
        if self.member.rank() > 0 {
            let words = self.member.learn(&name)?;
            let data = bytemuck::try_pod_read_unaligned(&words).map_err(|e| self.error(&name, &e.to_string()))?;
            return Ok(blas::cublasLtMatmulAlgo_t { data });
        }
        let algorithm = choose()?;
        self.member.tell(name, bytemuck::bytes_of(&algorithm.data).to_vec());
        Ok(algorithm)
    }

    fn error(&self, what: &str, why: &str) -> Error {
        Error::Device { op: format!("rank {}", self.member.rank()), why: format!("{what}: {why}") }
    }

    /// Allocates this rank's area, opens the way to those of the others, and learns their addresses.
    pub fn meet(&self, cuda: &Cuda) -> Result<Areas> {
        let (rank, count) = self.rank();
        let own = cuda.alloc("the exchange between ranks", ranks::area_bytes(count))?;
        // Zeroed before another rank writes to it.
        cuda.stream.wait("the exchange between ranks")?;
        let area_of = |rank: usize| format!("the memory of rank {rank}");
        let area = self.area(cuda, &own)?;
        self.member.tell(area_of(rank), bytemuck::bytes_of(&area).to_vec());
        let (mut addresses, mut peers) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for other in 0..count {
            if other == rank {
                addresses.push(own.address());
                continue;
            }
            let bytes = self.member.learn(&area_of(other))?;
            let theirs = bytemuck::try_pod_read_unaligned(&bytes);
            let theirs: Area = theirs.map_err(|e| self.error(&area_of(other), &e.to_string()))?;
            if theirs.slot == area.slot {
                let why = format!("ranks {rank} and {other} have the same CUDA device: --gpus gives each its own");
                return Err(Error::BadRequest(why));
            }
            let reached = cuda.context.reach_area(&theirs).map_err(|e| match e {
                Error::Device { why, .. } => {
                    self.error(&format!("its device does not reach the memory of rank {other}'s"), &why)
                }
                e => e,
            });
            let (address, peer) = reached?;
            addresses.push(address);
            peers.push(peer);
        }
        let watch = Watch::start(self.member.clone())?;
        addresses.push(watch.word.on_device()?);
        let table = cuda.alloc("addresses of the exchange", 8 * addresses.len() as u64)?;
        let bytes: Vec<u8> = addresses.iter().flat_map(|at| at.to_le_bytes()).collect();
        cuda.write_to(&table, 0, &bytes)?;
        Ok(Areas { table, _watch: watch, _own: own, _peers: peers })
    }

    fn area(&self, cuda: &Cuda, own: &Buf) -> Result<Area> {
        use sys::CUdevice_attribute as Of;
        let at = |what| cuda.context.attribute(what);
        let slot = [
            at(Of::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            at(Of::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            at(Of::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
            0,
        ];
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the memory is allocated, `handle` is valid for the call.
        let got = unsafe { sys::cuIpcGetMemHandle(&mut handle, own.address()) };
        // Some systems have no such handles; ranks of one process need none.
        let handle = match got {
            sys::CUresult::CUDA_SUCCESS => handle.reserved.map(|byte| byte as u8),
            _ => [0; 64],
        };
        Ok(Area { process: process(), device: self.device as u64, slot, address: own.address(), handle })
    }
}

impl Context {
    /// The address at which this device reaches the area of another rank.
    fn reach_area(&self, area: &Area) -> Result<(u64, Peer)> {
        if area.process == process() {
            return Ok((area.address, Peer::Here { _context: self.reach(area.device as usize)? }));
        }
        let mut address = 0;
        let handle = sys::CUipcMemHandle { reserved: area.handle.map(|byte| byte as _) };
        let lazily = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: this context is current, `address` is valid for the call; a handle that means nothing is an error.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, lazily) };
        named("cuIpcOpenMemHandle", opened.result())?;
        Ok((address, Peer::Elsewhere(address)))
    }

    /// Lets this device read and write the memory of another one.
    fn reach(&self, device: usize) -> Result<Retained> {
        let other = Retained::open(device)?;
        let mut can = 0;
        // SAFETY: both devices are valid, `can` is valid for the call.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device(), other.device()) };
        named("cuDeviceCanAccessPeer", asked.result())?;
        if can == 0 {
            let why = "there is no direct link between them".to_owned();
            return Err(Error::Device { op: "cuDeviceCanAccessPeer".into(), why });
        }
        // SAFETY: this context is current, the other one is retained.
        match unsafe { sys::cuCtxEnablePeerAccess(other.raw(), 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(other),
            done => named("cuCtxEnablePeerAccess", done.result()).map(|()| other),
        }
    }
}

impl RankDevice for Cuda {
    const NAME: &'static str = "cuda";

    type Setting = Options;

    fn open_rank(setting: Options, device: usize, member: Member) -> Result<Self> {
        check_number(member.ranks())?;
        Self::open_seat(Options { device, ..setting }, Some(Seat { device, member }))
    }

    fn settle(&self) -> Result<()> {
        self.settle_rank()
    }

    fn start_read(&self, src: &Tensor<Buf>) -> Result<Box<dyn Arriving>> {
        assert!(src.is_contiguous(), "a read of a view with gaps");
        Read::start_for_any(self, address(src), src.len() * src.dtype.bytes())
    }
}

fn check_number(ranks: usize) -> Result<()> {
    match ranks {
        0..=ranks::MOST => Ok(()),
        _ => {
            Err(Error::BadRequest(format!("{ranks} CUDA devices for one model; at most {} are possible", ranks::MOST)))
        }
    }
}

/// Ranks on these CUDA devices of one host, which reach one another's memory. `options.device` counts for nothing.
///
/// # Errors
/// [`Error::NoDevice`] if one of them is not there or not usable; [`Error::BadRequest`] for one that comes twice or too many.
pub fn ranks(devices_of_ranks: &[usize], options: Options) -> Result<Ranks> {
    check_number(devices_of_ranks.len())?;
    let found = devices();
    let device_of = |index: usize| found.iter().find(|d| d.index == Some(index));
    for (i, device) in devices_of_ranks.iter().enumerate() {
        if devices_of_ranks[..i].contains(device) {
            return Err(Error::BadRequest(format!("CUDA device {device} is named twice")));
        }
        let there = device_of(*device);
        let usable = match (there, found.first()) {
            (Some(d), _) => d.usable.clone(),
            (None, Some(d)) if d.index.is_none() => d.usable.clone(),
            _ => Err(format!("there is no CUDA device {device}, the last is {}", found.len().saturating_sub(1))),
        };
        usable.map_err(|why| Error::NoDevice { backend: "cuda", why })?;
    }
    Ranks::on::<Cuda>(options, devices_of_ranks)
}
