//! Models as GGUF files: names and transformations are those by which such files are read, the other way round.
//!
//! A file is planned first, and read back as if it were there: unless it says the same model, it is refused. Then its tensors are
//! written one after the other, some rows at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    sync::Arc,
};

use crate::{
    Error, Result,
    checkpoint::stored_tensor,
    config::Config,
    cpu::{CpuBackend, par},
    format::Format,
    gguf::{self, Gguf, Header, Kind, Meta, MetaValue, Stored},
    model_dir::ModelFiles,
    models::{self, Architecture, Limits},
    rope::RopeScaling,
    tensor::DType,
    weights::Loader,
};

mod fold;
mod keys;
mod mix;
mod rows;
mod weights;
mod words;

use mix::Mix;
pub use mix::Target;
use rows::{HELD, Rows};
use weights::Weights;

/// Elements that one thread codes at a time, about.
const PIECE: usize = 1 << 15;

/// A file that is to be written.
pub struct Conversion {
    header: Header,
    tensors: Vec<Item>,
    /// What of it other programs do not know: its tokenizer, or its head for drafts.
    pub for_selkie: Vec<&'static str>,
    /// Whether the model has a head for drafts that is not in it, because other programs do not read files with that one.
    pub without_head: bool,
}

struct Item {
    name: String,
    shape: Vec<usize>,
    kind: Kind,
    content: Content,
}

enum Content {
    Rows(Rows),
    Values(Vec<f32>),
}

/// A tensor that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Its name in the file.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its type.
    pub kind: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Sums of squared errors and of squares of the elements.
    pub squares: [f64; 2],
}

impl Written {
    /// The error relative to the elements, as the root of mean squares.
    pub fn error(&self) -> f64 {
        let [errors, squares] = self.squares;
        if errors == 0.0 { 0.0 } else { (errors / squares).sqrt() }
    }
}

impl Conversion {
    /// Plans the file of a model. `selkie_only`: its tokenizer and its head for drafts may be ones that other programs do not know.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model that such a file cannot hold, with what of it; those of the model's files.
    pub async fn plan(files: &ModelFiles, target: Target, selkie_only: bool) -> Result<Self> {
        let Planned { mut meta, tensors, head } = match files.gguf() {
            Some(name) => of_gguf(files, name).await?,
            None => of_folder(files, selkie_only).await?,
        };
        meta.set("general.file_type", MetaValue::u32(target.file_type()));
        let tokenizer = meta.text("tokenizer.ggml.model") == Some("none") && meta.has("tokenizer.ggml.tokens");
        let unknown = [("its tokenizer", tokenizer), ("its head for drafts", head == HeadOf::Selkie)];
        Ok(Self {
            for_selkie: unknown.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect(),
            without_head: head == HeadOf::LeftOut,
            ..Self::with(&meta, tensors, target)
        })
    }

    fn with(meta: &Meta, mut tensors: Vec<(String, Vec<usize>, Content)>, target: Target) -> Self {
        tensors.sort_by_key(|(name, ..)| (mix::layer(name), name.starts_with("output")));
        let layers = tensors.iter().filter_map(|(name, ..)| mix::layer(name)).max().map_or(0, |last| last + 1);
        let mut mix = Mix::new(target, layers, tensors.iter().map(|(name, ..)| name.as_str()));
        let item = |(name, shape, content): (String, Vec<usize>, Content)| {
            let kind = mix.kind(&name, &shape);
            Item { name, shape, kind, content }
        };
        let tensors: Vec<Item> = tensors.into_iter().map(item).collect();
        let header = Header::new(meta, tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice(), t.kind)));
        Self { header, tensors, for_selkie: Vec::new(), without_head: false }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.header.size
    }

    /// Writes the file; `report` gets the bytes written so far, and each tensor once it is complete.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming a tensor with elements that its type cannot hold; those of the source, and `out`'s by `io`.
    pub async fn write(
        &self,
        out: &mut dyn Write,
        io: &dyn Fn(std::io::Error) -> Error,
        report: &mut dyn FnMut(u64, Option<&Written>) -> Result<()>,
    ) -> Result<()> {
        out.write_all(&self.header.bytes).map_err(io)?;
        let mut done = self.header.bytes.len() as u64;
        for (item, padding) in self.tensors.iter().zip(&self.header.padding) {
            let mut written = Written {
                name: item.name.clone(),
                shape: item.shape.clone(),
                kind: item.kind.name(),
                bytes: 0,
                squares: [0.0; 2],
            };
            let count = item.count();
            // Whole rows, so that a block is never cut.
            let step = (HELD / item.width()).max(1);
            for first in (0..count).step_by(step) {
                let (bytes, squares) = item.coded(first, step.min(count - first)).await?;
                out.write_all(&bytes).map_err(io)?;
                written.bytes += bytes.len() as u64;
                (0..2).for_each(|i| written.squares[i] += squares[i]);
                done += bytes.len() as u64;
                report(done, None)?;
            }
            if !written.squares.iter().all(|x| x.is_finite()) {
                let why = "has elements that are not finite, or too large for its type";
                return Err(Error::model(&item.name, format!("the tensor {why}; try --type f32")));
            }
            out.write_all(&vec![0; *padding]).map_err(io)?;
            done += *padding as u64;
            report(done, Some(&written))?;
        }
        Ok(())
    }
}

