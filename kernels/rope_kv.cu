// Per-head norm, rotation, and the write of k and v into their pages. A warp per (token, head); heads in the order
// q, k, v. Grid (T, tiles of 8 heads).
// VEC, HEAD_DIM, Q_HEADS, KV_HEADS, PAIRS (rotated, 0 = none), HAS_NORM; q_t, k_t, v_t, q_out_t, kv_t.

constexpr int PER_LANE = div_up(HEAD_DIM, 32 * VEC);
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ float rows[WARPS][HEAD_DIM];
    i64 t = blockIdx.x;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int unit = blockIdx.y * WARPS + warp;
    u32 r = st.token_row(t);
    if (r == NONE || unit >= Q_HEADS + 2 * KV_HEADS) return;
    u32 position = st.position(t);
    bool is_q = unit < Q_HEADS, is_v = unit >= Q_HEADS + KV_HEADS;
    int head = is_q ? unit : is_v ? unit - Q_HEADS - KV_HEADS : unit - Q_HEADS;
    float x[PER_LANE][VEC];
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < PER_LANE; p++) {
        int c = (p * 32 + lane) * VEC;
        if (c >= HEAD_DIM) continue;
        if (is_q)
            load<VEC>(q + t * q_stride + head * HEAD_DIM + c, x[p]);
        else if (is_v)
            load<VEC>(v + t * v_stride + head * HEAD_DIM + c, x[p]);
        else
            load<VEC>(k + t * k_stride + head * HEAD_DIM + c, x[p]);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum += x[p][i] * x[p][i];
    }
    float *mine = rows[warp];
    if (!is_v && (HAS_NORM || PAIRS > 0)) {
        float s = 1.f;
        if constexpr (HAS_NORM) s = rsqrtf(warp_sum(sum) / HEAD_DIM + eps);
#pragma unroll
        for (int p = 0; p < PER_LANE; p++) {
            int c = (p * 32 + lane) * VEC;
            if (c >= HEAD_DIM) continue;
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                if constexpr (HAS_NORM) x[p][i] *= s * norm[(is_q ? 0 : HEAD_DIM) + c + i];
                mine[c + i] = x[p][i];
            }
        }
        __syncwarp();
        if constexpr (PAIRS > 0) {
            for (int i = lane; i < PAIRS; i += 32) {
                float sn, cs, a = mine[i], b = mine[i + PAIRS];
                sincosf((float)position * inv_freq[i], &sn, &cs);
                mine[i] = a * cs - b * sn;
                mine[i + PAIRS] = b * cs + a * sn;
            }
            __syncwarp();
#pragma unroll
            for (int p = 0; p < PER_LANE; p++) {
                int c = (p * 32 + lane) * VEC;
                if (c >= HEAD_DIM) continue;
#pragma unroll
                for (int i = 0; i < VEC; i++) x[p][i] = mine[c + i];
            }
        }
    }
    i64 page = is_q ? 0 : st.page_row(r)[position / PAGE];
    i64 at = (i64)(head * PAGE + position % PAGE) * HEAD_DIM;
    if constexpr (CODED<kv_t>)
        if (!is_q) {
            at += head * PAGE * 4; // scales of the heads before
            u32 most = 0;
#pragma unroll
            for (int p = 0; p < PER_LANE; p++) {
                if ((p * 32 + lane) * VEC >= HEAD_DIM) continue;
#pragma unroll
                for (int i = 0; i < VEC; i++) most = max(most, magnitude(x[p][i]));
            }
            kv_t *pages = is_v ? v_pages + page * v_pages_stride : k_pages + page * k_pages_stride;
            float *scales = scales_of(pages + (i64)head * head_in_page<kv_t>(HEAD_DIM), HEAD_DIM);
            float factor = code_factor(most, scales + position % PAGE);
#pragma unroll
            for (int p = 0; p < PER_LANE; p++) {
                if ((p * 32 + lane) * VEC >= HEAD_DIM) continue;
#pragma unroll
                for (int i = 0; i < VEC; i++) x[p][i] *= factor;
            }
        }
#pragma unroll
    for (int p = 0; p < PER_LANE; p++) {
        int c = (p * 32 + lane) * VEC;
        if (c >= HEAD_DIM) continue;
        if (is_q)
            store_global<VEC>(q_out + t * q_out_stride + head * HEAD_DIM + c, x[p]);
        else if (is_v)
            store_global<VEC>(v_pages + page * v_pages_stride + at + c, x[p]);
        else
            store_global<VEC>(k_pages + page * k_pages_stride + at + c, x[p]);
    }
}
