//! The GGUF container: header, keys and where the tensors lie.
//!
//! Nothing is believed before it was checked against the file: a count is compared with the bytes that are left before room
//! is made for it, strings and arrays end within the header, tensors lie within the file, on the alignment, and do not overlap.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::meta::{Meta, Value, number_size};
use crate::{
    Error, Result,
    format::Format,
    source::{Bytes, Source, not_a_pointer},
};

/// First bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Bytes of a header that are read at first; those with long vocabularies take more attempts. A page may fetch these bytes alone.
const FIRST_READ: u64 = 1 << 20;
/// Most bytes of a header: what stands before the data.
const MAX_HEADER: u64 = 512 << 20;
/// Bytes of the shortest key with its value, and of the shortest entry of a tensor.
const LEAST_KEY: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;
/// Most strings of an array; the largest vocabularies have some 300,000.
const MAX_STRINGS: usize = 1 << 22;
/// Longest name of a tensor in bytes; ggml allows 64.
const MAX_NAME: usize = 256;

/// What is stored under a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The type as messages name it.
    pub kind: String,
    /// Plain or coded elements with the bytes of a plain one; `None` for a type that is not read.
    pub format: Option<(Format, usize)>,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: Arc<str>,
    /// Its bytes.
    pub range: Range<u64>,
}

/// One file.
pub(super) struct File {
    pub meta: Meta,
    pub tensors: BTreeMap<String, Stored>,
}

/// Name, elements and bytes of a block of each type by its number; no bytes for those that are not defined any more.
pub(super) const TYPES: [(&str, u64, u64); 43] = [
    ("F32", 1, 4),
    ("F16", 1, 2),
    ("Q4_0", 32, 18),
    ("Q4_1", 32, 20),
    ("Q4_2", 0, 0),
    ("Q4_3", 0, 0),
    ("Q5_0", 32, 22),
    ("Q5_1", 32, 24),
    ("Q8_0", 32, 34),
    ("Q8_1", 32, 36),
    ("Q2_K", 256, 84),
    ("Q3_K", 256, 110),
    ("Q4_K", 256, 144),
    ("Q5_K", 256, 176),
    ("Q6_K", 256, 210),
    ("Q8_K", 256, 292),
    ("IQ2_XXS", 256, 66),
    ("IQ2_XS", 256, 74),
    ("IQ3_XXS", 256, 98),
    ("IQ1_S", 256, 50),
    ("IQ4_NL", 32, 18),
    ("IQ3_S", 256, 110),
    ("IQ2_S", 256, 82),
    ("IQ4_XS", 256, 136),
    ("I8", 1, 1),
    ("I16", 1, 2),
    ("I32", 1, 4),
    ("I64", 1, 8),
    ("F64", 1, 8),
    ("IQ1_M", 256, 56),
    ("BF16", 1, 2),
    ("Q4_0_4_4", 0, 0),
    ("Q4_0_4_8", 0, 0),
    ("Q4_0_8_8", 0, 0),
    ("TQ1_0", 256, 54),
    ("TQ2_0", 256, 66),
    ("IQ4_NL_4_4", 0, 0),
    ("IQ4_NL_4_8", 0, 0),
    ("IQ4_NL_8_8", 0, 0),
    ("MXFP4", 32, 17),
    ("NVFP4", 64, 36),
    ("Q1_0", 128, 18),
    ("Q2_0", 64, 18),
];

/// Reads the header of a file.
///
/// # Errors
/// [`Error::BadModel`] naming what is wrong; those of the source.
pub(super) async fn read(source: &dyn Source, name: &str) -> Result<File> {
    let path = source.path(name);
    let bad = |why: String| Error::model(path.clone(), why);
    let Some(size) = source.size(name).await? else {
        return Err(bad("no such file; the download is incomplete".into()));
    };
    let mut length = FIRST_READ.min(size);
    loop {
        let bytes = source.read(name, 0..length).await?;
        not_a_pointer(source, name, &bytes)?;
        let mut cursor = Cursor { bytes: &bytes, at: 0, size };
        match parse(&mut cursor, name) {
            Ok(file) => return Ok(file),
            Err(Fault::Bad(why)) => return Err(bad(why)),
            Err(Fault::Short) if length == size => {
                return Err(bad(format!(
                    "the header goes on after the end of the file, {size} bytes: it is truncated"
                )));
            }
            Err(Fault::Short) if length >= MAX_HEADER => {
                return Err(bad(format!("the header has more than {MAX_HEADER} bytes")));
            }
            Err(Fault::Short) => length = (4 * length).min(size).min(MAX_HEADER),
        }
    }
}

