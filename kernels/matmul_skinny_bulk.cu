// Skinny GEMM with bulk copies: up to 8 rows of x, compute capability 9.0 and later; the sums are those of matmul_skinny.cu.
//
// One warp copies slices of 16 rows of W into one ring, which continues across tiles, and starts before the previous kernels are
// complete. WARPS other warps share the inner dimension of every slice. Their sums are added in a fixed order, so a result does not
// depend on the number of rows of x.
//
// Fusion: PROLOGUE and CONV as in gemv.cu, with M = 1. With PAIR the last blocks compute another product, of the same input or of
// another; after a PROLOGUE it is the same.
//
// Grid: blocks that fit on the device at once, at most the tiles; with PAIR a block for each tile of both.
// Constants:
//   K, M, WARPS, STAGES
//   DEPTH           elements of a slice per warp
//   X_RESIDENT      x is copied once, not with every slice
//   PAIR            there is another product
//   all others      as in gemv.cu
// Types: out_t, pair_t, pool_t, conv_t.

constexpr int ROWS = 16;
constexpr int SPAN = DEPTH * WARPS;
constexpr int SLICES = div_up(K, SPAN);
constexpr int PITCH = SPAN + 8;                  // ldmatrix without bank conflicts
constexpr int STAGE = (ROWS + (X_RESIDENT ? 0 : M)) * PITCH;
constexpr int X_PITCH = SPAN * SLICES + 8;
constexpr int CONSUMERS = 32 * WARPS;
constexpr bool RAGGED = K % SPAN != 0;

DEV void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

