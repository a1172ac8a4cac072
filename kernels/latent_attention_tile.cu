// Attention over latents on tensor cores: a block has one token and up to 16 MT of its heads, which all read the same keys, and
// brings a page at a time to shared memory, where the latents are keys and values. Four warps share 16 heads: of the scores
// each has 16 keys, of the results a quarter of the columns. The pages of a token are cut into SPLITS runs.
// Grid (T, tiles of heads, SPLITS).
// Codes are copied as they are and become bf16 before their page is used. Their scales multiply the scores and the weights.
// LATENT (a multiple of 64), SHARED (of 16), WIDTH (columns of a head of `queries`), HEADS, MT, STAGES (pages in shared
// memory, of codes besides one in bf16), SPLITS; page_t (bf16 or i8); all other tensors are bf16.

constexpr int WARPS = 4 * MT;
constexpr int THREADS = 32 * WARPS;
constexpr int M = 16 * MT;                       // heads of a block
constexpr int VECS = LATENT / 8, TAIL_VECS = SHARED / 8;     // 16-byte pieces of a row
constexpr int COLUMNS = LATENT / 4;              // of the results of a warp
constexpr int TILES = COLUMNS / 8;
// Bytes in shared memory: queries, pages, weights.
constexpr int AT_TAIL = M * LATENT * 2, QUERY_BYTES = AT_TAIL + M * SHARED * 2;
constexpr int PAGE_TAIL = PAGE * LATENT * 2, PAGE_BYTES = PAGE_TAIL + PAGE * SHARED * 2;
// Of codes a page is copied with its scales, which follow the codes of the latents and those of the shared parts.
constexpr bool CODES = CODED<page_t>;
constexpr int CODES_TAIL = head_in_page<page_t>(LATENT), CODES_BYTES = CODES_TAIL + head_in_page<page_t>(SHARED);
constexpr int PAGES_BYTES = CODES ? PAGE_BYTES + STAGES * CODES_BYTES : STAGES * PAGE_BYTES;
constexpr int AT_WEIGHTS = QUERY_BYTES + PAGES_BYTES, AT_STATS = AT_WEIGHTS + M * PAGE * 2;
// Whether a warp keeps its queries in registers. It does where a block reads all pages of a token and the queries fit.
constexpr bool HELD = SPLITS == 1 && LATENT + SHARED <= 576;
constexpr bool HELD_TAILS = HELD && !CODES;      // the scales of codes take the registers
constexpr float LEAST = -1e30f;                  // below any score; finite, so that differences are numbers
constexpr float LN2 = 0.69314718f;

// Copies `count` rows of PIECES pieces of bf16 without gaps to a swizzled tile of ROWS, and zeros after them.
template <int ROWS, int PIECES> DEV void bring(u32 to, const void *from, int count) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        // If THREADS is a multiple of PIECES, a thread copies the same piece of every row.
        int row = i / PIECES, piece = (THREADS % PIECES == 0 ? threadIdx.x : i) % PIECES;
        cp_async16(to + swizzle<PIECES>(row, piece), (const bf16 *)from + i * 8, row < count);
    }
}

// Copies BYTES bytes, a multiple of 16, to shared memory.
template <int BYTES> DEV void bring_bytes(u32 to, const void *from) {
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) cp_async16(to + i, (const u8 *)from + i);
}

// A page of rows of codes without gaps to a swizzled tile of bf16.
template <int PIECES> DEV void expand(u32 to, const u8 *codes) {
#pragma unroll 2
    for (int i = threadIdx.x; i < PAGE * PIECES; i += THREADS) {
        uint2 w = reinterpret_cast<const uint2 *>(codes)[i];
        u32 at = to + swizzle<PIECES>(i / PIECES, i % PIECES);
        store_shared16(at, {pair_of_bytes<0, 1>(w.x), pair_of_bytes<2, 3>(w.x), pair_of_bytes<0, 1>(w.y), pair_of_bytes<2, 3>(w.y)});
    }
}

// This lane's part of 16 queries, over PIECES pieces from `from` on.
template <int PIECES, bool HELD> DEV void hold(u32 (*a)[4], u32 from, int row, int piece) {
#pragma unroll
    for (int j = 0; j < PIECES / 2 && HELD; j++) ldmatrix_x4(a[j], from + swizzle<PIECES>(row, 2 * j + piece));
}

