//! Shapes of published models at full size, for timing: one definition for every backend. The cases check that an op is
//! right, these shapes measure its speed.

use std::cell::Cell;

use selkie_core::{
    Error, Result,
    backend::{Backend, Handle},
    ops::{
        Act, Attention, Conv1d, GatedDelta, KvPool, LatentAttention, Matmul, Op, RowBlock, ScanForm, SelectiveScan,
        Weight,
    },
    step::{Chunk, PAGE, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
};

/// An op at the size that a published model gives it.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Stem of the op.
    pub op: &'static str,
    /// The property that the shape is for.
    pub name: String,
    /// Dtype of the recurrent states, if it is not the backend's own.
    pub state: Option<DType>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Rows of tokens, from an own slot each. Heads, P, N, groups.
    Scan(Batch, [usize; 4]),
    /// Channels, N of Mamba-1.
    Channels(Batch, [usize; 2]),
    /// Key heads, value heads, dk, dv.
    Delta(Batch, [usize; 4]),
    /// The same with a decay per key channel.
    ChannelDelta(Batch, [usize; 4]),
    /// Channels, taps.
    Conv(Batch, [usize; 2], Act),
    /// Query heads, KV heads, head dim.
    Attention(Batch, [usize; 3]),
    /// Heads, columns of a latent, of a shared key, of a head's queries.
    Latents(Batch, [usize; 4]),
    /// Rows of x, of w, and their length.
    Matmul([usize; 3]),
}

#[derive(Clone, Copy, Debug)]
enum Batch {
    /// One token in each of `rows` rows at `position`.
    Decode { rows: usize, position: usize },
    /// `rows` rows of `tokens` tokens from position 0.
    Prefill { rows: usize, tokens: usize },
}

/// A shape on a device.
#[derive(Clone, Debug)]
pub struct Timed<Buf> {
    /// The op, with arguments that hold random numbers.
    pub op: Op<Buf>,
    /// Bytes that must move, each once. Recurrent states count as read and written.
    pub bytes: u64,
    /// Operations.
    pub flops: u64,
}

