//! Lower tiers: what is evicted comes back, in this process and in the next; files that are cut, changed, swapped or gone are never
//! used; a process that is killed leaves each file whole or absent. That answers do not change is in `promise.rs`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use pollster::block_on;
use selkie_core::{
    digest::Digest,
    engine::{Engine, EngineOptions, Event, Finished, Request},
    saved::{Heap, HostMemory},
    state::{CacheEvent, PrefixKey, Realm, Reason},
    tier::{Content, Disk, DiskOptions, Name, Rates, TierOptions, Value, Values, Where},
};

use crate::{
    behind::Behind,
    models::{TestModel, golden_models, micro_models},
    promise::{Alone, Asked, Output},
    random::Random,
};

/// A directory that is deleted at the end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("selkie-tiers-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        Self(folder)
    }

    pub fn options(&self, bytes: u64) -> DiskOptions {
        let (place, ttl) = (Where::Dir(self.0.clone()), Duration::from_secs(3600));
        DiskOptions { place, bytes, ttl, identity: b"a model".to_vec() }
    }

    /// All files of values.
    pub fn files(&self) -> Vec<PathBuf> {
        let entries = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
        let mut files: Vec<_> = entries(&self.0).iter().flat_map(|dir| entries(dir)).collect();
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn prompt(seed: u64, vocab: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..200).map(|_| random.below(vocab) as u32).collect()
}

pub(super) fn request(seed: u64, vocab: usize) -> Request {
    Request { prompt: prompt(seed, vocab), max_tokens: 3, ..Request::default() }
}

/// An engine with room for one such prompt.
pub(super) fn small(model: &TestModel, tiers: TierOptions) -> Engine<Behind> {
    let options = EngineOptions {
        context: Some(256),
        slots: Some(2),
        kv_pages: Some(4),
        max_batch: 1,
        logits: true,
        tiers,
        ..EngineOptions::default()
    };
    model.engine(&options, true)
}

/// Runs a request, with free slots and pages full of NaN.
pub(super) fn run(engine: &mut Engine<Behind>, request: Request) -> (Output, Finished) {
    engine.submit(request).unwrap();
    let (mut output, mut end) = (Output::default(), None);
    while !engine.is_idle() {
        engine.poison_free().unwrap();
        for event in block_on(engine.step()).unwrap() {
            if let Event::Finished(finished) = &event {
                end = Some(finished.clone());
            }
            output.take(event);
        }
        engine.scheduler().audit().unwrap();
    }
    (output, end.unwrap())
}

/// Tokens that came from host memory and from disk, after the answer was compared with that of the request alone.
pub(super) fn lifted(engine: &mut Engine<Behind>, alone: &mut Alone<'_>, request: Request) -> [usize; 2] {
    let asked = Asked::plain(request);
    let (output, end) = run(engine, asked.request());
    assert!(output == alone.run(&asked), "an answer differs from the request alone");
    end.cache.map(|report| [report.host, report.disk]).unwrap()
}

fn host(bytes: u64) -> TierOptions {
    TierOptions { host: bytes, rates: Rates::ALWAYS, ..TierOptions::default() }
}

fn disk(folder: &Folder) -> TierOptions {
    TierOptions { disk: Some(folder.options(1 << 30)), ..host(0) }
}

#[test]
fn what_was_evicted_comes_back_in_every_family() {
    for model in golden_models() {
        let folder = Folder::new("families");
        let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(&model, 256));
        let mut first = small(&model, TierOptions { disk: disk(&folder).disk, ..host(1 << 30) });
        let mut ask = |engine: &mut _, seed| lifted(engine, &mut alone, request(seed, vocab));
        let back: Vec<_> = [1, 2, 1, 2].map(|seed| ask(&mut first, seed)).into();
        assert_eq!(back, [[0, 0], [0, 0], [192, 0], [192, 0]], "{}", model.name);
        let stats = first.stats().tiers;
        assert!(stats.host_tokens == 384 && stats.loads == 2 && stats.demoted > 0, "{}: {stats:?}", model.name);
        drop(first);
        // The next process has them on disk, as far as they were evicted.
        let mut second = small(&model, disk(&folder));
        assert_eq!(ask(&mut second, 1), [0, 192], "{}", model.name);
        assert!(second.stats().tiers.disk_values > 0, "{}", model.name);
    }
}

