//! Times single ops on a GPU, on the shapes that the project compares with other kernels.
//!
//! `cold` is one call after the L2 was flushed, `net` = cold less an empty kernel timed the same way, `warm` the mean of 20
//! calls in one graph; microseconds, medians. An argument leaves only the rows whose name holds it.

use selkie_core::{
    Result,
    backend::{Backend, Ops},
    ops::*,
    step::{Bucket, CARRY, Chunk, PAGE, Row, Step, bucket_of, encode},
    tensor::{DType, Tensor},
};
use selkie_cuda::{Buf, Cuda, Options};

struct Bench {
    cuda: Cuda,
    flush: Buf,
    empty: f32,
    filter: String,
}

/// One token in each of `n` rows at `position`, in place in slots 1 .. n.
fn decode(n: usize, position: u32) -> Vec<Row> {
    let pages = position / PAGE as u32 + 1;
    (0..n as u32)
        .map(|i| Row {
            lane: i,
            first_position: position,
            ids: vec![0],
            chunks: vec![Chunk { len: 1, src: i + 1, dst: i + 1 }],
            pages: (0..pages).map(|p| 1 + i * pages + p).collect(),
            outputs: vec![0],
        })
        .collect()
}

/// `n` rows of `tokens` tokens from position 0.
fn prefill(n: usize, tokens: usize) -> Vec<Row> {
    let chunks = tokens / PAGE;
    (0..n as u32)
        .map(|i| Row {
            lane: i,
            first_position: 0,
            ids: vec![0; tokens],
            chunks: (0..chunks)
                .map(|c| Chunk {
                    len: PAGE as u32,
                    src: if c == 0 { 0 } else { CARRY },
                    dst: if c + 1 == chunks { i + 1 } else { 0 },
                })
                .collect(),
            pages: (0..chunks as u32).map(|p| 1 + i * chunks as u32 + p).collect(),
            outputs: vec![tokens as u32 - 1],
        })
        .collect()
}

fn median(mut v: Vec<f32>) -> f32 {
    v.sort_by(f32::total_cmp);
    v[v.len() / 2]
}

impl Bench {
    fn tensor(&self, dtype: DType, dims: &[usize], scale: f32) -> Result<Tensor<Buf>> {
        let bytes = dims.iter().product::<usize>() * dtype.bytes();
        let t = Tensor::new(self.cuda.alloc("bench", bytes as u64)?, dtype, dims);
        if dtype != DType::U32 {
            self.cuda.fill_random(&t, t.buf_id() as u32, scale)?;
        }
        Ok(t)
    }

    fn act(&self, dims: &[usize]) -> Result<Tensor<Buf>> {
        self.tensor(DType::Bf16, dims, 1.0)
    }

    fn step(&self, rows: &[Row]) -> Result<(Step<Buf>, Bucket)> {
        let bucket = bucket_of(rows);
        let words = encode(rows, bucket);
        let buf = self.cuda.alloc("ints", 4 * words.len() as u64)?;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.cuda.write(&buf, 0, &bytes)?;
        Ok((Step::new(buf, bucket), bucket))
    }

