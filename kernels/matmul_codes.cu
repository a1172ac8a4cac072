// Products of up to 8 rows of x with coded weights, at memory speed: codes go from memory to the tensor cores as integers, and scales
// are applied to sums over 32 (or 16) elements. The layout of W is that of codes.cuh.
//
// A block has TEAMS teams of SHARE warps. A team takes tiles of 16 rows of W in turn; its warps share the inner dimension and their
// sums are added in a fixed order, which does not depend on the number of rows of x. Every warp copies its part of a tile through a
// ring of its own, which continues across tiles: with bulk copies from compute capability 9.0 on, so that weights are on their way
// before the previous kernels are complete.
//
// Fusion: PROLOGUE and CONV as in gemv.cu, with M = 1.
//
// Grid: blocks that fit on the device at once, at most the tiles.
// Constants:
//   FORMAT, K, M
//   WARPS, SHARE    of a block; of a team
//   STAGES, DEPTH   of a warp's ring; units of a stage
//   X_RESIDENT      x is copied once, not read with every unit
//   ROUND           and rounded, see round.cuh
//   all others      as in gemv.cu
// Types: out_t, pool_t, conv_t.

#include "codes.cuh"

static_assert(!ROUND || X_RESIDENT, "only x in shared memory is rounded");
constexpr int UNITS = div_up(K, UNIT);
constexpr int TEAMS = WARPS / SHARE;
constexpr int SLICES = div_up(div_up(UNITS, SHARE), DEPTH); // stages per tile and warp
constexpr bool EVEN = UNITS % (SHARE * DEPTH) == 0;          // all stages are full
constexpr int STAGE_BYTES = DEPTH * UNIT_BYTES;
constexpr int X_PITCH = UNITS * UNIT + 16;       // rows lie in different banks
constexpr int TAIL = K % UNIT ? (UNITS * UNIT - K) / 8 : 1; // pieces of x after the inner dimension
constexpr int CONSUMERS = 32 * WARPS;
constexpr int COLS = M == 1 ? 1 : 2;             // columns of x in a lane; with one row, all columns of the operand are that row
constexpr int SUMS = TEAMS * M * TILE;           // of a turn
constexpr int EACH = div_up(SUMS, CONSUMERS);
constexpr int X_SUMS = UNITS * UNIT / SCALE_WIDTH; // of a row of x, one for each scale of a row of W
constexpr int X_COLS = M == 1 ? 1 : div_up(M, 2) * 2;
constexpr bool KNOWN = SUMS_OF_X && X_RESIDENT && X_SUMS * X_COLS <= 2048; // they are computed once
DEV void sync_consumers() { __syncthreads(); }

#include "round.cuh"
#include "prologue_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) float sums_of_x[KNOWN ? X_SUMS : 1][X_COLS];
    __shared__ float part[2][TEAMS][SHARE][M][TILE], sums[NORM_UNITS];
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int team = warp / SHARE, member = warp % SHARE;
    bf16 *resident = reinterpret_cast<bf16 *>(shared);
    u8 *ring = shared + (X_RESIDENT ? 2 * M * X_PITCH : 0) + warp * STAGES * STAGE_BYTES;
    const u8 *codes_of_w = reinterpret_cast<const u8 *>(w);
    // Tiles of a team: whole turns of the grid block by block. All teams of a block take as many turns, the last one maybe without a tile.
    int tiles = div_up(n, TILE), first_tile = team * gridDim.x + blockIdx.x, turn_tiles = gridDim.x * TEAMS;
    int turns = (int)blockIdx.x < tiles ? div_up(tiles - (int)blockIdx.x, turn_tiles) : 0;
    int begin = member * UNITS / SHARE, end = (member + 1) * UNITS / SHARE;
    int jobs = turns * SLICES;
    u64 policy = evict_first();
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(8) u64 full[WARPS][STAGES], x_full;
#endif
    // Units from the warp's `slice`th stage of a tile on.
    auto units = [&](int slice) { return max(0, min(DEPTH, end - begin - slice * DEPTH)); };
    auto copy = [&](int j) {
        int tile = first_tile + j / SLICES * turn_tiles, slice = j % SLICES;
        u32 bytes = tile < tiles ? units(slice) * UNIT_BYTES : 0;
        const u8 *from = codes_of_w + ((i64)tile * UNITS + begin + slice * DEPTH) * UNIT_BYTES;
        u8 *to = ring + j % STAGES * STAGE_BYTES;
#if __CUDA_ARCH__ >= 900
        if (lane != 0) return;
        bulk_expect(full[warp] + j % STAGES, bytes);
        if (bytes) bulk_load<EVICT_FIRST>(to, from, bytes, full[warp] + j % STAGES, policy);
#else
        for (u32 at = lane * 16; at < bytes; at += 512) cp_async16(smem_addr(to + at), from + at, true, policy);
#endif
    };
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        for (int j = 0; j < STAGES; j++) barrier_init(full[warp] + j, 1);
        if (warp == 0) barrier_init(&x_full, 1);
        barrier_init_done();
    }
    __syncwarp();
