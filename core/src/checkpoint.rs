//! Weights by name: one safetensors file, a sharded set with its index, or random numbers for a bare configuration.
//!
//! A header is checked completely before it is used. Names are unique, every tensor has exactly the bytes of its shape,
//! and the tensors cover the data without overlaps or gaps, from its first byte to the end of the file. So all readers
//! of a file see the same model, and the file holds nothing else. A length from a file decides an allocation only after
//! it was compared with the file's size.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Bound, Range},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    Error, Result,
    format::Format,
    gguf::{Change, Gguf, Made, Stored},
    source::{Bytes, Source, read_small},
    tensor::DType,
};

mod affine;
mod digest;
mod formats;
mod grouped;
mod header;
#[cfg(not(target_arch = "wasm32"))]
mod kept;
mod mlx;
mod random;
mod recipe;
mod runs;
mod scaled;

pub(crate) use affine::{Size, Sizes};
pub(crate) use grouped::Layout;
use header::{read_header, read_shards};
pub use recipe::Recipe;
use runs::assembled;
pub(crate) use runs::stored_tensor;
use scaled::Scaled;

/// The longest index file that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 100_000_000;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Type, shape and place of a stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Element type as the file spells it, e.g. `BF16`.
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: Arc<str>,
    /// Its bytes, from the start of that file; not necessarily aligned to the element size. Of a tensor that is made of several,
    /// those of the first.
    pub range: Range<u64>,
    /// What it is made of, if it is not one stored tensor as it is.
    pub(crate) made: Option<Arc<Made>>,
    /// Its scales, if they are stored as tensors of their own.
    pub(crate) scaled: Option<Arc<Scaled>>,
    /// The tensors of its shape but for their rows, one after the other, that it is stored as.
    pub(crate) joined: Option<Arc<Vec<TensorInfo>>>,
    /// Whether 1 is taken off the stored elements.
    pub(crate) less_one: bool,
}

impl TensorInfo {
    /// Stored bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        if let Some(joined) = &self.joined {
            return joined.iter().map(Self::bytes).sum();
        }
        let Some(made) = &self.made else { return self.range.end - self.range.start };
        let rows = |stored: &Stored| stored.shape.iter().rev().skip(1).product::<usize>().max(1) as u64;
        let experts = |stored: &Stored| stored.shape.iter().rev().skip(2).product::<usize>().max(1) as u64;
        // A vector's rows are its elements.
        let of = |r: &crate::gguf::Rows| match r.from.shape.len() {
            1 => (r.count as u64, r.from.shape[0] as u64),
            _ => (r.count as u64 * experts(&r.from), rows(&r.from)),
        };
        made.rows.iter().map(|r| (r.from.range.end - r.from.range.start) / of(r).1.max(1) * of(r).0).sum()
    }
}

/// A tensor's elements as they lie in the file: little endian, outermost dimension first.
#[derive(Clone, Debug)]
pub struct RawTensor {
    /// F32, BF16 or F16; U8 of coded rows.
    pub dtype: DType,
    /// Sizes, outermost first, as they were asked for; of coded rows their bytes.
    pub shape: Vec<usize>,
    /// `shape.product() * dtype.bytes()` bytes, at any alignment.
    pub bytes: Bytes,
}

/// A stored tensor, to be read whole or in parts.
#[derive(Clone)]
pub struct StoredTensor {
    /// F32, BF16 or F16; U8 of coded rows.
    pub dtype: DType,
    /// What the bytes of a row are.
    pub format: Format,
    /// Sizes, outermost first, in elements.
    pub shape: Vec<usize>,
    place: Place,
}

/// Rows of a stored tensor that are rows of a weight: `count` from `first` on, every `step`th. Rows are the last dimension but one.
#[derive(Clone)]
pub struct Run {
    /// The tensor.
    pub tensor: StoredTensor,
    /// First row.
    pub first: usize,
    /// Distance to the next.
    pub step: usize,
    /// Rows.
    pub count: usize,
}

#[derive(Clone)]
enum Place {
    File { source: Arc<dyn Source>, info: TensorInfo },
    Memory(Bytes),
}