    fn wanted(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    fn row(&self, name: &str, bytes: u64, flops: u64, op: Op<Buf>) -> Result<()> {
        self.cuda.reserve(self.cuda.scratch(&op))?;
        self.cuda.run(|r| r.op(op.clone()))?;
        let one = self.cuda.record(|r| r.op(op.clone()))?;
        let many = self.cuda.record(|r| (0..20).try_for_each(|_| r.op(op.clone())))?;
        let warm = self.cuda.time_us(|| self.cuda.play(&many))?;
        // A light load brings the clocks up and does not heat the chip.
        for _ in 0..200 {
            self.cuda.clear(&self.flush)?;
        }
        let cold = (0..if warm > 40_000.0 { 5 } else { 31 }).map(|_| {
            self.cuda.clear(&self.flush)?;
            self.cuda.time_us(|| self.cuda.play(&one))
        });
        let cold = median(cold.collect::<Result<_>>()?);
        let warm = median((0..7).map(|_| self.cuda.time_us(|| self.cuda.play(&many))).collect::<Result<_>>()?) / 20.0;
        let floor = (bytes as f32 / 4.3e6).max(flops as f32 / 790e6);
        println!(
            "{name:<44} cold {cold:>8.2}  net {:>8.2}  warm {warm:>8.2}  floor {floor:>7.1}  {:>5.2} TB/s {:>6.1} TFLOP/s",
            cold - self.empty,
            bytes as f32 / warm / 1e6,
            flops as f32 / warm / 1e6
        );
        Ok(())
    }

    fn scan(&self, name: &str, rows: &[Row], slots: usize) -> Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let (h, p, n, g) = (128, 64, 128, 8);
        let (step, bucket) = self.step(rows)?;
        let t = bucket.tokens;
        let x = self.act(&[t, h * p + 2 * g * n])?;
        let par = self.tensor(DType::F32, &[3, h], 1.0)?;
        let a: Vec<u8> = (0..3 * h)
            .flat_map(|i| {
                match i / h {
                    0 => -0.5 - (i % 8) as f32 / 2.0,
                    1 => 1.0f32,
                    _ => -3.5,
                }
                .to_le_bytes()
            })
            .collect();
        self.cuda.write(&par.buf, 0, &a)?;
        let op = SelectiveScan {
            step,
            x: x.cols(0, h * p),
            b: x.cols(h * p, g * n),
            c: x.cols(h * p + g * n, g * n),
            dt: self.act(&[t, h])?,
            par,
            pool: self.tensor(DType::F32, &[slots + 1, h, p, n], 1.0)?,
            y: self.act(&[t, h * p])?,
            form: ScanForm::PerHead,
            heads_per_group: h / g,
            first_head: 0,
            dt_limit: (0.0, f32::INFINITY),
        };
        let bytes = rows.len() * 8 * h * p * n + t * (2 * h * p + 2 * g * n + h) * 2;
        self.row(name, bytes as u64, (t * h * p * n * 6) as u64, op.into())
    }

    fn delta(&self, name: &str, rows: &[Row], slots: usize) -> Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let (hk, hv, d) = (16, 32, 128);
        let (step, bucket) = self.step(rows)?;
        let t = bucket.tokens;
        let x = self.act(&[t, 2 * hk * d + hv * d])?;
        let op = GatedDelta {
            step,
            q: x.cols(0, hk * d),
            k: x.cols(hk * d, hk * d),
            v: x.cols(2 * hk * d, hv * d),
            a: self.act(&[t, hv])?,
            b: self.act(&[t, hv])?,
            par: self.tensor(DType::F32, &[2, hv], -1.0)?,
            pool: self.tensor(DType::F32, &[slots + 1, hv, d, d], 1.0)?,
            out: self.act(&[t, hv * d])?,
            heads_per_key: hv / hk,
            first_head: 0,
            beta_scale: 1.0,
        };
        let bytes = rows.len() * 8 * hv * d * d + t * (2 * hk * d + 2 * hv * d) * 2;
        self.row(name, bytes as u64, (t * hv * d * d * 8) as u64, op.into())
    }

    fn conv(&self, name: &str, rows: &[Row], slots: usize) -> Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let c = 10240;
        let (step, bucket) = self.step(rows)?;
        let t = bucket.tokens;
        let op = Conv1d {
            step,
            x: self.act(&[t, c])?,
            weight: self.tensor(DType::F32, &[c, 5], 1.0)?,
            pool: self.act(&[slots + 1, c, 3])?,
            out: self.act(&[t, c])?,
            act: Act::Silu,
        };
        self.row(name, (t * c * 4) as u64, 0, op.into())
    }

    fn linear(&self, n: usize, k: usize, m: usize) -> Result<()> {
        let name = format!("linear {n}x{k} M={m}");
        if !self.wanted(&name) {
            return Ok(());
        }
        let w = Weight { blocks: vec![RowBlock { w: self.act(&[n, k])?, col: 0 }], n, k };
        let op =
            Matmul { x: self.act(&[m, k])?, w, bias: None, out: self.act(&[m, n])?, scale: 1.0, accumulate: false };
        self.row(&name, (2 * n * k + 2 * m * (n + k)) as u64, (2 * n * k * m) as u64, op.into())
    }

    fn attention(&self, name: &str, rows: &[Row], context: usize) -> Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let (h, kv, hd) = (32, 8, 128);
        let (step, bucket) = self.step(rows)?;
        let t = bucket.tokens;
        let pages = 1 + rows.len() * context / PAGE;
        let dims = [pages, kv, PAGE, hd];
        let pool = KvPool { k: self.act(&dims)?, v: self.act(&dims)? };
        let op = Attention {
            step,
            q: self.act(&[t, h * hd])?,
            pool,
            out: self.act(&[t, h * hd])?,
            head_dim: hd,
            scale: 0.088,
            window: None,
        };
        let flops = if t > rows.len() { 2 * t * t * h * hd } else { 4 * rows.len() * context * h * hd };
        self.row(name, (rows.len() * context * kv * hd * 4) as u64, flops as u64, op.into())
    }
}

