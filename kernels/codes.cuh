// Coded weights on the device: where the codes of 16 rows lie, and what they stand for. FORMAT is the format.
//
// Codes become operands of tensor cores without arithmetic: the bits of a code of up to 8 bits are those of a bf16 number, subnormal or
// just above, that is 2^-133 times the code, and those of an 8-bit or 4-bit float are a bf16 number with a smaller exponent. So operands
// are 2^-DOWN times what the codes stand for; the inputs of the product are multiplied by 2^UP, and its sums by what is left. Inputs whose
// magnitude is 2^63 or more become infinite.
//
// Layout: a matrix is tiles of 16 rows, a tile is units of UNIT elements of each row, in their order. codes_arrange.cu writes it; it
// has the bytes of the stored blocks, in the order in which a warp multiplies them. Lane 4 g + q holds rows g and g + 8, and of 32
// elements of a row 4 q to 4 q + 3 and 16 + 4 q to 16 + 4 q + 3: four pairs of neighbours. A unit is, in this order:
//   codes    4 bits: 16 bytes a lane for two groups of 32, a word per group and row; pair i is the nibbles i and 4 + i of the word,
//            of E2M1 in the order of `pairs_of_e2m1`. 8 bits: 16 bytes a lane and group, two words per row, each two pairs.
//   high     the fifth bit, a word a lane for two groups: bit 4 (2 r + group) + i, second elements 16 further (r: which row).
//            Fifth and sixth: a word a lane and group, field 2 (4 r + i).
//   scales   as `Scales` reads them.
// Rows that are missing in the last tile, and elements after the inner dimension, are zeros.

constexpr int Q4_0 = 1, Q4_1 = 2, Q5_0 = 3, Q5_1 = 4, Q8_0 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8, IQ4_NL = 9, MXFP4 = 10, NVFP4 = 11,
              F4 = 12, F8 = 13, I4 = 14, I8 = 15;

constexpr bool SIXES = FORMAT == Q4_K || FORMAT == Q5_K;              // scales and offsets of 6 bits
constexpr bool E2M1 = FORMAT == MXFP4 || FORMAT == NVFP4 || FORMAT == F4;
constexpr bool FLOATS = FORMAT == I4 || FORMAT == I8;                 // scales and offsets in f32
constexpr bool OFFSETS = SIXES || FLOATS || FORMAT == Q4_1 || FORMAT == Q5_1;
constexpr bool HALVES = FORMAT == Q6_K || FORMAT == NVFP4 || FORMAT == F4; // a scale per 16
constexpr int HIGH_BITS = FORMAT == Q6_K ? 2 : FORMAT == Q5_0 || FORMAT == Q5_1 || FORMAT == Q5_K ? 1 : 0;
constexpr bool BYTES = FORMAT == Q8_0 || FORMAT == I8 || FORMAT == F8; // codes of 8 bits
constexpr bool SIXTEENFOLD = FORMAT == Q4_0 || FORMAT == Q4_1 || FORMAT == Q4_K || FORMAT == I4; // operands of odd pairs are so
constexpr int DOWN = FORMAT == IQ4_NL ? 0 : FORMAT == F8 ? 120 : E2M1 ? 127 : 133;
constexpr int UP = DOWN ? 64 : 0;

// Elements and bytes of a stored block.
constexpr int BLOCK = SIXES || FORMAT == Q6_K ? 256 : FORMAT == F8 ? 128 : FORMAT == NVFP4 || FORMAT == F4 || FORMAT == I4 ? 64 : 32;
constexpr int BLOCK_BYTES = FORMAT == Q4_0 || FORMAT == IQ4_NL ? 18
                            : FORMAT == Q4_1                   ? 20
                            : FORMAT == Q5_0                   ? 22
                            : FORMAT == Q5_1                   ? 24
                            : FORMAT == Q8_0                   ? 34
                            : FORMAT == Q4_K                   ? 144
                            : FORMAT == Q5_K                   ? 176
                            : FORMAT == Q6_K                   ? 210
                            : FORMAT == MXFP4                  ? 17
                            : FORMAT == NVFP4                  ? 36
                            : FORMAT == F4 || FLOATS           ? 40
                                                               : 132;

