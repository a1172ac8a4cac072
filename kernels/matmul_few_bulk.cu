// As matmul_few.cu, from compute capability 9.0 on: a warp of its own copies slices of 16 rows of W in bulk into one ring,
// which runs on across tiles and starts before the kernels ahead are done; WARPS others share the inner dimension of every
// slice and add up in a fixed order, so a result does not depend on the number of rows of x.
// With PRE the op ahead is computed too, by every block for itself and to the same bits as its own kernel does: 1 = RMS norm,
// 2 = activation; then x is what that op writes. With CONV the convolution of CHANNELS columns from CONV_FIRST on, behind it,
// is computed too, again to the same bits. M is 1 there.
// Grid (blocks that fit on the device at once, at most the tiles).
// K, M, WARPS, STAGES, DEPTH (of a slice, a warp), X_RESIDENT (x is copied once, not with every slice), ACCUMULATE, HAS_BIAS,
// PRE, ACT, HAS_SECOND (a gate or a second factor), and of a norm VEC, GROUP, THREADS (that rms_norm.cu gives a group), GATE,
// SHARED_WEIGHT; CONV, and of a convolution CONV_FIRST, CHANNELS, TAPS, CONV_ACT; out_t, pool_t, conv_t.

constexpr int ROWS = 16;
constexpr int SPAN = DEPTH * WARPS;
constexpr int SLICES = div_up(K, SPAN);
constexpr int PITCH = SPAN + 8;                  // ldmatrix without bank conflicts
constexpr int STAGE = (ROWS + (X_RESIDENT ? 0 : M)) * PITCH;
constexpr int X_PITCH = SPAN * SLICES + 8;
constexpr int CONSUMERS = 32 * WARPS;
constexpr bool RAGGED = K % SPAN != 0;
constexpr int NORM_WARPS = THREADS / 32;         // of a group in rms_norm.cu; the warps here stand in for them in turn
constexpr int NORM_UNITS = PRE == 1 ? K / GROUP * NORM_WARPS : 1;
constexpr int NORM_TURNS = div_up(NORM_UNITS, WARPS);
constexpr int NORM_PASSES = div_up(GROUP, VEC * THREADS);

DEV void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// A channel's part of a convolution over one token, in a thread.
struct Channel {
    float w[TAPS + 1], window[TAPS - 1];
    bool in = false;

    DEV void fetch(const u32 *ints, int c, const float *weight, i64 weight_stride, const pool_t *pool, i64 slot_stride) {
        in = c >= 0 && c < CHANNELS;
        if (!in) return;
        u32 src = Chunk(ints + 3).src;
#pragma unroll
        for (int j = 0; j <= TAPS; j++) w[j] = weight[c * weight_stride + j];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++)
            window[j] = src == 0 ? 0.f : to_f32(pool[src * slot_stride + (i64)c * (TAPS - 1) + j]);
    }
    // As conv1d.cu does it.
    DEV void put(const u32 *ints, int c, float x, pool_t *pool, i64 slot_stride, conv_t *out) {
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
        pool_t *to = pool + ch.dst * slot_stride + (i64)c * (TAPS - 1);
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) to[j] = from_f32<pool_t>(j + 1 < TAPS - 1 ? window[j + 1] : x);
    }
};

// The norm of the only row, by all consumers.
DEV void norm(const bf16 *a, const bf16 *gate, const float *weight, float eps, bf16 *x, float *sums) {
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
        store<VEC>(x + group * GROUP + c, v[i][p]);
    });
}

