// Products of coded experts with the pairs that chose them, on tensor cores: as expert_grouped.cu, with weights that every warp decodes
// into the operands of its own columns, rounded to bf16. The layout of W is that of codes.cuh. Grid (column tiles, tiles of pairs).
// FORMAT, K, N, BM, STAGES, TOP, X_PER_PAIR (x has a row per choice); out_t.

#include "codes.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int BN = 128;
constexpr int DEPTH = 64;
constexpr int PITCH = DEPTH + 16;                // rows of pairs lie in different banks
constexpr int STAGE = BM * PITCH;
constexpr int STEPS = div_up(K, DEPTH);
constexpr int UNITS = div_up(K, UNIT);
constexpr int SUBS = UNIT / DEPTH;               // steps of a unit
constexpr int M_TILES = BM / 16;
constexpr int TILES = BN / WARPS / TILE;         // of a warp

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 pairs[BM];
    bf16 *stages = reinterpret_cast<bf16 *>(shared);
    if (blockIdx.y >= tiles[0]) return;
    const u32 *tile = tiles + 4 * (1 + blockIdx.y);
    int e = tile[0], begin = tile[1], rows = tile[2];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4, n0 = blockIdx.x * BN + warp * (BN / WARPS);
    for (int i = tid; i < BM; i += THREADS) pairs[i] = order[begin + min(i, rows - 1)];
    __syncthreads();
    auto fetch = [&](int step) {
        bf16 *sx = stages + step % STAGES * STAGE;
        int k0 = step * DEPTH;
#pragma unroll
        for (int v = tid; v < BM * DEPTH / 8; v += THREADS) {
            int r = v / (DEPTH / 8), k = v % (DEPTH / 8) * 8;
            bool in = k0 + k < K && r < rows;
            i64 row = X_PER_PAIR ? pairs[r] : pairs[r] / TOP;
            cp_async16(smem_addr(sx + r * PITCH + k), in ? x + row * x_stride + k0 + k : x, in);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < STEPS) fetch(s);
        cp_async_commit();
    }
    // Rows past the last tile repeat the first one's, and are not stored.
    const u8 *units[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int at = n0 / TILE + t;
        units[t] = w + e * w_stride + (i64)(at * TILE < N ? at : 0) * UNITS * UNIT_BYTES;
    }
    float acc[M_TILES][2 * TILES][4] = {};
    for (int step = 0; step < STEPS; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < STEPS) fetch(step + STAGES - 1);
        cp_async_commit();
        const bf16 *sx = stages + step % STAGES * STAGE + c * 4;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const u8 *unit = units[t] + step / SUBS * UNIT_BYTES;
            Scales scales(unit, g);
            Codes codes(unit, step % SUBS, lane);
            // Of group, row and half: two operands of 8 columns.
            u32 b[2][2][2][2];
#pragma unroll
            for (int s = 0; s < SUBS; s++) {
                // An index that is a constant keeps the scales in registers.
                if (s != step % SUBS) continue;
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float v[8];
                        elements(codes, scales, s, j, r, v);
#pragma unroll
                        for (int i = 0; i < 4; i++) b[j][r][i / 2][i % 2] = pack_bf16(v[2 * i], v[2 * i + 1]);
                    }
            }
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const bf16 *from = sx + (m * 16 + g) * PITCH + j * 32 + half * 16;
                        uint2 upper = *reinterpret_cast<const uint2 *>(from);
                        uint2 lower = *reinterpret_cast<const uint2 *>(from + 8 * PITCH);
                        u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
                        for (int r = 0; r < 2; r++) mma_bf16(acc[m][2 * t + r], a, b[j][r][half][0], b[j][r][half][1]);
                    }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = m * 16 + g + 8 * h;
            if (r >= rows) continue;
            out_t *o = out + (i64)pairs[r] * out_stride;
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int col = n0 + i * 8 + 2 * c + j;
                    if (col < N) o[col] = from_f32<out_t>(acc[m][i][2 * h + j]);
                }
        }
}
