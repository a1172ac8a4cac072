//! How a number of bytes is split between slots and pages.
//!
//! The unit is one **cached path**: a sequence of the full context, with the two slots that it needs while it runs (its
//! state and the one it writes next), one for each draft and as many snapshots as a path may keep. Pages and slots are bought in that
//! proportion, so that a model with large states and a short context gets mostly slots and one with a long context
//! mostly pages. The remainder goes to the lanes without a whole path, two slots each, so that the batch can run
//! shorter sequences, and then in proportion. Memory that does not hold one whole path is halved, but slots get no more
//! than a path can use and no less than one sequence needs.

use super::{GRID, Limits, StateShape};
use crate::{Error, Result, units::thousands};

/// Slots that a running sequence uses at a time: its state, and the one that it writes next.
pub const RUNNING_SLOTS: u64 = 2;

/// Sizes of the two pools; the null slot and the null page are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Usable slots, 0 for a model without recurrent state.
    pub slots: usize,
    /// Usable pages, 0 for a model without attention.
    pub pages: usize,
}

impl Split {
    /// Splits `bytes`, null slot and null page included. `slots` and `pages` override the result of the split, even
    /// where they need more than `bytes`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if not even one slot and one page fit, [`Error::BadRequest`] for an override of 0 of
    /// something that the model needs.
    pub fn new(
        shape: &StateShape,
        limits: &Limits,
        bytes: u64,
        slots: Option<usize>,
        pages: Option<usize>,
    ) -> Result<Self> {
        let slots = slots.filter(|_| shape.has_slots());
        let pages = pages.filter(|_| shape.has_pages());
        for (count, name) in [(slots, "slot"), (pages, "KV page")] {
            if count == Some(0) {
                return Err(Error::BadRequest(format!("this model needs at least one {name}")));
            }
        }
        let (slot, page) = (shape.slot_bytes, shape.page_bytes);
        let left = bytes.saturating_sub(slot).saturating_sub(page);
        let fit = |bytes: u64, size: u64| bytes.checked_div(size).unwrap_or(0);
        let (slots, pages) = match (slots.map(|n| n as u64), pages.map(|n| n as u64)) {
            (Some(slots), Some(pages)) => (slots, pages),
            (Some(slots), None) => (slots, fit(left.saturating_sub(slots.saturating_mul(slot)), page)),
            (None, Some(pages)) => (fit(left.saturating_sub(pages.saturating_mul(page)), slot), pages),
            (None, None) => Self::share(shape, limits, left),
        };
        let short = (shape.has_slots() && slots == 0) || (shape.has_pages() && pages == 0);
        if short {
            let (slots, pages) = (slots.max(1), pages.max(1));
            let of = |count: u64, size: u64| (count.saturating_add(1)).saturating_mul(size);
            let asked = of(slots, slot).saturating_add(of(pages, page));
            let what = match (shape.has_slots(), shape.has_pages()) {
                (true, false) => format!("{} slots", thousands(slots)),
                (false, true) => format!("{} KV pages", thousands(pages)),
                _ => format!("{} slots and {} KV pages", thousands(slots), thousands(pages)),
            };
            return Err(Error::OutOfMemory { what, asked, free: bytes });
        }
        // Ids are u32.
        let count = |n: u64| n.min(u64::from(u32::MAX / 2)) as usize;
        Ok(Self { slots: count(slots), pages: count(pages) })
    }

    /// The most that batch and context can use, the null slot and page included: `max_batch` cached paths, or `slots`
    /// and `pages` where they are given. An override of one pool leaves the other its need.
    pub fn useful_bytes(shape: &StateShape, limits: &Limits, slots: Option<usize>, pages: Option<usize>) -> u64 {
        let pool = |given: Option<usize>, per_path: u64, size: u64| {
            let count = given.map_or_else(|| per_path.saturating_mul(limits.max_batch as u64), |n| n as u64);
            count.saturating_add(1).saturating_mul(size)
        };
        let slots = pool(slots, Self::path_slots(limits), shape.slot_bytes);
        slots.saturating_add(pool(pages, Self::path_pages(shape), shape.page_bytes))
    }

    /// Bytes of both pools, the null slot and page included.
    pub fn bytes(&self, shape: &StateShape) -> u64 {
        let pool = |count: usize, each: u64| (count as u64).saturating_add(1).saturating_mul(each);
        pool(self.slots, shape.slot_bytes).saturating_add(pool(self.pages, shape.page_bytes))
    }

    /// How many sequences of `length` tokens can run at a time.
    pub fn sequences(&self, shape: &StateShape, length: usize) -> usize {
        let by_slots = if shape.has_slots() { self.slots } else { usize::MAX };
        let by_pages = if shape.has_pages() { self.pages / length.div_ceil(GRID).max(1) } else { usize::MAX };
        by_slots.min(by_pages)
    }

    fn path_pages(shape: &StateShape) -> u64 {
        shape.context.div_ceil(GRID).max(1) as u64
    }

    fn path_slots(limits: &Limits) -> u64 {
        RUNNING_SLOTS + limits.drafts as u64 + if limits.prefix_cache { limits.path_cap as u64 } else { 0 }
    }

    fn path_bytes(shape: &StateShape, limits: &Limits) -> u64 {
        let pages = Self::path_pages(shape).saturating_mul(shape.page_bytes);
        pages.saturating_add(Self::path_slots(limits).saturating_mul(shape.slot_bytes))
    }

