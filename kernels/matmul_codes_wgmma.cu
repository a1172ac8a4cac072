// Products of 9 to 64 rows of x with coded weights, compute capability 9.0: a lane decodes its part of an operand to bf16 elements in
// registers, and warpgroups multiply them with x in shared memory. The layout of W is that of codes.cuh.
//
// A tile is ROWS rows of W, 16 for each warp, and is taken in spans of codes.cuh. Every warp copies its rows of a span through
// a ring of its own, before the previous kernels are complete. All share the spans of x, which another warpgroup brings into order.
// The spans of all tiles are dealt evenly to the blocks, one after the other. Of a tile that is dealt to several blocks, the one
// with the first span, which takes it last, adds the sums that the others have left in `partial`, in the order of the spans. Where
// WAYS blocks share each tile, each of them adds, of some rows of x, what all have left.
//
// With EIGHTS, x are codes of E4M3 too, and a scale per row and 128 columns in x_scales [K / 128, M], see round_codes.cu: codes are
// multiplied as they are, and sums over 128 elements with the scales of both.
//
// Grid: blocks that are on the device at once, since they wait for each other; at most the spans of all tiles.
// Constants:
//   FORMAT, K, M
//   GROUPS          warpgroups that multiply
//   STAGES          of a warp's ring
//   X_STAGES        of the ring of spans of x
//   WAYS            blocks of a tile, at most one for 8 rows of x; 1: dealt as said
//   EIGHTS          x are codes; its stride is in bytes
//   FOURS           four columns of out can be read and written at once
//   EVICT_FIRST, ACCUMULATE, HAS_COLUMNS, HAS_BIAS
// Type: out_t.

#include "codes.cuh"
#include "wgmma.cuh"

constexpr int UNITS = div_up(K, UNIT);
constexpr int SPANS = div_up(UNITS, SPAN_UNITS); // of a tile
constexpr int WARPS = 4 * GROUPS;                // that multiply
constexpr int GROUP = 128;                       // threads of a warpgroup
constexpr int THREADS = GROUP * (GROUPS + 1);
constexpr int ROWS = TILE * WARPS;
constexpr int BATCH = EIGHTS ? 128 : 64;         // elements of a product: rows of 128 bytes of x
constexpr int BATCHES = SPAN / BATCH;
constexpr int COLS = div_up(M, 16) * 16;         // columns of a product: rows of x, and some that reach no result
constexpr int SUMS = COLS / 2;                   // of a thread
constexpr int MINE = div_up(COLS / 8, WAYS);      // eights of rows of x that a block finishes, at most
constexpr u32 BATCH_BYTES = COLS * 128;          // of all rows of x
constexpr u32 X_BYTES = BATCHES * BATCH_BYTES;
constexpr int EACH = div_up(M * 4, GROUP);       // a thread's pieces of a batch of x, of 32 bytes
constexpr int PIECE = BATCH / 4;                 // elements of a piece
static_assert(!EIGHTS || FORMAT == F8 && K % UNIT == 0, "scales of whole units");

DEV uint4 larger(uint4 v) {
    if constexpr (UP == 0) return v;
    return make_uint4(fma_bf16x2(v.x, X_EVEN, MINUS_ZERO), fma_bf16x2(v.y, X_EVEN, MINUS_ZERO), fma_bf16x2(v.z, X_EVEN, MINUS_ZERO),
                      fma_bf16x2(v.w, X_EVEN, MINUS_ZERO));
}

typedef Raw<EIGHTS ? 1 : 2>::type x_t;           // of x, as bits

// Codes of x in the order of the bytes of a word of codes of W.
DEV uint4 as_codes(uint4 v) {
    constexpr u32 ORDER = 0x1302;
    return make_uint4(__byte_perm(v.x, 0, ORDER), __byte_perm(v.y, 0, ORDER), __byte_perm(v.z, 0, ORDER), __byte_perm(v.w, 0, ORDER));
}

// The pieces of a batch of x of a thread, on their way to shared memory.
struct Pieces {
    uint4 v[EACH][2];

