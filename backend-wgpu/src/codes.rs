//! WGSL that decodes coded weights where it reads them: `w_v8(i)` and the other accessors of a view, `i` counted in elements.
//!
//! Blocks keep the layout of the file. Where their size is not a multiple of four bytes, words are put together out of two. Eight
//! elements from a multiple of eight on always share a scale, an offset and a run of bytes. `w_wide(i)` reads 32 elements: two runs of
//! 16 codes, which begin at `w_runs(i)` of the row and have a scale and an offset each. Its codes are integers of 8 bits, four in a
//! word; `w_floats` makes floats of 16. Products of few rows read these, since bytes in flight limit them.

use std::fmt::Write;

use selkie_core::format::Format;

/// A word, counted in words.
const WORDS: &str = "
fn $n_u(j: u32) -> u32 { return b$b[j]; }
";

/// The same of a binding of vectors.
const VECTORS: &str = "
fn $n_u(j: u32) -> u32 { return b$b[j >> 2u][j & 3u]; }
fn $n_quad(at: u32) -> vec4<u32> { return b$b[at >> 4u]; }
";

/// Four words at multiples of four bytes.
const QUAD: &str = "
fn $n_quad(at: u32) -> vec4<u32> {
    let j = at >> 2u;
    return vec4<u32>($n_u(j), $n_u(j + 1u), $n_u(j + 2u), $n_u(j + 3u));
}
";

/// Words at multiples of four bytes, and eight bytes from there on.
const ALIGNED: &str = "
fn $n_word(at: u32) -> u32 { return $n_u(at >> 2u); }
fn $n_pair(at: u32) -> vec2<u32> { return vec2<u32>($n_u(at >> 2u), $n_u((at >> 2u) + 1u)); }
";

/// The same at any byte, and four words. A shift by 32 would be one by 0, so the next word is shifted twice.
const UNALIGNED: &str = "
fn $n_word(at: u32) -> u32 {
    let j = at >> 2u;
    let s = (at & 3u) * 8u;
    return ($n_u(j) >> s) | (($n_u(j + 1u) << 1u) << (31u - s));
}
fn $n_pair(at: u32) -> vec2<u32> {
    let j = at >> 2u;
    let s = (at & 3u) * 8u;
    let w = vec2<u32>($n_u(j), $n_u(j + 1u));
    let next = vec2<u32>(w.y, $n_u(j + 2u)) << vec2<u32>(1u);
    return (w >> vec2<u32>(s)) | (next << vec2<u32>(31u - s));
}
fn $n_quad(at: u32) -> vec4<u32> {
    let j = at >> 2u;
    let s = (at & 3u) * 8u;
    let w = vec4<u32>($n_u(j), $n_u(j + 1u), $n_u(j + 2u), $n_u(j + 3u));
    let next = vec4<u32>(w.yzw, $n_u(j + 4u)) << vec4<u32>(1u);
    return (w >> vec4<u32>(s)) | (next << vec4<u32>(31u - s));
}
";

/// Bytes, halves at even bytes, the codes of four bytes as floats (a byte in the low bits of the half 1024 adds itself, which takes
/// fewer instructions than a conversion of integers), and the accessors that are made of `v8`.
const COMMON: &str = "
fn $n_byte(at: u32) -> u32 { return ($n_u(at >> 2u) >> ((at & 3u) * 8u)) & 255u; }
fn $n_half_word(at: u32) -> u32 { return $n_u(at >> 2u) >> ((at & 2u) * 8u); }
fn $n_half(at: u32) -> f32 { return unpack2x16float($n_half_word(at)).x; }
fn $n_codes(c: u32) -> vec4<f32> {
    let a = unpack2x16float((c & 0x00ff00ffu) | 0x64006400u);
    let b = unpack2x16float(((c >> 8u) & 0x00ff00ffu) | 0x64006400u);
    return vec4<f32>(a.x, b.x, a.y, b.y) - 1024.0;
}
struct $n_Wide { c0: vec4<u32>, c1: vec4<u32>, scale: vec2<f32>, offset: vec2<f32> }
fn $n_low(w: vec4<u32>, s: u32) -> vec4<u32> { return (w >> vec4<u32>(s)) & vec4<u32>(0x0f0f0f0fu); }
fn $n_floats(c: vec4<u32>) -> mat4x4<f32> {
    let w = c ^ vec4<u32>(0x80808080u);
    return mat4x4<f32>($n_codes(w.x) - 128.0, $n_codes(w.y) - 128.0, $n_codes(w.z) - 128.0, $n_codes(w.w) - 128.0);
}
alias $n_raw = u32;
fn $n_raw8(i: u32) -> $n_raw { return i; }
fn $n_unpack(i: $n_raw) -> mat2x4<f32> { return $n_v8(i); }
fn $n_v4(i: u32) -> vec4<f32> {
    let w = $n_v8(i & ~7u);
    return select(w[0], w[1], (i & 4u) != 0u);
}
";

