// Products of the experts that few tokens chose with coded weights, at memory speed. Compute capability 9.0 and later.
//
// As in expert_stream.cu, but for the weights: a job is a tile of 16 rows of an expert for one (token, choice), with PARTS = 2 also the
// tile N / 2 rows further; with COMBINE it is a tile of columns of a token, for all its choices. A job is cut into spans of codes.cuh,
// which are dealt to the warps of a block as items. The order of sums depends on K and FORMAT only, and for choices on TOP.
//
// With ROUND the input is rounded, see round.cuh.
//
// Grid: blocks that fit on the device at once.
// The stride of w is in bytes. FORMAT, ROUND, and the constants of expert_stream.cu but for ROWS; out_t, mid_t.

#include "codes.cuh"
#include "round.cuh"

constexpr int UNITS = div_up(K, UNIT);
constexpr int SPANS = div_up(K, SPAN);
constexpr int TILES = div_up(N / PARTS, TILE);
constexpr int ITEMS = (COMBINE ? TOP : PARTS) * SPANS; // of a job
constexpr int X_PITCH = SPANS * SPAN;
constexpr int THREADS = 32 * WARPS;
constexpr int PAIRS = TOKENS * TOP;                     // at most 32: a lane for each
constexpr int X_ROWS = COMBINE ? PAIRS : TOKENS;
static_assert(PARTS == 1 || N % (2 * TILE) == 0, "halves of whole tiles");

