//! The name of a prefix: a 128-bit hash chained page by page, the same in every process and on every machine.
//!
//! It mixes the model's fingerprint, the namespace and all tokens so far. It is not a cryptographic hash: the tree compares
//! the tokens themselves before it trusts a match, so that a collision costs a miss and never a wrong text.

use super::{GRID, Realm};

/// Names a prefix of whole pages under one model and one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixHash(pub u128);

impl PrefixHash {
    /// The empty prefix in `namespace` of the model that `fingerprint` names.
    pub fn root(fingerprint: &[u8], namespace: &str) -> Self {
        Self::of_parts(&[fingerprint, namespace.as_bytes()])
    }

    /// The empty prefix in `realm`, whose origin is a part of the name unless it is empty.
    pub fn root_of(fingerprint: &[u8], realm: &Realm) -> Self {
        let Realm { namespace, origin } = realm;
        match origin.as_str() {
            "" => Self::root(fingerprint, namespace),
            origin => Self::of_parts(&[fingerprint, namespace.as_bytes(), origin.as_bytes()]),
        }
    }

    fn of_parts(parts: &[&[u8]]) -> Self {
        let mut mixer = Mixer { a: 0x243f_6a88_85a3_08d3, b: 0x1319_8a2e_0370_7344 };
        for part in parts {
            // The length first: ("ab", "c") is not ("a", "bc").
            mixer.absorb(part.len() as u64);
            for word in part.chunks(8) {
                let mut bytes = [0; 8];
                bytes[..word.len()].copy_from_slice(word);
                mixer.absorb(u64::from_le_bytes(bytes));
            }
        }
        mixer.finish()
    }

    /// This prefix followed by one page of [`GRID`] tokens.
    pub fn child(self, page: &[u32]) -> Self {
        assert_eq!(page.len(), GRID);
        let mut mixer = Mixer { a: self.0 as u64, b: (self.0 >> 64) as u64 };
        for pair in page.chunks_exact(2) {
            mixer.absorb(u64::from(pair[0]) | u64::from(pair[1]) << 32);
        }
        mixer.finish()
    }
}

/// Two 64-bit lanes. Every step is a bijection of (a, b) for a fixed word, so no step loses what came before.
struct Mixer {
    a: u64,
    b: u64,
}

impl Mixer {
    fn absorb(&mut self, word: u64) {
        self.a = (self.a ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.a = (self.a ^ (self.a >> 29)).wrapping_add(self.b.rotate_left(23));
        self.b = (self.b ^ word.rotate_left(32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.b = (self.b ^ (self.b >> 31)).wrapping_add(self.a.rotate_left(41));
    }

    fn finish(mut self) -> PrefixHash {
        for _ in 0..3 {
            self.absorb(0x4528_21e6_38d0_1377);
        }
        PrefixHash(u128::from(self.a) | u128::from(self.b) << 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn stable_across_processes() {
        let root = PrefixHash::root(b"model", "tenant");
        let page: Vec<u32> = (0..64).collect();
        // Values of the first release: a saved session is keyed by them.
        assert_eq!(format!("{:032x}", root.0), "6537f5e6ea879da6e8687c1502d6dde7");
        assert_eq!(format!("{:032x}", root.child(&page).0), "18decd98a4a575a1ab240fa796145fcd");
        let realm = |origin: &str| Realm { namespace: "tenant".into(), origin: origin.into() };
        assert_eq!(PrefixHash::root_of(b"model", &realm("")), root);
        assert_ne!(PrefixHash::root_of(b"model", &realm("elsewhere")), root);
    }

    #[test]
    fn everything_counts() {
        let page: Vec<u32> = (0..64).collect();
        let mut seen = HashSet::new();
        for (model, namespace) in [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("a", "bd")] {
            let root = PrefixHash::root(model.as_bytes(), namespace);
            assert!(seen.insert(root));
            assert!(seen.insert(root.child(&page)));
            assert!(seen.insert(root.child(&page).child(&page)));
            for i in 0..64 {
                for bit in 0..32 {
                    let mut other = page.clone();
                    other[i] ^= 1 << bit;
                    assert!(seen.insert(root.child(&other)));
                }
            }
        }
        let half: HashSet<u64> = seen.iter().map(|h| h.0 as u64).collect();
        assert_eq!(half.len(), seen.len(), "each half must be good on its own");
    }
}
