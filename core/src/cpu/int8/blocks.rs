//! Blocks of the coded formats, 16 rows at a time.
//!
//! Codes go to a [`Sink`]: strips, which many rows of x share, or at once into the products with a single row.
//!
//! The same layouts as in [`crate::format::blocks`], read as words of 16 rows: what is one code or scale there is a vector with a
//! lane per row here.

use super::{Rounded, Strip};
use std::marker::PhantomData;

use crate::cpu::simd::codes::Codes;
use crate::cpu::simd::{LANES, Simd};
use crate::format::blocks::{
    E2M1, F4, I4, I8, IQ4_NL, Iq4Nl, Mxfp4, Nvfp4, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, half_e8m0, half_ue4m3,
};
use crate::format::{GROUP, Integers};

type V<S> = <<S as Codes>::Float as Simd>::V;
/// Codes of a group in order.
type Steps<S> = [<S as Codes>::B; 8];

/// Low four bits of every byte.
const LOW: u32 = 0x0f0f_0f0f;
/// The fifth bit of every byte.
const FIFTH: u32 = 0x1010_1010;

/// How blocks of a format become strips.
pub(super) trait Blocks: Integers {
    /// What codes in a strip stand above their integers, [`Codes::BIAS`] excepted.
    const ZERO: i32 = 0;
    /// Codes need 8 bits, else at most 7 and no sign.
    const WIDE: bool = false;
    /// What codes stand above their integers.
    fn above<S: Codes>() -> i32 {
        Self::ZERO + if Self::WIDE { i32::from(S::BIAS) } else { 0 }
    }
    /// A scale per 16 columns.
    const SPLIT: bool = false;
    /// There are offsets.
    const OFFSET: bool = false;

    /// Codes come in runs of 32 bytes, so that they need not be in the order of [`Codes::words`].
    const PAIRED: bool = false;

    /// Hands on the groups of the block at byte `at` of 16 rows in ascending order; the first is group `to` of the sink.
    ///
    /// # Safety
    /// The rows have the block, and the sink its groups.
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize);
}

/// What takes the codes of 16 rows, group by group.
pub(super) trait Sink<S: Codes> {
    /// 32 bytes of every row, in the order that it wants them.
    ///
    /// # Safety
    /// The rows have these bytes.
    unsafe fn eight(&self, s: S, rows: &[*const u8; LANES], at: usize) -> Steps<S>;

    /// Takes a group: codes, a scale per row for each of its H parts, and offsets of the rows.
    ///
    /// # Safety
    /// It has the group.
    unsafe fn put<const H: usize>(&mut self, s: S, to: usize, codes: Steps<S>, scales: [V<S>; H], offset: Option<V<S>>);
}

impl<S: Codes> Sink<S> for Strip {
    #[inline(always)]
    unsafe fn eight(&self, s: S, rows: &[*const u8; LANES], at: usize) -> Steps<S> {
        // SAFETY: the caller's contract.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (s.words(rows, at), s.words(rows, at + 16)) };
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    unsafe fn put<const H: usize>(
        &mut self,
        s: S,
        to: usize,
        codes: Steps<S>,
        scales: [V<S>; H],
        offset: Option<V<S>>,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            for (j, codes) in codes.into_iter().enumerate() {
                s.store(codes, self.codes(to).add(64 * j));
            }
            for (half, scale) in scales.into_iter().enumerate() {
                s.float().store_ptr(scale, self.scales(to, half));
            }
            if let Some(offset) = offset {
                s.float().store_ptr(offset, self.offsets(to));
            }
        }
    }
}

/// Outputs of 16 weight rows and one row of x.
pub(super) struct OneRow<'a, S: Codes, F> {
    /// So far.
    pub acc: V<S>,
    /// Rounded activations.
    pub x: &'a Rounded,
    /// The row.
    pub m: usize,
    /// The format of the weights.
    pub format: PhantomData<F>,
}