constexpr int TILE = 16;                                              // rows
constexpr int UNIT = BLOCK < 64 ? 64 : BLOCK;
constexpr int UNIT_BYTES = TILE * (UNIT / BLOCK) * BLOCK_BYTES;
constexpr int PLANE_BYTES = TILE * UNIT / 2;
constexpr int HIGH_AT = (BYTES ? 2 : 1) * PLANE_BYTES;
constexpr int SCALES_AT = HIGH_AT + TILE * UNIT * HIGH_BITS / 8;
static_assert(UNIT_BYTES % 16 == 0, "units are copied 16 bytes at a time");
constexpr int SPAN = 256;                                             // elements of rows that a warp takes at a time: whole units
constexpr int SPAN_UNITS = SPAN / UNIT, SPAN_BYTES = SPAN_UNITS * UNIT_BYTES;
// Units of a span of rows of UNITS units.
template <int UNITS> DEV int units_of(int span) {
    return UNITS % SPAN_UNITS == 0 ? SPAN_UNITS : min(SPAN_UNITS, UNITS - span * SPAN_UNITS);
}

// What codes are more than what they stand for, and where their middle is.
constexpr int BIAS = FORMAT == Q4_0 ? 8 : FORMAT == Q5_0 ? 16 : FORMAT == Q6_K ? 32 : FORMAT == Q8_0 || FORMAT == I8 ? 128 : 0;
constexpr int MIDDLE = BYTES ? 128 : HIGH_BITS == 1 ? 16 : 8;
// Sums of x over the elements of a scale belong to the sums of codes.
constexpr bool SUMS_OF_X = BIAS != 0 || OFFSETS;
constexpr int SCALE_WIDTH = HALVES ? 16 : 32, GROUP_SCALES = 32 / SCALE_WIDTH; // elements of a scale; scales of a group of 32

constexpr float power_of_two_f32(int n) { return n == 0 ? 1.f : n > 0 ? 2.f * power_of_two_f32(n - 1) : 0.5f * power_of_two_f32(n + 1); }
// What sums of products are multiplied with, and the same of operands whose other factor is an element.
constexpr float OF_SUMS = power_of_two_f32(DOWN - UP);
// Two bf16 of 2^UP, and of what x is multiplied with where odd pairs have sixteenfold operands.
constexpr u32 X_EVEN = (127u + UP) << 7 | (127u + UP) << 23;
constexpr u32 X_ODD = SIXTEENFOLD ? (123u + UP) << 7 | (123u + UP) << 23 : X_EVEN;
constexpr u32 MINUS_ZERO = 0x80008000u;

// Four elements of x, the first of them a multiple of 4, for `multiply`.
DEV uint2 for_product(uint2 x) {
    if constexpr (UP == 0) return x;
    return make_uint2(fma_bf16x2(x.x, X_EVEN, MINUS_ZERO), fma_bf16x2(x.y, X_ODD, MINUS_ZERO));
}
DEV uint4 for_product(uint4 x) {
    uint2 a = for_product(make_uint2(x.x, x.y)), b = for_product(make_uint2(x.z, x.w));
    return make_uint4(a.x, a.y, b.x, b.y);
}

// Byte `i` of a word as a float.
DEV float byte_to_f32(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7540 | i)) - 8388608.f; }
// The same times a number of at most 12 bits, rounded once: `less` is 2^23 times it.
DEV float byte_times(u32 w, int i, float d, float less) {
    return __fmaf_rn(__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7540 | i)), d, -less);
}
DEV float half_to_f32(u32 w) {
    f16 h;
    h.bits = (u16)w;
    return to_f32(h);
}

// (a & mask) | set in one instruction; the compiler makes two.
DEV u32 and_or(u32 a, u32 mask, u32 set) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(set));
    return r;
}

// The four pairs of a word of nibbles.
DEV void pairs_of_nibbles(u32 w, u32 *pair) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (SIXTEENFOLD)
            pair[i] = w >> i / 2 * 8 & (i % 2 ? 0x00f000f0u : 0x000f000fu);
        else
            pair[i] = w >> 4 * i & 0x000f000fu;
    }
}

