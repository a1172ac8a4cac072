// GEMV: products of one or two rows of x, at memory speed. Compute capability 9.0 and later.
//
// Every warp streams rows of W through a ring of its own with bulk copies, and starts before the previous kernels are complete.
//
// Layout: 256 neighbouring elements of a row are one 16 x 16 operand of the tensor cores, piece i of 8 elements in row i % 16. The
// elements of x are the matching columns, so the products of a row of W lie on the diagonal. W and x are read in memory order.
// Warps synchronise only with SPLIT, once per 32 rows.
//
// Fusion: PROLOGUE is the op before the product (1 = RMS norm, 2 = activation). Every block computes it for itself, to the same bits as
// its own kernel, and x is its output. With CONV the kernel also computes the convolution after the product, of CHANNELS columns from
// CONV_FIRST on, to the same bits. M is 1 with either.
//
// Grid: at most the blocks that fit on the device at once.
// Constants:
//   K, M            inner dimension, rows of x
//   WARPS, STAGES   of a block; of a warp's ring
//   DEPTH           elements of a stage
//   SPLIT           the warps of a block share its rows; a stage holds the warp's part of a row
//   ROWS            rows of W that a warp multiplies at a time; divides STAGES; above 1 only if a stage holds a whole row
//   EVICT_FIRST     W is loaded with the evict-first policy
//   ACCUMULATE, HAS_COLUMNS, HAS_BIAS   the output's old value, factors and biases of columns
//   ROUND           0: the input is taken as it is
//   ACT, HAS_SECOND, ROW_GATE           of the prologue: activation; it has a gate or second factor; distance of the row's gate
//   VEC, GROUP, THREADS, GATE, SHARED_WEIGHT   of a norm, as in rms_norm.cu
//   CONV_FIRST, CHANNELS, TAPS, CONV_ACT       of a convolution
// Types: out_t, pool_t, conv_t.

constexpr int STEP = 256;
constexpr int STEPS = div_up(K, STEP);
constexpr int SLICES = SPLIT ? 1 : div_up(K, DEPTH); // stages per row and warp
constexpr int X_PITCH = STEPS * STEP;
// Steps that every stage holds.
constexpr int LEAST = SPLIT ? STEPS / WARPS : STEPS % (DEPTH / STEP) == 0 ? DEPTH / STEP : STEPS % (DEPTH / STEP);
constexpr bool RAGGED = K % STEP != 0;
constexpr int SUMS = ROWS == 1 ? 2 : ROWS;
constexpr bool SPARE = ROWS == 1 && STAGES > 2; // a warp issues its next copy before it multiplies
constexpr int CONSUMERS = 32 * WARPS;
DEV void sync_consumers() { __syncthreads(); }