impl<S: Codes, F: Blocks> Sink<S> for OneRow<'_, S, F> {
    #[inline(always)]
    unsafe fn eight(&self, s: S, rows: &[*const u8; LANES], at: usize) -> Steps<S> {
        // SAFETY: the caller's contract.
        unsafe { s.pairs(rows, at) }
    }

    #[inline(always)]
    unsafe fn put<const H: usize>(
        &mut self,
        s: S,
        to: usize,
        mut codes: Steps<S>,
        scales: [V<S>; H],
        offset: Option<V<S>>,
    ) {
        let (f, x, m) = (s.float(), self.x, self.m);
        // SAFETY: the caller's contract: x has the group.
        let (codes_of_x, scale_of_x) = unsafe { (s.twice(x.group(m, to)), f.splat(x.scale(m, to))) };
        for codes in &mut codes {
            *codes = match F::WIDE {
                true => s.dots::<true>(s.splat(0), *codes, codes_of_x),
                false => s.dots::<false>(s.splat(0), *codes, codes_of_x),
            };
        }
        let mut sums = s.folded(codes);
        if H == 1 {
            sums[0] = s.add(sums[0], sums[1]);
        }
        for half in 0..H {
            // SAFETY: as above.
            let sum_of_x = unsafe { if H == 2 { x.sum(m, to, half) } else { x.sum(m, to, 0) + x.sum(m, to, 1) } };
            let sum = s.add(sums[half], s.splat((-F::above::<S>() * sum_of_x) as u32));
            self.acc = f.fma(s.to_float(sum), f.mul(scales[half], scale_of_x), self.acc);
        }
        if let Some(offset) = offset {
            // SAFETY: as above.
            self.acc = f.fma(offset, f.splat(unsafe { x.shift(m, to) }), self.acc);
        }
    }
}

/// The low four bits of 16 bytes, then the high ones.
#[inline(always)]
fn nibbles<S: Codes>(s: S, w: [S::B; 4]) -> Steps<S> {
    let low = s.splat(LOW);
    let mut out = [low; 8];
    for j in 0..4 {
        out[j] = s.and(w[j], low);
        out[4 + j] = s.and(s.shr(w[j], 4), low);
    }
    out
}

#[inline(always)]
fn looked_up<S: Codes>(s: S, mut codes: Steps<S>, table: &[u8; 16]) -> Steps<S> {
    for codes in &mut codes {
        *codes = s.lookup(*codes, table);
    }
    codes
}

/// Adds bit `j` of `high` as the fifth of code `j`.
#[inline(always)]
fn fifth_bits<S: Codes>(s: S, mut codes: Steps<S>, high: S::B) -> Steps<S> {
    for (j, codes) in codes.iter_mut().enumerate() {
        // Four copies, each 7 bits further: bit i of four comes to bit 8 i + 4.
        let four = s.and(s.shr(high, 4 * j as u32), s.splat(15));
        let spread = s.and(s.mul(four, s.splat(0x0204_0810)), s.splat(FIFTH));
        *codes = s.or(*codes, spread);
    }
    codes
}

/// 16 numbers, one per row.
#[inline(always)]
fn floats<S: Codes>(s: S, lanes: [f32; LANES]) -> V<S> {
    s.float().load(&lanes)
}

/// A table of signed codes as bytes with something added.
const fn shifted(table: &[i8; 16], by: u8) -> [u8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (table[i] as u8).wrapping_add(by);
        i += 1;
    }
    out
}

impl Blocks for Q4_0 {
    const ZERO: i32 = 8;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = s.halves(rows, at);
            sink.put(s, to, nibbles(s, s.words(rows, at + 2)), [scale], None);
        }
    }
}

impl Blocks for Q4_1 {
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let head = s.words(rows, at)[0];
            let offset = s.float().neg(s.half(s.shr(head, 16)));
            sink.put(s, to, nibbles(s, s.words(rows, at + 4)), [s.half(head)], Some(offset));
        }
    }
}

impl Blocks for Q5_0 {
    const ZERO: i32 = 16;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let head = s.words(rows, at);
            let high = s.or(s.shr(head[0], 16), s.shl(head[1], 16));
            let codes = fifth_bits(s, nibbles(s, s.words(rows, at + 6)), high);
            sink.put(s, to, codes, [s.half(head[0])], None);
        }
    }
}

impl Blocks for Q5_1 {
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let head = s.words(rows, at);
            let codes = fifth_bits(s, nibbles(s, s.words(rows, at + 8)), head[1]);
            let offset = s.float().neg(s.half(s.shr(head[0], 16)));
            sink.put(s, to, codes, [s.half(head[0])], Some(offset));
        }
    }
}

impl Blocks for Q8_0 {
    const PAIRED: bool = true;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = s.halves(rows, at);
            let mut codes = sink.eight(s, rows, at + 2);
            for codes in &mut codes {
                *codes = s.xor(*codes, s.splat(u32::from(S::BIAS) * 0x0101_0101));
            }
            sink.put(s, to, codes, [scale], None);
        }
    }
}

