// Gated delta rule with a decay per key channel for long rows, token by token: of f32 activations, and where the chunked form does
// not fit. A block owns CB columns of the state of one head of one sequence, and walks the chunks in order. Some warps bring the
// next tokens to shared memory, normalised, with their decays;
// others hold 8 columns of S each in registers, 8 lanes to a pair of columns, so that a token has no barrier.
// With the decayed state S, kᵀS and qᵀS are summed together: o = qᵀS + (q·k) δ.
// Grid (as many rows as can be long, heads * DV / CB). Rows of at most MIN_TOKENS tokens are left to gated_delta.cu.
// HEADS, DK (a multiple of 32), DV, CB (of 8), HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS; q_t, k_t, v_t, a_t, b_t, pool_t, out_t.

constexpr int HOLDERS = CB / 8, BRINGERS = 4;    // warps
constexpr int THREADS = 32 * (HOLDERS + BRINGERS);
constexpr int TILE = 16;                         // tokens
constexpr int OWN = TILE / BRINGERS;             // of them a warp brings
constexpr int PIECES = div_up(DK, 128);          // quads of a lane that brings
constexpr int QUADS = DK / 32;                   // quads of rows of a lane that holds
constexpr int BLOCKS = DV / CB;
// Floats of a tile: keys, queries, decays, values, β, q·k.
constexpr int AT_Q = TILE * DK, AT_DECAY = 2 * AT_Q, AT_V = 3 * AT_Q, AT_BETA = AT_V + TILE * CB, AT_PRODUCT = AT_BETA + TILE;
constexpr int TILE_FLOATS = AT_PRODUCT + TILE;