// Of numbers of 16 codes, the bytes that four nibbles of `index` choose; `upper`: 3210 with 4 added where a code is 8 or more.
DEV u32 chosen(uint4 table, u32 index, u32 upper) {
    return __byte_perm(__byte_perm(table.x, table.y, index), __byte_perm(table.z, table.w, index), upper);
}

// The four pairs of a word of codes of IQ4_NL: upper and lower bytes of bf16 numbers.
DEV void pairs_of_table(u32 w, u32 *pair) {
    constexpr u32 H[4] = {0xc2c2c2c2u, 0xc1c1c2c2u, 0x4241413fu, 0x42424242u}, L[4] = {0x82a6d0feu, 0x20b00c44u, 0x18c85080u, 0xe2b28a54u};
    uint4 high = make_uint4(H[0], H[1], H[2], H[3]), low = make_uint4(L[0], L[1], L[2], L[3]);
    u32 index = w & 0x77777777u, upper = (w >> 1 & 0x44444444u) | 0x32103210u;
    u32 h0 = chosen(high, index, upper), h1 = chosen(high, index >> 16, upper >> 16);
    u32 l0 = chosen(low, index, upper), l1 = chosen(low, index >> 16, upper >> 16);
    u32 lo[2] = {__byte_perm(l0, h0, 0x5140), __byte_perm(l0, h0, 0x7362)};  // first elements of pairs 0 and 1, 2 and 3
    u32 hi[2] = {__byte_perm(l1, h1, 0x5140), __byte_perm(l1, h1, 0x7362)};
#pragma unroll
    for (int i = 0; i < 4; i++) pair[i] = __byte_perm(lo[i / 2], hi[i / 2], i % 2 ? 0x7632 : 0x5410);
}

// The four pairs of a word of E2M1 codes, doubled: a code's bits end at bit 6. Halves of a word have sign and magnitude of pairs 0, 1 and
// 2 three bits after one another, so that one shift brings both into place; those of pair 3 are in what is left.
DEV void pairs_of_e2m1(u32 w, u32 *pair) {
    constexpr u32 PLACE = 0x81c081c0u;
    pair[0] = w & PLACE;
    pair[1] = w << 3 & PLACE;
    pair[2] = w << 6 & PLACE;
    pair[3] = and_or(w >> 6, 0x01800180u, and_or(w >> 4, 0x00400040u, w << 4 & 0x80008000u));
}

// Two pairs of codes of 8 bits. Those of E4M3 end at bit 4; the upper bytes of halves are the first pair.
DEV void pairs_of_bytes(u32 w, u32 *pair) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (FORMAT == F8) {
            u32 v = i ? w << 8 : w;
            pair[i] = and_or(v >> 4, 0x07f007f0u, v & 0x80008000u);
        } else {
            pair[i] = w >> 8 * i & 0x00ff00ffu;
        }
    }
}

// The codes of two groups of 32 as operands of tensor cores.
struct Codes {
    u32 pair[2][2][4]; // group, row, pair

    // Groups 2 sub and 2 sub + 1 of a unit.
    DEV Codes(const u8 *unit, int sub, int lane) {
        if constexpr (BYTES) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint4 w = reinterpret_cast<const uint4 *>(unit)[(2 * sub + j) * 32 + lane];
                pairs_of_bytes(w.x, pair[j][0]);
                pairs_of_bytes(w.y, pair[j][0] + 2);
                pairs_of_bytes(w.z, pair[j][1]);
                pairs_of_bytes(w.w, pair[j][1] + 2);
            }
            return;
        }
        uint4 w4 = reinterpret_cast<const uint4 *>(unit)[sub * 32 + lane];
        u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 *to = pair[c / 2][c % 2];
            if constexpr (FORMAT == IQ4_NL)
                pairs_of_table(w[c], to);
            else if constexpr (E2M1)
                pairs_of_e2m1(w[c], to);
            else
                pairs_of_nibbles(w[c], to);
        }
        if constexpr (HIGH_BITS == 1) {
            u32 h = reinterpret_cast<const u32 *>(unit + HIGH_AT)[lane * (UNIT / 64) + sub];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int at = 4 * (2 * r + j) + i;
                        u32 *to = pair[j][r] + i;
                        *to = and_or(at < 4 ? h << (4 - at) : h >> (at - 4), 0x00100010u, *to);
                    }
        }
        if constexpr (HIGH_BITS == 2) {
            uint2 h2 = reinterpret_cast<const uint2 *>(unit + HIGH_AT + sub / 2 * 512)[lane * 2 + sub % 2];
            u32 h[2] = {h2.x, h2.y};
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int at = 2 * (4 * r + i);
                        u32 *to = pair[j][r] + i;
                        *to = and_or(at < 4 ? h[j] << (4 - at) : h[j] >> (at - 4), 0x00300030u, *to);
                    }
        }
    }
};

