//! GGUF files as models: the container, the configuration of a family out of its keys, weights under the names that the family
//! asks for, and the tokenizer.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{
    Error, Result,
    source::{Source, part_of_gguf},
};

mod arch;
mod container;
mod inverse;
mod meta;
mod vocabulary;
mod write;

use arch::{Facts, How, Rule};
pub use container::Stored;
pub use inverse::{Part, parts};
pub use meta::{Meta, Value as MetaValue};
pub use vocabulary::{GPT_2, TokenizerFiles, pre};
pub use write::{Header, Kind};

/// Most files of a model.
const MAX_FILES: usize = 1000;
/// Most frequencies of a rotation.
const MAX_FREQUENCIES: u64 = 1 << 12;

/// A model in one or more GGUF files.
#[derive(Debug)]
pub struct Gguf {
    path: String,
    arch: String,
    meta: Meta,
    tensors: BTreeMap<String, Stored>,
    rope_factors: Option<Vec<f32>>,
}

/// Rows of a stored tensor. Rows are the last dimension but one; of a vector, its elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// The tensor.
    pub from: Stored,
    /// The first row.
    pub first: usize,
    /// Distance to the next.
    pub step: usize,
    /// Rows.
    pub count: usize,
}

/// What becomes of the elements of a small tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// `ln(-x)`.
    NegLog,
    /// `x - 1`.
    MinusOne,
}

impl Change {
    /// The element for a stored one.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::NegLog => (-x).ln(),
            Self::MinusOne => x - 1.0,
        }
    }

    /// The stored element for one.
    pub fn undo(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::NegLog => -x.exp(),
            Self::MinusOne => x + 1.0,
        }
    }
}

/// A weight as the family asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its rows in order.
    pub rows: Vec<Rows>,
    /// What becomes of its elements.
    pub change: Change,
    /// A tensor of one factor on all of it.
    pub factor: Option<Stored>,
}

impl Gguf {
    /// Reads the header of `name`, and those of the other files of a split model.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file and what is wrong; those of the source.
    pub async fn open(source: &dyn Source, name: &str) -> Result<Self> {
        let (first, count) = part_of_gguf(name)
            .filter(|(.., of)| *of <= MAX_FILES)
            .map_or((name.to_owned(), 1), |(stem, _, of)| (part(stem, 1, of), of));
        let container::File { meta, mut tensors } = container::read(source, &first).await?;
        let path = source.path(&first);
        let bad = |why: String| Error::model(path.clone(), why);
        let split = meta.int("split.count").unwrap_or(1);
        if split > 1 && split != count as i64 {
            let why = format!("it is one of {split} files, which must be named like NAME-00001-of-{split:05}.gguf");
            return Err(bad(why));
        }
        for i in 2..=count {
            let (stem, ..) =
                part_of_gguf(name).filter(|(.., of)| *of <= MAX_FILES).expect("only such a name has a count");
            let file = part(stem, i, count);
            for (tensor, stored) in container::read(source, &file).await?.tensors {
                if tensors.insert(tensor.clone(), stored).is_some() {
                    return Err(Error::model(source.path(&file), format!("tensor `{tensor}` is in another file too")));
                }
            }
        }
        if let Some(all) = meta.int("split.tensors.count").filter(|all| count > 1 && *all != tensors.len() as i64) {
            return Err(bad(format!(
                "the files have {} tensors, of {all}; one of them is of another model",
                tensors.len()
            )));
        }
        let arch =
            meta.text("general.architecture").ok_or_else(|| bad("key `general.architecture` is missing".into()))?;
        let (arch, rope_factors) = (arch.to_owned(), rope_factors(source, &tensors).await?);
        Ok(Self { path, arch, meta, tensors, rope_factors })
    }

    /// The file, as messages name it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A file that is to be written, so that it can be read as one that is there. Its tensors lie nowhere.
    pub fn planned(path: &str, meta: Meta, tensors: BTreeMap<String, Stored>, rope_factors: Option<Vec<f32>>) -> Self {
        let arch = meta.text("general.architecture").unwrap_or_default().to_owned();
        Self { path: path.into(), arch, meta, tensors, rope_factors }
    }

