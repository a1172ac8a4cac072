// Attention over latents, bf16, compute capability 9.0: a block has 64 queries, the heads of a token or of a few consecutive tokens
// of one row, which all read the same pages; a page's latents are keys and values. One warpgroup copies pages, each half of it into a
// place of its own. Another one computes scores and weights; it and a third one multiply the weights with half of the columns each.
// The pages of a token are cut into SPLITS runs.
// Grid (tiles of TOKENS tokens, tiles of heads, SPLITS); tiles of several tokens are counted over the rows in order, the last ones
// (most keys) start first.
// LATENT (a multiple of 128 up to 512), SHARED (of 16 up to 64), WIDTH (columns of a head of `queries`), HEADS, TOKENS (at most 64
// heads in all, or 1), SPLITS (1 of several tokens).

#include "wgmma.cuh"

constexpr int GROUP = 128;                       // threads of a warpgroup
constexpr int QUERIES = 64;
constexpr int PLACES = 2;                        // of pages in shared memory
constexpr int BRINGERS = GROUP / PLACES;
constexpr int BLOCK_HEADS = HEADS < QUERIES ? HEADS : QUERIES;
constexpr int VECS = LATENT / 8, TAIL_VECS = SHARED / 8; // 16-byte pieces of a row
constexpr int HALF = LATENT / 2;                 // columns of a warpgroup
constexpr int N = HALF % 128 == 0 ? 128 : 64;    // columns of a product with the values
constexpr u32 TILE_BYTES = 64 * 128;             // 64 rows of 64 columns, in which queries and pages are stored
constexpr u32 AT_TAIL = LATENT / 64 * TILE_BYTES, BYTES = AT_TAIL + TILE_BYTES;
constexpr u32 AT_WEIGHTS = (1 + PLACES) * BYTES, AT_FACTORS = AT_WEIGHTS + TILE_BYTES;
constexpr u32 ALL = 0xffffffffu;

