// Products with coded weights of the experts that a token chose, one (token, choice) at a time, of every shape and dtype of x. A block
// takes 16 rows of an expert, as in codes.cuh; its warps share the inner dimension. Grid (token * choice, tiles of rows).
// FORMAT, K, TOP, X_PER_PAIR (x has a row per choice); x_t, out_t.

#include "codes.cuh"

constexpr int WARPS = 8;
constexpr int UNITS = div_up(K, UNIT);

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ float part[WARPS][TILE];
    i64 pair = blockIdx.x;
    u32 e = ids[pair / TOP * ids_stride + pair % TOP] - first;
    if (e >= experts) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const x_t *px = x + (X_PER_PAIR ? pair : pair / TOP) * x_stride + q * 4;
    const u8 *units = w + e * w_stride + (i64)blockIdx.y * UNITS * UNIT_BYTES;
    float sum[2] = {};
#pragma unroll UNIT == 64 ? 4 : 1
    for (int u = warp; u < UNITS; u += WARPS) {
        const u8 *unit = units + u * UNIT_BYTES;
        Scales scales(unit, g);
#pragma unroll
        for (int sub = 0; sub < UNIT / 64; sub++) {
            Codes codes(unit, sub, lane);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int k = u * UNIT + (2 * sub + j) * 32;
                if (K % UNIT != 0 && k >= K) break;
                float xv[8];
#pragma unroll
                for (int i = 0; i < 8; i++) xv[i] = to_f32(px[k + i / 4 * 16 + i % 4]);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float v[8];
                    elements(codes, scales, sub, j, r, v);
#pragma unroll
                    for (int i = 0; i < 8; i++) sum[r] = __fmaf_rn(v[i], xv[i], sum[r]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        if (q == 0) part[warp][g + 8 * r] = sum[r];
    }
    __syncthreads();
    int row = blockIdx.y * TILE + threadIdx.x;
    if (threadIdx.x >= TILE || row >= n) return;
    float v = 0.f;
#pragma unroll
    for (int p = 0; p < WARPS; p++) v += part[p][threadIdx.x];
    out[pair * out_stride + row] = from_f32<out_t>(v);
}
