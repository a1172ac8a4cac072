//! Matrices of safetensors files that are stored as integers, with a scale and perhaps a zero point per group of columns.
//!
//! They are brought into blocks ([`Format::I4`], [`Format::I8`]) when rows are read. An element is `scale * (code - zero)`. Codes
//! lie in words of 32 bits, the first one in the lowest bits, `p` in a word; `g` columns share a scale:
//!
//! | recipe | tensors of the linear layer `L`, an `[N, K]` matrix |
//! |---|---|
//! | gptq | `L.qweight [K / p, N]`, `L.qzeros [K / g, N / p]`, `L.scales [K / g, N]`, `L.g_idx [K]`: the group of each column |
//! | awq | `L.qweight [K, N / p]`, `L.qzeros [K / g, N / p]`, `L.scales [K / g, N]`; a word holds rows in the order of [`AWQ_ORDER`] |
//! | compressed-tensors `pack-quantized` | `L.weight_packed [N, K / p]`, `L.weight_scale [N, K / g]`, perhaps `L.weight_zero_point [N / p, K / g]` and `L.weight_g_idx [K]` |
//! | compressed-tensors `int-quantized` | `L.weight [N, K]` of bytes, `L.weight_scale [N, K / g]` |
//!
//! A zero point of gptq is one more than what is stored, but for `gptq_v2`. Without zero points it is the middle of the codes.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{
    TensorInfo,
    header::known_dtype,
    scaled::{Kind, Scaled, room},
};
use crate::{
    Error, Result,
    format::{Coded, Format, blocks},
    source::{Bytes, Source},
    tensor::DType,
};

/// Rows of a word of awq.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Rows that are unpacked together.
const TILE: usize = 64;

/// How a recipe stores integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// gptq; zero points are stored less one, and columns may belong to groups in any order.
    Gptq { less_one: bool, any_order: bool },
    /// awq.
    Awq,
    /// compressed-tensors `pack-quantized`, of this many bits.
    Packed { bits: usize },
    /// compressed-tensors `int-quantized`.
    Bytes,
}

impl Layout {
    /// Whether a row of the matrix is a column of what is stored.
    fn is_by_column(self) -> bool {
        matches!(self, Self::Gptq { .. } | Self::Awq)
    }
}

/// How the codes of a matrix are stored, and its tensors but codes and scales.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grouped {
    layout: Layout,
    bits: usize,
    /// Columns that share a scale.
    group: usize,
    zeros: Option<TensorInfo>,
    /// The group of each column, where that is not `column / group`.
    order: Option<TensorInfo>,
    n: usize,
    k: usize,
}

/// Replaces the tensors of each such matrix by one of its name, `L.weight`. The error names a tensor.
pub(super) fn gather(tensors: &mut BTreeMap<String, TensorInfo>, layout: Layout) -> Result<(), String> {
    let (leaf, dtype) = match layout {
        Layout::Gptq { .. } | Layout::Awq => (".qweight", "I32"),
        Layout::Packed { .. } => (".weight_packed", "I32"),
        Layout::Bytes => (".weight", "I8"),
    };
    let names: Vec<String> = tensors.keys().filter(|name| name.ends_with(leaf)).cloned().collect();
    for name in names {
        if tensors[&name].dtype != dtype {
            continue;
        }
        let mut info = tensors.remove(&name).expect("a name of the map");
        let stem = &name[..name.len() - leaf.len()];
        let (kind, scales) =
            Grouped::of(layout, stem, &info, tensors).map_err(|why| format!("tensor `{name}`: {why}"))?;
        info.shape = vec![kind.n, kind.k];
        info.dtype = format!("INT{}", kind.bits);
        info.scaled = Some(Arc::new(Scaled { kind: Kind::Integers(kind), scales, rounds: false }));
        tensors.insert(format!("{stem}.weight"), info);
    }
    Ok(())
}

