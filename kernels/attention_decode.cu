// Attention of few queries over long contexts, bf16, at memory speed. A block owns one token, one KV head with its whole
// group of query heads (at most 16), and the pages whose index is its own modulo SPLITS. Slices of 16 keys are dealt to its warps,
// which copy them with cp.async through rings of their own and synchronise only at the end. Scores
// and outputs are computed transposed, keys and dims in the rows of the mma, so that 8 heads fill its columns. The last of
// the SPLITS blocks to finish merges the results of all of them in the order of their numbers.
// Codes become bf16 in registers. Their scales multiply the scores and the weights, so that the operands are whole numbers.
// Grid (T, KV heads, SPLITS).
// HEAD_DIM (a multiple of 16), HEADS, KV_HEADS, SPLITS, WINDOW (0 = none), FIRST, WARPS, STAGES; kv_t (bf16 or i8), out_t.

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TILES = div_up(GROUP, 8);          // of 8 query heads
constexpr int KEYS = 16;
constexpr int SLICES = PAGE / KEYS;
constexpr int KSTEPS = HEAD_DIM / 16;
constexpr bool CODES = CODED<kv_t>;
constexpr int PIECE = 16 / sizeof(kv_t);         // elements of 16 bytes
constexpr int VECS = HEAD_DIM / PIECE;           // 16-byte pieces of a row
constexpr bool SWIZZLED = !CODES && VECS % 8 == 0; // else padded, rows of codes to an odd number of pieces
constexpr int PITCH = SWIZZLED || (CODES && VECS % 2) ? HEAD_DIM : HEAD_DIM + PIECE;
constexpr int SLICE = KEYS * PITCH * (int)sizeof(kv_t); // bytes of K or V in a stage
constexpr int SCALES = CODES ? KEYS * 4 : 0;     // bytes of the scales of K or V after both
constexpr int STAGE = 2 * (SLICE + SCALES);
constexpr int THREADS = 32 * WARPS;
constexpr float LEAST = -1e30f;                  // below any score; finite, so that differences are numbers

DEV u32 piece_at(int row, int piece) {
    if constexpr (SWIZZLED) return swizzle<VECS>(row, piece);
    return row * (PITCH * (int)sizeof(kv_t)) + piece * 16;
}
// The address of the piece 2 i after piece 0 or 1 of a row.
DEV u32 piece_on(u32 at, int i) { return SWIZZLED ? (at ^ (i & 3) << 5) + (i >> 2) * 128 : at + i * 32; }

