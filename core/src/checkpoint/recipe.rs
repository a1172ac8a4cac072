//! Random weights in coded formats.

use half::f16;

use crate::{Error, Result, format::Format};

/// Which formats the matrices of random weights have: one, or a mix as quantisers make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    usual: Format,
    /// Of embeddings, and of values and second products of MLPs in every other layer, where errors do most harm.
    careful: Format,
}

impl std::str::FromStr for Recipe {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let of = |usual, careful| Ok(Self { usual, careful });
        match name.to_ascii_lowercase().as_str() {
            "q4_k_m" => of(Format::Q4K, Format::Q6K),
            "q5_k_m" => of(Format::Q5K, Format::Q6K),
            "fp8" => of(Format::F8, Format::F8),
            "int4" => of(Format::I4, Format::I4),
            "int8" => of(Format::I8, Format::I8),
            other => match Format::CODED.into_iter().find(|f| f.name().eq_ignore_ascii_case(other)) {
                Some(format) => of(format, format),
                None => {
                    let known = Format::CODED.map(|f| f.name().to_ascii_lowercase()).join(" ");
                    let why = "no format of weights has this name";
                    Err(Error::BadRequest(format!("{name}: {why}; there are q4_k_m q5_k_m fp8 int4 int8 {known}")))
                }
            },
        }
    }
}

impl Recipe {
    /// Format of a tensor; plain where quantisers leave it as it is.
    pub(super) fn format(self, name: &str, shape: &[usize]) -> Format {
        let router = ["gate.weight", "router.weight", "router.layer.weight"]
            .iter()
            .any(|end| name.strip_suffix(end).is_some_and(|start| start.is_empty() || start.ends_with('.')));
        let k = shape.last().copied().unwrap_or(1);
        if shape.len() < 2 || router || !k.is_multiple_of(32) || name.contains("conv") {
            return Format::Plain;
        }
        let layer = name.split('.').find_map(|part| part.parse::<usize>().ok()).unwrap_or(0);
        let tables = ["embed", "lm_head"].iter().any(|part| name.contains(part));
        let often = ["v_proj", "down_proj", "output_linear", "w2"].iter().any(|part| name.contains(part));
        let format = if tables || often && layer.is_multiple_of(2) { self.careful } else { self.usual };
        match (format, k.is_multiple_of(format.block().map_or(1, |(n, _)| n))) {
            (format, true) => format,
            (Format::Q4K, _) => Format::Q5_0,
            (Format::Q5K, _) => Format::Q5_1,
            (Format::Q6K, _) => Format::Q8_0,
            (Format::F8 | Format::I4, _) => Format::Plain,
            _ => Format::Q4_0,
        }
    }
}

