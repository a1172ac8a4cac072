//! Matrices of safetensors files whose scales are tensors of their own: 8-bit floats and NVFP4. Those of integers are in `grouped.rs`
//! and `affine.rs`.
//!
//! They are brought into blocks that hold their scales ([`Format::F8`], [`Format::F4`]), row by row when they are read; rows that
//! are no whole blocks become f32. The names and dtypes of a layer's tensors decide how its matrix is read:
//!
//! | tensors of the linear layer `L` | as written by |
//! |---|---|
//! | `L.weight` F8_E4M3, `L.weight_scale_inv` per 128 x 128 | fp8 |
//! | `L.weight` F8_E4M3, `L.weight_scale` of one, per row, or per 128 x 128 | compressed-tensors `float-quantized`, modelopt FP8 |
//! | `L.weight` U8, two codes a byte, `L.weight_scale` F8_E4M3 per 16, `L.weight_scale_2` | modelopt NVFP4 |
//! | `L.weight_packed` U8, `L.weight_scale` F8_E4M3 per 16, `L.weight_global_scale`, which divides | compressed-tensors `nvfp4-pack-quantized` |

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{TensorInfo, affine::Affine, grouped::Grouped, header::known_dtype};
use crate::{
    Error, Result,
    format::{Coded, Format, blocks, e4m3_to_f32},
    source::{Bytes, Source},
    tensor::DType,
};

/// Rows and columns that share a scale where scales are a grid.
const GRID: usize = 128;
/// Columns that share a scale of NVFP4.
const FOUR_GROUP: usize = 16;
/// Values of the codes of E2M1.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Scales of a matrix, and how they apply.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scaled {
    pub(super) kind: Kind,
    pub(super) scales: TensorInfo,
    /// The recipe rounds activations.
    pub(super) rounds: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// 8-bit floats; rows and columns that share a scale.
    Eight { rows: usize, columns: usize },
    /// NVFP4, its factor, and whether that divides.
    Four { factor: TensorInfo, divides: bool },
    /// Integers.
    Integers(Grouped),
    /// Integers of MLX.
    Affine(Affine),
}

/// Replaces the tensors of each scaled matrix by one of its name, `L.weight`. The error names a tensor.
pub(super) fn gather(tensors: &mut BTreeMap<String, TensorInfo>) -> Result<(), String> {
    let names: Vec<String> = tensors.keys().cloned().collect();
    for name in names {
        let Some(info) = tensors.get(&name) else { continue };
        let (packed, eight) = (info.dtype == "U8", info.dtype == "F8_E4M3");
        let (stem, dense) = match (name.strip_suffix(".weight"), name.strip_suffix(".weight_packed")) {
            (Some(stem), _) if eight || packed && tensors.contains_key(&format!("{stem}.weight_scale_2")) => {
                (stem.to_owned(), true)
            }
            (_, Some(stem)) if packed && tensors.contains_key(&format!("{stem}.weight_global_scale")) => {
                (stem.to_owned(), false)
            }
            _ => continue,
        };
        let mut info = info.clone();
        let mut beside = |leaf: &str| tensors.remove(&format!("{stem}.{leaf}"));
        let Some(scales) = beside("weight_scale_inv").or_else(|| beside("weight_scale")) else {
            return Err(format!("tensor `{name}` of dtype {} has no `weight_scale` beside it", info.dtype));
        };
        let [n, k] = *info.shape else { return Err(format!("tensor `{name}` of scaled codes is {:?}", info.shape)) };
        let kind = if eight {
            sharing(n, k, &scales).map_err(|why| format!("tensor `{name}`: {why}"))?
        } else {
            let factor = if dense { beside("weight_scale_2") } else { beside("weight_global_scale") };
            let factor = factor.ok_or_else(|| format!("tensor `{name}` has no factor beside it"))?;
            info.shape[1] = k.checked_mul(2).ok_or_else(|| format!("tensor `{name}` is too large"))?;
            let groups = [n, info.shape[1].div_ceil(FOUR_GROUP)];
            if scales.dtype != "F8_E4M3" || scales.shape != groups || !is_one(&factor) || factor.dtype != "F32" {
                return Err(format!(
                    "tensor `{name}`: scales {} {:?} and factor {} {:?} are not those of NVFP4",
                    scales.dtype, scales.shape, factor.dtype, factor.shape
                ));
            }
            info.dtype = "NVFP4".into();
            Kind::Four { factor, divides: !dense }
        };
        // Scales of activations, which have their own instead; for NVFP4 they are not rounded.
        let for_inputs = ["input_scale", "input_global_scale"].map(|leaf| beside(leaf).is_some());
        let rounds = eight && for_inputs.contains(&true);
        info.scaled = Some(Arc::new(Scaled { kind, scales, rounds }));
        tensors.remove(&name);
        tensors.insert(format!("{stem}.weight"), info);
    }
    Ok(())
}

