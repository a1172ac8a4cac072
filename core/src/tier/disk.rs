//! Values as files of a directory that several processes may share and that survives them.
//!
//! `DIR/MODEL/KEY.page` and `DIR/MODEL/KEY.state`: one value each, in the format of [`Record`]. A file is written under another
//! name and renamed when it is complete, so that a kill leaves it whole or absent. After a loss of power it may be neither; the
//! checksum finds that, as it finds any damage, before a value is used. So nothing is synced, and no process holds a lock: each
//! accepts that a file is gone.
//!
//! The index is read from the directory when it is opened and at every sweep. A file's time of modification is that of its last
//! use; a sweep deletes what is older than the time to live, then the oldest files beyond the quota. It runs when this
//! process has written a sixteenth of the quota, and now and then. Processes do not see each other's files between sweeps, so
//! each may exceed the quota by that sixteenth.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use futures_channel::oneshot;
use rayon::prelude::*;

use super::{Content, DiskOptions, Name, Pace, Value, Wanted};
use crate::{
    cache_dir,
    digest::{Digest, Hasher},
    error::{Error, Result},
    saved::Room,
    state::PrefixKey,
};

/// A partly written file of this age was left by a process that ended.
const ABANDONED: Duration = Duration::from_secs(600);
/// The longest time between sweeps.
const SWEEP: Duration = Duration::from_secs(600);

/// What a load found: fewer values than asked for if files are gone or damaged. Cancelled if the thread ended.
pub type Loading = oneshot::Receiver<Vec<(Name, Value)>>;

/// Values to read, and who wants them.
type Load = (Vec<Wanted>, oneshot::Sender<Vec<(Name, Value)>>);

/// A value to write, and how often the directory had been cleared before.
type Store = (Name, Value, u64);

/// A directory of values, with a thread that writes and one that reads.
#[derive(Debug)]
pub struct Disk {
    shared: Arc<Shared>,
    stores: Option<Sender<Store>>,
    loads: Option<Sender<Load>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    /// The folder of this model.
    own: PathBuf,
    quota: u64,
    ttl: Duration,
    index: Mutex<Index>,
    /// Bytes that wait to be written; `written` is notified when there are fewer.
    queued: Mutex<u64>,
    most_queued: u64,
    written: Condvar,
    cleared: AtomicU64,
    /// A write failed: no further one is tried.
    full: AtomicBool,
    pace: Mutex<Pace>,
}

/// The files of this model, and the bytes of all files in the directory.
#[derive(Debug, Default)]
struct Index {
    files: HashMap<Name, u64>,
    total: u64,
}

/// A file in the directory.
struct Found {
    path: PathBuf,
    name: Option<Name>,
    bytes: u64,
    used: SystemTime,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Opens the directory and reads its index. `numerics` names what decides the bits of values besides the model. What comes while
    /// more than `most_queued` bytes wait to be written is not written.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if other users can write the directory or it cannot be used, with the reason.
    pub fn open(options: &DiskOptions, numerics: &str, most_queued: u64) -> Result<Self> {
        let DiskOptions { dir, bytes, ttl, identity } = options;
        let mut hasher = Hasher::default();
        hasher.update(identity);
        hasher.update(numerics.as_bytes());
        let own = dir.join(&hasher.finish().to_string()[..16]);
        let refused = |e: io::Error| Error::BadRequest(format!("{}: {e}; it cannot be a disk cache", dir.display()));
        cache_dir::make_private(dir).and_then(|()| cache_dir::make_private(&own)).map_err(refused)?;
        let shared = Arc::new(Shared {
            dir: dir.clone(),
            own,
            quota: *bytes,
            ttl: *ttl,
            index: Mutex::default(),
            queued: Mutex::new(0),
            most_queued,
            written: Condvar::new(),
            cleared: AtomicU64::new(0),
            full: AtomicBool::new(false),
            pace: Mutex::default(),
        });
        shared.sweep().map_err(refused)?;
        let ((stores, to_store), (loads, to_load)) = (channel(), channel());
        let (writer, reader) = (shared.clone(), shared.clone());
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| thread::Builder::new().name(name.into()).spawn(work);
        let threads = vec![
            spawn("selkie-store", Box::new(move || writer.write_all(&to_store))).map_err(refused)?,
            spawn("selkie-load", Box::new(move || reader.read_all(&to_load))).map_err(refused)?,
        ];
        Ok(Self { shared, stores: Some(stores), loads: Some(loads), threads })
    }

    /// Whether there was a file of this value when the index was last brought up to date.
    pub fn has(&self, name: &Name) -> bool {
        lock(&self.shared.index).files.contains_key(name)
    }