/// All shapes, op by op. Mamba-2 and attention as in Nemotron-H-8B, the delta rule as in Qwen3-Next, unless a model is named.
pub fn shapes() -> Vec<Shape> {
    let mut all = Vec::new();
    let mut add = |op, name: String, kind| all.push(Shape { op, name, state: None, kind });
    let decode = |rows| Batch::Decode { rows, position: 70 };
    let prefill = |rows, tokens| Batch::Prefill { rows, tokens };
    let (scan, delta, conv, attention) = ([128, 64, 128, 8], [16, 32, 128, 128], [10_240, 4], [32, 8, 128]);
    let (kimi, latents) = ([32, 32, 128, 128], [32, 512, 64, 192]);
    for rows in [1, 8, 64, 256] {
        add("selective_scan", format!("decode of {rows}"), Kind::Scan(decode(rows), scan));
    }
    for tokens in [2048, 8192, 32_768] {
        add("selective_scan", format!("prefill of {tokens}"), Kind::Scan(prefill(1, tokens), scan));
    }
    for tokens in [2048, 8192] {
        let (falcon, jamba) = ([24, 128, 256, 1], [8192, 16]);
        add("selective_scan", format!("prefill of {tokens}, Falcon-H1-7B"), Kind::Scan(prefill(1, tokens), falcon));
        add("selective_scan", format!("prefill of {tokens}, Jamba-Mini"), Kind::Channels(prefill(1, tokens), jamba));
    }
    for rows in [1, 8, 64, 256] {
        add("gated_delta", format!("decode of {rows}"), Kind::Delta(decode(rows), delta));
    }
    for (rows, tokens) in [(1, 2048), (1, 8192), (1, 32_768), (8, 4096)] {
        add("gated_delta", format!("prefill of {rows} x {tokens}"), Kind::Delta(prefill(rows, tokens), delta));
    }
    for tokens in [2048, 8192] {
        let name = format!("prefill of {tokens}, Olmo-Hybrid-7B");
        add("gated_delta", name, Kind::Delta(prefill(1, tokens), [30, 30, 96, 192]));
        let name = format!("prefill of {tokens}, Kimi-Linear");
        add("gated_delta", name, Kind::ChannelDelta(prefill(1, tokens), kimi));
    }
    for rows in [1, 8, 64, 256] {
        add("gated_delta", format!("decode of {rows}, Kimi-Linear"), Kind::ChannelDelta(decode(rows), kimi));
    }
    for tokens in [2048, 8192] {
        add("conv1d", format!("prefill of {tokens}"), Kind::Conv(prefill(1, tokens), conv, Act::Silu));
    }
    for tokens in [2048, 8192] {
        add(
            "conv1d",
            format!("prefill of {tokens}, LFM2-1.2B"),
            Kind::Conv(prefill(1, tokens), [2048, 3], Act::Identity),
        );
    }
    for rows in [1, 64] {
        add("conv1d", format!("decode of {rows}"), Kind::Conv(decode(rows), conv, Act::Silu));
    }
    for (n, k) in [(18_560, 4096), (21_504, 4096), (4096, 21_504), (131_072, 4096), (4096, 8192)] {
        for m in [1, 8, 64] {
            add("matmul", format!("{m} x {n} x {k}"), Kind::Matmul([m, n, k]));
        }
    }
    for (n, k) in [(2048, 2048), (768, 768)] {
        add("matmul", format!("1 x {n} x {k}"), Kind::Matmul([1, n, k]));
    }
    for (n, k) in [(18_560, 4096), (21_504, 4096), (4096, 21_504)] {
        add("matmul", format!("8192 x {n} x {k}"), Kind::Matmul([8192, n, k]));
    }
    for (rows, context) in [(1, 4096), (1, 32_768), (64, 4096)] {
        let batch = Batch::Decode { rows, position: context - 1 };
        add("attention", format!("decode of {rows} at {context}"), Kind::Attention(batch, attention));
    }
    for tokens in [2048, 8192] {
        add("attention", format!("prefill of {tokens}"), Kind::Attention(prefill(1, tokens), attention));
    }
    for tokens in [2048, 8192] {
        let name = format!("prefill of {tokens}, Qwen3.5-9B");
        add("attention", name, Kind::Attention(prefill(1, tokens), [16, 4, 256]));
    }
    for rows in [1, 8, 64] {
        let batch = Batch::Decode { rows, position: 32_767 };
        add("latent_attention", format!("decode of {rows} at 32768, Kimi-Linear"), Kind::Latents(batch, latents));
    }
    for tokens in [2048, 8192] {
        let name = format!("prefill of {tokens}, Kimi-Linear");
        add("latent_attention", name, Kind::Latents(prefill(1, tokens), latents));
    }
    all
}

impl Shape {
    /// `op/name`, unique in the list.
    pub fn id(&self) -> String {
        format!("{}/{}", self.op, self.name)
    }

    /// The shape with recurrent states of another dtype, if it has some.
    pub fn with_state(&self, state: DType) -> Option<Self> {
        let name = format!("{}, {} state", self.name, format!("{state:?}").to_lowercase());
        let recurrent =
            matches!(self.kind, Kind::Scan(..) | Kind::Channels(..) | Kind::Delta(..) | Kind::ChannelDelta(..));
        recurrent.then(|| Self { name, state: Some(state), ..self.clone() })
    }

    /// Makes the arguments on a device and reserves scratch.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if one argument does not fit into a binding; those of the backend.
    pub fn load<B: Backend>(&self, backend: &B) -> Result<Timed<B::Buf>> {
        let d = Device { backend, seed: Cell::new(1) };
        let state = self.state.unwrap_or(backend.caps().state);
        let timed = match self.kind {
            Kind::Scan(batch, sizes) => d.scan(batch, sizes, state)?,
            Kind::Channels(batch, sizes) => d.channels(batch, sizes, state)?,
            Kind::Delta(batch, sizes) => d.delta(batch, sizes, 1, state)?,
            Kind::ChannelDelta(batch, sizes) => d.delta(batch, sizes, sizes[2], state)?,
            Kind::Conv(batch, sizes, act) => d.conv(batch, sizes, act)?,
            Kind::Attention(batch, sizes) => d.attention(batch, sizes)?,
            Kind::Latents(batch, sizes) => d.latents(batch, sizes)?,
            Kind::Matmul(shape) => d.matmul(shape)?,
        };
        timed.op.check();
        backend.reserve(backend.scratch(&timed.op))?;
        Ok(timed)
    }
}

