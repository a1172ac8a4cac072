//! How far lower tiers lead for a request, and whether that takes less time than computing.

use super::{landing::Sought, lower::Lower, plan::SeqId};
use crate::{
    state::GRID,
    tier::{Content, Disk, Name, Rates},
};

/// Every so many times that computing seems faster, loading is tried, since a rate that was measured at a bad moment would last
/// for ever.
const TRIES: u64 = 16;

/// Where a value can be had.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// It was loaded for this request.
    Loaded,
    Host,
    /// Host memory, where it has to be decoded.
    Coded,
    /// The device, in the realm that the request is not brought into.
    Tree,
    Coming,
    Disk,
}

/// Which sources are asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Those that need no load.
    Here,
    /// Those of this process.
    Memory,
    All,
}

impl Source {
    fn within(self, reach: Reach) -> bool {
        match self {
            Self::Loaded | Self::Host | Self::Coming => true,
            Self::Coded | Self::Tree => reach != Reach::Here,
            Self::Disk => reach == Reach::All,
        }
    }

    /// Whether the value has to be loaded for the request that waits.
    fn is_far(self) -> bool {
        !self.within(Reach::Here)
    }
}

/// How far the tiers lead, and what that takes.
pub(super) struct Way {
    pub pages: usize,
    /// Its values, each with the number of its page.
    pub values: Vec<(usize, Name, Source)>,
}

impl Way {
    pub fn takes(&self, source: Source) -> bool {
        self.values.iter().any(|(_, _, from)| *from == source)
    }

    /// Whether some of its values have to be loaded.
    pub fn is_far(&self) -> bool {
        self.values.iter().any(|(_, _, from)| from.is_far())
    }
}

impl Lower {
    fn find(&self, seq: SeqId, name: &Name) -> Option<Source> {
        if self.load.as_ref().is_some_and(|load| load.seq == seq && load.value(name).is_some()) {
            return Some(Source::Loaded);
        }
        if self.host.has(name) {
            return Some(if name.content == Content::Int8 { Source::Coded } else { Source::Host });
        }
        if self.is_coming(name) {
            return Some(Source::Coming);
        }
        self.disk.as_ref().filter(|disk| disk.has(name)).map(|_| Source::Disk)
    }

    /// The farthest way that values of these tiers and the tree lead, beyond what the tree leads alone.
    pub(super) fn way(&self, seq: SeqId, sought: &Sought, reach: Reach) -> Option<Way> {
        let find = |i: usize, content| {
            let names = sought.keys.iter().map(|keys| Name { key: keys[i], content });
            let mut found = names.filter_map(|name| Some((i, name, self.find(seq, &name)?)));
            found.find(|(_, _, from)| from.within(reach))
        };
        let near = |i: usize| {
            let name = Name { key: sought.near.get(i)?.key, content: Content::Page };
            Source::Tree.within(reach).then_some((i, name, Source::Tree))
        };
        let (mut values, mut way) = (Vec::new(), None);
        for i in 0..sought.keys.first()?.len() {
            if i >= sought.known && self.page.bytes > 0 {
                let Some(page) = find(i, Content::Page).or_else(|| near(i)) else { break };
                values.push(page);
            }
            if i < sought.hit {
                continue;
            }
            if self.state.bytes == 0 {
                way = Some((i + 1, values.len(), None));
            } else if let Some(state) = find(i, self.state_content()) {
                way = Some((i + 1, values.len(), Some(state)));
            }
        }
        let (pages, count, state) = way?;
        values.truncate(count);
        values.extend(state);
        Some(Way { pages, values })
    }

    /// Whether a way takes less time than computing.
    pub(super) fn pays(&self, sought: &Sought, way: &Way) -> bool {
        let measured =
            Rates { copy: self.copy.rate(), disk: self.disk.as_ref().and_then(Disk::rate), prompt: self.prompt.rate() };
        let (mut in_memory, mut on_disk) = (0, 0);
        for (_, name, from) in &way.values {
            let (bytes, stored) = (self.layout(name.content).bytes, self.stored_bytes(name.content));
            match from {
                Source::Disk => (in_memory, on_disk) = (in_memory + bytes - stored, on_disk + stored),
                // From the device and back.
                Source::Tree => in_memory += 2 * bytes,
                _ => in_memory += bytes,
            }
        }
        let tokens = (way.pages - sought.hit) * GRID;
        if self.fixed.or(measured).favour_loading(in_memory, on_disk, tokens) {
            return true;
        }
        self.refused.set(self.refused.get() + 1);
        // Only a load can measure anew.
        self.fixed == Rates::default() && self.refused.get().is_multiple_of(TRIES)
    }
}
