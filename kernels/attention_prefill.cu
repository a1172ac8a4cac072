// Attention of many queries, bf16, tensor cores: a block owns 64 * MT consecutive tokens of one row and one query head and
// walks the row's pages once; the next page is copied to shared memory meanwhile. Scores and softmax stay in registers.
// Codes are copied as they are and become bf16 before their page is used; their scales multiply the scores and the weights.
// Grid (tiles, H); tiles are counted over the rows in order, the last ones (most keys) start first.
// HEAD_DIM (a multiple of 16), HEADS, KV_HEADS, WINDOW (0 = none), FIRST, MT; kv_t (bf16 or i8); out is bf16.

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 16 * MT * WARPS;
constexpr int PITCH = HEAD_DIM + 8;
constexpr int VECS = HEAD_DIM / 8;
constexpr int KSTEPS = HEAD_DIM / 16;
constexpr bool CODES = CODED<kv_t>;
constexpr int STAGES = CODES ? 1 : 2;            // pages of bf16 in shared memory
constexpr u32 ALL = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    extern __shared__ __align__(16) u8 shared[];
    bf16 *sq = reinterpret_cast<bf16 *>(shared), *ring = sq + TILE * PITCH;
    // The codes of the next page's keys and values, and the scales of two pages.
    u8 *codes = reinterpret_cast<u8 *>(ring + STAGES * 2 * PAGE * PITCH);
    float *scales = reinterpret_cast<float *>(codes + 2 * PAGE * HEAD_DIM);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int tile = gridDim.x - 1 - blockIdx.x, r, first, tokens;
    if (!tile_row(st, TILE, tile, r, first, tokens)) return;
    int h = blockIdx.y, kv = h / (HEADS / KV_HEADS), t0 = tile * TILE;
    int p0 = st.position(first);                       // of the row's first token
    int final = p0 + tokens - 1;                       // last position that has keys
    int q_first = p0 + t0, q_last = min(p0 + t0 + TILE - 1, final);
    int page_from = WINDOW ? max(0, q_first + 1 - WINDOW) / PAGE : 0, page_to = q_last / PAGE + 1;
    const u32 *table = st.page_row(r);
    i64 head = (i64)kv * head_in_page<kv_t>(HEAD_DIM);

    for (int i = threadIdx.x; i < TILE * VECS; i += THREADS) {
        int t = i / VECS, x = i % VECS * 8;
        bool in = t0 + t < tokens;
        cp_async16(smem_addr(sq + t * PITCH + x), q + (i64)(first + (in ? t0 + t : t0)) * q_stride + h * HEAD_DIM + x, in);
    }
    auto fetch = [&](int page) {
        i64 id = table[page];
        const kv_t *k = k_pages + id * k_pages_stride + head, *v = v_pages + id * v_pages_stride + head;
        bf16 *sk = ring + (page - page_from) % STAGES * 2 * PAGE * PITCH, *sv = sk + PAGE * PITCH;
        int keys = final + 1 - page * PAGE;            // later ones must not bring a NaN into the products
        if constexpr (CODES) {
            static_assert(THREADS == 2 * PAGE, "a thread for each scale");
            for (int i = threadIdx.x * 16; i < PAGE * HEAD_DIM; i += THREADS * 16) {
                cp_async16(smem_addr(codes + i), k + i);
                cp_async16(smem_addr(codes + PAGE * HEAD_DIM + i), v + i);
            }
            int key = threadIdx.x % PAGE;
            u32 to = smem_addr(scales + (page - page_from) % 2 * 2 * PAGE + threadIdx.x);
            cp_async4(to, scales_of(threadIdx.x < PAGE ? k : v, HEAD_DIM) + key, key < keys);
            cp_async_commit();
            return;
        }
#pragma unroll 4
        for (int i = threadIdx.x; i < PAGE * VECS; i += THREADS) {
            int key = i / VECS, x = i % VECS * 8;
            bool in = key < keys;
            cp_async16(smem_addr(sk + key * PITCH + x), k + key * HEAD_DIM + x, in);
            cp_async16(smem_addr(sv + key * PITCH + x), v + key * HEAD_DIM + x, in);
        }
        cp_async_commit();
    };
    fetch(page_from);
    // The page that was copied, as bf16.
    auto convert = [&] {
#pragma unroll 2
        for (int i = threadIdx.x; i < 2 * PAGE * VECS; i += THREADS) {
            uint2 w = reinterpret_cast<const uint2 *>(codes)[i];
            uint4 pairs = {pair_of_bytes<0, 1>(w.x), pair_of_bytes<2, 3>(w.x), pair_of_bytes<0, 1>(w.y), pair_of_bytes<2, 3>(w.y)};
            *reinterpret_cast<uint4 *>(ring + i / VECS * PITCH + i % VECS * 8) = pairs;
        }
    };

    float acc[MT][2 * KSTEPS][4], top[MT][2], sum[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2 * KSTEPS; i++) acc[m][i][0] = acc[m][i][1] = acc[m][i][2] = acc[m][i][3] = 0.f;
        top[m][0] = top[m][1] = -INF;
        sum[m][0] = sum[m][1] = 0.f;
    }
    float factor = scale * 1.44269504f;                // scores in powers of 2
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    int w0 = warp * 16 * MT;                           // this warp's first token in the tile

    for (int page = page_from; page < page_to; page++) {
        cp_async_wait<0>();
        __syncthreads();
        if constexpr (CODES) {
            convert();
            __syncthreads();
        }
        if (page + 1 < page_to) fetch(page + 1);
        bf16 *sk = ring + (page - page_from) % STAGES * 2 * PAGE * PITCH, *sv = sk + PAGE * PITCH;
        // Pages wholly after a warp's queries change nothing.
        if (page * PAGE > q_first + w0 + 16 * MT - 1) continue;
        float s[MT][8][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            u32 qa[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
                ldmatrix_x4(qa[m], smem_addr(sq + (w0 + m * 16 + a_row) * PITCH + i * 16 + a_col));
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 b[4];
                ldmatrix_x4(b, smem_addr(sk + (n * 16 + b_row) * PITCH + i * 16 + b_col));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_bf16(s[m][2 * n], qa[m], b[0], b[1]);
                    mma_bf16(s[m][2 * n + 1], qa[m], b[2], b[3]);
                }
            }
        }
        // Of keys n * 8 + 2 c and the next.
        auto scale_of = [&](int n, int value) {
            const float *of_page = scales + ((page - page_from) % 2 * 2 + value) * PAGE;
            return reinterpret_cast<const float2 *>(of_page)[n * 4 + c];
        };
        if constexpr (CODES)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float2 f = scale_of(n, 0);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    s[m][n][0] *= f.x;
                    s[m][n][1] *= f.y;
                    s[m][n][2] *= f.x;
                    s[m][n][3] *= f.y;
                }
            }
        bool edge = page * PAGE + PAGE - 1 > q_first + w0 || (WINDOW && page * PAGE < q_first + w0 + 16 * MT - WINDOW) ||
                    page * PAGE < FIRST;
        u32 p[MT][4][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int position = q_first + w0 + m * 16 + g + 8 * e;
                float now = top[m][e];
                if (edge) {
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            int key = page * PAGE + n * 8 + 2 * c + j;
                            if (key > position || (WINDOW && key <= position - WINDOW) || key < min(FIRST, position))
                                s[m][n][2 * e + j] = -INF;
                        }
                }
