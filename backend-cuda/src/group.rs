//! Devices of one process that are the ranks of a model.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use cudarc::{cublaslt::sys as blas, driver::sys};
use selkie_core::{
    Error, Result,
    backend::Backend,
    ops::Feature,
    ranks::{Arriving, DEADLINE, Member, RankDevice, Ranks},
    tensor::Tensor,
};

use crate::{
    backend::{Cuda, Options, devices},
    blas::Key,
    driver::{Context, Retained, named},
    launch::{Address, address},
    memory::{Buf, Read},
    plan::ranks,
};

/// What the ranks of a process tell one another while they open and load.
#[derive(Default)]
pub(crate) struct Group {
    told: Mutex<Told>,
    changed: Condvar,
}

#[derive(Default)]
struct Told {
    /// Address of each rank's area.
    areas: HashMap<usize, u64>,
    /// Algorithms of products as rank 0 has chosen them. Ranks that multiply equal values get equal bits.
    algorithms: HashMap<Key, blas::cublasLtMatmulAlgo_t>,
}

/// A rank's place in the group.
#[derive(Clone)]
pub(crate) struct Seat {
    /// The CUDA devices of all ranks, in order.
    devices: Arc<[usize]>,
    group: Arc<Group>,
    member: Member,
}

/// The memory of the others that this rank writes to, and its own.
pub(crate) struct Areas {
    /// Addresses of all areas.
    pub table: Buf,
    _own: Buf,
    /// The contexts of the others, which this one reaches.
    _peers: Vec<Retained>,
}

impl Seat {
    /// This rank and the number of ranks.
    pub fn rank(&self) -> (usize, usize) {
        (self.member.rank(), self.devices.len())
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.group.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the others have told it.
    fn wait_for<T>(&self, what: &str, mut known: impl FnMut(&Told) -> Option<T>) -> Result<T> {
        let began = Instant::now();
        let mut told = self.told();
        loop {
            if let Some(it) = known(&told) {
                return Ok(it);
            }
            self.member.check()?;
            if began.elapsed() > DEADLINE {
                let why = format!("{what} of another rank did not come within {DEADLINE:?}");
                return Err(Error::Device { op: format!("rank {}", self.member.rank()), why });
            }
            let woken = self.group.changed.wait_timeout(told, Duration::from_millis(20));
            told = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn tell(&self, f: impl FnOnce(&mut Told)) {
        f(&mut self.told());
        self.group.changed.notify_all();
    }

    /// The algorithm that rank 0 chooses; on rank 0 by `choose`.
    pub fn algorithm(
        &self,
        key: &Key,
        choose: impl FnOnce() -> Result<blas::cublasLtMatmulAlgo_t>,
    ) -> Result<blas::cublasLtMatmulAlgo_t> {
        if self.member.rank() > 0 {
            return self.wait_for("the algorithm of a product", |told| told.algorithms.get(key).copied());
        }
        let algorithm = choose()?;
        self.tell(|told| {
            told.algorithms.insert(key.clone(), algorithm);
        });
        Ok(algorithm)
    }

    /// Allocates this rank's area, opens the way to those of the others, and learns their addresses.
    pub fn meet(&self, cuda: &Cuda) -> Result<Areas> {
        let (rank, count) = self.rank();
        let mut peers = Vec::with_capacity(count);
        for (other, &device) in self.devices.iter().enumerate().filter(|(other, _)| *other != rank) {
            let peer = cuda.context.reach(device).map_err(|e| match e {
                Error::Device { why, .. } => Error::Device {
                    op: format!("rank {rank}"),
                    why: format!("its device does not reach the memory of rank {other}'s: {why}"),
                },
                e => e,
            })?;
            peers.push(peer);
        }
        let own = cuda.alloc("the exchange between ranks", ranks::area_bytes(count))?;
        // Zeroed before another rank writes to it.
        cuda.stream.wait("the exchange between ranks")?;
        self.tell(|told| {
            told.areas.insert(rank, own.address());
        });
        let all = self.wait_for("the memory", |told| {
            (0..count).map(|rank| told.areas.get(&rank).copied()).collect::<Option<Vec<u64>>>()
        })?;
        let table = cuda.alloc("addresses of the exchange", 8 * count as u64)?;
        let bytes: Vec<u8> = all.iter().flat_map(|at| at.to_le_bytes()).collect();
        cuda.write_to(&table, 0, &bytes)?;
        Ok(Areas { table, _own: own, _peers: peers })
    }
}

impl Context {
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
    type Place = Place;

    fn open_rank(place: Place, member: Member) -> Result<Self> {
        let Place { devices, options, group } = place;
        let options = Options { device: devices[member.rank()], ..options };
        Self::open_seat(options, Some(Seat { devices, group, member }))
    }

    fn ranks_have(feature: Feature) -> bool {
        feature == Feature::Ranks
    }

    fn settle(&self) -> Result<()> {
        self.settle_rank()
    }

    fn look(&self) -> Result<()> {
        self.stream.look("the steps before").map_err(|e| self.faults().name(e))
    }

    fn start_read(&self, src: &Tensor<Buf>) -> Result<Box<dyn Arriving>> {
        assert!(src.is_contiguous(), "a read of a view with gaps");
        Read::start_for_any(self, address(src), src.len() * src.dtype.bytes())
    }
}

/// What opens the device of a rank.
pub struct Place {
    devices: Arc<[usize]>,
    options: Options,
    group: Arc<Group>,
}

/// Ranks on these CUDA devices of one host, which reach one another's memory. `options.device` counts for nothing.
///
/// # Errors
/// [`Error::NoDevice`] if one of them is not there or not usable; [`Error::BadRequest`] for one that comes twice or too many.
pub fn ranks(devices_of_ranks: &[usize], options: Options) -> Result<Ranks> {
    if devices_of_ranks.len() > ranks::MOST {
        let why =
            format!("{} CUDA devices for one model; at most {} are possible", devices_of_ranks.len(), ranks::MOST);
        return Err(Error::BadRequest(why));
    }
    let found = devices();
    let device_of = |index: usize| found.iter().find(|d| d.index == Some(index));
    let first = devices_of_ranks.first().and_then(|first| device_of(*first));
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
        if let (Some(device), Some(first)) = (there, first)
            && device.name != first.name
        {
            let why = "CUDA devices of different kinds cannot share a model: their kernels round differently".into();
            return Err(Error::BadRequest(why));
        }
    }
    let (devices, group) = (Arc::<[usize]>::from(devices_of_ranks), Arc::<Group>::default());
    let place = |_| Place { devices: devices.clone(), options, group: group.clone() };
    Ranks::on::<Cuda>(devices_of_ranks.iter().map(place).collect())
}
