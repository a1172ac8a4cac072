//! Ops that follow each other in a step, where a backend may fuse several into one kernel. Together they leave the same
//! results as one by one.

use super::host::{Rng, put};
use super::{Plain, codes};
use selkie_core::Result;
use selkie_core::backend::{Backend, Handle, Ops};
use selkie_core::format::Format;
use selkie_core::ops::{Act, Activation, Conv1d, Gate, Matmul, Op, RmsNorm, RowBlock, Weight};
use selkie_core::step::{Chunk, Row, Src, Step, TokenRef, bucket_of, encode};
use selkie_core::tensor::{DType, Tensor};

/// Relative to 1 + |x|: the order of a sum may change.
const LIMIT: f32 = 1e-4;

/// Ops of one row or a few, as a decode step has them. Activations are f32.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The property that the chain is for.
    pub name: String,
    links: Links,
}

#[derive(Clone, Copy, Debug)]
enum Links {
    /// A norm, after a gate or not, a product and an activation, with a factor or without.
    Products { rows: usize, k: usize, n: usize, gate: bool, up: bool, weights: (DType, Format) },
    /// A product and the convolution of some of its columns, from one slot to another.
    Convolution,
}

/// A chain on a device.
struct Linked<Buf> {
    ops: Vec<Op<Buf>>,
    /// All that it writes, by name.
    left: Vec<(&'static str, Tensor<Buf>)>,
}

/// All chains.
pub fn chains() -> Vec<Chain> {
    let with = |rows: usize, k: usize, n: usize, gate: bool, up: bool, weights: (DType, Format)| {
        let and = |on: bool, what: &'static str| if on { what } else { "" };
        let stored = match weights {
            (_, Format::Plain) => and(weights.0 == DType::Bf16, ", bf16").to_owned(),
            (_, format) => format!(", {}", format.name()),
        };
        let name = format!("{rows} x {k} -> {n}{}{}{stored}", and(gate, ", gate"), and(up, ", up"));
        Chain { name, links: Links::Products { rows, k, n, gate, up, weights } }
    };
    let of = |rows, k, n, gate, up, weights| with(rows, k, n, gate, up, (weights, Format::Plain));
    let products = |rows, k, n, gate, up| of(rows, k, n, gate, up, DType::F32);
    let coded = |rows, k, n, gate, up, format| with(rows, k, n, gate, up, (DType::U8, format));
    vec![
        products(1, 256, 48, false, false),
        products(1, 3072, 36, true, true),
        products(3, 72, 40, true, false),
        products(8, 520, 64, false, true),
        products(5, 1544, 64, true, false),
        of(1, 4096, 48, false, false, DType::Bf16),
        of(1, 768, 48, true, false, DType::Bf16),
        of(2, 64, 48, false, true, DType::Bf16),
        of(8, 4096, 48, true, true, DType::Bf16),
        // Large enough for products of integers.
        coded(1, 2048, 2080, false, false, Format::Q4K),
        coded(3, 4096, 528, true, true, Format::Q8_0),
        coded(1, 96, 64, true, false, Format::Q8_0),
        Chain { name: "a convolution".into(), links: Links::Convolution },
    ]
}

impl Chain {
    /// The difference between the ops in one step and one by one, if there is any.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn difference<B: Backend>(&self, backend: &B) -> Result<Option<String>> {
        let make = &mut |name: &str, bytes: &[u8]| {
            let buf = backend.alloc(name, bytes.len() as u64)?;
            backend.write(&buf, 0, bytes)?;
            Ok(buf)
        };
        let Linked { ops, left } = self.linked(Maker { make, rng: Rng::new(&self.name) })?;
        backend.reserve(ops.iter().map(|op| backend.scratch(op)).max().unwrap_or(0))?;
        backend.run(|rec| ops.iter().try_for_each(|op| rec.op(op.clone())))?;
        let together = numbers(backend, &left).await?;
        for op in ops {
            backend.run(|rec| rec.op(op.clone()))?;
        }
        let apart = numbers(backend, &left).await?;
        Ok(left.iter().zip(together.iter().zip(&apart)).find_map(|((name, _), (a, b))| {
            let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs() / (1.0 + b.abs()));
            let fits = worst.clone().all(|x| x < LIMIT) && b.iter().any(|x| *x != 0.0);
            (!fits).then(|| format!("{name} differs by {} or is zero", worst.fold(0.0, f32::max)))
        }))
    }
}

impl Chain {
    /// The ops over handles without memory: for everything that depends on shapes only.
    pub fn plain_ops(&self) -> Vec<Op<Plain>> {
        let mut id = 0;
        let make = &mut |_: &str, bytes: &[u8]| {
            id += 1;
            Ok(Plain { id, bytes: bytes.len() as u64 })
        };
        self.linked(Maker { make, rng: Rng::blank(&self.name) }).expect("buffers that are numbers").ops
    }

