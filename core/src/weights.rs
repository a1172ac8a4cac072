//! Loading of weights onto a device: matrices as row blocks, experts as ranges, small parameters as f32.
//!
//! A matrix is described by [`Part`]s: which rows of which stored tensor are which output columns. Fusing q, k and v or
//! undoing an interleaved layout is a list of parts. A backend that computes in host memory adopts the stored bytes and
//! gets views of them; for the others the rows are gathered, in the order of their columns and in the stored dtype, into
//! as few buffers as one binding's limit allows. Of several ranks each has parts of its own ([`Rank`]).

use std::{collections::HashMap, ops::Range};

use crate::{
    Error, Result,
    backend::Backend,
    checkpoint::{Checkpoint, RawTensor, Run, StoredTensor},
    format::Format,
    ops::{RowBlock, Weight},
    tensor::{DType, Tensor},
};

mod experts;
mod gather;
mod parts;

use gather::{Piece, Stored, bytes_before};
pub use parts::{ExpertParts, ExpertShare, Part, Rank};

/// Bytes of one read and one write to a device: small enough to report progress and to bound staging memory, which a
/// page's module never releases.
const PIECE: usize = if cfg!(target_arch = "wasm32") { 4 << 20 } else { 16 << 20 };

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
    /// `[N, K]`, in the order of output columns.
    pub parts: Vec<LinearPart<Buf>>,
    /// `[N] f32`: a factor per output column, if they differ.
    pub columns: Option<Tensor<Buf>>,
    /// `[N] f32`, with its factors folded in.
    pub bias: Option<Tensor<Buf>>,
    /// Factor on the product.
    pub scale: f32,
}

/// Neighbouring output columns of a linear layer that take its input in one form.
#[derive(Clone, Debug)]
pub struct LinearPart<Buf> {
    /// `[n, K]`.
    pub w: Weight<Buf>,
    /// First output column.
    pub col: usize,
    /// Its input is rounded, see [`crate::ops::Round`].
    pub rounds: bool,
}

impl<Buf> Linear<Buf> {
    /// Output columns N.
    pub fn n(&self) -> usize {
        self.parts.iter().map(|part| part.w.n).sum()
    }
}

impl<Buf: Clone> LinearPart<Buf> {
    /// A matrix by whether the input of its blocks is rounded.
    fn of(mut w: Weight<Buf>, rounds: impl Fn(&RowBlock<Buf>) -> bool) -> Vec<Self> {
        let first = w.blocks.first().is_some_and(&rounds);
        if w.blocks.iter().all(|block| rounds(block) == first) {
            return vec![Self { w, col: 0, rounds: first }];
        }
        w.blocks.sort_by_key(|block| block.col);
        let alike = w.blocks.chunk_by(|a, b| rounds(a) == rounds(b));
        let part = |blocks: &[RowBlock<Buf>]| {
            let col = blocks[0].col;
            let n = blocks.iter().map(|block| block.w.rows()).sum();
            let rounds = rounds(&blocks[0]);
            let blocks = blocks.iter().map(|block| RowBlock { col: block.col - col, ..block.clone() }).collect();
            Self { w: Weight { blocks, n, k: w.k }, col, rounds }
        };
        alike.map(part).collect()
    }
}

/// Progress of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes placed on the device.
    pub done: u64,
    /// Bytes of the checkpoint, some of which may never be needed; at the end those that were.
    pub total: u64,
}

/// Reads tensors of one checkpoint onto one backend.
pub struct Loader<'a, B: Backend> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    /// Prefix of every relative name.
    prefix: String,
    progress: Progress,
    report: &'a mut dyn FnMut(Progress),
    /// Loaded matrices by the name of their first part, with their parts, for layers that share them.
    matrices: HashMap<String, Vec<Shared<B::Buf>>>,
    /// Most elements per token of inputs that are rounded.
    rounded: usize,
}

/// A loaded matrix and the stored rows that it is made of.
type Shared<Buf> = (Shares, Weight<Buf>);