fn is_one(info: &TensorInfo) -> bool {
    info.shape.iter().all(|n| *n == 1)
}

/// Which rows and columns of an `[n, k]` matrix of 8-bit floats share a scale.
fn sharing(n: usize, k: usize, scales: &TensorInfo) -> Result<Kind, String> {
    if known_dtype(&scales.dtype).is_none() {
        return Err(format!("its scales are {}, where F32, BF16 or F16 are known", scales.dtype));
    }
    match *scales.shape {
        _ if is_one(scales) => Ok(Kind::Eight { rows: n.max(1), columns: k.max(1) }),
        [rows] | [rows, 1] if rows == n => Ok(Kind::Eight { rows: 1, columns: k.max(1) }),
        [rows, columns] if (rows, columns) == (n.div_ceil(GRID), k.div_ceil(GRID)) => {
            Ok(Kind::Eight { rows: GRID, columns: GRID })
        }
        _ => Err(format!(
            "scales of shape {:?} for a matrix {:?}; there may be one, one per row, or one per {GRID} x {GRID}",
            scales.shape,
            [n, k]
        )),
    }
}

/// The values `range` of a small float tensor.
pub(super) async fn floats(source: &dyn Source, info: &TensorInfo, range: Range<usize>) -> Result<Vec<f32>> {
    let (dtype, size) = known_dtype(&info.dtype).unwrap_or((DType::F32, 4));
    let at = |i: usize| info.range.start + i as u64 * size;
    let bytes = source.read(&info.file, at(range.start)..at(range.end)).await?;
    Ok(dtype.to_f32(&bytes))
}

/// Memory for rows of `bytes` bytes, which a file may claim to have.
pub(super) fn room(bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    match out.try_reserve_exact(bytes) {
        Ok(()) => Ok(out),
        Err(_) => Err(Error::OutOfMemory { what: "rows of scaled weights".into(), asked: bytes as u64, free: 0 }),
    }
}

impl Scaled {
    /// The same of a recipe that rounds activations where weights are 8-bit floats.
    pub(super) fn round(&mut self) {
        self.rounds |= matches!(self.kind, Kind::Eight { .. });
    }

    /// Whether activations are rounded for this matrix, which is stored in whole blocks.
    pub(super) fn rounds(&self, weight: &TensorInfo) -> bool {
        self.rounds && weight.shape.last().is_some_and(|k| self.format(*k).1 == Format::F8)
    }

    /// Rows that share scales.
    pub(super) fn shared_rows(&self) -> Option<usize> {
        match self.kind {
            Kind::Eight { rows, .. } => Some(rows),
            _ => None,
        }
    }

