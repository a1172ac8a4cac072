// Stored blocks of coded rows to the layout of codes.cuh. A warp writes a unit. Grid (units of all tiles / warps).
// FORMAT, UNITS (units of a row).

#include "codes.cuh"

constexpr int WARPS = 8;

// The code of element `e` of a stored block; E4M3 and signed codes as bytes, those of Q8_0 and I8 with 128 added.
DEV u32 stored_code(const u8 *b, int e) {
    if constexpr (FORMAT == Q8_0) return b[2 + e] ^ 0x80;
    if constexpr (FORMAT == I8) return b[8 + e] ^ 0x80;
    if constexpr (FORMAT == I4) return b[8 + e % 32] >> e / 32 * 4 & 15;
    if constexpr (FORMAT == F8) return b[4 + e];
    if constexpr (FORMAT == NVFP4 || FORMAT == F4) {
        int i = (FORMAT == F4 ? 8 : 4) + e / 16 * 8 + e % 8;
        return b[i] >> e % 16 / 8 * 4 & 15;
    }
    if constexpr (SIXES) {
        u32 low = b[(FORMAT == Q4_K ? 16 : 48) + e / 64 * 32 + e % 32] >> e / 32 % 2 * 4 & 15;
        return FORMAT == Q4_K ? low : low | (b[16 + e % 32] >> e / 32 & 1) << 4;
    }
    if constexpr (FORMAT == Q6_K) {
        int h = e / 128, part = e / 32 % 4, i = e % 32;
        return (b[64 * h + 32 * (part % 2) + i] >> part / 2 * 4 & 15) | (b[128 + 32 * h + i] >> 2 * part & 3) << 4;
    }
    constexpr int AT = BLOCK_BYTES - 16;
    u32 low = b[AT + e % 16] >> e / 16 * 4 & 15;
    return HIGH_BITS == 0 ? low : low | (b[AT - 4 + e / 8] >> e % 8 & 1) << 4;
}

// The bits of a half of a word of E2M1 codes that are those of the code of pair `i`.
DEV u32 place_e2m1(u32 code, int i) {
    u32 sign = code >> 3, magnitude = code & 7;
    if (i < 3) return sign << (15 - 3 * i) | magnitude << (6 - 3 * i);
    return (magnitude >> 1) << 13 | sign << 11 | (magnitude & 1) << 10;
}

// Copies the `n` bytes of a row's scales.
DEV void copy_bytes(u8 *to, const u8 *from, int n) {
    for (int i = 0; i < n; i++) to[i] = from ? from[i] : 0;
}
// The same of E4M3, of which NaN counts as zero.
DEV void copy_eights(u8 *to, const u8 *from, int n) {
    for (int i = 0; i < n; i++) to[i] = from && (from[i] & 127) != 127 ? from[i] : 0;
}

// The scales of a row, of which the first block in the unit is `b`; null for none.
DEV void put_scales(u8 *at, const u8 *b, const u8 *second, int row) {
    int g = row % 8, r = row / 8;
    if constexpr (SIXES) return copy_bytes(at + 16 * row, b, 16);
    if constexpr (FORMAT == Q6_K) {
        copy_bytes(at + 16 * row, b ? b + 192 : b, 16);
        return copy_bytes(at + 256 + 2 * row, b ? b + 208 : b, 2);
    }
    if constexpr (FORMAT == I4) return copy_bytes(at + 8 * row, b, 8);
    if constexpr (FORMAT == I8) {
        copy_bytes(at + 16 * row, b, 8);
        return copy_bytes(at + 16 * row + 8, second, 8);
    }
    if constexpr (FORMAT == F8) return copy_bytes(at + 8 * g + 4 * r, b, 4);
    if constexpr (FORMAT == NVFP4 || FORMAT == F4) {
        const u8 *d = FORMAT == F4 && b ? b + 4 : b;
        copy_eights(at + 8 * g + 2 * r, d, 2);
        copy_eights(at + 8 * g + 4 + 2 * r, d ? d + 2 : d, 2);
        if constexpr (FORMAT == F4) copy_bytes(at + 64 + 8 * g + 4 * r, b, 4);
        return;
    }
    constexpr int SIZE = FORMAT == MXFP4 ? 1 : OFFSETS ? 4 : 2;
    copy_bytes(at + SIZE * (4 * g + r), b, SIZE);
    copy_bytes(at + SIZE * (4 * g + 2 + r), second, SIZE);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, tile = index / UNITS;
    if (tile * TILE >= n) return;
    int unit = index % UNITS, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    u8 *to = out + index * UNIT_BYTES;
    // Block `i` of the unit in a row of the tile; null past the last row or the inner dimension.
    auto block = [&](int row, int i) -> const u8 * {
        i64 at = (i64)(unit * (UNIT / BLOCK) + i) * BLOCK_BYTES;
        return tile * TILE + row < n && at < row_bytes ? stored + (tile * TILE + row) * row_bytes + at : nullptr;
    };
    for (int group = 0; group < UNIT / 32; group++) {
        u32 low[2][2] = {}, high[2] = {};
        for (int r = 0; r < 2; r++) {
            const u8 *b = block(g + 8 * r, group * 32 / BLOCK);
            if (!b) continue;
            for (int i = 0; i < 8; i++) {
                int pair = i / 2, second = i % 2;
                u32 code = stored_code(b, group * 32 % BLOCK + i / 4 * 16 + 4 * q + i % 4);
                if constexpr (BYTES) {
                    low[r][pair / 2] |= code << (8 * (FORMAT == F8 ? 1 - pair % 2 : pair % 2) + 16 * second);
                    continue;
                }
                u32 nibble = E2M1 ? place_e2m1(code, pair) : (code & 15) << 4 * pair;
                low[0][r] |= nibble << 16 * second;
                if constexpr (HIGH_BITS == 1) high[0] |= (code >> 4) << (4 * (2 * r + group % 2) + pair + 16 * second);
                if constexpr (HIGH_BITS == 2) high[0] |= (code >> 4) << (2 * (4 * r + pair) + 16 * second);
            }
        }
        if constexpr (BYTES) {
            reinterpret_cast<uint4 *>(to)[group * 32 + lane] = make_uint4(low[0][0], low[0][1], low[1][0], low[1][1]);
            continue;
        }
        reinterpret_cast<uint2 *>(to)[group / 2 * 64 + lane * 2 + group % 2] = make_uint2(low[0][0], low[0][1]);
        if constexpr (HIGH_BITS == 1) {
            u32 *word = reinterpret_cast<u32 *>(to + HIGH_AT) + lane * (UNIT / 64) + group / 2;
            *word = group % 2 ? *word | high[0] : high[0];
        }
        if constexpr (HIGH_BITS == 2) reinterpret_cast<u32 *>(to + HIGH_AT)[group / 4 * 128 + lane * 4 + group % 4] = high[0];
    }
    if (lane < TILE) put_scales(to + SCALES_AT, block(lane, 0), UNIT > BLOCK ? block(lane, 1) : nullptr, lane);
}