#endif
    // Weights do not wait for the previous kernels.
    for (int j = 0; j < STAGES; j++) {
        if (j < jobs) copy(j);
#if __CUDA_ARCH__ < 900
        cp_async_commit();
#endif
    }
    if constexpr (X_RESIDENT && K % UNIT != 0) {
        for (int i = threadIdx.x; i < M * TAIL; i += CONSUMERS)
            reinterpret_cast<uint4 *>(resident + i / TAIL * X_PITCH + K)[i % TAIL] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    // The sums of a turn are finished by other warps every turn.
    auto sum_of = [&](int turn, int e, int &of_team, int &m, int &row) {
        int i = ((int)threadIdx.x + CONSUMERS - turn % WARPS * 32) % CONSUMERS + e * CONSUMERS;
        of_team = i / (M * TILE);
        m = i / TILE % M;
        row = ((int)(blockIdx.x + of_team * gridDim.x) + turn * turn_tiles) * TILE + i % TILE;
        return i < SUMS && row < n && turn < turns;
    };
    Channel channel;
    auto fetch_channel = [&](int turn) {
        if constexpr (CONV) {
            static_assert(!CONV || EACH == 1, "a thread has one channel");
            int of_team, m, row;
            bool in = sum_of(turn, 0, of_team, m, row);
            channel.fetch(ints, in ? row - CONV_FIRST : -1, conv_weight, conv_weight_stride, pool, pool_stride);
        }
    };
    if (state_unwritten) fetch_channel(0);
    if constexpr (PROLOGUE == 1) norm(first, second, norm_weight, eps, resident, x, sums);
    wait_for_inputs();
    // Trigger the next kernel only here: its early blocks would take slots from ours.
    let_next_start();
    if constexpr (PROLOGUE == 2) activation(first, second, resident, x);
    if constexpr (PROLOGUE != 0) {
        __syncthreads();
        if constexpr (!ROUNDED_STORES)
            for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < K / 8; i += gridDim.x * CONSUMERS)
                reinterpret_cast<uint4 *>(x)[i] = reinterpret_cast<uint4 *>(resident)[i];
    } else if constexpr (X_RESIDENT) {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            bulk_expect(&x_full, 2 * M * K);
            for (int m = 0; m < M; m++) bulk_load(resident + m * X_PITCH, x + m * x_stride, 2 * K, &x_full);
        }
        barrier_wait(&x_full, 0);
#else
        for (int i = threadIdx.x; i < M * (K / 8); i += CONSUMERS)
            reinterpret_cast<uint4 *>(resident + i / (K / 8) * X_PITCH)[i % (K / 8)] =
                reinterpret_cast<const uint4 *>(x + i / (K / 8) * x_stride)[i % (K / 8)];
        __syncthreads();
