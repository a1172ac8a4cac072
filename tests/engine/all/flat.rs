//! The disk tier of a page: two files of cells, here in memory. They may lose everything from any byte on, be full, old or
//! damaged. That answers do not change is in `promise.rs` too.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use pollster::block_on;
use selkie_core::{
    saved::Heap,
    saved::HostMemory,
    tier::{Disk, DiskOptions, Flat, Flats, Rates, TierOptions, Where},
};

use crate::{
    models::{golden_models, micro_models},
    promise::Alone,
    random::Random,
    tiers::{SIZE, lifted, name, request, small, value, values, whole},
};

/// Both files of a model, which outlive those who have them open.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pages: Arc<Mutex<Vec<u8>>>,
    states: Arc<Mutex<Vec<u8>>>,
    room: Option<usize>,
}

/// A file while somebody has it open.
#[derive(Debug)]
struct Open {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Bytes that may still be written to both files; the write that exceeds them writes only some, later ones nothing.
    left: Option<Arc<AtomicUsize>>,
}

impl Memory {
    /// Empty files of which only the first `room` written bytes remain, as if the process ended then or the storage were full.
    pub fn with_room(room: usize) -> Self {
        Self { room: Some(room), ..Self::default() }
    }

    pub fn flats(&self, now: fn() -> u64) -> Flats {
        let left = self.room.map(|room| Arc::new(AtomicUsize::new(room)));
        let open = |bytes: &Arc<Mutex<Vec<u8>>>| Arc::new(Open { bytes: bytes.clone(), left: left.clone() });
        Flats { pages: open(&self.pages), states: open(&self.states), now }
    }

    fn options(&self, bytes: u64, now: fn() -> u64) -> DiskOptions {
        let (place, ttl) = (Where::Flat(self.flats(now)), Duration::from_secs(3600));
        DiskOptions { place, bytes, ttl, identity: b"a model".to_vec() }
    }

    fn tiers(&self) -> TierOptions {
        TierOptions { disk: Some(self.options(1 << 30, || 0)), rates: Rates::ALWAYS, ..TierOptions::default() }
    }

    fn disk(&self, bytes: u64, now: fn() -> u64) -> Disk {
        Disk::open(&self.options(bytes, now), &values("cpu")).unwrap()
    }

    /// The same files when the process has ended and another one begins.
    fn again(&self) -> Self {
        Self { room: None, ..self.clone() }
    }

    fn bytes(&self) -> usize {
        self.pages.lock().unwrap().len() + self.states.lock().unwrap().len()
    }
}

