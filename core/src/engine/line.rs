//! The names of a request's whole pages in one realm.

use crate::{
    bundle::lineage,
    state::{Cache, GRID, PrefixHash, PrefixKey, Realm, cache::Match},
};

/// The realm of what was in this one and was converted for lower tiers, as `how` says.
pub(super) fn cold_realm(realm: &Realm, how: &str) -> Realm {
    Realm { namespace: realm.namespace.clone(), origin: lineage(&realm.origin, how) }
}

/// A realm that a request can be matched in, and the names of its pages there as far as they were needed.
#[derive(Debug)]
pub(super) struct Line {
    pub realm: Realm,
    root: PrefixHash,
    hashes: Vec<PrefixHash>,
    /// For lower tiers.
    keys: Vec<PrefixKey>,
}

impl Line {
    pub fn new(realm: Realm, cache: &Cache) -> Self {
        Self { root: cache.root_hash(&realm), realm, hashes: Vec::new(), keys: Vec::new() }
    }

    /// Computes the names of the first `pages` pages of `tokens`.
    pub fn extend(&mut self, tokens: &[u32], pages: usize) {
        for page in tokens.chunks_exact(GRID).take(pages).skip(self.hashes.len()) {
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            self.hashes.push(parent.child(page));
        }
    }

    /// The name of a page, which is computed.
    pub fn hash(&self, page: usize) -> PrefixHash {
        self.hashes[page]
    }

    /// The name of the empty prefix.
    pub fn root(&self) -> PrefixHash {
        self.root
    }

    /// How much of the first `pages` pages the tree has, whose names are computed. `step` is the step being planned.
    pub fn find(&self, cache: &Cache, tokens: &[u32], pages: usize, step: u64) -> Match {
        let named = self.hashes[..pages].iter().copied().zip(tokens.chunks_exact(GRID));
        cache.find(&self.realm, named, step)
    }

    /// Takes the names for lower tiers of its first pages from elsewhere, so that they are not computed again.
    pub fn adopt_keys(&mut self, keys: impl Iterator<Item = PrefixKey>) {
        self.keys.extend(keys.skip(self.keys.len()));
    }

    /// The names of the first `pages` pages of `tokens` for lower tiers; `root` is that of the empty prefix.
    pub fn keys(&mut self, root: PrefixKey, tokens: &[u32], pages: usize) -> &[PrefixKey] {
        for page in tokens.chunks_exact(GRID).take(pages).skip(self.keys.len()) {
            let parent = self.keys.last().copied().unwrap_or(root);
            self.keys.push(parent.child(page));
        }
        &self.keys[..pages]
    }
}