// Scales and offsets of the rows g and g + 8 of a unit.
struct Scales {
    uint4 w[2];          // what is stored
    u32 sc[2][4];        // of Q4_K and Q5_K: scales of groups 0 to 3 and 4 to 7, offsets
    float d[2], dmin[2];

    DEV Scales(const u8 *unit, int g) {
        const u8 *at = unit + SCALES_AT;
        if constexpr (SIXES) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 h = reinterpret_cast<const uint4 *>(at)[g + 8 * r];
                d[r] = half_to_f32(h.x);
                dmin[r] = half_to_f32(h.x >> 16);
                sc[r][0] = h.y & 0x3f3f3f3fu;
                sc[r][1] = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
                sc[r][2] = h.z & 0x3f3f3f3fu;
                sc[r][3] = (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
            }
        } else if constexpr (FORMAT == Q6_K) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                w[r] = reinterpret_cast<const uint4 *>(at)[g + 8 * r];
                d[r] = to_f32(reinterpret_cast<const f16 *>(at + 256)[g + 8 * r]);
            }
        } else if constexpr (FLOATS) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if constexpr (FORMAT == I4) {
                    float2 f = reinterpret_cast<const float2 *>(at)[g + 8 * r];
                    d[r] = f.x;
                    dmin[r] = f.y;
                } else {
                    w[r] = reinterpret_cast<const uint4 *>(at)[g + 8 * r]; // of two groups
                }
            }
        } else if constexpr (OFFSETS) {
            w[0] = reinterpret_cast<const uint4 *>(at)[g];
        } else if constexpr (FORMAT == MXFP4) {
            w[0].x = reinterpret_cast<const u32 *>(at)[g];
        } else {
            // Halves, a byte for 16 elements, or for F8 the two floats.
            uint2 h = reinterpret_cast<const uint2 *>(at)[g];
            w[0].x = h.x;
            w[0].y = h.y;
            if constexpr (FORMAT == F4) {
                float2 f = reinterpret_cast<const float2 *>(at + 64)[g];
                d[0] = f.x;
                d[1] = f.y;
            }
        }
    }

    // Of 16 elements of a group.
    DEV float scale(int group, int r, int half) const {
        if constexpr (SIXES) return byte_times(sc[r][group / 4], group % 4, d[r], 8388608.f * d[r]);
        if constexpr (FORMAT == Q6_K) {
            int i = 2 * group + half;
            u32 words[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
            return __fmul_rn(d[r], byte_to_f32(words[i / 4] ^ 0x80808080u, i % 4) - 128.f);
        }
        if constexpr (FORMAT == I4) return d[r];
        if constexpr (FORMAT == I8) return __uint_as_float(group % 2 ? w[r].z : w[r].x);
        int c = 2 * (group % 2) + r;
        u32 words[4] = {w[0].x, w[0].y, w[0].z, w[0].w};
        if constexpr (OFFSETS) return half_to_f32(words[c]);
        if constexpr (FORMAT == F8) return __uint_as_float(words[r]);
        if constexpr (FORMAT == MXFP4) {
            u32 e = w[0].x >> 8 * c & 255;
            return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        }
        if constexpr (FORMAT == NVFP4 || FORMAT == F4) {
            int up = 20 - 16 * (c % 2) - 8 * half; // of the byte, to exponent and mantissa of a float
            u32 e = (up < 0 ? words[c / 2] >> -up : words[c / 2] << up) & 127u << 20;
            float v = __uint_as_float(e) * __uint_as_float((127u + 119u) << 23);
            return FORMAT == F4 ? __fmul_rn(d[r], v) : v;
        }
        return half_to_f32(words[c / 2] >> 16 * (c % 2));
    }

    DEV float offset(int group, int r) const {
        if constexpr (SIXES) return byte_times(sc[r][2 + group / 4], group % 4, dmin[r], 8388608.f * dmin[r]);
        if constexpr (FORMAT == I4) return dmin[r];
        if constexpr (FORMAT == I8) return __uint_as_float(group % 2 ? w[r].w : w[r].y);
        if constexpr (FORMAT == Q4_1 || FORMAT == Q5_1) {
            u32 words[4] = {w[0].x, w[0].y, w[0].z, w[0].w};
            return -half_to_f32(words[2 * (group % 2) + r] >> 16);
        }
        return 0.f;
    }
};

