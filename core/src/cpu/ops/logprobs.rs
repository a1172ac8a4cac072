//! Counts and log probabilities of sampled tokens on the CPU.

use crate::cpu::Buf;
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::{Logprobs, RuleWords};
use crate::sample;
use crate::step::NONE;

impl Logprobs<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let (logits, ids) = (view::read::<f32>(&self.logits), view::read::<u32>(&self.ids));
        let counts = RuleWords { vocab: self.logits.row_len() }.counts();
        let (mut rules, mut report) = (view::write::<u32>(&self.rules), view::write::<f32>(&self.report));
        let (mut rules, mut report) = (rules.rows(), report.rows());
        let outputs = tables.output_token().iter().zip(tables.output_lane()).enumerate();
        for (o, (_, &lane)) in outputs.filter(|(_, (token, _))| **token != NONE) {
            let (id, rules) = (ids.row(o)[0], rules.row_mut(lane as usize));
            if id == NONE {
                continue;
            }
            if rules[RuleWords::FLAGS] & RuleWords::COUNTED != 0 {
                rules[counts + id as usize] += 1;
            }
            if let Some(n) = rules[RuleWords::TOP].checked_sub(1) {
                sample::report(logits.row(o), id, n as usize, report.row_mut(o));
            }
        }
    }
}
