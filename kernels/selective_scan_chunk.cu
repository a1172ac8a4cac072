// Selective scan of long rows in the chunked (dual) form on tensor cores, bf16 in, f32 sums. A block owns PB columns of
// one head of one sequence and walks its chunks in order with the state in registers, so nothing but x, B, C, dt and y
// moves through device memory, and the state of every chunk end is at hand for a capture. The next chunk is copied to
// shared memory by four more warps while this one is computed.
// Per chunk: y = exp(a) C Sᵀ + (C Bᵀ ∘ L) x + D x;  S = exp(a_last) S + (w x)ᵀ B, with a the running sum of dt A.
// Grid (as many rows as can be long, heads * P / PB). Rows of at most MIN_TOKENS tokens are left to others.
// HEADS, P, N, PB, HEADS_PER_GROUP, FIRST_HEAD, MIN_TOKENS; pool_t.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;              // that compute; COPY more threads copy
constexpr int COPY = 128;
constexpr int Q = PAGE;
constexpr int BC_PITCH = N + 8;                  // ldmatrix without bank conflicts
constexpr int X_PITCH = PB + 8;
constexpr int M_PITCH = Q + 8;
constexpr int STAGE = 2 * Q * BC_PITCH + Q * X_PITCH;
constexpr int P_TILES = PB / 16;
constexpr int N_PART = N * P_TILES / WARPS;      // columns of S that a warp holds, of 16 rows
constexpr int S_TILES = N_PART / 8;
constexpr int Y_COLS = PB / 2;                   // columns of y that a warp computes, of 16 tokens
constexpr int Y_TILES = Y_COLS / 8;
constexpr int BLOCKS = P / PB;
constexpr int KSTEPS = N / 16;