impl Grouped {
    fn of(
        layout: Layout,
        stem: &str,
        codes: &TensorInfo,
        tensors: &mut BTreeMap<String, TensorInfo>,
    ) -> Result<(Self, TensorInfo), String> {
        let mut beside = |leaf: &str| tensors.remove(&format!("{stem}.{leaf}"));
        let by_column = layout.is_by_column();
        let names = if by_column {
            ["scales", "qzeros", "g_idx"]
        } else {
            ["weight_scale", "weight_zero_point", "weight_g_idx"]
        };
        let [scales, zeros, order] = names.map(&mut beside);
        // What the loader knows better, and the rounding of activations, which are not rounded.
        for leaf in ["weight_shape", "input_scale", "bias_scale"] {
            beside(leaf);
        }
        let scales = scales.ok_or_else(|| format!("there is no `{}` beside it", names[0]))?;
        if known_dtype(&scales.dtype).is_none() {
            return Err(format!("its scales are {}, where F32, BF16 or F16 are known", scales.dtype));
        }
        let ([rows, columns], [high, wide]) = (pair(codes)?, pair(&scales)?);
        let (n, groups) = if by_column { (wide, high) } else { (high, wide) };
        let per_word = match layout {
            // The only tensor whose both sizes are known is that of the zero points, or awq's codes.
            Layout::Gptq { .. } => n / pair(zeros.as_ref().ok_or("there is no `qzeros` beside it")?)?[1].max(1),
            Layout::Awq => n / columns.max(1),
            Layout::Packed { bits } => 32 / bits,
            Layout::Bytes => 4,
        };
        if ![16, 8, 4].contains(&per_word) || layout == Layout::Awq && per_word != AWQ_ORDER.len() {
            return Err(format!("its codes do not have 2, 4 or 8 bits (awq: 4): it is {:?}", codes.shape));
        }
        let k = match layout {
            Layout::Gptq { .. } => rows.checked_mul(per_word),
            Layout::Awq => Some(rows),
            Layout::Packed { .. } => columns.checked_mul(per_word),
            Layout::Bytes => Some(columns),
        };
        let k = k.filter(|k| *k > 0 && groups > 0 && n > 0).ok_or("it has no elements, or too many")?;
        let group = k.div_ceil(groups);
        let grouped = Self { layout, bits: 32 / per_word, group, zeros, order, n, k };
        grouped.check(codes, &scales, groups)?;
        Ok((grouped.in_order(), scales))
    }

    /// Refuses tensors that do not fit one another.
    fn check(&self, codes: &TensorInfo, scales: &TensorInfo, groups: usize) -> Result<(), String> {
        let p = 32 / self.bits;
        let (stored, zeros) = match self.layout {
            Layout::Gptq { .. } => ([self.k / p, self.n], [groups, self.n / p]),
            Layout::Awq => ([self.k, self.n / p], [groups, self.n / p]),
            Layout::Packed { .. } => ([self.n, self.k / p], [self.n.div_ceil(p), groups]),
            Layout::Bytes => ([self.n, self.k], [0, 0]),
        };
        let zeros_fit = self.zeros.as_ref().is_none_or(|z| z.shape == zeros && z.dtype == "I32");
        let order_fits = self.order.as_ref().is_none_or(|o| o.shape == [self.k] && o.dtype == "I32");
        let whole_words = self.n.is_multiple_of(p) || !self.layout.is_by_column();
        let whole = whole_words && self.group * (groups - 1) < self.k;
        if codes.shape == stored && zeros_fit && order_fits && whole {
            return Ok(());
        }
        let beside =
            |info: &Option<TensorInfo>| info.as_ref().map_or("none".into(), |i| format!("{} {:?}", i.dtype, i.shape));
        Err(format!(
            "codes {:?}, scales {:?}, zero points {} and groups of columns {} do not fit one another",
            codes.shape,
            scales.shape,
            beside(&self.zeros),
            beside(&self.order)
        ))
    }

