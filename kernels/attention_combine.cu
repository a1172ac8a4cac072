// Merges the split runs of a query: partial [T, H, SPLITS, 4 + HEAD_DIM] f32 = (max, sum, -, -, weighted values).
// A warp per (token, head). Grid (T * H / 4).
// HEAD_DIM, HEADS, SPLITS; out_t.

constexpr int HELD = div_up(SPLITS, 32);

extern "C" __global__ void __launch_bounds__(128) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 unit = blockIdx.x * 4 + threadIdx.x / 32;
    i64 t = unit / HEADS;
    int h = unit % HEADS, lane = threadIdx.x % 32;
    if (t >= st.tokens || st.token_row(t) == NONE) return;
    const float *p = partial + unit * SPLITS * (HEAD_DIM + 4);
    // Weights of the runs, some a lane.
    float top = -INF, tops[HELD], weights[HELD], sum = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int s = lane + 32 * i;
        tops[i] = s < SPLITS ? p[s * (HEAD_DIM + 4)] : -INF;
        weights[i] = s < SPLITS ? p[s * (HEAD_DIM + 4) + 1] : 0.f;
        top = fmaxf(top, tops[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        float f = tops[i] == -INF ? 0.f : __expf(tops[i] - top);
        sum += f * weights[i];
        weights[i] = f;
    }
    sum = warp_sum(sum);
    float scale = sum > 0.f ? 1.f / sum : 0.f;
    for (int base = 0; base < HEAD_DIM; base += 128) {
        int c = base + lane * 4;
        bool in = c < HEAD_DIM;
        float o[4] = {};
#pragma unroll
        for (int i = 0; i < HELD; i++) {
#pragma unroll 8
            for (int s = 32 * i; s < min(SPLITS, 32 * i + 32); s++) {
                float w = __shfl_sync(0xffffffffu, weights[i], s % 32), v[4] = {};
                if (in) load<4>(p + s * (HEAD_DIM + 4) + 4 + c, v);
#pragma unroll
                for (int e = 0; e < 4; e++) o[e] += w * v[e];
            }
        }
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] *= scale;
        if (in) store<4>(out + t * out_stride + h * HEAD_DIM + c, o);
    }
}