// Operands that sum x, or -BIAS times it where codes have no offset, of even and of odd pairs.
constexpr u32 FACTOR = OFFSETS ? 0x00010001u : 0x80008000u | BIAS | BIAS << 16;
constexpr u32 ODD_FACTOR = !SIXTEENFOLD ? FACTOR : OFFSETS ? 0x00100010u : 0x80008000u | BIAS << 4 | BIAS << 20;

// As mma_bf16, from `c` to `d`. Not volatile: the compiler mixes the products of several units.
DEV void product(float *d, const u32 *a, uint2 b, const float *c) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The operands of a half of 32 elements of two rows.
DEV void operands(const Codes &codes, int j, int half, u32 *a) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = codes.pair[j][i % 2][2 * half + i / 2];
}

// Adds the products of both halves of 32 elements with what `a` gives: to one sum, or to one for each scale.
template <class A> DEV void products_of_halves(float (*d)[4], const uint2 *b, A &&a) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 w[4];
        a(half, w);
        float *to = d[half * GROUP_SCALES / 2];
        product(to, w, b[half], to);
    }
}

// -BIAS times the sums of x, or those sums where codes have offsets.
DEV void products_of_factor(float (*d)[4], const uint2 *b) {
    products_of_halves(d, b, [](int, u32 *a) { a[0] = a[1] = FACTOR, a[2] = a[3] = ODD_FACTOR; });
}

// Adds the products of two groups of 32 elements with up to 8 rows of x. b: of each group, the lane's elements of x in both halves, as
// `for_product` makes them. KNOWN: `known` has the sums of x, times 2^(UP - DOWN), of the elements of each scale.
template <bool KNOWN = false>
DEV void multiply(const Codes &codes, const Scales &scales, int sub, const uint2 (*b)[2], float (*total)[2],
                  const float (*known)[2] = nullptr) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        // Sums of x: times -BIAS, sums of codes begin with them; with an offset, they are multiplied with that and the bias.
        float sums[GROUP_SCALES][4] = {}, d[GROUP_SCALES][4] = {};
        if constexpr (SUMS_OF_X && KNOWN) {
#pragma unroll
            for (int i = 0; i < GROUP_SCALES * 4; i++)
                sums[i / 4][i % 4] = known[j * GROUP_SCALES + i / 4][i % 2] * (OFFSETS ? 1.f : -BIAS);
        } else if constexpr (SUMS_OF_X) {
            products_of_factor(sums, b[j]);
        }
        if constexpr (SUMS_OF_X && !OFFSETS) {
#pragma unroll
            for (int i = 0; i < GROUP_SCALES * 4; i++) d[i / 4][i % 4] = sums[i / 4][i % 4];
        }
        products_of_halves(d, b[j], [&](int half, u32 *a) { operands(codes, j, half, a); });
        int group = 2 * sub + j;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int p = 0; p < GROUP_SCALES; p++) {
                float scale = scales.scale(group, r, p), less = OFFSETS ? -__fmaf_rn(scale, BIAS, scales.offset(group, r)) : 0.f;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    total[r][c] = __fmaf_rn(scale, d[p][2 * r + c], total[r][c]);
                    if constexpr (OFFSETS) total[r][c] = __fmaf_rn(less, sums[p][2 * r + c], total[r][c]);
                }
            }
        }
    }
}

