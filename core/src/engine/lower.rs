//! The lower tiers of an engine: copies of what the tree evicts, and loads for requests that wait. `crate::tier` has the rules.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet, VecDeque},
};

use super::{Engine, landing::Sought, plan::SeqId};
use crate::{
    backend::Backend,
    bundle::{Dtypes, Part, numerics, parts},
    error::Result,
    layer::LayerState,
    saved::{Heap, HostMemory, Room, Saving},
    state::{GRID, cache::Evicted},
    tier::{Content, Disk, Host, Loading, Name, Pace, Place, Rates, Tier, TierOptions, TierStats, Value},
};

/// Bytes of values on their way to or from a disk for which there is host memory besides that of the host tier; at least this,
/// and room for the pages of a prompt and a few states, which leave the device together: of a prefix with a gap nothing is of use.
const TRANSIT: u64 = 256 << 20;

/// Every so many times that computing seems faster, loading is tried, since a rate that was measured at a bad moment would last
/// for ever.
const TRIES: u64 = 16;

/// The lower tiers and what is on its way to them or from them.
pub(super) struct Lower {
    memory: Box<dyn HostMemory>,
    host: Host,
    disk: Option<Disk>,
    fixed: Rates,
    copy: Pace,
    prompt: Pace,
    /// Ways that were estimated to take longer than computing.
    refused: Cell<u64>,
    /// When the last step landed.
    landed: f64,
    page: Layout,
    state: Layout,
    /// Copies from the device, in the order in which they were enqueued.
    coming: VecDeque<Coming>,
    names: HashSet<Name>,
    load: Option<Load>,
    stats: TierStats,
    /// Places that came into the host tier or left it, not reported yet.
    news: Vec<(Place, bool)>,
}

/// The tensors of a value, in order.
struct Layout {
    parts: Vec<Part>,
    bytes: u64,
}

/// A copy from the device in flight.
struct Coming {
    name: Name,
    place: Place,
    saving: Box<dyn Saving>,
}

/// What is read from disk for a request that waits.
struct Load {
    seq: SeqId,
    /// `None` when it has arrived.
    loading: Option<Loading>,
    values: HashMap<Name, Value>,
}

/// Where a value can be had.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// It was loaded from disk for this request.
    Loaded,
    Host,
    Coming,
    Disk,
}

/// How far the tiers lead, and what that takes.
struct Way {
    pages: usize,
    /// Its values, each with the number of its page.
    values: Vec<(usize, Name, Source)>,
}

impl Way {
    fn takes(&self, source: Source) -> bool {
        self.values.iter().any(|(_, _, from)| *from == source)
    }
}

/// What a look at the lower tiers decided for a request.
enum Looked {
    /// It can be planned.
    Ready,
    /// It waits for values.
    Waits,
}

impl Lower {
    /// Empty tiers, or those of a directory; `None` without any.
    pub fn open<B: Backend>(options: &TierOptions, backend: &B, layers: &[LayerState]) -> Result<Option<Self>> {
        if !options.any() {
            return Ok(None);
        }
        let caps = backend.caps();
        let dtypes = Dtypes { kv: caps.kv, conv: caps.conv, state: caps.state };
        let layout = |paged: bool| {
            let parts: Vec<Part> =
                parts(layers, dtypes, 1, &[GRID]).into_iter().filter(|p| p.kind.is_paged() == paged).collect();
            // Of all ranks, one after the other.
            let bytes = caps.ranks as u64 * parts.iter().map(|p| p.row_bytes() as u64).sum::<u64>();
            Layout { parts, bytes }
        };
        let (page, state) = (layout(true), layout(false));
        let transit = if options.disk.is_some() { TRANSIT.max(8 * (page.bytes + state.bytes)) } else { 0 };
        let disk = options.disk.as_ref().map(|disk| Disk::open(disk, &numerics(caps), transit)).transpose()?;
        Ok(Some(Self {
            memory: backend.host_memory(options.host + transit)?,
            host: Host::new(options.host),
            disk,
            fixed: options.rates,
            copy: Pace::default(),
            prompt: Pace::default(),
            refused: Cell::default(),
            landed: 0.0,
            page,
            state,
            coming: VecDeque::new(),
            names: HashSet::new(),
            load: None,
            stats: TierStats::default(),
            news: Vec::new(),
        }))
    }

