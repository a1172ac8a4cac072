//! Loading of weights onto a device: matrices as row blocks, experts as ranges, small parameters as f32.
//!
//! A matrix is described by [`Part`]s: which rows of which stored tensor are which output columns. Fusing q, k and v or
//! undoing an interleaved layout is a list of parts. A backend that computes in host memory adopts the stored bytes and
//! gets views of them; for the others the rows are gathered, in the order of their columns and in the stored dtype, into
//! as few buffers as one binding's limit allows.

use std::{collections::HashMap, ops::Range};

use crate::{
    Error, Result,
    backend::Backend,
    checkpoint::{Checkpoint, RawTensor, StoredTensor},
    ops::{ExpertRange, RowBlock, Weight},
    tensor::{DType, Tensor},
};

/// Bytes of one read and one write to a device: small enough to report progress and to bound staging memory, which a
/// page's module would never give back.
const PIECE: usize = if cfg!(target_arch = "wasm32") { 4 << 20 } else { 16 << 20 };

/// Rows of a stored matrix that become output columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Name of the tensor, without the model's prefix.
    pub name: String,
    /// Rows of the whole tensor.
    pub of: usize,
    /// Rows taken.
    pub rows: Range<usize>,
    /// Output column of the first of them.
    pub col: usize,
    /// Factor on these output columns, their bias included.
    pub scale: f32,
}

impl Part {
    /// All `rows` rows of a tensor, from output column `col` on.
    pub fn whole(name: impl Into<String>, rows: usize, col: usize) -> Self {
        Self::rows(name, rows, 0..rows, col)
    }
}

impl Part {
    /// Some of the `of` rows of a tensor, from output column `col` on.
    pub fn rows(name: impl Into<String>, of: usize, rows: Range<usize>, col: usize) -> Self {
        Self { name: name.into(), of, rows, col, scale: 1.0 }
    }

    /// The same with a factor.
    pub fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }
}

/// Where the matrices `[N, K]` of all experts of a layer are stored: in one tensor, or in some per expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertParts {
    /// Names of one tensor `[E, N, K]`, any of which may exist.
    pub stacked: Vec<String>,
    /// Tensors of one expert, with `{}` for its number, and their rows; together N. Empty if only the stacked form exists.
    pub each: Vec<(String, usize)>,
}

/// How the stored weight of a norm is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// The factor itself.
    Plain,
    /// The factor minus 1.
    ZeroCentred,
}

impl NormKind {
    /// The factor for a stored weight.
    pub fn weight(self, stored: f32) -> f32 {
        match self {
            Self::Plain => stored,
            Self::ZeroCentred => 1.0 + stored,
        }
    }
}

/// A linear layer on the device: `scale * columns * x Wᵀ + bias`.
#[derive(Clone, Debug)]
pub struct Linear<Buf> {
    /// `[N, K]`.
    pub w: Weight<Buf>,
    /// `[N] f32`: a factor per output column, if they differ.
    pub columns: Option<Tensor<Buf>>,
    /// `[N] f32`, with its factors folded in.
    pub bias: Option<Tensor<Buf>>,
    /// Factor on the product.
    pub scale: f32,
}

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes placed on the device.
    pub done: u64,
    /// Bytes of the checkpoint, some of which may never be needed.
    pub total: u64,
}

/// Reads tensors of one checkpoint onto one backend.
pub struct Loader<'a, B: Backend> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    /// In front of every relative name.
    prefix: String,
    progress: Progress,
    report: &'a mut dyn FnMut(Progress),
    /// Matrices so far by the name of their first part, with their parts, for layers that share them.
    matrices: HashMap<String, Vec<Shared<B::Buf>>>,
}

