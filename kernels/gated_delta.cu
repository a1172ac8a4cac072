// Gated delta rule, token by token, with the state in registers: decode, verification, short rows, and every shape that
// the chunked kernel does not take. Columns of S are independent, so a block owns COLS columns of one head of one
// sequence and walks its chunks in order. One reduction a token: o = qᵀS' = e^g qᵀS + (q·k) δ.
// Grid: column tiles of the heads of each chunk, or row with MAX_TOKENS, then padding blocks; neighbouring blocks stream
// neighbouring memory.
// HEADS, DK, DV, COLS, THREADS, BLOCKS (of a multiprocessor, at least), HEADS_PER_KEY, FIRST_HEAD, EACH (every row of S has a
// decay of its own), MAX_TOKENS (longer rows are left to another kernel); q_t, k_t, v_t, a_t, b_t, pool_t, out_t.

constexpr int LANES = COLS / 4;               // threads along a row of S
constexpr int GROUPS = THREADS / LANES;       // rows of S in flight
constexpr int RPT = div_up(DK, GROUPS);       // rows per thread
constexpr int TILES = div_up(DV, COLS);
constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) ENTRY(PARAMETERS) {
    // kᵀS and qᵀS of 4 columns, k·k, q·q, k·q; of two tokens in turn, so that a token has one barrier, or with EACH two.
    __shared__ __align__(16) float parts[2][WARPS][LANES][12];
    // With EACH: decays, keys and queries, which every column needs.
    __shared__ float rows[2][EACH ? 3 : 1][EACH ? DK : 1];
    int unit = blockIdx.x / (HEADS * TILES), h = blockIdx.x / TILES % HEADS, tile = blockIdx.x % TILES * COLS;
    int blocks = MAX_TOKENS ? st.rows : st.chunks;
    if (unit >= blocks) {
        let_next_start();
        zero_padding<THREADS, HEADS * DV>(st, out, out_stride, blockIdx.x - blocks * HEADS * TILES);
        return;
    }
    bool mine = true;
    if constexpr (MAX_TOKENS > 0) {
        // Rows instead of chunks: most chunks belong to the chunked kernel.
        const u32 *row = st.row(unit);
        mine = row[3] != 0 && row[1] <= MAX_TOKENS;
        unit = mine ? row[2] : 0;
    }
    Chunk ch(st.chunk(unit));
    float a_neg = EACH ? 0.f : par[h], dt_bias = EACH ? 0.f : par[par_stride + h];
    mine = mine && ch.len != 0 && ch.src != CARRY;
    if (!state_unwritten || !mine) wait_for_inputs();
    let_next_start();
    if (!mine) return;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % LANES, group = tid / LANES;
    int col = tile + lane * 4;
    bool active = DV % COLS == 0 || col < DV;
    auto is_row = [&](int r) { return DK % GROUPS == 0 || group + r * GROUPS < DK; };
    Packed<4, pool_t> raw[RPT];
    int base = (h * DK + group) * DV + col;
#pragma unroll
    for (int r = 0; r < RPT; r++) raw[r].clear();
    if (active && ch.src != 0) {
#pragma unroll
        for (int r = 0; r < RPT; r++) {
            if (is_row(r)) raw[r] = load_raw<4>(pool + ch.src * pool_stride + base + r * GROUPS * DV);
        }
    }
    int key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK, turn = 0;
    if (state_unwritten) wait_for_inputs();
    float s[RPT][4];
#pragma unroll
    for (int r = 0; r < RPT; r++) unpack<4>(raw[r], s[r]);
    for (int c = unit;;) {
        for (int i = 0; i < (int)ch.len; i++, turn ^= 1) {
            i64 t = ch.start + i;
            float kr[RPT], qr[RPT], vv[4] = {0.f, 0.f, 0.f, 0.f}, sums[12] = {};
            if (active) load<4>(v + t * v_stride + h * DV + col, vv);
            float g = 1.f;
            if constexpr (EACH) {
                for (int row = tid; row < DK; row += THREADS) {
                    int d = h * DK + row;
                    rows[turn][0][row] = __expf(par[d] * softplus(to_f32(a[t * a_stride + d]) + par[par_stride + d]));
                    rows[turn][1][row] = to_f32(k[t * k_stride + key + row]);
                    rows[turn][2][row] = to_f32(q[t * q_stride + key + row]);
                }
                __syncthreads();
                // S decays before anything is read from it.
#pragma unroll
                for (int r = 0; r < RPT; r++) {
                    int row = group + r * GROUPS;
                    float own = is_row(r) ? rows[turn][0][row] : 0.f;
                    kr[r] = is_row(r) ? rows[turn][1][row] : 0.f;
                    qr[r] = is_row(r) ? rows[turn][2][row] : 0.f;
#pragma unroll
                    for (int e = 0; e < 4; e++) s[r][e] *= own;
                }
            } else {
#pragma unroll
                for (int r = 0; r < RPT; r++) {
                    int row = group + r * GROUPS;
                    kr[r] = is_row(r) ? to_f32(k[t * k_stride + key + row]) : 0.f;
                    qr[r] = is_row(r) ? to_f32(q[t * q_stride + key + row]) : 0.f;
                }
                g = __expf(a_neg * softplus(to_f32(a[t * a_stride + h]) + dt_bias));
            }
            float beta = beta_scale * sigmoid(to_f32(b[t * b_stride + h]));
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                sums[8] = __fmaf_rn(kr[r], kr[r], sums[8]);
                sums[9] = __fmaf_rn(qr[r], qr[r], sums[9]);
                sums[10] = __fmaf_rn(kr[r], qr[r], sums[10]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    sums[e] = __fmaf_rn(kr[r], s[r][e], sums[e]);
                    sums[4 + e] = __fmaf_rn(qr[r], s[r][e], sums[4 + e]);
                }
            }
#pragma unroll
            for (int m = LANES; m < 32; m *= 2) {
#pragma unroll
                for (int e = 0; e < 11; e++) sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], m);
            }
            if (tid % 32 < LANES) {
#pragma unroll
                for (int e = 0; e < 12; e += 4) store<4>(&parts[turn][warp][lane][e], sums + e);
            }
            __syncthreads();
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float part[12];
#pragma unroll
                for (int e = 0; e < 12; e += 4) load<4>(&parts[turn][w][lane][e], part + e);
#pragma unroll
                for (int e = 0; e < 11; e++) sums[e] = w == 0 ? part[e] : sums[e] + part[e];
            }
            float rk = rsqrtf(sums[8] + 1e-6f), rq = rsqrtf(sums[9] + 1e-6f) * rsqrtf((float)DK);
            float o[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float delta = beta * __fmaf_rn(-g * rk, sums[e], vv[e]);
                o[e] = __fmaf_rn(sums[10] * rk * rq, delta, g * rq * sums[4 + e]);
                delta *= rk;
#pragma unroll
                for (int r = 0; r < RPT; r++) s[r][e] = __fmaf_rn(kr[r], delta, g * s[r][e]);
            }
            if (active && group == 0) store<4>(out + t * out_stride + h * DV + col, o);
        }
        if (ch.dst != 0 && active) {
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                if (is_row(r)) store_global<4>(pool + ch.dst * pool_stride + base + r * GROUPS * DV, s[r]);
            }
        }
        if (++c >= st.chunks) return;
        Chunk next(st.chunk(c));
        if (next.len == 0 || next.src != CARRY || next.row != ch.row) return;
        ch = next;
    }
}