impl Batch {
    fn rows(self) -> Vec<Row> {
        let one = |i: u32, first_position: usize, tokens: usize| {
            let chunks = tokens.div_ceil(PAGE) as u32;
            let pages = (first_position + tokens).div_ceil(PAGE) as u32;
            // A prefill starts from slot 0, a decoded token in place. Both leave their state in a slot of their own.
            let slot = i + 1;
            let src = if first_position == 0 { 0 } else { slot };
            let chunk = |c: u32| Chunk {
                len: tokens.min(PAGE) as u32,
                src: if c == 0 { Src::Slot(src) } else { Src::Carry },
                dst: if c + 1 == chunks { slot } else { 0 },
            };
            Row {
                lane: i,
                first_position: first_position as u32,
                tokens: vec![TokenRef::Known(0); tokens],
                chunks: (0..chunks).map(chunk).collect(),
                pages: (0..pages).map(|p| 1 + i * pages + p).collect::<Vec<_>>().into(),
                outputs: vec![tokens as u32 - 1],
            }
        };
        match self {
            Self::Decode { rows, position } => (0..rows as u32).map(|i| one(i, position, 1)).collect(),
            Self::Prefill { rows, tokens } => (0..rows as u32).map(|i| one(i, 0, tokens)).collect(),
        }
    }
}

/// Makes arguments.
struct Device<'a, B: Backend> {
    backend: &'a B,
    seed: Cell<u32>,
}

/// Random bytes that are repeated where a device cannot make its own.
const PATTERN: usize = 1 << 22;