// This thread's pieces of 64 rows of PIECES, without gaps in memory; zeros from row `count` on.
template <int PIECES> DEV void bring(u32 to, const bf16 *from, int count, int tid) {
#pragma unroll 4
    for (int i = tid; i < PAGE * PIECES; i += BRINGERS) {
        int row = i / PIECES, piece = i % PIECES;
        cp_async16(to + piece / 8 * TILE_BYTES + swizzle<8>(row, piece % 8), from + i * 8, row < count);
    }
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) ENTRY(PARAMETERS) {
    extern __shared__ u8 shared[];
    // A page has arrived, has been read; per warp, the weights are there, have been read.
    __shared__ u64 bars[2 * PLACES + 8];
    let_next_start();
    wait_for_inputs();
    int tile = TOKENS > 1 ? gridDim.x - 1 - blockIdx.x : 0, first = blockIdx.x, tokens = 1, r;
    if constexpr (TOKENS > 1) {
        if (!tile_row(st, TOKENS, tile, r, first, tokens)) return;
    } else {
        r = st.token_row(first);
        if ((u32)r == NONE) return;
    }
    int t0 = first + tile * TOKENS, h0 = blockIdx.y * BLOCK_HEADS, split = blockIdx.z;
    tokens = min(tokens - tile * TOKENS, TOKENS);
    int heads = min(HEADS - h0, BLOCK_HEADS);
    int position = st.position(t0), last = position + tokens - 1;
    int pages = last / PAGE + 1, per = div_up(pages, SPLITS), from = split * per, count = max(0, min(pages - from, per));
    u32 sq = (smem_addr(shared) + 1023) & ~1023u, places = sq + BYTES, weights = sq + AT_WEIGHTS, factors = sq + AT_FACTORS;
    u32 full = smem_addr(bars), empty = full + 8 * PLACES, ready = empty + 8 * PLACES, taken = ready + 8 * 4;
    int group = threadIdx.x / GROUP, tid = threadIdx.x % GROUP, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PLACES; i++) {
            mbar_init(full + 8 * i, BRINGERS);
            mbar_init(empty + 8 * i, 8);
        }
        for (int i = 0; i < 8; i++) mbar_init(ready + 8 * i, 1);
        wgmma_publish();
    }
    __syncthreads();

    if (group == 2) {
        registers_lower<40>();
        const u32 *table = st.page_row(r) + from;
        int place = tid / BRINGERS, mine = tid % BRINGERS;
        u32 to = places + place * BYTES;
        i64 next = place < count ? table[place] : 0;
        for (int i = place, turn = 0; i < count; i += PLACES, turn ^= 1) {
            i64 page = next;
            if (i + PLACES < count) next = table[i + PLACES];
            if (i >= PLACES) mbar_wait(empty + 8 * place, turn ^ 1);
            int keys = last + 1 - (from + i) * PAGE;     // later ones must not bring a NaN into the products
            bring<VECS>(to, k_pages + page * k_pages_stride, keys, mine);
            bring<TAIL_VECS>(to + AT_TAIL, v_pages + page * v_pages_stride, keys, mine);
            cp_async_commit();
            cp_async_wait<0>();
            wgmma_publish();
            mbar_arrive(full + 8 * place);
        }
        return;
    }

    registers_raise<232>();
    // Query m is of head m % BLOCK_HEADS of token m / BLOCK_HEADS; those that there are not are zeros.
    auto exists = [&](int m) { return m / BLOCK_HEADS < tokens && m % BLOCK_HEADS < heads; };
    for (int i = threadIdx.x; i < QUERIES * (VECS + TAIL_VECS); i += 2 * GROUP) {
        int m = i / (VECS + TAIL_VECS), x = i % (VECS + TAIL_VECS);
        bool in = exists(m);
        i64 t = in ? t0 + m / BLOCK_HEADS : t0, h = in ? h0 + m % BLOCK_HEADS : h0;
        const bf16 *of_tail = queries + t * queries_stride + (h + 1) * WIDTH - SHARED + (x - VECS) * 8;
        cp_async16(sq + x / 8 * TILE_BYTES + swizzle<8>(m, x % 8), x < VECS ? q + t * q_stride + h * LATENT + x * 8 : of_tail, in);
    }
    cp_async_commit();
    cp_async_wait<0>();
    wgmma_publish();
    named_sync(1, 2 * GROUP);

    float acc[HALF / 2], keep[2];
    u32 p[PAGE / 16][4];
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) acc[i] = 0.f;
    ready += 8 * warp;
    taken += 8 * warp;
    u32 own_weights = weights + warp * 2048 + lane * 16, own_factors = factors + (warp * 32 + lane) * 8;
    auto give_factors = [&]() {
        store_shared(own_factors, __float_as_uint(keep[0]));
        store_shared(own_factors + 4, __float_as_uint(keep[1]));
    };
    auto arrive = [&](u32 bar) {
        __syncwarp();
        if (lane == 0) mbar_arrive(bar);
    };
    // The product of page i's weights and values in this warpgroup's columns.
    auto weigh = [&](int i) {
        u64 dv = tile_desc(places + i % PLACES * BYTES + group * (HALF / 64) * TILE_BYTES, TILE_BYTES, 1024);
        if (__any_sync(ALL, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
            for (int n = 0; n < HALF / 2; n++) acc[n] *= keep[n / 2 % 2];
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < PAGE / 16; j++)
#pragma unroll
            for (int n = 0; n < HALF; n += N) wgmma_registers<N, true>(acc + n / 2, p[j], dv + j * 128 + n / 64 * (TILE_BYTES / 16));
        wgmma_commit();
        wgmma_wait<0, HALF / 2>(acc);
        arrive(empty + 8 * (i % PLACES));
    };

    float top[2] = {-INF, -INF}, sum[2] = {};
    if (group == 0) {
        float factor = scale * LOG2E;            // scores in powers of 2
        int limit[2];                            // last keys of queries g and g + 8 of this warp
#pragma unroll
        for (int e = 0; e < 2; e++) limit[e] = position + (warp * 16 + g + 8 * e) / BLOCK_HEADS;
        u64 dq = tile_desc(sq, 0, 1024);
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            u64 dk = tile_desc(places + i % PLACES * BYTES, 0, 1024);
            float s[PAGE / 2];
            mbar_wait(full + 8 * (i % PLACES), i / PLACES & 1);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < (LATENT + SHARED) / 16; j++) {
                int at = j / 4 * (TILE_BYTES / 16) + j % 4 * 2;
                wgmma<PAGE>(s, dq + at, dk + at, j > 0);
            }
            wgmma_commit();
            wgmma_wait<0, PAGE / 2>(s);
            int key0 = (from + i) * PAGE;
            if (key0 + PAGE - 1 > position) {
#pragma unroll
                for (int n = 0; n < PAGE / 2; n++)
                    if (key0 + n / 4 * 8 + 2 * c + n % 2 > limit[n / 2 % 2]) s[n] = -INF;
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float now = top[e];
#pragma unroll
                for (int n = 0; n < PAGE / 8; n++) now = fmaxf(now, fmaxf(s[4 * n + 2 * e], s[4 * n + 2 * e + 1]));
                now = fmaxf(now, __shfl_xor_sync(ALL, now, 1));
                now = fmaxf(now, __shfl_xor_sync(ALL, now, 2));
                float base = now * factor, part = 0.f;
                keep[e] = ex2(top[e] * factor - base);
                top[e] = now;
#pragma unroll
                for (int n = 0; n < PAGE / 8; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float x = ex2(s[4 * n + 2 * e + j] * factor - base);
                        s[4 * n + 2 * e + j] = x;
                        part += x;
                    }
                sum[e] = sum[e] * keep[e] + part;
            }
            if (i > 0) mbar_wait(taken, (i - 1) & 1);
#pragma unroll
            for (int j = 0; j < PAGE / 16; j++) {
#pragma unroll
                for (int n = 0; n < 4; n++) p[j][n] = pack_bf16(s[8 * j + 2 * n], s[8 * j + 2 * n + 1]);
                store_shared16(own_weights + j * 512, {p[j][0], p[j][1], p[j][2], p[j][3]});
            }
            give_factors();
            arrive(ready);
            weigh(i);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            sum[e] += __shfl_xor_sync(ALL, sum[e], 1);
            sum[e] += __shfl_xor_sync(ALL, sum[e], 2);
            keep[e] = SPLITS > 1 ? 1.f : 1.f / sum[e];
        }
        if constexpr (SPLITS == 1) {
            mbar_wait(taken, (count - 1) & 1);
            give_factors();
            arrive(ready);
        }
    } else {
        auto take_factors = [&]() {
            float2 x = load_shared_f32x2(own_factors);
            keep[0] = x.x;
            keep[1] = x.y;
        };
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            mbar_wait(ready, i & 1);
#pragma unroll
            for (int j = 0; j < PAGE / 16; j++) {
                uint4 w = load_shared16(own_weights + j * 512);
                p[j][0] = w.x;
                p[j][1] = w.y;
                p[j][2] = w.z;
                p[j][3] = w.w;
            }
            take_factors();
            arrive(taken);
            mbar_wait(full + 8 * (i % PLACES), i / PLACES & 1);
            weigh(i);
        }
        if constexpr (SPLITS == 1) {
            mbar_wait(ready, count & 1);
            take_factors();
        }
    }

    int w0 = warp * 16;                          // this warp's first query
    if constexpr (SPLITS > 1) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int m = w0 + g + 8 * e;
            if (!exists(m)) continue;
            float *to = partial + (((i64)t0 * HEADS + h0 + m) * SPLITS + split) * (LATENT + 4);