// Scales and offsets of two groups of 32 elements of the rows g and g + 8 of a span: 2 q and 2 q + 1.
struct PairScales {
    float scale[2][2][GROUP_SCALES], offset[2][2]; // group, row

    DEV PairScales(const u8 *span, int g, int q) {
        if constexpr (SIXES) {
            // The fields of `Scales`, of the lane's groups only: bits that are not in the last word, and those that are.
            u32 in_first = q < 2 ? 0x3f3fu : 0x3030u, in_last = q < 2 ? 0 : 0x0f0fu;
            int down = 16 * (q % 2), down_first = down + (q < 2 ? 0 : 2);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 h = reinterpret_cast<const uint4 *>(span + SCALES_AT)[g + 8 * r];
                float d = half_to_f32(h.x), dmin = half_to_f32(h.x >> 16);
                u32 sc = and_or(h.y >> down_first, in_first, h.w >> down & in_last);
                u32 of = and_or(h.z >> down_first, in_first, h.w >> (down + 4) & in_last);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    scale[j][r][0] = byte_times(sc, j, d, 8388608.f * d);
                    offset[j][r] = byte_times(of, j, dmin, 8388608.f * dmin);
                }
            }
        } else if constexpr (FORMAT == Q6_K) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u32 w = reinterpret_cast<const u32 *>(span + SCALES_AT)[4 * (g + 8 * r) + q] ^ 0x80808080u;
                float d = to_f32(reinterpret_cast<const f16 *>(span + SCALES_AT + 256)[g + 8 * r]);
#pragma unroll
                for (int i = 0; i < 4; i++) scale[i / 2][r][i % 2] = __fmul_rn(d, byte_to_f32(w, i) - 128.f);
            }
        } else {
            Scales of(span + q * 64 / UNIT * UNIT_BYTES, g);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int p = 0; p < GROUP_SCALES; p++) scale[i / 2][i % 2][p] = of.scale(i / 2, i % 2, p);
                offset[i / 2][i % 2] = of.offset(i / 2, i % 2);
            }
        }
    }
};

// Puts eight elements of a row of x, from element `i` on, where `OneRow` reads them: those of a lane next to one another.
DEV void put_in_row(bf16 *row, int i, uint4 v) {
    auto place = [](int i) { return i / 32 * 32 + i / 4 % 4 * 8 + i / 16 % 2 * 4; };
    *reinterpret_cast<uint2 *>(row + place(i)) = make_uint2(v.x, v.y);
    *reinterpret_cast<uint2 *>(row + place(i + 4)) = make_uint2(v.z, v.w);
}

// The products of one row of x with spans of a tile. The columns of the operand are the 8 groups of a span, so that all its scales are
// those of different lanes: 4 g + q has the sums of the groups 2 q and 2 q + 1.
struct OneRow {
    float total[2] = {};

