//! The JSON header of a bundle: a safetensors header whose tensors have a fixed order and no gaps.

use std::fmt::Write;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

use super::{Head, Identity, Part, VERSION};
use crate::{digest::Digest, tensor::DType};

/// Longest header, its own length not counted: a hundred thousand tensors.
pub(super) const MOST_HEADER: u64 = 16 << 20;
/// Most dimensions of a tensor.
const MOST_DIMS: usize = 4;
const FORMAT: &str = "selkie-bundle";
const METADATA: &str = "__metadata__";
const FROM: &str = "from";

/// Names of the tensors that are not values of layers.
pub(super) const TOKENS: &str = "tokens";
pub(super) const ENDS: &str = "ends";
pub(super) const MESSAGES: &str = "messages";
pub(super) const CHECKSUMS: &str = "checksums";

/// A header in file order: bytes of the tensors before the state, and a head whose tokens, ends and messages are not read yet.
pub(super) struct Layout {
    pub head: Head,
    pub tokens: u64,
    pub ends: u64,
    pub messages: Option<u64>,
}

/// Tensors of a bundle with checksums: tokens, ends, messages if there are some, and all parts.
pub(super) fn summed(messages: bool, parts: usize) -> usize {
    2 + usize::from(messages) + parts
}

/// The header of a bundle with its length before it. The data begin at a multiple of 8 bytes.
pub(super) fn write(head: &Head, messages: Option<usize>) -> Vec<u8> {
    let mut meta = serde_json::Map::new();
    let Identity { weights, config, tokenizer } = &head.model;
    for (key, value) in [
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_string()),
        ("model", head.name.clone()),
        ("weights", weights.to_string()),
        ("config", config.to_string()),
        ("tokenizer", tokenizer.to_string()),
        ("numerics", head.numerics.clone()),
    ] {
        meta.insert(key.into(), value.into());
    }
    if head.from != 0 {
        meta.insert(FROM.into(), head.from.to_string().into());
    }
    let mut json = format!("{{\"{METADATA}\":{}", serde_json::Value::Object(meta));
    let mut at = 0;
    let mut add = |name: &str, dtype: &str, shape: &[usize], size: usize| {
        let end = at + (shape.iter().product::<usize>() * size) as u64;
        write!(json, ",\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}")
            .expect("a string takes everything");
        at = end;
    };
    add(TOKENS, "U32", &[head.tokens.len()], 4);
    add(ENDS, "U32", &[head.ends.len()], 4);
    if let Some(bytes) = messages {
        add(MESSAGES, "U8", &[bytes], 1);
    }
    for part in &head.parts {
        add(&part.name(), dtype_name(part.dtype), &part.shape, part.dtype.bytes());
    }
    // The first row is that of the header.
    add(CHECKSUMS, "U8", &[1 + summed(messages.is_some(), head.parts.len()), 32], 1);
    json.push('}');
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

/// Parses a header, which is followed by `data` bytes. The error says what is wrong.
pub(super) fn parse(json: &[u8], data: u64) -> Result<Layout, String> {
    let Entries { meta, tensors } =
        serde_json::from_slice(json).map_err(|e| format!("the header is not that of a bundle: {e}"))?;
    let mut head = read_meta(&meta)?;
    let mut end = 0;
    for (name, entry) in &tensors {
        entry.check(name, &mut end)?;
    }
    if end != data {
        return Err(format!("{data} bytes follow the header, {end} belong to its tensors; the file is truncated"));
    }
    let mut rest = tensors.iter().map(|(name, entry)| (name.as_str(), entry)).peekable();
    let mut bytes = |name: &str, rank: usize, dtype: &str| -> Result<Option<&Entry>, String> {
        let Some((_, entry)) = rest.next_if(|(found, _)| *found == name) else { return Ok(None) };
        match entry.dims == rank && entry.dtype == dtype {
            true => Ok(Some(entry)),
            false => Err(format!("tensor `{name}` must be {dtype} with {rank} dimensions")),
        }
    };
    let missing = |name: &str| format!("tensor `{name}` is missing or not in its place");
    let tokens = bytes(TOKENS, 1, "U32")?.ok_or_else(|| missing(TOKENS))?.bytes();
    let ends = bytes(ENDS, 1, "U32")?.ok_or_else(|| missing(ENDS))?.bytes();
    let messages = bytes(MESSAGES, 1, "U8")?.map(Entry::bytes);
    while let Some((name, entry)) = rest.next_if(|(name, _)| *name != CHECKSUMS) {
        let (layer, kind, position) = Part::parse(name)?;
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            "I8" => DType::I8,
            other => return Err(format!("tensor `{name}` is {other}; values of states are F32, BF16, F16 or I8")),
        };
        let shape = entry.shape[..entry.dims].iter().map(|d| usize::try_from(*d));
        let shape = shape.collect::<Result<_, _>>().map_err(|_| format!("tensor `{name}` is too large"))?;
        head.parts.push(Part { kind, layer, position, dtype, shape });
    }
    let (_, sums) = rest.next().ok_or_else(|| missing(CHECKSUMS))?;
    let rows = 1 + summed(messages.is_some(), head.parts.len()) as u64;
    if sums.dtype != "U8" || sums.shape[..sums.dims] != [rows, 32] || rest.next().is_some() {
        return Err(format!("tensor `{CHECKSUMS}` must be the last one, U8 [{rows}, 32]"));
    }
    Ok(Layout { head, tokens, ends, messages })
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
        DType::U32 => "U32",
        DType::U8 => "U8",
        DType::I8 => "I8",
    }
}