/// Integers that four codes stand for, 128 added, a byte each.
const TABLE: &str = "
fn $n_looked(c: u32) -> u32 {
    let high = (c & 4u) != 0u;
    let w = select(select($0u, $1u, high), select($2u, $3u, high), (c & 8u) != 0u);
    return (w >> ((c & 3u) * 8u)) & 255u;
}
fn $n_biased(c: u32) -> u32 {
    return $n_looked(c) | ($n_looked(c >> 8u) << 8u) | ($n_looked(c >> 16u) << 16u) | ($n_looked(c >> 24u) << 24u);
}
fn $n_table(c: u32) -> vec4<f32> { return $n_codes($n_biased(c)) - 128.0; }
fn $n_pairs(w: vec2<u32>) -> vec4<u32> { return $n_table16(vec4<u32>(w, w >> vec2<u32>(4u))); }
fn $n_table16(w: vec4<u32>) -> vec4<u32> {
    return vec4<u32>($n_biased(w.x), $n_biased(w.y), $n_biased(w.z), $n_biased(w.w)) ^ vec4<u32>(0x80808080u);
}
";

/// Scale and offset of 32 elements of a block of 256, which begins with four words: two halves, and 6 bits of eight scales and
/// eight offsets.
const SIXES: &str = "
fn $n_six(head: vec4<u32>, g: u32) -> vec2<f32> {
    let s = (g & 3u) * 8u;
    let low = head.yz >> vec2<u32>(s);
    let high = head.w >> s;
    let late = (vec2<u32>(high, high >> 4u) & vec2<u32>(15u)) | ((low >> vec2<u32>(2u)) & vec2<u32>(48u));
    return unpack2x16float(head.x) * vec2<f32>(select(low & vec2<u32>(63u), late, g >= 4u));
}
";

/// The scale of 16 elements: a number of 8 bits, of which the highest is not used.
const E4M3_SCALE: &str = "
fn $n_scale(e: u32) -> f32 {
    let small = f32(e & 7u) * bitcast<f32>((127u - 10u) << 23u);
    let large = (1.0 + f32(e & 7u) / 8.0) * bitcast<f32>((119u + (e >> 3u)) << 23u);
    return select(select(large, small, e < 8u), 0.0, e == 127u);
}
";

