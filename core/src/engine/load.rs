//! What is loaded for a request that waits: values from disk, states that have to be decoded, pages of the tree that it needs copies of.

use std::collections::{HashMap, HashSet};

use super::{
    lower::Lower,
    plan::SeqId,
    way::{Source, Way},
};
use crate::{
    saved::{Heap, HostMemory},
    tier::{Content, Converting, Loading, Name, Tier, Value},
};

/// What is loaded for a request.
pub(super) struct Load {
    pub seq: SeqId,
    /// The lowest one that something comes from.
    pub tier: Tier,
    /// What the disk's thread reads.
    reading: Option<Loading>,
    /// Copies from the device.
    copying: HashSet<Name>,
    decoding: Option<(Name, Converting)>,
    /// What is here, as it is stored.
    stored: HashMap<Name, Value>,
    /// The coded one of them, as the device has it.
    decoded: Option<(Name, Value)>,
}

impl Load {
    /// Whether everything has arrived.
    pub fn is_complete(&self) -> bool {
        self.reading.is_none() && self.copying.is_empty() && self.decoding.is_none()
    }

    /// A value as the device has it.
    pub fn value(&self, name: &Name) -> Option<&Value> {
        match name.content {
            Content::Int8 => self.decoded.as_ref().filter(|(decoded, _)| decoded == name).map(|(_, value)| value),
            Content::Page | Content::State => self.stored.get(name),
        }
    }

    /// A value as it is stored, which is not needed here any more.
    pub fn take(&mut self, name: &Name) -> Option<Value> {
        self.stored.remove(name)
    }

    /// It gets a copy of this value.
    pub fn expect(&mut self, name: Name) {
        self.copying.insert(name);
    }

    /// A copy has arrived, perhaps for this.
    pub fn copied(&mut self, name: &Name, value: &Value) {
        if self.copying.remove(name) {
            self.stored.insert(*name, value.clone());
        }
    }

    fn read(&mut self, values: Vec<(Name, Value)>) {
        self.reading = None;
        self.stored.extend(values);
    }

    /// Nothing if it could not be decoded: then the request is computed.
    fn decoded(&mut self, value: Option<Value>) {
        let Some((name, _)) = self.decoding.take() else { return };
        match value {
            Some(value) => self.decoded = Some((name, value)),
            None => _ = self.stored.remove(&name),
        }
    }
}

impl Lower {
    /// Begins to load the values of a way; copies from the device come besides.
    pub(super) fn load(&mut self, seq: SeqId, way: &Way) {
        let of = |source| way.values.iter().filter(move |(_, _, from)| *from == source).map(|(_, name, _)| *name);
        let wanted = of(Source::Disk).filter_map(|name| {
            let bytes = self.stored_bytes(name.content) as usize;
            // Ordinary memory is slower to copy from, and better than nothing.
            Some((name, self.memory.take(bytes).or_else(|| Heap.take(bytes))?))
        });
        let wanted: Vec<_> = wanted.collect();
        let reading = self.disk.as_ref().filter(|_| way.takes(Source::Disk)).map(|disk| disk.load(wanted));
        let tier = if reading.is_some() { Tier::Disk } else { Tier::Host };
        // What is there may be dropped before the rest has come.
        let here = of(Source::Host).chain(of(Source::Coded));
        let stored = here.filter_map(|name| Some((name, self.host.get(&name)?))).collect();
        let (copying, decoding, decoded) = (HashSet::new(), None, None);
        self.load = Some(Load { seq, tier, reading, copying, decoding, stored, decoded });
        self.decode();
    }

    /// Begins to decode a coded value that is here.
    fn decode(&mut self) {
        let (Some(load), Some(coder)) = (&mut self.load, &self.coder) else { return };
        let coded = load.stored.iter().find(|(name, _)| name.content == Content::Int8);
        let Some((name, value)) = coded.filter(|_| load.decoded.is_none() && load.decoding.is_none()) else { return };
        let bytes = self.state.bytes as usize;
        if let Some(room) = self.memory.take(bytes).or_else(|| Heap.take(bytes)) {
            load.decoding = Some((*name, coder.decode(value.clone(), room)));
        }
    }

    /// Takes what has been read and decoded.
    pub(super) fn poll_load(&mut self) {
        if let Some(load) = &mut self.load
            && let Some(reading) = &mut load.reading
        {
            match reading.try_recv() {
                Ok(None) => {}
                Ok(Some(values)) => load.read(values),
                // The thread ended, so nothing comes.
                Err(_) => load.read(Vec::new()),
            }
        }
        self.decode();
        if let Some(load) = &mut self.load
            && let Some((_, decoding)) = &mut load.decoding
        {
            match decoding.try_recv() {
                Ok(None) => {}
                Ok(value) => load.decoded(value),
                Err(_) => load.decoded(None),
            }
        }
    }

    /// Waits for what is being read and decoded.
    pub(super) async fn settle_load(&mut self) {
        if let Some(load) = &mut self.load
            && let Some(reading) = &mut load.reading
        {
            // Cancelled: the thread ended, so nothing comes.
            let values = reading.await.unwrap_or_default();
            load.read(values);
        }
        self.decode();
        if let Some(load) = &mut self.load
            && let Some((_, decoding)) = &mut load.decoding
        {
            let value = decoding.await.ok();
            load.decoded(value);
        }
    }

    /// Whether something is on its way for a request.
    pub(super) fn is_loading(&self) -> bool {
        self.load.as_ref().is_some_and(|load| !load.is_complete())
    }

    /// A value that is here, as the device has it.
    pub(super) fn value(&mut self, seq: SeqId, name: &Name) -> Option<Value> {
        let loaded = self.load.as_ref().filter(|load| load.seq == seq).and_then(|load| load.value(name));
        // What is coded there is of no use here.
        let exact = name.content != Content::Int8;
        loaded.cloned().or_else(|| self.host.get(name).filter(|_| exact))
    }
}
