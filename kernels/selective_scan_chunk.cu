// Selective scan of long rows in the chunked (dual) form on tensor cores, bf16 in, f32 state. A block owns PB columns of
// one head of one sequence and walks its chunks in order, so only x, B, C, dt and y move through device memory, and
// the state at every chunk end is available for a capture. Each of PB / 16 warps holds 16 rows of the state in registers and
// hands it, as operands, to four warps that compute the outputs of 16 tokens each; four more copy the coming chunks.
// Per chunk: y = exp(a) C Sᵀ + ((C Bᵀ ∘ L) dt + D) x;  S = exp(a_last) S + (w x)ᵀ B, with a the running sum of dt A.
// Grid (as many rows as can be long, heads * P / PB). Rows of at most MIN_TOKENS tokens are left to selective_scan.cu.
// HEADS, P, N, PB, STAGES, SETS, HEADS_PER_GROUP, FIRST_HEAD, MIN_TOKENS; pool_t.

constexpr int HOLDERS = PB / 16;                 // warps with state
constexpr int WRITERS = 4;                       // warps with the outputs of a chunk; SETS of them take turns
constexpr int THREADS = 32 * (HOLDERS + SETS * WRITERS);// that compute; COPY more threads copy
constexpr int COPY = 128;
constexpr int Q = PAGE;
constexpr int KSTEPS = N / 16;
constexpr int NP = N / 8, XP = PB / 8;           // pieces of 16 bytes of a row
constexpr int AT_B = Q * N * 2, AT_X = 2 * AT_B, STAGE = AT_X + Q * PB * 2;
constexpr int COPIES = SETS + 1;                 // of the state
constexpr int STATE_BYTES = HOLDERS * KSTEPS * 512;
constexpr int BLOCKS = P / PB;

