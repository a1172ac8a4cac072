// Attention of few queries over long contexts, bf16, at memory speed. A block owns one token, one KV head with its whole
// group of query heads (at most 16, the rows of the mma), and one of SPLITS runs of pages. Each of 4 warps takes 16 keys
// of every page through its own cp.async ring, so warps never wait for each other until the end.
// Grid (T, KV heads, SPLITS).
// HEAD_DIM (a multiple of 16), HEADS, KV_HEADS, SPLITS, WINDOW (0 = none), STAGES; out_t.

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int KEYS = 16;
constexpr int WARPS = PAGE / KEYS;
constexpr int PITCH = HEAD_DIM + 8;              // of a row in shared memory: ldmatrix without bank conflicts
constexpr int SLICE = KEYS * PITCH;              // elements of K or V of one stage
constexpr int KSTEPS = HEAD_DIM / 16;
constexpr int VECS = HEAD_DIM / 8;               // 16-byte pieces of a row

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    ENTRY(Step st, const bf16 *q, i64 q_stride, const bf16 *k_pages, i64 k_page_stride, const bf16 *v_pages,
          i64 v_page_stride, out_t *out, i64 out_stride, float *partial, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    int t = blockIdx.x, kv = blockIdx.y, split = blockIdx.z;
    let_next_start();
    u32 r = st.token_row(t);
    if (r == NONE) {
        wait_for_inputs();
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int position = st.position(t), begin = WINDOW ? max(0, position + 1 - WINDOW) : 0;
    int first_page = begin / PAGE, pages = position / PAGE + 1 - first_page, per = div_up(pages, SPLITS);
    int from = first_page + split * per, to = min(from + per, first_page + pages);
    const u32 *table = st.page_row(r);
    bf16 *ring = reinterpret_cast<bf16 *>(shared) + warp * STAGES * 2 * SLICE;
    i64 head = ((i64)kv * PAGE + warp * KEYS) * HEAD_DIM;

    u64 once = evict_first();
    u32 ids = 0;                                 // of pages base .. base + 31, one a lane
    int base = from - 32;
    auto fetch = [&](int page, int stage) {
        if (page >= base + 32) {
            base = page;
            ids = table[min(base + lane, to - 1)];
        }
        i64 id = __shfl_sync(0xffffffffu, ids, page - base);
        const bf16 *k = k_pages + id * k_page_stride + head, *v = v_pages + id * v_page_stride + head;
        bf16 *sk = ring + stage * 2 * SLICE, *sv = sk + SLICE;
#pragma unroll
        for (int i = 0; i < div_up(KEYS * VECS, 32); i++) {
            int at = i * 32 + lane, key = at / VECS, x = at % VECS * 8;
            if (KEYS * VECS % 32 && at >= KEYS * VECS) break;
            // Keys that do not count must not bring a NaN into the products.
            int absolute = page * PAGE + warp * KEYS + key;
            bool in = absolute <= position && absolute >= begin;
            const bf16 *pk = in ? k + key * HEAD_DIM + x : k_pages, *pv = in ? v + key * HEAD_DIM + x : v_pages;
            u32 to_k = smem_addr(sk + key * PITCH + x), to_v = smem_addr(sv + key * PITCH + x);
            // Measured: with one long row the hint saves 3 us of 52, with 64 rows it costs 12 of 277.
            if constexpr (SPLITS > 1) {
                cp_async16(to_k, pk, in, once);
                cp_async16(to_v, pv, in, once);
            } else {
                cp_async16(to_k, pk, in);
                cp_async16(to_v, pv, in);
            }
        }
    };
    // Pages that no token of this step lies in do not wait for the kernels before.
    int old = min(to, (int)st.position(st.row(r)[0]) / PAGE);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (from + s < old) fetch(from + s, s);
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (from + s >= old && from + s < to) fetch(from + s, s);
        cp_async_commit();
    }

    u32 qa[KSTEPS][4];
    const bf16 *pq = q + (i64)t * q_stride + (i64)kv * GROUP * HEAD_DIM;
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = g + (i & 1) * 8;
            qa[s][i] = row < GROUP ? *reinterpret_cast<const u32 *>(pq + row * HEAD_DIM + s * 16 + (i & 2) * 4 + c * 2) : 0;
        }
    }
    float acc[2 * KSTEPS][4], top[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2 * KSTEPS; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
    float factor = scale * 1.44269504f;          // scores in powers of 2
    // Addresses of this lane's rows for ldmatrix: four 8 x 8 blocks.
    int block = lane / 8, brow = lane % 8;
    int k_at = (brow + (block / 2) * 8) * PITCH + (block % 2) * 8;
    int v_at = (brow + (block % 2) * 8) * PITCH + (block / 2) * 8;

    for (int page = from; page < to; page++) {
        int ahead = page + STAGES - 1;
        if (ahead < to) fetch(ahead, (ahead - from) % STAGES);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        bf16 *sk = ring + (page - from) % STAGES * 2 * SLICE, *sv = sk + SLICE;
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            u32 b[4];
            ldmatrix_x4(b, smem_addr(sk + k_at + i * 16));
            mma_bf16(s[0], qa[i], b[0], b[1]);
            mma_bf16(s[1], qa[i], b[2], b[3]);
        }
        int first = page * PAGE + warp * KEYS;
        bool whole = first >= begin && first + KEYS <= position + 1;
        float now[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = first + n * 8 + c * 2 + (i & 1);
                s[n][i] = whole || (key >= begin && key <= position) ? s[n][i] * factor : -INF;
                now[i / 2] = fmaxf(now[i / 2], s[n][i]);
            }
        u32 p[4];
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
            now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
            float base_of = now[h] == -INF ? 0.f : now[h];
            keep[h] = ex2(top[h] - base_of);
            top[h] = now[h];
            float e0 = ex2(s[0][2 * h] - base_of), e1 = ex2(s[0][2 * h + 1] - base_of);
            float e2 = ex2(s[1][2 * h] - base_of), e3 = ex2(s[1][2 * h + 1] - base_of);
            sum[h] = sum[h] * keep[h] + (e0 + e1) + (e2 + e3);
            p[h] = pack_bf16(e0, e1);
            p[2 + h] = pack_bf16(e2, e3);
        }
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            u32 b[4];
            ldmatrix_x4_trans(b, smem_addr(sv + v_at + i * 16));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float *o = acc[2 * i + n];
                o[0] *= keep[0];
                o[1] *= keep[0];
                o[2] *= keep[1];
                o[3] *= keep[1];
                mma_bf16(o, p, b[2 * n], b[2 * n + 1]);
            }
        }
        __syncwarp();
    }

    // The four warps' results, in the memory of the rings.
    cp_async_wait<0>();
    __syncthreads();
    constexpr int OUT_PITCH = HEAD_DIM + 4;
    float *values = reinterpret_cast<float *>(shared), *stats = values + WARPS * GROUP * OUT_PITCH;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        int row = g + 8 * h;
        if (row >= GROUP) continue;
        if (c == 0) {
            stats[(warp * GROUP + row) * 2] = top[h];
            stats[(warp * GROUP + row) * 2 + 1] = sum[h];
        }
