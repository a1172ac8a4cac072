//! Weights by name: one safetensors file, a sharded set with its index, or random numbers for a bare configuration.
//!
//! A header is checked completely before anything is believed: no name comes twice, every tensor has exactly the bytes of its
//! shape, and one begins where the other ends, from the first byte of the data to the last of the file, so that all readers
//! of a file see the same model and nothing else is in it. Lengths from a file never decide an allocation before they were compared with its size.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ops::{Bound, Range},
    rc::Rc,
};

use serde_json::value::RawValue;

use crate::{
    Error, Result,
    source::{Bytes, Source, is_plain_file_name, read_small},
    tensor::DType,
};

mod random;

/// The longest header the format allows, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The longest index file that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 100_000_000;
/// The key of a header that is no tensor.
const METADATA: &str = "__metadata__";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where and what a stored tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type as the file spells it, e.g. `BF16`.
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: Rc<str>,
    /// Its bytes, from the start of that file; not necessarily aligned to the element size.
    pub range: Range<u64>,
}

/// A tensor's elements as they lie in the file: little endian, outermost dimension first.
#[derive(Clone, Debug)]
pub struct RawTensor {
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// Sizes, outermost first, as they were asked for.
    pub shape: Vec<usize>,
    /// `shape.product() * dtype.bytes()` bytes, at any alignment.
    pub bytes: Bytes,
}

/// A tensor that is there and has the right shape, to be read whole or in parts.
pub struct StoredTensor {
    /// F32, BF16 or F16.
    pub dtype: DType,
    /// Sizes, outermost first, as they were asked for.
    pub shape: Vec<usize>,
    place: Place,
}

enum Place {
    File { source: Rc<dyn Source>, info: TensorInfo },
    Memory(Bytes),
}

impl StoredTensor {
    /// Its bytes `range`, counted from its first element.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn read(&self, range: Range<usize>) -> Result<Bytes> {
        match &self.place {
            Place::File { source, info } => {
                let at = |byte: usize| info.range.start + byte as u64;
                source.read(&info.file, at(range.start)..at(range.end)).await
            }
            Place::Memory(bytes) => Ok(bytes.slice(range)),
        }
    }

    /// All of it.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn whole(self) -> Result<RawTensor> {
        let bytes = self.read(0..self.bytes()).await?;
        Ok(RawTensor { dtype: self.dtype, shape: self.shape, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes()
    }
}

/// The tensors of a model.
#[derive(Clone)]
pub struct Checkpoint {
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Files { source: Rc<dyn Source>, tensors: Rc<BTreeMap<String, TensorInfo>>, asked: Rc<RefCell<BTreeSet<String>>> },
    Random { seed: u64 },
}