impl Flat for Open {
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        if self.left.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) == 0) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.lock().unwrap().truncate(bytes as usize);
        Ok(())
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let (bytes, at) = (self.bytes.lock().unwrap(), at as usize);
        into.copy_from_slice(bytes.get(at..at + into.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut count = from.len();
        if let Some(left) = &self.left {
            count = count.min(left.load(Ordering::Relaxed));
            left.fetch_sub(count, Ordering::Relaxed);
        }
        let (mut bytes, at) = (self.bytes.lock().unwrap(), at as usize);
        if count > 0 {
            let end = bytes.len().max(at + count);
            bytes.resize(end, 0);
            bytes[at..at + count].copy_from_slice(&from[..count]);
        }
        if count < from.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

#[test]
fn what_was_evicted_or_kept_comes_back_after_a_reload_in_every_family() {
    for model in golden_models() {
        let memory = Memory::default();
        let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(&model, 256));
        let mut first = small(&model, memory.tiers());
        let mut ask = |engine: &mut _, seed| lifted(engine, &mut alone, request(seed, vocab));
        let back = [1, 2, 1, 2].map(|seed| ask(&mut first, seed));
        assert_eq!(back, [[0, 0], [0, 0], [0, 192], [0, 192]], "{}", model.name);
        assert_eq!(ask(&mut first, 3), [0, 0], "{}", model.name);
        // What is still on the device is written while nothing runs, a prefix at a time, and the page learns of no end.
        let mut turns = 0;
        while block_on(first.keep()).unwrap() {
            turns += 1;
            assert!(turns < 100, "{}: there is no end to it", model.name);
        }
        assert!(turns > 0 && !block_on(first.keep()).unwrap(), "{}", model.name);
        std::mem::forget(first);
        let mut second = small(&model, memory.tiers());
        assert_eq!([3, 1, 2].map(|seed| ask(&mut second, seed)), [[0, 192]; 3], "{}", model.name);
        second.clear_cache();
        assert_eq!((memory.bytes(), ask(&mut second, 1)), (0, [0, 0]), "{}: nothing remains", model.name);
        second.close_disk();
        let written = memory.bytes();
        assert_eq!([2, 1].map(|seed| ask(&mut second, seed)), [[0, 0]; 2], "{}", model.name);
        assert!(!block_on(second.keep()).unwrap() && memory.bytes() == written, "{}", model.name);
    }
}

/// A page ends at any byte that it writes, among values that replace others: what is found then is whole, and nothing is lost
/// that was complete before.
#[test]
fn an_end_at_any_byte_leaves_each_value_whole_or_absent() {
    let mut random = Random(11);
    let mut found = 0;
    for end in 0..300 {
        let begun = Memory::default();
        let disk = begun.disk(8 * SIZE, || 0);
        (0..6).for_each(|n| disk.store(name(n), value(n)));
        disk.flush();
        drop(disk);
        let room = random.below(4 * SIZE as usize) + usize::from(end == 0);
        let killed = Memory { room: Some(room), ..begun };
        let disk = killed.disk(8 * SIZE, || 0);
        // The sixth and later ones take the cells of others.
        for n in 6..12 {
            disk.store(name(n), value(n));
            disk.flush();
        }
        let told = disk.size().0;
        drop(disk);
        let disk = killed.again().disk(1 << 30, || 0);
        let there = disk.size().0;
        assert_eq!(whole(&disk, 0..12), there, "{end}: what is listed is whole");
        assert!(there + 1 >= told.min(6) && there > 0, "{end}: {there} of {told}");
        found += there;
    }
    assert!(found > 300);
}

#[test]
fn what_another_process_left_half_written_or_damaged_is_not_used() {
    let model = &micro_models()[0];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let memory = Memory::default();
    let mut engine = small(model, memory.tiers());
    let _ = [1, 2, 3].map(|seed| lifted(&mut engine, &mut alone, request(seed, vocab)));
    drop(engine);
    let whole = [&memory.pages, &memory.states].map(|file| file.lock().unwrap().clone());
    assert!(whole.iter().all(|file| !file.is_empty()));
    let restore = || {
        *memory.pages.lock().unwrap() = whole[0].clone();
        *memory.states.lock().unwrap() = whole[1].clone();
    };
    let mut random = Random(3);
    for _ in 0..40 {
        restore();
        // Any byte of any cell but the time of its use, before or after the files were opened.
        let mut engine = small(model, memory.tiers());
        let harm = |random: &mut Random| {
            for file in [&memory.pages, &memory.states] {
                let mut file = file.lock().unwrap();
                for _ in 0..8 {
                    let at = random.below(file.len());
                    file[at] ^= 1 << random.below(8);
                }
                if random.one_in(4) {
                    let bytes = random.below(file.len());
                    file.truncate(bytes);
                }
            }
        };
        harm(&mut random);
        let _ = lifted(&mut engine, &mut alone, request(1, vocab));
        drop(engine);
        let mut engine = small(model, memory.tiers());
        let _ = lifted(&mut engine, &mut alone, request(2, vocab));
    }
    restore();
    for file in [&memory.pages, &memory.states] {
        // The middle of the values of all cells.
        let mut file = file.lock().unwrap();
        (0..file.len()).step_by(97).for_each(|at| file[at] ^= 1);
    }
    let mut engine = small(model, memory.tiers());
    assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 0]);
}

#[test]
fn a_full_storage_ends_writing_and_nothing_else() {
    let model = &micro_models()[0];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    for room in [0, 1, 100, 5000, 20_000] {
        let memory = Memory::with_room(room);
        let mut engine = small(model, memory.tiers());
        for seed in [1, 2, 3, 1, 2, 3] {
            lifted(&mut engine, &mut alone, request(seed, vocab));
        }
        while block_on(engine.keep()).unwrap() {}
        assert!(memory.bytes() <= room.max(1) * 4 + 8192, "{room}: {}", memory.bytes());
    }
}

#[test]
fn quota_and_time_to_live_are_kept() {
    static NOW: AtomicU64 = AtomicU64::new(1_000_000_000);
    let now = || NOW.fetch_add(1, Ordering::Relaxed);
    let memory = Memory::default();
    let disk = memory.disk(10 * SIZE, now);
    (0..50).for_each(|n| {
        disk.store(name(n), value(n));
        disk.work();
    });
    assert!(disk.size().1 <= 10 * SIZE && disk.size().0 >= 7, "{:?}", disk.size());
    // Freed cells are used again.
    assert!(memory.bytes() as u64 <= 14 * SIZE, "{}", memory.bytes());
    let newest = whole(&disk, 44..50);
    assert!(newest == 6 && whole(&disk, 0..20) == 0, "the newest stay: {newest}");
    NOW.fetch_add(3_500_000, Ordering::Relaxed);
    // A use makes it young again.
    assert_eq!(whole(&disk, 49..50), 1);
    NOW.fetch_add(200_000, Ordering::Relaxed);
    assert_eq!(whole(&disk, 40..50), 1, "the others were not used for longer than they live");
    drop(disk);
    assert_eq!(memory.disk(10 * SIZE, now).size().0, 1);
    let twice = memory.disk(10 * SIZE, now);
    let asked = vec![(name(49), Heap.take(SIZE as usize - 1).unwrap())];
    assert!(block_on(twice.load(asked)).unwrap().is_empty(), "a value of another length");
}