    /// (slots, pages) out of `bytes`, both null entries already taken off.
    fn share(shape: &StateShape, limits: &Limits, bytes: u64) -> (u64, u64) {
        let (slot, page) = (shape.slot_bytes, shape.page_bytes);
        let (path_pages, path_slots) = (Self::path_pages(shape), Self::path_slots(limits));
        if slot == 0 || page == 0 {
            return (bytes.checked_div(slot).unwrap_or(0), bytes.checked_div(page).unwrap_or(0));
        }
        let path = Self::path_bytes(shape, limits);
        let (paths, rest) = (bytes / path, bytes % path);
        if paths == 0 {
            let most = bytes.saturating_sub(page) / slot;
            let slots = (bytes / 2 / slot).clamp(RUNNING_SLOTS, path_slots).min(most);
            let pages = ((bytes - slots * slot) / page).min(path_pages);
            return (slots + (bytes - slots * slot - pages * page) / slot, pages);
        }
        let lanes = (limits.max_batch as u64).saturating_sub(paths);
        let running = (RUNNING_SLOTS * lanes).min(rest / slot);
        let rest = rest - running * slot;
        let pages = (u128::from(rest) * u128::from(path_pages) / u128::from(path)) as u64;
        (paths * path_slots + running + (rest - pages * page) / slot, paths * path_pages + pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(slot: u64, page: u64, context: usize, bytes: u64) -> Result<Split> {
        let shape = StateShape { slot_bytes: slot, page_bytes: page, context };
        let limits = Limits { max_batch: 8, ..Limits::default() };
        let split = Split::new(&shape, &limits, bytes, None, None)?;
        assert!(split.bytes(&shape) <= bytes, "{split:?} takes {} of {bytes}", split.bytes(&shape));
        Ok(split)
    }

    #[test]
    fn follows_what_the_model_needs() {
        // 64 pages and 10 slots a path; the null entries come off first.
        let path = 64 * 1000 + 10 * 5000;
        assert_eq!(split(5000, 1000, 4096, 6000 + 3 * path).unwrap(), Split { slots: 30, pages: 192 });
        let half = split(5000, 1000, 4096, 6000 + path / 2).unwrap();
        assert_eq!(half, Split { slots: 5, pages: 32 });
        // One whole path, and enough slots for the other seven lanes.
        assert_eq!(split(5000, 1000, 4096, 6000 + path + 14 * 5000).unwrap(), Split { slots: 24, pages: 64 });
        // A long context turns the same bytes into pages, a short one into slots.
        assert!(split(5000, 1000, 1 << 20, 1 << 30).unwrap().slots < split(5000, 1000, 64, 1 << 30).unwrap().slots);
        // Only one kind: all of it.
        assert_eq!(split(0, 1000, 4096, 11_000).unwrap(), Split { slots: 0, pages: 10 });
        assert_eq!(split(1000, 0, 4096, 11_000).unwrap(), Split { slots: 10, pages: 0 });
        assert_eq!(split(1000, 1000, 4096, 4000).unwrap(), Split { slots: 1, pages: 1 });
        assert!(matches!(split(1000, 1000, 4096, 3999), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn an_override_of_one_pool_leaves_the_other_what_it_needs() {
        let shape = StateShape { slot_bytes: 100, page_bytes: 10, context: 640 };
        let limits = Limits { max_batch: 4, ..Limits::default() };
        for (slots, pages) in
            [(None, None), (Some(1000), None), (None, Some(1000)), (Some(1), None), (Some(7), Some(3))]
        {
            let bytes = Split::useful_bytes(&shape, &limits, slots, pages);
            let expected = Split { slots: slots.unwrap_or(40), pages: pages.unwrap_or(40) };
            assert_eq!(Split::new(&shape, &limits, bytes, slots, pages).unwrap(), expected);
        }
    }

    #[test]
    fn overrides_win() {
        let shape = StateShape { slot_bytes: 100, page_bytes: 10, context: 640 };
        let limits = Limits::default();
        let new = |slots, pages| Split::new(&shape, &limits, 1110, slots, pages);
        assert_eq!(new(Some(4), None).unwrap(), Split { slots: 4, pages: 60 });
        assert_eq!(new(None, Some(50)).unwrap(), Split { slots: 5, pages: 50 });
        assert_eq!(new(Some(99), Some(99)).unwrap(), Split { slots: 99, pages: 99 });
        assert!(new(Some(0), None).is_err());
        // The error names the bytes requested, not the smallest configuration that could run.
        let Err(Error::OutOfMemory { what, asked, free }) = new(None, Some(1000)) else { panic!("that cannot fit") };
        assert_eq!((what.as_str(), asked, free), ("1 slots and 1,000 KV pages", 200 + 10_010, 1110));
        let pure = StateShape { slot_bytes: 0, ..shape };
        assert_eq!(Split::new(&pure, &limits, 1010, Some(7), None).unwrap(), Split { slots: 0, pages: 100 });
        let error = new(Some(99), None).unwrap_err().to_string();
        assert!(error.contains("99 slots and 1 KV pages"), "{error}");
        assert_eq!(Split { slots: 3, pages: 20 }.sequences(&shape, 300), 3);
        assert_eq!(Split { slots: 9, pages: 20 }.sequences(&shape, 300), 4);
    }
}