    DEV void fetch(const x_t *x, i64 stride, int k) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int i = threadIdx.x % GROUP + e * GROUP;
            k += e == 0 ? i % 4 * PIECE : 0;
            bool in = (M * 4 % GROUP == 0 || i < M * 4) && (K % SPAN == 0 || k < K);
            const uint4 *at = reinterpret_cast<const uint4 *>(x + i / 4 * stride + k);
            v[e][0] = in ? at[0] : make_uint4(0, 0, 0, 0);
            v[e][1] = in ? at[1] : make_uint4(0, 0, 0, 0);
        }
    }
    // In the order of elements that a lane's codes have: of 16, those of 4 q and 4 q + 1, then those of 4 q + 2 and 4 q + 3. Times 2^UP.
    DEV void store(u32 to) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int i = threadIdx.x % GROUP + e * GROUP;
            if (M * 4 % GROUP != 0 && i >= M * 4) continue;
            if constexpr (EIGHTS) {
#pragma unroll
                for (int h = 0; h < 2; h++) store_shared16(to + swizzle<8>(i / 4, i % 4 * 2 + h), as_codes(v[e][h]));
                continue;
            }
            uint4 a = larger(v[e][0]), b = larger(v[e][1]);
            store_shared16(to + swizzle<8>(i / 4, i % 4 * 2), make_uint4(a.x, a.z, b.x, b.z));
            store_shared16(to + swizzle<8>(i / 4, i % 4 * 2 + 1), make_uint4(a.y, a.w, b.y, b.w));
        }
    }
};

// The ring of spans of x. Of each stage: it is there, it was read.
struct RingOfX {
    u32 tiles, full, empty;

    DEV u32 tile(int job) const { return tiles + job % X_STAGES * X_BYTES; }
    DEV void wait_full(int job) const { mbar_wait(full + job % X_STAGES * 8, job / X_STAGES & 1); }
    DEV void wait_empty(int job) const { mbar_wait(empty + job % X_STAGES * 8, ~(job / X_STAGES) & 1); }
    DEV void is_full(int job) const { mbar_arrive(full + job % X_STAGES * 8); }
    DEV void is_empty(int job) const { mbar_arrive(empty + job % X_STAGES * 8); }
};

// The scales of the spans of x in the ring.
typedef float ScalesOfX[X_STAGES][EIGHTS ? SPAN_UNITS : 1][EIGHTS ? COLS : 1];

// Brings the spans of x of `jobs` jobs into the ring, each while the one before is waited for.
DEV void copy_x(const x_t *x, i64 stride, const float *x_scales, const RingOfX &ring, ScalesOfX &scales, int span, int jobs) {
    Pieces next[BATCHES];
    float next_scales[SPAN_UNITS] = {};
    int t = threadIdx.x % GROUP;
    auto fetch_scales = [&]() {
#pragma unroll
        for (int u = 0; u < SPAN_UNITS; u++)
            if (EIGHTS && t < M && span * SPAN_UNITS + u < UNITS) next_scales[u] = x_scales[(span * SPAN_UNITS + u) * M + t];
    };
#pragma unroll
    for (int b = 0; b < BATCHES; b++) next[b].fetch(x, stride, span * SPAN + b * BATCH);
    fetch_scales();
    for (int job = 0; job < jobs; job++) {
        span = span + 1 < SPANS ? span + 1 : 0;
        ring.wait_empty(job);
        if (EIGHTS && t < COLS) {
#pragma unroll
            for (int u = 0; u < SPAN_UNITS; u++) scales[job % X_STAGES][EIGHTS ? u : 0][EIGHTS ? t : 0] = next_scales[u];
        }
        if (job + 1 < jobs) fetch_scales();
#pragma unroll
        for (int b = 0; b < BATCHES; b++) {
            next[b].store(ring.tile(job) + b * BATCH_BYTES);
            if (job + 1 < jobs) next[b].fetch(x, stride, span * SPAN + b * BATCH);
        }
        wgmma_publish();
        ring.is_full(job);
    }
}

// What warpgroups tell each other about the tiles that blocks share: sums that they leave, and how many have, 8 bits for each.
struct Shared {
    float *partial;
    u32 *ticket;
    int group;