impl<B: Backend> Device<'_, B> {
    fn random(&self, dtype: DType, dims: &[usize], half: f32) -> Result<Tensor<B::Buf>> {
        let bytes = dims.iter().product::<usize>() * dtype.bytes();
        let most = self.backend.caps().max_binding;
        if bytes as u64 > most {
            let why = format!("one binding of this device holds {most}");
            return Err(Error::Unsupported { what: format!("a tensor of {bytes} bytes"), why });
        }
        let t = Tensor::new(self.backend.alloc("bench", bytes as u64)?, dtype, dims);
        let seed = self.seed.replace(self.seed.get() + 1);
        if !self.backend.fill_random(&t, seed, half)? {
            let mut rng = super::Rng::new(&seed.to_string());
            let values = rng.ranged(bytes.min(PATTERN) / dtype.bytes(), -half, half);
            let mut pattern = vec![0; values.len() * dtype.bytes()];
            for (x, to) in values.into_iter().zip(pattern.chunks_exact_mut(dtype.bytes())) {
                super::host::put(dtype, x, to);
            }
            for at in (0..bytes).step_by(PATTERN) {
                self.backend.write(&t.buf, at as u64, &pattern[..pattern.len().min(bytes - at)])?;
            }
        }
        Ok(t)
    }

    fn act(&self, dims: &[usize]) -> Result<Tensor<B::Buf>> {
        self.random(self.backend.caps().act, dims, 1.0)
    }

    /// Rows of one value each, f32.
    fn constants(&self, values: &[f32], columns: usize) -> Result<Tensor<B::Buf>> {
        let all: Vec<f32> = values.iter().flat_map(|v| std::iter::repeat_n(*v, columns)).collect();
        let buf = self.backend.alloc("bench", 4 * all.len() as u64)?;
        self.backend.write(&buf, 0, bytemuck::cast_slice(&all))?;
        Ok(Tensor::new(buf, DType::F32, &[values.len(), columns]))
    }

    fn step(&self, batch: Batch) -> Result<Step<B::Buf>> {
        let rows = batch.rows();
        let bucket = bucket_of(&rows);
        let words = encode(&rows, bucket);
        let buf = self.backend.alloc("bench", 4 * words.len() as u64)?;
        self.backend.write(&buf, 0, bytemuck::cast_slice(&words))?;
        Ok(Step::new(buf, bucket))
    }

    fn scan(&self, batch: Batch, [h, p, n, g]: [usize; 4], state: DType) -> Result<Timed<B::Buf>> {
        let (step, rows) = (self.step(batch)?, batch.count());
        let t = step.bucket.tokens;
        let x = self.act(&[t, h * p + 2 * g * n])?;
        let op = SelectiveScan {
            step,
            x: x.cols(0, h * p),
            b: x.cols(h * p, g * n),
            c: x.cols(h * p + g * n, g * n),
            dt: self.act(&[t, h])?,
            par: self.constants(&[-2.0, 1.0, -3.5], h)?,
            pool: self.random(state, &[rows + 1, h, p, n], 1.0)?,
            y: self.act(&[t, h * p])?,
            form: ScanForm::PerHead,
            heads_per_group: h / g,
            first_head: 0,
            dt_limit: (0.0, f32::INFINITY),
        };
        let act = op.x.dtype.bytes();
        let bytes = 2 * rows * h * p * n * state.bytes() + t * (2 * h * p + 2 * g * n + h) * act;
        Ok(timed(op, bytes, t * h * p * n * 6))
    }

    fn channels(&self, batch: Batch, [c, n]: [usize; 2], state: DType) -> Result<Timed<B::Buf>> {
        let (step, rows) = (self.step(batch)?, batch.count());
        let t = step.bucket.tokens;
        let both = self.act(&[t, 2 * n])?;
        let mut par = vec![-2.0; n];
        par.extend([1.0, -3.5]);
        let op = SelectiveScan {
            step,
            x: self.act(&[t, c])?,
            b: both.cols(0, n),
            c: both.cols(n, n),
            dt: self.act(&[t, c])?,
            par: self.constants(&par, c)?,
            pool: self.random(state, &[rows + 1, c, 1, n], 1.0)?,
            y: self.act(&[t, c])?,
            form: ScanForm::PerChannel,
            heads_per_group: c,
            first_head: 0,
            dt_limit: (0.0, f32::INFINITY),
        };
        let bytes = 2 * rows * c * n * state.bytes() + t * (3 * c + 2 * n) * op.x.dtype.bytes();
        Ok(timed(op, bytes, t * c * n * 6))
    }

    /// With `gates` decays per head.
    fn delta(&self, batch: Batch, [hk, hv, dk, dv]: [usize; 4], gates: usize, state: DType) -> Result<Timed<B::Buf>> {
        let (step, rows) = (self.step(batch)?, batch.count());
        let t = step.bucket.tokens;
        let x = self.act(&[t, 2 * hk * dk + hv * dv])?;
        let op = GatedDelta {
            step,
            q: x.cols(0, hk * dk),
            k: x.cols(hk * dk, hk * dk),
            v: x.cols(2 * hk * dk, hv * dv),
            a: self.act(&[t, hv * gates])?,
            b: self.act(&[t, hv])?,
            par: self.constants(&[-1.0, -1.0], hv * gates)?,
            pool: self.random(state, &[rows + 1, hv, dk, dv], 1.0)?,
            out: self.act(&[t, hv * dv])?,
            heads_per_key: hv / hk,
            first_head: 0,
            beta_scale: 1.0,
        };
        let act = op.q.dtype.bytes();
        let bytes = 2 * rows * hv * dk * dv * state.bytes()
            + t * (2 * hk * dk + 2 * hv * dv + if gates > 1 { hv * gates } else { 0 }) * act;
        Ok(timed(op, bytes, t * hv * dk * dv * 8))
    }

    fn conv(&self, batch: Batch, [c, taps]: [usize; 2], act: Act) -> Result<Timed<B::Buf>> {
        let step = self.step(batch)?;
        let t = step.bucket.tokens;
        let conv = self.backend.caps().conv;
        let op = Conv1d {
            step,
            x: self.act(&[t, c])?,
            weight: self.random(DType::F32, &[c, taps + 1], 0.5)?,
            pool: self.random(conv, &[batch.count() + 1, c, taps - 1], 1.0)?,
            out: self.act(&[t, c])?,
            act,
        };
        let bytes = 2 * t * c * op.x.dtype.bytes();
        Ok(timed(op, bytes, 2 * t * c * taps))
    }

    fn attention(&self, batch: Batch, [h, kv, hd]: [usize; 3]) -> Result<Timed<B::Buf>> {
        let step = self.step(batch)?;
        let (t, rows, kv_type) = (step.bucket.tokens, batch.count(), self.backend.caps().kv);
        let (keys, flops) = (batch.keys(), 4 * batch.pairs() * h * hd);
        let dims = [1 + rows * keys.div_ceil(PAGE), kv, PAGE, hd];
        let pool = KvPool { k: self.random(kv_type, &dims, 1.0)?, v: self.random(kv_type, &dims, 1.0)? };
        let (q, out) = (self.act(&[t, h * hd])?, self.act(&[t, h * hd])?);
        let bytes = 2 * rows * keys * kv * hd * kv_type.bytes() + 2 * t * h * hd * q.dtype.bytes();
        let scale = 1.0 / (hd as f32).sqrt();
        Ok(timed(Attention { step, q, pool, out, head_dim: hd, scale, window: None, first: 0 }, bytes, flops))
    }

    fn latents(&self, batch: Batch, [heads, latent, shared, width]: [usize; 4]) -> Result<Timed<B::Buf>> {
        let step = self.step(batch)?;
        let (t, keys, kv_type) = (step.bucket.tokens, batch.keys(), self.backend.caps().kv);
        let pages = |columns| self.random(kv_type, &[1 + batch.count() * keys.div_ceil(PAGE), 1, PAGE, columns], 1.0);
        let pool = KvPool { k: pages(latent)?, v: pages(shared)? };
        let (q, queries) = (self.act(&[t, heads * latent])?, self.act(&[t, heads * width])?);
        let out = self.act(&[t, heads * latent])?;
        let bytes = batch.count() * keys * (latent + shared) * kv_type.bytes()
            + t * heads * (2 * latent + shared) * q.dtype.bytes();
        let scale = 1.0 / (width as f32).sqrt();
        let flops = 2 * batch.pairs() * heads * (2 * latent + shared);
        Ok(timed(LatentAttention { step, q, queries, pool, out, heads, scale }, bytes, flops))
    }

    fn matmul(&self, [m, n, k]: [usize; 3]) -> Result<Timed<B::Buf>> {
        let most = usize::try_from(self.backend.caps().max_binding).unwrap_or(usize::MAX) / (2 * k);
        let blocks = (0..n).step_by(most.min(n)).map(|col| {
            let w = self.random(DType::Bf16, &[most.min(n - col), k], (3.0 / k as f32).sqrt())?;
            Ok(RowBlock::plain(w, col))
        });
        let w = Weight { blocks: blocks.collect::<Result<_>>()?, n, k };
        let (x, out) = (self.act(&[m, k])?, self.act(&[m, n])?);
        let bytes = 2 * n * k + m * (n + k) * x.dtype.bytes();
        Ok(timed(
            Matmul { x, w, columns: None, bias: None, out, scale: 1.0, accumulate: false, precise: false },
            bytes,
            2 * m * n * k,
        ))
    }
}