#pragma unroll
            for (int n = 0; n < HALF / 8; n++)
                *reinterpret_cast<float2 *>(to + 4 + group * HALF + n * 8 + 2 * c) = make_float2(acc[4 * n + 2 * e], acc[4 * n + 2 * e + 1]);
            if (group == 0 && c == 0) *reinterpret_cast<float2 *>(to) = make_float2(top[e] * scale, sum[e]);
        }
        return;
    }
    // Through the queries' place in shared memory, so that whole sectors are written. All warps have their scores by now.
    named_sync(2 + group, GROUP);
    u32 at = sq + group * (HALF / 64) * TILE_BYTES;
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int n = 0; n < HALF / 8; n++)
            store_shared(at + n / 8 * TILE_BYTES + swizzle<8>(w0 + g + 8 * e, n % 8) + 4 * c,
                         pack_bf16(acc[4 * n + 2 * e] * keep[e], acc[4 * n + 2 * e + 1] * keep[e]));
    __syncwarp();
    for (int i = lane; i < 16 * (HALF / 8); i += 32) {
        int m = w0 + i / (HALF / 8), x = i % (HALF / 8);
        uint4 v = load_shared16(at + x / 8 * TILE_BYTES + swizzle<8>(m, x % 8));
        i64 t = t0 + m / BLOCK_HEADS, h = h0 + m % BLOCK_HEADS;
        if (exists(m)) *reinterpret_cast<uint4 *>(out + t * out_stride + h * LATENT + group * HALF + x * 8) = v;
    }
}
