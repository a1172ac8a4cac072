//! Block layouts of the coded formats, little endian as in GGUF files. The formulas are those of ggml's reference code.

use super::{Coded, GROUP, Group, Integers, e4m3_to_f32, f16_to_f32};

/// The integers of IQ4_NL's codes.
pub(crate) const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of E2M1 codes.
pub(crate) const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The 32 nibbles of 16 bytes: all low ones, then all high ones.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [i8; GROUP] {
    let bytes: &[u8; 16] = bytes.first_chunk().expect("a block holds its codes");
    let mut codes = [0; GROUP];
    for j in 0..16 {
        codes[j] = (bytes[j] & 15) as i8;
        codes[j + 16] = (bytes[j] >> 4) as i8;
    }
    codes
}

/// Adds bit `j` of `high` as the fifth of code `j`.
#[inline(always)]
fn fifth_bits(codes: &mut [i8; GROUP], high: &[u8]) {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    for (j, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> j & 1) << 4) as i8;
    }
}

#[inline(always)]
fn minus(mut codes: [i8; GROUP], zero: i8) -> [i8; GROUP] {
    for code in &mut codes {
        *code -= zero;
    }
    codes
}

#[inline(always)]
fn looked_up(mut codes: [i8; GROUP], table: &[i8; 16]) -> [i8; GROUP] {
    for code in &mut codes {
        *code = table[(*code & 15) as usize];
    }
    codes
}

macro_rules! coded {
    ($(#[$doc:meta])* $name:ident, $n:literal elements in $bytes:literal bytes, |$b:ident, $g:ident| $group:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Coded for $name {
            const BLOCK: usize = $n;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn values(block: &[u8], g: usize) -> [f32; GROUP] {
                let group = Self::group(block, g);
                let mut values = [0.0; GROUP];
                for (i, value) in values.iter_mut().enumerate() {
                    *value = group.value(i);
                }
                values
            }
        }

        impl Integers for $name {
            #[inline(always)]
            fn group(block: &[u8], $g: usize) -> Group {
                let $b: &[u8; $bytes] = block.first_chunk().expect("a whole block");
                $group
            }
        }
    };
}

coded!(
    /// `{f16 d; u8 qs[16]}`.
    Q4_0, 32 elements in 18 bytes, |b, _g| {
        Group { codes: minus(nibbles(&b[2..]), 8), scales: [half(b, 0); 2], offset: 0.0 }
    }
);
coded!(
    /// `{f16 d, m; u8 qs[16]}`.
    Q4_1, 32 elements in 20 bytes, |b, _g| {
        Group { codes: nibbles(&b[4..]), scales: [half(b, 0); 2], offset: -half(b, 2) }
    }
);
coded!(
    /// `{f16 d; u32 qh; u8 qs[16]}`.
    Q5_0, 32 elements in 22 bytes, |b, _g| {
        let mut codes = nibbles(&b[6..]);
        fifth_bits(&mut codes, &b[2..6]);
        Group { codes: minus(codes, 16), scales: [half(b, 0); 2], offset: 0.0 }
    }
);
coded!(
    /// `{f16 d, m; u32 qh; u8 qs[16]}`.
    Q5_1, 32 elements in 24 bytes, |b, _g| {
        let mut codes = nibbles(&b[8..]);
        fifth_bits(&mut codes, &b[4..8]);
        Group { codes, scales: [half(b, 0); 2], offset: -half(b, 2) }
    }
);
coded!(
    /// `{f16 d; i8 qs[32]}`.
    Q8_0, 32 elements in 34 bytes, |b, _g| {
        let mut codes = [0; GROUP];
        for j in 0..GROUP {
            codes[j] = b[2 + j] as i8;
        }
        Group { codes, scales: [half(b, 0); 2], offset: 0.0 }
    }
);
coded!(
    /// `{f16 d; u8 qs[16]}`.
    Iq4Nl, 32 elements in 18 bytes, |b, _g| {
        Group { codes: looked_up(nibbles(&b[2..]), &IQ4_NL), scales: [half(b, 0); 2], offset: 0.0 }
    }
);
coded!(
    /// `{u8 e; u8 qs[16]}`.
    Mxfp4, 32 elements in 17 bytes, |b, _g| {
        Group { codes: looked_up(nibbles(&b[1..]), &E2M1), scales: [half_e8m0(b[0]); 2], offset: 0.0 }
    }
);
coded!(
    /// `{u8 d[4]; u8 qs[32]}`: four groups of 16 with a scale each.
    Nvfp4, 64 elements in 36 bytes, |b, g| {
        let mut codes = [0; GROUP];
        for i in 0..2 {
            for j in 0..8 {
                let byte = b[4 + 16 * g + 8 * i + j];
                codes[16 * i + j] = (byte & 15) as i8;
                codes[16 * i + 8 + j] = (byte >> 4) as i8;
            }
        }
        let scales = [half_ue4m3(b[2 * g]), half_ue4m3(b[2 * g + 1])];
        Group { codes: looked_up(codes, &E2M1), scales, offset: 0.0 }
    }
);
coded!(
    /// `{f32 factor; u8 d[4]; u8 qs[32]}`: a block of [`Nvfp4`] and its factor.
    F4, 64 elements in 40 bytes, |b, g| {
        let factor = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let group = Nvfp4::group(&b[4..], g);
        Group { scales: [factor * group.scales[0], factor * group.scales[1]], ..group }
    }
);
coded!(
    /// `{f16 d, dmin; u8 scales[12]; u8 qs[128]}`.
    Q4K, 256 elements in 144 bytes, |b, g| {
        let (scale, offset) = scale_and_offset(b, g);
        Group { codes: half_of_64(&b[16..], g), scales: [scale; 2], offset }
    }
);
coded!(
    /// `{f16 d, dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]}`.
    Q5K, 256 elements in 176 bytes, |b, g| {
        let (scale, offset) = scale_and_offset(b, g);
        let mut codes = half_of_64(&b[48..], g);
        for j in 0..GROUP {
            codes[j] |= ((b[16 + j] >> g & 1) << 4) as i8;
        }
        Group { codes, scales: [scale; 2], offset }
    }
);
coded!(
    /// `{u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d}`.
    Q6K, 256 elements in 210 bytes, |b, g| {
        let (h, quarter) = (g / 4, g % 4);
        let low = 64 * h + 32 * (quarter % 2);
        let (shift, high) = (4 * (quarter / 2), 128 + 32 * h);
        let mut codes = [0; GROUP];
        for j in 0..GROUP {
            let code = (b[low + j] >> shift & 15) | (b[high + j] >> (2 * quarter) & 3) << 4;
            codes[j] = code as i8 - 32;
        }
        let d = half(b, 208);
        let scale = |i: usize| d * f32::from(b[192 + 8 * h + 2 * quarter + i] as i8);
        Group { codes, scales: [scale(0), scale(1)], offset: 0.0 }
    }
);
coded!(
    /// `{f32 scale; f32 offset; u8 qs[32]}`: low halves are the first 32.
    I4, 64 elements in 40 bytes, |b, g| {
        Group { codes: half_of_64(&b[8..], g), scales: [word(b, 0); 2], offset: word(b, 4) }
    }
);
coded!(
    /// `{f32 scale; f32 offset; i8 qs[32]}`.
    I8, 32 elements in 40 bytes, |b, _g| {
        let codes: &[u8; GROUP] = b[8..].first_chunk().expect("a block holds its codes");
        Group { codes: codes.map(|c| c as i8), scales: [word(b, 0); 2], offset: word(b, 4) }
    }
);