/// The parts of each rank, or one list for all of them.
type Shares = Vec<Vec<Part>>;

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader that reports its progress to `report` after every piece.
    pub fn new(backend: &'a B, checkpoint: &'a Checkpoint, report: &'a mut dyn FnMut(Progress)) -> Self {
        let progress = Progress { done: 0, total: checkpoint.bytes() };
        Self { backend, checkpoint, prefix: String::new(), progress, report, matrices: HashMap::new(), rounded: 0 }
    }

    /// The device.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// The stored tensors.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Uses the first of `prefixes` under which one of `names` is stored. If none is stored it uses the first prefix,
    /// so that the error about the missing tensor names it.
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

    /// The ranks of the device.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + use<B> {
        let of = self.backend.caps().ranks;
        (0..of).map(move |index| Rank { index, of })
    }

    /// Reports that all is done that the model needs. Returns the bytes placed on the device; a tensor that is used twice counts
    /// once.
    pub fn finish(mut self) -> u64 {
        self.progress.total = self.progress.done;
        (self.report)(self.progress);
        self.progress.done
    }

    /// The stored shape of a relative name; `None` if it is not there, and in a random checkpoint.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.checkpoint.info(&self.full(name)).map(|info| info.shape.as_slice())
    }

    /// The whole name of a relative one, which may be several separated by `|`: the first that is stored.
    fn full(&self, name: &str) -> String {
        // The output matrix lies outside of the prefix.
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

    /// The stored rows that a weight is made of.
    fn runs(&self, name: &str, shape: &[usize]) -> Result<Vec<Run>> {
        self.checkpoint.runs(&self.full(name), shape)
    }

    /// The first of several prefixes, separated by `|`, that a stored tensor has; the first of all if none has.
    pub fn stored_prefix<'n>(&self, prefixes: &'n str) -> &'n str {
        let stored = |p: &&str| {
            let full = format!("{}{p}", self.prefix);
            self.checkpoint.names().any(|name| name.starts_with(&full))
        };
        match prefixes.split_once('|') {
            None => prefixes,
            Some((first, _)) => prefixes.split('|').find(stored).unwrap_or(first),
        }
    }

    /// The elements of a small tensor of any shape with `len` of them.
    ///
    /// # Errors
    /// Those of [`Checkpoint::get`].
    pub async fn elements(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let shape = self.shape(name).filter(|s| s.iter().product::<usize>() == len).map(<[usize]>::to_vec);
        self.values(name, &shape.unwrap_or(vec![len])).await
    }

    fn advance(&mut self, bytes: usize) {
        self.progress.done += bytes as u64;
        self.progress.total = self.progress.total.max(self.progress.done);
        (self.report)(self.progress);
    }

    /// To one rank, or to all.
    fn write(&mut self, rank: Option<Rank>, dst: &B::Buf, at: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let at = at + (i * PIECE) as u64;
            match rank {
                Some(rank) => self.backend.write_on(rank.index, dst, at, piece)?,
                None => self.backend.write(dst, at, piece)?,
            }
            self.advance(piece.len());
        }
        Ok(())
    }

    /// A matrix with inner dimension `k` out of `parts`, which cover the output columns once. A matrix is loaded only
    /// once.
    ///
    /// # Errors
    /// Those of [`Checkpoint::get`], naming the tensor, and of the backend's allocations and writes.
    pub async fn matrix(&mut self, k: usize, parts: &[Part]) -> Result<Weight<B::Buf>> {
        self.matrix_of(k, vec![parts.to_vec()]).await
    }

    /// [`Loader::matrix`] of which every rank has parts of its own: as many rows, from the same tensors.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub async fn matrix_on(&mut self, k: usize, parts: impl Fn(Rank) -> Vec<Part>) -> Result<Weight<B::Buf>> {
        let shares = self.shares(&parts);
        self.matrix_of(k, shares).await
    }

    async fn matrix_of(&mut self, k: usize, shares: Shares) -> Result<Weight<B::Buf>> {
        for p in &shares[0] {
            self.refuse_factor(&p.name).await?;
        }
        self.unfactored(k, shares).await
    }

    /// The parts of each rank.
    fn shares(&self, parts: &dyn Fn(Rank) -> Vec<Part>) -> Shares {
        let mut shares: Shares = self.ranks().map(parts).collect();
        if shares.iter().all(|share| *share == shares[0]) {
            shares.truncate(1);
        }
        shares
    }

    /// # Errors
    /// [`Error::Unsupported`] for a weight that has a factor, where there is no place for one.
    async fn refuse_factor(&self, name: &str) -> Result<()> {
        let name = self.full(name);
        match self.checkpoint.factor(&name).await? {
            1.0 => Ok(()),
            factor => Err(Error::Unsupported {
                what: format!("tensor `{name}` with a factor of {factor} beside it"),
                why: "embeddings and experts are supported without".into(),
            }),
        }
    }

    /// [`Loader::matrix`] without the factors that the parts may have.
    async fn unfactored(&mut self, k: usize, shares: Shares) -> Result<Weight<B::Buf>> {
        let shares: Shares = shares.into_iter().map(parts::joined).collect();
        let name = shares[0][0].name.clone();
        let known = self.matrices.get(&name).and_then(|all| all.iter().find(|(s, w)| *s == shares && w.k == k));
        if let Some((_, w)) = known {
            return Ok(w.clone());
        }
        let w = self.new_matrix(k, &shares).await?;
        self.matrices.entry(name).or_default().push((shares, w.clone()));
        Ok(w)
    }

    async fn new_matrix(&mut self, k: usize, shares: &[Vec<Part>]) -> Result<Weight<B::Buf>> {
        let parts = &shares[0];
        let n = parts.last().map_or(0, |p| p.col + p.rows.len());
        if let Some(w) = self.random_matrix(n, k, &parts[0].name)? {
            return Ok(w);
        }
        if !self.backend.adopts() {
            let shares = shares.iter().map(|parts| self.pieces(k, parts)).collect::<Result<Vec<_>>>()?;
            return self.gather((n, k), &parts[0].name, &shares).await;
        }
        let (tensors, pieces) = self.pieces(k, parts)?;
        let mut adopted = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let format = tensor.format;
            adopted.push((self.adopt(tensor).await?, format));
        }
        let block = |p: &Piece| {
            let (w, format) = &adopted[p.tensor];
            RowBlock { w: w.every(p.first, p.step, p.count), format: *format, col: p.col, squares: false }
        };
        Ok(Weight { blocks: pieces.iter().map(block).collect(), n, k })
    }

    /// The stored tensors that `parts`, sorted by column, lie in, and which of their rows they are.
    fn pieces(&self, k: usize, parts: &[Part]) -> Result<Stored> {
        let mut tensors: Vec<StoredTensor> = Vec::new();
        let mut pieces: Vec<Piece> = Vec::new();
        // Each name is looked up once, whatever the number of its parts.
        let mut names: HashMap<&str, Vec<(usize, Run)>> = HashMap::new();
        for part in parts {
            if !names.contains_key(part.name.as_str()) {
                let mut runs = Vec::new();
                for run in self.runs(&part.name, &[part.of, part.stored_k(k)])? {
                    let known = tensors.iter().position(|t| t.same(&run.tensor));
                    let tensor = known.unwrap_or_else(|| {
                        tensors.push(run.tensor.clone());
                        tensors.len() - 1
                    });
                    runs.push((tensor, run));
                }
                names.insert(&part.name, runs);
            }
            let mut start = 0;
            for (tensor, run) in &names[part.name.as_str()] {
                let (from, to) = (part.rows.start.max(start), part.rows.end.min(start + run.count));
                if from < to {
                    let first = run.first + (from - start) * run.step;
                    let col = part.col + from - part.rows.start;
                    let skip = match &part.columns {
                        Some((range, _)) => {
                            let name = self.full(&part.name);
                            bytes_before(range.end, &run.tensor, &name)?;
                            bytes_before(range.start, &run.tensor, &name)?
                        }
                        None => 0,
                    };
                    let piece = Piece { tensor: *tensor, first, step: run.step, count: to - from, col, skip };
                    match pieces.last_mut() {
                        Some(last) if last.goes_on_as(&piece) => last.count += piece.count,
                        _ => pieces.push(piece),
                    }
                }
                start += run.count;
            }
        }
        Ok((tensors, pieces))
    }

    /// A tensor used in place in host memory.
    async fn adopt(&mut self, tensor: StoredTensor) -> Result<Tensor<B::Buf>> {
        let dims = tensor.dims();
        let raw = tensor.whole().await?;
        self.advance(raw.bytes.len());
        let buf = self.backend.adopt(&raw.bytes).expect("a backend that adopts");
        Ok(Tensor::new(buf, raw.dtype, &dims))
    }

    /// Random values made on the device, if the checkpoint is random and the device can make them.
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
            blocks.push(RowBlock::plain(w, col));
        }
        Ok(Some(Weight { blocks, n, k }))
    }

    /// A buffer for rows of a matrix, or of the matrices of experts.
    fn room(&self, name: &str, dtype: DType, format: Format, dims: &[usize]) -> Result<B::Buf> {
        let bytes = match format {
            Format::Plain => (dims.iter().product::<usize>() * dtype.bytes()) as u64,
            coded => self.backend.coded_bytes(coded, dims),
        };
        self.backend.alloc(&self.full(name), bytes)
    }

    /// Brings a block, all of whose rows are written, into the order of the device's kernels.
    fn arrange(&self, block: &RowBlock<B::Buf>) -> Result<()> {
        if block.format == Format::Plain { Ok(()) } else { self.backend.arrange(block) }
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

    /// [`Loader::matrix`] with the factors of the parts and, if requested, their biases: `x.bias` for `x.weight`.
    /// `input` is a factor on the layer's input, which does not apply to the biases.
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub async fn linear(&mut self, k: usize, parts: &[Part], bias: bool, input: f32) -> Result<Linear<B::Buf>> {
        self.linear_of(k, vec![parts.to_vec()], bias, input).await
    }

    /// [`Loader::linear`] of which every rank has parts of its own, see [`Loader::matrix_on`].
    ///
    /// # Errors
    /// As [`Loader::matrix`].
    pub async fn linear_on(
        &mut self,
        k: usize,
        parts: impl Fn(Rank) -> Vec<Part>,
        bias: bool,
        input: f32,
    ) -> Result<Linear<B::Buf>> {
        let shares = self.shares(&parts);
        self.linear_of(k, shares, bias, input).await
    }

    /// Compiled once per backend, not once per caller: a page has little room.
    async fn linear_of(&mut self, k: usize, shares: Shares, bias: bool, input: f32) -> Result<Linear<B::Buf>> {
        let mut first = shares[0].clone();
        let with_bias = if bias { shares.clone() } else { Vec::new() };
        let rounds = |p: &Part| self.rounds(&p.name, &[p.of, p.stored_k(k)]);
        let unrounded: Vec<Range<usize>> =
            first.iter().filter(|p| !rounds(p)).map(|p| p.col..p.col + p.rows.len()).collect();
        let w = self.unfactored(k, shares).await?;
        let n = w.n;
        // A block with rows of both kinds takes the input as it is.
        let rounds = |b: &RowBlock<B::Buf>| unrounded.iter().all(|c| c.end <= b.col || b.col + b.w.rows() <= c.start);
        let parts = LinearPart::of(w, rounds);
        self.will_round(if parts.iter().any(|part| part.rounds) { k } else { 0 });
        let bias = match bias {
            true => Some(self.biases(n, &with_bias).await?),
            false => None,
        };
        // Biases have their factors by now, and those of stored matrices do not concern them.
        for p in &mut first {
            p.scale *= self.checkpoint.factor(&self.full(&p.name)).await?;
        }
        if first.iter().all(|p| p.scale == first[0].scale) {
            return Ok(Linear { parts, columns: None, bias, scale: input * first[0].scale });
        }
        let mut columns = vec![0.0; n];
        for p in &first {
            columns[p.col..p.col + p.rows.len()].fill(input * p.scale);
        }
        let columns = self.upload(&format!("factors of {}", first[0].name), &columns, &[n])?;
        Ok(Linear { parts, columns: Some(columns), bias, scale: 1.0 })
    }

    /// Whether the input of products with a matrix is rounded: where its recipe says so, unless products are exact.
    fn rounds(&self, name: &str, shape: &[usize]) -> bool {
        self.backend.caps().rounds && self.checkpoint.rounds(&self.full(name), shape)
    }

    /// Notes an input of so many elements per token that is rounded.
    pub fn will_round(&mut self, elements: usize) {
        self.rounded = self.rounded.max(elements);
    }

    /// Most elements per token of the inputs that are rounded, of all layers loaded so far.
    pub fn rounded(&self) -> usize {
        self.rounded
    }

    async fn biases(&mut self, n: usize, shares: &[Vec<Part>]) -> Result<Tensor<B::Buf>> {
        let mut biases = Vec::new();
        for parts in shares {
            let mut all = vec![0.0; n];
            for p in parts.iter().filter(|p| p.has_bias()) {
                let name = format!("{}.bias", p.name.strip_suffix(".weight").unwrap_or(&p.name));
                let values = self.values(&name, &[p.of]).await?;
                for (out, b) in all[p.col..].iter_mut().zip(&values[p.rows.clone()]) {
                    *out = b * p.scale;
                }
            }
            biases.push(all);
        }
        self.upload_on(&shares[0][0].name, &[n], |rank| biases[rank.index.min(biases.len() - 1)].clone())
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
        self.write(None, &buf, 0, bytemuck::cast_slice(values))?;
        Ok(Tensor::new(buf, DType::F32, dims))
    }

    /// [`Loader::upload`] of values of which every rank has its own.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn upload_on(
        &mut self,
        label: &str,
        dims: &[usize],
        values: impl Fn(Rank) -> Vec<f32>,
    ) -> Result<Tensor<B::Buf>> {
        let all: Vec<Vec<f32>> = self.ranks().map(values).collect();
        self.upload_all(label, dims, &all)
    }

    /// Those of all ranks.
    fn upload_all(&mut self, label: &str, dims: &[usize], all: &[Vec<f32>]) -> Result<Tensor<B::Buf>> {
        let len = dims.iter().product::<usize>();
        let buf = self.backend.alloc(&self.full(label), 4 * len as u64)?;
        for (rank, values) in self.ranks().zip(all) {
            assert_eq!(values.len(), len, "{label}");
            self.write(Some(rank), &buf, 0, bytemuck::cast_slice(values))?;
        }
        Ok(Tensor::new(buf, DType::F32, dims))
    }
}

/// Most rows of a matrix on a device, whose kernels count elements in 32 bits.
fn most_rows(k: usize) -> usize {
    (u32::MAX as usize / k).max(1)
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
