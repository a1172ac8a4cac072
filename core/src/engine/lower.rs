//! The lower tiers of an engine: copies of what the tree evicts, and loads for requests that wait. `crate::tier` has the rules.

use std::{
    cell::Cell,
    collections::{HashSet, VecDeque},
    io,
};

use super::{
    Engine,
    landing::Sought,
    load::Load,
    plan::SeqId,
    way::{Reach, Source, Way},
};
use crate::{
    backend::{Backend, Caps},
    bundle::{Dtypes, Kind, Part, numerics, parts},
    error::{Error, Result},
    layer::LayerState,
    saved::{HostMemory, Room, Saving},
    state::{GRID, cache::Evicted},
    tier::{
        Coder, Coding, ColdDtype, Content, Converting, Disk, DiskOptions, Host, Name, Pace, Piece, Place, Rates, Tier,
        TierOptions, TierStats, Value, Values, Where,
    },
};

/// Bytes of values on their way to or from a disk for which there is host memory besides that of the host tier; at least this,
/// and room for the pages of a prompt and a few states, which leave the device together: of a prefix with a gap nothing is of use.
const TRANSIT: u64 = 256 << 20;
/// The same in a page, whose memory never shrinks.
const PAGE_TRANSIT: u64 = 64 << 20;

/// The lower tiers and what is on its way to them or from them.
pub(super) struct Lower {
    pub(super) memory: Box<dyn HostMemory>,
    pub(super) host: Host,
    pub(super) disk: Option<Disk>,
    /// Makes states smaller for these tiers.
    pub(super) coder: Option<Coder>,
    pub(super) fixed: Rates,
    pub(super) copy: Pace,
    pub(super) prompt: Pace,
    /// Ways that were estimated to take longer than computing.
    pub(super) refused: Cell<u64>,
    /// When the last step landed.
    landed: f64,
    pub(super) page: Layout,
    pub(super) state: Layout,
    /// Copies from the device, in the order in which they were enqueued.
    coming: VecDeque<Coming>,
    /// Those that have arrived and are being coded.
    coding: VecDeque<Encoding>,
    /// The names of both.
    names: HashSet<Name>,
    /// What was written while nothing ran.
    pub(super) kept: HashSet<Name>,
    pub(super) load: Option<Load>,
    stats: TierStats,
    /// Places that came into the host tier or left it, not reported yet.
    news: Vec<(Place, bool)>,
}

/// The tensors of a value, in order.
pub(super) struct Layout {
    pub parts: Vec<Part>,
    /// Of all ranks, one after the other.
    pub bytes: u64,
}

impl Layout {
    /// That of a page, or of a state.
    pub fn new(layers: &[LayerState], caps: &Caps, paged: bool) -> Self {
        let all = parts(layers, Dtypes::of(caps), 1, &[GRID]).into_iter();
        let parts: Vec<Part> = all.filter(|p| p.kind.is_paged() == paged).collect();
        let bytes = caps.ranks as u64 * parts.iter().map(|p| p.row_bytes() as u64).sum::<u64>();
        Self { parts, bytes }
    }
}

/// A copy from the device in flight.
struct Coming {
    name: Name,
    place: Place,
    saving: Box<dyn Saving>,
}

/// A copy that is being coded.
struct Encoding {
    name: Name,
    place: Place,
    coded: Converting,
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
    pub fn open<B: Backend>(
        options: &TierOptions,
        backend: &B,
        layers: &[LayerState],
        clock: fn() -> f64,
    ) -> Result<Option<Self>> {
        if !options.any() {
            return Ok(None);
        }
        let caps = backend.caps();
        let (page, state) = (Layout::new(layers, caps, true), Layout::new(layers, caps, false));
        let coding =
            Some(options.cold).filter(|cold| *cold == ColdDtype::Int8).and_then(|_| coding(&state.parts, caps.ranks));
        let coder = coding.map(Coder::start).transpose().map_err(no_threads)?;
        let transit = options.disk.as_ref().map_or(0, |disk| transit(disk, page.bytes + state.bytes));
        let numerics = numerics(caps);
        let stored = coder.as_ref().map_or((state.bytes, Content::State), |coder| (coder.coded_bytes(), Content::Int8));
        let values =
            Values { numerics: &numerics, bytes: [page.bytes, stored.0], state: stored.1, most_queued: transit, clock };
        let disk = options.disk.as_ref().map(|disk| Disk::open(disk, &values)).transpose()?;
        Ok(Some(Self {
            memory: backend
                .host_memory(options.host + transit.max(if coder.is_some() { most_coding(&state) } else { 0 }))?,
            host: Host::new(options.host),
            disk,
            coder,
            fixed: options.rates,
            copy: Pace::default(),
            prompt: Pace::default(),
            refused: Cell::default(),
            landed: 0.0,
            page,
            state,
            coming: VecDeque::new(),
            coding: VecDeque::new(),
            names: HashSet::new(),
            kept: HashSet::new(),
            load: None,
            stats: TierStats::default(),
            news: Vec::new(),
        }))
    }

