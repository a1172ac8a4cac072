// First half of the chunked gated delta rule: the part that does not depend on the state, for all chunks in parallel. A block takes one
// key head and all value heads that share it.
// With k, q normalised and c the running sum of the log decays: A[t, s] = β_t (k_t·k_s) exp(c_t - c_s) for s < t,
// T = (I + A)⁻¹ diag(β), M[t, s] = (q_t·k_s) exp(c_t - c_s) for s <= t. The second half needs W = Tᵀ (f_s ⊙ K) and M T, where
// f_s brings a key to the chunk's end: with R = V - f_k ⊙ (K S) it is O = f_q ⊙ (Q S) + (M T) R and S = decay S + Wᵀ R.
// The inverse: blocks of 16 on the diagonal by forward substitution in f32, those below by products in tf32.
// Per unit (chunk, value head) in scratch, as it will lie in shared memory: W [64, DK] and M T [64, 64] bf16, swizzled (blocks
// above the diagonal undefined), then [3, 64] f32: f_k, f_q, and the decay of the whole chunk in each entry. Grid (C, key heads).
// HEADS, DK, HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS.

constexpr int THREADS = 128;
constexpr int Q = PAGE;
constexpr int PITCH = DK + 8;
constexpr int A_PITCH = Q + 4;
constexpr int T_PITCH = Q + 8;
constexpr int KSTEPS = DK / 16;
constexpr int COLS = 32;                         // most columns of W that a warp computes, 16 at a time
constexpr int UNIT_BYTES = Q * DK * 2 + Q * Q * 2 + 3 * Q * 4;
static_assert(DK % 16 == 0 && DK >= 64 && DK <= 4 * COLS, "four warps share the columns of W");

// Rounded to the bits that a tf32 product reads.
DEV u32 tf32(float x) { return __float_as_uint(x) + 0x1000; }
DEV void mma_tf32(float *d, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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
    {
        // Two threads a token.
        const bf16 *pk = sk + tid / 2 * PITCH + tid % 2 * (DK / 2), *pq = sq + (pk - sk);
        float kk = 0.f, qq = 0.f;
#pragma unroll 4
        for (int i = 0; i < DK / 2; i += 8) {
            float v[8];
            load<8>(pk + i, v);
#pragma unroll
            for (int j = 0; j < 8; j++) kk += v[j] * v[j];
            load<8>(pq + i, v);
#pragma unroll
            for (int j = 0; j < 8; j++) qq += v[j] * v[j];
        }
        kk += __shfl_xor_sync(0xffffffffu, kk, 1);
        qq += __shfl_xor_sync(0xffffffffu, qq, 1);
        if (tid % 2 == 0) {
            rk[tid / 2] = rsqrtf(kk + 1e-6f);
            rq[tid / 2] = rsqrtf(qq + 1e-6f) * rsqrtf((float)DK);
        }
    }
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
        int g = lane / 4, c = lane % 4, block = lane / 8, brow = lane % 8;
        int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
        int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
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
        float *factors = reinterpret_cast<float *>(unit + Q * DK * 2 + Q * Q * 2);
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
        __syncwarp();
        // A warp's block on the diagonal, a lane per column.
        if (lane < 16) {
            float *diagonal = am + warp * 16 * (A_PITCH + 1), x[16];
#pragma unroll
            for (int r = 0; r < 16; r++) {
                x[r] = r == lane ? 1.f : 0.f;
#pragma unroll
                for (int j = 0; j < r; j += 4) {
                    float v[4];
                    load<4>(diagonal + r * A_PITCH + j, v);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (j + i < r) x[r] -= v[i] * x[j + i];
                }
            }
            __syncwarp(0xffffu);
#pragma unroll
            for (int r = 0; r < 16; r++) diagonal[r * A_PITCH + lane] = x[r];
        }
        __syncthreads();
        // Operands of tf32 products in `am`; the inner dimension runs in the order 0 2 4 6 1 3 5 7, so that sums are operands.
        u32 f[4];
        auto left = [&](int row, int col) {
            const float *p = am + (row + g) * A_PITCH + col + 2 * c;
            float2 lo = *reinterpret_cast<const float2 *>(p), hi = *reinterpret_cast<const float2 *>(p + 8 * A_PITCH);
            f[0] = tf32(lo.x), f[1] = tf32(hi.x), f[2] = tf32(lo.y), f[3] = tf32(hi.y);
        };
        auto left_sums = [&](const float *y) { f[0] = tf32(y[0]), f[1] = tf32(y[2]), f[2] = tf32(y[1]), f[3] = tf32(y[3]); };
        auto times = [&](float *d, int row, int col) {
            const float *p = am + (row + 2 * c) * A_PITCH + col + g;
            mma_tf32(d, f, tf32(p[0]), tf32(p[A_PITCH]));
        };
        auto put = [&](const float *d, int row, int col) {
            float *p = am + (row + g) * A_PITCH + col + 2 * c;
            *reinterpret_cast<float2 *>(p) = make_float2(-d[0], -d[1]);
            *reinterpret_cast<float2 *>(p + 8 * A_PITCH) = make_float2(-d[2], -d[3]);
        };
        {
            // Blocks (1, 0) and (3, 2) of the inverse, 8 columns a warp, left in the places of (0, 1) and (2, 3).
            int o = warp / 2 * 32;
            float y[2][4] = {}, d[4] = {};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                left(o + 16, o + 16 + 8 * i);
                times(y[0], o + 16 + 8 * i, o);
                times(y[1], o + 16 + 8 * i, o + 8);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                left_sums(y[i]);
                times(d, o + 8 * i, o + warp % 2 * 8);
            }
            put(d, o, o + 16 + warp % 2 * 8);
        }
        __syncthreads();
        {
            // Rows 32 to 63, columns 0 to 31, a block of 16 x 16 a warp, left 32 rows up and 32 columns to the right.
            int i = warp / 2, n = warp % 2;
            float y[4][4] = {}, d[2][4] = {};
#pragma unroll
            for (int b = 0; b < 2; b++) {
                if (b > i) continue;
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    left(32 + 16 * b, 32 + 16 * i + 8 * x);
#pragma unroll
                    for (int j = 0; j < 4; j++) times(y[j], 32 + 16 * b + 8 * x, 8 * j);
                }
            }