impl Batch {
    fn count(self) -> usize {
        match self {
            Self::Decode { rows, .. } | Self::Prefill { rows, .. } => rows,
        }
    }

    /// Keys that a row's last token attends to.
    fn keys(self) -> usize {
        match self {
            Self::Decode { position, .. } => position + 1,
            Self::Prefill { tokens, .. } => tokens,
        }
    }

    /// Pairs of a token and a key, half of the square for a prompt.
    fn pairs(self) -> usize {
        match self {
            Self::Decode { rows, position } => rows * (position + 1),
            Self::Prefill { rows, tokens } => rows * tokens * tokens / 2,
        }
    }
}

fn timed<Buf: Handle>(op: impl Into<Op<Buf>>, bytes: usize, flops: usize) -> Timed<Buf> {
    Timed { op: op.into(), bytes: bytes as u64, flops: flops as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use selkie_core::cpu::CpuBackend;

    #[test]
    fn shapes_have_cases_and_names_of_their_own() {
        let cases = crate::all();
        let mut ids: Vec<String> = shapes().iter().map(Shape::id).collect();
        assert!(shapes().iter().all(|s| cases.iter().any(|c| c.op == s.op)));
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn a_shape_runs() {
        let backend = CpuBackend::new();
        let shape = shapes().into_iter().find(|s| s.id() == "conv1d/decode of 1").unwrap();
        let timed = shape.load(&backend).unwrap();
        assert!(timed.op.cost().bytes >= timed.bytes);
        backend.run(|ops| selkie_core::backend::Ops::op(ops, timed.op.clone())).unwrap();
    }
}