    /// Without an order of columns that says nothing.
    fn in_order(mut self) -> Self {
        let any = match self.layout {
            Layout::Gptq { any_order, .. } => any_order,
            _ => true,
        };
        if !any || self.group >= self.k {
            self.order = None;
        }
        self
    }

    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.zeros.iter().chain(&self.order)
    }

    pub fn rule(&self) -> String {
        format!("{:?} of {} bits, groups of {}", self.layout, self.bits, self.group)
    }

    pub fn format(&self, k: usize) -> (DType, Format) {
        let whole = |block: usize| k.is_multiple_of(block) && (self.group.is_multiple_of(block) || self.group >= k);
        match () {
            () if self.order.is_some() => (DType::F32, Format::Plain),
            () if self.bits <= 4 && whole(blocks::I4::BLOCK) => (DType::U8, Format::I4),
            () if whole(blocks::I8::BLOCK) => (DType::U8, Format::I8),
            () => (DType::F32, Format::Plain),
        }
    }

    /// Rows of the matrix whose codes are `codes`.
    pub async fn rows(
        &self,
        source: &dyn Source,
        codes: &TensorInfo,
        scales: &TensorInfo,
        rows: Range<usize>,
    ) -> Result<Bytes> {
        let all = async |info: &TensorInfo| source.read(&info.file, info.range.clone()).await;
        let by_column = self.layout.is_by_column();
        // A row of a matrix that is stored by columns is everywhere in it.
        let (stored, first) = if by_column {
            (all(codes).await?, 0)
        } else {
            let row = self.k * self.bits / 8;
            let at = |r: usize| codes.range.start + (r * row) as u64;
            (source.read(&codes.file, at(rows.start)..at(rows.end)).await?, rows.start)
        };
        let (dtype, _) = known_dtype(&scales.dtype).unwrap_or((DType::F32, 4));
        let matrix = Matrix {
            of: self,
            stored: &stored,
            first,
            scales: dtype.to_f32(&all(scales).await?),
            zeros: match &self.zeros {
                Some(zeros) => Some(all(zeros).await?),
                None => None,
            },
            order: match &self.order {
                Some(order) => Some(self.order_of(order, &all(order).await?)?),
                None => None,
            },
        };
        let (dtype, format) = self.format(self.k);
        let mut out = room(rows.len() * format.bytes(self.k, dtype.bytes()))?;
        let mut tile = vec![0; TILE.min(rows.len()) * self.k];
        for start in rows.clone().step_by(TILE) {
            let part = start..rows.end.min(start + TILE);
            matrix.unpack(part.clone(), &mut tile);
            for (row, codes) in part.zip(tile.chunks(self.k)) {
                matrix.encode(row, codes, format, &mut out);
            }
        }
        Ok(out.into())
    }

    /// The group of each column.
    fn order_of(&self, info: &TensorInfo, bytes: &[u8]) -> Result<Vec<usize>> {
        let groups = self.k.div_ceil(self.group);
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize);
        let order: Vec<usize> = words.collect();
        match order.iter().find(|g| **g >= groups) {
            Some(g) => {
                Err(Error::model(&*info.file, format!("a column belongs to group {g} of {groups}; download it again")))
            }
            None => Ok(order),
        }
    }
}

/// Both sizes of a matrix.
fn pair(info: &TensorInfo) -> Result<[usize; 2], String> {
    match *info.shape {
        [rows, columns] => Ok([rows, columns]),
        // One scale per row.
        [rows] => Ok([rows, 1]),
        _ => Err(format!("a tensor beside it has the shape {:?}, where a matrix was expected", info.shape)),
    }
}

/// What is stored of a matrix.
struct Matrix<'a> {
    of: &'a Grouped,
    stored: &'a [u8],
    /// The row of the first stored byte.
    first: usize,
    scales: Vec<f32>,
    zeros: Option<Bytes>,
    order: Option<Vec<usize>>,
}

/// Word `i`.
fn word(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes(*bytes[4 * i..].first_chunk().expect("the shapes were checked"))
}

