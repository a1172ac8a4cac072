// Products of the experts that few tokens chose, at memory speed. Compute capability 9.0 and later.
//
// Every warp streams rows of W through a ring of its own and multiplies them with x in shared memory; layout as in gemv.cu. The order of
// a sum depends on K only. A unit is ROWS neighbouring rows of one expert for one (token, choice); with PARTS = 2 also the rows
// N / 2 further.
//
// Without COMBINE, units are dealt to all warps, and with HAS_MID the kernel also computes the activation of the products. With COMBINE, all
// choices of a column belong to one block, which adds them in ascending order.
//
// `inputs_complete`: the ids (and, without COMBINE, x) were complete before the previous kernel launched, so they are read before
// the wait.
//
// With ROUTE (one token, one group of experts) every warp chooses the experts from the logits, and the kernel without COMBINE writes the
// choice. `inputs_complete` is then about the logits.
//
// Grid: blocks that fit on the device at once.
// TOKENS, K, N (rows of W of an expert), TOP, WARPS, STAGES, ROWS, PARTS, COMBINE, ACCUMULATE, HAS_MID, ACT, ROUTE and the constants of
// route.cuh; out_t, mid_t.

constexpr int STEP = 256;
constexpr int STEPS = div_up(K, STEP);
constexpr int STAGE = PARTS * ROWS * K;          // elements
constexpr int UNITS = N / PARTS / ROWS;          // units of a (token, choice)
constexpr int THREADS = 32 * WARPS;
constexpr int PAIRS = TOKENS * TOP;              // at most 32: a lane for each
constexpr int X_ROWS = COMBINE ? PAIRS : TOKENS;

#include "route.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 full[WARPS][STAGES];
    __shared__ float factor[32];
    __shared__ u32 chosen[32];
    __shared__ u32 own_ids[ROUTE ? WARPS : 1][TOP];
    __shared__ float own_weights[ROUTE ? WARPS : 1][TOP];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bf16 *ring = reinterpret_cast<bf16 *>(shared) + warp * STAGES * STAGE;
    bf16 *resident = reinterpret_cast<bf16 *>(shared) + WARPS * STAGES * STAGE;
    float *sums = reinterpret_cast<float *>(resident + X_ROWS * K);
    // With COMBINE a block owns every gridDim-th group of columns and its warps the choices; without, units go in whole turns of the grid
    // and the remainder is spread over the blocks.
    int block = blockIdx.x, grid = gridDim.x, all = (COMBINE ? TOKENS : PAIRS) * UNITS;
    int jobs = COMBINE ? (all - block + grid - 1) / grid : 0;
    int turns = all / (grid * WARPS), last = turns * grid * WARPS + warp * grid + block;
    int total = COMBINE ? (jobs * TOP - warp + WARPS - 1) / WARPS : turns + (last < all);
    // The (token, choice) and the group of rows of unit i of the warp.
    auto unit = [&](int i, int &pair, int &group) {
        if constexpr (COMBINE) {
            int at = i * WARPS + warp, job = at / TOP * grid + block;
            pair = job / UNITS * TOP + at % TOP;
            group = job % UNITS;
        } else {
            int at = i < turns ? (i * grid + block) * WARPS + warp : last;
            pair = at / UNITS;
            group = at % UNITS;
        }
    };
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full[warp] + s, 1);
        barrier_init_done();
    }
    __syncwarp();
    float extra[PER];
    if constexpr (ROUTE) load_extra(bias, extra);
    if (!inputs_complete) wait_for_inputs();
    // Choices of no expert are units without a copy.
    u32 mine = NONE;
    if constexpr (ROUTE) {
        choose(logits, extra, sum_eps, route_scale, own_ids[warp], own_weights[warp], nullptr, nullptr);
        __syncwarp();
        if (lane < TOP) mine = own_ids[warp][lane];
    } else if (lane < PAIRS) {
        // Bypasses the L1, which may hold older values.
        mine = *(volatile const u32 *)(ids + lane / TOP * ids_stride + lane % TOP);
    }
    u64 policy = evict_first();
    auto copy = [&](int i) {
        int pair, group;
        unit(i, pair, group);
        u32 e = __shfl_sync(ALL, mine, pair);
        if (lane != 0) return;
        u64 *bar = full[warp] + i % STAGES;
        if (e >= experts) return barrier_arrive(bar);
        const bf16 *from = w + e * w_stride + (i64)group * ROWS * K;
        bf16 *to = ring + i % STAGES * STAGE;
        bulk_expect(bar, 2 * STAGE);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            bulk_load<true>(to + p * ROWS * K, from + (i64)p * (N / PARTS) * K, 2 * ROWS * K, bar, policy);
    };
    for (int i = 0; i < min(STAGES, total); i++) copy(i);
    if (COMBINE) wait_for_inputs();
    {
        constexpr int PIECES = K / 8, AHEAD = 4;
        for (int base = threadIdx.x; base < X_ROWS * PIECES; base += AHEAD * THREADS) {
            uint4 v[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                int i = base + a * THREADS;
                if (i < X_ROWS * PIECES) v[a] = __ldcg(reinterpret_cast<const uint4 *>(x + i / PIECES * x_stride) + i % PIECES);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                int i = base + a * THREADS;
                if (i < X_ROWS * PIECES) reinterpret_cast<uint4 *>(resident)[i] = v[a];
            }
        }
    }
    auto column = [&](int q, int &token, int &col) {
        int job = q / ROWS * grid + block;
        token = job / UNITS;
        col = job % UNITS * ROWS + q % ROWS;
    };
    float *before = sums + jobs * TOP * ROWS;
    if constexpr (COMBINE) {
        if (threadIdx.x < PAIRS) {
            chosen[lane] = mine;
            factor[lane] = ROUTE ? own_weights[0][lane % TOP] : weights[lane / TOP * weights_stride + lane % TOP];
        }
        if constexpr (ACCUMULATE)
            for (int q = threadIdx.x; q < jobs * ROWS; q += THREADS) {
                int token, col;
                column(q, token, col);
                before[q] = to_f32(out[token * out_stride + col]);
            }
    }
    wait_for_inputs();
    // Trigger only after the wait: the next kernel relies on everything before this one being complete.
    let_next_start();
    if (ROUTE && !COMBINE && block == 0 && threadIdx.x < TOP) {
        ids[lane] = mine;
        weights[lane] = own_weights[0][lane];
    }
    __syncthreads();

    float sum[PARTS * ROWS];
    auto write = [&](int i) {
        int pair, group;
        unit(i, pair, group);
        bool real = __shfl_sync(ALL, mine, pair) < experts;
        if (i >= total || !real) return;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            i64 at = pair * out_stride + group * ROWS + r;
            out_t v = from_f32<out_t>(sum[r]);
            out[at] = v;
            float a = activate<ACT>(to_f32(v));
            if constexpr (PARTS == 2) {
                v = from_f32<out_t>(sum[ROWS + r]);
                out[at + N / 2] = v;
                a *= to_f32(v);
            }
            if constexpr (HAS_MID) mid[pair * mid_stride + group * ROWS + r] = from_f32<mid_t>(a);
        }
    };
    for (int i = 0; i < total; i++) {
        int pair, group, stage = i % STAGES;
        unit(i, pair, group);
        bool real = __shfl_sync(ALL, mine, pair) < experts;
        barrier_wait(full[warp] + stage, i / STAGES & 1);
        float v[PARTS * ROWS] = {};
        if (real) {
            // Sums of every other step: an mma waits for the one before that it adds to.
            float acc[PARTS * ROWS][2][2][4] = {};
            const uint4 *a4 = reinterpret_cast<const uint4 *>(ring + stage * STAGE) + lane;
            const uint4 *b4 = reinterpret_cast<const uint4 *>(resident + (COMBINE ? pair : pair / TOP) * K) + lane;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                bool in = (k + 1) * STEP <= K || k * STEP + lane * 8 < K;
                uint4 b = in ? b4[k * 32] : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int r = 0; r < PARTS * ROWS; r++) {
                    uint4 w4 = in ? a4[r * (K / 8) + k * 32] : make_uint4(0, 0, 0, 0);
                    u32 a[4] = {w4.x, w4.y, w4.z, w4.w};
                    mma_bf16(acc[r][k % 2][0], a, b.x, b.z);
                    mma_bf16(acc[r][k % 2][1], a, b.y, b.w);
                }
            }
            int g = lane / 4, q = lane % 4;