enum Fault {
    /// The header goes on after the bytes that were read.
    Short,
    Bad(String),
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Self::Bad(why)
    }
}

/// A place in the first bytes of a file of `size` bytes.
struct Cursor<'a> {
    bytes: &'a Bytes,
    at: usize,
    size: u64,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], Fault> {
        let end = (self.at as u64).checked_add(n).filter(|end| *end <= self.size);
        let end = end.ok_or_else(|| format!("{n} bytes at byte {} of a file of {}", self.at, self.size))?;
        let part = self.bytes.as_ref().get(self.at..usize::try_from(end).map_err(|_| Fault::Short)?);
        let part = part.ok_or(Fault::Short)?;
        self.at = end as usize;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        Ok(self.take(N as u64)?.try_into().expect("as many bytes as asked for"))
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things of at least `least` bytes each, all of which are still to come.
    fn count(&mut self, what: &str, least: u64) -> Result<usize, Fault> {
        let n = self.u64()?;
        let left = self.size - self.at as u64;
        if n > left / least {
            return Err(Fault::Bad(format!(
                "{n} {what} cannot be in the {left} bytes that follow; the file is damaged"
            )));
        }
        Ok(n as usize)
    }

    fn string(&mut self) -> Result<String, Fault> {
        let n = self.u64()?;
        Ok(String::from_utf8_lossy(self.take(n)?).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value, Fault> {
        match kind {
            8 => Ok(Value::Text(self.string()?)),
            9 => self.list(),
            _ => {
                let size = number_size(kind).ok_or_else(|| format!("values of type {kind} are not known"))?;
                Ok(Value::Numbers { kind, one: true, bytes: self.take(size as u64)?.to_vec() })
            }
        }
    }

    fn list(&mut self) -> Result<Value, Fault> {
        let kind = self.u32()?;
        if kind == 8 {
            let n = self.count("strings of an array", 8)?;
            if n > MAX_STRINGS {
                return Err(Fault::Bad(format!("an array of {n} strings; at most {MAX_STRINGS} are read")));
            }
            // Strings that are still to be read decide nothing: the list grows as they come.
            let mut texts = Vec::new();
            for _ in 0..n {
                texts.push(self.string()?);
            }
            return Ok(Value::Texts(texts));
        }
        let size = number_size(kind).ok_or_else(|| format!("arrays of type {kind} are not read"))?;
        let n = self.count("elements of an array", size as u64)?;
        Ok(Value::Numbers { kind, one: false, bytes: self.take((n * size) as u64)?.to_vec() })
    }
}

fn parse(c: &mut Cursor<'_>, name: &str) -> Result<File, Fault> {
    if c.array::<4>()? != *MAGIC {
        return Err(Fault::Bad("this is no GGUF file; download it again".into()));
    }
    match c.u32()? {
        2 | 3 => {}
        v if v & 0xffff == 0 => return Err(Fault::Bad("this GGUF file is big endian, which is not supported".into())),
        v => {
            return Err(Fault::Bad(format!(
                "GGUF version {v} is not supported, only 2 and 3; convert the model again"
            )));
        }
    }
    let tensors = c.count("tensors", LEAST_TENSOR)?;
    let keys = c.count("keys", LEAST_KEY)?;
    let mut values = BTreeMap::new();
    for _ in 0..keys {
        let key = c.string()?;
        let kind = c.u32()?;
        let value = match c.value(kind) {
            Err(Fault::Bad(why)) => return Err(Fault::Bad(format!("key `{key}`: {why}"))),
            value => value?,
        };
        if values.insert(key.clone(), value).is_some() {
            return Err(Fault::Bad(format!("key `{key}` comes twice; the file is damaged or made to deceive")));
        }
    }
    let meta = Meta::new(values);
    let mut entries = Vec::new();
    for _ in 0..tensors {
        entries.push(entry(c)?);
    }
    let alignment = meta.int("general.alignment").unwrap_or(32);
    let alignment = u64::try_from(alignment).ok().filter(|n| n.is_power_of_two() && *n <= 1 << 20);
    let alignment = alignment.ok_or_else(|| "key `general.alignment` is no power of two up to 2^20".to_owned())?;
    let data = (c.at as u64).next_multiple_of(alignment);
    let tensors = place(entries, name, (data, c.size), alignment)?;
    Ok(File { meta, tensors })
}

/// Name, sizes (outermost first), type and offset of a tensor.
type Entry = (String, Vec<usize>, u32, u64);

fn entry(c: &mut Cursor<'_>) -> Result<Entry, Fault> {
    let name = c.string()?;
    if name.len() > MAX_NAME {
        return Err(Fault::Bad(format!("a tensor has a name of {} bytes, it may have {MAX_NAME}", name.len())));
    }
    let rank = c.u32()?;
    if !(1..=4).contains(&rank) {
        return Err(Fault::Bad(format!("tensor `{name}` has {rank} dimensions; 1 to 4 are possible")));
    }
    let mut shape = Vec::with_capacity(4);
    for _ in 0..rank {
        let n = usize::try_from(c.u64()?).ok().filter(|n| *n > 0);
        shape.push(n.ok_or_else(|| format!("tensor `{name}` has an impossible size"))?);
    }
    shape.reverse();
    Ok((name, shape, c.u32()?, c.u64()?))
}

/// Checks where the tensors lie in the data, which fills the file from `start` to `end`.
fn place(
    entries: Vec<Entry>,
    file: &str,
    (start, end): (u64, u64),
    alignment: u64,
) -> Result<BTreeMap<String, Stored>, String> {
    let file: Arc<str> = file.into();
    let mut tensors = BTreeMap::new();
    let mut ranges = Vec::with_capacity(entries.len());
    for (name, shape, kind, offset) in entries {
        let (type_name, n, bytes) = *TYPES
            .get(kind as usize)
            .filter(|t| t.1 > 0)
            .ok_or_else(|| format!("tensor `{name}` has type {kind}, which is not known"))?;
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
        let row = *shape.last().expect("at least one dimension") as u64;
        if !row.is_multiple_of(n) {
            return Err(format!("tensor `{name}` has rows of {row}, no multiple of the {n} in a block of {type_name}"));
        }
        if offset % alignment != 0 {
            return Err(format!("tensor `{name}` begins at {offset}, which is not aligned to {alignment}"));
        }
        let from = start.checked_add(offset);
        let to = elements.and_then(|e| (e / n).checked_mul(bytes)).and_then(|size| from?.checked_add(size));
        let range = from.zip(to).map(|(from, to)| from..to).filter(|r| r.end <= end).ok_or_else(|| {
            format!(
                "tensor `{name}`, {type_name} {shape:?}, ends after the end of the file, {end} bytes: it is truncated"
            )
        })?;
        ranges.push((range.clone(), name.clone()));
        let format = format_of(kind, bytes);
        let stored = Stored { kind: type_name.into(), format, shape, file: file.clone(), range };
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(format!("tensor `{name}` comes twice; the file is damaged or made to deceive"));
        }
    }
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(format!("tensors `{}` and `{}` overlap; the file is damaged", pair[0].1, pair[1].1)),
        None => Ok(tensors),
    }
}

pub(super) fn format_of(kind: u32, bytes: u64) -> Option<(Format, usize)> {
    let format = match kind {
        0 | 1 | 30 => Format::Plain,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        20 => Format::Iq4Nl,
        39 => Format::Mxfp4,
        40 => Format::Nvfp4,
        _ => return None,
    };
    Some((format, bytes as usize))
}
