// Products of up to 8 rows of x with coded weights, at memory speed: codes go from memory to the tensor cores as integers, and scales
// are applied to sums over 32 (or 16) elements. The layout of W is that of codes.cuh.
//
// A block has tiles of 16 rows of W that follow one another, and its warps share them evenly: each multiplies some spans of codes.cuh,
// in their order, and what it has of a tile is added to what other warps have of it, in their order. How warps share does not depend on
// the number of rows of x; the sums of one row within a span have an order of their own. Every warp copies its spans through a ring of
// its own: with bulk copies from compute capability 9.0 on, so that weights are on their way before the previous kernels are complete.
//
// Fusion: PROLOGUE and CONV as in gemv.cu, with M = 1.
//
// Grid: at most the tiles.
// Constants:
//   FORMAT, K, M
//   WARPS, STAGES   of a block; of a warp's ring
//   X_RESIDENT      x is copied once, not read with every span
//   ROUND           and rounded, see round.cuh
//   all others      as in gemv.cu
// Types: out_t, pool_t, conv_t.

#include "codes.cuh"

static_assert(!ROUND || X_RESIDENT, "only x in shared memory is rounded");
static_assert(M > 1 || X_RESIDENT, "one row of x fits");
constexpr int UNITS = div_up(K, UNIT), SPANS = div_up(K, SPAN);
constexpr bool WHOLE = UNITS % SPAN_UNITS == 0;    // all spans are
constexpr int X_PITCH = SPANS * SPAN + 16;         // rows lie in different banks
constexpr int TAIL = K % UNIT ? (UNITS * UNIT - K) / 8 : 1; // pieces of x after the inner dimension
constexpr int CONSUMERS = 32 * WARPS;
constexpr int AHEAD = div_up(M, 3);                // results of a thread, as of 10 tiles, whose other inputs are read before the products
constexpr int X_SUMS = UNITS * UNIT / SCALE_WIDTH; // of a row of x, one for each scale of a row of W
constexpr int X_COLS = div_up(M, 2) * 2;
constexpr bool KNOWN = M > 1 && SUMS_OF_X && X_RESIDENT && X_SUMS * X_COLS <= 2048; // they are computed once
DEV void sync_consumers() { __syncthreads(); }

#include "round.cuh"
#include "prologue_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) float sums_of_x[KNOWN ? X_SUMS : 1][X_COLS];
    __shared__ float sums[NORM_UNITS];
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    bf16 *resident = reinterpret_cast<bf16 *>(shared);
    u8 *rings = shared + (X_RESIDENT ? 2 * M * X_PITCH : 0), *ring = rings + warp * STAGES * SPAN_BYTES;
    // What warp p has of the block's tile t is part p + t.
    float(*part)[M][TILE] = reinterpret_cast<float(*)[M][TILE]>(rings + WARPS * STAGES * SPAN_BYTES);
    int tiles = div_up(n, TILE), first_tile = (int)((i64)blockIdx.x * tiles / gridDim.x);
    int own = (int)((i64)(blockIdx.x + 1) * tiles / gridDim.x) - first_tile, jobs = own * SPANS;
    int workers = min(WARPS, jobs);
    int begin = warp < workers ? warp * jobs / workers : 0, end = warp < workers ? (warp + 1) * jobs / workers : 0;
    const u8 *codes_of_w = reinterpret_cast<const u8 *>(w) + (i64)first_tile * UNITS * UNIT_BYTES;
    u64 policy = evict_first();
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(8) u64 full[WARPS][STAGES], x_full;
#endif
    auto copy = [&](int j, int stage) {
        int span = j % SPANS;
        u32 bytes = units_of<UNITS>(span) * UNIT_BYTES;
        const u8 *from = codes_of_w + (WHOLE ? (i64)j * SPAN_BYTES : (i64)j / SPANS * UNITS * UNIT_BYTES + span * SPAN_BYTES);
        u8 *to = ring + stage * SPAN_BYTES;
#if __CUDA_ARCH__ >= 900
        if (lane != 0) return;
        bulk_expect(full[warp] + stage, bytes);
        bulk_load<EVICT_FIRST>(to, from, bytes, full[warp] + stage, policy);
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
        if (begin + j < end) copy(begin + j, j);
#if __CUDA_ARCH__ < 900
        cp_async_commit();
#endif
    }
    if constexpr (X_RESIDENT && K % UNIT != 0) {
        for (int i = threadIdx.x; i < M * TAIL; i += CONSUMERS)
            reinterpret_cast<uint4 *>(resident + i / TAIL * X_PITCH + K)[i % TAIL] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    // Result i of the block: its row of x, and of W, which is n where there is none.
    int results = own * M * TILE;
    auto result = [&](int i, int &m, int &row) {
        m = i / TILE % M;
        row = i < results ? min(n, (first_tile + i / (M * TILE)) * TILE + i % TILE) : n;
    };
    auto fetch_channel = [&](int i) {
        Channel channel;
        if constexpr (CONV) {
            int m, row;
            result(i, m, row);
            channel.fetch(ints, row < n ? row - CONV_FIRST : -1, conv_weight, conv_weight_stride, pool, pool_stride);
        }
        return channel;
    };
    Channel channel[AHEAD];
    auto fetch_channels = [&] {
#pragma unroll
        for (int e = 0; e < AHEAD; e++) channel[e] = fetch_channel(threadIdx.x + e * CONSUMERS);
    };
    if (state_unwritten) fetch_channels();
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
            bf16 *row = resident + i / PIECES * X_PITCH;
            uint4 *at = reinterpret_cast<uint4 *>(row) + i % PIECES, v = *at;
            if constexpr (ROUND && !ROUNDED_STORES) {
                u32 pairs[4] = {v.x, v.y, v.z, v.w};
                round_pairs<8>(pairs);
                v = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            if constexpr (M == 1) {
                __syncwarp(15u << lane / 4 * 4); // the lanes whose elements change places
                put_in_row(row, 8 * i, for_product(v));
            } else {
                *at = for_product(v);
            }
            if constexpr (KNOWN) {
                float sum = bf16_lo(v.x) + bf16_hi(v.x) + (bf16_lo(v.y) + bf16_hi(v.y)) + (bf16_lo(v.z) + bf16_hi(v.z)) + (bf16_lo(v.w) + bf16_hi(v.w));
#pragma unroll
                for (int m = 1; m < LANES; m *= 2) sum += __shfl_xor_sync(mask, sum, m);
                if (i % LANES == 0) sums_of_x[i % PIECES / LANES][i / PIECES] = sum / OF_SUMS;
            }
        }
        __syncthreads();
    }
    if (!state_unwritten) fetch_channels();
    // What a result takes besides its sum.
    struct Other {
        out_t before;
        float factor, add;
    };
    auto fetch = [&](int i) {
        Other o = {};
        int m, row;
        result(i, m, row);
        if (row == n) return o;
        o.factor = scale * OF_SUMS;
        if constexpr (HAS_COLUMNS) o.factor *= columns[row];
        if constexpr (HAS_BIAS) o.add = bias[row];
        if constexpr (ACCUMULATE) o.before = out[m * out_stride + row];
        return o;
    };
    Other other[AHEAD];