#pragma unroll
            for (int r = 0; r < PARTS * ROWS; r++)
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    float *lo = acc[r][s][0], *hi = acc[r][s][1];
                    v[r] += g == 2 * q ? lo[0] + hi[2] : g == 2 * q + 1 ? lo[1] + hi[3] : 0.f;
                }
#pragma unroll
            for (int d = 16; d; d /= 2)
#pragma unroll
                for (int r = 0; r < PARTS * ROWS; r++) v[r] += __shfl_xor_sync(ALL, v[r], d);
        }
        __syncwarp();
        if (i + STAGES < total) copy(i + STAGES);
        if constexpr (COMBINE) {
            if (lane == 0)
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[(i * WARPS + warp) * ROWS + r] = v[r];
        } else {
            if (lane == i % 32)
#pragma unroll
                for (int r = 0; r < PARTS * ROWS; r++) sum[r] = v[r];
            if (i % 32 == 31) write(i - 31 + lane);
        }
    }
    if constexpr (!COMBINE) {
        if (total % 32 != 0) write(total / 32 * 32 + lane);
        return;
    }
    __syncthreads();
    for (int q = threadIdx.x; q < jobs * ROWS; q += THREADS) {
        int token, col;
        column(q, token, col);
        float s = 0.f;
#pragma unroll
        for (int j = 0; j < TOP; j++) {
            int pair = token * TOP + j;
            if (chosen[pair] == NONE) continue;
            s += factor[pair] * sums[(q / ROWS * TOP + j) * ROWS + q % ROWS];
        }
        out[token * out_stride + col] = from_f32<out_t>(s * scale + (ACCUMULATE ? before[q] : 0.f));
    }
}
