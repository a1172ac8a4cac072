// Selective scan, token by token, with the state in registers: decode, verification, short rows, and every shape that the
// chunked kernel does not take. A block owns a tile of (head, p) rows of one sequence and walks its chunks in order.
// Each thread reads its part of the state before it writes it. Grid (row tiles, chunks, or
// rows with MAX_TOKENS, + padding blocks): neighbouring blocks stream neighbouring memory.
// HEADS, P, N, LANES (that share a row), RPT (rows per thread), THREADS, VEC, HEADS_PER_GROUP, FIRST_HEAD, PER_CHANNEL,
// SHARED_BC, SHARED_HEAD (a thread's rows have one group, one head), MAX_TOKENS (longer rows are someone else's);
// x_t, b_t, c_t, dt_t, pool_t, y_t.

constexpr int ELEMS = N / LANES;
constexpr int VECS = ELEMS / 4;
constexpr int ROWS = HEADS * P;
constexpr int TILE = THREADS / LANES * RPT;

template <class T> DEV void load_n(const T *p, int lane, float *v) {
#pragma unroll
    for (int e = 0; e < VECS; e++) load<4>(p + (e * LANES + lane) * 4, v + 4 * e);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(Step st, const x_t *x, i64 x_stride, const b_t *b, i64 b_stride, const c_t *cc, i64 c_stride, const dt_t *dt,
          i64 dt_stride, const float *par, i64 par_stride, pool_t *pool, i64 slot_stride, y_t *y, i64 y_stride,
          float dt_min, float dt_max, u32 untouched) {
    let_next_start();
    int tile = blockIdx.x, c = blockIdx.y, blocks = MAX_TOKENS ? st.rows : st.chunks;
    if (!untouched || c >= blocks) wait_for_inputs();
    if (c >= blocks) {
        zero_padding<THREADS>(st, y, y_stride, c - blocks, tile * TILE, min(TILE, ROWS - tile * TILE));
        return;
    }
    if constexpr (MAX_TOKENS > 0) {
        // Rows instead of chunks: most of the many chunks are someone else's.
        const u32 *row = st.row(c);
        if (row[3] == 0 || row[1] > MAX_TOKENS) {
            wait_for_inputs();
            return;
        }
        c = row[2];
    }
    Chunk ch(st.chunk(c));
    if (ch.len == 0 || ch.src == CARRY) {
        wait_for_inputs();
        return;
    }
    int lane = threadIdx.x % LANES, first = tile * TILE + threadIdx.x / LANES * RPT;
    float s[RPT][ELEMS], a[PER_CHANNEL ? RPT : 1][PER_CHANNEL ? ELEMS : 1];
#pragma unroll
    for (int r = 0; r < RPT; r++) {
        if (first + r < ROWS && ch.src != 0) {
            load_n(pool + ch.src * slot_stride + (i64)(first + r) * N, lane, s[r]);
        } else {
#pragma unroll
            for (int e = 0; e < ELEMS; e++) s[r][e] = 0.f;
        }
        if constexpr (PER_CHANNEL) {
#pragma unroll
            for (int e = 0; e < ELEMS; e++) {
                int n = (e / 4 * LANES + lane) * 4 + e % 4;
                a[r][e] = first + r < ROWS ? par[n * par_stride + first + r] : 0.f;
            }
        }
    }
    const float *d_par = par + (PER_CHANNEL ? N : 1) * par_stride, *bias_par = d_par + par_stride;
    if (untouched) wait_for_inputs();
    for (;;) {
        for (int i = 0; i < (int)ch.len; i++) {
            i64 t = ch.start + i;
            float bv[ELEMS], cv[ELEMS], yv[RPT];
            float step = 0.f, decay = 0.f;
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                int row = min(first + r, ROWS - 1), h = row / P;
                if (r == 0 || !SHARED_BC) {
                    int g = (FIRST_HEAD + h) / HEADS_PER_GROUP;
                    load_n(b + t * b_stride + g * N, lane, bv);
                    load_n(cc + t * c_stride + g * N, lane, cv);
                }
                if (r == 0 || !SHARED_HEAD) {
                    step = softplus(to_f32(dt[t * dt_stride + h]) + bias_par[h]);
                    step = fminf(fmaxf(step, dt_min), dt_max);
                    if constexpr (!PER_CHANNEL) decay = __expf(step * par[h]);
                }
                float xs = step * to_f32(x[t * x_stride + row]), sum = 0.f;
#pragma unroll
                for (int e = 0; e < ELEMS; e++) {
                    float k = decay;
                    if constexpr (PER_CHANNEL) k = __expf(step * a[r][e]);
                    s[r][e] = __fmaf_rn(xs, bv[e], k * s[r][e]);
                    sum = __fmaf_rn(s[r][e], cv[e], sum);
                }
                yv[r] = sum;
            }
            // Sums over the lanes of each row, halving the number of rows a lane holds at every exchange.
            int n = RPT, mine = 0;
#pragma unroll
            for (int m = LANES / 2; m >= 1; m /= 2) {
                bool high = lane & m;
                if (n > 1) {
                    n /= 2;
#pragma unroll
                    for (int j = 0; j < RPT / 2; j++) {
                        if (j >= n) continue;
                        float keep = high ? yv[j + n] : yv[j], send = high ? yv[j] : yv[j + n];
                        yv[j] = keep + __shfl_xor_sync(0xffffffffu, send, m);
                    }
                    mine += high ? n : 0;
                } else {
                    yv[0] += __shfl_xor_sync(0xffffffffu, yv[0], m);
                }
            }
            if (LANES <= RPT || lane % (LANES / RPT) == 0) {
#pragma unroll
                for (int j = 0; j < (RPT > LANES ? RPT / LANES : 1); j++) {
                    int row = first + mine + j;
                    if (row >= ROWS) continue;
                    float out = __fmaf_rn(d_par[row / P], to_f32(x[t * x_stride + row]), yv[j]);
                    y[t * y_stride + row] = from_f32<y_t>(out);
                }
            }
        }
        if (ch.dst != 0) {
#pragma unroll
            for (int r = 0; r < RPT; r++) {
                if (first + r >= ROWS) continue;
                pool_t *p = pool + ch.dst * slot_stride + (i64)(first + r) * N;
#pragma unroll
                for (int e = 0; e < VECS; e++) store<4>(p + (e * LANES + lane) * 4, s[r] + 4 * e);
            }
        }
        if (++c >= st.chunks) return;
        Chunk next(st.chunk(c));
        if (next.len == 0 || next.src != CARRY || next.row != ch.row) return;
        ch = next;
    }
}