impl Item {
    fn count(&self) -> usize {
        match &self.content {
            Content::Rows(rows) => rows.count(),
            Content::Values(values) => values.len(),
        }
    }

    fn width(&self) -> usize {
        match &self.content {
            Content::Rows(rows) => rows.width,
            Content::Values(_) => 1,
        }
    }

    /// The bytes of some rows, and the sums of squared errors and of squares.
    async fn coded(&self, first: usize, count: usize) -> Result<(Vec<u8>, [f64; 2])> {
        let rows = match &self.content {
            Content::Values(values) => return Ok(code(self.kind, 1, &values[first..first + count])),
            Content::Rows(rows) => rows,
        };
        let values = rows.read(first, count).await?;
        if let Some(stored) = rows.as_stored().filter(|t| kind_of(t) == Some(self.kind)) {
            // What is stored in the wanted type is not coded once more.
            let row = self.kind.bytes(rows.width as u64) as usize;
            let bytes = stored.read(first * row..(first + count) * row).await?;
            return Ok((bytes.to_vec(), [0.0, squares(&values)]));
        }
        Ok(code(self.kind, rows.width, &values))
    }
}

/// The type under which files have such a tensor.
fn kind_of(tensor: &crate::checkpoint::StoredTensor) -> Option<Kind> {
    match (tensor.format, tensor.dtype) {
        (Format::Plain, DType::F32) => Some(Kind::F32),
        (Format::Plain, DType::F16) => Some(Kind::F16),
        (Format::Plain, DType::Bf16) => Some(Kind::BF16),
        (format, _) => Kind::of(format),
    }
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}

/// Rows of `width` elements in a type, coded on several threads, and the sums of squared errors and of squares.
fn code(kind: Kind, width: usize, values: &[f32]) -> (Vec<u8>, [f64; 2]) {
    let piece = width * (PIECE / width).max(1);
    let pieces = values.len().div_ceil(piece);
    let mut coded: Vec<(Vec<u8>, [f64; 2])> = vec![Default::default(); pieces];
    // The search for a scale costs some hundred operations an element.
    let tasks = values.chunks(piece).zip(&mut coded).collect();
    par::for_each(tasks, 100 * values.len(), |_, (values, coded): (&[f32], &mut (Vec<u8>, [f64; 2]))| {
        let bytes = encode(kind, values);
        let back = decode(kind, &bytes);
        let missed = values.iter().zip(back).map(|(x, y)| f64::from(x - y) * f64::from(x - y)).sum();
        *coded = (bytes, [missed, squares(values)]);
    });
    let mut bytes = Vec::with_capacity(kind.bytes(values.len() as u64) as usize);
    let mut sums = [0.0; 2];
    for (part, squares) in coded {
        bytes.extend(part);
        (0..2).for_each(|i| sums[i] += squares[i]);
    }
    (bytes, sums)
}

fn encode(kind: Kind, values: &[f32]) -> Vec<u8> {
    match kind {
        Kind::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Kind::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        Kind::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        coded => coded.format().encode(values),
    }
}

