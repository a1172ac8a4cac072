//! Cases of `matmul`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, dot};
use selkie_core::backend::Handle;
use selkie_core::format::Format;
use selkie_core::ops::{Matmul, Op, Weight};
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Product {
    m: usize,
    n: usize,
    k: usize,
    dtype: DType,
    /// Of the weight; other than plain, whatever the dtype.
    format: Format,
    /// Row blocks `(first column, columns)` in the order of the list; none = one block of all.
    blocks: Vec<(usize, usize)>,
    /// All blocks are parts of one buffer.
    one_buffer: bool,
    /// The first block is plain.
    mixed: bool,
    /// A factor per column.
    columns: bool,
    bias: bool,
    scale: f32,
    accumulate: bool,
    /// f32 with every activation dtype.
    out_f32: bool,
    /// Gaps between the rows of x and out, and of the weight.
    views: bool,
}

impl Product {
    fn blocks(&self) -> Vec<(usize, usize)> {
        if self.blocks.is_empty() { vec![(0, self.n)] } else { self.blocks.clone() }
    }
}

impl Spec for Product {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = Host { int8: d.int8.takes(self.m, self.n * self.k) && self.format.is_integer(), ..Host::default() };
        h.float("x", d.act, &[self.m, self.k], rng.vec(self.m * self.k, 1.0));
        let blocks = self.blocks();
        let scale = 1.0 / (self.k as f32).sqrt();
        let mut lead = 0;
        for (i, &(_, n)) in blocks.iter().enumerate() {
            let name = format!("w{i}");
            let format = if self.mixed && i == 0 { Format::Plain } else { self.format };
            h.weight(&name, (self.dtype, format), &[n, self.k], scale, rng);
            if self.one_buffer {
                h.share(&name, "w0", lead);
                lead += n * self.k;
            } else if self.views {
                h.spread(&name, 0, 8);
            }
        }
        if self.columns {
            h.float("columns", DType::F32, &[self.n], rng.vec(self.n, 1.0));
        }
        if self.bias {
            h.float("bias", DType::F32, &[self.n], rng.vec(self.n, 1.0));
        }
        let out = if self.out_f32 { DType::F32 } else { d.act };
        if self.accumulate {
            h.float("out", out, &[self.m, self.n], rng.vec(self.m * self.n, 1.0));
        } else {
            h.out("out", out, &[self.m, self.n]);
        }
        if self.views {
            h.spread("x", 4, 8);
            h.spread("out", 8, 12);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (x, before) = (h.factors("x"), h.get("out"));
        let mut out = vec![Want::Keep; self.m * self.n];
        for (i, (col, n)) in self.blocks().into_iter().enumerate() {
            let w = h.get(&format!("w{i}"));
            for r in 0..self.m {
                for j in 0..n {
                    let at = r * self.n + col + j;
                    let mut y = f64::from(self.scale) * dot(&x[r * self.k..][..self.k], &w[j * self.k..][..self.k]);
                    if self.columns {
                        y *= f64::from(h.get("columns")[col + j]);
                    }
                    if self.bias {
                        y += f64::from(h.get("bias")[col + j]);
                    }
                    if self.accumulate {
                        y += f64::from(before[at]);
                    }
                    out[at] = Want::Near(y);
                }
            }
        }
        vec![("out", out)]
    }