/// The body of `v8`, from the byte `b` of the block and the element `j` in it to a matrix.
fn body(format: Format) -> &'static str {
    match format {
        Format::Plain => unreachable!("plain elements have accessors of their own"),
        Format::Q4_0 => {
            "let q = b + 2u + (j & 15u); let s = (j >> 4u) * 4u; let d = $n_half(b);
    let w = $n_pair(q);
    return mat2x4<f32>(d * ($n_codes((w.x >> s) & 0x0f0f0f0fu) - 8.0),
                       d * ($n_codes((w.y >> s) & 0x0f0f0f0fu) - 8.0));"
        }
        Format::Q4_1 => {
            "let q = b + 4u + (j & 15u); let s = (j >> 4u) * 4u; let d = $n_half(b); let m = $n_half(b + 2u);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_codes((w.x >> s) & 0x0f0f0f0fu) + m,
                       d * $n_codes((w.y >> s) & 0x0f0f0f0fu) + m);"
        }
        Format::Q5_0 => {
            "let q = b + 6u + (j & 15u); let s = (j >> 4u) * 4u; let d = $n_half(b); let h = $n_word(b + 2u) >> j;
    let w = $n_pair(q);
    return mat2x4<f32>(d * ($n_codes(((w.x >> s) & 0x0f0f0f0fu) | $n_fifth(h)) - 16.0),
                       d * ($n_codes(((w.y >> s) & 0x0f0f0f0fu) | $n_fifth(h >> 4u)) - 16.0));"
        }
        Format::Q5_1 => {
            "let q = b + 8u + (j & 15u); let s = (j >> 4u) * 4u; let h = $n_word(b + 4u) >> j;
    let d = $n_half(b); let m = $n_half(b + 2u);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_codes(((w.x >> s) & 0x0f0f0f0fu) | $n_fifth(h)) + m,
                       d * $n_codes(((w.y >> s) & 0x0f0f0f0fu) | $n_fifth(h >> 4u)) + m);"
        }
        Format::Q8_0 => {
            "let q = b + 2u + j; let d = $n_half(b);
    let w = $n_pair(q);
    return mat2x4<f32>(d * ($n_codes(w.x ^ 0x80808080u) - 128.0),
                       d * ($n_codes(w.y ^ 0x80808080u) - 128.0));"
        }
        Format::Iq4Nl => {
            "let q = b + 2u + (j & 15u); let s = (j >> 4u) * 4u; let d = $n_half(b);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_table(w.x >> s), d * $n_table(w.y >> s));"
        }
        Format::Mxfp4 => {
            "let q = b + 1u + (j & 15u); let s = (j >> 4u) * 4u; let e = $n_byte(b);
    let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << (e & 1u), e < 2u));
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_table(w.x >> s), d * $n_table(w.y >> s));"
        }
        Format::Nvfp4 => {
            "let g = j >> 4u; let q = b + 4u + 8u * g; let s = (j & 8u) >> 1u; let e = $n_byte(b + g) & 127u; let d = $n_scale(e);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_table(w.x >> s), d * $n_table(w.y >> s));"
        }
        Format::F4 => {
            "let g = j >> 4u; let q = b + 8u + 8u * g; let s = (j & 8u) >> 1u; let e = $n_byte(b + 4u + g) & 127u; let d = bitcast<f32>($n_word(b)) * $n_scale(e);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_table(w.x >> s), d * $n_table(w.y >> s));"
        }
        Format::I4 => {
            "let g = j >> 5u; let q = b + 8u + (j & 31u); let s = g * 4u; let d = bitcast<f32>($n_word(b)); let m = bitcast<f32>($n_word(b + 4u));
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_codes((w.x >> s) & 0x0f0f0f0fu) - m,
                       d * $n_codes((w.y >> s) & 0x0f0f0f0fu) - m);"
        }
        Format::I8 => {
            "let q = b + 8u + j; let d = bitcast<f32>($n_word(b)); let m = bitcast<f32>($n_word(b + 4u));
    let w = $n_pair(q);
    return mat2x4<f32>(d * ($n_codes(w.x ^ 0x80808080u) - 128.0) - m,
                       d * ($n_codes(w.y ^ 0x80808080u) - 128.0) - m);"
        }
        Format::F8 => {
            "let q = b + 4u + j; let d = bitcast<f32>($n_word(b));
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_e4m3(w.x), d * $n_e4m3(w.y));"
        }
        Format::Q4K => {
            "let g = j >> 5u; let q = b + 16u + 32u * (g >> 1u) + (j & 31u); let s = (g & 1u) * 4u; let d = $n_six($n_quad(b), g);
    let w = $n_pair(q);
    return mat2x4<f32>(d.x * $n_codes((w.x >> s) & 0x0f0f0f0fu) - d.y,
                       d.x * $n_codes((w.y >> s) & 0x0f0f0f0fu) - d.y);"
        }
        Format::Q5K => {
            "let g = j >> 5u; let l = j & 31u; let q = b + 48u + 32u * (g >> 1u) + l; let s = (g & 1u) * 4u; let d = $n_six($n_quad(b), g);
    let x = $n_pair(b + 16u + l);
    let h0 = ((x.x >> g) & 0x01010101u) << 4u;
    let h1 = ((x.y >> g) & 0x01010101u) << 4u;
    let w = $n_pair(q);
    return mat2x4<f32>(d.x * $n_codes(((w.x >> s) & 0x0f0f0f0fu) | h0) - d.y,
                       d.x * $n_codes(((w.y >> s) & 0x0f0f0f0fu) | h1) - d.y);"
        }
        Format::Q6K => {
            "let half = j >> 7u; let part = (j >> 5u) & 3u; let l = j & 31u;
    let q = b + 64u * half + 32u * (part & 1u) + l; let s = (part >> 1u) * 4u; let h = b + 128u + 32u * half + l;
    let i8 = i32($n_byte(b + 192u + 8u * half + 2u * part + (l >> 4u)) << 24u) >> 24u;
    let d = $n_half(b + 208u) * f32(i8);
    let x = $n_pair(h);
    let h0 = ((x.x >> (2u * part)) & 0x03030303u) << 4u;
    let h1 = ((x.y >> (2u * part)) & 0x03030303u) << 4u;
    let w = $n_pair(q);
    return mat2x4<f32>(d * ($n_codes(((w.x >> s) & 0x0f0f0f0fu) | h0) - 32.0),
                       d * ($n_codes(((w.y >> s) & 0x0f0f0f0fu) | h1) - 32.0));"
        }
    }
}