#include "route.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 full[WARPS][STAGES];
    __shared__ float factor[32];
    __shared__ u32 chosen[32];
    __shared__ u32 own_ids[ROUTE ? WARPS : 1][TOP];
    __shared__ float own_weights[ROUTE ? WARPS : 1][TOP];
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    u8 *ring = shared + warp * STAGES * SPAN_BYTES;
    bf16 *resident = reinterpret_cast<bf16 *>(shared + WARPS * STAGES * SPAN_BYTES);
    float *sums = reinterpret_cast<float *>(resident + X_ROWS * X_PITCH);
    int block = blockIdx.x, grid = gridDim.x, all = (COMBINE ? TOKENS : PAIRS) * TILES;
    int jobs = (all - block + grid - 1) / grid, total = max(0, (jobs * ITEMS - warp + WARPS - 1) / WARPS);
    float *before = sums + jobs * ITEMS * TILE;
    // The (token, choice), the tile of the expert and the span of item i of the warp.
    auto item = [&](int i, int &pair, int &tile, int &span) {
        int at = i * WARPS + warp, job = at / ITEMS * grid + block, which = at % ITEMS / SPANS;
        span = at % SPANS;
        pair = COMBINE ? job / TILES * TOP + which : job / TILES;
        tile = job % TILES + (COMBINE ? 0 : which * TILES);
    };
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full[warp] + s, 1);
        barrier_init_done();
    }
    __syncwarp();
    float extra[PER];
    if constexpr (ROUTE) load_extra(bias, extra);
    if (!inputs_complete) wait_for_inputs();
    // Choices of no expert are items without a copy.
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
        int pair, tile, span;
        item(i, pair, tile, span);
        u32 e = __shfl_sync(ALL, mine, pair);
        if (lane != 0) return;
        u64 *bar = full[warp] + i % STAGES;
        if (e >= experts) return barrier_arrive(bar);
        u32 bytes = units_of<UNITS>(span) * UNIT_BYTES;
        bulk_expect(bar, bytes);
        const u8 *from = reinterpret_cast<const u8 *>(w) + e * w_stride + ((i64)tile * UNITS + span * SPAN_UNITS) * UNIT_BYTES;
        bulk_load<true>(ring + i % STAGES * SPAN_BYTES, from, bytes, bar, policy);
    };
    for (int i = 0; i < min(STAGES, total); i++) copy(i);
    if (COMBINE) wait_for_inputs();
    constexpr int PIECES = K / 8, PADDED = X_PITCH / 8;
    for (int i = threadIdx.x; i < X_ROWS * PADDED; i += THREADS) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (K % SPAN == 0 || i % PADDED < PIECES) v = __ldcg(reinterpret_cast<const uint4 *>(x + i / PADDED * x_stride) + i % PADDED);
        if constexpr (ROUND) {
            u32 pairs[4] = {v.x, v.y, v.z, v.w};
            round_pairs<8>(pairs);
            v = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        put_in_row(resident, 8 * i, for_product(v));
    }
    // A column of the block's jobs: with COMBINE its token, else its (token, choice).
    auto column = [&](int at, int &row, int &col) {
        int job = at / TILE * grid + block;
        row = job / TILES;
        col = job % TILES * TILE + at % TILE;
    };
    if (warp == 0) {
        chosen[lane] = mine;
        if (COMBINE && lane < PAIRS) factor[lane] = ROUTE ? own_weights[0][lane % TOP] : weights[lane / TOP * weights_stride + lane % TOP];
    }
    if constexpr (COMBINE && ACCUMULATE)
        for (int at = threadIdx.x; at < jobs * TILE; at += THREADS) {
            int token, col;
            column(at, token, col);
            before[at] = col < N ? to_f32(out[token * out_stride + col]) : 0.f;
        }
    wait_for_inputs();
    // Trigger only after the wait: the next kernel relies on everything before this one being complete.
    let_next_start();
    if (ROUTE && !COMBINE && block == 0 && threadIdx.x < TOP) {
        ids[lane] = mine;
        weights[lane] = own_weights[0][lane];
    }
    __syncthreads();
    for (int i = 0; i < total; i++) {
        int pair, tile, span, stage = i % STAGES;
        item(i, pair, tile, span);
        bool real = __shfl_sync(ALL, mine, pair) < experts;
        barrier_wait(full[warp] + stage, i / STAGES & 1);
        OneRow products;
        if (real)
            products.add(ring + stage * SPAN_BYTES, units_of<UNITS>(span), resident + (COMBINE ? pair : pair / TOP) * X_PITCH + span * SPAN, lane);
        float sum[2];
        products.take(sum);
        __syncwarp();
        if (i + STAGES < total) copy(i + STAGES);
        if (q == 0) {
            sums[(i * WARPS + warp) * TILE + g] = sum[0];
            sums[(i * WARPS + warp) * TILE + g + 8] = sum[1];
        }
    }
    __syncthreads();
    // Of the spans of a tile.
    auto sum_of = [&](int at, int which) {
        const float *from = sums + (at / TILE * ITEMS + which * SPANS) * TILE + at % TILE;
        float v = 0.f;
#pragma unroll
        for (int s = 0; s < SPANS; s++) v += from[s * TILE];
        return v * OF_SUMS;
    };
    for (int at = threadIdx.x; at < jobs * TILE; at += THREADS) {
        int row, col;
        column(at, row, col);
        if (col >= N) continue;
        if constexpr (COMBINE) {
            float s = 0.f;
#pragma unroll
            for (int j = 0; j < TOP; j++) {
                int pair = row * TOP + j;
                if (chosen[pair] != NONE) s += factor[pair] * sum_of(at, j);
            }
            out[row * out_stride + col] = from_f32<out_t>(s * scale + (ACCUMULATE ? before[at] : 0.f));
        } else {
            if (chosen[row] >= experts) continue;
            out_t v = from_f32<out_t>(sum_of(at, 0));
            out[row * out_stride + col] = v;
            float a = activate<ACT>(to_f32(v));
            if constexpr (PARTS == 2) {
                v = from_f32<out_t>(sum_of(at, 1));
                out[row * out_stride + col + N / 2] = v;
                a *= to_f32(v);
            }
            if constexpr (HAS_MID) mid[row * mid_stride + col] = from_f32<mid_t>(a);
        }
    }
}
