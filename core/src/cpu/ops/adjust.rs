//! Rules over logits on the CPU.

use crate::cpu::Buf;
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::{Adjust, ENTRY_WORDS, RuleWords};
use crate::step::NONE;

impl Adjust<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let logits = view::read::<f32>(&self.logits);
        let (rules, seen) = (view::read::<u32>(&self.rules), view::read::<u32>(&self.seen));
        let at = RuleWords { vocab: self.logits.row_len() };
        let mut out = view::write::<f32>(&self.out);
        let mut out = out.rows();
        let outputs = tables.output_token().iter().zip(tables.output_lane()).enumerate();
        for (o, (&token, &lane)) in outputs.filter(|(_, (token, _))| **token != NONE) {
            let (row, rules) = (out.row_mut(o), rules.row(lane as usize));
            row.copy_from_slice(logits.row(o));
            if rules[RuleWords::FLAGS] & RuleWords::RULED != 0 {
                let position = tables.positions()[token as usize] + 1;
                Lane { rules, at, seen: seen.row(lane as usize), position }.apply(row);
            }
        }
    }
}

/// A lane's rules for the token at `position`.
struct Lane<'a> {
    rules: &'a [u32],
    at: RuleWords,
    seen: &'a [u32],
    position: u32,
}

impl Lane<'_> {
    /// The steps of the contract, each over the whole row. No finite change makes minus infinity larger, so the first step is
    /// final.
    fn apply(&self, row: &mut [f32]) {
        let (rules, flags) = (self.rules, self.rules[RuleWords::FLAGS]);
        row.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NEG_INFINITY);
        if flags & RuleWords::MASKED != 0 {
            let mask = &rules[self.at.mask()..self.at.counts()];
            for (word, part) in mask.iter().zip(row.chunks_mut(32)).filter(|(word, _)| **word != u32::MAX) {
                let denied = part.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                denied.for_each(|(_, x)| *x = f32::NEG_INFINITY);
            }
        }
        let entries = &rules[self.at.entries()..][..ENTRY_WORDS * rules[RuleWords::ENTRIES] as usize];
        let (entries, _) = entries.as_chunks::<ENTRY_WORDS>();
        for &[id, bias, from] in entries {
            let x = &mut row[id as usize];
            *x = if self.position < from { f32::NEG_INFINITY } else { *x + f32::from_bits(bias) };
        }
        let penalty = f32::from_bits(rules[RuleWords::REPETITION]);
        if penalty != 1.0 {
            for (word, part) in self.seen.iter().zip(row.chunks_mut(32)).filter(|(word, _)| **word != 0) {
                for (_, x) in part.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 1) {
                    *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
                }
            }
        }
        if flags & RuleWords::COUNTED != 0 {
            let [frequency, presence] = [RuleWords::FREQUENCY, RuleWords::PRESENCE].map(|i| f32::from_bits(rules[i]));
            let counts = rules[self.at.counts()..].iter().zip(row);
            counts.filter(|(n, _)| **n > 0).for_each(|(&n, x)| *x = (*x - frequency * n as f32) - presence);
        }
    }
}
