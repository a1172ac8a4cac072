// First half of the chunked gated delta rule: the part that does not depend on the state, for all chunks in parallel. A block takes one
// key head and all value heads that share it.
// With k, q normalised and c the running sum of the log decays: A[t, s] = β_t (k_t·k_s) exp(c_t - c_s) for s < t,
// T = (I + A)⁻¹ diag(β), M[t, s] = (q_t·k_s) exp(c_t - c_s) for s <= t. The second half needs W = Tᵀ (f_s ⊙ K) and M T, where
// f_s brings a key to the chunk's end: with R = V - f_k ⊙ (K S) it is O = f_q ⊙ (Q S) + (M T) R and S = decay S + Wᵀ R.
// Grid (C, key heads).
// HEADS, DK, HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS.

constexpr int EACH = 0;
#include "gated_delta_unit.cuh"
constexpr int THREADS = PREPARERS;
static_assert(DK % 16 == 0 && DK >= 64 && DK <= 4 * COLS, "four warps share the columns of W");

extern "C" __global__ void __launch_bounds__(THREADS, 4) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    // Of the tokens: running sum of the decays' logarithms to base 2, β, and the decay from it to the end of its block of 16.
    __shared__ float sum[4][Q], beta[4][Q], ahead[4][Q], rk[Q], rq[Q];
    Chunk ch(st.chunk(blockIdx.x));
    if (ch.len == 0 || st.row(ch.row)[1] <= MIN_TOKENS) return;
    int key = FIRST_HEAD / HEADS_PER_KEY + blockIdx.y, len = ch.len;
    int first = max(key * HEADS_PER_KEY - FIRST_HEAD, 0), end = min((key + 1) * HEADS_PER_KEY - FIRST_HEAD, HEADS);
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
    bf16 *sk = reinterpret_cast<bf16 *>(shared), *sq = sk + Q * PITCH;
#pragma unroll 4
    for (int v = tid; v < Q * DK / 8; v += THREADS) {
        int t = v / (DK / 8), x = v % (DK / 8) * 8;
        bool in = t < len;
        i64 at = in ? ch.start + t : ch.start;
        cp_async16(smem_addr(sk + t * PITCH + x), k + at * k_stride + key * DK + x, in);
        cp_async16(smem_addr(sq + t * PITCH + x), q + at * q_stride + key * DK + x, in);
    }
    cp_async_commit();
    // Gates of one head a warp.
    auto gates = [&](int h) {
        if (h >= end) return;
        float gv[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = 2 * lane + e;
            i64 at = ch.start + t;
            gv[e] = t < len ? par[h] * LOG2E * softplus(to_f32(a[at * a_stride + h]) + par[par_stride + h]) : 0.f;
            beta[warp][t] = t < len ? beta_scale * sigmoid(to_f32(b[at * b_stride + h])) : 0.f;
        }
        float total = gv[0] + gv[1];
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float other = __shfl_up_sync(0xffffffffu, total, m);
            if (lane >= m) total += other;
        }
        float ends = __shfl_sync(0xffffffffu, total, lane | 7);
        sum[warp][2 * lane] = total - gv[1];
        sum[warp][2 * lane + 1] = total;
        ahead[warp][2 * lane] = ex2(ends - (total - gv[1]));
        ahead[warp][2 * lane + 1] = ex2(ends - total);
    };
    gates(first + warp);
    cp_async_wait<0>();
    __syncthreads();
    norms(sk, sq, rk, rq);
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    // Rows 16 kt of K Kᵀ, then rows 16 mt of Q Kᵀ: every warp has five blocks of 16 x 16 on or below the diagonal.
    int kt = warp, mt = 3 - warp;
    float raw[5][2][4] = {};
