//! Formats of stored weights: what the bytes of a row are besides plain elements.
//!
//! A coded row is a run of blocks along K. All formats here decode in groups of 32 elements, each of which is codes, a scale
//! per 16 of them and an offset: `scale * code - offset`, rounded after the product and after the difference. That one form
//! serves exact decoding and integer products alike.

use serde::{Deserialize, Serialize};

/// Elements of a [`Group`]; every block has a multiple of them.
pub const GROUP: usize = 32;

/// How the rows of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Format {
    /// Elements of the tensor's dtype.
    Plain,
    /// 4 bits and a scale per 32.
    Q4_0,
    /// 4 bits, a scale and an offset per 32.
    Q4_1,
    /// 5 bits and a scale per 32.
    Q5_0,
    /// 5 bits, a scale and an offset per 32.
    Q5_1,
    /// 8 bits and a scale per 32.
    Q8_0,
    /// 4 bits with scales and offsets of 6 bits per 32, in blocks of 256.
    Q4K,
    /// 5 bits with scales and offsets of 6 bits per 32, in blocks of 256.
    Q5K,
    /// 6 bits with scales of 8 bits per 16, in blocks of 256.
    Q6K,
    /// 4 bits that stand for unevenly spaced integers, and a scale per 32.
    Iq4Nl,
    /// E2M1 floats with a power of two per 32.
    Mxfp4,
    /// E2M1 floats with an E4M3 scale per 16, in blocks of 64.
    Nvfp4,
    /// [`Format::Nvfp4`] with a factor in each block: NVFP4 of safetensors files.
    F4,
    /// E4M3 floats with a scale per 128: 8-bit floats of safetensors files.
    F8,
    /// 4 bits with a scale and an offset in f32 per 64: integers of safetensors files.
    I4,
    /// 8 bits with a scale and an offset in f32 per 32: integers of safetensors files.
    I8,
}

/// 32 elements of a row.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// The codes as integers.
    pub codes: [i8; GROUP],
    /// Factors of the first and of the last 16.
    pub scales: [f32; 2],
    /// What is taken off every element.
    pub offset: f32,
}

impl Group {
    /// Element `i`.
    #[inline(always)]
    pub fn value(&self, i: usize) -> f32 {
        self.scales[i / 16] * f32::from(self.codes[i]) - self.offset
    }
}

/// How activations enter products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Products {
    /// As the backend does it best: as [`round_group`] rounds them on the CPU and, in large products of few rows, on wgpu, and
    /// everywhere as [`round_eight`] does where a recipe says so; on wgpu in f16 where a device has cooperative matrices for them
    /// and no router decides by what follows.
    #[default]
    Fast,
    /// As they are.
    Exact,
}

/// Rounds 32 activations of a token to 8 bits: `x ≈ scale * code` with codes in `-127..=127`, of which the largest is the
/// activation that is largest. Returns the scale, which is NaN unless all are finite. Activations below about 4e-37 count as 0.
#[inline(always)]
pub fn round_group(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> f32 {
    // Without their sign, bits of floats are in the order of what they stand for, NaN last.
    let most = x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    let most = f32::from_bits(most);
    let inverse = 127.0 / most;
    let inverse = if inverse.is_finite() && most.is_finite() { inverse } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        // The sum is rounded to an integer, ties to even, whose last bits are those of the float.
        *code = (x * inverse + 12_582_912.0).to_bits() as i8;
    }
    if most.is_finite() { most / 127.0 } else { f32::NAN }
}

/// A coded format as a type, so that kernels are compiled for it.
pub trait Coded: Copy + 'static {
    /// Elements of a block.
    const BLOCK: usize;
    /// Bytes of a block.
    const BYTES: usize;

    /// Elements of group `g` of a block of at least [`Coded::BYTES`] bytes.
    fn values(block: &[u8], g: usize) -> [f32; GROUP];
}

/// A format whose codes are integers.
pub trait Integers: Coded {
    /// Group `g` of a block of at least [`Coded::BYTES`] bytes.
    fn group(block: &[u8], g: usize) -> Group;
}

/// Evaluates an expression with `$F` as the [`Coded`] type of a format; `$plain` for plain elements.
macro_rules! with_format {
    ($format:expr, $F:ident => $coded:expr, plain => $plain:expr) => {
        $crate::format::with_format!(
            @match $format, $F, $coded, $crate::format::Format::Plain => $plain,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Iq4Nl Mxfp4 Nvfp4 F4 I4 I8 F8
        )
    };
    // `$F` is a type of `Integers`; the last expression is for all other formats.
    ($format:expr, $F:ident => $coded:expr, other => $other:expr) => {
        $crate::format::with_format!(
            @match $format, $F, $coded, _ => $other,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K Iq4Nl Mxfp4 Nvfp4 F4 I4 I8
        )
    };
    (@match $format:expr, $F:ident, $coded:expr, $rest:pat => $other:expr, $($name:ident)*) => {
        match $format {
            $($crate::format::Format::$name => {
                type $F = $crate::format::blocks::$name;
                $coded
            })*
            $rest => $other,
        }
    };
}

