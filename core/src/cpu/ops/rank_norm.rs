//! The RMS norm of rows that lie on several ranks, on the CPU.

use super::rms_norm::{gated, scaled};
use crate::cpu::simd::{Isa, dispatch};
use crate::cpu::{Buf, Member, view};
use crate::error::Result;
use crate::ops::RankNorm;

impl RankNorm<Buf> {
    pub(super) fn run(&self, member: &Member) -> Result<()> {
        let norm = &self.norm;
        let (x, weight) = (view::read::<f32>(&norm.x), view::read::<f32>(&norm.weight));
        let gate = norm.gate.as_ref().map(|g| (view::read::<f32>(&g.z), g.act, g.before));
        let gate = |t: usize| gate.as_ref().map(|(z, act, before)| (z.row(t), *act, *before));
        let mut out = view::write(&norm.out);
        let mut out = out.rows();
        let first = member.rank() / self.ranks * self.ranks;
        let mut squares = vec![0.0; x.rows()];
        member.exchange(
            |own| {
                for t in 0..x.rows() {
                    own.push(dispatch!(Isa::best(), |s| gated(s, x.row(t), gate(t), out.row_mut(t))));
                }
            },
            |rank, sums| {
                if (first..first + self.ranks).contains(&rank) {
                    squares.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
                }
            },
        )?;
        let columns = (norm.x.row_len() * self.ranks) as f32;
        for (t, squares) in squares.into_iter().enumerate() {
            let factor = 1.0 / (squares / columns + norm.eps).sqrt();
            dispatch!(Isa::best(), |s| scaled(s, factor, weight.flat(), gate(t), out.row_mut(t)));
        }
        Ok(())
    }
}