// The tiles of a row's chunks in order; no tile is of two chunks.
struct Tiles {
    const u32 *table;
    int chunks, chunk, at;
    DEV Chunk of() const { return Chunk(table + 5 * chunk); }
    DEV bool more() const { return chunk < chunks; }
    DEV void advance() {
        at += TILE;
        if (at < (int)of().len) return;
        at = 0;
        chunk++;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    Tiles tiles = {st.chunk(row[2]), (int)row[3], 0, 0};
    float *buffers = reinterpret_cast<float *>(shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int h = blockIdx.y / BLOCKS, col0 = blockIdx.y % BLOCKS * CB;

    if (warp >= HOLDERS) {
        int first = warp - HOLDERS, key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK;
        float a_neg[PIECES][4], dt_bias[PIECES][4];
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int c = (p * 32 + lane) * 4;
            if (c >= DK) continue;
            load<4>(par + h * DK + c, a_neg[p]);
            load<4>(par + par_stride + h * DK + c, dt_bias[p]);
        }
        // A tile is read while the one before it is used, and its buffer by the one after that.
        for (int turn = 0; tiles.more(); tiles.advance(), turn ^= 1) {
            Chunk ch = tiles.of();
            int count = min(TILE, (int)ch.len - tiles.at);
            i64 start = ch.start + tiles.at;
            Packed<4, q_t> qs[OWN][PIECES];
            Packed<4, k_t> ks[OWN][PIECES];
            Packed<4, a_t> as[OWN][PIECES];
            Packed<4, v_t> vs[OWN];
            float bs[OWN];
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                // Past the end, the tile's last token again; nothing reads it.
                i64 t = start + min(first + n * BRINGERS, count - 1);
                bs[n] = to_f32(b[t * b_stride + h]);
                if (lane < CB / 4) vs[n] = load_raw<4>(v + t * v_stride + h * DV + col0 + lane * 4);
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    int c = (p * 32 + lane) * 4;
                    qs[n][p].clear();
                    ks[n][p].clear();
                    as[n][p].clear();
                    if (c >= DK) continue;
                    qs[n][p] = load_raw<4>(q + t * q_stride + key + c);
                    ks[n][p] = load_raw<4>(k + t * k_stride + key + c);
                    as[n][p] = load_raw<4>(a + t * a_stride + h * DK + c);
                }
            }
            float *to = buffers + turn * TILE_FLOATS;
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                int i = first + n * BRINGERS;
                float x[PIECES][4], y[PIECES][4], kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    unpack<4>(ks[n][p], x[p]);
                    unpack<4>(qs[n][p], y[p]);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        kk = __fmaf_rn(x[p][e], x[p][e], kk);
                        qq = __fmaf_rn(y[p][e], y[p][e], qq);
                        kq = __fmaf_rn(x[p][e], y[p][e], kq);
                    }
                }
                float rk = rsqrtf(warp_sum(kk) + 1e-6f), rq = rsqrtf(warp_sum(qq) + 1e-6f) * rsqrtf((float)DK);
                kq = warp_sum(kq) * rk * rq;
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    int c = (p * 32 + lane) * 4;
                    if (c >= DK) continue;
                    float decay[4];
                    unpack<4>(as[n][p], decay);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[p][e] *= rk;
                        y[p][e] *= rq;
                        decay[e] = __expf(a_neg[p][e] * softplus(decay[e] + dt_bias[p][e]));
                    }
                    store<4>(to + i * DK + c, x[p]);
                    store<4>(to + AT_Q + i * DK + c, y[p]);
                    store<4>(to + AT_DECAY + i * DK + c, decay);
                }
                float values[4];
                unpack<4>(vs[n], values);
                if (lane < CB / 4) store<4>(to + AT_V + i * CB + lane * 4, values);
                if (lane == 0) {
                    to[AT_BETA + i] = beta_scale * sigmoid(bs[n]);
                    to[AT_PRODUCT + i] = kq;
                }
            }
            named_sync(1, THREADS);
        }
        return;
    }

    // Rows 4 (8 j + part) + e of two columns.
    int part = lane % 8, pair = warp * 8 + lane / 8 * 2;
    float s[QUADS][4][2] = {};
    i64 base = ((i64)h * DK + part * 4) * DV + col0 + pair;
    for (int turn = 0; tiles.more(); tiles.advance(), turn ^= 1) {
        Chunk ch = tiles.of();
        int count = min(TILE, (int)ch.len - tiles.at);
        if (tiles.at == 0 && ch.src != CARRY) {
#pragma unroll
            for (int j = 0; j < QUADS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 x = make_float2(0.f, 0.f);
                    if (ch.src != 0) x = load_pair(pool + ch.src * pool_stride + base + (i64)(32 * j + e) * DV);
                    s[j][e][0] = x.x;
                    s[j][e][1] = x.y;
                }
        }
        named_sync(1, THREADS);
        const float *from = buffers + turn * TILE_FLOATS;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            float kx[QUADS][4], kS[2] = {0.f, 0.f}, qS[2] = {0.f, 0.f};
#pragma unroll
            for (int j = 0; j < QUADS; j++) {
                int c = i * DK + (8 * j + part) * 4;
                float qx[4], decay[4];
                load<4>(from + c, kx[j]);
                load<4>(from + AT_Q + c, qx);
                load<4>(from + AT_DECAY + c, decay);
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        s[j][e][n] *= decay[e];
                        kS[n] = __fmaf_rn(kx[j][e], s[j][e][n], kS[n]);
                        qS[n] = __fmaf_rn(qx[e], s[j][e][n], qS[n]);
                    }
            }
#pragma unroll
            for (int m = 1; m < 8; m *= 2)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    kS[n] += __shfl_xor_sync(0xffffffffu, kS[n], m);
                    qS[n] += __shfl_xor_sync(0xffffffffu, qS[n], m);
                }
            float2 value = load_pair(from + AT_V + i * CB + pair);
            float beta = from[AT_BETA + i], product = from[AT_PRODUCT + i];
            float delta[2] = {beta * (value.x - kS[0]), beta * (value.y - kS[1])};
#pragma unroll
            for (int j = 0; j < QUADS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int n = 0; n < 2; n++) s[j][e][n] = __fmaf_rn(kx[j][e], delta[n], s[j][e][n]);
            i64 t = ch.start + tiles.at + i;
            if (part == 0)
                store_pair(out + t * out_stride + h * DV + col0 + pair, __fmaf_rn(product, delta[0], qS[0]),
                           __fmaf_rn(product, delta[1], qS[1]));
        }
        if (ch.dst == 0 || tiles.at + count < (int)ch.len) continue;
#pragma unroll
        for (int j = 0; j < QUADS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store_pair(pool + ch.dst * pool_stride + base + (i64)(32 * j + e) * DV, s[j][e][0], s[j][e][1]);
    }
}
