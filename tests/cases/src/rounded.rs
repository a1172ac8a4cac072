//! Products of rounded activations with 8-bit floats, with the ops before them in one step: a backend may round within the product's
//! kernel, or multiply codes.

use super::codes;
use super::host::{Rng, put, round};
use super::round::eight;
use selkie_core::Result;
use selkie_core::backend::{Backend, Ops};
use selkie_core::format::Format;
use selkie_core::ops::{Act, Activation, Matmul, Op, RmsNorm, Round, RowBlock, Weight};
use selkie_core::tensor::{DType, Tensor};

/// Largest RMS error over RMS value, with f32 activations and with those of 16 bits; that of a single element is ten times as
/// large.
const LIMITS: [f64; 2] = [1e-5, 1e-2];

/// The op before the rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    Norm,
    Activation,
}

/// A product and the ops before it.
#[derive(Clone, Debug)]
pub struct Rounded {
    rows: usize,
    k: usize,
    /// Rows of each block of w.
    n: Vec<usize>,
    before: Before,
    /// 128 rows share their scales.
    squares: bool,
    accumulate: bool,
    /// Factors and a bias per column.
    columns: bool,
    f32_out: bool,
}

/// All of them.
pub fn rounded() -> Vec<Rounded> {
    let base = Rounded {
        rows: 1,
        k: 512,
        n: vec![272],
        before: Before::Nothing,
        squares: true,
        accumulate: false,
        columns: false,
        f32_out: false,
    };
    let mut all: Vec<Rounded> =
        [1, 2, 5, 8, 9, 33, 64, 65, 68, 132, 300].map(|rows| Rounded { rows, ..base.clone() }).into();
    for before in [Before::Norm, Before::Activation] {
        all.extend([1, 3, 100].map(|rows| Rounded { rows, before, ..base.clone() }));
        all.push(Rounded { before, accumulate: true, k: 1152, ..base.clone() });
    }
    for rows in [1, 72, 160] {
        let base = Rounded { rows, ..base.clone() };
        all.push(Rounded { squares: false, ..base.clone() });
        all.push(Rounded { accumulate: true, f32_out: true, ..base.clone() });
        all.push(Rounded { columns: true, n: vec![128, 48], k: 128, ..base.clone() });
        all.push(Rounded { n: vec![200], k: 1920, ..base });
    }
    all.push(Rounded { rows: 8, k: 8192, ..base.clone() });
    all.push(Rounded { before: Before::Activation, k: 21504, n: vec![64], ..base });
    all
}

impl Rounded {
    /// The properties that it is for.
    pub fn name(&self) -> String {
        let Self { rows, k, n, .. } = self;
        let and = |on: bool, what: &'static str| if on { what } else { "" };
        let before = match self.before {
            Before::Nothing => "",
            Before::Norm => ", norm",
            Before::Activation => ", activation",
        };
        let rest = [
            and(!self.squares, ", scales of rows"),
            and(self.accumulate, ", added"),
            and(self.columns, ", columns"),
            and(self.f32_out, ", f32"),
        ];
        format!("{rows} x {k} -> {n:?}{before}{}", rest.concat())
    }

