// Products of coded experts with the few pairs that chose each, at memory speed, and the activation after them. Compute capability 9.0
// and later. The layout of W is that of codes.cuh; scales are applied to sums of codes, as in matmul_codes.cu.
//
// A tile is up to BM pairs of one expert, from the tables of expert_sort. A job is such a tile and 16 rows of W, with PARTS = 2 also
// the 16 rows N / 2 further. A team of SHARE warps takes it: they share the inner dimension, and their sums are added in their order,
// so that results do not depend on the other pairs. Every warp copies its part through a ring of its own, which continues across jobs.
// A block has neighbouring jobs, so that rows of x stay in its L1.
//
// Grid: blocks that fit on the device at once. The stride of w is in bytes.
// Constants:
//   FORMAT, K, N, TOP, BM
//   WARPS, SHARE    of a block; of a team
//   STAGES, DEPTH   of a warp's ring; units of a stage
//   PARTS           2: gate and up
//   X_PER_PAIR      x has a row per choice
//   HAS_MID, ACT    of the activation
// Types: out_t, mid_t.

#include "codes.cuh"

constexpr u32 ALL = 0xffffffffu;
constexpr int UNITS = div_up(K, UNIT);
constexpr int SUBS = UNIT / 64;
constexpr int TEAMS = WARPS / SHARE;
constexpr int SLICES = div_up(div_up(UNITS, SHARE), DEPTH); // of a part and warp
constexpr int ITEMS = PARTS * SLICES;            // of a job
constexpr int STAGE_BYTES = DEPTH * UNIT_BYTES;
constexpr int TILES = div_up(N / PARTS, TILE);   // of a part
constexpr int GROUPS = BM / 8;                   // of pairs
constexpr bool AHEAD = GROUPS == 1;              // x is read while the columns before are multiplied
constexpr int LATER = SHARE > 1 ? SHARE - 1 : 1; // warps of a team whose sums its first adds
constexpr int SHARED_SUMS = SHARE > 1 ? TEAMS : 1;
static_assert(PARTS == 1 || N % (2 * TILE) == 0, "halves of whole tiles");

