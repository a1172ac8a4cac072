//! The columns of all ranks on the CPU.

use crate::cpu::{Buf, Member, view};
use crate::error::Result;
use crate::ops::AllGather;

impl AllGather<Buf> {
    pub(super) fn run(&self, member: &Member) -> Result<()> {
        let (x, n) = (view::read::<f32>(&self.x), self.x.row_len());
        let mut out = view::write(&self.out);
        let mut out = out.rows();
        member.exchange(
            |own| (0..x.rows()).for_each(|t| own.extend_from_slice(x.row(t))),
            |rank, values| {
                for (t, values) in values.chunks(n).enumerate() {
                    out.row_mut(t)[rank * n..][..n].copy_from_slice(values);
                }
            },
        )
    }
}