/// Makes random bytes to blocks whose elements have mean 0 (or nearly so) and standard deviation `1/sqrt(k)`.
pub(super) fn tame(format: Format, k: usize, bytes: &mut [u8]) {
    let Some((_, block)) = format.block() else { return };
    let size = 1.0 / (k as f32).sqrt();
    // The standard deviation of uniform codes of 4, 5, 6 and 8 bits, and of twice E2M1's values.
    let (four, five, six, eight, e2m1) = (4.61, 9.23, 18.47, 73.9, 5.85);
    // That of E4M3 numbers below 2, which are no NaN.
    let e4m3 = 0.598;
    // A scale of 32 and an offset of 32 in each of the packed fields.
    let fields = [0xa0, 0xa0, 0xa0, 0xa0, 0xa0, 0xa0, 0xa0, 0xa0, 0, 0, 0, 0];
    for b in bytes.chunks_exact_mut(block) {
        let mut half = |at: usize, x: f32| b[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        let mut scale_and_offset = |codes: f32, mean: f32, of: f32| {
            half(0, size / codes / of);
            half(2, mean * size / codes / of);
        };
        match format {
            Format::Q4_0 => half(0, size / four),
            Format::Q5_0 => half(0, size / five),
            Format::Q8_0 | Format::Iq4Nl => half(0, size / eight),
            Format::Q4_1 => scale_and_offset(four, -7.5, 1.0),
            Format::Q5_1 => scale_and_offset(five, -15.5, 1.0),
            Format::Q4K | Format::Q5K => {
                let (codes, mean) = if format == Format::Q4K { (four, 7.5) } else { (five, 15.5) };
                scale_and_offset(codes, mean, 32.0);
                b[4..16].copy_from_slice(&fields);
            }
            Format::Q6K => {
                half(208, size / six / 64.0);
                b[192..208].fill(64);
            }
            Format::Mxfp4 => b[0] = (128.0 + (size / e2m1).log2().round()) as u8,
            // Subnormal E4M3 numbers, multiples of 2^-9, which count half.
            Format::Nvfp4 => b[..4].fill((1024.0 * size / e2m1).round().clamp(1.0, 7.0) as u8),
            Format::F8 => {
                b[..4].copy_from_slice(&(size / e4m3).to_le_bytes());
                b[4..].iter_mut().for_each(|code| *code &= 0xbf);
            }
            Format::I4 | Format::I8 => {
                let (codes, mean) = if format == Format::I4 { (four, 7.5) } else { (eight, 0.0) };
                b[..4].copy_from_slice(&(size / codes).to_le_bytes());
                b[4..8].copy_from_slice(&(mean * size / codes).to_le_bytes());
            }
            Format::Plain | Format::F4 => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let format = |recipe: &str, name: &str, k| recipe.parse::<Recipe>().unwrap().format(name, &[8, k]);
        assert_eq!(format("q4_k_m", "model.layers.1.mlp.down_proj.weight", 512), Format::Q4K);
        assert_eq!(format("q4_k_m", "model.layers.2.mlp.down_proj.weight", 512), Format::Q6K);
        assert_eq!(format("Q4_K_M", "model.layers.2.mlp.up_proj.weight", 512), Format::Q4K);
        assert_eq!(format("q4_k_m", "model.layers.2.mlp.up_proj.weight", 2688), Format::Q5_0);
        assert_eq!(format("q4_k_m", "lm_head.weight", 2688), Format::Q8_0);
        assert_eq!(format("q8_0", "model.layers.2.mlp.gate.weight", 512), Format::Plain);
        assert_eq!(format("q8_0", "model.layers.2.mlp.gate_proj.weight", 512), Format::Q8_0);
        assert_eq!(format("q8_0", "model.layers.2.mlp.gate_proj.weight", 48), Format::Plain);
        assert_eq!(format("fp8", "model.layers.2.mlp.gate_proj.weight", 512), Format::F8);
        assert_eq!(format("fp8", "model.layers.2.mlp.gate_proj.weight", 192), Format::Plain);
        assert_eq!(format("int4", "lm_head.weight", 512), Format::I4);
        let error = "q3_k_xl".parse::<Recipe>().unwrap_err().to_string();
        assert!(error.contains("q3_k_xl") && error.contains("q4_k_m") && error.contains("iq4_nl"), "{error}");
    }

    #[test]
    fn values_are_those_of_random_weights() {
        for format in Format::CODED.into_iter().chain([Format::F8, Format::I4, Format::I8]) {
            let k = 1024;
            let mut bytes: Vec<u8> =
                (0..format.bytes(64 * k, 0) as u32).map(|i| (i.wrapping_mul(2_654_435_769) >> 13) as u8).collect();
            tame(format, k, &mut bytes);
            let x = format.decode(&bytes);
            let mean = x.iter().sum::<f32>() / x.len() as f32;
            let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / x.len() as f32).sqrt() * 32.0;
            assert!(mean.abs() < 0.01 && (0.6..1.6).contains(&deviation), "{}: {mean} {deviation}", format.name());
        }
    }
}
