//! The name of a prefix outside of the tree: a cryptographic hash chained page by page.
//!
//! The tree compares tokens before it trusts a [`PrefixHash`](super::PrefixHash). Lower tiers keep values without tokens, where
//! a collision would give one prompt the state of another, so they go by these names.

use super::{GRID, Realm};
use crate::digest::{Digest, Hasher};

/// Names a prefix of whole pages under one model, its numerics and one realm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixKey(pub Digest);

impl PrefixKey {
    /// The empty prefix in `realm`. `identity` names the model and everything else that its states depend on.
    pub fn root(identity: &[u8], realm: &Realm) -> Self {
        let mut hasher = Hasher::default();
        for part in [&b"selkie prefix 1"[..], identity, realm.namespace.as_bytes(), realm.origin.as_bytes()] {
            // The length first: ("ab", "c") is not ("a", "bc").
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finish())
    }

    /// This prefix followed by one page of [`GRID`] tokens.
    #[must_use]
    pub fn child(self, page: &[u32]) -> Self {
        assert_eq!(page.len(), GRID);
        let mut bytes = [0; 32 + 4 * GRID];
        bytes[..32].copy_from_slice(&self.0.0);
        for (to, token) in bytes[32..].chunks_exact_mut(4).zip(page) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        Self(Digest::of(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn everything_counts() {
        let realm = |namespace: &str, origin: &str| Realm { namespace: namespace.into(), origin: origin.into() };
        let page: Vec<u32> = (0..64).collect();
        let mut other = page.clone();
        other[63] += 1;
        let mut seen = HashSet::new();
        for identity in [&b"model"[..], b"mode"] {
            for realm in [realm("", ""), realm("a", ""), realm("", "a"), realm("la", "")] {
                let root = PrefixKey::root(identity, &realm);
                for key in [root, root.child(&page), root.child(&other), root.child(&page).child(&page)] {
                    assert!(seen.insert(key));
                }
            }
        }
        // Files of a cache directory are named by it.
        let key = PrefixKey::root(b"model", &realm("tenant", "")).child(&page);
        assert_eq!(key.0.to_string().len(), 64);
    }
}
