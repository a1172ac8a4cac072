//! The default memory budget of a page.

use selkie_core::{
    engine::EngineOptions,
    state::{Limits, StateShape, budget::Split},
};

const MIB: u64 = 1 << 20;
/// Default number of concurrent sequences: a chat, and a second request that arrives meanwhile.
pub const MAX_BATCH: usize = 2;
/// Default context in tokens; published models allow far more than a page has memory for.
pub const MAX_CONTEXT: usize = 8192;
/// Maximum bytes for states and pages.
const MOST: u64 = 256 * MIB;
/// Minimum of the budget: states and pages of a small model may need more memory than its weights.
const LEAST: u64 = 64 * MIB;

/// Bytes for states and pages: half the size of the weights, between 64 and 256 MiB, at most a 32nd of the machine's memory if the
/// browser reports it (`memory`, in bytes), and at most the bytes that batch and context can use; but always enough for one whole
/// sequence.
pub fn memory(shape: &StateShape, options: &EngineOptions, weights: u64, memory: Option<u64>) -> u64 {
    let limits = Limits { max_batch: options.max_batch, prefix_cache: options.prefix_cache, ..Limits::default() };
    let useful = Split::useful_bytes(shape, &limits, None, None);
    let bytes = (weights / 2).clamp(LEAST, MOST).min(memory.map_or(MOST, |m| m / 32));
    let pages = shape.context.div_ceil(selkie_core::state::GRID) as u64 + 1;
    let least = (4 * shape.slot_bytes).saturating_add(pages.saturating_mul(shape.page_bytes));
    bytes.max(least).min(useful)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_gets_room_and_a_large_one_not_all() {
        let options = EngineOptions { max_batch: 2, ..EngineOptions::default() };
        let demo = StateShape { slot_bytes: 971_264, page_bytes: 262_144, context: 8192 };
        assert_eq!(memory(&demo, &options, 14 * MIB, None), 64 * MIB);
        // A phone of 1 GiB: a whole context still fits.
        assert_eq!(memory(&demo, &options, 14 * MIB, Some(1 << 30)), 4 * 971_264 + 129 * 262_144);
        let large = StateShape { slot_bytes: 20 * MIB, page_bytes: MIB, context: 8192 };
        assert_eq!(memory(&large, &options, 3000 * MIB, Some(8 << 30)), 256 * MIB);
        let tiny = StateShape { slot_bytes: 1000, page_bytes: 0, context: 8192 };
        assert_eq!(memory(&tiny, &options, MIB, None), 21_000);
    }
}
