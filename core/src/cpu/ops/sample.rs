//! Sampling on the CPU.

use crate::cpu::Buf;
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::Sample;
use crate::sample::{self, Sampling};
use crate::step::NONE;

impl Sample<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let logits = view::read::<f32>(&self.logits);
        let lanes = view::read::<u32>(&self.lanes);
        let mut scratch = Vec::new();
        let (mut seen, mut last, mut ids) =
            (view::write::<u32>(&self.seen), view::write::<u32>(&self.last), view::write::<u32>(&self.ids));
        let (mut seen, mut last, mut ids) = (seen.rows(), last.rows(), ids.rows());
        let outputs = tables.output_token().iter().zip(tables.output_lane()).enumerate();
        for (o, (&token, &lane)) in outputs.filter(|(_, (token, _))| **token != NONE) {
            let lane = lane as usize;
            let params =
                lanes.row(lane).try_into().map(Sampling::from_lane_words).expect("checked: LANE_WORDS columns");
            let position = tables.positions()[token as usize] + 1;
            let seen = seen.row_mut(lane);
            let id = sample::sample(logits.row(o), seen, &params, position, &mut scratch);
            if id != NONE {
                seen[id as usize / 32] |= 1 << (id % 32);
            }
            last.row_mut(lane)[0] = id;
            ids.row_mut(o)[0] = id;
        }
    }
}