pub(crate) use with_format;

impl Format {
    /// Coded formats of GGUF files.
    pub const CODED: [Self; 11] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    /// Coded formats that safetensors files are brought into, because they store scales in other tensors.
    pub const SCALED: [Self; 4] = [Self::F4, Self::F8, Self::I4, Self::I8];

    /// Whether its codes are integers, so that products can be those of integers.
    pub fn is_integer(self) -> bool {
        !matches!(self, Self::Plain | Self::F8)
    }

    /// The name by which files and people know it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4 => "NVFP4",
            Self::F4 => "F4_E2M1",
            Self::F8 => "F8_E4M3",
            Self::I4 => "INT4",
            Self::I8 => "INT8",
        }
    }

    /// Elements and bytes of a block; `None` for plain elements.
    pub fn block(self) -> Option<(usize, usize)> {
        with_format!(self, F => Some((F::BLOCK, F::BYTES)), plain => None)
    }

    /// Bytes of `k` elements, which are whole blocks; `element` is the size of a plain one.
    pub fn bytes(self, k: usize, element: usize) -> usize {
        match self.block() {
            Some((n, bytes)) => k / n * bytes,
            None => k * element,
        }
    }

    /// The elements of coded rows, f32.
    pub fn decode(self, rows: &[u8]) -> Vec<f32> {
        with_format!(self, F => decode::<F>(rows), plain => panic!("plain elements have no codes"))
    }
}

fn decode<F: Coded>(rows: &[u8]) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows.len() / F::BYTES * F::BLOCK);
    for block in rows.chunks_exact(F::BYTES) {
        for g in 0..F::BLOCK / GROUP {
            out.extend(F::values(block, g));
        }
    }
    out
}

/// A number of 8 bits as f32, exactly: a sign, 4 bits of exponent and 3 of mantissa, without infinities. The pattern of a NaN
/// counts as 480.
#[inline(always)]
pub fn e4m3_to_f32(bits: u8) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let value = if magnitude < 8 { magnitude as f32 / 512.0 } else { normal };
    if bits & 0x80 == 0 { value } else { -value }
}

/// The number of 8 bits nearest to one of at most 464 in magnitude, ties to even: of at most 448.
#[inline(always)]
pub fn f32_to_e4m3(x: f32) -> u8 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    // Three bits of mantissa are left, or multiples of 2^-9.
    let normal = ((magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let small = (x.abs() * 512.0).round_ties_even() as u32;
    let code = if magnitude < 121 << 23 { small } else { normal };
    (code | x.to_bits() >> 24 & 0x80) as u8
}

/// Activations that share a scale where they are rounded to 8-bit floats, and elements of a block of [`Format::F8`].
pub const EIGHT_GROUP: usize = 128;

/// Rounds 128 activations of a token to 8-bit floats: `out` is `scale * code`, where the scale is the smallest power of two from
/// 2^-100 on with which the largest code is at most 448. All are NaN unless all activations are finite. Four bits are left of
/// each number, so bf16 holds them exactly, and to round them again changes nothing.
#[inline(always)]
pub fn round_eight(x: &[f32; EIGHT_GROUP], out: &mut [f32; EIGHT_GROUP]) {
    let most = x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    // The exponent is one larger where the mantissa exceeds that of 448.
    let exponent = (((most + 0x1f_ffff) >> 23).max(35) - 8).min(247);
    let power = |exponent: u32| f32::from_bits(exponent << 23);
    let (scale, inverse) = (power(exponent), power(254 - exponent));
    let scale = if most < f32::INFINITY.to_bits() { scale } else { f32::NAN };
    for (x, out) in x.iter().zip(out) {
        *out = scale * e4m3_to_f32(f32_to_e4m3(x * inverse));
    }
}

/// The bits of an f16 number as f32, exactly; NaN stays NaN.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u16) -> f32 {
    let magnitude = (u32::from(h) & 0x7fff) << 13;
    let sign = (u32::from(h) & 0x8000) << 16;
    // The exponent is rebased by an exact multiplication, which also makes subnormal halves normal.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let inf_or_nan = magnitude | 0x7f80_0000;
    let bits = if magnitude >= 0x0f80_0000 { inf_or_nan } else { scaled.to_bits() };
    f32::from_bits(bits | sign)
}

pub mod blocks;
mod encode;

#[cfg(test)]
mod tests;
