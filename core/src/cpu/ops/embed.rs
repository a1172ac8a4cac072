//! Token embedding on the CPU.

use crate::cpu::Buf;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::{view, weight};
use crate::format::Format;
use crate::ops::Embed;
use crate::step::{FROM_DEVICE, NONE};
use crate::tensor::DType;

impl Embed<Buf> {
    pub(super) fn run(&self) {
        let tables = Tables::of(&self.step);
        let last = view::read::<u32>(&self.last);
        let blocks: Vec<_> = self.table.blocks.iter().map(|b| (b.col, view::read_bytes(b))).collect();
        let mut out = view::write(&self.out);
        let mut out = out.rows();
        for (t, &id) in tables.ids().iter().enumerate() {
            if tables.is_padding(t) {
                continue;
            }
            let id = if id & FROM_DEVICE != 0 { last.flat()[(id & !FROM_DEVICE) as usize] } else { id };
            if id == NONE {
                continue;
            }
            let id = id as usize;
            let block = blocks.iter().find(|(col, rows)| (*col..col + rows.rows()).contains(&id));
            let Some((col, rows)) = block else { panic!("embed: token id {id} of {}", self.table.n) };
            let row = rows.row(id - col);
            dispatch!(Isa::best(), |s| scaled(s, row, (rows.dtype, rows.format), self.scale, out.row_mut(t)));
        }
    }
}

#[inline(always)]
fn scaled<S: Simd>(s: S, row: &[u8], (dtype, format): (DType, Format), scale: f32, out: &mut [f32]) {
    if format != Format::Plain {
        for (x, out) in format.decode(row).into_iter().zip(out) {
            *out = x * scale;
        }
        return;
    }
    for (row, out) in row.chunks(LANES * dtype.bytes()).zip(out.chunks_mut(LANES)) {
        s.store_partial(s.mul(weight::load(s, row, dtype), s.splat(scale)), out);
    }
}