#include "round.cuh"
#include "prologue_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float sums[NORM_UNITS];
    __shared__ float parts[SPLIT ? WARPS : 1][M][32];
    __shared__ __align__(8) u64 full[WARPS][STAGES], x_full;
    // A warp number known to be uniform lets the compiler compute copy addresses once per warp; with ROWS that costs time.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (SPARE) warp = __shfl_sync(0xffffffffu, warp, 0);
    bf16 *resident = reinterpret_cast<bf16 *>(shared), *ring = resident + M * X_PITCH + warp * STAGES * DEPTH;
    // Rows of W: whole turns of the grid block by block; the remainder is spread over the blocks.
    int sets = SPLIT ? 1 : WARPS, set = SPLIT ? 0 : warp;
    int grid = gridDim.x * sets, whole = blockIdx.x * sets + set, left = set * gridDim.x + blockIdx.x;
    int turns = n / grid, last = turns * grid + left;
    int rows = turns + (last < n), total = rows * SLICES;
    auto row_of = [&](int i) { return i < turns ? i * grid + whole : last; };
    // The warp's part of a row.
    int begin = SPLIT ? warp * STEPS / WARPS * STEP : 0, end = SPLIT ? min((warp + 1) * STEPS / WARPS * STEP, K) : K;
    u64 policy = evict_first();
    auto copy = [&](int j, int row) {
        u64 *bar = full[warp] + j % STAGES;
        int k0 = begin + j % SLICES * DEPTH;
        u32 bytes = 2 * min(DEPTH, end - k0);
        bulk_expect(bar, bytes);
        bulk_load<EVICT_FIRST>(ring + j % STAGES * DEPTH, w + row * w_stride + k0, bytes, bar, policy);
    };
    if constexpr (RAGGED) {
        // Elements after the inner dimension must be finite; x is zero there.
        for (int i = threadIdx.x; i < (WARPS * STAGES * DEPTH + M * X_PITCH) / 8; i += CONSUMERS)
            reinterpret_cast<uint4 *>(shared)[i] = make_uint4(0, 0, 0, 0);
        bulk_fence();
        __syncthreads();
    }
    // Weights do not wait for the previous kernels. Only the lane that requests x does.
    if (lane == 0) {
        if (PROLOGUE == 0 && warp == 0) {
            // Before most of the weights: no product can start without x.
            barrier_init(&x_full, 1);
            barrier_init_done();
            wait_for_inputs();
            bulk_expect(&x_full, 2 * M * K);
            for (int m = 0; m < M; m++) bulk_load(resident + m * X_PITCH, x + m * x_stride, 2 * K, &x_full);
        }
        for (int j = 0; j < STAGES; j++) {
            barrier_init(full[warp] + j, 1);
            barrier_init_done();
            // As `row_of`, without a division before the first copy.
            int from = j / SLICES * grid, row = from + (from + grid <= n ? whole : left);
            if (row < n) copy(j, row);
        }
    }
    __syncthreads();
    // The sums of up to 32 rows are collected, one per lane; each lane prefetches the other inputs of its row.
    auto row_at = [&](int i) { return i < rows && (!SPLIT || warp == 0) ? row_of(i) : -1; };
    Channel channel;
    auto fetch_channel = [&](int i) {
        if constexpr (CONV) channel.fetch(ints, row_at(i) - CONV_FIRST, conv_weight, conv_weight_stride, pool, pool_stride);
    };
    if (state_unwritten) fetch_channel(lane);
    if constexpr (PROLOGUE == 1) norm(first, second, norm_weight, eps, resident, x, sums);
    wait_for_inputs();
    // Trigger the next kernel only here: its early blocks would take slots from ours.
    let_next_start();
    if constexpr (PROLOGUE == 2) activation(first, second, resident, x);
    if constexpr (PROLOGUE != 0) {
        __syncthreads();
        for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < K / 8; i += gridDim.x * CONSUMERS)
            reinterpret_cast<uint4 *>(x)[i] = reinterpret_cast<uint4 *>(resident)[i];
    } else {
        barrier_wait(&x_full, 0);
    }
    if (!state_unwritten) fetch_channel(lane);
    // Kept in the memory format: a conversion here would wait for the load.
    out_t before[M];
    float factor = scale, add = 0.f, sum[M];
    auto fetch_row = [&](int i) {
        int row = row_at(i);
        if (row < 0) return;
        if constexpr (HAS_COLUMNS) factor = scale * columns[row];
        if constexpr (HAS_BIAS) add = bias[row];
#pragma unroll
        for (int m = 0; m < M; m++)
            if (ACCUMULATE) before[m] = out[m * out_stride + row];
    };
    auto write_row = [&](int i) {
        if constexpr (SPLIT) {
            __syncthreads();
#pragma unroll
            for (int m = 0; m < M; m++) parts[warp][m][lane] = sum[m];
            __syncthreads();
#pragma unroll
            for (int m = 0; m < M; m++) {
                sum[m] = parts[0][m][lane];
                for (int p = 1; p < WARPS; p++) sum[m] += parts[p][m][lane];
            }
        }
        int row = row_at(i);
        if (row < 0) return;
#pragma unroll
        for (int m = 0; m < M; m++) {
            float v = sum[m] * factor;
            if constexpr (HAS_BIAS) v += add;
            if constexpr (ACCUMULATE) v += to_f32(before[m]);
            out[m * out_stride + row] = from_f32<out_t>(v);
            if constexpr (CONV)
                channel.put(ints, row - CONV_FIRST, to_f32(from_f32<out_t>(v)), pool, pool_stride, conv_out);
        }
    };
    fetch_row(lane);

    // Sums of rows, or of even and odd steps of the only row: an mma waits for the previous one with the same sums.
    float acc[SUMS][M][2][4];
    const uint4 *ws = reinterpret_cast<const uint4 *>(ring) + lane, *xs = reinterpret_cast<const uint4 *>(resident) + lane;
    auto step = [&](float (*to)[2][4], uint4 w4, const uint4 *b) {
        u32 a[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_bf16(to[m][0], a, b[m].x, b[m].z);
            mma_bf16(to[m][1], a, b[m].y, b[m].w);
        }
    };
    // Steps of 256 elements: rows in stages from `stage` on, x from `at` on. All loads of a stage are issued together.
    auto multiply = [&](int stage, int at, int steps) {
        const uint4 *from = ws + stage * (DEPTH / 8), *with = xs + at / 8;
#pragma unroll
        for (int k = 0; k < DEPTH / STEP; k++) {
            if (k >= LEAST && k >= steps) break;
            uint4 b[M];
#pragma unroll
            for (int m = 0; m < M; m++) b[m] = with[m * (X_PITCH / 8) + k * 32];
#pragma unroll
            for (int r = 0; r < ROWS; r++) step(acc[ROWS == 1 ? k % 2 : r], from[r * (DEPTH / 8) + k * 32], b);
        }
    };
    // The sums of the diagonals go to the lanes of rows `i` to `i + ROWS - 1`.
    auto keep = [&](int i) {
        int g = lane / 4, q = lane % 4;
        float v[ROWS][M];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int m = 0; m < M; m++) {
                float *lo = acc[r][m][0], *hi = acc[r][m][1];
                v[r][m] = g == 2 * q ? lo[0] + hi[2] : g == 2 * q + 1 ? lo[1] + hi[3] : 0.f;
                if constexpr (SUMS > ROWS) {
                    lo = acc[1][m][0], hi = acc[1][m][1];
                    v[r][m] += g == 2 * q ? lo[0] + hi[2] : g == 2 * q + 1 ? lo[1] + hi[3] : 0.f;
                }
            }