#[test]
fn a_tier_that_is_too_small_or_too_slow_is_not_used() {
    let model = &micro_models()[0];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let slow = Rates { copy: Some(1e-3), disk: None, prompt: Some(1e3) };
    for (tiers, declined) in [(host(10), 0), (TierOptions { rates: slow, ..host(1 << 30) }, 2)] {
        let mut engine = small(model, tiers);
        let back = [1, 2, 1, 2].map(|seed| lifted(&mut engine, &mut alone, request(seed, vocab)));
        let (stats, reasons) = (engine.stats().tiers, engine.stats().reason(Reason::Host));
        assert!(back == [[0, 0]; 4] && stats.loads == 0 && stats.declined == declined, "{stats:?}");
        assert_eq!(reasons, declined);
    }
}

#[test]
fn another_namespace_another_model_and_other_numerics_find_nothing() {
    let model = &micro_models()[0];
    let folder = Folder::new("names");
    let vocab = model.architecture.spec().vocab;
    let mut alone = Alone::new(model, 256);
    let of = |namespace: &str, seed| Request { namespace: namespace.into(), ..request(seed, vocab) };
    let mut engine = small(model, TierOptions { disk: disk(&folder).disk, ..host(1 << 30) });
    for request in [of("a", 1), of("a", 2), of("b", 1), of("", 1)] {
        assert_eq!(lifted(&mut engine, &mut alone, request), [0, 0]);
    }
    assert_eq!(lifted(&mut engine, &mut alone, of("a", 1)), [192, 0]);
    drop(engine);
    let mut engine = small(model, disk(&folder));
    assert_eq!(lifted(&mut engine, &mut alone, of("c", 1)), [0, 0]);
    assert_eq!(lifted(&mut engine, &mut alone, of("a", 1)), [0, 192]);
    drop(engine);
    let other = DiskOptions { identity: b"another model".to_vec(), ..folder.options(1 << 30) };
    let mut engine = small(model, TierOptions { disk: Some(other), ..host(0) });
    assert_eq!(lifted(&mut engine, &mut alone, of("a", 1)), [0, 0]);
    let name = Name { key: PrefixKey::root(b"x", &Realm::default()), content: Content::Page };
    let [one, two] = ["cpu", "cuda"].map(|numerics| open(&folder.options(1 << 30), numerics));
    one.store(name, vec![1; 10].into());
    drop(one);
    assert!(block_on(two.load(vec![(name, Heap.take(10).unwrap())])).unwrap().is_empty(), "values of other numerics");
}

#[test]
fn a_cleared_cache_is_cleared_everywhere() {
    let model = &micro_models()[0];
    let folder = Folder::new("cleared");
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let mut engine = small(model, TierOptions { disk: disk(&folder).disk, ..host(1 << 30) });
    let _ = [1, 2].map(|seed| lifted(&mut engine, &mut alone, request(seed, vocab)));
    engine.clear_cache();
    assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 0]);
    assert_eq!(engine.stats().tiers.host_tokens, 0);
}

#[test]
fn subscribers_learn_what_is_in_host_memory() {
    let model = &micro_models()[0];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let state = small(model, host(1)).sizes().shape.slot_bytes;
    let page = small(model, host(1)).sizes().shape.page_bytes;
    // Room for one prompt.
    let mut engine = small(model, host(3 * page + state));
    engine.subscribe(true);
    let mut there = std::collections::HashSet::new();
    let root = engine.scheduler().root(&Realm::default());
    for seed in [1, 2, 3, 1, 2, 3] {
        lifted(&mut engine, &mut alone, request(seed, vocab));
        for event in engine.take_cache_events() {
            if let CacheEvent::Host { hash, root: of, stored } = event {
                assert_eq!(of, root);
                assert!(if stored { there.insert(hash) } else { there.remove(&hash) }, "told twice");
            }
        }
    }
    assert!(!there.is_empty() && there.len() <= 4, "{there:?}");
}

#[test]
fn an_engine_that_ends_leaves_what_it_holds_to_the_next() {
    for model in &micro_models() {
        let folder = Folder::new("retired");
        let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
        let mut engine = small(model, disk(&folder));
        assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 0]);
        block_on(engine.retire()).unwrap();
        drop(engine);
        let mut engine = small(model, disk(&folder));
        assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 192], "{}", model.name);
    }
}