#pragma unroll
            for (int b = 0; b < 2; b++) {
                if (b < n) continue;
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    left_sums(y[2 * b + x]);
                    times(d[0], 16 * n + 8 * x, 16 * b);
                    times(d[1], 16 * n + 8 * x, 16 * b + 8);
                }
            }
            put(d[0], 16 * i, 32 + 16 * n);
            put(d[1], 16 * i, 32 + 16 * n + 8);
        }
        __syncthreads();
#pragma unroll 4
        for (int v = tid; v < Q * Q / 4; v += THREADS) {
            int t = v / (Q / 4), s = v % (Q / 4) * 4, bt = t / 16, bs = s / 16;
            float x[4] = {}, y[4], w[4];
            if (bt / 2 > bs / 2) load<4>(am + (t - 32) * A_PITCH + 32 + s, x);
            else if (bt >= bs) load<4>(am + (bs * 16 + t % 16) * A_PITCH + bt * 16 + s % 16, x);
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
        // Results go through this warp's quarter of the memory of A, so that whole sectors are written.
        u32 mine = smem_addr(am) + warp * (Q * COLS * 2);
        {
            // M T for the rows of this warp's M.
            float d[8][4] = {};
#pragma unroll
            for (int u = 1; u < 5; u++) {
                int s = u - kt - 1;
                if (s < 0) continue;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (n > s) continue;
                    u32 x[4];
                    ldmatrix_x4_trans(x, smem_addr(tb + (s * 16 + a_row) * T_PITCH + n * 16 + a_col));
                    mma_bf16(d[2 * n], m[u], x[0], x[1]);
                    mma_bf16(d[2 * n + 1], m[u], x[2], x[3]);
                }
            }
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    store_shared(mine + swizzle<8>(g + 8 * e, n) + 4 * c, pack_bf16(d[n][2 * e], d[n][2 * e + 1]));
            __syncwarp();
#pragma unroll
            for (int v = lane; v < 16 * Q / 8; v += 32)
                *reinterpret_cast<uint4 *>(unit + Q * DK * 2 + swizzle<8>(mt * 16 + v / 8, v % 8)) =
                    load_shared16(mine + swizzle<8>(v / 8, v % 8));
            __syncwarp();
        }
        // 16 columns at a time, for want of registers; where they are few, two turns for the warps with the fewest blocks of M T.
        int turns = KSTEPS == 8 ? 2 : 1 + (warp >= 8 - KSTEPS), unit0 = KSTEPS == 8 ? 2 * warp : warp + max(warp - 8 + KSTEPS, 0);
#pragma unroll 1
        for (int half = 0; half < turns; half++) {
            float w[4][2][4] = {};
#pragma unroll
            for (int t = 0; t < 4; t++) {
                u32 kb[4];
                ldmatrix_x4_trans(kb, smem_addr(sk + (t * 16 + a_row) * PITCH + (unit0 + half) * 16 + a_col));
#pragma unroll
                for (int s = 0; s <= t; s++) {
                    u32 x[4];
                    ldmatrix_x4_trans(x, smem_addr(tf + (t * 16 + b_row) * T_PITCH + s * 16 + b_col));
                    mma_bf16(w[s][0], x, kb[0], kb[1]);
                    mma_bf16(w[s][1], x, kb[2], kb[3]);
                }
            }
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        store_shared(mine + swizzle<4>(s * 16 + g + 8 * e, 2 * half + n) + 4 * c,
                                     pack_bf16(w[s][n][2 * e], w[s][n][2 * e + 1]));
        }
        __syncwarp();
#pragma unroll 8
        for (int v = lane; v < Q * 2 * turns; v += 32) {
            int t = v >> turns, piece = v & 2 * turns - 1;
            *reinterpret_cast<uint4 *>(unit + swizzle<DK / 8>(t, unit0 * 2 + piece)) = load_shared16(mine + swizzle<4>(t, piece));
        }
        __syncthreads();
    }
}
