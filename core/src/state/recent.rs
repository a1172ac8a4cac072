//! Hashes of nodes that were removed recently for lack of room: they turn a `first_sight` into an `evicted`.

use std::collections::{HashMap, VecDeque};

use super::PrefixHash;

/// A bounded set that forgets the oldest entry first.
#[derive(Debug)]
pub struct Recent {
    capacity: usize,
    next: u64,
    /// When each hash was added last.
    added: HashMap<PrefixHash, u64>,
    /// Additions in order. One whose number is no longer in `added` is stale.
    order: VecDeque<(PrefixHash, u64)>,
}

impl Recent {
    /// An empty set of at most `capacity` hashes.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, next: 0, added: HashMap::new(), order: VecDeque::new() }
    }

    /// Adds `hash` as the newest entry.
    pub fn add(&mut self, hash: PrefixHash) {
        self.added.insert(hash, self.next);
        self.order.push_back((hash, self.next));
        self.next += 1;
        if self.order.len() > self.capacity
            && let Some((old, number)) = self.order.pop_front()
            && self.added.get(&old) == Some(&number)
        {
            self.added.remove(&old);
        }
    }

    /// Forgets `hash`: it is in the tree again.
    pub fn remove(&mut self, hash: PrefixHash) {
        self.added.remove(&hash);
    }

    /// Whether `hash` was removed recently.
    pub fn contains(&self, hash: PrefixHash) -> bool {
        self.added.contains_key(&hash)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.added.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_oldest_and_survives_stale_entries() {
        let mut recent = Recent::new(2);
        let h = PrefixHash;
        recent.add(h(1));
        recent.remove(h(1));
        recent.add(h(1));
        recent.add(h(2));
        assert!(recent.contains(h(1)) && recent.contains(h(2)));
        recent.add(h(3));
        assert!(!recent.contains(h(1)) && recent.contains(h(2)) && recent.contains(h(3)));
    }
}
