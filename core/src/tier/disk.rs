//! The disk tier as an engine sees it: values are written and read later, so that no step waits for them.
//!
//! With a directory, one thread writes and one reads. A page has no threads: its worker writes between steps, a few MiB at a time,
//! and reads at once, which its files allow.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex},
};

use futures_channel::oneshot;

use super::{
    Content, DiskOptions, Name, Value, Wanted, Where,
    cells::Cells,
    shelf::{Shelf, lock},
};
#[cfg(not(target_arch = "wasm32"))]
use super::{directory::Directory, threads::Threads};
use crate::{
    digest::Hasher,
    error::{Error, Result},
};

/// Bytes that are written between two steps where there are no threads.
const BETWEEN_STEPS: u64 = 4 << 20;

/// What a load found: fewer values than asked for if files are gone or damaged. Cancelled if the thread ended.
pub type Loading = oneshot::Receiver<Vec<(Name, Value)>>;

/// A value to write, and how often the shelf had been cleared before.
pub(super) type Store = (Name, Value, u64);

/// What a disk tier has to know of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    /// What decides the bits of values besides the model.
    pub numerics: &'a str,
    /// Bytes of a page and of a state.
    pub bytes: [u64; 2],
    /// What a state is.
    pub state: Content,
    /// What comes while more bytes than this wait to be written is not written.
    pub most_queued: u64,
    /// Milliseconds since some moment.
    pub clock: fn() -> f64,
}

/// Stored values of a model.
#[derive(Debug)]
pub struct Disk {
    shelf: Arc<Shelf>,
    most_queued: u64,
    work: Work,
}

/// Who reads and writes.
#[derive(Debug)]
enum Work {
    #[cfg(not(target_arch = "wasm32"))]
    Threads(Threads),
    Here(Mutex<Here>),
}

/// Values that wait, and the bytes written since the last sweep.
#[derive(Debug)]
struct Here {
    waiting: VecDeque<Store>,
    written: u64,
    clock: fn() -> f64,
}

/// The folder of a model among those of others.
pub fn folder(identity: &[u8], numerics: &str) -> String {
    let mut hasher = Hasher::default();
    hasher.update(identity);
    hasher.update(numerics.as_bytes());
    let mut name = hasher.finish().to_string();
    name.truncate(16);
    name
}

impl Disk {
    /// Opens a storage and reads its index.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if other users can write the directory or it cannot be used, with the reason.
    pub fn open(options: &DiskOptions, values: &Values<'_>) -> Result<Self> {
        let refused = |e: io::Error| Error::BadRequest(format!("{}: {e}; it cannot be a disk cache", options.place));
        Self::try_open(options, values).map_err(refused)
    }

    fn try_open(options: &DiskOptions, values: &Values<'_>) -> io::Result<Self> {
        let DiskOptions { place, bytes, ttl, identity } = options;
        let most_queued = values.most_queued;
        match place {
            #[cfg(not(target_arch = "wasm32"))]
            Where::Dir(dir) => {
                let directory = Directory::open(dir, &folder(identity, values.numerics))?;
                let shelf = Arc::new(Shelf::open(Arc::new(directory), *bytes, *ttl)?);
                let work = Work::Threads(Threads::start(&shelf)?);
                Ok(Self { shelf, most_queued, work })
            }
            #[cfg(target_arch = "wasm32")]
            Where::Dir(_) => {
                let _ = identity;
                Err(io::Error::new(io::ErrorKind::Unsupported, "a browser has no directories"))
            }
            Where::Flat(flats) => {
                let shelf =
                    Arc::new(Shelf::open(Arc::new(Cells::open(flats, values.bytes, values.state)?), *bytes, *ttl)?);
                let here = Here { waiting: VecDeque::new(), written: 0, clock: values.clock };
                Ok(Self { shelf, most_queued, work: Work::Here(Mutex::new(here)) })
            }
        }
    }

    /// Whether there was this value when the index was last brought up to date.
    pub fn has(&self, name: &Name) -> bool {
        self.shelf.has(name)
    }

    /// Whether values of that size can be written: not if they exceed the quota, and not after a write that failed.
    pub fn takes(&self, bytes: u64) -> bool {
        self.shelf.takes(bytes)
    }

    /// Writes a value, later. Nothing happens if there are too many waiting, or after a write that failed.
    pub fn store(&self, name: Name, value: Value) {
        let bytes = value.len() as u64;
        if !self.takes(bytes) || self.has(&name) {
            return;
        }
        let store = (name, value, self.shelf.cleared());
        match &self.work {
            #[cfg(not(target_arch = "wasm32"))]
            Work::Threads(threads) => threads.store(store, self.most_queued),
            Work::Here(here) => {
                let waiting = &mut lock(here).waiting;
                let queued: u64 = waiting.iter().map(|(_, value, _)| value.len() as u64).sum();
                if queued == 0 || queued + bytes <= self.most_queued {
                    waiting.push_back(store);
                }
            }
        }
    }

    /// Writes some of what waits, where no thread does that.
    pub fn work(&self) {
        self.write_here(BETWEEN_STEPS);
    }

    /// Waits until all values are written.
    pub fn flush(&self) {
        #[cfg(not(target_arch = "wasm32"))]
        if let Work::Threads(threads) = &self.work {
            threads.flush();
        }
        self.write_here(u64::MAX);
    }

    fn write_here(&self, most: u64) {
        #[cfg_attr(target_arch = "wasm32", expect(irrefutable_let_patterns, reason = "there are no threads"))]
        let Work::Here(here) = &self.work else { return };
        let (mut here, mut bytes) = (lock(here), 0);
        while bytes < most {
            let Some((name, value, cleared)) = here.waiting.pop_front() else { break };
            bytes += value.len() as u64;
            here.written += self.shelf.write(name, &value, cleared);
            if self.shelf.tidy(here.written) {
                here.written = 0;
            }
        }
    }

    /// Reads values.
    pub fn load(&self, wanted: Vec<Wanted>) -> Loading {
        let (reply, loading) = oneshot::channel();
        match &self.work {
            #[cfg(not(target_arch = "wasm32"))]
            Work::Threads(threads) => threads.load((wanted, reply)),
            Work::Here(here) => {
                let clock = lock(here).clock;
                let started = clock();
                let read = |(name, room)| Some((name, self.shelf.read(&name, room)?));
                let values: Vec<(Name, Value)> = wanted.into_iter().filter_map(read).collect();
                let bytes: usize = values.iter().map(|(_, value)| value.len()).sum();
                lock(&self.shelf.pace).add(bytes as f64, clock() - started);
                let _ = reply.send(values);
            }
        }
        loading
    }

    /// Deletes all values of this model; those that wait are not written.
    pub fn clear(&self) {
        self.shelf.clear();
    }

    /// Bytes per millisecond of the loads so far.
    pub fn rate(&self) -> Option<f64> {
        lock(&self.shelf.pace).rate()
    }

    /// Values of this model and bytes of all values, as far as known.
    pub fn size(&self) -> (usize, u64) {
        self.shelf.size()
    }
}