#pragma unroll
                for (int n = 0; n < 8; n++) now = fmaxf(now, fmaxf(s[m][n][2 * e], s[m][n][2 * e + 1]));
                now = fmaxf(now, __shfl_xor_sync(ALL, now, 1));
                now = fmaxf(now, __shfl_xor_sync(ALL, now, 2));
                float base = now == -INF ? 0.f : now * factor, keep = ex2(top[m][e] * factor - base);
                if (top[m][e] == -INF) keep = 0.f;
                top[m][e] = now;
                float part = 0.f;
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float x = ex2(s[m][n][2 * e + j] * factor - base);
                        s[m][n][2 * e + j] = x;
                        part += x;
                    }
                    if constexpr (CODES) {
                        float2 f = scale_of(n, 1);
                        s[m][n][2 * e] *= f.x;
                        s[m][n][2 * e + 1] *= f.y;
                    }
                    p[m][n / 2][n % 2 * 2 + e] = pack_bf16(s[m][n][2 * e], s[m][n][2 * e + 1]);
                }
                sum[m][e] = sum[m][e] * keep + part;
                if (__any_sync(ALL, keep != 1.f)) {
#pragma unroll
                    for (int n = 0; n < 2 * KSTEPS; n++) {
                        acc[m][n][2 * e] *= keep;
                        acc[m][n][2 * e + 1] *= keep;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int n = 0; n < KSTEPS; n++) {
                u32 b[4];
                ldmatrix_x4_trans(b, smem_addr(sv + (i * 16 + a_row) * PITCH + n * 16 + a_col));
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_bf16(acc[m][2 * n], p[m][i], b[0], b[1]);
                    mma_bf16(acc[m][2 * n + 1], p[m][i], b[2], b[3]);
                }
            }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float total = sum[m][e];
            total += __shfl_xor_sync(ALL, total, 1);
            total += __shfl_xor_sync(ALL, total, 2);
            float r = total > 0.f ? 1.f / total : 0.f;
            int t = t0 + w0 + m * 16 + g + 8 * e;
            if (t >= tokens) continue;
            bf16 *o = out + (i64)(first + t) * out_stride + h * HEAD_DIM + 2 * c;
#pragma unroll
            for (int n = 0; n < 2 * KSTEPS; n++)
                *reinterpret_cast<u32 *>(o + n * 8) = pack_bf16(acc[m][n][2 * e] * r, acc[m][n][2 * e + 1] * r);
        }
}