    DEV float4 *place(int block) const {
        return reinterpret_cast<float4 *>(partial) + ((i64)block * GROUPS + group) * (SUMS / 4) * GROUP + threadIdx.x % GROUP;
    }
    DEV u32 count() const { return *reinterpret_cast<volatile u32 *>(ticket) >> 8 * group & 255; }
    // Leaves the sums that `mine` does not name, by eight rows of x.
    template <class F> DEV void leave(const float *sums, F &&mine) const {
        float4 *to = place(blockIdx.x);
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++)
            if (!mine(i)) to[i * GROUP] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        named_sync(1 + group, GROUP);
        if (threadIdx.x % GROUP == 0) {
            __threadfence();
            atomicAdd(ticket, 1u << 8 * group);
        }
    }
    // Adds the sums of as many `others`, the next blocks.
    DEV void add(float *sums, int others) const {
        if (threadIdx.x % GROUP == 0) {
            while (count() != others) {}
            __threadfence();
            atomicSub(ticket, (u32)others << 8 * group);
        }
        named_sync(1 + group, GROUP);
        for (int b = 1; b <= others; b++) {
            const float4 *from = place(blockIdx.x + b);
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++) plus(sums + 4 * i, __ldcg(from + i * GROUP));
        }
    }
    // Of the sums that `mine` names, adds those of all blocks of the tile, in their order.
    template <class F> DEV void add_mine(float *sums, F &&mine) const {
        if (threadIdx.x % GROUP == 0) {
            while (count() < WAYS) {}
            __threadfence();
            // The last one that has seen them begins again.
            u32 seen = atomicAdd(ticket, 1u << 8 * group) >> 8 * group & 255;
            if (seen == 2 * WAYS - 1) atomicSub(ticket, 2u * WAYS << 8 * group);
        }
        named_sync(1 + group, GROUP);
        int first = blockIdx.x / WAYS * WAYS;
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) {
            if (!mine(i)) continue;
            float4 own = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]), v[WAYS];
#pragma unroll
            for (int b = 0; b < WAYS; b++) v[b] = first + b == blockIdx.x ? own : __ldcg(place(first + b) + i * GROUP);
#pragma unroll
            for (int e = 0; e < 4; e++) sums[4 * i + e] = 0.f;
#pragma unroll
            for (int b = 0; b < WAYS; b++) plus(sums + 4 * i, v[b]);
        }
    }
    static DEV void plus(float *sums, float4 v) {
        sums[0] += v.x;
        sums[1] += v.y;
        sums[2] += v.z;
        sums[3] += v.w;
    }
};

// Four columns of a row of out.
struct Four {
    out_t *at;
    int count; // of them that are there

    DEV Four(out_t *at, int count) : at(at), count(count) {}
    DEV void get(float *v) const {
        if (FOURS && count >= 4) return load<4>(at, v);
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = e < count ? to_f32(at[e]) : 0.f;
    }
    DEV void put(const float *v) const {
        if (FOURS && count >= 4) return store<4>(at, v);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (e < count) at[e] = from_f32<out_t>(v[e]);
    }
};