impl Matrix<'_> {
    fn mask(&self) -> u32 {
        (1 << self.of.bits) - 1
    }

    /// The codes of some rows, a byte each.
    fn unpack(&self, rows: Range<usize>, out: &mut [u8]) {
        let Grouped { bits, n, k, .. } = *self.of;
        let (p, mask) = (32 / bits, self.mask());
        let mut spread = |at: usize, word: u32| {
            for (j, code) in out[at..at + p].iter_mut().enumerate() {
                *code = (word >> (bits * j) & mask) as u8;
            }
        };
        match self.of.layout {
            Layout::Gptq { .. } => {
                for kw in 0..k / p {
                    for (i, row) in rows.clone().enumerate() {
                        spread(i * k + kw * p, word(self.stored, kw * n + row));
                    }
                }
            }
            Layout::Packed { .. } => {
                for (i, row) in rows.enumerate() {
                    for kw in 0..k / p {
                        spread(i * k + kw * p, word(self.stored, (row - self.first) * (k / p) + kw));
                    }
                }
            }
            Layout::Awq => {
                for column in 0..k {
                    for (i, row) in rows.clone().enumerate() {
                        let word = word(self.stored, column * (n / p) + row / p);
                        out[i * k + column] = (word >> (bits * awq_place(row)) & mask) as u8;
                    }
                }
            }
            Layout::Bytes => {
                let from = (rows.start - self.first) * k;
                for (code, byte) in out.iter_mut().zip(&self.stored[from..from + rows.len() * k]) {
                    *code = byte ^ 0x80;
                }
            }
        }
    }

    /// Scale and zero point of a group of a row.
    fn group(&self, row: usize, group: usize) -> (f32, f32) {
        let Grouped { bits, n, k, group: width, .. } = *self.of;
        let (p, groups) = (32 / bits, k.div_ceil(width));
        let by_column = self.of.layout.is_by_column();
        let scale = self.scales[if by_column { group * n + row } else { row * groups + group }];
        let Some(zeros) = &self.zeros else { return (scale, (1u32 << (bits - 1)) as f32) };
        let zero = match self.of.layout {
            Layout::Awq => word(zeros, group * (n / p) + row / p) >> (bits * awq_place(row)),
            Layout::Gptq { less_one, .. } => {
                (word(zeros, group * (n / p) + row / p) >> (bits * (row % p))) + u32::from(less_one)
            }
            Layout::Packed { .. } | Layout::Bytes => word(zeros, row / p * groups + group) >> (bits * (row % p)),
        };
        (scale, (zero & self.mask()) as f32)
    }

    /// Appends a row in its format.
    fn encode(&self, row: usize, codes: &[u8], format: Format, out: &mut Vec<u8>) {
        let width = self.of.group;
        match format {
            Format::I4 => {
                for (b, codes) in codes.chunks(blocks::I4::BLOCK).enumerate() {
                    let (scale, zero) = self.group(row, b * blocks::I4::BLOCK / width);
                    out.extend(scale.to_le_bytes());
                    out.extend((scale * zero).to_le_bytes());
                    let (low, high) = codes.split_at(blocks::I4::BLOCK / 2);
                    out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
                }
            }
            Format::I8 => {
                for (b, codes) in codes.chunks(blocks::I8::BLOCK).enumerate() {
                    let (scale, zero) = self.group(row, b * blocks::I8::BLOCK / width);
                    out.extend(scale.to_le_bytes());
                    out.extend((scale * (zero - 128.0)).to_le_bytes());
                    out.extend(codes.iter().map(|code| code ^ 0x80));
                }
            }
            _ => {
                for (column, code) in codes.iter().enumerate() {
                    let group = self.order.as_ref().map_or(column / width, |order| order[column]);
                    let (scale, zero) = self.group(row, group);
                    out.extend((scale * (f32::from(*code) - zero)).to_le_bytes());
                }
            }
        }
    }
}

/// Where in its word the code of a row of awq is.
fn awq_place(row: usize) -> usize {
    const PLACES: [usize; 8] = {
        let (mut places, mut i) = ([0; 8], 0);
        while i < 8 {
            places[AWQ_ORDER[i]] = i;
            i += 1;
        }
        places
    };
    PLACES[row % 8]
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod tests;
