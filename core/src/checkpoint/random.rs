//! Random tensors, for measuring the speed of a model without its weights.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use super::{RawTensor, recipe};
use crate::{Error, Result, format::Format, source::Bytes, tensor::DType, zeroed::Zeroed};

/// Distribution of a tensor's values: uniform in `mid ± half`, or the logarithm of such a value.
#[derive(Clone, Copy, PartialEq)]
struct Spread {
    mid: f32,
    half: f32,
    log: bool,
    dtype: DType,
}

impl Spread {
    /// Chosen by the rank and the last part of the name, which all families share.
    fn of(name: &str, shape: &[usize]) -> Self {
        let between = |lo: f32, hi: f32, dtype| Self { mid: (lo + hi) / 2.0, half: (hi - lo) / 2.0, log: false, dtype };
        if name.ends_with("A_log") {
            Self { log: true, ..between(0.3, 8.0, DType::F32) }
        } else if name.ends_with("dt_bias") || name.ends_with("dt_proj.bias") {
            between(-4.0, 0.5, DType::F32)
        } else if name.ends_with(".D") {
            between(0.9, 1.1, DType::F32)
        } else if name.contains("norm") && name.ends_with("weight") {
            between(0.9, 1.1, DType::Bf16)
        } else if name.ends_with("bias") || shape.len() < 2 {
            between(-0.02, 0.02, DType::Bf16)
        } else {
            // A uniform variable in ±sqrt(3)s has standard deviation s.
            let half = (3.0 / shape[shape.len() - 1].max(1) as f32).sqrt();
            between(-half, half, DType::Bf16)
        }
    }
}

/// Seed and half width of the values of a bf16 matrix that a device may generate; `None` for everything else. The
/// values differ from those of [`tensor`], their distribution does not.
pub(super) fn matrix(seed: u64, name: &str, shape: &[usize]) -> Option<(u32, f32)> {
    let spread = Spread::of(name, shape);
    let plain = shape.len() >= 2 && spread.dtype == DType::Bf16 && spread.mid == 0.0;
    plain.then(|| (key(seed, name), spread.half))
}

fn key(seed: u64, name: &str) -> u32 {
    let key = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    hash((key >> 32) as u32 ^ hash(key as u32))
}

/// The tensor `name`, the same for the same seed, name, shape and format on every machine.
pub(super) fn tensor(seed: u64, name: &str, shape: &[usize], format: Format) -> Result<RawTensor> {
    let mut spread = Spread::of(name, shape);
    let mut stored = shape.to_vec();
    if let (Some(k), true) = (stored.last_mut(), format != Format::Plain) {
        (*k, spread.dtype) = (format.bytes(*k, 1), DType::U8);
    }
    let bytes = stored.iter().try_fold(spread.dtype.bytes(), |n, d| n.checked_mul(*d));
    // Committed by the threads that fill it.
    let Some(mut data) = bytes.and_then(Zeroed::new) else {
        let asked = stored.iter().fold(spread.dtype.bytes() as u64, |n, d| n.saturating_mul(*d as u64));
        return Err(Error::OutOfMemory { what: format!("random tensor `{name}` {shape:?}"), asked, free: 0 });
    };
    fill(&mut data, key(seed, name), &spread);
    if let Some(k) = shape.last() {
        recipe::tame(format, *k, &mut data);
    }
    Ok(RawTensor { dtype: spread.dtype, shape: stored, bytes: Bytes::new(Arc::new(data)) })
}

/// Bytes that one task fills, from a generator of its own: the split over threads does not matter.
const PART_BYTES: usize = 1 << 20;

fn fill(data: &mut [u8], key: u32, spread: &Spread) {
    let value = |i: u32, of: f32| {
        let x = spread.mid + spread.half * ((i as f32 + 0.5) * (2.0 / of) - 1.0);
        if spread.log { logarithm(x) } else { x }
    };
    // Looking values up costs less than computing them, and these are the bytes of whole models.
    let table =
        (spread.dtype == DType::Bf16).then(|| table(spread, |i| bf16::from_f32(value(i, TABLE_SIZE)).to_bits()));
    let one = |(part, bytes): (usize, &mut [u8])| {
        let mut state = u64::from(hash(key ^ part as u32)) << 32 | u64::from(hash(key.wrapping_add(part as u32))) | 1;
        if let Some(table) = &table {
            for four in bytes.chunks_mut(8) {
                let random = next(&mut state);
                for (i, out) in four.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let at = (random >> (64 - TABLE_BITS * (i as u32 + 1))) as usize % (1 << TABLE_BITS);
                    *out = table[at].to_le_bytes();
                }
            }
        } else if spread.dtype == DType::U8 {
            for out in bytes.chunks_mut(4) {
                let random = (next(&mut state) >> 32) as u32;
                out.copy_from_slice(&random.to_le_bytes()[..out.len()]);
            }
        } else {
            for out in bytes.as_chunks_mut::<4>().0 {
                *out = value((next(&mut state) >> 40) as u32, 16_777_216.0).to_le_bytes();
            }
        }
    };
    #[cfg(not(target_arch = "wasm32"))]
    {
        use rayon::prelude::*;
        data.par_chunks_mut(PART_BYTES).enumerate().for_each(one);
    }
    #[cfg(target_arch = "wasm32")]
    data.chunks_mut(PART_BYTES).enumerate().for_each(one);
}

