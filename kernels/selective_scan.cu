// Selective scan, token by token, with the state in registers: decode, verification, short rows, and every shape that the
// chunked kernel does not take. A block owns a tile of (head, p) rows of one sequence and walks its chunks in order.
// Each thread reads its part of the state before it writes it. Grid: row tiles of each chunk, or row with MAX_TOKENS, then
// padding blocks; neighbouring blocks stream neighbouring memory. A step of few sequences waits for memory twice: for the chunk
// table, then for state and token together. Loads that need no table are issued with it, and nothing between the loads of state
// and token waits for a load.
// HEADS, P, N, LANES (that share a row), VEC (neighbouring elements of a lane), RPT (rows per thread), SUB (of them in f32 at a
// time), THREADS, BLOCKS (of a multiprocessor, at least), HEADS_PER_GROUP, FIRST_HEAD, PER_CHANNEL, SHARED_BC, SHARED_HEAD (a
// thread's rows have one group, one head), MAX_TOKENS (longer rows are left to the chunked kernel); x_t, b_t, c_t, dt_t, pool_t, y_t.

constexpr int ELEMS = N / LANES;
constexpr int VECS = ELEMS / VEC;
constexpr int ROWS = HEADS * P;
constexpr int TILE = THREADS / LANES * RPT;
constexpr int TILES = div_up(ROWS, TILE);

DEV bool is_row(int row) { return ROWS % TILE == 0 || row < ROWS; }
// `row`, or the last one.
DEV int some_row(int row) { return is_row(row) ? row : ROWS - 1; }