/// `{f32 scale; u8 e4m3[128]}`.
#[derive(Clone, Copy, Debug)]
pub struct F8;

impl Coded for F8 {
    const BLOCK: usize = 128;
    const BYTES: usize = 132;

    #[inline(always)]
    fn values(block: &[u8], g: usize) -> [f32; GROUP] {
        let b: &[u8; Self::BYTES] = block.first_chunk().expect("a whole block");
        let scale = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let mut values = [0.0; GROUP];
        for (i, value) in values.iter_mut().enumerate() {
            *value = scale * e4m3_to_f32(b[4 + GROUP * g + i]);
        }
        values
    }
}

/// Half of a power of two, 2^(e - 128), because the codes that it scales are doubled; the smallest two are subnormal.
#[inline(always)]
pub(crate) fn half_e8m0(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

/// Half of an E4M3 number without sign, because the codes that it scales are doubled. The pattern of a NaN counts as 0.
#[inline(always)]
pub(crate) fn half_ue4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (bits & 0x7f, exponent) {
        (0 | 0x7f, _) => 0.0,
        (_, 0) => mantissa * f32::from_bits((127 - 10) << 23),
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((127 + exponent - 8) << 23),
    }
}

/// Scale and offset of 32 elements of Q4_K and Q5_K: 6 bits each times those of the block.
#[inline(always)]
fn scale_and_offset(b: &[u8], g: usize) -> (f32, f32) {
    let s = &b[4..16];
    let (scale, offset) = match g < 4 {
        true => (s[g] & 63, s[g + 4] & 63),
        false => ((s[g + 4] & 15) | (s[g - 4] >> 6) << 4, (s[g + 4] >> 4) | (s[g] >> 6) << 4),
    };
    (half(b, 0) * f32::from(scale), half(b, 2) * f32::from(offset))
}

/// Nibbles of group `g` where 32 bytes hold the low ones of one group and the high ones of the next.
#[inline(always)]
fn half_of_64(qs: &[u8], g: usize) -> [i8; GROUP] {
    let bytes: &[u8; GROUP] = qs[GROUP * (g / 2)..].first_chunk().expect("a block holds its codes");
    let mut codes = [0; GROUP];
    for j in 0..GROUP {
        codes[j] = (bytes[j] >> (4 * (g % 2)) & 15) as i8;
    }
    codes
}
