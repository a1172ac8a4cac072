//! The bytes of KV events: vLLM's batches in MessagePack, as maps (vLLM since 0.26, SGLang) or by position (before).

use selkie_core::state::GRID;
use serde::Serialize;

use super::ledger::Change;
use crate::args::KvFormat;

/// Where the pages are, as far as consumers tell places apart.
const MEDIUM: &str = "GPU";
/// Host memory, in the same terms. As vLLM does there, events name blocks by their hashes only.
const HOST: &str = "CPU";
/// The kind of cache group that indexers count.
const KIND: &str = "full_attention";

#[derive(Serialize)]
#[serde(tag = "type")]
enum Named<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: usize,
        medium: &'static str,
        group_idx: u32,
        kv_cache_spec_kind: &'static str,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
        group_idx: u32,
    },
    AllBlocksCleared {},
}

/// As [`Named`]: tag, hashes, parent, tokens, block size, LoRA id, medium, LoRA name, extra keys, group, kind.
#[derive(Serialize)]
struct Stored<'a>(
    &'static str,
    &'a [u64],
    Option<u64>,
    &'a [u32],
    usize,
    Option<u32>,
    &'static str,
    Option<&'static str>,
    Option<u32>,
    u32,
    &'static str,
);

#[derive(Serialize)]
#[serde(untagged)]
enum Placed<'a> {
    Stored(Stored<'a>),
    Removed(&'static str, &'a [u64], &'static str, u32),
    Cleared([&'static str; 1]),
}

/// A batch: `[seconds since 1970, [event, ...], rank]`.
pub fn batch(seconds: f64, changes: &[Change], format: KvFormat) -> Vec<u8> {
    let bytes = match format {
        KvFormat::Map => {
            let events: Vec<_> = changes.iter().map(named).collect();
            rmp_serde::to_vec_named(&(seconds, events, 0u32))
        }
        KvFormat::Positional => {
            let events: Vec<_> = changes.iter().map(placed).collect();
            rmp_serde::to_vec(&(seconds, events, 0u32))
        }
    };
    bytes.expect("numbers and texts have an encoding")
}

fn named(change: &Change) -> Named<'_> {
    match change {
        Change::Stored { parent, hashes, tokens } => Named::BlockStored {
            block_hashes: hashes,
            parent_block_hash: *parent,
            token_ids: tokens,
            block_size: GRID,
            medium: MEDIUM,
            group_idx: 0,
            kv_cache_spec_kind: KIND,
        },
        Change::Removed { hashes } => Named::BlockRemoved { block_hashes: hashes, medium: MEDIUM, group_idx: 0 },
        Change::Host { hash, stored: true } => Named::BlockStored {
            block_hashes: std::slice::from_ref(hash),
            parent_block_hash: None,
            token_ids: &[],
            block_size: GRID,
            medium: HOST,
            group_idx: 0,
            kv_cache_spec_kind: KIND,
        },
        Change::Host { hash, stored: false } => {
            Named::BlockRemoved { block_hashes: std::slice::from_ref(hash), medium: HOST, group_idx: 0 }
        }
        Change::Cleared => Named::AllBlocksCleared {},
    }
}

fn placed(change: &Change) -> Placed<'_> {
    match change {
        Change::Stored { parent, hashes, tokens } => {
            let stored = Stored("BlockStored", hashes, *parent, tokens, GRID, None, MEDIUM, None, None, 0, KIND);
            Placed::Stored(stored)
        }
        Change::Removed { hashes } => Placed::Removed("BlockRemoved", hashes, MEDIUM, 0),
        Change::Host { hash, stored: true } => {
            let hashes = std::slice::from_ref(hash);
            Placed::Stored(Stored("BlockStored", hashes, None, &[], GRID, None, HOST, None, None, 0, KIND))
        }
        Change::Host { hash, stored: false } => Placed::Removed("BlockRemoved", std::slice::from_ref(hash), HOST, 0),
        Change::Cleared => Placed::Cleared(["AllBlocksCleared"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_both_formats() {
        let removed = Change::Removed { hashes: vec![7, 1 << 63] };
        let map = batch(1.5, &[removed.clone(), Change::Cleared], KvFormat::Map);
        let mut expected = vec![0x93, 0xcb];
        expected.extend(1.5f64.to_be_bytes());
        expected.extend([0x92, 0x84]);
        let text = |out: &mut Vec<u8>, text: &str| {
            out.push(0xa0 | text.len() as u8);
            out.extend(text.as_bytes());
        };
        let hashes = [0x92, 7, 0xcf, 0x80, 0, 0, 0, 0, 0, 0, 0];
        text(&mut expected, "type");
        text(&mut expected, "BlockRemoved");
        text(&mut expected, "block_hashes");
        expected.extend(hashes);
        text(&mut expected, "medium");
        text(&mut expected, "GPU");
        text(&mut expected, "group_idx");
        expected.extend([0, 0x81]);
        text(&mut expected, "type");
        text(&mut expected, "AllBlocksCleared");
        expected.push(0);
        assert_eq!(map, expected);

        let placed = batch(1.5, &[removed, Change::Cleared], KvFormat::Positional);
        expected.truncate(10);
        expected.extend([0x92, 0x94]);
        text(&mut expected, "BlockRemoved");
        expected.extend(hashes);
        text(&mut expected, "GPU");
        expected.extend([0, 0x91]);
        text(&mut expected, "AllBlocksCleared");
        expected.push(0);
        assert_eq!(placed, expected);
    }
}