    fn layout(&self, content: Content) -> &Layout {
        match content {
            Content::Page => &self.page,
            Content::State => &self.state,
        }
    }

    /// Whether a value that the device loses is to be copied: some tier takes it and does not have it.
    fn wants(&mut self, name: &Name) -> bool {
        if self.names.contains(name) || self.host.get(name).is_some() {
            return false;
        }
        let on_disk = self.disk.as_ref().is_some_and(|disk| disk.has(name));
        self.host.takes(self.layout(name.content).bytes) || self.disk.is_some() && !on_disk
    }

    /// Memory for a value, in the place of those that were not used for longest; `None` if what is on its way has all of it.
    fn room(&mut self, bytes: usize) -> Option<Box<dyn Room>> {
        loop {
            if let Some(room) = self.memory.take(bytes) {
                return Some(room);
            }
            let dropped = self.host.drop_oldest()?;
            self.report_dropped([dropped]);
        }
    }

    /// Takes the copies that have arrived.
    fn collect(&mut self) -> Result<()> {
        while let Some(value) = self.coming.front_mut().and_then(|first| first.saving.take()) {
            self.take_first(value?);
        }
        Ok(())
    }

    /// Keeps the oldest copy, which has arrived.
    fn take_first(&mut self, value: Value) {
        let Some(Coming { name, place, .. }) = self.coming.pop_front() else { return };
        self.names.remove(&name);
        self.stats.demoted += 1;
        if let Some(disk) = &self.disk {
            disk.store(name, value.clone());
        }
        self.keep(name, value, place);
    }

    /// Puts a value into host memory.
    fn keep(&mut self, name: Name, value: Value, place: Place) {
        let had = self.host.has(&name);
        let dropped = self.host.put(name, value, place);
        if !had && self.host.has(&name) && self.is_end(&name) {
            self.news.push((place, true));
        }
        self.report_dropped(dropped);
    }

    /// These values left host memory.
    fn report_dropped(&mut self, dropped: impl IntoIterator<Item = (Name, Place)>) {
        for (name, place) in dropped {
            if self.is_end(&name) {
                self.news.push((place, false));
            }
        }
    }

    /// Whether a request can go on from a value: from states, or from any page of a model that has none.
    fn is_end(&self, name: &Name) -> bool {
        name.content == Content::State || self.state.bytes == 0
    }

    /// Waits for whatever is on its way.
    async fn settle(&mut self) -> Result<()> {
        while let Some(first) = self.coming.front_mut() {
            let value = first.saving.arrive().await?;
            self.take_first(value);
        }
        if let Some(load) = &mut self.load
            && let Some(loading) = &mut load.loading
        {
            // Cancelled: the thread ended, so nothing comes.
            let values = loading.await.unwrap_or_default();
            load.arrived(values);
        }
        Ok(())
    }