/// Each byte holds a code of the first and one of the second half of a block of 32.
const HALVES: &str = "vec2<u32>(0u, 16u)";
/// One run follows the other.
const RUN: &str = "vec2<u32>(j, j + 16u)";
/// The bytes of 64 elements hold the first 32 in their low bits and the others in the high ones.
const SIXTIES: &str = "vec2<u32>(0u, 32u) + ((j & 192u) | ((j & 32u) >> 1u))";

/// The body of `wide`, from the byte `b` of the block and the element `j` in it, a multiple of 32; and where the two runs of
/// 16 elements begin in the block. `None` for codes of 8 bits, of which 8 elements are 8 bytes.
fn wide(format: Format) -> Option<(&'static str, &'static str)> {
    let found = match format {
        Format::Plain | Format::F8 => return None,
        Format::Q8_0 => ("return $n_Wide($n_quad(b + 2u), $n_quad(b + 18u), vec2<f32>($n_half(b)), vec2<f32>());", RUN),
        Format::I8 => (
            "let d = bitcast<vec2<f32>>($n_pair(b));
    return $n_Wide($n_quad(b + 8u), $n_quad(b + 24u), d.xx, d.yy);",
            RUN,
        ),
        Format::Q4_0 => (
            "let w = $n_quad(b + 2u);
    let d = vec2<f32>($n_half(b));
    return $n_Wide($n_low(w, 0u), $n_low(w, 4u), d, 8.0 * d);",
            HALVES,
        ),
        Format::Q4_1 => (
            "let w = $n_quad(b + 4u);
    let d = unpack2x16float($n_word(b));
    return $n_Wide($n_low(w, 0u), $n_low(w, 4u), d.xx, -d.yy);",
            HALVES,
        ),
        Format::Q5_0 => (
            "let w = $n_quad(b + 6u); let m = $n_word(b + 2u);
    let d = vec2<f32>($n_half(b));
    return $n_Wide($n_low(w, 0u) | $n_fifth4(m), $n_low(w, 4u) | $n_fifth4(m >> 16u), d, 16.0 * d);",
            HALVES,
        ),
        Format::Q5_1 => (
            "let w = $n_quad(b + 8u); let m = $n_word(b + 4u);
    let d = unpack2x16float($n_word(b));
    return $n_Wide($n_low(w, 0u) | $n_fifth4(m), $n_low(w, 4u) | $n_fifth4(m >> 16u), d.xx, -d.yy);",
            HALVES,
        ),
        Format::Iq4Nl => (
            "let w = $n_quad(b + 2u);
    let d = vec2<f32>($n_half(b));
    return $n_Wide($n_table16(w), $n_table16(w >> vec4<u32>(4u)), d, vec2<f32>());",
            HALVES,
        ),
        Format::Mxfp4 => (
            "let w = $n_quad(b + 1u); let e = $n_byte(b);
    let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << (e & 1u), e < 2u));
    return $n_Wide($n_table16(w), $n_table16(w >> vec4<u32>(4u)), vec2<f32>(d), vec2<f32>());",
            HALVES,
        ),
        Format::Nvfp4 => (
            "let w = $n_quad(b + 4u + (j >> 1u)); let e = $n_half_word(b + (j >> 4u));
    let d = vec2<f32>($n_scale(e & 127u), $n_scale((e >> 8u) & 127u));
    return $n_Wide($n_pairs(w.xy), $n_pairs(w.zw), d, vec2<f32>());",
            RUN,
        ),
        Format::F4 => (
            "let w = $n_quad(b + 8u + (j >> 1u)); let e = $n_half_word(b + 4u + (j >> 4u));
    let d = bitcast<f32>($n_word(b)) * vec2<f32>($n_scale(e & 127u), $n_scale((e >> 8u) & 127u));
    return $n_Wide($n_pairs(w.xy), $n_pairs(w.zw), d, vec2<f32>());",
            RUN,
        ),
        Format::I4 => (
            "let w = $n_quad(b + 8u + (j >> 1u)); let d = bitcast<vec2<f32>>($n_pair(b));
    return $n_Wide($n_low(w, 0u), $n_low(w, 4u), d.xx, d.yy);",
            "vec2<u32>(j >> 1u, 32u + (j >> 1u))",
        ),
        Format::Q4K => (
            "let w = $n_quad(b + 16u + (j >> 1u)); let head = $n_quad(b);
    let g = (j >> 5u) & 6u; let d0 = $n_six(head, g); let d1 = $n_six(head, g | 1u);
    return $n_Wide($n_low(w, 0u), $n_low(w, 4u), vec2<f32>(d0.x, d1.x), vec2<f32>(d0.y, d1.y));",
            SIXTIES,
        ),
        Format::Q5K => (
            "let w = $n_quad(b + 48u + (j >> 1u)); let v = $n_quad(b + 16u + ((j & 32u) >> 1u)); let head = $n_quad(b);
    let g = (j >> 5u) & 6u; let d0 = $n_six(head, g); let d1 = $n_six(head, g | 1u); let m = v >> vec4<u32>(g);
    let h0 = (m & vec4<u32>(0x01010101u)) << vec4<u32>(4u); let h1 = (m & vec4<u32>(0x02020202u)) << vec4<u32>(3u);
    return $n_Wide($n_low(w, 0u) | h0, $n_low(w, 4u) | h1, vec2<f32>(d0.x, d1.x), vec2<f32>(d0.y, d1.y));",
            SIXTIES,
        ),
        Format::Q6K => (
            "let l = (j & 32u) >> 1u; let at = b + 192u + ((j >> 4u) & 8u) + ((j >> 5u) & 3u);
    let w = $n_quad(b + ((j >> 1u) & 96u) + l); let v = $n_quad(b + 128u + ((j >> 2u) & 32u) + l);
    let scales = vec2<u32>($n_byte(at), $n_byte(at + 4u));
    let m = v >> vec4<u32>((j >> 5u) & 2u);
    let h0 = (m & vec4<u32>(0x03030303u)) << vec4<u32>(4u); let h1 = m & vec4<u32>(0x30303030u);
    let d = $n_half(b + 208u) * vec2<f32>(vec2<i32>(scales << vec2<u32>(24u)) >> vec2<u32>(24u));
    return $n_Wide($n_low(w, 0u) | h0, $n_low(w, 4u) | h1, d, 32.0 * d);",
            "vec2<u32>(0u, 64u) + ((j & 128u) | ((j & 64u) >> 1u) | ((j & 32u) >> 1u))",
        ),
    };
    Some(found)
}

