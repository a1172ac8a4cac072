// First half of the chunked gated delta rule with a decay per key channel, for all chunks and value heads in parallel. As in
// gated_delta_prepare.cu, but with the decays inside of the products: A[t, s] = β_t Σ_c k_t[c] k_s[c] exp(G_t[c] - G_s[c]) for s < t,
// M likewise of q_t for s <= t, with G the running sum of the channel's log decays; K̂ = exp(G) k, Q̂ = exp(G) q, and W = Tᵀ (exp(G_end - G) k).
// No factor is ever above 1. Sums run within blocks of 16 tokens. Between two blocks, a row decays from the start of its own, a column to
// the end of its own, and both are factors of bf16 products. On the diagonal, the lower half against the upper one is such a
// product too, from token 7 on, and halves of 8 x 8 are summed in f32, with the decays multiplied token by token.
// Grid (C, heads).
// HEADS, DK (64, 96 or 128), HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS.

constexpr int EACH = 1;
#include "gated_delta_unit.cuh"
constexpr int THREADS = PREPARERS;
constexpr int L_PITCH = PITCH;                   // floats: a row of them is two of bf16
constexpr int KEYS = 2 * Q * PITCH * 2, INVERSE = Q * A_PITCH * 4 + Q * T_PITCH * 2;
constexpr int AT_L = KEYS > INVERSE ? KEYS : INVERSE, AT_DIAGONAL = AT_L + Q * L_PITCH * 4;
constexpr int SPAN = Q / power_of_two(2 * THREADS / DK);     // tokens whose decays a thread sums, of two channels
constexpr int PIECES = DK / 8, ROWS = power_of_two(32 / PIECES);
constexpr u32 LANES = 0xffffffffu >> (32 - ROWS * PIECES);   // that make factors, ROWS rows at a time
// Logarithms to base 2 of a token's decay end here: exp2 is 0 in f32 below, and sums stay small.
constexpr float LEAST = -150.f;

// The decays' running sums of two channels of SPAN tokens, within blocks of 16, and each block's sum.
DEV void sum_decays(const bf16 *a, i64 a_stride, const float *a_neg, const float *dt_bias, int len, float *l, float *ends) {
    int pair = threadIdx.x % (DK / 2) * 2, first = threadIdx.x / (DK / 2) * SPAN;
    if (first >= Q) return;
    float by[2] = {a_neg[pair] * LOG2E, a_neg[pair + 1] * LOG2E}, bias[2] = {dt_bias[pair], dt_bias[pair + 1]};
#pragma unroll 1
    for (int block = 0; block < SPAN; block += 16) {
        u32 raw[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int t = first + block + i;
            raw[i] = t < len ? *reinterpret_cast<const u32 *>(a + t * a_stride + pair) : 0;
        }
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int t = first + block + i;
            if (t < len) {
                sum[0] += fmaxf(by[0] * softplus(bf16_lo(raw[i]) + bias[0]), LEAST);
                sum[1] += fmaxf(by[1] * softplus(bf16_hi(raw[i]) + bias[1]), LEAST);
            }
            *reinterpret_cast<float2 *>(l + t * L_PITCH + pair) = make_float2(sum[0], sum[1]);
        }
        *reinterpret_cast<float2 *>(ends + (first + block) / 16 * DK + pair) = make_float2(sum[0], sum[1]);
    }
}

