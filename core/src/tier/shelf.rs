//! The index of what a [`Storage`] has of a model, and the rules for all of it: checksums, quota and time to live.
//!
//! The index is read when the shelf is opened and at every sweep. A sweep deletes what is older than the time to live, then
//! the oldest values beyond the quota. Several processes may share a storage and do not see each other's values between sweeps.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    Name, Pace, Value,
    record::{self, HEAD, TAIL},
    storage::{Storage, Stored},
};
use crate::saved::Room;

/// What a storage has of a model.
#[derive(Debug)]
pub(super) struct Shelf {
    storage: Arc<dyn Storage>,
    pub quota: u64,
    pub ttl: Duration,
    index: Mutex<Index>,
    /// How often it was cleared.
    cleared: AtomicU64,
    /// A write failed: no further one is tried.
    full: AtomicBool,
    pub pace: Mutex<Pace>,
}

/// The values of this model, and the bytes of all values.
#[derive(Debug, Default)]
struct Index {
    files: HashMap<Name, u64>,
    total: u64,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shelf {
    /// Sweeps the storage.
    ///
    /// # Errors
    /// If it cannot be listed.
    pub fn open(storage: Arc<dyn Storage>, quota: u64, ttl: Duration) -> io::Result<Self> {
        let shelf = Self {
            storage,
            quota,
            ttl,
            index: Mutex::default(),
            cleared: AtomicU64::new(0),
            full: AtomicBool::new(false),
            pace: Mutex::default(),
        };
        shelf.sweep()?;
        Ok(shelf)
    }

    /// Whether there was this value when the index was last brought up to date.
    pub fn has(&self, name: &Name) -> bool {
        lock(&self.index).files.contains_key(name)
    }

    /// Whether values of that size can be written at all.
    pub fn takes(&self, bytes: u64) -> bool {
        bytes <= self.quota && !self.full.load(Ordering::Relaxed)
    }

    /// How often it was cleared.
    pub fn cleared(&self) -> u64 {
        self.cleared.load(Ordering::Relaxed)
    }

    /// Values of this model and bytes of all values, as far as known.
    pub fn size(&self) -> (usize, u64) {
        let index = lock(&self.index);
        (index.files.len(), index.total)
    }

    /// Writes a value unless it is there, or the shelf was cleared more than `cleared` times; returns the bytes that it takes.
    pub fn write(&self, name: Name, value: &[u8], cleared: u64) -> u64 {
        if self.full.load(Ordering::Relaxed) || self.has(&name) || cleared != self.cleared() {
            return 0;
        }
        let head = record::head(&name, value.len() as u64);
        if let Err(e) = self.storage.write(&name, [&head, value, &record::tail(&head, value)]) {
            tracing::warn!("{}: {e}; nothing more is written to the disk cache", self.storage.label(&name));
            self.full.store(true, Ordering::Relaxed);
            return 0;
        }
        let bytes = (HEAD + value.len() + TAIL) as u64;
        let mut index = lock(&self.index);
        if index.files.insert(name, bytes).is_none() {
            index.total += bytes;
        }
        bytes
    }

    /// Sweeps if that is due, after `written` bytes since the last sweep. True if it did.
    pub fn tidy(&self, written: u64) -> bool {
        (written > self.quota / 16 || lock(&self.index).total > self.quota) && self.sweep().is_ok()
    }

    /// A value, if it is there, not too old and undamaged.
    pub fn read(&self, name: &Name, mut room: Box<dyn Room>) -> Option<Value> {
        let (mut head, mut tail) = ([0; HEAD], [0; TAIL]);
        let read = self.storage.read(name, [&mut head, room.bytes(), &mut tail], self.ttl).and_then(|young| {
            if young {
                record::check(name, &head, room.bytes(), &tail)?;
            }
            Ok(young)
        });
        match read {
            Ok(true) => return Some(room.freeze()),
            Ok(false) => self.forget(name, true),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!("{}: {e}; it is deleted", self.storage.label(name));
                self.forget(name, true);
            }
            Err(_) => self.forget(name, false),
        }
        None
    }

    fn forget(&self, name: &Name, delete: bool) {
        if delete {
            let _ = self.storage.remove(&Stored { folder: None, name: *name });
        }
        let mut index = lock(&self.index);
        if let Some(bytes) = index.files.remove(name) {
            index.total = index.total.saturating_sub(bytes);
        }
    }

    /// Deletes all values of this model; those that wait are not written.
    pub fn clear(&self) {
        self.cleared.fetch_add(1, Ordering::Relaxed);
        let names: Vec<Name> = lock(&self.index).files.keys().copied().collect();
        for name in names {
            self.forget(&name, true);
        }
    }

    /// Deletes what is too old or too much, and brings the index up to date.
    fn sweep(&self) -> io::Result<()> {
        let mut found = self.storage.list()?;
        found.sort_by_key(|file| std::cmp::Reverse(file.age));
        let mut total: u64 = found.iter().map(|file| file.bytes).sum();
        // Some room, so that the next value needs no sweep.
        let target = if total > self.quota { self.quota / 10 * 9 } else { total };
        let mut files = HashMap::new();
        for found in found {
            if (total > target || found.age > self.ttl) && self.storage.remove(&found.file).is_ok() {
                total -= found.bytes;
            } else if found.file.folder.is_none() {
                files.insert(found.file.name, found.bytes);
            }
        }
        *lock(&self.index) = Index { files, total };
        Ok(())
    }
}