/// Whether rows of floats are multiplied 32 elements at a time: of codes of less than 8 bits.
pub(crate) fn is_wide(format: Format) -> bool {
    !matches!(format, Format::Q8_0 | Format::I8) && wide(format).is_some()
}

/// Whether the codes are integers of 8 bits once they are read, so that products can be those of integers.
pub(crate) fn has_dots(format: Format) -> bool {
    wide(format).is_some()
}

/// Spreads four bits to the fifth bits of four bytes.
const FIFTH: &str = "
fn $n_fifth(h: u32) -> u32 {
    return ((h & 1u) << 4u) | ((h & 2u) << 11u) | ((h & 4u) << 18u) | ((h & 8u) << 25u);
}
fn $n_fifth4(h: u32) -> vec4<u32> {
    return vec4<u32>($n_fifth(h), $n_fifth(h >> 4u), $n_fifth(h >> 8u), $n_fifth(h >> 12u));
}
";

/// Four numbers of 8 bits. The pattern of a NaN counts as 480.
const E4M3: &str = "
fn $n_e4m3(w: u32) -> vec4<f32> {
    let c = vec4<u32>(w & 255u, (w >> 8u) & 255u, (w >> 16u) & 255u, w >> 24u);
    let m = c & vec4<u32>(127u);
    let large = bitcast<vec4<f32>>((m << vec4<u32>(20u)) + vec4<u32>(0x3c000000u));
    let v = select(large, vec4<f32>(m) / 512.0, m < vec4<u32>(8u));
    return select(v, -v, c > vec4<u32>(127u));
}
";

