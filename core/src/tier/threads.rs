//! A thread that writes values and one that reads them.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use futures_channel::oneshot;
use rayon::prelude::*;

use super::{
    Name, Value, Wanted,
    disk::Store,
    shelf::{Shelf, lock},
};

/// The longest time between sweeps.
const SWEEP: Duration = Duration::from_secs(600);

/// Values to read, and who wants them.
type Load = (Vec<Wanted>, oneshot::Sender<Vec<(Name, Value)>>);

/// Both threads. What waits is written before they end.
#[derive(Debug)]
pub(super) struct Threads {
    stores: Option<Sender<Store>>,
    loads: Option<Sender<Load>>,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// Bytes that wait to be written; `fewer` is notified when they become fewer.
#[derive(Debug, Default)]
struct Queue {
    bytes: Mutex<u64>,
    fewer: Condvar,
}

impl Threads {
    /// # Errors
    /// If the system has no more threads.
    pub fn start(shelf: &Arc<Shelf>) -> io::Result<Self> {
        let ((stores, to_store), (loads, to_load)) = (channel(), channel());
        let queue = Arc::new(Queue::default());
        let (writer, reader, written) = (shelf.clone(), shelf.clone(), queue.clone());
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| thread::Builder::new().name(name.into()).spawn(work);
        let threads = vec![
            spawn("selkie-store", Box::new(move || write_all(&writer, &written, &to_store)))?,
            spawn("selkie-load", Box::new(move || read_all(&reader, &to_load)))?,
        ];
        Ok(Self { stores: Some(stores), loads: Some(loads), queue, threads })
    }

    /// Passes a value on, unless more than `most` bytes would wait.
    pub fn store(&self, store: Store, most: u64) {
        let bytes = store.1.len() as u64;
        let mut queued = lock(&self.queue.bytes);
        if *queued > 0 && *queued + bytes > most {
            return;
        }
        if self.stores.as_ref().is_some_and(|stores| stores.send(store).is_ok()) {
            *queued += bytes;
        }
    }

    /// Waits until all values are written.
    pub fn flush(&self) {
        let mut queued = lock(&self.queue.bytes);
        while *queued > 0 {
            queued = self.queue.fewer.wait(queued).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Passes on values to read.
    pub fn load(&self, load: Load) {
        if let Some(loads) = &self.loads {
            let _ = loads.send(load);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        (self.stores, self.loads) = (None, None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn write_all(shelf: &Shelf, queue: &Queue, jobs: &Receiver<Store>) {
    let mut written = 0;
    loop {
        match jobs.recv_timeout(SWEEP.min(shelf.ttl.max(Duration::from_secs(1)))) {
            Ok((name, value, cleared)) => {
                written += shelf.write(name, &value, cleared);
                *lock(&queue.bytes) -= value.len() as u64;
                queue.fewer.notify_all();
            }
            Err(RecvTimeoutError::Timeout) => written = shelf.quota,
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if shelf.tidy(written) {
            written = 0;
        }
    }
}

fn read_all(shelf: &Shelf, jobs: &Receiver<Load>) {
    while let Ok((wanted, reply)) = jobs.recv() {
        let started = Instant::now();
        // From the memory of the system, one thread would copy and check more slowly than a disk reads.
        let read = wanted.into_par_iter().filter_map(|(name, room)| {
            // Whoever wanted them may be gone.
            let value = if reply.is_canceled() { None } else { shelf.read(&name, room) };
            Some((name, value?))
        });
        let values: Vec<(Name, Value)> = read.collect();
        let bytes: usize = values.iter().map(|(_, value)| value.len()).sum();
        lock(&shelf.pace).add(bytes as f64, started.elapsed().as_secs_f64() * 1e3);
        let _ = reply.send(values);
    }
}
