//! The choice of experts, both their halves and the activation in between, in one step and one by one: a backend may compute several
//! of them in one kernel. One by one they have cases of their own.

use super::codes;
use super::host::{Rng, put};
use selkie_core::Result;
use selkie_core::backend::{Backend, Ops};
use selkie_core::format::Format;
use selkie_core::ops::{Act, Activation, ExpertMatmul, ExpertRange, Op, Round, Route, Router, RowBlock};
use selkie_core::step::{Row, Step, TokenRef, bucket_of, encode};
use selkie_core::tensor::{DType, Tensor};

/// Largest RMS difference over RMS value: orders of sums differ, and what is rounded to activations in between.
const LIMIT: f64 = 5e-3;

/// The sizes of a mixture and how it is stored.
#[derive(Clone, Debug)]
pub struct ExpertChain {
    tokens: usize,
    experts: usize,
    top: usize,
    width: usize,
    inner: usize,
    gated: bool,
    format: Format,
    rounds: bool,
}

/// All of them.
pub fn expert_chains() -> Vec<ExpertChain> {
    let base = ExpertChain {
        tokens: 1,
        experts: 16,
        top: 4,
        width: 512,
        inner: 256,
        gated: true,
        format: Format::F8,
        rounds: true,
    };
    let mut all: Vec<ExpertChain> = [1, 2, 5, 9].map(|tokens| ExpertChain { tokens, ..base.clone() }).into();
    all.push(ExpertChain { gated: false, ..base.clone() });
    all.push(ExpertChain { experts: 512, top: 10, width: 2048, inner: 512, ..base.clone() });
    for format in Format::CODED.into_iter().chain(Format::SCALED) {
        all.push(ExpertChain { format, rounds: false, ..base.clone() });
        all.push(ExpertChain { format, rounds: false, gated: false, tokens: 3, ..base.clone() });
    }
    // Few pairs of each expert: both halves share one sort.
    for (format, tokens) in [(Format::Q4K, 8), (Format::Nvfp4, 9)] {
        all.push(ExpertChain { format, rounds: false, tokens, ..base.clone() });
    }
    // Rows of units that are not full.
    all.push(ExpertChain { format: Format::Q4_0, rounds: false, width: 96, inner: 160, ..base });
    all
}

impl ExpertChain {
    /// The properties that it is for.
    pub fn name(&self) -> String {
        let Self { tokens, experts, top, width, inner, gated, format, rounds } = self;
        let and = |on: &bool, what: &'static str| if *on { what } else { "" };
        let (gate, rounds) = (and(gated, ", gate"), and(rounds, ", rounded"));
        format!("{tokens} x {width} -> {top} of {experts} x {inner}, {}{gate}{rounds}", format.name())
    }