impl Blocks for Iq4Nl {
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let scale = s.halves(rows, at);
            let codes = looked_up(s, nibbles(s, s.words(rows, at + 2)), &const { shifted(&IQ4_NL, S::BIAS) });
            sink.put(s, to, codes, [scale], None);
        }
    }
}

impl Blocks for Mxfp4 {
    const ZERO: i32 = 12;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut scale = [0.0; LANES];
            for (scale, row) in scale.iter_mut().zip(rows) {
                *scale = half_e8m0(*row.add(at));
            }
            let codes = looked_up(s, nibbles(s, s.words(rows, at + 1)), &const { shifted(&E2M1, 12) });
            sink.put(s, to, codes, [floats(s, scale)], None);
        }
    }
}

impl Blocks for Nvfp4 {
    const ZERO: i32 = 12;
    const SPLIT: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe { nvfp4(s, rows, at, sink, to, &[1.0; LANES]) }
    }
}

impl Blocks for F4 {
    const ZERO: i32 = 12;
    const SPLIT: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        let mut factors = [0.0; LANES];
        for (factor, row) in factors.iter_mut().zip(rows) {
            // SAFETY: the caller's contract.
            *factor = f32::from_le_bytes(unsafe { row.add(at).cast::<[u8; 4]>().read_unaligned() });
        }
        // SAFETY: the caller's contract.
        unsafe { nvfp4(s, rows, at + 4, sink, to, &factors) }
    }
}

impl Blocks for I4 {
    const PAIRED: bool = true;
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let [scale, offset] = two_floats(s, rows, at);
            for (g, codes) in pair(s, sink, rows, at + 8).into_iter().enumerate() {
                sink.put(s, to + g, codes, [scale], Some(offset));
            }
        }
    }
}

impl Blocks for I8 {
    const PAIRED: bool = true;
    const WIDE: bool = true;
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let [scale, offset] = two_floats(s, rows, at);
            let mut codes = sink.eight(s, rows, at + 8);
            for codes in &mut codes {
                *codes = s.xor(*codes, s.splat(u32::from(S::BIAS) * 0x0101_0101));
            }
            sink.put(s, to, codes, [scale], Some(offset));
        }
    }
}

/// The numbers at byte `at` of every row, and those after them.
///
/// # Safety
/// The rows have these 8 bytes.
#[inline(always)]
unsafe fn two_floats<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize) -> [V<S>; 2] {
    let mut lanes = [[0.0; LANES]; 2];
    for (i, lanes) in lanes.iter_mut().enumerate() {
        for (lane, row) in lanes.iter_mut().zip(rows) {
            // SAFETY: the caller's contract.
            *lane = f32::from_le_bytes(unsafe { row.add(at + 4 * i).cast::<[u8; 4]>().read_unaligned() });
        }
    }
    [floats(s, lanes[0]), floats(s, lanes[1])]
}

/// A block of NVFP4 at byte `at` of every row, times a factor.
///
/// # Safety
/// As for [`Blocks::unpack`].
#[inline(always)]
unsafe fn nvfp4<S: Codes>(
    s: S,
    rows: &[*const u8; LANES],
    at: usize,
    sink: &mut impl Sink<S>,
    to: usize,
    factors: &[f32; LANES],
) {
    for g in 0..2 {
        // SAFETY: the caller's contract.
        unsafe {
            let mut scales = [[0.0; LANES]; 2];
            for (r, row) in rows.iter().enumerate() {
                for (i, scales) in scales.iter_mut().enumerate() {
                    scales[r] = factors[r] * half_ue4m3(*row.add(at + 2 * g + i));
                }
            }
            // 8 bytes are the low, then the high halves of 16 codes.
            let [a, b, c, d, e, f, i, j] = nibbles(s, s.words(rows, at + 4 + 16 * g));
            let codes = looked_up(s, [a, b, e, f, c, d, i, j], &const { shifted(&E2M1, 12) });
            sink.put(s, to + g, codes, [floats(s, scales[0]), floats(s, scales[1])], None);
        }
    }
}