struct Pairs {
    u32 expert, begin, count, unused;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 full[WARPS][STAGES];
    __shared__ float4 left[2][SHARED_SUMS][LATER][PARTS * GROUPS][32];
    int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int team = warp / SHARE, member = warp % SHARE;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    int first = member * UNITS / SHARE, units = (member + 1) * UNITS / SHARE - first;
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full[warp] + s, 1);
        barrier_init_done();
    }
    __syncwarp();
    if (!tables_complete) wait_for_inputs();
    // Bypasses the L1, which may hold older values.
    const uint4 *table = reinterpret_cast<const uint4 *>(tiles) + 1;
    i64 all = (i64)__ldcg(tiles) * TILES;
    int begin = (int)(blockIdx.x * all / gridDim.x) + team, end = (int)((blockIdx.x + 1) * all / gridDim.x);
    int items = div_up(max(end - begin, 0), TEAMS) * ITEMS;
    u64 policy = evict_first();
    u32 expert = 0;
    int known = -1;                              // the pairs whose expert that is
    auto copy = [&](int i) {
        if (lane != 0) return;
        int job = begin + i / ITEMS * TEAMS, part = i % ITEMS / SLICES, slice = i % SLICES;
        if (job / TILES != known) {
            known = job / TILES;
            expert = __ldcg(table + known).x;
        }
        u32 bytes = max(0, min(DEPTH, units - slice * DEPTH)) * UNIT_BYTES;
        i64 unit = (i64)(job % TILES + part * TILES) * UNITS + first + slice * DEPTH;
        bulk_expect(full[warp] + i % STAGES, bytes);
        if (bytes) bulk_load<true>(ring + i % STAGES * STAGE_BYTES, w + expert * w_stride + unit * UNIT_BYTES, bytes, full[warp] + i % STAGES, policy);
    };
    for (int i = 0; i < min(STAGES, items); i++) copy(i);
    wait_for_inputs();
    // Only after the wait: the next kernel relies on everything before this one being complete.
    let_next_start();

    int now = -1;                                // the pairs that the following belong to
    u32 pair[GROUPS];                            // of column g of a group
    const bf16 *mine[GROUPS];                    // its row of x, or null
    for (int i = 0; i < items;) {
        int turn = i / ITEMS, job = begin + turn * TEAMS;
        if (job / TILES != now) {
            now = job / TILES;
            uint4 of_job = __ldcg(table + now);
#pragma unroll
            for (int m = 0; m < GROUPS; m++) {
                bool in = 8 * m + g < of_job.z;
                pair[m] = in ? __ldcg(order + of_job.y + 8 * m + g) : NONE;
                mine[m] = in ? x + (X_PER_PAIR ? pair[m] : pair[m] / TOP) * x_stride + q * 4 : nullptr;
            }
        }
        // The lane's elements of 64 columns of x from `k` on.
        uint2 next[GROUPS][2][2];
        auto fetch = [&](int k) {
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    bool in = mine[m] && (K % UNIT == 0 || k + e * 16 + q * 4 < K);
                    next[m][e / 2][e % 2] = in ? *reinterpret_cast<const uint2 *>(mine[m] + k + e * 16) : make_uint2(0, 0);
                }
        };
        if constexpr (AHEAD) fetch(first * UNIT);
        float total[PARTS][GROUPS][2][2] = {};
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            for (int slice = 0; slice < SLICES; slice++, i++) {
                barrier_wait(full[warp] + i % STAGES, i / STAGES & 1);
                if (i > 0 && i - 1 + STAGES < items) copy(i - 1 + STAGES);
                int here = min(DEPTH, units - slice * DEPTH);
                for (int u = 0; u < here; u++) {
                    const u8 *unit = ring + i % STAGES * STAGE_BYTES + u * UNIT_BYTES;
                    int after = slice * DEPTH + u + 1 < units ? slice * DEPTH + u + 1 : 0;
                    Scales scales(unit, g);
#pragma unroll
                    for (int sub = 0; sub < SUBS; sub++) {
                        int k = (first + slice * DEPTH + u) * UNIT + sub * 64;
                        if constexpr (!AHEAD) fetch(k);
                        uint2 b[GROUPS][2][2];
#pragma unroll
                        for (int m = 0; m < GROUPS; m++)
#pragma unroll
                            for (int e = 0; e < 4; e++) b[m][e / 2][e % 2] = for_product(next[m][e / 2][e % 2]);
                        if constexpr (AHEAD) fetch(sub + 1 < SUBS ? k + 64 : (first + after) * UNIT);
                        Codes codes(unit, sub, lane);
#pragma unroll
                        for (int m = 0; m < GROUPS; m++) multiply(codes, scales, sub, b[m], total[part][m]);
                    }
                }
                __syncwarp();
            }
        if constexpr (SHARE > 1) {
            auto &sums = left[turn % 2][team];
            if (member > 0) {
#pragma unroll
                for (int c = 0; c < PARTS * GROUPS; c++) {
                    float(*v)[2] = total[c / GROUPS][c % GROUPS];
                    sums[member - 1][c][lane] = make_float4(v[0][0], v[0][1], v[1][0], v[1][1]);
                }
            }
            named_sync(1 + team, 32 * SHARE);
            if (member > 0) continue;
#pragma unroll
            for (int s = 0; s < SHARE - 1; s++)
#pragma unroll
                for (int c = 0; c < PARTS * GROUPS; c++) {
                    float(*v)[2] = total[c / GROUPS][c % GROUPS];
                    float4 add = sums[s][c][lane];
                    v[0][0] += add.x;
                    v[0][1] += add.y;
                    v[1][0] += add.z;
                    v[1][1] += add.w;
                }
        }
#pragma unroll
        for (int m = 0; m < GROUPS; m++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                i64 row = __shfl_sync(ALL, pair[m], 4 * (2 * q + c));
                if (row == NONE) continue;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int col = job % TILES * TILE + g + 8 * r;
                    if (col >= N / PARTS) continue;
                    out_t v = from_f32<out_t>(total[0][m][r][c] * OF_SUMS);
                    out[row * out_stride + col] = v;
                    float a = activate<ACT>(to_f32(v));
                    if constexpr (PARTS == 2) {
                        v = from_f32<out_t>(total[1][m][r][c] * OF_SUMS);
                        out[row * out_stride + col + N / 2] = v;
                        a *= to_f32(v);
                    }
                    if constexpr (HAS_MID) mid[row * mid_stride + col] = from_f32<mid_t>(a);
                }
            }
    }
}
