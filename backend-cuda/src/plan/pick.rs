//! Linear layers: which kernel computes a product.

use selkie_core::{
    Result,
    format::Format,
    ops::{Matmul, RowBlock},
    tensor::{DType, Tensor},
};

use super::{Arena, Device, Hazards, codes, codes_wgmma, eight, fused::Neighbours, gemv, skinny, vector, wide};
use crate::{
    arguments::{At, MatmulBias, MatmulPlain, Rows},
    launch::{Address, Gemm, Launch, Work, address},
    spec::{File, Spec},
};

/// Rows of x up to which a product is a skinny GEMM: our own kernels read W at memory speed.
pub(crate) const SKINNY_ROWS: usize = 8;

/// Rows of W: those of a block, or elements that were decoded from some of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    /// Address of the first row.
    pub at: u64,
    /// Elements between rows; 0 for codes.
    pub stride: usize,
    /// Dtype of the elements.
    pub dtype: DType,
    /// Format of the rows.
    pub format: Format,
    /// Number of rows.
    pub rows: usize,
    /// Output column of the first one.
    pub col: usize,
}

impl Matrix {
    pub fn of<B: Address>(block: &RowBlock<B>) -> Self {
        let RowBlock { w, format, col, .. } = block;
        let stride = if *format == Format::Plain { w.row_stride } else { 0 };
        Self { at: address(w), stride, dtype: w.dtype, format: *format, rows: w.rows(), col: *col }
    }

    /// The argument of kernels.
    pub fn argument(&self) -> Rows {
        Rows { at: self.at, stride: self.stride as u64 }
    }

    /// Whether all rows are bf16 and can be read 16 bytes at a time.
    fn is_wide(&self) -> bool {
        self.dtype == DType::Bf16 && self.at.is_multiple_of(16) && (self.rows <= 1 || self.stride.is_multiple_of(8))
    }
}

/// A product with rows of W that have one format.
#[derive(Clone, Copy)]
pub(super) struct Product<'a, B> {
    /// The op.
    pub op: &'a Matmul<B>,
    /// The rows of W.
    pub w: Matrix,
    /// Their columns of the output.
    pub out: &'a Tensor<B>,
}