impl Checkpoint {
    /// Reads the headers of `model.safetensors`, or of all shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming file and tensor if there are no weights or a header or the index is wrong; those of `source`.
    pub async fn open(source: Rc<dyn Source>) -> Result<Self> {
        let tensors = if source.size(SINGLE).await?.is_some() {
            read_header(&*source, SINGLE).await?
        } else if let Some(index) = read_small(&*source, INDEX, MAX_INDEX_BYTES).await? {
            read_shards(&*source, &index).await?
        } else {
            let mut why = format!("there is neither {SINGLE} nor {INDEX}");
            for other in ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors"] {
                if source.size(other).await?.is_some() {
                    why += &format!("; {other} has to be converted to {SINGLE} first");
                }
            }
            return Err(Error::model(source.label(), why));
        };
        Ok(Self { kind: Kind::Files { source, tensors: Rc::new(tensors), asked: Rc::default() } })
    }

    /// A checkpoint without files: whatever tensor is asked for is there, made from `seed` and its name.
    ///
    /// Matrices are bf16 with standard deviation `1/sqrt(last dim)`; the parameters of recurrent layers lie in the range in
    /// which trained ones lie, so that states neither vanish nor overflow. For measuring speed.
    pub fn random(seed: u64) -> Self {
        Self { kind: Kind::Random { seed } }
    }

    /// Whether this checkpoint is made up, see [`Checkpoint::random`].
    pub fn is_random(&self) -> bool {
        matches!(self.kind, Kind::Random { .. })
    }

    /// Seed and half width of the uniform bf16 values of a matrix that nobody stored, for a device that can make them itself.
    pub(crate) fn random_matrix(&self, name: &str, shape: &[usize]) -> Option<(u32, f32)> {
        match self.kind {
            Kind::Random { seed } => random::matrix(seed, name, shape),
            Kind::Files { .. } => None,
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

    /// What is stored under `name`; `None` if nothing is, and always for a random checkpoint.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        match &self.kind {
            Kind::Files { tensors, .. } => tensors.get(name),
            Kind::Random { .. } => None,
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

    /// Stored tensors that nobody asked for although others of the same module were: a bias beside its weight, say, that
    /// config.json does not mention. Whole modules that the model does not have (heads for drafts, vision) are not among them.
    pub fn passed_over(&self) -> Vec<&str> {
        let Kind::Files { tensors, asked, .. } = &self.kind else { return Vec::new() };
        let module = |name: &str| name.rfind('.').map_or(0, |dot| dot + 1);
        let asked = asked.borrow();
        let beside = |name: &str| {
            let prefix = &name[..module(name)];
            asked
                .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
                .take_while(|a| a.starts_with(prefix))
                .any(|a| module(a) == prefix.len())
        };
        tensors.keys().map(String::as_str).filter(|name| !asked.contains(*name) && beside(name)).collect()
    }

    /// Modules of which nothing was asked for, by the first one or two parts of their names, with their tensors and bytes:
    /// vision parts and heads for drafts.
    pub fn skipped(&self) -> BTreeMap<&str, (usize, u64)> {
        let Kind::Files { tensors, asked, .. } = &self.kind else { return BTreeMap::new() };
        let asked = asked.borrow();
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
                *bytes += info.range.end - info.range.start;
            }
        }
        skipped
    }

    /// Bytes of all stored tensors.
    pub fn bytes(&self) -> u64 {
        self.names().filter_map(|name| self.info(name)).map(|info| info.range.end - info.range.start).sum()
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
        self.find_tensor(names, shape)?.whole().await
    }

    /// The tensor that [`Checkpoint::get`] reads.
    ///
    /// # Errors
    /// As [`Checkpoint::get`], but those of the source.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor> {
        self.find_tensor(&[name], shape)
    }

    fn find_tensor(&self, names: &[&str], shape: &[usize]) -> Result<StoredTensor> {
        let Kind::Files { source, tensors, asked } = &self.kind else {
            let Kind::Random { seed } = self.kind else { unreachable!("a checkpoint is files or random") };
            let RawTensor { dtype, shape, bytes } = random::tensor(seed, names[0], shape)?;
            return Ok(StoredTensor { dtype, shape, place: Place::Memory(bytes) });
        };
        let Some((name, info)) = names.iter().find_map(|name| tensors.get_key_value(*name)) else {
            let why =
                format!("tensor `{}` is missing; the weights are incomplete or of another model", names.join("` or `"));
            return Err(Error::model(self.place(&**source), why));
        };
        let file = source.path(&info.file);
        let Some((dtype, _)) = known_dtype(&info.dtype) else {
            return Err(Error::Unsupported {
                what: format!("{file}: tensor `{name}` of dtype {}", info.dtype),
                why: "weights must be F32, BF16 or F16; use an unquantised release of the model".into(),
            });
        };
        if !same_shape(&info.shape, shape) {
            let why = format!(
                "tensor `{name}` has shape {:?}, but config.json asks for {shape:?}; these files do not belong together",
                info.shape
            );
            return Err(Error::model(file, why));
        }
        asked.borrow_mut().insert(name.clone());
        let place = Place::File { source: source.clone(), info: info.clone() };
        Ok(StoredTensor { dtype, shape: shape.to_vec(), place })
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

    /// What a message about an absent tensor names: the only file, or the collection.
    fn place(&self, source: &dyn Source) -> String {
        match self.names().next().and_then(|name| self.info(name)) {
            Some(info) if &*info.file == SINGLE => source.path(SINGLE),
            Some(_) => source.path(INDEX),
            None => source.path(SINGLE),
        }
    }
}