    fn is_reading(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.loading.is_some())
    }

    fn is_busy(&self) -> bool {
        !self.coming.is_empty() || self.is_reading()
    }

    fn find(&self, seq: SeqId, name: &Name) -> Option<Source> {
        let loaded = |load: &&Load| load.seq == seq && load.values.contains_key(name);
        if self.load.as_ref().filter(loaded).is_some() {
            return Some(Source::Loaded);
        }
        if self.host.has(name) {
            return Some(Source::Host);
        }
        if self.names.contains(name) {
            return Some(Source::Coming);
        }
        self.disk.as_ref().filter(|disk| disk.has(name)).map(|_| Source::Disk)
    }

    /// The farthest way that values of these tiers and the tree lead, beyond what the tree leads alone.
    fn way(&self, seq: SeqId, sought: &Sought, disk: bool) -> Option<Way> {
        let usable = |name: &Name| self.find(seq, name).filter(|from| disk || *from != Source::Disk);
        let (mut values, mut way) = (Vec::new(), None);
        for (i, &key) in sought.keys.iter().enumerate() {
            let (page, state) = (Name { key, content: Content::Page }, Name { key, content: Content::State });
            if i >= sought.known && self.page.bytes > 0 {
                let Some(from) = usable(&page) else { break };
                values.push((i, page, from));
            }
            if i < sought.hit {
                continue;
            }
            if self.state.bytes == 0 {
                way = Some((i + 1, values.len(), None));
            } else if let Some(from) = usable(&state) {
                way = Some((i + 1, values.len(), Some((i, state, from))));
            }
        }
        let (pages, count, state) = way?;
        values.truncate(count);
        values.extend(state);
        Some(Way { pages, values })
    }

    /// Whether a way takes less time than computing.
    fn pays(&self, sought: &Sought, way: &Way) -> bool {
        let measured =
            Rates { copy: self.copy.rate(), disk: self.disk.as_ref().and_then(Disk::rate), prompt: self.prompt.rate() };
        let bytes = |on_disk: bool| {
            let values = way.values.iter().filter(|(_, _, from)| (*from == Source::Disk) == on_disk);
            values.map(|(_, name, _)| self.layout(name.content).bytes).sum::<u64>()
        };
        let tokens = (way.pages - sought.hit) * GRID;
        if self.fixed.or(measured).favour_loading(bytes(false), bytes(true), tokens) {
            return true;
        }
        self.refused.set(self.refused.get() + 1);
        // Only a load can measure anew.
        self.fixed == Rates::default() && self.refused.get().is_multiple_of(TRIES)
    }

    /// Takes what has been read from disk.
    fn poll_load(&mut self) {
        let Some(load) = &mut self.load else { return };
        let Some(loading) = &mut load.loading else { return };
        match loading.try_recv() {
            Ok(None) => {}
            Ok(Some(values)) => load.arrived(values),
            // The thread ended, so nothing comes.
            Err(_) => load.arrived(Vec::new()),
        }
    }

    /// Begins to read the values of a way that are on disk.
    fn load(&mut self, seq: SeqId, way: &Way) {
        let on_disk = way.values.iter().filter(|(_, _, from)| *from == Source::Disk);
        let wanted = on_disk.filter_map(|(_, name, _)| {
            let bytes = self.layout(name.content).bytes as usize;
            // Ordinary memory is slower to copy from, and better than nothing.
            Some((*name, self.memory.take(bytes).or_else(|| Heap.take(bytes))?))
        });
        let wanted = wanted.collect();
        let loading = self.disk.as_ref().map(|disk| disk.load(wanted));
        self.load = Some(Load { seq, loading, values: HashMap::new() });
    }

    /// A value that is here.
    fn value(&mut self, seq: SeqId, name: &Name) -> Option<Value> {
        let loaded = self.load.as_ref().filter(|load| load.seq == seq).and_then(|load| load.values.get(name));
        loaded.cloned().or_else(|| self.host.get(name))
    }

    /// A step of so many tokens landed that was enqueued at that time.
    pub fn landed(&mut self, tokens: usize, enqueued: f64, now: f64) {
        // Fewer are decode steps, whose time says little about prompts.
        if tokens >= GRID {
            self.prompt.add(tokens as f64, now - enqueued.max(self.landed));
        }
        self.landed = now;
    }

    /// Counters; `counted` has those of the scheduler.
    pub fn stats(&self, counted: &TierStats) -> TierStats {
        let (disk_values, disk_bytes) = self.disk.as_ref().map_or((0, 0), Disk::size);
        TierStats {
            host_tokens: counted.host_tokens,
            disk_tokens: counted.disk_tokens,
            host_values: self.host.len() as u64,
            host_bytes: self.host.bytes(),
            host_evicted: self.host.evicted(),
            disk_values: disk_values as u64,
            disk_bytes,
            ..self.stats
        }
    }

    /// Forgets everything, on disk too.
    pub fn clear(&mut self) {
        self.host.clear();
        (self.load, self.news) = (None, Vec::new());
        self.coming.clear();
        self.names.clear();
        if let Some(disk) = &self.disk {
            disk.clear();
        }
    }
}

