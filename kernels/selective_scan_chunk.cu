// Selective scan of long rows in the chunked (dual) form on tensor cores, bf16 in, f32 state. A block owns PB columns of
// one head of one sequence and walks its chunks in order with the state in registers, so nothing but x, B, C, dt and y
// moves through device memory, and the state of every chunk end is at hand for a capture. The next chunk is copied to
// shared memory while this one is computed.
// Per chunk: y = exp(a) C Sᵀ + (C Bᵀ ∘ L) x + D x;  S = exp(a_last) S + (w x)ᵀ B, with a the running sum of dt A.
// Grid (R, heads * P / PB). Rows of at most MIN_TOKENS are someone else's.
// HEADS, P, N, PB, HEADS_PER_GROUP, FIRST_HEAD, MIN_TOKENS.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int Q = PAGE;
constexpr int BC_PITCH = N + 8;                  // ldmatrix without bank conflicts
constexpr int X_PITCH = PB + 8;
constexpr int STAGE = 2 * Q * BC_PITCH + Q * X_PITCH;
constexpr int P_TILES = PB / 16;
constexpr int N_PART = N * P_TILES / WARPS;      // columns of S that a warp holds, of 16 rows
constexpr int S_TILES = N_PART / 8;
constexpr int Y_COLS = PB / 2;                   // columns of y that a warp computes, of 16 tokens
constexpr int Y_TILES = Y_COLS / 8;
constexpr int BLOCKS = P / PB;
constexpr int KSTEPS = N / 16;

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(Step st, const bf16 *x, i64 x_stride, const bf16 *b, i64 b_stride, const bf16 *cc, i64 c_stride,
          const bf16 *dt, i64 dt_stride, const float *par, i64 par_stride, float *pool, i64 slot_stride, bf16 *y,
          i64 y_stride, float dt_min, float dt_max) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float sums[2][Q], steps[2][Q];
    bf16 *stages = reinterpret_cast<bf16 *>(shared), *s16 = stages + 2 * STAGE, *xw = s16 + PB * BC_PITCH;
    const u32 *row = st.row(blockIdx.x);
    int chunks = row[3];
    if (row[1] <= MIN_TOKENS || chunks == 0) return;
    const u32 *table = st.chunk(row[2]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int h = blockIdx.y / BLOCKS, p0 = blockIdx.y % BLOCKS * PB;
    int group = (FIRST_HEAD + h) / HEADS_PER_GROUP;
    float a_neg = par[h], d_skip = par[par_stride + h], bias = par[2 * par_stride + h];
    const bf16 *px = x + h * P + p0, *pb = b + group * N, *pc = cc + group * N;

    auto fetch = [&](int i) {
        int start = table[5 * i + 1], len = table[5 * i + 2];
        bf16 *sc = stages + i % 2 * STAGE, *sb = sc + Q * BC_PITCH, *sx = sb + Q * BC_PITCH;
#pragma unroll
        for (int v = threadIdx.x; v < Q * N / 8; v += THREADS) {
            int t = v / (N / 8), k = v % (N / 8) * 8;
            bool in = t < len;
            i64 at = in ? start + t : start;
            cp_async16(smem_addr(sc + t * BC_PITCH + k), pc + at * c_stride + k, in);
            cp_async16(smem_addr(sb + t * BC_PITCH + k), pb + at * b_stride + k, in);
        }
#pragma unroll
        for (int v = threadIdx.x; v < Q * PB / 8; v += THREADS) {
            int t = v / (PB / 8), k = v % (PB / 8) * 8;
            bool in = t < len;
            cp_async16(smem_addr(sx + t * X_PITCH + k), px + (i64)(in ? start + t : start) * x_stride + k, in);
        }
        cp_async_commit();
    };
    // Raw dt of tokens 2 lane and 2 lane + 1, for warp 0.
    auto raw_dt = [&](int i, float *v) {
        int start = table[5 * i + 1], len = table[5 * i + 2];
#pragma unroll
        for (int e = 0; e < 2; e++)
            v[e] = 2 * lane + e < len ? to_f32(dt[(i64)(start + 2 * lane + e) * dt_stride + h]) : -INF;
    };

    fetch(0);
    float next_dt[2];
    if (warp == 0) raw_dt(0, next_dt);
    // This warp's part of the state: rows sp + g, sp + g + 8; columns sn + 8 i + 2 c, + 1.
    int sp = warp % P_TILES * 16, sn = warp / P_TILES * N_PART;
    float s[S_TILES][4];
    u32 src = table[3];
#pragma unroll
    for (int i = 0; i < S_TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            i64 at = ((i64)h * P + p0 + sp + g + 8 * e) * N + sn + 8 * i + 2 * c;
            float2 v = src == 0 ? make_float2(0.f, 0.f) : *reinterpret_cast<float2 *>(pool + src * slot_stride + at);
            s[i][2 * e] = v.x;
            s[i][2 * e + 1] = v.y;
            *reinterpret_cast<u32 *>(s16 + (sp + g + 8 * e) * BC_PITCH + sn + 8 * i + 2 * c) = pack_bf16(v.x, v.y);
        }

    // This warp's part of y: 16 tokens, Y_COLS columns. The causal half of the work is shared evenly among the four
    // schedulers, which get warps by their number modulo 4.
    int yt = (warp < 4 ? warp : 7 - warp) * 16, yp = warp / 4 * Y_COLS;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;   // A operand; B operand through trans
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;   // B operand; A operand through trans

    for (int i = 0; i < chunks; i++) {
        int start = table[5 * i + 1], len = table[5 * i + 2];
        u32 dst = table[5 * i + 4];
        float *sum = sums[i % 2], *step = steps[i % 2];
        if (warp == 0) {
            float d[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                d[e] = next_dt[e] == -INF ? 0.f : fminf(fmaxf(softplus(next_dt[e] + bias), dt_min), dt_max);
            float a0 = d[0] * a_neg, a1 = a0 + d[1] * a_neg, total = a1;
#pragma unroll
            for (int m = 1; m < 32; m *= 2) {
                float other = __shfl_up_sync(0xffffffffu, total, m);
                if (lane >= m) total += other;
            }
            float before = total - a1;
            sum[2 * lane] = before + a0;
            sum[2 * lane + 1] = total;
            step[2 * lane] = d[0];
            step[2 * lane + 1] = d[1];
            if (i + 1 < chunks) raw_dt(i + 1, next_dt);
        }
        cp_async_wait<0>();
        __syncthreads();
        if (i + 1 < chunks) fetch(i + 1);
        bf16 *sc = stages + i % 2 * STAGE, *sb = sc + Q * BC_PITCH, *sx = sb + Q * BC_PITCH;
        float last = sum[Q - 1];
#pragma unroll
        for (int v = threadIdx.x; v < Q * PB / 8; v += THREADS) {
            int t = v / (PB / 8), k = v % (PB / 8) * 8;
            float w = __expf(last - sum[t]) * step[t], e[8];
            load<8>(sx + t * X_PITCH + k, e);
#pragma unroll
            for (int j = 0; j < 8; j++) e[j] *= w;
            store<8>(xw + t * X_PITCH + k, e);
        }

        if (yt < len) {
            u32 ca[KSTEPS][4];
#pragma unroll
            for (int k = 0; k < KSTEPS; k++) ldmatrix_x4(ca[k], smem_addr(sc + (yt + a_row) * BC_PITCH + k * 16 + a_col));
            float acc[Y_TILES][4] = {};
#pragma unroll
            for (int k = 0; k < KSTEPS; k++)
#pragma unroll
                for (int n = 0; n < Y_TILES / 2; n++) {
                    u32 bb[4];
                    ldmatrix_x4(bb, smem_addr(s16 + (yp + n * 16 + b_row) * BC_PITCH + k * 16 + b_col));
                    mma_bf16(acc[2 * n], ca[k], bb[0], bb[1]);
                    mma_bf16(acc[2 * n + 1], ca[k], bb[2], bb[3]);
                }
            float sum_t[2] = {sum[yt + g], sum[yt + g + 8]};
            float grow[2] = {__expf(sum_t[0]), __expf(sum_t[1])};
#pragma unroll
            for (int n = 0; n < Y_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n][e] *= grow[e / 2];
            for (int s0 = 0; s0 <= yt; s0 += 16) {
                float m[2][4] = {};
#pragma unroll
                for (int k = 0; k < KSTEPS; k++) {
                    u32 bb[4];
                    ldmatrix_x4(bb, smem_addr(sb + (s0 + b_row) * BC_PITCH + k * 16 + b_col));
                    mma_bf16(m[0], ca[k], bb[0], bb[1]);
                    mma_bf16(m[1], ca[k], bb[2], bb[3]);
                }
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int from = s0 + n * 8 + 2 * c + e % 2, to = yt + g + e / 2 * 8;
                        // Masked before the exponential: above the diagonal it overflows.
                        m[n][e] = from <= to ? m[n][e] * __expf(sum_t[e / 2] - sum[from]) * step[from] : 0.f;
                    }
                u32 ma[4] = {pack_bf16(m[0][0], m[0][1]), pack_bf16(m[0][2], m[0][3]), pack_bf16(m[1][0], m[1][1]),
                             pack_bf16(m[1][2], m[1][3])};
#pragma unroll
                for (int n = 0; n < Y_TILES / 2; n++) {
                    u32 bb[4];
                    ldmatrix_x4_trans(bb, smem_addr(sx + (s0 + a_row) * X_PITCH + yp + n * 16 + a_col));
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
        }
        __syncthreads();

        float decay = __expf(last);
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
        }
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int p = sp + g + 8 * e, k = sn + 8 * n + 2 * c;
                *reinterpret_cast<u32 *>(s16 + p * BC_PITCH + k) = pack_bf16(s[n][2 * e], s[n][2 * e + 1]);
                if (dst != 0)
                    *reinterpret_cast<float2 *>(pool + dst * slot_stride + ((i64)h * P + p0 + p) * N + k) =
                        make_float2(s[n][2 * e], s[n][2 * e + 1]);
            }
    }
}