    /// `general.architecture`.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// All keys.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All tensors, by their names in the file.
    pub fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            path: &self.path,
            arch: &self.arch,
            meta: &self.meta,
            tensors: &self.tensors,
            rope_factors: self.rope_factors.as_deref(),
            own_order: false,
        }
    }

    /// What `config.json` of the same model says.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an architecture that is not known, [`Error::BadModel`] naming the key.
    pub fn config(&self) -> Result<Map<String, Value>> {
        let (facts, arch) = (self.facts(), arch::find(&self.path, &self.arch)?);
        let mut config = facts.common(&self.arch)?;
        (arch.config)(&facts, &mut config)?;
        config.insert("eos_token_id".into(), vocabulary::ends(&self.meta).into());
        Ok(config)
    }

    /// Refuses a file whose weights its own keys describe and the `config.json` of the same model does not.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the way out.
    pub fn fits_config(&self) -> Result<()> {
        let Some(reason) = arch::differs_from_config(&self.arch) else { return Ok(()) };
        let what = format!("{}: weights of {:?} with a config.json of their own", self.path, self.arch);
        Err(Error::Unsupported { what, why: format!("{reason}; give the GGUF file itself") })
    }

    /// `tokenizer.json` and `tokenizer_config.json` of the same model; `None` if the file has no vocabulary.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a kind of vocabulary or of pre-tokeniser that is not known, by its name, and
    /// [`Error::BadModel`] naming the key.
    pub fn tokenizer(&self) -> Result<Option<TokenizerFiles>> {
        vocabulary::tokenizer(&self.path, &self.meta)
    }

    /// The chat template.
    pub fn template(&self) -> Option<&str> {
        self.meta.text("tokenizer.chat_template")
    }

    /// All weights by the names that the family asks for; what it does not know keeps the name of the file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] and [`Error::BadModel`] as for [`Gguf::config`], and if rows that a weight is made of are not
    /// there.
    pub fn weights(&self) -> Result<BTreeMap<String, Made>> {
        let (facts, arch) = (self.facts(), arch::find(&self.path, &self.arch)?);
        let (rules, layers) = ((arch.rules)(&facts)?, facts.layers()?);
        let mut weights = BTreeMap::new();
        let mut used: Vec<String> = vec!["rope_freqs.weight".into()];
        for rule in &rules {
            let numbers = if rule.sources[0].contains("{}") { 0..layers } else { 0..1 };
            for i in numbers {
                let fill = |name: &String| name.replace("{}", &i.to_string());
                let sources: Vec<String> = rule.sources.iter().map(fill).collect();
                let Some(stored) = sources.iter().map(|s| self.tensors.get(s)).collect::<Option<Vec<_>>>() else {
                    continue;
                };
                let mut made = make(rule, &stored)
                    .map_err(|why| Error::model(&self.path, format!("tensor `{}`: {why}", sources[0])))?;
                made.factor = self.factor(&sources)?;
                weights.insert(fill(&rule.name), made);
                used.extend(sources);
            }
        }
        used.sort_unstable();
        // Factors go with their weights. Ranges of activations are not used: none are quantised by a recipe here.
        let beside = |name: &str| name.ends_with(".scale") || name.ends_with(".input_scale");
        for (name, stored) in &self.tensors {
            if used.binary_search(name).is_err() && !beside(name) {
                weights.insert(name.clone(), copy(stored));
            }
        }
        Ok(weights)
    }

    /// The factor of an NVFP4 tensor, stored as a tensor of its own.
    fn factor(&self, sources: &[String]) -> Result<Option<Stored>> {
        let factor = |name: &String| self.tensors.get(&format!("{}.scale", name.strip_suffix(".weight")?));
        let mut found = sources.iter().filter_map(factor);
        let Some(stored) = found.next() else { return Ok(None) };
        if found.next().is_some() || stored.shape.iter().any(|n| *n != 1) {
            let what = format!("{}: factors of the parts of `{}`", self.path, sources[0]);
            return Err(Error::Unsupported { what, why: "only one factor for all of a matrix is supported".into() });
        }
        Ok(Some(stored.clone()))
    }
}

fn part(stem: &str, i: usize, of: usize) -> String {
    format!("{stem}-{i:05}-of-{of:05}.gguf")
}

async fn rope_factors(source: &dyn Source, tensors: &BTreeMap<String, Stored>) -> Result<Option<Vec<f32>>> {
    let Some(stored) = tensors.get("rope_freqs.weight") else { return Ok(None) };
    let bytes = stored.range.end - stored.range.start;
    if stored.kind != "F32" || bytes > 4 * MAX_FREQUENCIES {
        let why = format!("tensor `rope_freqs.weight` is {} {:?}", stored.kind, stored.shape);
        return Err(Error::model(source.path(&stored.file), why));
    }
    let bytes = source.read(&stored.file, stored.range.clone()).await?;
    Ok(Some(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
}

/// Rows of a tensor, and elements of each.
fn rows_of(shape: &[usize]) -> usize {
    if shape.len() < 2 { shape[0] } else { shape[shape.len() - 2] }
}

fn copy(stored: &Stored) -> Made {
    let all = Rows { from: stored.clone(), first: 0, step: 1, count: rows_of(&stored.shape) };
    Made { shape: stored.shape.clone(), rows: vec![all], change: Change::None, factor: None }
}

/// The weight of a rule out of its sources.
fn make(rule: &Rule, stored: &[&Stored]) -> Result<Made, String> {
    let mut made = copy(stored[0]);
    made.change = rule.change;
    if let How::Flat(_) = rule.how {
        made.shape = vec![made.shape.iter().product()];
    }
    let rows: Vec<usize> = stored.iter().map(|s| rows_of(&s.shape)).collect();
    let run = |p: &arch::Pick| match p.count.checked_sub(1).map(|last| p.first + last * p.step) {
        Some(last) if last < rows[p.source] => {
            Ok(Rows { from: stored[p.source].clone(), first: p.first, step: p.step, count: p.count })
        }
        _ => Err(format!("{} rows, but {} from row {} are needed", rows[p.source], p.count, p.first)),
    };
    made.rows = rule.how.picks(&rows)?.iter().map(run).collect::<Result<_, _>>()?;
    let outer = |s: &Stored| (s.shape[..s.shape.len().saturating_sub(2)].to_vec(), s.shape.last().copied());
    if stored[0].shape.len() > 1 && stored.iter().any(|s| outer(s) != outer(stored[0])) {
        let shapes: Vec<_> = stored.iter().map(|s| &s.shape).collect();
        return Err(format!("parts of {shapes:?} do not fit together"));
    }
    if !matches!(rule.how, How::Flat(_)) {
        let axis = made.shape.len().saturating_sub(2);
        made.shape[axis] = made.rows.iter().map(|r| r.count).sum();
    }
    Ok(made)
}