/// A loaded matrix and the stored rows that it is made of.
type Shared<Buf> = (Vec<Part>, Weight<Buf>);

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader that tells `report` after every piece how far it is.
    pub fn new(backend: &'a B, checkpoint: &'a Checkpoint, report: &'a mut dyn FnMut(Progress)) -> Self {
        let progress = Progress { done: 0, total: checkpoint.bytes() };
        Self { backend, checkpoint, prefix: String::new(), progress, report, matrices: HashMap::new() }
    }

    /// The device.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// The stored tensors.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Takes the first of `prefixes` under which one of `names` is stored; the first of all if none is, so that the error
    /// about the missing tensor names it.
    pub fn set_prefix(&mut self, prefixes: &[&str], names: &[&str]) {
        let stored = |p: &&&str| names.iter().any(|n| self.checkpoint.contains(&format!("{p}{n}")));
        self.prefix = prefixes.iter().find(stored).or(prefixes.first()).map_or(String::new(), |p| (*p).into());
    }

    /// The first of several relative names that is stored (the first of all if none is).
    pub fn choose<'n>(&self, names: &[&'n str]) -> &'n str {
        names.iter().find(|n| self.checkpoint.contains(&self.full(n))).unwrap_or(&names[0])
    }

    /// Whether a relative name is stored; nothing is in a random checkpoint.
    pub fn stores(&self, name: &str) -> bool {
        self.checkpoint.info(&self.full(name)).is_some()
    }

    /// Whether two relative names are both stored, with different values.
    ///
    /// # Errors
    /// Those of the source, and [`Error::Unsupported`] for an unknown dtype.
    pub async fn differ(&self, a: &str, b: &str) -> Result<bool> {
        let (a, b) = (self.full(a), self.full(b));
        let (Some(x), Some(y)) = (self.checkpoint.info(&a), self.checkpoint.info(&b)) else { return Ok(false) };
        if (&x.dtype, &x.shape) != (&y.dtype, &y.shape) {
            return Ok(true);
        }
        let (x, y) = (self.checkpoint.tensor(&a, &x.shape)?, self.checkpoint.tensor(&b, &y.shape)?);
        for start in (0..x.bytes()).step_by(PIECE) {
            let piece = start..x.bytes().min(start + PIECE);
            if *x.read(piece.clone()).await? != *y.read(piece).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Bytes placed on the device so far; a tensor that is used twice counts once.
    pub fn loaded(&self) -> u64 {
        self.progress.done
    }

    /// The stored shape of a relative name; `None` if it is not there, and in a random checkpoint.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.checkpoint.info(&self.full(name)).map(|info| info.shape.as_slice())
    }

    /// The whole name of a relative one, which may be several separated by `|`: the first that is stored.
    fn full(&self, name: &str) -> String {
        // The output matrix stands outside of the prefix.
        let whole = |n: &str| n.strip_prefix('/').map_or_else(|| format!("{}{n}", self.prefix), str::to_owned);
        let mut names = name.split('|').map(whole);
        let first = names.next().unwrap_or_default();
        if self.checkpoint.contains(&first) {
            return first;
        }
        names.find(|n| self.checkpoint.contains(n)).unwrap_or(first)
    }

    async fn raw(&self, name: &str, shape: &[usize]) -> Result<RawTensor> {
        self.checkpoint.get(&self.full(name), shape).await
    }

    fn stored(&self, name: &str, shape: &[usize]) -> Result<StoredTensor> {
        self.checkpoint.tensor(&self.full(name), shape)
    }

    fn advance(&mut self, bytes: usize) {
        self.progress.done += bytes as u64;
        self.progress.total = self.progress.total.max(self.progress.done);
        (self.report)(self.progress);
    }

    fn write(&mut self, dst: &B::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            self.backend.write(dst, at + (i * PIECE) as u64, piece)?;
            self.advance(piece.len());
        }
        Ok(())
    }

    /// Copies bytes `from` of a tensor to `dst` from byte `at` on, never holding more than a piece of them.
    async fn copy(&mut self, tensor: &StoredTensor, from: Range<usize>, dst: &B::Buf, at: usize) -> Result<()> {
        for start in from.clone().step_by(PIECE) {
            let piece = tensor.read(start..from.end.min(start + PIECE)).await?;
            self.write(dst, (at + start - from.start) as u64, &piece)?;
        }
        Ok(())
    }

    /// A matrix with inner dimension `k` out of `parts`, which cover the output columns once. One that is asked for again is not
    /// loaded again.
    ///
    /// # Errors
    /// Those of [`Checkpoint::get`], naming the tensor, and of the backend's allocations and writes.
    pub async fn matrix(&mut self, k: usize, parts: &[Part]) -> Result<Weight<B::Buf>> {
        let mut parts: Vec<Part> = parts.iter().map(|p| p.clone().scaled(1.0)).collect();
        parts.sort_by_key(|p| p.col);
        parts.dedup_by(|b, a| {
            let joined = a.name == b.name && a.rows.end == b.rows.start && a.col + a.rows.len() == b.col;
            if joined {
                a.rows.end = b.rows.end;
            }
            joined
        });
        let known = self.matrices.get(&parts[0].name).and_then(|all| all.iter().find(|(p, w)| *p == parts && w.k == k));
        if let Some((_, w)) = known {
            return Ok(w.clone());
        }
        let w = self.new_matrix(k, &parts).await?;
        self.matrices.entry(parts[0].name.clone()).or_default().push((parts, w.clone()));
        Ok(w)
    }

    async fn new_matrix(&mut self, k: usize, parts: &[Part]) -> Result<Weight<B::Buf>> {
        let n = parts.last().map_or(0, |p| p.col + p.rows.len());
        if let Some(w) = self.random_matrix(n, k, &parts[0].name)? {
            return Ok(w);
        }
        let mut tensors: HashMap<&str, StoredTensor> = HashMap::new();
        for p in parts {
            if !tensors.contains_key(p.name.as_str()) {
                tensors.insert(&p.name, self.stored(&p.name, &[p.of, k])?);
            }
        }
        if !self.backend.adopts() {
            return self.gather(n, k, parts, &tensors).await;
        }
        let mut adopted: HashMap<&str, Tensor<B::Buf>> = HashMap::new();
        for (name, tensor) in tensors {
            adopted.insert(name, self.adopt(tensor).await?);
        }
        let view = |p: &Part| adopted[p.name.as_str()].slice_rows(p.rows.start, p.rows.len());
        let blocks = parts.iter().map(|p| RowBlock { w: view(p), col: p.col }).collect();
        Ok(Weight { blocks, n, k })
    }

    /// A tensor where it lies in host memory.
    async fn adopt(&mut self, tensor: StoredTensor) -> Result<Tensor<B::Buf>> {
        let raw = tensor.whole().await?;
        self.advance(raw.bytes.len());
        let buf = self.backend.adopt(&raw.bytes).expect("a backend that adopts");
        Ok(Tensor::new(buf, raw.dtype, &raw.shape))
    }

    /// Random values made on the device, if nothing is stored and it can make them.
    fn random_matrix(&mut self, n: usize, k: usize, name: &str) -> Result<Option<Weight<B::Buf>>> {
        let name = self.full(name);
        let Some((seed, half)) = self.checkpoint.random_matrix(&name, &[n, k]) else { return Ok(None) };
        let most = self.rows_per_binding(k * DType::Bf16.bytes(), &name)?;
        let mut blocks = Vec::new();
        for col in (0..n).step_by(most.min(n)) {
            let rows = most.min(n - col);
            let bytes = rows * k * DType::Bf16.bytes();
            let w = Tensor::new(self.backend.alloc(&name, bytes as u64)?, DType::Bf16, &[rows, k]);
            if !self.backend.fill_random(&w, seed.wrapping_add(col as u32), half)? {
                return Ok(None);
            }
            self.advance(bytes);
            blocks.push(RowBlock { w, col });
        }
        Ok(Some(Weight { blocks, n, k }))
    }

    /// The same for the matrices of all experts.
    fn random_experts(&mut self, e: usize, n: usize, k: usize, name: &str) -> Result<Option<Vec<ExpertRange<B::Buf>>>> {
        let Some((seed, half)) = self.checkpoint.random_matrix(&self.full(name), &[e, n, k]) else { return Ok(None) };
        let gather = ExpertGather::new(self, name, DType::Bf16, e, n, k)?;
        for (i, block) in gather.ranges.iter().flat_map(|r| &r.blocks).enumerate() {
            if !self.backend.fill_random(&block.w, seed.wrapping_add(i as u32), half)? {
                return Ok(None);
            }
            self.advance(block.w.len() * DType::Bf16.bytes());
        }
        Ok(Some(gather.ranges))
    }

    /// Copies the rows of `parts`, sorted by column, into buffers of one dtype within the binding limit.
    async fn gather(
        &mut self,
        n: usize,
        k: usize,
        parts: &[Part],
        stored: &HashMap<&str, StoredTensor>,
    ) -> Result<Weight<B::Buf>> {
        let mut blocks = Vec::new();
        // What is left of the current part.
        let (mut next, mut taken) = (0, 0);
        while next < parts.len() {
            let dtype = stored[parts[next].name.as_str()].dtype;
            let col = parts[next].col + taken;
            let row = k * dtype.bytes();
            let most = self.rows_per_binding(row, &parts[next].name)?;
            let mut copies: Vec<(&StoredTensor, Range<usize>, usize)> = Vec::new();
            let mut rows = 0;
            while next < parts.len() && rows < most && stored[parts[next].name.as_str()].dtype == dtype {
                let p = &parts[next];
                let count = (p.rows.len() - taken).min(most - rows);
                let from = p.rows.start + taken;
                copies.push((&stored[p.name.as_str()], from * row..(from + count) * row, rows * row));
                (rows, taken) = (rows + count, taken + count);
                if taken == p.rows.len() {
                    (next, taken) = (next + 1, 0);
                }
            }
            let buf = self.backend.alloc(&self.full(&parts[0].name), (rows * row) as u64)?;
            for (tensor, from, at) in copies {
                self.copy(tensor, from, &buf, at).await?;
            }
            blocks.push(RowBlock { w: Tensor::new(buf, dtype, &[rows, k]), col });
        }
        Ok(Weight { blocks, n, k })
    }

    fn rows_per_binding(&self, row_bytes: usize, name: &str) -> Result<usize> {
        let limit = self.backend.caps().max_binding;
        match limit / row_bytes as u64 {
            0 => Err(Error::Unsupported {
                what: format!("tensor `{}` on this device", self.full(name)),
                why: format!("one row has {row_bytes} bytes, but a binding holds {limit}"),
            }),
            rows => Ok(usize::try_from(rows).unwrap_or(usize::MAX)),
        }
    }

    /// [`Loader::matrix`] with the factors of the parts and, if asked for, the biases that belong to them: `x.bias` to `x.weight`.
    /// `input` is a factor on what the layer reads, which its biases do not see.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub async fn linear(&mut self, k: usize, parts: &[Part], bias: bool, input: f32) -> Result<Linear<B::Buf>> {
        let w = self.matrix(k, parts).await?;
        let bias = match bias {
            true => Some(self.biases(w.n, parts).await?),
            false => None,
        };
        if parts.iter().all(|p| p.scale == parts[0].scale) {
            return Ok(Linear { w, columns: None, bias, scale: input * parts[0].scale });
        }
        let mut columns = vec![0.0; w.n];
        for p in parts {
            columns[p.col..p.col + p.rows.len()].fill(input * p.scale);
        }
        let columns = self.upload(&format!("factors of {}", parts[0].name), &columns, &[w.n])?;
        Ok(Linear { w, columns: Some(columns), bias, scale: 1.0 })
    }

    async fn biases(&mut self, n: usize, parts: &[Part]) -> Result<Tensor<B::Buf>> {
        let mut all = vec![0.0; n];
        for p in parts {
            let name = format!("{}.bias", p.name.strip_suffix(".weight").unwrap_or(&p.name));
            let values = self.values(&name, &[p.of]).await?;
            for (out, b) in all[p.col..].iter_mut().zip(&values[p.rows.clone()]) {
                *out = b * p.scale;
            }
        }
        self.upload(&parts[0].name, &all, &[n])
    }

    /// The matrices `[n, k]` of `experts` experts.
    ///
    /// # Errors
    /// As [`Loader::matrix`], and [`Error::Unsupported`] if the experts have several dtypes on a device that gathers them.
    pub async fn experts(
        &mut self,
        experts: usize,
        n: usize,
        k: usize,
        parts: &ExpertParts,
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let name = parts.stacked.first().or(parts.each.first().map(|(name, _)| name));
        if let Some(name) = name
            && let Some(ranges) = self.random_experts(experts, n, k, name)?
        {
            return Ok(ranges);
        }
        let stacked = parts.stacked.iter().find(|name| self.stores(name));
        match stacked.or(parts.stacked.first().filter(|_| parts.each.is_empty())) {
            Some(name) => {
                let tensor = self.stored(name, &[experts, n, k])?;
                if self.backend.adopts() {
                    let w = self.adopt(tensor).await?;
                    return Ok(vec![ExpertRange { first: 0, experts, blocks: vec![RowBlock { w, col: 0 }] }]);
                }
                let each = tensor.bytes() / experts;
                let mut gather = ExpertGather::new(self, name, tensor.dtype, experts, n, k)?;
                for e in 0..experts {
                    let bytes = tensor.read(e * each..(e + 1) * each).await?;
                    gather.put(self, e, 0, &bytes)?;
                }
                Ok(gather.ranges)
            }
            None => self.separate_experts(experts, n, k, &parts.each).await,
        }
    }

    async fn separate_experts(
        &mut self,
        experts: usize,
        n: usize,
        k: usize,
        each: &[(String, usize)],
    ) -> Result<Vec<ExpertRange<B::Buf>>> {
        let mut adopted = Vec::new();
        let mut gather: Option<ExpertGather<B>> = None;
        for e in 0..experts {
            let (mut col, mut blocks) = (0, Vec::new());
            for (pattern, rows) in each {
                let name = pattern.replace("{}", &e.to_string());
                let tensor = self.stored(&name, &[*rows, k])?;
                if self.backend.adopts() {
                    let w = self.adopt(tensor).await?;
                    blocks.push(RowBlock { w: Tensor::new(w.buf, w.dtype, &[1, *rows, k]), col });
                } else {
                    if gather.is_none() {
                        gather = Some(ExpertGather::new(self, &name, tensor.dtype, experts, n, k)?);
                    }
                    let gather = gather.as_mut().expect("it was just made");
                    if tensor.dtype != gather.dtype {
                        return Err(Error::Unsupported {
                            what: format!("tensor `{}` of dtype {:?}", self.full(&name), tensor.dtype),
                            why: format!("the experts before it are {:?}", gather.dtype),
                        });
                    }
                    gather.put(self, e, col, &tensor.whole().await?.bytes)?;
                }
                col += rows;
            }
            if gather.is_none() {
                adopted.push(ExpertRange { first: e, experts: 1, blocks });
            }
        }
        Ok(gather.map_or(adopted, |g| g.ranges))
    }

    /// The elements of a small tensor.
    ///
    /// # Errors
    /// Those of [`Checkpoint::get`].
    pub async fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let raw = self.raw(name, shape).await?;
        Ok(raw.dtype.to_f32(&raw.bytes))
    }

    /// A vector of `len` elements as `f` of the stored ones, f32.
    ///
    /// # Errors
    /// Those of [`Checkpoint::get`] and of the backend.
    pub async fn vector(&mut self, name: &str, len: usize, f: impl Fn(f32) -> f32) -> Result<Tensor<B::Buf>> {
        let values: Vec<f32> = self.values(name, &[len]).await?.into_iter().map(f).collect();
        self.upload(name, &values, &[len])
    }

    /// Computed f32 values as a tensor; `label` names it in errors.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn upload(&mut self, label: &str, values: &[f32], dims: &[usize]) -> Result<Tensor<B::Buf>> {
        assert_eq!(values.len(), dims.iter().product::<usize>(), "{label}");
        let buf = self.backend.alloc(&self.full(label), 4 * values.len() as u64)?;
        self.write(&buf, 0, bytemuck::cast_slice(values))?;
        Ok(Tensor::new(buf, DType::F32, dims))
    }
}