/// Whether blocks are made of vectors of four words.
pub(crate) fn is_vectors(format: Format) -> bool {
    format.block().is_some_and(|(_, bytes)| bytes % 16 == 0)
}

/// Writes the functions that read the view `name` in binding `b`, which is of vectors if `vectors`.
pub(crate) fn accessors(name: &str, b: usize, format: Format, vectors: bool, out: &mut String) {
    let (n, bytes) = format.block().expect("a coded format");
    let table = match format {
        Format::Iq4Nl => Some([0x3f2d_1801, 0x766a_5d4f, 0xa699_8d81, 0xf1d9_c5b5u32]),
        Format::Mxfp4 | Format::Nvfp4 | Format::F4 => Some([0x8382_8180, 0x8c88_8684, 0x7d7e_7f80, 0x7478_7a7cu32]),
        _ => None,
    };
    let mut text = if vectors { VECTORS } else { WORDS }.to_owned();
    text += if bytes % 4 == 0 { ALIGNED } else { UNALIGNED };
    if bytes % 4 == 0 && !vectors {
        text += QUAD;
    }
    text += COMMON;
    if let Some(words) = table {
        let mut table = TABLE.to_owned();
        for (i, word) in words.iter().enumerate() {
            table = table.replace(&format!("${i}u"), &format!("{word}u"));
        }
        text += &table;
    }
    match format {
        Format::Q5_0 | Format::Q5_1 => text += FIFTH,
        Format::Q4K | Format::Q5K => text += SIXES,
        Format::F8 => text += E4M3,
        Format::Nvfp4 | Format::F4 => text += E4M3_SCALE,
        _ => {}
    }
    let place = format!("let b = P.$n_off + i / {n}u * {bytes}u; let j = i % {n}u;");
    let _ = write!(text, "fn $n_v8(i: u32) -> mat2x4<f32> {{\n    {place}\n    {}\n}}\n", body(format));
    if let Some((wide, runs)) = wide(format) {
        let _ = write!(
            text,
            "fn $n_wide(i: u32) -> $n_Wide {{\n    {place}\n    {wide}\n}}\n\
             fn $n_runs(i: u32) -> vec2<u32> {{ let j = i % {n}u; return i - j + {runs}; }}\n"
        );
    }
    out.push_str(&text.replace("$n", name).replace("$b", &b.to_string()));
}