// act(a) or act(a) * b of the only row, by all consumers.
DEV void activation(const bf16 *a, const bf16 *b, bf16 *x) {
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
            }
            if (c < K) store<8>(x + c, g[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32)
    ENTRY(bf16 *x, i64 x_stride, const bf16 *w, i64 w_stride, int n, const float *bias, out_t *out, i64 out_stride,
          float scale, const bf16 *first, const bf16 *second, const float *norm_weight, float eps, const u32 *ints,
          const float *conv_weight, i64 conv_weight_stride, pool_t *pool, i64 slot_stride, conv_t *conv_out,
          u32 untouched) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float part[2][WARPS][M][ROWS], sums[NORM_UNITS];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES], x_full;
    bf16 *ring = reinterpret_cast<bf16 *>(shared), *resident = ring + STAGES * STAGE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int tiles = div_up(n, ROWS);
    int mine = blockIdx.x < tiles ? div_up(tiles - (int)blockIdx.x, (int)gridDim.x) : 0;
    int total = mine * SLICES;
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, WARPS);
        }
        barrier_init(&x_full, 1);
        barrier_init_done();
    }
    if constexpr (RAGGED) {
        // What stands behind the inner dimension must be finite; x is zero there.
        for (int i = threadIdx.x; i < (STAGES * STAGE + (X_RESIDENT ? M * X_PITCH : 0)) / 8; i += CONSUMERS + 32)
            reinterpret_cast<uint4 *>(shared)[i] = make_uint4(0, 0, 0, 0);
        bulk_fence();
    }
    __syncthreads();

    if (warp == WARPS) {
        u64 once = evict_first();
        auto copy = [&](int j, bool of_w, bool of_x) {
            int stage = j % STAGES, k0 = j % SLICES * SPAN;
            u32 bytes = 2 * min(SPAN, K - k0);
            bf16 *to = ring + stage * STAGE;
            if (of_w) {
                if (lane == 0) bulk_expect(full + stage, (ROWS + (X_RESIDENT ? 0 : M)) * bytes);
                __syncwarp();
                int row = min((int)(blockIdx.x + j / SLICES * gridDim.x) * ROWS + lane, n - 1);
                if (lane < ROWS) bulk_load(to + lane * PITCH, w + row * w_stride + k0, bytes, full + stage, once);
            }
            if (!X_RESIDENT && of_x && lane < M)
                bulk_load(to + (ROWS + lane) * PITCH, x + lane * x_stride + k0, bytes, full + stage);
        };
        // The weight does not wait for the kernels ahead.
        for (int j = 0; j < min(STAGES, total); j++) copy(j, true, false);
        wait_for_inputs();
        bulk_fence();
        if (PRE != 0) {
        } else if (X_RESIDENT) {
            if (lane == 0) bulk_expect(&x_full, 2 * M * K);
            __syncwarp();
            if (lane < M) bulk_load(resident + lane * X_PITCH, x + lane * x_stride, 2 * K, &x_full);
        } else {
            for (int j = 0; j < min(STAGES, total); j++) copy(j, false, true);
        }
        for (int j = STAGES; j < total; j++) {
            barrier_wait(empty + j % STAGES, (j / STAGES - 1) & 1);
            copy(j, true, true);
        }
        return;
    }
    Channel channel;
    auto fetch_channel = [&](int tile) {
        if (CONV && threadIdx.x < ROWS)
            channel.fetch(ints, tile * ROWS + (int)threadIdx.x - CONV_FIRST, conv_weight, conv_weight_stride, pool, slot_stride);
    };
    if (untouched) fetch_channel(blockIdx.x);
    if constexpr (PRE == 1) norm(first, second, norm_weight, eps, resident, sums);
    wait_for_inputs();
    // Not sooner: blocks that wait two kernels ahead slow down those that are to run first.
    let_next_start();
    if constexpr (PRE == 2) activation(first, second, resident);
    if constexpr (PRE != 0) {
        sync_consumers();
        for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < K / 8; i += gridDim.x * CONSUMERS)
            reinterpret_cast<uint4 *>(x)[i] = reinterpret_cast<uint4 *>(resident)[i];
    } else if (X_RESIDENT) {
        barrier_wait(&x_full, 0);
    }
    if (!untouched) fetch_channel(blockIdx.x);
    int block = lane / 8, brow = lane % 8, g = lane / 4, q = lane % 4;
    int a_at = (brow + block % 2 * 8) * PITCH + block / 2 * 8 + warp * DEPTH;
    // Eight rows of x, 32 k at once; rows that are not there repeat the first.
    int b_row = brow < M ? brow : 0;
    int b_at = (X_RESIDENT ? b_row * X_PITCH : (ROWS + b_row) * PITCH) + block * 8 + warp * DEPTH;
    int done = 0;
    for (int i = 0; i < mine; i++) {
        int n0 = (blockIdx.x + i * gridDim.x) * ROWS;
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        for (int s = 0; s < SLICES; s++, done++) {
            int stage = done % STAGES;
            barrier_wait(full + stage, done / STAGES & 1);
            bf16 *at = ring + stage * STAGE;
            bf16 *bx = X_RESIDENT ? resident + s * SPAN : at;
#pragma unroll
            for (int k = 0; k < DEPTH; k += 32) {
                u32 a[4], b[4];
                ldmatrix_x4(b, smem_addr(bx + b_at + k));
                ldmatrix_x4(a, smem_addr(at + a_at + k));
                mma_bf16(acc, a, b[0], b[1]);
                ldmatrix_x4(a, smem_addr(at + a_at + k + 16));
                mma_bf16(acc, a, b[2], b[3]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
        }
        float (*sum)[M][ROWS] = part[i % 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (2 * q + e % 2 < M) sum[warp][2 * q + e % 2][g + e / 2 * 8] = acc[e];
        sync_consumers();
        for (int j = threadIdx.x; j < M * ROWS; j += CONSUMERS) {
            int m = j / ROWS, r = j % ROWS;
            if (n0 + r >= n) continue;
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += sum[k][m][r];
            v *= scale;
            if constexpr (HAS_BIAS) v += bias[n0 + r];
            out_t *o = out + m * out_stride + n0 + r;
            if constexpr (ACCUMULATE) v += to_f32(*o);
            *o = from_f32<out_t>(v);
            if constexpr (CONV)
                channel.put(ints, n0 + r - CONV_FIRST, to_f32(from_f32<out_t>(v)), pool, slot_stride, conv_out);
        }
        if (i + 1 < mine) fetch_channel(blockIdx.x + (i + 1) * gridDim.x);
    }
}