extern "C" __global__ void __launch_bounds__(THREADS + COPY, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 bars[2 * STAGES + 2 * COPIES];
    // Of each token: log2 of the decay since the chunk's start; the same less log2(dt), so that one power of two gives
    // decay times dt; dt times the decay from it to the end of its block of 16, and to the end of the chunk.
    __shared__ float sums[STAGES][Q], keys[STAGES][Q], ahead[STAGES][Q], weights[STAGES][Q];
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    int chunks = row[3];
    if (chunks == 0) return;
    const u32 *table = st.chunk(row[2]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int h = blockIdx.y / BLOCKS, p0 = blockIdx.y % BLOCKS * PB;
    // A stage has arrived, has been read; a copy of the state has been written, has been read.
    u32 full = smem_addr(bars), empty = full + 8 * STAGES, ready = empty + 8 * STAGES, taken = ready + 8 * COPIES;
    u32 stages = smem_addr(shared), states = stages + STAGES * STAGE, rows = states + COPIES * STATE_BYTES;
    // Every lane arrives for itself: racecheck does not follow one lane that arrives for its warp.
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(full + 8 * i, COPY + 32);
            mbar_init(empty + 8 * i, 32 * (HOLDERS + WRITERS));
        }
        for (int i = 0; i < COPIES; i++) {
            mbar_init(ready + 8 * i, 32 * HOLDERS);
            mbar_init(taken + 8 * i, 32 * WRITERS);
        }
    }
    __syncthreads();

    if (warp >= HOLDERS + SETS * WRITERS) {
        int copier = threadIdx.x - THREADS;
        int group = (FIRST_HEAD + h) / HEADS_PER_GROUP;
        float a_neg = par[h] * LOG2E, bias = par[2 * par_stride + h];
        const bf16 *px = x + h * P + p0, *pb = b + group * N, *pc = cc + group * N;
        i64 start = table[1];
        int len = table[2];
        for (int i = 0; i < chunks; i++) {
            int s = i % STAGES;
            float d[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                d[e] = copier < 32 && 2 * lane + e < len ? to_f32(dt[(start + 2 * lane + e) * dt_stride + h]) : -INF;
            if (i >= STAGES) mbar_wait(empty + 8 * s, (i / STAGES - 1) & 1);
            u32 to = stages + s * STAGE;
            cp_async_tile<Q, NP, COPY>(to, pc + start * cc_stride, cc_stride, len, copier);
            cp_async_tile<Q, NP, COPY>(to + AT_B, pb + start * b_stride, b_stride, len, copier);
            cp_async_tile<Q, XP, COPY>(to + AT_X, px + start * x_stride, x_stride, len, copier);
            mbar_arrive_copied(full + 8 * s);
            if (i + 1 < chunks) {
                start = table[5 * i + 6];
                len = table[5 * i + 7];
            }
            if (copier < 32) {
#pragma unroll
                for (int e = 0; e < 2; e++)
                    d[e] = d[e] == -INF ? 0.f : fminf(fmaxf(softplus(d[e] + bias), dt_min), dt_max);
                float a0 = d[0] * a_neg, a1 = a0 + d[1] * a_neg, total = a1;
#pragma unroll
                for (int m = 1; m < 32; m *= 2) {
                    float other = __shfl_up_sync(0xffffffffu, total, m);
                    if (lane >= m) total += other;
                }
                float first = total - a1 + a0;
                float block = __shfl_sync(0xffffffffu, total, lane | 7), last = __shfl_sync(0xffffffffu, total, 31);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int t = 2 * lane + e;
                    float sum = e ? total : first, key = sum - log2f(d[e]);
                    sums[s][t] = sum;
                    keys[s][t] = key;
                    ahead[s][t] = ex2(block - key);
                    weights[s][t] = ex2(last - key);
                }
                mbar_arrive(full + 8 * s);
            }
        }
        return;
    }

    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_piece = block / 2;   // A operand; B operand through trans
    int b_row = brow + block / 2 * 8, b_piece = block % 2;   // B operand; A operand through trans

    if (warp >= HOLDERS) {
        float d_skip = par[par_stride + h];
        int w = warp - HOLDERS, set = w / WRITERS;
        u32 mine = rows + w * 16 * PB * 2;
        for (int i = set; i < chunks; i += SETS) {
            int start = table[5 * i + 1], len = table[5 * i + 2];
            // In turns, as later tokens are more work.
            int tile = (w + i / SETS) & 3, s = i % STAGES, copy = i % COPIES;
            u32 from = stages + s * STAGE, state = states + copy * STATE_BYTES + lane * 16;
            mbar_wait(full + 8 * s, i / STAGES & 1);
            mbar_wait(ready + copy * 8, i / COPIES & 1);
            float acc[2 * HOLDERS][4] = {}, m[4][2][4] = {};
#pragma unroll
            for (int k = 0; k < KSTEPS; k++) {
                u32 ca[4];
                ldmatrix_x4(ca, from + swizzle<NP>(tile * 16 + a_row, 2 * k + a_piece));
#pragma unroll
                for (int n = 0; n < HOLDERS; n++) {
                    uint4 v = load_shared16(state + (n * KSTEPS + k) * 512);
                    mma_bf16(acc[2 * n], ca, v.x, v.y);
                    mma_bf16(acc[2 * n + 1], ca, v.z, v.w);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (j > tile) continue;
                    u32 v[4];
                    ldmatrix_x4(v, from + AT_B + swizzle<NP>(j * 16 + b_row, 2 * k + b_piece));
                    mma_bf16(m[j][0], ca, v[0], v[1]);
                    mma_bf16(m[j][1], ca, v[2], v[3]);
                }
            }
            mbar_arrive(taken + copy * 8);
            const float *sum = sums[s];
            float grow[2], to[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                to[e] = sum[tile * 16 + g + 8 * e];
                grow[e] = ex2(to[e]);
            }
#pragma unroll
            for (int n = 0; n < 2 * HOLDERS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n][e] *= grow[e / 2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j > tile) continue;
                u32 ma[4];
                if (j < tile) {
                    // The decay between two blocks as a product over the end of the first: both factors are at most 1.
                    float split = sum[j * 16 + 15], f[2] = {ex2(to[0] - split), ex2(to[1] - split)};
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float2 w = *reinterpret_cast<const float2 *>(ahead[s] + j * 16 + n * 8 + 2 * c);
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            ma[2 * n + e] = pack_bf16(m[j][n][2 * e] * (f[e] * w.x), m[j][n][2 * e + 1] * (f[e] * w.y));
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float2 k = *reinterpret_cast<const float2 *>(keys[s] + j * 16 + n * 8 + 2 * c);
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            // Masked before the power: above the diagonal it overflows.
                            int past = g + 8 * e - n * 8 - 2 * c;
                            float lo = m[j][n][2 * e] * ex2(past >= 0 ? to[e] - k.x : -INF);
                            float hi = m[j][n][2 * e + 1] * ex2(past >= 1 ? to[e] - k.y : -INF);
                            if (past == 0) lo += d_skip;
                            if (past == 1) hi += d_skip;
                            ma[2 * n + e] = pack_bf16(lo, hi);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < HOLDERS; n++) {
                    u32 v[4];
                    ldmatrix_x4_trans(v, from + AT_X + swizzle<XP>(j * 16 + a_row, 2 * n + a_piece));
                    mma_bf16(acc[2 * n], ma, v[0], v[1]);
                    mma_bf16(acc[2 * n + 1], ma, v[2], v[3]);
                }
            }
            mbar_arrive(empty + 8 * s);
            // Through shared memory, so that whole sectors are written.
#pragma unroll
            for (int n = 0; n < 2 * HOLDERS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    store_shared(mine + swizzle<XP>(g + 8 * e, n) + 4 * c, pack_bf16(acc[n][2 * e], acc[n][2 * e + 1]));
            __syncwarp();
#pragma unroll
            for (int v = lane; v < 16 * XP; v += 32) {
                int t = v / XP, k = v % XP;
                uint4 out = load_shared16(mine + swizzle<XP>(t, k));
                t += tile * 16;
                if (t < len) *reinterpret_cast<uint4 *>(y + (i64)(start + t) * y_stride + h * P + p0 + k * 8) = out;
            }
            __syncwarp();
        }
        return;
    }

    // Tile n of s: rows g and g + 8 of these 16, columns 8 n + 2 c, + 1.
    float s[2 * KSTEPS][4];
    i64 base = ((i64)h * P + p0 + warp * 16 + g) * N + 2 * c;
    u32 src = table[3], dst = table[4];