impl<'a, B: Address> Product<'a, B> {
    /// Some rows of W, and the kernels that multiply them.
    pub fn with<T>(op: &'a Matmul<B>, w: Matrix, then: impl FnOnce(Product<'_, B>) -> T) -> T {
        then(Product { op, w, out: &op.out.cols(w.col, w.rows) })
    }

    /// Rows of x.
    pub fn m(&self) -> usize {
        self.op.x.rows()
    }

    /// Rows of W.
    pub fn n(&self) -> usize {
        self.w.rows
    }

    /// The inner dimension.
    pub fn k(&self) -> usize {
        self.op.w.k
    }

    /// Address of the factors of the block's columns, or null.
    pub fn columns(&self) -> At {
        self.of_block(self.op.columns.as_ref())
    }

    /// Address of the bias of the block's columns, or null.
    pub fn bias(&self) -> At {
        self.of_block(self.op.bias.as_ref())
    }

    fn of_block(&self, all: Option<&Tensor<B>>) -> At {
        At(all.map_or(0, |t| address(t) + 4 * self.w.col as u64))
    }

    /// Whether the library can write the output.
    pub fn library_writes(&self) -> bool {
        let Self { op, out, .. } = self;
        // It adds the old output within its product, so column factors would scale that too.
        !(op.columns.is_some() && op.accumulate)
            && address(*out).is_multiple_of(16)
            && (out.row_stride * out.dtype.bytes()).is_multiple_of(16)
    }

    fn kernel(&self, device: &Device) -> Kernel {
        let Self { op, w, .. } = self;
        let (m, k) = (self.m(), self.k());
        let inputs = device.tuned && wide(&[&op.x]) && w.is_wide() && k.is_multiple_of(8);
        // With more than two rows, to read x again with every slice of W costs more than the library's product.
        let takes = |s: skinny::Shape| m <= 2 || !device.blas || s.resident;
        if inputs && m <= SKINNY_ROWS && skinny::shape(m, k, device.shared).is_some_and(takes) {
            Kernel::Skinny
        } else if inputs && device.blas && self.library_writes() {
            Kernel::Library
        } else {
            Kernel::Plain
        }
    }

    /// One of the kernels with bulk copies, if the device has them and one takes the shape.
    fn bulk(&self, neighbours: &Neighbours<B>, device: &Device, hazards: &Hazards) -> Option<Launch> {
        let by_rows = if self.by_rows(device) { gemv::launch(self, neighbours, device, hazards) } else { None };
        by_rows.or_else(|| skinny::bulk(self, neighbours, device, hazards))
    }

    /// Whether W is dealt row by row if it can be. Short products depend on the kernels around them: several small blocks per
    /// multiprocessor let those start sooner.
    fn by_rows(&self, device: &Device) -> bool {
        let (m, k, n) = (self.m(), self.k(), self.n());
        exceeds_l2(n, k, device) || gemv::prefers_row_dealing(m, k, n, device)
    }

    fn library(&self) -> Vec<Work> {
        let Self { op, w, out } = self;
        let (m, n) = (self.m(), self.n());
        let gemm = |first: usize, n: usize| {
            Work::Gemm(Gemm {
                mnk: [m, n, self.k()],
                at: [
                    address(&op.x),
                    w.at + (2 * first * w.stride) as u64,
                    address(out) + (first * out.dtype.bytes()) as u64,
                ],
                strides: [op.x.row_stride, w.stride, out.row_stride],
                out: out.dtype,
                scale: op.scale,
                accumulate: op.accumulate,
                scales: None,
            })
        };
        // The library's fast kernels take multiples of 8 rows of W.
        let last = if n > 64 { n % 8 } else { 0 };
        let mut work = vec![gemm(0, n - last)];
        work.extend((last > 0).then(|| gemm(n - last, last)));
        if op.columns.is_some() || op.bias.is_some() {
            work.push(Work::Kernel(self.columns_and_bias()));
        }
        work
    }

    /// Factors and bias of the columns, over what the library has written.
    pub fn columns_and_bias(&self) -> Launch {
        const THREADS: usize = 128;
        const ROWS: usize = 8;
        let Self { op, out, .. } = self;
        let (m, n, columns, bias) = (self.m(), self.n(), self.columns(), self.bias());
        // A block of rows of W may start at any column of the factors.
        let vec = if columns.0.is_multiple_of(16) && bias.0.is_multiple_of(16) { vector(n, &[out]) } else { 1 };
        let spec = Spec::new(File::MatmulBias)
            .int("N", n)
            .int("VEC", vec)
            .int("THREADS", THREADS)
            .int("ROWS", ROWS)
            .flag("HAS_COLUMNS", op.columns.is_some())
            .flag("HAS_BIAS", op.bias.is_some())
            .ty("out_t", out.dtype);
        let args = MatmulBias { m: m as i32, columns, bias, out: (*out).into() };
        Launch::new(spec, [m.div_ceil(ROWS), n.div_ceil(THREADS * vec), 1], THREADS, &args)
    }

    fn plain(&self) -> Launch {
        let Self { op, w, out } = self;
        let (m, n) = (self.m(), self.n());
        let spec = Spec::new(File::MatmulPlain)
            .int("K", self.k())
            .flag("ACCUMULATE", op.accumulate)
            .flag("HAS_COLUMNS", op.columns.is_some())
            .flag("HAS_BIAS", op.bias.is_some())
            .ty("x_t", op.x.dtype)
            .ty("w_t", w.dtype)
            .ty("out_t", out.dtype);
        let args = MatmulPlain {
            x: (&op.x).into(),
            w: w.argument(),
            m: m as i32,
            n: n as i32,
            columns: self.columns(),
            bias: self.bias(),
            out: (*out).into(),
            scale: op.scale,
        };
        Launch::new(spec, [n.div_ceil(64), m.div_ceil(64), 1], 256, &args)
    }
}

/// The kernel of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// A skinny GEMM.
    Skinny,
    /// cuBLASLt.
    Library,
    /// The f32 kernel that takes every shape and dtype.
    Plain,
}

/// Whether W is larger than an L2 holds, so that to read it takes much longer than the kernels around the product.
fn exceeds_l2(n: usize, k: usize, device: &Device) -> bool {
    2 * n * k > (device.sms * 400) << 10
}

/// Whether W is loaded with the evict-first policy: if it exceeds the L2 and has at most 256 MiB. The gain and the cost are in
/// `docs/h200-cuda.md`.
pub(super) fn evict_first(n: usize, k: usize, device: &Device) -> bool {
    exceeds_l2(n, k, device) && 2 * n * k <= 256 << 20
}