// 8 x 8 elements transposed; a lane holds two neighbours of a row.
DEV u32 transpose(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// Four weighted values of some keys, relative to the largest of their scores.
struct Part {
    float top = LEAST, sum = 0.f;
    float4 o = {0.f, 0.f, 0.f, 0.f};
};
template <int N> DEV Part merged(const Part (&parts)[N]) {
    Part all;
#pragma unroll
    for (int i = 0; i < N; i++) all.top = fmaxf(all.top, parts[i].top);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float f = ex2(parts[i].top - all.top);
        all.sum += f * parts[i].sum;
        all.o.x += f * parts[i].o.x;
        all.o.y += f * parts[i].o.y;
        all.o.z += f * parts[i].o.z;
        all.o.w += f * parts[i].o.w;
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    extern __shared__ __align__(256) u8 shared[];
    int t = blockIdx.x, kv = blockIdx.y, split = blockIdx.z;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    let_next_start();
    // Most tokens are alone in the row of their number, so that nothing here waits for `r` but the check.
    int guess = min(t, st.rows - 1);
    u32 r = st.token_row(t);
    int position = st.position(t), row_first = st.row(guess)[0];
    const u32 *table = st.page_row(guess);
    int begin = max(WINDOW ? position + 1 - WINDOW : 0, min(FIRST, position)), first_page = begin / PAGE + split;
    // Pages i .. i + 31 of this block, one a lane.
    auto ids_from = [&](int i) { return table[min(first_page + (i + lane) * SPLITS, st.pages - 1)]; };
    u32 ids = ids_from(0), next = ids_from(32);
    int base = 0;
    if (r == NONE) {
        wait_for_inputs();
        return;
    }
    if (r != guess) {
        row_first = st.row(r)[0];
        table = st.page_row(r);
        ids = ids_from(0);
        next = ids_from(32);
    }
    // Pages that no token of this step lies in do not wait for the kernels before.
    int old = (position - (t - row_first)) / PAGE;
    int pages = max(0, div_up(position / PAGE + 1 - first_page, SPLITS));
    int count = div_up(max(0, pages * SLICES - warp), WARPS);
    auto first_key = [&](int i) {
        int slice = warp + i * WARPS;
        return (first_page + slice / SLICES * SPLITS) * PAGE + slice % SLICES * KEYS;
    };
    auto counts = [&](int key) { return (u32)(key - begin) <= (u32)(position - begin); };
    u32 ring = smem_addr(shared) + warp * STAGES * STAGE, to = piece_at(lane / VECS, lane % VECS);
    u64 policy = evict_first();
    bool waited = false;
    auto fetch = [&](int i, int stage) {
        int key0 = first_key(i), page = (warp + i * WARPS) / SLICES;
        if (page >= base + 32) {
            base += 32;
            ids = next;
            next = ids_from(base + 32);
        }
        if (!waited && key0 / PAGE >= old) {
            wait_for_inputs();
            waited = true;
        }
        i64 id = __shfl_sync(0xffffffffu, ids, page - base);
        i64 in_page = ((i64)kv * PAGE + key0 % PAGE) * HEAD_DIM + lane * PIECE;
        if constexpr (CODES) in_page += (i64)kv * PAGE * 4; // scales of the heads before
        const kv_t *k = k_pages + id * k_pages_stride + in_page, *v = v_pages + id * v_pages_stride + in_page;
        u32 to_k = ring + stage * STAGE, to_v = to_k + SLICE;
        if constexpr (CODES) {
            // Eight pieces of scales.
            const kv_t *from = lane < 4 ? k_pages + id * k_pages_stride : v_pages + id * v_pages_stride;
            const float *scales = scales_of(from + (i64)kv * head_in_page<kv_t>(HEAD_DIM), HEAD_DIM);
            if (lane < 8) cp_async16(to_v + SLICE + lane * 16, scales + key0 % PAGE + lane % 4 * 4);
        }
#pragma unroll
        for (int j = 0; j < div_up(KEYS * VECS, 32); j++) {
            int at = j * 32 + lane, key = at / VECS;
            if (KEYS * VECS % 32 && at >= KEYS * VECS) break;
            // Keys that do not count must not bring a NaN into the products.
            bool in = counts(key0 + key);
            constexpr int ROWS = 32 / VECS;      // of a copy, where that is a number
            u32 where = SWIZZLED && 32 % VECS == 0 ? (to ^ (j * ROWS & 7) << 4) + j * 512 : piece_at(key, at % VECS);
            // Measured: with one long row the hint saves 4 us of 44, with 64 rows it costs 12 of 252.
            if constexpr (SPLITS > 1) {
                cp_async16(to_k + where, k + j * (32 * PIECE), in, policy);
                cp_async16(to_v + where, v + j * (32 * PIECE), in, policy);
            } else {
                cp_async16(to_k + where, k + j * (32 * PIECE), in);
                cp_async16(to_v + where, v + j * (32 * PIECE), in);
            }
        }
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) {
        if (i < count) fetch(i, i);
        cp_async_commit();
    }
    if (!waited) wait_for_inputs();
    waited = true;

    // Of 16 dims a lane multiplies two neighbours in either half, or four neighbours where they are the codes of a word.
    u32 qb[TILES][KSTEPS][2];
    const bf16 *pq = q + (i64)t * q_stride + (i64)kv * GROUP * HEAD_DIM + c * (CODES ? 4 : 2);
    float acc[TILES][KSTEPS][4], top[TILES][2], sum[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        top[n][0] = top[n][1] = LEAST;
        sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            acc[n][i][0] = acc[n][i][1] = acc[n][i][2] = acc[n][i][3] = 0.f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int at = (n * 8 + g) * HEAD_DIM + i * 16 + h * (CODES ? 2 : 8);
                qb[n][i][h] = n * 8 + g < GROUP ? *reinterpret_cast<const u32 *>(pq + at) : 0;
            }
        }
    }
    float factor = scale * LOG2E;                // scores in powers of 2
    // Addresses of this lane's rows for ldmatrix: four 8 x 8 blocks.
    int block = lane / 8, brow = lane % 8;
    u32 k_at = piece_at(brow + block % 2 * 8, block / 2), v_at = piece_at(brow + block / 2 * 8, block % 2);

    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        u32 at_k = ring + stage * STAGE, at_v = at_k + SLICE;
        float s[TILES][2][4] = {};               // two sums each: a shorter chain
        u32 words[4];                            // codes of two steps
