// Attention of one query head over the latents of its row's pages, in f32 arithmetic: every dtype and size. Eight lanes share
// the score of a key; a thread holds every 128th quad of the result. The pages of a query are cut into SPLITS runs.
// Grid (T, H, SPLITS).
// LATENT, SHARED, WIDTH (columns of a head of `queries`), HEADS, SPLITS; q_t, page_t (of i8: codes, see CODED), out_t.

constexpr int THREADS = 128;
constexpr int LANES = 8;
constexpr int GROUPS = THREADS / LANES;
constexpr int HELD = div_up(LATENT, 4 * THREADS);

// N scaled elements to shared memory.
template <int N> DEV void bring(float *to, const q_t *from, float scale) {
    for (int c = threadIdx.x * 4; c < N; c += THREADS * 4) {
        float x[4];
        load<4>(from + c, x);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] *= scale;
        store<4>(to + c, x);
    }
}

// The part of a product over N elements that belongs to a lane.
template <int N> DEV float share(const float *query, const page_t *key, int lane) {
    float sum = 0.f;
#pragma unroll 4
    for (int c = lane * 4; c < N; c += LANES * 4) {
        float a[4], b[4];
        load<4>(query + c, a);
        load<4>(key + c, b);
#pragma unroll
        for (int e = 0; e < 4; e++) sum = __fmaf_rn(a[e], b[e], sum);
    }
    return sum;
}

// The scale of a key's N codes.
template <int N> DEV float scale_in(const page_t *page, int key) {
    if constexpr (CODED<page_t>) return scales_of(page, N)[key];
    return 1.f;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(16) float query[LATENT], tail[SHARED];
    // Of two pages in turn, so that a page has one barrier.
    __shared__ float scores[2][PAGE];
    i64 t = blockIdx.x;
    int h = blockIdx.y, split = blockIdx.z, tid = threadIdx.x, group = tid / LANES, lane = tid % LANES;
    u32 r = st.token_row(t);
    if (r == NONE) return;
    int position = st.position(t), pages = position / PAGE + 1, per = div_up(pages, SPLITS);
    int end = min(pages, (split + 1) * per);
    const u32 *table = st.page_row(r);
    bring<LATENT>(query, q + t * q_stride + (i64)h * LATENT, scale);
    bring<SHARED>(tail, queries + t * queries_stride + (i64)(h + 1) * WIDTH - SHARED, scale);
    __syncthreads();
    float acc[HELD][4] = {}, top = -INF, sum = 0.f;
    for (int p = split * per, turn = 0; p < end; p++, turn ^= 1) {
        i64 page = table[p];
        // Positions past the end are uninitialised.
        int count = min(PAGE, position + 1 - p * PAGE);
        const page_t *latents = k_pages + page * k_pages_stride, *tails = v_pages + page * v_pages_stride;
        for (int key = group; key < PAGE; key += GROUPS) {
            float score = 0.f;
            if (key < count) {
                score = share<LATENT>(query, latents + key * LATENT, lane) * scale_in<LATENT>(latents, key);
                score += share<SHARED>(tail, tails + key * SHARED, lane) * scale_in<SHARED>(tails, key);
            }
#pragma unroll
            for (int m = LANES / 2; m; m /= 2) score += __shfl_xor_sync(0xffffffffu, score, m);
            if (lane == 0) scores[turn][key] = key < count ? score : -INF;
        }
        __syncthreads();
        // Every warp has the weights of all keys, two a lane.
        float w[2] = {scores[turn][tid % 32], scores[turn][tid % 32 + 32]};
        float now = fmaxf(top, warp_max(fmaxf(w[0], w[1]))), keep = __expf(top - now);
        top = now;
#pragma unroll
        for (int i = 0; i < 2; i++) w[i] = __expf(w[i] - now);
        sum = sum * keep + warp_sum(w[0] + w[1]);
        if constexpr (CODED<page_t>)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int key = tid % 32 + 32 * i;
                w[i] = key < count ? w[i] * scale_in<LATENT>(latents, key) : 0.f;
            }
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[j][e] *= keep;
#pragma unroll 4
        for (int key = 0; key < count; key++) {
            float weight = __shfl_sync(0xffffffffu, key < 32 ? w[0] : w[1], key % 32);
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int c = (tid + j * THREADS) * 4;
                if (c >= LATENT) continue;
                float x[4];
                load<4>(latents + key * LATENT + c, x);
#pragma unroll
                for (int e = 0; e < 4; e++) acc[j][e] = __fmaf_rn(weight, x[e], acc[j][e]);
            }
        }
    }
    float *mine = SPLITS > 1 ? partial + ((t * HEADS + h) * SPLITS + split) * (LATENT + 4) : nullptr;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int c = (tid + j * THREADS) * 4;
        if (c >= LATENT) continue;
        if constexpr (SPLITS > 1) {
            store<4>(mine + 4 + c, acc[j]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) acc[j][e] = sum > 0.f ? acc[j][e] / sum : 0.f;
            store<4>(out + t * out_stride + (i64)h * LATENT + c, acc[j]);
        }
    }
    if (SPLITS > 1 && tid == 0) {
        mine[0] = top;
        mine[1] = sum;
    }
}
