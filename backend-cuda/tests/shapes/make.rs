//! Tensors without bytes, and ops on them.

use selkie_core::{
    backend::Handle,
    format::Format,
    kv8,
    ops::*,
    step::{Bucket, PAGE, Step},
    tensor::{DType, Tensor},
};
use selkie_cuda::launch::Address;

/// A buffer without bytes.
#[derive(Clone, Debug)]
pub struct Fake(usize);

impl Handle for Fake {
    fn id(&self) -> usize {
        self.0
    }
    fn bytes(&self) -> u64 {
        u64::MAX
    }
}

impl Address for Fake {
    fn address(&self) -> u64 {
        (self.0 as u64) << 32
    }
}

/// Makes tensors with different buffers.
pub struct Maker {
    next: usize,
    pub act: DType,
    pub state: DType,
    pub step: Step<Fake>,
    /// Whether weights are in every format, else in two.
    pub every_format: bool,
}

impl Maker {
    pub fn new(act: DType, state: DType, bucket: Bucket, every_format: bool) -> Self {
        Self { next: 2, act, state, step: Step::new(Fake(1), bucket), every_format }
    }

    pub fn of(&mut self, dtype: DType, dims: &[usize]) -> Tensor<Fake> {
        self.next += 1;
        Tensor::new(Fake(self.next), dtype, dims)
    }

    pub fn act(&mut self, dims: &[usize]) -> Tensor<Fake> {
        self.of(self.act, dims)
    }

    pub fn state(&mut self, dims: &[usize]) -> Tensor<Fake> {
        self.of(self.state, dims)
    }

    pub fn f32(&mut self, dims: &[usize]) -> Tensor<Fake> {
        self.of(DType::F32, dims)
    }

    pub fn codes(&mut self, format: Format, n: usize, k: usize) -> Weight<Fake> {
        let w = self.of(DType::U8, &[n, format.bytes(k, 1)]);
        Weight { blocks: vec![RowBlock { w, format, col: 0, squares: false }], n, k }
    }

    pub fn weight(&mut self, dtype: DType, n: usize, k: usize) -> Weight<Fake> {
        Weight { blocks: vec![RowBlock::plain(self.of(dtype, &[n, k]), 0)], n, k }
    }
}

/// `all`: with a factor and a bias per column.
pub fn matmul(m: &mut Maker, t: usize, w: Weight<Fake>, accumulate: bool, all: bool) -> Op<Fake> {
    let (columns, bias) = (all.then(|| m.f32(&[w.n])), all.then(|| m.f32(&[w.n])));
    Matmul { x: m.act(&[t, w.k]), out: m.act(&[t, w.n]), w, columns, bias, scale: 1.0, accumulate, precise: false }
        .into()
}

pub fn conv(m: &mut Maker, ops: &mut Vec<Op<Fake>>, c: usize) {
    let (step, t) = (m.step.clone(), m.step.bucket.tokens);
    let (x, weight, pool, out) = (m.act(&[t, c]), m.f32(&[c, 5]), m.act(&[9, c, 3]), m.act(&[t, c]));
    ops.push(Conv1d { step, x, weight, pool, out, act: Act::Silu }.into());
}

/// With pages of `pages`; of pages in 8 bits only some variants.
pub fn attention(m: &mut Maker, ops: &mut Vec<Op<Fake>>, [heads, kv, hd]: [usize; 3], pages: DType) {
    let (step, t) = (m.step.clone(), m.step.bucket.tokens);
    let dims = [9, kv, PAGE, kv8::stored(pages, hd)];
    let pool = KvPool { k: m.of(pages, &dims), v: m.of(pages, &dims) };
    let few = pages == DType::I8;
    for (norm, rope) in [(true, true), (false, true), (false, false)].into_iter().take(if few { 1 } else { 3 }) {
        let norm = norm.then(|| (m.f32(&[2, hd]), 1e-6));
        let inv_freq = rope.then(|| m.f32(&[hd / 2]));
        let qkv = m.act(&[t, (heads + 2 * kv) * hd]);
        let (q, k, v) = (qkv.cols(0, heads * hd), qkv.cols(heads * hd, kv * hd), qkv.cols((heads + kv) * hd, kv * hd));
        let q_out = m.act(&[t, heads * hd]);
        ops.push(
            RopeKv { step: step.clone(), q, k, v, norm, inv_freq, q_out, pool: pool.clone(), head_dim: hd }.into(),
        );
    }
    for window in [None, Some(100)].into_iter().take(if few { 1 } else { 2 }) {
        let (q, out) = (m.act(&[t, heads * hd]), m.act(&[t, heads * hd]));
        ops.push(
            Attention { step: step.clone(), q, pool: pool.clone(), out, head_dim: hd, scale: 0.1, window, first: 0 }
                .into(),
        );
    }
}