/// Device buffers of all experts, filled expert by expert.
struct ExpertGather<B: Backend> {
    ranges: Vec<ExpertRange<B::Buf>>,
    dtype: DType,
    per_range: usize,
    row_bytes: usize,
}

impl<B: Backend> ExpertGather<B> {
    fn new(l: &Loader<'_, B>, name: &str, dtype: DType, experts: usize, n: usize, k: usize) -> Result<Self> {
        let row_bytes = k * dtype.bytes();
        let most = l.rows_per_binding(row_bytes, name)?;
        let per_range = (most / n).clamp(1, experts);
        let rows = most.min(n);
        let mut ranges = Vec::new();
        for first in (0..experts).step_by(per_range) {
            let count = per_range.min(experts - first);
            let mut blocks = Vec::new();
            for col in (0..n).step_by(rows) {
                let dims = [count, rows.min(n - col), k];
                let bytes = dims.iter().product::<usize>() * dtype.bytes();
                let buf = l.backend.alloc(&l.full(name), bytes as u64)?;
                blocks.push(RowBlock { w: Tensor::new(buf, dtype, &dims), col });
            }
            ranges.push(ExpertRange { first, experts: count, blocks });
        }
        Ok(Self { ranges, dtype, per_range, row_bytes })
    }

    /// Writes rows of expert `e` that become output columns from `col` on.
    fn put(&mut self, l: &mut Loader<'_, B>, e: usize, col: usize, bytes: &[u8]) -> Result<()> {
        let range = &self.ranges[e / self.per_range];
        let end = col + bytes.len() / self.row_bytes;
        for b in &range.blocks {
            let n = b.w.dims()[1];
            let (from, to) = (col.max(b.col), end.min(b.col + n));
            if from < to {
                let at = ((e - range.first) * n + from - b.col) * self.row_bytes;
                l.write(&b.w.buf, at as u64, &bytes[(from - col) * self.row_bytes..(to - col) * self.row_bytes])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