#pragma unroll
        for (int d = 16; d; d /= 2)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int m = 0; m < M; m++) v[r][m] += __shfl_xor_sync(0xffffffffu, v[r][m], d);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int m = 0; m < M; m++)
                if (lane == i % 32 + r) sum[m] = v[r][m];
        int next = i + ROWS;
        if (next % 32 != 0 || next >= rows) return;
        write_row(next - 32 + lane);
        fetch_channel(next + lane);
        fetch_row(next + lane);
    };
    int next = min(STAGES, total); // the stage to copy next, with SPARE
    for (int j = 0; j < total; j += ROWS) {
        int stage = j % STAGES, slice = j % SLICES;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (j + r < total) barrier_wait(full[warp] + stage + r, j / STAGES & 1);
        if (slice == 0) {
#pragma unroll
            for (int i = 0; i < SUMS * M * 8; i++) acc[i / 8 / M][i / 8 % M][i / 4 % 2][i % 4] = 0.f;
        }
        // Refills the previous stage before the present one is multiplied. Towards the end fewer copies are in flight, so that the
        // last ones complete at about the same time on all multiprocessors.
        if (SPARE && next < min(j + 1 + min(STAGES - 1, max(1, (total - j) / 3)), total)) {
            if (lane == 0) copy(next, row_of(next / SLICES));
            next++;
        }
        __syncwarp();
        int at = begin + slice * DEPTH;
        multiply(stage, at, div_up(min(DEPTH, end - at), STEP));
        __syncwarp();
        if (!SPARE && lane == 0)
            for (int k = j + STAGES; k < min(j + STAGES + ROWS, total); k++) copy(k, row_of(k / SLICES));
        if (slice + 1 == SLICES) keep(j / SLICES);
    }
    if (rows > 0) write_row((rows - 1) / 32 * 32 + lane);
}
