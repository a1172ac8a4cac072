//! Which pages of the prefix tree are announced: those on the way to a state that a request can continue from. A page that no state
//! follows would promise a hit that a recurrent model cannot give. For a model without recurrent layers all pages are.
//!
//! Only one namespace is announced: an indexer goes by tokens alone and would promise one tenant another's pages.

use std::collections::HashMap;

use selkie_core::state::{CacheEvent, PrefixHash};

/// What an indexer is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Pages that follow each other, the first one after `parent`, or at the start of a prompt.
    Stored {
        /// The name before them; `None` at the start of a prompt.
        parent: Option<u64>,
        /// Their names.
        hashes: Vec<u64>,
        /// Their tokens, 64 each.
        tokens: Vec<u32>,
    },
    /// Pages that no request can use any more, deepest first.
    Removed {
        /// Their names.
        hashes: Vec<u64>,
    },
    /// A prefix came into host memory, or left it.
    Host {
        /// Its name.
        hash: u64,
        /// Whether it is there now.
        stored: bool,
    },
    /// No page is left.
    Cleared,
}

struct Page {
    parent: PrefixHash,
    tokens: Box<[u32]>,
    has_state: bool,
    /// Announced pages that follow it.
    announced_children: usize,
    announced: bool,
}

impl Page {
    fn is_useful(&self) -> bool {
        self.has_state || self.announced_children > 0
    }
}

/// The pages of one namespace, and which of them are announced.
pub struct Ledger {
    root: PrefixHash,
    pages: HashMap<PrefixHash, Page>,
}

/// The low 64 bits, which is what indexers can hold.
fn short(hash: PrefixHash) -> u64 {
    hash.0 as u64
}

impl Ledger {
    /// Of the namespace whose empty prefix is `root`.
    pub fn new(root: PrefixHash) -> Self {
        Self { root, pages: HashMap::new() }
    }

    /// What to announce after `event`, in order.
    pub fn apply(&mut self, event: &CacheEvent) -> Option<Change> {
        match event {
            CacheEvent::Stored { hash, parent, tokens, has_state } => {
                if let Some(page) = self.pages.get_mut(hash) {
                    page.has_state = *has_state;
                } else if *parent == self.root || self.pages.contains_key(parent) {
                    let (parent, tokens, has_state) = (*parent, tokens.clone(), *has_state);
                    let page = Page { parent, tokens, has_state, announced_children: 0, announced: false };
                    self.pages.insert(*hash, page);
                } else {
                    // Of another namespace.
                    return None;
                }
                if *has_state { self.announce(*hash) } else { self.withdraw(*hash) }
            }
            CacheEvent::Removed { hash } => {
                self.pages.get_mut(hash)?.has_state = false;
                let change = self.withdraw(*hash);
                self.pages.remove(hash);
                change
            }
            CacheEvent::Host { hash, root, stored } => {
                (*root == self.root).then(|| Change::Host { hash: short(*hash), stored: *stored })
            }
            CacheEvent::Cleared => {
                let any = self.pages.values().any(|page| page.announced);
                self.pages.clear();
                any.then_some(Change::Cleared)
            }
        }
    }

    /// Announces a page and those before it that are not.
    fn announce(&mut self, hash: PrefixHash) -> Option<Change> {
        let mut new = Vec::new();
        let mut at = hash;
        while let Some(page) = self.pages.get_mut(&at).filter(|page| !page.announced) {
            page.announced = true;
            new.push(at);
            at = page.parent;
            if let Some(parent) = self.pages.get_mut(&at) {
                parent.announced_children += 1;
            }
        }
        new.reverse();
        let parent = (at != self.root).then(|| short(at));
        let tokens = new.iter().flat_map(|hash| &self.pages[hash].tokens).copied().collect();
        (!new.is_empty()).then(|| Change::Stored { parent, hashes: new.iter().copied().map(short).collect(), tokens })
    }