impl StoredTensor {
    /// Its bytes `range`, counted from its first element.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn read(&self, range: Range<usize>) -> Result<Bytes> {
        let (source, info) = match &self.place {
            Place::File { source, info } => (source, info),
            Place::Memory(bytes) => return Ok(bytes.slice(range)),
        };
        if let Some(scaled) = &info.scaled {
            let row = self.row_bytes().max(1);
            let rows = range.start / row..range.end.div_ceil(row);
            let start = rows.start * row;
            let bytes = scaled.rows(&**source, info, rows).await?;
            return Ok(bytes.slice(range.start - start..range.end - start));
        }
        if info.less_one {
            let elements = range.start / 4..range.end.div_ceil(4);
            let values = scaled::floats(&**source, info, elements.clone()).await?;
            let bytes: Bytes = values.iter().flat_map(|x| (x - 1.0).to_le_bytes()).collect::<Vec<u8>>().into();
            return Ok(bytes.slice(range.start - 4 * elements.start..range.end - 4 * elements.start));
        }
        let at = |byte: usize| info.range.start + byte as u64;
        source.read(&info.file, at(range.start)..at(range.end)).await
    }

    /// All of it.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn whole(self) -> Result<RawTensor> {
        let bytes = self.read(0..self.bytes()).await?;
        let shape = self.dims();
        Ok(RawTensor { dtype: self.dtype, shape, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().rev().skip(1).product::<usize>() * self.row_bytes()
    }

    /// Elements of the last dimension; 1 of a scalar.
    pub fn k(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of the last dimension.
    pub fn row_bytes(&self) -> usize {
        self.format.bytes(self.k(), self.dtype.bytes())
    }

    /// Sizes in elements of the dtype, outermost first: bytes of coded rows.
    pub fn dims(&self) -> Vec<usize> {
        let mut dims = self.shape.clone();
        if self.format != Format::Plain {
            *dims.last_mut().expect("coded tensors have rows") = self.row_bytes();
        }
        dims
    }

    /// Rows that share the scales of their [`Format::F8`] blocks; `None` in other formats.
    pub fn rows_of_a_scale(&self) -> Option<usize> {
        match &self.place {
            _ if self.format != Format::F8 => None,
            Place::File { info, .. } => info.scaled.as_ref()?.shared_rows(),
            // Random ones have the same everywhere.
            Place::Memory(_) => Some(usize::MAX),
        }
    }

    /// Whether two are the same bytes of the same file.
    pub fn same(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (Place::File { info: a, .. }, Place::File { info: b, .. }) => (&a.file, &a.range) == (&b.file, &b.range),
            _ => false,
        }
    }
}

/// The names in it. A panic of another thread leaves them as they are.
fn locked(asked: &Mutex<BTreeSet<String>>) -> MutexGuard<'_, BTreeSet<String>> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tensors of a model.
#[derive(Clone)]
pub struct Checkpoint {
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Files { source: Arc<dyn Source>, tensors: Arc<BTreeMap<String, TensorInfo>>, asked: Arc<Mutex<BTreeSet<String>>> },
    Random { seed: u64, recipe: Option<Recipe> },
}