#pragma unroll
    for (int e = 0; e < AHEAD; e++) other[e] = fetch(threadIdx.x + e * CONSUMERS);

    // Rows of x that are not there repeat the first; their sums reach no result.
    const bf16 *mine = (X_RESIDENT ? resident : x) + (g < M ? g : 0) * (X_RESIDENT ? X_PITCH : x_stride) + q * 4;
    auto multiply_unit = [&](const u8 *unit, int k, float (*total)[2]) {
        Scales scales(unit, g);
#pragma unroll
        for (int sub = 0; sub < UNIT / 64; sub++) {
            uint2 b[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int from = k + sub * 64 + i * 16;
                bool in = X_RESIDENT || K % UNIT == 0 || from < K;
                uint2 v = in ? *reinterpret_cast<const uint2 *>(mine + from) : make_uint2(0, 0);
                b[i / 2][i % 2] = X_RESIDENT ? v : for_product(v);
            }
            float known[64 / SCALE_WIDTH][2];
            if constexpr (KNOWN) {
                int first = (k + sub * 64) / SCALE_WIDTH, col = min(2 * q, X_COLS - 2);
#pragma unroll
                for (int i = 0; i < 64 / SCALE_WIDTH * 2; i++) known[i / 2][i % 2] = sums_of_x[first + i / 2][col + i % 2];
            }
            multiply<KNOWN>(Codes(unit, sub, lane), scales, sub, b, total, known);
        }
    };
    int tile = begin / SPANS, span = begin % SPANS, stage = 0;
    u32 parity = 0;
    OneRow one;
    float total[2][2] = {};
    for (int j = begin; j < end; j++) {
        const u8 *at = ring + stage * SPAN_BYTES;
#if __CUDA_ARCH__ >= 900
        barrier_wait(full[warp] + stage, parity);
#else
        cp_async_wait<STAGES - 1>();
        __syncwarp();
#endif
        if constexpr (M == 1) {
            one.add(at, units_of<UNITS>(span), resident + span * SPAN, lane);
        } else {
#pragma unroll
            for (int u = 0; u < SPAN_UNITS; u++)
                if (WHOLE || u < units_of<UNITS>(span)) multiply_unit(at + u * UNIT_BYTES, span * SPAN + u * UNIT, total);
        }
        __syncwarp();
        if (j + STAGES < end) copy(j + STAGES, stage);
#if __CUDA_ARCH__ < 900
        cp_async_commit();
#endif
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++span < SPANS && j + 1 < end) continue;
        float(*to)[TILE] = part[warp + tile];
        if constexpr (M == 1) {
            one.take(total[0]);
            if (q < 2) to[0][g + 8 * q] = q == 0 ? total[0][0] : total[0][1];
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (2 * q + i % 2 < M) to[2 * q + i % 2][g + i / 2 * 8] = total[i / 2][i % 2];
                total[i / 2][i % 2] = 0.f;
            }
        }
        tile++;
        span = 0;
    }
    __syncthreads();
    auto finish = [&](int i, const Other &o, Channel &channel) {
        int m, row;
        result(i, m, row);
        if (row == n) return;
        int t = i / (M * TILE), last = ((t + 1) * SPANS * workers - 1) / jobs;
        float v = 0.f;
        for (int p = ((t * SPANS + 1) * workers - 1) / jobs; p <= last; p++) v += part[p + t][m][i % TILE];
        v *= o.factor;
        if constexpr (HAS_BIAS) v += o.add;
        if constexpr (ACCUMULATE) v += to_f32(o.before);
        out[m * out_stride + row] = from_f32<out_t>(v);
        if constexpr (CONV) channel.put(ints, row - CONV_FIRST, to_f32(from_f32<out_t>(v)), pool, pool_stride, conv_out);
    };
#pragma unroll
    for (int e = 0; e < AHEAD; e++) finish(threadIdx.x + e * CONSUMERS, other[e], channel[e]);
    for (int i = threadIdx.x + AHEAD * CONSUMERS; i < results; i += CONSUMERS) {
        Channel late = fetch_channel(i);
        finish(i, fetch(i), late);
    }
}