    fn linked<Buf: Handle>(&self, maker: Maker<'_, Buf>) -> Result<Linked<Buf>> {
        match self.links {
            Links::Products { rows, k, n, gate, up, weights } => maker.products(rows, k, n, gate, up, weights),
            Links::Convolution => maker.convolution(),
        }
    }
}

async fn numbers<B: Backend>(backend: &B, left: &[(&str, Tensor<B::Buf>)]) -> Result<Vec<Vec<f32>>> {
    let mut all = Vec::new();
    for (_, t) in left {
        all.push(bytemuck::pod_collect_to_vec(&backend.read(t).await?));
    }
    Ok(all)
}

/// Makes buffers of bytes and fills them with random numbers.
struct Maker<'a, Buf> {
    make: &'a mut dyn FnMut(&str, &[u8]) -> Result<Buf>,
    rng: Rng,
}

impl<Buf: Handle> Maker<'_, Buf> {
    /// f32 numbers between -1 and 1.
    fn filled(&mut self, name: &str, dims: &[usize]) -> Result<Tensor<Buf>> {
        self.filled_as(name, dims, DType::F32)
    }

    fn filled_as(&mut self, name: &str, dims: &[usize], dtype: DType) -> Result<Tensor<Buf>> {
        let values = self.rng.ranged(dims.iter().product(), -1.0, 1.0);
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        for (x, to) in values.into_iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
            put(dtype, x, to);
        }
        Ok(Tensor::new((self.make)(name, &bytes)?, dtype, dims))
    }

    fn product(&mut self, x: &Tensor<Buf>, n: usize, (dtype, format): (DType, Format)) -> Result<Matmul<Buf>> {
        let (rows, k) = (x.rows(), x.row_len());
        let w = match format {
            Format::Plain => self.filled_as("w", &[n, k], dtype)?,
            _ => {
                let bytes = codes::random(format, n * k, 1.0, &mut self.rng);
                Tensor::new((self.make)("w", &bytes)?, dtype, &[n, format.bytes(k, 1)])
            }
        };
        let w = Weight { blocks: vec![RowBlock { w, format, col: 0, squares: false }], n, k };
        let out = self.filled("out", &[rows, n])?;
        Ok(Matmul { x: x.clone(), w, columns: None, bias: None, out, scale: 0.5, accumulate: false, precise: false })
    }

    fn products(
        mut self,
        rows: usize,
        k: usize,
        n: usize,
        gate: bool,
        up: bool,
        weights: (DType, Format),
    ) -> Result<Linked<Buf>> {
        let (x, weight, u) = (self.filled("x", &[rows, k])?, self.filled("norm", &[k])?, self.filled("u", &[rows, k])?);
        let gate = match gate {
            true => Some(Gate { z: self.filled("z", &[rows, k])?, act: Act::Silu, before: true }),
            false => None,
        };
        let product = self.product(&u, if up { 2 * n } else { n }, weights)?;
        let (out, mid) = (product.out.clone(), self.filled("mid", &[rows, n])?);
        let act = Activation {
            gate: out.cols(0, n),
            up: up.then(|| out.cols(n, n)),
            row_gate: None,
            out: mid.clone(),
            act: if up { Act::Silu } else { Act::Relu2 },
        };
        let norm = RmsNorm { x, add: None, weight, gate, out: u.clone(), accumulate: false, eps: 1e-5, groups: 1 };
        Ok(Linked {
            ops: vec![norm.into(), product.into(), act.into()],
            left: vec![("u", u), ("out", out), ("mid", mid)],
        })
    }

    fn convolution(mut self) -> Result<Linked<Buf>> {
        let (k, n, channels) = (256, 60, 40);
        let chunks = vec![Chunk { len: 1, src: Src::Slot(2), dst: 1 }];
        let rows =
            [Row { first_position: 5, tokens: vec![TokenRef::Known(1)], chunks, outputs: vec![0], ..Row::default() }];
        let bucket = bucket_of(&rows);
        let words = encode(&rows, bucket);
        let ints = (self.make)("ints", bytemuck::cast_slice(&words))?;
        let x = self.filled("x", &[1, k])?;
        // A scale would prevent the fusion of the convolution with the product.
        let product = Matmul { scale: 1.0, ..self.product(&x, n, (DType::F32, Format::Plain))? };
        let (pool, conv) = (self.filled("pool", &[3, channels, 3])?, self.filled("conv", &[1, channels])?);
        let next = Conv1d {
            step: Step::new(ints, bucket),
            x: product.out.cols(8, channels),
            weight: self.filled("taps", &[channels, 5])?,
            pool: pool.clone(),
            out: conv.clone(),
            act: Act::Silu,
        };
        let left = vec![("out", product.out.clone()), ("pool", pool), ("conv", conv)];
        Ok(Linked { ops: vec![product.into(), next.into()], left })
    }
}
