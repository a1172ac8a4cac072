//! KV pages in 8 bits: a token's key or value of a head is signed codes and one f32 scale, so writing a token changes no other.
//!
//! Of latents a key is the latent and a value the shared part of the keys, see [`crate::ops::KvPool`].
//!
//! The bytes of a head in a page are `[64, hd]` codes, then `[64]` scales: `64 * (hd + 4)`. As a tensor of [`DType::I8`] the last
//! dim is therefore `hd + 4`. An element is `code * scale` with `scale = max |x| / 127`; a row that holds a number that is not
//! finite has a NaN for its scale, so that it is not taken for numbers.

use crate::{step::PAGE, tensor::DType};

/// Bytes of a scale.
const SCALE: usize = 4;
/// Below this, rows are zeros: the inverse of their scale would not be finite.
const LEAST: f32 = 1e-30;

/// Elements that a page's row takes for `dim` of them.
pub const fn stored(dtype: DType, dim: usize) -> usize {
    match dtype {
        DType::I8 => dim + SCALE,
        _ => dim,
    }
}

/// Elements of a row of a page that takes `width` of its dtype.
pub const fn elements(dtype: DType, width: usize) -> usize {
    match dtype {
        DType::I8 => width - SCALE,
        _ => width,
    }
}

/// Elements of a head of `dim` in a page.
pub const fn span(dtype: DType, dim: usize) -> usize {
    PAGE * stored(dtype, dim)
}

/// Writes the codes of a row and returns its scale.
pub fn encode(row: &[f32], codes: &mut [i8]) -> f32 {
    let most = row.iter().fold(0f32, |most, x| most.max(x.abs()));
    let inverse = if most > LEAST { 127.0 / most } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(row) {
        *code = (x * inverse).round_ties_even() as i8;
    }
    if row.iter().all(|x| x.is_finite()) { most / 127.0 } else { f32::NAN }
}

/// Writes a row of a head, `[hd]`, as token `slot` of its page.
pub fn put(row: &[f32], slot: usize, head: &mut [i8]) {
    let (codes, scales) = head.split_at_mut(PAGE * row.len());
    let scale = encode(row, &mut codes[slot * row.len()..][..row.len()]);
    scales[slot * SCALE..][..SCALE].copy_from_slice(bytemuck::cast_slice(&scale.to_le_bytes()));
}

/// The elements `[64, hd]` of a head in a page; `head` is all of its bytes.
pub fn decode(head: &[i8], out: &mut Vec<f32>) {
    let hd = head.len() / PAGE - SCALE;
    let (codes, scales) = head.split_at(PAGE * hd);
    out.clear();
    for (codes, scale) in codes.chunks_exact(hd).zip(scales.as_chunks::<SCALE>().0) {
        let scale = f32::from_le_bytes(scale.map(|b| b as u8));
        out.extend(codes.iter().map(|code| f32::from(*code) * scale));
    }
}

/// [`decode`] of several heads, one after the other, from bytes.
pub fn values(bytes: &[u8], hd: usize) -> Vec<f32> {
    let (mut all, mut head) = (Vec::new(), Vec::new());
    for bytes in bytes.chunks_exact(span(DType::I8, hd)) {
        decode(bytemuck::cast_slice(bytes), &mut head);
        all.extend_from_slice(&head);
    }
    all
}

/// The elements of rows of `dim` as f32, of whole heads if they are codes.
pub fn to_f32(dtype: DType, bytes: &[u8], dim: usize) -> Vec<f32> {
    if dtype == DType::I8 { values(bytes, dim) } else { dtype.to_f32(bytes) }
}

/// The bytes of several heads with these elements, `[heads, 64, hd]`.
pub fn bytes(values: &[f32], hd: usize) -> Vec<u8> {
    let mut all = vec![0; values.len() / hd * (hd + SCALE)];
    for (values, bytes) in values.chunks_exact(PAGE * hd).zip(all.chunks_exact_mut(span(DType::I8, hd))) {
        let head = bytemuck::cast_slice_mut(bytes);
        values.chunks_exact(hd).enumerate().for_each(|(slot, row)| put(row, slot, head));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_within_half_a_step() {
        let rows: Vec<f32> = (0..PAGE * 12).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
        let read = values(&bytes(&rows, 12), 12);
        for (row, read) in rows.chunks(12).zip(read.chunks(12)) {
            let most = row.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (x, y) in row.iter().zip(read) {
                assert!((x - y).abs() <= 0.5001 * most / 127.0, "{x} became {y}");
            }
        }
    }

    #[test]
    fn a_token_changes_no_other() {
        let mut head = vec![-1; span(DType::I8, 8)];
        let before = head.clone();
        put(&[1.0; 8], 5, &mut head);
        let changed: Vec<usize> = (0..head.len()).filter(|i| head[*i] != before[*i]).collect();
        let scale = PAGE * 8 + 5 * SCALE;
        assert!(changed.iter().all(|i| (40..48).contains(i) || (scale..scale + SCALE).contains(i)), "{changed:?}");
    }

    #[test]
    fn zeros_stay_and_what_is_not_finite_is_seen() {
        let mut codes = [7; 4];
        assert_eq!((encode(&[0.0; 4], &mut codes), codes), (0.0, [0; 4]));
        assert_eq!(encode(&[1e-38, 0.0, 0.0, 0.0], &mut codes) * f32::from(codes[0]), 0.0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(encode(&[1.0, bad, 0.0, 2.0], &mut codes).is_nan(), "{bad}");
        }
    }
}