    fn format(&self) -> Format {
        self.format
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let block = |(i, (col, _))| b.block(&format!("w{i}"), col);
        let blocks = self.blocks().into_iter().enumerate().map(block).collect();
        Matmul {
            x: b.t("x"),
            w: Weight { blocks, n: self.n, k: self.k },
            columns: b.opt("columns"),
            bias: b.opt("bias"),
            out: b.t("out"),
            scale: self.scale,
            accumulate: self.accumulate,
            precise: false,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Product {
        m: 5,
        n: 36,
        k: 64,
        dtype: DType::Bf16,
        format: Format::Plain,
        blocks: vec![],
        one_buffer: false,
        mixed: false,
        columns: false,
        bias: false,
        scale: 1.0,
        accumulate: false,
        out_f32: false,
        views: false,
    };
    to.add("base", base.clone());
    for (name, dtype) in [("f32", DType::F32), ("f16", DType::F16)] {
        for m in [1, 5, 70] {
            to.add(&format!("{name} weight, {m} rows"), Product { dtype, m, ..base.clone() });
        }
    }
    // Rows of three blocks of the longest kind: none begins at a word where blocks are not whole words.
    for format in Format::CODED.into_iter().chain(Format::SCALED) {
        let coded = Product { format, k: 768, n: 37, ..base.clone() };
        for m in [1, 5, 9, 15, 16, 17, 33, 48, 63, 64, 70] {
            to.add(&format!("{} weight, {m} rows", format.name()), Product { m, ..coded.clone() });
        }
        let all = Product { columns: true, scale: 0.22, bias: true, accumulate: true, ..coded };
        let all = Product { blocks: vec![(30, 7), (0, 4), (4, 26)], ..all };
        let name = format!("{} weight, factors of columns, scale, bias, residual, row blocks", format.name());
        let fours = vec![(32, 4), (0, 4), (4, 28)];
        to.add(&format!("{name}, 40 rows"), Product { m: 40, n: 36, blocks: fours, ..all.clone() });
        to.add(&name, all);
    }
    let mixed =
        Product { format: Format::F8, mixed: true, k: 256, n: 48, blocks: vec![(32, 16), (0, 32)], ..base.clone() };
    for m in [1, 5, 40, 70] {
        to.add(&format!("plain and coded row blocks, {m} rows"), Product { m, ..mixed.clone() });
    }
    // A row of which half of the last 64 elements is missing.
    for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::Iq4Nl, Format::Mxfp4] {
        for m in [1, 5, 12, 64] {
            let odd = Product { format, k: 96, m, ..base.clone() };
            to.add(&format!("{} weight, inner dim 96, {m} rows", format.name()), odd);
        }
    }
    for m in [1, 2, 3, 4, 8, 16, 33, 64, 130] {
        to.add(&format!("{m} rows"), Product { m, ..base.clone() });
    }
    // The skinny kernels keep x in shared memory, which is tightest at small inner dimensions.
    for k in [256, 512, 768, 1024, 1544] {
        for m in [3, 6, 8] {
            to.add(&format!("few rows, {m} x {k}"), Product { m, k, ..base.clone() });
        }
    }
    for k in [4, 12, 60, 68, 252, 516, 2052] {
        for m in [1, 17] {
            to.add(&format!("inner dim {k}, {m} rows"), Product { k, m, ..base.clone() });
        }
    }
    // The rank of the time step of a Mamba-1 of width 80, and others that are not read four at a time.
    for k in [1, 5, 13, 254] {
        for m in [1, 17] {
            let odd = Product { k, m, columns: true, bias: true, accumulate: true, scale: 0.22, ..base.clone() };
            to.add(&format!("inner dim {k}, {m} rows, f32"), Product { dtype: DType::F32, ..odd.clone() });
            to.add(&format!("inner dim {k}, {m} rows, bf16"), odd);
        }
    }
    for n in [1, 4, 7, 66, 260] {
        for m in [1, 17] {
            to.add(&format!("{n} columns, {m} rows"), Product { n, m, ..base.clone() });
        }
    }
    // Enough columns for the largest tiles.
    to.add("130 x 4100 x 64", Product { m: 130, n: 4100, ..base.clone() });
    let wide = Product { m: 67, n: 132, k: 196, ..base.clone() };
    to.add("67 x 132 x 196", wide.clone());
    // Kernels that take the inner dimension in slices may require whole slices.
    let slices = Product { k: 192, ..wide.clone() };
    let kinds = [("one row", Product { m: 1, ..base.clone() }), ("many rows", wide), ("many rows, slices", slices)];
    for (name, base) in kinds {
        to.add(&format!("bias, {name}"), Product { bias: true, ..base.clone() });
        to.add(&format!("scale, {name}"), Product { scale: 0.22, ..base.clone() });
        to.add(&format!("factors of columns, {name}"), Product { columns: true, ..base.clone() });
        let all = Product { columns: true, scale: 0.22, bias: true, accumulate: true, ..base.clone() };
        to.add(&format!("factors of columns, scale, bias, residual, {name}"), all);
        to.add(&format!("residual, {name}"), Product { accumulate: true, ..base.clone() });
        to.add(
            &format!("scale, bias, residual, {name}"),
            Product { scale: 0.22, bias: true, accumulate: true, ..base.clone() },
        );
        to.add(&format!("f32 out, {name}"), Product { out_f32: true, ..base.clone() });
        to.add(&format!("columns of wider matrices, {name}"), Product { views: true, ..base.clone() });
        to.add(
            &format!("residual in a wider matrix, {name}"),
            Product { views: true, accumulate: true, ..base.clone() },
        );
        let n = base.n;
        let blocks = vec![(n - 8, 8), (0, 4), (20, n - 28), (4, 16)];
        to.add(&format!("row blocks, {name}"), Product { blocks: blocks.clone(), ..base.clone() });
        let one = Product { blocks, one_buffer: true, columns: true, bias: true, accumulate: true, ..base.clone() };
        to.add(&format!("row blocks of one buffer, {name}"), one);
        let odd = vec![(0, 3), (3, 1), (4, n - 4)];
        to.add(&format!("odd row blocks, {name}"), Product { blocks: odd, dtype: DType::F32, ..base });
    }
    // Kernels may split a long inner dimension where there are few tiles.
    let long = Product { m: 67, n: 132, k: 4128, ..base.clone() };
    to.add("67 x 132 x 4128", long.clone());
    let all = Product { scale: 0.22, bias: true, accumulate: true, views: true, ..long };
    to.add("67 x 132 x 4128, scale, bias, residual in a wider matrix", all.clone());
    for m in [12, 40] {
        let few = Product { m, k: 4160, ..all.clone() };
        to.add(&format!("{m} x 132 x 4160, scale, bias, residual in a wider matrix"), few);
    }
    // Slices may be longer where the inner dimension allows, and the last part shorter than the others.
    for m in [12, 24, 40] {
        let few = Product { m, k: 4352, ..all.clone() };
        to.add(&format!("{m} x 132 x 4352, scale, bias, residual in a wider matrix"), few);
    }
    // The shapes of a library's product.
    for m in [12, 40] {
        let both = Product { m, k: 4160, columns: true, bias: true, ..base.clone() };
        to.add(&format!("{m} x 36 x 4160, factors of columns, bias"), both);
    }
    to.add("24 x 132 x 4128", Product { m: 24, n: 132, k: 4128, ..base.clone() });
    to.add("24 x 66 x 512", Product { m: 24, n: 66, k: 512, ..base.clone() });
    to.sized(Size::Large, "1 x 1030 x 4096", Product { m: 1, n: 1030, k: 4096, ..base.clone() });
    to.sized(Size::Large, "300 x 516 x 512", Product { m: 300, n: 516, k: 512, ..base.clone() });
    for m in [1, 8] {
        to.sized(Size::Bench, &format!("{m} x 18560 x 4096"), Product { m, n: 18560, k: 4096, ..base.clone() });
        to.sized(
            Size::Bench,
            &format!("{m} x 4096 x 21504"),
            Product { m, n: 4096, k: 21504, accumulate: true, ..base.clone() },
        );
    }
    // Long enough for the kernel in which every warp streams its own rows of W.
    let all = Product { m: 2, columns: true, scale: 0.22, bias: true, accumulate: true, ..base.clone() };
    to.sized(Size::Bench, "2 x 18560 x 4096", Product { n: 18560, k: 4096, ..all.clone() });
    to.sized(Size::Bench, "2 x 36000 x 768", Product { n: 36000, k: 768, ..all.clone() });
    // A row of several stages, the last one shorter.
    to.sized(Size::Bench, "2 x 4480 x 15680", Product { n: 4480, k: 15680, ..all.clone() });
    // So long that the warps of a block share its rows.
    to.sized(Size::Bench, "2 x 4300 x 16392", Product { n: 4300, k: 16392, ..all.clone() });
    // Longer still: little of a row, or nothing of a shared one, fits into shared memory with x.
    to.sized(Size::Bench, "1 x 2740 x 24840", Product { m: 1, n: 2740, k: 24840, ..all.clone() });
    to.sized(Size::Bench, "2 x 2740 x 30728", Product { n: 2740, k: 30728, ..all.clone() });
    // Short, but dealt row by row.
    for (n, k) in [(3712, 2688), (2688, 3712)] {
        to.sized(Size::Bench, &format!("1 x {n} x {k}"), Product { m: 1, n, k, ..all.clone() });
    }
    to.sized(Size::Bench, "1 x 28000 x 1000", Product { m: 1, n: 28000, k: 1000, views: true, ..all });
    // Codes: tiles that blocks share evenly and unevenly, and an x that does not stay in shared memory.
    for format in Format::CODED.into_iter().chain(Format::SCALED) {
        let coded = Product { format, n: 4500, k: 2304, columns: true, bias: true, accumulate: true, ..base.clone() };
        for m in [1, 8, 24, 64] {
            let name = format!("{} weight, {m} x 4500 x 2304", format.name());
            to.sized(Size::Bench, &name, Product { m, ..coded.clone() });
        }
    }
    for format in [Format::Q8_0, Format::Q4K] {
        for m in [6, 64] {
            let long = Product { format, m, n: 2200, k: 21504, out_f32: true, ..base.clone() };
            to.sized(Size::Bench, &format!("{} weight, {m} x 2200 x 21504", format.name()), long);
        }
    }
    for (m, n, k) in [(64, 2688, 2048), (16, 13568, 512)] {
        let name = format!("{} weight, {m} x {n} x {k}", Format::Q4K.name());
        to.sized(Size::Bench, &name, Product { format: Format::Q4K, m, n, k, accumulate: true, ..base.clone() });
    }
    to.sized(Size::Bench, "256 x 4096 x 4096", Product { m: 256, n: 4096, k: 4096, ..base.clone() });
    to.sized(Size::Bench, "1 x 131072 x 2048", Product { m: 1, n: 131_072, k: 2048, out_f32: true, ..base });
}

#[cfg(test)]
mod tests {
    use selkie_core::backend::Int8;