// Adds the products of the `count` units of a span, codes with codes; `wait` waits for those of x.
template <class F>
DEV void multiply_eights(const u8 *stage, int count, int lane, u64 desc, float *sums, const float (*scales_of_x)[EIGHTS ? COLS : 1], F &&wait) {
#pragma unroll
    for (int u = 0; u < SPAN_UNITS; u++) {
        if (u >= count) break;
        const u8 *unit = stage + u * UNIT_BYTES;
        u32 a[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 w = reinterpret_cast<const uint4 *>(unit)[j * 32 + lane];
            a[4 * j] = w.x;
            a[4 * j + 1] = w.z;
            a[4 * j + 2] = w.y;
            a[4 * j + 3] = w.w;
        }
        if (u == 0) wait();
        float part[SUMS];
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma_eights<COLS>(part, a + 4 * j, desc + u * (BATCH_BYTES >> 4) + j * 2, j > 0);
        wgmma_commit();
        Scales scales(unit, lane / 4);
        float of_row[2] = {scales.scale(0, 0, 0), scales.scale(0, 1, 0)};
        wgmma_wait<0, SUMS>(part);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            float of_x = scales_of_x[u][i / 4 * 8 + lane % 4 * 2 + i % 2];
            sums[i] = __fmaf_rn(part[i], of_x * of_row[i / 2 % 2], sums[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(PARAMETERS) {
    extern __shared__ u8 shared[];
    __shared__ __align__(8) u64 full[WARPS][STAGES], of_x[2][X_STAGES];
    __shared__ __align__(8) ScalesOfX scales_of_x;
    __shared__ __align__(8) u32 factors_of[EIGHTS ? 1 : WARPS][TILE][8]; // of a span, by its groups
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    RingOfX ring_of_x = {(smem_addr(shared) + 1023) & ~1023u, smem_addr(of_x[0]), smem_addr(of_x[1])};
    u8 *ring = shared + (ring_of_x.tiles - smem_addr(shared)) + X_STAGES * X_BYTES + warp * STAGES * SPAN_BYTES;
    // Spans of this block, counted over all tiles.
    i64 all = (i64)div_up(n, ROWS) * SPANS;
    auto first_of = [&](int block) {
        if constexpr (WAYS > 1) return block / WAYS * SPANS + block % WAYS * SPANS / WAYS;
        return (int)(block * all / gridDim.x);
    };
    int begin = first_of(blockIdx.x), jobs = first_of(blockIdx.x + 1) - begin;
    auto block_of = [&](i64 span) { return (int)(((span + 1) * gridDim.x - 1) / all); };
    u64 policy = evict_first();
    auto units = [&](int job) { return units_of<UNITS>((begin + job) % SPANS); };
    auto copy = [&](int job) {
        if (lane != 0) return;
        int tile = (begin + job) / SPANS * WARPS + warp, first = (begin + job) % SPANS * SPAN_UNITS;
        u32 bytes = tile * TILE < n ? units(job) * UNIT_BYTES : 0;
        u64 *bar = full[warp] + job % STAGES;
        bulk_expect(bar, bytes);
        if (bytes) bulk_load<EVICT_FIRST>(ring + job % STAGES * SPAN_BYTES, w + ((i64)tile * UNITS + first) * UNIT_BYTES, bytes, bar, policy);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            barrier_init(of_x[0] + s, GROUP);
            barrier_init(of_x[1] + s, WARPS);
        }
    }
    if (lane == 0 && warp < WARPS) {
        for (int s = 0; s < STAGES; s++) barrier_init(full[warp] + s, 1);
        barrier_init_done();
        // Weights do not wait for the previous kernels.
        for (int job = 0; job < min(STAGES, jobs); job++) copy(job);
    }
    __syncthreads();
    wait_for_inputs();
    let_next_start();
    // Of the 96 or 128 registers that a thread begins with, those who copy give some to the others.
    if (warp >= WARPS) {
        registers_lower<GROUPS == 4 ? 64 : EIGHTS ? 80 : 104>();
        return copy_x(reinterpret_cast<const x_t *>(x), x_stride, x_scales, ring_of_x, scales_of_x, begin % SPANS, jobs);
    }
    registers_raise<GROUPS == 4 ? 104 : EIGHTS ? 144 : 136>();

    float sums[SUMS] = {};
    for (int job = 0; job < jobs; job++) {
        int tile = (begin + job) / SPANS, span = (begin + job) % SPANS;
        barrier_wait(full[warp] + job % STAGES, job / STAGES & 1);
        if (job > 0 && job - 1 + STAGES < jobs) copy(job - 1 + STAGES);
        u8 *stage = ring + job % STAGES * SPAN_BYTES;
        u64 desc = tile_desc(ring_of_x.tile(job), 0, 1024);
        if constexpr (EIGHTS) {
            multiply_eights(stage, units(job), lane, desc, sums, scales_of_x[job % X_STAGES], [&] { ring_of_x.wait_full(job); });
            if (lane == 0) ring_of_x.is_empty(job);
        } else {
            // Each lane has the scales of two groups of its rows.
            PairScales scales(stage, g, q);
#pragma unroll
            for (int r = 0; r < 2; r++)
                *reinterpret_cast<uint2 *>(&factors_of[warp][g + 8 * r][2 * q]) = make_uint2(factors(scales, 0, r), factors(scales, 1, r));
            __syncwarp();
            u32 of_w[2][16];
#pragma unroll
            for (int batch = 0; batch < BATCHES; batch++) {
                u32 *a = of_w[batch % 2];
                int unit = batch * 64 / UNIT;
                // Units after the inner dimension count as zeros.
                if (UNITS % SPAN_UNITS == 0 || unit < units(job)) {
                    Codes codes(stage + unit * UNIT_BYTES, batch % (UNIT / 64), lane);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        uint2 w = *reinterpret_cast<const uint2 *>(&factors_of[warp][g + 8 * r][2 * batch]);
#pragma unroll
                        for (int i = 0; i < 8; i++) a[i / 4 * 8 + i % 4 * 2 + r] = rounded(codes, i < 4 ? w.x : w.y, i / 4, r, i % 4);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 16; i++) a[i] = 0;
                }
                if (batch == 0) ring_of_x.wait_full(job);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    wgmma_registers<COLS, false>(sums, a + 4 * i, desc + batch * (BATCH_BYTES >> 4) + i * 2);
                wgmma_commit();
                // The other operands may be written from here on.
                wgmma_wait<1>();
                if (batch == 0 && job > 0 && lane == 0) ring_of_x.is_empty(job - 1);
            }
        }
        __syncwarp();
        if (span + 1 < SPANS && job + 1 < jobs) continue;
        wgmma_wait<0, SUMS>(sums);
        // Which rows of x are finished here, by eights.
        auto mine = [](int i) {
            int part = blockIdx.x % WAYS;
            return WAYS == 1 || (i >= part * (COLS / 8) / WAYS && i < (part + 1) * (COLS / 8) / WAYS);
        };
        int first_block = WAYS > 1 ? blockIdx.x : block_of((i64)tile * SPANS);
        bool finishes = blockIdx.x == first_block;
        // What results take besides their sums is on its way while sums are exchanged, where there are registers for it.
        int row = (tile * WARPS + warp) * TILE + 4 * q, rows = finishes ? n - row : 0;
        float factor[4], bias_of[4], before[MINE][4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            factor[e] = scale;
            if constexpr (HAS_COLUMNS) factor[e] *= e < rows ? columns[row + e] : 0.f;
            bias_of[e] = HAS_BIAS && e < rows ? bias[row + e] : 0.f;
        }
        auto four = [&](int i) { return Four(out + (8 * i + g) * out_stride + row, 8 * i + g < M ? rows : 0); };
        auto get_before = [&] {
#pragma unroll
            for (int i = 0; i < COLS / 8; i++)
                if (ACCUMULATE && mine(i)) four(i).get(before[i % MINE]);
        };
        if (WAYS > 1) get_before();
        Shared others = {partial, tickets + (WAYS > 1 ? tile : first_block), warp / 4};
        if constexpr (WAYS > 1) {
            others.leave(sums, mine);
            others.add_mine(sums, mine);
        } else if (finishes) {
            int blocks = block_of((i64)tile * SPANS + SPANS - 1) - first_block;
            if (blocks > 0) others.add(sums, blocks);
        } else {
            others.leave(sums, [](int) { return false; });
        }
        if (finishes) {
            // Turned in shared memory, 8 rows of x at a time: the warp's part of the span was read.
            float *turned = reinterpret_cast<float *>(stage);
            static_assert(SPAN_BYTES >= 8 * TILE * 4, "room for 8 columns of sums");
            if (WAYS == 1) get_before();
#pragma unroll
            for (int i = 0; i < COLS / 8; i++) {
                if (!mine(i)) continue;
                __syncwarp();
#pragma unroll
                for (int e = 0; e < 4; e++) turned[(2 * q + e % 2) * TILE + g + e / 2 * 8] = sums[4 * i + e];
                __syncwarp();
                float v[4];
                load<4>(turned + g * TILE + 4 * q, v);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    v[e] *= factor[e];
                    if constexpr (HAS_BIAS) v[e] += bias_of[e];
                    if constexpr (ACCUMULATE) v[e] += before[i % MINE][e];
                }
                four(i).put(v);
            }
            wgmma_publish();
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
    }
}
