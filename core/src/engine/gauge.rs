//! How the drafts of a request fared, and whether more of them pay.
//!
//! Decisions follow from counts and from fixed [costs](TokenCosts), so a run can be repeated.

use super::{draft::MOST_DRAFTS, verify::WIDTHS};
use crate::state::TokenCosts;

/// What is thought of drafts before one was tried.
const FIRST: f32 = 0.7;
/// Weight of the newest verdict.
const NEWEST: f32 = 1.0 / 8.0;
/// Rows without drafts after drafts have not paid: the first time, and the longest.
const REST: [u32; 2] = [16, 256];

/// Verdicts on the drafts of one request.
#[derive(Clone, Debug)]
pub(super) struct Gauge {
    /// How often the draft at each place was right lately, where those before it were.
    right: [f32; MOST_DRAFTS],
    /// Rows to come without drafts, and how many it will be the next time.
    rest: u32,
    next_rest: u32,
}

impl Default for Gauge {
    fn default() -> Self {
        Self { right: [FIRST; MOST_DRAFTS], rest: 0, next_rest: REST[0] }
    }
}

impl Gauge {
    /// Tokens that a row of `width` gives beyond its first, on average.
    pub fn gain(&self, width: usize) -> f32 {
        let mut all_right = 1.0;
        let reached = self.right[..width - 1].iter().map(|right| {
            all_right *= right;
            all_right
        });
        reached.sum()
    }

    /// So many of the drafts of a row were right.
    pub fn note(&mut self, drafts: usize, accepted: usize) {
        // Those after a wrong one were not tried.
        for (place, right) in self.right[..drafts.min(accepted + 1)].iter_mut().enumerate() {
            *right += NEWEST * (f32::from(u8::from(place < accepted)) - *right);
        }
        if accepted > 0 {
            self.next_rest = REST[0];
        }
        // Places that have none yet become as good as the last one that had.
        if let Some(last) = accepted.checked_sub(1).filter(|_| accepted == drafts) {
            let (tried, later) = self.right.split_at_mut(drafts);
            later.iter_mut().for_each(|right| *right += NEWEST * (tried[last] - *right));
        }
    }

    /// Drafts do not pay: none for some rows, then as if none had been tried. Longer every time.
    pub fn rest(&mut self) {
        self.rest = self.next_rest;
        self.next_rest = REST[1].min(2 * self.next_rest);
        self.right = [FIRST; MOST_DRAFTS];
    }

    /// For a new request, after the verdicts on others: as good as theirs lately.
    pub fn as_good(&self) -> Self {
        Self { right: self.right, ..Self::default() }
    }

    /// Whether drafts of some width would pay if the sequence were alone; `head`: what a pass costs that makes one.
    pub fn pays(&self, costs: &TokenCosts, head: f32) -> bool {
        let price = |width: usize| costs.of_more(1, width - 1) + head * (width - 1) as f32;
        WIDTHS.into_iter().any(|width| self.gain(width) >= price(width))
    }

    /// Whether the next row is one without drafts.
    pub fn is_resting(&self) -> bool {
        self.rest > 0
    }

    /// The same, at that row.
    pub fn rests(&mut self) -> bool {
        let rests = self.rest > 0;
        self.rest -= u32::from(rests);
        rests
    }
}

/// The width with the best rate; the first of several.
pub(super) fn best(rates: impl Iterator<Item = (f32, usize)>) -> Option<(f32, usize)> {
    rates.reduce(|best, next| if next.0 > best.0 { next } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_follow_the_verdicts() {
        let mut gauge = Gauge::default();
        assert!((gauge.gain(4) - (0.7 + 0.49 + 0.343)).abs() < 1e-6);
        (0..50).for_each(|_| gauge.note(7, 2));
        let gain = gauge.gain(8);
        assert!((1.9..2.1).contains(&gain), "{gain}");
        (0..50).for_each(|_| gauge.note(7, 0));
        let gain = gauge.gain(8);
        assert!((0.0..0.1).contains(&gain), "{gain}");
    }

    #[test]
    fn a_draft_that_is_always_right_makes_room_for_more() {
        let mut gauge = Gauge::default();
        (0..50).for_each(|_| gauge.note(1, 1));
        let gain = gauge.gain(8);
        assert!(gain > 6.5, "{gain}");
    }

    #[test]
    fn rests_become_longer_until_a_draft_is_right() {
        let mut gauge = Gauge::default();
        let mut lengths = Vec::new();
        for _ in 0..6 {
            gauge.rest();
            lengths.push((0..).take_while(|_| gauge.rests()).count());
        }
        assert_eq!(lengths, [16, 32, 64, 128, 256, 256]);
        gauge.note(1, 1);
        gauge.rest();
        assert_eq!((0..).take_while(|_| gauge.rests()).count(), 16);
    }

    #[test]
    fn a_new_request_begins_with_the_verdicts_on_others_and_no_rest() {
        let mut gauge = Gauge::default();
        (0..50).for_each(|_| gauge.note(7, 2));
        let mut next = gauge.as_good();
        let pays = |cost, head| next.pays(&TokenCosts::each(cost), head);
        assert!(next.gain(8) == gauge.gain(8) && pays(0.9, 0.0) && !pays(1.1, 0.0) && !pays(0.9, 0.2), "{next:?}");
        gauge.rest();
        assert!(gauge.is_resting() && !gauge.as_good().rests());
        next.rest();
        assert_eq!((0..).take_while(|_| next.rests()).count(), 16);
    }
}
