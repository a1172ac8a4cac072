//! How much memory a page takes where its user does not say.

use selkie_core::{
    engine::EngineOptions,
    state::{Limits, StateShape, budget::Split},
};

const MIB: u64 = 1 << 20;
/// Sequences at a time: a chat, and another that arrives meanwhile.
pub const MAX_BATCH: usize = 2;
/// Longest sequence; published models allow far more than a page has memory for.
pub const MAX_CONTEXT: usize = 8192;
/// Most bytes for states and pages, whatever the model.
const MOST: u64 = 256 * MIB;
/// States and pages of a small model may take more than its weights.
const LEAST: u64 = 64 * MIB;

/// Bytes for states and pages: half of what the weights take, within 64 and 256 MiB, a 32nd of the machine's memory where
/// the browser tells it (`memory`, in bytes), and no more than batch and context can use; but one whole sequence has room.
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