type Table = Arc<[u16; 1 << TABLE_BITS]>;

/// The bits of a spread's values. The last table is kept: some models have hundreds of thousands of small tensors.
fn table(spread: &Spread, bits: impl Fn(u32) -> u16) -> Table {
    static LAST: Mutex<Option<(Spread, Table)>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((of, table)) if of == spread => table.clone(),
        _ => {
            let table: Table = Arc::new(std::array::from_fn(|i| bits(i as u32)));
            *last = Some((*spread, table.clone()));
            table
        }
    }
}

/// Kept out of line: inlined, it is computed for all values and selected for a few.
#[inline(never)]
fn logarithm(x: f32) -> f32 {
    x.ln()
}

/// Four indices come out of one random number.
const TABLE_BITS: u32 = 12;
const TABLE_SIZE: f32 = (1 << TABLE_BITS) as f32;

/// The next number of an xorshift64* generator; its upper bits are the good ones.
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// A well-mixing permutation of 32 bits (the "lowbias32" constants of the hash-prospector project).
fn hash(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(t: &RawTensor) -> Vec<f32> {
        match t.dtype {
            DType::F32 => t.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => t.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        }
    }

    #[test]
    fn a_matrix_has_the_spread_of_a_trained_one_and_depends_on_name_and_seed_only() {
        let shape = [2048, 400];
        let a = tensor(1, "model.layers.0.up_proj.weight", &shape, Format::Plain).unwrap();
        let x = floats(&a);
        let n = x.len() as f64;
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let std = (x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n - mean * mean).sqrt();
        assert!(mean.abs() < 1e-3 && (std * 20.0 - 1.0).abs() < 0.01, "mean {mean}, standard deviation {std}");
        // Neighbours, also over the border between two parts, are not alike.
        let lag = x.windows(2).map(|w| f64::from(w[0] * w[1])).sum::<f64>() / n / (std * std);
        assert!(lag.abs() < 0.01, "correlation {lag}");
        assert_eq!(&*a.bytes, &*tensor(1, "model.layers.0.up_proj.weight", &shape, Format::Plain).unwrap().bytes);
        assert_ne!(&*a.bytes, &*tensor(2, "model.layers.0.up_proj.weight", &shape, Format::Plain).unwrap().bytes);
        assert_ne!(&*a.bytes, &*tensor(1, "model.layers.1.up_proj.weight", &shape, Format::Plain).unwrap().bytes);
    }

    #[test]
    fn parameters_of_recurrent_layers_are_in_range() {
        for (name, lo, hi) in [
            ("mixer.A_log", 0.3f32.ln(), 8f32.ln()),
            ("mixer.dt_bias", -4.0, 0.5),
            ("mixer.D", 0.9, 1.1),
            ("mixer.norm.weight", 0.898, 1.102),
            ("mixer.conv1d.bias", -0.02, 0.02),
        ] {
            let x = floats(&tensor(7, name, &[300], Format::Plain).unwrap());
            assert!(x.iter().all(|v| (lo - 1e-4..=hi + 1e-4).contains(v)), "{name}");
            let spread = x.iter().cloned().fold(f32::MIN, f32::max) - x.iter().cloned().fold(f32::MAX, f32::min);
            assert!(spread > 0.9 * (hi - lo), "{name}: {spread}");
        }
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        assert!(matches!(tensor(0, "x", &[usize::MAX, 2], Format::Plain), Err(Error::OutOfMemory { .. })));
        assert!(matches!(tensor(0, "x", &[1 << 31, 1 << 30], Format::Plain), Err(Error::OutOfMemory { .. })));
    }
}
