//! Values in host memory, up to a number of bytes, in an order of their last use.

use std::collections::{BTreeMap, HashMap};

use super::{Name, Value};
use crate::state::PrefixHash;

/// Where the tree has, or had, the prefix of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its node's name.
    pub hash: PrefixHash,
    /// Its root's.
    pub root: PrefixHash,
}

#[derive(Debug)]
struct Held {
    value: Value,
    place: Place,
    used: u64,
}

/// The tier of host memory.
#[derive(Debug)]
pub struct Host {
    capacity: u64,
    bytes: u64,
    held: HashMap<Name, Held>,
    order: BTreeMap<u64, Name>,
    clock: u64,
    evicted: u64,
}

impl Host {
    /// An empty tier of at most `capacity` bytes of values.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, bytes: 0, held: HashMap::new(), order: BTreeMap::new(), clock: 0, evicted: 0 }
    }

    /// Whether it has a value.
    pub fn has(&self, name: &Name) -> bool {
        self.held.contains_key(name)
    }

    /// A value, which is used now.
    pub fn get(&mut self, name: &Name) -> Option<Value> {
        let held = self.held.get_mut(name)?;
        self.order.remove(&held.used);
        self.clock += 1;
        held.used = self.clock;
        self.order.insert(held.used, *name);
        Some(held.value.clone())
    }

    /// Whether a value of that size can be kept at all.
    pub fn takes(&self, bytes: u64) -> bool {
        bytes <= self.capacity
    }

    /// Keeps a value, dropping those that were not used for longest; it does not keep what is larger than itself. Returns the places of
    /// the dropped ones.
    pub fn put(&mut self, name: Name, value: Value, place: Place) -> Vec<(Name, Place)> {
        let bytes = value.len() as u64;
        if self.get(&name).is_some() || !self.takes(bytes) {
            return Vec::new();
        }
        let mut dropped = Vec::new();
        while self.bytes + bytes > self.capacity {
            let Some(oldest) = self.drop_oldest() else { break };
            dropped.push(oldest);
        }
        self.clock += 1;
        self.bytes += bytes;
        self.order.insert(self.clock, name);
        self.held.insert(name, Held { value, place, used: self.clock });
        dropped
    }

    /// Drops the value that was not used for longest, and returns its place; `None` if it is empty.
    pub fn drop_oldest(&mut self) -> Option<(Name, Place)> {
        let (_, oldest) = self.order.pop_first()?;
        let held = self.held.remove(&oldest)?;
        self.bytes -= held.value.len() as u64;
        self.evicted += 1;
        Some((oldest, held.place))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.held, self.order, self.bytes) = (HashMap::new(), BTreeMap::new(), 0);
    }

    /// Values now.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Bytes of values now.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Values dropped for lack of room so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{digest::Digest, state::PrefixKey, tier::Content};

    fn name(n: u8) -> Name {
        Name { key: PrefixKey(Digest([n; 32])), content: Content::Page }
    }

    #[test]
    fn the_least_recently_used_value_makes_room_and_bytes_are_bounded() {
        let mut host = Host::new(100);
        let place = |n: u8| Place { hash: PrefixHash(n.into()), root: PrefixHash(0) };
        let put = |host: &mut Host, n: u8, bytes: usize| {
            let dropped = host.put(name(n), vec![n; bytes].into(), place(n));
            assert!(host.bytes() <= 100 && dropped.iter().all(|(name, _)| !host.has(name)));
            dropped.into_iter().map(|(_, place)| place.hash.0 as u8).collect::<Vec<_>>()
        };
        assert!(put(&mut host, 1, 40).is_empty() && put(&mut host, 2, 40).is_empty());
        assert_eq!(host.get(&name(1)).unwrap()[..], [1; 40]);
        assert_eq!(put(&mut host, 3, 40), [2]);
        assert!(put(&mut host, 4, 101).is_empty() && !host.has(&name(4)), "larger than the tier");
        // A value that is here already is used, not stored twice.
        assert!(put(&mut host, 1, 40).is_empty());
        assert_eq!(put(&mut host, 5, 60), [3]);
        assert_eq!((host.len(), host.bytes(), host.evicted()), (2, 100, 2));
        let mut other = name(1);
        other.content = Content::State;
        assert!(!host.has(&other));
        host.clear();
        assert_eq!((host.len(), host.bytes()), (0, 0));
        assert!(put(&mut host, 9, 100).is_empty() && host.has(&name(9)));
    }
}