impl Load {
    fn arrived(&mut self, values: Vec<(Name, Value)>) {
        (self.loading, self.values) = (None, values.into_iter().collect());
    }
}

impl<B: Backend> Engine<B> {
    /// Enqueues copies of what the tree has lost, before anything is written there.
    ///
    /// # Errors
    /// A device error.
    pub(super) fn demote(&mut self) -> Result<()> {
        let Some(mut lower) = self.lower.take() else { return Ok(()) };
        let done = self.demote_to(&mut lower);
        self.lower = Some(lower);
        done
    }

    fn demote_to(&mut self, lower: &mut Lower) -> Result<()> {
        self.scheduler.take_evicted().into_iter().try_for_each(|lost| self.copy(lower, lost))
    }

    /// Enqueues copies of the page and the state of a prefix that a tier wants.
    fn copy(&self, lower: &mut Lower, lost: Evicted) -> Result<()> {
        let place = Place { hash: lost.hash, root: lost.root };
        for (content, entry) in [(Content::Page, lost.page), (Content::State, lost.slot)] {
            let name = Name { key: lost.key, content };
            if entry == 0 || !lower.wants(&name) {
                continue;
            }
            let Some(room) = lower.room(lower.layout(content).bytes as usize) else { continue };
            let saving = self.runner.save_entry(&lower.layout(content).parts, entry, room)?;
            lower.names.insert(name);
            lower.coming.push_back(Coming { name, place, saving });
        }
        Ok(())
    }

    /// Writes what the tree holds to disk, if there is that tier, so that the next process finds it. Nobody needs the engine any
    /// more.
    ///
    /// # Errors
    /// A device error.
    pub async fn retire(&mut self) -> Result<()> {
        let Some(mut lower) = self.lower.take_if(|lower| lower.disk.is_some() && !self.failed) else { return Ok(()) };
        lower.host = Host::new(0);
        for lost in self.scheduler.contents() {
            self.copy(&mut lower, lost)?;
            // One at a time: there may be more than the host has memory for.
            lower.settle().await?;
            if let Some(disk) = &lower.disk {
                disk.flush();
            }
        }
        Ok(())
    }

    /// Takes the copies that have arrived, and tells subscribers.
    pub(super) fn collect(&mut self) -> Result<()> {
        let Some(lower) = &mut self.lower else { return Ok(()) };
        lower.collect()?;
        // The device holds what it restores until that is counted.
        if let Some((bytes, time)) = self.runner.backend().restored() {
            lower.copy.add(bytes as f64, time);
        }
        for (place, stored) in lower.news.drain(..) {
            self.scheduler.report_host(place, stored);
        }
        Ok(())
    }

    /// Waits for the lower tiers, if something is on its way that a request waits for.
    pub(super) async fn settle(&mut self) -> Result<()> {
        match &mut self.lower {
            Some(lower) if lower.is_busy() => lower.settle().await,
            _ => Ok(()),
        }
    }

    /// Brings what lower tiers have for the requests that the next plan may admit.
    pub(super) fn lift(&mut self) -> Result<()> {
        let Some(mut lower) = self.lower.take() else { return Ok(()) };
        let lifted = self.lift_with(&mut lower);
        self.lower = Some(lower);
        lifted
    }