/// With pages of `pages`.
pub fn latent(m: &mut Maker, ops: &mut Vec<Op<Fake>>, [heads, latent, shared, own]: [usize; 4], pages: DType) {
    let (step, t) = (m.step.clone(), m.step.bucket.tokens);
    let mut rows = |width| m.of(pages, &[9, 1, PAGE, kv8::stored(pages, width)]);
    let pool = KvPool { k: rows(latent), v: rows(shared) };
    let width = own + shared;
    let proj = m.act(&[t, heads * width + latent + shared]);
    let (queries, kv) = (proj.cols(0, heads * width), proj.cols(heads * width, latent + shared));
    ops.push(LatentKv { step: step.clone(), kv, weight: m.f32(&[latent]), eps: 1e-6, pool: pool.clone() }.into());
    let (q, attended, values) = (m.act(&[t, heads * latent]), m.act(&[t, heads * latent]), m.act(&[t, heads * own]));
    let (keys, expansion) = (m.f32(&[heads * latent, own]), m.f32(&[heads * own, latent]));
    ops.push(HeadMatmul { x: queries.clone(), w: keys, out: q.clone(), heads }.into());
    ops.push(LatentAttention { step, q, queries, pool, out: attended.clone(), heads, scale: 0.1 }.into());
    ops.push(HeadMatmul { x: attended, w: expansion, out: values, heads }.into());
}

/// `n` rows of each of `e` experts, 8-bit floats with a scale per 128 x 128.
pub fn eights(m: &mut Maker, e: usize, n: usize, k: usize) -> RowBlock<Fake> {
    let w = m.of(DType::U8, &[e, n, Format::F8.bytes(k, 1)]);
    RowBlock { w, format: Format::F8, col: 0, squares: true }
}

/// The experts' first half, with `n` columns.
pub fn experts(m: &mut Maker, e: usize, n: usize, d: usize, ids: &Tensor<Fake>) -> ExpertMatmul<Fake> {
    let (t, k) = (ids.rows(), ids.row_len());
    let up = RowBlock::plain(m.of(DType::Bf16, &[e, n, d]), 0);
    let (x, experts) = (m.act(&[t, d]), vec![ExpertRange { first: 0, experts: e, blocks: vec![up] }]);
    let (ids, out) = (ids.clone(), m.act(&[t * k, n]));
    ExpertMatmul { x, experts, ids, combine: None, out, scale: 1.0, accumulate: false }
}

pub fn moe(m: &mut Maker, ops: &mut Vec<Op<Fake>>, e: usize, k: usize, inner: usize, d: usize) {
    let (step, t) = (m.step.clone(), m.step.bucket.tokens);
    let routers = [
        Router::SoftmaxTopK { renorm: true },
        Router::TopKSoftmax,
        Router::Sigmoid { groups: 4, topk_group: 2, renorm: true, sum_eps: 1e-20, scale: 2.5 },
    ];
    for router in routers {
        let (logits, ids, weights) = (m.f32(&[t, e]), m.of(DType::U32, &[t, k]), m.f32(&[t, k]));
        let bias = matches!(router, Router::Sigmoid { .. }).then(|| m.f32(&[e]));
        ops.push(Route { step: step.clone(), logits, bias, ids, weights, router }.into());
    }
    let ids = m.of(DType::U32, &[t, k]);
    ops.push(experts(m, e, inner, d, &ids).into());
    let w = m.of(DType::Bf16, &[e, d, inner]);
    let down = ExpertRange { first: 0, experts: e, blocks: vec![RowBlock::plain(w, 0)] };
    let (x, combine, out) = (m.act(&[t * k, inner]), Some(m.f32(&[t, k])), m.act(&[t, d]));
    ops.push(ExpertMatmul { x, experts: vec![down], ids, combine, out, scale: 1.0, accumulate: true }.into());
}