#pragma unroll
        for (int j = 0; j < KSTEPS; j++) {
            u32 a[4];
            if constexpr (CODES) {
                if (j % 2 == 0) ldmatrix_x4(words, at_k + piece_on(k_at, j / 2));
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    a[row] = pair_of_bytes<0, 1>(words[j % 2 * 2 + row]);
                    a[2 + row] = pair_of_bytes<2, 3>(words[j % 2 * 2 + row]);
                }
            } else {
                ldmatrix_x4(a, at_k + piece_on(k_at, j));
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_bf16(s[n][j % 2], a, qb[n][j][0], qb[n][j][1]);
        }
        int key = first_key(i) + g;
        bool in[2] = {counts(key), counts(key + 8)};
        float key_scales[2], value_scales[2];
        if constexpr (CODES)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 at = at_v + SLICE + (g + 8 * e) * 4;
                key_scales[e] = factor * load_shared_f32(at);
                value_scales[e] = in[e] ? load_shared_f32(at + SCALES) : 0.f;
            }
        auto factor_of = [&](int e) { return CODES ? key_scales[e] : factor; };
        u32 p[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            // Keys g and g + 8 of heads 2 c and 2 c + 1.
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] = in[e / 2] ? (s[n][0][e] + s[n][1][e]) * factor_of(e / 2) : -INF;
            float most[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
            // Weights may grow to 2^8 before everything is brought to a new largest score.
            if (__any_sync(0xffffffffu, most[0] > top[n][0] + 8.f || most[1] > top[n][1] + 8.f)) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
#pragma unroll
                    for (int m = 4; m < 32; m *= 2) most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], m));
                    most[h] = fmaxf(most[h], top[n][h]);
                    float keep = ex2(top[n][h] - most[h]);
                    top[n][h] = most[h];
                    sum[n][h] *= keep;
#pragma unroll
                    for (int j = 0; j < KSTEPS; j++) {
                        acc[n][j][h] *= keep;
                        acc[n][j][2 + h] *= keep;
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] = ex2(x[e] - top[n][e % 2]);
            sum[n][0] += x[0] + x[2];
            sum[n][1] += x[1] + x[3];
            if constexpr (CODES)
#pragma unroll
                for (int e = 0; e < 4; e++) x[e] *= value_scales[e / 2];
            p[n][0] = transpose(pack_bf16(x[0], x[1]));
            p[n][1] = transpose(pack_bf16(x[2], x[3]));
        }
#pragma unroll
        for (int j = 0; j < KSTEPS; j++) {
            u32 a[4];
            if constexpr (CODES) {
                // Words of a dim of an even number and the next, for two keys: rows g and g + 8 of the product.
                if (j % 2 == 0) ldmatrix_x4_trans(words, at_v + piece_on(v_at, j / 2));
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    a[2 * half] = pair_of_bytes<0, 2>(words[j % 2 + 2 * half]);
                    a[2 * half + 1] = pair_of_bytes<1, 3>(words[j % 2 + 2 * half]);
                }
            } else {
                ldmatrix_x4_trans(a, at_v + piece_on(v_at, j));
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_bf16(acc[n][j], a, p[n][0], p[n][1]);
        }
        __syncwarp();
        if (i + STAGES < count) fetch(i + STAGES, stage);
        cp_async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // The warps' results, in the memory of the rings.
    cp_async_wait<0>();
    __syncthreads();
    constexpr int OUT_PITCH = HEAD_DIM + 4;
    float *values = reinterpret_cast<float *>(shared), *stats = values + WARPS * GROUP * OUT_PITCH;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = n * 8 + c * 2 + h;
#pragma unroll
            for (int m = 4; m < 32; m *= 2) sum[n][h] += __shfl_xor_sync(0xffffffffu, sum[n][h], m);
            if (row >= GROUP) continue;
            if (g == 0) {
                stats[(warp * GROUP + row) * 2] = top[n][h];
                stats[(warp * GROUP + row) * 2 + 1] = sum[n][h];
            }
            float *o = values + (warp * GROUP + row) * OUT_PITCH + g * (CODES ? 2 : 1);
