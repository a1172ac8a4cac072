//! Linear layers on the CPU.

use crate::cpu::Buf;
use crate::cpu::gemm::{self, Product};
use crate::cpu::view;
use crate::format::Products;
use crate::ops::Matmul;

impl Matmul<Buf> {
    pub(super) fn run(&self, products: Products) {
        let x = view::read::<f32>(&self.x);
        let columns = self.columns.as_ref().map(view::read::<f32>);
        let bias = self.bias.as_ref().map(view::read::<f32>);
        let weights: Vec<_> = self.w.blocks.iter().map(|b| (b.col, view::read_bytes(b))).collect();
        let blocks: Vec<_> = weights.iter().map(|(col, w)| w.block(0, w.rows(), *col)).collect();
        let mut out = view::write(&self.out);
        let (x_ptr, x_stride) = x.raw();
        let (out_ptr, out_stride) = out.raw();
        let product = Product {
            x: x_ptr,
            x_stride,
            w: &blocks,
            out: out_ptr,
            out_stride,
            m: x.rows(),
            k: self.w.k,
            scale: self.scale,
            columns: columns.as_ref().map_or(std::ptr::null(), |c| c.flat().as_ptr()),
            bias: bias.as_ref().map_or(std::ptr::null(), |b| b.flat().as_ptr()),
            accumulate: self.accumulate,
            int8: products == Products::Fast,
        };
        // SAFETY: `check` compared the shapes; the views above hold the leases of all of them until the product is done.
        unsafe { gemm::matmul(&product) };
    }
}
