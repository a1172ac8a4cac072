//! FNV-1a, 64 bits: distinguishes inputs that were not chosen to collide. The same on every machine and in every
//! version.

/// The hash of nothing.
pub const START: u64 = 0xcbf2_9ce4_8422_2325;

/// `before` continued by `bytes`.
pub fn hash(before: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(before, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values() {
        assert_eq!(hash(START, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(START, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash(hash(START, b"foo"), b"bar"), 0x8594_4171_f739_67e8);
    }
}
