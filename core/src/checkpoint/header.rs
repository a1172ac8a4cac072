//! Headers of safetensors files, and the index of a sharded set. Everything is checked before anything is believed.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use serde_json::value::RawValue;

use super::{INDEX, TensorInfo};
use crate::{
    Error, Result,
    source::{Source, is_plain_file_name, not_a_pointer},
    tensor::DType,
};

/// The longest header the format allows, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The key of a header that does not name a tensor.
const METADATA: &str = "__metadata__";

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

/// The engine's dtype of a safetensors dtype, and bytes per element.
pub(super) fn known_dtype(name: &str) -> Option<(DType, u64)> {
    match name {
        "F32" => Some((DType::F32, 4)),
        "BF16" => Some((DType::Bf16, 2)),
        "F16" => Some((DType::F16, 2)),
        _ => None,
    }
}

/// All tensors of one safetensors file.
pub(super) async fn read_header(source: &dyn Source, name: &str) -> Result<BTreeMap<String, TensorInfo>> {
    let path = source.path(name);
    let bad = |why: String| Error::model(path.clone(), why);
    let Some(size) = source.size(name).await? else {
        return Err(bad("no such file, although the index names it; the download is incomplete".into()));
    };
    if size < 8 {
        return Err(bad(format!("a file of {size} bytes is not a safetensors file; download it again")));
    }
    let start = source.read(name, 0..size.min(64)).await?;
    not_a_pointer(source, name, &start)?;
    let length = &start[..8];
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes were read"));
    if length > MAX_HEADER_BYTES || length > size - 8 {
        let why = format!(
            "the header claims {length} bytes, the file has {size}; it is truncated or not a safetensors file, download it again"
        );
        return Err(bad(why));
    }
    let header = source.read(name, 8..8 + length).await?;
    parse_header(&header, size, &path, name)
}

/// Parses and checks the JSON of a header. `size` is that of the whole file.
fn parse_header(header: &[u8], size: u64, path: &str, name: &str) -> Result<BTreeMap<String, TensorInfo>> {
    let bad = |why: String| Error::model(path, format!("{why}; download the file again"));
    let data_start = 8 + header.len() as u64;
    let Entries(entries) =
        serde_json::from_slice(header).map_err(|e| bad(format!("the safetensors header is not valid: {e}")))?;
    let file: Arc<str> = name.into();
    let mut tensors = BTreeMap::new();
    for (tensor, value) in entries {
        if tensor == METADATA {
            continue;
        }
        let info = parse_entry(value, data_start, &file)
            .map_err(|why| bad(format!("the header's entry for tensor `{tensor}` is not valid: {why}")))?;
        check_bytes(&tensor, &info, size).map_err(bad)?;
        if tensors.insert(tensor.clone(), info).is_some() {
            return Err(bad(format!("the header names tensor `{tensor}` twice; the file is damaged or malicious")));
        }
    }
    check_places(&tensors, data_start, size).map_err(bad)?;
    Ok(tensors)
}

/// Checks that a tensor lies in the file and has the bytes of its shape.
fn check_bytes(tensor: &str, info: &TensorInfo, size: u64) -> Result<(), String> {
    let bytes = info.range.end - info.range.start;
    if info.range.end > size {
        return Err(format!(
            "tensor `{tensor}` ends at byte {}, but the file has {size}: it is truncated",
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

/// Checks that the tensors cover the data without overlaps, gaps or a remainder, as the format demands.
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
            return Err(format!("{hole} bytes before tensor `{name}` belong to no tensor, which the format forbids"));
        }
        (before, end) = (Some(name.as_str()), range.end);
    }
    if end < size {
        let rest = size - end;
        return Err(format!("{rest} bytes at the end belong to no tensor, which the format forbids"));
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

/// An entry of a header; the error is what is wrong with it.
fn parse_entry(value: &RawValue, data_start: u64, file: &Arc<str>) -> Result<TensorInfo, String> {
    let Entry { dtype, shape, data_offsets: (start, end) } =
        serde_json::from_str(value.get()).map_err(|e| e.to_string())?;
    let range = data_start.checked_add(start).zip(data_start.checked_add(end)).filter(|(start, end)| start <= end);
    let (start, end) = range.ok_or("its `data_offsets` are not a range of bytes")?;
    let file = file.clone();
    Ok(TensorInfo { dtype, shape, file, range: start..end, made: None, scaled: None, joined: None, less_one: false })
}

/// The entries of a JSON object in file order, duplicates included. A map would keep only the last one of each name.
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
pub(super) async fn read_shards(source: &dyn Source, index: &[u8]) -> Result<BTreeMap<String, TensorInfo>> {
    let path = source.path(INDEX);
    let bad = |why: String| Error::model(path.clone(), format!("{why}; download the file again"));
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
                || format!("tensor `{tensor}` is missing, although {INDEX} names it; download both files again");
            let info = shard.remove(tensor).ok_or_else(|| Error::model(source.path(file), missing()))?;
            all.insert(tensor.to_owned(), info);
        }
    }
    Ok(all)
}