fn decode(kind: Kind, bytes: &[u8]) -> Vec<f32> {
    match kind {
        Kind::F32 => DType::F32.to_f32(bytes),
        Kind::F16 => DType::F16.to_f32(bytes),
        Kind::BF16 => DType::Bf16.to_f32(bytes),
        coded => coded.format().decode(bytes),
    }
}

/// Keys and tensors of a file that is to be written.
struct Planned {
    meta: Meta,
    tensors: Vec<(String, Vec<usize>, Content)>,
    head: HeadOf,
}

/// The model's head for drafts in a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeadOf {
    /// There is none, or one that other programs read.
    All,
    /// One that only this program reads.
    Selkie,
    /// The file is without it, because other programs would refuse one with it.
    LeftOut,
}

impl HeadOf {
    /// Of a model whose files have the architecture `arch`.
    fn choose(files: &ModelFiles, read: &Architecture, arch: &str, selkie_only: bool) -> Self {
        let stored = read.head.as_ref().filter(|_| read.head_parameters(&files.checkpoint).is_some());
        match stored.is_none_or(|head| keys::head_is_known(arch, head)) {
            true => Self::All,
            false if selkie_only => Self::Selkie,
            false => Self::LeftOut,
        }
    }
}

/// Another GGUF file: its keys and names stay.
async fn of_gguf(files: &ModelFiles, name: &str) -> Result<Planned> {
    let gguf = Gguf::open(&**files.source(), name).await?;
    let mut meta = gguf.meta().clone();
    meta.retain(|key| !key.starts_with("split.") && key != "general.alignment");
    let mut tensors = Vec::new();
    for (name, stored) in gguf.tensors() {
        if name.ends_with(".scale") || name.ends_with(".input_scale") {
            return Err(Error::Unsupported {
                what: format!("{}: tensor `{name}`, a factor of another one,", gguf.path()),
                why: "files of NVFP4 are not converted; convert the model's folder".into(),
            });
        }
        let rows = Rows::whole(stored_tensor(files.source(), name, stored)?);
        tensors.push((name.clone(), stored.shape.clone(), Content::Rows(rows)));
    }
    let head = HeadOf::choose(files, &models::read(&files.config)?, gguf.arch(), true);
    Ok(Planned { meta, tensors, head })
}

/// The folder of a model.
async fn of_folder(files: &ModelFiles, selkie_only: bool) -> Result<Planned> {
    let mut read = models::read(&files.config)?;
    let arch = keys::architecture(files.label(), &read)?;
    let head = HeadOf::choose(files, &read, arch, selkie_only);
    read.drafts = head != HeadOf::LeftOut && read.head_parameters(&files.checkpoint).is_some();
    let mut architecture = read.clone();
    // Only files of these have keys for factors.
    let factors = if arch.starts_with("granite") { fold::Factors::new() } else { fold::factors(&mut architecture) };
    let used = used(files, &read).await?;
    let mut meta = keys::keys(arch, &architecture);
    meta.set("general.name", MetaValue::text(&files.name));
    words::add(&mut meta, files, architecture.vocab, selkie_only).await?;
    let of_tables = ["lm_head.weight", architecture.embedding[0]];
    let two_tables = architecture.tied && of_tables.iter().any(|name| factors.contains_key(*name));
    let weights = Weights::new(&files.checkpoint, &architecture, factors.clone(), used);
    let mut tensors = Vec::new();
    for part in gguf::parts(files.label(), &meta, &|name| weights.shape(name))? {
        let rows = weights.rows(&part)?;
        if two_tables && part.name == "token_embd.weight" {
            // Factors of their own make two tables of a shared one.
            let factors = factors.get("lm_head.weight").cloned().unwrap_or_default();
            let output = Rows { factors, ..rows.clone() };
            tensors.push(("output.weight".to_owned(), part.shape.clone(), Content::Rows(output)));
        }
        tensors.push((part.name, part.shape, Content::Rows(rows)));
    }
    weights.all_found(files.label(), arch)?;
    if let Some(values) = rope_factors(&architecture) {
        tensors.push(("rope_freqs.weight".into(), vec![values.len()], Content::Values(values)));
    }
    architecture.tied = tensors.iter().all(|(name, ..)| name != "output.weight");
    check(files.label(), arch, &meta, &tensors, &architecture)?;
    Ok(Planned { meta, tensors, head })
}