    /// What is wrong with the result of the ops in one step, or one by one; `None` if both are right.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn difference<B: Backend>(&self, backend: &B) -> Result<Option<String>> {
        let (rows, k, n, act) = (self.rows, self.k, self.n.iter().sum::<usize>(), backend.caps().act);
        let mut rng = Rng::new(&self.name());
        let alloc = |name: &str, dtype: DType, dims: &[usize], values: &[f32]| -> Result<Tensor<B::Buf>> {
            let mut bytes = vec![0; (values.len() * dtype.bytes()).next_multiple_of(4)];
            for (x, to) in values.iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
                put(dtype, *x, to);
            }
            let buf = backend.alloc(name, bytes.len() as u64)?;
            backend.write(&buf, 0, &bytes)?;
            Ok(Tensor::new(buf, dtype, dims))
        };
        let poison = vec![f32::NAN; rows * k];
        let first = alloc("first", act, &[rows, k], &rng.vec(rows * k, 2.0))?;
        let second = alloc("second", act, &[rows, k], &rng.vec(rows * k, 1.0))?;
        let x = match self.before {
            Before::Nothing => first.clone(),
            _ => alloc("x", act, &[rows, k], &poison)?,
        };
        let (mut blocks, mut w) = (Vec::new(), Vec::new());
        for &rows in &self.n {
            let bytes = self.weight(rows, &mut rng);
            w.extend(Format::F8.decode(&bytes));
            let dims = [rows, bytes.len() / rows];
            let buf = backend.alloc("w", backend.coded_bytes(Format::F8, &dims))?;
            backend.write(&buf, 0, &bytes)?;
            let col = w.len() / k - rows;
            let block =
                RowBlock { w: Tensor::new(buf, DType::U8, &dims), format: Format::F8, col, squares: self.squares };
            backend.arrange(&block)?;
            blocks.push(block);
        }
        let vectors = [rng.ranged(n, 0.5, 1.0), rng.vec(n, 0.5)];
        let [columns, bias] = match self.columns {
            true => [
                Some(alloc("columns", DType::F32, &[n], &vectors[0])?),
                Some(alloc("bias", DType::F32, &[n], &vectors[1])?),
            ],
            false => [None, None],
        };
        let out_t = if self.f32_out { DType::F32 } else { act };
        let old: Vec<f32> = rng.vec(rows * n, 1.0).into_iter().map(|x| round(out_t, x)).collect();
        let rounded = alloc("rounded", act, &[rows, k], &poison)?;
        let norm_weight = alloc("norm", DType::F32, &[k], &rng.ranged(k, 0.5, 1.5))?;
        let run = |together: bool| {
            // Nothing of the first run is left for the second.
            let out = alloc("out", out_t, &[rows, n], &old)?;
            let product = Matmul {
                x: rounded.clone(),
                w: Weight { blocks: blocks.clone(), n, k },
                columns: columns.clone(),
                bias: bias.clone(),
                out: out.clone(),
                scale: 0.5,
                accumulate: self.accumulate,
                precise: false,
            };
            let mut ops: Vec<Op<B::Buf>> = match self.before {
                Before::Nothing => Vec::new(),
                Before::Norm => vec![
                    RmsNorm {
                        x: first.clone(),
                        add: None,
                        weight: norm_weight.clone(),
                        gate: None,
                        out: x.clone(),
                        accumulate: false,
                        eps: 1e-5,
                        groups: 1,
                    }
                    .into(),
                ],
                Before::Activation => {
                    let (gate, up) = (first.clone(), Some(second.clone()));
                    vec![Activation { gate, up, row_gate: None, out: x.clone(), act: Act::Silu }.into()]
                }
            };
            ops.push(Round { x: x.clone(), out: rounded.clone() }.into());
            ops.push(product.into());
            let scratch = ops.iter().map(|op| backend.scratch(op)).max().unwrap_or(0);
            backend.reserve(scratch)?;
            match together {
                true => backend.run(|rec| ops.iter().try_for_each(|op| rec.op(op.clone())))?,
                false => ops.iter().try_for_each(|op| backend.run(|rec| rec.op(op.clone())))?,
            }
            Ok::<_, selkie_core::Error>(out)
        };
        let mut inputs = Vec::new();
        for (together, what) in [(true, "together"), (false, "one by one")] {
            let out = run(together)?;
            let got = out_t.to_f32(&backend.read(&out).await?);
            // The op before the rounding has cases of its own. What it leaves for others is not rounded.
            inputs.push(backend.read(&x).await?);
            if inputs[0] != inputs[inputs.len() - 1] {
                return Ok(Some("the op before the rounding leaves something else".into()));
            }
            let x = act.to_f32(&inputs[0]);
            let want = self.want(&x, &w, &vectors, &old);
            let limit = LIMITS[usize::from(act != DType::F32)];
            let rms = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
            let errors = || got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs());
            let error = (errors().map(|e| e * e).sum::<f64>() / want.len() as f64).sqrt() / rms;
            let worst = errors().zip(&want).map(|(e, want)| e / (rms + want.abs())).fold(0.0, f64::max);
            // Written so that NaN fails.
            if !(error < limit && worst < 10.0 * limit) {
                return Ok(Some(format!("{what}: RMS error {error:.2e}, of an element {worst:.2e}")));
            }
        }
        Ok(None)
    }

    /// Coded rows of a block of w.
    fn weight(&self, rows: usize, rng: &mut Rng) -> Vec<u8> {
        let mut bytes = codes::random(Format::F8, rows * self.k, 2.0 / (self.k as f32).sqrt(), rng);
        let (_, block) = Format::F8.block().expect("a coded format");
        let row = self.k / Format::F8.block().expect("a coded format").0 * block;
        for i in 0..rows {
            for at in (0..row).step_by(block).filter(|_| self.squares) {
                let shared: [u8; 4] = bytes[i / 128 * 128 * row + at..][..4].try_into().expect("four bytes");
                bytes[i * row + at..][..4].copy_from_slice(&shared);
            }
        }
        bytes
    }

    fn want(&self, x: &[f32], w: &[f32], [columns, bias]: &[Vec<f32>; 2], old: &[f32]) -> Vec<f64> {
        let (k, n) = (self.k, columns.len());
        let x: Vec<f32> = x.chunks(128).flat_map(eight).map(|x| x as f32).collect();
        let value = |(i, old): (usize, &f32)| {
            let (row, col) = (i / n, i % n);
            let mut v = 0.5 * super::dot(&x[row * k..][..k], &w[col * k..][..k]);
            if self.columns {
                v = v * f64::from(columns[col]) + f64::from(bias[col]);
            }
            if self.accumulate { v + f64::from(*old) } else { v }
        };
        old.iter().enumerate().map(value).collect()
    }
}