/// Scale and offset of group `g` of a block of Q4_K or Q5_K, of which `head` holds the first 16 bytes.
#[inline(always)]
fn scale_and_offset<S: Codes>(s: S, head: &[S::B; 4], g: u32) -> (V<S>, V<S>) {
    let (f, six) = (s.float(), s.splat(63));
    let (scale, offset) = if g < 4 {
        (s.and(s.shr(head[1], 8 * g), six), s.and(s.shr(head[2], 8 * g), six))
    } else {
        let at = 8 * (g - 4);
        let (low, high) = (s.splat(15), s.splat(48));
        let both = s.shr(head[3], at);
        // The upper two bits lie above the six of an earlier group.
        let (scale, offset) = (s.and(s.shr(head[1], at + 2), high), s.and(s.shr(head[2], at + 2), high));
        (s.or(s.and(both, low), scale), s.or(s.and(s.shr(both, 4), low), offset))
    };
    let (d, least) = (s.half(head[0]), s.half(s.shr(head[0], 16)));
    (f.mul(d, s.to_float(scale)), f.mul(least, s.to_float(offset)))
}

/// Codes of 4 bits of a pair of groups: 32 bytes hold the low halves of one and the high ones of the next.
///
/// # Safety
/// The rows have these bytes.
#[inline(always)]
unsafe fn pair<S: Codes>(s: S, sink: &impl Sink<S>, rows: &[*const u8; LANES], at: usize) -> [Steps<S>; 2] {
    // SAFETY: the caller's contract.
    let mut out = [unsafe { sink.eight(s, rows, at) }; 2];
    for j in 0..8 {
        out[1][j] = s.and(s.shr(out[0][j], 4), s.splat(LOW));
        out[0][j] = s.and(out[0][j], s.splat(LOW));
    }
    out
}

impl Blocks for Q4K {
    const PAIRED: bool = true;
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let head = s.words(rows, at);
            for p in 0..4 {
                for (i, codes) in pair(s, sink, rows, at + 16 + GROUP * p).into_iter().enumerate() {
                    let g = 2 * p + i;
                    let (scale, offset) = scale_and_offset(s, &head, g as u32);
                    sink.put(s, to + g, codes, [scale], Some(offset));
                }
            }
        }
    }
}

impl Blocks for Q5K {
    const PAIRED: bool = true;
    const OFFSET: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let head = s.words(rows, at);
            let high = sink.eight(s, rows, at + 16);
            for p in 0..4 {
                for (i, mut codes) in pair(s, sink, rows, at + 48 + GROUP * p).into_iter().enumerate() {
                    let g = 2 * p + i;
                    for (codes, high) in codes.iter_mut().zip(high) {
                        let bit = if g < 4 { s.shl(high, 4 - g as u32) } else { s.shr(high, g as u32 - 4) };
                        *codes = s.or(*codes, s.and(bit, s.splat(FIFTH)));
                    }
                    let (scale, offset) = scale_and_offset(s, &head, g as u32);
                    sink.put(s, to + g, codes, [scale], Some(offset));
                }
            }
        }
    }
}

impl Blocks for Q6K {
    const PAIRED: bool = true;
    const ZERO: i32 = 32;
    const SPLIT: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Codes>(s: S, rows: &[*const u8; LANES], at: usize, sink: &mut impl Sink<S>, to: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let scales = s.words(rows, at + 192);
            let d = s.halves(rows, at + 208);
            // Groups of 128 columns: 32 bytes are the low bits of two groups, another 32 the upper two bits of all four.
            for h in 0..2 {
                let upper = sink.eight(s, rows, at + 128 + 32 * h);
                let (even, odd) = (pair(s, sink, rows, at + 64 * h), pair(s, sink, rows, at + 64 * h + 32));
                for (quarter, mut codes) in [even[0], odd[0], even[1], odd[1]].into_iter().enumerate() {
                    for (codes, upper) in codes.iter_mut().zip(upper) {
                        let two = s.and(s.shr(upper, 2 * quarter as u32), s.splat(0x0303_0303));
                        *codes = s.or(*codes, s.shl(two, 4));
                    }
                    let word = s.shr(scales[2 * h + quarter / 2], 16 * (quarter % 2) as u32);
                    let scales = [signed_byte(s, word, d), signed_byte(s, s.shr(word, 8), d)];
                    sink.put(s, to + 4 * h + quarter, codes, scales, None);
                }
            }
        }
    }
}

/// The lowest byte of each lane, signed, times `d`.
#[inline(always)]
fn signed_byte<S: Codes>(s: S, word: S::B, d: V<S>) -> V<S> {
    let f = s.float();
    // 128 above what it is while it is unsigned.
    let byte = s.xor(s.and(word, s.splat(255)), s.splat(128));
    f.mul(d, f.sub(s.to_float(byte), f.splat(128.0)))
}