    /// Writes a value, later. Nothing happens if there are too many waiting, or after a write that failed.
    pub fn store(&self, name: Name, value: Value) {
        let bytes = value.len() as u64;
        if bytes > self.shared.quota || self.shared.full.load(Ordering::Relaxed) || self.has(&name) {
            return;
        }
        let mut queued = lock(&self.shared.queued);
        if *queued > 0 && *queued + bytes > self.shared.most_queued {
            return;
        }
        let cleared = self.shared.cleared.load(Ordering::Relaxed);
        if self.stores.as_ref().is_some_and(|stores| stores.send((name, value, cleared)).is_ok()) {
            *queued += bytes;
        }
    }

    /// Waits until all values are written.
    pub fn flush(&self) {
        let mut queued = lock(&self.shared.queued);
        while *queued > 0 {
            queued = self.shared.written.wait(queued).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads values.
    pub fn load(&self, wanted: Vec<Wanted>) -> Loading {
        let (reply, loading) = oneshot::channel();
        if let Some(loads) = &self.loads {
            let _ = loads.send((wanted, reply));
        }
        loading
    }

    /// Deletes all values of this model; those that wait are not written.
    pub fn clear(&self) {
        self.shared.cleared.fetch_add(1, Ordering::Relaxed);
        let names: Vec<Name> = lock(&self.shared.index).files.keys().copied().collect();
        for name in names {
            self.shared.forget(&name, true);
        }
    }

    /// Bytes per millisecond of the loads so far.
    pub fn rate(&self) -> Option<f64> {
        lock(&self.shared.pace).rate()
    }

    /// Values of this model and bytes of all files in the directory, as far as known.
    pub fn size(&self) -> (usize, u64) {
        let index = lock(&self.shared.index);
        (index.files.len(), index.total)
    }
}

/// What waits is written before the process ends.
impl Drop for Disk {
    fn drop(&mut self) {
        (self.stores, self.loads) = (None, None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn write_all(&self, jobs: &Receiver<Store>) {
        let (mut written, mut number) = (0, 0u64);
        loop {
            match jobs.recv_timeout(SWEEP.min(self.ttl.max(Duration::from_secs(1)))) {
                Ok((name, value, cleared)) => {
                    number += 1;
                    if cleared == self.cleared.load(Ordering::Relaxed) {
                        written += self.write(name, &value, number);
                    }
                    *lock(&self.queued) -= value.len() as u64;
                    self.written.notify_all();
                }
                Err(RecvTimeoutError::Timeout) => written = self.quota,
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if (written > self.quota / 16 || lock(&self.index).total > self.quota) && self.sweep().is_ok() {
                written = 0;
            }
        }
    }

    /// Writes one file; returns its bytes.
    fn write(&self, name: Name, value: &[u8], number: u64) -> u64 {
        if self.full.load(Ordering::Relaxed) || lock(&self.index).files.contains_key(&name) {
            return 0;
        }
        let path = self.path(&name);
        let aside = path.with_extension(format!("{}-{number}.new", std::process::id()));
        let written = Record { name, value }.write(&aside).and_then(|bytes| fs::rename(&aside, &path).map(|()| bytes));
        match written {
            Ok(bytes) => {
                let mut index = lock(&self.index);
                if index.files.insert(name, bytes).is_none() {
                    index.total += bytes;
                }
                bytes
            }
            Err(e) => {
                let _ = fs::remove_file(&aside);
                tracing::warn!("{}: {e}; nothing more is written to the disk cache", path.display());
                self.full.store(true, Ordering::Relaxed);
                0
            }
        }
    }

    fn read_all(&self, jobs: &Receiver<Load>) {
        while let Ok((wanted, reply)) = jobs.recv() {
            let started = Instant::now();
            // From the memory of the system, one thread would copy and check more slowly than a disk reads.
            let read = wanted.into_par_iter().filter_map(|(name, room)| {
                // Whoever wanted them may be gone.
                let value = if reply.is_canceled() { None } else { self.read(&name, room) };
                Some((name, value?))
            });
            let values: Vec<(Name, Value)> = read.collect();
            let bytes: usize = values.iter().map(|(_, value)| value.len()).sum();
            lock(&self.pace).add(bytes as f64, started.elapsed().as_secs_f64() * 1e3);
            let _ = reply.send(values);
        }
    }

    /// The value of a file, if it is there, not too old and undamaged.
    fn read(&self, name: &Name, mut room: Box<dyn Room>) -> Option<Value> {
        let path = self.path(name);
        let read = File::open(&path).and_then(|mut file| {
            let used = file.metadata()?.modified()?;
            if self.is_expired(used) {
                return Ok(false);
            }
            Record::read(&mut file, name, room.bytes())?;
            // Used now. If that cannot be said, it is deleted earlier.
            let _ = file.set_modified(SystemTime::now());
            Ok(true)
        });
        match read {
            Ok(true) => return Some(room.freeze()),
            Ok(false) => self.forget(name, true),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!("{}: {e}; it is deleted", path.display());
                self.forget(name, true);
            }
            Err(_) => self.forget(name, false),
        }
        None
    }

    fn is_expired(&self, used: SystemTime) -> bool {
        // A time in the future is that of another clock.
        used.elapsed().is_ok_and(|age| age > self.ttl)
    }

    fn forget(&self, name: &Name, delete: bool) {
        if delete {
            let _ = fs::remove_file(self.path(name));
        }
        let mut index = lock(&self.index);
        if let Some(bytes) = index.files.remove(name) {
            index.total = index.total.saturating_sub(bytes);
        }
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.own.join(format!("{}.{}", name.key.0, extension(name.content)))
    }

    /// Deletes what is too old or too much, and brings the index up to date.
    fn sweep(&self) -> io::Result<()> {
        let mut found = self.scan()?;
        found.sort_by_key(|file| file.used);
        let mut total: u64 = found.iter().map(|file| file.bytes).sum();
        // Some room, so that the next value needs no sweep.
        let target = if total > self.quota { self.quota / 10 * 9 } else { total };
        let mut files = HashMap::new();
        for file in found {
            if (total > target || self.is_expired(file.used)) && fs::remove_file(&file.path).is_ok() {
                total -= file.bytes;
            } else if let Some(name) = file.name {
                files.insert(name, file.bytes);
            }
        }
        *lock(&self.index) = Index { files, total };
        Ok(())
    }

    /// All values in the directory, of other models too. Deletes what processes left that ended while they wrote.
    fn scan(&self) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        for folder in fs::read_dir(&self.dir)? {
            let folder = folder?;
            if !folder.file_type()?.is_dir() {
                continue;
            }
            let own = folder.path() == self.own;
            // Another process may delete it, or files in it.
            let Ok(entries) = fs::read_dir(folder.path()) else { continue };
            for entry in entries.flatten() {
                let path = entry.path();
                let Some(meta) = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file) else { continue };
                let Ok(used) = meta.modified() else { continue };
                if path.extension().is_some_and(|e| e == "new") {
                    if used.elapsed().is_ok_and(|age| age > ABANDONED) {
                        let _ = fs::remove_file(&path);
                    }
                } else if let Some(name) = parse(&path) {
                    found.push(Found { path, name: own.then_some(name), bytes: meta.len(), used });
                }
            }
        }
        Ok(found)
    }
}

fn extension(content: Content) -> &'static str {
    match content {
        Content::Page => "page",
        Content::State => "state",
    }
}

/// The value whose file this is; `None` for other files, which are left alone.
fn parse(path: &Path) -> Option<Name> {
    let key = PrefixKey(Digest::parse(path.file_stem()?.to_str()?)?);
    let content =
        [Content::Page, Content::State].into_iter().find(|c| path.extension().is_some_and(|e| e == extension(*c)));
    Some(Name { key, content: content? })
}

/// Bytes before the value.
const HEAD: usize = 64;

/// A file: [`MAGIC`](Self::MAGIC), key, content (u32), zero (u32), length of the value (u64), the value, BLAKE3 of all that. Numbers are little endian.
struct Record<'a> {
    name: Name,
    value: &'a [u8],
}

