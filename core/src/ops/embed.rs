//! Token embedding: `out[t] = scale * table[id(t)]`.

use super::{Access, Cost, Weight, ensure, expect};
use crate::backend::Handle;
use crate::cpu::simd::{Isa, LANES, Simd, dispatch};
use crate::cpu::tables::Tables;
use crate::cpu::{self, view, weight};
use crate::step::{FROM_DEVICE, Step};
use crate::tensor::{DType, Tensor};

/// Looks up the rows of the step's token ids. Padding tokens leave their output row as it is.
#[derive(Clone, Debug)]
pub struct Embed<Buf> {
    /// Token ids of the step; an id with [`crate::step::FROM_DEVICE`] names a lane of `last`.
    pub step: Step<Buf>,
    /// `[L] u32`: what each lane sampled last.
    pub last: Tensor<Buf>,
    /// `[V, D]`, row blocks at `col` = first vocabulary id of the block.
    pub table: Weight<Buf>,
    /// `[T, D]`.
    pub out: Tensor<Buf>,
    /// Factor on every element (Granite, Falcon-H1).
    pub scale: f32,
}

impl<Buf: Handle> Embed<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        let mut t = vec![(Access::Read, &self.step.ints), (Access::Read, &self.last), (Access::Write, &self.out)];
        t.extend(self.table.blocks.iter().map(|b| (Access::Read, &b.w)));
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let row = self.table.k * self.table.blocks[0].w.dtype.bytes();
        let bytes = self.step.bucket.tokens * row + self.out.len() * self.out.dtype.bytes();
        Cost { bytes: bytes as u64, flops: self.out.len() as u64 }
    }

    pub(super) fn check(&self) {
        expect("embed", "out", &self.out, &[self.step.bucket.tokens, self.table.k]);
        ensure!("embed", self.last.dims().len() == 1, "last is not a vector");
        self.table.check("embed");
    }
}

impl Embed<cpu::Buf> {
    pub(super) fn reference(&self) {
        let tables = Tables::of(&self.step);
        let last = view::read::<u32>(&self.last);
        let blocks: Vec<_> = self.table.blocks.iter().map(|b| (b.col, view::read_bytes(&b.w))).collect();
        let mut out = view::write(&self.out);
        let mut out = out.rows();
        for (t, &id) in tables.ids().iter().enumerate() {
            if tables.is_padding(t) {
                continue;
            }
            let id = if id & FROM_DEVICE != 0 { last.flat()[(id & !FROM_DEVICE) as usize] } else { id } as usize;
            let block = blocks.iter().find(|(col, rows)| (*col..col + rows.rows()).contains(&id));
            let Some((col, rows)) = block else { panic!("embed: token id {id} of {}", self.table.n) };
            let row = rows.row(id - col);
            dispatch!(Isa::best(), |s| scaled(s, row, rows.dtype, self.scale, out.row_mut(t)));
        }
    }
}

#[inline(always)]
fn scaled<S: Simd>(s: S, row: &[u8], dtype: DType, scale: f32, out: &mut [f32]) {
    for (row, out) in row.chunks(LANES * dtype.bytes()).zip(out.chunks_mut(LANES)) {
        s.store_partial(s.mul(weight::load(s, row, dtype), s.splat(scale)), out);
    }
}
