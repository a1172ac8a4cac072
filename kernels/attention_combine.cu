// Merges the split runs of a query: partial [T, H, SPLITS, 4 + HEAD_DIM] f32 = (max, sum, -, -, weighted values).
// A block per 128 columns of a (token, head), whose warps share the runs. Grid (T * H, columns / 128).
// HEAD_DIM, HEADS, SPLITS, WARPS; out_t.

constexpr int HELD = div_up(SPLITS, 32);
constexpr int OWN = div_up(SPLITS, WARPS);       // runs of a warp

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(16) float parts[WARPS][128];
    i64 unit = blockIdx.x, t = unit / HEADS;
    int h = unit % HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.y * 128 + lane * 4;
    const float *p = partial + unit * SPLITS * (HEAD_DIM + 4);
    bool in = column < HEAD_DIM;
    // All that is read is on its way at once: weights of the runs, some a lane, and values.
    float top = -INF, tops[HELD], weights[HELD], values[OWN][4], sum = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int s = lane + 32 * i;
        tops[i] = s < SPLITS ? p[s * (HEAD_DIM + 4)] : -INF;
        weights[i] = s < SPLITS ? p[s * (HEAD_DIM + 4) + 1] : 0.f;
        top = fmaxf(top, tops[i]);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int s = warp + i * WARPS;
        if (in && s < SPLITS) load<4>(p + s * (HEAD_DIM + 4) + 4 + column, values[i]);
    }
    if (t >= st.tokens || st.token_row(t) == NONE) return;
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        float f = tops[i] == -INF ? 0.f : __expf(tops[i] - top);
        sum += f * weights[i];
        weights[i] = f;
    }
    sum = warp_sum(sum);
    float scale = sum > 0.f ? 1.f / sum : 0.f, o[4] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int s = warp + i * WARPS;
        float w = __shfl_sync(0xffffffffu, weights[i * WARPS / 32], s % 32);
        if (!in || s >= SPLITS) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] += w * values[i][e];
    }
    store<4>(&parts[warp][lane * 4], o);
    __syncthreads();
    if (warp > 0 || !in) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        float x[4];
        load<4>(&parts[w][lane * 4], x);
#pragma unroll
        for (int e = 0; e < 4; e++) o[e] += x[e];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) o[e] *= scale;
    store<4>(out + t * out_stride + h * HEAD_DIM + column, o);
}
