// Products of one or two rows of x at memory speed, from compute capability 9.0 on. Every warp streams rows of W through a ring
// of its own, copied in bulk, and starts to before the kernels ahead are done. 256 neighbouring elements of a row are 16 x 16
// operands for the tensor cores, piece i of 8 elements in row i % 16, and those of x the columns that go with them, so that
// products of a row of W lie on the diagonal: W and x are read as they lie in memory, and warps meet only with SPLIT, once for 32
// rows.
// With PROLOGUE the op ahead is computed too, by every block for itself and to the same bits as its own kernel does: 1 = RMS norm,
// 2 = activation; then x is what that op writes. With CONV the convolution of CHANNELS columns from CONV_FIRST on, behind it,
// is computed too, again to the same bits. M is 1 there.
// Grid (at most the blocks that fit on the device at once).
// K, M, WARPS, STAGES (of a warp's ring), DEPTH (elements of a stage), SPLIT (the warps of a block share its rows, each with a
// stage of every row), ROWS (of W that a warp multiplies side by side; they divide STAGES, and more than one only if a stage holds
// all that the warp has of a row), EVICT_FIRST (nothing else keeps W in the L2), ACCUMULATE, HAS_BIAS, PROLOGUE, ACT,
// HAS_SECOND (a gate or a second factor), and of a norm VEC, GROUP, THREADS (that rms_norm.cu gives a group), GATE,
// SHARED_WEIGHT; CONV, and of a convolution CONV_FIRST, CHANNELS, TAPS, CONV_ACT; out_t, pool_t, conv_t.

constexpr int STEP = 256;
constexpr int STEPS = div_up(K, STEP);
constexpr int SLICES = SPLIT ? 1 : div_up(K, DEPTH); // stages that a warp has of a row
constexpr int X_PITCH = STEPS * STEP;
// Steps that every stage holds.
constexpr int LEAST = SPLIT ? STEPS / WARPS : STEPS % (DEPTH / STEP) == 0 ? DEPTH / STEP : STEPS % (DEPTH / STEP);
constexpr bool RAGGED = K % STEP != 0;
constexpr int SUMS = ROWS == 1 ? 2 : ROWS;
constexpr bool SPARE = ROWS == 1 && STAGES > 2; // a warp copies on before it multiplies
constexpr int CONSUMERS = 32 * WARPS;
DEV void sync_consumers() { __syncthreads(); }

#include "around.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float sums[NORM_UNITS];
    __shared__ float parts[SPLIT ? WARPS : 1][M][32];
    __shared__ __align__(8) u64 full[WARPS][STAGES], x_full;
    // Told that it is the same in all lanes, the compiler computes what copies take once a warp; with ROWS that costs time.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (SPARE) warp = __shfl_sync(0xffffffffu, warp, 0);
    bf16 *resident = reinterpret_cast<bf16 *>(shared), *ring = resident + M * X_PITCH + warp * STAGES * DEPTH;
    // Rows of W: whole turns of the grid block by block, what is left over spread over the blocks.
    int sets = SPLIT ? 1 : WARPS, set = SPLIT ? 0 : warp;
    int grid = gridDim.x * sets, whole = blockIdx.x * sets + set, left = set * gridDim.x + blockIdx.x;
    int turns = n / grid, last = turns * grid + left;
    int rows = turns + (last < n), total = rows * SLICES;
    auto row_of = [&](int i) { return i < turns ? i * grid + whole : last; };
    // What a warp has of a row.
    int begin = SPLIT ? warp * STEPS / WARPS * STEP : 0, end = SPLIT ? min((warp + 1) * STEPS / WARPS * STEP, K) : K;
    u64 once = evict_first();
    auto copy = [&](int j, int row) {
        u64 *bar = full[warp] + j % STAGES;
        int k0 = begin + j % SLICES * DEPTH;
        u32 bytes = 2 * min(DEPTH, end - k0);
        bulk_expect(bar, bytes);
        bulk_load<EVICT_FIRST>(ring + j % STAGES * DEPTH, w + row * w_stride + k0, bytes, bar, once);
    };
    if constexpr (RAGGED) {
        // What stands behind the inner dimension must be finite; x is zero there.
        for (int i = threadIdx.x; i < (WARPS * STAGES * DEPTH + M * X_PITCH) / 8; i += CONSUMERS)
            reinterpret_cast<uint4 *>(shared)[i] = make_uint4(0, 0, 0, 0);
        bulk_fence();
        __syncthreads();
    }
    // The weight does not wait for the kernels ahead, but for the part of the warp that asks for x.
    if (lane == 0) {
        if (PROLOGUE == 0 && warp == 0) {
            // Sooner than most of the weight: nothing is multiplied without it.
            barrier_init(&x_full, 1);
            barrier_init_done();
            wait_for_inputs();
            bulk_expect(&x_full, 2 * M * K);
            for (int m = 0; m < M; m++) bulk_load(resident + m * X_PITCH, x + m * x_stride, 2 * K, &x_full);
        }
        for (int j = 0; j < STAGES; j++) {
            barrier_init(full[warp] + j, 1);
            barrier_init_done();
            // As `row_of`, but no copy waits for a division.
            int from = j / SLICES * grid, row = from + (from + grid <= n ? whole : left);
            if (row < n) copy(j, row);
        }
    }
    __syncthreads();
    // The sums of up to 32 rows wait for each other, each in a lane, which asks ahead for what goes with its row.
    auto row_at = [&](int i) { return i < rows && (!SPLIT || warp == 0) ? row_of(i) : -1; };
    Channel channel;
    auto fetch_channel = [&](int i) {
        if constexpr (CONV) channel.fetch(ints, row_at(i) - CONV_FIRST, conv_weight, conv_weight_stride, pool, pool_stride);
    };
    if (state_unwritten) fetch_channel(lane);
    if constexpr (PROLOGUE == 1) norm(first, second, norm_weight, eps, resident, sums);
    wait_for_inputs();
    // Not sooner: blocks that wait two kernels ahead slow down those that are to run first.
    let_next_start();
    if constexpr (PROLOGUE == 2) activation(first, second, resident);
    if constexpr (PROLOGUE != 0) {
        __syncthreads();
        for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < K / 8; i += gridDim.x * CONSUMERS)
            reinterpret_cast<uint4 *>(x)[i] = reinterpret_cast<uint4 *>(resident)[i];
    } else {
        barrier_wait(&x_full, 0);
    }
    if (!state_unwritten) fetch_channel(lane);
    // As it is in memory: to convert it here would be to wait for it.
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

    // Sums of rows, or of every other step of the only row: an mma waits for the one before that it adds to.
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
    // Steps of 256 elements of rows in stages from `stage` on, and of x from `at` on. All that is in a stage is asked for at once.
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
        // To the stage of before: the one that has come need not be multiplied first. In the end less and less is asked for
        // ahead, so that what is under way last comes at about the same time everywhere.
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