/// Everything that may happen to a file: the value is not used, and the answer is the same.
#[test]
fn damaged_and_swapped_files_are_never_used() {
    let model = &micro_models()[0];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    type Harm = fn(&[PathBuf]);
    let flip = |files: &[PathBuf], at: fn(usize) -> usize| {
        for file in files {
            let mut bytes = fs::read(file).unwrap();
            let at = at(bytes.len());
            bytes[at] ^= 1;
            fs::write(file, bytes).unwrap();
        }
    };
    let cases: [(&str, Harm); 6] = [
        ("cut", |files| files.iter().for_each(|f| fs::write(f, &fs::read(f).unwrap()[..70]).unwrap())),
        ("empty", |files| files.iter().for_each(|f| fs::write(f, b"").unwrap())),
        ("longer", |files| files.iter().for_each(|f| fs::write(f, [fs::read(f).unwrap(), vec![0]].concat()).unwrap())),
        ("gone", |files| files.iter().for_each(|f| fs::remove_file(f).unwrap())),
        ("old", |files| {
            let long_ago = SystemTime::now() - Duration::from_secs(7200);
            files.iter().for_each(|f| fs::File::options().write(true).open(f).unwrap().set_modified(long_ago).unwrap());
        }),
        ("swapped", |files| {
            // Each kind among itself: all have the same length.
            for kind in ["page", "state"] {
                let kind: Vec<_> = files.iter().filter(|f| f.extension().is_some_and(|e| e == kind)).collect();
                let bytes: Vec<_> = kind.iter().map(|f| fs::read(f).unwrap()).collect();
                assert!(kind.len() > 1);
                (0..kind.len()).for_each(|i| fs::write(kind[i], &bytes[(i + 1) % kind.len()]).unwrap());
            }
        }),
    ];
    let mut try_harm = |what: &str, harm: &dyn Fn(&[PathBuf])| {
        let folder = Folder::new("harm");
        let mut engine = small(model, disk(&folder));
        let _ = [1, 2, 3].map(|seed| lifted(&mut engine, &mut alone, request(seed, vocab)));
        drop(engine);
        let files = folder.files();
        assert!(files.len() > 4, "{files:?}");
        // The index of this engine is older than the harm.
        let mut engine = small(model, disk(&folder));
        harm(&files);
        assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 0], "{what}");
    };
    for (what, harm) in cases {
        try_harm(what, &harm);
    }
    try_harm("a bit of the head", &|files| flip(files, |_| 20));
    try_harm("a bit of the value", &|files| flip(files, |n| n / 2));
    try_harm("a bit of the checksum", &|files| flip(files, |n| n - 1));
    try_harm("nothing but the files of states", &|files| {
        let states = files.iter().filter(|f| f.extension().is_some_and(|e| e == "state"));
        states.for_each(|f| fs::remove_file(f).unwrap());
    });
}

#[cfg(unix)]
#[test]
fn only_its_owner_can_read_it_and_only_its_owner_may_write() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("modes");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let disk = open(&folder.options(1 << 20), "cpu");
    disk.store(name(1), value(1));
    drop(disk);
    let files = folder.files();
    assert_eq!((mode(&folder.0), mode(files[0].parent().unwrap()), mode(&files[0])), (0o700, 0o700, 0o600));
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o770)).unwrap();
    let refused = Disk::open(&folder.options(1 << 20), &values("cpu")).unwrap_err().to_string();
    assert!(refused.contains("other users can write it"), "{refused}");
}

/// Bytes of the values below.
pub(super) const SIZE: u64 = 20_000;

pub(super) fn values(numerics: &str) -> Values<'_> {
    Values { numerics, bytes: [SIZE; 2], state: Content::State, most_queued: 256 << 20, clock: || 0.0 }
}

fn open(options: &DiskOptions, numerics: &str) -> Disk {
    Disk::open(options, &values(numerics)).unwrap()
}

pub(super) fn name(n: u64) -> Name {
    let content = if n.is_multiple_of(2) { Content::Page } else { Content::State };
    Name { key: PrefixKey(Digest::of(&n.to_le_bytes())), content }
}

pub(super) fn value(n: u64) -> Value {
    let mut random = Random(n);
    (0..SIZE).map(|_| random.next() as u8).collect::<Vec<_>>().into()
}

/// The values of these numbers that are there, each compared with what it has to be.
pub(super) fn whole(disk: &Disk, numbers: std::ops::Range<u64>) -> usize {
    let names = numbers.clone().map(|n| (name(n), Heap.take(SIZE as usize).unwrap())).collect();
    let found = block_on(disk.load(names)).unwrap();
    for (of, bytes) in &found {
        let n = numbers.clone().find(|n| name(*n) == *of).unwrap();
        assert!(bytes[..] == value(n)[..], "value {n} is damaged");
    }
    found.len()
}