    /// A value of this content as the device has it.
    pub(super) fn layout(&self, content: Content) -> &Layout {
        match content {
            Content::Page => &self.page,
            Content::State | Content::Int8 => &self.state,
        }
    }

    /// Bytes of a value in these tiers.
    pub(super) fn stored_bytes(&self, content: Content) -> u64 {
        match (&self.coder, content) {
            (Some(coder), Content::Int8) => coder.coded_bytes(),
            _ => self.layout(content).bytes,
        }
    }

    /// What a state is in these tiers.
    pub(super) fn state_content(&self) -> Content {
        if self.coder.is_some() { Content::Int8 } else { Content::State }
    }

    /// Whether states that come back are converted ones.
    pub(super) fn converts(&self) -> bool {
        self.coder.is_some()
    }

    /// Whether a value is being copied from the device, or coded.
    pub(super) fn is_coming(&self, name: &Name) -> bool {
        self.names.contains(name)
    }

    /// Whether a value that the device loses is to be copied: some tier takes it and does not have it.
    pub(super) fn wants(&mut self, name: &Name) -> bool {
        if self.names.contains(name) || self.host.get(name).is_some() {
            return false;
        }
        let bytes = self.stored_bytes(name.content);
        self.host.takes(bytes) || self.disk.as_ref().is_some_and(|disk| disk.takes(bytes) && !disk.has(name))
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
        while let Some(value) = self.coding.front_mut().and_then(|first| first.coded.try_recv().transpose()) {
            self.take_coded(value.ok());
        }
        if let Some(disk) = &self.disk {
            disk.work();
        }
        Ok(())
    }

    /// Keeps the oldest copy, which has arrived, or has it coded first.
    fn take_first(&mut self, value: Value) {
        let Some(Coming { name, place, .. }) = self.coming.pop_front() else { return };
        self.stats.demoted += 1;
        if let Some(load) = &mut self.load {
            load.copied(&name, &value);
        }
        if name.content != Content::Int8 {
            return self.enter(name, value, place);
        }
        let room = self.room(self.stored_bytes(name.content) as usize);
        match (&self.coder, room) {
            (Some(coder), Some(room)) => {
                self.coding.push_back(Encoding { name, place, coded: coder.encode(value, room) });
            }
            _ => _ = self.names.remove(&name),
        }
    }

    /// Keeps the oldest value that was being coded; `None` if that was not possible.
    fn take_coded(&mut self, value: Option<Value>) {
        let Some(Encoding { name, place, .. }) = self.coding.pop_front() else { return };
        match value {
            Some(value) => self.enter(name, value, place),
            None => _ = self.names.remove(&name),
        }
    }

    /// A value is complete.
    fn enter(&mut self, name: Name, value: Value, place: Place) {
        self.names.remove(&name);
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
        name.content != Content::Page || self.state.bytes == 0
    }

    /// Waits for whatever is on its way.
    pub(super) async fn settle(&mut self) -> Result<()> {
        while let Some(first) = self.coming.front_mut() {
            let value = first.saving.arrive().await?;
            self.take_first(value);
        }
        while let Some(first) = self.coding.front_mut() {
            // Cancelled: it cannot be coded.
            let value = (&mut first.coded).await.ok();
            self.take_coded(value);
        }
        self.settle_load().await;
        Ok(())
    }

    fn is_busy(&self) -> bool {
        !self.coming.is_empty() || !self.coding.is_empty() || self.is_loading()
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
            converted: counted.converted,
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
        self.coding.clear();
        self.names.clear();
        self.kept.clear();
        if let Some(disk) = &self.disk {
            disk.clear();
        }
    }
}

/// Bytes that may be on their way to or from a disk, for values of `bytes` bytes.
fn transit(disk: &DiskOptions, bytes: u64) -> u64 {
    match disk.place {
        Where::Dir(_) => TRANSIT.max(8 * bytes),
        Where::Flat(_) => PAGE_TRANSIT.max(2 * bytes),
    }
}

/// Bytes of states that may wait to be coded.
fn most_coding(state: &Layout) -> u64 {
    TRANSIT.max(8 * state.bytes)
}