#pragma unroll
    for (int n = 0; n < 2 * KSTEPS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const pool_t *p = pool + src * pool_stride + base + e * 8 * N + n * 8;
            float2 v = src == 0 ? make_float2(0.f, 0.f) : load_pair(p);
            s[n][2 * e] = v.x;
            s[n][2 * e + 1] = v.y;
        }
    for (int i = 0; i < chunks; i++) {
        int stage = i % STAGES, copy = i % COPIES;
        u32 from = stages + stage * STAGE, mine = states + copy * STATE_BYTES + warp * KSTEPS * 512 + lane * 16;
        if (i >= COPIES) mbar_wait(taken + copy * 8, (i / COPIES - 1) & 1);
#pragma unroll
        for (int k = 0; k < KSTEPS; k++)
            store_shared16(mine + k * 512,
                           make_uint4(pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]),
                                      pack_bf16(s[2 * k][2], s[2 * k][3]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3])));
        mbar_arrive(ready + copy * 8);
        mbar_wait(full + 8 * stage, i / STAGES & 1);
        float decay = ex2(sums[stage][Q - 1]);
#pragma unroll
        for (int n = 0; n < 2 * KSTEPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= decay;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 xa[4];
            ldmatrix_x4_trans(xa, from + AT_X + swizzle<XP>(t * 16 + b_row, 2 * warp + b_piece));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float2 w = *reinterpret_cast<const float2 *>(weights[stage] + t * 16 + n * 8 + 2 * c);
#pragma unroll
                for (int e = 0; e < 2; e++) xa[2 * n + e] = pack_bf16(w.x * bf16_lo(xa[2 * n + e]), w.y * bf16_hi(xa[2 * n + e]));
            }
#pragma unroll
            for (int n = 0; n < KSTEPS; n++) {
                u32 v[4];
                ldmatrix_x4_trans(v, from + AT_B + swizzle<NP>(t * 16 + a_row, 2 * n + a_piece));
                mma_bf16(s[2 * n], xa, v[0], v[1]);
                mma_bf16(s[2 * n + 1], xa, v[2], v[3]);
            }
        }
        mbar_arrive(empty + 8 * stage);
        if (dst != 0) {
#pragma unroll
            for (int n = 0; n < 2 * KSTEPS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    store_pair(pool + dst * pool_stride + base + e * 8 * N + n * 8, s[n][2 * e], s[n][2 * e + 1]);
        }
        if (i + 1 < chunks) dst = table[5 * i + 9];
    }
}