#[test]
fn quota_and_time_to_live_are_kept() {
    let folder = Folder::new("quota");
    let disk = open(&folder.options(10 * SIZE), "cpu");
    let size = |files: Vec<PathBuf>| files.iter().map(|f| fs::metadata(f).unwrap().len()).sum::<u64>();
    (0..50).for_each(|n| disk.store(name(n), value(n)));
    drop(disk);
    assert!(size(folder.files()) <= 10 * SIZE && folder.files().len() >= 7, "{}", size(folder.files()));
    let brief = DiskOptions { ttl: Duration::from_millis(50), ..folder.options(10 * SIZE) };
    thread::sleep(Duration::from_millis(100));
    let disk = open(&brief, "cpu");
    assert_eq!((whole(&disk, 0..50), folder.files().len()), (0, 0), "all of them were old");
    disk.store(name(1), value(1));
    let stored = Instant::now();
    while !disk.has(&name(1)) && stored.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(100));
    assert_eq!(whole(&disk, 1..2), 0, "it was not used for longer than it lives");
}

/// The other process of the tests below: writes values until it is killed. Does nothing in an ordinary run.
#[test]
fn a_process_that_writes() {
    let Ok(dir) = std::env::var("SELKIE_TIER_CHILD") else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (bytes, first, count) = (number("SELKIE_TIER_BYTES"), number("SELKIE_TIER_FIRST"), number("SELKIE_TIER_COUNT"));
    let disk = open(&Folder(dir.into()).leaked(bytes), "cpu");
    for n in first..first + count {
        disk.store(name(n), value(n));
    }
}

impl Folder {
    /// Options for a directory that somebody else deletes.
    fn leaked(self, bytes: u64) -> DiskOptions {
        let options = self.options(bytes);
        std::mem::forget(self);
        options
    }

    fn writer(&self, bytes: u64, numbers: std::ops::Range<u64>) -> Command {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["tiers::a_process_that_writes", "--exact"]).env("SELKIE_TIER_CHILD", &self.0);
        child.env("SELKIE_TIER_BYTES", bytes.to_string()).env("SELKIE_TIER_FIRST", numbers.start.to_string());
        child.env("SELKIE_TIER_COUNT", (numbers.end - numbers.start).to_string());
        child.stdout(Stdio::null()).stderr(Stdio::null());
        child
    }
}

#[test]
fn a_kill_at_any_write_leaves_each_file_whole_or_absent() {
    let kills = if std::env::var_os("SELKIE_LONG").is_some() { 200 } else { 20 };
    let mut random = Random(5);
    let (mut found, mut partly) = (0, 0);
    for kill in 0..kills {
        let folder = Folder::new("kill");
        let mut child = folder.writer(1 << 30, 0..1000).spawn().unwrap();
        // Only from the first file on, since a process takes a while to begin.
        let begun = Instant::now();
        while (!folder.0.exists() || folder.files().is_empty()) && begun.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_micros(200));
        }
        thread::sleep(Duration::from_micros(random.below(20_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        let left = folder.files();
        let complete = left.iter().filter(|f| f.extension().is_some_and(|e| e != "new")).count();
        partly += left.len() - complete;
        let disk = open(&folder.options(1 << 30), "cpu");
        assert_eq!(disk.size().0, complete, "kill {kill}");
        // What has its name is whole.
        assert_eq!(whole(&disk, 0..1000), complete, "kill {kill}");
        found += complete;
    }
    println!("{kills} kills, {found} values found, {partly} partly written");
    assert!(found > 0);
}

#[test]
fn two_processes_share_a_directory() {
    let folder = Folder::new("two");
    let quota = 40 * SIZE;
    let disk = open(&folder.options(quota), "cpu");
    let mut other = folder.writer(quota, 0..400).spawn().unwrap();
    let mut found = 0;
    for round in 0..20 {
        (0..20).for_each(|n| disk.store(name(1000 + 20 * round + n), value(1000 + 20 * round + n)));
        found += whole(&disk, 0..400) + whole(&disk, 1000..1400);
    }
    assert!(other.wait().unwrap().success());
    drop(disk);
    // Both write the same values: either file is right.
    let mut both = [0..100, 0..100].map(|numbers| folder.writer(quota, numbers).spawn().unwrap());
    both.iter_mut().for_each(|child| assert!(child.wait().unwrap().success()));
    let disk = open(&folder.options(quota), "cpu");
    found += whole(&disk, 0..100);
    assert!(found > 20, "{found} values found");
    let bytes: u64 = folder.files().iter().map(|f| fs::metadata(f).unwrap().len()).sum();
    assert!(bytes <= quota, "{bytes} bytes after the sweep of the last one");
}
