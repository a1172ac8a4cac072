//! Lower tiers of the prefix cache: what the tree loses for lack of room goes to host memory and to disk, and comes back when a
//! request wants it.
//!
//! A **value** is the content of one page or of one slot, all layers together, as bytes. It belongs to a prefix
//! ([`PrefixKey`]: model, numerics, realm and all tokens), so it never changes: two values of one name are equal on the CPU, and
//! each of them is right on any backend. Nothing has to be invalidated, and a value may be in several places at a time.
//!
//! | where it is | who owns the bytes | how it leaves |
//! |---|---|---|
//! | device | a slot or page of the tree | evicted: a copy to the host is enqueued before the step that overwrites it |
//! | coming | the copy in flight, owned by the engine | it arrives: host, and on its way to disk |
//! | host | [`Host`], up to its bytes | its least recently used values are dropped; those that a load took live until it ends |
//! | disk | a file of the directory, or a cell of a page's files | quota, time to live, or any process that deletes it |
//! | loading | the disk's thread (of a page: its worker), then the waiting request's load | the request is admitted or ends |
//!
//! With [`ColdDtype::Int8`] states are coded on a thread between coming and host, and decoded for the load of a request (`cold.rs`).
//! Such a value is no longer exact: it is only ever brought into the realm of converted values (docs/cache.md).
//!
//! *Promotion.* Before a step is planned, the requests that it may admit are looked up. If a lower tier leads further than the tree,
//! and loading takes less time than computing ([`Rates`]), slots and pages are taken as for a bundle (`engine/landing.rs`), the
//! values are written, ordered before the step, and the nodes enter the tree. The plan then finds an ordinary hit. Values on
//! disk are read on a thread of their own first, for one request at a time; only requests of its share wait with it.
//!
//! *Fork.* Requests hold slots and pages of the tree and never a value of a lower tier, so they fork as always.
//! *Cancel.* A load whose request has ended is dropped with what it has read.
//! *Eviction while loading.* The request is looked up again when its values have arrived. What the tree lost meanwhile is
//! on the host then. What is nowhere any more is computed: a request loads from disk once.

mod cells;
mod cold;
#[cfg(not(target_arch = "wasm32"))]
mod directory;
mod disk;
mod host;
mod rates;
mod record;
mod shelf;
mod storage;
#[cfg(not(target_arch = "wasm32"))]
mod threads;

use std::{fmt, io, path::PathBuf, sync::Arc, time::Duration};

pub use cold::{Coder, Coding, Converting, Piece};
pub use disk::{Disk, Loading, Values, folder};
pub use host::{Host, Place};
pub use rates::{Pace, Rates};
pub use storage::Anywhere;

use crate::{saved::Room, source::Bytes, state::PrefixKey};

/// The bytes of a value.
pub type Value = Bytes;

/// A value to read, and memory of its size for it.
pub type Wanted = (Name, Box<dyn Room>);

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Keys and values of the last 64 tokens of the prefix.
    Page,
    /// Convolution and recurrent states at its end.
    State,
    /// The same with recurrent states as [`ColdDtype::Int8`]: near, not equal.
    Int8,
}

/// The name of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Its prefix.
    pub key: PrefixKey,
    /// Which of the two.
    pub content: Content,
}

/// A lower tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Memory of this process.
    Host,
    /// Files.
    Disk,
}

/// What recurrent states are in lower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ColdDtype {
    /// What they are on the device.
    #[default]
    Exact,
    /// Codes of 8 bits and a scale per row, see [`Coding`]. What comes back is converted, and every answer that used it says so.
    Int8,
}

/// Which lower tiers an engine has.
#[derive(Clone, Debug, Default)]
pub struct TierOptions {
    /// Bytes of host memory for evicted states and pages; 0: none.
    pub host: u64,
    /// Files for them.
    pub disk: Option<DiskOptions>,
    /// What states are there.
    pub cold: ColdDtype,
    /// Rates that are known, instead of measured ones.
    pub rates: Rates,
}

impl TierOptions {
    /// Whether there is any lower tier.
    pub fn any(&self) -> bool {
        self.host > 0 || self.disk.is_some()
    }
}

/// Values that survive the process.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Where they are.
    pub place: Where,
    /// Most bytes there.
    pub bytes: u64,
    /// Values that were not used for so long are deleted.
    pub ttl: Duration,
    /// Names the model beyond doubt: digests of weights and configuration.
    pub identity: Vec<u8>,
}

/// Where a disk tier is.
#[derive(Clone, Debug)]
pub enum Where {
    /// A directory, which several processes may share; created with mode 0700 if it does not exist.
    Dir(PathBuf),
    /// Two files, which this process has alone: those of a page.
    Flat(Flats),
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(dir) => dir.display().fmt(f),
            Self::Flat(_) => f.write_str("the browser's files"),
        }
    }
}

/// The files of one model, named by [`folder`], and the time.
#[derive(Clone, Debug)]
pub struct Flats {
    /// Its pages.
    pub pages: Arc<dyn Flat>,
    /// Its states.
    pub states: Arc<dyn Flat>,
    /// Milliseconds since 1970.
    pub now: fn() -> u64,
}

/// A file that is read and written at once, at any place.
pub trait Flat: Anywhere + fmt::Debug {
    /// Its bytes.
    ///
    /// # Errors
    /// Those of the file system.
    fn size(&self) -> io::Result<u64>;
    /// Makes it shorter.
    ///
    /// # Errors
    /// Those of the file system.
    fn resize(&self, bytes: u64) -> io::Result<()>;
    /// Fills `into` with the bytes from `at` on.
    ///
    /// # Errors
    /// Those of the file system; an end of the file before that of `into`.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes at `at`, also behind the end: what is between is zero.
    ///
    /// # Errors
    /// Those of the file system. Any part may have been written.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Counters of the lower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Prompt tokens whose deepest state or page came from host memory.
    pub host_tokens: u64,
    /// The same from disk.
    pub disk_tokens: u64,
    /// Requests that went on from a loaded prefix.
    pub loads: u64,
    /// Requests for which computing was estimated to be faster.
    pub declined: u64,
    /// States and pages copied from the device.
    pub demoted: u64,
    /// Requests that went on from values converted for these tiers.
    pub converted: u64,
    /// States and pages in host memory now, and their bytes.
    pub host_values: u64,
    /// Bytes of them.
    pub host_bytes: u64,
    /// Values that left host memory for lack of room.
    pub host_evicted: u64,
    /// Files known now.
    pub disk_values: u64,
    /// Bytes of them.
    pub disk_bytes: u64,
}

impl TierStats {
    /// Adds those of another engine.
    pub fn add(&mut self, other: &Self) {
        self.host_tokens += other.host_tokens;
        self.disk_tokens += other.disk_tokens;
        self.loads += other.loads;
        self.declined += other.declined;
        self.demoted += other.demoted;
        self.converted += other.converted;
        self.host_values += other.host_values;
        self.host_bytes += other.host_bytes;
        self.host_evicted += other.host_evicted;
        self.disk_values += other.disk_values;
        self.disk_bytes += other.disk_bytes;
    }
}