/// The number of a tensor's buffer, for seeds.
trait BufId {
    fn buf_id(&self) -> usize;
}

impl BufId for Tensor<Buf> {
    fn buf_id(&self) -> usize {
        use selkie_core::backend::Handle;
        self.buf.id()
    }
}

fn main() -> Result<()> {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let cuda = Cuda::open(Options::default())?;
    let flush = cuda.alloc("flush", 256 << 20)?;
    let mut b = Bench { cuda, flush, empty: 0.0, filter };
    // An op without tokens to speak of: a gather of one small row.
    let (step, _) = b.step(&decode(1, 0))?;
    let empty = Gather { step, x: b.act(&[1, 8])?, out: b.act(&[1, 8])? };
    b.cuda.run(|r| r.op(empty.clone().into()))?;
    let tape = b.cuda.record(|r| r.op(empty.clone().into()))?;
    for _ in 0..2000 {
        b.cuda.clear(&b.flush)?;
    }
    let times = (0..31).map(|_| {
        b.cuda.clear(&b.flush)?;
        b.cuda.time_us(|| b.cuda.play(&tape))
    });
    b.empty = median(times.collect::<Result<_>>()?);
    println!("{}: empty step {:.2} us", b.cuda.caps().device, b.empty);

    for n in [1, 8, 64, 256] {
        b.scan(&format!("state update H128 P64 N128 B={n}"), &decode(n, 70), n)?;
    }
    for n in [1, 8, 64, 256] {
        b.delta(&format!("delta step 32v d128 B={n}"), &decode(n, 70), n)?;
    }
    for (n, k, m) in [
        (18560, 4096, 1),
        (18560, 4096, 8),
        (18560, 4096, 64),
        (4096, 21504, 1),
        (131_072, 4096, 1),
        (4096, 8192, 1),
        (2048, 2048, 1),
        (768, 768, 1),
    ] {
        b.linear(n, k, m)?;
    }
    b.attention("attention decode B=1 32k", &decode(1, 32_767), 32_768)?;
    b.attention("attention decode B=64 4k", &decode(64, 4095), 4096)?;
    for t in [2048, 8192] {
        b.conv(&format!("conv1d 10240 T={t}"), &prefill(1, t), 1)?;
    }
    for t in [2048, 8192, 32_768] {
        b.scan(&format!("scan prefill T={t}"), &prefill(1, t), 1)?;
    }
    for t in [2048, 8192, 32_768] {
        b.delta(&format!("delta prefill T={t}"), &prefill(1, t), 1)?;
    }
    b.delta("delta prefill 8 x 4096", &prefill(8, 4096), 8)?;
    b.attention("attention prefill T=8192", &prefill(1, 8192), 8192)?;
    for (n, k) in [(18560, 4096), (21504, 4096), (4096, 21504)] {
        b.linear(n, k, 8192)?;
    }
    Ok(())
}