#pragma unroll
            for (int j = 0; j < KSTEPS; j++) {
                o[j * 16] = acc[n][j][h];
                o[j * 16 + (CODES ? 1 : 8)] = acc[n][j][2 + h];
            }
        }
    __syncthreads();
    // Four dims of a head at once.
    constexpr int PIECES = GROUP * HEAD_DIM / 4;
    auto put = [&](int row, int x, const Part &all) {
        float f = all.sum > 0.f ? 1.f / all.sum : 0.f, o[4] = {all.o.x * f, all.o.y * f, all.o.z * f, all.o.w * f};
        store<4>(out + (i64)t * out_stride + (kv * GROUP + row) * HEAD_DIM + x, o);
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < PIECES; i += THREADS) {
        int row = i / (HEAD_DIM / 4), x = i % (HEAD_DIM / 4) * 4;
        Part parts[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float2 stat = reinterpret_cast<float2 *>(stats)[w * GROUP + row];
            parts[w].top = stat.x;
            parts[w].sum = stat.y;
            parts[w].o = *reinterpret_cast<float4 *>(values + (w * GROUP + row) * OUT_PITCH + x);
        }
        Part all = merged(parts);
        if constexpr (SPLITS == 1) {
            put(row, x, all);
        } else {
            float *mine = partial + (((i64)t * HEADS + kv * GROUP + row) * SPLITS + split) * (HEAD_DIM + 4);
            *reinterpret_cast<float4 *>(mine + 4 + x) = all.o;
            if (x == 0) *reinterpret_cast<float2 *>(mine) = make_float2(all.top, all.sum);
        }
    }
    if constexpr (SPLITS > 1) {
        u32 &turn = *reinterpret_cast<u32 *>(shared);
        __syncthreads();
        // Counts up to SPLITS - 1 and back to zero.
        if (threadIdx.x == 0)
            asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                         : "=r"(turn)
                         : "l"(tickets + t * KV_HEADS + kv), "r"(SPLITS - 1)
                         : "memory");
        __syncthreads();
        if (turn != SPLITS - 1) return;
        // So many neighbouring lanes share a piece, so many loads of each are under way.
        constexpr int SHARE = PIECES * 4 <= THREADS ? 4 : PIECES * 2 <= THREADS ? 2 : 1, AT_ONCE = 8;
        int part = threadIdx.x % SHARE;
#pragma unroll 1
        for (int first = 0; first < PIECES; first += THREADS / SHARE) {
            int i = min(first + (int)threadIdx.x / SHARE, PIECES - 1);
            int row = i / (HEAD_DIM / 4), x = i % (HEAD_DIM / 4) * 4;
            const float *from = partial + ((i64)t * HEADS + kv * GROUP + row) * SPLITS * (HEAD_DIM + 4);
            Part parts[AT_ONCE + 1];
#pragma unroll 1
            for (int s0 = part; s0 < SPLITS; s0 += AT_ONCE * SHARE) {
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    int s = s0 + j * SHARE;
                    const float *p = from + min(s, SPLITS - 1) * (HEAD_DIM + 4);
                    float2 stat = __ldcg(reinterpret_cast<const float2 *>(p));
                    parts[j].top = s < SPLITS ? stat.x : LEAST;
                    parts[j].sum = s < SPLITS ? stat.y : 0.f;
                    parts[j].o = __ldcg(reinterpret_cast<const float4 *>(p + 4 + x));
                }
                parts[AT_ONCE] = merged(parts);
            }
            Part two[2] = {parts[AT_ONCE], {}};
#pragma unroll
            for (int m = 1; m < SHARE; m *= 2) {
                auto other = [&](float v) { return __shfl_xor_sync(0xffffffffu, v, m); };
                two[1].top = other(two[0].top);
                two[1].sum = other(two[0].sum);
                two[1].o = {other(two[0].o.x), other(two[0].o.y), other(two[0].o.z), other(two[0].o.w)};
                two[0] = merged(two);
            }
            if (part == 0 && first + (int)threadIdx.x / SHARE < PIECES) put(row, x, two[0]);
        }
    }
}