    /// The scales and, if there is one, the factor.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        let (factor, integers) = match &self.kind {
            Kind::Eight { .. } => (None, None),
            Kind::Four { factor, .. } => (Some(factor), None),
            Kind::Integers(integers) => (None, Some(integers)),
            Kind::Affine(affine) => (Some(&affine.biases), None),
        };
        [&self.scales].into_iter().chain(factor).chain(integers.into_iter().flat_map(Grouped::tensors))
    }

    /// How the scales apply, in words that a digest can take in.
    pub(super) fn rule(&self) -> String {
        let dtype = &self.scales.dtype;
        let rule = match &self.kind {
            Kind::Integers(integers) => format!("{dtype} scales, {}", integers.rule()),
            Kind::Affine(affine) => format!("{dtype} scales, {}", affine.rule()),
            Kind::Eight { rows, columns } => format!("{dtype} scales of {rows} x {columns}"),
            Kind::Four { divides: false, .. } => format!("{dtype} scales, a factor"),
            Kind::Four { divides: true, .. } => format!("{dtype} scales, a divisor"),
        };
        if self.rounds { rule + ", rounded activations" } else { rule }
    }

    /// What rows of `k` elements become: blocks, or f32 where they would not be whole.
    pub(super) fn format(&self, k: usize) -> (DType, Format) {
        let (format, block) = match &self.kind {
            Kind::Integers(integers) => return integers.format(k),
            Kind::Affine(affine) => return (DType::U8, affine.format()),
            Kind::Eight { .. } => (Format::F8, blocks::F8::BLOCK),
            Kind::Four { .. } => (Format::F4, blocks::F4::BLOCK),
        };
        if k.is_multiple_of(block) { (DType::U8, format) } else { (DType::F32, Format::Plain) }
    }

    /// Rows of the matrix `weight` in that form.
    pub(super) async fn rows(&self, source: &dyn Source, weight: &TensorInfo, rows: Range<usize>) -> Result<Bytes> {
        let k = weight.shape[1];
        let stored = match &self.kind {
            Kind::Integers(integers) => return integers.rows(source, weight, &self.scales, rows).await,
            Kind::Affine(affine) => return affine.rows(source, weight, &self.scales, rows).await,
            Kind::Eight { .. } => k,
            Kind::Four { .. } => k / 2,
        };
        let at = |row: usize| weight.range.start + (row * stored) as u64;
        let codes = source.read(&weight.file, at(rows.start)..at(rows.end)).await?;
        let (dtype, format) = self.format(k);
        let mut out = room(rows.len() * format.bytes(k, dtype.bytes()))?;
        match &self.kind {
            Kind::Integers(_) | Kind::Affine(_) => unreachable!("returned above"),
            Kind::Eight { rows: high, columns } => {
                let per_row = k.div_ceil(*columns);
                let (first, end) = (rows.start / high, rows.end.div_ceil(*high));
                let scales = floats(source, &self.scales, first * per_row..end * per_row).await?;
                for (row, codes) in rows.zip(codes.chunks(k.max(1))) {
                    eight_row(codes, &scales[(row / high - first) * per_row..][..per_row], *columns, format, &mut out);
                }
            }
            Kind::Four { factor, divides } => {
                let factor = floats(source, factor, 0..1).await?[0];
                let factor = if *divides { 1.0 / factor } else { factor };
                let groups = k.div_ceil(FOUR_GROUP);
                let at = |row: usize| self.scales.range.start + (row * groups) as u64;
                let scales = source.read(&self.scales.file, at(rows.start)..at(rows.end)).await?;
                for (codes, scales) in codes.chunks(stored.max(1)).zip(scales.chunks(groups.max(1))) {
                    four_row(codes, scales, factor, format, &mut out);
                }
            }
        }
        Ok(out.into())
    }
}

/// A row of 8-bit floats with a scale per `columns`.
fn eight_row(codes: &[u8], scales: &[f32], columns: usize, format: Format, out: &mut Vec<u8>) {
    if format == Format::Plain {
        for (codes, scale) in codes.chunks(columns).zip(scales) {
            out.extend(codes.iter().flat_map(|c| (scale * e4m3_to_f32(*c)).to_le_bytes()));
        }
        return;
    }
    for (i, codes) in codes.chunks(blocks::F8::BLOCK).enumerate() {
        out.extend(scales[i * blocks::F8::BLOCK / columns].to_le_bytes());
        out.extend_from_slice(codes);
    }
}

/// A row of NVFP4: two codes a byte, the first in the low half.
fn four_row(codes: &[u8], scales: &[u8], factor: f32, format: Format, out: &mut Vec<u8>) {
    let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
    if format == Format::Plain {
        for i in 0..2 * codes.len() {
            let value = E2M1[usize::from(code(i) & 7)] * (factor * e4m3_to_f32(scales[i / FOUR_GROUP]));
            out.extend(if code(i) & 8 == 0 { value } else { -value }.to_le_bytes());
        }
        return;
    }
    for (block, scales) in scales.chunks(4).enumerate() {
        out.extend(factor.to_le_bytes());
        out.extend_from_slice(scales);
        for group in 0..4 {
            let first = 64 * block + FOUR_GROUP * group;
            // Of 16 codes, a byte holds one of the first 8 and one of the others.
            out.extend((0..8).map(|j| code(first + j) | code(first + 8 + j) << 4));
        }
    }
}

#[cfg(test)]
#[path = "scaled_tests.rs"]
pub(super) mod tests;
