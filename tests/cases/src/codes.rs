//! Random blocks of the coded formats.

use half::f16;
use selkie_core::format::Format;

use super::host::Rng;

/// Bytes of blocks for `n` elements. Random codes, with scales by which the largest are about `size`.
pub(super) fn random(format: Format, n: usize, size: f32, rng: &mut Rng) -> Vec<u8> {
    let (per_block, bytes) = format.block().expect("a coded format");
    let mut out = Vec::with_capacity(n / per_block * bytes);
    for _ in 0..n / per_block {
        let mut block: Vec<u8> = (0..bytes).map(|_| rng.bits() as u8).collect();
        let vary = rng.range(0.5, 1.0);
        let mut half = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        match format {
            Format::Q4_0 => half(0, vary * size / 8.0),
            Format::Q5_0 => half(0, vary * size / 16.0),
            Format::Q8_0 | Format::Iq4Nl => half(0, vary * size / 127.0),
            Format::Q4_1 | Format::Q5_1 => {
                half(0, vary * size / if format == Format::Q4_1 { 8.0 } else { 16.0 });
                half(2, -size);
            }
            Format::Q4K | Format::Q5K => {
                half(0, vary * size / 500.0);
                half(2, size / 60.0);
            }
            Format::Q6K => half(208, vary * size / 4000.0),
            Format::Mxfp4 => block[0] = 125 + (size.log2().round() as i32 - 1) as u8,
            Format::Nvfp4 => {
                for d in &mut block[..4] {
                    *d = *d & 7 | 0x10;
                }
            }
            Format::F4 => {
                block[..4].copy_from_slice(&(vary * size).to_le_bytes());
                for d in &mut block[4..8] {
                    // From 0.25 to 0.5, so that twice E2M1's largest value is in range.
                    *d = *d & 7 | 0x28;
                }
            }
            Format::F8 => {
                // Any sign and mantissa, exponents of up to 1, subnormals among them.
                block[4..].iter_mut().for_each(|b| *b = *b & 0x87 | (*b >> 3 & 7) << 3);
                block[..4].copy_from_slice(&(vary * size).to_le_bytes());
            }
            Format::I4 | Format::I8 => {
                let (scale, middle) =
                    if format == Format::I4 { (vary * size / 8.0, 8.0) } else { (vary * size / 127.0, 1.0) };
                block[..4].copy_from_slice(&scale.to_le_bytes());
                block[4..8].copy_from_slice(&(scale * middle).to_le_bytes());
            }
            Format::Plain => unreachable!("it has blocks"),
        }
        out.extend(block);
    }
    out
}
