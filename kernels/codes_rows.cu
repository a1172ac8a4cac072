// Codes of 8-bit floats in the order of their rows [n, K], and the scales of blocks of 128 x 128 of them [n / 128, PITCH]. A warp takes
// units, as in codes.cuh. Grid (units of all tiles / warps).
// FORMAT, K, PITCH (K / 128, rounded up to a multiple of 4).

#include "codes.cuh"

constexpr int WARPS = 8;
constexpr int UNITS = K / UNIT;
static_assert(FORMAT == F8 && UNIT == 128, "a row of a unit has one scale");

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    // Rows of a unit lie 16 bytes further apart, in other banks.
    __shared__ __align__(16) u32 rows[WARPS][TILE][UNIT / 4 + 4];
    let_next_start();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    i64 index = (i64)blockIdx.x * WARPS + warp, tile = index / UNITS;
    int unit = index % UNITS;
    bool in = tile * TILE < n;
    if (in) {
        const u8 *at = w + index * UNIT_BYTES;
#pragma unroll
        for (int j = 0; j < UNIT / 32; j++) {
            uint4 c = reinterpret_cast<const uint4 *>(at)[j * 32 + lane];
            // Of the pairs' bytes, which lie as tensor cores take them.
            rows[warp][g][8 * j + q] = __byte_perm(c.x, 0, 0x2031);
            rows[warp][g][8 * j + 4 + q] = __byte_perm(c.y, 0, 0x2031);
            rows[warp][g + 8][8 * j + q] = __byte_perm(c.z, 0, 0x2031);
            rows[warp][g + 8][8 * j + 4 + q] = __byte_perm(c.w, 0, 0x2031);
        }
    }
    __syncwarp();
    // Earlier kernels may still read what is written here.
    wait_for_inputs();
    if (!in) return;
    if (lane == 0 && tile % (128 / TILE) == 0)
        scales[tile / (128 / TILE) * PITCH + unit] = *reinterpret_cast<const float *>(w + index * UNIT_BYTES + SCALES_AT);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = i * 4 + lane / 8, c = lane % 8;
        if (tile * TILE + row < n)
            reinterpret_cast<uint4 *>(codes + (tile * TILE + row) * (i64)K + unit * UNIT)[c] =
                *reinterpret_cast<const uint4 *>(&rows[warp][row][4 * c]);
    }
}