fn same_shape(a: &[usize], b: &[usize]) -> bool {
    a.iter().filter(|n| **n != 1).eq(b.iter().filter(|n| **n != 1))
}

/// The engine's dtype of a safetensors dtype, and bytes per element.
fn known_dtype(name: &str) -> Option<(DType, u64)> {
    match name {
        "F32" => Some((DType::F32, 4)),
        "BF16" => Some((DType::Bf16, 2)),
        "F16" => Some((DType::F16, 2)),
        _ => None,
    }
}

/// Bits per element of the dtypes that the format knows; sizes of others cannot be checked.
fn dtype_bits(name: &str) -> Option<u64> {
    Some(match name {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

/// All tensors of one safetensors file.
async fn read_header(source: &dyn Source, name: &str) -> Result<BTreeMap<String, TensorInfo>> {
    let path = source.path(name);
    let bad = |why: String| Error::model(path.clone(), why);
    let Some(size) = source.size(name).await? else {
        return Err(bad("no such file, although the index names it; the download is incomplete".into()));
    };
    if size < 8 {
        return Err(bad(format!("{size} bytes are no safetensors file; download it again")));
    }
    let length = source.read(name, 0..8).await?;
    let length = u64::from_le_bytes(length[..8].try_into().expect("eight bytes were read"));
    if length > MAX_HEADER_BYTES || length > size - 8 {
        let why =
            format!("the header claims {length} bytes in a file of {size}; it is truncated or no safetensors file");
        return Err(bad(why));
    }
    let header = source.read(name, 8..8 + length).await?;
    parse_header(&header, size, &path, name)
}

/// Parses and checks the JSON of a header. `size` is that of the whole file.
fn parse_header(header: &[u8], size: u64, path: &str, name: &str) -> Result<BTreeMap<String, TensorInfo>> {
    let bad = |why: String| Error::model(path, why);
    let data_start = 8 + header.len() as u64;
    let Entries(entries) =
        serde_json::from_slice(header).map_err(|e| bad(format!("the safetensors header is not valid: {e}")))?;
    let file: Rc<str> = name.into();
    let mut tensors = BTreeMap::new();
    for (tensor, value) in entries {
        if tensor == METADATA {
            continue;
        }
        let info = parse_entry(value, data_start, &file)
            .map_err(|why| bad(format!("the header's entry for tensor `{tensor}` is not valid: {why}")))?;
        check_bytes(&tensor, &info, size).map_err(bad)?;
        if tensors.insert(tensor.clone(), info).is_some() {
            return Err(bad(format!(
                "the header names tensor `{tensor}` twice; the file is damaged or made to deceive"
            )));
        }
    }
    check_places(&tensors, data_start, size).map_err(bad)?;
    Ok(tensors)
}

/// A tensor lies in the file and has the bytes of its shape.
fn check_bytes(tensor: &str, info: &TensorInfo, size: u64) -> Result<(), String> {
    let bytes = info.range.end - info.range.start;
    if info.range.end > size {
        return Err(format!(
            "tensor `{tensor}` ends at byte {}, but the file has {size}: it is truncated; download it again",
            info.range.end
        ));
    }
    let elements = info.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
    let asked = dtype_bits(&info.dtype).map(|bits| elements.and_then(|n| n.checked_mul(bits)));
    if asked.is_some_and(|asked| asked != bytes.checked_mul(8)) {
        let shape = &info.shape;
        return Err(format!(
            "tensor `{tensor}` is {} {shape:?} but has {bytes} bytes; the header is damaged",
            info.dtype
        ));
    }
    Ok(())
}

/// The tensors cover the data without overlaps, holes and a rest, as the format demands.
fn check_places(tensors: &BTreeMap<String, TensorInfo>, data_start: u64, size: u64) -> Result<(), String> {
    let mut by_place: Vec<(&String, &Range<u64>)> = tensors.iter().map(|(name, t)| (name, &t.range)).collect();
    by_place.sort_by_key(|(_, range)| (range.start, range.end));
    let mut before: Option<&str> = None;
    let mut end = data_start;
    for (name, range) in by_place {
        if range.start < end {
            let before = before.unwrap_or_default();
            return Err(format!("tensors `{before}` and `{name}` overlap; the header is damaged"));
        }
        if range.start > end {
            let hole = range.start - end;
            return Err(format!(
                "{hole} bytes before tensor `{name}` belong to no tensor, which the format forbids; save the file again"
            ));
        }
        (before, end) = (Some(name.as_str()), range.end);
    }
    if end < size {
        let rest = size - end;
        return Err(format!(
            "{rest} bytes at the end belong to no tensor, which the format forbids; download the file again"
        ));
    }
    Ok(())
}

/// `{"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}`.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// An entry of a header; the error says what is wrong with it.
fn parse_entry(value: &RawValue, data_start: u64, file: &Rc<str>) -> Result<TensorInfo, String> {
    let Entry { dtype, shape, data_offsets: (start, end) } =
        serde_json::from_str(value.get()).map_err(|e| e.to_string())?;
    let range = data_start.checked_add(start).zip(data_start.checked_add(end)).filter(|(start, end)| start <= end);
    let (start, end) = range.ok_or("its `data_offsets` are no range of bytes")?;
    Ok(TensorInfo { dtype, shape, file: file.clone(), range: start..end })
}

/// The entries of a JSON object in their order, of which a map would keep only the last of a name.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'a> serde::Deserialize<'a> for Entries<'a> {
    fn deserialize<D: serde::Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'a> serde::de::Visitor<'a> for Visitor {
            type Value = Entries<'a>;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'a>>(self, mut map: A) -> Result<Entries<'a>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        from.deserialize_map(Visitor)
    }
}

/// All tensors of a sharded checkpoint.
async fn read_shards(source: &dyn Source, index: &[u8]) -> Result<BTreeMap<String, TensorInfo>> {
    let path = source.path(INDEX);
    let bad = |why: String| Error::model(path.clone(), why);
    let Entries(index) = serde_json::from_slice(index).map_err(|e| bad(format!("not valid JSON: {e}")))?;
    let map = index.iter().find(|(key, _)| key == "weight_map").map(|(_, map)| map);
    let map = map.ok_or_else(|| bad("`weight_map` is missing".into()))?;
    let Entries(map) = serde_json::from_str(map.get()).map_err(|e| bad(format!("key `weight_map`: {e}")))?;
    let mut shards: BTreeMap<&str, String> = BTreeMap::new();
    for (tensor, file) in &map {
        let file: String = serde_json::from_str(file.get())
            .map_err(|_| bad(format!("the shard of tensor `{tensor}` is not a file name")))?;
        if !is_plain_file_name(&file) {
            return Err(bad(format!("the shard of tensor `{tensor}`, {file:?}, is not a plain file name")));
        }
        if shards.insert(tensor, file).is_some() {
            return Err(bad(format!("`weight_map` names tensor `{tensor}` twice")));
        }
    }
    let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in &shards {
        by_file.entry(file).or_default().push(tensor);
    }
    let mut all = BTreeMap::new();
    for (file, names) in by_file {
        let mut shard = read_header(source, file).await?;
        for tensor in names {
            let missing =
                || Error::model(source.path(file), format!("tensor `{tensor}` is missing, although {INDEX} names it"));
            let info = shard.remove(tensor).ok_or_else(missing)?;
            all.insert(tensor.to_owned(), info);
        }
    }
    Ok(all)
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
