// Second half of the chunked gated delta rule on tensor cores: a block owns DB columns of the state of one head of one
// sequence, keeps them in registers and walks the chunks in order; four more warps copy the next chunk to shared memory meanwhile.
// Per chunk, with f the factors of the first half: R = V - f_k ⊙ (K S); Δ = T R; O = f_q ⊙ (Q S) + M Δ;
// S = decay S + Kᵀ (f_s ⊙ Δ). Grid (as many rows as can be long, heads * DV / DB). Rows of at most MIN_TOKENS tokens are left to others.
// HEADS, DK, DV, DB, HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS; pool_t.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;              // that compute; COPY more threads copy
constexpr int COPY = 128;
constexpr int Q = PAGE;
constexpr int K_PITCH = DK + 8;
constexpr int D_PITCH = DB + 8;
constexpr int T_PITCH = Q + 8;
constexpr int UNIT_BYTES = 2 * Q * Q * 2 + 4 * Q * 4;
// Elements of a stage: K, Q, V, T, M, factors (f32, so two each).
constexpr int STAGE = 2 * Q * K_PITCH + Q * D_PITCH + 2 * Q * T_PITCH + 8 * Q;
constexpr int KSTEPS = DK / 16;
constexpr int COLS = DB / 2;                     // columns of a warp's tile of 16 tokens
constexpr int TILES = COLS / 8;
constexpr int S_ROWS = DK / WARPS;               // rows of S that a warp holds
constexpr int BLOCKS = DV / DB;
static_assert(S_ROWS == 16, "a warp holds one tile of rows");