fn read_meta(meta: &[(String, String)]) -> Result<Head, String> {
    let get = |key: &str| {
        let found = meta.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
        found.ok_or_else(|| format!("the metadata have no `{key}`: this is not a bundle"))
    };
    if get("format")? != FORMAT {
        return Err(format!("its format is not `{FORMAT}`: this is not a bundle"));
    }
    let version = get("version")?;
    if version != VERSION.to_string() {
        return Err(format!("this is version {version:?} of the format, selkie reads version {VERSION}"));
    }
    let digest = |key: &str| {
        Digest::parse(get(key)?).ok_or_else(|| format!("metadata `{key}`: not a digest of 64 hexadecimal digits"))
    };
    let model = Identity { weights: digest("weights")?, config: digest("config")?, tokenizer: digest("tokenizer")? };
    let from = match get(FROM) {
        Ok(text) => text.parse().map_err(|_| format!("metadata `{FROM}`: not a number of tokens"))?,
        Err(_) => 0,
    };
    Ok(Head {
        name: get("model")?.to_owned(),
        model,
        numerics: get("numerics")?.to_owned(),
        tokens: Vec::new(),
        ends: Vec::new(),
        messages: None,
        from,
        parts: Vec::new(),
    })
}

/// A tensor's entry.
struct Entry {
    dtype: String,
    /// Sizes in the first `dims` places.
    shape: [u64; MOST_DIMS],
    dims: usize,
    offsets: (u64, u64),
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.offsets.1 - self.offsets.0
    }

    /// Checks that the tensor begins at `end` and has the bytes of its shape; then `end` is where this tensor ends.
    fn check(&self, name: &str, end: &mut u64) -> Result<(), String> {
        let size = match self.dtype.as_str() {
            "F32" | "U32" => 4,
            "F16" | "BF16" => 2,
            "U8" | "I8" => 1,
            other => return Err(format!("tensor `{name}` is {other}, which no tensor of a bundle is")),
        };
        let bytes = self.shape[..self.dims].iter().try_fold(size, |n: u64, d| n.checked_mul(*d));
        let (from, to) = self.offsets;
        if from != *end || to < from || bytes != Some(to - from) {
            return Err(format!("tensor `{name}` is not at its place: the bytes {from} to {to} of the data"));
        }
        *end = to;
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            dtype: String,
            shape: Dims,
            data_offsets: (u64, u64),
        }
        let Fields { dtype, shape: Dims(shape, dims), data_offsets: offsets } = Fields::deserialize(from)?;
        Ok(Self { dtype, shape, dims, offsets })
    }
}

/// Up to [`MOST_DIMS`] sizes.
struct Dims([u64; MOST_DIMS], usize);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Dims;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                write!(f, "up to {MOST_DIMS} sizes")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Dims, A::Error> {
                let mut dims = Dims([0; MOST_DIMS], 0);
                while let Some(size) = list.next_element()? {
                    let place = dims.0.get_mut(dims.1);
                    *place.ok_or_else(|| serde::de::Error::invalid_length(dims.1 + 1, &self))? = size;
                    dims.1 += 1;
                }
                Ok(dims)
            }
        }
        from.deserialize_seq(List)
    }
}

/// The header's object. A map would keep only the last one of equal names; lists keep all, and order refuses doubles.
struct Entries {
    meta: Vec<(String, String)>,
    tensors: Vec<(String, Entry)>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries { meta: Vec::new(), tensors: Vec::new() };
                while let Some(key) = map.next_key::<String>()? {
                    if key != METADATA {
                        let entry = map.next_value()?;
                        entries.tensors.push((key, entry));
                    } else if entries.meta.is_empty() {
                        let Strings(meta) = map.next_value()?;
                        entries.meta = meta;
                    } else {
                        return Err(serde::de::Error::duplicate_field(METADATA));
                    }
                }
                Ok(entries)
            }
        }
        from.deserialize_map(Object)
    }
}

/// An object of strings without doubles.
struct Strings(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Strings;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                /// Up to eight keys are written; a few more may be ignored.
                const MOST: usize = 64;
                let mut all: Vec<(String, String)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if all.len() == MOST || all.iter().any(|(k, _)| *k == key) {
                        return Err(serde::de::Error::custom("metadata with too many keys, or one twice"));
                    }
                    all.push((key, value));
                }
                Ok(Strings(all))
            }
        }
        from.deserialize_map(Object)
    }
}