impl Checkpoint {
    /// Reads the headers of `model.safetensors`, of all shards that `model.safetensors.index.json` names, or of the only GGUF file.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming file and tensor if there are no weights or a header or the index is wrong; those of `source`.
    pub async fn open(source: Arc<dyn Source>) -> Result<Self> {
        let mut tensors = if source.size(SINGLE).await?.is_some() {
            read_header(&*source, SINGLE).await?
        } else if let Some(index) = read_small(&*source, INDEX, MAX_INDEX_BYTES).await? {
            read_shards(&*source, &index).await?
        } else if let Some(name) = source.gguf()? {
            let gguf = Gguf::open(&*source, &name).await?;
            gguf.fits_config()?;
            return Self::of_gguf(source, &gguf);
        } else {
            let mut why = format!("there is neither {SINGLE} nor {INDEX}, nor a GGUF file");
            for other in ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors"] {
                if source.size(other).await?.is_some() {
                    why += &format!("; {other} has to be converted to {SINGLE} first");
                }
            }
            return Err(Error::model(source.label(), why));
        };
        scaled::gather(&mut tensors).map_err(|why| Error::model(source.label(), why))?;
        Ok(Self { kind: Kind::Files { source, tensors: Arc::new(tensors), asked: Arc::default() } })
    }

    /// The same with the integers that a recipe stores as `layout` says.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming a matrix whose tensors do not fit one another.
    pub(crate) fn with_integers(self, layout: Layout) -> Result<Self> {
        let Kind::Files { source, tensors, asked } = self.kind else { return Ok(self) };
        let mut tensors = Arc::unwrap_or_clone(tensors);
        grouped::gather(&mut tensors, layout).map_err(|why| Error::model(source.label(), why))?;
        Ok(Self { kind: Kind::Files { source, tensors: Arc::new(tensors), asked } })
    }

    /// The same with the matrices that MLX quantised in these sizes, and with the names that `family` asks for where MLX has others.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming file and tensor where tensors do not fit one another, [`Error::Unsupported`] for weights whose
    /// order MLX changes.
    pub(crate) fn with_mlx(self, sizes: Option<&Sizes>, family: &str) -> Result<Self> {
        let Kind::Files { source, tensors, asked } = self.kind else { return Ok(self) };
        let mut tensors = Arc::unwrap_or_clone(tensors);
        if let Some(sizes) = sizes {
            affine::gather(&*source, &mut tensors, sizes)?;
        }
        mlx::rename(&*source, &mut tensors, family)?;
        Ok(Self { kind: Kind::Files { source, tensors: Arc::new(tensors), asked } })
    }

    /// The same, with activations rounded for all weights of 8-bit floats. Without this, they are rounded only for weights that have a
    /// stored `input_scale`.
    pub(crate) fn with_rounding(self) -> Self {
        let Kind::Files { source, tensors, asked } = self.kind else { return self };
        let mut tensors = Arc::unwrap_or_clone(tensors);
        for scaled in tensors.values_mut().filter_map(|info| info.scaled.as_mut()) {
            Arc::make_mut(scaled).round();
        }
        Self { kind: Kind::Files { source, tensors: Arc::new(tensors), asked } }
    }

    /// Whether the recipe of a matrix of this shape rounds the input of products with it, see [`crate::ops::Round`].
    pub fn rounds(&self, name: &str, shape: &[usize]) -> bool {
        match &self.kind {
            Kind::Random { recipe, .. } => recipe.is_some_and(|recipe| recipe.format(name, shape) == Format::F8),
            Kind::Files { .. } => {
                self.info(name).is_some_and(|info| info.scaled.as_ref().is_some_and(|scaled| scaled.rounds(info)))
            }
        }
    }

    /// Whether a convolution is `[C, K, 1]`, as MLX has it.
    pub(crate) fn is_of_mlx(&self) -> bool {
        let Kind::Files { tensors, .. } = &self.kind else { return false };
        mlx::has_moved_axes(tensors)
    }

    /// The weights of a GGUF file, by the names that its family asks for.
    ///
    /// # Errors
    /// Those of [`Gguf::weights`].
    pub fn of_gguf(source: Arc<dyn Source>, gguf: &Gguf) -> Result<Self> {
        let info = |made: Made| {
            let first = &made.rows[0].from;
            let (dtype, shape) = (first.kind.clone(), made.shape.clone());
            TensorInfo {
                dtype,
                shape,
                file: first.file.clone(),
                range: first.range.clone(),
                made: Some(Arc::new(made)),
                scaled: None,
                joined: None,
                less_one: false,
            }
        };
        let tensors = gguf.weights()?.into_iter().map(|(name, made)| (name, info(made))).collect();
        Ok(Self { kind: Kind::Files { source, tensors: Arc::new(tensors), asked: Arc::default() } })
    }

    /// A checkpoint without files: every tensor exists, with values made from `seed` and its name.
    ///
    /// Matrices are bf16 with standard deviation `1/sqrt(last dim)`; the parameters of recurrent layers lie in the range in
    /// which trained ones lie, so that states neither vanish nor overflow. For measuring speed.
    pub fn random(seed: u64) -> Self {
        Self { kind: Kind::Random { seed, recipe: None } }
    }

    /// [`Checkpoint::random`] with matrices of random blocks.
    pub fn random_coded(seed: u64, recipe: Recipe) -> Self {
        Self { kind: Kind::Random { seed, recipe: Some(recipe) } }
    }

    /// Whether the tensors are random, see [`Checkpoint::random`].
    pub fn is_random(&self) -> bool {
        matches!(self.kind, Kind::Random { .. })
    }

    /// Of a random checkpoint: seed and half width of the uniform bf16 values of a matrix, for a device that can
    /// generate them.
    pub(crate) fn random_matrix(&self, name: &str, shape: &[usize]) -> Option<(u32, f32)> {
        match self.kind {
            Kind::Random { seed, recipe: None } => random::matrix(seed, name, shape),
            Kind::Random { .. } | Kind::Files { .. } => None,
        }
    }

    /// Names of all stored tensors in alphabetical order; none for a random checkpoint.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let tensors = match &self.kind {
            Kind::Files { tensors, .. } => Some(tensors),
            Kind::Random { .. } => None,
        };
        tensors.into_iter().flat_map(|t| t.keys().map(String::as_str))
    }

    /// The stored tensor `name`; `None` if there is none, and always for a random checkpoint.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        match &self.kind {
            Kind::Files { tensors, .. } => tensors.get(name),
            Kind::Random { .. } => None,
        }
    }

    /// Names of the stored tensors that were requested so far.
    pub fn asked(&self) -> BTreeSet<String> {
        match &self.kind {
            Kind::Files { asked, .. } => locked(asked).clone(),
            Kind::Random { .. } => BTreeSet::new(),
        }
    }

    /// Whether [`Checkpoint::get`] can find `name`; a random checkpoint has every tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.is_random() || self.info(name).is_some()
    }

    /// The first of several names for the same tensor that exists.
    pub fn find<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        names.iter().find(|name| self.contains(name)).copied()
    }

    /// Stored tensors that were not requested although others of their module were, e.g. a bias that config.json does
    /// not mention. Modules that the model does not use at all (draft heads, vision) are not listed.
    pub fn passed_over(&self) -> Vec<&str> {
        let Kind::Files { tensors, asked, .. } = &self.kind else { return Vec::new() };
        let module = |name: &str| name.rfind('.').map_or(0, |dot| dot + 1);
        let asked = locked(asked);
        let beside = |name: &str| {
            let prefix = &name[..module(name)];
            asked
                .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
                .take_while(|a| a.starts_with(prefix))
                .any(|a| module(a) == prefix.len())
        };
        tensors.keys().map(String::as_str).filter(|name| !asked.contains(*name) && beside(name)).collect()
    }

    /// Modules of which no tensor was requested, e.g. vision parts and draft heads: the first one or two parts of their
    /// names, with the number and the bytes of their tensors.
    pub fn skipped(&self) -> BTreeMap<&str, (usize, u64)> {
        let Kind::Files { tensors, asked, .. } = &self.kind else { return BTreeMap::new() };
        let asked = locked(asked);
        let read = |module: &str| {
            asked
                .range::<str, _>((Bound::Included(module), Bound::Unbounded))
                .next()
                .is_some_and(|a| a.starts_with(module))
        };
        let mut skipped = BTreeMap::new();
        for (name, info) in tensors.iter().filter(|(name, _)| !asked.contains(*name)) {
            // The outermost module that is not read at all.
            let dots = name.match_indices('.').take(2).map(|(dot, _)| &name[..=dot]);
            if let Some(module) = dots.into_iter().find(|module| !read(module)) {
                let (count, bytes) = skipped.entry(module.trim_end_matches('.')).or_insert((0, 0));
                *count += 1;
                *bytes += info.bytes();
            }
        }
        skipped
    }

    /// The tensor `name`, which must have `shape`; dimensions of size 1 do not count in the comparison, since files disagree
    /// about them (`[C, 1, K]` or `[C, K]`).
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing or has another shape, [`Error::Unsupported`] for a dtype other than f32, bf16 and
    /// f16, [`Error::OutOfMemory`] if a random tensor does not fit; those of the source.
    pub async fn get(&self, name: &str, shape: &[usize]) -> Result<RawTensor> {
        self.get_any(&[name], shape).await
    }

    /// [`Checkpoint::get`] of the first of several names that exists.
    ///
    /// # Errors
    /// As [`Checkpoint::get`].
    pub async fn get_any(&self, names: &[&str], shape: &[usize]) -> Result<RawTensor> {
        let (runs, change) = self.find_runs(names, shape)?;
        match runs.as_slice() {
            [run] if change == Change::None && run.is_whole() && run.tensor.format == Format::Plain => {
                let RawTensor { dtype, bytes, .. } = run.tensor.clone().whole().await?;
                Ok(RawTensor { dtype, shape: shape.to_vec(), bytes })
            }
            _ => assembled(&runs, change, shape).await,
        }
    }

    /// The rows of stored tensors that the matrix, vector or stack of matrices `name` is made of.
    ///
    /// # Errors
    /// As [`Checkpoint::get`], but those of the source.
    pub fn runs(&self, name: &str, shape: &[usize]) -> Result<Vec<Run>> {
        Ok(self.find_runs(&[name], shape)?.0)
    }

    /// The factor on all of `name`, which is a tensor of its own; 1 if there is none.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn factor(&self, name: &str) -> Result<f32> {
        let (Kind::Files { source, .. }, Some(made)) = (&self.kind, self.info(name).and_then(|i| i.made.as_ref()))
        else {
            return Ok(1.0);
        };
        let Some(stored) = &made.factor else { return Ok(1.0) };
        let tensor = stored_tensor(source, "factor", stored)?;
        Ok(assembled(&[Run::whole(tensor)], Change::None, &[1]).await?.dtype_values()[0])
    }

    /// The tensor that [`Checkpoint::get`] reads.
    ///
    /// # Errors
    /// As [`Checkpoint::get`], but those of the source.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor> {
        let mut tensors = self.whole_tensors(name, shape)?;
        match tensors.pop() {
            Some(tensor) if tensors.is_empty() => Ok(tensor),
            _ => Err(in_parts(name)),
        }
    }

    /// The tensors whose rows, one after the other, are those of `name`.
    ///
    /// # Errors
    /// As [`Checkpoint::tensor`].
    pub fn whole_tensors(&self, name: &str, shape: &[usize]) -> Result<Vec<StoredTensor>> {
        let runs = self.runs(name, shape)?;
        if runs.iter().all(Run::is_whole) {
            return Ok(runs.into_iter().map(|run| run.tensor).collect());
        }
        Err(in_parts(name))
    }

    /// The stored bytes of `name`, whatever its dtype.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is not stored; those of the source.
    pub async fn read(&self, name: &str) -> Result<Bytes> {
        match (&self.kind, self.info(name)) {
            (Kind::Files { source, .. }, Some(info)) => source.read(&info.file, info.range.clone()).await,
            (Kind::Files { source, .. }, None) => {
                Err(Error::model(self.place(&**source), format!("tensor `{name}` is missing")))
            }
            (Kind::Random { .. }, _) => Err(Error::model("random weights", format!("tensor `{name}` is not stored"))),
        }
    }

    /// At most `bytes` stored bytes from the middle of `name`.
    pub(crate) async fn read_middle(&self, name: &str, bytes: u64) -> Result<Bytes> {
        let (Kind::Files { source, .. }, Some(info)) = (&self.kind, self.info(name)) else {
            return self.read(name).await;
        };
        let size = (info.range.end - info.range.start).min(bytes);
        let start = info.range.start + (info.range.end - info.range.start - size) / 2;
        source.read(&info.file, start..start + size).await
    }

    /// The place that a message about a missing tensor names: the only file, or the collection.
    fn place(&self, source: &dyn Source) -> String {
        match self.names().next().and_then(|name| self.info(name)) {
            Some(info) if &*info.file == SINGLE => source.path(SINGLE),
            Some(_) => source.path(INDEX),
            None => source.path(SINGLE),
        }
    }
}

/// Of a weight that is asked for as one tensor.
fn in_parts(name: &str) -> Error {
    Error::Unsupported {
        what: format!("tensor `{name}`"),
        why: "it is made of parts of others, where one stored tensor is needed".into(),
    }
}

impl Run {
    fn whole(tensor: StoredTensor) -> Self {
        let count = tensor.rows();
        Self { tensor, first: 0, step: 1, count }
    }

    /// Whether it is all rows in their order.
    pub fn is_whole(&self) -> bool {
        (self.first, self.step, self.count) == (0, 1, self.tensor.rows())
    }
}

impl StoredTensor {
    /// Entries of the last dimension but one; elements of a vector.
    pub fn rows(&self) -> usize {
        match self.shape.as_slice() {
            [.., rows, _] | [rows] => *rows,
            [] => 1,
        }
    }
}

impl RawTensor {
    /// The elements of a tensor that is not coded.
    fn dtype_values(&self) -> Vec<f32> {
        self.dtype.to_f32(&self.bytes)
    }
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