/// A product of one row with its neighbours, or of some whose inputs are rounded, if one kernel computes them all.
pub(super) fn fuse_neighbours<B: Address>(
    op: &Matmul<B>,
    neighbours: &Neighbours<B>,
    device: &Device,
    hazards: &Hazards,
) -> Option<Work> {
    let [block] = op.w.blocks.as_slice() else { return None };
    let one = |product: Product<'_, B>| {
        if op.x.rows() != 1 && !neighbours.is_rounding() {
            return None;
        }
        match block.format {
            Format::Plain if neighbours.rounds() || product.kernel(device) != Kernel::Skinny => None,
            Format::Plain if neighbours.pair().is_some_and(|other| !pairs(&product, other, device)) => None,
            Format::Plain => product.bulk(neighbours, device, hazards),
            _ if neighbours.pair().is_some() => None,
            _ => codes::launch(&product, neighbours, device, hazards),
        }
    };
    Product::with(op, Matrix::of(block), one).map(Work::Kernel)
}

/// Whether another product may be computed in the kernel of this one: both are short and alone would be computed in the same way.
fn pairs<B: Address>(product: &Product<B>, other: &Matmul<B>, device: &Device) -> bool {
    let alike = |p: &Product<B>| {
        let plain = p.op.columns.is_none() && p.op.bias.is_none() && !p.op.accumulate;
        plain && p.kernel(device) == Kernel::Skinny && !p.by_rows(device)
    };
    let [block] = other.w.blocks.as_slice() else { return false };
    let same = other.w.k == product.k() && other.scale == product.op.scale && other.x.rows() == product.m();
    let fits = skinny::fits_pair(product.m(), product.k(), [product.n(), other.w.n], device);
    let plain = block.format == Format::Plain && Product::with(other, Matrix::of(block), |p| alike(&p));
    same && plain && alike(product) && fits
}

/// The launches of rows of plain elements.
fn plain_rows<B: Address>(product: &Product<B>, device: &Device, hazards: &Hazards) -> Result<Vec<Work>> {
    Ok(match product.kernel(device) {
        Kernel::Skinny => {
            let bulk = product.bulk(&Neighbours::none(), device, hazards);
            vec![Work::Kernel(bulk.map_or_else(|| skinny::launch(product, device), Ok)?)]
        }
        Kernel::Library => product.library(),
        Kernel::Plain => vec![Work::Kernel(product.plain())],
    })
}

/// The launches of rows of codes: from the codes, or from elements that are decoded to the scratch memory, part by part.
fn coded_rows<B: Address>(
    product: &Product<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Result<Vec<Work>> {
    let few = codes::launch(product, &Neighbours::none(), device, hazards);
    if let Some(launch) = few.or_else(|| codes_wgmma::launch(product, device, arena)) {
        return Ok(vec![Work::Kernel(launch)]);
    }
    let mut work = Vec::new();
    for (decode, part) in codes::decoded(&product.w, product.k(), product.op.x.dtype, arena) {
        work.push(Work::Kernel(decode));
        work.extend(Product::with(product.op, part, |p| plain_rows(&p, device, hazards))?);
    }
    Ok(work)
}

pub(super) fn matmul<B: Address>(
    op: &Matmul<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Result<Vec<Work>> {
    let mut work = Vec::new();
    for block in &op.w.blocks {
        work.extend(Product::with(op, Matrix::of(block), |product| match block.format {
            Format::Plain => plain_rows(&product, device, hazards),
            _ => coded_rows(&product, device, arena, hazards),
        })?);
    }
    Ok(work)
}

/// Bytes of the scratch memory that decoded weights, or sums of their products, take.
pub(super) fn scratch<B: Address>(op: &Matmul<B>, device: &Device) -> u64 {
    let bytes = |block: &RowBlock<B>| {
        Product::with(op, Matrix::of(block), |product| {
            if block.format == Format::Plain || codes::takes(&product, device) {
                return 0;
            }
            let decoded = || codes::decoded_bytes(product.n(), product.k(), op.x.dtype);
            codes_wgmma::scratch(&product, device).unwrap_or_else(decoded)
        })
    };
    op.w.blocks.iter().map(bytes).max().unwrap_or(0).max(eight::scratch(op, device))
}
