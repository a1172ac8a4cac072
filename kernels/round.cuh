// Activations as 8-bit floats with a power of two per 128 columns; see round_eight in core/src/format.rs.

// Of 128 columns, the largest bits of which are `most` but for their sign.
struct EightScale {
    float scale, inverse;
    DEV EightScale(u32 most) {
        // The exponent is one larger where the mantissa exceeds that of 448.
        u32 exponent = min(max((most + 0x1fffffu) >> 23, 35u) - 8u, 247u);
        scale = most < 0x7f800000u ? __uint_as_float(exponent << 23) : __uint_as_float(0x7fc00000u);
        inverse = __uint_as_float((254u - exponent) << 23);
    }
};

// The code of a number of at most 448 in magnitude, without its sign.
DEV u32 eight_code(float y) {
    u32 bits = __float_as_uint(y) & 0x7fffffffu;
    if (bits < 121u << 23) return __float2uint_rn(fabsf(y) * 512.f);
    return ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
}

// What the code of `y` stands for.
DEV float eight_value(float y) {
    u32 code = eight_code(y);
    float v = code < 8 ? (float)code * 0x1p-9f : __uint_as_float((code << 20) + (120u << 23));
    return copysignf(v, y);
}

// The largest of what neighbouring 128 / N lanes have, which have N columns each.
template <int N, class F> DEV u32 largest_of_128(u32 x, F &&larger) {
    constexpr int LANES = 128 / N;
    u32 mask = LANES == 32 ? 0xffffffffu : ((1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) x = larger(x, __shfl_xor_sync(mask, x, d));
    return x;
}

// The scale of 128 columns, of which a lane has N.
template <int N> DEV EightScale eight_scale(const float *x) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    return EightScale(largest_of_128<N>(most, [](u32 a, u32 b) { return max(a, b); }));
}

// Rounds N of 128 columns in place, pairs of bf16 numbers; neighbouring lanes have the others. A number is added that leaves four bits
// of each, or a multiple of 2^-9 of the scale, and taken off again.
template <int N> DEV void round_pairs(u32 *pair) {
    constexpr u32 ONE = 0x3f803f80u, SIGNS = 0x80008000u;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) largest = __vmaxu2(largest, pair[i] & ~SIGNS);
    largest = largest_of_128<N>(largest, [](u32 a, u32 b) { return __vmaxu2(a, b); });
    u32 most = max(largest << 16, largest & 0xffff0000u);
    EightScale s(most);
    if (most < 0x7c000000u) {
        // The exponent of the smallest number of four bits, and from that of a number to that of 24 times its power of two.
        u32 least = (__float_as_uint(s.scale) >> 16) - (6 << 7), leasts = least | least << 16;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            u32 x = pair[i], far = __vmaxu2(x & 0x7f807f80u, leasts) + 0x02400240u;
            u32 r = fma_bf16x2(fma_bf16x2(x, ONE, far), ONE, far ^ SIGNS);
            pair[i] = r | (x & SIGNS);
        }
        return;
    }
    // There is no room above the largest.
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        pair[i] = pack_bf16(s.scale * eight_value(bf16_lo(pair[i]) * s.inverse), s.scale * eight_value(bf16_hi(pair[i]) * s.inverse));
}