// s += 16 queries times 16 keys over PIECES pieces, two sums each for a shorter chain, or the second one alone. The queries
// are `held` or in shared memory.
template <int PIECES, bool HELD, bool ONE = false>
DEV void products(float (&s)[2][2][4], u32 (*held)[4], u32 queries, u32 keys, int a_row, int a_piece, int b_row, int b_piece) {
#pragma unroll
    for (int j = 0; j < PIECES / 2; j++) {
        u32 b[4], *a = held[HELD ? j : 0];
        if (!HELD) ldmatrix_x4(a, queries + swizzle<PIECES>(a_row, 2 * j + a_piece));
        ldmatrix_x4(b, keys + swizzle<PIECES>(b_row, 2 * j + b_piece));
        mma_bf16(s[ONE ? 1 : j % 2][0], a, b[0], b[1]);
        mma_bf16(s[ONE ? 1 : j % 2][1], a, b[2], b[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    let_next_start();
    wait_for_inputs();
    i64 t = blockIdx.x;
    int h0 = blockIdx.y * M, split = blockIdx.z;
    u32 r = st.token_row(t);
    if (r == NONE) return;
    int position = st.position(t), pages = position / PAGE + 1, per = div_up(pages, SPLITS);
    int from = split * per, count = max(0, min(pages - from, per));
    const u32 *table = st.page_row(r) + from;
    u32 base = smem_addr(shared), weights = base + AT_WEIGHTS;
    float *stats = reinterpret_cast<float *>(shared + AT_STATS);         // [4][M], of the warps that share heads

    // Heads past the last one are zeros, whose results are not stored.
    const bf16 *tails = queries + t * queries_stride + WIDTH - SHARED;
    bring<M, VECS>(base, q + t * q_stride + (i64)h0 * LATENT, HEADS - h0);
#pragma unroll 1
    for (int i = threadIdx.x; i < M * TAIL_VECS; i += THREADS) {
        int head = i / TAIL_VECS, piece = i % TAIL_VECS;
        bool in = h0 + head < HEADS;
        const bf16 *at = in ? tails + (i64)(h0 + head) * WIDTH + piece * 8 : tails;
        cp_async16(base + AT_TAIL + swizzle<TAIL_VECS>(head, piece), at, in);
    }
    // Keys past the end must not bring a NaN into the products.
    auto fetch = [&](int i) {
        u32 to = base + QUERY_BYTES + (CODES ? PAGE_BYTES + i % STAGES * CODES_BYTES : i % STAGES * PAGE_BYTES);
        i64 page = table[i];
        if constexpr (CODES) {
            bring_bytes<CODES_TAIL>(to, k_pages + page * k_pages_stride);
            bring_bytes<CODES_BYTES - CODES_TAIL>(to + CODES_TAIL, v_pages + page * v_pages_stride);
            return;
        }
        int keys = position + 1 - (from + i) * PAGE;
        bring<PAGE, VECS>(to, k_pages + page * k_pages_stride, keys);
        bring<PAGE, TAIL_VECS>(to + PAGE_TAIL, v_pages + page * v_pages_stride, keys);
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        if (i < count) fetch(i);
        cp_async_commit();
    }

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int first = warp / 4 * 16, part = warp % 4;  // first head in the block, quarter
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_piece = block / 2, b_row = brow + block / 2 * 8, b_piece = block % 2;
    float o[TILES][4] = {}, top[2] = {LEAST, LEAST}, sum[2] = {0.f, 0.f}, factor = scale * LOG2E;
    u32 held[VECS / 2][4], held_tails[TAIL_VECS / 2][4];
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    hold<VECS, HELD>(held, base, first + a_row, a_piece);
    hold<TAIL_VECS, HELD_TAILS>(held_tails, base + AT_TAIL, first + a_row, a_piece);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        u32 latents = base + QUERY_BYTES + (CODES ? 0 : i % STAGES * PAGE_BYTES);
        // Of codes, the scales of this warp's keys; those of the shared parts follow.
        u32 scales_at = base + QUERY_BYTES + PAGE_BYTES + i % STAGES * CODES_BYTES + PAGE * LATENT + part * 16 * 4;
        if constexpr (CODES) {
            const u8 *codes = shared + QUERY_BYTES + PAGE_BYTES + i % STAGES * CODES_BYTES;
            expand<VECS>(latents, codes);
            expand<TAIL_VECS>(latents + PAGE_TAIL, codes + CODES_TAIL);
            __syncthreads();
        }
        // Whether key 8 n + 2 c + e of this warp's keys counts, and its scale.
        auto counts = [&](int n, int e) { return (from + i) * PAGE + part * 16 + n * 8 + 2 * c + e <= position; };
        auto scale_of = [&](u32 at, int n, int e) { return load_shared_f32(at + (n * 8 + 2 * c + e) * 4); };
        float scales[2][2];
        float s[2][2][4] = {};
        products<VECS, HELD>(s, held, base, latents, first + a_row, a_piece, part * 16 + b_row, b_piece);
        if constexpr (CODES)
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) scales[n][e] = counts(n, e) ? scale_of(scales_at, n, e) : 0.f;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[0][n][e] = (s[0][n][e] + s[1][n][e]) * scales[n][e % 2];
                    s[1][n][e] = 0.f;
                }
            }
        products<TAIL_VECS, HELD_TAILS, CODES>(s, held_tails, base + AT_TAIL, latents + PAGE_TAIL, first + a_row, a_piece, part * 16 + b_row, b_piece);
        // Keys 8 n + 2 c and the next one of heads g and g + 8, in powers of 2.
        float x[2][4], most[2] = {LEAST, LEAST};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float rest = s[1][n][e];
                if constexpr (CODES) rest *= scale_of(scales_at + CODES_BYTES - PAGE * LATENT - PAGE * 4, n, e % 2);
                x[n][e] = counts(n, e % 2) ? (s[0][n][e] + rest) * factor : -INF;
                most[e / 2] = fmaxf(most[e / 2], x[n][e]);
            }
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int m = 1; m < 4; m *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(0xffffffffu, most[e], m));
            if (c == 0) stats[part * M + first + g + 8 * e] = most[e];
        }
        __syncthreads();
        float keep[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float now = top[e];
#pragma unroll
            for (int w = 0; w < 4; w++) now = fmaxf(now, stats[w * M + first + g + 8 * e]);
            keep[e] = ex2(top[e] - now);
            top[e] = now;
            sum[e] *= keep[e];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[n][e] = ex2(x[n][e] - top[e / 2]);
                sum[e / 2] += x[n][e];
                if constexpr (CODES) x[n][e] *= scales[n][e % 2];
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 at = weights + swizzle<PAGE / 8>(first + g + 8 * e, part * 2 + n) + c * 4;
                store_shared(at, pack_bf16(x[n][2 * e], x[n][2 * e + 1]));
            }
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] *= keep[e / 2];
#pragma unroll
        for (int k = 0; k < PAGE / 16; k++) {
            u32 a[4], b[4];
            ldmatrix_x4(a, weights + swizzle<PAGE / 8>(first + a_row, 2 * k + a_piece));
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                ldmatrix_x4_trans(b, latents + swizzle<VECS>(k * 16 + a_row, part * TILES + 2 * n + a_piece));
                mma_bf16(o[2 * n], a, b[0], b[1]);
                mma_bf16(o[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
        if (i + STAGES < count) fetch(i + STAGES);
        cp_async_commit();
    }

    // The copies of the queries, where there was no page.
    cp_async_wait<0>();
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int m = 1; m < 4; m *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], m);
        if (c == 0) stats[part * M + first + g + 8 * e] = sum[e];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int in_block = first + g + 8 * e, head = h0 + in_block, column = part * COLUMNS + 2 * c;
        if (head >= HEADS) continue;
        float all = 0.f;
#pragma unroll
        for (int w = 0; w < 4; w++) all += stats[w * M + in_block];
        if constexpr (SPLITS == 1) {
            float f = all > 0.f ? 1.f / all : 0.f;
            bf16 *to = out + t * out_stride + (i64)head * LATENT + column;
#pragma unroll
            for (int n = 0; n < TILES; n++)
                *reinterpret_cast<u32 *>(to + n * 8) = pack_bf16(o[n][2 * e] * f, o[n][2 * e + 1] * f);
        } else {
            float *to = partial + ((t * HEADS + head) * SPLITS + split) * (LATENT + 4);
#pragma unroll
            for (int n = 0; n < TILES; n++)
                *reinterpret_cast<float2 *>(to + 4 + column + n * 8) = make_float2(o[n][2 * e], o[n][2 * e + 1]);
            if (part == 0 && c == 0) *reinterpret_cast<float2 *>(to) = make_float2(top[e] * LN2, all);
        }
    }
}
