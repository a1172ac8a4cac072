// Attention of one query head over its row's pages in f32 arithmetic: every head dim, every dtype. Eight lanes share a
// key; each group of lanes keeps its own running softmax, merged at the end. The keys of a query are cut into SPLITS runs
// of pages. Grid (T, H, SPLITS).
// HEAD_DIM, HEADS, KV_HEADS, SPLITS, WINDOW (0 = none), FIRST; q_t, kv_t, out_t.

constexpr int THREADS = 128;
constexpr int LANES = 8;
constexpr int GROUPS = THREADS / LANES;
constexpr int VECS = div_up(HEAD_DIM, 4 * LANES);

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(16) float accs[GROUPS][HEAD_DIM];
    __shared__ float tops[GROUPS], sums[GROUPS];
    int t = blockIdx.x, h = blockIdx.y, split = blockIdx.z;
    u32 r = st.token_row(t);
    if (r == NONE) return;
    int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int position = st.position(t), begin = max(WINDOW ? position + 1 - WINDOW : 0, min(FIRST, position));
    int first_page = begin / PAGE, pages = position / PAGE + 1 - first_page;
    int per = div_up(pages, SPLITS);
    int from = max(begin, (first_page + split * per) * PAGE), to = min(position + 1, (first_page + (split + 1) * per) * PAGE);
    const u32 *table = st.page_row(r);
    i64 head = (i64)(h / (HEADS / KV_HEADS)) * head_in_page<kv_t>(HEAD_DIM);
    float qv[VECS][4], acc[VECS][4];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        int c = (i * LANES + lane) * 4;
#pragma unroll
        for (int e = 0; e < 4; e++) qv[i][e] = acc[i][e] = 0.f;
        if (c < HEAD_DIM) load<4>(q + (i64)t * q_stride + h * HEAD_DIM + c, qv[i]);
    }
    float top = -INF, sum = 0.f;
    int rounds = div_up(max(to - from, 0), GROUPS);
    for (int i = 0; i < rounds; i++) {
        int key = from + i * GROUPS + group;
        bool in = key < to;
        i64 at = head + (i64)(key % PAGE) * HEAD_DIM;
        i64 page = in ? table[key / PAGE] : 0;
        float dot = 0.f;
#pragma unroll
        for (int j = 0; j < VECS; j++) {
            int c = (j * LANES + lane) * 4;
            if (!in || c >= HEAD_DIM) continue;
            float kv[4];
            load<4>(k_pages + page * k_pages_stride + at + c, kv);
#pragma unroll
            for (int e = 0; e < 4; e++) dot += qv[j][e] * kv[e];
        }
#pragma unroll
        for (int m = LANES / 2; m; m /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, m);
        if (!in) continue;
        dot *= scale;
        if constexpr (CODED<kv_t>) dot *= scales_of(k_pages + page * k_pages_stride + head, HEAD_DIM)[key % PAGE];
        float now = fmaxf(top, dot), keep = __expf(top - now), w = __expf(dot - now);
        top = now;
        sum = sum * keep + w;
        if constexpr (CODED<kv_t>) w *= scales_of(v_pages + page * v_pages_stride + head, HEAD_DIM)[key % PAGE];
#pragma unroll
        for (int j = 0; j < VECS; j++) {
            int c = (j * LANES + lane) * 4;
            if (c >= HEAD_DIM) continue;
            float vv[4];
            load<4>(v_pages + page * v_pages_stride + at + c, vv);
#pragma unroll
            for (int e = 0; e < 4; e++) acc[j][e] = acc[j][e] * keep + w * vv[e];
        }
    }
    if (lane == 0) {
        tops[group] = top;
        sums[group] = sum;
    }
#pragma unroll
    for (int j = 0; j < VECS; j++) {
        int c = (j * LANES + lane) * 4;
        if (c < HEAD_DIM) store<4>(&accs[group][c], acc[j]);
    }
    __syncthreads();
    top = -INF;
    for (int g = 0; g < GROUPS; g++) top = fmaxf(top, tops[g]);
    sum = 0.f;
    for (int g = 0; g < GROUPS; g++) sum += tops[g] == -INF ? 0.f : sums[g] * __expf(tops[g] - top);
    i64 unit = ((i64)t * HEADS + h) * SPLITS + split;
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
        float o = 0.f;
        for (int g = 0; g < GROUPS; g++) o += tops[g] == -INF ? 0.f : accs[g][c] * __expf(tops[g] - top);
        if constexpr (SPLITS == 1)
            out[(i64)t * out_stride + h * HEAD_DIM + c] = from_f32<out_t>(sum > 0.f ? o / sum : 0.f);
        else
            partial[unit * (HEAD_DIM + 4) + 4 + c] = o;
    }
    if (SPLITS > 1 && threadIdx.x == 0) {
        partial[unit * (HEAD_DIM + 4)] = top;
        partial[unit * (HEAD_DIM + 4) + 1] = sum;
    }
}