extern "C" __global__ void __launch_bounds__(THREADS + COPY)
    ENTRY(Step st, const bf16 *x, i64 x_stride, const bf16 *b, i64 b_stride, const bf16 *cc, i64 c_stride,
          const bf16 *dt, i64 dt_stride, const float *par, i64 par_stride, pool_t *pool, i64 slot_stride, bf16 *y,
          i64 y_stride, float dt_min, float dt_max) {
    extern __shared__ __align__(16) u8 shared[];
    // Of each token: log2 of the decay since the chunk's start, and the same less log2(dt), so that one power of two
    // gives decay times dt.
    __shared__ float sums[2][Q], keys[2][Q];
    bf16 *stages = reinterpret_cast<bf16 *>(shared), *s16 = stages + 2 * STAGE, *xw = s16 + PB * BC_PITCH,
         *m16 = xw + Q * X_PITCH;
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    int chunks = row[3];
    if (chunks == 0) return;
    const u32 *table = st.chunk(row[2]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int h = blockIdx.y / BLOCKS, p0 = blockIdx.y % BLOCKS * PB;

    if (warp >= WARPS) {
        int copier = threadIdx.x - THREADS;
        int group = (FIRST_HEAD + h) / HEADS_PER_GROUP;
        float a_neg = par[h] * LOG2E, bias = par[2 * par_stride + h];
        const bf16 *px = x + h * P + p0, *pb = b + group * N, *pc = cc + group * N;
        int start = table[1], len = table[2];
        for (int i = 0; i <= chunks; i++) {
            if (i < chunks) {
                bf16 *sc = stages + i % 2 * STAGE, *sb = sc + Q * BC_PITCH, *sx = sb + Q * BC_PITCH;
                float d[2];
#pragma unroll
                for (int e = 0; e < 2; e++)
                    d[e] = copier < 32 && 2 * lane + e < len ? to_f32(dt[(i64)(start + 2 * lane + e) * dt_stride + h]) : -INF;
#pragma unroll 4
                for (int v = copier; v < Q * N / 8; v += COPY) {
                    int t = v / (N / 8), k = v % (N / 8) * 8;
                    bool in = t < len;
                    i64 at = in ? start + t : start;
                    cp_async16(smem_addr(sc + t * BC_PITCH + k), pc + at * c_stride + k, in);
                    cp_async16(smem_addr(sb + t * BC_PITCH + k), pb + at * b_stride + k, in);
                }
#pragma unroll 4
                for (int v = copier; v < Q * PB / 8; v += COPY) {
                    int t = v / (PB / 8), k = v % (PB / 8) * 8;
                    bool in = t < len;
                    cp_async16(smem_addr(sx + t * X_PITCH + k), px + (i64)(in ? start + t : start) * x_stride + k, in);
                }
                cp_async_commit();
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
                    sums[i % 2][2 * lane] = first;
                    sums[i % 2][2 * lane + 1] = total;
                    keys[i % 2][2 * lane] = first - log2f(d[0]);
                    keys[i % 2][2 * lane + 1] = total - log2f(d[1]);
                }
                if (i > 0) __syncthreads();      // the middle of chunk i - 1
                cp_async_wait<0>();
            } else {
                __syncthreads();                 // the middle of the last chunk
                return;
            }
            __syncthreads();                     // the start of chunk i
        }
        return;
    }

    float d_skip = par[par_stride + h];
    // This warp's part of the state: rows sp + g, sp + g + 8; columns sn + 8 i + 2 c, + 1.
    int sp = warp % P_TILES * 16, sn = warp / P_TILES * N_PART;
    float s[S_TILES][4];
    u32 src = table[3];
#pragma unroll
    for (int i = 0; i < S_TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            i64 at = ((i64)h * P + p0 + sp + g + 8 * e) * N + sn + 8 * i + 2 * c;
            float2 v = src == 0 ? make_float2(0.f, 0.f) : load_pair(pool + src * slot_stride + at);
            s[i][2 * e] = v.x;
            s[i][2 * e + 1] = v.y;
            *reinterpret_cast<u32 *>(s16 + (sp + g + 8 * e) * BC_PITCH + sn + 8 * i + 2 * c) = pack_bf16(v.x, v.y);
        }

    // This warp's part of y: 16 tokens, Y_COLS columns.
    int yt = (warp < 4 ? warp : 7 - warp) * 16, yp = warp / 4 * Y_COLS;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;   // A operand; B operand through trans
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;   // B operand; A operand through trans

    int start = table[1], len = table[2];
    u32 dst = table[4];
    for (int i = 0; i < chunks; i++) {
        __syncthreads();
        const float *sum = sums[i % 2], *key = keys[i % 2];
        bf16 *sc = stages + i % 2 * STAGE, *sb = sc + Q * BC_PITCH, *sx = sb + Q * BC_PITCH;
        float last = sum[Q - 1];
#pragma unroll
        for (int v = threadIdx.x; v < Q * PB / 8; v += THREADS) {
            int t = v / (PB / 8), k = v % (PB / 8) * 8;
            float w = ex2(last - key[t]), e[8];
            load<8>(sx + t * X_PITCH + k, e);
#pragma unroll
            for (int j = 0; j < 8; j++) e[j] *= w;
            store<8>(xw + t * X_PITCH + k, e);
        }
        // The masked scores (C Bᵀ ∘ L) dt, in the 20 pieces of 16 x 8 on and below the diagonal.
        for (int u = warp; u < 20; u += WARPS) {
            int tile = u < 2 ? 0 : u < 6 ? 1 : u < 12 ? 2 : 3, s0 = (u - tile * (tile + 1)) * 8;
            float m[2][4] = {};
#pragma unroll
            for (int k = 0; k < KSTEPS; k += 2) {
                u32 ca[4], bb[4];
                ldmatrix_x4(bb, smem_addr(sb + (s0 + brow) * BC_PITCH + k * 16 + block * 8));
                ldmatrix_x4(ca, smem_addr(sc + (tile * 16 + a_row) * BC_PITCH + k * 16 + a_col));
                mma_bf16(m[0], ca, bb[0], bb[1]);
                ldmatrix_x4(ca, smem_addr(sc + (tile * 16 + a_row) * BC_PITCH + k * 16 + 16 + a_col));
                mma_bf16(m[1], ca, bb[2], bb[3]);
            }
            int from = s0 + 2 * c;
            float k0 = key[from], k1 = key[from + 1];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int to = tile * 16 + g + 8 * e;
                // Masked before the power: above the diagonal it overflows.
                float f0 = ex2(from <= to ? sum[to] - k0 : -INF), f1 = ex2(from < to ? sum[to] - k1 : -INF);
                *reinterpret_cast<u32 *>(m16 + to * M_PITCH + from) =
                    pack_bf16((m[0][2 * e] + m[1][2 * e]) * f0, (m[0][2 * e + 1] + m[1][2 * e + 1]) * f1);
            }
        }
        float acc[Y_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < KSTEPS; k++) {
            u32 ca[4];
            ldmatrix_x4(ca, smem_addr(sc + (yt + a_row) * BC_PITCH + k * 16 + a_col));
#pragma unroll
            for (int n = 0; n < Y_TILES / 2; n++) {
                u32 bb[4];
                ldmatrix_x4(bb, smem_addr(s16 + (yp + n * 16 + b_row) * BC_PITCH + k * 16 + b_col));
                mma_bf16(acc[2 * n], ca, bb[0], bb[1]);
                mma_bf16(acc[2 * n + 1], ca, bb[2], bb[3]);
            }
        }
        float grow[2] = {ex2(sum[yt + g]), ex2(sum[yt + g + 8])};
#pragma unroll
        for (int n = 0; n < Y_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] *= grow[e / 2];
        __syncthreads();

        float decay = ex2(last);
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= decay;
#pragma unroll
        for (int k = 0; k < Q / 16; k++) {
            u32 xa[4];
            ldmatrix_x4_trans(xa, smem_addr(xw + (k * 16 + b_row) * X_PITCH + sp + b_col));
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                u32 bb[4];
                ldmatrix_x4_trans(bb, smem_addr(sb + (k * 16 + a_row) * BC_PITCH + sn + n * 16 + a_col));
                mma_bf16(s[2 * n], xa, bb[0], bb[1]);
                mma_bf16(s[2 * n + 1], xa, bb[2], bb[3]);
            }
            if (k * 16 > yt) continue;
            u32 ma[4];
            ldmatrix_x4(ma, smem_addr(m16 + (yt + a_row) * M_PITCH + k * 16 + a_col));
#pragma unroll
            for (int n = 0; n < Y_TILES / 2; n++) {
                u32 bb[4];
                ldmatrix_x4_trans(bb, smem_addr(sx + (k * 16 + a_row) * X_PITCH + yp + n * 16 + a_col));
                mma_bf16(acc[2 * n], ma, bb[0], bb[1]);
                mma_bf16(acc[2 * n + 1], ma, bb[2], bb[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < Y_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = yt + g + 8 * e, p = yp + n * 8 + 2 * c;
                if (t >= len) continue;
                u32 raw = *reinterpret_cast<const u32 *>(sx + t * X_PITCH + p);
                float lo = acc[n][2 * e] + d_skip * bf16_lo(raw), hi = acc[n][2 * e + 1] + d_skip * bf16_hi(raw);
                *reinterpret_cast<u32 *>(y + (i64)(start + t) * y_stride + h * P + p0 + p) = pack_bf16(lo, hi);
            }
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int p = sp + g + 8 * e, k = sn + 8 * n + 2 * c;
                *reinterpret_cast<u32 *>(s16 + p * BC_PITCH + k) = pack_bf16(s[n][2 * e], s[n][2 * e + 1]);
                if (dst != 0)
                    store_pair(pool + dst * slot_stride + ((i64)h * P + p0 + p) * N + k, s[n][2 * e],
                               s[n][2 * e + 1]);
            }
        if (i + 1 < chunks) {
            start = table[5 * i + 6];
            len = table[5 * i + 7];
            dst = table[5 * i + 9];
        }
    }
}