extern "C" __global__ void __launch_bounds__(THREADS + COPY)
    ENTRY(Step st, const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride,
          const u8 *scratch, pool_t *pool, i64 slot_stride, bf16 *out, i64 out_stride) {
    extern __shared__ __align__(16) u8 shared[];
    bf16 *stages = reinterpret_cast<bf16 *>(shared), *s16 = stages + 2 * STAGE, *r16 = s16 + DK * D_PITCH,
         *d16 = r16 + Q * D_PITCH, *w16 = d16 + Q * D_PITCH;
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    int chunks = row[3];
    if (chunks == 0) return;
    int first = row[2];
    const u32 *table = st.chunk(first);
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
    int h = blockIdx.y / BLOCKS, col0 = blockIdx.y % BLOCKS * DB;
    int key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK;

    if (warp >= WARPS) {
        int copier = tid - THREADS;
        int start = table[1], len = table[2];
        for (int i = 0; i <= chunks; i++) {
            if (i < chunks) {
                bf16 *sk = stages + i % 2 * STAGE, *sq = sk + Q * K_PITCH, *sv = sq + Q * K_PITCH,
                     *stt = sv + Q * D_PITCH, *sf = stt + 2 * Q * T_PITCH;
#pragma unroll 4
                for (int j = copier; j < Q * DK / 8; j += COPY) {
                    int t = j / (DK / 8), x = j % (DK / 8) * 8;
                    bool in = t < len;
                    i64 at = in ? start + t : start;
                    cp_async16(smem_addr(sk + t * K_PITCH + x), k + at * k_stride + key + x, in);
                    cp_async16(smem_addr(sq + t * K_PITCH + x), q + at * q_stride + key + x, in);
                }
#pragma unroll
                for (int j = copier; j < Q * DB / 8; j += COPY) {
                    int t = j / (DB / 8), x = j % (DB / 8) * 8;
                    bool in = t < len;
                    i64 at = in ? start + t : start;
                    cp_async16(smem_addr(sv + t * D_PITCH + x), v + at * v_stride + h * DV + col0 + x, in);
                }
                const u8 *unit = scratch + ((i64)(first + i) * HEADS + h) * UNIT_BYTES;
                // T, then M: 128 rows of 64.
#pragma unroll 4
                for (int j = copier; j < 2 * Q * Q / 8; j += COPY)
                    cp_async16(smem_addr(stt + j / (Q / 8) * T_PITCH + j % (Q / 8) * 8), unit + j * 16);
                if (copier < Q) cp_async16(smem_addr(sf + copier * 8), unit + 2 * Q * Q * 2 + copier * 16);
                cp_async_commit();
                if (i + 1 < chunks) {
                    start = table[5 * i + 6];
                    len = table[5 * i + 7];
                }
            }
            if (i > 0) {
                __syncthreads();
                __syncthreads();
            }
            if (i == chunks) return;
            cp_async_wait<0>();
            __syncthreads();
        }
        return;
    }

    float s[2 * TILES][4];
    u32 src = table[3];
    int sr = warp * 16;
#pragma unroll
    for (int n = 0; n < 2 * TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int r = sr + g + 8 * e, x = 8 * n + 2 * c;
            const pool_t *p = pool + src * slot_stride + ((i64)h * DK + r) * DV + col0 + x;
            float2 f = src == 0 ? make_float2(0.f, 0.f) : load_pair(p);
            s[n][2 * e] = f.x;
            s[n][2 * e + 1] = f.y;
            *reinterpret_cast<u32 *>(s16 + r * D_PITCH + x) = pack_bf16(f.x, f.y);
        }
    // A warp's tile of tokens. Causal work is shared evenly among the four schedulers.
    int tt = (warp < 4 ? warp : 7 - warp) * 16, tc = warp / 4 * COLS;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;

    int start = table[1], len = table[2];
    u32 dst = table[4];
    // Three barriers a chunk: it has arrived, R is complete, Δ is complete.
    for (int i = 0; i < chunks; i++) {
        __syncthreads();
        bf16 *sk = stages + i % 2 * STAGE, *sq = sk + Q * K_PITCH, *sv = sq + Q * K_PITCH, *stt = sv + Q * D_PITCH,
             *sm = stt + Q * T_PITCH;
        const float *f = reinterpret_cast<const float *>(sm + Q * T_PITCH);
        float ks[TILES][4] = {}, o[TILES][4] = {};
#pragma unroll
        for (int j = 0; j < KSTEPS; j++) {
            u32 ka[4], qa[4];
            ldmatrix_x4(ka, smem_addr(sk + (tt + a_row) * K_PITCH + j * 16 + a_col));
            ldmatrix_x4(qa, smem_addr(sq + (tt + a_row) * K_PITCH + j * 16 + a_col));
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                u32 sb[4];
                ldmatrix_x4_trans(sb, smem_addr(s16 + (j * 16 + a_row) * D_PITCH + tc + n * 16 + a_col));
                mma_bf16(ks[2 * n], ka, sb[0], sb[1]);
                mma_bf16(ks[2 * n + 1], ka, sb[2], sb[3]);
                mma_bf16(o[2 * n], qa, sb[0], sb[1]);
                mma_bf16(o[2 * n + 1], qa, sb[2], sb[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = tt + g + 8 * e, x = tc + n * 8 + 2 * c;
                u32 raw = *reinterpret_cast<const u32 *>(sv + t * D_PITCH + x);
                float fk = f[t], fq = f[Q + t];
                o[n][2 * e] *= fq;
                o[n][2 * e + 1] *= fq;
                *reinterpret_cast<u32 *>(r16 + t * D_PITCH + x) =
                    pack_bf16(bf16_lo(raw) - fk * ks[n][2 * e], bf16_hi(raw) - fk * ks[n][2 * e + 1]);
            }
        __syncthreads();
        float d[TILES][4] = {};
        for (int s0 = 0; s0 <= tt; s0 += 16) {
            u32 ta[4];
            ldmatrix_x4(ta, smem_addr(stt + (tt + a_row) * T_PITCH + s0 + a_col));
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                u32 rb[4];
                ldmatrix_x4_trans(rb, smem_addr(r16 + (s0 + a_row) * D_PITCH + tc + n * 16 + a_col));
                mma_bf16(d[2 * n], ta, rb[0], rb[1]);
                mma_bf16(d[2 * n + 1], ta, rb[2], rb[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = tt + g + 8 * e, x = tc + n * 8 + 2 * c;
                float w = f[2 * Q + t];
                *reinterpret_cast<u32 *>(d16 + t * D_PITCH + x) = pack_bf16(d[n][2 * e], d[n][2 * e + 1]);
                *reinterpret_cast<u32 *>(w16 + t * D_PITCH + x) = pack_bf16(w * d[n][2 * e], w * d[n][2 * e + 1]);
            }
        float decay = f[3 * Q];
        __syncthreads();
        for (int s0 = 0; s0 <= tt; s0 += 16) {
            u32 ma[4];
            ldmatrix_x4(ma, smem_addr(sm + (tt + a_row) * T_PITCH + s0 + a_col));
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                u32 db[4];
                ldmatrix_x4_trans(db, smem_addr(d16 + (s0 + a_row) * D_PITCH + tc + n * 16 + a_col));
                mma_bf16(o[2 * n], ma, db[0], db[1]);
                mma_bf16(o[2 * n + 1], ma, db[2], db[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = tt + g + 8 * e, x = tc + n * 8 + 2 * c;
                if (t >= len) continue;
                *reinterpret_cast<u32 *>(out + (i64)(start + t) * out_stride + h * DV + col0 + x) =
                    pack_bf16(o[n][2 * e], o[n][2 * e + 1]);
            }
#pragma unroll
        for (int n = 0; n < 2 * TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= decay;
#pragma unroll
        for (int j = 0; j < Q / 16; j++) {
            u32 ka[4];
            ldmatrix_x4_trans(ka, smem_addr(sk + (j * 16 + b_row) * K_PITCH + sr + b_col));
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                u32 wb[4];
                ldmatrix_x4_trans(wb, smem_addr(w16 + (j * 16 + a_row) * D_PITCH + n * 16 + a_col));
                mma_bf16(s[2 * n], ka, wb[0], wb[1]);
                mma_bf16(s[2 * n + 1], ka, wb[2], wb[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2 * TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int r = sr + g + 8 * e, x = 8 * n + 2 * c;
                *reinterpret_cast<u32 *>(s16 + r * D_PITCH + x) = pack_bf16(s[n][2 * e], s[n][2 * e + 1]);
                if (dst != 0)
                    store_pair(pool + dst * slot_stride + ((i64)h * DK + r) * DV + col0 + x, s[n][2 * e],
                               s[n][2 * e + 1]);
            }
        if (i + 1 < chunks) {
            start = table[5 * i + 6];
            len = table[5 * i + 7];
            dst = table[5 * i + 9];
        }
    }
}