    use super::*;

    /// The error of rounding activations itself: what is off, squared, over what is there.
    #[test]
    fn eight_bits_are_within_their_error() {
        let mut worst = 0f64;
        for case in crate::all().into_iter().filter(|c| c.size == Size::Small && c.format.is_integer()) {
            let sums = |int8: Int8| -> Vec<f64> {
                let host = case.spec.host(&Dtypes { int8, ..crate::tests::F32 }, &mut Rng::new(&case.id()));
                let wants = case.spec.want(&host);
                let near = wants.iter().flat_map(|(_, w)| w);
                near.filter_map(|w| if let Want::Near(v) = w { Some(*v) } else { None }).collect()
            };
            let (rounded, exact) = (sums(Int8::Always), sums(Int8::Never));
            let off: f64 = rounded.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum();
            let nmse = off / exact.iter().map(|x| x * x).sum::<f64>();
            assert!(nmse <= 1e-4 && (nmse > 0.0 || case.op == "embed"), "{}: NMSE {nmse:e}", case.id());
            worst = worst.max(nmse);
        }
        println!("activations of 8 bits: largest NMSE {worst:.1e}");
    }

    #[test]
    fn hand_computed_blocks() {
        let spec = Product {
            m: 1,
            n: 2,
            k: 2,
            dtype: DType::F32,
            format: Format::Plain,
            blocks: vec![(1, 1), (0, 1)],
            one_buffer: false,
            mixed: false,
            columns: false,
            bias: true,
            scale: 2.0,
            accumulate: true,
            out_f32: true,
            views: false,
        };
        let mut h = Host::default();
        h.float("x", DType::F32, &[1, 2], vec![3.0, 5.0]);
        h.float("w0", DType::F32, &[1, 2], vec![1.0, 10.0]);
        h.float("w1", DType::F32, &[1, 2], vec![2.0, 20.0]);
        h.float("bias", DType::F32, &[2], vec![0.25, 0.5]);
        h.float("out", DType::F32, &[1, 2], vec![1000.0, 2000.0]);
        assert_eq!(spec.want(&h)[0].1, [Want::Near(1212.25), Want::Near(2106.5)]);
    }
}