#pragma unroll
        for (int i = 0; i < 2 * KSTEPS; i++) {
            float *o = values + (warp * GROUP + row) * OUT_PITCH + i * 8 + c * 2;
            o[0] = acc[i][2 * h];
            o[1] = acc[i][2 * h + 1];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += 32 * WARPS) {
        int row = i / HEAD_DIM, x = i % HEAD_DIM;
        float best = -INF, o = 0.f, total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, stats[(w * GROUP + row) * 2]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float m = stats[(w * GROUP + row) * 2], f = m == -INF ? 0.f : ex2(m - best);
            total += f * stats[(w * GROUP + row) * 2 + 1];
            o += f * values[(w * GROUP + row) * OUT_PITCH + x];
        }
        i64 unit = (i64)t * HEADS + kv * GROUP + row;
        if constexpr (SPLITS == 1) {
            out[(i64)t * out_stride + (kv * GROUP + row) * HEAD_DIM + x] = from_f32<out_t>(total > 0.f ? o / total : 0.f);
        } else {
            float *to_partial = partial + (unit * SPLITS + split) * (HEAD_DIM + 4);
            to_partial[4 + x] = o;
            if (x == 0) {
                to_partial[0] = best * 0.69314718f;
                to_partial[1] = total;
            }
        }
    }
}
