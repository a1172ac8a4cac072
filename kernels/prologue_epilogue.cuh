// The ops before and after a product of one row, as parts of its kernel: computed by CONSUMERS threads in WARPS warps, which
// synchronise in `sync_consumers`. With ROUND the product's input is rounded, see round.cuh, which is included before.

constexpr int NORM_WARPS = THREADS / 32;         // of a group in rms_norm.cu; each warp here does the work of several of them
constexpr int NORM_UNITS = PROLOGUE == 1 ? K / GROUP * NORM_WARPS : 1;
constexpr int NORM_TURNS = div_up(NORM_UNITS, WARPS);
constexpr int NORM_PASSES = div_up(GROUP, VEC * THREADS);
// The prologue rounds what it stores: 128 columns lie in lanes that are all active, or none.
constexpr bool ROUNDED_STORES = ROUND && (PROLOGUE == 2 || (PROLOGUE == 1 && VEC >= 4 && GROUP % 128 == 0));

// A channel's part of a convolution over one token, in a thread.
struct Channel {
    float w[TAPS + 1], window[TAPS - 1];
    bool in = false;

    DEV void fetch(const u32 *ints, int c, const float *weight, i64 weight_stride, const pool_t *pool, i64 pool_stride) {
        in = c >= 0 && c < CHANNELS;
        if (!in) return;
        u32 src = Chunk(ints + 3).src;
#pragma unroll
        for (int j = 0; j <= TAPS; j++) w[j] = weight[c * weight_stride + j];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++)
            window[j] = src == 0 ? 0.f : to_f32(pool[src * pool_stride + (i64)c * (TAPS - 1) + j]);
    }
    // As in conv1d.cu.
    DEV void put(const u32 *ints, int c, float x, pool_t *pool, i64 pool_stride, conv_t *out) {
        if (!in) return;
        Chunk ch(ints + 3);
        if (ints[2] == NONE || ch.len == 0) {
            out[c] = from_f32<conv_t>(0.f);
            return;
        }
        float s = w[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) s = __fmaf_rn(w[j], window[j], s);
        out[c] = from_f32<conv_t>(activate<CONV_ACT>(__fmaf_rn(w[TAPS - 1], x, s)));
        if (ch.dst == 0) return;
        pool_t *to = pool + ch.dst * pool_stride + (i64)c * (TAPS - 1);
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) to[j] = from_f32<pool_t>(j + 1 < TAPS - 1 ? window[j + 1] : x);
    }
};

// Stores N elements of the prologue's output for the product. Where they are rounded, `out` gets them as they were, each from one block.
template <int N> DEV void put_input(bf16 *x, bf16 *out, int c, float *v) {
    if constexpr (ROUNDED_STORES && N >= 4) {
        if (c / N % gridDim.x == blockIdx.x) store<N>(out + c, v);
        u32 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) pairs[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
        round_pairs<N>(pairs);
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            reinterpret_cast<uint2 *>(x + c)[i] = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
    } else {
        store<N>(x + c, v);
    }
}

// The norm of the only row, by all consumers.
DEV void norm(const bf16 *a, const bf16 *gate, const float *weight, float eps, bf16 *x, bf16 *out, float *sums) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float v[NORM_TURNS][NORM_PASSES][VEC], w[NORM_TURNS][NORM_PASSES][VEC], z[NORM_TURNS][NORM_PASSES][VEC];
    auto each = [&](auto &&f) {
#pragma unroll
        for (int i = 0; i < NORM_TURNS; i++) {
            int unit = warp + i * WARPS, group = unit / NORM_WARPS;
#pragma unroll
            for (int p = 0; p < NORM_PASSES; p++) {
                int c = (unit % NORM_WARPS * 32 + lane + p * THREADS) * VEC;
                if (unit < NORM_UNITS && c < GROUP) f(i, p, group, c);
            }
        }
    };
    each([&](int i, int p, int group, int c) { load<VEC>(weight + (SHARED_WEIGHT ? 0 : group * GROUP) + c, w[i][p]); });
    wait_for_inputs();
    each([&](int i, int p, int group, int c) {
        load<VEC>(a + group * GROUP + c, v[i][p]);
        if constexpr (HAS_SECOND) load<VEC>(gate + group * GROUP + c, z[i][p]);
    });
    float sum[NORM_TURNS] = {};
    each([&](int i, int p, int, int) {
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            if constexpr (HAS_SECOND) z[i][p][e] = activate<ACT>(z[i][p][e]);
            if constexpr (GATE == 1) v[i][p][e] *= z[i][p][e];
            sum[i] += v[i][p][e] * v[i][p][e];
        }
    });
#pragma unroll
    for (int i = 0; i < NORM_TURNS; i++) {
        sum[i] = warp_sum(sum[i]);
        if (lane == 0 && warp + i * WARPS < NORM_UNITS) sums[warp + i * WARPS] = sum[i];
    }
    sync_consumers();
    if constexpr (NORM_WARPS > 1) {
#pragma unroll
        for (int i = 0; i < NORM_TURNS; i++) {
            int first = min(warp + i * WARPS, NORM_UNITS - 1) / NORM_WARPS * NORM_WARPS;
            sum[i] = warp_sum(lane < NORM_WARPS ? sums[first + lane] : 0.f);
        }
    }
    each([&](int i, int p, int group, int c) {
        float r = rsqrtf(sum[i] / GROUP + eps);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            v[i][p][e] *= w[i][p][e] * r;
            if constexpr (GATE == 2) v[i][p][e] *= z[i][p][e];
        }
        put_input<VEC>(x, out, group * GROUP + c, v[i][p]);
    });
}

// act(a) or act(a) * b of the only row, by all consumers; with ROW_GATE times sigmoid(a[ROW_GATE]).
DEV void activation(const bf16 *a, const bf16 *b, bf16 *x, bf16 *out) {
    float gate = ROW_GATE ? sigmoid(to_f32(a[ROW_GATE])) : 1.f;
    constexpr int STEP = CONSUMERS * 8, AHEAD = 4;
    for (int base = threadIdx.x * 8; base < K; base += AHEAD * STEP) {
        float g[AHEAD][8], u[AHEAD][8];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int c = base + i * STEP;
            if (c < K) load<8>(a + c, g[i]);
            if (HAS_SECOND && c < K) load<8>(b + c, u[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int c = base + i * STEP;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                g[i][e] = activate<ACT>(g[i][e]);
                if constexpr (HAS_SECOND) g[i][e] *= u[i][e];
                if constexpr (ROW_GATE != 0) g[i][e] *= gate;
            }
            if (c < K) put_input<8>(x, out, c, g[i]);
        }
    }
}