    /// The difference between the ops in one step and one by one, if there is any.
    ///
    /// # Errors
    /// Those of the backend.
    pub async fn difference<B: Backend>(&self, backend: &B) -> Result<Option<String>> {
        let Self { tokens: t, experts: e, top, width: d, inner, format, .. } = *self;
        let (act, mut rng) = (backend.caps().act, Rng::new(&self.name()));
        let alloc = |name: &str, dtype: DType, dims: &[usize], values: &[f32]| -> Result<Tensor<B::Buf>> {
            let mut bytes = vec![0; (values.len() * dtype.bytes()).next_multiple_of(4)];
            for (x, to) in values.iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
                match dtype {
                    DType::U32 => to.copy_from_slice(&(*x as u32).to_le_bytes()),
                    _ => put(dtype, *x, to),
                }
            }
            let buf = backend.alloc(name, bytes.len() as u64)?;
            backend.write(&buf, 0, &bytes)?;
            Ok(Tensor::new(buf, dtype, dims))
        };
        let mut weights = |n: usize, k: usize| -> Result<Vec<ExpertRange<B::Buf>>> {
            let bytes = codes::random(format, e * n * k, 2.0 / (k as f32).sqrt(), &mut rng);
            let dims = [e, n, bytes.len() / (e * n)];
            let buf = backend.alloc("experts", backend.coded_bytes(format, &dims))?;
            backend.write(&buf, 0, &bytes)?;
            let block = RowBlock { w: Tensor::new(buf, DType::U8, &dims), format, col: 0, squares: false };
            backend.arrange(&block)?;
            Ok(vec![ExpertRange { first: 0, experts: e, blocks: vec![block] }])
        };
        let n = if self.gated { 2 * inner } else { inner };
        let (up, down) = (weights(n, d)?, weights(d, inner)?);
        let rows: Vec<Row> =
            (0..t).map(|_| Row { tokens: vec![TokenRef::Known(1)], outputs: vec![0], ..Row::default() }).collect();
        let bucket = bucket_of(&rows);
        let t = bucket.tokens;
        let ints: Vec<u32> = encode(&rows, bucket);
        let buf = backend.alloc("ints", 4 * ints.len() as u64)?;
        backend.write(&buf, 0, bytemuck::cast_slice(&ints))?;
        let step = Step::new(buf, bucket);
        let (x, logits) = (rng.vec(t * d, 1.0), rng.vec(t * e, 2.0));
        let (x, logits) = (alloc("x", act, &[t, d], &x)?, alloc("logits", DType::F32, &[t, e], &logits)?);
        let old = rng.vec(t * d, 0.1);
        let run = |together: bool| {
            // Tokens of padding choose no expert, so their rows are left.
            let zeros = |rows: usize, n: usize| vec![0.0; rows * n];
            let ids = alloc("ids", DType::U32, &[t, top], &zeros(t, top))?;
            let weights = alloc("weights", DType::F32, &[t, top], &zeros(t, top))?;
            let first = alloc("rounded x", act, &[t, d], &zeros(t, d))?;
            let proj = alloc("proj", act, &[t * top, n], &zeros(t * top, n))?;
            let mid = alloc("mid", act, &[t * top, inner], &zeros(t * top, inner))?;
            let second = alloc("rounded mid", act, &[t * top, inner], &zeros(t * top, inner))?;
            let out = alloc("out", act, &[t, d], &old)?;
            let input = |of: &Tensor<B::Buf>, rounded: &Tensor<B::Buf>| if self.rounds { rounded } else { of }.clone();
            let router = Router::SoftmaxTopK { renorm: true };
            let (ids_of, w_of) = (ids.clone(), weights.clone());
            let mut ops: Vec<Op<B::Buf>> = vec![
                Route { step: step.clone(), logits: logits.clone(), bias: None, ids: ids_of, weights: w_of, router }
                    .into(),
                ExpertMatmul {
                    x: input(&x, &first),
                    experts: up.clone(),
                    ids: ids.clone(),
                    combine: None,
                    out: proj.clone(),
                    scale: 1.0,
                    accumulate: false,
                }
                .into(),
                Activation {
                    gate: proj.cols(0, inner),
                    up: self.gated.then(|| proj.cols(inner, inner)),
                    row_gate: None,
                    out: mid.clone(),
                    act: if self.gated { Act::Silu } else { Act::Relu2 },
                }
                .into(),
                ExpertMatmul {
                    x: input(&mid, &second),
                    experts: down.clone(),
                    ids: ids.clone(),
                    combine: Some(weights.clone()),
                    out: out.clone(),
                    scale: 0.5,
                    accumulate: true,
                }
                .into(),
            ];
            if self.rounds {
                ops.insert(3, Round { x: mid.clone(), out: second }.into());
                ops.insert(1, Round { x: x.clone(), out: first }.into());
            }
            backend.reserve(ops.iter().map(|op| backend.scratch(op)).max().unwrap_or(0))?;
            match together {
                true => backend.run(|rec| ops.iter().try_for_each(|op| rec.op(op.clone())))?,
                false => ops.iter().try_for_each(|op| backend.run(|rec| rec.op(op.clone())))?,
            }
            Ok::<_, selkie_core::Error>((ids, [("weights", weights), ("proj", proj), ("mid", mid), ("out", out)]))
        };
        let ((ids, together), (same_ids, apart)) = (run(true)?, run(false)?);
        if backend.read(&ids).await? != backend.read(&same_ids).await? {
            return Ok(Some("other experts are chosen".into()));
        }
        for ((name, a), (_, b)) in together.iter().zip(&apart) {
            let (a, b) = (a.dtype.to_f32(&backend.read(a).await?), b.dtype.to_f32(&backend.read(b).await?));
            let sum = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
            let size = sum(&mut b.iter().map(|x| f64::from(*x)));
            let error = sum(&mut a.iter().zip(&b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            if error.is_nan() || error >= LIMIT * size {
                return Ok(Some(format!("{name} differs by {:.2e}", error / size)));
            }
        }
        Ok(None)
    }
}