#endif
    }
    if constexpr (X_RESIDENT) {
        if constexpr (PROLOGUE != 0) __syncthreads();
        constexpr int PIECES = UNITS * UNIT / 8, LANES = SCALE_WIDTH / 8;
        u32 mask = ((1u << LANES) - 1) << lane / LANES * LANES; // of the lanes that have the elements of a scale
        for (int i = threadIdx.x; i < M * PIECES; i += CONSUMERS) {
            uint4 *at = reinterpret_cast<uint4 *>(resident + i / PIECES * X_PITCH) + i % PIECES, v = *at;
            if constexpr (ROUND && !ROUNDED_STORES) {
                u32 pairs[4] = {v.x, v.y, v.z, v.w};
                round_pairs<8>(pairs);
                v = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            *at = for_product(v);
            if constexpr (KNOWN) {
                float sum = bf16_lo(v.x) + bf16_hi(v.x) + (bf16_lo(v.y) + bf16_hi(v.y)) + (bf16_lo(v.z) + bf16_hi(v.z)) + (bf16_lo(v.w) + bf16_hi(v.w));
#pragma unroll
                for (int m = 1; m < LANES; m *= 2) sum += __shfl_xor_sync(mask, sum, m);
                if (i % LANES == 0) sums_of_x[i % PIECES / LANES][i / PIECES] = sum / OF_SUMS;
            }
        }
        __syncthreads();
    }
    if (!state_unwritten) fetch_channel(0);
    // Rows of x that are not there repeat the first; their sums reach no result.
    const bf16 *mine = (X_RESIDENT ? resident : x) + (g < M ? g : 0) * (X_RESIDENT ? X_PITCH : x_stride) + q * 4;
    out_t before[EACH];
    float factor[EACH], add[EACH];
    auto fetch_row = [&](int turn) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int of_team, m, row;
            if (!sum_of(turn, e, of_team, m, row)) continue;
            factor[e] = scale * OF_SUMS;
            if constexpr (HAS_COLUMNS) factor[e] *= columns[row];
            if constexpr (HAS_BIAS) add[e] = bias[row];
            if constexpr (ACCUMULATE) before[e] = out[m * out_stride + row];
        }
    };
    int j = 0;
    for (int turn = 0; turn < turns; turn++) {
        fetch_row(turn);
        float total[2][COLS] = {};
        bool there = first_tile + turn * turn_tiles < tiles;
        for (int slice = 0; slice < SLICES; slice++, j++) {
#if __CUDA_ARCH__ >= 900
            barrier_wait(full[warp] + j % STAGES, j / STAGES & 1);
            if (j > 0 && j - 1 + STAGES < jobs) copy(j - 1 + STAGES);
#else
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            if (j > 0 && j - 1 + STAGES < jobs) copy(j - 1 + STAGES);
            if (j > 0) cp_async_commit();
#endif
            const u8 *unit = ring + j % STAGES * STAGE_BYTES;
            int k = (begin + slice * DEPTH) * UNIT, count = EVEN ? DEPTH : units(slice);
            auto multiply_unit = [&](int u) {
                const u8 *at = unit + u * UNIT_BYTES;
                Scales scales(at, g);
#pragma unroll
                for (int sub = 0; sub < UNIT / 64; sub++) {
                    uint2 b[2][2];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int from = k + u * UNIT + sub * 64 + i * 16;
                        bool in = X_RESIDENT || K % UNIT == 0 || from < K;
                        uint2 v = in ? *reinterpret_cast<const uint2 *>(mine + from) : make_uint2(0, 0);
                        b[i / 2][i % 2] = X_RESIDENT ? v : for_product(v);
                    }
                    float known[64 / SCALE_WIDTH][COLS];
                    if constexpr (KNOWN) {
                        int first = (k + u * UNIT + sub * 64) / SCALE_WIDTH, col = COLS == 1 ? 0 : min(2 * q, X_COLS - 2);
#pragma unroll
                        for (int i = 0; i < 64 / SCALE_WIDTH * COLS; i++) known[i / COLS][i % COLS] = sums_of_x[first + i / COLS][col + i % COLS];
                    }
                    multiply<COLS, KNOWN>(Codes(at, sub, lane), scales, sub, b, total, known);
                }
            };
            if (there) {
#pragma unroll UNIT == 64 ? 4 : 1
                for (int u = 0; u < count; u++) multiply_unit(u);
            }
            __syncwarp();
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                int m = M == 1 ? q : 2 * q + c;
                if (m < M) part[turn % 2][team][member][m][g + 8 * r] = total[r][c];
            }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int of_team, m, row;
            if (!sum_of(turn, e, of_team, m, row)) continue;
            float v = 0.f;
#pragma unroll
            for (int p = 0; p < SHARE; p++) v += part[turn % 2][of_team][p][m][row % TILE];
            v *= factor[e];
            if constexpr (HAS_BIAS) v += add[e];
            if constexpr (ACCUMULATE) v += to_f32(before[e]);
            out[m * out_stride + row] = from_f32<out_t>(v);
            if constexpr (CONV) channel.put(ints, row - CONV_FIRST, to_f32(from_f32<out_t>(v)), pool, pool_stride, conv_out);
        }
        if (turn + 1 < turns) fetch_channel(turn + 1);
    }
}
