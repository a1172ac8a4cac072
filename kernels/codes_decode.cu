// Elements of coded rows as plain ones, for kernels that take those. A warp decodes units, as in codes.cuh. Grid (units of all tiles / warps).
// FORMAT, K; out_t.

#include "codes.cuh"

constexpr int WARPS = 8;
constexpr int UNITS = div_up(K, UNIT);

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    i64 index = (i64)blockIdx.x * WARPS + threadIdx.x / 32, row = index / UNITS * TILE + threadIdx.x % 32 / 4;
    int lane = threadIdx.x % 32, k0 = index % UNITS * UNIT;
    const u8 *unit = w + index * UNIT_BYTES;
    // Earlier kernels may still read what is written here.
    wait_for_inputs();
    if (row - lane / 4 >= n) return;
    Scales scales(unit, lane / 4);
#pragma unroll
    for (int sub = 0; sub < UNIT / 64; sub++) {
        Codes codes(unit, sub, lane);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int k = k0 + (2 * sub + j) * 32;
                if (row + 8 * r >= n || k >= K) continue;
                float v[8];
                elements(codes, scales, sub, j, r, v);
                out_t *o = out + (row + 8 * r) * out_stride + k + lane % 4 * 4;
                store<4>(o, v);
                store<4>(o + 16, v + 4);
            }
    }
}