// A block of 16 x 16 on the diagonal by a warp: M on the diagonal and below, A without β above it, transposed. `k`, `q`, `l`, `rk`, `rq`: of
// the block's rows.
DEV void diagonal_block(const bf16 *k, const bf16 *q, const float *l, const float *rk, const float *rq, float *to) {
    int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, part = lane % 16, row0 = lane / 16 * 8;
    // The sums over channels of rows r and 7 - r together, 7 of A and 9 of M.
    float v[4][16] = {};
#pragma unroll 1
    for (int at = 2 * part; at < DK; at += 32) {
        // Decayed keys of 8 tokens.
        float p[8][2], before[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int r = i < 4 ? i : 7 - i;
            float2 kx = load_pair(k + (row0 + i) * PITCH + at), qx = load_pair(q + (row0 + i) * PITCH + at);
            float2 now = load_pair(l + (row0 + i) * L_PITCH + at);
            float x[2] = {kx.x, kx.y}, y[2] = {qx.x, qx.y}, sum[2] = {now.x, now.y};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float decay = i > 0 ? ex2(sum[e] - before[e]) : 1.f;
                before[e] = sum[e];
                p[i][e] = x[e];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j > i) continue;
                    int in_a = (i < 4 ? 0 : r) + j, in_m = 7 + (i < 4 ? 0 : r + 1) + j;
                    if (j < i) {
                        p[j][e] *= decay;
                        v[r][in_a] = __fmaf_rn(x[e], p[j][e], v[r][in_a]);
                    }
                    v[r][in_m] = __fmaf_rn(y[e], p[j][e], v[r][in_m]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        // Lane n of 16 gets the sum of the n-th.
#pragma unroll
        for (int m = 8; m; m /= 2)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (n >= m) continue;
                float give = part & m ? v[r][n] : v[r][n + m], keep = part & m ? v[r][n + m] : v[r][n];
                v[r][n] = keep + __shfl_xor_sync(0xffffffffu, give, m);
            }
        bool of_a = part < 7;
        int n = of_a ? part : part - 7, ahead = of_a ? r : r + 1;
        int t = row0 + (n < ahead ? r : 7 - r), s = row0 + (n < ahead ? n : n - ahead);
        to[of_a ? s * 16 + t : t * 16 + s] = v[r][0] * (of_a ? rk[t] : rq[t]) * rk[s];
    }
    // Rows of the product: queries of the lower half, then its keys.
    float d[4] = {};
#pragma unroll 2
    for (int i = 0; i < KSTEPS; i++) {
        u32 x[4], y[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int at = i * 16 + 8 * e + 2 * c;
            float2 split = load_pair(l + 7 * L_PITCH + at), row = load_pair(l + (8 + g) * L_PITCH + at);
            float2 col = load_pair(l + g * L_PITCH + at);
            float2 qx = load_pair(q + (8 + g) * PITCH + at), kx = load_pair(k + (8 + g) * PITCH + at), ks = load_pair(k + g * PITCH + at);
            row.x = ex2(row.x - split.x), row.y = ex2(row.y - split.y);
            x[2 * e] = pack_bf16(qx.x * row.x, qx.y * row.y);
            x[2 * e + 1] = pack_bf16(kx.x * row.x, kx.y * row.y);
            y[e] = pack_bf16(ks.x * ex2(split.x - col.x), ks.y * ex2(split.y - col.y));
        }
        mma_bf16(d, x, y[0], y[1]);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int s = 2 * c + e, t = 8 + g;
        to[t * 16 + s] = d[e] * rq[t] * rk[s];
        to[s * 16 + t] = d[2 + e] * rk[t] * rk[s];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(16) float ends[4][DK], beta[Q], rk[Q], rq[Q];
    Chunk ch(st.chunk(blockIdx.x));
    if (ch.len == 0 || st.row(ch.row)[1] <= MIN_TOKENS) return;
    int h = blockIdx.y, key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK, len = ch.len;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
    i64 start = ch.start;
    bf16 *sk = reinterpret_cast<bf16 *>(shared), *sq = sk + Q * PITCH;
    float *l = reinterpret_cast<float *>(shared + AT_L), *diagonal = reinterpret_cast<float *>(shared + AT_DIAGONAL);
    u8 *unit = scratch + ((i64)blockIdx.x * HEADS + h) * UNIT_BYTES;
#pragma unroll 4
    for (int v = tid; v < Q * DK / 8; v += THREADS) {
        int t = v / (DK / 8), x = v % (DK / 8) * 8;
        bool in = t < len;
        i64 at = in ? start + t : start;
        cp_async16(smem_addr(sk + t * PITCH + x), k + at * k_stride + key + x, in);
        cp_async16(smem_addr(sq + t * PITCH + x), q + at * q_stride + key + x, in);
    }
    cp_async_commit();
    sum_decays(a + start * a_stride + h * DK, a_stride, par + h * DK, par + par_stride + h * DK, len, l, ends[0]);
    if (tid < Q) beta[tid] = tid < len ? beta_scale * sigmoid(to_f32(b[(start + tid) * b_stride + h])) : 0.f;
    cp_async_wait<0>();
    __syncthreads();
    norms(sk, sq, rk, rq);
    __syncthreads();
    int row0 = warp * 16;
    diagonal_block(sk + row0 * PITCH, sq + row0 * PITCH, l + row0 * L_PITCH, rk + row0, rq + row0, diagonal + warp * 256);

    // A warp's rows as factors. Where a row of sums was, the keys that decay to the block's end, then those that decay to the chunk's.
    bf16 *sc = reinterpret_cast<bf16 *>(l);
    __syncwarp();
    if (lane < ROWS * PIECES) {
        int piece = lane % PIECES * 8, sub = lane / PIECES;
        float before[8] = {}, end[8], after[8] = {};
        load<8>(ends[warp] + piece, end);
#pragma unroll 1
        for (int w = 0; w < 4; w++) {
            float x[8];
            load<8>(ends[w] + piece, x);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (w < warp) before[j] += x[j];
                if (w > warp) after[j] += x[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) before[j] = ex2(before[j]), after[j] = ex2(after[j]);
#pragma unroll 1
        for (int t = row0 + sub; t < row0 + 16; t += ROWS) {
            float sums[8], ks[8], qs[8], left[8];
            load<8>(l + t * L_PITCH + piece, sums);
            load<8>(sk + t * PITCH + piece, ks);
            load<8>(sq + t * PITCH + piece, qs);
            __syncwarp(LANES);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float grown = ex2(sums[j]);
                ks[j] *= rk[t], qs[j] *= rq[t];
                left[j] = ks[j] * ex2(end[j] - sums[j]);
                ks[j] *= grown, qs[j] *= grown;
            }
            store<8>(sk + t * PITCH + piece, ks);
            store<8>(sq + t * PITCH + piece, qs);
            store<8>(sc + 2 * t * PITCH + piece, left);
#pragma unroll
            for (int j = 0; j < 8; j++) ks[j] *= before[j], qs[j] *= before[j], left[j] *= after[j];
            store<8>(sc + (2 * t + 1) * PITCH + piece, left);
            u8 *to = unit + swizzle<PIECES>(t, piece / 8);
            store_global<8>(reinterpret_cast<bf16 *>(to + AT_K), ks);
            store_global<8>(reinterpret_cast<bf16 *>(to + AT_Q), qs);
        }
    }
    if (tid < DK) reinterpret_cast<float *>(unit + AT_F)[tid] = ex2(ends[0][tid] + ends[1][tid] + ends[2][tid] + ends[3][tid]);
    __syncthreads();

    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    // Rows 16 kt of A, then rows 16 mt of M: every warp has five blocks of 16 x 16 on or below the diagonal.
    int kt = warp, mt = 3 - warp;
    float raw[5][2][4] = {};
#pragma unroll
    for (int u = 0; u < 5; u++) {
        bool of_k = u <= kt;
        int bs = of_k ? u : u - kt - 1, bt = of_k ? kt : mt;
        if (bs == bt) continue;
        const bf16 *rows = (of_k ? sk : sq) + (bt * 16 + a_row) * PITCH + a_col;
        const bf16 *keys = sc + 2 * (bs * 16 + b_row) * PITCH + b_col;
#pragma unroll 2
        for (int i = 0; i < KSTEPS; i++) {
            u32 x[4], kb[4];
            ldmatrix_x4(kb, smem_addr(keys + i * 16));
            ldmatrix_x4(x, smem_addr(rows + i * 16));
            if (bt - bs > 1) {
                // The blocks in between.
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int at = i * 16 + 8 * e + 2 * c;
                    float2 f = load_pair(ends[bs + 1] + at);
                    if (bt - bs > 2) {
                        float2 more = load_pair(ends[bs + 2] + at);
                        f.x += more.x, f.y += more.y;
                    }
                    f.x = ex2(f.x), f.y = ex2(f.y);
#pragma unroll
                    for (int n = 2 * e; n < 2 * e + 2; n++) x[n] = pack_bf16(bf16_lo(x[n]) * f.x, bf16_hi(x[n]) * f.y);
                }
            }
            mma_bf16(raw[u][0], x, kb[0], kb[1]);
            mma_bf16(raw[u][1], x, kb[2], kb[3]);
        }
    }
    __syncthreads();
    float *am = reinterpret_cast<float *>(shared);
    bf16 *tb = reinterpret_cast<bf16 *>(am + Q * A_PITCH);
    u32 m[5][4];
#pragma unroll
    for (int u = 0; u < 5; u++) {
        bool of_k = u <= kt;
        int bs = of_k ? u : u - kt - 1, bt = of_k ? kt : mt;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = g + 8 * e, s = 8 * n + 2 * c;
                float v[2] = {raw[u][n][2 * e], raw[u][n][2 * e + 1]};
#pragma unroll
                for (int j = 0; j < 2 && bs == bt; j++) {
                    const float *from = diagonal + bt * 256;
                    v[j] = of_k ? (s + j < t ? from[(s + j) * 16 + t] : 0.f) : (s + j <= t ? from[t * 16 + s + j] : 0.f);
                }
                m[u][2 * n + e] = pack_bf16(v[0], v[1]);
                float w = beta[bt * 16 + t];
                if (of_k) *reinterpret_cast<float2 *>(am + (bt * 16 + t) * A_PITCH + bs * 16 + s) = make_float2(w * v[0], w * v[1]);
            }
    }
    invert(am, warp, lane);
#pragma unroll 4
    for (int v = tid; v < Q * Q / 4; v += THREADS) {
        int t = v / (Q / 4), s = v % (Q / 4) * 4;
        float x[4], w[4];
        inverse4(am, t, s, x);
        load<4>(beta + s, w);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] *= w[i];
        store<4>(tb + t * T_PITCH + s, x);
    }
    __syncthreads();
    u32 mine = smem_addr(am) + warp * (Q * COLS * 2);
    put_mt(unit, mine, tb, m, warp, lane);
    put_w<2 * PITCH>(unit, mine, sc + PITCH, tb, warp, lane);
}