#pragma unroll
    for (int u = 0; u < 5; u++) {
        bool of_k = u <= kt;
        int s = of_k ? u : u - kt - 1;
        const bf16 *rows = (of_k ? sk + kt * 16 * PITCH : sq + mt * 16 * PITCH) + a_row * PITCH + a_col;
        const bf16 *keys = sk + (s * 16 + b_row) * PITCH + b_col;
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            u32 x[4], kb[4];
            ldmatrix_x4(kb, smem_addr(keys + i * 16));
            ldmatrix_x4(x, smem_addr(rows + i * 16));
            mma_bf16(raw[u][0], x, kb[0], kb[1]);
            mma_bf16(raw[u][1], x, kb[2], kb[3]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < 5; u++) {
        bool of_k = u <= kt;
        int s = (of_k ? u : u - kt - 1) * 16 + 2 * c, t = (of_k ? kt : mt) * 16 + g;
        const float *norm = of_k ? rk : rq;
        float r[2] = {norm[t], norm[t + 8]};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) raw[u][n][j] *= r[j / 2] * rk[s + 8 * n + j % 2];
    }

#pragma unroll 1
    for (int h = first; h < end; h++) {
        // Keeps the compiler from hoisting the head-independent part, which would be spilled.
        asm volatile("" : "+r"(lane), "+l"(sk));
        int g = lane / 4, c = lane % 4;
        bf16 *tb = sk + Q * PITCH, *tf = tb + Q * T_PITCH;       // T, and T with f_s on its rows, where Q was
        float *am = reinterpret_cast<float *>(tf + Q * T_PITCH);
        int slot = (h - first) % 4;
        if (slot == 0 && h > first) {
            gates(h + warp);
            __syncthreads();
        }
        const float *sums = sum[slot], *betas = beta[slot];
        float last = sums[Q - 1];
        u8 *unit = scratch + ((i64)blockIdx.x * HEADS + h) * UNIT_BYTES;
        float *factors = reinterpret_cast<float *>(unit + AT_F);
        if (tid < Q) {
            float grown = ex2(sums[tid]);
            factors[tid] = rk[tid] * grown;
            factors[Q + tid] = rq[tid] * grown;
            factors[2 * Q + tid] = ex2(last);
        }
        u32 m[5][4];
#pragma unroll
        for (int u = 0; u < 5; u++) {
            bool of_k = u <= kt;
            int bs = of_k ? u : u - kt - 1, bt = of_k ? kt : mt;
            float v[2][4];
            if (bs < bt) {
                // The decay between two blocks as a product over the end of the first: both factors are at most 1.
                float split = sums[bs * 16 + 15], f[2];
#pragma unroll
                for (int e = 0; e < 2; e++) f[e] = ex2(sums[bt * 16 + g + 8 * e] - split);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float2 w = *reinterpret_cast<const float2 *>(ahead[slot] + bs * 16 + 8 * n + 2 * c);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        v[n][2 * e] = raw[u][n][2 * e] * (f[e] * w.x);
                        v[n][2 * e + 1] = raw[u][n][2 * e + 1] * (f[e] * w.y);
                    }
                }
            } else {
                int least = of_k ? 1 : 0;      // the diagonal itself is M's only
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int t = g + j / 2 * 8, s = 8 * n + 2 * c + j % 2;
                        // Masked before the exponential: above the diagonal it overflows.
                        float d = t - s >= least ? ex2(sums[bt * 16 + t] - sums[bs * 16 + s]) : 0.f;
                        v[n][j] = raw[u][n][j] * d;
                    }
            }
            if (of_k) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int t = bt * 16 + g + 8 * e;
                    float w = betas[t];
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        *reinterpret_cast<float2 *>(am + t * A_PITCH + bs * 16 + 8 * n + 2 * c) =
                            make_float2(w * v[n][2 * e], w * v[n][2 * e + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) m[u][2 * n + e] = pack_bf16(v[n][2 * e], v[n][2 * e + 1]);
        }
        invert(am, warp, lane);
#pragma unroll 4
        for (int v = tid; v < Q * Q / 4; v += THREADS) {
            int t = v / (Q / 4), s = v % (Q / 4) * 4;
            float x[4], y[4], w[4];
            inverse4(am, t, s, x);
            load<4>(betas + s, w);
            float fs = rk[t] * ex2(last - sums[t]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] *= w[i];
                y[i] = x[i] * fs;
            }
            store<4>(tb + t * T_PITCH + s, x);
            store<4>(tf + t * T_PITCH + s, y);
        }
        __syncthreads();
        u32 mine = smem_addr(am) + warp * (Q * COLS * 2);
        put_mt(unit, mine, tb, m, warp, lane);
        put_w<PITCH>(unit, mine, sk, tf, warp, lane);
        __syncthreads();
    }
}
