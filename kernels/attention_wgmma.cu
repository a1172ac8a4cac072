// Attention of many queries, bf16, compute capability 9.0: a block owns 128 consecutive tokens of one row and one query
// head. One warpgroup copies tiles of KEYS keys and values; two warpgroups of 64 tokens each compute the softmax of one tile
// while the product with the values of the tile before still runs.
// Grid (H, tiles); tiles are counted over the rows in order, the last ones (most keys) start first.
// HEAD_DIM (64, 128 or 256), HEADS, KV_HEADS, WINDOW (0 = none), FIRST; out is bf16.

#include "wgmma.cuh"

constexpr int TILE = 128;
constexpr int KEYS = HEAD_DIM == 256 ? 64 : 128; // what fits into shared memory and registers
constexpr int STAGES = 2;
constexpr int GROUP = 128;                       // threads of a warpgroup
constexpr int VECS = HEAD_DIM / 8;
constexpr u32 Q_BYTES = TILE * HEAD_DIM * 2, KV_BYTES = KEYS * HEAD_DIM * 2;
constexpr int N = HEAD_DIM < 128 ? HEAD_DIM : 128; // columns of a product with the values
constexpr u32 ALL = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) ENTRY(PARAMETERS) {
    extern __shared__ u8 shared[];
    __shared__ u64 bars[4 * STAGES];
    int tile = gridDim.y - 1 - blockIdx.y, r, first, tokens;
    if (!tile_row(st, TILE, tile, r, first, tokens)) return;
    u32 sq = (smem_addr(shared) + 1023) & ~1023u, sk = sq + Q_BYTES, sv = sk + STAGES * KV_BYTES;
    // Of K, then of V: the tile has arrived, the tile has been read.
    u32 full = smem_addr(bars), empty = full + 16 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) {
            mbar_init(full + 8 * i, GROUP);
            mbar_init(empty + 8 * i, 8);
        }
        wgmma_publish();
    }
    __syncthreads();
    int h = blockIdx.x, kv = h / (HEADS / KV_HEADS), t0 = tile * TILE;
    int p0 = st.position(first);                 // of the row's first token
    int final = p0 + tokens - 1;                 // last position that has keys
    int q_first = p0 + t0, q_last = min(q_first + TILE - 1, final);
    int from = WINDOW ? max(0, q_first + 1 - WINDOW) / KEYS : 0, to = q_last / KEYS + 1;
    int group = threadIdx.x / GROUP, tid = threadIdx.x % GROUP, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;

    if (group == 2) {
        registers_lower<40>();
        const u32 *table = st.page_row(r);
        int row = tid / VECS, piece = tid % VECS;      // of the first of this thread's pieces
        constexpr int STEP = GROUP / VECS;             // rows between them
        static_assert(STEP % 4 == 0, "rows are at most one bit of the swizzle apart");
        u32 at = piece / 8 * (KEYS * 128) + swizzle<8>(row, piece % 8);
        i64 head = (i64)kv * PAGE * HEAD_DIM + row * HEAD_DIM + piece * 8;
        auto pages = [&](int tile, u32 *id) {
            int last = final / PAGE;
#pragma unroll
            for (int i = 0; i < KEYS / PAGE; i++) id[i] = table[min(tile * (KEYS / PAGE) + i, last)];
        };
        // Issues one tile and hands over the one before it.
        int issued = 0;
        u32 before = 0;
        auto copy = [&](const bf16 *base, i64 stride, const u32 *id, int tile, u32 dst, u32 bar) {
            int keys = final + 1 - tile * KEYS;        // later ones must not bring a NaN into the products
#pragma unroll
            for (int i = 0; i < KEYS / PAGE; i++) {
                const bf16 *src = base + id[i] * stride + head;
#pragma unroll
                for (int j = 0; j < PAGE / STEP; j++)
                    cp_async16(dst + (at ^ j * STEP % 8 * 16) + (i * PAGE + j * STEP) * 128, src + j * STEP * HEAD_DIM,
                               row + i * PAGE + j * STEP < keys);
            }
            cp_async_commit();
            if (issued++ > 0) {
                cp_async_wait<1>();
                wgmma_publish();
                mbar_arrive(before);
            }
            before = bar;
        };
        u32 now[KEYS / PAGE], next[KEYS / PAGE];
        pages(from, now);
        for (int i = 0; i <= to - from; i++) {
            // K of tile i, then V of tile i - 1: the order in which they are wanted.
            if (i < to - from) {
                pages(from + i, next);
                int s = i % STAGES;
                if (i >= STAGES) mbar_wait(empty + 8 * s, (i / STAGES - 1) & 1);
                copy(k_pages, k_pages_stride, next, from + i, sk + s * KV_BYTES, full + 8 * s);
            }
            if (i > 0) {
                int s = (i - 1) % STAGES;
                if (i > STAGES) mbar_wait(empty + 8 * (STAGES + s), ((i - 1) / STAGES - 1) & 1);
                copy(v_pages, v_pages_stride, now, from + i - 1, sv + s * KV_BYTES, full + 8 * (STAGES + s));
            }
#pragma unroll
            for (int j = 0; j < KEYS / PAGE; j++) now[j] = next[j];
        }
        cp_async_wait<0>();
        wgmma_publish();
        mbar_arrive(before);
        return;
    }

    registers_raise<232>();
    int w0 = group * 64 + warp * 16;             // this warp's first token in the tile
    for (int i = tid; i < 64 * VECS; i += GROUP) {
        int row = group * 64 + i / VECS, x = i % VECS;
        bool in = t0 + row < tokens;
        cp_async16(sq + x / 8 * (TILE * 128) + swizzle<8>(row, x % 8),
                   q + (i64)(first + (in ? t0 + row : t0)) * q_stride + h * HEAD_DIM + x * 8, in);
    }
    cp_async_commit();
    cp_async_wait<0>();
    wgmma_publish();
    named_sync(1 + group, GROUP);

    float acc[HEAD_DIM / 2], s[KEYS / 2], top[2] = {-INF, -INF}, sum[2] = {}, keep[2];
    u32 p[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
    float factor = scale * LOG2E;                // scores in powers of 2
    u64 dq = tile_desc(sq + group * 64 * 128, 0, 1024);
    auto scores = [&](int i) {
        u64 dk = tile_desc(sk + i % STAGES * KV_BYTES, 0, 1024);
        mbar_wait(full + 8 * (i % STAGES), i / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; j++)
            wgmma<KEYS>(s, dq + (j / 4 * TILE * 8 + j % 4 * 2), dk + (j / 4 * KEYS * 8 + j % 4 * 2), j > 0);
        wgmma_commit();
    };
    auto weigh = [&](int i) {
        u64 dv = tile_desc(sv + i % STAGES * KV_BYTES, KEYS * 128, 1024);
        mbar_wait(full + 8 * (STAGES + i % STAGES), i / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
            for (int n = 0; n < HEAD_DIM; n += N)
                wgmma_registers<N, true>(acc + n / 2, p[j], dv + j * 128 + n / 64 * KEYS * 8);
        wgmma_commit();
    };
    // Scores to weights, in place, and the factor for the sums so far.
    auto softmax = [&](int i) {
        int key0 = (from + i) * KEYS, position = q_first + w0;
        if (key0 + KEYS - 1 > position || (WINDOW && key0 <= position + 15 - WINDOW) || key0 < FIRST) {
#pragma unroll
            for (int n = 0; n < KEYS / 2; n++) {
                int key = key0 + n / 4 * 8 + 2 * c + n % 2, mine = position + g + n / 2 % 2 * 8;
                if (key > mine || (WINDOW && key <= mine - WINDOW) || key < min(FIRST, mine)) s[n] = -INF;
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float now = top[e];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) now = fmaxf(now, fmaxf(s[4 * n + 2 * e], s[4 * n + 2 * e + 1]));
            now = fmaxf(now, __shfl_xor_sync(ALL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(ALL, now, 2));
            float base = now == -INF ? 0.f : now * factor;
            keep[e] = top[e] == -INF ? 0.f : ex2(top[e] * factor - base);
            top[e] = now;
            float part = 0.f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float x = ex2(s[4 * n + 2 * e + j] * factor - base);
                    s[4 * n + 2 * e + j] = x;
                    part += x;
                }
            sum[e] = sum[e] * keep[e] + part;
        }
    };
    auto pack = [&]() {
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[j][i] = pack_bf16(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    };
    auto release = [&](u32 bar) {
        if (lane == 0) mbar_arrive(bar);
    };

    int tiles = to - from;
    scores(0);
    wgmma_wait<0, KEYS / 2>(s);
    release(empty);
    softmax(0);
    pack();
    for (int i = 1; i < tiles; i++) {
        scores(i);
        weigh(i - 1);
        wgmma_wait<1, KEYS / 2>(s);
        release(empty + 8 * (i % STAGES));
        softmax(i);
        wgmma_wait<0, HEAD_DIM / 2>(acc);
        release(empty + 8 * (STAGES + (i - 1) % STAGES));
        if (__any_sync(ALL, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 2; n++) acc[n] *= keep[n / 2 % 2];
        }
        pack();
    }
    weigh(tiles - 1);
    wgmma_wait<0, HEAD_DIM / 2>(acc);

    // Through the queries' place in shared memory, so that whole sectors are written.
    named_sync(1 + group, GROUP);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float total = sum[e];
        total += __shfl_xor_sync(ALL, total, 1);
        total += __shfl_xor_sync(ALL, total, 2);
        float inverse = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
        for (int n = 0; n < VECS; n++)
            store_shared(sq + n / 8 * (TILE * 128) + swizzle<8>(w0 + g + 8 * e, n % 8) + 4 * c,
                         pack_bf16(acc[4 * n + 2 * e] * inverse, acc[4 * n + 2 * e + 1] * inverse));
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * VECS; i += 32) {
        int row = w0 + i / VECS, x = i % VECS;
        uint4 v = load_shared16(sq + x / 8 * (TILE * 128) + swizzle<8>(row, x % 8));
        if (t0 + row < tokens)
            *reinterpret_cast<uint4 *>(out + (i64)(first + t0 + row) * out_stride + h * HEAD_DIM + x * 8) = v;
    }
}