/// Names of the stored tensors that the model uses: it is loaded where the weights lie, which copies no matrix.
async fn used(files: &ModelFiles, architecture: &Architecture) -> Result<BTreeSet<String>> {
    let (backend, mut report) = (CpuBackend::new(), |_| {});
    let mut loader = Loader::new(&backend, &files.checkpoint, &mut report);
    models::build(architecture, &mut loader, Limits { max_tokens: 1, max_outputs: 1 }).await?;
    let mut used = files.checkpoint.asked();
    // Two equal tables are one.
    let (table, head) = (loader.choose(architecture.embedding), "/lm_head.weight");
    if architecture.tied && loader.stores(table) && loader.stores(head) && !loader.differ(table, head).await? {
        used.remove("lm_head.weight");
    }
    Ok(used)
}

/// By what the frequencies of Llama 3's rule are divided.
fn rope_factors(a: &Architecture) -> Option<Vec<f32>> {
    let rope = fold::attention_layers(a).flatten().find_map(|p| p.rope)?;
    let RopeScaling::Llama3 { .. } = rope.scaling else { return None };
    let plain = crate::rope::Rope { scaling: RopeScaling::None, ..rope };
    Some(plain.inv_freq().iter().zip(rope.inv_freq()).map(|(plain, scaled)| plain / scaled).collect())
}

/// Reads the planned file as if it were there, and compares the model that it says.
fn check(
    label: &str,
    arch: &str,
    meta: &Meta,
    tensors: &[(String, Vec<usize>, Content)],
    want: &Architecture,
) -> Result<()> {
    let file: Arc<str> = label.into();
    let stored = |(name, shape, _): &(String, Vec<usize>, Content)| {
        let format = Some((Format::Plain, 4));
        (name.clone(), Stored { kind: "F32".into(), format, shape: shape.clone(), file: file.clone(), range: 0..0 })
    };
    let planned: BTreeMap<_, _> = tensors.iter().map(stored).collect();
    let gguf = Gguf::planned(label, meta.clone(), planned, rope_factors(want));
    let got = models::read(&Config::from_keys(label, gguf.config()?))?;
    let refuse = |what: String| Error::Unsupported {
        what: format!("{label}: a GGUF file of architecture {arch:?} of this model"),
        why: format!("such a file cannot say {what} as the model has it; use the folder as it is"),
    };
    let frequencies = |a: &Architecture| fold::attention_layers(a).flatten().find_map(|p| p.rope).map(|r| r.inv_freq());
    let near = |(a, b): (f32, f32)| (a / b - 1.0).abs() < 1e-5;
    let (a, b) = (frequencies(want).unwrap_or_default(), frequencies(&got).unwrap_or_default());
    if a.len() != b.len() || !a.into_iter().zip(b).all(near) {
        return Err(refuse("the rule of rotations".into()));
    }
    // A head that is not stored is none.
    let head = |a: &Architecture| a.head.clone().filter(|_| want.drafts);
    let text = |a| format!("{:#?}", Architecture { head: head(a), drafts: false, ..fold::as_read(a) });
    let [want, got] = [want, &got].map(text);
    match want.lines().zip(got.lines()).position(|(a, b)| a != b) {
        None if want.len() == got.len() => Ok(()),
        place => Err(refuse(field(&want, place.unwrap_or(0)))),
    }
}

/// The field of a printed architecture that a line belongs to.
fn field(text: &str, place: usize) -> String {
    let lines: Vec<&str> = text.lines().take(place + 1).collect();
    let depth = |line: &str| line.len() - line.trim_start().len();
    let own = lines.last().map_or(0, |line| depth(line));
    let named = |line: &&&str| depth(line) <= own && line.contains(": ");
    let line = lines.iter().rev().find(named).copied().unwrap_or_default();
    format!("`{}`", line.trim().split(": ").next().unwrap_or_default())
}
