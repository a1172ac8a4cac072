//! WGSL that decodes coded weights where it reads them: `w_v8(i)` and the other accessors of a view, `i` counted in elements.
//!
//! Blocks keep the layout of the file. Where their size is not a multiple of four bytes, words are put together out of two. Eight
//! elements from a multiple of eight on always share a scale, an offset and a run of bytes. Nothing but u32 and f32 is needed.

use std::fmt::Write;

use selkie_core::format::Format;

/// Words at multiples of four bytes, and eight bytes from there on.
const ALIGNED: &str = "
fn $n_word(at: u32) -> u32 { return b$b[at >> 2u]; }
fn $n_pair(at: u32) -> vec2<u32> { return vec2<u32>(b$b[at >> 2u], b$b[(at >> 2u) + 1u]); }
";

/// The same at any byte.
const UNALIGNED: &str = "
fn $n_word(at: u32) -> u32 {
    let j = at >> 2u;
    let s = (at & 3u) * 8u;
    if s == 0u { return b$b[j]; }
    return (b$b[j] >> s) | (b$b[j + 1u] << (32u - s));
}
fn $n_pair(at: u32) -> vec2<u32> {
    let j = at >> 2u;
    let s = (at & 3u) * 8u;
    let w = vec2<u32>(b$b[j], b$b[j + 1u]);
    if s == 0u { return w; }
    return (w >> vec2<u32>(s)) | (vec2<u32>(w.y, b$b[j + 2u]) << vec2<u32>(32u - s));
}
";

/// Bytes, halves at even bytes, the codes of four bytes as floats, and the accessors that are made of `v8`.
const COMMON: &str = "
fn $n_byte(at: u32) -> u32 { return (b$b[at >> 2u] >> ((at & 3u) * 8u)) & 255u; }
fn $n_half(at: u32) -> f32 { return unpack2x16float(b$b[at >> 2u] >> ((at & 2u) * 8u)).x; }
fn $n_codes(c: u32) -> vec4<f32> {
    return vec4<f32>(f32(c & 255u), f32((c >> 8u) & 255u), f32((c >> 16u) & 255u), f32(c >> 24u));
}
alias $n_raw = u32;
fn $n_raw8(i: u32) -> $n_raw { return i; }
fn $n_unpack(i: $n_raw) -> mat2x4<f32> { return $n_v8(i); }
fn $n_v4(i: u32) -> vec4<f32> {
    let w = $n_v8(i & ~7u);
    return select(w[0], w[1], (i & 4u) != 0u);
}
";

/// Integers of codes, 128 added, a byte each.
const TABLE: &str = "
fn $n_looked(c: u32) -> f32 {
    let high = (c & 4u) != 0u;
    let w = select(select($0u, $1u, high), select($2u, $3u, high), (c & 8u) != 0u);
    return f32((w >> ((c & 3u) * 8u)) & 255u) - 128.0;
}
fn $n_table(c: u32) -> vec4<f32> {
    return vec4<f32>($n_looked(c & 15u), $n_looked((c >> 8u) & 15u), $n_looked((c >> 16u) & 15u), $n_looked((c >> 24u) & 15u));
}
";

/// Scale and offset of 32 elements of a block of 256, which begins with four words: two halves, and 6 bits of eight scales and
/// eight offsets.
const SIXES: &str = "
fn $n_six(b: u32, g: u32) -> vec2<f32> {
    let at = b >> 2u;
    let both = unpack2x16float(b$b[at]);
    let s = (g & 3u) * 8u;
    let low = vec2<u32>(b$b[at + 1u], b$b[at + 2u]) >> vec2<u32>(s);
    let high = b$b[at + 3u] >> s;
    let late = (vec2<u32>(high, high >> 4u) & vec2<u32>(15u)) | ((low >> vec2<u32>(2u)) & vec2<u32>(48u));
    return both * vec2<f32>(select(low & vec2<u32>(63u), late, g >= 4u));
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
            "let g = j >> 4u; let q = b + 4u + 8u * g; let s = (j & 8u) >> 1u; let e = $n_byte(b + g) & 127u;
    let small = f32(e & 7u) * bitcast<f32>((127u - 10u) << 23u);
    let large = (1.0 + f32(e & 7u) / 8.0) * bitcast<f32>((119u + (e >> 3u)) << 23u);
    let d = select(select(large, small, e < 8u), 0.0, e == 127u);
    let w = $n_pair(q);
    return mat2x4<f32>(d * $n_table(w.x >> s), d * $n_table(w.y >> s));"
        }
        Format::F4 => {
            "let g = j >> 4u; let q = b + 8u + 8u * g; let s = (j & 8u) >> 1u; let e = $n_byte(b + 4u + g) & 127u;
    let small = f32(e & 7u) * bitcast<f32>((127u - 10u) << 23u);
    let large = (1.0 + f32(e & 7u) / 8.0) * bitcast<f32>((119u + (e >> 3u)) << 23u);
    let d = bitcast<f32>($n_word(b)) * select(select(large, small, e < 8u), 0.0, e == 127u);
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
            "let g = j >> 5u; let q = b + 16u + 32u * (g >> 1u) + (j & 31u); let s = (g & 1u) * 4u; let d = $n_six(b, g);
    let w = $n_pair(q);
    return mat2x4<f32>(d.x * $n_codes((w.x >> s) & 0x0f0f0f0fu) - d.y,
                       d.x * $n_codes((w.y >> s) & 0x0f0f0f0fu) - d.y);"
        }
        Format::Q5K => {
            "let g = j >> 5u; let l = j & 31u; let q = b + 48u + 32u * (g >> 1u) + l; let s = (g & 1u) * 4u; let d = $n_six(b, g);
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

/// Spreads four bits to the fifth bits of four bytes.
const FIFTH: &str = "
fn $n_fifth(h: u32) -> u32 {
    return ((h & 1u) << 4u) | ((h & 2u) << 11u) | ((h & 4u) << 18u) | ((h & 8u) << 25u);
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

/// Writes the functions that read the view `name` in binding `b`.
pub(crate) fn accessors(name: &str, b: usize, format: Format, out: &mut String) {
    let (n, bytes) = format.block().expect("a coded format");
    let table = match format {
        Format::Iq4Nl => Some([0x3f2d_1801, 0x766a_5d4f, 0xa699_8d81, 0xf1d9_c5b5u32]),
        Format::Mxfp4 | Format::Nvfp4 | Format::F4 => Some([0x8382_8180, 0x8c88_8684, 0x7d7e_7f80, 0x7478_7a7cu32]),
        _ => None,
    };
    let mut text = if bytes % 4 == 0 { ALIGNED } else { UNALIGNED }.to_owned() + COMMON;
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
        _ => {}
    }
    let _ = write!(
        text,
        "fn $n_v8(i: u32) -> mat2x4<f32> {{\n    let b = P.$n_off + i / {n}u * {bytes}u; let j = i % {n}u;\n    {}\n}}\n",
        body(format)
    );
    out.push_str(&text.replace("$n", name).replace("$b", &b.to_string()));
}