#include "round.cuh"
#include "prologue_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float part[2][WARPS][M][ROWS], sums[NORM_UNITS];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES], x_full;
    bf16 *ring = reinterpret_cast<bf16 *>(shared), *resident = ring + STAGES * STAGE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int tile = blockIdx.x, step = gridDim.x;
    bool second_product = PAIR && tile >= div_up(n, ROWS);
    if (second_product) {
        tile -= div_up(n, ROWS);
        x = pair_x, x_stride = pair_x_stride, w = pair_w, w_stride = pair_w_stride, n = pair_n;
    }
    int tiles = div_up(n, ROWS);
    int mine = PAIR ? 1 : tile < tiles ? div_up(tiles - tile, step) : 0;
    int total = mine * SLICES;
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, WARPS);
        }
        barrier_init(&x_full, 1);
        barrier_init_done();
    }
    if constexpr (RAGGED) {
        // Elements after the inner dimension must be finite; x is zero there.
        for (int i = threadIdx.x; i < (STAGES * STAGE + (X_RESIDENT ? M * X_PITCH : 0)) / 8; i += CONSUMERS + 32)
            reinterpret_cast<uint4 *>(shared)[i] = make_uint4(0, 0, 0, 0);
        bulk_fence();
    }
    __syncthreads();

    if (warp == WARPS) {
        u64 policy = evict_first();
        auto copy = [&](int j, bool of_w, bool of_x) {
            int stage = j % STAGES, k0 = j % SLICES * SPAN;
            u32 bytes = 2 * min(SPAN, K - k0);
            bf16 *to = ring + stage * STAGE;
            if (of_w) {
                if (lane == 0) bulk_expect(full + stage, (ROWS + (X_RESIDENT ? 0 : M)) * bytes);
                __syncwarp();
                int row = min((tile + j / SLICES * step) * ROWS + lane, n - 1);
                if (lane < ROWS) bulk_load<EVICT_FIRST>(to + lane * PITCH, w + row * w_stride + k0, bytes, full + stage, policy);
            }
            if (!X_RESIDENT && of_x && lane < M)
                bulk_load(to + (ROWS + lane) * PITCH, x + lane * x_stride + k0, bytes, full + stage);
        };
        // Weights do not wait for the previous kernels.
        for (int j = 0; j < min(STAGES, total); j++) copy(j, true, false);
        wait_for_inputs();
        if (PROLOGUE != 0) {
        } else if (X_RESIDENT) {
            if (lane == 0) bulk_expect(&x_full, 2 * M * K);
            __syncwarp();
            if (lane < M) bulk_load(resident + lane * X_PITCH, x + lane * x_stride, 2 * K, &x_full);
        } else {
            for (int j = 0; j < min(STAGES, total); j++) copy(j, false, true);
        }
        for (int j = STAGES; j < total; j++) {
            barrier_wait(empty + j % STAGES, (j / STAGES - 1) & 1);
            copy(j, true, true);
        }
        return;
    }
    Channel channel;
    auto fetch_channel = [&](int tile) {
        if (CONV && threadIdx.x < ROWS)
            channel.fetch(ints, tile * ROWS + (int)threadIdx.x - CONV_FIRST, conv_weight, conv_weight_stride, pool, pool_stride);
    };
    if (state_unwritten) fetch_channel(tile);
    if constexpr (PROLOGUE == 1) norm(first, second, norm_weight, eps, resident, x, sums);
    wait_for_inputs();
    // Trigger the next kernel only here: its early blocks would take slots from ours.
    let_next_start();
    if constexpr (PROLOGUE == 2) activation(first, second, resident, x);
    if constexpr (PROLOGUE != 0) {
        sync_consumers();
        for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < K / 8; i += gridDim.x * CONSUMERS)
            reinterpret_cast<uint4 *>(x)[i] = reinterpret_cast<uint4 *>(resident)[i];
    } else if (X_RESIDENT) {
        barrier_wait(&x_full, 0);
    }
    if (!state_unwritten) fetch_channel(tile);
    int block = lane / 8, brow = lane % 8, g = lane / 4, q = lane % 4;
    int a_at = (brow + block % 2 * 8) * PITCH + block / 2 * 8 + warp * DEPTH;
    // Eight rows of x, 32 k at once; rows that are not there repeat the first.
    int b_row = brow < M ? brow : 0;
    int b_at = (X_RESIDENT ? b_row * X_PITCH : (ROWS + b_row) * PITCH) + block * 8 + warp * DEPTH;
    int done = 0;
    for (int i = 0; i < mine; i++) {
        int n0 = (tile + i * step) * ROWS;
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        for (int s = 0; s < SLICES; s++, done++) {
            int stage = done % STAGES;
            barrier_wait(full + stage, done / STAGES & 1);
            bf16 *at = ring + stage * STAGE;
            bf16 *bx = X_RESIDENT ? resident + s * SPAN : at;
#pragma unroll
            for (int k = 0; k < DEPTH; k += 32) {
                u32 a[4], b[4];
                ldmatrix_x4(b, smem_addr(bx + b_at + k));
                ldmatrix_x4(a, smem_addr(at + a_at + k));
                mma_bf16(acc, a, b[0], b[1]);
                ldmatrix_x4(a, smem_addr(at + a_at + k + 16));
                mma_bf16(acc, a, b[2], b[3]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
        }
        float (*sum)[M][ROWS] = part[i % 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (2 * q + e % 2 < M) sum[warp][2 * q + e % 2][g + e / 2 * 8] = acc[e];
        sync_consumers();
        for (int j = threadIdx.x; j < M * ROWS; j += CONSUMERS) {
            int m = j / ROWS, r = j % ROWS;
            if (n0 + r >= n) continue;
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += sum[k][m][r];
            v *= scale;
            if constexpr (HAS_COLUMNS) v *= columns[n0 + r];
            if constexpr (HAS_BIAS) v += bias[n0 + r];
            if (second_product) {
                pair_out[m * pair_out_stride + n0 + r] = from_f32<pair_t>(v);
                continue;
            }
            out_t *o = out + m * out_stride + n0 + r;
            if constexpr (ACCUMULATE) v += to_f32(*o);
            *o = from_f32<out_t>(v);
            if constexpr (CONV)
                channel.put(ints, n0 + r - CONV_FIRST, to_f32(from_f32<out_t>(v)), pool, pool_stride, conv_out);
        }
        if (i + 1 < mine) fetch_channel(tile + (i + 1) * step);
    }
}
