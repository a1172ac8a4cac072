// Merges the split runs of a query: partial [T, H, SPLITS, 4 + HEAD_DIM] f32 = (max, sum, -, -, weighted values).
// A warp per (token, head). Grid (T * H / 4).
// HEAD_DIM, HEADS, SPLITS; out_t.

extern "C" __global__ void __launch_bounds__(128) ENTRY(Step st, const float *partial, out_t *out, i64 out_stride) {
    i64 unit = blockIdx.x * 4 + threadIdx.x / 32;
    i64 t = unit / HEADS;
    int h = unit % HEADS, lane = threadIdx.x % 32;
    if (t >= st.tokens || st.token_row(t) == NONE) return;
    const float *p = partial + unit * SPLITS * (HEAD_DIM + 4);
    float top = -INF;
    for (int s = lane; s < SPLITS; s += 32) top = fmaxf(top, p[s * (HEAD_DIM + 4)]);
    top = warp_max(top);
    float sum = 0.f;
    for (int s = lane; s < SPLITS; s += 32) {
        float m = p[s * (HEAD_DIM + 4)];
        sum += m == -INF ? 0.f : p[s * (HEAD_DIM + 4) + 1] * __expf(m - top);
    }
    sum = warp_sum(sum);
    for (int c = lane * 4; c < HEAD_DIM; c += 128) {
        float o[4] = {};
        for (int s = 0; s < SPLITS; s++) {
            const float *ps = p + s * (HEAD_DIM + 4);
            float m = ps[0], v[4];
            if (m == -INF) continue;
            float w = __expf(m - top);
            load<4>(ps + 4 + c, v);
#pragma unroll
            for (int e = 0; e < 4; e++) o[e] += w * v[e];
        }
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] = sum > 0.f ? o[e] / sum : 0.f;
        store<4>(out + t * out_stride + h * HEAD_DIM + c, o);
    }
}