    fn lift_with(&mut self, lower: &mut Lower) -> Result<()> {
        self.scheduler.loading.clear();
        // Its request has ended, or was admitted.
        lower.load = lower.load.take().filter(|load| self.scheduler.is_waiting(load.seq));
        lower.poll_load();
        let candidates = self.scheduler.candidates();
        // One load at a time. It gives way to another one only if its request cannot be admitted now.
        let mine = lower.load.as_ref().map(|load| load.seq).filter(|id| candidates.iter().flatten().any(|c| c == id));
        for share in &candidates {
            for &id in share {
                if let Looked::Waits = self.look(id, mine.is_none_or(|mine| mine == id), lower)? {
                    self.scheduler.loading.push(id);
                    break;
                }
            }
        }
        Ok(())
    }

    /// `may_load`: nobody else's load would be lost.
    fn look(&mut self, id: SeqId, may_load: bool, lower: &mut Lower) -> Result<Looked> {
        let Some(sought) = self.scheduler.seek(id) else { return Ok(Looked::Ready) };
        let loaded = lower.load.as_ref().is_some_and(|load| load.seq == id);
        if loaded && lower.is_reading() {
            return Ok(Looked::Waits);
        }
        // From disk once: what is gone now is computed.
        let ways = [true, false].into_iter().filter(|disk| !(*disk && loaded));
        let mut ways = ways.filter_map(|disk| lower.way(id, &sought, disk)).peekable();
        let tier = ways.peek().map(|way| if way.takes(Source::Disk) { Tier::Disk } else { Tier::Host });
        // What has been loaded is not weighed again.
        let Some(way) = ways.find(|way| way.takes(Source::Loaded) || lower.pays(&sought, way)) else {
            if let Some(tier) = tier {
                lower.stats.declined += 1;
                self.scheduler.declined(id, tier);
            }
            self.scheduler.looked(id, None);
            return Ok(Looked::Ready);
        };
        if way.takes(Source::Coming) {
            return Ok(Looked::Waits);
        }
        if way.takes(Source::Disk) {
            if may_load && !lower.is_reading() {
                lower.load(id, &way);
            }
            return Ok(Looked::Waits);
        }
        self.bring(id, lower, &sought, &way)?;
        Ok(Looked::Ready)
    }

    /// Puts the values of a way, all of which are here, into the tree. Without room for them the request is looked up again.
    fn bring(&mut self, id: SeqId, lower: &mut Lower, sought: &Sought, way: &Way) -> Result<()> {
        let here = way.values.iter().map(|(at, name, _)| Some((*at, *name, lower.value(id, name)?)));
        let values: Option<Vec<(usize, Name, Value)>> = here.collect();
        let Some(values) = values else { return Ok(()) };
        let Some(landing) = self.scheduler.open_lift(id, way.pages) else { return Ok(()) };
        if let Err(e) = self.demote_to(lower) {
            self.scheduler.close_landing(landing);
            return Err(e);
        }
        let started = (self.clock)();
        let mut bytes = 0;
        for (at, name, value) in &values {
            let entry = match name.content {
                Content::Page => landing.page(*at),
                Content::State => landing.slot((at + 1) * GRID),
            };
            let Some(entry) = entry else { continue };
            if let Err(e) = self.runner.restore_entry(&lower.layout(name.content).parts, entry, value) {
                self.scheduler.close_landing(landing);
                return Err(e);
            }
            bytes += value.len();
        }
        let (bytes, time) = self.runner.backend().restored().unwrap_or((bytes as u64, (self.clock)() - started));
        lower.copy.add(bytes as f64, time);
        self.scheduler.land(landing);
        let tier = if way.takes(Source::Loaded) { Tier::Disk } else { Tier::Host };
        self.scheduler.looked(id, Some((tier, sought.hit * GRID, way.pages * GRID)));
        lower.stats.loads += 1;
        let Some(load) = lower.load.take_if(|load| load.seq == id) else { return Ok(()) };
        // They are likely to be wanted again.
        for (at, name, value) in values.into_iter().filter(|(_, name, _)| load.values.contains_key(name)) {
            if let Some(place) = self.scheduler.place(id, at + 1) {
                lower.keep(name, value, place);
            }
        }
        Ok(())
    }
}