// The inputs that SUB rows of a thread read of a token, in the memory format.
struct Token {
    static constexpr int GROUPS_OF = SHARED_BC ? 1 : SUB, HEADS_OF = SHARED_HEAD ? 1 : SUB;
    Packed<VEC, b_t> b[GROUPS_OF][VECS];
    Packed<VEC, c_t> c[GROUPS_OF][VECS];
    dt_t dt[HEADS_OF];
    x_t x[SUB];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) ENTRY(PARAMETERS) {
    int tile = blockIdx.x % TILES, unit = blockIdx.x / TILES, blocks = MAX_TOKENS ? st.rows : st.chunks;
    if (unit >= blocks) {
        let_next_start();
        zero_padding<THREADS, ROWS>(st, y, y_stride, blockIdx.x - blocks * TILES);
        return;
    }
    bool mine = true;
    if constexpr (MAX_TOKENS > 0) {
        // Rows instead of chunks: most chunks belong to the chunked kernel.
        const u32 *row = st.row(unit);
        mine = row[3] != 0 && row[1] <= MAX_TOKENS;
        unit = mine ? row[2] : 0;
    }
    Chunk begin(st.chunk(unit));
    mine = mine && begin.len != 0 && begin.src != CARRY;
    int lane = threadIdx.x % LANES, first = tile * TILE + threadIdx.x / LANES * RPT;
    const float *d_par = par + (PER_CHANNEL ? N : 1) * par_stride, *bias_par = d_par + par_stride;
    float a[RPT][PER_CHANNEL ? ELEMS : 1], d[RPT], bias[RPT];
#pragma unroll
    for (int r = 0; r < RPT; r++) {
        int row = some_row(first + r);
        if constexpr (PER_CHANNEL) {
#pragma unroll
            for (int e = 0; e < ELEMS; e++) a[r][e] = par[((e / VEC * LANES + lane) * VEC + e % VEC) * par_stride + row];
        }
        if (r == 0 || !SHARED_HEAD) {
            if constexpr (!PER_CHANNEL) a[r][0] = par[row / P];
            d[r] = d_par[row / P];
            bias[r] = bias_par[row / P];
        }
    }
    if (!state_unwritten || !mine) wait_for_inputs();
    let_next_start();
    if (!mine) return;
    // The inputs that SUB rows from `part` on read of a token.
    auto fetch = [&](Token &token, i64 t, int part) {
#pragma unroll
        for (int r = 0; r < SUB; r++) {
            int row = some_row(first + part + r), h = row / P, g = (FIRST_HEAD + h) / HEADS_PER_GROUP;
            if (r < token.HEADS_OF) token.dt[r] = dt[t * dt_stride + h];
            if (r < token.GROUPS_OF) {
#pragma unroll
                for (int e = 0; e < VECS; e++) {
                    token.b[r][e] = load_raw<VEC>(b + t * b_stride + g * N + (e * LANES + lane) * VEC);
                    token.c[r][e] = load_raw<VEC>(cc + t * cc_stride + g * N + (e * LANES + lane) * VEC);
                }
            }
            token.x[r] = x[t * x_stride + row];
        }
    };
    Packed<VEC, pool_t> raw[RPT][VECS];
    if (begin.src != 0) {
        const pool_t *p = pool + begin.src * pool_stride + (first * N + lane * VEC);
#pragma unroll
        for (int r = 0; r < RPT; r++) {
#pragma unroll
            for (int e = 0; e < VECS; e++) raw[r][e] = load_raw<VEC>(p + (some_row(first + r) - first) * N + e * LANES * VEC);
        }
    } else {
#pragma unroll
        for (int r = 0; r < RPT; r++) {
#pragma unroll
            for (int e = 0; e < VECS; e++) raw[r][e].clear();
        }
    }
    Token token;
    if (state_unwritten) wait_for_inputs();
    fetch(token, begin.start, 0);
    // The compiler would rather ask where the token is used.
    asm volatile("" ::: "memory");
    // Read before it is needed: whether the row has another chunk.
    Chunk after(st.chunk(min(unit + 1, st.chunks - 1)));
#pragma unroll
    for (int part = 0; part < RPT; part += SUB) {
        float s[SUB][ELEMS];
#pragma unroll
        for (int r = 0; r < SUB; r++) {
#pragma unroll
            for (int e = 0; e < ELEMS; e++) s[r][e] = to_f32(raw[part + r][e / VEC].item[e % VEC]);
        }
        if (part > 0) fetch(token, begin.start, part);
        Chunk ch = begin;
        for (int c = unit;;) {
            for (int i = 0;;) {
                i64 t = ch.start + i;
                float bv[ELEMS], cv[ELEMS], yv[SUB];
                float step = 0.f, decay = 0.f;
#pragma unroll
                for (int r = 0; r < SUB; r++) {
                    int of_head = SHARED_HEAD ? 0 : part + r;
                    if (r < token.GROUPS_OF) {
#pragma unroll
                        for (int e = 0; e < ELEMS; e++) {
                            bv[e] = to_f32(token.b[r][e / VEC].item[e % VEC]);
                            cv[e] = to_f32(token.c[r][e / VEC].item[e % VEC]);
                        }
                    }
                    if (r < token.HEADS_OF) {
                        step = softplus(to_f32(token.dt[r]) + bias[of_head]);
                        step = fminf(fmaxf(step, dt_min), dt_max);
                        if constexpr (!PER_CHANNEL) decay = ex2(LOG2E * step * a[of_head][0]);
                    }
                    float xr = to_f32(token.x[r]), xs = step * xr;
                    // The skip is one lane's.
                    float sum = lane == 0 ? d[of_head] * xr : 0.f;
#pragma unroll
                    for (int e = 0; e < ELEMS; e++) {
                        float k = decay;
                        if constexpr (PER_CHANNEL) k = ex2(LOG2E * step * a[part + r][e]);
                        s[r][e] = __fmaf_rn(xs, bv[e], k * s[r][e]);
                        sum = __fmaf_rn(s[r][e], cv[e], sum);
                    }
                    yv[r] = sum;
                }
                // Before the sums: most of the bytes written are state.
                if (i + 1 == (int)ch.len && ch.dst != 0) {
#pragma unroll
                    for (int r = 0; r < SUB; r++) {
                        if (!is_row(first + part + r)) continue;
                        pool_t *p = pool + ch.dst * pool_stride + (first * N + lane * VEC) + (part + r) * N;
#pragma unroll
                        for (int e = 0; e < VECS; e++) store_global<VEC>(p + e * LANES * VEC, s[r] + VEC * e);
                    }
                }
                // Sums over the lanes of each row, halving the number of rows a lane holds at every exchange.
                int n = SUB, mine = 0;
#pragma unroll
                for (int m = LANES / 2; m >= 1; m /= 2) {
                    bool high = lane & m;
                    if (n > 1) {
                        n /= 2;
#pragma unroll
                        for (int j = 0; j < SUB / 2; j++) {
                            if (j >= n) continue;
                            float keep = high ? yv[j + n] : yv[j], send = high ? yv[j] : yv[j + n];
                            yv[j] = keep + __shfl_xor_sync(0xffffffffu, send, m);
                        }
                        mine += high ? n : 0;
                    } else {
                        yv[0] += __shfl_xor_sync(0xffffffffu, yv[0], m);
                    }
                }
                if (LANES <= SUB || lane % (LANES / SUB) == 0) {
#pragma unroll
                    for (int j = 0; j < (SUB > LANES ? SUB / LANES : 1); j++) {
                        int row = first + part + mine + j;
                        if (is_row(row)) y[t * y_stride + row] = from_f32<y_t>(yv[j]);
                    }
                }
                if (++i >= (int)ch.len) break;
                fetch(token, ch.start + i, part);
            }
            if (++c >= st.chunks) break;
            Chunk next = c == unit + 1 ? after : Chunk(st.chunk(c));
            if (next.len == 0 || next.src != CARRY || next.row != ch.row) break;
            ch = next;
            fetch(token, ch.start, part);
        }
    }
}