impl Record<'_> {
    const MAGIC: [u8; 16] = *b"selkie value 1\r\n";

    fn head(name: &Name, bytes: u64) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..16].copy_from_slice(&Self::MAGIC);
        head[16..48].copy_from_slice(&name.key.0.0);
        head[48] = match name.content {
            Content::Page => 1,
            Content::State => 2,
        };
        head[56..].copy_from_slice(&bytes.to_le_bytes());
        head
    }

    /// Creates the file, for this user alone; returns its bytes.
    fn write(&self, path: &Path) -> io::Result<u64> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path)?;
        let head = Self::head(&self.name, self.value.len() as u64);
        let mut hasher = Hasher::default();
        hasher.update(&head);
        hasher.update(self.value);
        for piece in [&head[..], self.value, &hasher.finish().0] {
            file.write_all(piece)?;
        }
        Ok((HEAD + self.value.len() + 32) as u64)
    }

    /// Fills `value` from the file. [`io::ErrorKind::InvalidData`] if it is not exactly the record of that name with a value of
    /// that size.
    fn read(file: &mut File, name: &Name, value: &mut [u8]) -> io::Result<()> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let size = value.len() as u64;
        if file.metadata()?.len() != HEAD as u64 + size + 32 {
            return Err(bad("it has another length than values of this model"));
        }
        let (mut head, mut digest) = ([0; HEAD], [0; 32]);
        for piece in [&mut head[..], &mut *value, &mut digest] {
            file.read_exact(piece).map_err(|_| bad("it is cut"))?;
        }
        let mut hasher = Hasher::default();
        hasher.update(&head);
        hasher.update(value);
        match (hasher.finish().0 == digest, head == Self::head(name, size)) {
            (false, _) => Err(bad("its checksum is wrong")),
            (_, false) => Err(bad("it is the value of another prefix")),
            _ => Ok(()),
        }
    }
}