    /// Takes back a page that leads to no state, and those before it that then lead to none.
    fn withdraw(&mut self, hash: PrefixHash) -> Option<Change> {
        let mut gone = Vec::new();
        let mut at = hash;
        while let Some(page) = self.pages.get_mut(&at).filter(|page| page.announced && !page.is_useful()) {
            page.announced = false;
            gone.push(short(at));
            at = page.parent;
            if let Some(parent) = self.pages.get_mut(&at) {
                parent.announced_children -= 1;
            }
        }
        (!gone.is_empty()).then_some(Change::Removed { hashes: gone })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: PrefixHash = PrefixHash(1 << 64);

    fn stored(hash: u128, parent: u128, has_state: bool) -> CacheEvent {
        let parent = if parent == 0 { ROOT } else { PrefixHash(parent) };
        CacheEvent::Stored { hash: PrefixHash(hash), parent, tokens: vec![hash as u32; 64].into(), has_state }
    }

    fn announced(parent: Option<u64>, hashes: &[u64]) -> Option<Change> {
        let tokens = hashes.iter().flat_map(|hash| [*hash as u32; 64]).collect();
        Some(Change::Stored { parent, hashes: hashes.to_vec(), tokens })
    }

    fn removed(hashes: &[u64]) -> Option<Change> {
        Some(Change::Removed { hashes: hashes.to_vec() })
    }

    #[test]
    fn pages_are_announced_up_to_the_deepest_state() {
        let mut ledger = Ledger::new(ROOT);
        assert_eq!(ledger.apply(&stored(1, 0, false)), None);
        assert_eq!(ledger.apply(&stored(2, 1, false)), None);
        assert_eq!(ledger.apply(&stored(3, 2, true)), announced(None, &[1, 2, 3]));
        assert_eq!(ledger.apply(&stored(4, 3, false)), None);
        assert_eq!(ledger.apply(&stored(5, 4, true)), announced(Some(3), &[4, 5]));
        // A state in the middle changes nothing, nor does its end.
        assert_eq!(ledger.apply(&stored(4, 3, true)), None);
        assert_eq!(ledger.apply(&stored(4, 3, false)), None);
        // A second branch.
        assert_eq!(ledger.apply(&stored(6, 2, true)), announced(Some(2), &[6]));
        // Without the deepest state its way is of no use either.
        assert_eq!(ledger.apply(&stored(5, 4, false)), removed(&[5, 4]));
        assert_eq!(ledger.apply(&stored(3, 2, false)), removed(&[3]));
        assert_eq!(ledger.apply(&CacheEvent::Removed { hash: PrefixHash(6) }), removed(&[6, 2, 1]));
        assert_eq!(ledger.apply(&CacheEvent::Cleared), None);
    }

    #[test]
    fn other_namespaces_are_not_announced() {
        let mut ledger = Ledger::new(ROOT);
        assert_eq!(ledger.apply(&stored(8, 99, true)), None);
        assert_eq!(ledger.apply(&stored(9, 8, true)), None);
        assert_eq!(ledger.apply(&CacheEvent::Removed { hash: PrefixHash(8) }), None);
        assert_eq!(ledger.apply(&stored(1, 0, true)), announced(None, &[1]));
        assert_eq!(ledger.apply(&CacheEvent::Cleared), Some(Change::Cleared));
    }

    #[test]
    fn host_memory_is_announced_for_the_own_namespace() {
        let mut ledger = Ledger::new(ROOT);
        let event = |root, stored| CacheEvent::Host { hash: PrefixHash(3 << 64 | 4), root, stored };
        assert_eq!(ledger.apply(&event(ROOT, true)), Some(Change::Host { hash: 4, stored: true }));
        assert_eq!(ledger.apply(&event(ROOT, false)), Some(Change::Host { hash: 4, stored: false }));
        assert_eq!(ledger.apply(&event(PrefixHash(99), true)), None);
    }

    /// After every event, what was announced and not removed is exactly the set of pages that lead to a state.
    #[test]
    fn random_trees() {
        use std::collections::HashSet;

        let mut seed = 7u64;
        let mut random = move |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..50 {
            let mut ledger = Ledger::new(ROOT);
            let mut known: HashSet<u64> = HashSet::new();
            // (hash, parent, state) of the pages in the tree.
            let mut tree: Vec<(u128, u128, bool)> = Vec::new();
            for hash in 1..80u128 {
                let event = match random(4) {
                    0 if !tree.is_empty() => {
                        let at = random(tree.len() as u64) as usize;
                        tree[at].2 = !tree[at].2;
                        stored(tree[at].0, tree[at].1, tree[at].2)
                    }
                    1 if !tree.is_empty() => {
                        let leaf = |at: &usize| !tree.iter().any(|page| page.1 == tree[*at].0);
                        let leaves: Vec<usize> = (0..tree.len()).filter(leaf).collect();
                        let at = leaves[random(leaves.len() as u64) as usize];
                        CacheEvent::Removed { hash: PrefixHash(tree.remove(at).0) }
                    }
                    _ => {
                        let parent = match random(tree.len() as u64 + 1) as usize {
                            0 => 0,
                            at => tree[at - 1].0,
                        };
                        tree.push((hash, parent, random(3) == 0));
                        stored(hash, parent, tree[tree.len() - 1].2)
                    }
                };
                match ledger.apply(&event) {
                    Some(Change::Stored { parent, hashes, tokens }) => {
                        assert_eq!(tokens.len(), 64 * hashes.len());
                        assert!(parent.is_none_or(|parent| known.contains(&parent)), "a parent that is not known");
                        assert!(hashes.into_iter().all(|hash| known.insert(hash)), "announced twice");
                    }
                    Some(Change::Removed { hashes }) => assert!(hashes.iter().all(|hash| known.remove(hash))),
                    Some(Change::Cleared | Change::Host { .. }) => unreachable!("nothing clears it"),
                    None => {}
                }
                let mut useful = HashSet::new();
                for page in tree.iter().filter(|page| page.2) {
                    let mut at = page.0;
                    while let Some(page) = tree.iter().find(|page| page.0 == at) {
                        useful.insert(at as u64);
                        at = page.1;
                    }
                }
                assert_eq!(known, useful);
            }
        }
    }
}
