//! Matrices that MLX quantised: integers with a scale and a smallest element per group of columns.
//!
//! A linear layer or embedding `L` of `N` rows and `K` columns is `L.weight [N, K * bits / 32]` of words and `L.scales`,
//! `L.biases [N, K / group]` of floats; experts are stacked, `[E, N, ..]`. An element is `scale * code + bias`. The codes of a row are
//! one stream of bits from the lowest of its first byte on, so that 8 of them are `bits` bytes (ml-explore/mlx, `mx.quantize` and
//! `extract_bits` in mlx/backend/cpu/quantized.cpp).

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{
    TensorInfo,
    header::known_dtype,
    scaled::{Kind, Scaled, floats, room},
};
use crate::{
    Error, Result,
    format::{Coded, Format, blocks},
    source::{Bytes, Source},
};

/// Bits of a code, and columns that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub bits: usize,
    pub group: usize,
}

impl Size {
    pub const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
    /// Each is whole blocks of [`Format::I8`].
    pub const GROUPS: [usize; 3] = [32, 64, 128];
}

/// The sizes of all matrices but those of some layers, by their path in MLX's model; `None` of one that is not quantised.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub all: Size,
    pub layers: BTreeMap<String, Option<Size>>,
}

/// How the codes of a matrix are stored, and its biases.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Affine {
    size: Size,
    k: usize,
    pub biases: TensorInfo,
}

/// Replaces the tensors of each quantised matrix by one of its name, `L.weight`.
pub(super) fn gather(source: &dyn Source, tensors: &mut BTreeMap<String, TensorInfo>, sizes: &Sizes) -> Result<()> {
    let words = |(name, info): (&String, &TensorInfo)| {
        (info.dtype == "U32").then(|| name.strip_suffix(".weight").map(str::to_owned)).flatten()
    };
    let stems: Vec<String> = tensors.iter().filter_map(words).collect();
    for stem in stems {
        let name = format!("{stem}.weight");
        let info = tensors.remove(&name).expect("a name of the map");
        let file = source.path(&info.file);
        let matrix = matrix(&stem, info, tensors, sizes)
            .map_err(|why| Error::model(file, format!("tensor `{name}`: {why}; download the model again")))?;
        tensors.insert(name, matrix);
    }
    Ok(())
}

fn matrix(
    stem: &str,
    mut codes: TensorInfo,
    tensors: &mut BTreeMap<String, TensorInfo>,
    sizes: &Sizes,
) -> Result<TensorInfo, String> {
    let size = sizes.layers.get(stem).copied().unwrap_or(Some(sizes.all));
    let size = size.ok_or("it holds codes, but config.json says that it is not quantised")?;
    let mut beside = |leaf: &str| {
        let info = tensors.remove(&format!("{stem}.{leaf}")).ok_or(format!("there is no `{leaf}` beside it"))?;
        match known_dtype(&info.dtype) {
            Some(_) => Ok(info),
            None => Err(format!("its {leaf} are {}, where F32, BF16 or F16 are known", info.dtype)),
        }
    };
    let (scales, biases) = (beside("scales")?, beside("biases")?);
    let Size { bits, group } = size;
    let fits = |words: usize, groups: usize| words.checked_mul(32) == groups.checked_mul(group * bits);
    let k = match (&*codes.shape, &*scales.shape) {
        ([rows @ .., words], [of @ .., groups])
            if !rows.is_empty()
                && rows == of
                && scales.shape == biases.shape
                && fits(*words, *groups)
                && !codes.shape.contains(&0) =>
        {
            groups * group
        }
        _ => {
            return Err(format!(
                "codes {:?}, scales {:?} and biases {:?} do not fit one another with {bits} bits and groups of {group}",
                codes.shape, scales.shape, biases.shape
            ));
        }
    };
    *codes.shape.last_mut().expect("it has rows") = k;
    codes.dtype = format!("INT{bits}");
    codes.scaled = Some(Arc::new(Scaled { kind: Kind::Affine(Affine { size, k, biases }), scales, rounds: false }));
    Ok(codes)
}

impl Affine {
    pub fn rule(&self) -> String {
        format!("MLX's, {:?}", self.size)
    }

    /// Blocks of 4 bits if a group is whole ones.
    pub fn format(&self) -> Format {
        let four = self.size.bits <= 4 && self.size.group.is_multiple_of(blocks::I4::BLOCK);
        if four { Format::I4 } else { Format::I8 }
    }

    /// Rows of the matrix whose codes are `codes`; those of all experts are one matrix.
    pub async fn rows(
        &self,
        source: &dyn Source,
        codes: &TensorInfo,
        scales: &TensorInfo,
        rows: Range<usize>,
    ) -> Result<Bytes> {
        let Size { bits, group } = self.size;
        let (row, groups) = (self.k / 8 * bits, self.k / group);
        let at = |r: usize| codes.range.start + (r * row) as u64;
        let stored = source.read(&codes.file, at(rows.start)..at(rows.end)).await?;
        let of_groups = rows.start * groups..rows.end * groups;
        let scales = floats(source, scales, of_groups.clone()).await?;
        let biases = floats(source, &self.biases, of_groups).await?;
        let mut out = room(rows.len() * self.format().bytes(self.k, 1))?;
        let mut codes = vec![0; self.k];
        for (i, stored) in stored.chunks_exact(row).enumerate() {
            unpack(stored, bits, &mut codes);
            let of_row = i * groups..(i + 1) * groups;
            for ((codes, scale), bias) in codes.chunks(group).zip(&scales[of_row.clone()]).zip(&biases[of_row]) {
                self.encode(codes, *scale, *bias, &mut out);
            }
        }
        Ok(out.into())
    }

    /// Appends a group as blocks, whose offset is taken off.
    fn encode(&self, codes: &[u8], scale: f32, bias: f32, out: &mut Vec<u8>) {
        let four = self.format() == Format::I4;
        // A code of 8 bits is stored less 128. The sum is exact but for biases that are far larger or smaller than the scale.
        let (flip, offset) = if self.size.bits == 8 { (0x80, -(scale * 128.0 + bias)) } else { (0, -bias) };
        for codes in codes.chunks(if four { blocks::I4::BLOCK } else { blocks::I8::BLOCK }) {
            out.extend(scale.to_le_bytes());
            out.extend(offset.to_le_bytes());
            if four {
                let (low, high) = codes.split_at(blocks::I4::BLOCK / 2);
                out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
            } else {
                out.extend(codes.iter().map(|code| code ^ flip));
            }
        }
    }
}

/// The codes of a row, a byte each.
fn unpack(stored: &[u8], bits: usize, codes: &mut [u8]) {
    let mask = u8::MAX >> (8 - bits);
    for (codes, stored) in codes.as_chunks_mut::<8>().0.iter_mut().zip(stored.chunks_exact(bits)) {
        let mut word = [0; 8];
        word[..bits].copy_from_slice(stored);
        let word = u64::from_le_bytes(word);
        for (j, code) in codes.iter_mut().enumerate() {
            *code = (word >> (bits * j)) as u8 & mask;
        }
    }
}

#[cfg(test)]
#[path = "affine_tests.rs"]
mod tests;