/// How states of these parts are coded, those of all ranks one after the other; `None` if nothing would become smaller.
fn coding(parts: &[Part], ranks: usize) -> Option<Coding> {
    let piece = |part: &Part| match (part.kind, part.shape.split_last()) {
        (Kind::Recurrent, Some((&width, rows))) => {
            Piece::Rows { rows: rows.iter().product(), width, dtype: part.dtype }
        }
        _ => Piece::Kept(part.row_bytes()),
    };
    Coding::new((0..ranks).flat_map(|_| parts.iter().map(piece)).collect())
}

fn no_threads(e: io::Error) -> Error {
    Error::BadRequest(format!("states cannot be made smaller for lower tiers: {e}"))
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
    pub(super) fn copy(&self, lower: &mut Lower, lost: Evicted) -> Result<()> {
        for (content, entry) in [(Content::Page, lost.page), (lower.state_content(), lost.slot)] {
            let name = Name { key: lost.key, content };
            if entry != 0 && lower.wants(&name) {
                self.copy_entry(lower, &lost, content, entry)?;
            }
        }
        Ok(())
    }

    /// Enqueues a copy of a page or a state. False if there is no room for it.
    fn copy_entry(&self, lower: &mut Lower, of: &Evicted, content: Content, entry: u32) -> Result<bool> {
        if content == Content::Int8 && lower.coding.len() as u64 * lower.state.bytes > most_coding(&lower.state) {
            return Ok(false);
        }
        let Some(room) = lower.room(lower.layout(content).bytes as usize) else { return Ok(false) };
        let saving = self.runner.save_entry(&lower.layout(content).parts, entry, room)?;
        let (name, place) = (Name { key: of.key, content }, Place { hash: of.hash, root: of.root });
        lower.names.insert(name);
        lower.coming.push_back(Coming { name, place, saving });
        Ok(true)
    }

    /// Begins to load the values of a way for a request.
    fn begin_load(&self, id: SeqId, lower: &mut Lower, sought: &Sought, way: &Way) -> Result<()> {
        lower.load(id, way);
        for (at, name, _) in way.values.iter().filter(|(_, _, from)| *from == Source::Tree) {
            let Some(page) = sought.near.get(*at) else { continue };
            if self.copy_entry(lower, page, name.content, page.page)?
                && let Some(load) = &mut lower.load
            {
                load.expect(*name);
            }
        }
        Ok(())
    }

    /// Takes the copies that have arrived, hands them on and tells subscribers.
    pub(super) fn collect(&mut self) -> Result<()> {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.collect()?;
        }
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

    /// Waits for what leaves the device, and for the lower tiers if something is on its way that a request waits for.
    pub(super) async fn settle(&mut self) -> Result<()> {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.settle().await?;
        }
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
        if loaded && lower.is_loading() {
            return Ok(Looked::Waits);
        }
        // Loaded once: what is gone now is computed.
        let reaches: &[Reach] = if loaded { &[Reach::Here] } else { &[Reach::All, Reach::Memory] };
        let mut ways = reaches.iter().filter_map(|reach| lower.way(id, &sought, *reach)).peekable();
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
        if way.is_far() {
            if may_load && !lower.is_loading() {
                self.begin_load(id, lower, &sought, &way)?;
            }
            return Ok(Looked::Waits);
        }
        // Where something runs, it runs on meanwhile.
        if !self.scheduler.running.is_empty() && !self.fetch(id, lower, &way)? {
            return Ok(Looked::Waits);
        }
        self.bring(id, lower, &sought, &way)?;
        Ok(Looked::Ready)
    }

    /// Brings the values of a way near the device; true once they are.
    fn fetch(&mut self, id: SeqId, lower: &mut Lower, way: &Way) -> Result<bool> {
        let mut near = true;
        for (_, name, _) in &way.values {
            let Some(value) = lower.value(id, name) else { continue };
            near &= self.runner.backend().fetch(&value)?;
        }
        Ok(near)
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
                Content::State | Content::Int8 => landing.slot((at + 1) * GRID),
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
        let load = lower.load.take_if(|load| load.seq == id);
        let tier = load.as_ref().filter(|_| way.takes(Source::Loaded)).map_or(Tier::Host, |load| load.tier);
        self.scheduler.looked(id, Some((tier, sought.hit * GRID, way.pages * GRID)));
        lower.stats.loads += 1;
        let Some(mut load) = load else { return Ok(()) };
        // They are likely to be wanted again.
        for (at, name, _) in values {
            let own = sought.keys[0].get(at) == Some(&name.key);
            if let (Some(value), Some(place)) = (load.take(&name), self.scheduler.place(id, at + 1, own)) {
                lower.keep(name, value, place);
            }
        }
        Ok(())
    }
}
