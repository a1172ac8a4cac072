//! The sum over ranks on the CPU.

use crate::cpu::{Buf, Member, view};
use crate::error::Result;
use crate::ops::AllReduce;

impl AllReduce<Buf> {
    pub(super) fn run(&self, member: &Member) -> Result<()> {
        let (x, d) = (view::read::<f32>(&self.x), self.x.row_len());
        let mut sum = vec![0.0; x.rows() * d];
        member.exchange(
            |own| (0..x.rows()).for_each(|t| own.extend_from_slice(x.row(t))),
            |_, values| sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x),
        )?;
        let mut out = view::write(&self.out);
        let mut out = out.rows();
        for (t, sum) in sum.chunks(d).enumerate() {
            match self.accumulate {
                true => out.row_mut(t).iter_mut().zip(sum).for_each(|(out, sum)| *out += sum),
                false => out.row_mut(t).copy_from_slice(sum),
            }
        }
        Ok(())
    }
}
