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
//! | disk | a file of the directory | quota, time to live, or any process that deletes it |
//! | loading | the disk's thread, then the waiting request's load | the request is admitted or ends |
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

#[cfg(not(target_arch = "wasm32"))]
mod disk;
#[cfg(target_arch = "wasm32")]
#[path = "no_disk.rs"]
mod disk;
mod host;
mod rates;

use std::{path::PathBuf, time::Duration};

pub use disk::{Disk, Loading};
pub use host::{Host, Place};
pub use rates::{Pace, Rates};

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

/// Which lower tiers an engine has.
#[derive(Clone, Debug, Default)]
pub struct TierOptions {
    /// Bytes of host memory for evicted states and pages; 0: none.
    pub host: u64,
    /// Files for them.
    pub disk: Option<DiskOptions>,
    /// Rates that are known, instead of measured ones.
    pub rates: Rates,
}

impl TierOptions {
    /// Whether there is any lower tier.
    pub fn any(&self) -> bool {
        self.host > 0 || self.disk.is_some()
    }
}

/// A directory of values, which several processes may share.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The directory; created with mode 0700 if it does not exist.
    pub dir: PathBuf,
    /// Most bytes of files in it.
    pub bytes: u64,
    /// Files that were not used for so long are deleted.
    pub ttl: Duration,
    /// Names the model beyond doubt: digests of weights and configuration.
    pub identity: Vec<u8>,
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
