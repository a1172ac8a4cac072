//! Counts and log probabilities of sampled tokens on the CPU.

use crate::cpu::Buf;
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::{Logprobs, MOST_TOP, RuleWords};
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
                write(logits.row(o), id, n as usize, report.row_mut(o));
            }
        }
    }
}

/// Writes the report of one position. The normaliser is a sum in f64 in the order of ids.
fn write(x: &[f32], id: u32, n: usize, report: &mut [f32]) {
    let value = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { x };
    let max = x.iter().copied().map(value).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = x.iter().map(|&x| f64::from(value(x) - max).exp()).sum();
    let log = sum.ln();
    let lp = |x: f32| (f64::from(value(x)) - f64::from(max) - log) as f32;
    let finite = max.is_finite();
    report[0] = if finite { lp(x[id as usize]) } else { f32::NEG_INFINITY };
    let mut best: [(f32, usize); MOST_TOP] = [(f32::NEG_INFINITY, 0); MOST_TOP];
    let mut found = 0;
    for (v, x) in x.iter().copied().map(value).enumerate().filter(|_| finite) {
        if x == f32::NEG_INFINITY || n == 0 || (found == n && x <= best[n - 1].0) {
            continue;
        }
        // After all that are at least as large: the lowest id comes first among equals.
        let place = best[..found].iter().take_while(|(other, _)| *other >= x).count();
        found = (found + 1).min(n);
        best[place..found].rotate_right(1);
        best[place] = (x, v);
    }
    let (pairs, _) = report[1..].as_chunks_mut::<2>();
    for (i, pair) in pairs[..n].iter_mut().enumerate() {
        *pair = if i < found { [best[i].1 as f32, lp(best[i].0)] } else { [-1.0, 0.0] };
    }
}
