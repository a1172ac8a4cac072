//! Row selection on the CPU.

use crate::cpu::Buf;
use crate::cpu::tables::Tables;
use crate::cpu::view;
use crate::ops::Gather;
use crate::step::NONE;

impl Gather<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let x = view::read::<f32>(&self.x);
        let mut out = view::write(&self.out);
        let mut out = out.rows();
        for (o, &token) in tables.output_token().iter().enumerate() {
            match token {
                NONE => out.row_mut(o).fill(0.0),
                token => out.row_mut(o).copy_from_slice(x.row(token as usize)),
            }
        }
    }
}