    // Adds those of a span of `units` units. `x`: its elements as `for_product` makes them, where `put_in_row` puts them.
    DEV void add(const u8 *span, int units, const bf16 *x, int lane) {
        int g = lane / 4, q = lane % 4;
        uint4 v = reinterpret_cast<const uint4 *>(x)[lane];
        uint2 b[2] = {make_uint2(v.x, v.y), make_uint2(v.z, v.w)};
        float sums[GROUP_SCALES][4] = {}, mine[2][2][GROUP_SCALES];
        if constexpr (SUMS_OF_X) products_of_factor(sums, b);
#pragma unroll
        for (int at = 0; at < 4; at++) {
            Codes codes(span + at * 64 / UNIT * UNIT_BYTES, at % (UNIT / 64), lane);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float d[GROUP_SCALES][4] = {};
                products_of_halves(d, b, [&](int half, u32 *a) { operands(codes, j, half, a); });
#pragma unroll
                for (int i = 0; i < 2 * GROUP_SCALES; i++) {
                    float &to = mine[j][i % 2][i / 2];
                    to = at == 0 || q == at ? d[i / 2][2 * (i % 2) + j] : to;
                }
            }
        }
        // A unit that is not there has no scales.
        if (q * 64 / UNIT >= units) return;
        PairScales scales(span, g, q);
#pragma unroll
        for (int i = 0; i < 4 * GROUP_SCALES; i++) {
            int j = i % 2, r = i / 2 % 2, p = i / 4;
            float scale = scales.scale[j][r][p], sum = mine[j][r][p];
            if constexpr (SUMS_OF_X && !OFFSETS) sum += sums[p][j];
            total[r] = __fmaf_rn(scale, sum, total[r]);
            if constexpr (OFFSETS) total[r] = __fmaf_rn(-__fmaf_rn(scale, BIAS, scales.offset[j][r]), sums[p][j], total[r]);
        }
    }

    // Those of the rows g and g + 8, in all lanes, and begins again.
    DEV void take(float *sum) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float v = total[r] + __shfl_xor_sync(0xffffffffu, total[r], 1);
            sum[r] = v + __shfl_xor_sync(0xffffffffu, v, 2);
            total[r] = 0.f;
        }
    }
};

// What half `h` of pair `i` of operands stands for, without its scale.
DEV float value_of(u32 pair, int i, int h) {
    if constexpr (FORMAT == IQ4_NL || FORMAT == F8 || E2M1) return (h ? bf16_hi(pair) : bf16_lo(pair)) * power_of_two_f32(DOWN);
    // The bits of a float of 2^23 and the code, or of 2^19 where the code is sixteenfold.
    bool more = SIXTEENFOLD && i % 2;
    u32 bits = (h ? pair >> 16 : pair & 0xffffu) | (more ? 0x49000000u : 0x4b000000u);
    return __uint_as_float(bits) - ((more ? 524288.f : 8388608.f) + BIAS);
}

// The elements of row g + 8 r that a lane holds of group 2 sub + j: 4 q to 4 q + 3, and those 16 further. Rounded as the CPU does.
DEV void elements(const Codes &codes, const Scales &scales, int sub, int j, int r, float *v) {
    float offset = scales.offset(2 * sub + j, r);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float scale = scales.scale(2 * sub + j, r, i / 4), value = value_of(codes.pair[j][r][i / 2], i / 2, i % 2);
        v[i] = __fsub_rn(__fmul_rn(scale, value), offset);
    }
}

// What `rounded` takes of a group of a row, as two bf16: the factors of its halves, or a factor and what is added to the products, which is
// that of the middle of the codes for the rounded scale.
DEV u32 factors(const PairScales &of, int j, int r) {
    constexpr float SMALL = power_of_two_f32(-UP), TO_X = power_of_two_f32(-DOWN);
    float first = of.scale[j][r][0] * OF_SUMS;
    u32 w = pack_bf16(first, of.scale[j][r][GROUP_SCALES - 1] * OF_SUMS);
    if constexpr (OFFSETS) {
        float factor = bf16_lo(w), offset = -SMALL * of.offset[j][r] - BIAS * TO_X * first;
        w = pack_bf16(factor, __fmaf_rn(first - factor, MIDDLE * TO_X, offset));
    }
    return w;
}

// 2^-UP times the two elements that a pair of a group of row g + 8 r stands for, in bf16 arithmetic.
DEV u32 rounded(const Codes &codes, u32 factors, int j, int r, int pair) {
    u32 factor = factors, less = MINUS_ZERO;
    if constexpr (HALVES || OFFSETS) factor = __byte_perm(factors, 0, HALVES && pair >= 2 ? 0x3232 : 0x1010);
    if constexpr (OFFSETS)
        less = __byte_perm(factors, 0, 0x3232);
    else if constexpr (BIAS != 0)
        less = fma_bf16x2(factor, FACTOR, MINUS_ZERO);
    if (SIXTEENFOLD && pair % 2) factor = fma_bf16x2(factor, 0x3d803d80u, MINUS_ZERO);
    return fma_bf16x2(codes.pair[j][r][pair], factor, less);
}
